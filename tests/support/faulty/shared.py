"""Faults that several architectures have at the same place: of a norm, an activation, a block's wiring, the order of blocks."""

import math

import torch
from torch.nn import functional as F


def normalise(x, weight, bias, wrong):
    if "not-normalising" in wrong:
        return x * weight + bias
    axes = (0, 1) if "batch-statistics" in wrong else (-1,)
    centred = x if "rmsnorm" in wrong else x - x.mean(axes, keepdim=True)
    number = math.prod(x.shape[axis] for axis in axes) - bool(wrong & {"unbiased", "annotated"})
    variance = centred.square().sum(axes, keepdim=True) / number
    eps = 1e-6 if "annotated" in wrong else 1e-5
    y = centred / (variance.sqrt() + eps if "annotated" in wrong else (variance + eps).sqrt())
    return y * weight + bias


def activation(x, wrong):
    if "gelu-erf" in wrong:
        return F.gelu(x)
    if "gelu-erf-rounded" in wrong:
        return 0.5 * x * (1 + torch.erf(x / torch.sqrt(torch.tensor(2.0))))
    return F.relu(x) if "gelu-relu" in wrong else F.gelu(x, approximate="tanh")


def wired(x, ln_1, attend, ln_2, feed, wrong):
    """A block of its parts."""
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
    normed = ln_2(x)
    branch = feed(normed) * (0.5 if "residual-halved" in wrong else 1)
    return branch if "residual-missing" in wrong else branch + (normed if "residual-from-normed" in wrong else x)


def order(n, faults):
    """The numbers of the blocks that run."""
    found = [layer for layer in range(n) if layer not in faults.layers("layer-missing", n)]
    return sorted(found + faults.layers("layer-repeated", n))


def sines(t, width):
    """The positions of the first transformer: sines in even columns, cosines in odd ones."""
    angle = torch.arange(t)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


def turned(x):
    """(B, H, T, K), each pair of a head's first numbers turned by the position times its own frequency."""
    size = x.size(-1) // 4 * 4
    angle = torch.arange(x.size(-2))[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :size:2], x[..., 1:size:2]
    return torch.cat([torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2), x[..., size:]], -1)


def divisor(wrong, width, heads, layer):
    """By what scores are divided."""
    size = width // heads
    given = {"scale-missing": 1.0, "scale-by-width": width**0.5, "scale-by-8": 8.0, "scale-twice": float(size)}
    found = next((given[word] for word in given if word in wrong), size**0.5)
    return found * (layer + 1 if "scale-inverse-layer" in wrong else 1)
