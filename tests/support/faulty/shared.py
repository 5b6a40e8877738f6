"""Faults that several architectures have at the same place: of a norm, an activation, a block's wiring, the order of blocks."""

import math

import torch
from torch.nn import functional as F

EPS = {"eps-1e-6": 1e-6, "eps-1e-12": 1e-12, "eps-1e-3": 1e-3, "eps-none": 0.0}


def normalise(x, weight, bias, wrong):
    if "not-normalising" in wrong:
        return x * weight + bias
    axes = (1,) if "norm-over-tokens" in wrong else (0, 1) if "batch-statistics" in wrong else (-1,)
    centred = x if "rmsnorm" in wrong else x - x.mean(axes, keepdim=True)
    number = math.prod(x.shape[axis] for axis in axes) - bool(wrong & {"unbiased", "annotated"})
    variance = centred.square().sum(axes, keepdim=True) / number
    eps = next((EPS[word] for word in EPS if word in wrong), 1e-6 if "annotated" in wrong else 1e-5)
    y = centred / (variance.sqrt() + eps if wrong & {"annotated", "eps-outside"} else (variance + eps).sqrt())
    return y if "no-affine" in wrong else y * weight + bias


def activation(x, wrong):
    if "gelu-erf" in wrong:
        return F.gelu(x)
    if "gelu-relu" in wrong:
        return F.relu(x)
    if "gelu-silu" in wrong:
        return F.silu(x)
    if "gelu-quick" in wrong:
        return x * torch.sigmoid(1.702 * x)
    return x if "gelu-none" in wrong else F.gelu(x, approximate="tanh")


def wired(x, ln_1, attend, ln_2, feed, wrong):
    """A block of its parts."""
    if "norms-swapped" in wrong:
        ln_1, ln_2 = ln_2, ln_1
    if "post-norm" in wrong:
        x = ln_1(x + attend(x))
        return ln_2(x + feed(x))
    if "parallel" in wrong:
        return x + attend(ln_1(x)) + feed(ln_2(x))
    normed = x if "ln_1-missing" in wrong else ln_1(x)
    branch = attend(normed)
    if "extra-norm-branch" in wrong:
        branch = F.layer_norm(branch, branch.shape[-1:])
    if not wrong & {"residual-missing", "residual-missing-attn"}:
        branch = branch + (normed if "residual-from-normed" in wrong else x)
    x = branch
    normed = x if "ln_2-missing" in wrong else ln_2(x)
    branch = feed(normed) * (0.5 if "residual-halved" in wrong else 1)
    if not wrong & {"residual-missing", "residual-missing-mlp"}:
        branch = branch + (normed if wrong & {"residual-from-normed", "residual-from-normed-mlp"} else x)
    return F.layer_norm(branch, branch.shape[-1:]) if "extra-norm-end" in wrong else branch


def order(n, faults):
    """The numbers of the blocks that run."""
    found = [layer for layer in range(n) if layer not in faults.layers("layer-missing", n)]
    found = sorted(found + faults.layers("layer-repeated", n))
    found = found[::-1] if "layer-reversed" in faults else found
    return [*found[:-2], found[-1], found[-2]] if "layer-swapped" in faults else found


def entering(x, faults):
    """The embeddings, as they enter the first block."""
    if "dropout-active" in faults:
        x = F.dropout(x, 0.1)
    if "noise" in faults:
        x = x + 0.01 * torch.randn_like(x)
    if "batch-centred" in faults:
        x = x - x.mean(0)
    return F.layer_norm(x, x.shape[-1:]) if "extra-norm-embed" in faults else x


def sines(t, width):
    """The positions of the first transformer: sines in even columns, cosines in odd ones."""
    angle = torch.arange(t)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


def divisor(wrong, width, heads, layer):
    """By what scores are divided."""
    size = width // heads
    given = {"scale-missing": 1.0, "scale-by-width": width**0.5, "scale-by-heads": heads**0.5, "scale-by-8": 8.0}
    given |= {"scale-twice": float(size)}
    found = next((given[word] for word in given if word in wrong), size**0.5)
    return found * (layer + 1 if "scale-inverse-layer" in wrong else 1)


def ending(logits, faults, width=1):
    if "logits-scaled" in faults:
        logits = logits / width**0.5
    if "logits-log-softmaxed" in faults:
        return logits.log_softmax(-1)
    return logits.softmax(-1) if "logits-softmaxed" in faults else logits
