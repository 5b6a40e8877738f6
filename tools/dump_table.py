"""Measure how often `gpt2 diagnose DUMP` is right, on dumps of the programs of tests/support/programs.

    python tools/dump_table.py                              # every fault, level and dtype: an hour on one core
    python tools/dump_table.py --sample 60 --level block    # sixty of them, drawn from a fixed seed
    python tools/dump_table.py --drawn 30                   # random pairs of faults, from logits alone
    python tools/dump_table.py --right 200                  # programs without a fault: how many are called faulty
    python tools/dump_table.py --only 'c: gelu-erf'         # one, with its whole diagnosis

NumPy, and C and JavaScript where gcc and node are installed. Random weights of the size of trained ones; nothing is fetched.
Names are shuffled and say nothing, and arrays that have nothing to do with the model are among the others. Each row on stderr as
it comes, then a table by language, level and dtype; the last line of stdout is JSON.

A fault whose effect on every dumped array is below four times the rounding of the right program's logits is *below rounding*:
then "equal" is right too, and it counts in that column alone unless a wrong cause is named.

Seconds of a dump are CPU seconds. The engine's limits of time are too, until twice as long has passed by the clock.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.faulty.scoring import Row
from support.programs import DTYPES, LANGUAGES, LEVELS, PROGRAMS, SIZES, Home, Program, missing, read_dump, shuffled
from support.programs.drawn import draw_pairs
from support.programs.reference import expected_logits
from support.programs.scoring import score_dump

import gpt2
from gpt2.port import deadline

deadline.SLOWEST = math.inf  # CPU time alone is the limit: the machine may be busy
VISIBLE = 4.0  # times the rounding
COLUMNS = ("dumps", "first", "all found", "located", "undetermined", "called equal", "failed", "below rounding")


@dataclass(frozen=True)
class Case:
    """A program, and how it stores and computes."""

    program: Program
    dtype: str
    compute: str

    @property
    def name(self) -> str:
        return f"{self.program.name}  [{self.program.level} {self.dtype}]"


@dataclass(frozen=True)
class Result:
    case: Case
    row: Row | None  # None: the diagnosis failed
    visible: bool
    said: str

    @property
    def wrong(self) -> bool:
        if not self.case.program.line:
            return self.row is None or self.row.verdict != "equal"
        if not self.visible and self.row is not None and self.row.verdict != "mismatch":
            return False
        return self.row is None or not self.row.first or bool(self.row.missed) or not self.row.located

    def counts(self) -> list[str]:
        """The columns in which it counts."""
        row = self.row
        if row is None:
            return ["dumps", "failed"]
        if not self.visible and not row.causes:
            return ["below rounding"]
        held = {
            "first": row.first,
            "all found": not row.missed,
            "located": row.located,
            "undetermined": row.verdict == "undetermined",
            "called equal": row.verdict == "equal",
        }
        return ["dumps", *(name for name, holds in held.items() if holds)]


class Bench:
    """The programs of one size: their home, our model, and how far right programs are from GPT-2 by rounding."""

    def __init__(self, folder: Path, size: str, tokens: int = 11, seed: int = 0) -> None:
        self.home = Home(folder, SIZES[size], tokens, seed)
        self.model: nn.Module = gpt2.load(str(self.home.model))
        self.memory: dict[object, object] = {}

    def rounding(self, case: Case) -> float:
        """The error of the right program's logits, over their root mean square."""
        key = case.program.language, case.dtype, case.compute
        if key not in self.memory:
            right = Program(case.program.language, "", "logits")
            found = next(a for a in read_dump(self.home.dump(right, case.dtype, case.compute)).values() if a.dtype.kind == "f")
            expected = expected_logits(right, self.home).numpy()
            expected = expected if found.ndim == 3 else expected[0]
            self.memory[key] = float(np.abs(found - expected).max() / np.sqrt((expected**2).mean()))
        return self.memory[key]

    def effect(self, program: Program) -> float:
        """The largest change of a dumped array by the faults, over its root mean square; infinite if one is gone."""
        key = replace(program, line="")
        if key not in self.memory:
            self.memory[key] = read_dump(self.home.dump(key))
        right, found = self.memory[key], read_dump(self.home.dump(program))
        if right.keys() != found.keys():
            return float("inf")
        changes = [0.0]
        for name, array in right.items():
            if array.dtype.kind == "f" and array.size and (size := np.sqrt((array**2).mean())):
                changes.append(float(np.abs(found[name] - array).max() / size))
        return max(changes)

    def run(self, case: Case, seed: int, whole: bool) -> Result:
        visible = self.effect(case.program) > VISIBLE * self.rounding(case) or not case.program.line
        dump = shuffled(self.home.dump(case.program, case.dtype, case.compute, foreign=seed), seed)
        start = time.process_time()
        try:
            diagnosis = gpt2.diagnose(str(dump), self.model)
        except Exception as error:
            if whole:
                traceback.print_exc()
            return Result(case, None, visible, f"{type(error).__name__}: {str(error)[:150]}")
        finally:
            dump.unlink()
        took = time.process_time() - start
        row = score_dump(case.program, diagnosis, self.home.config, took, took)
        if whole:
            print(f"\n{case.name}\n{diagnosis.table()}\n", file=sys.stderr)
        said = f"{row.verdict} first at {row.point}: {' | '.join(row.causes) or 'no cause'}"
        return Result(case, row, visible, said)


def computes(language: str, dtype: str) -> str:
    """NumPy computes as it stores, C in float32, JavaScript in float64 for what it stores as float16."""
    if language == "c" or dtype == "float32":
        return "float32"
    return "float32" if language == "numpy" and dtype == "float16" else "float64"


def cases(options: argparse.Namespace, bench: Bench) -> list[Case]:
    levels = options.level or (["logits"] if options.drawn else LEVELS)
    languages = [name for name in options.language or LANGUAGES if not missing(name)]
    if options.drawn:
        share = -(-options.drawn // (len(languages) * len(levels)))
        programs = [
            one
            for language in languages
            for level in levels
            for one in draw_pairs(share, options.seed, bench.home, language, level)
        ]
    else:
        chosen = [one for one in PROGRAMS.values() if one.language in languages]
        if options.only:
            chosen = [one for one in chosen if any(fnmatchcase(one.name, pattern) for pattern in options.only)]
        programs = [replace(one, level=level) for one in chosen for level in levels]
    dtypes = options.dtype or (["float32"] if options.drawn else DTYPES)
    found = [Case(program, dtype, computes(program.language, dtype)) for program in programs for dtype in dtypes]
    if options.sample and options.sample < len(found):
        found = random.Random(options.seed).sample(found, options.sample)
    return found


def right_cases(n: int, options: argparse.Namespace) -> list[tuple[str, int, int, Case]]:
    """(size, tokens, seed of the weights, case) of ``n`` programs without a fault, every kind in turn."""
    languages = [name for name in options.language or LANGUAGES if not missing(name)]
    kinds = [(a, b, c) for b in options.level or LEVELS for c in options.dtype or DTYPES for a in languages]
    draw, found = random.Random(options.seed), []
    for number in range(n):
        language, level, dtype = kinds[number % len(kinds)]
        compute = draw.choice(("float16", "float32", "float64") if language == "numpy" else ("float32", "float64"))
        size, tokens = draw.choice(list(SIZES)), draw.choice((5, 11, 16))
        found.append((size, tokens, draw.randrange(5), Case(Program(language, "", level), dtype, compute)))
    return found


def show(results: list[Result]) -> None:
    counts: dict[tuple[str, str, str], Counter] = {}
    for result in results:
        program, dtype = result.case.program, result.case.dtype
        for key in ((program.language, program.level, dtype), ("all", program.level, dtype), ("all", program.level, "all")):
            counts.setdefault(key, Counter()).update(result.counts())
            if result.row is not None:
                counts[key]["seconds"] += result.row.seconds
    print(f"\n{'':30}" + "".join(f"{head:>15}" for head in (*COLUMNS, "s each")), file=sys.stderr)
    for key in sorted(counts, key=lambda key: (key[0] == "all", key[2] == "all", LEVELS.index(key[1]), key)):
        counted = counts[key]
        ran = counted["dumps"] + counted["below rounding"] - counted["failed"]
        numbers = "".join(f"{counted[head]:15}" for head in COLUMNS) + f"{counted['seconds'] / max(ran, 1):15.2f}"
        print(f"{' '.join(key):30}" + numbers, file=sys.stderr)


def failure(result: Result) -> str:
    row, wanted = result.case.program, result.case.program.causes
    right = "; ".join(f"{word} = {' or '.join(ids)}" for word, ids in wanted.items()) or "nothing wrong"
    return f"{row.name} [{row.level} {result.case.dtype}, {result.case.compute}]: said {result.said}; right: {right}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="tiny", choices=SIZES)
    parser.add_argument("--language", nargs="+", choices=LANGUAGES)
    parser.add_argument("--level", nargs="+", choices=LEVELS)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these programs (* for anything), with the whole diagnosis")
    parser.add_argument("--sample", type=int, metavar="N", help="so many dumps, drawn from a fixed seed")
    parser.add_argument("--drawn", type=int, metavar="N", help="instead, so many pairs of faults drawn at random")
    parser.add_argument("--right", type=int, metavar="N", help="instead, so many dumps of programs without a fault")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--failures", metavar="FILE", help="write a line for each wrong answer")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no other dump after so many")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: list[Result] = []
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        benches: dict[tuple[str, int, int], Bench] = {}

        def bench(*key) -> Bench:
            if key not in benches:
                benches[key] = Bench(Path(name) / "-".join(map(str, key)), *key)
            return benches[key]

        if options.right:
            todo = [(bench(size, tokens, seed), case) for size, tokens, seed, case in right_cases(options.right, options)]
        else:
            todo = [(bench(options.size, 11, 0), case) for case in cases(options, bench(options.size, 11, 0))]
        for number, (one, case) in enumerate(todo):
            if time.perf_counter() - start > options.seconds:
                print(f"stopped after {number} of {len(todo)} dumps", file=sys.stderr)
                break
            result = one.run(case, number, bool(options.only))
            results.append(result)
            mark = "WRONG " if result.wrong else "" if result.visible else "below rounding "
            took = result.row.seconds if result.row else 0.0
            print(f"{took:6.2f} s  {mark}{case.name}  {result.said}", file=sys.stderr, flush=True)
    show(results)
    wrong = [failure(result) for result in results if result.wrong]
    if options.failures:
        Path(options.failures).write_text("".join(line + "\n" for line in wrong))
    total = Counter(column for result in results for column in result.counts())
    seconds = [result.row.seconds for result in results if result.row]
    summary = {column.replace(" ", "_"): total[column] for column in COLUMNS}
    summary |= {"with_a_flaw": len(wrong), "seconds_worst": round(max(seconds, default=0.0), 2)}
    summary["seconds_mean"] = round(sum(seconds) / max(len(seconds), 1), 2)
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
