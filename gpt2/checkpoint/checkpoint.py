"""Open a model by name as a Checkpoint (files, files plus a LoRA adapter, or random weights); check that its tensors fit."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gpt2.checkpoint.configs import config_of
from gpt2.checkpoint.containers import gguf_file
from gpt2.checkpoint.containers.mapped_file import whole
from gpt2.checkpoint.files import files_of, folder_of, open_weights
from gpt2.checkpoint.hub import resolve
from gpt2.checkpoint.keys import HEAD, expected
from gpt2.checkpoint.match import Assignment, match, require_names
from gpt2.checkpoint.names import ModelName, RandomWeights
from gpt2.checkpoint.peft_files import Adapter, base_of, is_adapter, read_adapter
from gpt2.config import GPT2Config, official_size
from gpt2.data import from_directory, holds_tokenizer
from gpt2.errors import CheckpointError, InputError, require_memory
from gpt2.int8 import Int8GPT2
from gpt2.model import GPT2
from gpt2.sampling import not_finite

if TYPE_CHECKING:
    from gpt2.data import Tokenizer

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

    @abstractmethod
    def files(self) -> dict[str, Path]:
        """Return the files of config, weights and tokenizer, by their names in a report."""

    def load(self, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> GPT2:
        dtype, read, names = dtype or self.dtype, self.reader(), expected(self.config)
        if dtype != self.stored and torch.device(device).type == "cpu":  # else the file is mapped, or a device says what it has
            needed = self.config.num_parameters() * dtype.itemsize
            require_memory(needed, f"{self.name}: its weights in {dtype}".replace("torch.", ""), "leave the dtype out")
        if dtype == torch.int8:
            model: GPT2 = (small := Int8GPT2(self.config))
            for name in names:  # one at a time: all of them in float32 need four times the result's memory
                small.put(name, read(name, torch.float32), device)
        else:
            model = model_with(self.config, ((name, read(name, dtype).to(device)) for name in names))
        model.name = self.name
        return model

    def not_finite(self) -> dict[str, int]:
        """Return how many values of each parameter are NaN or infinite, by the names of those that have some."""
        read = self.reader()
        return not_finite(whole((name, read(name, self.stored)) for name in expected(self.config)))

    def own_tokenizer(self) -> Tokenizer | None:
        """Return :meth:`tokenizer`, or None if the checkpoint has none. Raises InputError: it is damaged."""
        try:
            return self.tokenizer()
        except gguf_file.NoTokenizer:
            return None


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
    def container(self) -> str:
        """The format of the weights' files: "safetensors", "GGUF" ..."""
        return next(iter(self.assignment.files.values())).kind

    def reader(self, *, mapped: bool = True) -> Reader:
        return lambda name, dtype: self.assignment.read(name, dtype, mapped=mapped)

    def tokenizer(self) -> Tokenizer:
        return tokenizer_of(self.path)

    def files(self) -> dict[str, Path]:
        return {path.name: path for path in files_of(self.path)}


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
        tied = self.base.config.tie_word_embeddings
        source = {HEAD: "wte.weight"} if tied else {}  # the base's, before the adapter
        return lambda name, dtype: self.adapter.merge(name, lambda wide: read(source.get(name, name), wide), dtype)

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer beside the adapter, else the base's."""
        return super().tokenizer() if holds_tokenizer(self.path) else self.base.tokenizer()

    def files(self) -> dict[str, Path]:
        return super().files() | {f"{self.base.name}: {name}": path for name, path in self.base.files().items()}


@dataclass(frozen=True)
class RandomCheckpoint(Checkpoint):
    """Random weights, drawn when they are read; the same ones each time."""

    random: RandomWeights

    def reader(self, *, mapped: bool = True) -> Reader:
        state = random_model(self.random).state_dict()
        return lambda name, dtype: state[name].to(dtype)

    def load(self, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> GPT2:
        dtype, model = dtype or self.dtype, random_model(self.random).to(device)
        return Int8GPT2.of(model) if dtype == torch.int8 else model.to(dtype).eval()

    def tokenizer(self) -> Tokenizer:
        raise gguf_file.NoTokenizer(f"{self.name}: random weights come without a tokenizer; name a trained model")

    def files(self) -> dict[str, Path]:
        return {}


def open_checkpoint(name: ModelName, *, offline: bool = False) -> Checkpoint:
    """Open a parsed name, downloaded if needed. Raises InputError: no such model. CheckpointError: it does not fit its config."""
    dtype = None if name.dtype is None else getattr(torch, name.dtype)
    if name.random is not None:
        config = official_size(name.random.size)
        return RandomCheckpoint(name.base, None, config, dtype or torch.float32, torch.float32, name.random)
    source = resolve(name, offline=offline)
    return open_path(
        source.path, name=source.name, revision=source.revision, dtype=dtype, offline=offline, activation=name.activation
    )


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
        require_names(files, path)
        config, assumed = config_of(path, files, activation)
        assignment = match(files, config, path)
        config = replace(config, tie_word_embeddings=assignment.tied)
        stored = assignment.dtype
        return StoredCheckpoint(name, revision, config, dtype or stored, stored, path, assignment, assumed=assumed)
    adapter = read_adapter(path)
    try:
        base = open_path(base_of(adapter, offline=offline), name=adapter.base, activation=activation)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: a LoRA adapter; its base model cannot be opened: {error}") from None
    config = adapter.config_of(base.config, base.reader())
    adapter.require_fit(config)
    stored = base.stored
    return AdaptedCheckpoint(
        name, revision, config, dtype or stored, stored, path, base.assignment, adapter, base, assumed=base.assumed
    )


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
    collects = gc.isenabled()
    gc.disable()  # thousands of new objects would trigger a collection that walks all of torch: 0.1 s
    try:
        model = GPT2(config, initialise=False)
        for name, tensor in tensors:
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, nn.Parameter(tensor))
    finally:
        if collects:
            gc.enable()
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
