"""The configuration of a GPT-2, read from and written to ``config.json``, with Hugging Face's names of fields.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), and the official ``config.json`` files.
"""

import reprlib
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from gpt2.errors import CheckpointError, InputError, did_you_mean

ACTIVATIONS = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu", "quick_gelu", "relu", "silu", "swish", "tanh")
# Other names that transformers reads for the same fields. A config with both must have equal values.
ALIASES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
# Every file of a tokenizer that is not this project's own; those that were read are written back by an export.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json", "chat_template.jinja"),
    *("vocab.json", "merges.txt", "vocab.txt", "spiece.model"),
)
# Every file beside the weights in the Hub's layout; repositories also hold copies for TensorFlow, Flax, Rust and ONNX.
SMALL = ("config.json", "generation_config.json", "chat.json", *TOKENIZER_FILES)
# Sizes come from untrusted files. The largest GPT-2 has 48 layers; the tensor list of a billion layers would fill memory.
MAX_LAYERS, MAX_SIZE = 10_000, 2**31 - 1
MAX_WHOLE, MAX_FLOAT = 2**63 - 1, sys.float_info.max


@dataclass(frozen=True)
class GPT2Config:
    """Sizes and switches of one GPT-2; the defaults are those of the 124M model.

    ``n_inner=None`` means a feed-forward width of ``4 * n_embd``. ``scale_attn_weights`` divides attention scores by
    ``sqrt(head_dim)``; ``scale_attn_by_inverse_layer_idx`` also by the layer's number, counted from 1 (Mistral GPT-2,
    stanford-crfm). ``reorder_and_upcast_attn`` computes scores and softmax in float32 or wider. ``tie_word_embeddings=False``
    gives the head a matrix of its own. Raises InputError: invalid values (a width not divisible by the heads, a size below 1, an
    unknown activation).
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    reorder_and_upcast_attn: bool = False
    bos_token_id: int | None = 50256
    eos_token_id: int | None = 50256
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"):
            _require(name, getattr(self, name), int, minimum=1, maximum=MAX_LAYERS if name == "n_layer" else MAX_SIZE)
        for name in ("n_inner", "bos_token_id", "eos_token_id"):
            if getattr(self, name) is not None:
                _require(name, getattr(self, name), int, minimum=1 if name == "n_inner" else 0, maximum=MAX_SIZE)
        for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "layer_norm_epsilon", "initializer_range"):
            _require(name, getattr(self, name), float, minimum=0, maximum=1 if name.endswith("pdrop") else MAX_FLOAT)
        for name in ("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "tie_word_embeddings"):
            _require(name, getattr(self, name), bool)
        if self.n_embd % self.n_head:
            raise InputError(f"config: n_embd {self.n_embd} is not divisible by n_head {self.n_head}")
        if not isinstance(name := self.activation_function, str) or name not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise InputError(f"config: unknown activation_function {quoted(name)}; known: {known}")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.n_embd // self.n_head

    @property
    def inner(self) -> int:
        """Width of the feed-forward."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    def parameters_by_part(self) -> dict[str, int]:
        """Count the parameters of each part from the sizes. A tied head shares the token embedding, so it adds none."""
        d, f, layers = self.n_embd, self.inner, self.n_layer
        tables = ("token embedding (tied head)",) if self.tie_word_embeddings else ("token embedding", "head")
        return {
            **dict.fromkeys(tables, self.vocab_size * d),
            "position embedding": self.n_positions * d,
            "attention": layers * (4 * d * d + 4 * d),
            "feed-forward": layers * (2 * d * f + f + d),
            "layer norms": layers * 4 * d + 2 * d,
        }

    def num_parameters(self) -> int:
        """Count all parameters: ``V d + P d + L (12 d^2 + 13 d) + 2 d`` with a feed-forward of ``4 d`` and a tied head."""
        return sum(self.parameters_by_part().values())

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], where: str = "config.json") -> Self:
        """Read the content of a Hugging Face ``config.json``; other keys have no effect.

        A key that changes what a model computes, and that this GPT-2 does not support, is an error.

        Raises:
            CheckpointError: not a GPT-2, or a value of the wrong type or range.
        """
        if not isinstance(raw, Mapping):
            raise CheckpointError(f"{where}: expected a JSON object, found {type(raw).__name__}; is this a config.json?")
        model_type = raw.get("model_type", "gpt2")
        if model_type != "gpt2":
            raise CheckpointError(f"{where}: model_type is {quoted(model_type)}, not 'gpt2'; this loader reads GPT-2 only")
        for key in ("add_cross_attention", "is_encoder_decoder"):
            if raw.get(key):
                given = quoted(raw[key])
                raise CheckpointError(f"{where}: {key} is {given}, but GPT-2 is a decoder-only model; use another checkpoint")
        if raw.get("quantization_config"):
            what = f"quantization_config is {quoted(raw['quantization_config'])}: quantised weights are not read"
            raise CheckpointError(f"{where}: {what}; give the model that they were made from")
        values = {field.name: raw[field.name] for field in fields(cls) if field.name in raw}
        if isinstance(ends := values.get("eos_token_id"), list):  # all of them end a text: gpt2.data.files.stated_ends
            values["eos_token_id"] = ends[0] if ends else None
        for alias, name in ALIASES.items():
            if alias in raw and values.setdefault(name, raw[alias]) != raw[alias]:
                both = f"{name} is {quoted(values[name])} and {alias}, its other name, {quoted(raw[alias])}"
                raise CheckpointError(f"{where}: {both}; remove the wrong one")
        if "n_positions" not in values and "n_ctx" in raw:
            values["n_positions"] = raw["n_ctx"]
        missing = [name for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head") if name not in values]
        if missing:
            raise CheckpointError(f"{where}: lacks {', '.join(missing)}; is this the config.json of a GPT-2?")
        try:
            return cls(**values)
        except InputError as error:
            raise CheckpointError(f"{where}: {str(error).removeprefix('config: ')}; correct the file or fetch it again") from None

    def to_hf(self, dtype: str = "float32") -> dict[str, Any]:
        """Return a ``config.json`` that transformers, vLLM, CTranslate2 and llama.cpp's converter accept (it needs ``n_ctx``)."""
        stated = asdict(self) | {one: float(getattr(self, one)) for one in ("layer_norm_epsilon", "initializer_range")}  # no int
        tied = stated.pop("tie_word_embeddings")  # stands where files that were written before have it
        last = {"n_ctx": self.n_positions, "tie_word_embeddings": tied, "dtype": dtype}
        return {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **stated, **last}


def quoted(value: object) -> str:
    """Return the ``repr`` of an untrusted value for a message: one short line without control characters."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # an integer of more than 4300 digits
        return f"a huge {type(value).__name__}"


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 60, 60


def number(value: object, kind: type[int] | type[float], least: float = -MAX_FLOAT, most: float = MAX_FLOAT) -> Any:
    """Return a number of an untrusted file as ``kind``; None if it is none, no whole one, not finite, or out of bounds.

    JSON and TOML hold numbers of any size, and truth values, which Python counts as integers.
    """
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        return None
    fits = max(least, -MAX_WHOLE) <= value <= min(most, MAX_WHOLE) if kind is int else least <= value <= most
    return kind(value) if fits else None


def _require(name: str, value: Any, kind: type, minimum: float = 0, maximum: float = 1) -> None:
    """Raise an :class:`InputError` if a field does not have type ``kind`` or is out of bounds."""
    fits = isinstance(value, int | float) if kind is float else isinstance(value, kind)
    if not fits or (kind is not bool and isinstance(value, bool)):
        raise InputError(f"config: {name} must be {'a number' if kind is float else kind.__name__}, found {quoted(value)}")
    if kind is not bool and number(value, kind, minimum, maximum) is None:
        bounds = f"{minimum:g} or more, and finite" if maximum == MAX_FLOAT else f"within {minimum} .. {maximum}"
        raise InputError(f"config: {name} is {quoted(value)}, and must be {bounds}")


OFFICIAL_SIZES: dict[str, GPT2Config] = {
    "distilgpt2": GPT2Config(n_layer=6),
    "gpt2": GPT2Config(),
    "gpt2-medium": GPT2Config(n_layer=24, n_embd=1024, n_head=16),
    "gpt2-large": GPT2Config(n_layer=36, n_embd=1280, n_head=20),
    "gpt2-xl": GPT2Config(n_layer=48, n_embd=1600, n_head=25),
}


def official_size(name: str) -> GPT2Config:
    """Return the config of an official size, such as "gpt2-medium"; an unknown one raises an :class:`InputError`."""
    if name in OFFICIAL_SIZES:
        return OFFICIAL_SIZES[name]
    raise InputError(f"unknown size {name!r}{did_you_mean(name, OFFICIAL_SIZES)}: sizes are {', '.join(OFFICIAL_SIZES)}")
