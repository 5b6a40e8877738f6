"""Compute each part of GPT-2 from the port's own inputs to it: a cause is named only if its correction changes something."""

from __future__ import annotations

import torch
from torch import Tensor

from gpt2.measure.metrics import worst_relative_error
from gpt2.measure.tracing import point_at
from gpt2.model import ACTIVATIONS, GPT2
from gpt2.port.diagnosis.hypotheses import attention_weights
from gpt2.port.diagnosis.norms import Norms
from gpt2.port.diagnosis.scores import Layout
from gpt2.port.diagnosis.search import Fault
from gpt2.port.diagnosis.trail import Trail
from gpt2.port.graph import right_scale

NO_CHANGE = 1e-13  # the largest relative error, in float64, of a value that a correction does not change


class Replay:
    """GPT-2's formulas on the values of ``trail``; ``reference``: our model, for the embeddings."""

    def __init__(self, trail: Trail, reference: GPT2) -> None:
        self.trail, self.values, self.reference = trail, trail.values, reference
        self.norms = Norms(trail.config, trail.own)

    def effective(self) -> list[Fault]:
        """Return the trail's faults without those whose correction changes nothing; note in the trail how much each changes."""
        kept = []
        for fault in self.trail.faults:
            error = self.error(fault)
            if error is not None and error <= NO_CHANGE and not self.trail.pool.narrow:
                continue
            if error is not None:
                self.trail.missed.setdefault(fault.place.name, error)
            kept.append(fault)
        return kept

    def error(self, fault: Fault) -> float | None:
        """Return the error of GPT-2's formula, from the port's inputs, against the port's value at a fault; None if unknown."""
        part = fault.part.partition(".")[0] if fault.part.startswith("attn") else fault.part
        n = fault.layer
        if fault.norm_after or fault.id == "extra-norm":  # named after the norm, and found behind a branch
            return None
        if part in ("wte", "wpe", "embed"):
            wte, wpe = (table.weight.double() for table in (self.reference.wte, self.reference.wpe))
            return self._compared(wte[self.trail.ids] + wpe[: self.trail.ids.shape[1]], "embed")
        if part == "ln_f":
            stream = self._stream(len(self.trail.blocks))
            return None if stream is None else self._compared(self.norms.at("ln_f")[0].formula(stream), "ln_f")
        if n is None or n >= len(self.trail.blocks):
            return None
        layer = self.trail.blocks[n]
        if part in ("ln_1", "ln_2"):
            stream = self._stream(n) if part == "ln_1" else self._at(n, "mid")
            right = None if stream is None else self.norms.at(f"h.{layer}.{part}")[0].formula(stream)
        elif part == "attn":
            part, right = "attn.c_proj", self._attention(n, layer)
        elif part == "mlp.act":
            up = self._at(n, "mlp.c_fc")
            right = None if up is None else ACTIVATIONS[self.trail.config.activation_function](up)
        else:
            return None
        return None if right is None else self._compared(right, point_at(n, part))

    def _attention(self, n: int, layer: int) -> Tensor | None:
        x, w, heads = self._at(n, "ln_1"), self.trail.weights(layer), self.trail.config.n_head
        if x is None:
            return None
        q, k, v = (Layout.RIGHT.split(y, heads) for y in (x @ w["attn.c_attn.weight"] + w["attn.c_attn.bias"]).chunk(3, -1))
        factor = right_scale(self.trail.config, layer)
        weights = next(attention_weights(q @ k.mT * factor, factor)).value
        return Layout.RIGHT.merge(weights @ v) @ w["attn.c_proj.weight"] + w["attn.c_proj.bias"]

    def _at(self, n: int, part: str) -> Tensor | None:
        return self.values.get(point_at(n, part))

    def _stream(self, n: int) -> Tensor | None:
        """Return what enters the ``n``-th block, or the last norm behind all blocks."""
        return self._at(n - 1, "") if n else self.values.get("embed")

    def _compared(self, right: Tensor, point: str) -> float | None:
        value = self.values.get(point)
        if value is None or value.shape != right.shape or not bool(torch.isfinite(value).all()):
            return None
        return worst_relative_error(right, value)
