"""What was found, as frozen dataclasses first; terminal, JSON and HTML are made of them afterwards."""

from __future__ import annotations

import io
import json
import math
import os
import platform
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2 import __version__
from gpt2.errors import InputError
from gpt2.measure.tracing import layer_of

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

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
class Environment:
    """What the figures were measured with."""

    versions: dict[str, str]
    dtype: str
    device: str
    threads: int
    machine: str


@dataclass(frozen=True)
class Report:
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

    @property
    def ok(self) -> bool:
        """Every check holds: the models are equal."""
        return all(check.ok for check in self.checks)

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
        }
        return json.dumps(finite(body), indent=2, allow_nan=False)

    def table(self, width: int = 100) -> str:
        """The report as plain text, ``width`` columns."""
        from rich.console import Console

        written = io.StringIO()
        self.print(Console(file=written, width=width, color_system=None, force_jupyter=False))
        return written.getvalue()

    def save_html(self, path: str | Path) -> None:
        """The report as one self-contained HTML file."""
        from rich.console import Console

        console = Console(file=io.StringIO(), width=110, record=True, force_jupyter=False)
        self.print(console)
        try:
            console.save_html(str(path))
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror}); choose another file") from None

    def print(self, console: Console) -> None:
        """Write the report to a rich console."""
        for part in self._render():
            console.print(part, highlight=False)

    def _render(self) -> Iterator[RenderableType]:
        from rich.markup import escape

        env = self.environment
        packages = " · ".join(f"{name} {number}" for name, number in env.versions.items() if name in ("torch", "transformers"))
        yield f"\n[bold]{escape(self.model)}[/bold]  against  [bold]{escape(self.reference)}[/bold]"
        yield f"[dim]{self.parameters:,} parameters · {packages} · {env.device}, {_threads(env.threads)}\n{self.coverage}[/dim]\n"
        yield self._blocks()
        yield "[dim]Errors are relative, against transformers in float64; a ratio is our error over transformers' own.[/dim]\n"
        yield self._summary()
        seconds = f"[dim]in {self.seconds:.1f} s[/dim]"
        skipped = [check.id for check in self.checks if check.skipped]
        partly = f"; not run: {', '.join(skipped)}" if skipped else ""
        if self.ok:
            yield f"\n[bold green]EQUAL[/bold green]  at every point{' that was run' if skipped else ''}{partly}  {seconds}\n"
        else:
            first = self.first_divergence
            where = "a check without a point" if first is None else f"first at [bold]{first.name}[/bold]: {_amount(first)}"
            yield f"\n[bold red]DIFFERENT[/bold red]  {where}{partly}  {seconds}\n"

    def _blocks(self) -> RenderableType:
        """A row per block: the worst of its traced activations and gradients, by both rules."""
        from rich import box
        from rich.table import Table

        dtype = self.environment.dtype
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
        table.add_column("where")
        table.add_column("float64\nworst", justify="right")
        table.add_column("\nat", style="dim")
        table.add_column(f"{dtype}\nworst", justify="right")
        table.add_column("\nratio", justify="right")
        table.add_column("\nat", style="dim")
        table.add_column("gradients\nfloat64", justify="right")
        table.add_column("\nratio", justify="right")
        checks = {check.id: check for check in self.checks}
        for where in ["embed", *(f"h.{layer}" for layer in range(self.n_layer)), "head"]:
            cells = [where]
            mapping = _worst_in(checks.get("activations"), where)
            cells += [_mark(mapping, f"{mapping.error:.1e}"), short(mapping.name)] if mapping else ["", ""]
            rounding = _worst_in(checks.get("rounding"), where)
            cells += _rounding_cells(rounding) if rounding else [""] * 3
            gradient = _worst_in(checks.get("gradients"), where)
            cells.append(_mark(gradient, f"{gradient.error:.1e}") if gradient else "")
            gradient = _worst_in(checks.get("gradients-rounding"), where)
            cells.append(_mark(gradient, f"{gradient.ratio:.2f}") if gradient else "")
            table.add_row(*cells)
        return table

    def _summary(self) -> RenderableType:
        from rich.table import Table

        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
        for no_wrap in (True, True, True, False, True, False):
            table.add_column(no_wrap=no_wrap)
        for check in self.checks:
            title = check.id.removesuffix("-rounding"), f"[dim]{check.dtype}[/dim]", check.title
            if check.skipped:
                table.add_row("[yellow]–[/yellow]", *title, "", f"[yellow]not run: {check.skipped}[/yellow]")
                continue
            mark = "[green]✓[/green]" if check.ok else "[bold red]✗[/bold red]"
            worst = check.worst
            told = () if worst is None or (check.kind == EXACT and check.ok) else (_amount(worst), f"[dim]{worst.name}[/dim]")
            table.add_row(mark, *title, *told)
        return table


def environment(dtype: str, device: str) -> Environment:
    """Versions and machine of this process."""
    import torch

    names = ("torch", "transformers", "safetensors", "tokenizers", "tiktoken", "numpy")
    own = {"gpt2-toolkit": __version__, "python": platform.python_version()}
    versions = {**own, **{name: version(name) for name in names}}
    return Environment(versions, dtype, device, torch.get_num_threads(), f"{platform.machine()}, {os.cpu_count()} cores")


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count != 1)}"


def short(point: str) -> str:
    """``"h.3.attn.k"`` -> ``"attn.k"``, for a row that already says which block."""
    return point if layer_of(point) is None or point.count(".") == 1 else point.split(".", 2)[2]


def _where(point: str) -> str:
    layer = layer_of(point)
    if layer is not None:
        return f"h.{layer}"
    return "embed" if point.split(".")[0].split(" ")[0] in ("wte", "wpe", "embed") else "head"


def _worst_in(check: Check | None, where: str) -> Point | None:
    if check is None:
        return None
    return Check("", "", "", "", tuple(point for point in check.points if _where(point.name) == where)).worst


def _mark(point: Point, text: str) -> str:
    return text if point.ok else f"[bold red]{text}[/bold red]"


def _rounding_cells(point: Point) -> list[str]:
    ratio = _mark(point, f"{point.ratio:.2f}")
    return [_mark(point, f"{point.error:.1e}"), ratio, short(point.name)]


def _amount(point: Point) -> str:
    if point.reference_error is not None:
        return f"{point.ratio:.2f} × theirs"
    if point.bound == 0:
        return f"{point.error:,.0f} entries differ" if point.error != 0 else "none differ"
    return f"{point.error:.1e}"


def finite(value: Any) -> Any:
    """JSON knows no infinity: it becomes the string "inf"."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def points_of(rows: Iterable[tuple[str, float]], bound: float) -> tuple[Point, ...]:
    return tuple(Point(name, error, bound) for name, error in rows)
