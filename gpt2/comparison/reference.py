"""Keep what a side shows on a text: ``gpt2 compare A --save FILE``, alone or beside a comparison, for a side ``trace:FILE``.

A reference is a safetensors file. N are the text's tokens, M the scored ones in the order of the windows, V the vocabulary::

    ids           (N,) int32
    logits        (M, V), as the side gave them
    token_bytes   (V,) float64: the bytes that each token stands for; zeros where no tokenizer was known
    crc32         (4,) uint8, little-endian: of the metadata's ``about``, the logits, the ids and the bytes, in this order

``about`` is JSON: the side with its files' sha256, the text with its windows, versions and machine. safetensors has no checksum,
so ``crc32`` is compared when a file is read.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from gpt2 import __version__
from gpt2.checkpoint.saving import raw_bytes, safetensors_header, write_pieces
from gpt2.comparison.loaded import Loaded
from gpt2.comparison.passage import Passage, Settings, open_passage
from gpt2.comparison.sides.opening import open_side
from gpt2.comparison.sides.side import environment_of
from gpt2.comparison.sides.trace_side import FORMAT, SUFFIX, checksum
from gpt2.data.files import written_aside
from gpt2.errors import InputError, user_path
from gpt2.measure.metrics import Logits
from gpt2.pages.reports import as_json


def require_name(path: str | Path) -> Path:
    """Return the path of a reference that will be written. Raises InputError: another suffix."""
    if Path(path).suffix != SUFFIX:
        raise InputError(f"--save {path}: a reference is a safetensors file; give a name that ends in {SUFFIX}")
    return user_path(path)


def save_reference(name: str, path: str | Path, settings: Settings) -> Path:
    """Run one side over a text, write what it shows, and return the path.

    Raises InputError: no such side or text, or the file cannot be written.
    """
    path, side = require_name(path), open_side(name, settings)
    passage = open_passage([side], [side.tokenizer], settings)
    with side, saving(path, Loaded(side, [side]), passage) as logits, torch.inference_mode():
        for inputs, group in passage.windows.batches(passage.ids):
            logits(inputs)
            settings.progress(f"{name}: {group[-1].end:,} of {len(passage.ids) - 1:,} tokens")
    return path


@contextmanager
def saving(path: Path, loaded: Loaded, passage: Passage) -> Iterator[Logits]:
    """Return the side's ``logits``, which must be asked for the passage's windows in order, and which keeps them in a file.

    Raises InputError: the side is such a file, the size of its vocabulary is not known, or the file cannot be written.
    """
    side, tokenizer, vocab, windows = loaded.side, loaded.tokenizer, loaded.vocab, passage.windows
    if side.recording is not None:
        raise InputError(f"{side.name}: is a file of what was shown already; leave --save out")
    if not vocab:
        raise InputError(f"{side.name}: the size of its vocabulary is not known; save it beside a MODEL that has a tokenizer")
    env, spans = environment_of([side]), list(windows.of(len(passage.ids)))
    said = {"side": asdict(side.describe(env.versions)), "text": asdict(passage.scored), "environment": env}
    said |= {"tokenizer": tokenizer.fingerprint if tokenizer else None, "windows": vars(windows)}
    about = as_json({"format": FORMAT, "version": __version__, **said}, None)
    lengths = passage.token_bytes(tokenizer)[:vocab].double() if tokenizer else torch.zeros(vocab, dtype=torch.float64)
    held = {"ids": passage.ids.int(), "token_bytes": lengths, "crc32": torch.empty(4, dtype=torch.uint8)}
    later, rest = list[str](), iter(spans)
    file: IO[bytes] | None = None
    crc = zlib.crc32(about.encode())

    def keeping(ids: Tensor) -> Tensor:
        nonlocal file, crc
        output = loaded.logits(ids)
        for row in output:
            span = next(rest)
            rows = row[span.first - span.start :].detach().cpu().contiguous()
            if file is None:  # the header needs the type of the logits
                shape = sum(span.end - span.first for span in spans), vocab
                held["logits"] = torch.empty(shape, dtype=rows.dtype, device="meta")
                header, order = safetensors_header(held, {"about": about})
                file = stack.enter_context(written_aside(path))
                file.write(header)
                file.writelines(raw_bytes(held[name]) for name in order[: order.index("logits")])
                later.extend(order[order.index("logits") + 1 :])
            write_pieces(file, rows)
            crc = zlib.crc32(raw_bytes(rows), crc)
        return output

    try:
        with ExitStack() as stack:
            yield keeping
            assert file is not None
            assert next(rest, None) is None, "a window was not asked for"
            held["crc32"] = torch.tensor(list(checksum(held, crc)), dtype=torch.uint8)
            file.writelines(raw_bytes(held[name]) for name in later)
    except OSError as error:
        why = f"cannot be written ({error.strerror or error}); choose another place, or make room"
        raise InputError(f"{path}: {why}") from error
