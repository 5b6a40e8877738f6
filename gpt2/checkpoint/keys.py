"""The key table: each tensor of a GPT-2 checkpoint with its shape and its names in our model, Hugging Face, OpenAI and GGUF.

Our modules have Hugging Face's names, so those keys differ only by a prefix. Reading, writing and checking all use this table.
"""

import re
from collections.abc import Container, Mapping
from functools import lru_cache

from gpt2.config import ALIASES, GPT2Config

PREFIX = "transformer."  # written by transformers, absent from the official files
# Names that wrappers put before or into keys: torch.compile, DDP, FSDP, activation checkpointing, Lightning Fabric, Opacus.
WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_?module|_forward_module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.", re.ASCII
)

# One row per parameter: our name ("{}" is the layer); its shape in the symbols V vocabulary, P positions, D width, F
# feed-forward; OpenAI's name (openai/gpt-2, src/model.py), where `w` has a leading axis of one, a convolution's width; GGUF's
# name (ggml-org/llama.cpp, gguf-py/gguf/constants.py), where matrices are [out, in].
_ROWS = (
    ("wte.weight", ("V", "D"), "model/wte", "token_embd.weight"),
    ("wpe.weight", ("P", "D"), "model/wpe", "position_embd.weight"),
    ("h.{}.ln_1.weight", ("D",), "model/h{}/ln_1/g", "blk.{}.attn_norm.weight"),
    ("h.{}.ln_1.bias", ("D",), "model/h{}/ln_1/b", "blk.{}.attn_norm.bias"),
    ("h.{}.attn.c_attn.weight", ("D", "3D"), "model/h{}/attn/c_attn/w", "blk.{}.attn_qkv.weight"),
    ("h.{}.attn.c_attn.bias", ("3D",), "model/h{}/attn/c_attn/b", "blk.{}.attn_qkv.bias"),
    ("h.{}.attn.c_proj.weight", ("D", "D"), "model/h{}/attn/c_proj/w", "blk.{}.attn_output.weight"),
    ("h.{}.attn.c_proj.bias", ("D",), "model/h{}/attn/c_proj/b", "blk.{}.attn_output.bias"),
    ("h.{}.ln_2.weight", ("D",), "model/h{}/ln_2/g", "blk.{}.ffn_norm.weight"),
    ("h.{}.ln_2.bias", ("D",), "model/h{}/ln_2/b", "blk.{}.ffn_norm.bias"),
    ("h.{}.mlp.c_fc.weight", ("D", "F"), "model/h{}/mlp/c_fc/w", "blk.{}.ffn_up.weight"),
    ("h.{}.mlp.c_fc.bias", ("F",), "model/h{}/mlp/c_fc/b", "blk.{}.ffn_up.bias"),
    ("h.{}.mlp.c_proj.weight", ("F", "D"), "model/h{}/mlp/c_proj/w", "blk.{}.ffn_down.weight"),
    ("h.{}.mlp.c_proj.bias", ("D",), "model/h{}/mlp/c_proj/b", "blk.{}.ffn_down.bias"),
    ("ln_f.weight", ("D",), "model/ln_f/g", "output_norm.weight"),
    ("ln_f.bias", ("D",), "model/ln_f/b", "output_norm.bias"),
)
TABLE: dict[str, tuple[str, ...]] = {ours: shape for ours, shape, _, _ in _ROWS}
HEAD = "lm_head.weight"  # (V, D), of an untied head; beside a tied one, a copy of the token embedding
SHARES = ("q", "k", "v")  # parts of c_attn, under which files with three matrices in its place have them
_GGUF = {ours: gguf for ours, _, _, gguf in _ROWS} | {HEAD: "output.weight"}
_OURS = {openai: ours for ours, _, openai, _ in _ROWS} | {gguf: ours for ours, gguf in _GGUF.items()}

_STACKS, _NORMS = ("blocks", "layers"), ("h.{}.ln_1", "h.{}.ln_2", "ln_f")
_PARTS = tuple(dict.fromkeys(ours.rpartition(".")[0].removeprefix("h.{}.") for ours in TABLE if ours.startswith("h.")))
# Other projects' names of our modules: rasbt/LLMs-from-scratch (ch04), Lightning-AI/litgpt (model.py), karpathy/minGPT of 2020.
_SCHEMES: tuple[dict[str, str], ...] = (
    {
        **{"tok_emb": "wte", "pos_emb": "wpe", "final_norm": "ln_f", "out_head": "lm_head", "trf_blocks.{}.norm1": "h.{}.ln_1"},
        **{"trf_blocks.{}.att.W_query": "h.{}.attn.q", "trf_blocks.{}.att.W_key": "h.{}.attn.k"},
        **{"trf_blocks.{}.att.W_value": "h.{}.attn.v", "trf_blocks.{}.att.out_proj": "h.{}.attn.c_proj"},
        **{"trf_blocks.{}.norm2": "h.{}.ln_2", "trf_blocks.{}.ff.layers.0": "h.{}.mlp.c_fc"},
        **{"trf_blocks.{}.ff.layers.2": "h.{}.mlp.c_proj"},
    },
    {
        **{"h.{}.norm_1": "h.{}.ln_1", "h.{}.attn.qkv": "h.{}.attn.c_attn", "h.{}.attn.proj": "h.{}.attn.c_proj"},
        **{"h.{}.norm_2": "h.{}.ln_2", "h.{}.mlp.fc": "h.{}.mlp.c_fc", "h.{}.mlp.proj": "h.{}.mlp.c_proj"},
    },
    {
        **{"blocks.{}.ln1": "h.{}.ln_1", "blocks.{}.attn.query": "h.{}.attn.q", "blocks.{}.attn.key": "h.{}.attn.k"},
        **{"blocks.{}.attn.value": "h.{}.attn.v", "blocks.{}.attn.proj": "h.{}.attn.c_proj", "blocks.{}.ln2": "h.{}.ln_2"},
        **{"blocks.{}.mlp.0": "h.{}.mlp.c_fc", "blocks.{}.mlp.2": "h.{}.mlp.c_proj", "head": "lm_head"},
    },
    # Our own names of a block's parts, in a list of another name.
    *({f"{stack}.{{}}.{part}": f"h.{{}}.{part}" for part in _PARTS} for stack in _STACKS),
    {norm: norm for norm in _NORMS},
)
# Names of the sizes in model_args, hparams.json and other configs: openai/gpt-2, karpathy/nanoGPT, and what others write.
SYNONYMS = ALIASES | {
    **{"n_vocab": "vocab_size", "block_size": "n_positions", "n_ctx": "n_positions", "context_length": "n_positions"},
    **{"max_seq_len": "n_positions", "embed_dim": "n_embd", "emb_dim": "n_embd", "d_model": "n_embd", "num_layers": "n_layer"},
    **{"n_layers": "n_layer", "num_heads": "n_head", "n_heads": "n_head"},
}

# Last names of a key in transformers' Keras and Flax files, where they differ from ours.
_LEAVES = dict.fromkeys(("kernel", "gamma", "scale", "embedding", "embeddings"), "weight") | {"beta": "bias"}

# Our names of a key without its prefix ("{}" is the layer): each of the schemes above, and redundant tensors beside them.
_LEAF = {"weight": "weight", "bias": "bias", "scale": "weight", "shift": "bias", "gamma": "weight", "beta": "bias"}
_NAMED = {name: name for name in (*TABLE, HEAD, "h.{}.attn.bias", "h.{}.attn.masked_bias")}
_NAMED |= {
    f"{theirs}.{leaf}": f"{ours}.{_LEAF[leaf]}"
    for each in _SCHEMES
    for theirs, ours in each.items()
    for leaf in _LEAF
    if ours in _NORMS or leaf in ("weight", "bias")
}
_ATTENTIONS = (*(f"{stack}.{{}}.attn" for stack in ("h", *_STACKS)), "trf_blocks.{}.att")
_NAMED |= {f"{attn}.{mask}": "h.{}.attn.bias" for attn in _ATTENTIONS for mask in ("bias", "mask", "causal_mask", "tril")}
_NAMED |= {"lm_head.decoder.weight": HEAD, "pos_emb": "wpe.weight"}
_LONGEST = max(name.count(".") for name in _NAMED) + 1  # parts of a name

# Redundant tensors, dropped only after their content is checked.
CAUSAL_MASK = re.compile(r"h\.\d{1,5}\.attn\.bias", re.ASCII)  # (1, 1, P, P), ones on and below the diagonal, or above it
MASKED_SCORE = re.compile(r"h\.\d{1,5}\.attn\.masked_bias", re.ASCII)  # scalar that older code wrote over masked scores
# Further heads on a GPT-2's last norm: of TRL and other reinforcement learning, of transformers' classifiers, of ClipCap.
OTHER_HEADS = re.compile(
    r"(?!(?:.*\.)?h\.\d)(?:.*\.)?(v_head|value_head|q_heads?|ilql_heads|reward_head|regression_head|multiple_choice_head|mc_head|score|classifier"
    r"|qa_outputs|clip_project)\..*",
    re.ASCII,
)
# Training state beside a model: TensorFlow's counter and Adam's moments, the counter of torch's AveragedModel.
TRAINING_STATE = re.compile(r"global_step|n_averaged|beta[12]_power|model/[\w/]{1,40}/Adam(_1)?", re.ASCII)
REDUNDANT = (CAUSAL_MASK, MASKED_SCORE, OTHER_HEADS, TRAINING_STATE)  # what may stand beside the parameters


def expected(config: GPT2Config) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter, in the order of the forward pass."""
    sizes = {"V": config.vocab_size, "P": config.n_positions, "D": config.n_embd, "3D": 3 * config.n_embd, "F": config.inner}
    shapes = {name: tuple(sizes[symbol] for symbol in symbols) for name, symbols in TABLE.items()}
    layers = {name.format(layer): shape for layer in range(config.n_layer) for name, shape in shapes.items() if "{}" in name}
    outside = {name: shape for name, shape in shapes.items() if "{}" not in name}
    outside |= {} if config.tie_word_embeddings else {HEAD: (config.vocab_size, config.n_embd)}
    return {name: outside.pop(name) for name in ("wte.weight", "wpe.weight")} | layers | outside


def sizes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the config sizes that the tensors' shapes show, in either orientation. No shape shows the number of heads."""
    shown: dict[str, int] = {}
    for field, name, axis in (("vocab_size", "wte.weight", 0), ("n_embd", "wte.weight", 1), ("n_positions", "wpe.weight", 0)):
        if len(shape := without_leading_ones(shapes.get(name, ()))) == 2:
            shown[field] = shape[axis]
    if layers := [number for name in shapes if (number := layer(name)) is not None]:
        shown["n_layer"] = max(layers) + 1
    widths = list(without_leading_ones(shapes.get("h.0.mlp.c_fc.weight", ())))
    if len(widths) == 2 and shown.get("n_embd") in widths:
        widths.remove(shown["n_embd"])
        shown["n_inner"] = widths[0]
    return shown


def without_leading_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a matrix's shape without the leading axis that OpenAI's files, and minGPT's positions of 2020, have."""
    return shape[1:] if len(shape) == 3 and shape[0] == 1 else shape


def is_parameter(name: str) -> bool:
    """Return whether one of our names is a parameter's of some GPT-2, or of a third of one."""
    name, _ = share(name)
    return name in TABLE or name == HEAD or layer(name) is not None


def layer(name: str) -> int | None:
    """Return the layer of a per-layer parameter, counted from zero; None for other names."""
    match = re.match(r"h\.(\d{1,5})\.", name, re.ASCII)
    return int(match[1]) if match and f"h.{{}}.{name[match.end() :]}" in TABLE else None


@lru_cache(maxsize=4096)
def from_file(key: str) -> str:
    """Return our name for a file's key in any known format, behind any prefix; of an unknown key, what follows known prefixes.

    ``h.3.attn.q.weight`` is a third of ``h.3.attn.c_attn.weight`` (:func:`share`).
    """
    number = re.match(r"(?:blk\.|model/h)(\d{1,5})(?=[./])", key, re.ASCII)
    template = key if number is None else key[: number.start(1)] + "{}" + key[number.end(1) :]
    if template in _OURS:
        return _OURS[template].format(number and number[1])
    if (nested := _from_path(key)) in TABLE or layer(nested) is not None:
        return nested
    key = WRAPPERS.sub("", key)
    parts = key.split(".")[-_LONGEST:]
    for start in range(len(parts)):
        name = ".".join(parts[start:])
        number = re.search(r"(?<=\.)\d{1,5}(?=\.)", name, re.ASCII)
        template = name if number is None else f"{name[: number.start()]}{{}}{name[number.end() :]}"
        if template in _NAMED:
            return _NAMED[template].format(number and number[0])
    while wrapper := next((wrapper for wrapper in ("model.", PREFIX) if key.startswith(wrapper)), None):
        key = key.removeprefix(wrapper)
    return key


def share(name: str) -> tuple[str, int | None]:
    """Return the parameter that a file's tensor is or is a third of, and which third: q, k, v are 0, 1, 2."""
    part = re.fullmatch(r"(h\.\d{1,5}\.attn)\.([qkv])(\..*)", name, re.ASCII)
    return (name, None) if part is None else (f"{part[1]}.c_attn{part[3]}", SHARES.index(part[2]))


def _from_path(key: str) -> str:
    """Return our name for a path in a Keras or Flax file: `MODEL/transformer/h_._0/ln_1/gamma:0`, `h/0/ln_1/scale`."""
    *modules, leaf = key.removesuffix(":0").replace("_._", "/").split("/")
    if PREFIX[:-1] in modules:
        modules = modules[len(modules) - modules[::-1].index(PREFIX[:-1]) :]
    return ".".join((*modules, _LEAVES.get(leaf, leaf)))


def head_name(names: Container[str]) -> str:
    """Return which of a model's parameters the head multiplies by: its own, or the token embedding."""
    return HEAD if HEAD in names else "wte.weight"


def to_file(name: str) -> str:
    return name if name == HEAD else PREFIX + name


def to_gguf(name: str) -> str:
    return _GGUF[template(name)].format(layer(name))


def template(name: str) -> str:
    """Return a parameter's row in the key table: ``"h.3.ln_1.bias"`` -> ``"h.{}.ln_1.bias"``."""
    return name if not name.startswith("h.") else "h.{}." + name.split(".", 2)[2]
