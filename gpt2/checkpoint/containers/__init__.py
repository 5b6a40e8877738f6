"""What every container of weights gives: the name, dtype and shape of each tensor at once, its data when asked.

One module per container beside this one (`safetensors_file.py`, `torch_file.py`, `tensorflow_file.py`, `gguf_file.py`), each of
which believes nothing that its file says before it is checked; and the helpers for speaking about what they found.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gpt2.config import quoted
from gpt2.errors import CheckpointError

# The largest GPT-2 has 580 tensors and 60 kB of header; a header of megabytes is an attack on the JSON parser.
HEADER_LIMIT = 4_000_000


@dataclass(frozen=True)
class Entry:
    """One tensor of a file, as it will be read."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Container(Protocol):
    """An open file (or set of files) of tensors, its directory checked."""

    @property
    def kind(self) -> str:
        """The format's name, for `gpt2 info`."""

    @property
    def path(self) -> Path:
        """The file, for messages."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Every tensor, by its name in the file."""

    def read(self, name: str, dtype: torch.dtype | None = None, *, mapped: bool = True) -> Tensor:
        """One tensor on the CPU, as stored or converted; a view of the mapped file where that can be, unless not ``mapped``.

        Raises:
            CheckpointError: the data is damaged, or cannot be read.
        """


def countable(shape: Iterable[int]) -> bool:
    """Whether torch can hold a tensor of this shape: an empty one too counts the elements that its other axes would have."""
    return math.prod(n or 1 for n in shape) < 1 << 48


def read_json(path: Path) -> dict[str, Any]:
    """A small JSON object from outside, or a CheckpointError."""
    try:
        if path.stat().st_size > HEADER_LIMIT:
            raise CheckpointError(
                f"{path}: is {path.stat().st_size:,} bytes, and a checkpoint's JSON has a few thousand; fetch it again"
            )
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); check that it is there, and yours to read") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON ({str(error)[:80]}); fetch it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: is not a JSON object; fetch it again")
    return value


def shown(name: str) -> str:
    """A name from outside, for a message: bare if it looks like a tensor's or a file's, else quoted and cut."""
    return name if re.fullmatch(r"[\w./-]{1,80}", name, re.ASCII) else quoted(name)


def listed(names: list[str], limit: int = 4) -> str:
    """The first few of many names, and how many more."""
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(shown(name) for name in names[:limit]) + more
