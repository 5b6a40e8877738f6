"""Damaged torch files for `support/fuzz.py`: bytes, pickles, archives and the numbers in a zip's directory."""

import io
import itertools
import pickletools
import random
import re
import zipfile
from pathlib import Path

import torch

from gpt2.checkpoint.containers.torch_file import TorchFile
from gpt2.config import GPT2Config
from support.fuzz import Subject, changed_bytes, number_bytes, of_files, read_every_way
from support.torch_layouts import hf_bin, lightning, mingpt, nanogpt

SMALL = GPT2Config(vocab_size=5, n_positions=4, n_embd=4, n_layer=1, n_head=2, bos_token_id=4, eos_token_id=4)
OPCODES = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes]


def damaged_pickle(pick: random.Random, data: bytes, start: int = 0) -> bytes:
    """Change whole instructions (replace, drop, repeat or swap some), or a number in one."""
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
                parts[at] = b"J" + number_bytes(pick, (4,))
            case 5:
                numbers = [i for i, part in enumerate(parts) if part[:1] in (b"K", b"M", b"J")]
                if numbers:
                    parts[pick.choice(numbers)] = b"K" + bytes([pick.randrange(40)])
    return data[: bounds[0]] + b"".join(parts) + data[bounds[-1] :]


def damaged_zip(pick: random.Random, data: bytes) -> bytes:
    """A well-formed archive with damaged members."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    names = list(members)
    root = names[0].split("/")[0]
    match pick.randrange(8):
        case 0 | 1 | 2 | 3:
            members[f"{root}/data.pkl"] = damaged_pickle(pick, members[f"{root}/data.pkl"])
        case 4:
            members[f"{root}/data.pkl"] = changed_bytes(pick, members[f"{root}/data.pkl"], data)
        case 5:
            name = pick.choice(names)
            members[name] = changed_bytes(pick, members[name], data)
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
    directory = [match.start() for match in re.finditer(rb"PK\x01\x02|PK\x05\x06|PK\x06\x06|PK\x06\x07|PK\x03\x04", data)]
    for _ in range(pick.choice([1, 1, 2, 3])):
        at = pick.choice(directory) + pick.randrange(4, 60)
        old = int.from_bytes(data[at : at + 4], "little")
        number = number_bytes(pick, more=[old + 1, old + 64, abs(old - 1), pick.randrange(len(data))])
        result[at : at + len(number)] = number
    return bytes(result)


def damaged_legacy(pick: random.Random, data: bytes) -> bytes:
    """The format before torch 1.6, with the fourth (the description) or another of its pickles damaged."""
    stream, starts = io.BytesIO(data), []
    for _ in range(5):
        starts.append(stream.tell())
        list(pickletools.genops(stream))
    return damaged_pickle(pick, data, starts[pick.choice([3, 3, 3, 3, 3, 0, 1, 2, 4])])


def damaged(pick: random.Random, data: bytes, other: bytes) -> bytes:
    kind = pick.randrange(10)
    if kind < 3:
        return changed_bytes(pick, data, other)
    if kind == 3:
        return data[: pick.randrange(len(data))]
    if not data.startswith(b"PK"):
        return damaged_legacy(pick, data)
    return damaged_zip(pick, data) if kind < 8 else damaged_tail(pick, data)


def prepare(folder: Path) -> Subject:
    """One file of each kind, a few kB each."""
    hf_bin(folder / "official", SMALL, zipped=False)
    hf_bin(folder / "new", SMALL, prefix="transformer.", mask=torch.bool, head=True)
    hf_bin(folder / "half", SMALL, dtype=torch.bfloat16, mask=None)
    nanogpt(folder / "nano" / "ckpt.pt", SMALL, compiled=True)
    nanogpt(folder / "old" / "ckpt.pt", SMALL, bias=False, zipped=False)
    mingpt(folder / "min" / "model.pt", SMALL)
    lightning(folder / "light" / "last.ckpt", SMALL)
    odd = {"turned": torch.randn(3, 5).t(), "part": torch.randn(40)[3:30:2], "parameter": torch.nn.Parameter(torch.randn(2, 2))}
    torch.save(odd, folder / "odd.pt")
    torch.save(odd, folder / "odd4.pt", pickle_protocol=4)
    paths = [path for path in sorted(folder.rglob("*.*")) if path.suffix in (".bin", ".pt", ".ckpt")]
    files, path = [path.read_bytes() for path in paths], folder / "damaged.bin"

    assert len(files) == 9
    return of_files(path, files, damaged, lambda: read_every_way(TorchFile(path), 4))
