"""Keep what a side shows: ``gpt2 compare A --save FILE``, alone or while it is compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from gpt2.comparison.loaded import Loaded
from gpt2.comparison.passage import Passage, Settings, open_passage
from gpt2.comparison.reference_file import ReferenceWriter
from gpt2.comparison.sides.opening import open_side
from gpt2.comparison.sides.side import Shown, environment_of, vocabulary
from gpt2.data import Tokenizer
from gpt2.errors import InputError
from gpt2.measure.metrics import Logits

TRACED = 256  # tokens whose activations are compared, and kept


@dataclass(frozen=True)
class Keep:
    """Where and what to save: all logits, or with ``top`` those of so many likeliest tokens; ``activations`` on request."""

    path: Path
    top: int = 0
    activations: bool = False

    def __post_init__(self) -> None:
        if self.path.suffix != ".safetensors":
            raise InputError(f"--save {self.path}: a reference is a safetensors file; give a name that ends in .safetensors")
        if self.top < 0:
            raise InputError(f"--save-top {self.top}: give the number of likeliest tokens to keep, such as 100")


def save_reference(name: str, keep: Keep, settings: Settings) -> Path:
    """Run one side over a text, and write what it shows.

    Raises InputError: no such side or text, a side that shows no logits, or the file cannot be written.
    """
    side = open_side(name, settings)
    tokenizer = side.tokenizer()
    passage = open_passage([side], [tokenizer], settings)
    with side.running() as running:
        loaded = Loaded(side, running, tokenizer, [side], vocabulary(side, tokenizer))
        with saving(keep, loaded, tokenizer, passage) as logits, torch.inference_mode():
            for inputs, group in passage.windows.batches(passage.ids):
                logits(inputs)
                settings.progress(f"{name}: {group[-1].end:,} of {len(passage.ids) - 1:,} tokens")
    return keep.path


@contextmanager
def saving(keep: Keep, loaded: Loaded, tokenizer: Tokenizer | None, passage: Passage) -> Iterator[Logits]:
    """Return the side's ``logits``, which must be asked for the passage's windows in order, and which keeps them in a file.

    ``tokenizer`` is that of the text. Raises InputError: the side shows no logits, or no activations where they are asked for, or
    nothing tells the size of its vocabulary.
    """
    side, running = loaded.side, loaded.running
    if Shown.LOGITS not in side.shows:
        raise InputError(f"{side.name}: shows no logits, so they cannot be saved; leave --save out")
    activations: dict[str, Tensor] = {}
    if keep.activations:
        if Shown.ACTIVATIONS not in side.shows:
            raise InputError(f"{side.name}: shows no activations; leave --save-activations out")
        start = passage.ids[None, : min(passage.windows.context, TRACED)]
        for what, why in running.left_out(start).items():
            raise InputError(f"{side.name}: {what} cannot be saved: {why}; leave --save-activations out")
        activations = {name: tensor for block in running.blocks(start) for name, tensor in block.items()}
    if not loaded.vocab:
        raise InputError(f"{side.name}: the size of its vocabulary is not known; save it beside a MODEL that has a tokenizer")
    env = environment_of([side])
    about = {
        "side": asdict(side.describe(env.versions)),
        "text": asdict(passage.scored),
        "tokenizer": tokenizer.fingerprint if tokenizer else None,
        "environment": env,
    }
    lengths = passage.token_bytes(tokenizer, loaded.vocab) if tokenizer else None
    text, kept = (passage.ids, passage.windows, loaded.vocab), (keep.top, lengths, activations)
    writer = ReferenceWriter(keep.path, about, *text, *kept)
    spans = passage.windows.of(len(passage.ids))

    def keeping(ids: Tensor) -> Tensor:
        output = loaded.logits(ids)
        for row in output:
            span = next(spans)
            writer.add(row[span.first - span.start :])
        return output

    with writer.open():
        yield keeping
