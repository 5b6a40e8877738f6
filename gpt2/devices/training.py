"""Cases beyond single operators: an AdamW step, and a whole model's logits and gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from gpt2.devices.arithmetic import Run
from gpt2.devices.case import Case, Material, first_blocks
from gpt2.kv_cache import KVCache
from gpt2.measure.rounding import FORWARD_RATIO, TRAINING_RATIO
from gpt2.measure.tracing import block_of
from gpt2.model import GPT2

WHOLE = 200e6  # parameters of a model whose logits are judged; of a larger one, as many blocks as have so many
TRAINED = 60e6  # the same for gradients, which take more memory


def adamw_cases(m: Material) -> Iterator[Case]:
    """Yield two steps of a matrix, contiguous and transposed; the result is how far it moved."""
    weight = m.weight("h.0.attn.c_proj.weight")
    gradient = m.normal(*weight.shape) / 100

    def steps(fused: bool, transposed: bool, decay: float = 0.1) -> Run:
        def run(weight: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
            # clone() keeps the strides of a transposed matrix
            parameter = torch.nn.Parameter((weight.t() if transposed else weight).clone())
            optimizer = torch.optim.AdamW([parameter], 1e-2, (0.9, 0.95), weight_decay=decay, fused=fused, foreach=False)
            before = parameter.detach().clone()
            for scale in (1.0, -0.5):
                parameter.grad = (gradient.t() if transposed else gradient).clone() * scale
                optimizer.step()
            moved = parameter.detach() - before
            return (moved.t() if transposed else moved,)

        return run

    undecayed = ("it leaves out the weight decay", steps(True, False, decay=0))
    for how, fused in (("fused", True), ("step by step", False)):
        for layout, transposed in (("", False), (", transposed parameter", True)):
            yield Case(
                "AdamW step",
                how + layout,
                steps(fused, transposed),
                (weight, gradient),
                wrong=(undecayed,),
                other_ways=(steps(not fused, transposed),),
                dtypes=(torch.float32,),
                ratio=TRAINING_RATIO,
            )


def model_cases(m: Material) -> Iterator[Case]:
    """Yield the logits of a whole model (or of its first blocks): in one pass, through the cache, with padding; its gradients."""
    yield from _of_blocks(m, _affordable(m.model, WHOLE), trained=False)
    yield from _of_blocks(m, _affordable(m.model, TRAINED), trained=True)


def _affordable(model: GPT2, parameters: float) -> int:
    """Return how many blocks a model of so many parameters may have, at least one."""
    per_block = sum(p.numel() for p in model.h[0].parameters())
    rest = model.config.num_parameters() - per_block * model.config.n_layer
    return max(1, min(model.config.n_layer, int((parameters - rest) / per_block)))


def _of_blocks(m: Material, count: int, trained: bool) -> Iterator[Case]:
    model = first_blocks(m.model, count)
    operator = "whole model" if count == m.config.n_layer else f"first {count} block{'s' * (count > 1)}"
    names = [name for name, _ in model.named_parameters()]
    weights = tuple(parameter.detach() for parameter in model.parameters())
    with torch.device("meta"):
        shell = GPT2(model.config, initialise=False).eval()
    ids = m.ids[:, : min(12, m.ids.size(1))]
    half = ids.size(1) // 2
    mask = torch.ones_like(ids)
    mask[1, :half] = 0

    def call(parameters: tuple[Tensor, ...], *args: Tensor, **kwargs: object) -> Tensor:
        logits: Tensor = functional_call(shell, dict(zip(names, parameters, strict=True)), args, kwargs)
        return logits

    @torch.no_grad()
    def plain(ids: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        return (call(parameters, ids),)

    @torch.no_grad()
    def cached(ids: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        head = parameters[0]
        cache = KVCache(shell.config, len(ids), ids.size(1), dtype=head.dtype, device=head.device)
        parts = ids.split([half - 1, 1, 1, ids.size(1) - half - 1], 1)
        return (torch.cat([call(parameters, part, cache=cache) for part in parts], 1),)

    @torch.no_grad()
    def padded(ids: Tensor, mask: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        logits = call(parameters, ids, attention_mask=mask)
        return logits[0], logits[1, half:]

    def gradients(ids: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        leaves = [parameter.detach().requires_grad_() for parameter in parameters]
        loss = F.cross_entropy(call(tuple(leaves), ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        blocks: dict[str, list[Tensor]] = {}
        for name, gradient in zip(names, torch.autograd.grad(loss, leaves), strict=True):
            blocks.setdefault(block_of(name), []).append(gradient.flatten())
        return tuple(torch.cat(each) for each in blocks.values())  # a bias alone may have a gradient of rounding errors only

    if trained:
        yield Case(operator, "gradients", gradients, (ids, *weights), trained=False, ratio=TRAINING_RATIO)
        return
    yield Case(operator, "logits, B > 1", plain, (ids, *weights), trained=False, ratio=FORWARD_RATIO)
    yield Case(operator, "logits through the cache", cached, (ids, *weights), trained=False, ratio=FORWARD_RATIO)
    yield Case(operator, "logits with padding", padded, (ids, mask, *weights), trained=False, ratio=FORWARD_RATIO)
