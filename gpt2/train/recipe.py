"""Recipes: every setting of a training run, in one TOML file.

A recipe and its text determine a run. An unknown key is refused with a suggestion, so a typo never trains with a default.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from gpt2.config import ACTIVATIONS, quoted
from gpt2.errors import InputError

FOLDER = Path(__file__).parent / "recipes"
NAME = re.compile(r"[^/\\:\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,100}")  # of a run: one component of a path on any system
FINE_TUNE_PATIENCE = 5  # evaluations without improvement


@dataclass(frozen=True)
class Data:
    """The text and its tokenizer.

    ``source`` is "plays" (validation: the held-out plays), "all-plays" (every play in one text), "play:NAME" (one play), or
    "tinyshakespeare". ``path`` is a text file to use instead. Except for "plays", the validation text is the last fraction
    ``held_out`` of the text. ``tokenizer`` is "bpe" or "words" (made from the training text, ``vocab_size`` entries), "chars", or
    "gpt2" (the official vocabulary). Fine-tuning always uses the tokenizer of the initial model. ``tokens`` is a folder of token
    files (:mod:`gpt2.data.token_files`) to use instead of any text.

    Training windows begin at random positions, or, with a ``stride``, at its multiples in random order, each once per epoch.
    """

    source: str = "tinyshakespeare"
    path: str = ""
    tokens: str = ""
    held_out: float = 0.1
    tokenizer: str = "bpe"
    vocab_size: int = 2048
    stride: int = 0


@dataclass(frozen=True)
class Model:
    """The model to train from scratch; fine-tuning takes the shape of the initial model.

    ``kind`` is "gpt2", or "bigram" (:mod:`gpt2.train.bigram`), which ignores the sizes. ``activation_function`` is one of
    :data:`gpt2.config.ACTIVATIONS`: GPT-2's own, or "gelu", the exact GELU of nanoGPT, which a CPU computes
    four times as fast.
    """

    kind: str = "gpt2"
    n_layer: int = 5
    n_embd: int = 160
    n_head: int = 5
    n_positions: int = 256
    activation_function: str = "gelu_new"


@dataclass(frozen=True)
class Optim:
    """AdamW with linear warm-up to ``lr`` and cosine decay to ``min_lr``; gradients are clipped to ``clip`` (0: never)."""

    lr: float = 1e-3
    min_lr: float = 1e-4
    warmup: int = 100
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.1
    clip: float = 1.0


@dataclass(frozen=True)
class Lora:
    """LoRA adapters to train instead of the weights (:mod:`gpt2.lora`), of rank ``r`` (0: none), scaled by ``alpha / r``.

    ``targets`` are the projections to adapt: c_attn, c_fc, c_proj (both of a block; one is attn.c_proj or mlp.c_proj).
    """

    r: int = 0
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ("c_attn", "c_proj", "c_fc")


@dataclass(frozen=True)
class Recipe:
    """One training run.

    - A step reads ``batch_size`` windows of ``context`` tokens, in ``grad_accum`` parts.
    - Every ``eval_every`` steps the validation text is scored (its first ``eval_tokens`` tokens; 0: all). After ``patience``
      evaluations in a row without improvement the run stops (0: never; -1: 5 when fine-tuning, never from scratch).
    - ``dropout`` acts on the embeddings and both residual branches, ``attn_dropout`` on the attention weights. The latter is 0 by
      default, because it prevents the fused attention kernel (a step of the embedded model: 1.20 s with it, 0.72 s without).
    - ``precision`` "bf16" computes a step's matrix products in bfloat16, by autocast; weights, optimizer and evaluations stay
      float32. "auto" measures both when the run begins, and keeps the faster one to the end.
    - ``checkpointing`` is activation checkpointing. ``compile`` compiles the blocks with torch.compile, for GPUs: on a CPU it
      takes minutes, needs a C++ compiler, and gained nothing.
    - A step with a loss or gradient that is not finite, or a loss that explodes (:mod:`gpt2.train.divergence`), changes no
      weights. ``on_divergence`` then says "stop" (the run), "skip" (the step), or "rewind" to the newest checkpoint, with other
      windows.
    - ``device`` is "cpu", "cuda", "mps", "xpu", or "auto": the accelerator if there is one. ``parallel`` is "ddp" (each process
      has the whole model) or "fsdp" (each has a shard).
    - ``expect`` is the validation loss that the recipe reaches on its own text, in nats per token (0: not stated), and
      ``takes`` is the time and the machine. ``tensorboard`` also writes the metrics for TensorBoard.
    """

    name: str = ""
    description: str = ""
    steps: int = 1000
    batch_size: int = 16
    context: int = 256
    grad_accum: int = 1
    dropout: float = 0.1
    attn_dropout: float = 0.0
    seed: int = 1337
    log_every: int = 10
    eval_every: int = 100
    save_every: int = 100
    sample_tokens: int = 64
    eval_tokens: int = 0
    patience: int = -1
    precision: str = "float32"
    checkpointing: bool = False
    compile: bool = False
    device: str = "auto"
    parallel: str = "ddp"
    on_divergence: str = "stop"
    tensorboard: bool = False
    expect: float = 0.0
    takes: str = ""
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    optim: Optim = field(default_factory=Optim)
    lora: Lora = field(default_factory=Lora)

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "context", "grad_accum", "log_every", "eval_every", "save_every"):
            _require(name, getattr(self, name), 1, math.inf, "give 1 or more")
        for name in ("eval_tokens", "sample_tokens", "expect"):
            _require(name, getattr(self, name), 0, math.inf, "give 0 or more")
        _require("patience", self.patience, -1, math.inf, "give 0 (never stop early) or more, or -1 (as suits the run)")
        _require("seed", self.seed, 0, 2**63, "give 0 or more, below 2**63")
        for name in ("dropout", "attn_dropout"):
            _require(name, getattr(self, name), 0, 1, "give 0 or more and less than 1")
        for name in ("beta1", "beta2"):
            _require(f"optim.{name}", getattr(self.optim, name), 0, 1, "give 0 or more and less than 1")
        for name in ("lr", "min_lr", "warmup", "weight_decay", "clip"):
            _require(f"optim.{name}", getattr(self.optim, name), 0, math.inf, "give 0 or more, and finite")
        _require(
            "data.stride", self.data.stride, 0, math.inf, "give the tokens from one window to the next, or 0 for random windows"
        )
        _require("lora.r", self.lora.r, 0, math.inf, "give a rank, or 0 for no adapters")
        _require("lora.alpha", self.lora.alpha, math.ulp(0), math.inf, "give more than 0")
        _require("lora.dropout", self.lora.dropout, 0, 1, "give 0 or more and less than 1")
        if self.batch_size % self.grad_accum:
            raise InputError(f"recipe: batch_size {self.batch_size} does not divide into grad_accum {self.grad_accum} parts")
        if not 0 < self.data.held_out < 1:
            raise InputError(f"recipe: data.held_out is {self.data.held_out}; give a fraction between 0 and 1")
        for name, value, known in (
            ("data.tokenizer", self.data.tokenizer, ("bpe", "chars", "words", "gpt2")),
            ("model.kind", self.model.kind, ("gpt2", "bigram")),
            ("model.activation_function", self.model.activation_function, ACTIVATIONS),
            ("precision", self.precision, ("float32", "bf16", "auto")),
            ("device", self.device, ("auto", "cpu", "cuda", "mps", "xpu")),
            ("parallel", self.parallel, ("ddp", "fsdp")),
            ("on_divergence", self.on_divergence, ("stop", "skip", "rewind")),
        ):
            if value not in known:
                raise InputError(f"recipe: {name} is {value!r}; give {', '.join(map(repr, known[:-1]))} or {known[-1]!r}")
        if self.data.path and self.data.tokens:
            raise InputError("recipe: data.path and data.tokens are both given; give one of them")
        if self.optim.lr < self.optim.min_lr:
            raise InputError(
                f"recipe: optim.lr {self.optim.lr} is below optim.min_lr {self.optim.min_lr}, the rate it decays to; set both"
            )

    def resolved(self, init: str | None) -> Recipe:
        """This recipe with its open settings decided, for a run from scratch or from the model named ``init``."""
        if init is not None and self.model.kind == "bigram":
            raise InputError(f"--init {init}: a bigram is trained from scratch; leave --init out, or choose another recipe")
        return self if self.patience >= 0 else replace(self, patience=0 if init is None else FINE_TUNE_PATIENCE)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def _require(name: str, value: float, least: float, below: float, remedy: str) -> None:
    if not least <= value < below:  # NaN is neither
        raise InputError(f"recipe: {name} is {value}; {remedy}")


def names() -> list[str]:
    """The names of the recipes in the package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe by name or by the path of a TOML file, with ``key=value`` overrides (``optim.lr=3e-4``).

    Raises:
        InputError: no such recipe, not TOML, an unknown key (with the nearest known one), or a value of the wrong type.
    """
    path = FOLDER / f"{name}.toml"
    if not path.is_file():
        path = Path(name)
        if not path.is_file():
            close = difflib.get_close_matches(name, names(), n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise InputError(f"no recipe {name!r}: {hint}recipes are {', '.join(names())}, or give the path of a TOML file")
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, thousands of digits; nested too deep
        raise InputError(f"{path}: not a TOML file ({str(error)[:120]}); correct it") from None
    for override in overrides:
        _apply(raw, override)
    return build({"name": path.stem, **raw}, str(path))


def _apply(raw: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise InputError(f"--set {override}: write key=value, as in optim.lr=3e-4")
    *tables, last = key.strip().split(".")
    kind: Any = Recipe
    for table in tables:
        raw = raw.setdefault(table, {})
        if not isinstance(raw, dict):
            raise InputError(f"--set {override}: {table} is a value, not a table of keys")
        kind = get_type_hints(kind).get(table) if is_dataclass(kind) else None
    wanted = get_type_hints(kind).get(last) if is_dataclass(kind) else None
    raw[last] = _value(text.strip(), wanted)


def _value(text: str, wanted: type | None) -> Any:
    """Parse a value as TOML, or as typed in a shell: text without quotes, 1984 for a key that takes text, .5 for 0.5."""
    try:
        table = tomllib.loads(f"v = {text}")
        value = table["v"] if len(table) == 1 else text
    except (ValueError, RecursionError):
        value = text
    if wanted is str and not isinstance(value, str):
        return text
    if wanted is float and isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def build(raw: Mapping[str, Any], where: str) -> Recipe:
    """A recipe from the tables of its file, which is ``where``.

    Raises:
        InputError: an unknown key (with the nearest known one), a value of the wrong type or range, or a name that is no name
            of a folder: without --out a run goes to ``out/NAME``.
    """
    recipe: Recipe = _build(Recipe, raw, where)
    if "name" in raw and (not NAME.fullmatch(recipe.name) or set(recipe.name) == {"."}):
        raise InputError(
            f"{where}: name {quoted(recipe.name)} cannot be the name of a run's folder; "
            r"give up to 100 characters without / \ : and control characters (name = ..., or --set name=...)"
        )
    return recipe


def _build(kind: type, raw: Mapping[str, Any], where: str, prefix: str = "") -> Any:
    """A frozen dataclass from a TOML table: every key known, every value of the declared type."""
    kinds = get_type_hints(kind)
    values = {}
    for key, value in raw.items():
        if key not in kinds:
            known = [prefix + f.name for f in fields(kind)]
            everything = (
                known if prefix else known + [f"{t}.{f.name}" for t, k in kinds.items() if is_dataclass(k) for f in fields(k)]
            )
            close = difflib.get_close_matches(prefix + key, everything, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else f"keys are {', '.join(known)}"
            raise InputError(f"{where}: unknown key {quoted(prefix + key)}; {hint}")
        wanted: type = kinds[key]
        if is_dataclass(wanted):
            if not isinstance(value, Mapping):
                raise InputError(f"{where}: {prefix + key} is a table of keys, found {quoted(value)}")
            values[key] = _build(wanted, value, where, f"{key}.")
            continue
        if wanted is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if wanted == tuple[str, ...]:
            names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
            if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
                raise InputError(f"{where}: {prefix + key} is a list of names, found {quoted(value)}")
            values[key] = tuple(names)
            continue
        if type(value) is not wanted:
            raise InputError(f"{where}: {prefix + key} must be {wanted.__name__}, found {quoted(value)}")
        values[key] = value
    return kind(**values)
