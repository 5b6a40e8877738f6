"""Thousands of damaged files through our readers: `python -m support.fuzz KIND COUNT SEED FOLDER`, in a process of its own.

KIND is one of the modules `KIND_fuzz.py` beside this one; its `prepare` defines how files are damaged and read. Every file
must be read, or be refused in one line. The last line of stdout is a JSON object: the number of files read, the count of each
refusal (without numbers and names), the slowest file, and the growth of memory.
"""

import importlib
import json
import random
import re
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpt2.checkpoint.containers import Container
from gpt2.errors import InputError

NUMBERS = [-1, 0, 1, 2, 3, 4, 7, 8, 9, 12, 16, 24, 31, 32, 64, 127, 128, 255, 256, 65535, 2**16, 2**31 - 1, 2**31, 2**32 - 1]
NUMBERS += [2**32, 2**40, 2**47, 2**48, 2**53, 2**62, 2**63, 2**64 - 1, 2**64]
JUNK: list[Any] = [*NUMBERS, 10**30, 0.0, 1.0, 1.5, 1e300, -0.0, True, False, None, "", "F32", "F64", "BOOL", "F8_E4M3", "a\nb"]
JUNK += ["\ud800", "\0", "é", "x" * 3000, "9" * 5000, [], [0], [1, 2], [[]], {}, {"dtype": "F32"}, float("nan"), float("inf")]
JUNK += [{"dtype": "F32", "shape": [], "data_offsets": [0, 4]}, [1] * 9, [0, 2**40], [2**32, 2**32], [0, 2**63], [[[[]]]]]
NAMES = ["wte.weight", "h.0.attn.bias", "lm_head.weight", "__metadata__", "transformer.h.0.ln_1.bias", "transformer.", "", "a"]
NAMES += ["h.1.attn.masked_bias", "h." + "9" * 5000 + ".ln_1.bias", "h.٣.attn.bias", "h.99999.ln_1.bias", "a\nb", "\x1b[2J\n"]
NAMES += ["b", "é" * 40, "x" * 5000, "\ud800", "\0", "{", '"']


Damaged = Callable[[random.Random, bytes, bytes], bytes]


class Subject(NamedTuple):
    """``damage`` damages one file; ``read`` reads it or raises InputError with a message of less than ``limit`` characters."""

    damage: Callable[[random.Random], None]
    read: Callable[[], object]
    limit: int = 700


def of_files(path: Path, files: Sequence[bytes], damaged: Damaged, read: Callable[[], object], limit: int = 700) -> Subject:
    """Damage one of ``files`` with bytes of another, at ``path``; all are read whole first."""

    def damage(pick: random.Random) -> None:
        path.write_bytes(damaged(pick, pick.choice(files), pick.choice(files)))

    for content in files:
        path.write_bytes(content)
        read()
    return Subject(damage, read, limit)


def number_bytes(pick: random.Random, widths: Sequence[int] = (1, 2, 4, 8), more: Sequence[int] = ()) -> bytes:
    """The bytes of a number at a limit, or of one of ``more``."""
    width = pick.choice(widths)
    return (pick.choice([*NUMBERS, *more]) % 256**width).to_bytes(width, "little")


def changed_bytes(pick: random.Random, data: bytes, other: bytes) -> bytes:
    """Bytes that are overwritten, cut, repeated, flipped, replaced by a number, or copied from another file."""
    result = bytearray(data)
    for _ in range(pick.choice([1, 1, 1, 2, 5])):
        at = pick.randrange(len(result) + 1)
        match pick.randrange(7):
            case 0:
                result[at : at + 1] = bytes([pick.randrange(256)])
            case 1:
                del result[at : at + pick.choice([1, 2, 10, 200, 10**6])]
            case 2:
                number = number_bytes(pick)
                result[at : at + len(number)] = number
            case 3:
                start = pick.randrange(len(other))
                result[at : at + pick.choice([0, 30])] = other[start : start + pick.choice([1, 30, 300])]
            case 4:
                result[at:at] = result[at : at + pick.choice([1, 5, 50, 500])]
            case 5:
                result[at:at] = number_bytes(pick)
            case 6 if result:
                result[pick.randrange(len(result))] ^= 1 << pick.randrange(8)
    return bytes(result)


def changed_json(raw: Any, pick: random.Random, names: Sequence[str] = NAMES, junk: Sequence[Any] = JUNK) -> Any:
    """Change one place in a JSON value: a number, a key (removed, renamed, repeated or exchanged), or a nonsense value."""
    if isinstance(raw, dict) and raw and pick.random() < 0.9:
        key, other = pick.choice(list(raw)), pick.choice(list(raw))
        match pick.randrange(10):
            case 0:
                return {name: value for name, value in raw.items() if name != key}
            case 1:
                return {(pick.choice(names) if name == key else name): value for name, value in raw.items()}
            case 2:
                return raw | {key: raw[other], other: raw[key]}
            case 3:
                return raw | {pick.choice(names): pick.choice([*junk, *raw.values()])}
        return raw | {key: changed_json(raw[key], pick, names, junk)}
    if isinstance(raw, list) and raw and pick.random() < 0.8:
        place = pick.randrange(len(raw))
        new = pick.choice([[], [pick.choice(NUMBERS)], [raw[place]] * 2, [1, raw[place]]])
        new = new if pick.random() < 0.2 else [changed_json(raw[place], pick, names, junk)]
        return [*raw[:place], *new, *raw[place + 1 :]]
    if type(raw) is int and pick.random() < 0.6:
        return raw + pick.choice([-8, -4, -2, -1, 1, 2, 4, 8])
    return pick.choice(junk)


def read_every_way(file: Container, most: int) -> None:
    """Read each tensor mapped, copied and converted; ``most`` limits their bytes, as a multiple of the file's size."""
    for name, entry in file.entries.items():
        tensors = [file.read(name), file.read(name, mapped=False), file.read(name, torch.bfloat16)]
        assert all(tensor.shape == entry.shape and tensor.is_contiguous() for tensor in tensors)
        assert tensors[0].dtype == tensors[1].dtype == entry.dtype
        assert sum(tensor.nbytes for tensor in tensors) < most * file.path.stat().st_size


def reason(message: str, folder: Path, limit: int) -> str:
    """A refusal without the names and numbers of its file."""
    where, _, what = message.partition(": ")
    assert where.startswith(str(folder)), message
    assert "; " in what, message
    assert message.isprintable(), message
    assert len(message) < limit, message
    return re.sub(r"b?'.*'|b?\".*\"|[\w.]*[._][\w.]+|tensor \S+|[\d,]+", "*", what)[:60]


def forbid(event: str, args: tuple[object, ...]) -> None:
    """Raise if a checkpoint runs code."""
    if event == "pickle.find_class" or event.startswith(("os.system", "os.exec", "os.spawn", "subprocess")):
        raise AssertionError(f"{event} {args}")


def fuzz(kind: str, count: int, seed: int, folder: Path) -> dict[str, Any]:
    pick = random.Random(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    subject: Subject = importlib.import_module(f"support.{kind}_fuzz").prepare(folder)
    subject.read()
    warnings.simplefilter("error")
    sys.addaudithook(forbid)
    loaded, slowest, refused = 0, 0.0, Counter[str]()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        subject.damage(pick)
        begin = time.process_time()
        try:
            subject.read()
            loaded += 1
        except InputError as error:
            refused[reason(str(error), folder, subject.limit)] += 1
        except BaseException as error:
            raise AssertionError(f"file {number} of seed {seed}") from error
        slowest = max(slowest, time.process_time() - begin)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024
    return {"loaded": loaded, "refused": refused, "slowest_s": slowest, "grown_mb": grown}


if __name__ == "__main__":
    print(json.dumps(fuzz(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))))
