"""Thousands of damaged GGUF files through the reader, in a process of its own: `python -m support.gguf_fuzz COUNT SEED FOLDER`.

Every file must load, or give one InputError of one line. The last line of stdout is a JSON object: how many loaded, how often
each refusal was given (numbers and names taken out), the slowest file, and the memory that the process grew by.
"""

import json
import random
import re
import resource
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from gpt2.checkpoint.containers.gguf_file import GGUFFile, config_of, tokenizer_of
from gpt2.checkpoint.loading import load_path
from gpt2.data.bpe import train_bpe
from gpt2.errors import InputError
from support.gguf_layouts import BF16, F16, F32, Q8_0, WIDE, write

SMALL = type(WIDE)(vocab_size=260, n_positions=4, n_embd=32, n_layer=1, n_head=2, bos_token_id=259, eos_token_id=259)
NUMBERS = [0, 1, 2, 3, 8, 9, 31, 32, 64, 255, 256, 2**16, 2**31 - 1, 2**32 - 1, 2**40, 2**48, 2**62, 2**63, 2**64 - 1]


def originals(folder: Path) -> list[bytes]:
    """One file of each kind, with a vocabulary and without."""
    tokenizer = train_bpe("to be or not to be", SMALL.vocab_size)
    for kind in (F32, F16, BF16, Q8_0):
        write(folder / f"{kind.name}.gguf", SMALL, kind, tokenizer=tokenizer)
    write(folder / "bare.gguf", SMALL, Q8_0, change=lambda writer: writer.add_custom_alignment(8))
    return [path.read_bytes() for path in sorted(folder.glob("*.gguf"))]


def header_end(data: bytes) -> int:
    """Where the data begins, near enough."""
    return data.rindex(b"token_embd.weight") + 100


def places(data: bytes) -> list[int]:
    """Where the lengths, counts, types and offsets lie: before and behind each name."""
    return [at for found in re.finditer(rb"[a-z_]+\.[a-z0-9_.]+", data[: header_end(data)]) for at in found.span()]


def damaged(pick: random.Random, data: bytes, other: bytes) -> bytes:
    """Flip, overwrite, cut, repeat, splice; mostly in the header, and there mostly in its numbers."""
    result, named = bytearray(data), places(data)
    for _ in range(pick.choice([1, 1, 1, 2, 4])):
        at = pick.choice([pick.randrange(24), pick.randrange(header_end(data)), pick.randrange(len(data))])
        match pick.randrange(8):
            case 0 | 1 | 2:
                at, width = max(0, pick.choice(named) + pick.choice([-8, 0, 0, 4, 8, 12, 16, 20, 24])), pick.choice([4, 8])
                old = int.from_bytes(data[at : at + width], "little")
                new = pick.choice([*NUMBERS, old + 1, abs(old - 1), old + 32, pick.randrange(len(data))])
                result[at : at + width] = (new % 256**width).to_bytes(width, "little")
            case 3:
                result[at : at + 8] = pick.choice(NUMBERS).to_bytes(8, "little")
            case 4 if at < len(result):
                result[at] ^= 1 << pick.randrange(8)
            case 5:
                del result[at : at + pick.choice([1, 4, 8, 100, 10**6])]
            case 6:
                result[at:at] = result[at : at + pick.choice([1, 8, 32, 500])]
            case 7:
                start = pick.randrange(len(other))
                result[at : at + pick.choice([0, 30])] = other[start : start + pick.choice([1, 30, 300])]
    return bytes(result)


def outcome(path: Path) -> str:
    """ "loaded", or the refusal without its particulars; anything else is a bug, and raised."""
    try:
        file = GGUFFile(path)
        for name, entry in file.entries.items():
            tensors = [file.read(name), file.read(name, mapped=False), file.read(name, torch.bfloat16)]
            assert all(tensor.shape == entry.shape and tensor.is_contiguous() for tensor in tensors)
            assert tensors[0].dtype == tensors[1].dtype == entry.dtype
            assert sum(tensor.nbytes for tensor in tensors) < 12 * path.stat().st_size
        config_of(file)
        load_path(path)
        tokenizer_of(file)
        return "loaded"
    except InputError as error:
        message = str(error)
        assert message.startswith(f"{path}"), message
        assert "; " in message, message
        assert message.isprintable(), message
        assert len(message) < 1000, message
        return re.sub(r"b?'.*'|b?\".*\"|[\w.]*[._][\w.]+|[\d,]+", "*", message.removeprefix(f"{path}").lstrip(": "))[:60]


def main(count: int, seed: int, folder: Path) -> None:
    pick, outcomes, path = random.Random(seed), Counter(), folder / "damaged.gguf"
    files = originals(folder / "originals")
    told = []
    for content in files:
        path.write_bytes(content)
        told.append(outcome(path))
    assert Counter(told)["loaded"] == 4, told  # the fifth carries no tokenizer
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
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    loaded = outcomes.pop("loaded", 0)
    refused = dict(outcomes.most_common())
    print(json.dumps({"loaded": loaded, "refused": refused, "slowest_s": slowest, "grown_mb": grown / 1024}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
