"""Read a dump: the token ids and floating-point arrays of a forward pass, as any program wrote them.

Containers: ``.npz`` (without pickles), ``.safetensors``, a directory of ``.npy`` files, and llm.c's debug state (``.bin``).
"""

import math
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from gpt2.checkpoint.containers import MappedFile, shown
from gpt2.checkpoint.containers.llmc_file import HEADER, STATE, magic_of
from gpt2.checkpoint.files import open_file
from gpt2.checkpoint.keys import from_file, is_parameter
from gpt2.config import GPT2Config
from gpt2.data.files import opened, reading
from gpt2.errors import InputError, printable, require_memory, user_path
from gpt2.measure.tracing import points_size

IDS = ("ids", "input_ids", "tokens", "idx")  # the names of the token ids, the first found counts
# Names of the mask of a padded batch, and the value of a real token in it.
MASKS = {"attention_mask": 1, "padding_mask": 1, "pad_mask": 1, "key_padding_mask": 0, "src_key_padding_mask": 0}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
MAX_BYTES = 16_000_000_000  # of all arrays; a full dump of gpt2 on 1024 tokens has 3 GB
STATE_VERSION = 2  # of llm.c's debug state: its logits are not padded
BY_NAME = (".safetensors", ".pt")  # also a checkpoint's
SUFFIXES = (".npz", *BY_NAME, ".bin", ".npy")
WAYS = "a .npz, .safetensors or .pt file, a directory of .npy files, or llm.c's debug state (.bin)"
ROWS, COPIES = 16, 64  # of the model's longest rows and of its parameters, in float64: what a dump may hold
STEP = "diagnose the step itself: gpt2 diagnose FILE.py:build --step FILE.py:make_step"
FEWER = "write fewer tokens"
DICTIONARY = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 16), }"
RIGHT = f"a right one begins with \\x93NUMPY, the bytes 1 0 118 0, {DICTIONARY}, spaces, and a newline as byte 127"
SAVE = f"give integers, in a dump under the name {IDS[0]} (or {', '.join(IDS[1:])}), shape (T,) or (B, T)"


@dataclass(frozen=True)
class Dump:
    """What a program wrote: ``ids`` (B, T) int64, and ``arrays`` by their own names, of any float dtype and shape."""

    source: str
    ids: Tensor
    arrays: Mapping[str, Tensor]


def is_dump(text: str | Path) -> bool:
    """Return whether WHAT of the command line is meant as a dump, not as ``FILE.py:build`` or as a checkpoint."""
    path = user_path(text)
    if path.is_dir():
        return not os.path.lexists(path / "config.json")
    if path.suffix.lower() in BY_NAME and path.is_file():
        with suppress(InputError):
            names = list(open_file(path).entries)
            return _ids_name(names) is not None or not any(is_parameter(from_file(name)) for name in names)
    if path.suffix.lower() == ".bin" and path.is_file():
        return magic_of(path) == STATE
    return path.suffix.lower() in SUFFIXES and path.suffix.lower() != ".pt"


def read(path: str | Path, config: GPT2Config, ids: Tensor | None = None) -> Dump:
    """Read the dump at ``path``; ``ids`` (B, T) count where it holds none.

    Raises InputError: not there, damaged, without ids or floats, or with NaN.
    """
    path = user_path(path)
    if not path.exists():
        raise InputError(f"{path}: no such file or directory; give {WAYS}")
    readers: dict[str, Callable[[Path, float], Iterator[tuple[str, Any]]]]
    readers = {".npz": read_npz, **dict.fromkeys(BY_NAME, _tensors), ".bin": lambda path, _: _debug_state(path, config)}
    reader = _directory if path.is_dir() else readers.get(path.suffix.lower())
    if reader is None:
        alone = "; a single array is not a dump: put it and the ids into a directory" if path.suffix.lower() == ".npy" else ""
        raise InputError(f"{path}: is not a dump{alone or f'; give {WAYS}'}")
    numbers = ROWS * points_size(config, 1, config.n_positions) + COPIES * config.num_parameters()
    return dump_of(dict(reader(path, min(MAX_BYTES, 8 * numbers))), config, str(path), ids)


def dump_of(arrays: Mapping[str, Any], config: GPT2Config, source: str = "your arrays", ids: Tensor | None = None) -> Dump:
    """Return the dump of ``arrays``, NumPy's or torch's, by any names. Raises InputError as :func:`read` does."""
    numbers = {name: one for name, one in arrays.items() if isinstance(one, Tensor) or np.asarray(one).dtype.kind not in "US"}
    tensors = {str(name): _tensor(value, f"{source}: {shown(str(name))}") for name, value in numbers.items()}
    key = _ids_name(tensors)
    if key is not None:
        given = tensors.pop(key)
        _refuse_steps(tensors, given, config, source)
        ids = as_ids(given, f"{source}: {shown(key)}", config)
    if ids is None:
        raise InputError(f"{source}: holds no token ids; {SAVE}")
    floats = {name: tensor for name, tensor in tensors.items() if tensor.dtype in FLOATS and tensor.numel()}
    if not floats:
        raise InputError(f"{source}: holds no floating-point arrays beside the ids; save at least the logits")
    for name, tensor in tensors.items():
        _refuse_padding(name, tensor, ids, source)
    return Dump(source, ids, floats)


def _ids_name(tensors: Iterable[str]) -> str | None:
    own = {PurePosixPath(name).name.lower(): name for name in reversed([*tensors])}
    return next((own[wanted] for wanted in IDS if wanted in own), None)


def _refuse_padding(name: str, tensor: Tensor, ids: Tensor, source: str) -> None:
    """Raise InputError if an array is the mask of a padded batch, and hides some tokens."""
    real = MASKS.get(PurePosixPath(name).name.lower())
    if real is None or tensor.numel() != ids.numel() or not bool(((tensor == 0) | (tensor == 1)).all()):
        return
    if hidden := int((tensor != real).sum()):
        many = f"{hidden} token{'s' * (hidden > 1)}"
        raise InputError(f"{source}: {shown(name)} hides {many}; padding is not judged: dump one row without it")


def of_a_step(tensors: Mapping[str, Tensor], config: GPT2Config) -> list[str]:
    """Return the names of arrays that have the shape of a matrix of the model: gradients and parameters of a training step."""
    width = config.n_embd
    matrices = [{config.vocab_size, width}, {width, 3 * width}, {width, config.inner}]
    return [name for name, tensor in tensors.items() if tensor.ndim == 2 and set(tensor.shape) in matrices]


def _refuse_steps(tensors: Mapping[str, Tensor], ids: Tensor, config: GPT2Config, source: str) -> None:
    """Raise InputError for a dump of training steps: ids of several batches, or parameters or gradients without logits."""
    large, wide = of_a_step(tensors, config), [one for one in tensors.values() if one.shape[-1:] >= (config.vocab_size,)]
    logits = any(one.numel() // one.shape[-1] <= ids.numel() for one in wide)
    others = (tensor for name, tensor in tensors.items() if name not in large and tensor.is_floating_point())
    forward = logits or any(length in tensor.shape for tensor in others for length in ids.shape[-1:])
    if (ids.ndim == 3 and ids.numel()) or (large and not forward):
        several = f"ids of shape {tuple(ids.shape)}"
        what = several if ids.ndim == 3 else f"{shown(large[0])}, which has a parameter's shape, and no logits"
        raise InputError(f"{source}: holds {what}: training steps are not read from a dump; {STEP}")


def as_ids(values: Any, where: str, config: GPT2Config, *, also: int = 0) -> Tensor:
    """Return an array of ids as int64 (B, T); ``also`` is allowed beside the vocabulary.

    Raises InputError: another shape, no whole numbers, too many, or not in the vocabulary.
    """
    given = _tensor(values, where)
    shape = tuple(given.shape)
    if given.ndim not in (1, 2) or not given.numel():
        raise InputError(f"{where}: has shape {shape}, and ids are (T,) or (B, T); {SAVE}")
    wrong = given.dtype == torch.bool or given.is_complex()
    if given.is_floating_point():  # which rounds larger whole numbers, and the next one to this
        wrong = bool(((given != given.round()) | ~(given < 2 / torch.finfo(given.dtype).eps)).any())
    if wrong:
        raise InputError(f"{where}: holds {str(given.dtype).removeprefix('torch.')} values that are not ids; {SAVE}")
    ids = given.long().reshape(-1, shape[-1])
    outside = ids[(ids >= config.vocab_size) | ((ids < 0) & (ids != also))]
    if len(outside):
        known = f"the model knows 0 to {config.vocab_size - 1:,}; is it the right model?"
        raise InputError(f"{where}: holds the id {int(outside[0])}, and {known}")
    if shape[-1] > config.n_positions:
        raise InputError(f"{where}: has {shape[-1]} tokens in a row, and the model has {config.n_positions} positions; run fewer")
    require_memory(8 * points_size(config, *ids.shape) // config.n_layer, f"{where}: {len(ids):,} rows", "run fewer")
    return ids


def _tensor(value: Any, where: str) -> Tensor:
    """Return one array as a tensor; integers of any kind become int64. Raises InputError: no numbers."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu")
    array = np.asarray(value)
    if array.dtype.kind == "V" and array.dtype.itemsize == 2 and not array.dtype.names:  # JAX's bfloat16: NumPy keeps no name
        return torch.from_numpy(np.require(array, requirements=["C", "W"]).view(np.int16)).view(torch.bfloat16)
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    if array.dtype.kind == "u":  # no large id becomes a negative one
        array = np.minimum(array.astype(np.uint64), np.uint64(np.iinfo(np.int64).max))
    if array.dtype.kind in "iu":
        array = array.astype(np.int64)
    elif array.dtype.kind not in "fb":
        raise InputError(f"{where}: holds {array.dtype} values; save numbers, without pickles")
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.require(native, requirements=["C", "W"]))


# Containers


def read_npy(path: Path, most: float = math.inf) -> np.ndarray:
    """Return the array in a file. Raises InputError: more than ``most`` bytes, damaged, or no array of numbers."""
    with reading(path, "give a .npy file"), opened(path) as file:
        return _read(file, str(path), path.stat().st_size, most)


def read_npz(path: Path, most: float = math.inf) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays of an archive by name; ``most`` bytes in all. Raises InputError as :func:`read_npy`."""
    try:
        with opened(path) as whole, zipfile.ZipFile(whole) as archive:
            require_memory(sum(one.file_size for one in archive.infolist()), f"{path}: its unpacked arrays", FEWER, most)
            for one in archive.infolist():
                name = one.filename.removesuffix(".npy")
                with archive.open(one) as file:
                    yield name, _read(file, f"{path}: {printable(name, one_line=True)[:200]}", one.file_size, most)
    except InputError:
        raise
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile) as error:  # an encrypted file: RuntimeError
        raise InputError(f"{path}: cannot be read ({_said(error)}); write it again") from None


def _read(file: IO[bytes], where: str, size: int, most: float) -> np.ndarray:
    require_memory(size, f"{where}: its numbers", FEWER, most)
    try:
        array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
        if file.read(1):
            raise ValueError(f"the file has more than the {array.nbytes:,} bytes of {array.shape} of {array.dtype}")
    except Exception as error:  # NumPy evaluates the header as Python, and fails in a dozen ways
        how = "save numbers, without pickles" if "Object arrays" in str(error) else RIGHT
        raise InputError(f"{where}: NumPy cannot read it ({_said(error)}); {how}") from None
    return array


def _said(error: Exception) -> str:
    return printable(str(error).partition("\n")[0], one_line=True)[:160] or type(error).__name__


def _tensors(path: Path, most: float) -> Iterator[tuple[str, Tensor]]:
    file = open_file(path)
    require_memory(sum(entry.end - entry.start for entry in file.entries.values()), f"{path}: its arrays", FEWER, most)
    for name in file.entries:
        yield name, file.read(name, mapped=False)


def _debug_state(path: Path, config: GPT2Config) -> Iterator[tuple[str, Tensor]]:
    """Yield ids and logits of llm.c's debug state; its loss and gradients are not read."""
    file = MappedFile(path)
    head = file.bytes(0, HEADER.size)
    if len(head) < HEADER.size:
        raise InputError(f"{path}: is cut short: {len(head)} bytes, and llm.c's debug state has a header of {HEADER.size:,}")
    magic, version, batch, tokens, *_ = HEADER.unpack(head)
    if magic != STATE or version != STATE_VERSION:
        found = f"begins with {magic:,}, version {version:,}"
        wanted = f"llm.c's debug state's {STATE:,}, version {STATE_VERSION}; write it with its train_gpt2.py"
        raise InputError(f"{path}: {found}, not with {wanted}")
    count = batch * tokens
    needed = HEADER.size + 8 * count + 4 * count * config.vocab_size
    if min(batch, tokens) < 1 or needed > file.size:
        what = f"has {file.size:,} bytes, and {batch} x {tokens} tokens of {config.vocab_size:,} logits need {needed:,}"
        raise InputError(f"{path}: {what}; it is cut short, or of another vocabulary")
    yield "ids", file.tensor(HEADER.size, (batch, tokens), torch.int32, mapped=False)
    logits = (batch, tokens, config.vocab_size)
    yield "logits", file.tensor(HEADER.size + 8 * count, logits, torch.float32, mapped=False)


def _directory(path: Path, most: float) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays of all .npy files; ``layers/0.npy`` is named ``layers/0``. Other files are not read."""
    files = sorted(Path(folder) / name for folder, _, names in os.walk(path) for name in names if name.endswith(".npy"))
    if not files:
        port = "the Python file that builds your model, as in port.py:build"
        raise InputError(f"{path}: is a directory without .npy files; give {WAYS}, or {port}")
    require_memory(sum(file.stat().st_size for file in files), f"{path}: its arrays", FEWER, most)
    for file in files:
        yield file.relative_to(path).with_suffix("").as_posix(), read_npy(file, most)
