"""Run a case on a device, and say whether its error is that of an arithmetic, or what the wrong result looks like."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpt2.devices.arithmetic import Arithmetic, Run, arithmetics
from gpt2.devices.case import Case
from gpt2.errors import InputError
from gpt2.measure.metrics import relative_error, worst_relative_error
from gpt2.measure.placement import device_name
from gpt2.measure.rounding import WORST_RATIO, rounding_noise
from gpt2.pages.reports import dtype_label

LARGEST = 0.25  # an arithmetic with a larger error overflows: it explains nothing
OWN_ULPS = 16  # the CPU's own kernels explain no more than this many units in the last place: they may be wrong too
FEW = 64  # outputs with fewer entries may be one unit in the last place off: their error is a matter of luck
SAME = 0.05  # a mistake is recognised if it leaves at most this share of the error


@dataclass(frozen=True)
class Device:
    """Where cases run. ``context`` is entered around each call; tests simulate other devices by it."""

    target: torch.device
    name: str
    context: Callable[[], AbstractContextManager[object]] = field(default=nullcontext)

    @classmethod
    def of(cls, target: torch.device) -> Device:
        return cls(target, device_name(target))

    def run(self, function: Run, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Copy the ``inputs`` to the device, call ``function`` there, and return its results on the CPU."""
        moved = [tensor.to(self.target, copy=True) for tensor in inputs]
        with self.context():
            results = function(*moved)
        return tuple(result.detach().to("cpu", copy=True) for result in results)


@dataclass(frozen=True)
class Verdict:
    """One case in one dtype. ``arithmetic`` explains the error; None if none does, and then ``looks_like`` says what is known."""

    operator: str
    condition: str
    dtype: str
    error: float
    explained: float
    arithmetic: str | None
    precise: bool  # whether that arithmetic is the dtype's own, in whatever order of summing
    advice: str = ""
    looks_like: str = ""
    repeats: bool = True  # whether a second run gave the same bits
    missing: str = ""  # what PyTorch has not implemented for the device, such as "aten::histc"

    @property
    def ok(self) -> bool:
        return self.arithmetic is not None

    @property
    def wrong(self) -> bool:
        return not self.ok and not self.missing

    @property
    def ratio(self) -> float:
        """The device's error over what the arithmetic explains."""
        return self.error / self.explained if self.explained else (0.0 if self.error == 0 else float("inf"))


@dataclass(frozen=True)
class _Error:
    norm: float
    worst: float

    @classmethod
    def of(cls, got: Tensor, exact: Tensor) -> _Error:
        return cls(relative_error(got, exact), worst_relative_error(got, exact))

    def within(self, explained: _Error, ratio: float) -> bool:
        return self.norm <= ratio * explained.norm and self.worst <= WORST_RATIO * explained.worst

    def larger(self, other: _Error) -> _Error:
        return _Error(max(self.norm, other.norm), max(self.worst, other.worst))


def judge(device: Device, case: Case, dtype: torch.dtype) -> Verdict:
    """Compare a case on the device with float64 on the CPU; a coarser arithmetic is tried only if the finer explains less."""
    inputs = tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in case.inputs)
    wide = tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs)
    exact = _on_cpu(case.run, wide)
    label = dtype_label(dtype)
    try:
        got = device.run(case.run, inputs)
        repeats = all(map(_same, got, device.run(case.run, inputs)))
    except (RuntimeError, NotImplementedError, TypeError) as raised:
        said = " ".join(str(raised).split())[:160]
        if "out of memory" in said:  # CUDA's and MPS' words, which say nothing of what the device computes
            raise InputError(f"{device.name} is out of memory at {case.name}, {label}; judge it with a smaller model") from None
        missing = missing_kernel(raised)
        looks_like = f"not implemented on this device: {missing}" if missing else f"it raises: {said}"
        what = case.operator, case.condition, label
        return Verdict(*what, float("inf"), 0.0, None, False, looks_like=looks_like, missing=missing)
    errors = [_Error.of(a, b) for a, b in zip(got, exact, strict=True)]
    error = max(each.norm for each in errors)
    explained = own_rounding = _by_rounding(case, wide, exact, dtype, [each.dtype for each in got])
    for arithmetic in (None, *arithmetics(dtype, device.target.type)):
        if arithmetic is not None:
            explained = list(map(_Error.larger, explained, _explained(arithmetic, case.run, inputs, exact)))
        if all(error.within(each, case.ratio) for error, each in zip(errors, explained, strict=True)):
            worst = max(zip(errors, explained, strict=True), key=lambda pair: pair[0].norm / (pair[1].norm or 1))
            name, advice = (label, "") if arithmetic is None else (arithmetic.name, arithmetic.advice)
            sizes = worst[0].norm, worst[1].norm
            return Verdict(case.operator, case.condition, label, *sizes, name, arithmetic is None, advice, repeats=repeats)
    looks_like = _looks_like(case, wide, got, exact, own_rounding)
    return Verdict(
        *(case.operator, case.condition, label, error, max(each.norm for each in own_rounding), None, False),
        looks_like=looks_like,
        repeats=repeats,
    )


def missing_kernel(raised: Exception) -> str:
    """Return what PyTorch says it has no kernel for on this device; empty if it says something else."""
    said = " ".join(str(raised).split())
    kernel = re.search(r"""["'](\w+)["'] not implemented for ['"](\w+)""", said)  # "gelu_cuda" not implemented for 'Half'
    if kernel is not None:
        return f"{kernel[1]} for {kernel[2]}"
    if "only supported when" in said:  # pack_vnni2 is only supported when avx512 is supported
        return said[:80]
    if isinstance(raised, NotImplementedError) or "is not supported on" in said:  # BFloat16 is not supported on MPS
        name = re.search(r"\w+::\w+", said)
        return name[0] if name is not None else said[:80] or "this operator"
    return ""


def _on_cpu(function: Run, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(result.detach() for result in function(*(tensor.clone() for tensor in inputs)))


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num())


def _by_rounding(
    case: Case, wide: Sequence[Tensor], exact: Sequence[Tensor], dtype: torch.dtype, results: Sequence[torch.dtype]
) -> list[_Error]:
    """Return what rounding to ``dtype`` explains: the larger errors of every way to compute the case, with random errors.

    ``results``: the dtypes to which the results are rounded at last.
    """
    explained = [_Error(0.0, 0.0)] * len(exact)
    for way in (case.run, *case.other_ways):
        with rounding_noise(dtype):
            noisy = [each.to(stored) for each, stored in zip(_on_cpu(way, wide), results, strict=True)]
        explained = [each.larger(_Error.of(a, b)) for each, a, b in zip(explained, noisy, exact, strict=True)]
    least = _Error(torch.finfo(dtype).eps, torch.finfo(dtype).eps)
    return [each.larger(least) if right.numel() < FEW else each for each, right in zip(explained, exact, strict=True)]


def _explained(arithmetic: Arithmetic, way: Run, inputs: Sequence[Tensor], exact: Sequence[Tensor]) -> list[_Error]:
    results = arithmetic.run(way, inputs)
    errors = [_Error.of(result, expected) for result, expected in zip(results, exact, strict=True)]
    info = torch.finfo(next((each.dtype for each in inputs if each.is_floating_point()), torch.float32))
    if not (arithmetic.flushes and any(0 < float(each.abs().max()) < info.tiny for each in inputs if each.is_floating_point())):
        most = LARGEST if arithmetic.sums is not None else OWN_ULPS * info.eps
        errors = [each if each.norm <= most else _Error(0.0, 0.0) for each in errors]
    return [
        each.larger(_Error(torch.finfo(result.dtype).eps, torch.finfo(result.dtype).eps)) if result.numel() < FEW else each
        for each, result in zip(errors, results, strict=True)
    ]


def _looks_like(
    case: Case, wide: Sequence[Tensor], got: Sequence[Tensor], exact: Sequence[Tensor], rounding: Sequence[_Error]
) -> str:
    """Return which mistake gives the device's numbers, and how many entries are wrong."""

    def gives(results: Sequence[Tensor]) -> bool:
        """Whether the device has these numbers, to rounding."""
        return len(results) == len(got) and all(
            relative_error(a, b) <= max(2 * allowed.norm, SAME * min(1.0, relative_error(a, right)))
            for a, b, right, allowed in zip(got, results, exact, rounding, strict=True)
        )

    for what, function in case.wrong:
        try:
            results = _on_cpu(function, wide)
        except RuntimeError:
            continue  # a shape that this mistake cannot have
        if gives([result.expand_as(right) for result, right in zip(results, exact, strict=True) if _fits(result, right)]):
            return what
    pairs = list(zip(got, exact, strict=True))
    if any(bool((~a.isfinite() & b.isfinite()).any()) for a, b in pairs):
        share = sum(int((~a.isfinite() & b.isfinite()).sum()) for a, b in pairs) / sum(a.numel() for a in got)
        return f"NaN or infinity in {share:.1%} of the entries, where the CPU gives numbers: it overflows"
    allowed = [WORST_RATIO * max(each.worst, 1e-12) for each in rounding]
    wrong = [~((a.double() - b).abs() <= most * _rms(b)) & (a != b) for (a, b), most in zip(pairs, allowed, strict=True)]
    share = sum(int(each.sum()) for each in wrong) / sum(each.numel() for each in wrong)
    if all(bool((a[where] == 0).all()) for a, where in zip(got, wrong, strict=True)):
        return f"zeros in {share:.1%} of the entries, where the CPU gives other numbers"
    if gives([_first_row(b) for b in exact]):
        return "every row of the batch gets the first row's result"
    factors = [float((a.double() * b).sum() / b.square().sum()) for a, b in pairs if bool(b.isfinite().all())]
    if len(factors) == len(pairs) and gives([b * factor for b, factor in zip(exact, factors, strict=True)]):
        return "off by a factor of " + " and ".join(dict.fromkeys(f"{factor:.3g}" for factor in factors))
    return f"no mistake that is known here; {share:.1%} of the entries are off" + _rows(wrong)


def _fits(result: Tensor, right: Tensor) -> bool:
    try:
        return torch.broadcast_shapes(result.shape, right.shape) == right.shape
    except RuntimeError:
        return False


def _rms(x: Tensor) -> float:
    return float(x[x.isfinite()].square().mean().sqrt()) if x.numel() else 0.0


def _first_row(x: Tensor) -> Tensor:
    return x[:1].expand_as(x) if x.ndim else x


def _rows(wrong: Sequence[Tensor]) -> str:
    """Return which entries of the first axis hold all errors, if it is only some."""
    for each in wrong:
        if each.ndim > 1 and (at := each.flatten(1).any(1)).any() and not at.all():
            index = at.nonzero().flatten().tolist()
            return f", in rows {', '.join(map(str, index[:8]))}{' ...' if len(index) > 8 else ''} of {len(at)}"
    return ""
