"""Compare a port's weights with the checkpoint's, piece by piece (q, k and v apart), and name each difference's cause.

A sum over bits, which ignores order, recognises reordered entries; then the common wrong orders are tried.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.port.alternatives import entries
from gpt2.port.alternatives.precision import NARROW
from gpt2.port.mapping.departures import missing_entries
from gpt2.port.mapping.filling import Own
from gpt2.port.terms.causes import Cause
from gpt2.port.terms.places import ALL_WEIGHTS, Place, collapsed

NORMS = "load h.N.ln_1 into the norm before attention, and h.N.ln_2 into the one before the feed-forward"
MAX_KINDS = 4  # merge causes of one id in more kinds of parameters
EXACT = 0.95  # the confidence if all entries are equal


@dataclass(frozen=True)
class Piece:
    """A tensor of the checkpoint, or its q, k or v share; ``placed`` marks the port's entries, ``called`` is the port's name."""

    place: Place
    called: str
    held: Tensor
    ours: Tensor
    placed: Tensor


class WeightComparison:
    """Compares ``own`` with ``state``, the checkpoint in float64. ``blank``: the port holds none of it."""

    def __init__(self, own: Own, state: Mapping[str, Tensor], config: GPT2Config) -> None:
        self.own, self.state, self.config = own, state, config
        self.causes: list[Cause] = []
        self.notes: list[str] = []
        self.blank = False
        self._rounded: dict[str, list[Place]] = {}  # by dtype
        self._likeness: dict[tuple[Place, ...], str] = {}  # a description of values that are not the checkpoint's
        self._exchanged: dict[str, list[tuple[Piece, Place]]] = {}  # shares of c_attn that hold another share
        self._lent: dict[int, list[tuple[Piece, Place]]] = {}  # by block: norms that hold the other one's tensors
        self._compare()

    def _compare(self) -> None:
        weights = self.own.weights.items()
        differing = [name for name, one in weights if one is not self.state[name] and not torch.equal(one, self.state[name])]
        for dtype, narrow in NARROW.items():  # if most tensors are rounded, compare the others with the rounded checkpoint
            rounded = {name for name in differing if torch.equal(self.own.weights[name], self.state[name].to(narrow).double())}
            if len(rounded) > len(differing) / 2:
                self._rounded[dtype] = [Place.of(name) for name in differing if name in rounded]
                differing = [name for name in differing if name not in rounded]
                self.state = {**self.state, **{name: self.state[name].to(narrow).double() for name in differing}}
        self._missing_biases(differing)
        for name in self._not_whole_blocks(differing):
            self._tensor(name)
        for name, pieces in self._exchanged.items():
            got = ", ".join(f"{piece.place.share} holds {other.share}" for piece, other in pieces)
            place = Place.of(name.rpartition(".")[0])
            words = f"queries, keys and values have changed places: {got}"
            self._add("qkv-order", words, self._holder_evidence(*pieces[0]), place)
        self._lent_norms()
        self._head()
        for dtype, places in self._rounded.items():
            some, many = replace(places[0], others=len(places) - 1), len(places) > 1
            words = f"your {'weights hold' if many else 'weight holds'} the checkpoint's values rounded to {dtype}"
            place = ALL_WEIGHTS if many and len(places) >= len(self.state) / 2 else some
            self._add("reduced-precision", words, f"rounding the checkpoint to {dtype} gives them to the bit ({some})", place)
        for name, norm in self.own.extra.items():
            words = f"your {name} (norm {norm:.2g}) is added where GPT-2 adds nothing"
            self._add("extra-bias", words, "its values are not zero", Place(None, name), confidence=0.7, kind="a parameter")
        self._combine_not_loaded()

    def _add(
        self, id: str, words: str, evidence: str, *places: Place, confidence: float = EXACT, called: str = "", kind: str = ""
    ) -> None:
        """Add a cause: ``words`` say what the parameter ``called`` is or holds; causes of one ``kind`` are merged over blocks."""
        detail, fix = f"{called} {words}".strip(), NORMS if id == "norms-swapped" else None
        self.causes.append(Cause(id, places, detail, evidence, confidence, fix, kind or words, held=True))

    def _combine_not_loaded(self) -> None:
        fresh = [cause for cause in self.causes if cause.id == "not-loaded"]
        self.blank = {cause.place.name for cause in fresh} >= {name for name, tensor in self.state.items() if tensor.ndim > 1}
        if not self.blank and len({cause.place.pattern for cause in fresh}) <= MAX_KINDS:
            return
        self.causes = [cause for cause in self.causes if cause not in fresh]
        blocks = [Place(cause.place.layer, "") for cause in fresh if cause.place.layer is not None]
        places = (ALL_WEIGHTS,) if self.blank or not blocks else collapsed(blocks, self.config.n_layer)
        some = ", ".join(cause.where for cause in fresh[:3])
        what = f"not the checkpoint's values in {len(fresh)} places ({some}, ...)"
        what = "none of the checkpoint's values" if self.blank else what
        looks = {self._likeness.get(cause.places, "") for cause in fresh}
        first = "" if len(looks) == 1 else f"of {fresh[0].where}: "  # what is said of one is not true of all
        words = f"your module holds {what}; {first}{self._likeness.get(fresh[0].places, '')}"
        self._add("not-loaded", words, fresh[0].evidence, *places, confidence=0.9)

    def _missing_biases(self, differing: list[str]) -> None:
        placed = {name: self.own.placed[name] for name in differing if name.endswith("bias") and name not in self.own.misfits}
        for missing in missing_entries(placed, self.state):
            name, place = missing.name, Place.of(missing.name)
            weight = f"{name.removesuffix('bias')}weight"
            if place.stem in ("ln_1", "ln_2", "ln_f") and not bool(self.own.placed[weight].any()):
                words, place = "your norm has no weight and no bias", replace(place, part=place.stem)
                evidence = f"no parameter takes the place of the checkpoint's {weight} and {name}"
                self._add("layernorm-without-affine", words, evidence, place, confidence=0.9)
            elif missing.shares == "k":
                self.notes.append(f"no bias for the keys ({name}): softmax does not see what is added to all keys alike")
            else:
                self.causes.append(missing.cause())

    def _not_whole_blocks(self, differing: list[str]) -> list[str]:
        """Return the names without blocks that hold all of another block's weights; add one cause for these."""
        layers = dict.fromkeys(layer for name in differing if (layer := Place.of(name).layer) is not None)
        moved = {layer: other for layer in layers if (other := self._held_block(f"h.{layer}")) is not None}
        if moved:
            pairs = [f"h.{layer} holds h.{other}" for layer, other in moved.items()]
            words = ", ".join(pairs[:6]) + (", ..." if len(pairs) > 6 else "")
            id, what = "wrong-tensor", "whole blocks hold another's weights"
            if set(moved) == set(moved.values()):
                id, what = "layer-order", "blocks run in another order than the checkpoint's"
            evidence = "all weights of these blocks are the other's to the bit"
            self._add(id, f"{what}: {words}", evidence, *(Place(layer, "") for layer in moved))
        return [name for name in differing if Place.of(name).layer not in moved]

    def _held_block(self, block: str) -> int | None:
        """Return the other block of the checkpoint that a block of the port holds, or None."""
        held, placed = _family(self.own.weights, block), _family(self.own.placed, block)
        for other in range(self.config.n_layer):
            ours = _family(self.state, f"h.{other}")
            telling = [part for part in held if not entries.constant(ours[part]) and bool(placed[part].all())]
            if f"h.{other}" != block and telling and all(torch.equal(held[part], ours[part]) for part in telling):
                return other
        return None

    def _tensor(self, name: str) -> None:
        called = f"your {self.own.names.get(name, name)}"
        whole = Piece(Place.of(name), called, self.own.weights[name], self.state[name], self.own.placed[name])
        pieces = [whole]
        if ".c_attn." in name:
            thirds = zip("qkv", *(tensor.chunk(3, -1) for tensor in (whole.held, whole.ours, whole.placed)), strict=True)
            pieces = [Piece(replace(whole.place, share=share), called, *third) for share, *third in thirds]
            if all(bool(piece.placed.any()) for piece in pieces) and entries.same_entries(whole.held, whole.ours):
                attention = replace(whole, place=replace(whole.place, part=whole.place.stem))
                if self._misread(attention, entries.misread_c_attn(whole.ours, self.config)):
                    return
                if not all(entries.fingerprint(piece.held) in self._holders for piece in pieces):  # mixed, across q, k and v
                    pieces = [attention]
        for piece in pieces:
            if bool(piece.placed.any()) and not torch.equal(piece.held[piece.placed], piece.ours[piece.placed]):
                self._piece(piece)

    def _misread(self, piece: Piece, misreadings: Iterator[entries.Misreading]) -> bool:
        """Return whether a tensor is one of these misreadings, and add the cause."""
        one = next((one for one in misreadings if torch.equal(piece.held, one.change(piece.ours))), None)
        if one is not None:
            self._add(one.id, one.words, one.evidence, piece.place, called=piece.called)
        return one is not None

    def _piece(self, piece: Piece) -> None:
        name, place, held, ours = piece.place.name, piece.place, piece.held, piece.ours
        if (name, place.share) in self.own.shared:
            self._shared(name, place)
        elif self._is_rounded(place, held[piece.placed], ours[piece.placed]):
            pass
        elif name == "wpe.weight" and (by := entries.moved_rows(held, ours)):
            words = f"position p reads the checkpoint's row p {'+' if by > 0 else '-'} {abs(by)}"
            evidence = f"{piece.called}, moved by {abs(by)}, equals the checkpoint's to the bit"
            self._add("position-offset", words, evidence, Place(None, "wpe"))
        elif self._misread(piece, entries.misread(place.part, ours, self.config)):
            pass
        elif not bool(piece.placed.all()) or entries.constant(held):
            self._unrelated(piece)
        elif entries.same_entries(held, ours):
            id = "head-layout" if place.part.startswith("attn.") else "wrong-tensor"
            evidence = "the same values, each as often, and not in the same places"
            self._add(id, "holds the right values in another order", evidence, place, confidence=0.85, called=piece.called)
        elif (other := self._holders.get(entries.fingerprint(held))) is not None:
            self._other(piece, other)
        else:
            self._unrelated(piece)

    def _is_rounded(self, place: Place, held: Tensor, ours: Tensor) -> bool:
        dtype = next((name for name, narrow in NARROW.items() if torch.equal(held, ours.to(narrow).double())), None)
        if dtype is not None:
            self._rounded.setdefault(dtype, []).append(place)
        return dtype is not None

    def _shared(self, name: str, place: Place) -> None:
        """Add the cause that one parameter is used as two shares; its use for several heads is a departure."""
        parameter, other = self.own.shared[name, place.share]
        if name.endswith("weight") and other != place.share:
            id = "value-projection-wrong" if place.share == "v" else "wrong-tensor"
            words = f"your {parameter} serves as {place.share} and as {other} at once"
            evidence = "in the forward pass one parameter is multiplied into both"
            self._add(id, words, evidence, Place(place.layer, f"attn.{place.share}"), kind="shared")

    @cached_property
    def _holders(self) -> dict[tuple[int, int], Place]:
        """Return the checkpoint's first place with each fingerprint."""
        holders: dict[tuple[int, int], Place] = {}
        for name, tensor in self.state.items():
            for share, third in zip("qkv", tensor.chunk(3, -1), strict=False) if ".c_attn." in name else ():
                holders.setdefault(entries.fingerprint(third), replace(Place.of(name), share=share))
            holders.setdefault(entries.fingerprint(tensor), Place.of(name))
        return holders

    def _holder_evidence(self, piece: Piece, other: Place) -> str:
        ours = self.state[other.name]
        ours = ours.chunk(3, -1)["qkv".index(other.share)] if other.share else ours
        same_order = ours.shape == piece.held.shape and torch.equal(ours, piece.held)
        return f"its values are the checkpoint's {other} to the bit{'' if same_order else ', in another order (transposed?)'}"

    def _other(self, piece: Piece, other: Place) -> None:
        place = piece.place
        if other.name == place.name:
            self._exchanged.setdefault(other.name, []).append((piece, other))
        elif place.layer is not None and other.layer == place.layer and {place.stem, other.stem} == {"ln_1", "ln_2"}:
            one = place.layer in self.own.parallel and self.own.names[place.name] == self.own.names.get(other.name)
            if not one or place.stem == "ln_1":  # else both branches read one norm, which holds ln_1's values
                self._lent.setdefault(place.layer, []).append((piece, other))
        else:
            kind, words = f"another tensor: {other.pattern}", f"holds the checkpoint's {other}"
            self._add("wrong-tensor", words, self._holder_evidence(piece, other), place, called=piece.called, kind=kind)

    def _lent_norms(self) -> None:
        """Add one cause for the norms of a block that hold each other's weights, or for the one that holds the other's."""
        for layer, pieces in self._lent.items():
            stems = list(dict.fromkeys(piece.place.stem for piece, _ in pieces))
            got = " and ".join(f"{piece.called.removeprefix('your ')} holds {other}" for piece, other in pieces)
            places = [Place(layer, stem) for stem in stems] if len(stems) > 1 else [piece.place for piece, _ in pieces]
            kind, evidence = f"norms: {', '.join(place.part for place in places)}", self._holder_evidence(*pieces[0])
            words = f"norms hold each other's weights: {got}" if len(stems) > 1 else f"a norm holds the other's weights: {got}"
            self._add("norms-swapped", words, evidence, *places, kind=kind)

    def _unrelated(self, piece: Piece) -> None:
        held, ours = piece.held[piece.placed], piece.ours[piece.placed]
        same = float((held == ours).double().mean())
        close = float((held - ours).norm() / ours.norm().clamp(min=1e-300))
        id, confidence = "not-loaded", 0.9
        if piece.place.name in self.own.scalars:
            id, kind, words = "layernorm-without-affine", "one", "is one number; the checkpoint has one for each unit"
            evidence = "it is multiplied into all units"
        elif same > 0.2:
            kind, words = "in part", f"holds the checkpoint's values in part ({same:.0%}) only"
            evidence = f"{1 - same:.0%} of its entries differ"
        elif close < 0.02:
            id, confidence, kind, words = "reduced-precision", 0.8, "close", f"is the checkpoint's to {close:.1e} only"
            evidence = "close to it, and equal nowhere: was it quantised?"
        else:
            looks = self._likeness[piece.place,] = entries.likeness(held)
            kind, words = "other values", f"does not hold the checkpoint's values: {looks}"
            evidence = f"no tensor of the checkpoint has these values (relative distance {close:.2g})"
        self._add(id, words, evidence, piece.place, confidence=confidence, called=piece.called, kind=kind)

    def _head(self) -> None:
        head, name = self.own.head, self.own.head_name
        if head is None or any(torch.equal(head, weights["wte.weight"]) for weights in (self.state, self.own.weights)):
            return
        ours = self.state["wte.weight"]
        if not self._is_rounded(Place(None, name), head, ours):
            values = "the right values in another order" if entries.same_entries(head, ours) else entries.likeness(head)
            holds = "holds" if torch.equal(self.own.weights["wte.weight"], ours) else "does not hold either"
            words = f"your head ({name}) has weights of its own: {values}; GPT-2's head is its token embedding"
            evidence = f"{name} differs from the checkpoint's wte.weight, which your embedding {holds}"
            self._add("untied-head", words, evidence, Place(None, "logits"))


def _family(tensors: Mapping[str, Tensor], stem: str) -> dict[str, Tensor]:
    """Return the tensors named ``stem`` plus a dot and a leaf, by leaf."""
    return {name.removeprefix(f"{stem}."): tensor for name, tensor in tensors.items() if name.startswith(f"{stem}.")}
