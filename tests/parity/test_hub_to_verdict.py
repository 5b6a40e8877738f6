"""From a Hub name to a verdict: real processes, a real server on loopback, the official file layout."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import torch
from support import forks
from support.hf_layouts import masks, write_config, write_weights
from support.hub_standin import HubStandIn
from support.random_models import random_model

from gpt2.config import GPT2Config
from gpt2.data.bpe import train_bpe

REPO = "openai-community/gpt2"


def files(folder: Path) -> dict[str, bytes]:
    """A small GPT-2 in the layout of the official repository: no prefix, mask buffers, unaligned data, and extra files."""
    tokenizer = train_bpe("Once upon a midnight dreary, while I pondered, weak and weary,\n" * 30, 280)
    eot = tokenizer.eot
    config = GPT2Config(280, n_positions=32, n_embd=24, n_layer=2, n_head=3, bos_token_id=eot, eos_token_id=eot)
    tensors = random_model(config, 0.1, dtype=torch.float32).state_dict()
    write_weights(write_config(folder, config) / "model.safetensors", tensors | masks(config), start=3)
    tokenizer.save(folder, n_positions=32)
    clutter = {"README.md": b"# GPT-2", "pytorch_model.bin": b"never fetched", "64-8bits.tflite": b"nor this"}
    return {path.name: path.read_bytes() for path in folder.iterdir()} | clutter


def gpt2(hub: HubStandIn, home: Path, *args: str) -> subprocess.CompletedProcess:
    return forks.run("-m", "gpt2", *args, environ=hub.environ(home))


def test_verify_by_the_official_name(tmp_path: Path) -> None:
    """Download, hash, map and compare with transformers; then again without a request."""
    with HubStandIn() as hub:
        commit = hub.add_repo(REPO, files(tmp_path / "official"), lfs=("model.safetensors", "pytorch_model.bin"))
        result = gpt2(hub, tmp_path / "home", "verify", "gpt2", "--json", "-")
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
        again = gpt2(
            hub, tmp_path / "home", "generate", "gpt2", "--offline", "--prompt", "Once", "--max-new-tokens", "4", "--json", "-"
        )
        for stderr in (result.stderr, again.stderr):
            assert stderr.count("other files than the official ones") == 1, "in one line, by every command"
            assert "model.safetensors" in stderr
        assert len(json.loads(again.stdout)["ids"]) <= 4
        assert len(hub.requests) == before
