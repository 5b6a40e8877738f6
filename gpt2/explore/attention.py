"""Compute attention weights on a short text, for one model or for two and their difference."""

from dataclasses import replace
from itertools import product

import torch
from torch import Tensor, nn

from gpt2.comparison.sides.checkpoint_side import CheckpointSide
from gpt2.comparison.sides.side import environment_of
from gpt2.errors import InputError
from gpt2.explore.attention_page import AttentionReport, Head
from gpt2.explore.lens import text_tokenizers
from gpt2.measure.tracing import trace_blocks


def attention_maps(model: nn.Module, ids: Tensor) -> Tensor:
    """Return attention weights (layers, heads, T, T), float32, of a model over (1, T) ``ids``; row i is query i."""
    blocks = trace_blocks(model, ids)
    return torch.stack([block[name][0].float() for block in blocks for name in block if name.endswith(".attn.weights")])


def compare_attention(a: str, b: str | None, text: str, *, device: str = "cpu", offline: bool = False) -> AttentionReport:
    """Compute attention weights of one model or two on ``text``; names as in :func:`~gpt2.comparison.run.compare`."""
    sides = [CheckpointSide.open(name, offline=offline, device=device) for name in (a, b) if name is not None]
    tokenizers = text_tokenizers(sides)
    ids = tokenizers[0].encode(text)
    most = min(side.config.n_positions for side in sides)
    if not 2 <= len(ids) <= most:
        raise InputError(f"the text makes {len(ids)} tokens; the model looks at 2 to {most} at a time: give another")
    for part in ("n_layer", "n_head"):
        values = [getattr(side.config, part) for side in sides]
        if values[0] != values[-1]:
            raise InputError(f"{a} and {b} differ in {part}, {values[0]} and {values[1]}; look at one at a time")
    if any(tokenizer.encode(text) != ids for tokenizer in tokenizers):
        raise InputError(f"{a} and {b} read the text as other tokens; look at one at a time")
    maps = []
    for side in sides:
        with side:
            maps.append(attention_maps(side.program, torch.tensor([ids])))
    report = summarise_attention(a, b, tuple(tokenizers[0].shown(index) for index in ids), *maps)
    return replace(report, models=tuple(side.describe() for side in sides), environment=environment_of(sides))


def summarise_attention(
    a: str, b: str | None, tokens: tuple[str, ...], maps: Tensor, maps_b: Tensor | None = None
) -> AttentionReport:
    """Compute the figures of (layers, heads, T, T) weights."""
    moved = None if maps_b is None else (maps_b.double() - maps.double()).abs()[:, :, 1:].sum(-1).mean(-1) / 2
    heads_b = () if maps_b is None else _heads(maps_b, moved)
    return AttentionReport(a, b, tokens, _heads(maps, moved), heads_b, maps, maps_b)


def _heads(maps: Tensor, moved: Tensor | None) -> tuple[Head, ...]:
    rows = maps[:, :, 1:].double()  # (L, H, T - 1, T)
    n = maps.size(-1)
    back = (torch.arange(1, n)[:, None] - torch.arange(n)).clamp(min=0).double()
    figures = {
        "distance": (rows * back).sum(-1).mean(-1),
        "entropy": torch.special.entr(rows).sum(-1).mean(-1),
        "previous": maps.diagonal(-1, -2, -1).double().mean(-1),
        "first": rows[..., 0].mean(-1),
        "itself": maps.diagonal(0, -2, -1)[..., 1:].double().mean(-1),
    }
    if moved is not None:
        figures["moved"] = moved
    places = product(range(maps.size(0)), range(maps.size(1)))
    return tuple(Head(layer, h, **{name: float(each[layer, h]) for name, each in figures.items()}) for layer, h in places)
