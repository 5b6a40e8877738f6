"""Write a model directory that transformers, vLLM, llama.cpp and CTranslate2 open without changes."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt2.checkpoint.containers import listed, require_whole_files
from gpt2.checkpoint.containers.safetensors_file import DTYPES
from gpt2.checkpoint.keys import expected, to_file
from gpt2.checkpoint.names import WEIGHTS
from gpt2.config import GPT2Config
from gpt2.data import Tokenizer
from gpt2.data.files import opened, read_all, written_aside
from gpt2.errors import InputError, user_path
from gpt2.model import GPT2

DTYPE_NAMES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16", torch.float16: "float16"}
FORMAT_NAMES = {dtype: name for name, dtype in DTYPES.items()}
CARD, MANIFEST = "README.md", "manifest.json"
ALIGNMENT = 64  # bytes, a cache line: the files can be mapped in place


def save(model: GPT2, tokenizer: Tokenizer | None, directory: str | Path, more: Mapping[str, Tensor] | None = None) -> Path:
    """Write ``model`` and ``tokenizer`` to ``directory`` in Hugging Face's layout; return the directory.

    Weights keep their dtype and Conv1D orientation, under transformers' names, without the tied head and without a second copy
    in memory. The same weights give the same bytes. All files are written and synced aside, then renamed: a full disk changes
    nothing, and a reader never sees a half-written file. ``more`` are tensors of another head, by their names in the file.

    Raises:
        InputError: the directory cannot be written, or ``model`` is not a plain GPT2 (wrapped, quantised, adapters unmerged).
    """
    directory = user_path(directory)
    tensors = _plain(model)
    if not isinstance(tokenizer, Tokenizer | None):
        raise InputError(f"cannot save a {type(tokenizer).__name__} as a tokenizer; give gpt2.load_tokenizer(NAME), or None")
    with writing(directory), tempfile.TemporaryDirectory(prefix=".partial-", dir=directory, ignore_cleanup_errors=True) as aside:
        written = {**{to_file(name): tensor for name, tensor in tensors.items()}, **(more or {})}
        write_file(Path(aside, WEIGHTS), safetensors_file(written))
        save_config(model.config, tensors["wte.weight"].dtype, Path(aside), tokenizer.stated if tokenizer else None)
        if tokenizer is not None:
            tokenizer.save(directory, n_positions=model.config.n_positions)
        for name in sorted(os.listdir(aside)):
            os.replace(Path(aside, name), directory / name)
    return directory


def save_official(model: GPT2, tokenizer: Tokenizer | None, directory: Path) -> Path:
    """Write a model into a new folder for somebody's code: its tensors have the names of the official files, without a prefix."""
    tensors = _plain(model)
    with writing(directory):
        write_file(directory / WEIGHTS, safetensors_file(tensors))
        save_config(model.config, tensors["wte.weight"].dtype, directory)
        if tokenizer is not None:
            tokenizer.save(directory, n_positions=model.config.n_positions)
    return directory


def save_config(config: GPT2Config, dtype: torch.dtype, directory: Path, ends: tuple[int, ...] | None = None) -> None:
    """Write config.json and generation_config.json for weights of ``dtype``; ``ends`` end a text, else what the config says."""
    stated = config.to_hf(DTYPE_NAMES[dtype])
    write_json(directory / "config.json", stated)
    generation = {key: stated[key] for key in ("bos_token_id", "eos_token_id") if stated[key] is not None}
    ends = ends if ends is None else tuple(end for end in ends if end < config.vocab_size)
    if ends is not None and ends != (() if config.eos_token_id is None else (config.eos_token_id,)):
        generation["eos_token_id"] = None if not ends else ends[0] if len(ends) == 1 else list(ends)
    write_json(directory / "generation_config.json", generation)


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Make a checkpoint's directory. Raises InputError if this or a write inside the block fails."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        why = error.strerror or error
        raise InputError(f"{directory}: cannot write the checkpoint ({why}); choose another folder, or make room") from error


def write_json(path: Path, value: Any) -> None:
    write_file(path, (json.dumps(value, indent=2) + "\n").encode())


def write_file(path: Path, content: bytes | Iterable[bytes | memoryview]) -> None:
    """Write aside, sync, rename. ``content`` is all bytes, or pieces in order."""
    with written_aside(path) as file:
        file.writelines([content] if isinstance(content, bytes) else content)


def sha256(path: Path) -> str:
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unlike_manifest(directory: Path, needed: Iterable[str] = ()) -> str:
    """Return how ``directory`` differs from its manifest (name -> sha256), which lists the ``needed`` files; "" if it does not.

    The card is not compared, because people edit it.
    """
    try:
        manifest = json.loads(read_all(directory / MANIFEST))
        for name in needed:
            if name not in manifest:
                return f"{MANIFEST} does not list {name}"
        stated = {directory / name: digest for name, digest in manifest.items() if name != CARD}
        with ThreadPoolExecutor() as pool:
            differ = [path for path, found in zip(stated, pool.map(sha256, stated), strict=True) if found != stated[path]]
    except OSError as error:
        what = "missing" if isinstance(error, FileNotFoundError) else f"unreadable ({error.strerror})"
        return f"{Path(error.filename or directory).name} is {what}"
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        return f"unreadable ({error})"
    return f"{differ[0].relative_to(directory).as_posix()} does not have the sha256 that {MANIFEST} states" if differ else ""


def _plain(model: GPT2) -> dict[str, Tensor]:
    """Return the parameters in the key table's order. Raises InputError: they are not exactly the table's."""
    if not isinstance(model, GPT2):
        what = f"a {type(model).__name__} is no GPT2 of gpt2.load; unwrap it, or give gpt2.checkpoint_of(module).load()"
        raise InputError(f"cannot save this model: {what}")
    state, wanted = model.state_dict(), expected(model.config)
    odd = list(state.keys() ^ wanted.keys()) or [name for name, shape in wanted.items() if state[name].shape != shape]
    odd = odd or [name for name, tensor in state.items() if tensor.dtype not in DTYPE_NAMES or tensor.is_meta]
    if odd:
        what = f"{listed(sorted(odd))} are not a plain GPT-2's; unwrap it, or merge its adapters"
        raise InputError(f"cannot save this model: {what}")
    return {name: state[name] for name in wanted}


def safetensors_file(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file in pieces; wider dtypes come first, so every tensor is aligned."""
    header, order = safetensors_header(tensors, metadata)
    yield header
    for name in order:
        require_whole_files()
        yield raw_bytes(tensors[name])


def safetensors_header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> tuple[bytes, list[str]]:
    """Return a file's first bytes, and the order in which the tensors' data must follow; tensors may be on the meta device."""
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        shape = list(tensors[name].shape)
        header[name] = {"dtype": FORMAT_NAMES[tensors[name].dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, order


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's data as bytes, copied only if it is not contiguous on the CPU."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
