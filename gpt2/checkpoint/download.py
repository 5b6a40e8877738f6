"""Fetch the files of a Hub repository into `huggingface_hub`'s cache: choose, download or resume, and have each one checked.

`huggingface_hub` (2.4) restarts a broken download. Here the partial blob has one name for all tries, and the next try asks for
the rest by ``Range``. No header of a response is used as a name.
"""

import contextlib
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gpt2.checkpoint import cache, hub
from gpt2.checkpoint.cache import COMMIT, HASH, Declared, digest, digest_of, mismatch
from gpt2.checkpoint.xet import over_xet
from gpt2.data.files import SMALL, warn_once, written_aside
from gpt2.errors import CheckpointError, InputError

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
OTHERS = r"[\w./+-]+\.(safetensors|bin|h5|msgpack|ot|onnx|pth?|ckpt|index|gguf)"  # to name what is there instead
OFFLINE = "offline, and the cache {cache} holds {what}: run once online (no --offline, no HF_HUB_OFFLINE=1), or {way_out}"

PAUSES = (0.5, 1.0, 1.5)  # seconds between retries without progress
STALL_SECONDS = 25.0  # give up after so many seconds with less than `MIN_PROGRESS` received, over all tries
MIN_PROGRESS = 1 << 12  # bytes
ABANDONED = 24 * 3600  # seconds since the last write: then a partial download counts as abandoned

log = logging.getLogger("gpt2")
Listing = tuple[Path, dict[str, Declared]]  # folder of a commit's files, and what the Hub declares of each


def repository_files(repo: str, revision: str, offline: bool) -> Path:
    """Return the folder of a repository's files at ``revision``, downloaded and verified; its name is the 40-hex commit."""
    with hub.explained(repo, revision):
        from huggingface_hub import constants
        from huggingface_hub.utils import validate_repo_id

        validate_repo_id(repo)
        online = not (offline or constants.is_offline_mode())
        part, known, lacking = _cached(repo, revision)
        found = cached = (part, known) if part and not lacking else None
        if online:
            found = _listed(repo, revision, cached)
            online = found is not cached
        if found is None:
            what = f"no copy of {repo} at {revision}"
            if part and (there := sorted(file.name for file in part.iterdir() if file.is_file())):
                what = f"only a part of {repo} at {revision} ({', '.join(there[:4])}), without {', '.join(lacking[:4])}"
            raise InputError(OFFLINE.format(cache=constants.HF_HUB_CACHE, what=what, way_out="give a local directory"))
        folder, declared = found
        files = choose(repo, declared)
        if online:
            cache.remember_listing(folder, declared)
            sweep(folder, [declared[name] for name in files if not (folder / name).is_file()])
        for name in files:
            _make_whole(repo, folder, name, declared[name], online)
        if online:
            cache.remember_ref(repo, revision, folder.name)
        if others := cache.other_than_official(repo, {name: declared[name].digest for name in files}):
            what = f"has other files than the official ones: {', '.join(others)} (sha256 differs)"
            warn_once(f"{repo} at {folder.name[:12]} {what}")
    return folder


def _cached(repo: str, revision: str) -> tuple[Path | None, dict[str, Declared], list[str]]:
    """Return the cached snapshot's folder or None, what is declared of its files, and those that are not there.

    Makes no request. Where nothing says how they are called, "the weights" are not there.
    """
    if (folder := cache.cached_snapshot(repo, revision)) is None:
        return None, {}, []
    declared = cache.recorded_listing(folder) or cache.declared_by_links(folder)
    try:
        return folder, declared, [name for name in choose(repo, declared) if not (folder / name).is_file()]
    except CheckpointError:  # another program downloaded only a part, such as the tokenizer
        return folder, declared, ["the weights" if "config.json" in declared else "config.json"]


def _listed(repo: str, revision: str, cached: Listing | None) -> Listing:
    """Return the snapshot that the Hub has at ``revision``, downloaded or not; ``cached`` if the Hub does not answer."""
    from huggingface_hub.errors import HTTPError

    warm = cached is not None
    try:
        commit = revision if COMMIT.fullmatch(revision) else hub.commit_of(repo, revision, warm=warm)
        folder = cache.snapshot(repo, commit)
        return folder, cache.recorded_listing(folder) or hub.list_files(repo, commit, warm=warm)
    except HTTPError as error:
        if hub.is_final(error):
            raise
        if cached is None:
            way_out = "run --offline with a warm cache, or give a local directory; HF_HUB_ETAG_TIMEOUT=30 waits longer"
            raise hub.unreachable(repo, error, way_out) from error
        log.info("cannot reach the Hub (%s): using the cached %s", hub.one_line(error), cached[0])
        return cached


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


def _make_whole(repo: str, folder: Path, name: str, declared: Declared, online: bool) -> None:
    """Fetch a missing file; hash one that was not verified before, and if ``online`` fetch a damaged one again, once."""
    file = folder / name
    if online and not file.is_file():
        fetch(repo, folder, name, declared)
    if not HASH.fullmatch(declared.digest):
        return log.warning("%s: the cache keeps no hash for it, so it is used unverified", file)
    actual = digest(file, declared.digest)
    if actual == declared.digest:
        return None
    if declared.lacks_sha256:
        return log.warning("%s: %s declares no sha256 for it, so it is used unverified", file, repo)
    if not online:
        raise mismatch(repo, name, actual, declared.digest, "run once online")
    log.info("%s: %s instead of %s, fetching it again", file, actual, declared.digest)
    cache.discard(folder, name)
    return fetch(repo, folder, name, declared, tries=1)


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
    with hub.explained(file.repo, file.commit):
        from huggingface_hub import constants
        from huggingface_hub.errors import HTTPError

        folder = cache.snapshot(file.repo, file.commit, "dataset")
        local = folder / file.path
        if local.is_file() and digest(local, file.sha256) == file.sha256:
            return local
        way_out = f"fetch {file.path} of the data set {file.repo} yourself, and put it at {local}"
        if offline or constants.is_offline_mode():
            what = f"{'a damaged' if local.is_file() else 'no'} copy of {file.path} of {file.repo}"
            raise InputError(OFFLINE.format(cache=constants.HF_HUB_CACHE, what=what, way_out=way_out))
        try:  # this request has a time limit, the download has none
            hub.commit_of(file.repo, file.commit, "dataset")
        except HTTPError as error:
            if hub.is_final(error):
                raise
            raise hub.unreachable(file.repo, error, f"or {way_out}") from error
        _make_whole(file.repo, folder, file.path, Declared(file.sha256, file.size), online=True)
        return local


def fetch(repo: str, folder: Path, name: str, declared: Declared, *, tries: int = 2) -> None:
    """Download a file into a commit's ``folder``, in `huggingface_hub`'s layout.

    A second process waits for the first. Without working locks (some network file systems) both write the same bytes, and the
    hash decides. Raises CheckpointError: ``tries`` files with a wrong hash. HTTPError: no answer, or a refusal. OSError.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import are_symlinks_supported, is_xet_available
    from huggingface_hub.utils import WeakFileLock

    if not HASH.fullmatch(declared.digest):
        raise InputError(f"{constants.ENDPOINT} declares no hash for {name} of {repo}: check HF_ENDPOINT")
    top, storage, file = Path(constants.HF_HUB_CACHE), folder.parents[1], folder / name
    blob = storage / "blobs" / declared.digest
    part, lock = _part(blob), top / ".locks" / storage.name / f"{blob.name}.lock"
    for place, path in ((storage, file), (storage, blob), (top, lock)):
        cache.make_folder(place, path.parent)
    links = are_symlinks_supported(constants.HF_HUB_CACHE)
    with WeakFileLock(lock):
        if not blob.is_file() and not file.is_file():
            kept = blob if links else file
            try:
                by_xet = declared.xet and len(declared.digest) == 64 and not os.path.lexists(part) and is_xet_available()
                if not by_xet or not over_xet(repo, file, folder.name, part, declared):
                    _complete_part(repo, folder, name, part, declared, tries)
                os.replace(part, kept)
                if not declared.lacks_sha256:
                    cache.remember(kept, declared.digest, kept.stat())
            except FileNotFoundError:
                if not kept.exists():
                    raise  # else the lock did not work, and the other process finished first
        part.unlink(missing_ok=True)  # another program finished first
        if not file.is_file():
            file.unlink(missing_ok=True)  # a dangling symlink
            if links:
                with contextlib.suppress(FileExistsError):  # as above
                    file.symlink_to(os.path.relpath(blob, file.parent))
            else:
                with written_aside(file) as copy, blob.open("rb") as whole:
                    shutil.copyfileobj(whole, copy)


def sweep(snapshot: Path, wanted: Iterable[Declared]) -> None:
    """Remove abandoned partial downloads, also `huggingface_hub`'s, unless the ``wanted`` files can resume from them."""
    blobs = snapshot.parents[1] / "blobs"
    keep = {_part(blobs / declared.digest) for declared in wanted}
    for left in [] if blobs.is_symlink() else blobs.glob("*.incomplete"):
        with contextlib.suppress(OSError):
            age = time.time() - left.lstat().st_mtime
            if left not in keep and age > ABANDONED and HASH.fullmatch(left.name.partition(".")[0]):
                left.unlink()


def _part(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.gpt2-toolkit.incomplete")


def _complete_part(repo: str, folder: Path, name: str, part: Path, declared: Declared, tries: int) -> None:
    """Fill ``part`` until its hash is the declared one. A complete file with another hash is deleted and downloaded again."""
    from huggingface_hub import hf_hub_url

    url = hf_hub_url(repo, name, revision=folder.name, repo_type=folder.parents[1].name.partition("s--")[0])
    actual = ""
    for number in range(tries):
        if number:
            log.info("%s: %s instead of %s, fetching it again", name, actual, declared.digest)
        with _open_part(part) as out:
            _download(url, out, declared.size)
            actual = digest_of(out, declared.digest, folder / name)
            os.fsync(out.fileno())
        if actual == declared.digest or declared.lacks_sha256:
            return
        part.unlink()
    raise mismatch(repo, name, actual, declared.digest, "a proxy or mirror alters it; try another network or HF_ENDPOINT")


def _open_part(part: Path) -> BinaryIO:
    """Open the partial file to read and write. A link or pipe under its name may be an attack, and is removed."""

    def opener(path: str, flags: int) -> int:
        safe = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # where the system has them
        return os.open(path, flags | os.O_CREAT | safe, 0o666)

    with contextlib.suppress(FileNotFoundError):
        if not _is_own(part.lstat()):
            part.unlink()
    out = open(part, "r+b", opener=opener)  # noqa: SIM115 (the caller closes it)
    if not _is_own(os.fstat(out.fileno())):
        out.close()
        raise OSError(f"{part} is not a regular file")
    return out


def _is_own(entry: os.stat_result) -> bool:
    return stat.S_ISREG(entry.st_mode) and entry.st_nlink <= 1


def _download(url: str, out: BinaryIO, size: int) -> None:
    """Append the missing bytes of a file of ``size`` bytes to ``out``, over several connections; without ranges if the server
    refuses them. Raises `huggingface_hub`'s HTTPError: a refusal, or no more progress.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HTTPError
    from huggingface_hub.utils import tqdm

    end = furthest = mark = out.seek(0, os.SEEK_END)
    fruitless, waited, ranges, since = 0, 0.0, True, time.monotonic()
    with tqdm(total=size, initial=end, unit="B", unit_scale=True, desc=url.rpartition("/")[2], disable=None) as bar:
        while (end := out.seek(0, os.SEEK_END)) < size:
            headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={end}-"} if end and ranges else {})
            broken: HTTPError | None = None
            try:
                with hub.get(url, constants.HF_HUB_DOWNLOAD_TIMEOUT, headers=headers) as answer:
                    if answer.status_code not in (200, 206):
                        raise HTTPError(f"answer {answer.status_code} without a file")
                    if answer.status_code == 200:  # the whole file, even if a range was requested
                        end = out.seek(0)
                        out.truncate()
                    for chunk in answer.iter_raw():
                        end += out.write(chunk[: size - end])
                        out.flush()
                        bar.update(max(end - furthest, 0))
                        furthest = max(end, furthest)
                        if furthest >= mark + MIN_PROGRESS:
                            mark, since, fruitless = furthest, time.monotonic(), 0
                        if end == size or time.monotonic() > since + STALL_SECONDS:
                            break
            except HfHubHTTPError as error:
                if error.response.status_code == 429:
                    pause = hub.wait_for_rate_limit(error, waited)
                    waited, since = waited + pause, since + pause
                    continue
                if hub.is_final(error) and "Range" not in headers:
                    raise
                ranges, broken = ranges and not hub.is_final(error), error  # it may refuse the range: retry with the whole file
            except HTTPError as error:
                broken = error
            except (InputError, OSError):
                raise
            except Exception as error:  # any error of huggingface_hub for a malformed response
                raise hub.no_hub(hub.one_line(error)) from error
            if end < size and (ranges or "Range" not in headers):
                broken = broken or HTTPError(f"the connection ended at byte {end:,} of {size:,}")
                if fruitless == len(PAUSES) or time.monotonic() > since + STALL_SECONDS:
                    raise broken
                log.info("%s: %s, going on from byte %d", url, hub.one_line(broken), end)
                time.sleep(PAUSES[fruitless])
                fruitless += 1
