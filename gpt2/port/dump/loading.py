"""Find faults of loading in a dump: which tensors gave the recorded products, if the checkpoint's did not.

The weights of a program are not in its dump. But if arrays X and Y are recorded, and Y = X W + b for a W that people get by
misreading the checkpoint, then the program holds this W. Sums find the candidates: the sum of all entries of Y follows from the
column sums of X and the row sums of W, whatever the layouts.

Shapes: X (N, I) and Y (N, O) for N = B T tokens; W (I, O); b (O,).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.port.diagnosis.causes import PlacedCause
from gpt2.port.diagnosis.norms import layer_norm
from gpt2.port.diagnosis.places import ALL_WEIGHTS, Place
from gpt2.port.diagnosis.report import LIKELY
from gpt2.port.diagnosis.scores import Layout
from gpt2.port.diagnosis.weights import NARROW
from gpt2.port.dump.holdings import LINEAR, NORMS, PARTS, Held, Holdings
from gpt2.port.dump.pool import DumpPool
from gpt2.port.dump.tolerance import HALVES, UNITS

ROUNDED_INPUT = 6  # error of a product whose input was stored in a half precision, in units of that rounding


class Input(NamedTuple):
    """An array as rows (N, I), with its column sums, and the rounding of its storage; ``number``: of the pool's entry."""

    number: int
    rows: Tensor
    sums: Tensor
    unit: float


@dataclass(frozen=True)
class Loaded:
    """The program's weights by the checkpoint's names, as far as its products show them, and the causes that they show."""

    weights: Mapping[str, Tensor]
    causes: tuple[PlacedCause, ...]


class Loading:
    """Reads the weights off the products in ``pool``; ``state`` is the checkpoint in float64, ``ids`` (B, T)."""

    def __init__(self, pool: DumpPool, state: Mapping[str, Tensor], config: GPT2Config, ids: Tensor) -> None:
        self.pool, self.config, self.ids = pool, config, ids
        self.holdings = Holdings(state, config)
        self.count = ids.numel()
        self._inputs: dict[tuple[int, bool], list[Input]] = {}
        self._results: dict[tuple[int, str], set[int]] = {}  # the entries that hold the results of a block's norms
        self.own = dict(state)
        self.causes: list[PlacedCause] = []

    def run(self) -> Loaded:
        self._rounded_as_a_whole()
        layers = range(self.config.n_layer)
        uses = {(layer, part): self._uses(layer, part) for layer in layers for part in PARTS}
        for layer in layers:
            there = [part for part in PARTS if uses[layer, part]]
            misread = any(not uses[layer, part] for part in LINEAR[:3]) and self._misread_columns(layer) if there else False
            for part in PARTS if there else ():
                if not uses[layer, part] and not (misread and part in LINEAR[:3]):
                    self._misread(layer, part, {n: len(uses[n, part]) for n in layers})
            self._order(layer)
        self._tokens()
        return Loaded(self.own, tuple(self.causes))

    def _uses(self, layer: int, part: str) -> list[int]:
        """Return the inputs of which the right product is recorded, by their entries' numbers; only this block's, if known."""
        held = self.holdings.right(layer, part)
        numbers = self._origins(part, held, self._given(layer, part))
        if part in NORMS:
            results = [
                self.pool.find(one.rows * held.weight + held.bias)
                for one in self._rows(len(held.weight), True)
                if one.number in numbers
            ]
            self._results[layer, part] = {number for match in results if match is not None for number in match.entries}
        return numbers

    def _given(self, layer: int, part: str) -> set[int]:
        """Return the entries that are the block's own input of a projection; none if unknown."""
        norm = "ln_1" if part in LINEAR[:3] else "ln_2" if part == "mlp.c_fc" else ""
        return self._results.get((layer, norm), set())

    # Weights that a program holds

    def _misread_columns(self, layer: int) -> bool:
        """Find c_attn with its columns in another order, and keep it; return whether that is so."""
        given = self._given(layer, "attn.q")
        for thirds in self.holdings.columns(layer):
            if all(self._origins(part, one, given) for part, one in zip(LINEAR, thirds, strict=False)):
                for leaf, values in (("weight", [one.weight for one in thirds]), ("bias", [one.bias for one in thirds])):
                    self.own[f"h.{layer}.attn.c_attn.{leaf}"] = torch.cat(values, -1)
                self._blame(thirds[0], Place(layer, "attn.c_attn"))
                return True
        return False

    def _blame(self, held: Held, place: Place) -> None:
        evidence = "an array of your dump is the product of another one with these values, and of none with the checkpoint's"
        for id in held.id.split():
            self.causes.append(PlacedCause(id, (place,), held.words, evidence, LIKELY, None, held.kind or held.words))

    def _misread(self, layer: int, part: str, uses: Mapping[int, int]) -> None:
        """Find what the program holds in place of a part's tensors, and keep it; ``uses``: of each block's, recorded products."""
        ours = self.holdings.right(layer, part)
        given = self._given(layer, part)
        # Another block's tensors that are used once are used by that block, unless this block's own input is known.
        others = (n for n, count in uses.items() if n != layer and (given or count != 1))
        wrong = list(self.holdings.weights(layer, part, sorted(others, key=lambda n: uses[n] < 2)))
        found = self._first(part, [*self.holdings.biases(layer, part), *wrong], given)
        if found is None:  # a misread weight, and another bias
            both = [
                one._replace(
                    bias=torch.zeros_like(ours.bias), id=f"{one.id} missing-bias", words=f"{one.words}; no bias is added"
                )
                for one in wrong
            ]
            found = self._first(part, both, given)
        if found is None:
            return
        name = f"h.{layer}.{part}"
        self._blame(found, Place(layer, part if part in (*NORMS, *LINEAR[:3]) else f"{part}{found.leaf}"))
        for leaf, value in (("weight", found.weight), ("bias", found.bias)):
            if part in LINEAR[:3]:
                name = f"h.{layer}.attn.c_attn"
                thirds = list(self.own[f"{name}.{leaf}"].chunk(3, -1))
                thirds["qkv".index(part[-1])] = value
                value = torch.cat(thirds, -1)
            self.own[f"{name}.{leaf}"] = value

    def _first(self, part: str, held: list[Held], given: set[int]) -> Held | None:
        return next((one for one in held if self._origins(part, one, given)), None)

    # Products among the arrays

    def _origins(self, part: str, held: Held, given: set[int] | None = None) -> list[int]:
        """Return the entries of which a recorded array is the product with ``held``; only those ``given``, if any are."""
        inputs = [one for one in self._rows(len(held.weight), part in NORMS) if not given or one.number in given]
        if not inputs:
            return []
        rows = held.weight if part in NORMS else held.weight.sum(1)
        predicted = torch.stack([one.sums for one in inputs]) @ rows + self.count * held.bias.sum()
        numbers: list[int] = []
        for one, total in zip(inputs, predicted.tolist(), strict=True):
            if self._plausible(total, one, held, part in NORMS):
                value = one.rows * held.weight if part in NORMS else one.rows @ held.weight
                if self._recorded(value + held.bias, part, one.unit):
                    numbers.append(one.number)
        return numbers

    def _plausible(self, total: float, one: Input, held: Held, is_norm: bool) -> bool:
        """Return whether an array of the right size has this sum, up to rounding."""
        width = held.bias.numel()
        size = float(held.weight.square().mean().sqrt() * one.rows.square().mean().sqrt())
        scale = (size * (1.0 if is_norm else len(held.weight) ** 0.5) + float(held.bias.abs().mean())) * self.count * width
        loose = (self.pool.bound + ROUNDED_INPUT * one.unit) * scale
        apart = not is_norm and width == self.config.n_embd
        candidates = [width, width // self.config.n_head] if apart else [width]
        for part in candidates:
            if part != width:
                return self.pool.has_whole(self.count * part)  # heads apart: their sums are not predicted
            if any(abs(theirs - total) <= loose for theirs in self.pool.sums_of(self.count * part)):
                return True
        return False

    def _recorded(self, value: Tensor, part: str, unit: float) -> bool:
        if not bool(value.any()):  # zeros that a program keeps are no product
            return False
        bound = self.pool.tolerance.stages[part] + (ROUNDED_INPUT * unit if unit >= UNITS[torch.float16][0] else 0.0)
        if part not in LINEAR[:3]:
            return self.pool.find_within(bound, value) is not None
        heads = Layout.RIGHT.split(value.view(*self.ids.shape, -1), self.config.n_head)
        return self.pool.find_within(bound, heads, 1, 0, 2) is not None

    def _rows(self, width: int, normed: bool) -> list[Input]:
        """Return every array that may be N tokens of ``width`` features; ``normed``: normalised, before weight and bias."""
        if (width, normed) not in self._inputs:
            out = []
            for number, entry in enumerate(self.pool.entries):
                if entry.numel() != self.count * width or not bool(entry.isfinite().all()):
                    continue
                dtype = self.pool.dtypes[number]
                for rows in _as_rows(entry, width, self.config.n_head):
                    rows = layer_norm(rows, eps=self.config.layer_norm_epsilon) if normed else rows
                    out.append(Input(number, rows, rows.sum(0), UNITS[dtype][0] if dtype in HALVES else 0.0))
            self._inputs[width, normed] = out
        return self._inputs[width, normed]

    # Faults of many tensors, or of none that gives a product

    def _rounded_as_a_whole(self) -> None:
        """Recognise a checkpoint that was rounded to a narrow dtype on the way."""
        probes = [(layer, part) for layer in (0, self.config.n_layer - 1) for part in ("mlp.c_fc", "attn.v", "mlp.c_proj")]
        if any(self._origins(part, self.holdings.right(layer, part)) for layer, part in probes):
            return
        for dtype, narrow in NARROW.items():
            for layer, part in probes:
                held = self.holdings.right(layer, part)
                if self._origins(part, Held(held.weight.to(narrow).double(), held.bias.to(narrow).double())):
                    words = f"your weights hold the checkpoint's values rounded to {dtype}"
                    evidence = (
                        f"arrays of your dump are products with the checkpoint rounded to {dtype}, and none with its own values"
                    )
                    self.causes.append(PlacedCause("reduced-precision", (ALL_WEIGHTS,), words, evidence, LIKELY))
                    self.own = {name: tensor.to(narrow).double() for name, tensor in self.own.items()}
                    self.holdings = Holdings(dict(self.own), self.config)
                    return

    def _order(self, layer: int) -> None:
        """Recognise queries, keys and values in other roles: the recorded scores are products of another pair."""
        name = f"h.{layer}.attn.c_attn"
        thirds = {leaf: self.own[f"{name}.{leaf}"].chunk(3, -1) for leaf in ("weight", "bias")}
        held = [Held(weight, bias) for weight, bias in zip(thirds["weight"], thirds["bias"], strict=True)]
        shared = set(self._origins("attn.v", held[2])) & {*self._origins("attn.q", held[0]), *self._origins("attn.k", held[1])}
        for one in self._rows(self.config.n_embd, False):
            if one.number not in shared:
                continue
            rows = one.rows.view(*self.ids.shape, -1)
            split = [Layout.RIGHT.split(rows @ third.weight + third.bias, self.config.n_head) for third in held]
            pairs = [pair for pair in itertools.permutations(range(3), 2) if self._scored(split[pair[0]] @ split[pair[1]].mT)]
            if pairs:
                pair = next((one for one in pairs if one == (0, 1) or len(pairs) == 1 or self._weighed(split, one)), None)
                if pair is not None and pair != (0, 1):
                    self._reorder(layer, (*pair, 3 - sum(pair)))
                return

    def _scored(self, scores: Tensor) -> bool:
        """Return whether scores are recorded, with a factor; also those of the transposed ones, unless they are masked."""
        return bool(self.pool.factors(scores, 1, 0) or self.pool.factors(scores.tril(), 1, 0))

    def _weighed(self, split: list[Tensor], pair: tuple[int, int]) -> bool:
        """Return whether the attention weights of these queries and keys are recorded, or what they make of the values."""
        scores = split[pair[0]] @ split[pair[1]].mT / self.config.head_dim**0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        return any(self.pool.find(value, 1, 0, 2) is not None for value in (weights, weights @ split[3 - sum(pair)]))

    def _reorder(self, layer: int, order: tuple[int, ...]) -> None:
        name = f"h.{layer}.attn.c_attn"
        for leaf in ("weight", "bias"):
            thirds = self.own[f"{name}.{leaf}"].chunk(3, -1)
            self.own[f"{name}.{leaf}"] = torch.cat([thirds[number] for number in order], -1)
        got = ", ".join(f"{'qkv'[i]} from {'qkv'[j]}" for i, j in enumerate(order) if i != j)
        words = f"queries, keys and values have changed places ({got})"
        evidence = "the recorded scores are products of these, and not of queries and keys"
        self.causes.append(PlacedCause("qkv-order", (Place(layer, "attn"),), words, evidence, LIKELY, None, "qkv-order"))

    def _tokens(self) -> None:
        """Recognise rows of the token embedding that belong to another id."""
        wte, wpe = self.own["wte.weight"], self.own["wpe.weight"][: self.ids.shape[1]]

        def seen(table: Tensor) -> bool:
            return any(self.pool.find(table[self.ids] + rows, 0, 1) is not None for rows in (wpe, 0.0))

        if seen(wte):
            return
        for shift in (1, -1):
            rolled = wte.roll(shift, 0)
            if seen(rolled):
                words = f"a token is given the embedding of the id {'before' if shift > 0 else 'after'} its own"
                evidence = "the recorded embeddings are these rows of the checkpoint's wte"
                self.causes.append(PlacedCause("wrong-tensor", (Place(None, "wte"),), words, evidence, LIKELY))
                self.own["wte.weight"] = rolled


def _as_rows(entry: Tensor, width: int, heads: int) -> Iterator[Tensor]:
    """Yield an array as rows of ``width`` features, in any order of rows."""
    if entry.ndim == 1 or entry.shape[-1] == width:
        yield entry.reshape(-1, width)
    if entry.ndim > 1 and entry.shape[0] == width:
        yield entry.movedim(0, -1).reshape(-1, width)
    if entry.ndim >= 3 and entry.shape[-1] * heads == width:
        for axis in range(entry.ndim - 1):
            if entry.shape[axis] == heads:
                yield entry.movedim(axis, -2).reshape(-1, width)
