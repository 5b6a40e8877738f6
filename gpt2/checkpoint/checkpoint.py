"""Open a model by name: find where it is, and make a Checkpoint of its files, of files plus a LoRA adapter, or of a seed."""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from gpt2.checkpoint.containers import gguf_file, read_json, whole
from gpt2.checkpoint.files import config_of, files_of, folder_of, is_adapter, open_weights
from gpt2.checkpoint.hub import repository_files
from gpt2.checkpoint.keys import HEAD, expected
from gpt2.checkpoint.match import Assignment, match, require_gpt2
from gpt2.checkpoint.names import ADAPTER, DEFAULT, OFFICIAL, PATHS, REPOSITORY, ModelName, RandomWeights
from gpt2.checkpoint.peft_files import MERGE_WITH_PEFT, NO_BASE, Adapter, read_adapter
from gpt2.config import GPT2Config, official_size
from gpt2.damage import ADVICE, Look, look
from gpt2.data import Tokenizer, from_directory, holds_tokenizer
from gpt2.errors import CheckpointError, InputError, did_you_mean, require_memory, user_path
from gpt2.garbage import uncollected
from gpt2.int8 import Int8GPT2
from gpt2.model import GPT2

Reader = Callable[[str, torch.dtype], Tensor]  # (parameter's name, dtype) -> the parameter, on the CPU


@dataclass(frozen=True)
class Checkpoint(ABC):
    """A model that can be loaded; its weights are stored in dtype ``stored``, and the model runs in ``dtype``."""

    name: str
    revision: str | None
    config: GPT2Config
    dtype: torch.dtype
    stored: torch.dtype

    @abstractmethod
    def reader(self, *, mapped: bool = True) -> Reader:
        """Return a function that reads one parameter: a view of the mapped file if possible and ``mapped``."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """Return the checkpoint's own tokenizer. Raises InputError: it has none, or it is damaged."""

    def files(self) -> dict[str, Path]:
        """Return the files of config, weights and tokenizer, by their names in a report; none of what is in memory."""
        return {}

    def load(self, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> GPT2:
        dtype, read, names = dtype or self.dtype, self.reader(), expected(self.config)
        if dtype != self.stored and torch.device(device).type == "cpu":  # else the file is mapped, or a device says what it has
            needed = self.config.num_parameters() * dtype.itemsize
            require_memory(needed, f"{self.name}: its weights in {dtype}".replace("torch.", ""), "leave the dtype out")
        if dtype == torch.int8:
            with uncollected():
                model: GPT2 = (small := Int8GPT2(self.config))
                for name in names:  # one at a time: all of them in float32 need four times the result's memory
                    small.put(name, read(name, torch.float32), device)
        else:
            model = model_with(self.config, ((name, read(name, dtype).to(device)) for name in names))
        int8 = [(name, 127 * scale) for name, scale in model.named_buffers() if name.endswith(".scale")]  # a row's largest
        narrows = bool(int8) or torch.finfo(dtype).max < torch.finfo(self.stored).max
        if narrows and look([*model.named_parameters(), *int8]).damage:  # said of the file: here it may be an infinity
            found, small_type = self.look(), str(dtype).removeprefix("torch.")
            narrow = f"{found.worst}, too large for {small_type}; if that is damage, {ADVICE}; else load it in float32"
            raise CheckpointError(f"{self.name}: {f'holds {found.damage}; {ADVICE}' if found.damage else narrow}")
        model.name = self.name
        return model

    def look(self) -> Look:
        """Look once at every weight, for damaged ones."""
        read = self.reader()
        return look(whole((name, read(name, self.stored)) for name in expected(self.config)))

    def own_tokenizer(self) -> Tokenizer | None:
        """Return :meth:`tokenizer`, or None if the checkpoint has none. Raises InputError: it is damaged."""
        try:
            return self.tokenizer()
        except gguf_file.NoTokenizer:
            return None


@dataclass(frozen=True, eq=False)
class ClassifierHead:
    """A classifier's head on the last token of a text: the names of its C classes, and a map (C, D) with or without a bias."""

    classes: tuple[str, ...]
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class StoredCheckpoint(Checkpoint):
    """A checkpoint in a local directory or file; ``assignment`` maps parameters to tensors."""

    path: Path
    assignment: Assignment
    assumed: str = field(default="", kw_only=True)  # what the files do not say of the config

    @property
    def extra(self) -> dict[str, Tensor]:
        """The tensors of other heads beside the language model, such as a classifier's, by their keys."""
        return {key: self.assignment.files[key].read(key) for key in self.assignment.extra}

    @property
    def classifier(self) -> ClassifierHead | None:
        """The head ``score`` of transformers' GPT2ForSequenceClassification, with the names that the config gives the classes."""
        key = next((key for key in self.assignment.extra if f".{key}".endswith(".score.weight")), None)
        if key is None:
            return None
        weight, config = (held := self.extra)[key], (self.path if self.path.is_dir() else self.path.parent) / "config.json"
        names = read_json(config).get("id2label") if config.is_file() else None
        names = names if isinstance(names, dict) else {}
        classes = tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(len(weight)))
        return ClassifierHead(classes, weight, held.get(key.removesuffix("weight") + "bias"))

    @property
    def container(self) -> str:
        """The format of the weights' files: "safetensors", "GGUF" ..."""
        return next(iter(self.assignment.files.values())).kind

    def reader(self, *, mapped: bool = True) -> Reader:
        return lambda name, dtype: self.assignment.read(name, dtype, mapped=mapped)

    def tokenizer(self) -> Tokenizer:
        return tokenizer_of(self.path)

    def files(self) -> dict[str, Path]:
        return {path.name: path for path in files_of(self.path, self.assignment.files.values())}


@dataclass(frozen=True)
class AdaptedCheckpoint(StoredCheckpoint):
    """A LoRA adapter in PEFT's format (in ``path``), merged into its ``base`` while the weights are read."""

    adapter: Adapter
    base: StoredCheckpoint

    @property
    def changed(self) -> frozenset[str]:
        """The parameters that are not the base's: added to, replaced, or a head that the base ties and the adapter does not."""
        untied = {HEAD} if self.base.config.tie_word_embeddings and not self.config.tie_word_embeddings else set[str]()
        return frozenset({*self.adapter.factors, *self.adapter.whole, *untied})

    def reader(self, *, mapped: bool = True) -> Reader:
        read = self.base.reader(mapped=mapped)
        source = {HEAD: "wte.weight"} if self.base.config.tie_word_embeddings else {}  # the base's, before the adapter
        return lambda name, dtype: self.adapter.merge(name, lambda wide: read(source.get(name, name), wide), dtype)

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer beside the adapter, else the base's."""
        return super().tokenizer() if holds_tokenizer(self.path) else self.base.tokenizer()

    def files(self) -> dict[str, Path]:
        own = {path.name: path for path in files_of(self.path, [self.adapter.file])}
        return own | {f"{self.base.name}: {name}": path for name, path in self.base.files().items()}


@dataclass(frozen=True)
class RandomCheckpoint(Checkpoint):
    """Random weights, drawn when they are read; the same ones each time."""

    random: RandomWeights

    def reader(self, *, mapped: bool = True) -> Reader:
        state = random_model(self.random).state_dict()
        return lambda name, dtype: state[name].to(dtype)

    def load(self, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> GPT2:
        if (dtype or self.dtype) == torch.int8:
            return super().load(dtype, device)
        model = random_model(self.random).to(device).to(dtype or self.dtype).eval()  # in place: no second copy
        model.name = self.name
        return model

    def tokenizer(self) -> Tokenizer:
        raise gguf_file.NoTokenizer(f"{self.name}: random weights come without a tokenizer; name a trained model")


@dataclass(frozen=True)
class Source:
    """The place of a checkpoint on this machine."""

    name: str  # "openai-community/gpt2", "shakespeare-mini", or the path as written
    path: Path  # directory, or single file
    revision: str | None  # the 40-hex commit for a Hub repository, else None


def resolve(name: str | ModelName, *, revision: str | None = None, offline: bool = False) -> Source:
    """Return the local files of a model name, downloaded and verified if they come from the Hub.

    An official short name has priority over a folder of that name (write ``./gpt2``); other existing paths over ``org/name``.
    Raises InputError: no such model, or the Hub does not answer. CheckpointError: the files are not what the Hub declared.
    """
    parsed = name if isinstance(name, ModelName) else ModelName.parse(name, revision=revision)
    name = parsed.base
    if "://" in name:
        raise InputError(f"{name}: is a web address; give ORG/NAME, as in openai-community/gpt2, or the path of a copy")
    if parsed.local:
        path = Path(__file__).parent.parent / "assets" / DEFAULT if name == DEFAULT else user_path(name)
        return Source(name, path, None)
    if name.startswith(PATHS):
        path = user_path(name)
        neighbours = os.listdir(path.parent) if path.parent.is_dir() else []
        raise InputError(f"no such file or directory: {name}{did_you_mean(path.name, neighbours)}: check the path")
    repo, where = OFFICIAL.get(name, name), Path(name).parent if Path(name).name == "best" else name
    missing = f"{name}: no such folder; gpt2 train RECIPE --out {where} makes one, gpt2 export MODEL {name} another"
    if repo.count("/") > 1:
        raise InputError(missing)
    if not REPOSITORY.fullmatch(repo):
        hint = did_you_mean(repo.lower(), [DEFAULT, *OFFICIAL])
        known = ", ".join([DEFAULT, *OFFICIAL])
        raise InputError(f"unknown model {name!r}{hint}: use {known}, org/name[@revision], random:SIZE, or an existing path")
    revision = "main" if parsed.revision is None else parsed.revision
    if not re.fullmatch(r"\w[\w./-]*", revision, re.ASCII) or ".." in revision:
        raise InputError(f"{revision!r} cannot be a revision of {repo}: name a branch, a tag or a commit")
    try:
        folder = repository_files(repo, revision, offline)
    except InputError as error:
        if isinstance(error, CheckpointError) or "/" not in name or not Path(name).parent.is_dir():
            raise
        raise InputError(f"{missing}; nor does the Hub give one: {error}") from None  # a folder stands where it would be
    return Source(repo, folder, folder.name)


def open_checkpoint(name: ModelName, *, offline: bool = False) -> Checkpoint:
    """Open a parsed name, downloaded if needed. Raises InputError: no such model. CheckpointError: it does not fit its config."""
    dtype = None if name.dtype is None else getattr(torch, name.dtype)
    if name.random is not None:
        config = official_size(name.random.size)
        return RandomCheckpoint(name.base, None, config, dtype or torch.float32, torch.float32, name.random)
    source = resolve(name, offline=offline)
    place = {"name": source.name, "revision": source.revision}
    return open_path(source.path, **place, dtype=dtype, offline=offline, activation=name.activation)


def open_path(
    path: Path,
    *,
    name: str | None = None,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    offline: bool = False,
    activation: str | None = None,
) -> StoredCheckpoint:
    """Open a local directory or file as :func:`open_checkpoint` does; only an adapter's base may come from elsewhere."""
    name = str(path) if name is None else name
    if not is_adapter(path):
        files = open_weights(path)
        require_gpt2(files, path)
        config, assumed = config_of(path, files, activation)
        assignment = match(files, config, path)
        config = replace(config, tie_word_embeddings=assignment.tied)
        stored = assignment.dtype
        return StoredCheckpoint(name, revision, config, dtype or stored, stored, path, assignment, assumed=assumed)
    adapter = read_adapter(path)
    place = base_of(adapter, offline=offline)
    try:
        base = open_path(place, name=adapter.base, activation=activation)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {NO_BASE}: {error}") from None
    config = adapter.config_of(base.config, base.reader())
    adapter.require_fit(config)
    stored = base.stored
    shared = (name, revision, config, dtype or stored, stored, path, base.assignment)
    return AdaptedCheckpoint(*shared, adapter, base, assumed=base.assumed)


def base_of(adapter: Adapter, *, offline: bool = False) -> Path:
    """Return the base model's path, downloaded if needed. Raises CheckpointError: no base is named, or it cannot be loaded."""
    remedy = f"put the base model's name or path into base_model_name_or_path of {adapter.path / ADAPTER}"
    if adapter.base is None:
        raise CheckpointError(f"{adapter.path}: {NO_BASE}: it names none; {remedy}")
    # With a revision, the name is a Hub repository, even if a folder has that name.
    pinned = adapter.revision is not None and (adapter.base in OFFICIAL or REPOSITORY.fullmatch(adapter.base))
    try:
        path = resolve(f"{adapter.base}@{adapter.revision}" if pinned else adapter.base, offline=offline).path
    except InputError as error:
        raise CheckpointError(f"{adapter.path}: {NO_BASE}: {error}; or {remedy}") from None
    if is_adapter(path):
        raise CheckpointError(f"{adapter.path}: {NO_BASE}: {adapter.base} is an adapter too; {MERGE_WITH_PEFT}")
    return path


def tokenizer_of(path: Path, *, offline: bool = False) -> Tokenizer:
    """Return the tokenizer beside the weights, in a GGUF file, or of an adapter's base. Raises InputError: none, or damaged."""
    if is_adapter(path) and not holds_tokenizer(path):
        path = base_of(read_adapter(path), offline=offline)
    if path.is_file() or any(path.glob("*.gguf")):
        file = next(iter(open_weights(path).values()), None)
        if isinstance(file, gguf_file.GGUFFile):
            return gguf_file.tokenizer_of(file)
    try:
        return from_directory(folder_of(path))
    except InputError as error:
        if holds_tokenizer(folder_of(path)):
            raise
        open_weights(path)  # raises for what is no model either, such as the folder of a run
        raise gguf_file.NoTokenizer(str(error)) from None


def model_with(config: GPT2Config, tensors: Iterable[tuple[str, Tensor]]) -> GPT2:
    """Build a GPT2 in eval mode around the given tensors, without copying them. Missing parameters stay uninitialised."""
    with uncollected():
        model = GPT2(config, initialise=False)
        for name, tensor in tensors:
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, nn.Parameter(tensor))
    return model.eval()


def random_model(random: RandomWeights) -> GPT2:
    """Build a float32 model of an official size, initialised as GPT-2; 1-D parameters get noise, since zeros would hide bugs."""
    config = official_size(random.size)
    model = GPT2(config, initialise=False)
    generator = torch.Generator().manual_seed(random.seed)
    model.initialise(generator)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=config.initializer_range)
    return model
