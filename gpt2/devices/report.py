"""The device verdict as frozen dataclasses, from which text and JSON are made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpt2.devices.judge import Verdict
from gpt2.pages.reports import Environment, Printed, as_json, data_table

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class DeviceReport(Printed):
    """Every case in every dtype, in the order of computation."""

    model: str
    device: str
    coverage: str
    verdicts: tuple[Verdict, ...]
    environment: Environment
    seed: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether an arithmetic explains every error. An imprecise one, such as TF32, is no bug."""
        return all(each.ok for each in self.verdicts)

    @property
    def verdict(self) -> str:
        """Whether the device is "right", "imprecise" (right in a coarser arithmetic) or "wrong"."""
        return "wrong" if not self.ok else "right" if all(each.precise for each in self.verdicts) else "imprecise"

    @property
    def first_wrong(self) -> Verdict | None:
        """The first case, in the order of computation, that no arithmetic explains."""
        return next((each for each in self.verdicts if not each.ok), None)

    @property
    def arithmetics(self) -> dict[str, str]:
        """What is less precise than the dtype that was asked for: each arithmetic's name, and the line that turns it off."""
        return {each.arithmetic: each.advice for each in self.verdicts if each.arithmetic and not each.precise}

    def sentence(self, wrong: Verdict) -> str:
        """Say what is wrong: ``"attention is wrong for B > 1 with a mask"``."""
        same = [each for each in self.verdicts if (each.operator, each.dtype) == (wrong.operator, wrong.dtype)]
        everywhere = len(same) > 1 and not any(each.ok for each in same)
        return f"{wrong.operator} is wrong" + ("" if everywhere else f" for {wrong.condition}")

    def to_json(self) -> str:
        """Return every case in every dtype as JSON."""
        first = self.first_wrong
        body = {
            "verdict": self.verdict,
            "ok": self.ok,
            "first_wrong": None if first is None else {**vars(first), "sentence": self.sentence(first)},
            "arithmetics": self.arithmetics,
            **vars(self),
            "seconds": round(self.seconds, 2),
            "verdicts": [{**vars(each), "ok": each.ok, "ratio": each.ratio} for each in self.verdicts],
        }
        return as_json(body)

    def parts(self) -> Iterator[RenderableType]:
        """Yield a row for each operator, what is imprecise or wrong, and the verdict."""
        from rich.markup import escape

        versions = self.environment.versions
        yield f"\n[bold]{escape(self.model)}[/bold]  on  [bold]{escape(self.device)}[/bold], torch {versions['torch']}"
        yield f"[dim]{self.coverage}\nEach operator on the model's shapes; the error against float64 on the CPU, over what the"
        yield "[dim]arithmetic explains (up to 1.5 holds).[/dim]\n"
        yield self._table()
        for name, advice in self.arithmetics.items():
            at = dict.fromkeys(each.operator for each in self.verdicts if each.arithmetic == name)
            yield f"[yellow]{name}[/yellow]: {', '.join(at)}" + (f"\n    turn it off: {escape(advice)}" if advice else "")
        if unsteady := list(dict.fromkeys(each.operator for each in self.verdicts if not each.repeats)):
            yield f"[dim]not bit-identical when repeated: {', '.join(unsteady)}[/dim]"
        said = set()
        for each in self.verdicts:
            if not each.ok and (line := f"{self.sentence(each)}, {each.dtype}: {each.looks_like}") not in said:
                said.add(line)
                yield f"[red]✗[/red] {escape(line)}"
        end = f"  [dim]in {self.seconds:.1f} s[/dim]\n"
        first = self.first_wrong
        if first is not None:
            yield f"\n[bold red]WRONG[/bold red]  {escape(self.sentence(first))}: {escape(first.looks_like)}{end}"
        elif self.verdict == "imprecise":
            yield f"\n[bold yellow]IMPRECISE[/bold yellow]  right, with {', '.join(self.arithmetics)}{end}"
        else:
            yield f"\n[bold green]RIGHT[/bold green]  every operator, in every dtype{end}"

    def _table(self) -> RenderableType:
        dtypes = list(dict.fromkeys(each.dtype for each in self.verdicts))
        table = data_table("operator", "cases", *dtypes, right=(1,))
        for operator in dict.fromkeys(each.operator for each in self.verdicts):
            own = [each for each in self.verdicts if each.operator == operator]
            conditions = len({each.condition for each in own})
            table.add_row(operator, str(conditions), *(_cell([each for each in own if each.dtype == dtype]) for dtype in dtypes))
        return table


def _cell(verdicts: list[Verdict]) -> str:
    if not verdicts:
        return ""
    if wrong := [each for each in verdicts if not each.ok]:
        return f"[bold red]✗ {len(wrong)} of {len(verdicts)}[/bold red]"
    if coarse := [each for each in verdicts if not each.precise]:
        return f"[yellow]{', '.join(dict.fromkeys(str(each.arithmetic) for each in coarse))}[/yellow]"
    return f"× {max(each.ratio for each in verdicts):.2f}"
