"""Find the local files of a model name: the embedded checkpoint, a path, or a Hub repository; and single files of data sets.

The README of this folder says what is downloaded and checked. `hub_api.py` sends requests, `download.py` fetches and resumes,
`cache.py` knows the folders and hashes; session, settings and cache layout are `huggingface_hub`'s.
"""

import logging
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpt2.checkpoint import cache
from gpt2.checkpoint.cache import COMMIT, HASH, Declared, digest, mismatch
from gpt2.checkpoint.download import fetch, sweep
from gpt2.checkpoint.hub_api import commit_of, explained, is_final, list_files, one_line, unreachable
from gpt2.checkpoint.names import DEFAULT, OFFICIAL, PATHS, REPOSITORY, ModelName, did_you_mean
from gpt2.checkpoint.official_files import other_than_official
from gpt2.data.files import TOKENIZER_FILES, warn_once
from gpt2.errors import CheckpointError, InputError

# Files to download beside the weights. Repositories also hold TensorFlow, Flax, Rust and ONNX copies.
SMALL = ("config.json", "generation_config.json", "chars.json", "words.json", "chat.json", *TOKENIZER_FILES)
# Weights: only the first name that exists, with the files that match its pattern.
WEIGHTS = {
    "model.safetensors": "",
    "model.safetensors.index.json": r"model-\d+-of-\d+\.safetensors",
    "pytorch_model.bin": "",
    "pytorch_model.bin.index.json": r"pytorch_model-\d+-of-\d+\.bin",
    "model.ckpt.index": r"model\.ckpt\.data-\d+-of-\d+|checkpoint|hparams\.json|encoder\.json|vocab\.bpe",  # OpenAI's own
    "flax_model.msgpack": "",
    "tf_model.h5": "",
}
# If none exists: a PEFT adapter, whose base is another repository.
ADAPTER, ADAPTED = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")
# Else the only file that can be a whole model, such as a GGUF or nanoGPT's ckpt.pt.
ALONE = r"(?!adapter_)[\w.+-]+\.(gguf|safetensors|pth?|ckpt)"
OFFLINE = "offline, and the cache {cache} holds {what}: run once online (no --offline, no HF_HUB_OFFLINE=1), or {way_out}"

log = logging.getLogger("gpt2")


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
    folder = repository_files(repo, revision, offline)
    return Source(repo, folder, folder.name)


def repository_files(repo: str, revision: str, offline: bool) -> Path:
    """Return the folder of a repository's files at ``revision``, downloaded and verified; its name is the 40-hex commit."""
    with explained(repo, revision):
        from huggingface_hub import constants
        from huggingface_hub.utils import validate_repo_id

        validate_repo_id(repo)
        folder, declared, online = _snapshot(repo, revision, offline or constants.is_offline_mode())
        files = _choose(repo, declared)
        _verify(repo, folder, files, declared, online)
        if others := other_than_official(repo, {name: declared[name].digest for name in files}):
            what = f"has other files than the official ones: {', '.join(others)} (sha256 differs)"
            warn_once(f"{repo} at {folder.name[:12]} {what}")
    return folder


def _snapshot(repo: str, revision: str, offline: bool) -> tuple[Path, dict[str, Declared], bool]:
    """Return the folder of the files, their declared hashes, and whether the Hub may be asked for a file again."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HTTPError

    cached = _complete(repo, revision)
    if offline:
        if cached is not None:
            return *cached, False
        part = cache.cached_snapshot(repo, revision)
        there = sorted(file.name for file in part.iterdir() if file.is_file()) if part else []
        what = f"no copy of {repo} at {revision}"
        if part and there:
            _, lacking = _lacking(repo, part)
            what = f"only a part of {repo} at {revision} ({', '.join(there[:4])}), without {', '.join(lacking[:4])}"
        raise InputError(OFFLINE.format(cache=constants.HF_HUB_CACHE, what=what, way_out="give a local directory"))
    try:
        commit = revision if COMMIT.fullmatch(revision) else commit_of(repo, revision, warm=cached is not None)
        folder = cache.snapshot(repo, commit)
        declared = cache.recorded_listing(folder) or list_files(repo, commit, warm=cached is not None)
    except HTTPError as error:
        if is_final(error):
            raise
        if cached is None:
            way_out = "run --offline with a warm cache, or give a local directory; HF_HUB_ETAG_TIMEOUT=30 waits longer"
            raise unreachable(repo, error, way_out) from error
        log.info("cannot reach %s (%s): using the cached %s", constants.ENDPOINT, one_line(error), cached[0])
        return *cached, False
    files = _choose(repo, declared)
    if not cache.recorded_listing(folder):
        cache.remember_listing(folder, {name: row for name, row in declared.items() if "/" not in name})
    missing = [name for name in files if not (folder / name).is_file()]
    sweep(folder, [declared[name] for name in missing])
    for name in missing:
        fetch(repo, folder / name, declared[name])
    cache.remember_ref(repo, revision, commit)
    return folder, declared, True


def _complete(repo: str, revision: str) -> tuple[Path, dict[str, Declared]] | None:
    """Return the cached snapshot and its declared hashes, or None if it or one of its files is missing. Makes no request."""
    if (folder := cache.cached_snapshot(repo, revision)) is None:
        return None
    declared, lacking = _lacking(repo, folder)
    return None if lacking else (folder, declared)


def _lacking(repo: str, folder: Path) -> tuple[dict[str, Declared], list[str]]:
    """Return the declared hashes, and the files that are not there, or "the weights" where nothing says how they are called."""
    declared = cache.recorded_listing(folder) or cache.declared_by_links(folder)
    try:
        return declared, [name for name in _choose(repo, declared) if not (folder / name).is_file()]
    except CheckpointError:  # another program downloaded only a part, such as the tokenizer
        return declared, ["the weights" if "config.json" in declared else "config.json"]


def _choose(repo: str, names: Collection[str]) -> list[str]:
    """Choose the files to download, weights last. Raises CheckpointError: the repository has nothing that can be loaded."""
    small = [name for name in SMALL if name in names]
    first = next((name for name in WEIGHTS if name in names), None)
    if first is not None:
        if "config.json" not in names and first != "model.ckpt.index":
            raise CheckpointError(f"{repo} has no config.json: it is not a GPT-2 checkpoint in the Hub's layout")
        return [*small, first, *sorted(name for name in names if re.fullmatch(WEIGHTS[first], name, re.ASCII))]
    if ADAPTER in names and (adapter := next((name for name in ADAPTED if name in names), None)):
        return [*small, ADAPTER, adapter]
    alone = sorted(name for name in names if re.fullmatch(ALONE, name, re.ASCII))
    if len(alone) == 1:
        return small + alone
    kinds = r"[\w./+-]+\.(safetensors|bin|h5|msgpack|ot|onnx|pth?|ckpt|index|gguf)"
    others = sorted(name for name in names if re.fullmatch(kinds, name, re.ASCII))
    there = f"only {', '.join(others[:3])}{' and more' * (len(others) > 3)}" if others else "no weights to load"
    advice = "choose a revision that has it (refs/pr/N often does), or fetch the files yourself and give the directory"
    if alone:
        advice = f"fetch the right one of these {len(alone)} yourself, and give its path"
    raise CheckpointError(f"{repo} has no model.safetensors ({there}): {advice}")


def _verify(repo: str, folder: Path, files: list[str], declared: Mapping[str, Declared], online: bool) -> None:
    """Hash the files that were not verified before. If ``online``, a damaged file is downloaded once more, then refused."""
    for name in files:
        file, expected = folder / name, declared[name].digest
        if not HASH.fullmatch(expected):
            log.warning("%s: the cache keeps no hash for it, so it is used unverified", file)
            continue
        actual = digest(file, expected)
        if actual == expected:
            continue
        if declared[name].lacks_sha256:
            log.warning("%s: %s declares no sha256 for it, so it is used unverified", file, repo)
            continue
        if not online:
            raise mismatch(repo, name, actual, expected, "run once online")
        log.info("%s: %s instead of %s, fetching it again", file, actual, expected)
        cache.discard(file)
        fetch(repo, file, declared[name], tries=1)


@dataclass(frozen=True)
class DatasetFile:
    """A file of a Hub data set, pinned by its hash so that measurements on it stay comparable."""

    repo: str  # "org/name"
    commit: str  # 40 hex
    path: str
    sha256: str
    size: int  # bytes


def dataset_file(file: DatasetFile, *, offline: bool = False) -> Path:
    """Return the file in the local Hub cache, downloaded if missing. Raises InputError: unavailable. CheckpointError: damaged."""
    with explained(file.repo, file.commit):
        from huggingface_hub import constants
        from huggingface_hub.errors import HTTPError

        local = cache.snapshot(file.repo, file.commit, "dataset") / file.path
        if local.is_file() and digest(local, file.sha256) == file.sha256:
            return local
        way_out = f"fetch {file.path} of the data set {file.repo} yourself, and put it at {local}"
        if offline or constants.is_offline_mode():
            what = f"{'a damaged' if local.is_file() else 'no'} copy of {file.path} of {file.repo}"
            raise InputError(OFFLINE.format(cache=constants.HF_HUB_CACHE, what=what, way_out=way_out))
        try:  # this request has a time limit, the download has none
            commit_of(file.repo, file.commit, "dataset")
        except HTTPError as error:
            if is_final(error):
                raise
            raise unreachable(file.repo, error, f"or {way_out}") from error
        cache.discard(local)
        fetch(file.repo, local, Declared(file.sha256, file.size))
        return local
