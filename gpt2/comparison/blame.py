"""Find which parts of b make it differ from a: put parts of b into a, and measure what each does to the predictions.

Both must have the same shape and compute the same function, so that a's tensors can be replaced by b's. A block replaced
leaves everything before it as it was: the residual streams of a and of b before every block are kept for one batch of
windows, and a variant runs only from the first block in which it differs from both.

KL does not add up: parts that each carry a little may carry more, or less, together. So each part is measured alone, and in
order from the embeddings to the last norm, where the last figure is that of all of b's weights.
"""

from __future__ import annotations

import time
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from gpt2.checkpoint.export import OF_DTYPE
from gpt2.checkpoint.gguf_writer import TYPES, as_stored, stored_bytes
from gpt2.checkpoint.keys import head_name, layer
from gpt2.comparison.blame_result import Blame, Kept, Part, Precision
from gpt2.comparison.distributions import gain
from gpt2.comparison.weights import Read
from gpt2.config import GPT2Config
from gpt2.int8 import rounded_parameter
from gpt2.measure.estimates import Bootstrap
from gpt2.measure.metrics import Progress, silent
from gpt2.measure.per_token import measure_rows
from gpt2.measure.windows import Windows
from gpt2.model import GPT2

TOKENS = 2048  # tokens of the text that are used at most: enough for 64 blocks of the bootstrap
HALVES_IN_TENSORS = 3  # halves of blocks whose tensors are measured one by one: those that carry most
KEPT = 6  # parts that are kept in a's precision at most
INT8 = "int8"
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class _Effect(NamedTuple):
    kl: Tensor  # (N,) float64
    gain: Tensor  # (N,)


def part_name(name: str) -> str:
    """Return the part of the first level to which a parameter belongs: ``h.3``, ``wte``, ``wpe`` or ``ln_f``."""
    number = layer(name)
    return name.split(".")[0] if number is None else f"h.{number}"


def half_name(name: str) -> str:
    """Return the half of a block to which a parameter belongs: ``h.3.attn`` or ``h.3.mlp``, each with its norm."""
    number, module = layer(name), name.split(".")[2]
    return f"h.{number}.{'attn' if module in ('ln_1', 'attn') else 'mlp'}"


def quantisation(a: Read, b: Read, changed: Collection[str]) -> str | None:
    """Return the type to which b's parameters are a's, rounded, or None: of a GGUF file, "int8", or a dtype of all tensors."""
    for type in (*TYPES, INT8, *HALVES):
        if changed and next(beyond_rounding(a, b, changed, type), None) is None:
            return type
    return None


def beyond_rounding(a: Read, b: Read, changed: Iterable[str], type: str) -> Iterator[str]:
    """Yield the parameters of b that are not a's, rounded to a type of :func:`quantisation`."""
    return (name for name in changed if not torch.equal(rounded(name, a(name), type), b(name).float()))


def rounded(name: str, tensor: Tensor, type: str) -> Tensor:
    """Return a parameter in float32, rounded to a type of :func:`quantisation`."""
    if type in HALVES:
        return tensor.to(HALVES[type]).float()
    return rounded_parameter(name, tensor) if type == INT8 else as_stored(name, tensor, type)


def _bytes(name: str, shape: Sequence[int], type: str) -> int:
    entries = torch.Size(shape).numel()
    if type in HALVES:
        return 2 * entries
    if type != INT8:
        return stored_bytes(name, shape, type)
    if len(shape) != 2 or name == "wpe.weight":
        return 4 * entries
    return entries + 4 * shape[1 if name.startswith("h.") else 0]  # a float32 scale per output


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
        """Return logits (B, T, V) with the parameters ``taken``: those of a, of b, or others."""
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
    config: GPT2Config,
    a: Callable[[str], Tensor],
    b: Callable[[str], Tensor],
    ids: Tensor,
    windows: Windows,
    *,
    names: Collection[str],
    vocab: int,
    seed: int = 0,
    progress: Progress = silent,
) -> Blame:
    """Put parts of b into a and measure what each carries on the text ``ids`` (N,).

    ``a`` and ``b`` read a parameter by its name, of the same ``names`` and shapes; all is computed in float32, or in float64
    where a has float64 weights. Unchanged tensors are held once.
    """
    started = time.perf_counter()
    weights_a: dict[str, Tensor] = {}
    weights_b: dict[str, Tensor] = {}
    dtypes: set[torch.dtype] = set()
    for name in names:
        progress(f"blame: reading {name}")
        tensor = a(name)
        dtypes.add(tensor.dtype)
        weights_a[name] = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        other = b(name).to(weights_a[name].dtype)
        weights_b[name] = weights_a[name] if torch.equal(weights_a[name], other) else other
    changed = [name for name in names if weights_b[name] is not weights_a[name]]
    mixed = _Mixed(config, weights_a, weights_b)
    measure = _Measured(mixed, ids[:TOKENS], windows, vocab, seed, progress)
    parts = _grouped(changed, part_name)
    halves = _grouped([name for name in changed if layer(name) is not None], half_name)
    in_order = [frozenset().union(*list(parts.values())[: place + 1]) for place in range(len(parts))]
    measure([frozenset(changed), *parts.values(), *in_order, *halves.values()])
    levels = [measure.part(name, own, upto) for (name, own), upto in zip(parts.items(), in_order, strict=True)]
    half_parts = [measure.part(name, own) for name, own in halves.items()]
    heaviest = sorted(half_parts, key=lambda part: -part.alone.value)[:HALVES_IN_TENSORS]
    single = [name for part in heaviest for name in names if name in halves[part.name]]
    measure([frozenset({name}) for name in single])
    tensors = [measure.part(name, frozenset({name})) for name in single]
    type = quantisation(weights_a.__getitem__, weights_b.__getitem__, changed)
    own_type = OF_DTYPE[reduce(torch.promote_types, dtypes)]
    kept = () if type is None else _kept(measure, parts, levels, type, own_type)
    precisions = () if type is None else _precisions(measure, own_type)
    whole = measure.part("", frozenset(changed))
    levels_down = tuple(levels), tuple(half_parts), tuple(sorted(tensors, key=lambda part: -part.alone.value))
    passes, seconds = mixed.blocks_run / config.n_layer / len(measure.batches), time.perf_counter() - started
    return Blame(measure.tokens, *levels_down, whole.alone, whole.gain, type, kept, precisions, passes, seconds)


class _Measured:
    """Measures a with sets of b's parameters in place of its own, each set once."""

    def __init__(self, mixed: _Mixed, ids: Tensor, windows: Windows, vocab: int, seed: int, progress: Progress) -> None:
        self.mixed, self.ids, self.windows, self.vocab, self.progress = mixed, ids, windows, vocab, progress
        self.tokens = len(ids) - 1
        self.bootstrap = Bootstrap(self.tokens, seed)
        self.batches = list(windows.batches(ids))
        self.effects: dict[frozenset[str], _Effect] = {}

    def __call__(self, sets: Sequence[frozenset[str]]) -> None:
        """Measure b's parameters in each of these sets."""
        wanted = [names for names in dict.fromkeys(sets) if names not in self.effects]
        taken = [ChainMap({name: self.mixed.b[name] for name in names}, self.mixed.a) for names in wanted]
        self.effects |= dict(zip(wanted, self.of(taken), strict=True))

    def of(self, models: Sequence[Mapping[str, Tensor]]) -> list[_Effect]:
        """Measure models, given by their parameters, against a."""
        effects: list[list[_Effect]] = [[] for _ in models]
        for number, (inputs, group) in enumerate(self.batches if models else []):
            self.mixed.start(inputs)
            reference = self.mixed.logits(self.mixed.a)
            for place, taken in enumerate(models):
                self.progress(f"blame: variant {place + 1} of {len(models)}, windows {number + 1} of {len(self.batches)}")
                logits = self.mixed.logits(taken)
                for row, window in enumerate(group):
                    first = window.first - window.start
                    targets = self.ids[window.first + 1 : window.end + 1]
                    rows_a, rows_b = (each[row, first:, : self.vocab] for each in (reference, logits))
                    logp_a, logp_b, kl, *_ = measure_rows(rows_a, rows_b, targets, 1)
                    effects[place].append(_Effect(kl, gain(logp_a, logp_b)))
        return [_Effect(*map(torch.cat, zip(*parts, strict=True))) for parts in effects]

    def part(self, name: str, own: frozenset[str], upto: frozenset[str] | None = None) -> Part:
        alone, mean = self.effects[own], self.bootstrap.mean
        return Part(name, len(own), mean(alone.kl), mean(alone.gain), None if upto is None else mean(self.effects[upto].kl))


def _grouped(names: Sequence[str], group: Callable[[str], str]) -> dict[str, frozenset[str]]:
    return {part: frozenset(name for name in names if group(name) == part) for part in dict.fromkeys(map(group, names))}


def _kept(
    measure: _Measured, parts: Mapping[str, frozenset[str]], levels: Sequence[Part], type: str, own: str
) -> tuple[Kept, ...]:
    """Keep the parts in a's precision that carry most for their bytes: one, two, and so on."""
    shapes = {name: tuple(tensor.shape) for name, tensor in measure.mixed.a.items()}

    def more(names: Collection[str]) -> int:
        return sum(_bytes(name, shapes[name], own) - _bytes(name, shapes[name], type) for name in names)

    changed = frozenset().union(*parts.values())
    same = [name for name in shapes if name not in changed and more([name]) > 0]  # b has them in a's precision already
    before = tuple(dict.fromkeys(map(part_name, same)))
    ordered = [part.name for part in sorted(levels, key=lambda part: -part.alone.value / max(1, more(parts[part.name])))]
    small = sum(_bytes(name, shape, type) for name, shape in shapes.items()) + more(same)
    choices = [ordered[:count] for count in range(min(KEPT, len(ordered) - 1) + 1)]
    left = [changed - frozenset().union(*(parts[name] for name in choice)) for choice in choices]
    measure(left)
    means = [measure.bootstrap.mean(measure.effects[names].kl) for names in left]
    rows = zip(choices, left, means, strict=True)
    return tuple(Kept((*before, *choice), small + more(changed - names), kl) for choice, names, kl in rows)


def _precisions(measure: _Measured, own: str) -> tuple[Precision, ...]:
    """Round a's parameters to every type that takes fewer bytes than its own."""
    weights, found = measure.mixed.a, []
    for each in (*TYPES, INT8):
        size = sum(_bytes(name, tensor.shape, each) for name, tensor in weights.items())
        if size < sum(_bytes(name, tensor.shape, own) for name, tensor in weights.items()):
            measure.progress(f"blame: rounding to {each}")
            (effect,) = measure.of([{name: rounded(name, tensor, each).to(tensor.dtype) for name, tensor in weights.items()}])
            found.append(Precision(each, size, measure.bootstrap.mean(effect.kl)))
    return tuple(sorted(found, key=lambda precision: -precision.bytes))
