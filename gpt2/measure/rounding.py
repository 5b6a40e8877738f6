"""The one account of what rounding explains: how far a right model in a dtype may be from the float64 run.

Monte Carlo arithmetic: a model runs in float64, and each operation's result gets a random error of the size that rounding to the
dtype has. So the figure depends on the weights, the ids and the dtype, and on no machine's kernels. u = eps / 2 is the largest
relative error of one rounding. The errors' root mean squares:

- one elementary result (sum of two, product, quotient, square root): 0.425 u, of mantissas that are distributed as 1 / m;
- exp, tanh, log, 1 / sqrt and the like: 1.2 u, up to two units in the last place, as vendors allow themselves. Kernels for 16-bit
  numbers compute these, norms and softmax in float32 and round once: 0.425 u;
- a 16-bit result is rounded, at a random place, also below 2^-14, where float16 has numbers 2^-24 apart. So equal numbers get
  equal errors, which do not average out in sums: the weights of a long row of attention may be two different numbers, and the
  gradients of 50,000 logits one;
- a sum y of K products t: 0.425 u sqrt(K (y^2 / 3 + sum(t^2) / 6) + sum(t^2)). That is adding one after another: the K
  partial sums go from 0 to y like a Brownian bridge, whose mean square is the bracket. Other orders are as precise or better. The
  last sum is the products' own rounding, on a processor (or in a kernel) without fused multiply-add.
  K is all of them: kernels add 50,257 in turn where the other side is narrow (n_embd 2 to 8). This costs no sharpness where it
  matters: a forward pass sums over n_embd or n_inner, and only the gradient that the head hands down over the vocabulary.
  Of a matrix product, sum(t^2) is taken in two factors, which are exact for each column's sum over the rows.
  Sums of 16-bit numbers are kept in float32 and rounded once, but for the gradients of a norm's weight and bias, which
  PyTorch's CPU kernel adds up in 16 bits, row by row. Neighbouring rows have one sign, so the bracket is that of the partial
  sums in this order, where it is larger;
- below 2^-14, float16 has numbers 2^-24 apart: 2^-24 / sqrt(12).

A device may compute less precisely than the dtype allows (:class:`Coarser`): round a product's operands first (TF32), keep its
sums in 16 bits, or flush subnormal numbers to zero. The formulas are the same, with a larger u or fewer partial sums.

Sources: Parker, "Monte Carlo arithmetic" (1997); Higham and Mary, "A new approach to probabilistic rounding error analysis" (SIAM
J. Sci. Comput., 2019), for the square root of K; Benford's law, for the distribution of mantissas.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2.checkpoint.checkpoint import model_with
from gpt2.measure.elementary import CACHED, STEPS, Steps, attention_in_steps
from gpt2.measure.metrics import split, worst_relative_error
from gpt2.measure.tracing import Recorded, trace, trace_steps
from gpt2.model import GPT2

# How many times what rounding explains a right model's error may be; tests/measure/test_rounding.py has right and imprecise ones.
FORWARD_RATIO = 2.0
TRAINING_RATIO = 3.0  # of loss, gradients and AdamW: a near-tie in one softmax may decide a sequence's gradient
WORST_RATIO = 8.0  # of the worst entry's error: the largest of many errors varies more than their norm
# Of two implementations whose float64 results are equal, and whose errors in the dtype are the same ones: see ``of_the_machine``.
MACHINE_RATIO = 8.0
SAME_ERRORS = 1 / 4  # two errors are the same one if their difference is at most so much of the smaller

ELEMENTARY = 0.425  # root mean square of one rounding's relative error, in units of u
FUNCTION = 1.2
TINY = torch.finfo(torch.float64).tiny
NORMALS = 131_071  # random numbers: few, which stay in a cache, and a prime, so that no tensor's rows have this length

# By the names of PyTorch's operators, in place or not.
RESULTS = {
    *("add", "sub", "rsub", "mul", "div", "sqrt", "reciprocal", "pow", "addcmul", "addcdiv", "lerp"),
    *("embedding_dense_backward", "index_add", "index_put"),
}
FUNCTIONS = {
    *("exp", "exp2", "log", "tanh", "rsqrt", "sigmoid", "erf", "gelu", "silu", "_softmax", "native_layer_norm"),
    *("gelu_backward", "tanh_backward", "silu_backward", "sigmoid_backward", "_softmax_backward_data"),
}
LOSSES = {"_log_softmax", "_log_softmax_backward_data"}  # always in float32 or wider
SUMS = {"sum", "mean"}
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "mv", "dot"}


def unit(dtype: torch.dtype) -> float:
    """Return u, the largest relative error of one rounding to ``dtype``."""
    return torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class Coarser:
    """An arithmetic less precise than a dtype's own.

    ``off`` is the line of PyTorch that turns it off. ``operands``: u of a product's operands, such as 2^-11 for TF32. ``sums``: a
    product keeps so many partial sums in the dtype itself. ``flushes``: subnormal numbers count as zero.
    """

    name: str
    off: str = ""
    operands: float = 0.0
    sums: float = 0
    flushes: bool = False


def coarser_arithmetics(dtype: torch.dtype, kind: str) -> tuple[Coarser, ...]:
    """Return what a device of that ``kind`` ("cpu", "cuda" ...) may compute ``dtype`` with, the finer before the coarser."""
    matmul = f"torch.backends.{'mkldnn' if kind == 'cpu' else kind}.matmul"
    flush, label = Coarser("subnormals flushed to zero", flushes=True), str(dtype).removeprefix("torch.")
    if dtype == torch.float32:
        off = f"{matmul}.fp32_precision = 'ieee'" if kind in ("cpu", "cuda") else ""
        return flush, Coarser("TF32 products", off, 2**-11), Coarser("bfloat16 products", off, 2**-8)
    short = "fp16" if dtype == torch.float16 else "bf16"
    partly = f"{matmul}.allow_{short}_reduced_precision_reduction = False" if kind == "cuda" else ""
    wholly = f"{matmul}.allow_fp16_accumulation = False" if kind == "cuda" and short == "fp16" else ""
    return flush, Coarser(f"partial sums in {label}", partly, sums=16), Coarser(f"sums in {label}", wholly, sums=math.inf)


@contextmanager
def rounding_noise(dtype: torch.dtype, seed: int = 0, coarser: Coarser | None = None) -> Iterator[Steps]:
    """Add random errors as large as rounding to ``dtype`` to all that PyTorch computes in float64 within the ``with`` block.

    Forwards and backwards, on the CPU, in this thread. The weights should have been rounded to ``dtype`` before. A backward pass
    runs outside of the mode that it yields; what it computes again (gradient checkpointing) has to enter that mode again.
    """
    noise = _Noise(dtype, seed, coarser or Coarser(""))
    functions = STEPS if dtype in (torch.float32, torch.float64) else {F.scaled_dot_product_attention: attention_in_steps}
    with Steps(torch.float64, functions, noise.wider) as steps, noise:
        yield steps


def noisy_results(
    run: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], dtype: torch.dtype, coarser: Coarser | None, seed: int
) -> list[Tensor]:
    """Return what ``run`` gives for float64 ``inputs`` (and integers), each operation off by a rounding to ``dtype``."""
    if coarser is not None and coarser.flushes:
        inputs = [_flushed(x, dtype) if x.is_floating_point() else x for x in inputs]
    with rounding_noise(dtype, seed, coarser):
        return [result.detach() for result in run(*inputs)]


def rounded_weights(model: GPT2, dtype: torch.dtype) -> GPT2:
    """Return a float64 model of the weights of ``model`` rounded to ``dtype``, to run in :func:`rounding_noise`."""
    return model_with(model.config, ((name, value.to(dtype).double()) for name, value in model.state_dict().items()))


def explained_errors(model: GPT2, ids: Tensor, dtype: torch.dtype, exact: Recorded | None = None) -> dict[str, float]:
    """Return the worst entry's error that rounding to ``dtype`` explains at each traced point of a float64 model on ids (B, T).

    ``exact`` has the tensors of the float64 run (computed if they are not given); others than these are not kept.
    """
    exact, noisy = exact or trace(model, ids), Recorded()
    with rounding_noise(dtype):
        trace_steps(rounded_weights(model, dtype), ids, lambda step: noisy.update({n: x for n, x in step.items() if n in exact}))
    return {name: worst_relative_error(noisy[name], tensor) for name, tensor in exact.items()}


def of_the_machine(error: float, other: float, apart: float) -> bool:
    """Return whether two errors against float64 are the machine's: the two results are far nearer to each other (``apart``)."""
    return apart <= SAME_ERRORS * min(error, other)


def root_mean_square(values: Sequence[float]) -> float:
    """Return the root mean square of several runs' errors."""
    return math.sqrt(sum(value**2 for value in values) / len(values))


def _flushed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of ``x`` in which the subnormal numbers of ``dtype`` are zero."""
    return x.masked_fill(x.abs() < torch.finfo(dtype).tiny, 0)


class _Noise(TorchDispatchMode):
    """Adds a random error to each result in float64; see the module's docstring for the sizes."""

    def __init__(self, dtype: torch.dtype, seed: int, coarser: Coarser) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype, self.coarser = dtype, coarser
        self.unit = unit(dtype)
        self.sums = min(self.unit, unit(torch.float32))
        self.spacing = 2.0**-24 if dtype == torch.float16 else 0.0
        self.seed, (self.normals, state) = seed, _normals(seed)
        self.generator = torch.Generator().set_state(state)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: True would make torch import its compiler, which takes seconds."""
        return False

    @contextmanager
    def wider(self) -> Iterator[None]:
        """Round as the inside of a fused kernel does: to float32, if not to a wider dtype."""
        before, self.unit = self.unit, self.sums
        try:
            yield
        finally:
            self.unit = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if torch.is_inference_mode_enabled():  # where PyTorch hands over whole functions, such as linear
            with self:
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.rstrip("_")
        first = result[0] if isinstance(result, tuple) else result
        if not isinstance(first, Tensor) or first.dtype != torch.float64:
            return result
        if name in RESULTS:
            return self._off_by(result, ELEMENTARY * self.unit)
        if name in FUNCTIONS:
            return self._off_by(result, (FUNCTION if self.unit == self.sums else ELEMENTARY) * self.unit)
        if name in LOSSES:
            return self._off_by(result, FUNCTION * self.sums)
        if name in PRODUCTS:
            (a, b), own = args[-2:], self.coarser
            terms, partial = (min(a.size(-1), own.sums), unit(self.dtype)) if own.sums else (a.size(-1), None)
            if result.ndim == 2:
                sizes, of_column = _squares(a, b)
                wide = min(NORMALS, max(1, b.size(1)))
                for left in range(0, b.size(1), wide):
                    columns = slice(left, left + wide)
                    for part, size in zip(*(split(x, NORMALS // wide) for x in (result[:, columns], sizes)), strict=True):
                        self._add_error(part, size[:, None] * of_column[columns], terms, partial, own.operands)
                return result
            multiply = {"baddbmm": torch.bmm}.get(name, func)
            return self._summed(result, multiply(a.float().square_(), b.float().square_()), terms, partial, own.operands)
        if name == "native_layer_norm_backward":
            return self._norm_gradients(result, *args)
        if name in SUMS:
            terms = args[0].numel() / max(1, result.numel())
            squares = func(args[0].square(), *args[1:], **(kwargs or {}))
            return self._summed(result, squares / terms if name == "mean" else squares, terms)
        return result

    def _off_by(self, result: Any, size: float) -> Any:
        """Give each number a relative error of root mean square ``size``, in place; of a tuple, give it to each tensor."""
        for each in result if isinstance(result, tuple) else (result,):
            if isinstance(each, Tensor) and each.dtype == torch.float64:
                for part in _parts(each):
                    if self.unit == self.sums:
                        part.mul_(self._some(_factors(self.seed, size), part))  # infinity stays
                    self._store(part)
        return result

    def _norm_gradients(self, result: Any, upstream: Tensor, x: Tensor, shape: Any, mean: Tensor, root: Tensor, *_: Any) -> Any:
        """Round the gradients of a layer norm as kernels for 16-bit numbers do: they keep the sums over the rows in 16 bits.

        Float32 does not come here: :class:`Steps` computes its norms, and their gradients' sums have the account of any sum.
        """
        self._off_by(result[0], ELEMENTARY * self.unit)
        for gradient, terms in zip(result[1:], (upstream * (x - mean) * root, upstream), strict=True):
            rows = x.numel() // gradient.numel()
            flat = terms.reshape(rows, -1)
            in_turn = flat.cumsum(0).square_().sum(0).div_(rows).view(gradient.shape)  # neighbouring rows may have one sign
            squares = flat.square().sum(0).view(gradient.shape)
            self._summed(gradient, torch.maximum(squares, 6 * in_turn - 2 * gradient.square()), rows, self.unit)
        return result

    def _summed(self, result: Tensor, squares: Tensor, *size: Any) -> Tensor:
        """Give sums the errors of :meth:`_add_error`, in parts."""
        for part, square in zip(_parts(result), _parts(squares), strict=True):
            self._add_error(part, square, *size)
        return result

    def _add_error(self, part: Tensor, squares: Tensor, terms: float, unit: float | None = None, operands: float = 0.0) -> None:
        """Give sums of ``terms`` products, whose squares sum to ``squares``, the error of adding them and of rounding the sum."""
        one = (ELEMENTARY * (unit or self.sums)) ** 2
        each = terms * one
        both = 2 * (ELEMENTARY * operands) ** 2  # a product has two operands
        variance = part.square().mul_(each / 3).add_(squares, alpha=each / 6 + one + both)
        if self.spacing and unit == self.unit:  # zeros stay zero
            variance.add_(variance > 0, alpha=terms * self.spacing**2 / 12)
        part.addcmul_(variance.sqrt_(), self._some(self.normals, part))
        self._store(part)

    def _store(self, part: Tensor) -> None:
        """Round results to as many digits as a 16-bit dtype has, and its spacing, at a random place: times a random factor."""
        if self.unit > self.sums:
            exponent = float(torch.rand((), generator=self.generator, dtype=torch.float32)) - 0.5
            factor, below = 2**exponent, 53 + round(math.log2(self.unit))
            part.mul_(factor).view(torch.int64).add_(1 << (below - 1)).bitwise_and_(-1 << below)
            if self.spacing:
                multiples = 1.5 * 2**52 * self.spacing  # float64 has no fraction of the spacing there
                part.add_(multiples).sub_(multiples)
            part.div_(factor)
        if self.coarser.flushes and self.unit == unit(self.dtype):
            part.copy_(_flushed(part, self.dtype))

    def _some(self, table: Tensor, like: Tensor) -> Tensor:
        """Return as many numbers of a table as ``like`` has, from a random place: drawing new ones would take too long."""
        start = int(torch.randint(NORMALS, (), generator=self.generator))
        return table[start : start + like.numel()].view_as(like)


@lru_cache(maxsize=16)
def _normals(seed: int) -> tuple[Tensor, Tensor]:
    """Return NORMALS random numbers, twice in a row so that a part from anywhere may have as many; and the generator's state."""
    generator = torch.Generator().manual_seed(seed)
    normals = torch.randn(NORMALS, generator=generator, dtype=torch.float64)
    return torch.cat((normals, normals)), generator.get_state()


@lru_cache(maxsize=32)
def _factors(seed: int, size: float) -> Tensor:
    return 1 + size * _normals(seed)[0]


def _squares(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of the squared terms of a product (M, K) x (K, N) as two factors: of each row (M,) and each column (N,).

    Their products are the exact sums where all rows of ``a`` are in proportion; for others, the sum of each column is exact. A
    second product, of all the squares, would take half the time of the first.
    """
    of_term = torch.cat([part.square().sum(0, keepdim=True) for part in split(a, max(1, CACHED // max(1, a.size(1))))]).sum(0)
    of_row = torch.linalg.vector_norm(a, dim=1).square_()
    wide = max(1, CACHED // max(1, b.size(0)))
    of_column = torch.cat([of_term @ part.square() for part in b.split(wide, 1)]) / of_term.sum().clamp_min_(TINY)
    return of_row, of_column


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    """Return a tensor's entries as flat views of at most NORMALS each. Raises RuntimeError: its memory has gaps."""
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)  # as a permutation's result lies in memory
    return split(tensor.permute(order).view(-1), NORMALS)
