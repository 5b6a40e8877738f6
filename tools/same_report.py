"""Print a line for each of 40 dumps, 20 modules and 10 steps: its name, and a hash of everything that `diagnose` says of it.

    python tools/same_report.py > quiet.txt
    nice -n 19 python tools/same_report.py > nice.txt     # beside busy processes, as `yes > /dev/null &` four times
    diff quiet.txt nice.txt

A search ends at its limit of work, not at one of time, so the lines are the same on a quiet machine, a busy one and a slow one.
CPU seconds go to stderr.
"""

import hashlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.faulty import CONFIG, FAULTY, write
from support.programs import fourteenth
from support.steps import FAULTY_STEPS
from support.steps.scoring import diagnosis_of

import gpt2

DUMPS, MODULES, STEPS = 40, 20, 10
DTYPES, LEVELS = ("float32", "float16", "float64"), ("full", "block", "logits")


def dumps(folder: Path) -> Iterator[tuple[str, Callable[[], gpt2.Diagnosis]]]:
    """Yield a name and a diagnosis to be made: faults of every program of the fourteenth set, at each level, in each dtype."""
    beds = [fourteenth.FourteenthBed(folder / f"bed{n}", shape) for n, shape in enumerate(fourteenth.SHAPES)]
    models = [gpt2.load(str(bed.model)) for bed in beds]
    every = [(program, fault, level) for program in fourteenth.FAULTS for fault in fourteenth.FAULTS[program] for level in LEVELS]
    for number, (program, fault, level) in enumerate(random.Random(0).sample(every, min(DUMPS, len(every)))):
        dtype, size = DTYPES[number % 3], number % len(beds)
        path = beds[size].dump(program, (fault,), level, dtype, number)
        yield f"dump {program}: {fault} ({level}, {dtype})", partial(gpt2.diagnose, str(path), models[size])


def modules(folder: Path) -> Iterator[tuple[str, Callable[[], gpt2.Diagnosis]]]:
    directory = write(folder, CONFIG)
    model = gpt2.load(str(directory))
    for name in random.Random(0).sample(sorted(FAULTY), MODULES):
        module = FAULTY[name].build(CONFIG, directory)
        if FAULTY[name].filled:
            gpt2.load_into(module, model)
        yield f"module {name}", partial(gpt2.diagnose, module, model)


def steps() -> Iterator[tuple[str, Callable[[], gpt2.Diagnosis]]]:
    for name in random.Random(0).sample(sorted(FAULTY_STEPS), STEPS):
        yield f"step {name}", partial(diagnosis_of, FAULTY_STEPS[name])


def main() -> int:
    torch.set_num_threads(1)
    seconds = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for part in (dumps(folder), modules(folder), steps()):
            for name, diagnose in part:
                start = time.process_time()
                said = diagnose()
                seconds.append(time.process_time() - start)
                text = (said.to_json() + said.table(100)).replace(place, "")
                print(f"{hashlib.sha256(text.encode()).hexdigest()[:16]}  {said.verdict:12}  {name}", flush=True)
                print(f"{seconds[-1]:5.1f} s  {name}", file=sys.stderr, flush=True)
    print(f"median {statistics.median(seconds):.2f}, worst {max(seconds):.1f} CPU s of {len(seconds)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
