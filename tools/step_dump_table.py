"""Measure how often `gpt2.diagnose` is right on dumps of training steps that a program outside of torch wrote.

    python tools/step_dump_table.py                          # every fault, at each level of dump
    python tools/step_dump_table.py --levels usual --dtype float16 --layout flat
    python tools/step_dump_table.py --levels moments --layout apart  # stacked, q, k and v apart, with moments: as in JAX

A fault counts at the levels whose arrays show it; a dump that shows none must be equal. A line for each flaw on stderr, then a
table; the last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.step_programs import FAULTS, LAYOUTS, LEVELS, Dumped
from support.step_programs.scoring import score


def runs(options: argparse.Namespace) -> Iterator[Dumped]:
    """The dumps that are asked for."""
    compute = "float64" if options.dtype == "float64" else "float32"
    for level in options.levels:
        for line in options.only or ["", *FAULTS]:
            yield Dumped(line, level, options.layout, options.dtype, compute)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS))
    parser.add_argument("--layout", choices=LAYOUTS, default="plain")
    parser.add_argument("--dtype", choices=("float16", "float32", "float64"), default="float32")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only these faults")
    options = parser.parse_args()
    start, found = time.perf_counter(), {}
    rows = ((run.level, score(run)) for run in runs(options))
    for level, row in rows:
        total = found.setdefault(level, {"runs": 0, "right": 0, "first": 0, "missed": 0, "beside": 0})
        total["runs"] += 1
        total["right"] += row.right
        total["first"] += row.first
        total["missed"] += bool(row.missed)
        total["beside"] += bool(row.beside)
        if not row.right:
            print(row.flaw(), file=sys.stderr, flush=True)
    for level, total in found.items():
        print(f"{level:12}" + "".join(f"{name} {value:<6}" for name, value in total.items()), file=sys.stderr)
    print(json.dumps({**found, "seconds": round(time.perf_counter() - start, 1)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
