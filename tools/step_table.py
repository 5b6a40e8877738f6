"""Measure how often `gpt2.diagnose_step` is right, on all training steps of tests/support/steps, faulty and right.

    python tools/step_table.py                      # all
    python tools/step_table.py --only summed 'right: groups'   # some (* for anything), with the whole diagnosis
    python tools/step_table.py --flaws FILE         # also writes every flaw into a file

Tiny models of random weights; nothing is fetched. A table on stderr, by style, then each step whose diagnosis has a flaw; the
last line of stdout is JSON. The exit code is 1 if any diagnosis has a flaw.
"""

import argparse
import gc
import json
import sys
import time
import traceback
from fnmatch import fnmatchcase
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.steps import FAULTY_STEPS, Step
from support.steps.right import RIGHT_STEPS
from support.steps.scoring import StepRow, diagnosis_of, score_step

HEADS = ("steps", "right first", "all found", "undetermined", "called equal", "beside", "failed", "mean s", "worst s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these steps (* for anything), and the whole diagnosis of each")
    parser.add_argument("--slow", action="store_true", help="the steps through torch.compile as well")
    parser.add_argument("--flaws", metavar="FILE", help="write every flaw into this file")
    options = parser.parse_args()

    def asked(name: str) -> bool:
        return not options.only or any(fnmatchcase(name, one) for one in options.only)

    steps: dict[str, Step] = dict(FAULTY_STEPS) | {f"right: {name}": step for name, step in RIGHT_STEPS.items()}
    rows, failed = [], []
    for name, step in steps.items():
        if not asked(name) or (step.slow and not options.slow):
            continue
        found = measure(name, step, bool(options.only))
        (rows if isinstance(found, StepRow) else failed).append(found)
    lines = flaws(rows, failed)
    show(rows, failed, lines)
    if options.flaws:
        Path(options.flaws).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(bool(lines))


def measure(name: str, step: Step, whole: bool) -> StepRow | tuple[str, str]:
    """A row of the table, or the step's name and why there is none."""
    gc.collect()
    start = time.perf_counter()
    try:
        diagnosis = diagnosis_of(step)
    except Exception as error:
        if whole:
            traceback.print_exc()
        return name, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    row = score_step(name, step, diagnosis, time.perf_counter() - start)
    if whole:
        print(f"\n{name}\n{diagnosis.table()}\n", file=sys.stderr)
    flaw = "" if row.perfect else "   " + row.flaws()
    print(f"{row.seconds:5.1f} s  {row.verdict:12} {name}{flaw}", file=sys.stderr, flush=True)
    return row


def flaws(rows: list[StepRow], failed: list[tuple[str, str]]) -> list[str]:
    return [f"{row.name}: {row.flaws()}" for row in rows if not row.perfect] + [f"{name}: {why}" for name, why in failed]


def counts(rows: list[StepRow], failed: int) -> tuple[float, ...]:
    """The cells of a line of the table."""
    seconds = [row.seconds for row in rows]
    return (
        len(rows) + failed,
        sum(row.first for row in rows),
        sum(bool(row.causes) and not row.missed for row in rows),
        sum(row.verdict == "undetermined" for row in rows),
        sum(row.verdict == "equal" for row in rows),
        sum(bool(row.beside) for row in rows),
        failed,
        round(sum(seconds) / max(1, len(seconds)), 2),
        round(max(seconds, default=0.0), 2),
    )


def show(rows: list[StepRow], failed: list[tuple[str, str]], lines: list[str]) -> None:
    faulty, right = ([row for row in rows if row.faulty is kind] for kind in (True, False))
    broken = sum(not name.startswith("right:") for name, _ in failed)
    print(f"\n{'':10}" + "".join(f"{head:>13}" for head in HEADS), file=sys.stderr)
    for kind, cells in (("faulty", counts(faulty, broken)), ("right", counts(right, len(failed) - broken))):
        print(f"{kind:10}" + "".join(f"{cell:>13}" for cell in cells), file=sys.stderr)
    print("\nWith a flaw:", *lines, sep="\n  ", file=sys.stderr)
    summary = dict(zip((head.replace(" ", "_") for head in HEADS), counts(faulty, broken), strict=True))
    several = [row for row in faulty if len(row.name.split()) > 1]
    summary |= {"several_faults": len(several), "several_all_found": sum(not row.missed for row in several)}
    summary |= {"right": len(right), "right_not_called_equal": sum(row.verdict != "equal" for row in right)}
    print(json.dumps(summary | {"without_flaw": sum(row.perfect for row in faulty)}))


if __name__ == "__main__":
    sys.exit(main())
