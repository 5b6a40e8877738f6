"""The floor of noise of one model on one text, beside what a batch, padding and another dtype make: ``gpt2 compare --noise``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from gpt2.checkpoint.names import DEFAULT
from gpt2.comparison.floor import TOKENS, Floor, measure_floor
from gpt2.comparison.passage import open_passage
from gpt2.comparison.sides.checkpoint_side import CheckpointSide
from gpt2.comparison.subjects import Model, Scored
from gpt2.errors import InputError
from gpt2.measure.estimates import Bootstrap, Estimate
from gpt2.measure.metrics import Progress, max_abs, silent
from gpt2.measure.per_token import measure_rows
from gpt2.pages.reports import Environment, Printed, add_texts, as_json, data_table, dtype_label, environment

if TYPE_CHECKING:
    from rich.console import RenderableType

ROW, TOGETHER, PADDING = 256, 4, 7  # tokens of a row, rows of a batch, and tokens of padding: odd, so that rows lie elsewhere


@dataclass(frozen=True)
class Way:
    """The model run in another way, beside each row of the text alone; ``flipped`` are tokens with another first choice."""

    name: str
    kl: Estimate
    logit: float  # the largest difference of one
    flipped: int


@dataclass(frozen=True)
class Noise(Printed):
    """The floor of a model that rounds to its dtype (None: it computes in int8), and the ways that were measured."""

    model: Model
    text: Scored
    floor: Floor | None
    ways: tuple[Way, ...]
    environment: Environment
    seed: int
    seconds: float
    command: ClassVar[str] = "gpt2 compare --noise"

    def to_json(self) -> str:
        """Return everything that was measured as JSON."""
        return as_json(dict(vars(self)))

    def parts(self) -> Iterator[RenderableType]:
        """Yield the model and text, a row for the floor and each way, and what a difference must exceed."""
        from rich.markup import escape

        yield f"\n[bold]{escape(self.model.name)}[/bold]  [dim]the floor of noise[/dim]"
        rows = f"{self.text.tokens:,} tokens in rows of {self.text.context}"
        yield f"[dim]{escape(self.text.name)}: {rows}, {self.model.dtype}[/dim]\n"
        table = data_table("", "KL, nats", "95 %", "largest logit", "flipped", right=range(1, 5), wrap=True)
        floor = () if self.floor is None else ((f"{name}, explained", kl, logit, "") for name, kl, logit in self.floor.ways)
        for name, kl, logit, flipped in (*floor, *((way.name, way.kl, way.logit, f"{way.flipped:,}") for way in self.ways)):
            add_texts(table, name, f"{kl.value:.1e}", f"{kl.low:.1e} .. {kl.high:.1e}", f"{logit:.1e}", flipped)
        yield table
        yield "[dim]flipped: tokens whose first choice is another one than that of each row run alone[/dim]"
        if self.floor is not None:
            least = f"a KL must exceed {self.floor.kl:.2g} nats, and a logit move by more than {self.floor.logit:.2g}"
            yield f"[bold]In {self.model.dtype} {least}, to mean anything.[/bold]"
        yield f"[dim]in {self.seconds:.1f} s[/dim]\n"


@torch.inference_mode()
def measure_noise(
    name: str = DEFAULT,
    *,
    on: str | None = None,
    tokens: int | None = None,
    seed: int = 0,
    offline: bool = False,
    progress: Progress = silent,
) -> Noise:
    """Return what rounding explains between two runs of a model, and measure a batch, padding and another dtype.

    Arguments as for :func:`gpt2.compare`; by default 1024 tokens. Raises InputError: no such model or text, or too few tokens.
    """
    started = time.perf_counter()
    side = CheckpointSide.open(name, offline=offline)
    if side.by_transformers:
        raise InputError(f"{name}: --noise runs our implementation; leave out hf/")
    tokenizer = side.tokenizer()
    passage = open_passage(on, ROW * TOGETHER if tokens is None else tokens, [side], [tokenizer], seed, offline=offline)
    vocab = min([side.config.vocab_size] + ([] if tokenizer is None else [tokenizer.n_vocab]))
    progress("loading the model")
    other = torch.float32 if side.dtype == torch.bfloat16 else torch.bfloat16
    model, coarse, padding = side.checkpoint.load(), side.checkpoint.load(other), min(PADDING, side.config.n_positions // 2)
    length = min(ROW, side.config.n_positions - padding, len(passage.ids))
    rows = passage.ids[: len(passage.ids) // length * length].view(-1, length)

    def padded(some: Tensor) -> Tensor:
        wide = torch.cat((some.new_zeros(len(some), padding), some), 1)
        real = (torch.arange(wide.size(1)) >= padding).expand_as(wide).long()
        return torch.cat([model(row[None], attention_mask=mask[None])[:, padding:] for row, mask in zip(wide, real, strict=True)])

    ways: dict[str, Callable[[Tensor], Tensor]] = {
        f"{min(TOGETHER, len(rows))} rows in one batch": model,
        f"{padding} tokens of padding on the left": padded,
        f"in {dtype_label(other)}": lambda some: torch.cat([coarse(row[None]) for row in some]),
    }
    columns: dict[str, list[tuple[Tensor, Tensor, float]]] = {way: [] for way in ways}
    for done, some in enumerate(rows.split(TOGETHER)):
        progress(f"noise: {done * TOGETHER * length:,} of {rows.numel():,} tokens")
        alone = torch.cat([model(row[None]) for row in some])[..., :vocab].flatten(0, 1)
        for way, run in ways.items():
            moved = run(some)[..., :vocab].flatten(0, 1)
            _, _, kl, _, _, top, other_top, *_ = measure_rows(alone, moved, some.flatten(), 1)
            columns[way].append((kl, top != other_top, max_abs(moved, alone)))
    bootstrap, found = Bootstrap(rows.numel(), seed), []
    for way, parts in columns.items():
        kls, flips, logits = zip(*parts, strict=True)
        found.append(Way(way, bootstrap.mean(torch.cat(kls)), max(logits), int(torch.cat(flips).sum())))
    progress("the floor of noise")
    floor = None if side.dtype == torch.int8 else measure_floor(model, passage.ids[:TOKENS], vocab, side.dtype)
    env = environment([side.dtype])
    text = Scored(passage.scored.name, passage.scored.sha256, rows.numel(), length, length, "")
    return Noise(side.describe(env.versions), text, floor, tuple(found), env, seed, time.perf_counter() - started)
