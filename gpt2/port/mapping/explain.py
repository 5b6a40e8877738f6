"""What did not fit between a port and a checkpoint, in sentences for the port's author."""

from __future__ import annotations

import re
from collections.abc import Mapping as MappingType

import torch
from torch import Tensor

from gpt2.port.anatomy.anatomy import Anatomy
from gpt2.port.anatomy.parts import Matrix, Part, Table
from gpt2.port.mapping.lacks import Findings, Lacks, named
from gpt2.port.mapping.mapping import KEEP, Mapping
from gpt2.port.recording.dataflow import Source, Use

UNKNOWN = "used in the forward pass, but as no part of GPT-2 that is known here"


class Explanation:
    """Compares what was found in a port with what a checkpoint holds."""

    def __init__(self, anatomy: Anatomy, mapping: Mapping, state: MappingType[str, Tensor]) -> None:
        self.anatomy, self.mapping, self.state = anatomy, mapping, state
        self.found = Findings()
        self._sizes()
        self._oddities()
        Lacks(anatomy, mapping, state, self.found)

    def _sizes(self) -> None:
        anatomy, config, say = self.anatomy, self.mapping.config, self.found.problems.append
        blocks, heads = len(anatomy.layers), len(anatomy.attentions[0].heads)
        hidden = sum(len(part.outputs) for part in anatomy.parts if part.part == "mlp.c_fc" and part.layer == anatomy.layers[0])
        words = len(anatomy.head) if anatomy.head is not None else anatomy.stream.vocabulary
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
                    say(f"your {kind} {named(anatomy, kind, layer)}runs {branch.times} times")
        if anatomy.torn:
            layer = min(anatomy.torn)
            where = named(anatomy, "attention", layer)
            say(f"your attention {where}mixes up heads and positions: view as (B, T, heads, size), transpose, and so back")
        if anatomy.post_norm:
            say("your norms stand after the branches, GPT-2's before them; they are filled in the order in which they run")
        for norm in anatomy.extra_norms:
            names = {anatomy.recording.name(int(ids[0])) for ids in (norm.scale, norm.shift) if ids is not None}
            self.found.unfilled |= dict.fromkeys(sorted(names), "a norm that GPT-2 does not have")
        if anatomy.positions is not None and anatomy.positions.skipped and self.mapping.is_shifted(anatomy.positions):
            say(f"your positions begin at row {anatomy.positions.skipped} of their table, the checkpoint's at 0")
        self.found.problems += self._in_buffers()
        if anatomy.head is None:
            self.found.notes.append("your forward returns no logits: its hidden states are compared with ours")
        if anatomy.recording.unfollowed:
            self.found.notes.append(f"not followed: {', '.join(anatomy.recording.unfollowed)}")

    def _in_buffers(self) -> list[str]:
        parts = ((("position embedding" if part.part == "wpe" else part.part), name) for part, name in self.mapping.in_buffers)
        return [f"your {what} ({name}) is a buffer and no parameter: it is left as it is" for what, name in parts]

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
        elif positions is not None and self.anatomy.recording.name(int(positions.first[0])) == source.name:
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
            harmless = self._in_buffers()  # such as a bias of zeros
            self.found.problems[:] = [problem for problem in self.found.problems if problem not in harmless]
            self.found.notes += harmless

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
