"""The floor of noise: how far two right runs of one model part by rounding alone, and ``gpt2 compare --noise``."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.comparison.distributions import perplexity_ratio
from gpt2.comparison.passage import Scored
from gpt2.comparison.settings import Settings
from gpt2.comparison.sides.engines import EngineSide
from gpt2.comparison.sides.opening import open_passage, open_side
from gpt2.comparison.sides.side import ComparedModel, Side, environment_of
from gpt2.errors import InputError
from gpt2.measure.environment import Environment, dtype_label
from gpt2.measure.estimates import Bootstrap, Estimate, positive
from gpt2.measure.metrics import Logits, max_abs
from gpt2.measure.per_token import measure_rows
from gpt2.measure.rounding import rounding_noise
from gpt2.model import GPT2
from gpt2.pages.reports import Column, Printed, Section, as_json, bold, dim, numbers
from gpt2.parity.streaming import Streamed

SURE = 2048  # tokens for a floor on which a verdict depends: on 256, rounding to bfloat16 makes a ratio of 0.996 .. 1.004
ROW, TOGETHER, PADDING = 256, 4, 7  # tokens of a row, rows of a batch, and tokens of padding: odd, so that rows lie elsewhere
EXACT = Estimate(1.0, 1.0, 1.0)  # a ratio of what is equal


@dataclass(frozen=True)
class Floor:
    """KL between two right runs, and the largest difference of a logit. A difference that is not above means nothing.

    ``ratio`` is that of their perplexities: one that is above its floor may stand beside a KL that is not.
    """

    way: str  # what makes the runs differ
    mean: Estimate
    logit: float
    tokens: int
    ratio: Estimate
    kl = property(lambda self: self.mean.high)  # what a mean KL must exceed

    @property
    def figures(self) -> dict[str, object]:
        """What the JSON has of it."""
        return {"ways": [(self.way, self.mean, self.logit)], "tokens": self.tokens}


def equal(ratio: Estimate, explained: Estimate = EXACT) -> bool:
    """Return whether a ratio of perplexities shows no better model: its interval holds 1, or rounding explains the ratio."""
    return ratio.low <= 1 <= ratio.high or min(1, explained.low) <= ratio.value <= max(1, explained.high)


@torch.no_grad()
def measure_floor(side: Side, ids: Tensor, *dtypes: torch.dtype | None, tokens: int = 0) -> Floor | None:
    """Return what :mod:`gpt2.measure.rounding` explains of two runs of a side, in the first and in the last of the dtypes.

    They are on one row of the ids (T,), or on as many ``tokens`` in several. None of what is no model of ours in a float dtype.
    """
    if type(side.gpt2) is not GPT2:
        return None
    floats = [dtype for dtype in dtypes if dtype is not None and dtype != torch.int8]
    length = min(ROW, side.gpt2.config.n_positions)
    ids = ids[: max(length, tokens)].cpu()
    found, logit = list[list[Tensor]](), 0.0
    for seed, row in enumerate(ids.split(length)):
        one, two = _rounded_runs(side.gpt2, row, side.vocab or None, {2 * seed: floats[0], 2 * seed + 1: floats[-1]})
        found, logit = [*found, measure_rows(one[:-1], two[:-1], row[1:], 1)[:3]], max(logit, max_abs(two, one))
    logp_a, logp_b, kl = map(torch.cat, zip(*found, strict=True))
    name, bootstrap = f"rounding to {' and '.join(map(dtype_label, dict.fromkeys(floats)))}", Bootstrap(len(kl))
    return Floor(name, bootstrap.mean(kl).through(positive), logit, len(ids), perplexity_ratio(logp_a, logp_b, bootstrap))


def _rounded_runs(model: GPT2, row: Tensor, vocab: int | None, dtypes: dict[int, torch.dtype]) -> list[Tensor]:
    """Return the logits (T, V) of a row of ids (T,) in each of the dtypes, by seed of the errors of rounding."""
    runs = []
    for seed, dtype in dtypes.items():

        def convert(stored: Tensor, dtype: torch.dtype = dtype) -> Tensor:
            return stored.to("cpu", dtype).double()

        with Streamed(model, convert, convert, lambda _: None), rounding_noise(dtype, seed):  # a block's weights at a time
            runs.append(model.head(model.hidden(row[None]))[0, :, :vocab])
    return runs


@dataclass(frozen=True)
class Way:
    """The model run in another way, beside each row alone; ``flipped`` counts tokens with another first choice."""

    name: str
    kl: Estimate
    logit: float  # the largest difference of one
    flipped: int | str


@dataclass(frozen=True)
class Noise(Printed):
    """The floor of a model (None: of int8 and engines), beside what a batch, padding and another dtype make."""

    model: ComparedModel
    text: Scored
    floor: Floor | None
    ways: tuple[Way, ...]
    environment: Environment
    seed: int
    seconds: float
    command: ClassVar[str] = "gpt2 compare --noise"

    def to_json(self) -> str:
        return as_json(vars(self))

    def sections(self) -> Iterator[Section]:
        explained = [Way(f"{floor.way}, explained", floor.mean, floor.logit, "")] if (floor := self.floor) else []
        kind = f", in {self.model.dtype}" if self.model.dtype else ""
        yield Section(note=("\n", bold(self.model.name), "  ", dim(f"the floor of noise{kind}")))
        yield Section(note=dim(f"{self.text.name}: {self.text.tokens:,} tokens in rows of {self.text.context}\n"))
        ways = (*explained, *self.ways)
        rows = [(way.name, *way.kl.cells(".1e"), f"{way.logit:.1e}", f"{way.flipped}") for way in ways]
        yield Section(columns=(Column(wrap=True), *numbers("KL, nats", "95 %", "largest logit", "flipped")), rows=rows)
        yield Section(note=dim("flipped: tokens whose first choice is another one than that of each row run alone"))
        for way in explained:
            least = f"a KL must exceed {way.kl.high:.2g} nats, and a logit move by more than {way.logit:.2g}"
            yield Section(note=bold(f"In {self.model.dtype} {least}, to mean anything."))
        yield Section(note=dim(f"in {self.seconds:.1f} s\n"))


@torch.inference_mode()
def measure_noise(name: str, settings: Settings) -> Noise:
    """Return a model's floor, and measure a batch, padding and another dtype; of an engine, a batch alone.

    Raises InputError: no such model or text, a side that is neither, or too few tokens.
    """
    started, side = time.perf_counter(), open_side(name, settings)
    passage = open_passage([side], replace(settings, tokens=ROW * TOGETHER if settings.tokens is None else settings.tokens))
    vocab, positions = side.vocab or None, side.n_positions or ROW
    padding, ways = 0 if isinstance(side, EngineSide) else min(PADDING, positions // 2), dict[str, Logits]()
    length = min(ROW, passage.windows.context, positions - padding, len(passage.ids))
    rows = passage.ids[: len(passage.ids) // length * length].view(-1, length)
    batch, floor = f"in a batch of {min(TOGETHER, len(rows))}", None
    settings.progress("loading the model")
    with side:
        if isinstance(side, EngineSide):
            run = ways[batch if side.batched else "rows, which it runs one after another"] = side.run
        elif side.checkpoint and (model := side.gpt2) is not None:
            run = ways[batch] = model
            floor = measure_floor(side, passage.ids, side.dtype)
            mask = (torch.arange(padding + length) >= padding).long()[None]
            padded, other = partial(model, attention_mask=mask), torch.float32 if side.dtype == torch.bfloat16 else torch.bfloat16
            filled = f"{padding} tokens of padding on the left"
            ways[filled] = lambda some: _alone(padded, F.pad(some, (padding, 0)))[:, padding:]
            ways[f"in {dtype_label(other)}"] = partial(_alone, side.checkpoint.load(other))
        else:
            raise InputError(f"{name}: --noise runs our implementation, or an engine such as onnx/FILE; leave out hf/")
        found = []
        for way, moved_by in ways.items():
            settings.progress(f"noise: {way}")
            kls, flipped, logit = list[Tensor](), 0, 0.0
            for some in rows.split(TOGETHER):
                plain, moved = (logits[..., :vocab].flatten(0, 1) for logits in (_alone(run, some), moved_by(some)))
                _, _, kl, _, _, top, other_top, *_ = measure_rows(plain, moved, some.flatten(), 1)
                kls, flipped, logit = [*kls, kl], flipped + int((top != other_top).sum()), max(logit, max_abs(moved, plain))
            mean = Bootstrap(rows.numel(), settings.seed).mean(torch.cat(kls)).through(positive)
            found.append(Way(way, mean, logit, flipped))
    text = replace(passage.scored, tokens=rows.numel(), context=length, stride=length, told="")
    about = side.describe().hashed(), text, floor, tuple(found), environment_of([side]), settings.seed
    return Noise(*about, time.perf_counter() - started)


def _alone(run: Logits, rows: Tensor) -> Tensor:
    """Return what a model says of each row, run alone."""
    return torch.cat([run(row[None]) for row in rows])
