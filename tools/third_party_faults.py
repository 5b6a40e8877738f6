"""GPT-2s by other people that were diagnosed before this project's authors had seen them, as a table: what each does differently.

``causes`` are what `gpt2 diagnose` must name, and nothing else: found by reading their code, confirmed by mending it until the
verdict was `equal`. A constant kept in float32 (sqrt(2/pi) of a GELU) is a note, and no cause. Each is
pinned to a commit. How a project is described: see `third_party_project.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from third_party_built import (
    SevenShi,
    abdulvajid,
    adityaa,
    davidfitzek,
    deniskurlov,
    gregoire,
    huangchong,
    llmc,
    michaelnny,
    minhnguyen,
    msaelices,
    pfrwilson,
    pyemma,
    pyemma_nano,
    shehab,
    submarat,
    tamir303,
    timotheegath,
    wanghaoming,
)
from third_party_project import KARPATHY, RASCHKA, Project
from torch import nn

from gpt2.config import GPT2Config


@dataclass(frozen=True)
class Diagnosed(Project):
    """A project at ``commit``; ``causes`` are the ids of all that parts it from GPT-2."""

    commit: str = ""
    causes: tuple[str, ...] = ()


EMBED = "vocab_size n_layer context_length num_heads embed_dim"
JAHEROTH = "vocab_size d_model nhead num_layers dim_feedforward context_length"
LLINAUER = "n_layers d_vocab context_length d_model n_heads d_head"
NABLA = "vocab_size context_size embedding_size n_heads n_layers"
XIONGSI = "vocab_size context_length d_model num_layers num_heads d_ff"
AXR = "vocab_size max_seq_len num_layers num_heads embed_dim intermediate_size"
ATANDRA = "vocab_size d_model n_heads n_layers d_ff max_seq_len"
EVANGRONBERG = "vocab_size d_model n_heads layers max_seq_len"
N_EMBED = "block_size vocab_size n_layer n_head n_embed"
MTM = "n_emb n_head n_layer block_size vocab_size"
DARIO = "n_embd n_head n_layer context_length vocab_size"
VIVEK = "vocab_size emb_dim context_length num_heads num_layers"
BIAS_GELU = "missing-bias gelu-variant"
DROPOUT = {"dropout": 0.1}
BIASED, UNBIASED = {"drop_rate": 0.1, "qkv_bias": True}, {"drop_rate": 0.1, "qkv_bias": False}
SCRIPT = {"dropout": 0.1, "device": "cpu"}
PLOTS = ("matplotlib", "matplotlib.pyplot", "seaborn")
STUDENT = "module-06/module6_programming"
GRONBERG = ("evangronberg/chatgpt-from-scratch", "2fa581f087")


def line(
    source: str,
    commit: str,
    model: str | Callable[[GPT2Config, Path], nn.Module],
    causes: str = "",
    config: str = "",
    sizes: str = KARPATHY,
    settings: dict[str, object] | None = None,
    stubs: tuple[str, ...] = (),
    name: str = "",
) -> Diagnosed:
    """Return a project of the table; ``causes`` are ids with spaces between them."""
    return Diagnosed(
        name or source, source, model, config, sizes, settings or {}, stubs, commit=commit, causes=tuple(causes.split())
    )


DIAGNOSED = (
    line("Adityaa-Sharma/GPT-2-Scratch", "face4f96dc", adityaa, "norm-missing final-norm-missing missing-bias gelu-variant"),
    line(
        "JaHeRoth/gpt2-from-scratch",
        "7f1d7306d5",
        "utilities.models:ParametersGPT2",
        "embedding-scaled gelu-variant final-norm-missing",  # that it is in bfloat16 is a note
        "utilities.models:ModelConfig",
        JAHEROTH,
        {"eos_token_id": 10**6, "dropout_p": 0.1, "device": "cpu"},
    ),
    line(
        "MatinKhajavi/GPT-from-scratch",
        "9bbcec1b72",
        "gpt_from_scratch.models.gpt:GPT",
        "",
        "gpt_from_scratch.models.utils:GPTConfig",
        RASCHKA,
        BIASED,
    ),
    line("NikitaGordia/GPT-2", "62287c844f", "gpt.model:GPT", "", "gpt.model:GPTConfig", stubs=("hydra", "omegaconf", "loguru")),
    line("Tydos/GPT-2", "06ec300690", "src.model.gpt:GPTModel", "", "namespace", EMBED, {"drop_rate": 0.1}, PLOTS),
    line("7shi/my-gpt2", "16b375b210", SevenShi, ""),
    line("ZhuChenHua/pytorch-gpt2", "f22edbc024", "src.model:GPT2", "", "namespace"),
    line(
        "amirdy/Building-and-Training-a-GPT-2-Model-from-Scratch",
        "bfaf3f54c8",
        "models.gpt:GPT",
        "missing-bias layernorm-eps",
        "namespace",
        RASCHKA,
        {"drop_rate": 0.1, "weight_tying": True},
    ),
    line("llinauer/miniGPT", "e0c5f13738", "gpt_mini.model:MiniGPT", "", "", LLINAUER),
    line("nabla0001/gpt-2", "1eed21658b", "gpt:GPT", BIAS_GELU, "namespace", NABLA, DROPOUT, ("config",)),
    line("minhnguyent546/pre-training-gpt2", "a4636fc69c", minhnguyen, "layernorm-eps"),
    line("pyemma/gpt-from-scratch", "c71cc3137f", pyemma, "scale-wrong missing-bias"),
    line("pyemma/gpt-from-scratch", "c71cc3137f", pyemma_nano, "gelu-variant", name="pyemma/gpt-from-scratch, nano"),
    line(
        "mtm-007/GPT-2",
        "e3bfccc919",
        "src/model.py!NanoGptModel",
        "missing-bias scale-wrong gelu-variant final-norm-missing",
        "globals",
        MTM,
        SCRIPT,
        PLOTS,
    ),
    line(
        "vivek12345/gpt2-from-scratch",
        "f04d123e25",
        "src.models.gpt2:GPTModel",
        "scale-missing gelu-variant",
        "dict",
        VIVEK,
        {"dropout": 0.1, "qkv_bias": False},
    ),
    line(
        "xiongsi2000/unbox-gpt2",
        "f4fd71bf9e",
        "transformer_lib.transformer_lm:TransformerLM",
        "rmsnorm missing-bias gelu-variant",
        "",
        XIONGSI,
    ),
    line("submarat/gpt2-small-repro", "b173c0bfa9", submarat, "gelu-variant"),
    line("pfrwilson/miniGPT", "bcbef06cd4", pfrwilson, "post-norm final-norm-missing gelu-variant scale-wrong"),
    line(
        "axr2718/NdGPT-2",
        "1e7cf3e2f1",
        "models.gpt2:GPT2",
        "gelu-variant",
        "config:GPT2Config",
        AXR,
        {"use_ndlinear": False},
    ),
    line("michaelnny/miniGPT", "c12b3d737c", michaelnny, "gelu-variant"),
    line(
        "umer-ateeq/GPT-From-Scratch",
        "1192c3d26c",
        "pretrain.model:GPTModel",
        BIAS_GELU,
        "dict",
        RASCHKA,
        UNBIASED,
    ),
    line("msaelices/learn-gpt2", "84b141b6ac", msaelices, ""),
    line("qaflan/mini-gpt2", "964a0b4421", "gpt:GPT", "", "configs:GPTConfig", N_EMBED),
    line(
        *GRONBERG,
        f"{STUDENT}/my_gpt.py:GPTModel",
        "head-layout scale-by-width missing-bias gelu-variant final-norm-missing",
        "",
        EVANGRONBERG,
    ),
    line(
        *GRONBERG,
        f"{STUDENT}/gpt.py:GPTModel",
        "missing-bias gelu-variant final-norm-missing",
        "",
        EVANGRONBERG,
        name="evangronberg/chatgpt-from-scratch, solution",
    ),
    line("JorgeVanco/GPT-from-scratch", "f25e8e8b61", "src.model.GPTModel:GPTModel", "gelu-variant", "dict", RASCHKA, BIASED),
    line("atandra2000/GPT-From-Scratch", "880afecedf", "src.model:GPT", "gelu-variant", "", ATANDRA),
    line("huangchong-yan/0-GPT2", "0baffd59bb", huangchong),
    line("SAIR-Org/miniGPT", "110f6199e7", "model.gpt:GPTModel", "missing-bias", "dict", RASCHKA, UNBIASED),
    line("WangHaoming/my-gpt2", "3ab2f84039", wanghaoming, "gelu-variant"),
    line("davidfitzek/minigpt", "32971918da", davidfitzek, BIAS_GELU),
    line(
        "DarioVajda/miniGPT",
        "c1e0dd7346",
        "miniGPT/miniGPT.py!AttentionLanguageModel",
        "missing-bias scale-by-width gelu-variant",
        "globals",
        DARIO,
        SCRIPT,
        ("tqdm",),
    ),
    line("cacapouh/gpt2-from-scratch", "040be7b1da", "model:GPTModel", "", "dict", RASCHKA, BIASED),
    line("karpathy/llm.c", "f1e2ace651", llmc),
    line("tamir303/GPT2", "4100df224c", tamir303, "not-loaded missing-bias scale-by-width gelu-variant"),
    line("timotheegath/gpt-from-scratch-arena1.1", "a1c238815b", timotheegath),
    # The first one turns queries and keys by the number of the head, which cancels in their products.
    line(
        "abdulvajid1/GPT-2-124M-From-Scratch-Pytorch",
        "30c5e6123b",
        abdulvajid,
        "position-missing rmsnorm layernorm-eps dropout-active",
    ),
    line("shehab-ashraf/GPT-2", "472d51ee20", shehab, "position-missing rotary-positions rmsnorm gelu-variant residual-scaled"),
    line(
        "Gregoire-Andre-Dumont/GPT-2",
        "70df2f8fe8",
        gregoire,
        "rotary-positions residual-from-normed batch-dependent gelu-variant",
    ),
    line("deniskurlov/gpt-from-scratch", "b2a5a871e8", deniskurlov, f"position-missing rotary-positions {BIAS_GELU}"),
)
