"""Thousands of damaged torch files through the reader, in a process of its own: `python -m support.torch_fuzz COUNT SEED FOLDER`.

Every file must load, or give one CheckpointError of one line. The last line of stdout is a JSON object: how many loaded, how
often each refusal was given (numbers and names taken out), the slowest file, and the memory that the process grew by.
"""

import io
import itertools
import json
import pickletools
import random
import re
import resource
import sys
import time
import warnings
import zipfile
from collections import Counter
from pathlib import Path

import torch

from gpt2.checkpoint.containers.torch_file import TorchFile
from gpt2.errors import CheckpointError
from support.hf_layouts import TINY
from support.torch_layouts import hf_bin, lightning, mingpt, nanogpt

SMALL = type(TINY)(vocab_size=5, n_positions=4, n_embd=4, n_layer=1, n_head=2, bos_token_id=4, eos_token_id=4)
NUMBERS = [0, 1, 2, 3, 4, 127, 128, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1]
OPCODES = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes]


def originals(folder: Path) -> list[bytes]:
    """One file of each kind, a few kB each."""
    hf_bin(folder / "official", SMALL, zipped=False)
    hf_bin(folder / "new", SMALL, prefix="transformer.", mask=torch.bool, head=True)
    hf_bin(folder / "half", SMALL, dtype=torch.bfloat16, mask=None)
    nanogpt(folder / "nano" / "ckpt.pt", SMALL, compiled=True)
    nanogpt(folder / "old" / "ckpt.pt", SMALL, bias=False, zipped=False)
    mingpt(folder / "min" / "model.pt", SMALL)
    lightning(folder / "light" / "last.ckpt", SMALL)
    odd = {"turned": torch.randn(3, 5).t(), "part": torch.randn(40)[3:30:2], "parameter": torch.nn.Parameter(torch.randn(2, 2))}
    torch.save(odd, folder / "odd")
    torch.save(odd, folder / "odd4", pickle_protocol=4)
    files = [*folder.glob("*/*.bin"), *folder.glob("*/*.pt"), *folder.glob("*/*.ckpt"), folder / "odd", folder / "odd4"]
    return [path.read_bytes() for path in sorted(files)]


def damaged_bytes(pick: random.Random, data: bytes, other: bytes) -> bytes:
    """Flip, cut, repeat, overwrite, or splice."""
    result = bytearray(data)
    for _ in range(pick.choice([1, 1, 1, 2, 5])):
        at = pick.randrange(len(result) + 1)
        match pick.randrange(6):
            case 0:
                result[at : at + 1] = bytes([pick.randrange(256)])
            case 1:
                del result[at : at + pick.choice([1, 2, 10, 200, 10**6])]
            case 2:
                width = pick.choice([1, 2, 4, 8])
                result[at : at + width] = (pick.choice(NUMBERS) % 256**width).to_bytes(width, "little")
            case 3:
                start = pick.randrange(len(other))
                result[at : at + pick.choice([0, 30])] = other[start : start + pick.choice([1, 30, 300])]
            case 4:
                result[at:at] = result[at : at + pick.choice([1, 5, 50, 500])]
            case 5 if result:
                at = pick.randrange(len(result))
                result[at] ^= 1 << pick.randrange(8)
    return bytes(result)


def damaged_pickle(pick: random.Random, data: bytes, start: int = 0) -> bytes:
    """Keep the instructions whole: replace, drop, repeat or swap some, or change a number in one."""
    stream = io.BytesIO(data)
    stream.seek(start)
    bounds = [position for _, _, position in pickletools.genops(stream)] + [stream.tell()]
    parts = [data[a:b] for a, b in itertools.pairwise(bounds)]
    for _ in range(pick.choice([1, 1, 2, 4])):
        at, other = pick.randrange(len(parts)), pick.randrange(len(parts))
        match pick.randrange(6):
            case 0:
                parts[at] = pick.choice(OPCODES) + parts[at][1:]
            case 1:
                parts[at] = b""
            case 2:
                parts[at] = parts[at] + parts[other]
            case 3:
                parts[at], parts[other] = parts[other], parts[at]
            case 4:
                parts[at] = b"J" + (pick.choice(NUMBERS) % 2**32).to_bytes(4, "little")
            case 5:
                numbers = [i for i, part in enumerate(parts) if part[:1] in (b"K", b"M", b"J")]
                if numbers:
                    parts[pick.choice(numbers)] = b"K" + bytes([pick.randrange(40)])
    return data[: bounds[0]] + b"".join(parts) + data[bounds[-1] :]


def damaged_zip(pick: random.Random, data: bytes) -> bytes:
    """A well-formed archive around damaged members."""
    members = {
        info.filename: zipfile.ZipFile(io.BytesIO(data)).read(info) for info in zipfile.ZipFile(io.BytesIO(data)).infolist()
    }
    names = list(members)
    root = names[0].split("/")[0]
    match pick.randrange(8):
        case 0 | 1 | 2 | 3:
            members[f"{root}/data.pkl"] = damaged_pickle(pick, members[f"{root}/data.pkl"])
        case 4:
            members[f"{root}/data.pkl"] = damaged_bytes(pick, members[f"{root}/data.pkl"], data)
        case 5:
            name = pick.choice(names)
            members[name] = damaged_bytes(pick, members[name], data)
        case 6:
            del members[pick.choice(names)]
        case 7:
            members[pick.choice(names).replace(root, pick.choice([root, "", "x/y"]))] = members[pick.choice(names)]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", pick.choice([zipfile.ZIP_STORED] * 9 + [zipfile.ZIP_DEFLATED])) as archive:
        for name, content in members.items():
            archive.writestr(name if name.strip("\0") else "-", content)
    return buffer.getvalue()


def damaged_tail(pick: random.Random, data: bytes) -> bytes:
    """A zip's directory with a few of its numbers changed."""
    result = bytearray(data)
    directory = [found.start() for found in re.finditer(rb"PK\x01\x02|PK\x05\x06|PK\x06\x06|PK\x06\x07|PK\x03\x04", data)]
    for _ in range(pick.choice([1, 1, 2, 3])):
        at, width = pick.choice(directory) + pick.randrange(4, 60), pick.choice([1, 2, 4, 8])
        old = int.from_bytes(result[at : at + width], "little")
        new = pick.choice([*NUMBERS, old + 1, old + 64, abs(old - 1), pick.randrange(len(data))])
        result[at : at + width] = (new % 256**width).to_bytes(width, "little")
    return bytes(result)


def damaged_legacy(pick: random.Random, data: bytes) -> bytes:
    """The form before torch 1.6, its fourth (the description) or another of its pickles damaged."""
    stream, starts = io.BytesIO(data), []
    for _ in range(5):
        starts.append(stream.tell())
        list(pickletools.genops(stream))
    return damaged_pickle(pick, data, starts[pick.choice([3, 3, 3, 3, 3, 0, 1, 2, 4])])


def damaged(pick: random.Random, data: bytes, other: bytes) -> bytes:
    kind = pick.randrange(10)
    if kind < 3:
        return damaged_bytes(pick, data, other)
    if kind == 3:
        return data[: pick.randrange(len(data))]
    if not data.startswith(b"PK"):
        return damaged_legacy(pick, data)
    return damaged_zip(pick, data) if kind < 8 else damaged_tail(pick, data)


def outcome(path: Path) -> str:
    """ "loaded", or the refusal without its particulars; anything else is a bug, and raised."""
    try:
        file = TorchFile(path)
        for name, entry in file.entries.items():
            tensors = [file.read(name), file.read(name, mapped=False), file.read(name, torch.bfloat16)]
            assert all(tensor.shape == entry.shape and tensor.is_contiguous() for tensor in tensors)
            assert tensors[0].dtype == tensors[1].dtype == entry.dtype
            assert sum(tensor.nbytes for tensor in tensors) < 4 * path.stat().st_size
        return "loaded"
    except CheckpointError as error:
        message = str(error)
        assert message.startswith(f"{path}: "), message
        assert "; " in message, message
        assert message.isprintable(), message
        assert len(message) < 700, message
        return re.sub(r"b?'.*'|b?\".*\"|tensor \S+|[\d,]+", "*", message.removeprefix(f"{path}: "))[:60]


def forbid(event: str, args: tuple[object, ...]) -> None:
    if event == "pickle.find_class" or event.startswith(("os.system", "os.exec", "os.spawn", "subprocess")):
        raise AssertionError(f"{event} {args}")


def main(count: int, seed: int, folder: Path) -> None:
    pick, outcomes, path = random.Random(seed), Counter(), folder / "damaged.bin"
    torch.manual_seed(seed)
    files = originals(folder)
    for content in files:
        path.write_bytes(content)
        assert outcome(path) == "loaded"
    warnings.simplefilter("error")
    sys.addaudithook(forbid)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slowest = 0.0
    for number in range(count):
        path.write_bytes(damaged(pick, pick.choice(files), pick.choice(files)))
        begin = time.process_time()
        try:
            outcomes[outcome(path)] += 1
        except BaseException:
            print(f"file {number} of seed {seed}", file=sys.stderr)
            raise
        slowest = max(slowest, time.process_time() - begin)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) // 1024
    print(json.dumps({"loaded": outcomes.pop("loaded", 0), "refused": outcomes, "slowest_s": slowest, "grown_mb": grown}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
