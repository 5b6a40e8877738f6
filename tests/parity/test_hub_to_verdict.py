"""From a name on the Hub to a verdict: real processes, a real server on loopback, the official file layout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hf_layouts import masks, weights, write_config, write_weights
from hub_standin import HubStandIn

from gpt2.config import GPT2Config
from gpt2.data.bpe import train_bpe

REPO = "openai-community/gpt2"


@pytest.fixture
def hub():
    with HubStandIn() as server:
        yield server


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    """A small GPT-2 exactly as the official repository holds it: no prefix, mask buffers, unaligned data, and other clutter."""
    tokenizer = train_bpe("Once upon a midnight dreary, while I pondered, weak and weary,\n" * 30, 280)
    eot = tokenizer.eot
    config = GPT2Config(280, n_positions=32, n_embd=24, n_layer=2, n_head=3, bos_token_id=eot, eos_token_id=eot)
    folder = write_config(tmp_path / "official", config)
    tensors = {
        name: 0.1 * tensor + (".ln_" in f".{name}" and name.endswith("weight")) for name, tensor in weights(config).items()
    }
    write_weights(folder / "model.safetensors", tensors | masks(config), start=3)
    tokenizer.save(folder, n_positions=32)
    clutter = {"README.md": b"# GPT-2", "pytorch_model.bin": b"never fetched", "64-8bits.tflite": b"nor this"}
    return {path.name: path.read_bytes() for path in folder.iterdir()} | clutter


def gpt2(hub: HubStandIn, home: Path, *args: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "gpt2", *args]
    return subprocess.run(command, capture_output=True, text=True, env=hub.environ(home, **environment), timeout=120)


def refused(result: subprocess.CompletedProcess) -> str:
    """Exit 2, one line, no traceback."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr.strip().count("\n") == 0, result.stderr
    return result.stderr


def test_verify_by_the_official_name(hub: HubStandIn, files: dict[str, bytes], tmp_path: Path) -> None:
    """Downloaded, hashed, mapped, equal to transformers; then again without a single request."""
    commit = hub.add_repo(REPO, files, lfs=("model.safetensors", "pytorch_model.bin"))
    result = gpt2(hub, tmp_path / "home", "verify", "gpt2", "--json", "-")
    assert result.returncode == 0, result.stderr + result.stdout
    report = json.loads(result.stdout)
    assert report["ok"] is True
    assert report["model"] == REPO
    assert report["revision"] == commit
    assert [check["id"] for check in report["checks"] if check["skipped"]] == []
    fetched = {request.path for request in hub.requests}
    assert not any("pytorch_model" in path or "tflite" in path for path in fetched)

    before = len(hub.requests)
    again = gpt2(
        hub, tmp_path / "home", "generate", "gpt2", "--offline", "--prompt", "Once", "--max-new-tokens", "4", "--json", "-"
    )
    assert again.returncode == 0, again.stderr
    assert len(json.loads(again.stdout)["ids"]) <= 4
    assert len(hub.requests) == before


def test_a_flipped_byte_never_becomes_a_model(hub: HubStandIn, files: dict[str, bytes], tmp_path: Path) -> None:
    """The Hub's client accepts it, safetensors accepts it, and every answer would be subtly wrong."""
    hub.add_repo(REPO, files, lfs=("model.safetensors",))
    hub.corrupt(REPO, "model.safetensors")
    message = refused(gpt2(hub, tmp_path / "home", "info", "gpt2"))
    assert "model.safetensors" in message
    assert "sha256" in message or "hash" in message


def test_what_the_hub_can_say_no_to(hub: HubStandIn, files: dict[str, bytes], tmp_path: Path) -> None:
    """Missing, gated, incomplete, unreachable: each one line that names the way out."""
    hub.add_repo("someone/private", files)
    hub.gate("someone/private")
    hub.add_repo("someone/weightless", {"config.json": files["config.json"]})
    home = tmp_path / "home"
    assert "someone/missing" in refused(gpt2(hub, home, "info", "someone/missing"))
    assert "gated" in refused(gpt2(hub, home, "info", "someone/private")).lower()
    assert "model.safetensors" in refused(gpt2(hub, home, "info", "someone/weightless"))
    assert "offline" in refused(gpt2(hub, home, "info", "gpt2", "--offline")).lower()
    hub.close()
    assert "offline" in refused(gpt2(hub, home, "info", "gpt2")).lower()
