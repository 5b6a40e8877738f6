"""One generator of mutations, and the loop that runs damaged inputs of each surface (`support/surfaces.py`) through our readers.

Each input must be read, or be refused by an InputError in one printable line, within SECONDS of processor time and without MEMORY
more. Anything else has fallen.
"""

import contextlib
import json
import random
import re
import resource
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpt2.checkpoint.containers import Container
from gpt2.errors import InputError

SECONDS, MEMORY = 30, 2000  # of one input: seconds, and MB that the process grows by
NUMBERS = [-1, 0, 1, 2, 3, 4, 7, 8, 9, 12, 16, 24, 31, 32, 64, 127, 128, 255, 256, 65535, 2**16, 2**31 - 1, 2**31, 2**32 - 1]
NUMBERS += [2**32, 2**40, 2**47, 2**48, 2**53, 2**62, 2**63, 2**64 - 1, 2**64]
JUNK: list[Any] = [*NUMBERS, 10**30, 0.0, 1.0, 1.5, 1e300, -0.0, True, False, None, "", "F32", "F64", "BOOL", "F8_E4M3", "a\nb"]
JUNK += ["\ud800", "\0", "é", "x" * 3000, "9" * 5000, [], [0], [1, 2], [[]], {}, {"dtype": "F32"}, float("nan"), float("inf")]
JUNK += [{"dtype": "F32", "shape": [], "data_offsets": [0, 4]}, [1] * 9, [0, 2**40], [2**32, 2**32], [0, 2**63], [[[[]]]]]
NAMES = ["wte.weight", "h.0.attn.bias", "lm_head.weight", "__metadata__", "transformer.h.0.ln_1.bias", "transformer.", "", "a"]
NAMES += ["h.1.attn.masked_bias", "h." + "9" * 5000 + ".ln_1.bias", "h.٣.attn.bias", "h.99999.ln_1.bias", "a\nb", "\x1b[2J\n"]
NAMES += ["b", "é" * 40, "x" * 5000, "\ud800", "\0", "{", '"']

Way = Callable[[random.Random, bytes, bytes], bytes]  # damages a file, with bytes of another one


class Surface(NamedTuple):
    """``damage`` damages an input; ``read`` reads it, or raises InputError with a message of less than ``limit`` characters."""

    damage: Callable[[random.Random], None]
    read: Callable[[], object]
    limit: int = 700


def of_files(victims: Mapping[Path, Sequence[Way]], read: Callable[[Path], object], limit: int = 700) -> Surface:
    """Damage one victim at a time in one of its ways. ``read`` gets the victim's path; it must read each victim whole."""
    whole = {path: path.read_bytes() for path in victims}
    last = next(iter(victims))
    for path in victims:
        read(path)

    def overwrite(path: Path, content: bytes) -> None:
        with open(path, "r+b") as file:  # in place: on ext4, truncating and rewriting a file takes milliseconds
            file.write(content)
            file.truncate()

    def damage(pick: random.Random) -> None:
        nonlocal last
        overwrite(last, whole[last])
        last = pick.choice([path for path, ways in victims.items() for _ in ways])
        overwrite(last, pick.choice(victims[last])(pick, whole[last], pick.choice([*whole.values()])))

    return Surface(damage, lambda: read(last), limit)


def number_bytes(pick: random.Random, widths: Sequence[int] = (1, 2, 4, 8), more: Sequence[int] = ()) -> bytes:
    """The bytes of a number at a limit, or of one of ``more``."""
    width = pick.choice(widths)
    return (pick.choice([*NUMBERS, *more]) % 256**width).to_bytes(width, "little")


def changed_numbers(pick: random.Random, data: bytes, places: Sequence[int], widths: Sequence[int] = (4, 8)) -> bytes:
    """Some numbers at ``places`` replaced by a neighbour, a multiple, a limit, or a place in the file."""
    result = bytearray(data)
    for _ in range(pick.choice([1, 1, 1, 2, 4])):
        at = max(0, pick.choice(places))
        old = int.from_bytes(data[at : at + 4], "little")
        near = [old + 1, old + 2, abs(old - 1), abs(old - 2), 2 * old, old // 2, old + 32, old + 64, pick.randrange(len(data))]
        number = number_bytes(pick, widths, near)
        result[at : at + len(number)] = number
    return bytes(result)


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


def cut(pick: random.Random, data: bytes, other: bytes) -> bytes:
    """The file without its end, or with more behind it."""
    return data[: pick.randrange(len(data))] if pick.random() < 0.6 else data + bytes(pick.choice([1, 2, 4, 1000]))


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


def changed_text(pick: random.Random, data: bytes, other: bytes) -> bytes:
    """Bytes, or, half the time where they are JSON, another value somewhere in it."""
    if data[:1] in b"{[" and pick.random() < 0.5:
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(data)
            for _ in range(pick.choice([1, 1, 2])):
                value = changed_json(value, pick)
            return json.dumps(value).encode(errors="surrogatepass")
    return changed_bytes(pick, data, other)


def read_every_way(file: Container, most: int) -> None:
    """Read each tensor mapped, copied and converted; ``most`` limits their bytes, as a multiple of the file's size."""
    for name, entry in file.entries.items():
        tensors = [file.read(name), file.read(name, mapped=False), file.read(name, torch.bfloat16)]
        assert all(tensor.shape == entry.shape and tensor.is_contiguous() for tensor in tensors)
        assert tensors[0].dtype == tensors[1].dtype == entry.dtype
        assert sum(tensor.nbytes for tensor in tensors) < most * file.path.stat().st_size


def forbid(event: str, args: tuple[object, ...]) -> None:
    """Raise if a checkpoint runs code."""
    if event == "pickle.find_class" or event.startswith(("os.system", "os.exec", "os.spawn", "subprocess")):
        raise AssertionError(f"{event} {args}")


def fuzz(name: str, surface: Surface, count: int, seed: int) -> dict[str, Any]:
    """Run ``count`` damaged inputs; return how many loaded, each refusal without names and numbers, and what fell."""
    torch.set_num_threads(1)
    surface.read()  # the control: whole, it is read
    warnings.simplefilter("error")
    loaded, slowest, refused, fallen = 0, 0.0, Counter[str](), []
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        surface.damage(random.Random(f"{seed} {name} {number}"))
        begin, fall = time.process_time(), ""
        try:
            surface.read()
            loaded += 1
        except InputError as error:
            what = str(error)
            refused[re.sub(r"b?'.*'|b?\".*\"|[\w./-]*[._/][\w./-]+|tensor \S+|[\d,]+", "*", what)[:60]] += 1
            right = what.isprintable() and len(what) < surface.limit and re.search("[;:] ", what)
            fall = "" if right else f"not one line with advice: {what[:200]!r}"
        except Exception as error:
            fall = f"{type(error).__name__}: {str(error)[:200]!r}"
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) // 1024
        slowest = max(slowest, took := time.process_time() - begin)
        fall = fall or f"{took:.0f} s, {grown} MB" * (took > SECONDS or grown > MEMORY)
        fallen += [f"{name} {number} of seed {seed}: {fall}"] if fall else []
    return {"loaded": loaded, "refused": refused, "slowest_s": slowest, "grown_mb": grown, "fallen": fallen}
