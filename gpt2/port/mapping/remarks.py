"""Collect the sentences of ``load_into``'s report: problems, notes, and leftovers in the module and in the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping as MappingType
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpt2.checkpoint.keys import HEAD
from gpt2.checkpoint.keys import layer as layer_of
from gpt2.port.mapping.departures import Departure, DepartureKind, MissingEntries, find_departures, missing_entries, module_name
from gpt2.port.mapping.filling import Filled
from gpt2.port.mapping.mapping import Mapping
from gpt2.port.recording.dataflow import Source

# For each tensor of the checkpoint: the subject and the predicate of the sentence if the port has no place for it.
LACKS = {
    "attn.c_attn.weight": ("attn", "no projection of its own for its {share}"),
    "attn.c_attn.bias": ("attn", "no bias for its {share}"),
    "attn.c_proj.weight": ("attn", "no output projection"),
    "attn.c_proj.bias": ("attn", "no output bias"),
    "mlp.c_fc.weight": ("mlp", "no first layer"),
    "mlp.c_fc.bias": ("mlp", "no bias in its first layer"),
    "mlp.c_proj.weight": ("mlp", "no second layer"),
    "mlp.c_proj.bias": ("mlp", "no bias in its second layer"),
    "ln_1.weight": ("attn", "no scale in the norm before it"),
    "ln_1.bias": ("attn", "no shift in the norm before it"),
    "ln_2.weight": ("mlp", "no scale in the norm before it"),
    "ln_2.bias": ("mlp", "no shift in the norm before it"),
    "ln_f.weight": ("", "no scale in its last norm"),
    "ln_f.bias": ("", "no shift in its last norm"),
}
TOGETHER = (DepartureKind.NORM_MISSING, DepartureKind.HEADS_MIXED, DepartureKind.HEADS_SHARED)  # one sentence for all blocks
SUBJECTS = {"attn": "attention", "mlp": "feed-forward", "ln_1": "attention", "ln_2": "feed-forward", "": "module"}
SHARES = {"q": "queries", "k": "keys", "v": "values"}


@dataclass
class Remarks:
    """The sentences of a report; ``neutral``: tensors with a bias of zero or a scale of one where the port has no place."""

    mapping: Mapping
    state: MappingType[str, Tensor]
    unfilled: dict[str, str] = field(default_factory=dict)
    idle: dict[str, str] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)
    ambiguous: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    neutral: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.anatomy = self.mapping.anatomy
        departures = find_departures(self.mapping)
        self._in_buffers = [sentence(d) for d in departures if d.kind is DepartureKind.IN_BUFFER]
        groups: dict[tuple[Departure | DepartureKind, str], list[Departure]] = {}
        for departure in departures:
            groups.setdefault((departure.kind if departure.kind in TOGETHER else departure, departure.part), []).append(departure)
        for first, *rest in groups.values():
            if first.kind is DepartureKind.EXTRA_NORM:
                self.unfilled |= dict.fromkeys(first.names, sentence(first))
            else:
                sentences = self.notes if first.kind is DepartureKind.VOCABULARY_PADDED else self.problems
                sentences.append(sentence(first, len(rest)))
        if self.anatomy.head is None:
            self.notes.append("your forward returns no logits: its hidden states are compared with ours")
        if self.anatomy.recording.unfollowed:
            self.notes.append(f"not followed: {', '.join(self.anatomy.recording.unfollowed)}")
        no_norm = (DepartureKind.NORM_MISSING, DepartureKind.FINAL_NORM_MISSING)
        self._missing_tensors({(d.layer, d.part) for d in departures if d.kind in no_norm})

    def _missing_tensors(self, unnormed: set[tuple[int | None, str]]) -> None:
        families: dict[tuple[str, str], list[MissingEntries]] = {}
        for missing in missing_entries(self.mapping.placed, self.state):
            name = missing.name
            layer, family = layer_of(name), re.sub(r"^h\.\d+\.", "", name)
            if layer is not None and layer not in self.anatomy.layers:
                self.unused[name] = "a block that your module does not run"
            elif name in map(self.mapping.target, self.mapping.misfits):
                self.unused[name] = "of another size in your module"
            elif family in ("wte.weight", "wpe.weight", HEAD):
                self._missing_rows(name, int(self.mapping.placed[name].all(1).sum()))
            else:
                self._missing_entries(missing)
                if missing.norm and (layer, family.rpartition(".")[0]) not in unnormed:  # a missing norm is reported as such
                    families.setdefault((family, missing.shares), []).append(missing)
        self.problems += [self._lack(family, alike) for (family, _), alike in families.items()]

    def _missing_rows(self, name: str, rows: int) -> None:
        every = len(self.state[name])
        self.unused[name] = f"rows {rows}:{every}" if rows else "all of it"
        if name == "wpe.weight" and rows:
            self.notes.append(f"your module has {rows:,} positions, the checkpoint {every:,}: the first {rows:,} are filled")
        elif name == "wpe.weight":
            self.neutral[name] = torch.zeros_like(self.state[name])

    def _missing_entries(self, missing: MissingEntries) -> None:
        name, shares = missing.name, missing.shares
        part = "in part" if self.mapping.placed[name].any() else "all of it"
        self.unused[name] = " and ".join(shares) if 0 < len(shares) < 3 else part
        if missing.neutral is None:
            return
        self.neutral[name] = missing.neutral
        if shares == "k":
            self.unused[name] += ": without effect, as softmax does not see what is added to all keys alike"
        elif not missing.norm:
            self.unused[name] += f": it is {'one' if name.endswith('.weight') else 'zero'}, so nothing is lost"

    def _lack(self, family: str, alike: list[MissingEntries]) -> str:
        """Return one sentence for the same missing tensor in all blocks."""
        part, lack = LACKS[family]
        first, *rest = alike
        words = [SHARES[letter] for letter in first.shares]
        lack = lack.format(share=" and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]])))
        subject = _subject(part, module_name(self.anatomy, part, layer_of(first.name)) if part else "", len(rest))
        others = f"; up to {max(missing.norm for missing in rest):.2g} in other blocks" if rest else ""
        value = "one (off by" if family.endswith(".weight") and family.startswith("ln") else "zero (norm"
        return f"your {subject} has {lack}; the checkpoint's {first.name} is not {value} {first.norm:.2g}{others})"

    def left_over(self, filled: list[Filled]) -> None:
        """Report the parameters that were not filled, not completely filled, or used in two ways."""
        for one in filled:
            first, *others = self.mapping.uses(one.source)
            if others:
                self.ambiguous.append(f"{one.source.name} is used {first} and {others[0]}; it is filled for the first")
            if not one.complete and one.source.name not in self.unfilled:
                self._left_out(one.source, one.row is None, one.words)
        alike: dict[str, list[str]] = {}  # parameters that serve as two parts with different weights
        for conflict in self.mapping.conflicts:
            if not torch.equal(self._values(conflict.taken), self._values(conflict.refused)):
                one_part, other = (self._label(int(entries[0])) for entries in (conflict.taken, conflict.refused))
                if one_part == other:  # of another head: a departure
                    continue
                words = f"{conflict.source} serves as {one_part} and as {other}, which differ; it holds the first"
                alike.setdefault(re.sub(r"\d+", "#", words), []).append(words)
        self.ambiguous += [words + (f"; so do {len(rest)} more" if rest else "") for words, *rest in alike.values()]

    def _left_out(self, source: Source, whole: bool, words: str) -> None:
        positions = self.anatomy.positions
        if whole and source.storage not in self.anatomy.recording.uses:
            self.idle[source.name] = "never used in the forward pass"
        elif whole:
            self.unfilled[source.name] = self._why(source)
        elif any(source.region.overlaps(table.ids) for table in self.anatomy.words):
            self.notes.append(f"{source.name} has rows that no token reads: they are left as they are")
        elif positions is not None and self.anatomy.recording.name(int(positions.ids[0])) == source.name:
            most = self.mapping.config.n_positions
            self.notes.append(f"{source.name} has more positions than the checkpoint's {most:,}: the rest is left as it is")
        else:
            self.unfilled[source.name] = f"in part ({words})"

    def _why(self, source: Source) -> str:
        if source.region.overlaps(torch.tensor(list(self.anatomy.adapters))):
            return "a pair of low rank beside a projection, which GPT-2 does not have"
        misfit = next((part for part in self.mapping.misfits if source.region.overlaps(part.ids)), None)
        if misfit is None:
            return "used in the forward pass, but as no part of GPT-2 that is known here"
        beyond = misfit.layer not in (None, *range(self.mapping.config.n_layer))
        return "the checkpoint has no such block" if beyond else "of another size in the checkpoint"

    def _values(self, entries: Tensor) -> Tensor:
        values = torch.empty(entries.shape, dtype=torch.float64)
        for name, mine, numbers in self.mapping.by_tensor(entries):
            values[mine] = self.state[name].flatten()[numbers].double()
        return values

    def _label(self, entry: int) -> str:
        name = self.mapping.owner(entry)
        column = (entry - self.mapping.starts[name]) % self.state[name].shape[-1]
        return f"{'qkv'[column * 3 // self.state[name].shape[-1]]} of {name}" if ".c_attn." in name else name

    def settle(self, agrees: bool) -> None:
        """If the logits agree, turn problems about parameters left unchanged into notes: they have no effect."""
        if agrees:
            whole = {name: why for name, why in self.unfilled.items() if not why.startswith("in part")}
            self.idle |= {name: f"{why}; without effect as it is" for name, why in whole.items()}
            self.unfilled = {name: why for name, why in self.unfilled.items() if name not in whole}
            self.problems = [problem for problem in self.problems if problem not in self._in_buffers]
            self.notes += self._in_buffers  # such as a bias of zeros


def sentence(departure: Departure, more: int = 0) -> str:
    """Return a departure as a sentence for the port's author; ``more`` other blocks have the same departure."""
    part, names = departure.part, departure.names
    some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return departure.kind.value.format(
        port_size=departure.port_size,
        checkpoint_size=departure.checkpoint_size,
        plural="" if departure.port_size == 1 else "s",
        left_out=f": {some} left out" if names else "",
        subject=_subject(part, departure.module, more),
        part="position embedding" if part == "wpe" else part,
        norm=f"h.{departure.layer}.{part}",
        name="".join(names[:1]),
    )


def _subject(part: str, module: str, more: int = 0) -> str:
    """Return the subject of a sentence, such as "attention (blocks.0.attn and 2 more)"."""
    others = f" and {more} more" if more else ""
    return SUBJECTS.get(part, "") + (f" ({module}{others})" if module else "")
