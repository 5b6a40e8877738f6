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
    stopped: str = ""  # "interrupted" if it ended early

    @property
    def ok(self) -> bool:
        """Whether all cases were judged, and an arithmetic explains every error. An imprecise one, such as TF32, is no bug."""
        return not self.stopped and all(each.ok for each in self.verdicts)

    @property
    def verdict(self) -> str:
        """Return the device's verdict: "right", "imprecise" (right in a coarser arithmetic), "incomplete" or "wrong".

        Incomplete: what it computes is right, and it lacks an operator. "interrupted": nothing wrong was found before Ctrl-C.
        """
        if self.first_wrong is not None:
            return "wrong"
        if self.stopped:
            return self.stopped
        if self.missing:
            return "incomplete"
        return "right" if all(each.precise for each in self.verdicts) else "imprecise"

    @property
    def first_wrong(self) -> Verdict | None:
        """The first case, in the order of computation, that no arithmetic explains."""
        return next((each for each in self.verdicts if each.wrong), None)

    @property
    def missing(self) -> dict[str, str]:
        """What PyTorch has not implemented for the device, and the operators that need it, by dtype."""
        cases: dict[str, dict[str, None]] = {}
        for each in self.verdicts:
            if each.missing:
                cases.setdefault(each.missing, {})[f"{each.operator} in {each.dtype}"] = None
        return {name: ", ".join(where) for name, where in cases.items()}

    @property
    def arithmetics(self) -> dict[str, str]:
        """What is less precise than the dtype that was asked for: each arithmetic's name, and the line that turns it off."""
        return {each.arithmetic: each.advice for each in self.verdicts if each.arithmetic and not each.precise}

    def sentence(self, wrong: Verdict) -> str:
        """Say what is wrong: ``"attention is wrong for B > 1 with a mask"``."""
        same = [each for each in self.verdicts if (each.operator, each.dtype) == (wrong.operator, wrong.dtype)]
        everywhere = len(same) > 1 and all(each.wrong for each in same)
        return f"{wrong.operator} is wrong" + ("" if everywhere else f" for {wrong.condition}")

    def to_json(self) -> str:
        """Return every case in every dtype as JSON."""
        first = self.first_wrong
        body = {
            "verdict": self.verdict,
            "ok": self.ok,
            "first_wrong": None if first is None else {**vars(first), "sentence": self.sentence(first)},
            "arithmetics": self.arithmetics,
            "missing": self.missing,
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
        yield "[dim]arithmetic explains (up to 1.5 holds, 3 of gradients).[/dim]\n"
        yield self._table()
        for name, advice in self.arithmetics.items():
            at = dict.fromkeys(each.operator for each in self.verdicts if each.arithmetic == name)
            yield f"[yellow]{name}[/yellow]: {', '.join(at)}" + (f"\n    turn it off: {escape(advice)}" if advice else "")
        if unsteady := list(dict.fromkeys(each.operator for each in self.verdicts if not each.repeats)):
            yield f"[dim]not bit-identical when repeated: {', '.join(unsteady)}[/dim]"
        said = set()
        for each in self.verdicts:
            if each.wrong and (line := f"{self.sentence(each)}, {each.dtype}: {each.looks_like}") not in said:
                said.add(line)
                yield f"[red]✗[/red] {escape(line)}"
        for name, where in self.missing.items():
            yield f"[yellow]not implemented on this device: {escape(name)}[/yellow]  ({escape(where)})"
        end = f"  [dim]in {self.seconds:.1f} s[/dim]\n"
        first = self.first_wrong
        if first is not None:
            yield f"\n[bold red]WRONG[/bold red]  {escape(self.sentence(first))}: {escape(first.looks_like)}{end}"
        elif self.stopped:
            yield f"\n[bold yellow]INTERRUPTED[/bold yellow]  nothing wrong in the {len(self.verdicts)} cases before{end}"
        elif self.missing:
            names = ", ".join(map(escape, self.missing))
            yield f"\n[bold yellow]INCOMPLETE[/bold yellow]  right in all that it has; not implemented: {names}{end}"
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
    if wrong := [each for each in verdicts if each.wrong]:
        return f"[bold red]✗ {len(wrong)} of {len(verdicts)}[/bold red]"
    if missing := [each for each in verdicts if each.missing]:
        return f"[yellow]lacks {len(missing)} of {len(verdicts)}[/yellow]"
    if coarse := [each for each in verdicts if not each.precise]:
        return f"[yellow]{', '.join(dict.fromkeys(str(each.arithmetic) for each in coarse))}[/yellow]"
    return f"× {max(each.ratio for each in verdicts):.2f}"
