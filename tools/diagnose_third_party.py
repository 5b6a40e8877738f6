"""Run `gpt2 diagnose` on GPT-2s that other people have written, and count the causes that are right, missed and false.

    python tools/diagnose_third_party.py --repositories ~/others
    python tools/diagnose_third_party.py --repositories ~/others --only pyemma

The projects, what is wrong in each, and the commit at which it was read are in `third_party_faults.py`, and with --second in
`third_party_second.py`: those were collected later, for a fair figure. Nothing is fetched: a project is tried if its repository
lies under --repositories as `owner+name`. **Their code is run**, each project in a process of its own, with the weights of a tiny
random checkpoint put in by `load_into`. The table goes to stderr; the last line of stdout is JSON. The exit code is 1 if any
cause is missed or false.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from third_party_faults import DIAGNOSED, Diagnosed
from third_party_run import Absent, parser_of, run_each, version_of
from third_party_second import SECOND

import gpt2
from gpt2.config import GPT2Config

CONFIG = GPT2Config(vocab_size=97, n_positions=32, n_embd=48, n_layer=3, n_head=4, bos_token_id=96, eos_token_id=96)


def attempt(project: Diagnosed, checkpoint: Path, repositories: Path | None) -> dict[str, Any]:
    """Build, fill and diagnose; counts and seconds. Never raises."""
    result: dict[str, Any] = {"project": project.name, "commit": project.commit}
    try:
        result["version"], root = version_of(project.source, repositories)
        torch.manual_seed(0)
        module = project.module(CONFIG, root).eval()
        start = time.process_time()
        diagnosis = gpt2.diagnose(module, str(checkpoint), fill=True)
        result["seconds"] = round(time.process_time() - start, 1)
        said, wanted = {cause.id for cause in diagnosis.causes}, set(project.causes)
        result |= {"verdict": diagnosis.verdict, "right": sorted(said & wanted)}
        result |= {"missed": sorted(wanted - said), "false": sorted(said - wanted)}
    except Absent as absent:
        result["absent"] = str(absent)
    except Exception as error:
        result["failed"] = f"{type(error).__name__}: {error}"[:300]
    return result


def row(result: dict[str, Any]) -> str:
    """One line of the table."""
    state = result.get("absent") or result.get("failed")
    commit, version = result.get("commit", ""), result.get("version", "")
    moved = "" if version.startswith(commit) or commit.startswith(version) else f"  (at {version}, not {commit})"
    if state is None:
        counts = ", ".join(f"{name} {' '.join(result[name]) or 'none'}" for name in ("right", "missed", "false"))
        state = f"{result['verdict']:12} {counts}, {result['seconds']} s of CPU"
    return f"{result['project']:56} {state}{moved}"


def main() -> int:
    parser = parser_of(__doc__, timeout=300.0)
    parser.add_argument("--second", action="store_true", help="the projects of third_party_second.py")
    arguments = parser.parse_args()
    results = run_each(arguments, SECOND if arguments.second else DIAGNOSED, CONFIG, attempt, row)
    print(json.dumps({"torch": torch.__version__, "results": results}))
    return int(any(result.get("failed") or result.get("missed") or result.get("false") for result in results))


if __name__ == "__main__":
    sys.exit(main())
