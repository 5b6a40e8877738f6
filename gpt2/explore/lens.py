"""Record one forward pass: attention weights, and the logit lens, the prediction of the final norm and head after every block.

Its page is one self-contained file or, if served, one with a field for another prompt.

Source: nostalgebraist, "interpreting GPT: the logit lens", 2020.
"""

import math
import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor

from gpt2.checkpoint.loading import require_rows
from gpt2.checkpoint.names import DEFAULT
from gpt2.comparison.sides.checkpoint_side import CheckpointSide
from gpt2.comparison.sides.side import ComparedModel, Side, environment_of
from gpt2.comparison.words import Choice
from gpt2.data import Tokenizer
from gpt2.errors import InputError
from gpt2.measure.environment import Environment
from gpt2.measure.metrics import MAX_JS
from gpt2.measure.per_token import likeliest, measure_rows
from gpt2.measure.tracing import point_at, root_of, trace_blocks
from gpt2.pages.rendering import pack_lower, percent, readable, render, short_names, visible
from gpt2.pages.reports import Line, Printed, Section, Styled, as_json, bold, dim, pieces, plain
from gpt2.parity.checks import head_of

MAX_TOKENS = 128  # of a prompt, side by side on a page
MAX_WEIGHTS = 3_000_000  # attention weights of one model, a page of about 4 MB
MAX_CHARACTERS = 4_000  # of a prompt, before it is cut into tokens
UNEXPECTED = 12  # bits of surprise with the darkest colour: one in four thousand
PROMPT = "JULIET:\nO Romeo, Romeo! wherefore art"
TOP = 8  # candidates kept per reading


@dataclass(frozen=True)
class Reading:
    """The prediction at one position, read from the stream at one point.

    ``top`` are the most likely tokens, in order; ``entropy`` is of the whole distribution, in nats. ``probability`` and
    ``rank`` (1 is the most likely) are those of the token that comes next; both are None at the end of the prompt.
    """

    top: tuple[Choice, ...]
    entropy: float
    probability: float | None
    rank: int | None


@dataclass(frozen=True)
class Lens:
    """One model's pass over ``tokens``: ``readings[p][t]`` is of position t at ``points[p]`` ("embed", "h.0", ...)."""

    model: ComparedModel
    tokens: tuple[str, ...]
    points: tuple[str, ...]
    readings: tuple[tuple[Reading, ...], ...]  # those of the last point are the model's predictions
    attention: Tensor = field(repr=False, compare=False)  # (layers, heads, T, T), float32


@dataclass(frozen=True)
class Exploration(Printed):
    """One prompt read by one or two models; ``js`` is the divergence of two models' predictions per position, in nats."""

    command: ClassVar[str] = "gpt2 explore"
    script: ClassVar[str] = "lens"

    prompt: str
    lenses: tuple[Lens, ...]
    js: tuple[float, ...] | None
    environment: Environment

    @property
    def names(self) -> list[str]:
        return [visible(lens.model.name) for lens in self.lenses]

    @property
    def legend(self) -> list[str]:
        """What each model is called within the page: its name, with a letter where there are two."""
        if len(self.names) == 1:
            return self.names
        pairs = zip("AB", short_names(*self.names), strict=True)
        return [name if name == letter else f"{letter} · {name}" for letter, name in pairs]

    def to_json(self) -> str:
        """Return everything as JSON; attention weights have four digits."""
        rounded = [lens.attention.double().mul(1e4).round().div(1e4).tolist() for lens in self.lenses]
        lenses = [{**vars(lens), "attention": weights} for lens, weights in zip(self.lenses, rounded, strict=True)]
        return as_json({**vars(self), "lenses": lenses}, indent=None)

    def sections(self) -> Iterator[Section]:
        """Yield the models, and with what each goes on."""
        yield Section(note=_heading(self.names))
        for letter, name, lens in zip("ab", self.legend, self.lenses, strict=False):
            who = Styled(name, letter) if len(self.lenses) == 2 else "The model"
            best = lens.readings[-1][-1].top[0]
            said = bold(f"“{_shown(best.text).strip()}”"), dim(f" {percent(best.probability)}")
            yield Section(note=(who, " continues with ", *said))

    def origin(self, page: str) -> Iterator[Section]:
        """Yield how to make the page again."""
        command = shlex.join(["gpt2", "explore", *(lens.model.name for lens in self.lenses)])
        rows = [("command", f"{command} --prompt {shlex.quote(self.prompt)} --html {shlex.quote(page)}")]
        for name, lens in zip(self.legend, self.lenses, strict=True):
            sizes = f"{lens.model.parameters:,} parameters, {len(lens.attention)} layers of {lens.attention.size(1)} heads"
            rows.append((name, f"{sizes}, run by {lens.model.implementation} in {lens.model.dtype}"))
        rows.append(("versions", ", ".join(f"{name} {version}" for name, version in self.environment.versions.items())))
        yield Section("Made with", f"{command} opens this page with a field for another prompt", ("", ""), rows)

    def html(self, page: str = "report.html", *, served: bool = False, **_: Any) -> str:
        """Return the page; ``served`` adds a field for another prompt."""
        same_tokens = len({lens.tokens for lens in self.lenses}) == 1
        each = zip("ab", self.legend, self.lenses, strict=False)
        sides = [{"letter": letter, "name": name, "lens": lens, "strip": _strip(lens, self.js)} for letter, name, lens in each]
        shown = {"sides": sides, "strips": sides[:1] if same_tokens else sides, "parted": self.js is not None, "cell": _shown}
        shown |= {"shared": same_tokens and len(sides) == 2, "kind": "two" if len(sides) == 2 else "one", "share": _share}
        return super().html(page, body="lens", served=served, prompt=self.prompt, characters=MAX_CHARACTERS, **shown)

    def page_data(self) -> dict[str, Any]:
        """Return the data for the script; each token's text is stored once, and readings hold its index."""
        numbers: dict[str, int] = {}

        def number(text: str) -> int:
            return numbers.setdefault(_shown(text), len(numbers))

        def reading(one: Reading) -> list[Any]:
            top = [value for choice in one.top for value in (number(choice.text), _short(choice.probability))]
            return [top, _short(one.entropy), _short(one.probability), one.rank]

        sides = [
            {
                "tokens": [number(token) for token in lens.tokens],
                "points": lens.points,
                "n_head": lens.attention.size(1),
                "readings": [[reading(one) for one in row] for row in lens.readings],
                "maps": pack_lower(lens.attention),
            }
            for lens in self.lenses
        ]
        js = None if self.js is None else [_short(value) for value in self.js]
        return {"sides": sides, "js": js, "texts": list(numbers)}


def _heading(names: Sequence[str]) -> Line:
    return ("Inside ", bold(names[0]), *(part for name in names[1:] for part in (" and ", bold(name))))


def error_page(names: tuple[str, ...], prompt: str, error: InputError) -> str:
    """Return the page with the prompt's field and the error message."""
    shown = {"command": Exploration.command, "heading": _heading([*map(visible, names)]), "pieces": pieces, "plain": plain}
    known: Any = {"sides": (), "kind": ("one", "two")[len(names) - 1], "error": str(error), "characters": MAX_CHARACTERS}
    return render("lens", {}, body="lens", served=True, prompt=prompt[:MAX_CHARACTERS], **shown, **known)


def _strip(lens: Lens, js: tuple[float, ...] | None) -> list[dict[str, Any]]:
    """Return the prompt's tokens with their colours: how unexpected each was, or how far two models differ after it."""
    given = [None, *(reading.probability for reading in lens.readings[-1][:-1])]
    shares = [_surprise(p) for p in given] if js is None else [_share(value / MAX_JS) for value in js]
    strip = []
    for token, x in zip(map(readable, lens.tokens), shares, strict=True):
        text = token.lstrip(" ")
        # Leading spaces are a part of their own: a line break after them would cut the ring around a token.
        strip.append({"lead": token.removesuffix(text), "text": text, "x": x})
    return strip


def _share(share: float) -> int:
    """Map 0 .. 1 to a colour's strength in percent, by the root, which keeps small ones visible."""
    return round(100 * math.sqrt(min(max(share, 0.0), 1.0))) if math.isfinite(share) else 0


def _surprise(p: float | None) -> int:
    """Map a probability to 0 .. 100, for 0 to UNEXPECTED bits of surprise."""
    if p is None or math.isnan(p):
        return 0
    return 100 if p == 0 else round(100 * min(1.0, max(0.0, -math.log2(p) / UNEXPECTED)))


def _shown(text: str) -> str:
    return visible(text) or "∅"


def _short(value: float | None) -> float | None:
    return float(f"{value:.3g}") if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class Explorer:
    """One or two loaded models for any number of prompts; made by :func:`explorer`."""

    sides: tuple[CheckpointSide, ...]
    tokenizers: tuple[Tokenizer, ...]
    environment: Environment

    def look(self, prompt: str = PROMPT) -> Exploration:
        """Run each model over ``prompt``; raises InputError if it is empty, or too long for a model or the page."""
        if len(prompt) > MAX_CHARACTERS:
            raise InputError(f"the prompt has {len(prompt):,} characters; there is room for {MAX_CHARACTERS:,}: shorten it")
        ids = [self._ids(prompt, side, tokenizer) for side, tokenizer in zip(self.sides, self.tokenizers, strict=True)]
        lenses, logits = zip(*map(_look, self.sides, self.tokenizers, ids), strict=True)
        one_language = len({tokenizer.fingerprint for tokenizer in self.tokenizers}) == 1
        js = tuple(_js(*logits)) if len(lenses) == 2 and one_language else None
        return Exploration(prompt, lenses, js, self.environment)

    def _ids(self, prompt: str, side: CheckpointSide, tokenizer: Tokenizer) -> list[int]:
        ids = tokenizer.encode(prompt)
        if not ids:
            raise InputError("the prompt is empty; type a few words")
        require_rows(ids, tokenizer, side.config, side.name)
        weights = MAX_WEIGHTS // (side.config.n_layer * side.config.n_head)
        room = min(MAX_TOKENS, side.config.n_positions, math.isqrt(2 * weights))
        if len(ids) > room:
            raise InputError(f"the prompt makes {len(ids):,} tokens of {side.name}; there is room for {room}: shorten it")
        return ids


@contextmanager
def explorer(*names: str, device: str = "cpu", offline: bool = False) -> Iterator[Explorer]:
    """Load one or two models, named as for :func:`gpt2.comparison.run.compare`, for the time of the ``with`` block."""
    sides = tuple(CheckpointSide.open(name, offline=offline, device=device) for name in names or (DEFAULT,))
    opened = Explorer(sides, text_tokenizers(sides), environment_of(sides))
    with ExitStack() as stack:
        for side in sides:
            stack.enter_context(side)
        yield opened


def text_tokenizers(sides: Sequence[Side]) -> tuple[Tokenizer, ...]:
    """Return each side's own tokenizer, or the first one if it has none; without any, raise an InputError."""
    if (shared := next((side.tokenizer for side in sides if side.tokenizer is not None), None)) is None:
        raise InputError(f"{sides[0].name}: has no tokenizer to read a text with; give a model that comes with one")
    return tuple(side.tokenizer or shared for side in sides)


@torch.inference_mode()
def _look(side: CheckpointSide, tokenizer: Tokenizer, ids: list[int]) -> tuple[Lens, Tensor]:
    """Return the lens: each point's stream goes through the final norm and the head; and the logits (T, V) of the last point."""
    root, readings, attention = root_of(side.program), [], []
    points = ("embed", *(point_at(layer, "") for layer in range(len(root.h))))
    for point, block in zip(points, islice(trace_blocks(side.program, torch.tensor([ids])), len(points)), strict=True):
        hidden = root.ln_f(block[point].to(root.wte.weight.device))
        logits = head_of(side.program, hidden)[0, :, : tokenizer.n_vocab].cpu()  # without the padding of the vocabulary
        readings.append(_read(logits, ids, tokenizer))
        attention += [block[name][0].float() for name in block if name.endswith(".attn.weights")]
    tokens = tuple(tokenizer.shown(index) for index in ids)
    return Lens(side.describe(), tokens, points, tuple(readings), torch.stack(attention)), logits


def _read(logits: Tensor, ids: list[int], tokenizer: Tokenizer) -> tuple[Reading, ...]:
    logp = logits.double().log_softmax(-1)
    top = likeliest(logits, min(TOP, logits.size(-1)))[0]
    chances = logp.gather(1, top).exp().tolist()
    spread = torch.special.entr(logp.exp()).sum(-1).tolist()
    rows = []
    for at, (chosen, probabilities) in enumerate(zip(top.tolist(), chances, strict=True)):
        choices = tuple(Choice(tokenizer.shown(index), p) for index, p in zip(chosen, probabilities, strict=True))
        right = logp[at, ids[at + 1]] if at + 1 < len(ids) else None
        rank = None if right is None else int((logp[at] > right).sum()) + 1
        rows.append(Reading(choices, spread[at], None if right is None else float(right.exp()), rank))
    return tuple(rows)


def _js(a: Tensor, b: Tensor) -> list[float]:
    vocab = min(a.size(-1), b.size(-1))
    unused = torch.zeros(len(a), dtype=torch.int64)  # the correct tokens, which the divergence does not need
    return measure_rows(a[:, :vocab], b[:, :vocab], unused, 1)[4].tolist()
