"""A fault that can be switched on in a simulation: alone, joined with others, or from a later token on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpt2.port.diagnosis.hypotheses import IN_PROMPT, IN_STEPS
from gpt2.port.diagnosis.search import Fault, Formula
from gpt2.port.dump.simulation import Entrance, Run, Simulation, Stage, Stages, State

Blame = Callable[[int], tuple[Fault, ...]]
Replaced = Callable[[Simulation, int], Stages]
Tops = Callable[[Simulation, int], Mapping[str, Formula]]


@dataclass(frozen=True)
class Variant:
    """A fault that can be switched on in a block, or outside the blocks.

    ``label``: equal in all blocks. ``blame``: the faults by the block's number, without a layer. ``replaced``: the stages in a
    block; none if the fault changes nothing there. ``rare``: tried in all blocks together only, if blocks are expensive.
    ``all_tokens``: the first few tokens alone do not show it as all tokens do. ``mixes_rows``: the first row of a batch alone
    does not either, because the others change it. ``shared``: of code that all blocks share: tried in all of them together alone.
    ``run``: the fault is in how blocks, tokens or rows follow each other, and replaces no stage. ``top``: by stage, what it does
    to the value that another fault of that stage gives; None if it cannot go with one. ``kept``: the same function with what a
    cache keeps of it in ``attn.k`` and ``attn.v``; None if ``replaced`` has it there.
    """

    label: str
    blame: Blame
    replaced: Replaced
    outside: bool = False
    rare: bool = False
    all_tokens: bool = False
    mixes_rows: bool = False
    shared: bool = False
    run: Run | None = None
    top: Tops | None = None
    kept: Replaced | None = None

    @classmethod
    def of(cls, label: str, faults: Iterable[Fault], replaced: Replaced, rare: bool = False, mixes_rows: bool = False) -> Variant:
        fixed = tuple(faults)
        return cls(label, lambda layer: fixed, replaced, rare=rare, mixes_rows=mixes_rows)

    def faults(self, layer: int | None) -> tuple[Fault, ...]:
        """Return the faults with their places; ``layer`` is None outside the blocks."""
        return tuple(replace(fault, layer=layer) for fault in self.blame(layer or 0))


def on_top(formula: Formula, stage: Stage) -> Stage:
    """Return the stage whose value ``formula`` changes."""
    return lambda s: formula(stage(s))


def joined(label: str, *variants: Variant) -> Variant:
    """Return several variants as one, in one block."""

    def replaced(simulation: Simulation, layer: int) -> Stages:
        return {stage: formula for one in variants for stage, formula in one.replaced(simulation, layer).items()}

    def kept(simulation: Simulation, layer: int) -> Stages:
        made = [(one.kept or one.replaced)(simulation, layer) for one in variants]
        return {stage: formula for stages in made for stage, formula in stages.items()}

    def blame(layer: int) -> tuple[Fault, ...]:
        return tuple(fault for one in variants for fault in one.blame(layer))

    caches = kept if any(one.kept for one in variants) else None
    return Variant(label, blame, replaced, mixes_rows=any(one.mixes_rows for one in variants), kept=caches)


def late(variant: Variant, token: int) -> Variant:
    """Return a fault of the tokens from ``token`` on alone, as in a program that reads a prompt, and then steps with a cache."""

    def blame(layer: int) -> tuple[Fault, ...]:
        words = IN_STEPS.format(token)
        return tuple(replace(fault, detail=f"{words}: {fault.detail}") for fault in variant.blame(layer))

    def replaced(simulation: Simulation, layer: int) -> Stages:
        rights = {
            **simulation.right(layer),
            "embed": lambda s: simulation.embed(),
            "ln_f": lambda s: simulation.norm("ln_f", s["x"]),
        }
        return {stage: _from_token(token, rights[stage], wrong) for stage, wrong in variant.replaced(simulation, layer).items()}

    return replace(variant, label=f"{variant.label} from {token}", blame=blame, replaced=replaced, all_tokens=True, top=None)


def early(variant: Variant, token: int) -> Variant:
    """Return a block's fault of the first ``token`` tokens alone: of a prompt, computed in one piece.

    What the prompt leaves in the cache is what the fault gives; later tokens are computed from it by GPT-2's formulas.
    """

    def blame(layer: int) -> tuple[Fault, ...]:
        words = IN_PROMPT.format(token)
        return tuple(replace(fault, detail=f"{words}: {fault.detail}") for fault in variant.blame(layer))

    def replaced(simulation: Simulation, layer: int) -> Stages:
        prompt = simulation.remember(("prompt", token), simulation.ids, lambda: simulation.on_ids(simulation.ids[:, :token]))
        rights = simulation.right(layer)
        wrongs = (variant.kept or variant.replaced)(prompt, layer)
        return {stage: _in_prompt(token, rights[stage], wrong) for stage, wrong in wrongs.items()}

    return replace(variant, label=f"{variant.label} until {token}", blame=blame, replaced=replaced, all_tokens=True, top=None)


def _in_prompt(token: int, right: Stage, wrong: Stage) -> Stage:
    def formula(s: State) -> Tensor:
        whole, prompt = right(s), wrong(Entrance(0, s).cut(len(s["x"]), token).state)
        part = whole[..., :token, : prompt.shape[-1]]
        if part.shape != prompt.shape:  # another number of heads
            return whole
        out = whole.clone()
        out[..., :token, : prompt.shape[-1]] = prompt
        return out

    return formula


def _from_token(token: int, right: Stage, wrong: Stage) -> Stage:
    def formula(s: State) -> Tensor:
        before, behind = right(s), wrong(s)
        if before.shape != behind.shape:  # another number of heads
            return behind
        axis = before.ndim - 2  # (B, T, D), (B, H, T, K) and (B, H, T, T)
        return torch.cat([before.narrow(axis, 0, token), behind.narrow(axis, token, behind.shape[axis] - token)], axis)

    return formula
