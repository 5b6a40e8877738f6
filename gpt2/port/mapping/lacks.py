"""What of a checkpoint has no place in a port, and what the port loses by it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping as MappingType
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpt2.checkpoint.keys import layer as layer_of
from gpt2.port.anatomy.anatomy import Anatomy
from gpt2.port.anatomy.parts import Matrix
from gpt2.port.mapping.mapping import Mapping

# What a port lacks that has no place for a tensor of the checkpoint: subject and predicate.
LACKS = {
    "attn.c_attn.weight": ("attention", "no projection of its own for its {share}"),
    "attn.c_attn.bias": ("attention", "no bias for its {share}"),
    "attn.c_proj.weight": ("attention", "no output projection"),
    "attn.c_proj.bias": ("attention", "no output bias"),
    "mlp.c_fc.weight": ("feed-forward", "no first layer"),
    "mlp.c_fc.bias": ("feed-forward", "no bias in its first layer"),
    "mlp.c_proj.weight": ("feed-forward", "no second layer"),
    "mlp.c_proj.bias": ("feed-forward", "no bias in its second layer"),
    "ln_1.weight": ("attention", "no scale in the norm before it"),
    "ln_1.bias": ("attention", "no shift in the norm before it"),
    "ln_2.weight": ("feed-forward", "no scale in the norm before it"),
    "ln_2.bias": ("feed-forward", "no shift in the norm before it"),
    "ln_f.weight": ("module", "no scale in its last norm"),
    "ln_f.bias": ("module", "no shift in its last norm"),
}
WORDS = {"q": "queries", "k": "keys", "v": "values"}


@dataclass
class Findings:
    """Everything there is to say but whether the logits agree; ``neutral`` are the tensors as the port has them, where it lacks
    something that can be put in numbers: a bias of zero, a scale of one."""

    unfilled: dict[str, str] = field(default_factory=dict)
    idle: dict[str, str] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)
    ambiguous: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    neutral: dict[str, Tensor] = field(default_factory=dict)


def named(anatomy: Anatomy, kind: str, layer: int | None, more: str = "") -> str:
    """ "(blocks.0.attn) ": the dotted name that the parameters of a block's attention or feed-forward have in common."""
    part = {"attention": "attn.", "feed-forward": "mlp."}.get(kind)
    matrices = [p for p in anatomy.parts if isinstance(p, Matrix) and p.layer == layer and part and p.part.startswith(part)]
    names = [anatomy.recording.name(int(next(matrix.outer())[0][0])).split(".")[:-1] for matrix in matrices]
    together = itertools.takewhile(lambda pieces: len(set(pieces)) == 1, zip(*names, strict=False))
    where = ".".join(pieces[0] for pieces in together)
    return f"({where}{more}) " if where else ""


class Lacks:
    """Goes through all that is not placed, and tells ``found``."""

    def __init__(self, anatomy: Anatomy, mapping: Mapping, state: MappingType[str, Tensor], found: Findings) -> None:
        self.anatomy, self.mapping, self.state, self.found = anatomy, mapping, state, found
        self._look()

    def _look(self) -> None:
        blocks = set(self.anatomy.layers)
        families: dict[tuple[str, str], list[tuple[str, float]]] = {}
        for name, placed in self.mapping.placed.items():
            if bool(placed.all()):
                continue
            if layer_of(name) is not None and layer_of(name) not in blocks:
                self.found.unused[name] = "a block that your module does not run"
                continue
            family = re.sub(r"^h\.\d+\.", "", name)
            if self.mapping.refused(name):
                self.found.unused[name] = "of another size in your module"
            elif family in ("wte.weight", "wpe.weight"):
                self._left_rows(name, placed)
            else:
                share, lost = self._left(name, family, placed)
                if lost:
                    families.setdefault((family, share), []).append((name, lost))
        self._missing_norms(families)
        for (family, share), lost in families.items():
            self.found.problems.append(self._sentence(family, share, lost))

    def _missing_norms(self, families: dict[tuple[str, str], list[tuple[str, float]]]) -> None:
        """Where nothing is normed, one sentence, and none about the scale and the shift."""
        for name, kind, branches in (("ln_1", "attention", "attentions"), ("ln_2", "feed-forward", "feed_forwards")):
            found = zip(self.anatomy.layers, getattr(self.anatomy, branches), strict=False)
            bare = [layer for layer, branch in found if not branch.normed]
            if not bare or self.anatomy.post_norm:
                continue
            for leaf in ("weight", "bias"):
                lost = families.pop((f"{name}.{leaf}", ""), [])
                rest = [(tensor, norm) for tensor, norm in lost if layer_of(tensor) not in bare]
                families |= {(f"{name}.{leaf}", ""): rest} if rest else {}
            more = f" and {len(bare) - 1} more" if len(bare) > 1 else ""
            place = named(self.anatomy, kind, bare[0], more)
            self.found.problems.append(f"your {kind} {place}has no norm before it; the checkpoint has h.{bare[0]}.{name}")
        if not self.anatomy.end_normed:
            for leaf in ("weight", "bias"):
                families.pop((f"ln_f.{leaf}", ""), None)
            self.found.problems.append("your module has no last norm; the checkpoint has ln_f")

    def _left_rows(self, name: str, placed: Tensor) -> None:
        rows = int(placed.all(1).sum())
        self.found.unused[name] = f"rows {rows}:{len(placed)}" if rows else "all of it"
        if name == "wpe.weight" and rows:
            self.found.notes.append(
                f"your module has {rows:,} positions, the checkpoint {len(placed):,}: the first {rows:,} are filled"
            )
        elif name == "wpe.weight":
            self.found.neutral[name] = torch.zeros_like(self.state[name])
            if not self.mapping.in_buffers:
                self.found.problems.append("your module has no learned positions; the checkpoint's wpe.weight is left out")

    def _left(self, name: str, family: str, placed: Tensor) -> tuple[str, float]:
        """Which share of a tensor is left over (of q, k, v), and how large it is: 0 where that changes nothing."""
        tensor, shares = self.state[name], ""
        if family.startswith("attn.c_attn"):
            thirds = zip("qkv", placed.chunk(3, -1), strict=True)
            shares = "".join(share for share, third in thirds if not bool(third.any()))
        self.found.unused[name] = " and ".join(shares) if 0 < len(shares) < 3 else "all of it" if not placed.any() else "in part"
        if tensor.ndim > 1:
            return shares, float(torch.linalg.vector_norm(tensor[~placed].double()))
        neutral = 1.0 if family.endswith(".weight") else 0.0
        self.found.neutral[name] = torch.where(placed, tensor, neutral)
        lost = (tensor.double() - neutral).masked_fill(placed, 0.0)
        if shares and family.endswith("bias"):
            lost.chunk(3)[1].zero_()  # the keys' bias adds the same to all scores of a query
            if shares == "k":
                self.found.unused[name] += ": without effect, as softmax does not see what is added to all keys alike"
        if not bool(lost.any()):
            self.found.unused[name] += "" if shares == "k" else f": it is {'one' if neutral else 'zero'}, so nothing is lost"
        return shares, float(torch.linalg.vector_norm(lost))

    def _sentence(self, family: str, share: str, lost: list[tuple[str, float]]) -> str:
        """One sentence for the same lack in all blocks."""
        subject, lack = LACKS[family]
        (name, norm), rest = lost[0], lost[1:]
        words = [WORDS[letter] for letter in share]
        lack = lack.format(share=" and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]])))
        place = named(self.anatomy, subject, layer_of(name), f" and {len(rest)} more" if rest else "")
        most = max((norm for _, norm in rest), default=0.0)
        others = f"; up to {most:.2g} in other blocks" if rest else ""
        not_neutral = "one (off by" if family.endswith(".weight") and family.startswith("ln") else "zero (norm"
        return f"your {subject} {place}has {lack}; the checkpoint's {name} is not {not_neutral} {norm:.2g}{others})"
