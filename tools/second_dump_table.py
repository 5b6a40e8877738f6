"""Measure `gpt2 diagnose DUMP` on sets of programs that were written after it: tests/support/programs/second ... thirteenth.

    python tools/second_dump_table.py --seconds 200 --seed 1           # dumps in an order drawn from a seed, for so long
    python tools/second_dump_table.py --level logits --pairs           # two faults at once
    python tools/second_dump_table.py --right 36                       # programs without a fault
    python tools/second_dump_table.py --sixth --once                   # the sixth set, each fault once; --third to --thirteenth
    python tools/second_dump_table.py --seventh --half A --once        # one of the two halves of the seventh, or the eighth
    python tools/second_dump_table.py --eighth --once --pairs --level full  # its 24 pairs; so for the ninth to thirteenth

Random models of three sizes; names are shuffled and say nothing. A dump whose fault changes the logits (against our own model,
in float64) by less than four times the rounding of the right program's is left out. Each dump is a line of JSON on stdout.

Seconds of a dump are CPU seconds, and so are the engine's limits of time here, however long it takes by the clock.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.programs import eighth, eleventh, fifth, fourth, ninth, second, seventh, sixth, tenth, third, thirteenth, twelfth
from support.programs.second import DTYPES, LEVELS, Bed

import gpt2
from gpt2.port import deadline

deadline.SLOWEST = math.inf  # CPU time alone is the limit: the machine may be busy
LIMIT = 60  # seconds for one dump
VISIBLE = 4.0  # times the rounding
FAULTS = (
    second.FAULTS
    | third.FAULTS
    | fourth.FAULTS
    | fifth.FAULTS
    | sixth.FAULTS
    | seventh.FAULTS
    | eighth.FAULTS
    | ninth.FAULTS
    | tenth.FAULTS
    | eleventh.FAULTS
    | twelfth.FAULTS
    | thirteenth.FAULTS
)
SETS = {
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
}
CAN_RUN = {"nested": lambda: shutil.which("node"), "rust": fourth.compiler, "java": lambda: not fifth.missing()}
CAN_RUN |= {name: lambda name=name: not sixth.missing(name) for name in sixth.FAULTS}
CAN_RUN |= {name: lambda name=name: not seventh.missing(name) for name in seventh.FAULTS}
CAN_RUN |= {name: lambda name=name: not eighth.missing(name) for name in eighth.FAULTS}
CAN_RUN |= {name: lambda name=name: not ninth.missing(name) for name in ninth.FAULTS}
CAN_RUN |= {name: lambda name=name: not tenth.missing(name) for name in tenth.FAULTS}
CAN_RUN |= {name: lambda name=name: not eleventh.missing(name) for name in eleventh.FAULTS}
CAN_RUN |= {name: lambda name=name: not twelfth.missing(name) for name in twelfth.FAULTS}
CAN_RUN |= {name: lambda name=name: not thirteenth.missing(name) for name in thirteenth.FAULTS}


@functools.cache
def truth_and_rounding(bed: Bed, program: str, dtype: str) -> tuple[np.ndarray, float]:
    """Our own model's logits in float64, and how far those of the right program are from them."""
    ids, right = bed.run(program, (), "float64" if dtype == "float64" else "float32")
    model = gpt2.load(str(bed.model)).double().eval()
    with torch.no_grad():
        truth = model(torch.from_numpy(np.atleast_2d(ids))).numpy().reshape(*ids.shape, -1)
    return truth, float(np.abs(right["logits"].astype(dtype) - truth).max())


def visible(bed: Bed, program: str, faults: tuple[str, ...], dtype: str) -> bool:
    """Whether each of ``faults`` changes the logits, and each changes those that the others give."""
    truth, rounding = truth_and_rounding(bed, program, dtype)
    both = bed.run(program, faults)[1]["logits"]
    if len(faults) == 1:
        return apart(both, truth) > VISIBLE * rounding
    alone = [bed.run(program, [fault])[1]["logits"] for fault in faults]
    return all(min(apart(one, truth), apart(one, both)) > VISIBLE * rounding for one in alone)


def apart(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max()) if one.shape == other.shape else float("inf")


def too_long(*_: object) -> None:
    raise TimeoutError(f"more than {LIMIT} s")


def run(
    bed: Bed, model: gpt2.GPT2, program: str, faults: tuple[str, ...], level: str, dtype: str, seed: int
) -> dict[str, object]:
    dump = bed.dump(program, faults, level, dtype, seed)
    signal.signal(signal.SIGPROF, too_long)
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    start = time.process_time()
    row: dict[str, object] = {"program": program, "faults": faults, "level": level, "dtype": dtype, "width": bed.shape.width}
    try:
        said = gpt2.diagnose(str(dump), model)
        causes = [cause.id for cause in said.causes]
        accepted = [FAULTS[program][fault] for fault in faults]
        row["verdict"] = said.verdict
        row["said"] = [f"{cause.id} at {cause.where}" for cause in said.causes]
        row["first"] = bool(causes) and any(causes[0] in ids for ids in accepted)
        row["all"] = all(any(cause in ids for cause in causes) for ids in accepted)
        row["others"] = sum(not any(cause in ids for ids in accepted) for cause in causes)
    except Exception as error:
        row |= {
            "verdict": "failed",
            "said": [f"{type(error).__name__}: {error}"[:150]],
            "first": False,
            "all": False,
            "others": 0,
        }
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        dump.unlink()
    return row | {"seconds": round(time.process_time() - start, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--level", nargs="+", choices=LEVELS, default=LEVELS)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--pairs", action="store_true", help="two faults at once")
    parser.add_argument("--right", type=int, metavar="N", help="instead, so many programs without a fault")
    for name in SETS:
        parser.add_argument(
            f"--{name}", dest="chosen", action="store_const", const=SETS[name], help=f"the {name} set, not the second"
        )
    parser.add_argument("--program", nargs="+", metavar="NAME", help="of the set, only these")
    parser.add_argument("--half", choices=("A", "B"), help="of the seventh or eighth set, only this half")
    parser.add_argument("--once", action="store_true", help="one dump of each fault that shows, or pair")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no other dump after so many")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen, make = options.chosen or (second, Bed)
    if unknown := set(options.program or ()) - set(chosen.FAULTS):
        parser.error(f"--program {' '.join(sorted(unknown))}: the programs of this set are {', '.join(chosen.FAULTS)}")
    names = [name for name in options.program or chosen.FAULTS if name not in CAN_RUN or CAN_RUN[name]()]
    if not names:
        sys.exit("the set was not run: this machine lacks what its programs need")
    draw, start = random.Random(options.seed), time.perf_counter()
    kinds = list(itertools.product(names, options.level, options.dtype))
    if options.right:
        todo = [(*kinds[number % len(kinds)], ()) for number in range(options.right)]
    else:
        half = {(name, fault): "B" for name in names for fault in FAULTS[name]}
        half |= dict.fromkeys(seventh.HALF_A | eighth.HALF_A, "A")
        asked = {name: [fault for fault in FAULTS[name] if options.half in (None, half[name, fault])] for name in names}
        sets = {name: list(itertools.combinations(asked[name], 2 if options.pairs else 1)) for name in names}
        if options.pairs and chosen in (eighth, ninth, tenth, eleventh, twelfth, thirteenth):
            sets = {name: [pair for pair in chosen.PAIRS[name] if set(pair) <= set(asked[name])] for name in names}
        todo = [(*kind, faults) for kind in kinds for faults in sets[kind[0]]]
        draw.shuffle(todo)
    with tempfile.TemporaryDirectory() as folder:
        beds = [make(Path(folder) / str(shape.seed), shape) for shape in chosen.SHAPES]
        models = [gpt2.load(str(bed.model)) for bed in beds]
        done = set()
        for number, (program, level, dtype, faults) in enumerate(todo):
            if time.perf_counter() - start > options.seconds:
                break
            which = draw.randrange(len(beds))
            if options.once and (program, faults) in done:
                continue
            if faults and not visible(beds[which], program, faults, dtype):
                continue
            done.add((program, faults))
            row = run(beds[which], models[which], program, faults, level, dtype, number)
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
