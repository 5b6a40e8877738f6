"""Read llm.c's checkpoints, such as gpt2_124M.bin: a header of 256 numbers, then the parameters in a fixed order.

Source: karpathy/llm.c, train_gpt2.py (write_model, write_state, write_tokenizer) and train_gpt2.c. All numbers are little-endian.
The header holds int32: magic, version, positions, vocabulary, layers, heads, width, rows of the token embedding. Each kind of
parameter follows for all layers at once; matrices are [out, in]. The embedding is padded with rows that no token uses, to a
multiple of 128. Version 3 is float32, 5 is bfloat16; 1 is float32 without padding. 2 and 4, of a few days in 2024, are refused.
"""

import math
import struct
from collections.abc import Iterator
from pathlib import Path

import torch

from gpt2.checkpoint.containers import Container, Damaged, Entry, MappedFile, Refused
from gpt2.checkpoint.keys import TABLE, template

MODEL, STATE, TOKENIZER = 20240326, 20240327, 20240328  # magic numbers
OTHER_FILES = {
    STATE: "llm.c's debug state, which holds gradients",
    TOKENIZER: "llm.c's tokenizer",
    20240520: "llm.c's file of tokens",
    20240801: "llm.c's Llama 3",
    20240803: "llm.c's Llama 3",
}
HEADER = struct.Struct("<256i")
PADDED_TO = 128  # the multiple of rows of the token embedding
UNPADDED, FLOAT32, BFLOAT16 = 1, 3, 5  # versions
DTYPES = {UNPADDED: torch.float32, FLOAT32: torch.float32, BFLOAT16: torch.bfloat16}
FIELDS = ("n_positions", "vocab_size", "n_layer", "n_head", "n_embd")
MAX_LAYERS = 10_000


class LlmcFile(Container):
    """A checkpoint of llm.c, under Hugging Face's names; ``sizes`` are what its header states."""

    kind = "llm.c"
    sizes: dict[str, int]

    def _directory(self) -> dict[str, Entry]:
        if self._file.size < HEADER.size:
            raise Damaged(f"is cut short: {self._file.size:,} bytes, with a header of {HEADER.size:,}")
        magic, version, *numbers = HEADER.unpack(self._file.bytes(0, HEADER.size))
        if magic in OTHER_FILES:
            raise Refused(f"is {OTHER_FILES[magic]}, not a GPT-2's weights; give a model's file, such as gpt2_124M.bin")
        if version not in DTYPES:
            known = ", ".join(map(str, DTYPES))
            raise Refused(f"is llm.c's version {version:,}, and {known} are read; write it anew with llm.c's train_gpt2.py")
        self.sizes = dict(zip(FIELDS, numbers, strict=False))
        rows = self.sizes["vocab_size"] if version == UNPADDED else numbers[len(FIELDS)]
        if min(self.sizes.values()) < 1 or self.sizes["n_layer"] > MAX_LAYERS:
            raise Damaged(f"has a header that states {', '.join(f'{name} {size:,}' for name, size in self.sizes.items())}")
        if rows < self.sizes["vocab_size"]:
            raise Damaged(f"has a header that states {rows:,} rows for a vocabulary of {self.sizes['vocab_size']:,}")
        shapes = {name: self._shape(name) for name in TABLE}
        padding = (rows - self.sizes["vocab_size"]) * self.sizes["n_embd"]
        layers = {name: self.sizes["n_layer"] if "{}" in name else 1 for name in TABLE}
        count = padding + sum(layers[name] * math.prod(shape) for name, shape in shapes.items())
        end = HEADER.size + count * DTYPES[version].itemsize
        if end != self._file.size:
            raise Damaged(f"has {self._file.size:,} bytes where its header says {end:,}")
        entries, start = {}, HEADER.size
        for name in order(self.sizes["n_layer"]):
            entries[name] = Entry(DTYPES[version], shapes[template(name)], start)
            start = entries[name].end + (padding * DTYPES[version].itemsize if name == "wte.weight" else 0)
        return entries

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a row of the key table, matrices as [out, in]."""
        width = self.sizes["n_embd"]
        sizes = {"V": self.sizes["vocab_size"], "P": self.sizes["n_positions"], "D": width, "3D": 3 * width, "F": 4 * width}
        shape = tuple(sizes[symbol] for symbol in TABLE[name])
        return shape[::-1] if is_matrix(name) else shape


def order(n_layer: int) -> Iterator[str]:
    """Yield every parameter's name as llm.c's files have them: one kind after the other, each for all layers."""
    for name in TABLE:
        yield from (name.format(layer) for layer in range(n_layer)) if "{}" in name else (name,)


def is_matrix(name: str) -> bool:
    """Return whether llm.c's files hold a parameter, or a row of the key table, as [out, in]."""
    return name.startswith("h.") and len(TABLE[template(name)]) == 2


def magic_of(path: Path) -> int:
    """Return the first number of a file, 0 of a shorter one."""
    head = MappedFile(path).bytes(0, 4)
    return int.from_bytes(head, "little") if len(head) == 4 else 0


def padded_rows(vocab_size: int) -> int:
    """Return the rows of the token embedding in a file."""
    return -(-vocab_size // PADDED_TO) * PADDED_TO


def header(magic: int, version: int, *numbers: int) -> bytes:
    """Return a file's first 1,024 bytes."""
    return HEADER.pack(magic, version, *numbers, *[0] * (254 - len(numbers)))
