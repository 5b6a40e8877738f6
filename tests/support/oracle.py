"""A slow second GPT-2, written from the papers' formulas only, for tests where no library can be the reference."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.config import GPT2Config

# Each formula written by hand for one number at a time. "gelu_new", "gelu_fast" and "gelu_pytorch_tanh" name one function.
TANH_GELU = lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))  # noqa: E731
FORMULAS = {
    "gelu_new": TANH_GELU,
    "gelu_fast": TANH_GELU,
    "gelu_pytorch_tanh": TANH_GELU,
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "quick_gelu": lambda x: x / (1 + math.exp(-1.702 * x)),
    "relu": lambda x: max(x, 0.0),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "swish": lambda x: x / (1 + math.exp(-x)),
    "tanh": math.tanh,
}


def oracle(weights: dict[str, Tensor], config: GPT2Config, ids: list[int]) -> Tensor:
    """Logits (T, V) of one text by the papers' formulas, computed one token, head and score at a time in float64."""
    d, size = config.n_embd, config.n_embd // config.n_head
    bend = FORMULAS[config.activation_function]

    def norm(x: Tensor, name: str) -> Tensor:
        mean = x.sum() / d
        variance = ((x - mean) ** 2).sum() / d
        return (x - mean) / (variance + config.layer_norm_epsilon) ** 0.5 * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def affine(x: Tensor, name: str) -> Tensor:
        return (x[:, None] * weights[f"{name}.weight"]).sum(0) + weights[f"{name}.bias"]

    stream = [weights["wte.weight"][token] + weights["wpe.weight"][t] for t, token in enumerate(ids)]
    for layer in range(config.n_layer):
        at = f"h.{layer}"
        qkv = [affine(norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn") for x in stream]
        divisor = (math.sqrt(size) if config.scale_attn_weights else 1.0) * (
            layer + 1 if config.scale_attn_by_inverse_layer_idx else 1
        )
        for t in range(len(ids)):
            heads = []
            for head in range(config.n_head):
                part = slice(head * size, (head + 1) * size)
                query = qkv[t][:d][part]
                scores = [float((query * qkv[s][d : 2 * d][part]).sum()) / divisor for s in range(t + 1)]
                weight = [math.exp(score - max(scores)) for score in scores]
                heads.append(sum(w / sum(weight) * qkv[s][2 * d :][part] for s, w in enumerate(weight)))
            stream[t] = stream[t] + affine(torch.cat(heads), f"{at}.attn.c_proj")
        for t in range(len(ids)):
            wide = affine(norm(stream[t], f"{at}.ln_2"), f"{at}.mlp.c_fc")
            bent = torch.tensor([bend(float(value)) for value in wide], dtype=torch.float64)
            stream[t] = stream[t] + affine(bent, f"{at}.mlp.c_proj")
    final = [norm(x, "ln_f") for x in stream]
    head = weights.get("lm_head.weight", weights["wte.weight"])
    return torch.stack([(head * x).sum(1) for x in final])


def as_the_guide_does(logits_of: Callable[[Tensor], Tensor], ids: Tensor, context: int, stride: int) -> float:
    """The loss of ``ids`` (T,) by the loop of Hugging Face's guide to perplexity, where only new tokens have labels.
    The guide weighs each window by its labels less one. That is almost the mean over scored tokens, which this computes."""
    total = count = previous = 0
    for begin in range(0, len(ids), stride):
        end = min(begin + context, len(ids))
        labels = ids[begin:end].clone()
        labels[: previous - end] = -100
        with torch.inference_mode():
            logits = logits_of(ids[None, begin:end])[0]
        scored = int((labels[1:] != -100).sum())
        if scored:
            loss = F.cross_entropy(logits[:-1], labels[1:], ignore_index=-100).item()
            total, count = total + loss * scored, count + scored
        previous = end
        if end == len(ids):
            break
    return total / count


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Assert equality within 1e-10 of the largest value: a bug is larger, float64's rounding smaller."""
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10 * float(expected.abs().max()))
