"""Compute attention weights on a short text, of one model or two; with their table, their page and its pictures."""

import base64
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gpt2.comparison.sides.checkpoint_side import CheckpointSide
from gpt2.comparison.sides.side import ComparedModel, environment_of
from gpt2.errors import InputError
from gpt2.explore.lens import text_tokenizers
from gpt2.measure.environment import Environment
from gpt2.measure.tracing import trace_blocks
from gpt2.pages.drawing import matplotlib_of_our_own
from gpt2.pages.rendering import pack_lower, readable, visible
from gpt2.pages.reports import Line, Printed, Section, as_json, bold, dim, numbers

POSITIVE, NEGATIVE = (0xD8, 0x62, 0x28), (0x3F, 0x7F, 0xC4)  # visible on light and dark pages
LABELLED = 24  # most tokens that are named along the edges
VISIBLE = 750_000  # weights of all heads, in a page of less than 3 MB: 72 tokens of gpt2, 25 of gpt2-xl


@dataclass(frozen=True)
class Head:
    """Where one head attends, as a mean over all tokens but the first.

    ``distance`` is in tokens, ``entropy`` in nats; ``previous``, ``first`` and ``itself`` are the shares of attention on the
    token before, the first token and the token itself. ``moved`` is the total variation distance of a's and b's rows, or None.
    """

    layer: int
    head: int
    distance: float
    entropy: float
    previous: float
    first: float
    itself: float
    moved: float | None = None


@dataclass(frozen=True)
class AttentionReport(Printed):
    """``heads`` are a's, layer by layer, ``heads_b`` b's. ``maps`` (layers, heads, T, T) are a's weights, ``maps_b`` b's."""

    command: ClassVar[str] = "gpt2 compare --attention"
    script: ClassVar[str] = "attention"

    a: str
    b: str | None
    tokens: tuple[str, ...]
    heads: tuple[Head, ...]
    heads_b: tuple[Head, ...]
    maps: Tensor = field(repr=False, compare=False)
    maps_b: Tensor | None = field(default=None, repr=False, compare=False)
    models: tuple[ComparedModel, ...] = ()
    environment: Environment | None = None

    def to_json(self) -> str:
        """Return all figures and weights as JSON."""
        weights = {"maps": self.maps.tolist(), "maps_b": None if self.maps_b is None else self.maps_b.tolist()}
        return as_json({**vars(self), **weights})

    def sections(self) -> Iterator[Section]:
        """Yield the notable heads with the reason, and on pages one head in the text, a picture of all, and all figures."""
        yield Section(note=("\nattention of ", bold(self.a), *((" → ", bold(self.b)) if self.b else ())))
        shares = "shares of attention, on average over the tokens"
        yield Section(note=dim(f"{len(self.heads)} heads, {len(self.tokens)} tokens; {shares}"))
        look = "point at a token, tap it or use the arrow keys: the tokens that it looks at are coloured"
        yield Section("One head, in the text", look, chart=self._chooser)
        note = "a row is a token: how its attention is divided among the tokens up to itself; colour is the root of the weight"
        if self.maps_b is not None:
            more = "B's weights minus A's: more in B is red, more in A blue; colour is the root, on one scale for all heads"
            yield Section("B − A", more, chart=partial(picture, self.maps_b - self.maps, self.tokens, signed=True))
            yield Section(f"B, {self.b}", note, chart=partial(picture, self.maps_b, self.tokens, signed=False))
        yield Section(f"A, {self.a}", note, chart=partial(picture, self.maps, self.tokens, signed=False))
        figures = numbers("looks back", "entropy", "previous", "first", "itself", *(["moved"] if self.b else []))
        rows: list[list[Line]]
        rows = [[f"h.{head.layer} head {head.head}", *self._figures(head), dim(why)] for head, why in self.notable()]
        yield Section(columns=("head", *figures, ""), rows=rows)
        each = [("", self.heads)] if self.maps_b is None else [(" in A", self.heads), (" in B", self.heads_b)]
        all = [(f"h.{head.layer} head {head.head}{side}", *self._figures(head)) for side, heads in each for head in heads]
        yield Section("Every head", "", ("head", *figures), all, for_pages=True)

    def _figures(self, head: Head) -> list[str]:
        shares = [f"{share:.0%}" for share in (head.previous, head.first, head.itself)]
        moved = [] if not self.b else [""] if head.moved is None else [f"{head.moved:.1%}"]
        return [f"{head.distance:.1f}", f"{head.entropy:.2f}", *shares, *moved]

    def _chooser(self) -> str:
        """Return the text of a page, and what chooses the head by which the script colours it."""
        from markupsafe import Markup

        choice, option = Markup('<label{}>{} <select id="{}">{}</select></label>'), Markup('<option value="{}">{}</option>')
        layers, heads = (range(size) for size in self.maps.shape[:2])
        named = ("model", [(side, side) for side in self._sides()]), ("layer", [(n, f"h.{n}") for n in layers])
        choices = (
            choice.format(" hidden" * (len(all) == 1), name, name, Markup("").join(option.format(*each) for each in all))
            for name, all in (*named, ("head", [(n, n) for n in heads]))
        )
        token = Markup('<span class="tok{}" tabindex="{}">{}</span>')
        last, texts = len(self.tokens) - 1, list(map(readable, self.tokens))
        spans = [token.format(" nl" * ("\n" in text), -(at < last), text) for at, text in enumerate(texts)]
        box = Markup('<p class="switch">{}</p><div class="text look">{}</div><p class="remark" id="says" aria-live="polite"></p>')
        return box.format(Markup("").join(choices), Markup("").join(spans))

    def _sides(self) -> dict[str, Tensor]:
        return {"A": self.maps} if self.maps_b is None else {"A": self.maps, "B": self.maps_b}

    def notable(self) -> list[tuple[Head, str]]:
        """Return the heads with extreme values and the reason, in the order of the layers."""
        rules: list[tuple[str, Callable[[Head], float]]] = [
            ("looks at the token before", lambda head: head.previous),
            ("rests on the first token", lambda head: head.first),
            ("looks at the token itself", lambda head: head.itself),
            ("looks farthest back beyond the first", lambda head: head.distance * (1 - head.first)),
            ("spreads widest", lambda head: head.entropy),
            ("looks most narrowly", lambda head: -head.entropy),
        ]
        chosen = [(max(self.heads, key=key), why) for why, key in rules]
        if self.b:
            chosen += [(head, "moved most") for head in sorted(self.heads, key=lambda head: -(head.moved or 0.0))[:5]]
        reasons = [(head, [why for other, why in chosen if other is head]) for head in self.heads]
        return [(head, ", ".join(why)) for head, why in reasons if why]

    def page_data(self) -> dict[str, Any]:
        """Return what the page's script draws. Raises InputError: too many tokens for weights to be seen."""
        most = math.isqrt(VISIBLE // len(self.heads))
        if len(self.tokens) > most:
            room = f"a page of {len(self.heads)} heads has room for {most}: give a shorter text, or take the weights as --json"
            raise InputError(f"the text makes {len(self.tokens)} tokens, and {room}")
        maps = {side: pack_lower(weights) for side, weights in self._sides().items()}
        return {"heads": self.maps.size(1), "tokens": [visible(token) for token in self.tokens], "maps": maps}


def picture(maps: Tensor, tokens: Sequence[str], *, signed: bool) -> str:
    """Return an image of all heads of (layers, heads, T, T) maps, named along the edges, as an SVG: a row for each layer.

    Opacity follows the root of a weight, which keeps small ones visible; a difference is ``signed``.
    """
    import numpy as np
    from markupsafe import Markup

    layers, heads, n, _ = maps.shape
    cell = 9 if n <= LABELLED else max(1, 150 // n)
    while cell > 3 and heads * n * cell > 2400:
        cell -= 1
    step = n + max(1, round(10 / cell))  # from one head to the next
    panels = np.zeros((layers, step, heads, step))  # zero is transparent, for the gaps
    panels[:, :n, :, :n] = maps.double().nan_to_num().transpose(1, 2).numpy()
    values = panels.reshape(layers * step, heads * step)
    share = np.sqrt(np.clip(np.abs(values) / ((np.abs(values).max() or 1.0) if signed else 1.0), 0, 1))
    image = np.empty((*values.shape, 4), dtype=np.uint8)
    image[..., :3] = np.where(values[..., None] < 0, NEGATIVE, POSITIVE)
    image[..., 3] = 5 * np.rint(51 * share)  # 52 shades look the same in half the bytes
    written = io.BytesIO()
    with matplotlib_of_our_own():
        from matplotlib.image import imsave

        imsave(written, image, format="png")
    words = map(visible, tokens) if n <= LABELLED and cell >= 7 else ()
    labels = [word if len(word) <= 10 else f"{word[:9]}…" for word in words]
    longest = 6 * max(map(len, labels), default=0)
    side, step, left, top = n * cell, step * cell, 34 + longest, 24
    width, height = step * heads, step * layers
    shown = Markup('<image x="{}" y="{}" width="{}" height="{}" preserveAspectRatio="none" href="data:image/png;base64,{}"/>')
    parts = [shown.format(left, top, width, height, base64.b64encode(written.getvalue()).decode())]
    text = Markup('<text class="{}" text-anchor="{}" transform="translate({:.1f} {:.1f}) rotate({})">{}</text>')
    frame = Markup('<rect x="{}" y="{}" width="{}" height="{}"/>')
    for head in range(heads):
        x = left + head * step
        parts.append(text.format("", "middle", x + side / 2, top - 6, 0, f"{'head ' * (side >= 48)}{head}"))
        parts += [frame.format(x, top + layer * step, side, side) for layer in range(layers)]
        below = top + height - step + side + 4
        parts += [text.format("dim", "end", x + (at + 0.8) * cell, below, -90, label) for at, label in enumerate(labels)]
    for layer in range(layers):
        y = top + layer * step
        parts.append(text.format("", "start", 2, y + side / 2 + 3, 0, f"h.{layer}"))
        parts += [text.format("dim", "end", left - 4, y + (at + 0.8) * cell, 0, label) for at, label in enumerate(labels)]
    whole = Markup(
        '<div class="scroll natural"><svg viewBox="0 0 {} {}" style="--w:{}px" role="img" aria-label="{}">{}</svg></div>'
    )
    title = "Attention weights of every head"
    return whole.format(left + width, top + height + 8 + longest, left + width, title, Markup("").join(parts))


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
