"""Find which parts of b make it differ from a: put parts of b into a, and measure what each does to the predictions.

Both must have the same shape and compute the same function, so that a's tensors can be replaced by b's. A block replaced
leaves everything before it as it was: the residual streams of a and of b before every block are kept for one batch of
windows, and a variant runs only from the first block in which it differs from both.

KL does not add up: parts that each carry a little may carry more, or less, together. So each part is measured alone, and in
order from the embeddings to the last norm, where the last figure is that of all of b's weights.
"""

from __future__ import annotations

import itertools
import math
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from gpt2.checkpoint.keys import expected, head_name, layer
from gpt2.comparison.distributions import gain
from gpt2.comparison.sides.side import Read
from gpt2.config import GPT2Config
from gpt2.measure.estimates import Bootstrap, Estimate
from gpt2.measure.metrics import Progress, silent
from gpt2.measure.per_token import measure_rows
from gpt2.measure.windows import Window, Windows
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


def part_name(name: str) -> str:
    """Return the part of the first level to which a parameter belongs: ``h.3``, ``wte``, ``wpe`` or ``ln_f``."""
    number = layer(name)
    return name.split(".")[0] if number is None else f"h.{number}"


def half_name(name: str) -> str:
    """Return the half of a block to which a parameter belongs: ``h.3.attn`` or ``h.3.mlp``, each with its norm."""
    number, module = layer(name), name.split(".")[2]
    return f"h.{number}.{'attn' if module in ('ln_1', 'attn') else 'mlp'}"


class _Mixed:
    """Runs a with some of b's parameters on one batch of ids (B, T), from the first block that differs from both."""

    def __init__(self, config: GPT2Config, a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
        self.model, self.a, self.b = GPT2(config, initialise=False).eval(), a, b
        self.head = head_name(a)
        self.stages = [self._stage(stage, a) for stage in range(config.n_layer + 2)]
        self.first_changed = self._first_differing(a, b)
        self.blocks_run = 0

    def _first_differing(self, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> int:
        differs = (any(a[name] is not b[name] for name in names) for names in self.stages)
        return next((stage for stage, changed in enumerate(differs) if changed), len(self.stages))

    def _stage(self, stage: int, names: Collection[str]) -> list[str]:
        """Return the parameters of a stage: 0 is the embeddings, 1 the first block, the last one the norm and the readout."""
        depth = self.model.config.n_layer
        own = {0: ("wte.weight", "wpe.weight"), depth + 1: ("ln_f.weight", "ln_f.bias", self.head)}
        return list(own[stage]) if stage in own else [name for name in names if layer(name) == stage - 1]

    def start(self, ids: Tensor) -> None:
        """Take the next ids (B, T) and forget the streams of the last ones."""
        self.ids = ids
        self.streams: dict[bool, list[Tensor]] = {}  # of a (False) and of b (True): the stream before every block

    def _stream(self, of_b: bool, block: int) -> Tensor:
        source, kept = (self.b if of_b else self.a), self.streams.setdefault(of_b, [])
        while len(kept) <= block:
            if of_b and len(kept) < self.first_changed:
                kept.append(self._stream(False, len(kept)))
                continue
            kept.append(self._block(len(kept) - 1, kept[-1], source) if kept else self._embed(source))
        return kept[block]

    def logits(self, taken: Mapping[str, Tensor]) -> Tensor:
        """Return logits (B, T, V) with the parameters ``taken``, each that of a or of b."""
        last = len(self.stages) - 1
        of_a, of_b = self._first_differing(taken, self.a), self._first_differing(taken, self.b)
        stage = min(last, max(of_a, of_b))
        x = self._embed(taken) if stage == 0 else self._stream(of_b > of_a, stage - 1)
        for block in range(max(0, stage - 1), last - 1):
            x = self._block(block, x, taken)
        x = F.layer_norm(x, x.shape[-1:], taken["ln_f.weight"], taken["ln_f.bias"], self.model.config.layer_norm_epsilon)
        return F.linear(x, taken[self.head])

    def _embed(self, source: Mapping[str, Tensor]) -> Tensor:
        return source["wte.weight"][self.ids] + source["wpe.weight"][: self.ids.size(1)]

    def _block(self, number: int, x: Tensor, source: Mapping[str, Tensor]) -> Tensor:
        self.blocks_run += 1
        prefix = f"h.{number}."
        own = {name.removeprefix(prefix): source[name] for name in self.stages[number + 1]}
        output: Tensor = functional_call(self.model.h[number], own, (x,))
        return output


@torch.inference_mode()
def find_blame(
    config: GPT2Config, a: Read, b: Read, ids: Tensor, windows: Windows, *, vocab: int, seed: int = 0, progress: Progress = silent
) -> Blame:
    """Put parts of b into a and measure what each carries on the text ``ids`` (N,).

    ``a`` and ``b`` read a parameter by its name, of the shapes of ``config``; all is computed in float32, or in float64
    where a has float64 weights. Unchanged tensors are held once.
    """
    weights_a: dict[str, Tensor] = {}
    weights_b: dict[str, Tensor] = {}
    for name in expected(config):
        progress(f"blame: reading {name}")
        tensor = a(name)
        weights_a[name] = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        other = b(name).to(weights_a[name].dtype)
        weights_b[name] = weights_a[name] if torch.equal(weights_a[name], other) else other
    changed = [name for name in weights_b if weights_b[name] is not weights_a[name]]
    parts, halves = _grouped(changed, part_name), _grouped([name for name in changed if layer(name) is not None], half_name)
    in_order = list(itertools.accumulate(parts.values(), lambda before, own: before | own))
    wanted = list(dict.fromkeys([whole := frozenset(changed), *parts.values(), *in_order, *halves.values()]))
    mixed, ids = _Mixed(config, weights_a, weights_b), ids[:TOKENS]
    batches, bootstrap = list(windows.batches(ids)), Bootstrap(len(ids) - 1, seed)
    effects = _effects(mixed, wanted, ids, batches, vocab, progress)
    means = {own: (bootstrap.mean(kl), bootstrap.mean(gained)) for own, (kl, gained) in zip(wanted, effects, strict=True)}
    of_parts = zip(parts.items(), in_order, strict=True)
    levels = tuple(BlamedPart(name, len(own), *means[own], means[upto][0]) for (name, own), upto in of_parts)
    half_parts = tuple(BlamedPart(name, len(own), *means[own], None) for name, own in halves.items())
    return Blame(len(ids) - 1, levels, half_parts, *means[whole], mixed.blocks_run / config.n_layer / len(batches))


def _effects(
    mixed: _Mixed,
    wanted: Sequence[frozenset[str]],
    ids: Tensor,
    batches: Sequence[tuple[Tensor, list[Window]]],
    vocab: int,
    progress: Progress,
) -> list[tuple[Tensor, Tensor]]:
    """Return KL and gain of each token (N,), float64, with each set of b's parameters in place of a's."""
    models = [ChainMap({name: mixed.b[name] for name in names}, mixed.a) for names in wanted]
    effects: list[list[tuple[Tensor, Tensor]]] = [[] for _ in models]
    for number, (inputs, group) in enumerate(batches):
        mixed.start(inputs)
        reference = mixed.logits(mixed.a)
        for place, taken in enumerate(models):
            progress(f"blame: variant {place + 1} of {len(models)}, windows {number + 1} of {len(batches)}")
            logits = mixed.logits(taken)
            for row, window in enumerate(group):
                rows_a, rows_b = (each[row, window.first - window.start :, :vocab] for each in (reference, logits))
                logp_a, logp_b, kl, *_ = measure_rows(rows_a, rows_b, ids[window.first + 1 : window.end + 1], 1)
                effects[place].append((kl, gain(logp_a, logp_b)))
    return [(torch.cat([kl for kl, _ in rows]), torch.cat([gained for _, gained in rows])) for rows in effects]


def _grouped(names: Sequence[str], group: Callable[[str], str]) -> dict[str, frozenset[str]]:
    return {part: frozenset(name for name in names if group(name) == part) for part in dict.fromkeys(map(group, names))}
