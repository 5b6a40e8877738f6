"""Measure how often `gpt2 diagnose` is right, on all faulty ports of tests/support/faulty and all right ones.

    python tools/diagnose_table.py                          # all, at a tiny size
    python tools/diagnose_table.py --shape gpt2 --sample 30 # thirty of them, at the official shape
    python tools/diagnose_table.py --only 'fused: gelu-erf' # one, with its whole diagnosis

Random weights of the size of trained ones; nothing is fetched. A table on stderr, by architecture, then each port whose
diagnosis has a flaw; the last line of stdout is JSON.
"""

import argparse
import gc
import json
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.faulty import ARCHITECTURES, CONFIG, FAULTY, SOUND, Faulty, write
from support.faulty.scoring import FAULTY_AFTER_ALL, Row, score
from support.ports import PORTS

import gpt2
from gpt2.config import GPT2Config, official_size
from gpt2.port.diagnosis import diagnose

OUTCOMES = ("first", "wrong", "undetermined", "called equal", "failed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", help="an official size, such as gpt2; tiny if left out")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these ports (* for anything), and the whole diagnosis of each")
    parser.add_argument("--sample", type=int, metavar="N", help="so many faulty ports, drawn from a fixed seed")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--no-equal", action="store_true", help="leave out the right ports")
    options = parser.parse_args()
    config = official_size(options.shape) if options.shape else CONFIG
    faulty = [port for name, port in FAULTY.items() if not options.only or any(fnmatchcase(name, one) for one in options.only)]
    if options.sample is not None:
        faulty = random.Random(options.seed).sample(faulty, min(options.sample, len(faulty)))
    with tempfile.TemporaryDirectory() as folder:
        directory = write(Path(folder), config)
        model = gpt2.load(str(directory))
        outcomes = [diagnose_faulty(port, config, directory, model, bool(options.only)) for port in faulty]
        equal = [] if options.only or options.no_equal else [*diagnose_equal(config, directory, model)]
    show(outcomes, equal)
    return 0


def diagnose_faulty(port: Faulty, config: GPT2Config, directory: Path, model: nn.Module, whole: bool) -> Row | tuple[str, str]:
    """A row of the table, or the port's name and why there is none."""
    gc.collect()
    try:
        module = port.build(config, directory)
        if port.filled:
            gpt2.load_into(module, model)
        start, cpu = time.perf_counter(), time.process_time()
        diagnosis = diagnose(module, model)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    except Exception as error:
        if whole:
            traceback.print_exc()
        return port.name, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if whole:
        print(f"\n{port.name}\n{diagnosis.table()}\n", file=sys.stderr)
    row = score(port, diagnosis, seconds, cpu)
    print(
        f"{seconds:5.1f} s {cpu:5.1f} cpu  {row.outcome:13}{port.name}{'' if row.perfect else '   ' + flaws(row)}",
        file=sys.stderr,
        flush=True,
    )
    return row


def flaws(row: Row) -> str:
    """What was said, and what is true."""
    return f"said {' | '.join(row.said)}; is {' | '.join(row.port.truth)}"


def diagnose_equal(config: GPT2Config, directory: Path, model: nn.Module) -> Iterator[tuple[str, str, float]]:
    """(name and dtype, verdict, seconds) of every right port, in float32 and bfloat16."""
    for name, build in right_ports(config, directory, model).items():
        for dtype in (torch.float32, torch.bfloat16):
            try:
                module = build().to(dtype)
                if not runs(module, config):  # some mix float32 into what they compute, and cannot run in bfloat16 at all
                    continue
                start = time.perf_counter()
                diagnosis = diagnose(module, model)
                words = diagnosis.verdict + "".join(f" {cause.id}" for cause in diagnosis.causes)
                seconds = time.perf_counter() - start
                print(f"{seconds:5.1f} s  {name} {dtype}: {words}", file=sys.stderr, flush=True)
                yield f"{name} {str(dtype).removeprefix('torch.')}", words, seconds
            except Exception as error:
                yield f"{name} {str(dtype).removeprefix('torch.')}", f"{type(error).__name__}: {error}".splitlines()[0], 0.0


def runs(module: nn.Module, config: GPT2Config) -> bool:
    try:
        module(torch.arange(min(config.n_positions, config.vocab_size))[None])
    except RuntimeError:
        return False
    return True


def right_ports(config: GPT2Config, directory: Path, model: nn.Module) -> dict:
    """Name -> a function that builds and fills it: the architectures without faults, and tests/support/ports."""
    state = model.state_dict()

    def sound(port: Faulty) -> nn.Module:
        module = port.build(config, directory)
        if port.filled:
            gpt2.load_into(module, model)
        return module

    def ported(port) -> nn.Module:
        module = port.build(config).float()
        port.fill(module, state)
        return module

    ports = {name: lambda port=port: sound(port) for name, port in SOUND.items()}
    return ports | {
        f"ports: {name}": lambda port=port: ported(port)
        for name, port in PORTS.items()
        if port.complete and not port.home and name not in FAULTY_AFTER_ALL
    }


def show(outcomes: list[Row | tuple[str, str]], equal: list[tuple[str, str, float]]) -> None:
    rows = [row for row in outcomes if isinstance(row, Row)]
    failed = [row for row in outcomes if not isinstance(row, Row)]
    table: dict[str, Counter] = {name: Counter() for name in ARCHITECTURES}
    for row in rows:
        counted = table[row.port.architecture]
        counted.update([row.outcome, *["perfect"] * row.perfect, *["all"] * (not row.missed)])
        counted["cpu"] += row.cpu
    for name, _ in failed:
        table[name.split(":")[0]]["failed"] += 1
    heads = ("ports", *OUTCOMES, "all found", "no flaw", "cpu s each")
    print(f"\n{'':11}" + "".join(f"{head:>14}" for head in heads), file=sys.stderr)
    for name, counted in table.items():
        if total := sum(counted[outcome] for outcome in OUTCOMES):
            cells = (total, *(counted[outcome] for outcome in OUTCOMES), counted["all"], counted["perfect"])
            print(f"{name:11}" + "".join(f"{cell:14}" for cell in cells) + f"{counted['cpu'] / total:14.2f}", file=sys.stderr)
    print("\nWith a flaw:", file=sys.stderr)
    for row in rows:
        if not row.perfect:
            print(f"  {row.port.name}: {row.outcome}; {flaws(row)}", file=sys.stderr)
    for name, why in failed:
        print(f"  {name}: {why}", file=sys.stderr)
    called_faulty = [one for one in equal if one[1] != "equal"]
    for name, words, _ in called_faulty:
        print(f"  {name}, which is right: {words}", file=sys.stderr)
    count = Counter(row.outcome for row in rows)
    summary = {"ports": len(outcomes), **{outcome: count[outcome] for outcome in OUTCOMES}, "failed": len(failed)}
    summary |= {"all_found": sum(not row.missed for row in rows)}
    summary |= {
        "without_flaw": sum(row.perfect for row in rows),
        "equal": len(equal),
        "equal_not_called_equal": len(called_faulty),
    }
    summary["seconds_worst"] = round(max((row.seconds for row in rows), default=0.0), 2)
    summary["seconds_mean"] = round(sum(row.seconds for row in rows) / max(len(rows), 1), 2)
    summary["cpu_seconds_worst"] = round(max((row.cpu for row in rows), default=0.0), 2)
    summary["cpu_seconds_mean"] = round(sum(row.cpu for row in rows) / max(len(rows), 1), 2)
    print(json.dumps(summary))


if __name__ == "__main__":
    sys.exit(main())
