"""A third set of GPT-2s by other people, none of them seen before the engine was done: see `third_party_faults.py`.

The truth of each was read from its code, and this file written, before the engine was asked.
"""

import sys
from pathlib import Path

from third_party_built import package
from third_party_faults import BIAS_GELU, BIASED, DROPOUT, N_EMBED, UNBIASED, Diagnosed, line
from third_party_project import KARPATHY, RASCHKA, find, namespace, sizes_of
from torch import nn

from gpt2.config import GPT2Config

EMBED_SIZE = "context_size vocab_size num_blocks num_heads embed_size"
HIDDEN = "vocab_size hidden_size num_layers num_heads max_position_embeddings"
VASILIS = "context_window vocab_size n_layers n_heads n_embedding_size"
MMTQ = f"{KARPATHY} max_position_embeddings"
XIE = "vocab_size n_ctx n_position n_embed n_head n_layer"
AJU = "vocab_size n_ctx d_model n_layer n_head"
KETVECTOR = "vocab_size n_layer n_head n_embd seq_length"
BZEENO = "vocab_size context_length embdg_dim n_heads n_transformer_blocks"


def amrtamer(c: GPT2Config, root: Path) -> nn.Module:
    return find("model.py:GPT", root)(namespace({**sizes_of(c, EMBED_SIZE), "dropout": 0.1, "bias": True}), False)


def aju22(c: GPT2Config, root: Path) -> nn.Module:
    sys.path.insert(0, str(root / "GPT2Model"))
    return find("model:GPT2", Path())(find("config:GPT2Config", Path())(**sizes_of(c, AJU)))


def ardaaras(c: GPT2Config, root: Path) -> nn.Module:
    config = find("src:GPT2Config", root)(**sizes_of(c, RASCHKA), **UNBIASED)
    return find("src.models:GPTClassifier", root)(config)


def atharva(c: GPT2Config, root: Path) -> nn.Module:
    package("src", root / "src")
    return find("src.model:GPTModel", root)({**sizes_of(c, RASCHKA), **UNBIASED})


def vasilis(c: GPT2Config, root: Path) -> nn.Module:
    return find("gpt.model:GPT2", root)(find("gpt.settings:GPTConfig", root)(**sizes_of(c, VASILIS)))


def ggruber(c: GPT2Config, root: Path) -> nn.Module:
    config = find("src/model/gpt.py:GPT2Config", root)(**sizes_of(c, KARPATHY), feedforward_dim=c.inner)
    return find("src/model/gpt.py:GPT2", root)(config)


def reezxy(c: GPT2Config, root: Path) -> nn.Module:
    return find("08.gpt2_model.py!GPT2", root)(c.vocab_size, c.n_embd, c.n_head, c.n_layer, c.n_positions)


def elcaiseri(c: GPT2Config, root: Path) -> nn.Module:
    return find("gpt:GPT2LMHeadModel", root)(c.vocab_size, c.n_positions, c.n_embd, c.n_layer, c.n_head)


EXACT_MODEL = "model.py:GPTModel"
THIRD: tuple[Diagnosed, ...] = (
    line("ketvector/gpt2-scratch", "c125724", "gpt:GPT", "gelu-variant scale-wrong", "config:Config", KETVECTOR),
    line("Xie-Minghui/gpt2-pytorch", "945cf98", "models.modules:GPT2GeneratorModel", "", "utils.config:GPT2Config", XIE),
    line("pradsgit/gpt2-pytorch", "bd4615f", "model.py:GPT2", "final-norm-missing", "model.py:GPTConfig", N_EMBED),
    line("Drykx/GPT2-Scratch", "5fef876", "GPT2/gpt2_functions.py:GPT2", "", "namespace", stubs=("wget", "datasets")),
    line("shuzhancnjx/gpt2-from-scratch", "58c3d44", "src/gpt2/gpt.py:GPT", "", "src/gpt2/gpt.py:GPTConfig", KARPATHY, DROPOUT),
    line("Reezxy/gpt2-from-scratch", "85774e8", reezxy, BIAS_GELU),
    line(
        "NayeemHossenJim/GPT2-From-Scratch",
        "365e914",
        "src/compact_gpt_architecture.py:GPTModel",
        "missing-bias",
        "dict",
        RASCHKA,
        UNBIASED,
        ("tiktoken",),
    ),
    line("ardaaras99/gpt2-from-scratch", "8a963f3", ardaaras, BIAS_GELU),
    line("jrajala6/gpt2-from-scratch", "917123e", "model:GPT", BIAS_GELU, "dict", RASCHKA, UNBIASED),
    line(
        "mmtq/miniGPT2-from-scratch-using-pyTorch", "aa758d8", "model.gpt2:miniGPT2", "gelu-variant", "namespace", MMTQ, DROPOUT
    ),
    line("elcaiseri/gpt2-from-scratch", "b21d776", elcaiseri),
    line("pavanpreet-gandhi/reproduce-gpt2", "eefa20b", "gpt2.py:GPT", "", "gpt2.py:GPTConfig"),
    line(
        "bzeeno/GPT2-Implementation",
        "faaa5ae",
        "gpt.gpt_implementation:GPTModel",
        "missing-bias layernorm-unbiased-variance gelu-variant",
        "namespace",
        BZEENO,
        UNBIASED,
    ),
    line("soumitra1854/gpt-2-from-scratch", "90a27ab", EXACT_MODEL, "gelu-variant", "dict", RASCHKA, BIASED),
    line("VasilisMpletsos/GPT-2-from-Scratch", "d739aa3", vasilis),
    line("ggruber193/gpt-2-from-scratch", "1aa77c0", ggruber),
    line(
        "jorgensandhaug/gpt-2-from-scratch",
        "53f44ac",
        "model.py:GPT2Model",
        "residual-from-normed gelu-variant",
        "model.py:GPT2Config",
        HIDDEN,
    ),
    line("Amrtamer711/GPT-2-From-Scratch", "128b58d", amrtamer, stubs=("hellaswag",)),
    line(
        "parthnayyar/GPT-2-from-scratch",
        "cc04405",
        "src/model.py:GPT2",
        "",
        "namespace",
        f"{KARPATHY} context_window",
    ),
    line(
        "ShallowU/Reproduce-GPT2-124M",
        "e7a2582",
        "TestWorkFlow/train_gpt2_1A6000.py!GPT",
        "",
        "namespace",
        stubs=("tiktoken", "matplotlib", "matplotlib.pyplot", "huggingface_hub"),
    ),
    line("aju22/GPT2-From-Scratch", "066765d", aju22, "mask-missing layernorm-eps gelu-variant"),
    line("Avaneesh40585/GPT2-From-Scratch", "f093fe9", EXACT_MODEL, "gelu-variant", "dict", RASCHKA, BIASED),
    line("atharvahatekar/GPT2-From-Scratch", "7eb426c", atharva, BIAS_GELU),
)
