"""LoRA adapters (Hu et al., arXiv:2106.09685): low-rank matrices trained beside frozen projections.

An adapted projection computes ``x W + b + s (x Aᵀ) Bᵀ`` with A (r, in), B (out, r) and s = alpha / r. B is initialised with
zeros, so the adapted model first computes the same as the original. Merging makes a projection with the weight ``W + s Aᵀ Bᵀ``.

Shapes: W is [in, out] as in the rest of the model; A and B are [out, in], as in PEFT.
"""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.errors import InputError, did_you_mean
from gpt2.int8 import require_float
from gpt2.model import GPT2, Conv1D

PROJECTIONS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
TARGETS = ("c_attn", "c_proj", "c_fc", *PROJECTIONS)  # names that a user may give; c_proj means both


class LoRAConv1D(Conv1D):
    """A frozen projection with an adapter; ``weight`` and ``bias`` are the original's tensors and keep their names."""

    def __init__(self, base: Conv1D, r: int, alpha: float, dropout: float) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias = base.weight, base.bias
        n_in, n_out = self.weight.shape
        dtype, device = torch.promote_types(self.weight.dtype, torch.float32), self.weight.device
        self.lora_A = nn.Parameter(torch.empty(r, n_in, dtype=dtype, device=device))
        self.lora_B = nn.Parameter(torch.zeros(n_out, r, dtype=dtype, device=device))
        self.r, self.alpha, self.dropout = r, alpha, dropout

    @property
    def scale(self) -> float:
        return self.alpha / self.r

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        low_rank = F.linear(F.dropout(x, self.dropout, self.training).to(self.lora_A.dtype), self.lora_A)  # (..., r)
        # addmm also scales and adds; separate operators make a training step 10 % slower.
        rows = y.reshape(-1, y.size(-1)).to(low_rank.dtype)
        return torch.addmm(rows, low_rank.reshape(-1, self.r), self.lora_B.t(), alpha=self.scale).view_as(y).to(y.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, r={self.r}, alpha={self.alpha:g}, dropout={self.dropout:g}"


def merge_into(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return ``W + s Aᵀ Bᵀ`` as a new tensor in W's dtype, summed in float64 if the device has it, and rounded once."""
    wide = torch.float32 if weight.device.type == "mps" else torch.float64
    return torch.addmm(weight.to(wide), a.t().to(wide), b.t().to(wide), alpha=scale).to(weight.dtype)


def inject(
    model: GPT2,
    r: int = 8,
    alpha: float = 16.0,
    dropout: float = 0.0,
    targets: Iterable[str] = ("c_attn", "c_proj", "c_fc"),
    *,
    seed: int = 0,
) -> GPT2:
    """Add an adapter to every projection named in ``targets``, in place, freeze everything else, and return the model.

    A is drawn uniformly from ±1/√in, as in PEFT, layer by layer with a separate generator, so ``seed`` repeats it exactly.

    Raises:
        InputError: an unknown target, no target, a rank below 1, an int8 model, or a model that already has adapters.
    """
    chosen = chosen_projections(targets)
    require_float(model, "lora")
    if r < 1:
        raise InputError(f"lora: r is {r}; give 1 or more")
    if adapters(model):
        raise InputError("lora: this model has adapters already; merge them first")
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for block in model.h:
        for name in chosen:
            part, _, leaf = name.partition(".")
            adapted = LoRAConv1D(getattr(block.get_submodule(part), leaf), r, alpha, dropout)
            bound = 1 / math.sqrt(adapted.lora_A.size(1))
            values = torch.rand(adapted.lora_A.shape, generator=generator, dtype=torch.float64) * (2 * bound) - bound
            adapted.lora_A.data.copy_(values)
            setattr(block.get_submodule(part), leaf, adapted.train(model.training))
    return model


def chosen_projections(targets: Iterable[str]) -> tuple[str, ...]:
    """Return the projections that ``targets`` name, in full or by the part after a dot; raise InputError for unknown names."""
    targets = tuple(targets)
    for target in targets:
        if target not in TARGETS:
            hint = did_you_mean(target, TARGETS)
            raise InputError(f"lora.targets: GPT-2 has no projection {target!r}{hint}; give some of {', '.join(TARGETS)}")
    if not targets:
        raise InputError(f"lora.targets: the list is empty; give some of {', '.join(TARGETS)}")
    return tuple(name for name in PROJECTIONS if any(f".{name}".endswith(f".{target}") for target in targets))


def adapters(model: nn.Module) -> dict[str, LoRAConv1D]:
    """Return every adapted projection by its name (``h.0.attn.c_attn``), in the order of the forward pass."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRAConv1D)}


@torch.no_grad()
def merged(model: GPT2) -> GPT2:
    """Return a plain GPT2 with the adapters merged; it shares all other tensors with ``model``, which does not change."""
    adapted = adapters(model)
    if not adapted:
        return model
    plain = GPT2(model.config, initialise=False)
    for name, tensor in model.state_dict().items():
        parent, _, leaf = name.rpartition(".")
        if leaf in ("lora_A", "lora_B"):
            continue
        module = adapted.get(parent)
        if module is not None and leaf == "weight":
            tensor = merge_into(tensor, module.lora_A, module.lora_B, module.scale)
        setattr(plain.get_submodule(parent), leaf, nn.Parameter(tensor, requires_grad=False))
    for block, original in zip(plain.h, model.h, strict=True):
        block.attn.attend = original.attn.attend
    return plain.train(model.training)
