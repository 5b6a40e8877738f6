"""What a checkpoint is, without running it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..config import GPT2Config, official_size
from .files import open_weights
from .hub import resolve
from .load import match, read_config
from .names import DEFAULT, parse_random, split_dtype
from .save import sha256

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class File:
    """A file of a checkpoint; ``size`` in bytes."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Description:
    """One checkpoint. ``dtype`` is what it would be loaded as; ``dropped`` are tensors without information of their own."""

    name: str
    path: str | None
    revision: str | None
    config: GPT2Config
    dtype: str
    dropped: tuple[str, ...]
    files: tuple[File, ...]

    @property
    def weights_bytes(self) -> int:
        return self.config.num_parameters() * BYTES[self.dtype]

    @property
    def cache_bytes(self) -> int:
        """Keys and values of one full context."""
        config = self.config
        return 2 * config.n_layer * config.n_positions * config.n_embd * BYTES[self.dtype]

    @property
    def training_bytes(self) -> int:
        """Weights, gradients and AdamW's two moments in float32; activations come on top."""
        return 16 * self.config.num_parameters()


def describe(name: str = DEFAULT, *, revision: str | None = None, offline: bool = False) -> Description:
    """Read a model's config, file headers and hashes; names as in :func:`gpt2.load`.

    Raises:
        InputError: no such model. CheckpointError: its tensors do not fit its config.
    """
    base, dtype = split_dtype(name)
    random = parse_random(base)
    if random is not None:
        return Description(base, None, None, official_size(random[0]), dtype or "float32", (), ())
    source = resolve(base, revision=revision, offline=offline)
    config, files = read_config(source.path), open_weights(source.path)
    assignment = match(files, config, source.path)
    stored = files[assignment.sources["wte.weight"]].entries[assignment.sources["wte.weight"]].dtype
    paths = sorted(path for path in source.path.iterdir() if path.is_file()) if source.path.is_dir() else [source.path]
    return Description(
        name=source.name,
        path=str(source.path),
        revision=source.revision,
        config=config,
        dtype=dtype or str(stored).removeprefix("torch."),
        dropped=assignment.dropped,
        files=tuple(_file(path) for path in paths),
    )


def _file(path: Path) -> File:
    return File(path.name, path.stat().st_size, sha256(path))
