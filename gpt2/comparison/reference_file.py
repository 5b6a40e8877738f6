"""Write and read a reference: what one side of a comparison showed on a text, kept for a comparison elsewhere or years later.

A reference is a safetensors file. N are the text's tokens, M the scored ones in the order of the windows, V the vocabulary::

    ids                             (N,) int32
    logits                          (M, V) as the side gave them; or, of the K likeliest tokens alone,
    top_ids, top_logp               (M, K) int32 and float64: ids and log-probabilities in nats, largest first
    target_logp                     (M,) float64: that of the right token
    rest                            (M,) float64: the probability of all other tokens together
    token_bytes                     (M,) int32: the right token's length, 0 where no tokenizer was known
    at.NAME                         (1, T, ...) activations of the first T tokens, on request, under the names of a trace
    crc32                           (M, 4) uint8: of each row of the logits, or of the K likeliest tokens' arrays

The metadata's ``about`` is JSON: the side with its files' sha256, the text with its protocol, versions and machine. safetensors
has no checksum, so ``crc32`` and one of all the rest (``checked``) are compared when a file is read.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Self

import torch
from torch import Tensor

from gpt2 import __version__
from gpt2.checkpoint.containers import require_whole_files
from gpt2.checkpoint.containers.safetensors_file import SafetensorsFile
from gpt2.checkpoint.saving import raw_bytes, safetensors_header, write_pieces
from gpt2.data.files import written_aside
from gpt2.errors import CheckpointError, InputError
from gpt2.measure.per_token import log_sums
from gpt2.measure.windows import RowWindows, Windows
from gpt2.pages.reports import as_json

FORMAT = "gpt2-toolkit reference"
TRACE_PREFIX = "trace:"  # of the name of a side that was saved
MAX_VOCAB = 1 << 24  # ids; no tokenizer has as many
ACTIVATION = "at."  # before a traced point's name
SHIFTS = torch.tensor([0, 8, 16, 24])  # of the four bytes of a checksum
TOP = ("top_ids", "top_logp", "target_logp", "rest")


class ReferenceWriter:
    """Write a reference of a text's ids (N,) row by row, with ``about``, which is JSON of the side and the text.

    ``vocab`` cuts the logits; ``top`` keeps so many of the likeliest tokens, 0 all logits; ``token_bytes`` (V,) are lengths, and
    ``activations`` have their names in a trace. Raises InputError: the file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        about: Mapping[str, Any],
        ids: Tensor,
        windows: Windows,
        vocab: int,
        top: int = 0,
        token_bytes: Tensor | None = None,
        activations: Mapping[str, Tensor] = {},
    ) -> None:
        self.path, self.vocab, self.top, self.written = path, vocab, min(top, vocab), 0
        self.targets = torch.cat([ids[span.first + 1 : span.end + 1] for span in windows.of(len(ids))])
        lengths = torch.zeros(len(self.targets)) if token_bytes is None else token_bytes[self.targets]
        self._small = {"ids": ids.int(), "token_bytes": lengths.round().int()}
        self._small |= {ACTIVATION + name: tensor.detach() for name, tensor in activations.items()}
        kept = {**vars(windows), "skipped": windows.skipped} if isinstance(windows, RowWindows) else vars(windows)
        self._about = {"format": FORMAT, "version": __version__, **about, "windows": kept, "vocab": vocab}
        self._top: list[tuple[Tensor, ...]] = []
        self._crc: list[int] = []
        self._file: IO[bytes] | None = None
        self._stack = ExitStack()

    def add(self, logits: Tensor) -> None:
        """Keep the next rows (R, V or more). Raises InputError: no room."""
        rows = logits[:, : self.vocab].detach().cpu().contiguous()
        targets = self.targets[self.written : self.written + len(rows)]
        self.written += len(rows)
        columns: tuple[Tensor, ...] = (rows,)
        if self.top:
            sums = log_sums(rows)[:, None]
            ids, values = _largest(rows, self.top)
            logp = values - sums
            right = rows.gather(1, targets[:, None]).double() - sums
            columns = (ids.int(), logp, right[:, 0], (1 - logp.exp().sum(1)).clamp(min=0))
            self._top.append(columns)
        else:
            file = self._file or self._begin(
                {"logits": torch.empty(len(self.targets), self.vocab, dtype=rows.dtype, device="meta")}
            )
            write_pieces(file, rows)
        self._crc += _checksums(columns)

    def _begin(self, streamed: Mapping[str, Tensor]) -> IO[bytes]:
        """Write the header, and the tensors that come before the streamed one; return the file."""
        tensors = {**self._small, **streamed, "crc32": torch.empty(len(self.targets), 4, dtype=torch.uint8, device="meta")}
        about = as_json({**self._about, "checked": checksum(self._small)}, None)
        header, order = safetensors_header(tensors, {"about": about, "about_crc32": str(zlib.crc32(about.encode()))})
        self._file = self._stack.enter_context(written_aside(self.path))
        self._file.write(header)
        place = order.index("logits" if "logits" in order else "crc32")
        for name in order[:place]:
            self._file.write(raw_bytes(tensors[name]))
        self._later = [name for name in order[place:] if name != "logits"]
        return self._file

    def _finish(self) -> None:
        assert self.written == len(self.targets), f"{self.written} rows of {len(self.targets)}"
        tops = zip(TOP, zip(*self._top, strict=True), strict=False)
        file = self._file or self._begin({name: torch.cat(column) for name, column in tops})
        crc = torch.tensor(self._crc, dtype=torch.int64)[:, None]
        self._small["crc32"] = (crc >> SHIFTS & 255).to(torch.uint8)
        for name in self._later:
            file.write(raw_bytes(self._small[name]))

    @contextmanager
    def open(self) -> Iterator[Self]:
        """Write during the ``with`` block; the file is synced and renamed at its end, or removed after an error."""
        try:
            with self._stack:
                yield self
                self._finish()
        except OSError as error:
            why = f"cannot be written ({error.strerror or error}); choose another place, or make room"
            raise InputError(f"{self.path}: {why}") from error


@dataclass(frozen=True)
class Reference:
    """A reference that was read: its text, and its arrays as they lie in the file."""

    path: Path
    about: Mapping[str, Any]
    ids: Tensor  # (N,) int64
    windows: Windows
    vocab: int
    file: SafetensorsFile

    @property
    def whole(self) -> bool:
        """Whether all logits are kept, or those of the likeliest tokens."""
        return "logits" in self.file.entries

    @property
    def activations(self) -> dict[str, Tensor]:
        """The kept activations by their names in a trace; none if they were not asked for."""
        names = [name for name in self.file.entries if name.startswith(ACTIVATION)]
        return {name.removeprefix(ACTIVATION): self.file.read(name) for name in names}

    def logits(self, scored: slice) -> Tensor:
        """Return the logits (R, V) of some scored tokens. Raises CheckpointError: a row is not as it was written."""
        return self._intact("logits", places=scored)[0]

    def top(self) -> tuple[Tensor, ...]:
        """Return the arrays ``TOP`` of the likeliest tokens. Raises CheckpointError: a row is not as it was written."""
        return self._intact(*TOP)

    @cached_property
    def _crc(self) -> list[int]:
        return (self.file.read("crc32").long() << SHIFTS).sum(1).tolist()

    def _intact(self, *names: str, places: slice = slice(None)) -> tuple[Tensor, ...]:
        require_whole_files()
        columns = tuple(self.file.read(name)[places] for name in names)
        if _checksums(columns) != self._crc[places]:
            raise CheckpointError(f"{self.path}: is damaged: a row's checksum is wrong; copy the file again")
        return columns


def about_of(path: Path) -> dict[str, Any] | None:
    """Return the ``about`` of a safetensors file of ours, a reference or a trace; None of a foreign one.

    Raises CheckpointError: the file is damaged.
    """
    metadata = SafetensorsFile(path).metadata
    try:
        about = json.loads(metadata["about"])
    except (KeyError, ValueError, RecursionError):
        return None
    if not isinstance(about, dict) or not isinstance(about.get("format"), str):
        return None
    if about["format"] == FORMAT and metadata.get("about_crc32") != str(zlib.crc32(metadata["about"].encode())):
        raise CheckpointError(f"{path}: is damaged: its header's checksum is wrong; copy the file again")
    return about


def read_reference(path: Path) -> Reference:
    """Open a reference. Raises CheckpointError: it is damaged, or none."""
    file, about = SafetensorsFile(path), about_of(path)
    try:
        if about is None or about["format"] != FORMAT:
            raise ValueError("is not a reference")
        small = {n: file.read(n) for n in file.entries if n in ("ids", "token_bytes") or n.startswith(ACTIVATION)}
        if checksum(small) != about["checked"]:
            raise ValueError("the checksum of its ids or activations is wrong")
        kind = RowWindows if "skipped" in about["windows"] else Windows
        windows, ids, vocab = kind(**about["windows"]), small["ids"].long(), int(about["vocab"])
        if not all(value is None or (isinstance(value, int) and value >= 0) for value in vars(windows).values()):
            raise ValueError("its windows are not whole numbers")
        scored = sum(span.end - span.first for span in windows.of(len(ids)))
        found: dict[str, Any] = {name: (entry.dtype, *entry.shape) for name, entry in file.entries.items()}
        wanted: dict[str, Any] = {
            "crc32": (torch.uint8, scored, 4),
            "token_bytes": (torch.int32, scored),
            "ids": (torch.int32, len(ids)),
        }
        if "logits" in found:
            dtype, k = found["logits"][0], vocab
            wanted["logits"] = dtype if dtype.is_floating_point else torch.float32, scored, k
        else:
            k = found["top_ids"][2]
            wanted |= {"top_ids": (torch.int32, scored, k), "top_logp": (torch.float64, scored, k)}
            wanted |= dict.fromkeys(("target_logp", "rest"), (torch.float64, scored))
        if k < 1 or any(found[name] != what for name, what in wanted.items()):
            raise ValueError(f"its arrays are not of {scored:,} scored tokens")
        if not 0 <= int(ids.min()) <= int(ids.max()) < vocab <= MAX_VOCAB or int(small["token_bytes"].min()) < 0:
            raise ValueError(f"an id is outside its vocabulary of {vocab:,}, or a token has no length")
    except (KeyError, ValueError, TypeError, IndexError, OverflowError, InputError) as error:
        raise CheckpointError(f"{path}: is damaged ({error}); save the reference again") from None
    return Reference(path, about, ids, windows, vocab, file)


def _largest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return ids and float64 values (R, k) of each row's largest, largest first; among equals the lower id first.

    :func:`gpt2.measure.per_token.likeliest` is faster for a few, and takes minutes for a hundred of 8,192 tokens.
    """
    ids = logits.topk(k, sorted=False).indices.sort(1).values
    values, order = logits.gather(1, ids).double().sort(dim=1, descending=True, stable=True)
    return ids.gather(1, order), values


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """Return one CRC-32 of several tensors, in the order of their names."""
    crc = 0
    for name in sorted(tensors):
        crc = zlib.crc32(raw_bytes(tensors[name]), crc)
    return crc


def _checksums(columns: tuple[Tensor, ...]) -> list[int]:
    """Return the CRC-32 of each row, over all columns."""
    crcs = [0] * len(columns[0])
    for column in columns:
        flat = column.contiguous().view(len(column), -1).view(torch.uint8).numpy()
        crcs = [zlib.crc32(row, crc) for row, crc in zip(flat, crcs, strict=True)]
    return crcs
