"""Int8 inference: GPT-2 with its matrices in eight bits, a quarter of float32's bytes to store and to read.

Each row of a matrix [out, in] has one scale: weight = scale x an integer from -127 to 127, rounded to the nearest (the simplest
scheme in Dettmers et al., arXiv:2208.07339). On a CPU with integer-product instructions (VNNI), activations are quantised too,
with a scale per row; a row with a few large entries gets another eight bits for the remainder, because the other entries would
have too few steps. Integer sums are exact, so a token's result does not depend on its batch. Other processors use int8 weights
only. Everything else stays in float32: residual stream, norms, biases, attention and position embeddings.
"""

import math
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.config import GPT2Config
from gpt2.errors import InputError
from gpt2.kv_cache import KVCache
from gpt2.model import GPT2

CREST_LIMIT = 4.0  # a row's maximum over its root mean square, above which eight bits are too few
ROW_CHUNK = 256  # rows that are multiplied at a time, so that intermediate results stay in the CPU's cache
MAX_KERNEL_ROWS = 16  # without VNNI: with more rows, converting the weights to float32 is faster than PyTorch's kernel
WEIGHT_CHUNK = 1 << 22  # weights that are converted at a time


def quantise(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix (out, in) to int8; return it and a float32 scale per row, rounded to bfloat16 for PyTorch's kernel."""
    largest = matrix.abs().amax(1).float()
    scale = (largest / 127).bfloat16()
    scale = torch.where(scale.float() * 127 < largest, scale * (1 + 2**-7), scale)  # round up, or the largest is clipped
    scale = scale.float()
    steps = torch.where(scale == 0, 1, scale)
    return (matrix.float() / steps[:, None]).round_().clamp_(-127, 127).to(torch.int8), scale


def rounded_parameter(name: str, tensor: Tensor) -> Tensor:
    """Return the GPT2 parameter ``name`` as :class:`Int8GPT2` computes with it: float32, in the original's orientation."""
    if tensor.ndim != 2 or name == "wpe.weight":
        return tensor.float()
    transposed = name.startswith("h.")  # projections are stored [in, out]
    weight, scale = quantise(tensor.t() if transposed else tensor)
    rounded = weight.float() * scale[:, None]
    return rounded.t() if transposed else rounded


def product(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Multiply rows (M, in) by an int8 weight (out, in), add the bias, return float32; over ``ROW_CHUNK`` rows go to ``out``."""
    if not (x.is_cpu and torch.cpu._is_vnni_supported()):
        y = _float_product(x, weight, scale)
        return y if bias is None else y.add_(bias)
    if len(x) == 1:
        return _integer_product_of_one_row(x.float(), weight.t(), scale, bias)
    if len(x) <= ROW_CHUNK:
        return _integer_product(x.float(), weight.t(), scale, bias)
    y = torch.empty(len(x), len(weight)) if out is None else out
    for rows, result in zip(x.split(ROW_CHUNK), y.split(ROW_CHUNK), strict=True):
        _integer_product(rows.float(), weight.t(), scale, bias, result)
    return y


def _integer_product(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Quantise the rows (M, in) and multiply integers; ``weight`` is (in, out) here."""
    largest = torch.linalg.vector_norm(x, math.inf, 1, True)
    unit = largest / 127
    steps = x / unit  # NaN in a row of zeros or with an infinity; multiplying by the unit makes that 0 and NaN at the end
    whole = steps.round()
    y = torch._int_mm(whole.to(torch.int8), weight)
    # Compared in float64, as for a single row, so that a row at the limit gets as many bits alone as in a batch.
    rough = largest.double() > torch.linalg.vector_norm(x, 2, 1, True).double() * (CREST_LIMIT / math.sqrt(x.size(1)))
    if rough.any():
        rows = rough.view(-1).nonzero().view(-1)
        rest = torch._int_mm(_remainder(steps[rows], whole[rows]), weight).float()
        y = y.float().index_add_(0, rows, rest, alpha=1 / 254)
    y = y * unit
    return torch.mul(y, scale, out=out) if bias is None else torch.addcmul(bias, y, scale, out=out)


def _integer_product_of_one_row(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the same with half as many operators, because for one row calls cost more than arithmetic."""
    largest = torch.linalg.vector_norm(x, math.inf).item()
    unit = largest / 127
    steps = x / unit
    whole = steps.round()
    y = torch._int_mm(whole.to(torch.int8), weight)
    if largest > torch.linalg.vector_norm(x).item() * (CREST_LIMIT / math.sqrt(x.size(1))):
        y = y.float().add_(torch._int_mm(_remainder(steps, whole), weight), alpha=1 / 254)
    return y.float().mul_(unit).mul_(scale) if bias is None else torch.addcmul(bias, y, scale, value=unit)


def _remainder(steps: Tensor, whole: Tensor) -> Tensor:
    """Quantise the rounding error, at most half a step, to eight more bits; ``steps`` is overwritten."""
    return steps.sub_(whole).mul_(254).round_().to(torch.int8)


def _float_product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Multiply float rows (M, in), rounded to bfloat16 if PyTorch has a kernel for that, by an int8 weight (out, in)."""
    if x.is_cpu and len(x) <= MAX_KERNEL_ROWS and weight.size(1) % 16 == 0:  # for other widths the kernel reads out of bounds
        return torch._weight_int8pack_mm(x.bfloat16(), weight, scale.bfloat16()).float()
    chunk = max(1, WEIGHT_CHUNK // weight.size(1))
    x = x.float()
    parts = zip(weight.split(chunk), scale.split(chunk), strict=True)
    return torch.cat([F.linear(x, rows.float()) * scales for rows, scales in parts], dim=1)


class Int8Matrix(nn.Module):
    """An int8 ``weight`` (rows, columns) with a float32 ``scale`` per row."""

    weight: Tensor
    scale: Tensor

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(rows, columns, dtype=torch.int8))
        self.register_buffer("scale", torch.empty(rows))


class Int8Conv1D(Int8Matrix):
    """An affine map with an int8 weight [out, in]."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(n_out, n_in)
        self.bias = nn.Parameter(torch.empty(n_out), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = product(x.reshape(-1, x.size(-1)), self.weight, self.scale, self.bias)
        return y.view(*x.shape[:-1], y.size(-1))


class Int8Embedding(Int8Matrix):
    """Token embeddings in int8."""

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight).float() * F.embedding(ids, self.scale[:, None])


class Int8GPT2(GPT2):
    """A GPT2 with its token embedding and projections in int8, built without weights: :meth:`put` sets each one."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config, initialise=False)
        self.wte = Int8Embedding(config.vocab_size, config.n_embd)
        if not config.tie_word_embeddings:
            self.lm_head = Int8Embedding(config.vocab_size, config.n_embd)
        for block in self.h:
            for part, name in ((block.attn, "c_attn"), (block.attn, "c_proj"), (block.mlp, "c_fc"), (block.mlp, "c_proj")):
                setattr(part, name, Int8Conv1D(*getattr(part, name).weight.shape))
        self.requires_grad_(False)
        self.eval()

    @torch.no_grad()
    def put(self, name: str, tensor: Tensor, device: torch.device | str = "cpu") -> None:
        """Set the parameter that a GPT2 calls ``name``; quantise matrices."""
        path, _, leaf = name.rpartition(".")
        module = self.get_submodule(path)
        if isinstance(module, Int8Matrix) and leaf == "weight":
            weight, scale = quantise(tensor.t() if isinstance(module, Int8Conv1D) else tensor)
            module.weight, module.scale = weight.contiguous().to(device), scale.to(device)
        else:
            setattr(module, leaf, nn.Parameter(tensor.float().to(device), requires_grad=False))

    def head(self, hidden: Tensor) -> Tensor:
        table = self.head_table
        return product(hidden.reshape(-1, hidden.size(-1)), table.weight, table.get_buffer("scale")).view(*hidden.shape[:-1], -1)

    def new_cache(self, batch: int = 1, capacity: int | None = None) -> KVCache:
        return KVCache(self.config, batch, capacity, device=self.wte.weight.device)

    def train(self, mode: bool = True) -> Self:
        if mode:
            raise InputError("int8 weights cannot be trained; load the model without :int8")
        return super().train(mode)


def require_float(model: nn.Module, what: str) -> None:
    """Raise an :class:`InputError` for an int8 model, because ``what`` needs the original weights."""
    if isinstance(model, Int8GPT2):
        raise InputError(f"{what} needs the original weights, which int8 only approximates; leave :int8 out")
