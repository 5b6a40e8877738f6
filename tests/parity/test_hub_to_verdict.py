"""From a Hub name to a verdict: real processes, a real server on loopback."""

from __future__ import annotations

import json
from pathlib import Path

from support import forks
from support.checks import content
from support.hub_standin import HubStandIn
from support.random_models import write_checkpoint

REPO = "openai-community/gpt2"


def test_verify_by_the_official_name(tmp_path: Path) -> None:
    """Download, hash, map and compare with transformers; then again without a request."""
    with HubStandIn() as hub:
        clutter = {"pytorch_model.bin": b"never fetched", "64-8bits.tflite": b"nor this"}
        files = content(write_checkpoint(tmp_path / "model")) | clutter
        commit = hub.add_repo(REPO, files, lfs=("model.safetensors", "pytorch_model.bin"))
        environ = hub.environ(tmp_path / "home")
        result = forks.run("-m", "gpt2", "verify", "gpt2", "--json", "-", environ=environ)
        report = json.loads(result.stdout)
        assert report["ok"] is True
        assert report["model"] == REPO
        assert report["official"]["weights"] == [], "the stand-in's weights are of its own making"
        assert set(report["official"]["different"]) >= {"model.safetensors", "config.json"}
        assert report["revision"] == commit
        assert [check["id"] for check in report["checks"] if check["skipped"]] == []
        fetched = {request.path for request in hub.requests}
        assert not any("pytorch_model" in path or "tflite" in path for path in fetched)

        before = len(hub.requests)
        words = "-m gpt2 generate gpt2 --offline --prompt Once --max-new-tokens 4 --json -"
        again = forks.run(*words.split(), environ=environ)
        for stderr in (result.stderr, again.stderr):
            assert stderr.count("other files than the official ones") == 1, "in one line, by every command"
            assert "model.safetensors" in stderr
        assert len(json.loads(again.stdout)["ids"]) <= 4
        assert len(hub.requests) == before
