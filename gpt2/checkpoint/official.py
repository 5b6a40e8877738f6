"""Compare a checkpoint's files with the official ones, whose published hashes are in `official_files.toml`."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpt2.checkpoint.names import OFFICIAL

WEIGHTS = ("model.safetensors", "pytorch_model.bin", "tf_model.h5", "flax_model.msgpack")
_TABLE = tomllib.loads(Path(__file__).with_name("official_files.toml").read_text(encoding="utf-8"))  # which names its sources
OFFICIAL_FILES: Mapping[str, Mapping[str, str]] = {model: _TABLE["shared"] | own for model, own in _TABLE["files"].items()}
GIT_BLOBS: Mapping[str, str] = _TABLE["git_blobs"]  # sha256 of a small file -> its git blob hash, which the Hub lists instead


@dataclass(frozen=True)
class Official:
    """A comparison with the official files of ``model``; None if the model is unknown."""

    model: str | None
    weights: tuple[str, ...]  # official weight files
    same: tuple[str, ...]  # all official files
    different: tuple[str, ...]  # files with an official name and other content

    def __str__(self) -> str:
        differing = f"{', '.join(self.different)} differ{'s' * (len(self.different) == 1)} from {self.model}'s"
        if self.weights and not set(self.different) & set(WEIGHTS):
            return f"the official file of {self.model}" + (f"; {differing}" if self.different else "")
        if self.model is None:
            return "not an official file"
        return "not the official file" + (f": {differing}" if self.different else "")


def official_name(name: str) -> str | None:
    """Return ``"gpt2"`` for ``"gpt2"`` or ``"openai-community/gpt2"``, with or without ``@revision``; None for other names."""
    plain = name.partition("@")[0]
    return next((model for model, repository in OFFICIAL.items() if plain in (model, repository)), None)


def official_files(hashes: Mapping[str, str], name: str = "") -> Official:
    """Compare a checkpoint's files (name -> sha256) with the official ones of ``name``, else of the model that they match."""
    there, kinds = set(hashes.values()), (WEIGHTS, ("config.json",))  # under any name, weights before the config
    alike = (model for kind in kinds for model, known in OFFICIAL_FILES.items() if there & {known.get(file) for file in kind})
    model = official_name(name) or next(alike, None)
    known = OFFICIAL_FILES[model] if model else {}
    same = tuple(name for name, digest in hashes.items() if known.get(name) == digest)
    different = tuple(name for name, digest in hashes.items() if known.get(name, digest) != digest)
    weights = tuple(name for name, digest in hashes.items() if digest in [known.get(each) for each in WEIGHTS])
    return Official(model, weights, same, different)


def other_than_official(repository: str, declared: Mapping[str, str]) -> tuple[str, ...]:
    """Return the files of an official repository whose declared hashes differ. A large file with only a git hash is skipped."""
    known = OFFICIAL_FILES.get(official_name(repository) or "", {})
    official = {name: digest for name, digest in known.items() if len(declared.get(name, "")) == 64}
    official |= {name: GIT_BLOBS[digest] for name, digest in known.items() if digest in GIT_BLOBS and name not in official}
    return tuple(name for name, digest in declared.items() if digest and official.get(name, digest) != digest)
