"""Fetch files from the Hub with `huggingface_hub`: choose them, hash each one once, and make every failure one line."""

import contextlib
import errno
import functools
import hashlib
import io
import json
import logging
import os
import re
import traceback
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2.checkpoint.names import ADAPTED, ADAPTER, LAYOUTS, OFFICIAL, OLD_LAYOUTS
from gpt2.checkpoint.official import other_than_official
from gpt2.config import SMALL
from gpt2.data.client import check_environment, one_line
from gpt2.data.files import read_all, warn_once, write
from gpt2.errors import CheckpointError, InputError, did_you_mean

# Weights: only the first name that exists, with the files that match its pattern.
WEIGHTS = {
    name: pattern
    for single, index, suffix in LAYOUTS
    for name, pattern in ((single, ""), (index, rf"{single.removesuffix(suffix)}-\d+-of-\d+\{suffix}"))
}
WEIGHTS["model.ckpt.index"] = r"model\.ckpt\.data-\d+-of-\d+|checkpoint|hparams\.json|encoder\.json|vocab\.bpe"  # OpenAI's own
WEIGHTS |= dict.fromkeys(OLD_LAYOUTS, "")
# If none exists: ADAPTED, of a PEFT adapter, whose base is another repository.
# Else the only file that can be a whole model, such as a GGUF or nanoGPT's ckpt.pt.
ALONE = r"(?!adapter_)[\w.+-]+\.(gguf|safetensors|pth?|ckpt)"
OTHERS = r"[\w./+-]+\.(safetensors|bin|h5|msgpack|ot|onnx|pth?|ckpt|index|gguf)"  # to name what is there instead

COMMIT = re.compile(r"[0-9a-f]{40}")
HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # git's, or a sha256
GIT_LIMIT = 10 << 20  # bytes: git holds no larger file, only its pointer
WARM_PATIENCE = 3.0  # seconds for an answer if the cache can serve
SETTINGS = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "https_proxy", "http_proxy", "all_proxy", "SSL_CERT_FILE", "HF_ENDPOINT")
LOCAL = "run it again later, use --offline with a warm cache, or give a local directory"
OFFLINE = "offline, and the cache {} holds {}: run once online (no --offline, no HF_HUB_OFFLINE=1), or give a local directory"
FULL = (errno.ENOSPC, errno.EDQUOT)
BUSY = (408, 429, 500, 502, 503, 504)  # statuses of temporary failures
# Status of a refusal -> what to do; {hub} is the Hub's address, {owner} the repository's, {otherwise} the general advice.
REFUSALS = {
    401: "the token is not valid; correct HF_TOKEN, or run `hf auth login`",
    402: "see the plan at {hub}/settings/billing",
    403: "the token may not do this to a repository of {owner}; make one that may at {hub}/settings/tokens",
    **dict.fromkeys((409, 412), "the repository changed meanwhile; run it again"),
    413: "too large for the Hub; split the weights into shards, or ask the Hub for more room",
    **dict.fromkeys(BUSY, "{otherwise}"),
    429: "wait some minutes and run it again, or log in (`hf auth login` raises the limit)",
}

log = logging.getLogger("gpt2")


@dataclass(frozen=True)
class Snapshot:
    """A commit in the cache: its folder, and its files with the hash that is declared of each (sha256, git's, or "")."""

    folder: Path
    declared: dict[str, str]
    listed: bool  # the commit's listing is known; else these are the files that another program left there

    def lacking(self, repo: str, names: Collection[str] = ()) -> list[str]:
        """Return the files of a model that are not there; "the weights" where nothing says how they are called."""
        try:
            return [name for name in choose(repo, names or self.declared) if not (self.folder / name).is_file()]
        except CheckpointError:
            if names or self.listed:
                raise
            return ["the weights" if "config.json" in self.declared else "config.json"]


def repository_files(repo: str, revision: str, offline: bool) -> Path:
    """Return the folder of a repository's files at ``revision``, downloaded and verified; its name is the 40-hex commit."""
    with explained(repo, revision):
        from huggingface_hub import constants

        offline, found = offline or constants.is_offline_mode(), _cached(repo, revision)
        if not offline:
            found = _brought_up_to_date(repo, revision, found)
        if found is None or (lacking := found.lacking(repo)):
            what = f"no copy of {repo} at {revision}"
            if found and (there := sorted(file.name for file in found.folder.iterdir() if file.is_file())):
                what = f"only a part of {repo} at {revision} ({', '.join(there[:4])}), without {', '.join(lacking[:4])}"
            raise InputError(OFFLINE.format(constants.HF_HUB_CACHE, what))
        for name in choose(repo, found.declared):
            _require_hash(repo, found.folder / name, found.declared[name], mend=not offline)
        if others := other_than_official(repo, found.declared):
            what = f"has other files than the official ones: {', '.join(others)} (sha256 differs)"
            warn_once(f"{repo} at {found.folder.name[:12]} {what}")
    return found.folder


def _cached(repo: str, revision: str) -> Snapshot | None:
    """Return what the cache holds of a commit, or of the last known commit of a branch or tag. Makes no request."""
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=[], local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    if not COMMIT.fullmatch(folder.name):
        return None
    try:
        declared, listed = {file.path: file.blob_id for file in get_cached_repo_tree(repo, revision=folder.name)}, True
    except CachedRepoTreeNotFoundError:
        declared, listed = {}, False
    for file in [file for file in folder.iterdir() if file.is_symlink() or file.is_file()]:
        blob = Path(os.readlink(file)).name if file.is_symlink() else ""
        declared[file.name] = blob if HASH.fullmatch(blob) else declared.get(file.name, "")
        if not listed and file.name.endswith(".index.json"):  # it names shards; what it holds is checked when it is loaded
            with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
                declared = {str(name): "" for name in json.loads(read_all(file))["weight_map"].values()} | declared
    return Snapshot(folder, declared, listed)


def _brought_up_to_date(repo: str, revision: str, found: Snapshot | None) -> Snapshot | None:
    """Return the snapshot that the Hub has at ``revision``, downloaded; ``found`` if the Hub does not answer, and it is whole."""
    from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    whole = found if found and not found.lacking(repo) else None
    if whole and whole.listed and COMMIT.fullmatch(revision):
        return whole
    seconds = WARM_PATIENCE if whole and "HF_HUB_ETAG_TIMEOUT" not in os.environ else float(constants.HF_HUB_ETAG_TIMEOUT)
    try:
        info = HfApi().model_info(repo, revision=revision, timeout=seconds)
    except HTTPError as error:
        if not whole or (isinstance(error, HfHubHTTPError) and error.response.status_code not in BUSY):
            raise
        log.info("cannot reach the Hub (%s): using the cached %s", one_line(error), whole.folder)
        return whole
    if not COMMIT.fullmatch(info.sha or ""):
        raise InputError(f"{repo} at {constants.ENDPOINT} names no commit; check HF_ENDPOINT")
    files = choose(repo, names := [file.rfilename for file in info.siblings or ()])
    current = found if found and found.folder.name == info.sha else None
    if current and not current.lacking(repo, names) and (current.listed or not os.access(current.folder, os.W_OK)):
        return current
    for name in files:  # in this thread, which Ctrl-C ends: the threads of snapshot_download end when their files are there
        hf_hub_download(repo, name, revision=info.sha)
    from huggingface_hub.utils import tqdm

    target = info.sha if current else revision  # for a branch's name the cache then remembers where it points
    bar = type("Bar", (tqdm,), {"__init__": functools.partialmethod(tqdm.__init__, disable=None)})  # on a terminal alone
    return _cached(repo, Path(snapshot_download(repo, revision=target, allow_patterns=files, tqdm_class=bar)).name)


def choose(repo: str, names: Collection[str]) -> list[str]:
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
    others = sorted(name for name in names if re.fullmatch(OTHERS, name, re.ASCII))
    there = f"only {', '.join(others[:3])}{' and more' * (len(others) > 3)}" if others else "no weights to load"
    advice = "choose a revision that has it (refs/pr/N often does), or fetch the files yourself and give the directory"
    if alone:
        advice = f"fetch the right one of these {len(alone)} yourself, and give its path"
    raise CheckpointError(f"{repo} has no model.safetensors ({there}): {advice}")


@dataclass(frozen=True)
class DatasetFile:
    """A file of a Hub data set, pinned by its hash so that measurements on it stay comparable."""

    repo: str  # "org/name"
    commit: str  # 40 hex
    path: str
    sha256: str


def dataset_file(file: DatasetFile, *, offline: bool = False) -> Path:
    """Return the file in the local Hub cache, downloaded if missing. Raises InputError: unavailable. CheckpointError: damaged."""
    with explained(file.repo, file.commit):
        from huggingface_hub import constants, hf_hub_download

        offline = offline or constants.is_offline_mode()
        place: dict[str, Any] = {"repo_type": "dataset", "revision": file.commit, "local_files_only": offline}
        local = Path(hf_hub_download(file.repo, file.path, **place))
        _require_hash(file.repo, local, file.sha256, mend=not offline)
    return local


def _require_hash(repo: str, file: Path, expected: str, *, mend: bool) -> None:
    """Hash a file, once for each state of it, and remember a right one.

    Raises CheckpointError: it has another hash; with ``mend`` it is removed from the cache, so that the next run fetches it.
    """
    from huggingface_hub import constants

    if not expected:
        return log.warning("%s: the cache keeps no hash for it, so it is used unverified", file)
    record = Path(constants.HF_HOME, "gpt2-toolkit", "verified", expected)  # of the last file that was seen to have it
    with file.open("rb") as stream:
        stat = os.fstat(stream.fileno())
        stamp = f"{stat.st_size} {stat.st_mtime_ns} {file.resolve()}\n".encode(errors="surrogateescape")
        with contextlib.suppress(OSError):
            if record.read_bytes() == stamp:
                return None
        actual = hashes_of(stream)
    if expected not in actual:
        if mend:
            _discard(file)
        what = f"{file.name} hashes to {actual[len(expected) == 40]}, the Hub declares {expected}"
        advice = "the damaged file was removed, run it again to fetch it; if this happens again, a proxy changes it"
        advice = advice if mend else "run once online"
        raise CheckpointError(f"{repo}: {what}: {advice}")
    with contextlib.suppress(OSError):  # in a read-only home it is hashed again by the next load
        write(record.parent, {record.name: stamp})
    return None


def hashes_of(stream: io.BufferedReader | io.BytesIO) -> tuple[str, str, str]:
    """Return a file's sha256, and git's hashes by which the Hub lists it: of a small file, and of a large one's pointer."""
    sha256, size = hashlib.file_digest(stream, "sha256").hexdigest(), stream.tell()
    stream.seek(0)
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
    blobs = (stream.read() if size <= GIT_LIMIT else pointer, pointer)
    own, pointers = (hashlib.sha1(b"blob %d\0" % len(blob) + blob, usedforsecurity=False).hexdigest() for blob in blobs)
    return sha256, own, pointers


def _discard(file: Path) -> None:
    """Remove a snapshot's entry and its blob; never a file outside of the cache, even if the blob links to it."""
    from huggingface_hub import constants

    links, top = [file], Path(constants.HF_HUB_CACHE).resolve()
    while links[-1].is_symlink():
        links.append(links[-1].parent / os.readlink(links[-1]))
    for each in links:
        if each.parent.resolve().is_relative_to(top):
            each.unlink(missing_ok=True)


@contextlib.contextmanager
def explained(repo: str, revision: str = "", otherwise: str = LOCAL) -> Iterator[None]:
    """Convert every failure of the library, whatever its type, into an error of one line; ``otherwise`` is the general advice.

    An error that no frame of the library raised, nor the system, is a bug of ours, and stays one.
    """
    check_environment()
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:
        frames = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
        if not isinstance(error, OSError) and not any(name.startswith("huggingface_hub") for name in frames):
            raise
        wrapped = isinstance(error, errors.LocalEntryNotFoundError | RuntimeError) and error.__cause__  # the client's own words
        match cause := wrapped or error:
            case errors.HFValidationError():
                what = f"{repo} cannot be a repository on the Hub: {one_line(cause)}"
            case errors.RevisionNotFoundError():
                what = f"{repo} has no revision {revision!r}: name one of its branches, tags or commits"
            case errors.GatedRepoError():
                what = f"{repo} is gated: accept its terms at {hub}/{repo}, then run `hf auth login` or set HF_TOKEN"
            case errors.RepositoryNotFoundError():
                what = f"no repository {repo} at {hub}, and no such path here{did_you_mean(repo.lower(), OFFICIAL.values())}"
                what += ": check the spelling; a private one needs `hf auth login` or HF_TOKEN"
            case errors.LocalEntryNotFoundError():
                what = OFFLINE.format(constants.HF_HUB_CACHE, f"no copy of {repo} at {revision}")
            case errors.HfHubHTTPError():
                said, status = one_line(Exception(cause.server_message or "no reason given")), cause.response.status_code
                advice = REFUSALS.get(status, "check HF_ENDPOINT, or correct it and run it again")
                advice = advice.format(hub=hub, owner=repo.partition("/")[0], otherwise=otherwise)
                what = f"{hub} answers {status} for {repo} ({said}): {advice}"
            case OSError() if cause.errno is not None and (cause.filename is not None or cause.errno in FULL):
                where = f"cannot store or read {repo} in the cache {constants.HF_HUB_CACHE} ({one_line(cause)})"
                raise CheckpointError(f"{where}: check its disk and permissions, or set HF_HOME to another place") from error
            case _:
                check = ", ".join(name for name in SETTINGS if os.environ.get(name)) or "HF_ENDPOINT"
                what = f"{repo}: the connection to {hub} failed ({one_line(cause)}): check the network and {check}, {otherwise}"
        raise InputError(what) from error
