"""Ten ways to be almost right: each breaks a loaded model in place, and `gpt2 verify` must refuse it where it is broken."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.model import GPT2, eager_attention


def erf_gelu(model: GPT2) -> None:
    for block in model.h:
        block.mlp.activation = F.gelu


def eps_1e6(model: GPT2) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-6


def untransposed_square_c_proj(model: GPT2) -> None:
    weight = model.h[-1].attn.c_proj.weight
    weight.data = weight.data.T.contiguous()


def q_and_k_swapped(model: GPT2) -> None:
    def swapped(c_attn: torch.nn.Module, args: tuple, output: Tensor) -> Tensor:
        q, k, v = output.chunk(3, dim=-1)
        return torch.cat((k, q, v), dim=-1)

    for block in model.h:
        block.attn.c_attn.register_forward_hook(swapped)


def positions_off_by_one(model: GPT2) -> None:
    model.wpe.forward = lambda positions: F.embedding((positions + 1).clamp(max=model.wpe.num_embeddings - 1), model.wpe.weight)


def untied_head(model: GPT2) -> None:
    noise = torch.randn(model.wte.weight.shape, generator=torch.Generator().manual_seed(0)).to(model.wte.weight.dtype)
    head = model.wte.weight.detach() + 1e-4 * noise
    model.head = lambda hidden: F.linear(hidden, head.to(hidden.dtype))


def no_final_norm(model: GPT2) -> None:
    model.ln_f.forward = lambda x: x


def missing_scale(model: GPT2) -> None:
    for block in model.h:
        block.attn.scale = 1.0


def mask_one_too_far(model: GPT2) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float) -> Tensor:
        sees = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril(k.size(-2) - q.size(-2) + 1)
        return eager_attention(q, k, v, sees, scale, dropout)

    model.use_attention(attend)


def one_bit_flipped(model: GPT2) -> None:
    weight = model.h[0].mlp.c_fc.weight
    bits = weight.data.clone().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()])
    bits[0, 0] ^= 1
    weight.data = bits.view(weight.dtype)


# The ten, each with the first point or parameter that differs.
CONTROLS: dict[str, tuple[Callable[[GPT2], None], str]] = {
    "erf GELU": (erf_gelu, "h.0.mlp.act"),
    "eps 1e-6": (eps_1e6, "h.0.ln_1"),
    "one untransposed square c_proj": (untransposed_square_c_proj, "h.1.attn.c_proj.weight"),
    "q and k swapped": (q_and_k_swapped, "h.0.attn.q"),
    "positions off by one": (positions_off_by_one, "wpe"),
    "untied head": (untied_head, "logits"),
    "no final LN": (no_final_norm, "ln_f"),
    "missing scale": (missing_scale, "h.0.attn.scores"),
    "mask includes the future by one": (mask_one_too_far, "h.0.attn.weights"),
    "one bit flipped in one weight": (one_bit_flipped, "h.0.mlp.c_fc.weight"),
}
