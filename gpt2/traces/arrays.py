"""Compute a trace's arrays: every intermediate of a forward pass, the loss, gradients, and parameters after optimizer steps."""

import math
import re
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from gpt2.config import GPT2Config, quoted
from gpt2.errors import InputError, require_memory
from gpt2.measure.environment import dtype_label
from gpt2.measure.metrics import Progress, token_losses
from gpt2.measure.tracing import part_of, points, points_size, trace_blocks
from gpt2.model import GPT2
from gpt2.optim import Optim, adamw
from gpt2.traces.batch import NO_TARGET, TokenRows
from gpt2.train.recipe import build

# What each point is, with its shape: B batch, T tokens, D width, F feed-forward, H heads, V vocabulary.
POINTS = {
    "wte": "token embeddings, (B, T, D)",
    "wpe": "position embeddings, (1, T, D)",
    "embed": "wte + wpe, the residual stream before the first block, (B, T, D)",
    "ln_1": "the block's input after its first layer norm, (B, T, D)",
    "attn.q": "queries, heads side by side, (B, T, D)",
    "attn.k": "keys, heads side by side, (B, T, D)",
    "attn.v": "values, heads side by side, (B, T, D)",
    "attn.scores": "q k^T, scaled, before softmax; masked entries are 0, (B, H, T, T)",
    "attn.weights": "attention weights, after mask and softmax, (B, H, T, T)",
    "attn.heads": "weights times values, heads side by side, (B, T, D)",
    "attn.c_proj": "the attention branch's output, (B, T, D)",
    "mid": "the residual stream after attention, (B, T, D)",
    "ln_2": "mid after the second layer norm, (B, T, D)",
    "mlp.c_fc": "the feed-forward's features before GELU, (B, T, F)",
    "mlp.act": "the features after GELU, (B, T, F)",
    "mlp.c_proj": "the feed-forward branch's output, (B, T, D)",
    "": "the residual stream after the block, (B, T, D)",
    "ln_f": "the residual stream after the last layer norm, (B, T, D)",
    "logits": "ln_f times the token embedding, (B, T, V)",
}
KEYS = ("optim.lr", "optim.beta1", "optim.beta2", "optim.weight_decay", "optim.clip")
GRADIENT = "grad."  # before a parameter's name
STEP = re.compile(r"step(\d+)\.")  # likewise
Named = Iterator[tuple[str, Tensor]]  # arrays by name


def meaning(name: str) -> str:
    """Return what an array of a trace is, in one line."""
    if name.startswith(GRADIENT):
        return f"gradient of the loss by {name.removeprefix(GRADIENT)}, in the checkpoint's layout"
    if after := STEP.match(name):
        return f"{name[after.end() :]} after step {after[1]}, in the checkpoint's layout"
    return OTHERS.get(name) or POINTS[part_of(name) if name.count(".") > 1 or not name.startswith("h.") else ""]


OTHERS = {
    "ids": "token ids, (B, T)",
    "targets": f"the next token of each, (B, T); {NO_TARGET} where it is unknown",
    "loss": "mean cross-entropy of the known targets, in nats",
    "losses": "the loss before the first step and after each, in nats",
}


def stored(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return a tensor as it is kept, contiguous and on the CPU. Raises InputError: a value does not fit ``dtype``."""
    with np.errstate(over="ignore"):  # NumPy rounds once; torch rounds float64 to float32 first, then to float16
        kept = torch.from_numpy(tensor.detach().cpu().contiguous().numpy().astype(dtype_label(dtype)))
    if dtype != tensor.dtype and not bool(kept.isfinite().all()) and bool(tensor.isfinite().all()):
        raise InputError(f"{name}: has values that {dtype_label(dtype)} cannot hold; choose float32 or float64")
    return kept


def forward(model: GPT2, batch: TokenRows, dtype: torch.dtype, progress: Progress) -> Named:
    """Yield every point of :mod:`gpt2.measure.tracing` in the order of computation; one block at a time is in float64."""
    yield "ids", batch.ids.to(torch.int32)
    for number, block in enumerate(trace_blocks(model, batch.ids)):
        progress(f"forward pass, part {number + 1} of {len(model.h) + 2}")
        for name in list(block):
            yield name, stored(block.pop(name), dtype, name)


def backward(model: GPT2, batch: TokenRows) -> Tensor:
    """Put the gradients of the mean loss over the known targets into the parameters; return that loss, a scalar."""
    known = batch.targets != NO_TARGET
    loss = token_losses(model(batch.ids), batch.targets.clamp(min=0))[known].mean()
    loss.backward()
    return loss.detach()


def gradients(model: GPT2, batch: TokenRows, dtype: torch.dtype, *, loss_only: bool = False) -> Named:
    """Yield the targets, the loss, and unless ``loss_only`` every parameter's gradient."""
    if not bool((batch.targets != NO_TARGET).any()):
        raise InputError("no token has a next one, so there is no loss; give rows of two tokens or more")
    yield "targets", batch.targets.to(torch.int32)
    yield "loss", stored(backward(model, batch), dtype, "loss")
    for name, parameter in model.named_parameters() if not loss_only else ():
        assert parameter.grad is not None, name
        yield GRADIENT + name, stored(parameter.grad, dtype, GRADIENT + name)


def require_room(config: GPT2Config, batch: TokenRows, copies: int, itemsize: int, *, trains: bool) -> None:
    """Raise InputError if this machine cannot hold a trace with ``copies`` of the parameters, in ``itemsize`` bytes a number."""
    rows, tokens = batch.ids.shape
    numbers, parameters = points_size(config, rows, tokens), config.num_parameters()
    # In float64: the weights, with gradients and AdamW's moments; one block's points, or all that autograd keeps.
    computed = 8 * (parameters * (4 if trains else 1) + (numbers if trains else numbers // config.n_layer))
    needed = computed + itemsize * (numbers + copies * parameters)
    require_memory(needed, f"{rows} x {tokens:,} tokens", "trace fewer tokens or rows, or fewer steps")


def optim_of(settings: Mapping[str, object]) -> Optim:
    """Return a recipe's optimizer with these settings (``{"optim.lr": 3e-4}``), else its defaults. Raises InputError."""
    table = {"min_lr": 0.0}  # the rate is constant
    for key, value in settings.items():
        if key not in KEYS:
            raise InputError(f"unknown setting {quoted(key)}; known are {', '.join(KEYS)}, the rate is constant")
        try:
            table[key.removeprefix("optim.")] = float(str(value))
        except ValueError:
            raise InputError(f"{key} is {quoted(str(value))}; give a number") from None
    return build({"optim": table}, "settings").optim


def described(optim: Optim) -> dict[str, object]:
    """Return all settings of the steps, as they are written beside the arrays."""
    values = {key: getattr(optim, key.removeprefix("optim.")) for key in KEYS}
    fixed = {"optimizer": "AdamW", "eps": 1e-8, "decayed": "matrices and embeddings", "rate": "constant", "dropout": 0.0}
    return {**values, **fixed}


def step(model: GPT2, batch: TokenRows, count: int, optim: Optim, dtype: torch.dtype, progress: Progress) -> Named:
    """Train ``model`` in place for ``count`` steps; yield every parameter after each, and at the end all losses, (count + 1,).

    One step: gradients of the mean loss over the batch, clipped to a norm of ``optim.clip`` (0: never), then AdamW. No dropout.
    """
    optimizer = adamw(model, optim)
    losses = []
    for number in range(1, count + 1):
        progress(f"step {number} of {count}")
        optimizer.zero_grad()
        losses.append(backward(model, batch))
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip or math.inf)
        optimizer.step()
        for name, parameter in model.named_parameters():
            yield f"step{number}.{name}", stored(parameter, dtype, name)
    losses.append(backward(model, batch))
    yield "losses", stored(torch.stack(losses), dtype, "losses")


assert {part_of(name) if name != "h.0" else "" for name in points(1)} == POINTS.keys()
