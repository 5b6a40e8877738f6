"""Run `gpt2.load_into` on GPT-2s that other people have written: random weights into each, logits against ours in float64.

    python tools/try_third_party.py --repositories ~/others            # everything that is installed or lies there
    python tools/try_third_party.py --only nanoGPT litgpt --size gpt2

The projects are in `third_party.py`. Nothing is fetched: a project is tried if its package is installed, or if its repository
lies under --repositories as `owner+name`. **Their code is run**, each project in a process of its own. A project with a known
fault is tried as it is and then with the fault mended, so that their fault cannot hide a wrong mapping. The table goes to stderr;
the last line of stdout is JSON.
"""

from __future__ import annotations

import json
import math
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from third_party import PROJECTS
from third_party_project import Project
from third_party_run import Absent, parser_of, run_each, version_of
from torch import Tensor, nn

import gpt2
from gpt2.config import GPT2Config, official_size

TINY = GPT2Config(vocab_size=61, n_positions=20, n_embd=24, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0)


def logits_of(module: nn.Module, ids: Tensor, vocabulary: int) -> Tensor:
    """(B, T, V), or (B, 1, V) from a model that gives the last position only; the padding of a vocabulary is cut off."""
    output = module(ids)
    output = output[0] if isinstance(output, tuple | list) else output
    output = output["logits"] if isinstance(output, dict) else output
    return getattr(output, "logits", output)[..., :vocabulary].double()


@torch.no_grad()
def relative_error(module: nn.Module, checkpoint: Path) -> float:
    """Largest difference of any logit over the largest logit, in float64, over the whole context or 256 tokens of it.

    A model that gives the last position only is asked at eight lengths.
    """
    ours = gpt2.load(str(checkpoint), dtype="float64")
    vocabulary, length = ours.config.vocab_size, min(ours.config.n_positions, 256)
    ids = torch.randint(vocabulary, (2, length), generator=torch.Generator().manual_seed(0))
    right = ours(ids)
    logits = logits_of(module, ids, vocabulary)
    if logits.size(1) != length:
        ends = sorted({max(1, length * eighth // 8) for eighth in range(1, 9)})
        logits = torch.cat([logits_of(module, ids[:, :end], vocabulary) for end in ends], dim=1)
        right = right[:, [end - 1 for end in ends]]
    error = float((logits - right).abs().max() / right.abs().max())
    return error if math.isfinite(error) else math.inf


def attempt(project: Project, checkpoint: Path, repositories: Path | None) -> dict[str, Any]:
    """Build, load, compare; again with the fault mended. Never raises."""
    result: dict[str, Any] = {"project": project.name, "source": project.source, "fault": project.fault, "lacks": project.lacks}
    stage = "find"
    try:
        result["version"], root = version_of(project.source, repositories)
        config = gpt2.load(str(checkpoint)).config
        for mended in (False, True) if project.mend else (False,):
            stage = "build"
            torch.manual_seed(0)
            module = project.module(config, root).double().eval()
            result["parameters"] = sum(1 for _ in module.parameters())
            if mended:
                project.mend(module)
            stage = "load_into"
            report = gpt2.load_into(module, str(checkpoint))
            said = json.loads(report.to_json())
            said["rows"] = [row for row in said["rows"] if not row["sources"]]  # the filled ones are long and all alike
            result["report, mended" if mended else "report"] = said
            stage = "compare"
            result["error, mended" if mended else "error"] = relative_error(module, checkpoint)
    except Absent as absent:
        result["absent"] = str(absent)
    except Exception as error:
        result["failed"] = f"{stage}: {type(error).__name__}: {error}"[:600]
        result["traceback"] = traceback.format_exc()[-3000:]
    return result


def main() -> int:
    parser = parser_of(__doc__, timeout=900.0)
    parser.add_argument("--size", default="tiny", help="tiny, or an official size such as gpt2")
    arguments = parser.parse_args()
    config = TINY if arguments.size == "tiny" else official_size(arguments.size)
    results = run_each(arguments, PROJECTS, config, attempt, row)
    print(json.dumps({"size": arguments.size, "torch": torch.__version__, "results": results}))
    return 0


def row(result: dict[str, Any]) -> str:
    """One line of the table."""
    state = result.get("absent") or result.get("failed") or ""
    if not state:
        state = f"ok={result['report']['ok']!s:5} logits {result['error']:.1e}"
        state += f", mended {result['error, mended']:.1e}" if "error, mended" in result else ""
        state += f" (theirs: {result['fault']})" if result["fault"] else ""
        last = result.get("report, mended", result["report"])
        else_equal = any("logits agree" in note for note in last["notes"])
        state += f" (lacks {result['lacks']}{': all that parts it from ours' if else_equal else ''})" if result["lacks"] else ""
    return f"{result['project']:42} {result.get('version', ''):12} {state}"


if __name__ == "__main__":
    sys.exit(main())
