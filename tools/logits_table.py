"""Measure how often faults are named from a program's logits alone, or from one tensor a block.

    python tools/logits_table.py                  # the faulty ports of tests/support/faulty, by their logits
    python tools/logits_table.py --drawn 50       # two faults each, drawn at random
    python tools/logits_table.py --only 'fused:*' --seconds 60

The logits come from the ports' own code, in float32, so that nothing is shared with the simulation. The tolerance is our model's
own rounding in float32, times 16. A port counts as right if the first explanation names exactly its faults, each by a cause that
describes it. Faults that need a cache, padding or a second call are left out. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.faulty import CONFIG, FAULTY, SOUND, Faulty, write
from support.faulty.drawn import draw
from support.ports import logits

import gpt2
from gpt2.measure.metrics import worst_relative_error
from gpt2.port.deadline import Deadline
from gpt2.port.dump.explaining import Explanation, explain

CALLS = ("cache", "padding", "dropout", "noise", "counts", "batch-", "padded", "ffn-dropout")  # not seen in one forward pass
SLACK = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these ports (* for anything)")
    parser.add_argument("--sample", type=int, metavar="N", help="so many ports, drawn from a fixed seed")
    parser.add_argument("--drawn", type=int, metavar="N", help="instead, so many ports of two faults drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each port")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = write(Path(folder), CONFIG)
        model = gpt2.load(str(directory)).double()
        ports = chosen(options, directory)
        ids = torch.randint(CONFIG.vocab_size, (2, 12), generator=torch.Generator().manual_seed(5))
        rounding = worst_relative_error(gpt2.load(str(directory))(ids).detach(), model(ids).detach())
        tolerance = SLACK * max(rounding, 2.0**-22)
        count: Counter = Counter()
        seconds = []
        for port in ports:
            start = time.process_time()
            explanation = explain(
                model, ids, {"logits": shown(port, ids, directory)}, {"logits": tolerance}, Deadline(options.seconds)
            )
            seconds.append(time.process_time() - start)
            outcome = judged(port, explanation)
            count[(len(port.causes), outcome)] += 1
            print(f"{seconds[-1]:5.1f} s  {outcome:12}{port.name}   {described(explanation)}", file=sys.stderr, flush=True)
    table = {f"{faults} faults, {outcome}": number for (faults, outcome), number in sorted(count.items())}
    print(json.dumps({"ports": len(ports), **table, "seconds_worst": round(max(seconds), 1), "tolerance": tolerance}))
    return 0


def chosen(options: argparse.Namespace, directory: Path) -> list[Faulty]:
    """The ports to explain."""
    if options.drawn:
        drawn = draw(3 * options.drawn, options.seed, CONFIG, directory)
        return [port for port in drawn if len(port.causes) == 2][: options.drawn]
    ports = [port for port in (*FAULTY.values(), *SOUND.values()) if not port.filled and visible(port)]
    ports = [port for port in ports if not options.only or any(fnmatchcase(port.name, one) for one in options.only)]
    return random.Random(options.seed).sample(ports, min(options.sample, len(ports))) if options.sample else ports


def visible(port: Faulty) -> bool:
    """Whether all faults show in one forward pass."""
    return not any(word.startswith(CALLS) for word in port.causes)


@torch.no_grad()
def shown(port: Faulty, ids: Tensor, directory: Path) -> Tensor:
    """What a port that dumps its logits shows."""
    return logits(port.build(CONFIG, directory), ids, CONFIG.vocab_size).double()


def judged(port: Faulty, explanation: Explanation) -> str:
    """Whether the first explanation names the port's faults, and nothing else."""
    if explanation.right:
        return "called right" if port.causes else "right"
    if not explanation.hypotheses:
        return "undetermined"

    def names(said: set[str]) -> bool:
        known = {id for ids in port.causes.values() for id in ids}
        return all(said & set(ids) for ids in port.causes.values()) and said <= known

    sets = [{one.id for one in (*each.faults, *each.same)} & {one.id for one in each.faults} for each in explanation.hypotheses]
    alike = [{one.id for one in (*each.faults, *each.same)} for each in explanation.hypotheses]
    if names(sets[0]) or (explanation.hypotheses[0].same and all(alike[0] & set(ids) for ids in port.causes.values())):
        return "first"
    return "offered" if any(map(names, sets)) else "wrong"


def described(explanation: Explanation) -> str:
    """The explanations in a line."""
    sets = [
        " + ".join(f"{one.id} {'/'.join(map(str, one.places))}" for one in each.faults)
        + (f" (or {', '.join(one.id for one in each.same)})" if each.same else "")
        for each in explanation.hypotheses
    ]
    return " | ".join(sets[:3]) + ("" if explanation.complete else "  (stopped)")


if __name__ == "__main__":
    sys.exit(main())
