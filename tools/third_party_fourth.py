"""A fourth set of GPT-2s by other people, none of them seen before the engine was done: see `third_party_faults.py`.

The truth of each was read from its code, and this file written, before the engine was asked.
"""

import logging
import sys
import types
from collections.abc import Callable
from pathlib import Path

from third_party_built import package
from third_party_faults import BIAS_GELU, BIASED, DROPOUT, Diagnosed, line
from third_party_project import KARPATHY, RASCHKA, Project, find, sizes_of
from torch import nn

from gpt2.config import GPT2Config

SCRIPT = {"dropout": 0.1, "device": "cpu", "use_sdpa": True}
GENOVESE = {"shortcut_dropout": 0.1, "mha_dropout": 0.1, "emb_dropout": 0.1}
MYYYYY = "src.model:ModelConfig", "vocab_size n_layers d_model n_heads d_ff context_length"
LEARNED = {"norm_type": "layernorm", "ffn_type": "gelu", "pos_type": "learned"}
TURNED, ROPE = f"position-missing rotary-positions {BIAS_GELU}", LEARNED | {"pos_type": "rope"}
COURSE, SPRUNG = "vocab_size block_size embed_dim n_layer", "vocab_size context_size n_layers n_heads n_embed"
HF, CSABA = "vocab_size n_positions n_embd n_layer n_head", "context_length vocab_size num_layers embd_size num_heads"
GELU, SINES, NO_PROJECTION = "gelu-variant", "position-sinusoidal gelu-variant", "output-projection-missing gelu-variant"
ELLIOT, PLOTS = "decoder_transformer/training.py", ("matplotlib", "matplotlib.pyplot")
AHK = "vocab_size n_embd n_head n_layer chunk_size"


def within(folder: str, *described: object) -> Callable[[GPT2Config, Path], nn.Module]:
    """A builder of what a line describes, from ``folder`` of the repository."""
    return lambda c, root: Project("", "", *described).module(c, root / folder)  # type: ignore[arg-type]


def resized(root: Path, name: str, sizes: dict[str, object]) -> type[nn.Module]:
    """The class ``name`` of their `model.py`, whose sizes are numbers in its text: those are replaced."""
    text, theirs = (root / "model.py").read_text(), types.ModuleType("theirs")
    for old, new in sizes.items():
        text = text.replace(old, str(new))
    exec(compile(text, "model.py", "exec"), theirs.__dict__)
    return getattr(theirs, name)  # type: ignore[no-any-return]


def bobby(c: GPT2Config, root: Path) -> nn.Module:
    package("model", root / "model")
    sizes = sizes_of(c, "vocab_size num_layers num_heads n_embed block_size")
    return find("model.gpt2:GPT2", root)(sizes | {"languagemodel": {"is_causal": True}, "use_rope": False})


def victor(c: GPT2Config, root: Path) -> nn.Module:
    sys.modules["src.logger"] = types.SimpleNamespace(logger=logging.getLogger("theirs"))  # type: ignore[assignment]
    sizes = sizes_of(c, "vocab_size embedding_dimension num_heads num_blocks max_seq_len")
    return find("src.modules.gpt2_model:GPT2Model", root)(**sizes, hidden_dimension=c.head_dim)


def diixo(c: GPT2Config, root: Path) -> nn.Module:
    return find("gpt2.py!GPT", root, context_length=c.n_positions)(**sizes_of(c, "vocab_size d_model n_heads n_layers"))


def andras(c: GPT2Config, root: Path) -> nn.Module:
    sizes = {"768 + 128": c.n_embd, "12 + 2": c.n_head, "n_layer = 12": f"n_layer = {c.n_layer}"}
    return resized(root, "GPT2Model", sizes | {"n_tokens = 512": f"n_tokens = {c.vocab_size}"})()


def zolda(c: GPT2Config, root: Path) -> nn.Module:
    return resized(root, "GPT2", {"1024": c.inner})(c.vocab_size, c.n_head, c.n_embd, c.n_layer)


genovese = within("src", "model.gpt:GPTModel", "", "vocab_size emb_dim max_length num_heads num_layers", GENOVESE)
LECTURE = within("src/transformer", "transformer:Transformer", "", f"{SPRUNG} head_size", DROPOUT)
# Each block of the last one reads the embeddings, twice; what a token may see has the score 1e-9, the future keeps its own.
ZOLDA = f"embedding-scaled mask-missing layer-missing post-norm final-norm-missing {SINES}"
FOURTH: tuple[Diagnosed, ...] = (
    line("MathieuNlp/GPT2-from-scratch", "13f4a77", within("src", "model.gpt2:GPT", "config.config:GPTConfig")),
    line("csabakecskemeti/gpt2-from-scratch", "c392292", "src/model.py:GPT", "", "src/model.py:GPTConfig", CSABA),
    line("ccs96307/gpt2-pytorch-implemented", "e594ef7", "gpt2.py:MyGPT2LMHeadModel", "", "gpt2.py:GPT2Config", HF),
    line("Himanshu-00/gpt2-from-scratch-pytorch", "966e215", "gpt:GPTModel", "", "dict", RASCHKA, BIASED),
    line("NanaKwame90/gpt2-from-scratch", "af2725d", "model/model_gpt.py:GPTModel", "", "dict", RASCHKA, BIASED),
    line("LCZ-ctrl/gpt2-from-scratch", "1eb93e5", "gpt.py:GPTModel", "", "dict", RASCHKA, BIASED),
    line("JulianSprung/GPT2-PyTorch", "9e9135d", "src/gpt2/gpt2.py:GPT2", "", "src/gpt2/gpt2.py:GPT2Config", SPRUNG),
    line("JulianSprung/GPT2-PyTorch", "9e9135d", LECTURE, BIAS_GELU, name="JulianSprung/GPT2-PyTorch, lecture"),
    line("psh61116/gpt2-from-scratch", "4964712", "model.gpt:GPT", GELU, "namespace", KARPATHY, {"dropout": 0.1, "bias": True}),
    line("AbdelrhmanEbied/GPT2-From-Scratch", "4d766d1", "architecture/model.py:GPT_2", GELU, "namespace"),
    line("maikereis/gpt_from_scrath", "8b46a2c", "src/gepeto/model.py:GPTModel", GELU, "dict", RASCHKA, BIASED),
    line("Elliot-Sones/miniGPT", "890d4bd", f"{ELLIOT}!GPTLanguageModel", "missing-bias", "globals", KARPATHY, SCRIPT),
    line("ahk-d/GPT-from-scratch-implementation-and-tutorial", "f677ade", "task4.py!GPTModel", BIAS_GELU, "", AHK, {}, PLOTS),
    line("DanielePioGenovese/GPT-from-scratch", "2eb0239", genovese, BIAS_GELU),
    line("bobbycxy/gpt-from-scratch", "0c81998", bobby, f"scale-by-width {GELU}"),
    line("Myyyyy-y/gpt-from-scratch", "c3d7d40", "src.model:TransformerLM", BIAS_GELU, *MYYYYY, LEARNED),
    line("Myyyyy-y/gpt-from-scratch", "c3d7d40", "src.model:TransformerLM", TURNED, *MYYYYY, ROPE, name="Myyyyy-y, rope"),
    line("VictorMenestrel/gpt2-from-scratch", "55048c7", victor, SINES),
    line("diixo/gpt2-from-scratch", "6a2e014", diixo, f"post-norm final-norm-missing {SINES}", stubs=("tiktoken",)),
    line("Fuzanwenn/gpt2-pytorch", "2382744", "model.py:Transformer", NO_PROJECTION, "", COURSE),
    line("Andras7/gpt2-pytorch", "55ba29d", andras, f"scale-by-width logits-softmaxed {SINES}"),  # products in float16
    line("zolda93/minimal-GPT2-from-scratch", "69f722e", zolda, ZOLDA),
)
