"""From a name on the Hub to a verdict: real processes, a real server on loopback, the official file layout."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from support.hf_layouts import masks, weights, write_config, write_weights
from support.hub_standin import HubStandIn

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
    assert again.returncode == 0, again.stderr
    for stderr in (result.stderr, again.stderr):
        assert stderr.count("other files than the official ones") == 1, "in one line, by every command"
        assert "model.safetensors" in stderr
    assert len(json.loads(again.stdout)["ids"]) <= 4
    assert len(hub.requests) == before


class Evil:
    """Unpickled, it leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


def pickled(value: object) -> bytes:
    torch.save(value, buffer := io.BytesIO())
    return buffer.getvalue()


def test_repositories_with_pickles_alone(hub: HubStandIn, files: dict[str, bytes], tmp_path: Path) -> None:
    """Half of the older GPT-2s have only `pytorch_model.bin`. The same model comes out of it, whole or in shards; and one that
    would run code when it is unpickled is refused, and runs none."""
    safe, small = files["model.safetensors"], {name: files[name] for name in files if "model." not in name}
    tensors = safetensors.torch.load(safe)
    shards = {f"pytorch_model-0000{n}-of-00002.bin": {key: tensors[key] for key in sorted(tensors)[n - 1 :: 2]} for n in (1, 2)}
    index = {"metadata": {}, "weight_map": {key: shard for shard, part in shards.items() for key in part}}
    sharded = {name: pickled(part) for name, part in shards.items()}
    hub.add_repo("org/safe", small | {"model.safetensors": safe})
    hub.add_repo("org/whole", small | {"pytorch_model.bin": pickled(tensors)}, lfs=("pytorch_model.bin",))
    hub.add_repo("org/shards", small | sharded | {"pytorch_model.bin.index.json": json.dumps(index).encode()}, lfs=(*sharded,))
    evil = pickled({**tensors, "h.0.ln_1.bias": Evil(tmp_path / "mark")})
    hub.add_repo("org/evil", small | {"pytorch_model.bin": evil}, lfs=("pytorch_model.bin",))

    code = """
import sys, json, torch, gpt2
from gpt2.errors import CheckpointError
safe, *others = [gpt2.load(name).state_dict() for name in ("org/safe", "org/whole", "org/shards")]
equal = [all(torch.equal(safe[key], other[key]) for key in safe) for other in others]
try:
    gpt2.load("org/evil")
except CheckpointError as error:
    print(json.dumps({"equal": equal, "refused": str(error)}))
"""
    root = str(Path(__file__).parents[2])
    environment = hub.environ(tmp_path / "home") | {"PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["equal"] == [True, True]
    assert "pytorch_model.bin" in told["refused"]
    assert "open" in told["refused"], "it names what would have been called"
    assert not (tmp_path / "mark").exists()


def test_a_flipped_byte_never_becomes_a_model(hub: HubStandIn, files: dict[str, bytes], tmp_path: Path) -> None:
    """The Hub's client accepts it, safetensors accepts it, and every answer would be subtly wrong."""
    hub.add_repo(REPO, files, lfs=("model.safetensors",))
    hub.corrupt(REPO, "model.safetensors")
    message = refused(gpt2(hub, tmp_path / "home", "info", "gpt2"))
    assert "model.safetensors" in message
    assert "sha256" in message or "hash" in message


@pytest.mark.slow
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
