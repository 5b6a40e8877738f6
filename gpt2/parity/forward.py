"""The checks of a forward pass: activations, logits, cache, padding, rounding, greedy text."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpt2.decoder import Decoder
from gpt2.errors import InputError
from gpt2.generation import generate
from gpt2.measure.allocator import give_back_freed_memory
from gpt2.measure.environment import dtype_label
from gpt2.measure.metrics import errors_of_both, max_abs, relative_error, worst_relative_error
from gpt2.measure.rounding import FORWARD_RATIO, MACHINE_RATIO
from gpt2.measure.tracing import Recorded, points, trace_steps
from gpt2.model import GPT2
from gpt2.parity.checks import Probe, Subject, head_of, hidden_of
from gpt2.parity.reference import reference_cache
from gpt2.parity.streaming import Walk, lockstep, side_by_side

GREEDY_TOKENS = 24
SAMPLES = 2  # runs with random rounding errors, each with the rows of a batch of its own; one
ENOUGH = 1 << 16  # where a point has so many errors
CHUNK = 128  # positions whose logits are compared at a time
SINGLE_TOKENS = 2  # read through the cache: the second one reads what the first one wrote
MISSING = torch.tensor(math.nan)  # stands for a missing point: NaN fails any bound


@torch.no_grad()
def forward(subject: Subject) -> None:
    """Compare a forward pass at every point; each row of a batch must give what it gives alone."""
    text, where = _greedy(subject)
    expected, theirs, noise = _activations(subject, torch.cat((subject.probe.rows, text)), slice(where.start - 1, where.stop - 1))
    _text(subject, text[0], where, expected[-1], theirs, max(each.largest for each in noise))
    give_back_freed_memory(subject.bytes)
    _parts(subject, expected[:-1], [each.ways for each in noise])
    del expected
    give_back_freed_memory(subject.bytes)
    _windows(subject, [each.hidden for each in noise])


class SampleErrors(NamedTuple):
    """What one sample with random errors is off by."""

    hidden: float  # at the final norm
    ways: list[float]  # in the logits of each way of reading the first rows
    largest: float  # the largest error of a logit of the last row, where a text was chosen


def _activations(subject: Subject, rows: Tensor, chosen: slice) -> tuple[Tensor, Tensor, list[SampleErrors]]:
    """Compare all models at every point, block by block.

    Return transformers' logits in float64, its best ids in ``dtype`` of the last row (T,), and each noisy sample's errors.
    """
    findings, label, what = subject.findings, dtype_label(subject.dtype), "float64: activations"

    def walk(context: AbstractContextManager[object], model: nn.Module, rows: Tensor, emit: Callable[[Recorded], None]) -> None:
        with context:
            trace_steps(model, rows, emit)

    noisy_model = subject.noisy()  # made before a walk begins: a later copy would have the walk's hooks
    count = subject.draws * (SAMPLES if rows.numel() * subject.config.n_embd < ENOUGH else 1)
    walks: list[Walk[Recorded]] = [
        partial(walk, subject.exactly(subject.reference, f"{what}, transformers"), subject.reference, rows),
        partial(walk, subject.exactly(subject.ours, f"{what}, ours"), subject.ours, rows),
        *(partial(trace_steps, model, rows) for model in (subject.ours_rounded, subject.reference_rounded)),
        partial(walk, subject.noisily(noisy_model, what, seed=0), noisy_model, rows.repeat(count, 1)),
    ]
    seen: list[str] = []
    logits: list[Tensor] = []
    hidden: list[float] = []
    noise: list[SampleErrors] = []
    with closing(lockstep(*walks)) as every_step:  # a difference, or Ctrl-C, ends the threads
        for steps in every_step:
            expected, exact = next(steps) or Recorded(), next(steps) or Recorded()
            for name, tensor in expected.items():
                findings.mapping("activations", name, worst_relative_error(exact.get(name, MISSING), tensor))
            exact.clear()  # each step is let go before the next model's
            ours, reference = next(steps) or Recorded(), next(steps) or Recorded()
            errors: dict[str, tuple[float, float, float]] = {}
            for name, tensor in expected.items():
                pair = ours.get(name, MISSING), reference.get(name, MISSING)
                errors[name] = errors_of_both(*pair, tensor)
                if name == "logits":
                    logits = [tensor, pair[1][-1].argmax(-1)]
                del pair
            ours.clear()
            reference.clear()
            if logits:
                give_back_freed_memory(subject.bytes)
            noisy = next(steps) or Recorded()
            for name, tensor in expected.items():
                samples = noisy[name].chunk(count) if len(noisy[name]) > len(tensor) else [noisy[name]]  # wpe has one row
                off_by = [relative_error(each, tensor) for each in samples]
                findings.rounding("rounding", name, errors[name], off_by)
                if name == "ln_f":
                    hidden = off_by
                if name == "logits":
                    for at_norm, each in zip(hidden, samples, strict=True):
                        ways = _ways(subject.probe, each[:-1], tensor[:-1], whole=False)
                        of_ways = [relative_error(part, right) for _, _, part, right in ways]
                        noise.append(SampleErrors(at_norm, of_ways, max_abs(each[-1, chosen], tensor[-1, chosen])))
                del samples
            noisy.clear()
            seen += expected
            findings.progress(f"{label}: activations")
            findings.settle()
    if seen != points(subject.config.n_layer):
        raise RuntimeError(f"the trace of transformers' model lacks {set(points(subject.config.n_layer)) - set(seen)}")
    findings.settle("activations")
    return logits[0], logits[1], noise


def _parts(subject: Subject, expected: Tensor, noise: list[list[float]]) -> None:
    """Compare what our model gives through the cache and with padding: in float64, and in ``dtype``, as far off as ``noise``."""
    findings, label, probe = subject.findings, dtype_label(subject.dtype), subject.probe
    with subject.exactly(subject.ours, "float64: cache and padding"):
        for check, name, logits, exact in _ways(probe, subject.ours, expected, whole=True):
            findings.mapping(check, name, worst_relative_error(logits, exact))
            findings.settle()
    findings.settle("padding")
    findings.progress(f"{label}: cache and padding")
    ways = (_ways(probe, model, expected, whole=False) for model in (subject.ours_rounded, subject.reference_rounded))
    for (_, name, ours, exact), (*_, theirs, _), *errors in zip(*ways, *noise, strict=True):
        findings.rounding("rounding", name, errors_of_both(ours, theirs, exact), errors)
    findings.settle()


def _ways(probe: Probe, model: nn.Module | Tensor, expected: Tensor, whole: bool) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    """Yield (check, point, logits, the expected ones) for the parts of a cached text, and for padded rows.

    Through the cache, a model reads a prompt, two tokens one by one, and the rest in one piece; ``whole`` reads the padded rows
    without it too, and takes all positions through the head at once. Given logits (3, T, V) are those of a model that was not
    read so: it differs by the order of a few sums.
    """
    rows, (padded, mask), start = probe.rows, probe.padded(), 0
    real, alone = mask.bool(), mask.bool().flip(1)
    right = expected[alone]
    if isinstance(model, Tensor):
        cached, ways = model, {"padded rows, cached": model[alone]}
    else:
        runs: dict[str, Callable[[], Tensor]] = {"": partial(_read_in_parts, model, rows, logits=not whole)}
        if whole:
            runs["padded rows"] = lambda: _read(model, padded, mask=mask, logits=False)[real]
        runs["padded rows, cached"] = lambda: _read_in_parts(model, padded, mask, logits=not whole)[real]
        ways = dict(zip(runs, side_by_side(*runs.values()), strict=True))
        ways = {way: head_of(model, hidden) for way, hidden in ways.items()} if whole else ways
        cached = ways.pop("")
    for part, end in _ends(rows.size(1)).items():
        if end > start:
            yield "cache", f"logits ({part})", cached[:, start:end], expected[:, start:end]
        start = end
    for way, logits in ways.items():
        yield "padding", f"logits ({way})", logits, right


def _ends(length: int) -> dict[str, int]:
    """Return where the parts end in which a cache reads a text: half of it, single tokens, and the rest."""
    half = length // 2
    return {"prefill": half, "single tokens": half + min(SINGLE_TOKENS, length // 4), "chunk": length}


def _sizes(length: int) -> list[int]:
    """Return the sizes of the pieces of these parts."""
    half, single, _ = _ends(length).values()
    return [size for size in (half, *[1] * (single - half), length - single) if size]


def _read_in_parts(model: nn.Module, ids: Tensor, mask: Tensor | None = None, logits: bool = True) -> Tensor:
    """Return the ``logits`` (B, T, V), or what our final norm gives, of ids (B, T) read in parts through a cache.

    What our cache was not given is NaN.
    """
    cache, sizes = model.new_cache(*ids.shape) if isinstance(model, GPT2) else reference_cache(model), _sizes(ids.size(1))
    for empty in (cache.keys, cache.values) if isinstance(model, GPT2) else ():
        empty.fill_(math.nan)
    pieces = zip(itertools.accumulate(sizes, initial=0), ids.split(sizes, dim=1), strict=False)
    return torch.cat([_read(model, piece, start, mask, cache, logits) for start, piece in pieces], dim=1)


def _read(
    model: nn.Module, ids: Tensor, start: int = 0, mask: Tensor | None = None, cache: Any = None, logits: bool = True
) -> Tensor:
    """Return the ``logits`` of ids behind ``start`` cached tokens, or what our final norm gives.

    For logits, our model reads a single token as generation does.
    """
    end = start + ids.size(1)
    seen = None if mask is None else mask[:, :end]
    if isinstance(model, GPT2):
        if not logits:
            return model.hidden(ids, attention_mask=seen, cache=cache)
        if start and end - start == 1:
            return Decoder(model).decode(ids, cache, seen)
        return model(ids, cache=cache, attention_mask=seen)
    real = torch.ones(1, end, dtype=torch.long) if seen is None else seen
    positions = (real.cumsum(-1) - 1).clamp(min=0)[:, start:]
    return model(ids, cache, attention_mask=seen, position_ids=positions, use_cache=cache is not None).logits


def _windows(subject: Subject, noise: Sequence[float]) -> None:
    """Compare the logits of whole contexts, on the default path, in float64; the first one also in ``dtype``.

    Our model reads the first one through a cache too, by what the final norm gives: the head takes each position alone. In
    ``dtype``, what rounding explains at the final norm of the traced rows (``noise``) stands for every position at first, as
    README.md explains. Where an error is over the bound, whole contexts run with noise.
    """
    findings, windows, (ours, reference) = subject.findings, subject.probe.windows, (subject.ours, subject.reference)
    for index, window in enumerate(windows):
        what, ids = f"float64: context {index + 1} of {len(windows)}", window[None]
        with subject.exactly(ours, f"{what}, ours"), subject.exactly(reference, f"{what}, transformers"):
            in_parts = [partial(_read_in_parts, ours, ids, logits=False)] if index == 0 else []
            hidden, expected, *cached = side_by_side(partial(hidden_of, ours, ids), partial(hidden_of, reference, ids), *in_parts)
            for part in _chunks(len(window)):
                logits, exact = head_of(ours, hidden[:, part]), head_of(reference, expected[:, part])
                findings.mapping("logits", _named("logits", index, part), worst_relative_error(logits, exact))
                for each in cached:
                    error = worst_relative_error(each[:, part], expected[:, part])
                    findings.mapping("cache", _named("ln_f", index, part), error)
        if index == 0:
            findings.progress(f"{dtype_label(subject.dtype)}: context 1")
            rounded = [hidden_of(model, ids) for model in (subject.ours_rounded, subject.reference_rounded)]
            noisy: list[Tensor] = []
            if subject.draws > 1:
                with subject.noisily(model := subject.noisy(), what, seed=1):
                    noisy = [hidden_of(model, ids) for _ in range(subject.draws)]
            for part in _chunks(len(window)):
                errors = errors_of_both(*(each[:, part] for each in (*rounded, expected)))
                off_by = [relative_error(each[:, part], expected[:, part]) for each in noisy] or noise
                findings.rounding("rounding", _named("ln_f", index, part), errors, off_by)
        findings.settle()
    findings.settle("logits", "cache", "rounding")


def _chunks(length: int) -> Iterator[slice]:
    return (slice(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK))


def _named(point: str, window: int, part: slice) -> str:
    return f"{point} (window {window}, {part.start} to {part.stop - 1})"


def _greedy(subject: Subject) -> tuple[Tensor, slice]:
    """Return a row (1, T) that begins with a text by our model in ``dtype``, and where that text is, after its prompt."""
    subject.findings.progress(f"{dtype_label(subject.dtype)}: greedy text")
    row, context = subject.probe.rows[:1].clone(), subject.config.n_positions
    prompt = max(1, min(8, row.size(1) // 2))
    end = min(prompt + GREEDY_TOKENS, row.size(1), context)
    with suppress(InputError):  # logits that are not finite: the row stays random, and the checks of logits report them
        row[:, :end] = generate(subject.ours_rounded, row[:, :prompt], end - prompt, temperature=0)
    return row, slice(prompt, end)


def _text(subject: Subject, row: Tensor, text: slice, exact: Tensor, theirs: Tensor, noise: float) -> None:
    """Compare a greedy text of ours with transformers' best id after each of its tokens, by its float64 logits (T, V).

    Our text was generated in ``dtype``, so the logit of an id may be lower than the best by what the rounding of two logits
    explains: twice the largest error of the logits with ``noise``, by the rule of rounding; by that of a machine for ``theirs``
    (T,), transformers' best ids in ``dtype``.
    """
    before = slice(text.start - 1, text.stop - 1)
    logits = exact[before].double()
    lower = logits.amax(-1) - logits.gather(-1, row[text, None])[:, 0]
    explained = 2 * noise * torch.where(theirs[before] == row[text], MACHINE_RATIO, FORWARD_RATIO)
    subject.findings.exact("text", "text (generated with the cache)", int((~(lower <= explained)).sum()))
    subject.findings.settle("text")
