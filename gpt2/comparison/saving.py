"""Keep what a side shows: ``gpt2 compare A --save FILE``, alone or while it is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from gpt2.comparison.passage import Passage, open_passage, token_bytes
from gpt2.comparison.reference_file import ReferenceWriter
from gpt2.comparison.sides.opening import open_side
from gpt2.comparison.sides.side import Running, Shown, Side, environment_of
from gpt2.data import Tokenizer
from gpt2.errors import InputError
from gpt2.measure.metrics import Logits, Progress, silent

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


def save_reference(
    name: str,
    keep: Keep,
    *,
    on: str | None = None,
    tokens: int | None = None,
    seed: int = 0,
    dtype: str | None = None,
    device: str = "cpu",
    offline: bool = False,
    progress: Progress = silent,
) -> Path:
    """Run one side over a text, and write what it shows; the options are those of :func:`gpt2.compare`.

    Raises InputError: no such side or text, a side that shows no logits, or the file cannot be written.
    """
    side = open_side(name, offline=offline, dtype=dtype, device=device)
    tokenizer = side.tokenizer()
    passage = open_passage(on, tokens, [side], [tokenizer], seed, offline=offline)
    with side.running() as running, saving(keep, side, running, tokenizer, passage) as logits:
        run_over(logits, passage, lambda done: progress(f"{name}: {done:,} of {len(passage.ids) - 1:,} tokens"))
    return keep.path


@torch.inference_mode()
def run_over(logits: Logits, passage: Passage, progress: Callable[[int], None]) -> None:
    """Run a model over a text's windows, for what keeps its logits."""
    done = 0
    for inputs, group in passage.windows.batches(passage.ids):
        logits(inputs)
        done += sum(span.end - span.first for span in group)
        progress(done)


@contextmanager
def saving(keep: Keep, side: Side, running: Running, tokenizer: Tokenizer | None, passage: Passage) -> Iterator[Logits]:
    """Return the side's ``logits``, which must be asked for the passage's windows in order, and which keeps them in a file.

    ``tokenizer`` is that of the text. Raises InputError: the side shows no logits, or no activations where they are asked for, or
    nothing tells the size of its vocabulary.
    """
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
    sizes = [side.vocab_size, None if tokenizer is None else tokenizer.n_vocab]
    known = [size for size in sizes if size is not None]
    if not known:
        raise InputError(f"{side.name}: the size of its vocabulary is not known; save it beside a MODEL that has a tokenizer")
    vocab = min(known)
    env = environment_of([side])
    about = {
        "side": asdict(side.describe(env.versions)),
        "text": asdict(passage.scored),
        "tokenizer": tokenizer.fingerprint if tokenizer else None,
        "environment": env,
    }
    lengths = token_bytes(tokenizer, passage.written, passage.ids) if tokenizer else None
    writer = ReferenceWriter(
        keep.path,
        about,
        passage.ids,
        passage.windows,
        vocab,
        top=keep.top,
        token_bytes=lengths,
        activations=activations,
    )
    spans = passage.windows.of(len(passage.ids))

    def kept(ids: Tensor) -> Tensor:
        output = running.logits(ids)
        if output.size(-1) < vocab:
            sizes = f"gives logits of {output.size(-1):,} tokens, and its vocabulary has {vocab:,}"
            raise InputError(f"{side.name}: {sizes}; use the model's own tokenizer")
        for row in output:
            span = next(spans)
            writer.add(row[span.first - span.start :])
        return output

    with writer.open():
        yield kept
