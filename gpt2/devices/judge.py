"""Compare one computation on a device with float64 on the CPU: right, right in a coarser arithmetic, or wrong."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product

import torch
from torch import Tensor

from gpt2.errors import InputError
from gpt2.measure.environment import dtype_label
from gpt2.measure.metrics import Progress, relative_error, worst_entry, worst_relative_error
from gpt2.measure.placement import missing_kernel, on_device
from gpt2.measure.replay import Run
from gpt2.measure.rounding import WORST_RATIO, Coarser, coarser_arithmetics, noisy_results

FEW = 64  # results with fewer entries may be one unit in the last place off: their error is a matter of luck
MORE_DRAWS = 16  # runs with random errors, where one speaks against a device
LUCK = 16  # an error so many times the bound is no matter of luck
MANY = 1 << 24  # entries of all results together, beyond which few numbers do not decide, and many runs take minutes


@dataclass(frozen=True)
class Verdict:
    """One result. ``arithmetic`` explains its error; None if none does, and then ``looks_like`` says what is wrong."""

    operator: str
    condition: str
    dtype: str
    where: str  # the module whose parameter it reads, or "after" that module; of the whole model, a traced point or a gradient
    error: float = float("inf")
    explained: float = 0.0
    arithmetic: str | None = None
    advice: str = ""  # the line that turns a coarser arithmetic off
    looks_like: str = ""
    missing: str = ""  # what PyTorch has not implemented for the device, such as "aten::histc"

    @property
    def wrong(self) -> bool:
        return self.arithmetic is None and not self.missing

    @property
    def ratio(self) -> float:
        """The error over what the arithmetic explains."""
        return self.error / self.explained if self.explained else float("inf") if self.error else 0.0

    @property
    def sentence(self) -> str:
        """Say what is wrong: ``"h.0.attn.c_attn: addmm is wrong for a batch with padding, float32: entry [1, 0] is ..."``."""
        return f"{self.where}: {self.operator} is wrong for {self.condition}, {self.dtype}: {self.looks_like}"


@dataclass
class Judge:
    """Judges a device in ``dtype``. Of each operator, condition and dtype it keeps the first wrong verdict, or the worst one."""

    device: torch.device
    progress: Progress
    dtype: torch.dtype = torch.float32
    worst: dict[tuple[str, ...], Verdict] = field(default_factory=dict)
    first_wrong: Verdict | None = None

    def __call__(
        self, condition: str, ratio: float, operator: str, where: str | Sequence[str], run: Run, inputs: Sequence[Tensor]
    ) -> None:
        """Compare what ``run`` gives for the ``inputs``, in the dtype on the device and in float64 on the CPU.

        The inputs are float64, of numbers that the dtype has too, or integers. ``where`` is the place of all results, or of each.
        An error of up to ``ratio`` times what rounding explains holds: the error of a run with random errors, or the largest of
        several (README.md says why). Raises InputError: out of memory.
        """
        named = operator, condition, dtype_label(self.dtype)
        places = [where] if isinstance(where, str) else where
        if named not in self.worst:
            self.progress(f"{self.device}: {', '.join(named)}")
        try:
            got = on_device(self.device, run, [x.to(self.dtype) if x.is_floating_point() else x for x in inputs])
        except (RuntimeError, TypeError, ArithmeticError) as raised:
            said = " ".join(str(raised).split())[:160]
            if "out of memory" in said:  # CUDA's and MPS' words, which say nothing of what the device computes
                raise InputError(f"{self.device} is out of memory at {operator}; judge it with a smaller model") from None
            return self._keep(Verdict(*named, places[0], looks_like=f"it raises: {said}", missing=missing_kernel(raised)))

        right = [x.detach() for x in run(*inputs)]

        @cache
        def drawn(coarser: Coarser | None, seed: int) -> list[tuple[float, float]]:
            """Return the errors of each result, of its norm and of its worst entry, in a run with random errors."""
            noisy = noisy_results(run, inputs, self.dtype, coarser, seed)
            noise = (x.to(result.dtype) for x, result in zip(noisy, got, strict=True))
            return [(relative_error(x, exact), worst_relative_error(x, exact)) for x, exact in zip(noise, right, strict=True)]

        for index, (result, exact) in enumerate(zip(got, right, strict=True)):
            error, worst, own, explained = relative_error(result, exact), worst_relative_error(result, exact), 0.0, 0.0
            verdict = partial(Verdict, *named, places[index % len(places)], error)
            least = torch.finfo(self.dtype).eps if exact.numel() < FEW else 0.0
            for coarser, draws in product((None, *coarser_arithmetics(self.dtype, self.device.type)), (1, MORE_DRAWS)):
                if draws > 1 and (sum(map(Tensor.numel, right)) > MANY or error > LUCK * ratio * explained):
                    continue
                errors = (drawn(coarser, seed)[index] for seed in range(draws))
                explained, most = (max(least, *each) for each in zip(*errors, strict=True))
                own = own if coarser else explained
                if error <= ratio * explained and worst <= WORST_RATIO * most:
                    self._keep(verdict(explained, *((coarser.name, self._off(coarser, operator)) if coarser else named[2:])))
                    break
            else:
                self._keep(verdict(own, looks_like=worst_entry(result, exact)))

    def _off(self, coarser: Coarser, operator: str) -> str:
        """Return the line that turns an arithmetic off; CUDA's fused attention of float32 has its own."""
        fused = self.device.type == "cuda" and coarser.operands and operator.startswith("scaled_dot_product_attention")
        return "torch.backends.cuda.enable_mem_efficient_sdp(False)" if fused else coarser.off

    def _keep(self, verdict: Verdict) -> None:
        key = verdict.operator, verdict.condition, verdict.dtype
        before = self.worst.get(key, verdict)
        self.worst[key] = max(before, verdict, key=lambda x: (2, 0) if x.wrong else (x.arithmetic != x.dtype, x.ratio))
        self.first_wrong = self.first_wrong or (verdict if verdict.wrong else None)
