"""Compare the weights that a port holds with the checkpoint's, and say what happened to those that differ.

Tensors are compared piece by piece (q, k and v apart). The same entries in another order are recognised by a sum over the bits
of the entries, which does not depend on their order; the order itself by trying those that people confuse.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.port.diagnosis.causes import PlacedCause
from gpt2.port.diagnosis.entries import constant, fingerprint, likeness, reading
from gpt2.port.diagnosis.own import Own
from gpt2.port.diagnosis.places import ALL_WEIGHTS, EVERY, Layer, Place, joined
from gpt2.port.diagnosis.same import same_part

NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8_e4m3fn": torch.float8_e4m3fn}
MAX_KINDS = 4  # causes of one id in more kinds of parameters than this are reported as one
EXACT = 0.95  # the confidence that equality of all entries gives
TO_THE_BIT = "the checkpoint's values in that order are yours to the bit"
SPLIT = "q, k, v = (x @ w + b).split(n_embd, -1); q = q.view(B, T, n_head, head_size).transpose(1, 2)"


@dataclass(frozen=True)
class Piece:
    """A tensor of the checkpoint, or its q, k or v share, in the checkpoint's layout and float64: the port's values, the
    checkpoint's, and where the port has an entry at all."""

    name: str
    share: str
    theirs: Tensor
    ours: Tensor
    placed: Tensor

    @property
    def place(self) -> Place:
        return replace(Place.of(self.name), share=self.share)


@dataclass(frozen=True)
class Misreading:
    """A tensor that a port has if it reads the checkpoint wrongly, and the cause: ``words`` follow the parameter's name."""

    tensor: Tensor
    id: str
    words: str
    evidence: str = TO_THE_BIT
    fix: str | None = None


@dataclass(frozen=True)
class WeightReport:
    """What a comparison found; ``blank`` where the port holds nothing of the checkpoint."""

    causes: tuple[PlacedCause, ...]
    notes: tuple[str, ...]
    blank: bool


class WeightComparison:
    """Compares ``own`` with ``state``, the checkpoint in float64."""

    def __init__(self, own: Own, state: Mapping[str, Tensor], config: GPT2Config) -> None:
        self.own, self.state, self.config = own, state, config
        self.causes: list[PlacedCause] = []
        self.notes: list[str] = []
        self._rounded: dict[str, list[Place]] = {}  # by dtype
        self._likeness: dict[tuple[Place, ...], str] = {}  # what the values look like that are not the checkpoint's
        self._exchanged: dict[str, list[tuple[Piece, Place]]] = {}  # c_attn's shares that hold another of its shares
        self._index: dict[tuple[int, int], Place] | None = None

    def run(self) -> WeightReport:
        differing = [
            name
            for name, theirs in self.own.weights.items()
            if theirs is not self.state[name] and not torch.equal(theirs, self.state[name])
        ]
        self._missing_biases(differing)
        for name in self._not_whole_blocks(self._not_harmless(differing)):
            self._tensor(name)
        for name, pieces in self._exchanged.items():
            got = ", ".join(f"{piece.share} holds {other.share}" for piece, other in pieces)
            evidence = self._holder_evidence(pieces[0][0], pieces[0][1])
            place = Place.of(name.rpartition(".")[0])
            self._add("qkv-order", place, "", f"queries, keys and values have changed places: {got}", evidence)
        self._head()
        for dtype, places in self._rounded.items():
            self._rounding(dtype, places)
        for name, norm in self.own.extra.items():
            words = f"(norm {norm:.2g}) is added where GPT-2 adds nothing"
            self._add("extra-bias", Place(None, name), f"your {name}", words, "its values are not zero", 0.7, kind="a parameter")
        self._combine_missing_biases()
        blank = self._combine_not_loaded()
        return WeightReport(tuple(self.causes), tuple(self.notes), blank)

    def _add(
        self,
        id: str,
        place: Place | tuple[Place, ...],
        subject: str,
        words: str,
        evidence: str,
        confidence: float = EXACT,
        *,
        kind: str = "",
        fix: str | None = None,
    ) -> None:
        """A cause. ``kind`` is needed where the words hold numbers that differ from block to block."""
        places = place if isinstance(place, tuple) else (place,)
        self.causes.append(PlacedCause(id, places, f"{subject} {words}".strip(), evidence, confidence, fix, kind or words))

    def _called(self, name: str) -> str:
        """The port's own name of a tensor's first parameter."""
        return f"your {next(iter(self.own.names.get(name, ())), name)}"

    # Many causes as one

    def _rounding(self, dtype: str, places: list[Place]) -> None:
        some = replace(places[0], others=len(places) - 1)
        place = ALL_WEIGHTS if 1 < len(places) >= len(self.state) / 2 else some
        words = f"{'weights hold' if len(places) > 1 else 'weight holds'} the checkpoint's values rounded to {dtype}"
        self._add("reduced-precision", place, "your", words, f"rounding the checkpoint to {dtype} gives them to the bit ({some})")

    def _combine_missing_biases(self) -> None:
        absent = [cause for cause in self.causes if cause.id == "missing-bias"]
        patterns = list(dict.fromkeys(_pattern(cause.places[0]) for cause in absent))
        if len(patterns) > MAX_KINDS:
            self.causes = [cause for cause in self.causes if cause not in absent]
            words = f"you have no biases in these places; the checkpoint has {joined(patterns)}"
            self._add("missing-bias", Place(EVERY, ""), "", words, absent[0].evidence, 0.9)

    def _combine_not_loaded(self) -> bool:
        """Many parameters that were never loaded are one cause. Returns whether all matrices are among them."""
        fresh = [cause for cause in self.causes if cause.id == "not-loaded"]
        matrices = {name for name, tensor in self.state.items() if tensor.ndim > 1}
        blank = {cause.places[0].name for cause in fresh} >= matrices
        if blank or len({_pattern(cause.places[0]) for cause in fresh}) > MAX_KINDS:
            self.causes = [cause for cause in self.causes if cause not in fresh]
            some = ", ".join(joined(cause.places) for cause in fresh[:3])
            words = f"not the checkpoint's values in {len(fresh)} places ({some}, ...)"
            layers = dict.fromkeys(cause.places[0].layer for cause in fresh if cause.places[0].layer is not None)
            blocks: list[Layer] = list(layers) if len(layers) < self.config.n_layer else [EVERY]
            places = (ALL_WEIGHTS,) if blank or not blocks else tuple(Place(block, "") for block in blocks)
            words = "none of the checkpoint's values" if blank else words
            words = f"holds {words}; {self._likeness.get(fresh[0].places, '')}"
            self._add("not-loaded", places, "your module", words, fresh[0].evidence, 0.9)
        return blank

    # Absent, and harmless

    def _missing_biases(self, differing: list[str]) -> None:
        for name in differing:
            placed, tensor, place = self.own.placed[name], self.state[name], Place.of(name)
            if not name.endswith("bias") or bool(placed.all()):
                continue
            norm = name.removesuffix(".bias")
            evidence = f"no parameter takes the place of the checkpoint's {norm}.weight and {name}"
            if place.stem in ("ln_1", "ln_2", "ln_f") and not bool(self.own.placed[f"{norm}.weight"].any()):
                words = "your norm has no weight and no bias"
                self._add("layernorm-without-affine", replace(place, part=place.stem), "", words, evidence, 0.9)
                continue
            share = ""
            if place.stem == "attn.c_attn":
                absent = [letter for letter, third in zip("qkv", placed.chunk(3), strict=True) if not bool(third.any())]
                share = f" for {', '.join(absent)}" if len(absent) < 3 else ""
                if absent == ["k"]:
                    self.notes.append(f"no bias for the keys ({name}): softmax does not see what is added to all keys alike")
                    continue
            size = float(tensor.masked_fill(placed, 0.0).norm())
            words = f"you have no bias{share} here; the checkpoint's is not zero (norm {size:.2g})"
            evidence = f"no parameter takes the place of the checkpoint's {name}"
            self._add("missing-bias", place, "", words, evidence, 0.9, kind=f"no bias{share}")

    def _not_harmless(self, differing: list[str]) -> list[str]:
        """Without the parts that compute the same although they differ: heads, or hidden units, in another order throughout."""
        same: dict[str, bool] = {}
        left = []
        for name in differing:
            place = Place.of(name)
            part = place.part.partition(".")[0]
            if part in ("attn", "mlp"):
                stem = Place(place.layer, part).name + "."
                if stem not in same:
                    theirs, ours = (_family(weights, stem) for weights in (self.own.weights, self.state))
                    same[stem] = same_part(part, theirs, ours, self.config)
                if same[stem]:
                    continue
            left.append(name)
        return left

    def _not_whole_blocks(self, differing: list[str]) -> list[str]:
        """Without the blocks that hold another block's weights altogether, which are one cause."""
        held: dict[Layer, int] = {}
        for layer in dict.fromkeys(Place.of(name).layer for name in differing):
            other = None if layer is None else self._held_block(Place(layer, "").name)
            if other is not None:
                held[layer] = other
        if held:
            pairs = [f"h.{layer} holds h.{other}" for layer, other in held.items()]
            words = ", ".join(pairs[:6]) + (", ..." if len(pairs) > 6 else "")
            id, what = "wrong-tensor", "whole blocks hold another's weights"
            if set(held) == set(held.values()):
                id, what = "layer-order", "blocks run in another order than the checkpoint's"
            places = tuple(Place(layer, "") for layer in held)
            self._add(id, places, "", f"{what}: {words}", "all weights of these blocks are the other's to the bit")
        return [name for name in differing if Place.of(name).layer not in held]

    def _held_block(self, block: str) -> int | None:
        """The checkpoint's block whose weights a block of the port holds, if that is another one."""
        theirs, placed = _family(self.own.weights, f"{block}."), _family(self.own.placed, f"{block}.")
        for other in range(self.config.n_layer):
            ours = _family(self.state, f"h.{other}.")
            telling = [part for part in theirs if not constant(ours[part]) and bool(placed[part].all())]
            if f"h.{other}" != block and telling and all(torch.equal(theirs[part], ours[part]) for part in telling):
                return other
        return None

    # One tensor

    def _tensor(self, name: str) -> None:
        theirs, ours, placed = self.own.weights[name], self.state[name], self.own.placed[name]
        pieces = [Piece(name, "", theirs, ours, placed)]
        if ".c_attn." in name:
            thirds = zip("qkv", *(tensor.chunk(3, -1) for tensor in (theirs, ours, placed)), strict=True)
            pieces = [Piece(name, *third) for third in thirds]
            if all(bool(piece.placed.any()) for piece in pieces) and fingerprint(theirs) == fingerprint(ours):
                place = Place.of(name)
                if self._misread(theirs, self._misread_c_attn(ours), replace(place, part=place.stem), name):
                    return
        for piece in pieces:
            if bool(piece.placed.any()) and not torch.equal(piece.theirs[piece.placed], piece.ours[piece.placed]):
                self._piece(piece)

    def _misread(self, theirs: Tensor, misreadings: Iterator[Misreading], place: Place, name: str) -> bool:
        """Whether a tensor is one of these misreadings; then that is a cause."""
        for one in misreadings:
            if torch.equal(theirs, one.tensor):
                self._add(one.id, place, self._called(name), one.words, one.evidence, fix=one.fix)
                return True
        return False

    def _misread_c_attn(self, ours: Tensor) -> Iterator[Misreading]:
        if ours.ndim == 2:
            yield _reshaped(ours)
        thirds = ours.chunk(3, -1)
        for order in itertools.permutations(range(3)):
            got = ", ".join(f"{'qkv'[i]} from {'qkv'[j]}" for i, j in enumerate(order) if i != j)
            yield Misreading(torch.cat([thirds[j] for j in order], -1), "qkv-order", f"has its thirds in another order ({got})")
        sizes = {"q|k|v": 3, "head": self.config.n_head, "unit": self.config.head_dim}
        for axes in itertools.permutations(sizes):
            words = f"has its columns read as ({', '.join(axes)}); the checkpoint has (q|k|v, head, unit)"
            yield Misreading(ours.index_select(-1, reading(sizes, axes)), "head-layout", words, fix=SPLIT)

    def _misread_piece(self, piece: Piece) -> Iterator[Misreading]:
        ours, part = piece.ours, piece.place.part
        if ours.ndim == 2:
            if ours.shape[0] == ours.shape[1]:
                words = "is transposed"
                yield Misreading(ours.t(), "transposed", words, "transposed back, it equals the checkpoint's to the bit")
            yield _reshaped(ours)
        axis = 0 if part == "attn.c_proj.weight" else -1
        if part.startswith("attn.") and ours.shape[axis] == self.config.n_embd:
            order = reading({"head": self.config.n_head, "unit": self.config.head_dim}, ("unit", "head"))
            for words, index in (("(unit, head)", order), ("(head, unit), as if stored (unit, head)", order.argsort())):
                yield Misreading(ours.index_select(axis, index), "head-layout", f"is read in the order {words}")

    def _piece(self, piece: Piece) -> None:
        called, theirs, ours = self._called(piece.name), piece.theirs, piece.ours
        if (piece.name, piece.share) in self.own.shared:
            self._shared(piece)
            return
        for dtype, narrow in NARROW.items():
            if torch.equal(theirs[piece.placed], ours.to(narrow).double()[piece.placed]):
                self._rounded.setdefault(dtype, []).append(piece.place)
                return
        if piece.name == "wpe.weight" and (by := _rolled(theirs, ours)):
            words = f"position p reads the checkpoint's row p {'+' if by > 0 else '-'} {abs(by)}"
            evidence = f"{called}, moved by {abs(by)}, equals the checkpoint's to the bit"
            self._add("position-offset", Place(None, "wpe"), "", words, evidence)
        elif self._misread(theirs, self._misread_piece(piece), piece.place, piece.name):
            return
        elif not bool(piece.placed.all()) or constant(theirs):
            self._unrelated(piece)
        elif fingerprint(theirs) == fingerprint(ours):
            id = "head-layout" if piece.place.part.startswith("attn.") else "wrong-tensor"
            evidence = "the same values, each as often, and not in the same places"
            self._add(id, piece.place, called, "holds the right values in another order", evidence, 0.85)
        elif (other := self._holder(theirs)) is not None:
            self._other(piece, other)
        else:
            self._unrelated(piece)

    def _shared(self, piece: Piece) -> None:
        """One parameter of the port is used as two shares."""
        if piece.name.endswith("weight"):
            parameter, taken = self.own.shared[piece.name, piece.share]
            id = "value-projection-wrong" if piece.share == "v" else "wrong-tensor"
            place = Place(piece.place.layer, f"attn.{piece.share}")
            words = f"serves as {piece.share} and as {taken} at once"
            evidence = "in the forward pass one parameter is multiplied into both"
            self._add(id, place, f"your {parameter}", words, evidence, kind="shared")

    def _holder(self, theirs: Tensor) -> Place | None:
        """The place of the checkpoint that has the same entries."""
        if self._index is None:
            self._index = {}
            for name, tensor in self.state.items():
                place = Place.of(name)
                if ".c_attn." in name:
                    for share, third in zip("qkv", tensor.chunk(3, -1), strict=True):
                        self._index.setdefault(fingerprint(third), replace(place, share=share))
                self._index.setdefault(fingerprint(tensor), place)
        return self._index.get(fingerprint(theirs))

    def _holder_evidence(self, piece: Piece, other: Place) -> str:
        name = other.name
        ours = self.state[name].chunk(3, -1)["qkv".index(other.share)] if other.share else self.state[name]
        same_order = ours.shape == piece.theirs.shape and torch.equal(ours, piece.theirs)
        return f"its values are the checkpoint's {other} to the bit{'' if same_order else ', in another order (transposed?)'}"

    def _other(self, piece: Piece, other: Place) -> None:
        """It holds what belongs elsewhere."""
        if other.name == piece.name:
            self._exchanged.setdefault(piece.name, []).append((piece, other))
            return
        swapped = piece.place.part.startswith("ln_") and other.layer == piece.place.layer and other.part.startswith("ln_")
        words = f"holds the checkpoint's {other}"
        words += ": ln_1 stands before attention, ln_2 before the feed-forward" if swapped else ""
        id = "norms-swapped" if swapped and other.layer is not None else "wrong-tensor"
        kind = f"another tensor: {_pattern(other)}"
        self._add(id, piece.place, self._called(piece.name), words, self._holder_evidence(piece, other), kind=kind)

    def _unrelated(self, piece: Piece) -> None:
        theirs, ours = piece.theirs[piece.placed], piece.ours[piece.placed]
        called, same = self._called(piece.name), float((theirs == ours).double().mean())
        close = float((theirs - ours).norm() / ours.norm().clamp(min=1e-300))
        ratio = float((theirs @ ours) / (ours @ ours)) if bool(ours.any()) else 0.0
        if same > 0.2:
            words, evidence = f"holds the checkpoint's values in part ({same:.0%}) only", f"{1 - same:.0%} of its entries differ"
            self._add("not-loaded", piece.place, called, words, evidence, 0.9, kind="in part")
        elif close < 0.02:
            evidence = "close to it, and equal nowhere: was it quantised?"
            words = f"is the checkpoint's to {close:.1e} only"
            self._add("reduced-precision", piece.place, called, words, evidence, 0.8, kind="close")
        elif ratio and float((theirs - ratio * ours).norm()) < 1e-6 * float(theirs.norm()):
            evidence = "every entry has that ratio to the checkpoint's"
            words = f"holds the checkpoint's values times {ratio:.6g}"
            self._add("wrong-tensor", piece.place, called, words, evidence, kind="times a factor")
        else:
            looks = self._likeness[piece.place,] = likeness(theirs)
            evidence = f"no tensor of the checkpoint has these values (relative distance {close:.2g})"
            words = f"does not hold the checkpoint's values: {looks}"
            self._add("not-loaded", piece.place, called, words, evidence, 0.9, kind="other values")

    def _head(self) -> None:
        head, name = self.own.head, self.own.head_name
        if head is None or any(torch.equal(head, weights["wte.weight"]) for weights in (self.state, self.own.weights)):
            return
        ours = self.state["wte.weight"]
        for dtype, narrow in NARROW.items():
            if torch.equal(head, ours.to(narrow).double()):
                self._rounded.setdefault(dtype, []).append(Place(None, name))
                return
        values = "the right values in another order" if fingerprint(head) == fingerprint(ours) else likeness(head)
        holds = "holds" if torch.equal(self.own.weights["wte.weight"], ours) else "does not hold either"
        words = f"your head ({name}) has weights of its own: {values}; GPT-2's head is its token embedding"
        evidence = f"{name} differs from the checkpoint's wte.weight, which your embedding {holds}"
        self._add("untied-head", Place(None, "logits"), "", words, evidence)


def _pattern(place: Place) -> Place:
    """The same place in any block."""
    return Place(None if place.layer is None else EVERY, place.part)


def _family(tensors: Mapping[str, Tensor], stem: str) -> dict[str, Tensor]:
    """The tensors whose names begin with ``stem``, without it."""
    return {name.removeprefix(stem): tensor for name, tensor in tensors.items() if name.startswith(stem)}


def _reshaped(ours: Tensor) -> Misreading:
    words, evidence = "was reshaped where it had to be transposed", "the checkpoint's values, reshaped, are yours to the bit"
    return Misreading(ours.reshape(ours.shape[::-1]).t(), "transposed", words, evidence)


def _rolled(theirs: Tensor, ours: Tensor) -> int:
    """By how many rows a table was moved: row r is the checkpoint's r + n. 0 if it was not moved."""
    for by in (1, 2, -1, -2):
        mine, right = (theirs[:-by], ours[by:]) if by > 0 else (theirs[-by:], ours[:by])
        if len(mine) > 2 and torch.equal(mine, right):
            return by
    return 0
