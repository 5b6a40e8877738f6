"""The report of verify as frozen dataclasses, from which terminal text, JSON and HTML are made."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpt2.checkpoint.official import Official
from gpt2.measure.environment import Environment
from gpt2.measure.rounding import FORWARD_RATIO, MACHINE_RATIO, TRAINING_RATIO, of_the_machine
from gpt2.measure.tracing import block_of, layer_of, part_of
from gpt2.pages.reports import Column, Line, Printed, Section, Styled, as_json, bold, dim, numbers, yellow
from gpt2.parity.record import RecordReport

if TYPE_CHECKING:
    from rich.console import RenderableType

EXACT, MAPPING, ROUNDING = "exact", "mapping", "rounding"
# Why a report has unfinished checks.
RUNNING, INTERRUPTED, AT_DIFFERENCE = "to do", "interrupted", "stopped at the first difference"


@dataclass(frozen=True)
class Point:
    """One compared value; it holds if ``error`` <= ``bound``, which for rounding is a multiple of what rounding ``explained``.

    ``reference_error`` is transformers' own, and ``apart`` the distance of the two results. Where both err alike, the error is
    the machine's (:attr:`of_the_machine`), and up to MACHINE_RATIO times what rounding explains holds.
    """

    name: str
    error: float
    bound: float
    explained: float | None = None
    reference_error: float | None = None
    apart: float | None = None

    @property
    def ok(self) -> bool:
        return self.error <= self.bound or (self.of_the_machine and self.error <= self._most)

    @property
    def of_the_machine(self) -> bool:
        """Whether our error is over the bound, and transformers' is the same one."""
        if self.reference_error is None or self.apart is None or self.error <= self.bound:
            return False
        return of_the_machine(self.error, self.reference_error, self.apart)

    @property
    def imprecise(self) -> bool:
        """Whether this process is imprecise: transformers errs more than a machine may, or over the bound where ours fails."""
        return self.reference_error is not None and not self.reference_error <= (self._most if self.ok else self.bound)

    @property
    def _most(self) -> float:
        return MACHINE_RATIO * (self.explained or 0.0)

    @property
    def ratio(self) -> float:
        """Our error over what rounding explains, or over the bound."""
        unit = self.bound if self.explained is None else self.explained
        return self.error / unit if unit else (0.0 if self.error == 0 else float("inf"))

    @property
    def amount(self) -> str:
        """The error as text: a ratio of two errors, a count of differing entries, or an error."""
        if self.explained is not None:
            return f"× {self.ratio:.2f}"
        return f"{self.error:,.0f} differ" if self.bound == 0 else f"{self.error:.1e}"


@dataclass(frozen=True)
class Check:
    """One comparison at many points; ``kind`` is "exact", "mapping" or "rounding"."""

    id: str
    kind: str
    title: str
    dtype: str  # the dtype of the computation; "" if nothing was computed
    points: tuple[Point, ...] = ()
    skipped: str = ""  # why it was not run, or not finished

    @property
    def ok(self) -> bool:
        """Whether every point holds; a check without points holds only if it was skipped for a stated reason."""
        return bool(self.points or self.skipped) and all(point.ok for point in self.points)

    @property
    def worst(self) -> Point | None:
        """The first failing point, else the point nearest its bound."""
        return _worst(self.points)


def _worst(points: Iterable[Point]) -> Point | None:
    points = list(points)
    failed = next((point for point in points if not point.ok), None)
    return failed or max(points, key=lambda point: point.ratio, default=None)


@dataclass(frozen=True)
class Report(Printed):
    """The result of verify: ``model`` is ours, ``reference`` is the implementation that it was compared with."""

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
    record: RecordReport | None = None  # published numbers of the official weights, computed again
    stopped: str = ""  # why the run ended early: "interrupted", "stopped at the first difference"
    assumed: str = ""  # what the files do not say of the model, and both were given alike
    outlier: str = ""  # a weight that is far larger than the others

    @property
    def ok(self) -> bool:
        """Whether the run ended, every check holds (the models are equal), and every published number computed is reproduced.

        Not where this process computes imprecisely: then both models may err alike.
        """
        holds = not self.stopped and all(check.ok for check in self.checks) and self.imprecise is None
        return holds and (self.record is None or self.record.ok)

    @property
    def imprecise(self) -> Point | None:
        """The first point that shows that this process computes imprecisely, if no other check fails.

        In training, where a near-tie in a softmax may make one model's error large, only where ours errs as transformers' does.
        """
        if any(not check.ok for check in self.checks if check.kind != ROUNDING):
            return None
        points = ((check.id, point) for check in self.checks for point in check.points if point.imprecise)
        return next((point for id, point in points if id == "rounding" or point.of_the_machine), None)

    @property
    def verdict(self) -> str:
        """ "equal", "mismatch", "imprecise" (this process computes products imprecisely), or why the run ended early."""
        if self.ok:
            return "equal"
        if self.imprecise is not None:
            return "imprecise"
        return self.stopped if self.stopped and self.first_divergence is None else "mismatch"

    @property
    def first_divergence(self) -> Point | None:
        """The first point, in the order of computation, that does not hold."""
        return next((point for check in self.checks for point in check.points if not point.ok), None)

    def check(self, id: str) -> Check:
        """Return the check with this id, such as "gradients" or "rounding"."""
        return next(check for check in self.checks if check.id == id)

    def to_json(self) -> str:
        """Return every point of every check as JSON, with versions and the sha256 of every file."""
        first = self.first_divergence
        body = {
            "verdict": self.verdict,
            "ok": self.ok,
            "first_divergence": {"point": first.name, "layer": layer_of(first.name), "error": first.error} if first else None,
            "skipped": [check.id for check in self.checks if check.skipped],
            **vars(self),
            "seconds": round(self.seconds, 2),
            "checks": [{**vars(check), "ok": check.ok} for check in self.checks],
        }
        return as_json(body)

    def sections(self) -> Iterator[Section]:
        """Yield both models, a row per block, a row per check, and the verdict."""
        env = self.environment
        packages = " · ".join(f"{name} {number}" for name, number in env.versions.items() if name in ("torch", "transformers"))
        threads = f"{env.threads} thread{'s' * (env.threads != 1)}"
        settings = [f"{name}={value}" for name, value in env.settings.items()]
        kernels = " · ".join((env.processor, env.capability, env.blas, *settings))
        yield Section(note=("\n", bold(self.model), "  against  ", bold(self.reference)))
        here = f"{self.parameters:,} parameters · {packages} · {env.device}, {threads}\n{kernels}\n{self.coverage}\n"
        yield Section(note=dim(here))
        yield self._blocks()
        most = f"{FORWARD_RATIO:g} ({TRAINING_RATIO:g} in training)"
        ratios = f"Ratios (×) are our error over what rounding explains, at most {most}."
        yield Section(note=dim(f"Errors are relative to transformers in float64. {ratios} theirs: transformers'.\n"))
        yield self._checks()
        if self.outlier:
            yield Section(note=yellow(f"\n{self.outlier}"))
        if self.official is not None and self.official.model is not None:
            yield Section(note=dim(f"\nfiles: {self.official}"))
        if self.record is not None:
            yield from self.record.sections()
        yield from self._verdict()

    def _verdict(self) -> Iterator[Section]:
        skipped = [check.id for check in self.checks if check.skipped]
        end = f"; not run: {', '.join(skipped)}" if skipped else "", dim(f"  in {self.seconds:.1f} s"), "\n"
        first = self.first_divergence
        if self.stopped == INTERRUPTED and first is None:
            yield Section(note=("\n", Styled("INTERRUPTED", "bold yellow"), "  no difference so far", *end))
        elif self.imprecise is not None:
            yield Section(note=("\n", Styled("IMPRECISE", "bold red"), f"  {self._imprecision(self.imprecise)}", *end))
        elif all(check.ok for check in self.checks):
            points = "  at every point" + " that was run" * bool(skipped)
            yield Section(note=("\n", Styled("EQUAL", "bold green"), points, *end))
            machines = [point for check in self.checks for point in check.points if point.of_the_machine]
            if machines:
                yield Section(note=yellow(f"{self._machine(max(machines, key=lambda point: point.ratio))}\n"))
            if self.assumed:
                yield Section(note=yellow(f"{self.assumed}\n"))
            if self.record is not None and not self.record.ok:
                yield Section(note=(Styled("BUT NOT WHAT OTHERS RECORDED", "bold red"), "  of the official weights\n"))
        elif first is None:
            yield Section(note=("\n", Styled("DIFFERENT", "bold red"), "  a check without a point", *end))
        else:
            said = f": {first.amount}{self._by_rounding(first)}"
            yield Section(note=("\n", Styled("DIFFERENT", "bold red"), "  first at ", bold(first.name), said, *end))

    def _by_rounding(self, first: Point) -> str:
        """Return what a difference by rounding alone means; empty for any other."""
        if first.explained is None or not first.bound:
            return ""
        theirs = "" if first.reference_error is None else f"; transformers' is × {first.reference_error / first.explained:.2f}"
        most = f"what rounding to {self.environment.dtype} explains, at most × {first.bound / first.explained:g} is right"
        return f" {most}{theirs}. It is the same function in float64: something is computed less precisely"

    def _machine(self, point: Point) -> str:
        """Return by how much this machine rounds more than the account explains, in ours and in transformers' alike."""
        errors = f"{point.amount} what rounding explains (off by {point.error:.1e}, from each other by {point.apart:.1e})"
        return f"This machine rounds {self.environment.dtype} more than usual: at {point.name}, both are {errors}"

    def _imprecision(self, point: Point) -> str:
        """Return which setting makes this process compute imprecisely, as far as known."""
        env = self.environment
        settings = ", ".join(f"{name} = {value}" for name, value in env.settings.items())
        times = (point.reference_error or 0.0) / point.explained if point.explained else float("inf")
        error = f"transformers' own error at {point.name} is {times:,.1f} times what rounding explains"
        remedy = "unset it" if settings else "try another machine"
        here = f"Set here: {settings or 'nothing that is known to round'}; {remedy} and verify again"
        return f"this process computes {env.dtype} imprecisely: {error}, so nothing can be said of ours. {here}"

    def so_far(self, stage: str, height: int) -> "RenderableType":
        """Return what fits a terminal of ``height`` lines while the run goes on: the blocks, the checks, and the stage."""
        from rich.console import Group

        shown = [self._blocks()] if self.n_layer + len(self.checks) + 12 < height else []
        shown += [self._checks(), Section(note=("\n", dim(f"{self.seconds:.0f} s  {stage} …")))]
        return Group(*(part for section in shown for part in section.printed()))

    def _blocks(self) -> Section:
        """Return a row per block: its worst traced activations and gradients, by both rules."""
        checks, rows = {check.id: check for check in self.checks}, []
        for block in ["embed", *(f"h.{layer}" for layer in range(self.n_layer)), "head"]:
            row: list[Line] = [block]
            for id, cells in BLOCK_CELLS.items():
                points = checks[id].points if id in checks else ()
                worst = _worst(point for point in points if block_of(point.name) == block)
                row += ["" if worst is None else _cell(worst, what) for what in cells]
            rows.append(row)
        errors = numbers("float64\nworst", f"{self.environment.dtype}\nours", "\ntheirs", "\nratio")
        return Section(columns=("where", *errors, "\nat", *numbers("gradients\nfloat64", "\nratio")), rows=rows)

    def _checks(self) -> Section:
        rows = list[list[Line]]()
        for check in self.checks:
            title = check.id.removesuffix("-rounding"), dim(check.dtype), check.title
            if check.skipped and check.ok:
                so_far = f"{len(check.points)} points; " if check.points else "" if self.stopped == RUNNING else "not run: "
                rows.append([yellow("–"), *title, "", yellow(f"{so_far}{check.skipped}")])
                continue
            worst = None if check.kind == EXACT and check.ok else check.worst
            mark = Styled("✓", "green") if check.ok else Styled("✗", "bold red")
            rows.append([mark, *title, *(("", "") if worst is None else (worst.amount, dim(worst.name)))])
        return Section(columns=[Column(wrap=wrap) for wrap in (False, False, False, True, False, True)], rows=rows)


# Columns of the table of blocks: a check, and the cells for its worst point.
BLOCK_CELLS: dict[str, tuple[str, ...]] = {"activations": ("error",), "rounding": ("error", "theirs", "ratio", "at")}
BLOCK_CELLS |= {"gradients": ("error",), "gradients-rounding": ("ratio",)}


def _cell(point: Point, what: str) -> Line:
    if what == "theirs":
        return f"{point.reference_error:.1e}"
    if what == "at":
        return dim(part_of(point.name.partition(" (")[0]))
    text = f"{point.error:.1e}" if what == "error" else f"{point.ratio:.2f}"
    return text if point.ok else Styled(text, "bold red")
