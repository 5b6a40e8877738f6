"""Whether two sets of weights make the same branch: heads, or hidden units, may be in another order throughout."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.measure.metrics import worst_relative_error
from gpt2.model import ACTIVATIONS, sdpa_attention

BOUND = 1e-10  # relative, in float64


def same_part(part: str, theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor], config: GPT2Config) -> bool:
    """Whether an "attn" or "mlp" gives the same for a random (1, 6, D) with either weights ("c_attn.weight", ...)."""
    x = torch.randn(1, 6, config.n_embd, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    one, other = (_run(part, weights, x, config) for weights in (theirs, ours))
    return worst_relative_error(one, other) <= BOUND


def _run(part: str, w: Mapping[str, Tensor], x: Tensor, config: GPT2Config) -> Tensor:
    if part == "mlp":
        hidden = ACTIVATIONS[config.activation_function](x @ w["c_fc.weight"] + w["c_fc.bias"])
        return hidden @ w["c_proj.weight"] + w["c_proj.bias"]
    q, k, v = (x @ w["c_attn.weight"] + w["c_attn.bias"]).unflatten(-1, (3, config.n_head, -1)).permute(2, 0, 3, 1, 4)
    scale = config.head_dim**-0.5 / float(x.shape[-1]) ** 0.25  # gentle: large weights must not make every softmax a maximum
    y = sdpa_attention(q, k, v, None, scale, 0.0)
    return F.linear(y.transpose(1, 2).flatten(2), w["c_proj.weight"].t(), w["c_proj.bias"])
