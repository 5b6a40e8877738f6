"""Describe a checkpoint without running it: config, memory, files and hashes."""

from dataclasses import dataclass
from pathlib import Path

import torch

from gpt2.checkpoint.checkpoint import AdaptedCheckpoint, StoredCheckpoint, open_checkpoint
from gpt2.checkpoint.containers import listed
from gpt2.checkpoint.loading import rows_note
from gpt2.checkpoint.names import DEFAULT, FLOATS, ModelName
from gpt2.checkpoint.official import Official, official_files
from gpt2.checkpoint.saving import sha256
from gpt2.config import GPT2Config
from gpt2.errors import InputError


@dataclass(frozen=True)
class File:
    """A file of a checkpoint; ``size`` in bytes."""

    name: str
    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "File":
        return cls(path.name, path.stat().st_size, sha256(path))


@dataclass(frozen=True)
class Description:
    """One checkpoint: the ``dtype`` to load it in, its differences from transformers' layout (``notes``), its files."""

    name: str
    path: str | None
    revision: str | None
    config: GPT2Config
    dtype: str
    container: str
    notes: tuple[str, ...]
    dropped: tuple[str, ...]
    files: tuple[File, ...]
    official: Official | None
    not_finite: dict[str, int]  # parameter -> how many of its values are NaN, infinite, or too large for float32

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Of the weights; of the cache of one full context; of training in float32, with gradients and AdamW's two moments."""
        config, itemsize, parameters = self.config, getattr(torch, self.dtype).itemsize, self.config.num_parameters()
        cache = 2 * config.n_layer * config.n_positions * config.n_embd
        return {"weights": parameters * itemsize, "cache": cache * itemsize, "training": 16 * parameters}


def describe(name: str = DEFAULT, *, revision: str | None = None, offline: bool = False) -> Description:
    """Read a model's config, file headers and hashes. Raises InputError: no such model. CheckpointError: a bad checkpoint."""
    checkpoint = open_checkpoint(ModelName.parse(name, FLOATS, revision=revision), offline=offline)
    dtype = str(checkpoint.dtype).removeprefix("torch.")
    if not isinstance(checkpoint, StoredCheckpoint):
        return Description(checkpoint.name, None, None, checkpoint.config, dtype, "none", (), (), (), None, {})
    path, assignment = checkpoint.path, checkpoint.assignment
    found = checkpoint.look()
    notes = [f"DAMAGED: holds {found.damage}"] if found.damage else [found.outlier] if found.outlier else []
    notes += ["matrices are stored [out, in], as in nn.Linear, and read as transposed views"] if assignment.transposed else []
    if isinstance(checkpoint, AdaptedCheckpoint):
        adapter = checkpoint.adapter
        whole = f", which replaces {listed(list(adapter.whole))}" if adapter.whole else ""
        notes.append(f"a LoRA adapter of {adapter.base}, merged into {len(adapter.factors)} of its matrices as it is read{whole}")
        if checkpoint.base.config.tie_word_embeddings and not checkpoint.config.tie_word_embeddings:
            notes.append("the head is untied: the adapter changes the embedding and the head each for itself")
    notes += [checkpoint.assumed] if checkpoint.assumed else []
    notes += [*assignment.notes, *(note for file in dict.fromkeys(assignment.files.values()) for note in file.notes)]
    try:
        tokenizer = checkpoint.own_tokenizer()
        notes += [] if tokenizer is None else rows_note(tokenizer, checkpoint.config, checkpoint.name)
    except InputError as error:
        notes.append(f"no command reads text with it: {error}")
    notes += [f"left out, as no part of the language model: {listed(list(assignment.extra))}"] if assignment.extra else []
    files = tuple(File.of(file) for file in checkpoint.files().values() if file.is_relative_to(path))
    official = official_files({file.name: file.sha256 for file in files}, checkpoint.name)
    about = checkpoint.name, str(path), checkpoint.revision, checkpoint.config, dtype, checkpoint.container
    return Description(*about, tuple(notes), assignment.dropped, files, official, dict(found.counts))
