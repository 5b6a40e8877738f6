"""What is wrong with the weights that a port holds.

They are compared piece by piece (q, k and v apart) with the checkpoint's. Equal entries in another order are recognised
by a sum over the entries' bits that does not depend on their order; which order it is, by trying those that people mix up.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping as MappingType
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.checkpoint.keys import layer as layer_of
from gpt2.config import GPT2Config
from gpt2.port.diagnosis.causes import cause
from gpt2.port.diagnosis.entries import constant, fingerprint, likeness, reading
from gpt2.port.diagnosis.own import Own
from gpt2.port.diagnosis.report import Cause
from gpt2.port.diagnosis.same import same_part

NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8_e4m3fn": torch.float8_e4m3fn}
MANY = 4  # kinds of parameters
EXACT = 0.95  # the confidence that equality of all entries gives
SHORT = {"q": 0, "k": 1, "v": 2}


@dataclass(frozen=True)
class Piece:
    """A tensor of the checkpoint, or its q, k or v share; ``theirs`` and ``ours`` (the checkpoint's) in its layout, float64."""

    name: str
    share: str
    theirs: Tensor
    ours: Tensor
    placed: Tensor

    @property
    def label(self) -> str:
        return f"{self.name} ({self.share})" if self.share else self.name

    @property
    def layer(self) -> int | None:
        return layer_of(self.name)

    @property
    def kind(self) -> str:
        """The name without the block."""
        return self.name if self.layer is None else self.name.split(".", 2)[2]


@dataclass(frozen=True)
class Verdicts:
    """The causes, and what is worth a note; ``blank`` where nothing of the checkpoint is in the port."""

    causes: tuple[Cause, ...]
    notes: tuple[str, ...]
    blank: bool


class Judge:
    """Compares ``own`` with ``state``, the checkpoint in float64."""

    def __init__(self, own: Own, state: MappingType[str, Tensor], config: GPT2Config) -> None:
        self.own, self.state, self.config = own, state, config
        self.causes: list[Cause] = []
        self.notes: list[str] = []
        self._rounded: dict[str, list[str]] = {}
        self._shares: dict[str, list[tuple[str, str, str]]] = {}  # c_attn's shares that hold another of its shares
        self._index: dict[tuple[int, int], str] | None = None

    def judge(self) -> Verdicts:
        differing = [
            name
            for name, theirs in self.own.weights.items()
            if theirs is not self.state[name] and not torch.equal(theirs, self.state[name])
        ]
        self._missing(differing)
        left = self._not_harmless(differing)
        self._whole_blocks(left)
        for name in left:
            self._tensor(name)
        self._orders()
        self._head()
        for dtype, names in self._rounded.items():
            some = f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
            where = names[0] if len(names) == 1 else "all weights" if len(names) >= len(self.state) / 2 else some
            words = f"your {'weights hold' if len(names) > 1 else 'weight holds'} the checkpoint's values rounded to {dtype}"
            self._say("reduced-precision", where, words, f"rounding the checkpoint to {dtype} gives them to the bit ({some})")
        for name, norm in self.own.extra.items():
            self._say(
                "extra-bias",
                name,
                f"your {name} (norm {norm:.2g}) is added where GPT-2 adds nothing",
                "its values are not zero",
                0.7,
            )
        absent = [cause for cause in self.causes if cause.id == "missing-bias"]
        if len({re.sub(r"\d+", "#", cause.where) for cause in absent}) > MANY:
            self.causes = [cause for cause in self.causes if cause not in absent]
            kinds = ", ".join(dict.fromkeys(re.sub(r"^h\.\d+", "h.*", cause.where) for cause in absent))
            self._say(
                "missing-bias", "h.*", f"you have no biases in these places; the checkpoint has {kinds}", absent[0].evidence, 0.9
            )
        fresh = [cause for cause in self.causes if cause.id == "not-loaded"]
        matrices = {name for name, tensor in self.state.items() if tensor.ndim > 1}
        blank = {piece.where.partition(" ")[0] for piece in fresh} >= matrices
        if len({re.sub(r"\d+", "#", cause.where) for cause in fresh}) > MANY or blank:
            self._together(fresh, blank)
        return Verdicts(tuple(self.causes), tuple(self.notes), blank)

    def _together(self, fresh: list[Cause], blank: bool) -> None:
        """Many parameters that were never loaded are one cause."""
        self.causes = [cause for cause in self.causes if cause not in fresh]
        some = ", ".join(cause.where for cause in fresh[:3])
        words = (
            "none of the checkpoint's values" if blank else f"not the checkpoint's values in {len(fresh)} places ({some}, ...)"
        )
        layers = sorted({layer_of(cause.where.partition(" ")[0]) for cause in fresh} - {None})
        blocks = [f"h.{layer}" for layer in layers] if len(layers) < self.config.n_layer else ["h.*"]
        where = "all weights" if blank else ", ".join(blocks)
        self._say("not-loaded", where, f"your module holds {words}; {fresh[0].detail.partition(': ')[2]}", fresh[0].evidence, 0.9)

    def _say(self, id: str, where: str, detail: str, evidence: str, confidence: float = EXACT, fix: str | None = None) -> None:
        self.causes.append(cause(id, where, detail, evidence, confidence, fix))

    def _called(self, name: str) -> str:
        """The port's own name of a tensor's first parameter, to be read by its author."""
        found = self.own.names.get(name, ())
        return f"your {found[0]}" if found else f"your {name}"

    # Absent, and harmless

    def _missing(self, differing: list[str]) -> None:
        for name in differing:
            placed, tensor = self.own.placed[name], self.state[name]
            if not name.endswith("bias") or bool(placed.all()):
                continue
            lost = tensor.masked_fill(placed, 0.0)
            norm, share = name.removesuffix(".bias"), ""
            if "ln_" in norm.rpartition(".")[2] and not bool(self.own.placed[f"{norm}.weight"].any()):
                evidence = f"no parameter takes the place of the checkpoint's {norm}.weight and {norm}.bias"
                self._say("layernorm-without-affine", norm, "your norm has no weight and no bias", evidence, 0.9)
                continue
            if name.endswith("c_attn.bias"):
                absent = [letter for letter, third in zip("qkv", placed.chunk(3), strict=True) if not bool(third.any())]
                share = f" for {', '.join(absent)}" if len(absent) < 3 else ""
                if absent == ["k"]:
                    self.notes.append(f"no bias for the keys ({name}): softmax does not see what is added to all keys alike")
                    continue
            detail = f"you have no bias{share} here; the checkpoint's is not zero (norm {float(lost.norm()):.2g})"
            self._say("missing-bias", name, detail, f"no parameter takes the place of the checkpoint's {name}", 0.9)

    def _not_harmless(self, differing: list[str]) -> list[str]:
        """Without those that differ and compute the same: heads, and hidden units, that changed places together."""
        left = []
        for name in differing:
            layer = layer_of(name)
            part = name.split(".")[2] if layer is not None else ""
            if part in ("attn", "mlp"):
                stem = f"h.{layer}.{part}."
                if name == next(other for other in differing if other.startswith(stem)):
                    harmless = same_part(
                        part,
                        *({n: w[n] for n in w if n.startswith(stem)} for w in (self.own.weights, self.state)),
                        stem,
                        self.config,
                    )
                    self._harmless = harmless
                if self._harmless:
                    continue
            left.append(name)
        return left

    # One tensor

    def _pieces(self, name: str) -> list[Piece]:
        theirs, ours, placed = self.own.weights[name], self.state[name], self.own.placed[name]
        if ".c_attn." not in name:
            return [Piece(name, "", theirs, ours, placed)]
        return [Piece(name, share, *(t.chunk(3, -1)[i] for t in (theirs, ours, placed))) for share, i in SHORT.items()]

    def _tensor(self, name: str) -> None:
        pieces = [piece for piece in self._pieces(name) if bool(piece.placed.any())]
        theirs, ours = self.own.weights[name], self.state[name]
        if len(pieces) == 3 and fingerprint(theirs) == fingerprint(ours) and self._whole(name, theirs, ours):
            return
        for piece in pieces:
            if not torch.equal(piece.theirs[piece.placed], piece.ours[piece.placed]):
                self._piece(piece)

    def _whole(self, name: str, theirs: Tensor, ours: Tensor) -> bool:
        """c_attn has the right entries in another order."""
        if theirs.ndim == 2 and torch.equal(theirs, ours.reshape(theirs.shape[::-1]).t()):
            self._say(
                "transposed",
                name,
                f"{self._called(name)} was reshaped where it had to be transposed",
                "the checkpoint's values, reshaped, are yours to the bit",
            )
            return True
        thirds = theirs.chunk(3, -1)
        for order in itertools.permutations(range(3)):
            if all(torch.equal(thirds[i], ours.chunk(3, -1)[j]) for i, j in enumerate(order)):
                got = ", ".join(f"{'qkv'[i]} from {'qkv'[j]}" for i, j in enumerate(order) if i != j)
                self._say(
                    "qkv-order",
                    name.rsplit(".", 1)[0],
                    f"{self._called(name)}: thirds have changed places ({got})",
                    "put back in order, they equal the checkpoint's to the bit",
                )
                return True
        sizes = {"q|k|v": 3, "head": self.config.n_head, "unit": self.config.head_dim}
        for order in itertools.permutations(sizes):
            if torch.equal(theirs, ours.index_select(-1, reading(sizes, order))):
                read = f"you read the columns of {self._called(name)[5:]} as ({', '.join(order)})"
                detail = f"{read}; the checkpoint has (q|k|v, head, unit)"
                self._say(
                    "head-layout",
                    name.rsplit(".", 1)[0],
                    detail,
                    "the checkpoint's columns in that order equal yours to the bit",
                    fix="q, k, v = (x @ w + b).split(n_embd, -1); q = q.view(B, T, n_head, head_size).transpose(1, 2)",
                )
                return True
        return False

    def _piece(self, piece: Piece) -> None:
        called = self._called(piece.name)
        theirs, ours = piece.theirs, piece.ours
        if piece.label in self.own.shared:
            served, taken = self.own.shared[piece.label]
            detail = f"your {served} serves as {piece.share} and as {taken} at once"
            evidence = "in the forward pass one parameter is multiplied into both"
            id = "value-projection-wrong" if piece.share == "v" else "wrong-tensor"
            where = piece.name.replace("attn.c_attn.weight", f"attn.{piece.share}")
            if piece.name.endswith("weight"):
                self._say(id, where, detail, evidence)
            return
        for dtype, narrow in NARROW.items():
            if torch.equal(theirs[piece.placed], ours.to(narrow).double()[piece.placed]):
                self._rounded.setdefault(dtype, []).append(piece.label)
                return
        if piece.name == "wpe.weight" and (by := _rolled(theirs, ours)):
            detail = f"position p reads the checkpoint's row p {'+' if by > 0 else '-'} {abs(by)}"
            self._say("position-offset", "wpe", detail, f"{called}, moved by {abs(by)}, equals the checkpoint's to the bit")
            return
        square = theirs.ndim == 2 and theirs.shape[0] == theirs.shape[1]
        if square and torch.equal(theirs, ours.t()):
            self._say(
                "transposed", piece.label, f"{called} lies on its side", "transposed, it equals the checkpoint's to the bit"
            )
        elif theirs.ndim == 2 and torch.equal(theirs, ours.reshape(theirs.shape[::-1]).t()):
            self._say(
                "transposed",
                piece.label,
                f"{called} was reshaped where it had to be transposed",
                "the checkpoint's values, reshaped, are yours to the bit",
            )
        elif bool(piece.placed.all()) and fingerprint(theirs) == fingerprint(ours) and not constant(theirs):
            self._reordered(piece)
        elif bool(piece.placed.all()) and (other := self._holder(theirs)):
            self._other(piece, other)
        else:
            self._unrelated(piece)

    def _reordered(self, piece: Piece) -> None:
        sizes = {"head": self.config.n_head, "unit": self.config.head_dim}
        axis = 0 if piece.kind == "attn.c_proj.weight" else -1
        attention = piece.kind.startswith("attn.")
        if attention and piece.theirs.shape[axis] == self.config.n_embd:
            order = reading(sizes, ("unit", "head"))
            for words, index in (("(unit, head)", order), ("(head, unit), as if stored (unit, head)", order.argsort())):
                if torch.equal(piece.theirs, piece.ours.index_select(axis, index)):
                    self._say(
                        "head-layout",
                        piece.label,
                        f"{self._called(piece.name)} is read in the order {words}",
                        "the checkpoint's values in that order are yours to the bit",
                    )
                    return
        detail = f"{self._called(piece.name)} holds the right values in another order"
        self._say(
            "head-layout" if attention else "wrong-tensor",
            piece.label,
            detail,
            "the same values, each as often, and not in the same places",
            0.85,
        )

    def _holder(self, theirs: Tensor) -> str:
        """The label of the piece of the checkpoint that has the same entries; "" for none."""
        if constant(theirs):
            return ""
        if self._index is None:
            self._index = {}
            for name, tensor in self.state.items():
                if ".c_attn." in name:
                    for share, third in zip("qkv", tensor.chunk(3, -1), strict=True):
                        self._index.setdefault(fingerprint(third), f"{name} ({share})")
                self._index.setdefault(fingerprint(tensor), name)
        return self._index.get(fingerprint(theirs), "")

    def _values(self, label: str) -> Tensor:
        name, _, share = label.partition(" (")
        return self.state[name].chunk(3, -1)[SHORT[share[0]]] if share else self.state[name]

    def _other(self, piece: Piece, other: str) -> None:
        """It holds what belongs elsewhere."""
        ours = self._values(other)
        turned = (
            "" if ours.shape == piece.theirs.shape and torch.equal(ours, piece.theirs) else ", in another order (transposed?)"
        )
        evidence = f"its values are the checkpoint's {other} to the bit{turned}"
        called, target = self._called(piece.name), other.partition(" (")[0]
        if target == piece.name:
            self._shares.setdefault(piece.name, []).append((piece.share, other, evidence))
        elif piece.kind.startswith("ln_") and layer_of(target) == piece.layer and ".ln_" in target:
            self._say(
                "norms-swapped",
                piece.label,
                f"{called} holds the checkpoint's {other}: ln_1 stands before attention, ln_2 before the feed-forward",
                evidence,
            )
        else:
            self._say("wrong-tensor", piece.label, f"{called} holds the checkpoint's {other}", evidence)

    def _orders(self) -> None:
        """Separate q, k and v that hold one another's."""
        for name, found in self._shares.items():
            got = ", ".join(f"{share} holds {other[-2]}" for share, other, _ in found)
            self._say("qkv-order", name.rsplit(".", 1)[0], f"queries, keys and values have changed places: {got}", found[0][2])

    def _unrelated(self, piece: Piece) -> None:
        theirs, ours = piece.theirs[piece.placed], piece.ours[piece.placed]
        called, same = self._called(piece.name), float((theirs == ours).double().mean())
        close = float((theirs - ours).norm() / ours.norm().clamp(min=1e-300))
        if same > 0.2:
            self._say(
                "not-loaded",
                piece.label,
                f"{called} holds the checkpoint's values in part ({same:.0%}) only",
                f"{1 - same:.0%} of its entries differ",
                0.9,
            )
        elif close < 0.02:
            self._say(
                "reduced-precision",
                piece.label,
                f"{called} is the checkpoint's to {close:.1e} only",
                "close to it, and equal nowhere: was it quantised?",
                0.8,
            )
        else:
            ratio = float((theirs @ ours) / (ours @ ours)) if bool(ours.any()) else 0.0
            if abs(ratio) > 0 and float((theirs - ratio * ours).norm()) < 1e-6 * float(theirs.norm()):
                self._say(
                    "wrong-tensor",
                    piece.label,
                    f"{called} holds the checkpoint's values times {ratio:.6g}",
                    "every entry has that ratio to the checkpoint's",
                )
            else:
                self._say(
                    "not-loaded",
                    piece.label,
                    f"{called} does not hold the checkpoint's values: {likeness(theirs)}",
                    f"no tensor of the checkpoint has these values (relative distance {close:.2g})",
                    0.9,
                )

    # Blocks, and the head

    def _whole_blocks(self, differing: list[str]) -> None:
        """Blocks that hold another block's weights altogether: one cause, and none for their tensors."""
        kinds = [name.split(".", 2)[2] for name in self.state if layer_of(name) == 0]
        held: dict[int, int] = {}
        for layer in sorted({layer_of(name) for name in differing} - {None}):
            for other in range(self.config.n_layer):
                mine = {kind: (self.own.weights[f"h.{layer}.{kind}"], self.state[f"h.{other}.{kind}"]) for kind in kinds}
                alike = [
                    torch.equal(*pair) for kind, pair in mine.items() if not constant(pair[1]) and self._is_placed(layer, kind)
                ]
                if other != layer and alike and all(alike):
                    held[layer] = other
                    break
        if not held:
            return
        differing[:] = [name for name in differing if layer_of(name) not in held]
        words = ", ".join(f"h.{layer} holds h.{other}" for layer, other in list(held.items())[:6]) + (
            ", ..." if len(held) > 6 else ""
        )
        where = ", ".join(f"h.{layer}" for layer in list(held)[:6]) + (", ..." if len(held) > 6 else "")
        if sorted(held) == sorted(held.values()):
            self._say(
                "layer-order",
                where,
                f"blocks run in another order than the checkpoint's: {words}",
                "all weights of these blocks are the other's to the bit",
            )
        else:
            self._say(
                "wrong-tensor",
                where,
                f"whole blocks hold another's weights: {words}",
                "all weights of these blocks are the other's to the bit",
            )

    def _is_placed(self, layer: int, kind: str) -> bool:
        return bool(self.own.placed[f"h.{layer}.{kind}"].all())

    def _head(self) -> None:
        head, name = self.own.head, self.own.head_name
        if head is None or any(torch.equal(head, weights["wte.weight"]) for weights in (self.state, self.own.weights)):
            return
        ours = self.state["wte.weight"]
        for dtype, narrow in NARROW.items():
            if torch.equal(head, ours.to(narrow).double()):
                self._rounded.setdefault(dtype, []).append(name)
                return
        kind = "the right values in another order" if fingerprint(head) == fingerprint(ours) else likeness(head)
        holds = "holds" if torch.equal(self.own.weights["wte.weight"], ours) else "does not hold either"
        detail = f"your head ({name}) has weights of its own: {kind}; GPT-2's head is its token embedding"
        evidence = f"{name} differs from the checkpoint's wte.weight, which your embedding {holds}"
        self._say("untied-head", "logits", detail, evidence)


def _rolled(theirs: Tensor, ours: Tensor) -> int:
    """By how many rows a table was moved, 0 for not at all: row r is the checkpoint's r + n."""
    for by in (1, 2, -1, -2):
        mine, right = (theirs[:-by], ours[by:]) if by > 0 else (theirs[-by:], ours[:by])
        if len(mine) > 2 and torch.equal(mine, right):
            return by
    return 0
