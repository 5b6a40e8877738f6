"""From a Hub name to a verdict: real processes, a real server on loopback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import forks
from support.checks import content
from support.hub_standin import HubStandIn
from support.random_models import write_checkpoint

from gpt2.cli.main import main

REPO = "openai-community/gpt2"


def test_verify_by_the_official_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, caplog) -> None:
    """Download, hash and map in a process of its own; then, without a request, compare with transformers in this one."""
    with HubStandIn() as hub:
        clutter = {"pytorch_model.bin": b"never fetched", "64-8bits.tflite": b"nor this"}
        files = content(write_checkpoint(tmp_path / "model")) | clutter
        commit = hub.add_repo(REPO, files, lfs=("model.safetensors", "pytorch_model.bin"))
        words = "-m gpt2 generate gpt2 --prompt Once --max-new-tokens 4 --json -"
        first = forks.run(*words.split(), environ=hub.environ(tmp_path / "home"))
        assert len(json.loads(first.stdout)["ids"]) <= 4
        fetched = {request.path for request in hub.requests}
        assert fetched
        assert not any("pytorch_model" in path or "tflite" in path for path in fetched)

        before = len(hub.requests)
        monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
        assert main(["verify", "gpt2", "--offline", "--json", "-"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["ok"] is True
        assert report["model"] == REPO
        assert report["official"]["weights"] == [], "the stand-in's weights are of its own making"
        assert set(report["official"]["different"]) >= {"model.safetensors", "config.json"}
        assert report["revision"] == commit
        assert [check["id"] for check in report["checks"] if check["skipped"]] == []
        for said in (first.stderr, caplog.text):
            assert said.count("other files than the official ones") == 1, "in one line, by every command"
            assert "model.safetensors" in said
        assert len(hub.requests) == before
