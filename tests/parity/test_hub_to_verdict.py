"""From a Hub name to a verdict: real processes, a real server on loopback."""

import json
from pathlib import Path

import pytest
from support import forks
from support.checks import content
from support.hub_standin import HubStandIn
from support.random_models import write_checkpoint

REPO = "openai-community/gpt2"
OFFLINE = """
from gpt2.cli.main import main
commands = "verify gpt2", "generate gpt2 --prompt x", "bench gpt2", "trace gpt2 --text x --out x", "export gpt2 x", "info gpt2"
commands += "explore gpt2 --html x", "compare gpt2 shakespeare-mini", "diagnose port.py --model gpt2"
for words in commands:
    assert main([*words.split(), "--offline"]) == 2, words
"""


@pytest.mark.parametrize("command", ["info", pytest.param("verify", marks=pytest.mark.slow)])  # which imports transformers
def test_a_command_by_the_official_name(command: str, tmp_path: Path) -> None:
    """Download, hash and map, and compare with transformers; then again without a request."""
    with HubStandIn() as hub:
        clutter = {"pytorch_model.bin": b"never fetched", "64-8bits.tflite": b"nor this"}
        files = content(write_checkpoint(tmp_path / "model")) | clutter
        commit = hub.add_repo(REPO, files, lfs=("model.safetensors", "pytorch_model.bin"))
        environ = hub.environ(tmp_path / "home")
        result = forks.run("-m", "gpt2", command, "gpt2", "--json", "-", environ=environ)
        report = json.loads(result.stdout)
        assert report["official"]["weights"] == [], "the stand-in's weights are of its own making"
        assert set(report["official"]["different"]) >= {"model.safetensors", "config.json"}
        if command == "verify":
            assert (report["ok"], report["model"], report["revision"]) == (True, REPO, commit)
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


def test_no_command_asks_when_it_is_offline(tmp_path: Path) -> None:
    """A command that did not hand --offline on asked the Hub, and downloaded."""
    (tmp_path / "port.py").touch()
    with HubStandIn() as hub:
        hub.add_repo(REPO, content(write_checkpoint(tmp_path / "model")))
        result = forks.run("-c", OFFLINE, environ=hub.environ(tmp_path / "home"), cwd=tmp_path)
        assert hub.requests == []
    assert result.stderr.count("offline, and the cache") == 9
