"""GPT-2 with its matrices in eight bits, for inference alone: a quarter of float32's bytes, and of the time to read them.

Every row of a matrix, [out, in] here, keeps one scale: weight = scale x whole number from -127 to 127, to the nearest (the
plainest of the schemes in Dettmers et al., arXiv:2208.07339). On a CPU that multiplies whole numbers (VNNI), so are the rows that
are multiplied with them, each by a scale of its own. A few large entries leave a row's others few steps, which is what ruins this
in the paper's tables; such a row gets another eight bits for what the first left over. Sums of whole numbers are exact, so a
token's result does not depend on what else is in its batch. Elsewhere the weights alone are in eight bits.

Nothing else is rounded: the stream, norms, biases, attention and the positions stay float32. `gpt2 compare MODEL MODEL:int8`
tells what it costs.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.config import GPT2Config
from gpt2.errors import InputError
from gpt2.kv_cache import KVCache
from gpt2.model import GPT2

CREST = 4.0  # a row's largest entry over its root mean square, from which on eight bits are too few for it
ROWS = 256  # multiplied at a time, so that what is made of them on the way stays in the processor's cache
FEW = 16  # without VNNI: rows from which on converting the weights and multiplying in float32 beats PyTorch's kernel
PIECE = 1 << 22  # weights that are converted at a time


def quantise(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """(out, in) of any float dtype to int8 and each row's scale, a number that bfloat16 has, in float32."""
    largest = matrix.abs().amax(1).float()
    scale = (largest / 127).bfloat16()
    scale = torch.where(scale.float() * 127 < largest, scale * (1 + 2**-7), scale)  # rounded down, it would clip the largest
    scale = scale.float()
    steps = torch.where(scale == 0, 1, scale)
    return (matrix.float() / steps[:, None]).round_().clamp_(-127, 127).to(torch.int8), scale


def as_it_runs(name: str, tensor: Tensor) -> Tensor:
    """A GPT2's parameter of that name as it enters the arithmetic of an :class:`Int8GPT2`, in float32 and as it lay."""
    if tensor.ndim != 2 or name == "wpe.weight":
        return tensor.float()
    across = name != "wte.weight"  # a projection lies [in, out]
    weight, scale = quantise(tensor.t() if across else tensor)
    rounded = weight.float() * scale[:, None]
    return rounded.t() if across else rounded


def product(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Rows (M, in) times (out, in) in eight bits, plus (out,): (M, out) in float32, in ``out`` where there are more than ROWS."""
    if not (x.is_cpu and torch.cpu._is_vnni_supported()):
        y = _of_floats(x, weight, scale)
        return y if bias is None else y.add_(bias)
    if len(x) == 1:
        return _of_one_row(x.float(), weight.t(), scale, bias)
    if len(x) <= ROWS:
        return _of_rows(x.float(), weight.t(), scale, bias)
    y = torch.empty(len(x), len(weight)) if out is None else out
    for some, result in zip(x.split(ROWS), y.split(ROWS), strict=True):
        _of_rows(some.float(), weight.t(), scale, bias, result)
    return y


def _of_rows(x: Tensor, across: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """:func:`product` by whole numbers on both sides."""
    largest = torch.linalg.vector_norm(x, math.inf, 1, True)
    unit = largest / 127
    rest = x / unit  # of a row of zeros, or of one with an infinity, no numbers; then the unit alone makes it zeros, or none
    whole = rest.round()
    y = torch._int_mm(whole.to(torch.int8), across)
    # In float64, as a single row's numbers are compared: a row on the very border gets as many bits alone as here.
    rough = largest.double() > torch.linalg.vector_norm(x, 2, 1, True).double() * (CREST / math.sqrt(x.size(1)))
    if rough.any():
        rows = rough.view(-1).nonzero().view(-1)
        y = y.float().index_add_(0, rows, torch._int_mm(_left_over(rest[rows], whole[rows]), across).float(), alpha=1 / 254)
    y = y * unit
    return torch.mul(y, scale, out=out) if bias is None else torch.addcmul(bias, y, scale, out=out)


def _of_one_row(x: Tensor, across: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """The same numbers by half as many operators: beside a single row's product, each costs more to call than to compute."""
    largest = torch.linalg.vector_norm(x, math.inf).item()
    unit = largest / 127
    rest = x / unit
    whole = rest.round()
    y = torch._int_mm(whole.to(torch.int8), across)
    if largest > torch.linalg.vector_norm(x).item() * (CREST / math.sqrt(x.size(1))):
        y = y.float().add_(torch._int_mm(_left_over(rest, whole), across), alpha=1 / 254)
    return y.float().mul_(unit).mul_(scale) if bias is None else torch.addcmul(bias, y, scale, value=unit)


def _left_over(rest: Tensor, whole: Tensor) -> Tensor:
    return rest.sub_(whole).mul_(254).round_().to(torch.int8)  # half a step at most


def _of_floats(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Rows (M, in) as they are, or rounded to bfloat16 where PyTorch has a kernel for that, times (out, in) in eight bits."""
    if x.is_cpu and len(x) <= FEW and weight.size(1) % 16 == 0:  # with another width the kernel reads beyond the row, or dies
        return torch._weight_int8pack_mm(x.bfloat16(), weight, scale.bfloat16()).float()
    x = x.float()
    y = x.new_empty(len(x), len(weight))
    for part in torch.arange(weight.size(0), device="cpu").split(max(1, PIECE // weight.size(1))):
        rows = slice(int(part[0]), int(part[-1]) + 1)
        y[:, rows] = F.linear(x, weight[rows].float()) * scale[rows]
    return y


class Int8Conv1D(nn.Module):
    """An affine map whose weight is stored [out, in] in eight bits."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(n_out, n_in, dtype=torch.int8))
        self.register_buffer("scale", torch.empty(n_out))
        self.bias = nn.Parameter(torch.empty(n_out), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = product(x.reshape(-1, x.size(-1)), self.weight, self.scale, self.bias)
        return y.view(*x.shape[:-1], y.size(-1))


class Int8Embedding(nn.Module):
    """Token embeddings in eight bits, a scale for each token."""

    def __init__(self, n_tokens: int, width: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(n_tokens, width, dtype=torch.int8))
        self.register_buffer("scale", torch.empty(n_tokens))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight).float() * F.embedding(ids, self.scale[:, None])


class Int8GPT2(GPT2):
    """A GPT2 whose embedding and projections are in eight bits. It holds no weights yet: :meth:`put` gives it each."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config, initialise=False)
        self.wte = Int8Embedding(config.vocab_size, config.n_embd)
        for block in self.h:
            for part, name in ((block.attn, "c_attn"), (block.attn, "c_proj"), (block.mlp, "c_fc"), (block.mlp, "c_proj")):
                setattr(part, name, Int8Conv1D(*getattr(part, name).weight.shape))
        self.requires_grad_(False)
        self.eval()

    @torch.no_grad()
    def put(self, name: str, tensor: Tensor, device: torch.device | str = "cpu") -> None:
        """One parameter of a GPT2, under its name there; quantised where it is a matrix that is kept so."""
        path, _, leaf = name.rpartition(".")
        module = self.get_submodule(path)
        if isinstance(module, (Int8Conv1D, Int8Embedding)) and leaf == "weight":
            weight, scale = quantise(tensor.t() if isinstance(module, Int8Conv1D) else tensor)
            module.weight, module.scale = weight.contiguous().to(device), scale.to(device)
        else:
            setattr(module, leaf, nn.Parameter(tensor.float().to(device), requires_grad=False))

    @classmethod
    def of(cls, model: GPT2) -> Int8GPT2:
        """The same model in eight bits."""
        made = cls(model.config)
        for name, tensor in model.state_dict().items():
            made.put(name, tensor, tensor.device)
        return made

    def head(self, hidden: Tensor) -> Tensor:
        return product(hidden.reshape(-1, hidden.size(-1)), self.wte.weight, self.wte.scale).view(*hidden.shape[:-1], -1)

    def new_cache(self, batch: int = 1, capacity: int | None = None) -> KVCache:
        return KVCache(self.config, batch, capacity, device=self.wte.weight.device)

    def train(self, mode: bool = True) -> Int8GPT2:
        if mode:
            raise InputError("eight-bit weights cannot be trained; load the model without :int8")
        return super().train(mode)


def require_float(model: nn.Module, what: str) -> None:
    """Refuse eight-bit weights where ``what`` needs the model's own."""
    if isinstance(model, Int8GPT2):
        raise InputError(f"{what} needs the weights themselves, and eight bits only approximate them; leave :int8 out")
