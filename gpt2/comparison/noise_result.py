"""The floor of noise as frozen dataclasses, with its terminal tables and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from gpt2.comparison.results import Model, Scored
from gpt2.measure.estimates import Estimate
from gpt2.pages.rendering import render, visible, write
from gpt2.pages.reports import Environment, Printed, add_texts, as_json, data_table

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Way:
    """Another way to compute the same logits, against the baseline.

    ``logit`` is the largest difference of a logit, ``error`` the relative one of all. ``flipped`` counts tokens of the text
    whose likeliest next token differs, ``hanging`` those where it might: the baseline's two likeliest are at most twice
    ``logit`` apart. ``parts_at`` is the first token in which a greedy text differs, per prompt, or None.
    """

    group: str  # "batch", "padding", "cache", "kernel", "threads", "device", "dtype"
    name: str
    dtype: str
    logit: float
    error: float
    kl: Estimate
    kl_max: float
    flipped: int
    hanging: int
    parts_at: tuple[int | None, ...]

    @property
    def parted(self) -> tuple[int, ...]:
        """Where the greedy texts that differ do so, counted from 1."""
        return tuple(sorted(at + 1 for at in self.parts_at if at is not None))

    @property
    def parting(self) -> str:
        """How many greedy texts differ, and from which token on, in words."""
        if not self.parted:
            return "none"
        return f"{len(self.parted)} of {len(self.parts_at)}, from token {self.parted[0]} (median {median(self.parted):.0f})"


@dataclass(frozen=True)
class CloseCall:
    """A token whose choice hangs on rounding: the two likeliest after ``before``, and the ways that may swap them."""

    at: int
    before: str
    first: str
    second: str
    margin: float
    ways: tuple[str, ...]


@dataclass(frozen=True)
class Limit:
    """What a difference must exceed in one dtype to mean anything: the largest that the ways in this dtype make."""

    dtype: str
    kl: float  # the upper end of the 95 % interval
    kl_way: str
    logit: float
    flipped: int


@dataclass(frozen=True)
class Noise(Printed):
    """The result of running one model in every way. ``skipped`` are (way, reason); ``text.tokens`` are in ``rows`` rows."""

    model: Model
    text: Scored
    rows: int
    ways: tuple[Way, ...]
    skipped: tuple[tuple[str, str], ...]
    close_calls: tuple[CloseCall, ...]
    prompts: int
    new_tokens: int
    environment: Environment
    seed: int
    seconds: float

    @property
    def limits(self) -> tuple[Limit, ...]:
        """One limit for each dtype that was run; the model's own dtype first. Float64 has none: it is the more exact way."""
        limits = []
        for dtype in dict.fromkeys(way.dtype for way in self.ways):
            of_dtype = [way for way in self.ways if way.dtype == dtype]
            if dtype != "float64" or dtype == self.model.dtype:
                worst = max(of_dtype, key=lambda way: way.kl.high)
                logit, flipped = max(way.logit for way in of_dtype), max(way.flipped for way in of_dtype)
                limits.append(Limit(dtype, worst.kl.high, worst.name, logit, flipped))
        return tuple(limits)

    def to_json(self) -> str:
        """Return everything that was measured as JSON."""
        return as_json({**vars(self), "limits": self.limits})

    def save_html(self, path: str | Path) -> None:
        """Write the report as one self-contained page; raises InputError if the file cannot be written."""
        write(path, self.page())

    def page(self) -> str:
        """Return the report as HTML text."""
        from gpt2.comparison.bar_plots import way_bars
        from gpt2.comparison.page import again

        command = again([self.model.name], self.text, self.seed, "--noise")
        return render("noise", c=self, bars=way_bars(self.ways), command=command, data={})

    def sentences(self) -> tuple[str, ...]:
        """Return what the limits say, one sentence for each dtype."""
        said = []
        for limit in self.limits:
            where = f"In {limit.dtype}" if limit.dtype == self.model.dtype else f"Against a run in {limit.dtype}"
            flips = f"{limit.flipped:,} of {self.text.tokens:,} first choices"
            exceed = f"a KL must exceed {limit.kl:.2g} nats, and a logit move by more than {limit.logit:.2g}, to mean anything"
            said.append(f"{where} {exceed}; rounding alone changed {flips}.")
        return tuple(said)

    def parts(self) -> Iterator[RenderableType]:
        """Yield the model, the ways, the tokens that hang on rounding, and the limits."""
        from rich.markup import escape

        yield f"\n[bold]{escape(self.model.name)}[/bold]  [dim]the floor of noise[/dim]"
        rows = f"{self.rows} row{'s' * (self.rows != 1)} of {self.text.context} tokens"
        yield f"[dim]{escape(self.text.name)}: {rows}; baseline: {self.model.dtype}, each row alone[/dim]\n"
        table = data_table("way", "logit", "KL", "KL max", "flips", "hang", "texts part", wrap=True)
        for way in self.ways:
            numbers = f"{way.logit:.1e}", f"{way.kl.value:.1e}", f"{way.kl_max:.1e}"
            add_texts(table, way.name, *numbers, f"{way.flipped:,}", f"{way.hanging:,}", way.parting)
        yield table
        yield (
            "[dim]logit: largest difference. hang: tokens whose two likeliest candidates are closer than twice that.\n"
            f"texts part: of {self.prompts} greedy texts of {self.new_tokens} tokens, how many differ, and from which token[/dim]"
        )
        for name, why in self.skipped:
            yield f"[yellow]left out[/yellow]  {escape(name)}: {escape(why)}"
        if self.close_calls:
            yield "\n[bold]Tokens that hang on rounding[/bold]  [dim]the ten closest[/dim]"
            table = data_table("after", "first", "second", "apart", "ways")
            for call in self.close_calls:
                words = visible(f"…{call.before[-28:]}"), visible(call.first), visible(call.second)
                add_texts(table, *words, f"{call.margin:.1e}", f"{len(call.ways)} of {len(self.ways)}")
            yield table
        for sentence in self.sentences():
            yield f"[bold]·[/bold] {sentence}"
        yield f"[dim]in {self.seconds:.1f} s[/dim]\n"
