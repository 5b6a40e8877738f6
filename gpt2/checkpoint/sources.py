"""Find the local files of a model name: the embedded checkpoint, a path, or a Hub repository."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from gpt2.checkpoint.names import DEFAULT, OFFICIAL, PATHS, REPOSITORY, ModelName, did_you_mean
from gpt2.errors import CheckpointError, InputError


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
    if parsed.local:
        path = Path(__file__).parent.parent / "assets" / DEFAULT if name == DEFAULT else Path(name).expanduser()
        if not path.exists():
            raise CheckpointError(f"the embedded checkpoint {path} is missing: reinstall the package")
        return Source(name, path, None)
    if name.startswith(PATHS):
        path = Path(os.path.expanduser(name))
        neighbours = os.listdir(path.parent) if path.parent.is_dir() else []
        raise InputError(f"no such file or directory: {name}{did_you_mean(path.name, neighbours)}: check the path")
    repo = OFFICIAL.get(name, name)
    if not REPOSITORY.fullmatch(repo):
        hint = did_you_mean(repo, [DEFAULT, *OFFICIAL])
        known = ", ".join([DEFAULT, *OFFICIAL])
        raise InputError(f"unknown model {name!r}{hint}: use {known}, org/name[@revision], random:SIZE, or an existing path")
    revision = "main" if parsed.revision is None else parsed.revision
    if not re.fullmatch(r"\w[\w./-]*", revision, re.ASCII) or ".." in revision:
        raise InputError(f"{revision!r} cannot be a revision of {repo}: name a branch, a tag or a commit")
    from gpt2.checkpoint.hub import repository_files  # a local model loads without the code for the Hub

    folder = repository_files(repo, revision, offline)
    return Source(repo, folder, folder.name)
