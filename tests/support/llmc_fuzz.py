"""Damaged checkpoints of llm.c for `support/fuzz.py`: mostly the numbers of the header, sometimes the file's length."""

import random
from pathlib import Path

from gpt2.checkpoint.files import open_file
from gpt2.checkpoint.loading import load_path
from gpt2.config import GPT2Config
from support.fuzz import Subject, changed_bytes, number_bytes, of_files, read_every_way
from support.llmc_layouts import write

SMALL = GPT2Config(vocab_size=60, n_positions=4, n_embd=8, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None)
USED = 8  # numbers of the header that have a meaning


def damaged(pick: random.Random, data: bytes, other: bytes) -> bytes:
    chance = pick.random()
    if chance < 0.15:
        return changed_bytes(pick, data, other)
    if chance < 0.25:
        return changed_bytes(pick, data[:1024], other) + data[1024:]
    if chance < 0.35:
        return data[: pick.randrange(len(data))] if pick.random() < 0.5 else data + bytes(pick.choice([1, 2, 4, 1000]))
    result = bytearray(data)
    for _ in range(pick.choice([1, 1, 1, 2, 4])):
        at = 4 * (pick.randrange(USED) if pick.random() < 0.8 else pick.randrange(256))
        old = int.from_bytes(data[at : at + 4], "little")
        result[at : at + 4] = number_bytes(pick, (4,), [old + 1, abs(old - 1), 2 * old, old // 2, 20240327, 20240328, 1, 3, 5])
    return bytes(result)


def prepare(folder: Path) -> Subject:
    """One file of each version."""
    for version in (1, 3, 5):
        write(folder / f"{version}.bin", SMALL, version=version)
    files, path = [(folder / f"{version}.bin").read_bytes() for version in (1, 3, 5)], folder / "damaged" / "model.bin"
    path.parent.mkdir()

    def read() -> None:
        read_every_way(open_file(path), 12)
        load_path(path)

    return of_files(path, files, damaged, read)
