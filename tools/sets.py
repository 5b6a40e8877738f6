"""The yardstick of `gpt2 diagnose DUMP`: every set of programs of tests/support/programs, each fault once, at each level.

    python tools/sets.py new.jsonl --sample 6 --against tools/sets.jsonl  # six of each level, beside older answers
    python tools/sets.py new.jsonl --level full --processes 2              # with most values
    python tools/sets.py new.jsonl --program chunked --fault 'one key*' --show  # and each diagnosis in full
    python tools/sets.py new.jsonl --fault ''                              # programs without a fault: all must be equal
    python tools/sets.py copy.jsonl --processes 2  # whatever a copy of tools/sets.jsonl does not answer yet

The file of answers has a line of JSON per dump; its first line names the columns. An answer that is there is not made again, so
a run may be stopped at any time. Another engine needs another file. `--against` runs only what the older file answers, and
prints each dump whose answer changed, then a table by set and level; the last line of stdout is JSON. gpt2/port/RESULTS.md says
how today's engine answers the sets that have left the tree.

Levels: `full` (most values), `block` (one tensor of each block), `logits`. Dtype, model and seed
are drawn from the dump's name; so is the order within a set and level, so that any beginning is a sample. A fault that changes
the logits (in float64) by less than four times the rounding of the right program's is not counted. Seconds are CPU seconds.
"""

import argparse
import hashlib
import itertools
import json
import math
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.faulty.scoring import blocks
from support.programs import fourteenth

import gpt2

SETS, BEDS = {"fourteenth": fourteenth}, {"fourteenth": fourteenth.FourteenthBed}
LEVELS = ("full", "block", "logits")
DTYPES = ("float32", "float16", "float64")
LIMIT = 60  # CPU seconds for one dump; the engine's own limit is below
VISIBLE = 4.0  # times the rounding
HIDDEN = "below rounding"  # in place of a verdict: the fault shows in no dtype and no model
OUTCOMES = ("right first", "wrong first", "no cause", "called equal", "failed")


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
    dtype: str = ""  # "" until it is drawn
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
        """The dump's name: with its dtype only where nothing else tells right programs apart."""
        return "/".join((self.set, self.program, self.level, " + ".join(self.faults) or f"right {self.dtype}"))

    @property
    def drawn(self) -> int:
        """A number from the name: the same on any machine."""
        return int(hashlib.sha256(self.key.encode()).hexdigest()[:8], 16)

    @property
    def outcome(self) -> str:
        others = {"equal": "called equal", "failed": "failed"}
        return "right first" if self.first else others.get(self.verdict, "wrong first" if self.ids else "no cause")

    @property
    def worth(self) -> tuple[int, bool, bool]:
        """What makes an answer better than another one."""
        return (2 if self.first else self.outcome == "no cause"), self.complete, self.placed in (None, True)


def read(path: Path) -> dict[str, Answer]:
    """Return a file's answers by key; none if there is no file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()[1:]] if path.exists() else []
    answers = [Answer(*(tuple(one) if isinstance(one, list) else one for one in row)) for row in rows]
    return {answer.key: answer for answer in answers}


def add(path: Path, answer: Answer) -> None:
    """Write a line at the end of a file of answers; first the names of the columns, if it is new."""
    head = "" if path.exists() else json.dumps([field.name for field in fields(Answer)]) + "\n"
    row = [int(one) if isinstance(one, bool) else one for one in asdict(answer).values()]
    with path.open("a") as file:
        file.write(head + json.dumps(row, separators=(",", ":")) + "\n")


def dumps(options: argparse.Namespace) -> list[Answer]:
    """Return the dumps that are asked for, the first of each set and level first."""
    ranked = list[tuple[int, Answer]]()
    for name, level in itertools.product(options.set, options.level):
        module, found = SETS[name], list[Answer]()
        for program in module.FAULTS:
            found += [Answer(name, program, (fault,), level) for fault in module.FAULTS[program]]
            found += [Answer(name, program, (), level, dtype) for dtype in DTYPES]
        wanted = [(one, " + ".join(one.faults)) for one in found if one.program in (options.program or [one.program])]
        found = [one for one, word in wanted if any(word == name or fnmatchcase(word, name) for name in options.fault)]
        ranked += enumerate(sorted(found, key=lambda one: one.drawn)[: options.sample])
    return [one for _, one in sorted(ranked, key=lambda each: each[0])]


@cache
def bed_of(name: str, size: int) -> Any:
    return BEDS[name](Path(tempfile.mkdtemp()) / "bed", SETS[name].SHAPES[size])


@cache
def model_of(name: str, size: int) -> gpt2.GPT2:
    return gpt2.load(str(bed_of(name, size).model))


@cache
@torch.no_grad()
def truth_and_rounding(name: str, size: int, program: str, dtype: str) -> tuple[np.ndarray, float]:
    """Return our own logits in float64, and how far those of the right program are from them."""
    ids, right = bed_of(name, size).run(program, (), "float64" if dtype == "float64" else "float32")
    truth = gpt2.load(str(bed_of(name, size).model)).double()(torch.from_numpy(ids)).numpy()
    return truth, far(right["logits"].astype(dtype), truth)


def far(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max()) if one.shape == other.shape else math.inf


def visible(dump: Answer) -> bool:
    """Return whether the fault changes the logits."""
    truth, rounding = truth_and_rounding(dump.set, dump.size, dump.program, dump.dtype)
    found = bed_of(dump.set, dump.size).run(dump.program, dump.faults)[1]["logits"]
    return far(found, truth) > VISIBLE * rounding


def too_long(*_: object) -> None:
    raise TimeoutError(f"more than {LIMIT} s")


def prepare(folder: str) -> None:
    """Let this process use one thread, and a folder that the main process removes."""
    tempfile.tempdir = folder
    torch.set_num_threads(1)
    signal.signal(signal.SIGPROF, too_long)


def answered(dump: Answer) -> tuple[Answer | None, str]:
    """Run a program and diagnose its dump, in the first dtype and model in which its faults show.

    Returns the answer and the diagnosis in full; no answer where the program itself did not run.
    """
    sizes = range(len(SETS[dump.set].SHAPES))
    kinds = [replace(dump, dtype=dtype, size=size) for dtype in ([dump.dtype] if dump.dtype else DTYPES) for size in sizes]
    random.Random(dump.drawn).shuffle(kinds)
    try:
        kind = next((kind for kind in kinds if not kind.faults or visible(kind)), None)
        if kind is None:
            return replace(dump, verdict=HIDDEN), ""
        dump = replace(kind, seed=dump.drawn % 100_000)
        path = bed_of(dump.set, dump.size).dump(dump.program, dump.faults, dump.level, dump.dtype, dump.seed)
    except Exception as error:
        return None, f"{dump.key}: the program did not run: {error}"
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    start = time.process_time()
    try:
        said = gpt2.diagnose(str(path), model_of(dump.set, dump.size))
    except Exception as error:
        said, text, dump = None, traceback.format_exc(), replace(dump, verdict="failed", ids=(type(error).__name__,))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        path.unlink()
    dump = replace(dump, seconds=round(time.process_time() - start, 1))
    if said is not None:
        dump, text = judged(dump, said), said.table()
    return dump, f"{dump.key} [{dump.dtype}]\n{text}\n"


def answers(todo: list[Answer], processes: int) -> Iterator[tuple[Answer | None, str]]:
    """Yield what :func:`answered` returns, as it comes."""
    if todo:
        with tempfile.TemporaryDirectory() as folder, get_context("spawn").Pool(processes, prepare, [folder]) as pool:
            yield from pool.imap_unordered(answered, todo)


def judged(dump: Answer, said: Any) -> Answer:
    """Return ``dump`` with its verdict, its causes, and whether they are right: the first one, all of them, their blocks."""
    dump = replace(dump, verdict=said.verdict, ids=tuple(dict.fromkeys(cause.id for cause in said.causes)))
    if not dump.faults:
        return replace(dump, first=said.verdict == "equal", complete=not said.causes)
    module, config = SETS[dump.set], model_of(dump.set, dump.size).config
    found = [[one for one in said.causes if one.id in module.FAULTS[dump.program][fault]] for fault in dump.faults]
    places = [module.LISTS[dump.program][fault][1] for fault in dump.faults]
    placed = None
    if all(place.startswith("h.") for place in places):
        named = [blocks([cause.where for cause in causes], config.n_layer) for causes in found]
        placed = named == [blocks([place], config.n_layer) for place in places]
    begins = bool(said.causes) and any(said.causes[0] in causes for causes in found)
    return replace(dump, first=begins, complete=all(found), placed=placed)


def compare(now: dict[str, Answer], before: dict[str, Answer]) -> None:
    """Print each dump whose answer changed: worse, better, or another one that is as good."""
    lines: dict[str, list[str]] = {"worse": [], "other": [], "better": []}
    for key, one in now.items():
        old = before[key]
        word = "worse" if one.worth < old.worth else "better" if one.worth > old.worth else "other"
        said = [f"{each.outcome}{'' if each.complete else ', not all'} ({' | '.join(each.ids)})" for each in (old, one)]
        if word != "other" or (one.verdict, one.ids) != (old.verdict, old.ids):
            lines[word].append(f"{word:7} {key} [{one.dtype}]: {said[0]} -> {said[1]}")
    counts = ", ".join(f"{len(found)} {word}" for word, found in lines.items())
    print("\n".join([*(line for found in lines.values() for line in sorted(found)), f"of {len(now)} answers: {counts}\n"]))


def counted(answers: list[Answer]) -> dict[str, float]:
    outcomes = Counter(one.outcome for one in answers)
    complete = [one for one in answers if one.complete]
    counts = {name: outcomes[name] for name in OUTCOMES} | {"complete": len(complete)}
    counts["placed"] = sum(one.placed in (None, True) for one in complete)
    return counts | {"s each": round(sum(one.seconds for one in answers) / len(answers), 1)}


def table(now: dict[str, Answer], before: dict[str, Answer]) -> dict[str, dict[str, float]]:
    """Print counts by set and level, in brackets the older ones of the same dumps; return the totals by level."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for key, one in now.items():
        for name in (one.set, "all") if one.verdict != HIDDEN else ():
            groups[name, one.level if one.faults else "right"].append(key)
    print(f"{'':20}{'dumps':>7}" + "".join(f"{name:>13}" for name in (*OUTCOMES, "complete", "placed", "s each")))
    totals = {}
    for (name, level), keys in sorted(groups.items(), key=lambda each: [*SETS, "all"].index(each[0][0])):
        new = counted([now[key] for key in keys])
        old = counted([before[key] for key in keys]) if before else new
        cells = [f"{new[one]:g}" + (f" ({old[one]:g})" if new[one] != old[one] else "") for one in new]
        print(f"{name + ' ' + level:20}{len(keys):7}" + "".join(f"{cell:>13}" for cell in cells))
        if name == "all":
            totals[level] = {"dumps": len(keys), **new}
    return totals


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("answers", type=Path, metavar="ANSWERS", help="the file of answers, to which new ones are added")
    parser.add_argument("--set", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--level", nargs="+", choices=LEVELS, default=list(LEVELS))
    parser.add_argument("--program", nargs="+", metavar="NAME", help="only these programs")
    parser.add_argument(
        "--fault", nargs="+", metavar="NAME", default=["*"], help="only these faults (* for anything, '' for none)"
    )
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
    for answer, text in answers(todo, options.processes):
        if answer is not None:
            said = f"{answer.outcome:13} {answer.key} [{answer.dtype}]  {' | '.join(answer.ids)}"
            print(f"{answer.seconds:5.1f} s  {said}", file=sys.stderr)
            now[answer.key] = answer
            add(options.answers, answer)
        if answer is None or options.show:
            print(text, file=sys.stderr)
    now = {one.key: now[one.key] for one in asked if one.key in now}
    if before:
        compare(now, before)
    print(json.dumps(table(now, before)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
