"""The checks of a forward pass: activations, logits, cache, padding, rounding, greedy text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from gpt2.decoder import Decoder
from gpt2.generation import generate
from gpt2.measure.metrics import max_abs, relative_error, worst_relative_error
from gpt2.measure.tracing import Recorded, points, stepwise, trace_steps
from gpt2.model import GPT2
from gpt2.pages.reports import dtype_label
from gpt2.parity.checks import Subject, head_of, hidden_of
from gpt2.parity.report import ROUNDING_RATIO

GREEDY_TOKENS = 24
CHUNK = 128  # positions whose logits are compared at a time
SINGLE_TOKENS = 2  # read through the cache in float64: the second one reads what the first one wrote
MISSING = torch.tensor(math.nan)  # stands for a missing point: NaN fails any bound

T = TypeVar("T")
Walk = Callable[[Callable[[T], None]], object]


def lockstep(*walks: Walk[T]) -> Generator[tuple[T | None, ...]]:
    """Advance several computations side by side; yield what each gives in each step, None from one that has ended."""
    with ExitStack() as stack:
        yield from itertools.zip_longest(*(stack.enter_context(closing(stepwise(walk))) for walk in walks))


@torch.no_grad()
def forward(subject: Subject) -> None:
    """Compare a forward pass at every point; each row of a batch must give what it gives alone."""
    text, where = _greedy(subject)
    expected, rounded = _activations(subject, torch.cat((subject.probe.rows, text)))
    _text(subject, text[0], where, expected[-1], rounded[-1])
    _parts(subject, expected[:-1], rounded[:-1])
    del expected, rounded
    _windows(subject)


def _activations(subject: Subject, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Compare all four models at every point, block by block; return transformers' logits, in float64 and in ``dtype``."""
    findings, label = subject.findings, dtype_label(subject.dtype)

    def exactly(model: nn.Module, what: str) -> Walk[Recorded]:
        def walk(emit: Callable[[Recorded], None]) -> None:
            with subject.exactly(model, f"float64: activations, {what}"):
                trace_steps(model, rows, emit)

        return walk

    walks: list[Walk[Recorded]] = [exactly(subject.reference, "transformers"), exactly(subject.ours, "ours")]
    walks += [partial(trace_steps, model, rows) for model in (subject.ours_rounded, subject.reference_rounded)]
    seen: list[str] = []
    logits: list[Tensor] = []
    for steps in lockstep(*walks):
        expected, exact, ours, reference = (step or {} for step in steps)
        for name, tensor in expected.items():
            findings.mapping("activations", name, worst_relative_error(exact.get(name, MISSING), tensor))
            errors = (relative_error(each.get(name, MISSING), tensor) for each in (ours, reference))
            findings.rounding("rounding", name, *errors)
        seen += expected
        logits = [step["logits"] for step in (expected, reference) if "logits" in step]
        findings.progress(f"{label}: activations")
        findings.settle()
    if seen != points(subject.config.n_layer):
        raise RuntimeError(f"the trace of transformers' model lacks {set(points(subject.config.n_layer)) - set(seen)}")
    findings.settle("activations")
    return logits[0], logits[1]


def _parts(subject: Subject, expected: Tensor, reference: Tensor) -> None:
    """Compare what our model gives on its default path, through the cache and with padding, in float64 and in ``dtype``."""
    findings = subject.findings
    with subject.exactly(subject.ours, "float64: cache and padding"):
        for check, name, take, logits in _ways(subject, subject.ours, SINGLE_TOKENS):
            findings.mapping(check, name, worst_relative_error(logits, take(expected)))
            findings.settle()
    findings.settle("cache", "padding")
    findings.progress(f"{dtype_label(subject.dtype)}: cache and padding")
    for _, name, take, logits in _ways(subject, subject.ours_rounded, 16):
        errors = (relative_error(each, take(expected)) for each in (logits, take(reference)))
        findings.rounding("rounding", name, *errors)
    findings.settle("rounding")


def _ways(subject: Subject, ours: GPT2, singles: int) -> Iterator[tuple[str, str, Callable[[Tensor], Tensor], Tensor]]:
    """Yield (check, point, how to take the expected logits from those of the rows, our logits) for each way to read the rows."""
    rows = subject.probe.rows
    yield "logits", "logits (default path)", lambda logits: logits, ours(rows)
    end = 0
    for part, logits in _read_in_parts(ours, rows, singles):
        start, end = end, end + logits.size(1)
        yield "cache", f"logits ({part})", partial(_between, start, end), logits
    padded, mask = subject.probe.padded()
    cached = torch.cat([logits for _, logits in _read_in_parts(ours, padded, singles, mask)], dim=1)
    for how, logits in (("", ours(padded, attention_mask=mask)), (", cached", cached)):
        yield "padding", f"logits (padded rows{how})", partial(_beginnings, subject.probe.padding), logits[mask.bool()]


def _between(start: int, end: int, logits: Tensor) -> Tensor:
    return logits[:, start:end]


def _beginnings(padding: tuple[int, ...], logits: Tensor) -> Tensor:
    return torch.cat([row[: len(row) - count] for row, count in zip(logits, padding, strict=True)])


def _read_in_parts(ours: GPT2, ids: Tensor, singles: int, mask: Tensor | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the logits of (B, T) ids read through the cache: a prompt, single tokens as generation reads them, then a chunk."""
    length, cache, decoder = ids.size(1), ours.new_cache(len(ids)), Decoder(ours)
    half, single = length // 2, min(singles, length // 4)
    for part, sizes in {"prefill": [half], "single tokens": [1] * single, "chunk": [length - half - single]}.items():
        logits = []
        for size in sizes:
            end = cache.length + size
            new, seen = ids[:, cache.length : end], None if mask is None else mask[:, :end]
            one = size == 1 and cache.length > 0
            logits.append(decoder.decode(new, cache, seen) if one else ours(new, cache=cache, attention_mask=seen))
        if logits:
            yield part, torch.cat(logits, dim=1)


def _windows(subject: Subject) -> None:
    """Compare the logits of whole contexts, on the default path, in float64."""
    findings, windows, models = subject.findings, subject.probe.windows, (subject.ours, subject.reference)
    for index, window in enumerate(windows):
        what = f"float64: context {index + 1} of {len(windows)}"
        with subject.exactly(models[0], f"{what}, ours"), subject.exactly(models[1], f"{what}, transformers"):
            hidden = [hidden_of(model, window[None]) for model in models]
            for start in range(0, len(window), CHUNK):
                end = min(start + CHUNK, len(window))
                ours, theirs = (head_of(model, h[:, start:end]) for model, h in zip(models, hidden, strict=True))
                name = f"logits (window {index}, {start} to {end - 1})"
                findings.mapping("logits", name, worst_relative_error(ours, theirs))
        findings.settle()
    findings.settle("logits")


def _greedy(subject: Subject) -> tuple[Tensor, slice]:
    """Return a row (1, T) that begins with a text by our model in ``dtype``, and where that text is, after its prompt."""
    subject.findings.progress(f"{dtype_label(subject.dtype)}: greedy text")
    row, context = subject.probe.rows[:1].clone(), subject.config.n_positions
    prompt = max(1, min(8, row.size(1) // 2))
    end = min(prompt + GREEDY_TOKENS, row.size(1), context)
    row[:, :end] = generate(subject.ours_rounded, row[:, :prompt], end - prompt, temperature=0)
    return row, slice(prompt, end)


def _text(subject: Subject, row: Tensor, text: slice, exact: Tensor, rounded: Tensor) -> None:
    """Compare a greedy text of ours with transformers' best id after each of its tokens, by its float64 logits (T, V).

    Our text was generated in ``dtype``. So the logit of an id may be lower than the best by what the rounding of two logits
    explains: by the rule of rounding, 1.5 times the largest error of transformers' own logits, ``rounded``.
    """
    before = slice(text.start - 1, text.stop - 1)
    logits = exact[before].double()
    lower = logits.amax(-1) - logits.gather(-1, row[text, None])[:, 0]
    explained = 2 * ROUNDING_RATIO * max_abs(rounded[before], exact[before])
    subject.findings.exact("text", "text (generated with the cache)", int((~(lower <= explained)).sum()))
    subject.findings.settle("text")
