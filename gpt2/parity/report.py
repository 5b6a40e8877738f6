"""The report of verify as frozen dataclasses, from which terminal text, JSON and HTML are made."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2.errors import InputError
from gpt2.measure.tracing import layer_of
from gpt2.pages.reports import Environment, Printed, as_json, data_table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpt2.checkpoint.official_files import Official
    from gpt2.parity.record import RecordReport

EXACT, MAPPING, ROUNDING = "exact", "mapping", "rounding"


@dataclass(frozen=True)
class Point:
    """One compared thing: it holds when ``error`` is at most ``bound``.

    In a rounding check ``reference_error`` is transformers' own distance from the float64 run, and the bound follows from it.
    """

    name: str
    error: float
    bound: float
    reference_error: float | None = None

    @property
    def ok(self) -> bool:
        return self.error <= self.bound

    @property
    def ratio(self) -> float:
        """How near the bound, in units of what sets it: our rounding over theirs, or the error over the bound."""
        unit = self.bound if self.reference_error is None else self.reference_error
        return self.error / unit if unit else (0.0 if self.error == 0 else float("inf"))


@dataclass(frozen=True)
class Check:
    """One question put to the model at many points; ``kind`` is "exact", "mapping" or "rounding"."""

    id: str
    kind: str
    title: str
    dtype: str  # what was computed in; "" where nothing was
    points: tuple[Point, ...] = ()
    skipped: str = ""  # why it was not run; it then says nothing either way

    @property
    def ok(self) -> bool:
        """Every point holds; a check without points holds only if it says why it was skipped."""
        return bool(self.points or self.skipped) and all(point.ok for point in self.points)

    @property
    def worst(self) -> Point | None:
        """The first failing point, or else the one nearest its bound."""
        failed = next((point for point in self.points if not point.ok), None)
        return failed or max(self.points, key=lambda point: point.ratio, default=None)


@dataclass(frozen=True)
class Report(Printed):
    """Two models compared: ``model`` is ours, ``reference`` is what it was held against."""

    model: str
    reference: str
    revision: str | None
    parameters: int
    n_layer: int
    coverage: str
    checks: tuple[Check, ...]
    files: dict[str, str]  # name -> sha256
    environment: Environment
    seed: int
    seconds: float
    official: Official | None = None  # whether the files are the official ones; None for random weights
    record: RecordReport | None = None  # what other people recorded of the official weights, computed again

    @property
    def ok(self) -> bool:
        """Every check holds, so the models are equal, and every recorded number that was computed is reproduced."""
        return all(check.ok for check in self.checks) and (self.record is None or self.record.ok)

    @property
    def first_divergence(self) -> Point | None:
        """The first point, in the order of computation, that does not hold."""
        return next((point for check in self.checks for point in check.points if not point.ok), None)

    def check(self, id: str) -> Check:
        """The check of this id, such as "gradients" or "rounding"."""
        return next(check for check in self.checks if check.id == id)

    def to_json(self) -> str:
        """Every point of every check, with versions and the sha256 of every file."""
        first = self.first_divergence
        body = {
            "model": self.model,
            "reference": self.reference,
            "ok": self.ok,
            "verdict": "equal" if self.ok else "mismatch",
            "first_divergence": {"point": first.name, "layer": layer_of(first.name), "error": first.error} if first else None,
            "revision": self.revision,
            "parameters": self.parameters,
            "coverage": self.coverage,
            "skipped": [check.id for check in self.checks if check.skipped],
            "seed": self.seed,
            "seconds": round(self.seconds, 2),
            "environment": asdict(self.environment),
            "files": self.files,
            "checks": [{**asdict(check), "ok": check.ok} for check in self.checks],
            "official": asdict(self.official) if self.official else None,
            "record": self.record.to_dict() if self.record else None,
        }
        return as_json(body)

    def save_html(self, path: str | Path) -> None:
        """The report as one self-contained HTML file."""
        from rich.console import Console

        console = Console(file=io.StringIO(), width=110, record=True, force_jupyter=False)
        self.print(console)
        try:
            console.save_html(str(path))
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror}); choose another file") from None

    def parts(self) -> Iterator[RenderableType]:
        """Both models, a row per block, a row per check, and the verdict."""
        from rich.markup import escape

        env = self.environment
        packages = " · ".join(f"{name} {number}" for name, number in env.versions.items() if name in ("torch", "transformers"))
        threads = f"{env.threads} thread{'s' * (env.threads != 1)}"
        yield f"\n[bold]{escape(self.model)}[/bold]  against  [bold]{escape(self.reference)}[/bold]"
        yield f"[dim]{self.parameters:,} parameters · {packages} · {env.device}, {threads}\n{self.coverage}[/dim]\n"
        yield self._blocks()
        yield "[dim]Errors are relative to transformers in float64; ratios (×) are our error over its own.[/dim]\n"
        yield self._checks()
        yield from self._official()
        skipped = [check.id for check in self.checks if check.skipped]
        not_run = f"; not run: {', '.join(skipped)}" if skipped else ""
        end = f"{not_run}  [dim]in {self.seconds:.1f} s[/dim]\n"
        if all(check.ok for check in self.checks):
            yield f"\n[bold green]EQUAL[/bold green]  at every point{' that was run' if skipped else ''}{end}"
            if self.record is not None and not self.record.ok:
                yield "[bold red]BUT NOT WHAT OTHERS RECORDED[/bold red]  of the official weights\n"
        else:
            first = self.first_divergence
            where = "a check without a point" if first is None else f"first at [bold]{first.name}[/bold]: {_amount(first)}"
            yield f"\n[bold red]DIFFERENT[/bold red]  {where}{end}"

    def _official(self) -> Iterator[RenderableType]:
        """Whether these are the official files, and the public record of them."""
        from rich.markup import escape

        if self.official is not None and self.official.model is not None:
            yield f"\n[dim]files: {escape(str(self.official))}[/dim]"
        if self.record is None:
            return
        if self.record.everything:
            yield self.record.render()
        yield f"{'[green]✓[/green]' if self.record.ok else '[bold red]✗[/bold red]'} {escape(self.record.line())}"

    def _blocks(self) -> RenderableType:
        """A row per block: the worst of its traced activations and gradients, by both rules."""
        ratio, exact = "\nratio", "gradients\nfloat64"
        titles = "where", "float64\nworst", "\nat", f"{self.environment.dtype}\nworst", ratio, "\nat", exact, ratio
        table = data_table(*titles, right=(1, 3, 4, 6, 7))
        checks = {check.id: check for check in self.checks}
        for where in ["embed", *(f"h.{layer}" for layer in range(self.n_layer)), "head"]:
            points = [_worst_in(checks.get(id), where) for id in ("activations", "rounding", "gradients", "gradients-rounding")]
            table.add_row(
                where,
                *(_error_cell(points[0]), _name_cell(points[0])),
                *(_error_cell(points[1]), _ratio_cell(points[1]), _name_cell(points[1])),
                *(_error_cell(points[2]), _ratio_cell(points[3])),
            )
        return table

    def _checks(self) -> RenderableType:
        from rich.table import Table

        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
        for no_wrap in (True, True, True, False, True, False):
            table.add_column(no_wrap=no_wrap, overflow="fold")
        for check in self.checks:
            title = check.id.removesuffix("-rounding"), f"[dim]{check.dtype}[/dim]", check.title
            if check.skipped:
                table.add_row("[yellow]–[/yellow]", *title, "", f"[yellow]not run: {check.skipped}[/yellow]")
                continue
            mark = "[green]✓[/green]" if check.ok else "[bold red]✗[/bold red]"
            worst = None if check.kind == EXACT and check.ok else check.worst
            table.add_row(mark, *title, *(() if worst is None else (_short_amount(worst), f"[dim]{worst.name}[/dim]")))
        return table


def _where(point: str) -> str:
    layer = layer_of(point)
    if layer is not None:
        return f"h.{layer}"
    return "embed" if point.split(".")[0].split(" ")[0] in ("wte", "wpe", "embed") else "head"


def _worst_in(check: Check | None, where: str) -> Point | None:
    if check is None:
        return None
    return Check("", "", "", "", tuple(point for point in check.points if _where(point.name) == where)).worst


def _error_cell(point: Point | None) -> str:
    return "" if point is None else _mark(point, f"{point.error:.1e}")


def _ratio_cell(point: Point | None) -> str:
    return "" if point is None else _mark(point, f"{point.ratio:.2f}")


def _name_cell(point: Point | None) -> str:
    """``"h.3.attn.k"`` -> ``"attn.k"``: the row says which block, and the table of checks says which logits."""
    if point is None:
        return ""
    name = point.name.partition(" (")[0]
    return f"[dim]{name.split('.', 2)[2] if name.count('.') > 1 else name}[/dim]"


def _mark(point: Point, text: str) -> str:
    return text if point.ok else f"[bold red]{text}[/bold red]"


def _amount(point: Point) -> str:
    if point.reference_error is not None:
        return f"{point.ratio:.2f} × theirs"
    if point.bound == 0:
        return f"{point.error:,.0f} {'entry differs' if point.error == 1 else 'entries differ'}"
    return f"{point.error:.1e}"


def _short_amount(point: Point) -> str:
    if point.reference_error is not None:
        return f"× {point.ratio:.2f}"
    return f"{point.error:,.0f} differ" if point.bound == 0 else f"{point.error:.1e}"


def points_of(rows: Iterable[tuple[str, float]], bound: float) -> tuple[Point, ...]:
    return tuple(Point(name, error, bound) for name, error in rows)
