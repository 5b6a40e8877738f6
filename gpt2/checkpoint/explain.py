"""What did not fit between a port and a checkpoint, in sentences for the port's author."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping as MappingType
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .anatomy import Anatomy
from .dataflow import Source, Use
from .keys import layer as layer_of
from .mapping import KEEP, Mapping
from .parts import Matrix, Part, Table

# How we know a part when we see it: by what it does in the forward pass.
EVIDENCE = {
    "wte": "the token ids choose its rows",
    "wpe": "added to the stream, other rows at other positions",
    "attn.q": "its results are matched against the keys, for the position that the mix is for",
    "attn.k": "its results are matched against the queries, for the positions that are mixed",
    "attn.v": "its results are what attention mixes",
    "attn.c_proj": "takes the mix back to the stream",
    "mlp.c_fc": "takes the stream to units that only the next projection reads",
    "mlp.c_proj": "takes the hidden units back to the stream",
    "attn.q.bias": "added to the queries",
    "attn.k.bias": "added to the keys",
    "attn.v.bias": "added to the values",
    "attn.c_proj.bias": "added to what attention gives back",
    "mlp.c_fc.bias": "added to the hidden units",
    "mlp.c_proj.bias": "added to what the feed-forward gives back",
    "ln_1.weight": "scales the normed stream before the queries",
    "ln_1.bias": "shifts the normed stream before the queries",
    "ln_2.weight": "scales the normed stream before the feed-forward",
    "ln_2.bias": "shifts the normed stream before the feed-forward",
    "ln_f.weight": "scales the normed stream at the end",
    "ln_f.bias": "shifts the normed stream at the end",
    "head": "its results are the logits; GPT-2's head is its token embedding",
    "head.bias": "added to the logits, where GPT-2 adds nothing",
    "surplus": "added where a bias is added already",
}

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
UNKNOWN = "used in the forward pass, but as no part of GPT-2 that is known here"
WORDS = {"q": "queries", "k": "keys", "v": "values"}


def evidence(part: Part) -> str:
    """Why we believe that a parameter is this part of GPT-2."""
    return EVIDENCE[part.part] if part.layer is None else f"block {part.layer}: {EVIDENCE[part.part]}"


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


class Explanation:
    """Compares what was found in a port with what a checkpoint holds."""

    def __init__(self, anatomy: Anatomy, mapping: Mapping, state: MappingType[str, Tensor]) -> None:
        self.anatomy, self.mapping, self.state = anatomy, mapping, state
        self.found = Findings()
        self._sizes()
        self._oddities()
        self._leftovers()

    def where(self, kind: str, layer: int | None) -> str:
        """The dotted name that the parameters of a block's attention or feed-forward have in common."""
        parts = {"attention": "attn.", "feed-forward": "mlp.", "module": "none"}[kind]
        matrices = [p for p in self.anatomy.parts if isinstance(p, Matrix) and p.layer == layer and p.part.startswith(parts)]
        names = [self.anatomy.name(int(next(matrix.outer())[0][0])).split(".")[:-1] for matrix in matrices]
        return ".".join(os.path.commonprefix(names))

    def _sizes(self) -> None:
        anatomy, config, say = self.anatomy, self.mapping.config, self.found.problems.append
        blocks, heads = len(anatomy.layers), len(anatomy.attentions[0].heads)
        hidden = sum(len(part.outputs) for part in anatomy.parts if part.part == "mlp.c_fc" and part.layer == anatomy.layers[0])
        words = len(anatomy.head) if anatomy.head is not None else anatomy.vocabulary
        if anatomy.width != config.n_embd:
            say(f"your module is {anatomy.width:,} wide, the checkpoint {config.n_embd:,}")
        if blocks != config.n_layer:
            absent = [f"h.{layer}" for layer in range(config.n_layer) if layer not in anatomy.layers]
            which = f": {', '.join(absent[:3])}{', ...' if len(absent) > 3 else ''} left out" if absent else ""
            say(f"your forward runs {_count(blocks, 'block')}, the checkpoint has {config.n_layer}{which}")
        if heads != config.n_head and not anatomy.torn:
            say(f"your attention has {_count(heads, 'head')}, the checkpoint {config.n_head}")
        if hidden not in (0, config.inner):
            say(f"your feed-forward is {hidden:,} wide, the checkpoint's {config.inner:,}")
        if words < config.vocab_size:
            say(f"your vocabulary has {words:,} entries, the checkpoint {config.vocab_size:,}")
        elif words > config.vocab_size:
            self.found.notes.append(
                f"your vocabulary is padded from {config.vocab_size:,} to {words:,} entries: the rest is zero"
            )

    def _oddities(self) -> None:
        anatomy, say = self.anatomy, self.found.problems.append
        for kind, branches in (("attention", anatomy.attentions), ("feed-forward", anatomy.feed_forwards)):
            for layer, branch in zip(anatomy.layers, branches, strict=False):
                if branch.times > 1:
                    say(f"your {kind} {self._named(kind, layer)}runs {branch.times} times")
        if anatomy.torn:
            layer = min(anatomy.torn)
            where = self._named("attention", layer)
            say(
                f"your attention {where}mixes up heads and positions: view as (B, T, heads, size) and transpose, and back likewise"
            )
        if anatomy.post_norm:
            say("your norms stand after the branches, GPT-2's before them; they are filled in the order in which they run")
        for norm in anatomy.extra_norms:
            names = {anatomy.name(int(ids[0])) for ids in (norm.scale, norm.shift) if ids is not None}
            self.found.unfilled |= dict.fromkeys(sorted(names), "a norm that GPT-2 does not have")
        if anatomy.positions is not None and anatomy.positions.skipped and self.mapping.is_shifted(anatomy.positions):
            say(f"your positions begin at row {anatomy.positions.skipped} of their table, the checkpoint's at 0")
        for part, name in self.mapping.in_buffers:
            what = "position embedding" if part.part == "wpe" else part.part
            say(f"your {what} ({name}) is a buffer and no parameter: it is left as it is")
        if anatomy.head is None:
            self.found.notes.append("your forward returns no logits: its hidden states are compared with ours")
        if anatomy.recording.unfollowed:
            self.found.notes.append(f"not followed: {', '.join(anatomy.recording.unfollowed)}")

    def _named(self, kind: str, layer: int | None, more: str = "") -> str:
        where = self.where(kind, layer)
        return f"({where}{more}) " if where else ""

    # Left over of the checkpoint

    def _leftovers(self) -> None:
        blocks = set(self.anatomy.layers)
        families: dict[tuple[str, str], list[tuple[str, float]]] = {}
        for name, placed in self.mapping.placed.items():
            if bool(placed.all()):
                continue
            if layer_of(name) is not None and layer_of(name) not in blocks:
                self.found.unused[name] = "a block that your module does not run"
                continue
            family = re.sub(r"^h\.\d+\.", "", name)
            if family in ("wte.weight", "wpe.weight"):
                self._left_rows(name, placed)
            elif self.mapping.refused(name):
                self.found.unused[name] = "of another size in your module"
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
            self.found.problems.append(
                f"your {kind} {self._named(kind, bare[0], more)}has no norm before it, where the checkpoint has h.{bare[0]}.{name}"
            )
        if not self.anatomy.end_normed:
            for leaf in ("weight", "bias"):
                families.pop((f"ln_f.{leaf}", ""), None)
            self.found.problems.append("your module has no last norm, where the checkpoint has ln_f")

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
        """Which share of a tensor is left over (of q, k, v), and how large it is: 0 where leaving it out changes nothing."""
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
        named = self._named(subject, layer_of(name), f" and {len(rest)} more" if rest else "")
        most = max((norm for _, norm in rest), default=0.0)
        others = f"; up to {most:.2g} in other blocks" if rest else ""
        not_neutral = "one (off by" if family.endswith(".weight") and family.startswith("ln") else "zero (norm"
        return f"your {subject} {named}has {lack}; the checkpoint's {name} is not {not_neutral} {norm:.2g}{others})"

    # Left over of the module

    def judge(self, source: Source, low: int, high: int, shown: str) -> Use:
        """How a parameter is used; and why it is not filled, or not whole, if its entries, from ``low`` to ``high``, say so."""
        uses = sorted(self.anatomy.recording.uses.get(source.storage, {Use()}), key=lambda use: use != Use())
        if len(uses) > 1:
            ways = " and ".join(f"times {use.scale:.4g}" + (f" plus {use.shift:.4g}" if use.shift else "") for use in uses[:2])
            self.found.ambiguous.append(f"{source.name} is used {ways}; it is filled for the first")
        if low == KEEP and source.name not in self.found.unfilled:
            self._left_out(source, high, shown)
        return uses[0]

    def _left_out(self, source: Source, high: int, shown: str) -> None:
        positions = self.anatomy.positions
        if high == KEEP and source.storage not in self.anatomy.recording.uses:
            self.found.idle[source.name] = "never used in the forward pass"
        elif high == KEEP:
            self.found.unfilled[source.name] = self._why(source)
        elif any(self._overlaps(words, source) for words in self.anatomy.words):
            self.found.notes.append(f"{source.name} has rows that no token reads: they are left as they are")
        elif positions is not None and self.anatomy.name(int(positions.first[0])) == source.name:
            most = self.mapping.config.n_positions
            self.found.notes.append(f"{source.name} has more positions than the checkpoint's {most:,}: the rest is left as it is")
        else:
            self.found.unfilled[source.name] = f"in part ({shown})"

    def _why(self, source: Source) -> str:
        region = source.region
        if any(region.start <= id <= region.last for id in self.anatomy.adapters):
            return "a pair of low rank beside a projection, which GPT-2 does not have"
        for part in self.mapping.misfits:
            if self._overlaps(part, source):
                beyond = part.layer not in (None, *range(self.mapping.config.n_layer))
                return "the checkpoint has no such block" if beyond else "of another size in the checkpoint"
        return UNKNOWN

    def settle(self, agrees: bool) -> None:
        """Where the logits agree, what was left as it is has no effect as it is, whatever it may be."""
        if agrees:
            self.found.idle |= {
                name: f"{why}; without effect as it is"
                for name, why in self.found.unfilled.items()
                if not why.startswith("in part")
            }
            self.found.unfilled = {name: why for name, why in self.found.unfilled.items() if why.startswith("in part")}

    def _overlaps(self, part: Part, source: Source) -> bool:
        ids = next(part.outer())[0] if isinstance(part, Matrix) else part.first if isinstance(part, Table) else part.ids
        return bool(((ids >= source.region.start) & (ids <= source.region.last)).any())

    def conflicts(self) -> None:
        """Parameters that serve as two different parts, whose weights differ."""
        alike: dict[str, list[str]] = {}
        for conflict in self.mapping.conflicts:
            taken, refused = (self._values(entries) for entries in (conflict.taken, conflict.refused))
            if not torch.equal(taken, refused):
                first, second = (self._label(int(entries[0])) for entries in (conflict.taken, conflict.refused))
                sentence = f"{conflict.source} serves as {first} and as {second}, which differ; it holds the first"
                alike.setdefault(re.sub(r"\d+", "#", sentence), []).append(sentence)
        for first, *rest in alike.values():
            self.found.ambiguous.append(first + (f"; so do {len(rest)} more" if rest else ""))

    def _values(self, entries: Tensor) -> Tensor:
        values = torch.empty(entries.shape, dtype=torch.float64)
        for name in {self.mapping.owner(int(end)) for end in entries.aminmax()}:
            start = self.mapping.starts[name]
            mine = (entries >= start) & (entries < start + self.state[name].numel())
            values[mine] = self.state[name].flatten()[entries[mine] - start].double()
        return values

    def _label(self, entry: int) -> str:
        name = self.mapping.owner(entry)
        column = (entry - self.mapping.starts[name]) % self.state[name].shape[-1]
        return f"{'qkv'[column * 3 // self.state[name].shape[-1]]} of {name}" if ".c_attn." in name else name


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"
