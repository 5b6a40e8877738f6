"""Run a module on ids that are drawn: its logits, in float64 where it can, and the error that its rounding makes, or may make."""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.config import GPT2Config
from gpt2.errors import InputError
from gpt2.measure.metrics import FLOAT64_BOUND, max_abs, worst_relative_error
from gpt2.measure.rounding import WORST_RATIO, explained_errors
from gpt2.measure.tracing import trace
from gpt2.measure.user_code import error_at, logits_of
from gpt2.port.mapping.mapping import LENGTHS, probes
from gpt2.port.recording.dispatch import DeterministicMode, FirstNaN, run_deterministically
from gpt2.port.recording.forward import Borrowed, ForwardError, device_of
from gpt2.port.recording.pool import LOOSE, Pool, collect
from gpt2.port.search.logits import Reference, error_of, require_logits
from gpt2.port.terms.causes import SURE, Cause
from gpt2.port.terms.places import Place

FIX = "compute in float32: no .bfloat16(), no .half() and no autocast within the forward pass"
SLACK = 4.0 * WORST_RATIO  # times what rounding explains: another order of the same operations may round more
MOST_OPERATORS = 1_000_000  # for the logits of one probe: some 20 s; the first has as many as it has


class Runs:
    """The forward passes of one module. ``bound``: the largest error of its logits; ``notes``: what was met, for the report.

    ``state``: the checkpoint in float64, once it is read.
    """

    def __init__(self, module: nn.Module, config: GPT2Config, notes: list[str]) -> None:
        self.module, self.config, self.notes = module, config, notes
        self.who = type(module).__name__
        self.device = device_of(module)
        self.state: Mapping[str, Tensor] = {}
        self.bound = FLOAT64_BOUND
        self.keep_casts = False
        self.operators = 0  # of the last run
        self.rewind: Callable[[], None] = lambda: None  # what makes each call the module's first one

    def outputs(self, borrowed: Borrowed, some: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return ids and logits of each probe, in float64 if possible, else in the module's dtype; later probes may fail."""
        outputs: list[tuple[Tensor, Tensor]] = []
        rate = math.inf  # operators for a pair of tokens, the fewest of all calls: the first one also prepares for later ones
        for ids in some:
            if outputs and rate * ids.size(1) ** 2 > MOST_OPERATORS:
                why = "your forward takes long, as one that goes number by number"
                self.notes.append(f"{why}: {ids.size(1)} tokens were not tried")
                continue
            logits = self.run(ids) if outputs else borrowed.widest(lambda: [self.run(some[0])])[0]
            if isinstance(logits, Exception):
                words = f"fails on ids of shape {tuple(ids.shape)}"
                if not outputs:
                    raise ForwardError(f"{self.who}: its forward {words}: {error_at(logits)}")
                self.notes.append(f"your forward {words} ({error_at(logits)})")
                continue
            if not outputs and not borrowed.wide:
                self._allow_rounding(logits, borrowed.failure)
            elif not outputs and borrowed.failure is not None:
                words = "your forward makes tensors in torch's default dtype; it was run with float64 as that default"
                self.notes.append(f"{words} ({error_at(borrowed.failure)})")
            outputs.append((ids, logits))
            rate = min(rate, self.operators / ids.size(1) ** 2)
        return outputs

    def call(self, ids: Tensor, keep_casts: bool | None = None, **arguments: Any) -> tuple[Any, DeterministicMode]:
        """Return what the module returns for ids (B, T) without dropout, and what it drew and cast."""
        keep_casts = self.keep_casts if keep_casts is None else keep_casts
        return run_deterministically(lambda: self.module(ids.to(self.device), **arguments), keep_casts)

    def logits(self, ids: Tensor, keep_casts: bool) -> tuple[Tensor, DeterministicMode]:
        output, mode = self.call(ids, keep_casts)
        return logits_of(output, ids, self.config.vocab_size), mode

    def pool(self, ids: Tensor, keep_casts: bool) -> Pool:
        """Return the tensors that the module computes."""
        self.rewind()
        return run_deterministically(lambda: collect(self.module, ids.to(self.device), self.config), keep_casts)[0]

    def run(self, ids: Tensor) -> Tensor | Exception:
        """Return the logits of ids (B, T), or the error."""
        self.rewind()
        try:
            output, mode = self.logits(ids, self.keep_casts)
        except Exception as error:
            return error
        self.operators = mode.operators
        if mode.casts and not mode.keep_casts and bool(output.isnan().any()):  # it reads the bits of narrower numbers
            self.keep_casts = True
            output, mode = self.logits(ids, True)
        if mode.casts and not mode.keep_casts:
            self.notes.append(f"your forward casts to {', '.join(sorted(mode.casts))}; it was measured with float64 there")
        elif mode.casts:
            self._allow_rounding(output, None)
        logits = require_logits(output.detach().cpu(), ids, self.config, self.who)
        if bool(logits.isnan().any()):
            at, why = int(logits.isnan().any(-1).any(0).nonzero()[0]), "a division by zero, or a softmax over nothing but -inf"
            raise InputError(f"{self.who}: its logits are NaN from position {at} on{self.first_nan(ids)}; look for {why}")
        return logits

    def parted(self, logits: Tensor, due: Tensor, least: float) -> int:
        """Return the first token whose logits are off by more than ``least``, of those that the module returns."""
        due = due[:, -logits.shape[1] :]
        wrong = ((logits[..., : self.config.vocab_size] - due).abs() > least * due.square().mean().sqrt()).any(2).any(0)
        return int(wrong.long().argmax())

    def cut(self, ids: Tensor, logits: Tensor, right: Callable[[Tensor], Tensor | None], least: float) -> tuple[Tensor, Tensor]:
        """Return a text and its logits up to soon behind the first that is off by more than ``least``; it has two rows or more.

        The whole text where that is unknown: ``right``, which computes the right logits, returns None, or the part shows nothing.
        """
        if (due := right(ids)) is None:
            return ids, logits
        part = ids[:, : self.parted(logits, due, least) + LENGTHS[0]]
        part = part if len(ids) > 1 else torch.cat([part, part.flip(1)])
        again, due = self.run(part), right(part)
        if isinstance(again, Exception) or due is None or error_of(again, due) <= least:
            return ids, logits
        return part, again

    def first_nan(self, ids: Tensor) -> str:
        """Return words for a message: which result is the first with NaN; "" if none is."""
        with suppress(Exception), FirstNaN() as mode:
            self.module(ids.to(self.device))
        return f"; the first array with NaN is the result of {mode.words}" if mode.words else ""

    def explained(self, reference: Reference, ids: Tensor, dtype: torch.dtype) -> float:
        """Return the largest error of right logits that rounding to ``dtype`` explains, or the bound if that is larger."""
        right = {"logits": reference(ids)}
        return max(self.bound, WORST_RATIO * explained_errors(reference.model, ids, dtype, right)["logits"])

    def _allow_rounding(self, output: Tensor, failure: Exception | None) -> None:
        """For a module without float64, allow the errors that rounding to its dtype explains."""
        dtype = output.dtype if output.dtype != torch.float64 else torch.float32
        self.bound = self.explained(Reference(self.config, self.state), probes(self.config)[0], dtype)
        why, kind = f" (in float64 it fails: {error_at(failure)})" if failure else "", str(dtype).removeprefix("torch.")
        self.notes.append(f"your forward was measured in {kind}, and may be off by {self.bound:.1e}{why}")

    def imprecise(self, borrowed: Borrowed, ids: Tensor, wide: Tensor, same: Reference) -> list[Cause]:
        """Return the cause that logits in float32 are farther from those in float64, ``wide``, than rounding explains.

        It may be a cast, autocast, or products of short numbers. ``same``: our model with the module's weights; it says what
        rounding explains, and where the module departs from that.
        """
        self.rewind()
        with borrowed.in_own_dtype():
            try:
                output, mode = self.logits(ids, True)
            except Exception:  # what it does in the dtype of its weights is no question of digits
                return []
            narrow = output.detach().to("cpu", torch.float64)
            error = worst_relative_error(narrow, wide)
            explained = explained_errors(same.model, ids, torch.float32) if error > LOOSE else {}
            if not explained or error <= SLACK * explained["logits"]:
                return []
            own = self.pool(ids, True)
        pool, first = self.pool(ids, False), "logits"
        for point, value in trace(same.model, ids).items():
            ordered = value.flatten().sort().values
            arrays = (one.flatten().sort().values for one in own.entries if one.numel() == value.numel())
            nearest = min((worst_relative_error(one, ordered) for one in arrays), default=0.0)
            if pool.find(value) is not None and nearest > SLACK * explained[point]:
                first = point
                break
        casts = "".join(f", and casts to {dtype}" for dtype in sorted(mode.casts - {"float32"}))
        words = f"your forward computes in fewer digits than float32 has{casts}"
        off = f"in float32, your logits are off by {error:.0e} from your own in float64"
        evidence = f"{off}; rounding explains {explained['logits']:.0e}"
        return [Cause("reduced-precision", (Place.of(first),), words, evidence, SURE, FIX, effect=max_abs(narrow, wide))]
