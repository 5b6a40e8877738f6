"""A model's name -> the local directory that holds it: embedded, a path, or a repository on the Hub.

`huggingface_hub` does the transport: cache layout, redirects, tokens, proxies, resuming. Three things it does not do are
added here, because without them a load can be wrong, or hang, and nobody is told.

**Integrity.** The client accepts a flipped byte as long as the length is right, and safetensors has no checksum. The Hub
declares a hash for every file: sha256 for a large one, git's blob hash (sha1 over ``blob <size>\\0`` + data) for a small
one. The client stores that declaration twice, as the listing of the commit (``trees/<commit>.json``) and as the name of
the blob that a snapshot's symlink points to. So every file is hashed on its first load without one more request; the
listing comes first since it also serves caches without symlinks (Windows, ``HF_HUB_DISABLE_SYMLINKS``). What was verified
is remembered in ``HF_HOME/gpt2-toolkit/verified/<hash>`` by size, mtime and real path, so a warm load reads no weights.
Damage that keeps all three is not seen again; delete that folder to have everything rehashed.

**Patience.** The client tries a dead server for 23 seconds. One question under a wall-clock limit goes first; its answer
(commit, file names) also tells a repository without usable weights before anything is downloaded.

**Contact.** Offline, or with a complete snapshot of a pinned commit, no request is made at all.
"""

import contextlib
import difflib
import hashlib
import json
import logging
import os
import queue
import re
import tempfile
import threading
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import urlsplit

from gpt2.checkpoint.names import DEFAULT, OFFICIAL
from gpt2.errors import CheckpointError, InputError

# All that is ever downloaded: repositories also hold .bin, TensorFlow, Flax, Rust and ONNX copies of the same weights.
FILES = [
    "config.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
]
COMMIT = re.compile(r"[0-9a-f]{40}")
PATIENCE = 3.0  # seconds for the first answer; HF_HUB_ETAG_TIMEOUT, the client's own variable, overrides it

log = logging.getLogger("gpt2")


@dataclass(frozen=True)
class Source:
    """Where a checkpoint lies, once its name is resolved."""

    name: str  # what was resolved: "openai-community/gpt2", "shakespeare-mini", or the path as written
    path: Path  # local directory (or single file) holding the checkpoint
    revision: str | None  # the 40-hex commit for a Hub repository, else None


def resolve(name: str, *, revision: str | None = None, offline: bool = False) -> Source:
    """The local files behind a model name, downloaded and verified where they come from the Hub.

    An official short name means the official repository even where a folder of that name exists (this project's own root
    has a ``gpt2/``): write ``./gpt2`` for the folder. Any other existing path comes before a repository ``org/name``.
    Raises InputError, or CheckpointError when the files are not what the Hub declared.
    """
    repo, at, pinned = name.partition("@")
    if name == DEFAULT or (repo not in OFFICIAL and os.path.exists(os.path.expanduser(name))):
        if revision is not None:
            raise InputError(f"{name} has no revisions, it lies on this machine: leave out revision {revision!r}")
        path = Path(__file__).parent.parent / "assets" / DEFAULT if name == DEFAULT else Path(name).expanduser()
        if not path.exists():
            raise CheckpointError(f"the embedded checkpoint {path} is missing: reinstall the package")
        return Source(name, path, None)
    if name.startswith((".", "/", "~")):
        path = Path(os.path.expanduser(name))
        neighbours = os.listdir(path.parent) if path.parent.is_dir() else []
        raise InputError(f"no such file or directory: {name}{_did_you_mean(path.name, neighbours)}: check the path")
    repo = OFFICIAL.get(repo, repo)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", repo, re.ASCII):
        hint = _did_you_mean(repo, [DEFAULT, *OFFICIAL])
        known = ", ".join([DEFAULT, *OFFICIAL])
        raise InputError(f"unknown model {name!r}{hint}: use {known}, org/name[@revision], or an existing path")
    if at and revision is not None and pinned != revision:
        raise InputError(f"{name} and revision {revision!r} disagree: give the revision once")
    revision = pinned if at else revision or "main"
    if not re.fullmatch(r"\w[\w./-]*", revision, re.ASCII) or ".." in revision:
        raise InputError(f"{revision!r} cannot be a revision of {repo}: name a branch, a tag or a commit")
    return _from_hub(repo, revision, offline)


def _did_you_mean(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name.lower(), known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _from_hub(repo: str, revision: str, offline: bool) -> Source:
    try:  # a malformed URL would make the client's own import fail
        urlsplit(os.environ.get("HF_ENDPOINT", "")).port  # noqa: B018
    except ValueError as error:
        raise InputError(f"HF_ENDPOINT={os.environ['HF_ENDPOINT']} is not a URL: set or unset it ({error})") from error
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError, HTTPError

    try:
        folder, online = _snapshot(repo, revision, offline or constants.is_offline_mode())
        declared = _declared(folder)
        _require_parts(repo, declared or os.listdir(folder))
        _verify(repo, folder, declared, online)
    except InputError:
        raise
    except (HTTPError, HFValidationError, OSError) as error:
        raise _explain(repo, revision, error) from error
    return Source(repo, folder, folder.name)


def _snapshot(repo: str, revision: str, offline: bool) -> tuple[Path, bool]:
    """The snapshot's folder, and whether the Hub may be asked for one of its files again."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    if offline:
        if (folder := _cached(repo, revision)) is None:
            raise InputError(
                f"offline, and the cache {constants.HF_HUB_CACHE} holds no complete copy of {repo} at {revision}: "
                "run once online (no --offline, no HF_HUB_OFFLINE=1) or give a local directory"
            )
        return folder, False
    if COMMIT.fullmatch(revision) and (folder := _cached(repo, revision)) is not None and _declared(folder):
        return folder, True
    try:
        info = _ask(repo, revision)
    except HTTPError as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code < 500 and error.response.status_code != 429:
            raise  # a firm answer: no such repository, no such revision, no access
        if (folder := _cached(repo, revision)) is None:
            raise InputError(
                f"cannot reach the Hub at {constants.ENDPOINT} for {repo} ({_one_line(error)}) and the cache holds no "
                "complete copy: check the network or HF_ENDPOINT, run --offline with a warm cache, or give a local "
                "directory; HF_HUB_ETAG_TIMEOUT=30 waits longer"
            ) from error
        log.info("cannot reach %s (%s): using the cached %s", constants.ENDPOINT, _one_line(error), folder)
        return folder, False
    if info.siblings:
        _require_parts(repo, {sibling.rfilename for sibling in info.siblings})
    # Without its listing a snapshot may be a part (one file fetched by another program): the client then fills it up.
    if (folder := _cached(repo, revision)) is not None and folder.name == info.sha and _declared(folder):
        return folder, True
    return Path(snapshot_download(repo, revision=revision, allow_patterns=FILES)), True


def _cached(repo: str, revision: str) -> Path | None:
    """The cached snapshot, or None where there is none or its listing shows that files are missing. No request."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def _ask(repo: str, revision: str):
    """The Hub's ``ModelInfo``, in one request and limited time.

    In a thread, since a socket's timeout starts anew for every address a name resolves to and does not cover the name's
    lookup; through the client, so that its proxies, certificates and token hold.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError, HTTPError

    seconds = constants.HF_HUB_ETAG_TIMEOUT if "HF_HUB_ETAG_TIMEOUT" in os.environ else PATIENCE
    answers: queue.SimpleQueue = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(HfApi().model_info(repo, revision=revision, timeout=seconds))
        except Exception as error:
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=seconds + 0.5)
    except queue.Empty:
        raise HTTPError(f"no answer in {seconds:g} s") from None
    if isinstance(answer, (HTTPError, HFValidationError, OSError)):
        raise answer
    if isinstance(answer, Exception):  # no URL, no JSON, or JSON about something else
        raise InputError(f"{constants.ENDPOINT} does not answer as a Hub does: check HF_ENDPOINT") from answer
    return answer


def _require_parts(repo: str, names: Collection[str]) -> None:
    """Refuse a repository that cannot be loaded, before its gigabytes are fetched."""
    if "config.json" not in names:
        raise CheckpointError(f"{repo} has no config.json: it is not a GPT-2 checkpoint in the Hub's layout")
    if not any(name in names for name in ("model.safetensors", "model.safetensors.index.json")):
        pickles = sorted(name for name in names if name.endswith(".bin"))
        found = f"only {pickles[0]}, a pickle, which is not downloaded" if pickles else "no weights to load"
        raise CheckpointError(
            f"{repo} has no model.safetensors ({found}): choose a revision that has it (refs/pr/N often does), "
            "or fetch the files yourself and give the directory"
        )


def _declared(folder: Path) -> dict[str, str]:
    """File name -> declared hash, from the client's record of the commit's listing; empty if there is none."""
    listing = folder.parent.parent / "trees" / f"{folder.name}.json"
    try:
        files = json.loads(listing.read_text(encoding="utf-8"))["files"]
        return {name: row.get("lfs_sha256") or row["blob_id"] for name, row in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _verify(repo: str, folder: Path, declared: dict[str, str], online: bool) -> None:
    """Hash what was not hashed before. A damaged file is fetched once more if ``online``, then refused."""
    for file in sorted(folder.iterdir()):
        if not any(fnmatchcase(file.name, pattern) for pattern in FILES):
            continue
        expected = declared.get(file.name) or (Path(os.readlink(file)).name if file.is_symlink() else "")
        if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", expected):
            log.warning("%s: the cache keeps no hash for it, so it is used unverified", file)
            continue
        actual = _digest(file, expected)
        if actual != expected and online:
            log.info("%s: %s instead of %s, fetching it again", file, actual, expected)
            _fetch_again(repo, file)
            actual = _digest(file, expected)
            if actual != expected:
                _discard(file)
        if actual != expected:
            advice = "a proxy or mirror alters it; try another network or HF_ENDPOINT" if online else "run once online"
            raise CheckpointError(f"{repo}: {file.name} hashes to {actual}, the Hub declares {expected}: {advice}")


def _digest(file: Path, expected: str) -> str:
    """The file's hash, of the kind of ``expected``; remembered when it agrees, and then not computed again."""
    from huggingface_hub import constants

    record = Path(constants.HF_HOME, "gpt2-toolkit", "verified", expected)
    with file.open("rb") as stream:
        stat = os.fstat(stream.fileno())
        stamp = f"{stat.st_size} {stat.st_mtime_ns} {file.resolve()}"
        try:
            stamps = record.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            stamps = []
        if stamp in stamps:
            return expected
        git_blob = hashlib.sha1(b"blob %d\0" % stat.st_size, usedforsecurity=False)
        digest = git_blob if len(expected) == 40 else hashlib.sha256()
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() == expected:
        with contextlib.suppress(OSError):  # a read-only HF_HOME costs a rehash each time, nothing more
            record.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=record.parent, delete=False) as new:
                new.write("\n".join([*stamps, stamp]) + "\n")
            os.replace(new.name, record)
    return digest.hexdigest()


def _discard(file: Path) -> None:
    """Remove a snapshot's entry and the blob it points to, not what a user may have put behind the blob."""
    if file.is_symlink():
        (file.parent / os.readlink(file)).unlink(missing_ok=True)
    file.unlink(missing_ok=True)


def _fetch_again(repo: str, file: Path) -> None:
    from huggingface_hub import hf_hub_download

    _discard(file)
    try:  # force_download, or the client would link the same damaged bytes back from its shared store
        hf_hub_download(repo, file.name, revision=file.parent.name, force_download=True)
    except ValueError as error:  # how the client wraps a network error under force_download
        raise error.__cause__ if isinstance(error.__cause__, OSError) else OSError(_one_line(error)) from error


def _explain(repo: str, revision: str, error: Exception) -> InputError:
    """The client's exception as one line that says what to do."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.HFValidationError):
        return InputError(f"{repo} cannot be a repository on the Hub: {_one_line(error)}")
    if isinstance(error, errors.RevisionNotFoundError):
        return InputError(f"{repo} has no revision {revision!r}: name one of its branches, tags or commits")
    if isinstance(error, errors.GatedRepoError):
        page = f"{constants.ENDPOINT}/{repo}"
        return InputError(f"{repo} is gated: accept its terms at {page}, then run `hf auth login` or set HF_TOKEN")
    if isinstance(error, errors.RepositoryNotFoundError):
        hint = _did_you_mean(repo, OFFICIAL.values())
        return InputError(
            f"no repository {repo} at {constants.ENDPOINT}, and no such path here{hint}: check the spelling; "
            "a private one needs `hf auth login` or HF_TOKEN"
        )
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        return InputError(f"{constants.ENDPOINT} answers {status} for {repo}: check HF_TOKEN and HF_ENDPOINT, or retry")
    if isinstance(error, (errors.HTTPError, errors.LocalEntryNotFoundError)):
        cause = _one_line(error.__cause__ or error)
        return InputError(f"the download of {repo} broke off ({cause}): run it again, complete files are kept")
    return CheckpointError(
        f"cannot store or read {repo} in the cache {constants.HF_HUB_CACHE} ({_one_line(error)}): "
        "check its disk and permissions, or set HF_HOME to another place"
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
