"""Read off how the logits follow from the last stream: by which norm and head, and what changes them in the end."""

from collections.abc import Iterator

from torch import Tensor

from gpt2.port.fits.affine import Norm, other_weights, vectors_of
from gpt2.port.fits.observed import Fit, Observed
from gpt2.port.graph import Entrance
from gpt2.port.search.blamed import Blamed
from gpt2.port.search.blocks import Blocks
from gpt2.port.search.matching import PartSearch
from gpt2.port.search.part import Part
from gpt2.port.terms.causes import Cause
from gpt2.port.terms.tolerance import UNITS, stored


class LastPart:
    """The last norm and the head: a part behind the last block, of which the logits are shown."""

    def __init__(self, blocks: Blocks, blamed: Blamed) -> None:
        self.blocks, self.blamed = blocks, blamed
        self.observation, self.model, self.pool = blocks.observation, blocks.model, blocks.observation.pool
        self.table, self.normed = self.model.table, dict[str, Tensor]()  # the last normed stream, if it is found
        self.logits = self.pool.logits[..., : len(self.table)]

    def explained(self, x: Tensor, known: bool = True, fitted: bool = True) -> bool:
        """Return whether the logits follow from the last stream, by a ``known`` other norm or head, or by a ``fitted`` one."""
        right = self.model.site(0).norm(x, "ln_f")
        seen = self.observation.find("ln_f", right)
        normed = right if seen is None else seen.own
        self.normed |= {} if seen is None else {"ln_f": normed}
        if any(self.observation.are_logits(one, self.table) for one in (normed, right)):
            return True
        if not known or not bool(self.logits.isfinite().all()):
            return False
        count = self.logits.shape[1]
        expected = {"ln_f": right, "logits": (normed @ self.table.T)[:, -count:]}
        allowed = {"logits": self.pool.tolerance_at("logits") + stored(self.logits, self.pool.logits_dtype)}
        part = Part(self.model, "logits", Entrance(self.model.config.n_layer, {"x": x}), {"logits": self.logits}, allowed)
        every = [fit.candidate for fit in PartSearch(part).fits()]
        self.model.budget.check()
        fits = [one for one in every if (fitted or not one.head) and all(fault.id != "untied-head" for fault in one.head)]
        if fits:
            earlier = {one for some in self.blocks.known for one in some}
            best = min(fits, key=lambda fit: not any(one in earlier for one, _ in fit.sites))
            values = part.values(best)
            for one, _ in best.sites:
                stage = "ln_f" if "ln_f" in one.outside else "logits"
                self.blamed.alternative(one, None, stage, {stage: (values[stage], expected[stage])}, {})
            if best.head:
                self.blamed.fitted(best.head, "logits", {"logits": (values["logits"], expected["logits"])})
            return True
        stage, fit = next(self._fitted(x, right, normed, seen is None), ("", None)) if fitted else ("", None)
        if fit is not None:
            self.blamed.fitted(fit.faults, stage, {"logits": (self.logits, expected["logits"])})
        return fit is not None

    def _fitted(self, x: Tensor, right: Tensor, normed: Tensor, other_norm: bool) -> Iterator[tuple[str, Fit]]:
        """Yield fits of the last norm to its recorded result, where that is not GPT-2's, and of the head to the logits."""
        numbers, eps = self.model.site(0).numbers("ln_f"), self.model.config.layer_norm_epsilon
        norm = Norm("ln_f", *numbers, eps, vectors_of(self.model.state))
        for seen in self.observation.unexplained("ln_f", right, ()) if other_norm else ():
            self.model.budget.check()
            fit = next(filter(None, norm.fits(seen, x, seen.wrong_rows())), None)
            if fit is not None and self.observation.are_logits(fit.value, self.table):
                yield "ln_f", fit
        if self.logits.shape[:2] == normed.shape[:2]:
            unit, smallest = UNITS[self.pool.logits_dtype]
            slack, bound = unit * self.logits.abs() + smallest, self.pool.tolerance_at("logits")
            seen = Observed(self.logits, slack, bound, normed @ self.table.T, -1)
            if bool((rows := seen.wrong_rows()).any()) and other_weights(seen, normed, rows):
                yield "logits", Fit((Cause.at("untied-head", "logits", "the head has weights other than wte's"),), self.logits)
