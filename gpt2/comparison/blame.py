"""Find which parts of b make it differ from a: put parts of b into a, and measure what each does to the predictions.

Both must have the same shape and compute the same function. The residual streams of a and of b before every block are kept for
one batch of windows, and a variant runs only from the first block in which it differs from both. KL does not add up, so each
part is measured alone, and in order from the embeddings to the last norm.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from gpt2.checkpoint.keys import expected, head_name, layer
from gpt2.comparison.distributions import gain
from gpt2.comparison.sides.side import Read
from gpt2.config import GPT2Config
from gpt2.measure.estimates import Bootstrap, Estimate, positive
from gpt2.measure.metrics import Progress, silent
from gpt2.measure.per_token import measure_rows
from gpt2.measure.windows import Windows
from gpt2.model import GPT2
from gpt2.pages.reports import Section, dim

TOKENS = 2048  # tokens of the text that are used at most: enough for 64 blocks of the bootstrap
BAR = 10  # characters of the longest bar


@dataclass(frozen=True)
class BlamedPart:
    """What a part of b carries: ``alone`` is KL(a‖a with this part of b) in nats a token, over ``tensors`` that differ.

    ``gain`` is the change of the text's mean log-probability, also nats a token: above 0, the part predicts the text better.
    ``in_order`` is the KL with this part and all parts before it, in the order of computation; None below the first level.
    """

    name: str
    tensors: int
    alone: Estimate
    gain: Estimate
    in_order: Estimate | None


@dataclass(frozen=True)
class Blame:
    """What each part of b carries. Parts without a changed tensor are in none of the lists; they carry exactly nothing.

    ``parts`` are blocks, embeddings and the last norm, in the order of computation; ``halves`` are the blocks' attention (with
    its norm) and feed-forward (with its norm). ``whole`` is a with all of b's weights: what is measured between a and b beyond
    that is b's arithmetic. ``passes`` counts runs through all blocks.
    """

    tokens: int
    parts: tuple[BlamedPart, ...]
    halves: tuple[BlamedPart, ...]
    whole: Estimate
    gain: Estimate
    passes: float

    def sections(self, shared: str = "") -> Iterator[Section]:
        """Yield the parts, the halves that carry most, and all of b; ``shared`` says which tokens are measured, if not all."""
        title, note = "Blame", f"KL that each part of b brings into a, in nats a token{shared}"
        if not self.parts:
            yield Section(title, note)
            yield Section(note="every tensor is the same: no part of b carries anything")
            return
        yield _table(self.parts, title, note)
        if len(self.halves) > 1:
            yield _table(sorted(self.halves, key=lambda part: -part.alone.value)[:8])
        measured = f"all of b's weights in a: KL {self.whole.text('.3g')}"
        yield Section(note=dim(f"{measured}; {self.tokens:,} tokens, {self.passes:.0f} forward passes"))


def _table(parts: Sequence[BlamedPart], title: str = "", note: str | None = None) -> Section:
    ordered, longest, rows = any(part.in_order for part in parts), max(part.alone.value for part in parts), []
    for part in parts:
        bar = "█" * round(BAR * part.alone.value / longest) if 0 < longest < math.inf and part.alone.value > 0 else ""
        cells = f"{part.alone.value:.3g}", part.alone.span(".1e", ".."), f"{part.gain.value:+.1e}"
        rows.append([part.name, bar or "·", *cells, *([f"{part.in_order.value:.3g}"] if part.in_order else [])])
    columns = "part of b in a", "", "KL alone", "95 %", "log-prob.", *(["in order"] if ordered else [])
    return Section(title, note, columns, rows)


class _Mixed:
    """Runs a with some of b's parameters, ``taken``, on one batch of ids (B, T). ``b`` holds the changed ones.

    Stage 0 is the embeddings, then comes one for each block. ``until`` are the changed parameters up to each stage.
    """

    def __init__(self, config: GPT2Config, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
        self.model = GPT2(config, initialise=False).eval()
        self.a, self.b, self.head, self.blocks_run = a, b, head_name(a), 0
        self.stages = [["wte.weight", "wpe.weight"], *(list(own) for n, own in itertools.groupby(a, layer) if n is not None)]
        self.until = [*itertools.accumulate((b.keys() & {*names} for names in self.stages), set[str].union)]

    def start(self, ids: Tensor) -> None:
        """Take the next ids (B, T) and forget the streams of the last ones."""
        self.ids, self.streams = ids, dict[tuple[int, frozenset[str]], Tensor]()

    def _read(self, name: str, taken: frozenset[str]) -> Tensor:
        return self.b[name] if name in taken else self.a[name]

    def _stream(self, taken: frozenset[str]) -> Tensor:
        """Return the residual stream (B, T, D) behind the last block; where nothing or all of b is taken so far, it is kept."""
        for stage, names in enumerate(self.stages):
            own = taken & self.until[stage]
            if (stage, own) in self.streams:
                x = self.streams[stage, own]
                continue
            read = {name.removeprefix(f"h.{stage - 1}."): self._read(name, taken) for name in names}
            if stage == 0:
                x = read["wte.weight"][self.ids] + read["wpe.weight"][: self.ids.size(1)]
            else:
                self.blocks_run += 1
                x = functional_call(self.model.h[stage - 1], read, (x,))
            if own in (frozenset(), self.until[stage]):
                self.streams[stage, own] = x
        return x

    def logits(self, taken: frozenset[str]) -> Tensor:
        """Return logits (B, T, V) of a with b's parameters ``taken``."""
        x, config = self._stream(taken), self.model.config
        norm = self._read("ln_f.weight", taken), self._read("ln_f.bias", taken)
        return F.linear(F.layer_norm(x, x.shape[-1:], *norm, config.layer_norm_epsilon), self._read(self.head, taken))


@torch.inference_mode()
def find_blame(
    config: GPT2Config, a: Read, b: Read, ids: Tensor, windows: Windows, draws: Bootstrap, vocab: int, progress: Progress = silent
) -> Blame:
    """Put parts of b into a and measure what each carries on the text ``ids`` (N,), of which ``draws`` resamples scored tokens.

    ``a`` and ``b`` read a parameter by its name, of the shapes of ``config``; all is computed in float32, or in float64
    where a has float64 weights. Unchanged tensors are held once.
    """
    weights_a, changed = dict[str, Tensor](), dict[str, Tensor]()
    for name in expected(config):
        progress(f"blame: reading {name}")
        tensor = a(name)
        weights_a[name] = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        other = b(name).to(weights_a[name].dtype)
        if not torch.equal(weights_a[name], other):
            changed[name] = other
    parts = {part: frozenset(own) for part, own in itertools.groupby(changed, _part)}
    halves = {half: frozenset(own) for half, own in itertools.groupby(changed, _half) if half}
    in_order = list(itertools.accumulate(parts.values(), lambda before, own: before | own))
    variants = dict.fromkeys([whole := frozenset(changed), *parts.values(), *in_order, *halves.values()])
    effects = {taken: list[tuple[Tensor, Tensor]]() for taken in variants}  # KL and gain of each token, float64
    mixed, batches = _Mixed(config, weights_a, changed), list(windows.batches(ids))
    for number, (inputs, group) in enumerate(batches, 1):
        mixed.start(inputs)
        reference = mixed.logits(frozenset())
        for place, (taken, measured) in enumerate(effects.items(), 1):
            progress(f"blame: variant {place} of {len(effects)}, windows {number} of {len(batches)}")
            logits = mixed.logits(taken)
            for row, window in enumerate(group):
                rows_a, rows_b = (each[row, window.first - window.start :, :vocab] for each in (reference, logits))
                logp_a, logp_b, kl, *_ = measure_rows(rows_a, rows_b, ids[window.first + 1 : window.end + 1], 1)
                measured.append((kl, gain(logp_a, logp_b)))
    joined = ((taken, *map(torch.cat, zip(*rows, strict=True))) for taken, rows in effects.items())
    means = {taken: (draws.mean(kls).through(positive), draws.mean(gains)) for taken, kls, gains in joined}
    of_parts = zip(parts.items(), in_order, strict=True)
    levels = tuple(BlamedPart(name, len(own), *means[own], means[upto][0]) for (name, own), upto in of_parts)
    half_parts = tuple(BlamedPart(name, len(own), *means[own], None) for name, own in halves.items())
    return Blame(draws.n, levels, half_parts, *means[whole], mixed.blocks_run / config.n_layer / len(batches))


def _part(name: str) -> str:
    """Return the part of the first level to which a parameter belongs: ``h.3``, ``wte``, ``wpe`` or ``ln_f``."""
    number = layer(name)
    return name.split(".")[0] if number is None else f"h.{number}"


def _half(name: str) -> str:
    """Return the half of a block to which a parameter belongs, each with its norm: ``h.3.attn`` or ``h.3.mlp``; "" of others."""
    number, module = layer(name), name.split(".")[-2]
    return "" if number is None else f"h.{number}.{'attn' if '.attn.' in name or module == 'ln_1' else 'mlp'}"
