"""Explain a block: which alternatives, in a text that is read at once or in calls, or which fitted numbers give its values."""

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from gpt2.errors import misfit
from gpt2.port.alternatives import table
from gpt2.port.alternatives.alternative import Alternative
from gpt2.port.alternatives.candidates import Candidate
from gpt2.port.fits.nodes import node_fit
from gpt2.port.fits.observed import Observed
from gpt2.port.graph import ATTENTION, HIDDEN, ORDER
from gpt2.port.search.batch import Batch
from gpt2.port.search.blocks import BEHIND, FIRST, WHOLE, Blocks, Trial
from gpt2.port.search.matching import PartSearch

MOST_FAULTS = 6  # alternatives of one block
MOST_ARRAYS, MOST_TRIED = 3, 24  # that may be the value of a node, the likest first
RESULTS = ("attn.mixed", "attn.heads", "attn.c_proj")  # of attention
PROBED = 8  # numbers of a value that are compared first
TARGETS = 3  # nodes that are not found, the first ones


class Explainer:
    """Explains a block by what gives its values; ``of_module``: a module shows all that it computes, a dump some of it.

    Tried in this order: one alternative; one beside the faults of an earlier block; one, to float32's precision; two of attention
    that hide each other; one in calls; fitted numbers. What explains a part of it is kept, and the rest explained likewise.
    """

    def __init__(self, blocks: Blocks, of_module: bool) -> None:
        self.blocks, self.of_module = blocks, of_module
        self.observation, self.model = blocks.observation, blocks.model
        self.widens = self.of_module and not self.observation.pool.narrow  # constants in float32 may be all that hides a fault
        self.inner = [one for one in table(self.model) if one.edits and not one.steps]
        self.reached: Trial | None = None  # as far as alternatives explain the last block
        self.resumed = False  # behind a block that nothing explains

    def explained(self, base: Trial) -> Trial | None:
        """Return a block with the alternatives that explain it, the likeliest; None if none do. ``reached``: how far they do."""
        self.reached, knowns = base, list(self._with_known(base))
        if self.observation.pool.late and (fit := self._masked(base)) is not None:  # tables have few masks of long texts
            if self.blocks.goes_on(fit):
                return fit
            base = self.reached = fit
        for _ in range(MOST_FAULTS):
            whole, part = self._best(base)
            if whole is None and not base.alternatives:  # one more fault may hide the known ones
                whole = next(filter(None, (self._best(trial)[0] for trial in knowns)), None)
            if whole is None:
                whole, part = self._widened(base, part)
            if whole is None and (both := self._both_hidden(base)) is not None:
                whole, part = (both, None) if self.blocks.goes_on(both) else (None, part or both)
            if whole is None and not self.of_module:
                whole = self._in_calls(base)
            if whole is not None:
                return whole
            part = part or self._fitted(base)
            if part is None or self.blocks.goes_on(part):
                return part
            base = self.reached = part
        return None

    def as_before(self, base: Trial) -> Trial | None:
        """Return a block with the faults of an earlier block, if they explain it."""
        return next((trial for trial in self._with_known(base) if self.blocks.goes_on(trial)), None)

    def changed_behind(self, last: Trial) -> Trial | None:
        """Return a block that is right, but whose result is changed before the next block reads it; None if no change fits."""
        some = (self.blocks.tried(last, one) for one in self.inner if set(one.edits) == {""})
        shown = (one for one in some if one is not None and self.blocks.shown_behind(one.layer, one.state[""]))
        if (best := min(shown, key=_likelihood, default=None)) is not None:
            return best
        arrays = self.observation.unexplained("", last.state[""], last.seen.values())
        fitted = (self._with_fit(last, "", seen) for seen in itertools.islice(arrays, MOST_ARRAYS))
        return next((one for one in fitted if one and self.blocks.shown_behind(one.layer, one.state[""])), None)

    def _with_known(self, base: Trial) -> Iterator[Trial]:
        """Yield a block with the faults of each earlier block, which may hide one another."""
        for earlier in self.blocks.known:
            trial: Trial | None = base
            for one in earlier:
                trial = None if trial is None else self.blocks.tried(trial, one, shown=False)
            if trial is not None:
                yield trial

    def _both_hidden(self, base: Trial) -> Trial | None:
        """Return a block with another factor of the scores and one more common fault of attention, which shows neither alone."""
        if base.alternatives or not set(FIRST[1:]) <= base.seen.keys() or not BEHIND["attn.scores"].isdisjoint(base.seen):
            return None
        common = [one for one in self.inner if not one.rare and set(one.edits) <= set(ATTENTION)]
        factors, others = ([one for one in common if (set(one.edits) == {WHOLE}) == of_scores] for of_scores in (True, False))
        pairs = [Candidate(((one, base.layer), (two, base.layer))) for one in factors for two in others]
        for node in RESULTS:  # two faults leave little that is like a node's value: any array may be it, by its first row
            arrays = list(self.observation.unexplained(node, base.state[node], base.seen.values()))
            some = [pair for pair in pairs if node != "attn.heads" or any(node in one.edits for one, _ in pair.sites)]
            if not (arrays and some):  # heads that are merged as GPT-2 does show what is mixed, which was tried
                continue
            part, rows = self.blocks.part(base, node, arrays[0]), torch.stack([seen.value[:1] for seen in arrays])
            bounds = part.bound * rows.square().flatten(1).mean(1).sqrt()
            for few, values in Batch(part, 1).values(some):
                self.model.budget.check()
                ends = (values.flatten(1)[:, None, -PROBED:] - rows.flatten(1)[:, -PROBED:]).abs().amax(-1) <= bounds  # (N, R)
                both = ends.nonzero().tolist()
                near = dict.fromkeys(n for n, row in both if bool((values[n] - rows[row]).abs().amax() <= bounds[row]))
                for (one, _), (two, _) in (few[n].sites for n in near):
                    trial = self.blocks.tried(base, one, shown=False)
                    whole = None if trial is None else self.blocks.tried(trial, two)
                    if whole is not None and not whole.seen.keys().isdisjoint(RESULTS):  # the feed-forward may be wrong as well
                        return whole
        return None

    def _near(self, base: Trial, node: str) -> Iterator[Candidate]:
        """Yield the single faults that give an array which is like the value of a node."""
        arrays = self.observation.unexplained(node, base.state[node], base.seen.values())
        if parts := [self.blocks.part(base, node, seen) for seen in itertools.islice(arrays, MOST_ARRAYS)]:
            search = PartSearch(parts[0], others=parts[1:])
            yield from search.nearest(search.faults.singles())
            self.model.budget.check()

    def _widened(self, base: Trial, part: Trial | None) -> tuple[Trial | None, Trial | None]:
        """Return a block as explained, else the best part, to the precision of float32, in which a module may keep constants."""
        if not self.widens or base.alternatives or not any(node in base.seen for node in FIRST[1:]):
            return None, part
        self.widens, self.observation.pool.narrow = False, True
        base = self.blocks.block(base.layer, base.state["x"])
        whole = base if self.blocks.goes_on(base) else self.as_before(base)
        whole, wide = (whole, None) if whole else self._best(base)
        self.observation.pool.narrow = whole is not None or (part is None and wide is not None)
        return whole, part or wide

    def _best(self, base: Trial) -> tuple[Trial | None, Trial | None]:
        """Return the best trial that explains a block, and the best of those that explain more of it than ``base``."""
        nodes, hidden = self.blocks.missing(base), {node for node in BEHIND if BEHIND[node].isdisjoint(base.seen)}
        some = [one for one in self.inner if one not in base.alternatives and not hidden.isdisjoint(one.edits)]
        some.sort(key=lambda one: not _changes(one, nodes[0] if nodes else ""))
        wholes, parts = list[Trial](), list[Trial]()
        for node in () if self.model.small else dict.fromkeys((*nodes[:1], "")):  # each whole block takes long
            if not wholes and not base.alternatives and node not in base.seen:
                near = {one for each in self._near(base, node) for one, _ in each.sites}
                wholes, _ = self._tried(base, (one for one in some if one in near))
        if not wholes:
            shown = {*self.blocks.screened(base, some)}
            wholes, parts = self._tried(base, (one for one in some if one in shown))
        if len(wholes) > 1:  # a result that nothing reads may be a step of a sum in another order
            wholes = [one for one in wholes if self.blocks.shown_behind(one.layer, one.state[""], one.alternatives)] or wholes
        whole = min(wholes, key=_likelihood, default=None)
        part = min(parts, key=lambda one: (-len(one.seen), one.unseen, *_likelihood(one)), default=None)
        if whole is not None and not base.alternatives:
            ties = tuple(one.alternatives[0] for one in wholes if _likelihood(one)[0] == _likelihood(whole)[0])
            whole = replace(whole, ties=ties)
        return whole, part

    def _tried(self, base: Trial, some: Iterable[Alternative]) -> tuple[list[Trial], list[Trial]]:
        """Return the trials that explain a block, and those that explain more of it than ``base``."""
        wholes, parts = list[Trial](), list[Trial]()
        shown = ""  # the first node that an explanation shows: what does not change it is no better one
        for one in some:
            self.model.budget.check()
            trial = self.blocks.tried(base, one) if _changes(one, shown) else None
            if trial is None:
                continue
            if self.blocks.goes_on(trial):
                wholes.append(trial)
                shown = min((*(trial.seen.keys() - base.seen.keys()), shown), key=ORDER.__getitem__)
            elif len(trial.seen) > len(base.seen):
                parts.append(trial)
        return wholes, parts

    def _in_calls(self, base: Trial) -> Trial | None:
        """Return a block with an alternative in some calls that explains it; None if there is none.

        From the block's input to an array that may be the value of a node is a part, of which every value at its end is shown.
        """
        for node, seen in self._targets(base, 1):
            part = self.blocks.part(base, node, seen)
            for some in PartSearch(part).in_calls():
                self.model.budget.check()
                tried = (self.blocks.tried(base, one) for candidate in some for one, _ in candidate.sites)
                trials = [trial for trial in tried if trial is not None and self.blocks.goes_on(trial)]
                if trials:
                    return min(trials, key=_likelihood)
        return None

    def _targets(self, base: Trial, most: int = MOST_ARRAYS) -> Iterator[tuple[str, Observed]]:
        """Yield nodes that are not found, with arrays that may be their values: of the first nodes, and of those nearly found.

        A program need not write every node. An array with some right tokens is a node's, or that of one which equals it there.
        """
        nodes = [node for node in self.blocks.missing(base) if node not in (*HIDDEN, WHOLE)]
        partly: list[tuple[str, Observed]] = []
        for number, node in enumerate(nodes):
            arrays = self.observation.unexplained(node, base.state[node], base.seen.values())
            for seen in itertools.islice(arrays, most):
                wrong = seen.wrong_rows()
                if number < TARGETS and bool(wrong.any()):
                    yield node, seen
                elif bool(wrong.any()) and not bool(wrong.all()):
                    partly.append((node, seen))
        yield from partly[:TARGETS]

    # Free numbers

    def _masked(self, base: Trial) -> Trial | None:
        """Return ``base`` with attention's weights as an array shows them; None if they are found, or none fits."""
        if (node := "attn.weights") not in self.blocks.missing(base):
            return None
        arrays = itertools.islice(self.observation.unexplained(node, base.state[node], base.seen.values()), MOST_TRIED)
        return next(filter(None, (self._with_fit(base, node, seen) for seen in arrays)), None)

    def _fitted(self, base: Trial) -> Trial | None:
        """Return ``base`` with one more node as what its array shows was computed; None if nothing fits.

        Of the targets those that what follows confirms, or the likest of a node that has none such: but not behind a block that
        nothing explains, whose own arrays may look like anything.
        """
        first = None
        for _, some in itertools.groupby(self._targets(base, MOST_TRIED), key=lambda target: target[0]):
            every = list(some)
            given = [_given(node, seen.value, str(n)) for n, (node, seen) in enumerate(every)]
            shown = {*self.blocks.screened(base, given, but=every[0][0])}
            sure = [self._confirmed(base, one) if one in shown else 0 for one in given]
            surest = [target for target, much in zip(every, sure, strict=True) if 0 < much == max(sure)]
            for node, seen in surest or every[: 0 if self.resumed else MOST_ARRAYS]:
                if (trial := self._with_fit(base, node, seen)) is not None:
                    if self.blocks.goes_on(trial):
                        return trial
                    first = first or trial
        return first

    def _with_fit(self, base: Trial, node: str, seen: Observed) -> Trial | None:
        """Return ``base`` with a node as what an array shows was computed."""
        self.model.budget.check()
        fit = None
        with misfit():  # of a block with another number of heads
            fit = node_fit(self.model, base.layer, node, base.state, seen)
        trial = None if fit is None else self.blocks.tried(base, _given(node, fit.value))
        if fit is None or trial is None:
            return None
        faults = list(base.faults)
        for one in fit.faults:  # one fault in all blocks, whatever numbers are fitted
            kind = one.kind or f"{one.place.part} {re.sub('[0-9][0-9.e+-]*', '', one.detail)}"
            faults.append(replace(one.within(base.layer), kind=kind))
        return replace(trial, alternatives=base.alternatives, faults=tuple(faults))

    def _confirmed(self, base: Trial, one: Alternative) -> int:
        """Return 2 if an array that is given as the value of a node explains the block, 1 if what follows is found, else 0."""
        self.model.budget.check()
        trial = self.blocks.tried(base, one)
        if trial is None:
            return 0
        whole, (node,) = self.blocks.goes_on(replace(trial, alternatives=base.alternatives)), one.edits
        return 2 if whole else int(not BEHIND[node].isdisjoint(trial.seen.keys() - base.seen.keys()))


def _given(node: str, value: Tensor, key: str = "") -> Alternative:
    """Return what gives a node a value, whatever it reads."""
    return Alternative("", "", {node: lambda c, s: value}, key=key)


def _changes(one: Alternative, node: str) -> bool:
    """Return whether an alternative changes a node; any does the last one."""
    return any(node == changed or node in BEHIND[changed] for changed in one.edits)


def _likelihood(trial: Trial) -> tuple[object, ...]:
    """Return what says which of several trials of a block is likelier, the least first."""
    blamed = Candidate(tuple((one, trial.layer) for one in trial.alternatives), head=trial.faults)
    return -len(trial.seen) - trial.again, blamed.order_of_naming
