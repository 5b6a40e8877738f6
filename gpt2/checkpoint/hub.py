"""A model's name -> the local directory that holds it: embedded, a path, or a repository on the Hub.

`huggingface_hub` does the transport: cache layout, redirects, tokens, proxies. What it does not do is added here, and in
`download.py`, because without it a load can be wrong, or hang, or begin again at the first of six gigabytes.

**Integrity.** The client accepts a flipped byte as long as the length is right, and safetensors has no checksum. The client
stores the hash that the Hub declares twice, as the listing of the commit (``trees/<commit>.json``) and as the name of the
blob that a snapshot's symlink points to. So every file is hashed on its first load without one more request; the listing
comes first since it also serves caches without symlinks (Windows, ``HF_HUB_DISABLE_SYMLINKS``).

**Economy.** One form of the weights is downloaded, safetensors before a pickle, and nothing else than a config and tokenizer
files; a broken download goes on from where it was.

**Patience.** The client tries a dead server for 23 seconds. One question under a wall-clock limit goes first; its answer
(commit, file names) also tells a repository without usable weights before anything is downloaded.

**Contact.** Offline, or with a complete snapshot of a pinned commit, no request is made at all. With a warm cache and a
branch's name it is one: where does the branch point?
"""

import contextlib
import difflib
import json
import logging
import os
import queue
import re
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from gpt2.checkpoint.download import COMMIT, HASH, Declared, digest, discard, fetch, mismatch, one_line
from gpt2.checkpoint.names import DEFAULT, OFFICIAL
from gpt2.errors import CheckpointError, InputError

# What is downloaded beside the weights. Repositories also hold TensorFlow, Flax, Rust and ONNX copies of everything.
SMALL = (
    "config.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
# The weights: the first of these that is there, with what belongs to it, and none of the others.
WEIGHTS = {
    "model.safetensors": "",
    "model.safetensors.index.json": r"model-\d+-of-\d+\.safetensors",
    "pytorch_model.bin": "",
    "pytorch_model.bin.index.json": r"pytorch_model-\d+-of-\d+\.bin",
    "model.ckpt.index": r"model\.ckpt\.data-\d+-of-\d+|checkpoint|hparams\.json|encoder\.json|vocab\.bpe",  # OpenAI's own
}
# Without any of those: an adapter of PEFT's, whose base is another repository.
ADAPTER, ADAPTED = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")
# Without that too: the one file there that could be a whole model, such as a GGUF or nanoGPT's ckpt.pt.
ALONE = r"(?!adapter_)[\w.+-]+\.(gguf|safetensors|pth?|ckpt)"
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
        raise InputError(f"unknown model {name!r}{hint}: use {known}, org/name[@revision], random:SIZE, or an existing path")
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
    with explained(repo, revision):
        from huggingface_hub import constants

        folder, online = _snapshot(repo, revision, offline or constants.is_offline_mode())
        declared = _declared(folder)
        files = _choose(repo, declared or os.listdir(folder))
        _verify(repo, folder, files, declared, online)
    return Source(repo, folder, folder.name)


@contextlib.contextmanager
def explained(repo: str, revision: str) -> Iterator[None]:
    """Whatever goes wrong with the Hub inside, as an InputError or CheckpointError of one line."""
    try:  # a malformed URL would make the client's own import fail
        urlsplit(os.environ.get("HF_ENDPOINT", "")).port  # noqa: B018
    except ValueError as error:
        raise InputError(f"HF_ENDPOINT={os.environ['HF_ENDPOINT']} is not a URL: set or unset it ({error})") from error
    from huggingface_hub.errors import HFValidationError, HTTPError

    try:
        yield
    except InputError:
        raise
    except (HTTPError, HFValidationError, OSError) as error:
        raise _explain(repo, revision, error) from error


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
        info = ask(repo, revision)
    except HTTPError as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code < 500 and error.response.status_code != 429:
            raise  # a firm answer: no such repository, no such revision, no access
        if (folder := _cached(repo, revision)) is None:
            raise InputError(
                f"cannot reach the Hub at {constants.ENDPOINT} for {repo} ({one_line(error)}) and the cache holds no "
                "complete copy: check the network or HF_ENDPOINT, run --offline with a warm cache, or give a local "
                "directory; HF_HUB_ETAG_TIMEOUT=30 waits longer"
            ) from error
        log.info("cannot reach %s (%s): using the cached %s", constants.ENDPOINT, one_line(error), folder)
        return folder, False
    if info.siblings:
        _choose(repo, {sibling.rfilename for sibling in info.siblings})
    # Without its listing a snapshot may be a part (one file fetched by another program): it is then filled up.
    if (folder := _cached(repo, revision)) is not None and folder.name == info.sha and _declared(folder):
        return folder, True
    small = [name for name in SMALL if name in {sibling.rfilename for sibling in info.siblings or ()}]
    folder = Path(snapshot_download(repo, revision=revision, allow_patterns=small or [".gitattributes"]))
    declared = _declared(folder)
    if not declared:
        raise OSError(f"the client could not keep the listing of {folder.name}")
    for name in _choose(repo, declared):
        if not (folder / name).exists():
            fetch(repo, folder / name, declared[name])
    return folder, True


def _cached(repo: str, revision: str) -> Path | None:
    """The cached snapshot, or None where there is none or its listing shows that files are missing. No request."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=list(SMALL), local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    declared = _declared(folder)
    return folder if not declared or all((folder / name).exists() for name in _choose(repo, declared)) else None


def ask(repo: str, revision: str, kind: Literal["model", "dataset"] = "model"):
    """The Hub's ``ModelInfo`` or ``DatasetInfo``, in one request and limited time.

    In a thread, since a socket's timeout starts anew for every address a name resolves to and does not cover the name's
    lookup; through the client, so that its proxies, certificates and token hold.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError, HTTPError

    seconds = constants.HF_HUB_ETAG_TIMEOUT if "HF_HUB_ETAG_TIMEOUT" in os.environ else PATIENCE
    answers: queue.SimpleQueue = queue.SimpleQueue()

    def request() -> None:
        try:
            answers.put(HfApi().repo_info(repo, revision=revision, repo_type=kind, timeout=seconds))
        except Exception as error:
            answers.put(error)

    threading.Thread(target=request, daemon=True).start()
    try:
        answer = answers.get(timeout=seconds + 0.5)
    except queue.Empty:
        raise HTTPError(f"no answer in {seconds:g} s") from None
    if isinstance(answer, (HTTPError, HFValidationError, OSError)):
        raise answer
    if isinstance(answer, Exception):  # no URL, no JSON, or JSON about something else
        raise InputError(f"{constants.ENDPOINT} does not answer as a Hub does: check HF_ENDPOINT") from answer
    return answer


def _choose(repo: str, names: Collection[str]) -> list[str]:
    """The files to download of all that a repository holds, the weights last: one form of them, safetensors before a pickle.

    Raises CheckpointError for a repository that cannot be loaded, before its gigabytes are fetched.
    """
    small = [name for name in SMALL if name in names]
    first = next((name for name in WEIGHTS if name in names), None)
    if first is not None:
        if "config.json" not in names and first != "model.ckpt.index":
            raise CheckpointError(f"{repo} has no config.json: it is not a GPT-2 checkpoint in the Hub's layout")
        return [*small, first, *sorted(name for name in names if re.fullmatch(WEIGHTS[first], name, re.ASCII))]
    adapter = next((name for name in ADAPTED if name in names), None)
    if adapter is not None and ADAPTER in names:
        return [*small, ADAPTER, adapter]
    alone = sorted(name for name in names if re.fullmatch(ALONE, name, re.ASCII))
    if len(alone) == 1:
        return small + alone
    kinds = r"[\w./+-]+\.(safetensors|bin|h5|msgpack|ot|onnx|pth?|ckpt|index|gguf)"
    others = sorted(name for name in names if re.fullmatch(kinds, name, re.ASCII))
    found = f"only {', '.join(others[:3])}{' and more' * (len(others) > 3)}" if others else "no weights to load"
    advice = "choose a revision that has it (refs/pr/N often does), or fetch the files yourself and give the directory"
    if alone:
        advice = f"fetch the right one of these {len(alone)} yourself, and give its path"
    raise CheckpointError(f"{repo} has no model.safetensors ({found}): {advice}")


def _declared(folder: Path) -> dict[str, Declared]:
    """What the Hub declared about each file, from the client's record of the commit's listing; empty if there is none."""
    listing = folder.parent.parent / "trees" / f"{folder.name}.json"
    try:
        files = json.loads(listing.read_text(encoding="utf-8"))["files"]
        return {name: Declared(row.get("lfs_sha256") or row["blob_id"], row["size"]) for name, row in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _verify(repo: str, folder: Path, files: list[str], declared: Mapping[str, Declared], online: bool) -> None:
    """Hash what was not hashed before. A damaged file is fetched once more if ``online``, then refused."""
    for file in (folder / name for name in files):
        blob = Path(os.readlink(file)).name if file.is_symlink() else ""
        expected = declared[file.name].digest if file.name in declared else blob
        if not HASH.fullmatch(expected):
            log.warning("%s: the cache keeps no hash for it, so it is used unverified", file)
            continue
        actual = digest(file, expected)
        if actual == expected:
            continue
        if not online:
            raise mismatch(repo, file.name, actual, expected, "run once online")
        log.info("%s: %s instead of %s, fetching it again", file, actual, expected)
        size = declared[file.name].size if file.name in declared else file.stat().st_size
        discard(file)
        fetch(repo, file, Declared(expected, size), tries=1)


def _explain(repo: str, revision: str, error: Exception) -> InputError:
    """The client's exception as one line that says what to do."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.HFValidationError):
        return InputError(f"{repo} cannot be a repository on the Hub: {one_line(error)}")
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
        cause = one_line(error.__cause__ or error)
        return InputError(f"the download of {repo} broke off ({cause}): run it again, it goes on from where it was")
    return CheckpointError(
        f"cannot store or read {repo} in the cache {constants.HF_HUB_CACHE} ({one_line(error)}): "
        "check its disk and permissions, or set HF_HOME to another place"
    )
