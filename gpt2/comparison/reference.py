"""Keep what a side shows on a text: ``gpt2 compare A --save FILE``, alone or beside a comparison, for a side ``trace:FILE``.

A reference is a safetensors file. N are the text's tokens, M the scored ones in the order of the windows, V the vocabulary::

    token_bytes   (V,) float64: the bytes that each token stands for; zeros where no tokenizer was known
    ids           (N,) int64
    logits        (M, V), as the side gave them

Its metadata's ``about`` is JSON: the side with its files' sha256, the text with its windows, versions and machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from gpt2 import __version__
from gpt2.checkpoint.saving import safetensors_header, write_pieces
from gpt2.comparison.passage import Passage
from gpt2.comparison.settings import Settings
from gpt2.comparison.sides.opening import open_passage, open_side
from gpt2.comparison.sides.side import Side, environment_of
from gpt2.comparison.sides.trace_side import FORMAT, SUFFIX
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
    passage = open_passage([side], settings)
    with side, saving(path, side, passage) as logits, torch.inference_mode():
        for inputs, group in passage.windows.batches(passage.ids):
            logits(inputs)
            settings.progress(f"{name}: {group[-1].end:,} of {len(passage.ids) - 1:,} tokens")
    return path


@contextmanager
def saving(path: Path, side: Side, passage: Passage) -> Iterator[Logits]:
    """Return the side's ``logits``, which must be asked for the passage's windows in order, and which keeps them in a file.

    Raises InputError: the side is such a file, the size of its vocabulary is not known, or the file cannot be written.
    """
    tokenizer, vocab = side.text_tokenizer, side.vocab
    if side.recording is not None:
        raise InputError(f"{side.name}: is a file of what was shown already; leave --save out")
    if not vocab:
        raise InputError(f"{side.name}: the size of its vocabulary is not known; save it beside a MODEL that has a tokenizer")
    env, spans = environment_of([side]), list(passage.windows.of(len(passage.ids)))
    said = {"side": side.describe(), "text": passage.scored, "environment": env}
    said |= {"tokenizer": tokenizer.fingerprint if tokenizer else None, "windows": vars(passage.windows)}
    about = as_json({"format": FORMAT, "version": __version__, **said}, None)
    lengths = passage.token_bytes(tokenizer)[:vocab].double() if tokenizer else torch.zeros(vocab, dtype=torch.float64)
    shape, rest = (sum(span.end - span.first for span in spans), vocab), iter(spans)

    def keeping(ids: Tensor) -> Tensor:
        output = side.logits(ids)
        for row in output:
            span = next(rest)
            parts = [row[span.first - span.start :]]
            if span is spans[0]:  # the header needs the type of the logits
                logits = torch.empty(shape, dtype=row.dtype, device="meta")
                header, _ = safetensors_header({"token_bytes": lengths, "ids": passage.ids, "logits": logits}, {"about": about})
                parts = [torch.frombuffer(bytearray(header), dtype=torch.uint8), lengths, passage.ids, *parts]
            for part in parts:
                write_pieces(file, part)
        return output

    try:
        with written_aside(path) as file:
            yield keeping
            assert next(rest, None) is None, "a window was not asked for"
    except OSError as error:
        why = f"cannot be written ({error.strerror or error}); choose another place, or make room"
        raise InputError(f"{path}: {why}") from error
