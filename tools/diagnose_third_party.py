"""Run `gpt2 diagnose` on GPT-2s that other people have written, and count the causes that are right, missed and false.

    python tools/diagnose_third_party.py --repositories ~/others
    python tools/diagnose_third_party.py --repositories ~/others --only pyemma

The projects, what is wrong in each, and the commit at which it was read are in `third_party_faults.py`, and with --second,
--third or --fourth in `third_party_second.py` and so on: those were collected later, for fair figures. Nothing is fetched: a
project is tried if its repository lies under --repositories as `owner+name`. **Their code is run**, each project in a process of
its own, with the weights of a tiny random checkpoint put in by `load_into`. The table goes to stderr; the last line of stdout is
JSON. The exit code is 1 if any cause is missed or false.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from third_party_faults import DIAGNOSED, Diagnosed
from third_party_fourth import FOURTH
from third_party_second import SECOND
from third_party_third import THIRD

import gpt2
from gpt2.checkpoint.keys import expected
from gpt2.config import GPT2Config

LATER = {"second": SECOND, "third": THIRD, "fourth": FOURTH}
CONFIG = GPT2Config(vocab_size=97, n_positions=32, n_embd=48, n_layer=3, n_head=4, bos_token_id=96, eos_token_id=96)


def write_checkpoint(directory: Path) -> Path:
    """Random weights in the official layout. Biases and norms are drawn too, so nothing hides behind a zero or a one."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.3 + (".ln_" in f".{name}" and name.endswith("weight"))
        for name, shape in expected(CONFIG).items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    return directory


def attempt(project: Diagnosed, root: Path, checkpoint: Path) -> dict[str, Any]:
    """Build, fill and diagnose; counts and seconds. Never raises."""
    result: dict[str, Any] = {"project": project.name, "commit": project.commit}
    try:
        commit = subprocess.run(["git", "-C", str(root), "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True)
        result["version"] = commit.stdout.strip() or "no commit"
        torch.manual_seed(0)
        module = project.module(CONFIG, root).eval()
        start = time.process_time()
        diagnosis = gpt2.diagnose(module, str(checkpoint), fill=True)
        result["seconds"] = round(time.process_time() - start, 1)
        said, wanted = {cause.id for cause in diagnosis.causes}, set(project.causes)
        result |= {"verdict": diagnosis.verdict, "right": sorted(said & wanted)}
        result |= {"missed": sorted(wanted - said), "false": sorted(said - wanted)}
    except Exception as error:
        result["failed"] = f"{type(error).__name__}: {error}"[:300]
    return result


def attempt_apart(project: Diagnosed, root: Path, checkpoint: Path, timeout: float) -> dict[str, Any]:
    """The same in a process of its own: this script with --one, which prints the result."""
    if not root.is_dir():
        return {"project": project.name, "absent": f"{root} is not there"}
    command = [sys.executable, *sys.argv, "--checkpoint", str(checkpoint), "--one", project.name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"project": project.name, "failed": f"more than {timeout:g} s"}
    last = done.stdout.strip().rpartition("\n")[2]
    return json.loads(last) if last else {"project": project.name, "failed": done.stderr[-600:]}


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repositories", type=Path, required=True, help="folder of clones, each called owner+name")
    parser.add_argument("--only", nargs="*", help="words that the project's name contains", default=[])
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each project")
    for name in LATER:
        parser.add_argument(f"--{name}", action="store_true", help=f"the projects of third_party_{name}.py")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    projects = [
        (project, arguments.repositories / project.source.replace("/", "+"))
        for project in next((projects for name, projects in LATER.items() if getattr(arguments, name)), DIAGNOSED)
        if not arguments.only or any(word.lower() in project.name.lower() for word in arguments.only)
    ]
    if arguments.one:
        project, root = next(each for each in projects if each[0].name == arguments.one)
        with contextlib.redirect_stdout(sys.stderr):
            result = attempt(project, root, arguments.checkpoint)
        print(json.dumps(result))
        return 0
    results = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder))
        for project, root in projects:
            results.append(attempt_apart(project, root, checkpoint, arguments.timeout))
            print(row(results[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"torch": torch.__version__, "results": results}))
    return int(any(result.get("failed") or result.get("missed") or result.get("false") for result in results))


if __name__ == "__main__":
    sys.exit(main())
