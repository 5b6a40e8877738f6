"""Token files: ids in little-endian uint16, as nanoGPT's `train.bin` and `val.bin`, mapped; or made of a large text, once.

Parallel processes make them. A group of documents is tokenized by one, and written in order by the one that started it. Every few
groups the sizes of the files are saved in ``progress.json``: after a kill, what lies behind them is cut off, and the documents
before them are skipped. ``manifest.json`` appears when all is written, and names what the files were made of.
"""

import contextlib
import glob
import hashlib
import json
import mmap
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from gpt2.data.batches import FILLER, draw, lay_out
from gpt2.data.documents import Document, documents
from gpt2.data.files import opened, reading, write as write_files
from gpt2.data.tokenizer import Tokenizer
from gpt2.errors import InputError, user_path

TRAIN, VAL = "train.bin", "val.bin"
FILES = (TRAIN, VAL, "train.marks", "val.marks")
MANIFEST, PROGRESS = "manifest.json", "progress.json"
SAMPLES, BLOCK = 4096, 2048  # of a longer file, only so many blocks of so many ids are checked
LARGE = 64 * 2**20  # bytes of text from which on token files are made
GROUP = 1 << 20  # characters that a process tokenizes at a time
SAVE_EVERY = 32  # groups
Piece = tuple[Document, bool, bool]  # whether it continues the document before, and whether that is held out


def read(directory: str | Path, n_vocab: int, *, check: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Map a folder's `train.bin` and `val.bin`; return both as read-only uint16 arrays.

    Ids are checked against ``n_vocab``; in a file of more than 8 million ids, 4,096 blocks spread over it. Without ``check`` no
    page is read: another process of this machine has checked them. Of a long file no page is read ahead, because windows are at
    random places. Raises InputError: a file that is missing, is empty, has an odd size, or has an id outside the vocabulary.
    """
    files = []
    for path in (user_path(directory) / TRAIN, user_path(directory) / VAL):
        with reading(path, f"give a folder with {TRAIN} and {VAL}, --set data.tokens=DIR"):
            size = path.stat().st_size
        if size == 0 or size % 2:
            raise InputError(f"{path}: {size} bytes are not a positive number of uint16 ids; write the file again")
        ids = mapped(path, "<u2")
        largest = int(max(block.max() for block in _blocks(ids))) if check else 0
        if largest >= n_vocab:
            why = "these tokens were made with another tokenizer, or are not uint16"
            raise InputError(f"{path}: id {largest} lies outside the tokenizer's vocabulary of {n_vocab:,}; {why}")
        files.append(ids)
    return files[0], files[1]


def mapped(path: Path, dtype: str) -> np.ndarray:
    """Map a file that is not empty, for reading."""
    with opened(path) as file:
        ids = np.memmap(file, dtype=dtype, mode="r")
    if len(ids) > SAMPLES * BLOCK and isinstance(ids.base, mmap.mmap) and hasattr(mmap, "MADV_RANDOM"):
        ids.base.madvise(mmap.MADV_RANDOM)
    return ids


def fingerprint(*files: np.ndarray) -> str:
    """Return the sha256 (hex) of the files' lengths and ids; of a long file, of the blocks that :func:`read` checks."""
    digest = hashlib.sha256()
    for ids in files:
        digest.update(f"{len(ids)}|".encode())
        for block in _blocks(ids):
            digest.update(block.tobytes())
    return digest.hexdigest()


def _blocks(ids: np.ndarray) -> list[np.ndarray]:
    if len(ids) <= SAMPLES * BLOCK:
        return [ids]
    return [ids[start : start + BLOCK] for start in np.linspace(0, len(ids) - BLOCK, SAMPLES, dtype=np.int64)]


@dataclass(frozen=True)
class Task:
    """What decides the token files: the tokenizer, the id behind each document, and settings of a recipe."""

    tokenizer: Tokenizer
    end: int
    field: str
    prompt: str
    held_out: float
    split_seed: int
    padded: bool
    context: int  # 0 unless padded: packed streams serve every context


def prepared(
    path: str, paths: Sequence[Path], task: Task, say: Callable[[str], None], *, check: bool = True
) -> tuple[list[np.ndarray], Counter[str]]:
    """Return training ids, validation ids, and with a prompt or padding the marks of both, mapped; and the tally of documents.

    The files lie beside ``path``, in ``PATH.tokens/``. ``check`` as in :func:`read`. Raises
    InputError: as :func:`gpt2.data.documents.documents`; a vocabulary beyond 65,536; a folder that cannot be written; a
    full disk; a process that was killed.
    """
    if task.tokenizer.n_vocab > 1 << 16:
        raise InputError(f"{path}: token files hold ids below 65,536, and the vocabulary has {task.tokenizer.n_vocab:,}")
    sources = [[str(each), (stat := each.stat()).st_size, stat.st_mtime_ns] for each in paths]
    made_of = {"sources": sources, **vars(task), "tokenizer": task.tokenizer.fingerprint}
    folder = _folder(path, hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:12])
    from huggingface_hub.utils import WeakFileLock

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # a file system without locks
                stack.enter_context(WeakFileLock(folder / ".lock"))  # waits until no other process writes there
            if not (folder / MANIFEST).is_file():
                _write(folder, paths, task, made_of, say)
    except OSError as error:
        remedy = "make room, or give a link to the text from a folder of yours; the same command goes on"
        raise InputError(f"{folder}: cannot write token files ({error.strerror}); {remedy}") from None
    except BrokenProcessPool:
        raise InputError(f"{folder}: a tokenizing process was killed, perhaps for memory; the same command goes on") from None
    manifest = json.loads((folder / MANIFEST).read_text())
    arrays = list(read(folder, task.tokenizer.n_vocab, check=check))
    if task.prompt or task.padded:
        arrays += [mapped(folder / name, "u1") for name in FILES[2:]]
    if check and fingerprint(*arrays) != manifest["fingerprint"]:
        raise InputError(f"{folder}: these are not the token files that {MANIFEST} names; delete the folder, they are made again")
    return arrays, Counter(manifest["tally"])


def _folder(path: str, name: str) -> Path:
    root = Path(path)
    while glob.has_magic(str(root)) and not root.exists():
        root = root.parent
    root = Path(os.path.abspath(root))  # without "..", which has no name to put a suffix behind
    return root.with_name(f"{root.name}.tokens") / name


def _write(folder: Path, paths: Sequence[Path], task: Task, made_of: dict[str, Any], say: Callable[[str], None]) -> None:
    """Write all token files, from where an earlier call was interrupted."""
    state: dict[str, Any] = {"read": 0, "sizes": [0] * len(FILES), "tally": {}}
    if (folder / PROGRESS).is_file():
        saved = json.loads((folder / PROGRESS).read_text())
        present = ((folder / name, size) for name, size in zip(FILES, saved["sizes"], strict=True))
        if all(path.is_file() and path.stat().st_size >= size for path, size in present):
            state = saved
            say(f"{folder}: going on after {state['read']:,} pieces of text")
    tally, found = Counter[str](state["tally"]), Counter[str]()
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(folder / name, "ab")) for name in FILES]
        for file, size in zip(files, state["sizes"], strict=True):
            file.truncate(size)
            file.seek(size)
        pieces = _split(documents(paths, task.field, task.prompt, tally=found, streamed=True), task)
        began, total, shown = time.monotonic(), sum(size for _, size, _ in made_of["sources"]), time.monotonic()
        for number, (count, parts, more) in enumerate(_tokenized(islice(pieces, state["read"], None), task), 1):
            for file, part in zip(files, parts, strict=True):
                file.write(part)
            state["read"] += count
            tally += more
            if number % SAVE_EVERY == 0:
                _save(folder, files, state | {"tally": tally})
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                say(f"tokenizing {total / 1e9:.1f} GB of text: {tally['tokens']:,} tokens after {shown - began:.0f} s")
        ends = np.uint16(task.end).tobytes(), bytes([FILLER])
        for index, file in enumerate(files):
            if task.padded:  # the target of the last row's last token
                file.write(ends[index // 2])
            file.flush()
    _divide(folder, task, tally)
    for name in FILES:
        with open(folder / name, "r+b") as whole:  # Windows syncs no file that is open for reading
            os.fsync(whole.fileno())
    filled = [name for name in FILES if (folder / name).stat().st_size]
    written = [np.memmap(folder / name, "u1" if name.endswith("marks") else "<u2", "r") for name in filled]
    manifest = made_of | {"tally": tally + found, "fingerprint": fingerprint(*written)}
    write_files(folder, {MANIFEST: json.dumps(manifest, indent=1) + "\n"})
    (folder / PROGRESS).unlink(missing_ok=True)


def _save(folder: Path, files: Sequence[Any], state: dict[str, Any]) -> None:
    for file in files:
        file.flush()
        os.fsync(file.fileno())
    write_files(folder, {PROGRESS: json.dumps(state | {"sizes": [file.tell() for file in files]})})


def _divide(folder: Path, task: Task, tally: Counter[str]) -> None:
    """Hold out the last part of a single document, and refuse several that all fell to one side."""
    sizes = [(folder / name).stat().st_size for name in FILES]
    if min(sizes[:2]) > 2:
        return
    if tally["documents"] != 1 or task.prompt or task.padded:
        raise InputError(f"{folder}: all documents are held out, or none is; --set data.split_seed to another number")
    if sizes[1] > sizes[0]:
        os.replace(folder / FILES[1], folder / FILES[0])
    ids = np.memmap(folder / FILES[0], "<u2", "r")
    cut = int((1 - task.held_out) * len(ids))
    ids[cut:].tofile(folder / FILES[1])
    del ids
    os.truncate(folder / FILES[0], 2 * cut)


def _split(found: Iterable[Document], task: Task) -> Iterator[Piece]:
    """Yield each document, or piece of one, with its side: the first piece decides."""
    held, continued = False, False
    for document in found:
        held = held if continued else draw(document, task.split_seed) < task.held_out
        yield document, continued, held
        continued = document.more


def _tokenized(pieces: Iterator[Piece], task: Task) -> Iterator[tuple[int, list[bytes], Counter[str]]]:
    """Yield groups of pieces in order: how many, the bytes for each of :data:`FILES`, and their tally."""
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    spawn = multiprocessing.get_context("spawn")
    waiting: deque[tuple[int, Future[tuple[list[bytes], Counter[str]]]]] = deque()
    with ProcessPoolExecutor(workers, spawn, _begin, (task,)) as pool:
        for group in _groups(pieces):
            waiting.append((len(group), pool.submit(_tokenize, group)))
            if len(waiting) > 2 * workers:  # this bounds the memory
                count, future = waiting.popleft()
                yield count, *future.result()
        while waiting:
            count, future = waiting.popleft()
            yield count, *future.result()


def _groups(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    group, size = list[Piece](), 0
    for piece in pieces:
        group.append(piece)
        size += len(piece[0].text) + len(piece[0].prompt)
        if size >= GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


_task: Task


def _begin(task: Task) -> None:
    """Keep the task in this process, which ends with the one that started it; Ctrl-C is for that one."""
    global _task
    _task = task
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent was killed; it would wait for work for ever."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


def encoded(tokenizer: Tokenizer, text: str, document: Document) -> list[int]:
    """Return the ids of a part of a document. Raises InputError, with its place."""
    try:
        return tokenizer.encode(text)
    except InputError as error:
        raise InputError(f"{document.where}: {error}") from None


def _tokenize(group: list[Piece]) -> tuple[list[bytes], Counter[str]]:
    task, tally = _task, Counter[str]()
    parts: list[list[bytes]] = [[] for _ in FILES]
    for document, continued, held in group:
        if continued and task.padded:  # behind the end of its row
            continue
        prompt, text = (encoded(task.tokenizer, part, document) for part in (document.prompt, document.text))
        end = None if document.more and not task.padded else task.end
        ids, marks = lay_out(prompt, text, end, task.context or 1 << 62, padded=task.padded, tally=tally)
        tally["held_out"] += held and end is not None
        parts[held].append(ids.astype("<u2").tobytes())
        if task.prompt or task.padded:
            parts[2 + held].append(marks.tobytes())
    return [b"".join(part) for part in parts], tally
