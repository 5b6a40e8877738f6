"""tools/verify_repositories.py: the verdict on every kind of repository, from a Hub on loopback, in real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.commands import load_script
from support.hub_standin import Answer, HubStandIn, Request
from support.replicas import REPLICAS, SINGLE, gpt2, name_of, publish, publish_base
from torch import nn

from gpt2.checkpoint.loading import load_path
from gpt2.data.library import LibraryTokenizer
from gpt2.parity import run

SCRIPT = Path(__file__).parents[2] / "tools" / "verify_repositories.py"
tool = load_script("verify_repositories")


def verify_all(hub: HubStandIn, folder: Path, names: list[str], *options: str, status: int = 0) -> tuple[list[dict], str, str]:
    """Run the script on a list; return its lines, the table, and what it says meanwhile."""
    (folder / "list.txt").write_text("# kinds\n\n" + "\n".join(names) + "  # the last\n")
    command = [sys.executable, SCRIPT, folder / "list.txt", "--out", folder / "out.jsonl", *options]
    done = subprocess.run(command, env=hub.environ(folder / "home"), cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == status, done.stderr[-3000:]
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".out")], "downloads are deleted"
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()], done.stdout, done.stderr


def wrong(lines: list[dict], kinds: list[str]) -> list[str]:
    """The lines that are not what their kind's row says."""
    found = []
    for kind, line in zip(kinds, lines, strict=True):
        expected = REPLICAS[kind]
        right = line["verdict"] == expected.verdict and expected.reason in line["reason"] and line["repository"] == name_of(kind)
        right &= line["verdict"] != "equal" or (line["greedy"] is True and line["ids"] is not False)
        if not right:
            found.append(f"{kind}: {line}")
    return found


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.slow
def test_kinds_then_a_second_run_with_limits(tmp_path: Path) -> None:
    """A run that was cut goes on where it was; a repository that hangs costs its own time, one out of reach gets no line."""
    kinds = ["tokenizer BERT", "nanoGPT", "another architecture", "large"]
    with HubStandIn() as hub:
        names = [publish(hub, kind, tmp_path / name_of(kind)) for kind in kinds]
        lines, table, _ = verify_all(hub, tmp_path, names)
        assert wrong(lines, kinds) == []
        assert [line["revision"] for line in lines] == [hub.repos[name].refs["main"] for name in names]
        assert [line["ids"] for line in lines] == [True, None, None, None], "nanoGPT's has no tokenizer"
        assert "| equal | 2 | |\n" in table
        assert "| refused: … model_type is 'llama', not 'gpt2'; this loader reads GPT-2 only | 1 | replicas/another-" in table

        before = len(hub.requests)
        with (tmp_path / "out.jsonl").open("a") as file:
            file.write('{"repository": "replicas/hangs", "verdict": "eq')  # the power went
        for name in ("replicas/hangs", "replicas/away"):
            hub.repos[name] = hub.repos[names[0]]
        hub.hold("replicas/hangs", SINGLE, after=100, times=9)

        def away(request: Request, answer: Answer) -> Answer:
            return replace(answer, status=503) if "away" in request.path else answer

        hub.rewrite = away
        more = [*names, "replicas/hangs@main", "replicas/away"]
        again, table, said = verify_all(hub, tmp_path, more, "--timeout", "4")
        assert again[:4] == lines
        assert [(line["repository"], line["verdict"], line["reason"]) for line in again[4:]] == [
            ("replicas/hangs@main", "timed out", "not finished in 4 s")
        ]
        assert again[4]["revision"] == hub.repos["replicas/hangs"].refs["main"]
        assert "replicas/away: no answer" in said
        assert not any("BERT" in request.path for request in hub.requests[before:])
        assert "| timed out | 1 | |" in table


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
    gpt2(tmp_path / "model")
    if what == "ids":
        assert tool.judge(str(tmp_path / "model")) == {"verdict": "equal", "greedy": True, "ids": True, "reason": ""}
    place, name, value, reason = CONTROLS[what]
    target = (f"{place}.{name}", value) if isinstance(place, str) else (place, name, value)
    monkeypatch.setattr(*target)
    found = tool.judge(str(tmp_path / "model"))
    assert found["verdict"] == "different"
    assert reason in found["reason"]


@pytest.mark.slow
def test_every_kind_of_repository(tmp_path: Path) -> None:
    """More than forty kinds, written by the original libraries."""
    pytest.importorskip("sentencepiece")
    kinds = list(REPLICAS)
    assert len(kinds) >= 40
    with HubStandIn() as hub:
        publish_base(hub, tmp_path / "base")
        names = [publish(hub, kind, tmp_path / str(number)) for number, kind in enumerate(kinds)]
        lines, table, _ = verify_all(hub, tmp_path, names, "--timeout", "120")
        print(f"\n{len(kinds)} kinds\n{table}")
        assert wrong(lines, kinds) == []
