"""The device verdict as frozen dataclasses, from which text and JSON are made."""

from collections.abc import Iterator
from dataclasses import dataclass

from gpt2.devices.judge import Verdict
from gpt2.measure.environment import Environment
from gpt2.pages.reports import Line, Printed, Section, Styled, as_json, bold, dim, yellow


@dataclass(frozen=True)
class DeviceReport(Printed):
    """In ``verdicts``, of each operator, condition and dtype the first wrong result, else the one with the largest ratio."""

    model: str
    device: str
    coverage: str
    verdicts: tuple[Verdict, ...]
    first_wrong: Verdict | None  # in the order of computation
    environment: Environment
    seed: int
    seconds: float
    stopped: str = ""  # "interrupted" if it ended early

    @property
    def ok(self) -> bool:
        """Whether all was judged and an arithmetic explains every error. An imprecise one, such as TF32, is no bug."""
        return self.verdict in ("right", "imprecise")

    @property
    def verdict(self) -> str:
        """Return "right", "imprecise" (in a coarser arithmetic), "incomplete" (lacks an operator), "wrong", "interrupted"."""
        if self.first_wrong is not None:
            return "wrong"
        return self.stopped or ("incomplete" if self.missing else "imprecise" if self.arithmetics else "right")

    @property
    def missing(self) -> dict[str, str]:
        """What PyTorch has not implemented for the device, and the operators that need it."""
        return {each.missing: self._operators(missing=each.missing) for each in self.verdicts if each.missing}

    @property
    def arithmetics(self) -> dict[str, str]:
        """What is less precise than the dtype that was asked for: each arithmetic's name, and the lines that turn it off."""
        found: dict[str, dict[str, None]] = {}
        for each in self.verdicts:
            if each.arithmetic not in (None, each.dtype):
                found.setdefault(each.arithmetic, {})[each.advice] = None
        return {name: "; ".join(filter(None, lines)) for name, lines in found.items()}

    def to_json(self) -> str:
        """Return the report as JSON."""
        own = {name: getattr(self, name) for name in ("verdict", "ok", "arithmetics", "missing")}
        verdicts = [{**vars(each), "ok": each.arithmetic is not None, "ratio": each.ratio} for each in self.verdicts]
        return as_json({**own, **vars(self), "seconds": round(self.seconds, 2), "verdicts": verdicts})

    def sections(self) -> Iterator[Section]:
        """Yield a row for each condition, what is imprecise or wrong, and the verdict."""
        version, dtypes = self.environment.versions["torch"], list(dict.fromkeys(each.dtype for each in self.verdicts))
        yield Section(note=("\n", bold(self.model), "  on  ", bold(self.device), f", torch {version}"))
        rule = "the error against float64 on the CPU, over what rounding explains (up to 2 holds, 3 of training)."
        yield Section(note=dim(f"{self.coverage}\nEach operator alone, then the whole model: {rule}\n"))
        rows = list[list[Line]]()
        for row in dict.fromkeys(each.condition for each in self.verdicts):
            own = [[x for x in self.verdicts if (x.condition, x.dtype) == (row, dtype)] for dtype in dtypes]
            rows.append([row, *map(_cell, own)])
        yield Section(columns=("condition", *dtypes), rows=rows)
        for name, advice in self.arithmetics.items():
            off = f"\n    turn it off: {advice}" if advice else ""
            yield Section(note=(yellow(name), f": {self._operators(arithmetic=name)}{off}"))
        for name, operators in self.missing.items():
            yield Section(note=(yellow(f"not implemented on this device: {name}"), f"  ({operators})"))
        yield from (Section(note=(Styled("✗", "red"), f" {each.sentence}")) for each in self.verdicts if each.wrong)
        colour = {"wrong": "red", "right": "green"}.get(self.verdict, "yellow")
        said = {
            "wrong": self.first_wrong.sentence if self.first_wrong else "",
            "interrupted": "nothing wrong before",
            "incomplete": f"right in all that it has, lacks {', '.join(self.missing)}",
            "imprecise": f"right, with {', '.join(self.arithmetics)}",
            "right": "every operator and the whole model, in every dtype",
        }[self.verdict]
        end = dim(f"  in {self.seconds:.1f} s"), "\n"
        yield Section(note=("\n", Styled(self.verdict.upper(), f"bold {colour}"), f"  {said}", *end))

    def _operators(self, **having: str) -> str:
        own = [each for each in self.verdicts if having.items() <= vars(each).items()]
        return ", ".join(dict.fromkeys(f"{each.operator} in {each.dtype}" for each in own))


def _cell(verdicts: list[Verdict]) -> Line:
    if bad := [each for each in verdicts if each.arithmetic is None]:
        return Styled(f"✗ {bad[0].operator}", "bold red") if any(each.wrong for each in bad) else yellow("incomplete")
    coarse = dict.fromkeys(str(each.arithmetic) for each in verdicts if each.arithmetic != each.dtype)
    return yellow(", ".join(coarse)) if coarse else f"× {max((each.ratio for each in verdicts), default=0):.2f}"
