"""The yardstick of `gpt2 diagnose DUMP`: every set of programs of tests/support/programs, each fault once, at each level.

    python tools/sets.py new.jsonl --sample 6 --against tools/sets.jsonl  # six of each set and level, beside older answers
    python tools/sets.py new.jsonl --set eighth --level full --processes 2  # one set with most values
    python tools/sets.py new.jsonl --set first --program numpy --fault 'gelu-erf*' --show  # and each diagnosis in full
    python tools/sets.py new.jsonl --right                                # programs without a fault: all must be equal
    python tools/sets.py tools/sets.jsonl --processes 2                   # whatever that file does not answer yet

The file of answers has a line of JSON per dump; its first line names the columns. An answer that is there is not made again, so
a run may be stopped at any time. Another engine needs another file. `--against` runs only what the older file answers, and
prints each dump whose answer changed, then a table by set and level; the last line of stdout is JSON.

Levels: `full` (most values), `block` (one tensor of each block), `logits`, `pairs` (two faults, logits). Dtype, model and seed
are drawn from the dump's name; so is the order within a set and level, so that any beginning is a sample. A fault that changes
the logits (in float64) by less than four times the rounding of the right program's is not counted. The set `ports` has the
modules of tests/support/faulty, by their logits. Seconds are CPU seconds, and so is the engine's limit of time.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.faulty import bed as ports
from support.faulty.scoring import blocks
from support.programs import (
    Program,
    eighth,
    eleventh,
    fifth,
    first,
    fourth,
    ninth,
    second,
    seventh,
    sixth,
    tenth,
    third,
    thirteenth,
    twelfth,
)
from support.programs.scoring import score_dump

import gpt2
from gpt2.port import deadline

SETS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "first": (first, first.Bed),
    "second": (second, second.Bed),
    "third": (third, third.ListBed),
    "fourth": (fourth, fourth.RustBed),
    "fifth": (fifth, fifth.FifthBed),
    "sixth": (sixth, sixth.SixthBed),
    "seventh": (seventh, seventh.SeventhBed),
    "eighth": (eighth, eighth.EighthBed),
    "ninth": (ninth, ninth.NinthBed),
    "tenth": (tenth, tenth.TenthBed),
    "eleventh": (eleventh, eleventh.EleventhBed),
    "twelfth": (twelfth, twelfth.TwelfthBed),
    "thirteenth": (thirteenth, thirteenth.ThirteenthBed),
    "ports": (ports, ports.Bed),
}
LEVELS = ("full", "block", "logits", "pairs")
DTYPES = ("float32", "float16", "float64")
LIMIT = 60  # CPU seconds for one dump; the engine's own limit is below
VISIBLE = 4.0  # times the rounding
HIDDEN = "below rounding"  # in place of a verdict: the fault shows in no dtype and no model


@dataclass(frozen=True)
class Answer:
    """A dump and what was said of it, as a line of the file.

    ``first``: the first cause is a right one (without a fault: the verdict is "equal"); ``complete``: each fault has a right
    cause; ``placed``: the right causes name exactly the right blocks, None if the set gives no block. ``size`` numbers the model.
    """

    set: str
    program: str
    faults: tuple[str, ...]
    level: str
    dtype: str  # "" until it is drawn
    size: int = 0
    seed: int = 0
    verdict: str = ""
    ids: tuple[str, ...] = ()
    first: bool = False
    complete: bool = False
    placed: bool | None = None
    seconds: float = 0.0

    @property
    def key(self) -> str:
        """Name the dump: with its dtype only where nothing else tells right programs apart."""
        return "/".join((self.set, self.program, self.level, " + ".join(self.faults) or f"right {self.dtype}"))

    @property
    def drawn(self) -> int:
        """Return a number from the name: the same on any machine."""
        return int(hashlib.sha256(self.key.encode()).hexdigest()[:8], 16)

    @property
    def outcome(self) -> str:
        if self.first:
            return "right first"
        if self.verdict in ("equal", "failed"):
            return "called equal" if self.verdict == "equal" else "failed"
        return "wrong first" if self.ids else "no cause"

    @property
    def worth(self) -> tuple[int, bool, bool]:
        """Return what makes an answer better than another one."""
        return (2 if self.first else 1 if self.outcome == "no cause" else 0), self.complete, self.placed is not False

    def line(self) -> str:
        return json.dumps([int(one) if isinstance(one, bool) else one for one in asdict(self).values()], separators=(",", ":"))


HEAD = json.dumps([field.name for field in fields(Answer)])


def read(path: str | Path) -> dict[str, Answer]:
    """Return a file's answers by key; none if there is no file."""
    if not Path(path).exists():
        return {}
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()[1:]]
    answers = [Answer(*(tuple(one) if isinstance(one, list) else one for one in row)) for row in rows]
    return {answer.key: answer for answer in answers}


def pairs(module: Any, program: str) -> Iterable[tuple[str, ...]]:
    """Return eight pairs of a program's faults: its author's, or drawn among those with different ids."""
    if hasattr(module, "PAIRS"):
        return module.PAIRS[program]
    faults = {one: ids for one, ids in module.FAULTS[program].items() if not one.startswith(getattr(module, "APART", ()))}
    apart = [pair for pair in itertools.combinations(sorted(faults), 2) if not set(faults[pair[0]]) & set(faults[pair[1]])]
    return random.Random(program).sample(apart, min(8, len(apart)))


def dumps(options: argparse.Namespace) -> list[Answer]:
    """Return the dumps that are asked for, the first of each set and level first."""
    ranked: list[tuple[int, Answer]] = []
    for name, level in itertools.product(options.set, options.level):
        module, found = SETS[name][0], list[Answer]()
        if module is ports and level not in ("logits", "pairs"):
            continue
        for program in module.FAULTS:
            if lacks := missing(name, program):
                print(f"{name}/{program} is not run: {lacks}", file=sys.stderr)
                continue
            faults = pairs(module, program) if level == "pairs" else [(fault,) for fault in module.FAULTS[program]]
            if not options.right:
                found += [Answer(name, program, tuple(some), level, "") for some in faults]
            if level != "pairs" and not options.fault:
                found += [Answer(name, program, (), level, dtype) for dtype in DTYPES]
        if options.program:
            found = [one for one in found if one.program in options.program]
        if options.fault:
            found = [one for one in found if any(fnmatchcase(fault, word) for fault in one.faults for word in options.fault)]
        ranked += enumerate(sorted(found, key=lambda one: one.drawn)[: options.sample])
    return [one for _, one in sorted(ranked, key=lambda each: each[0])]


@functools.cache
def missing(name: str, program: str) -> str | None:
    """Return what this machine lacks for a program, or None."""
    if name == "fourth":
        return None if fourth.compiler() else "no rustc that runs"
    if name == "fifth":
        return fifth.missing() if program == "java" else None
    if name in ("second", "third", "ports"):
        return first.missing("javascript") if program == "nested" else None
    return SETS[name][0].missing(program)


class Bench:
    """The models and programs of one process; one thread, and no limit by the clock."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder) / str(os.getpid())
        self.bed, self.model, self.right = map(functools.cache, (self._bed, self._model, self._right))
        torch.set_num_threads(1)
        deadline.SLOWEST = math.inf

    def _bed(self, name: str, size: int) -> Any:
        module, make = SETS[name]
        return make(self.folder / name / str(size), module.SHAPES[size])

    def _model(self, name: str, size: int) -> gpt2.GPT2:
        return gpt2.load(str(self.bed(name, size).model))

    @torch.no_grad()
    def _right(self, name: str, size: int, program: str, dtype: str) -> tuple[np.ndarray, float]:
        """Return our own logits in float64, and how far those of the right program are from them."""
        ids, right = self.bed(name, size).run(program, (), "float64" if dtype == "float64" else "float32")
        model = gpt2.load(str(self.bed(name, size).model)).double()
        truth = model(torch.from_numpy(np.atleast_2d(ids))).numpy().reshape(*ids.shape, -1)
        return truth, far(right["logits"].astype(dtype), truth)

    def visible(self, dump: Answer, dtype: str, size: int) -> bool:
        """Return whether each fault changes the logits, and each changes those that the others give."""
        truth, rounding = self.right(dump.set, size, dump.program, dtype)
        parts = [dump.faults, *([fault] for fault in dump.faults if len(dump.faults) > 1)]
        whole, *alone = [self.bed(dump.set, size).run(dump.program, part)[1]["logits"] for part in parts]
        return all(
            far(one, other) > VISIBLE * rounding for one in (whole, *alone) for other in (truth, whole) if one is not other
        )

    def answer(self, dump: Answer) -> tuple[Answer, str]:
        """Run a program and diagnose its dump, in the first dtype and model in which its faults show; also the text to show."""
        draw, sizes = random.Random(dump.drawn), range(len(SETS[dump.set][0].SHAPES))
        kinds = list(itertools.product([dump.dtype] if dump.dtype else DTYPES, sizes))
        draw.shuffle(kinds)
        seen = next((kind for kind in kinds if not dump.faults or self.visible(dump, *kind)), None)
        if seen is None:
            return replace(dump, verdict=HIDDEN), ""
        named = replace(dump, dtype=seen[0], size=seen[1], seed=dump.drawn % 100_000)
        level = "logits" if dump.level == "pairs" else dump.level
        path = self.bed(dump.set, named.size).dump(dump.program, dump.faults, level, named.dtype, named.seed)
        signal.signal(signal.SIGPROF, too_long)
        signal.setitimer(signal.ITIMER_PROF, LIMIT)
        start = time.process_time()
        try:
            said = gpt2.diagnose(str(path), self.model(dump.set, named.size))
            judged = self.judged(named, level, said)
            text = f"{named.key} [{named.dtype}]\n{said.table()}"
        except Exception as error:
            judged = replace(named, verdict="failed", ids=(type(error).__name__,))
            text = f"{named.key} [{named.dtype}]\n{traceback.format_exc()}"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            path.unlink()
        return replace(judged, seconds=round(time.process_time() - start, 1)), text

    def judged(self, dump: Answer, level: str, said: Any) -> Answer:
        """Return ``dump`` with its verdict, its causes, and whether they are right: the first one, all of them, their blocks."""
        dump = replace(dump, verdict=said.verdict, ids=tuple(dict.fromkeys(cause.id for cause in said.causes)))
        if not dump.faults:
            return replace(dump, first=said.verdict == "equal", complete=not said.causes)
        module, layers = SETS[dump.set][0], len(self.model(dump.set, dump.size).h)
        found = [[one for one in said.causes if one.id in module.FAULTS[dump.program][fault]] for fault in dump.faults]
        placed = None
        if module is first:
            line = Program(dump.program, " ".join(dump.faults), level)
            placed = score_dump(line, said, self.bed(dump.set, dump.size).home.config, 0, 0).located
        elif hasattr(module, "LISTS"):
            places = [module.LISTS[dump.program][fault][1].replace("h.-1", f"h.{layers - 1}") for fault in dump.faults]
            if all(place.startswith("h.") for place in places):
                said_blocks = [blocks([cause.where for cause in causes], layers) for causes in found]
                placed = [blocks([place], layers) for place in places] == said_blocks
        return replace(
            dump, first=any(said.causes[:1] == tuple(some[:1]) for some in found if some), complete=all(found), placed=placed
        )


def far(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max()) if one.shape == other.shape else math.inf


def too_long(*_: object) -> None:
    raise TimeoutError(f"more than {LIMIT} s")


BENCH: list[Bench] = []  # of this process


def prepare(folder: str) -> None:
    BENCH.append(Bench(folder))


def answered(dump: Answer) -> tuple[Answer | None, str]:
    """Return a dump's answer; None where the program did not run, so that it is run again another time."""
    try:
        return BENCH[0].answer(dump)
    except Exception as error:
        return None, f"{dump.key}: the program did not run: {error}"


def compare(now: dict[str, Answer], before: dict[str, Answer]) -> None:
    """Print each dump whose answer changed: worse, better, or another one that is as good."""
    lines = []
    for key, one in now.items():
        old = before.get(key, one)
        if (one.verdict, one.ids, one.worth) != (old.verdict, old.ids, old.worth):
            word = "worse" if one.worth < old.worth else "better" if one.worth > old.worth else "other"
            said = [
                f"{each.outcome}{'' if each.complete else ', not all'} ({' | '.join(each.ids) or each.verdict})"
                for each in (old, one)
            ]
            lines.append(f"{word:7} {key} [{one.dtype}]: {said[0]} -> {said[1]}")
    print("\n".join(sorted(lines, key=lambda line: ("worse", "other", "better").index(line.split()[0]))))


COLUMNS = ("right first", "wrong first", "no cause", "called equal", "failed", "complete", "placed", "s each")


def counted(answers: list[Answer]) -> list[float]:
    outcomes = Counter(one.outcome for one in answers)
    placed = sum(one.placed is not False and one.complete for one in answers)
    seconds = sum(one.seconds for one in answers) / len(answers)
    return [*(outcomes[name] for name in COLUMNS[:5]), sum(one.complete for one in answers), placed, round(seconds, 1)]


def table(now: dict[str, Answer], before: dict[str, Answer]) -> dict[str, dict[str, Any]]:
    """Print counts by set and level, in brackets the older ones of the same dumps; return the totals by level."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for key, one in now.items():
        if one.verdict != HIDDEN and (not before or key in before):
            for name in (one.set, "all"):
                groups[name, one.level if one.faults else "right"].append(key)
    print(f"\n{'':20}{'dumps':>7}" + "".join(f"{name:>15}" for name in COLUMNS))
    totals = {}
    for (name, level), keys in sorted(groups.items(), key=lambda each: [*SETS, "all"].index(each[0][0])):
        new = counted([now[key] for key in keys])
        old = counted([before[key] for key in keys]) if before else new
        cells = (f"{one:g}" if one == other else f"{one:g} ({other:g})" for one, other in zip(new, old, strict=True))
        print(f"{name + ' ' + level:20}{len(keys):7}" + "".join(f"{cell:>15}" for cell in cells))
        if name == "all":
            totals[level] = {"dumps": len(keys), **dict(zip(COLUMNS, new, strict=True))}
    return totals


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("answers", type=Path, metavar="ANSWERS", help="the file of answers, to which new ones are added")
    parser.add_argument("--set", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--level", nargs="+", choices=LEVELS, default=list(LEVELS))
    parser.add_argument("--program", nargs="+", metavar="NAME", help="only these programs")
    parser.add_argument("--fault", nargs="+", metavar="NAME", help="only these faults (* for anything)")
    parser.add_argument("--right", action="store_true", help="only programs without a fault")
    parser.add_argument("--sample", type=int, metavar="N", help="the first N dumps of each set and level")
    parser.add_argument("--against", type=Path, metavar="FILE", help="older answers: run only those dumps, and show what changed")
    parser.add_argument("--show", action="store_true", help="print each diagnosis in full")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="one thread each")
    options = parser.parse_args()
    if options.against and not options.against.exists():
        parser.error(f"--against {options.against}: there is no such file")
    now, before = read(options.answers), read(options.against) if options.against else {}
    asked = [one for one in dumps(options) if not before or one.key in before]
    todo = [one for one in asked if one.key not in now]
    print(f"{len(asked)} dumps are asked for, {len(asked) - len(todo)} are answered", file=sys.stderr)
    if not now:
        options.answers.write_text(HEAD + "\n")
    with (
        tempfile.TemporaryDirectory() as folder,
        multiprocessing.get_context("spawn").Pool(options.processes, prepare, [folder]) as pool,
        options.answers.open("a") as file,
    ):
        for answer, text in pool.imap_unordered(answered, todo):
            if answer is not None:
                now[answer.key] = answer
                file.write(answer.line() + "\n")
                file.flush()
                print(
                    f"{answer.seconds:5.1f} s  {answer.outcome:13} {answer.key} [{answer.dtype}]  {' | '.join(answer.ids)}",
                    file=sys.stderr,
                )
            if answer is None or options.show:
                print(f"{text}\n", file=sys.stderr)
    now = {one.key: now[one.key] for one in asked if one.key in now}
    if before:
        compare(now, before)
    print(json.dumps(table(now, before)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
