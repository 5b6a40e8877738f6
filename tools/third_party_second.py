"""A second set of GPT-2s by other people: nothing in `gpt2 diagnose` was made from them before they were measured.

The truth of each was read from its code before the engine was asked. Two lines were corrected afterwards: the GELU of idosumit
and of Futtano has its constant in float32, which is a `gelu-variant` in the first table as well, and was overlooked.
How a line is written: see `third_party_faults.py`.
"""

import importlib
import sys
import types
from pathlib import Path

from third_party_built import package
from third_party_faults import BIAS_GELU, BIASED, DROPOUT, N_EMBED, PLOTS, UNBIASED, Diagnosed, line
from third_party_project import KARPATHY, RASCHKA, find, namespace, sizes_of, stub
from torch import nn

from gpt2.config import GPT2Config

SIZES = {
    "2745189173": "n_embd block_size num_heads num_layers",
    "AkashKarnatak": "n_ctx n_layer n_head n_embd",
    "Suraj": "max_len embed_dim num_heads num_layers ff_hidden_dim",
    "andy": "embed_dim context_len layers",
    "atkins": "block_size n_embd n_heads n_layers",
    "borangundogan": "max_seq_len n_layer n_head d_model d_mlp",
    "christyxgeorge": "block_size n_embed n_heads n_layers",
    "ggschuler": "n_embeddings block_size n_heads n_layer",
    "saqib": "context_length num_layers embd_size num_heads",
    "vijaygkd": "n_blocks d_model d_ff n_heads seq_len",
}
SIZES = {name: f"{sizes} vocab_size" for name, sizes in SIZES.items()}


def suleman(c: GPT2Config, root: Path) -> nn.Module:
    sys.modules["reader"] = types.ModuleType("reader")  # it reads their data
    sys.modules["reader"].read_tokens = lambda: range(c.vocab_size)
    sys.path.insert(0, str(root))
    constants = importlib.import_module("constants")
    constants.context_size, constants.num_embeddings = c.n_positions, c.n_embd
    constants.head_count, constants.layer_count = c.n_head, c.n_layer
    return find("model:BigramModel", root)()


def cybershiptrooper(c: GPT2Config, root: Path) -> nn.Module:
    sizes = {"vocab_size": c.vocab_size, "d_model": c.n_embd, "n_layers": c.n_layer, "n_heads": c.n_head, "d_mlp": c.inner}
    config = find("utils.config:GPT2Config", root)(**sizes, n_ctx=c.n_positions, debug=False)
    return find("model.transformer_model:TransformerModel", root)(config)


def koyui(c: GPT2Config, root: Path) -> nn.Module:
    sizes = {"n_emb": c.n_embd, "n_head": c.n_head, "n_layer": c.n_layer, "max_tokens": c.n_positions}
    return find("models/model.py:GPT2", root)(namespace({"vocab_size": c.vocab_size - 3, **sizes}), None)  # it adds three


def ziad(c: GPT2Config, root: Path) -> nn.Module:
    config = find("nanogpt.config:GPTConfig", root / "src")
    return find("nanogpt.model:GPT", root / "src")(config(**sizes_of(c, KARPATHY)))


def priyang(c: GPT2Config, root: Path) -> nn.Module:
    config = find("model.config:GPTConfig", root / "src")
    return find("model.model:GPT", root / "src")(config(**sizes_of(c, KARPATHY)))


def tonimateos(c: GPT2Config, root: Path) -> nn.Module:
    sizes = {"n_embd": c.n_embd, "num_heads": c.n_head, "block_size": c.n_positions, "n_transformer_layers": c.n_layer}
    return find("train.py!GPTLanguageModel", root, **sizes, dropout=0.2, device="cpu")(c.vocab_size)


def thomasevers(c: GPT2Config, root: Path) -> nn.Module:
    return find("model.bigram:BigramLanguageModel", root / "src")(**sizes_of(c, KARPATHY))


def borangundogan(c: GPT2Config, root: Path) -> nn.Module:
    config = find("llm.config:GPTConfig", root / "src")(**sizes_of(c, SIZES["borangundogan"]))
    return find("llm.gpt:GPTModel", root / "src")(config)


def christyxgeorge(c: GPT2Config, root: Path) -> nn.Module:
    package("minigpt", root / "minigpt")
    package("minigpt.models", root / "minigpt/models")
    config = namespace({**sizes_of(c, SIZES["christyxgeorge"]), "bias": False, "dropout": 0.1, "device": "cpu"})
    return find("minigpt.models.mgptv6:GPTLanguageModelv6", root)(config)


def andy(c: GPT2Config, root: Path) -> nn.Module:
    package("src", root / "src")
    return find("src.modules.gpt2:GPT2", root)(**sizes_of(c, SIZES["andy"]))  # always twelve heads


def futtano(c: GPT2Config, root: Path) -> nn.Module:
    stub("tiktoken")
    return find("gpt_2.model:GPTModel", root / "src")({**sizes_of(c, RASCHKA), **UNBIASED})


SECOND: tuple[Diagnosed, ...] = (
    line(
        "AkashKarnatak/gpt2-from-scratch",
        "4d4d001001",
        "gpt2.py:GPT2Model",
        "",
        "gpt2.py:GPT2Config",
        SIZES["AkashKarnatak"],
    ),
    line(
        "2745189173/miniGPT-from-scratch",
        "ccd673a426",
        "src.model:GPTLanguageModel",
        BIAS_GELU,
        "src.model:GPTConfig",
        SIZES["2745189173"],
    ),
    line("Arijit963/miniGPT-from-scratch", "1e6f196cab", "src/gpt.py:MiniGPT", BIAS_GELU, "src/gpt.py:GPTConfig"),
    line("andy-zhou/gpt-2", "7fe68dca74", andy, "head-layout"),
    line(
        "atkinssamuel/gpt-from-scratch",
        "ccc011c093",
        "src/llm.py:AttentionIsAllYouNeed",
        "missing-bias scale-by-width gelu-variant",
        "",
        SIZES["atkins"],
        {"device": "cpu"},
    ),
    line(
        "ggschuler/gpt-from-scratch",
        "325e230961",
        "gpt/models/bigram_attention.py:BigramLanguageModelAttention",
        "missing-bias scale-by-width softmax-axis gelu-variant",
        "",
        SIZES["ggschuler"],
        {"dropout_rate": 0.1},
    ),
    line(
        "suleman-dawood/GPT-from-scratch",
        "f0ec94024c",
        suleman,
        "extra-norm missing-bias softmax-axis gelu-variant final-norm-missing",
    ),
    line(
        "vijaygkd/tinyGPT",
        "1f0c552e16",
        "GPT:GPT",
        "post-norm final-norm-missing gelu-variant",
        "",
        SIZES["vijaygkd"],
        {"p_drop": 0.1},
    ),
    line(
        "cybershiptrooper/gpt2-from-scratch",
        "2f479417f4",
        cybershiptrooper,
        "head-layout missing-bias layernorm-eps residual-from-normed gelu-variant logits-softmaxed",
    ),
    line("koyui/GPT2-From-Scratch", "7f76e53ff1", koyui, "gelu-variant"),
    line("idosumit/GPT2-from-scratch", "74a92f6808", "model:GPT2", BIAS_GELU, "dict", RASCHKA, UNBIASED),
    line("snnclsr/chatgpt-from-scratch", "4c49fdfd67", "modelling/model.py:GPTModel", "", "dict", RASCHKA, BIASED),
    line("saqib1707/gpt2-from-scratch", "af97fdb27c", "src.model:GPT", "", "src.model:GPTConfig", SIZES["saqib"]),
    line("Mahatav/GPT-2", "e492f4e9df", "model.gpt2:GPT2", "gelu-variant", "config:GPT2Config", KARPATHY, DROPOUT),
    line("NoeFlandre/GPT2-From-Scratch", "1dba875b5a", "src.model.gpt2:GPT2", "", "src.model.config:GPT2Config"),
    line("Ziad-Tamim/nanoGPT-from-scratch", "d2da837736", ziad, "position-sinusoidal missing-bias gelu-variant"),
    line("benuh/MiniGPT", "ac98c2cc12", "backend/src/minigpt/model.py:MiniGPT", "gelu-variant"),
    line(
        "dragoflu/gpt2-from-scratch",
        "9ba865d647",
        "02-gpt2-from-scratch/model.py:GPT2",
        "",
        "02-gpt2-from-scratch/model.py:GPT2Config",
        N_EMBED,
    ),
    line("henesduran/GPT2-from-scratch", "9f2fd27a09", "src/model.py:GPT", "", "src/model.py:GPTConfig"),
    line("priyangkarghosh/tllm", "1df6e65c16", priyang, "gelu-variant"),
    line("tonimateos/GPT-from-scratch", "71fb2138e8", tonimateos, BIAS_GELU, stubs=PLOTS),
    line(
        "Thomasevers2517/MiniGPT",
        "0f39b1fff0",
        thomasevers,
        "missing-bias scale-by-width gelu-variant",
        stubs=("lightning",),
    ),
    line(
        "Suraj-Sedai/Transformer-language-model-MiniGPT",
        "93c4bbadac",
        "model.transformer_model:TransformerModel",
        "position-sinusoidal mask-missing post-norm gelu-variant",
        "",
        SIZES["Suraj"],
    ),
    line(
        "oldGreenIsMe/miniGPT2",
        "06ffe15126",
        "src.model.gpt:GPT",
        "gelu-variant cache-inconsistent",
        "src.config:GPTConfig",
    ),
    line(
        "borangundogan/miniGPT-HPC",
        "044368aa11",
        borangundogan,
        "position-missing rotary-positions rmsnorm missing-bias gelu-variant",
    ),
    line("christyxgeorge/minigpt", "f8b0b62805", christyxgeorge, "missing-bias scale-by-width gelu-variant"),
    line("Futtano/GPT-2", "f41c99c330", futtano, BIAS_GELU),
)
