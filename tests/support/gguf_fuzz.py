"""Damaged GGUF files for `support/fuzz.py`: mostly numbers in their headers."""

import contextlib
import random
import re
from pathlib import Path

from gpt2.checkpoint.containers.gguf_file import GGUFFile, NoTokenizer, config_of, tokenizer_of
from gpt2.checkpoint.loading import load_path
from gpt2.config import GPT2Config
from gpt2.data.bpe import train_bpe
from support.fuzz import Subject, changed_bytes, number_bytes, of_files, read_every_way
from support.gguf_layouts import BF16, F16, F32, Q8_0, write

SMALL = GPT2Config(vocab_size=260, n_positions=4, n_embd=32, n_layer=1, n_head=2, bos_token_id=259, eos_token_id=259)


def damaged(pick: random.Random, data: bytes, other: bytes) -> bytes:
    end = data.rindex(b"token_embd.weight") + 100  # approximate start of the data
    if pick.random() < 0.6:
        return changed_bytes(pick, data[:end], other) + data[end:]
    if pick.random() < 0.2:
        return changed_bytes(pick, data, other)
    result = bytearray(data)
    for _ in range(pick.choice([1, 1, 1, 2, 4])):
        # Lengths, counts, types and offsets are before and after each name.
        name = pick.choice(list(re.finditer(rb"[a-z_]+\.[a-z0-9_.]+", data[:end])))
        at = max(0, pick.choice(name.span()) + pick.choice([-8, 0, 0, 4, 8, 12, 16, 20, 24]))
        old = int.from_bytes(data[at : at + 8], "little")
        number = number_bytes(pick, (4, 8), [old + 1, abs(old - 1), old + 32, pick.randrange(len(data))])
        result[at : at + len(number)] = number
    return bytes(result)


def prepare(folder: Path) -> Subject:
    """One file of each kind, with a vocabulary and without."""
    tokenizer = train_bpe("to be or not to be", SMALL.vocab_size)
    for kind in (F32, F16, BF16, Q8_0):
        write(folder / f"{kind.name}.gguf", SMALL, kind, tokenizer=tokenizer)
    write(folder / "bare.gguf", SMALL, Q8_0, change=lambda writer: writer.add_custom_alignment(8))
    files, path = [file.read_bytes() for file in sorted(folder.glob("*.gguf"))], folder / "damaged.gguf"

    def read() -> None:
        file = GGUFFile(path)
        read_every_way(file, 12)
        config_of(file)
        load_path(path)
        with contextlib.suppress(NoTokenizer):
            tokenizer_of(file)

    return of_files(path, files, damaged, read, limit=1000)
