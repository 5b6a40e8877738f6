"""tools/verify_repositories.py: the verdict on a list of repositories, from a Hub on loopback, in real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import torch_layouts
from support.commands import load_script
from support.hub_standin import HubStandIn, Unread
from support.random_models import write_checkpoint
from torch import nn

from gpt2.checkpoint.loading import load_path
from gpt2.data.library import LibraryTokenizer
from gpt2.parity import run

SCRIPT = Path(__file__).parents[2] / "tools" / "verify_repositories.py"
tool = load_script("verify_repositories")
SINGLE = "model.safetensors"


def verify_all(hub: HubStandIn, folder: Path, names: list[str], *options: str, status: int = 0) -> tuple[list[dict], str, str]:
    """Run the script on a list; return its lines, the table, and what it says meanwhile."""
    (folder / "list.txt").write_text("# kinds\n\n" + "\n".join(names) + "  # the last\n")
    command = [sys.executable, SCRIPT, folder / "list.txt", "--out", folder / "out.jsonl", *options]
    done = subprocess.run(command, env=hub.environ(folder / "home"), cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == status, done.stderr[-3000:]
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".out")], "downloads are deleted"
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()], done.stdout, done.stderr


def publish(hub: HubStandIn, kind: str, folder: Path) -> str:
    """Put one kind of repository on a Hub, and return its name there."""
    if kind == "nanoGPT":
        torch_layouts.nanogpt(folder / "ckpt.pt")
    else:
        write_checkpoint(folder)
    if kind == "llama":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    files: dict[str, Any] = {path.name: path for path in folder.iterdir()}
    files |= {SINGLE: Unread(1 << 40)} if kind == "large" else {}
    hub.add_repo(f"kinds/{kind}", files, lfs=tuple({SINGLE, "ckpt.pt"} & {*files}))
    return f"kinds/{kind}"


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.slow
def test_kinds_then_a_second_run_with_limits(tmp_path: Path) -> None:
    """A run that was cut goes on where it was; a repository that hangs costs its own time."""
    verdicts = {"saved": "equal", "nanoGPT": "equal", "llama": "refused", "large": "too large"}
    with HubStandIn() as hub:
        names = [publish(hub, kind, tmp_path / kind) for kind in verdicts]
        lines, table, _ = verify_all(hub, tmp_path, names)
        assert [(line["repository"], line["verdict"]) for line in lines] == list(zip(names, verdicts.values(), strict=True))
        assert [line["greedy"] for line in lines[:2]] == [True, True]
        assert "bytes to download" in lines[3]["reason"]
        assert [line["revision"] for line in lines] == [hub.repos[name].refs["main"] for name in names]
        assert [line["ids"] for line in lines] == [True, None, None, None], "nanoGPT's has no tokenizer"
        assert "| equal | 2 | |\n" in table
        assert "| refused: … model_type is 'llama', not 'gpt2'; this loader reads GPT-2 only | 1 | kinds/llama" in table

        before = len(hub.requests)
        with (tmp_path / "out.jsonl").open("a") as file:
            file.write('{"repository": "kinds/hangs", "verdict": "eq')  # the power went
        hub.repos["kinds/hangs"] = hub.repos[names[0]]
        hub.hold("kinds/hangs", SINGLE, after=100, times=9)
        again, _, _ = verify_all(hub, tmp_path, [*names, "kinds/hangs@main"], "--timeout", "4")
        assert again[:4] == lines
        assert [(line["repository"], line["verdict"], line["reason"]) for line in again[4:]] == [
            ("kinds/hangs@main", "timed out", "not finished in 4 s")
        ]
        assert not any("saved" in request.path for request in hub.requests[before:])


@pytest.mark.parametrize(
    ("names", "out", "error"),
    [("gpt2\n", "", "list.txt: 'gpt2' is not org/name"), ("a/b\n", '{"loss": 3}\n', "other lines than this script's")],
)
def test_bad_input_is_one_line(tmp_path: Path, names: str, out: str, error: str) -> None:
    """Another program's file must not be written to."""
    (tmp_path / "list.txt").write_text(names)
    (tmp_path / "out.jsonl").write_text(out)
    with pytest.raises(tool.InputError, match=error):
        tool.repositories(tmp_path / "list.txt"), tool.finished(tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == out


def broken(path: Path, dtype: Any) -> nn.Module:
    model = load_path(path, dtype=dtype)
    model.h[1].attn.c_attn.bias.data[0] += 1
    return model


CONTROLS: dict[str, tuple[object, str, Callable, str]] = {
    "weights": (run, "verify", partial(run.verify, build=broken), "first at h.1.attn.c_attn.bias"),
    "greedy": ("gpt2.generation", "generate", lambda model, ids, *_, **__: [*ids, 7] * 2, "other greedy tokens"),
    "ids": (LibraryTokenizer, "encode_prompt", lambda self, text, special=False: [5], "other ids"),
}


@pytest.mark.parametrize("what", CONTROLS)
def test_a_difference_is_seen(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "model")
    if what == "ids":
        assert tool.judge(str(tmp_path / "model")) == {"verdict": "equal", "greedy": True, "ids": True, "reason": ""}
    place, name, value, reason = CONTROLS[what]
    target = (f"{place}.{name}", value) if isinstance(place, str) else (place, name, value)
    monkeypatch.setattr(*target)
    found = tool.judge(str(tmp_path / "model"))
    assert found["verdict"] == "different"
    assert reason in found["reason"]
