"""LoRA (Hu et al., arXiv:2106.09685): thin matrices trained beside frozen ones.

An adapted projection computes ``x W + b + s (x Aᵀ) Bᵀ`` with A (r, in), B (out, r) and s = alpha / r. B begins as zeros, so
training begins at the model itself. Merged, the projection is a plain one again, of weight ``W + s Aᵀ Bᵀ``. Subtracting what
was added would not give W back, because both sums round; so the merged weight is a tensor of its own, and W is kept.

Shapes: W is [in, out] as everywhere here; A and B lie as PEFT stores them, [out, in] like nn.Linear's weight.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.errors import InputError
from gpt2.int8 import require_float
from gpt2.model import GPT2, Conv1D

PROJECTIONS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
TARGETS = ("c_attn", "c_proj", "c_fc", *PROJECTIONS)  # what may be named; c_proj alone means both


class LoRAConv1D(Conv1D):
    """A frozen projection with its adapter; ``weight`` and ``bias`` are the original's own, under their own names."""

    def __init__(self, base: Conv1D, r: int, alpha: float, dropout: float) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias = base.weight, base.bias
        n_in, n_out = self.weight.shape
        new = {"dtype": torch.promote_types(self.weight.dtype, torch.float32), "device": self.weight.device}
        self.lora_A = nn.Parameter(torch.empty(r, n_in, **new))
        self.lora_B = nn.Parameter(torch.zeros(n_out, r, **new))
        self.r, self.alpha, self.dropout = r, alpha, dropout
        self.register_buffer("unmerged", None, persistent=False)  # the original weight, while the adapter is merged into it

    @property
    def scale(self) -> float:
        return self.alpha / self.r

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.unmerged is not None:
            return y
        thin = F.linear(F.dropout(x, self.dropout, self.training).to(self.lora_A.dtype), self.lora_A)  # (..., r)
        # Scaled and added by the product itself: as a sum of its own, it made a training step 10 % slower.
        wide = y.reshape(-1, y.size(-1)).to(thin.dtype)
        return torch.addmm(wide, thin.reshape(-1, self.r), self.lora_B.t(), alpha=self.scale).view_as(y).to(y.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, r={self.r}, alpha={self.alpha:g}, dropout={self.dropout:g}"


def merge_into(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """``W + s Aᵀ Bᵀ``, a new tensor in W's dtype; summed in float64, where the device has it, and rounded once."""
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
    """Put an adapter beside every projection named in ``targets``, in place, and freeze all else; return the model.

    A is drawn uniformly from ±1/√in, as PEFT draws it, by ``seed``, layer by layer, so the same call gives the same bits.

    Raises:
        InputError: a target that GPT-2 does not have, none at all, a rank below 1, or a model that has adapters already.
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
            drawn = torch.rand(adapted.lora_A.shape, generator=generator, dtype=torch.float64) * (2 * bound) - bound
            adapted.lora_A.data.copy_(drawn)
            setattr(block.get_submodule(part), leaf, adapted.train(model.training))
    return model


def chosen_projections(targets: Iterable[str]) -> tuple[str, ...]:
    """The projections of a block that ``targets`` name, by PEFT's rule: the whole name, or its end after a dot.

    Raises:
        InputError: a name that fits none, or no name at all.
    """
    targets = tuple(targets)
    for target in targets:
        if target not in TARGETS:
            close = difflib.get_close_matches(target, TARGETS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"give some of {', '.join(TARGETS)}"
            raise InputError(f"lora.targets: GPT-2 has no projection {target!r}; {hint}")
    if not targets:
        raise InputError(f"lora.targets: names nothing to adapt; give some of {', '.join(TARGETS)}")
    return tuple(name for name in PROJECTIONS if any(f".{name}".endswith(f".{target}") for target in targets))


def adapters(model: nn.Module) -> dict[str, LoRAConv1D]:
    """Every adapted projection by its name (``h.0.attn.c_attn``), in the order of the forward pass."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRAConv1D)}


def merge(model: GPT2) -> GPT2:
    """Add every adapter into its weight, in place; the original weights stay aside for :func:`unmerge`."""
    for module in adapters(model).values():
        if module.unmerged is None:
            original = module.weight
            with torch.no_grad():
                together = merge_into(original, module.lora_A, module.lora_B, module.scale)
            module.weight, module.unmerged = nn.Parameter(together, requires_grad=False), original.data
    return model


def unmerge(model: GPT2) -> GPT2:
    """Take every adapter out of its weight again, in place: the original's own bits, not a difference."""
    for module in adapters(model).values():
        if module.unmerged is not None:
            module.weight, module.unmerged = nn.Parameter(module.unmerged, requires_grad=False), None
    return model


@torch.no_grad()
def merged(model: GPT2) -> GPT2:
    """A plain GPT2 with the adapters in its weights, for whoever saves or ships it; ``model`` stays as it is.

    Tensors without an adapter are shared. A model without adapters comes back itself.
    """
    adapted = adapters(model)
    if not adapted:
        return model
    plain = GPT2(model.config, initialise=False)
    for name, tensor in model.state_dict().items():
        parent, _, leaf = name.rpartition(".")
        if leaf in ("lora_A", "lora_B"):
            continue
        module = adapted.get(parent)
        if module is not None and leaf == "weight" and module.unmerged is None:
            tensor = merge_into(tensor, module.lora_A, module.lora_B, module.scale)
        setattr(plain.get_submodule(parent), leaf, nn.Parameter(tensor, requires_grad=False))
    for block, theirs in zip(plain.h, model.h, strict=True):
        block.attn.attend = theirs.attn.attend
    return plain.train(model.training)
