"""A rehearsal of the official repositories: exact names, shapes, layout and small files, through the real client."""

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support import forks
from support.hub_standin import HubStandIn
from support.official_repositories import OFFICIAL, Weights, add, require_room, small_files

from gpt2.checkpoint.cache import GIT_BLOBS, OFFICIAL_FILES, WEIGHTS, official_files, other_than_official
from gpt2.checkpoint.containers.safetensors_file import SafetensorsFile
from gpt2.checkpoint.download import SMALL
from gpt2.config import OFFICIAL_SIZES, official_size


@pytest.mark.parametrize("name", OFFICIAL)
def test_the_small_files_are_the_official_ones(name: str) -> None:
    """With a config of our own, the rehearsal would only test our own format."""
    files = {file: hashlib.sha256(content).hexdigest() for file, content in small_files(name).items()}
    assert files == {file: digest for file, digest in OFFICIAL_FILES[name].items() if file not in WEIGHTS}
    assert json.loads(small_files(name)["config.json"])["n_layer"] == official_size(name).n_layer
    for file, content in small_files(name).items():
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        assert GIT_BLOBS[files[file]] == blob, "by which the Hub's listing knows it"


def test_which_files_are_official() -> None:
    """A changed file must not be called official, nor an official one changed."""
    own, medium = OFFICIAL_FILES["gpt2"], OFFICIAL_FILES["gpt2-medium"]
    assert str(official_files(own)) == "the official file of gpt2"
    assert str(official_files(medium, "./copy")) == "the official file of gpt2-medium"
    other = {**own, "config.json": "0" * 64}
    assert str(official_files(other)) == "the official file of gpt2; config.json differs from gpt2's"
    changed = {**own, "model.safetensors": "0" * 64}  # the pickle beside it is official, but is not loaded
    assert str(official_files(changed)) == "not the official file: model.safetensors differs from gpt2's"
    swapped = official_files({**medium, "README.md": "1" * 64}, "openai-community/gpt2@main")
    assert str(swapped).startswith("not the official file: generation_config.json, model.safetensors, config.json differ from")
    assert official_files({"weights.safetensors": own["model.safetensors"]}).weights == ("weights.safetensors",)
    listing = {"model.safetensors": own["model.safetensors"], "config.json": GIT_BLOBS[own["config.json"]]}
    assert other_than_official("openai-community/gpt2", listing) == ()
    assert other_than_official("openai-community/gpt2-medium", listing) == ("model.safetensors", "config.json")
    assert other_than_official("someone/gpt2", listing) == ()
    assert other_than_official("openai-community/gpt2", {"model.safetensors": "3" * 40, "vocab.json": ""}) == ()
    assert str(official_files({"vocab.json": own["vocab.json"], "config.json": "2" * 64})) == "not an official file"


@pytest.mark.parametrize("name", OFFICIAL_SIZES)
def test_the_official_files_come_out(name: str, tmp_path: Path) -> None:
    """FACTS.md: gpt2 has a header of 14,283 bytes, 160 tensors, data from byte 14,291, and 548,105,171 bytes in all."""
    official, weights, config = OFFICIAL[name], Weights(name), official_size(name)
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as file:
        file.write(weights.head)
        file.truncate(weights.size)  # the data is a hole in the file and takes no disk
    size = path.stat().st_size
    assert int.from_bytes(weights.head[:8], "little") == official.header
    assert size == official.size
    entries = SafetensorsFile(path).entries
    assert len(entries) == official.tensors == 13 * config.n_layer + 4
    assert {entry.dtype for entry in entries.values()} == {torch.float32}
    assert min(entry.start for entry in entries.values()) == 8 + official.header
    assert all(entry.start % 4 for entry in entries.values()), "no float is aligned"
    masks = [entry for key, entry in entries.items() if key.endswith(".attn.bias")]
    assert [entry.shape for entry in masks] == [(1, 1, 1024, 1024)] * config.n_layer
    assert size - 8 - official.header == 4 * (config.num_parameters() + config.n_layer * 1024 * 1024)
    assert sum(key.startswith("transformer.") for key in entries) == (official.tensors if name == "distilgpt2" else 0)
    raw = json.loads(weights.head[8:])
    assert raw["__metadata__"] == {"format": "pt"}
    if name == "gpt2":
        assert (official.header, size, len(entries), 8 + official.header) == (14_283, 548_105_171, 160, 14_291)
        assert raw["h.2.attn.c_attn.weight"]["data_offsets"] == [541_012_992, 548_090_880], "as the real file has it"


@pytest.fixture
def hub():
    with HubStandIn() as server:
        yield server


def report_of(hub: HubStandIn, home: Path, *command: str) -> Any:
    """The JSON printed by ``command``, run in a process with this Hub."""
    return json.loads(forks.run(*command, environ=hub.environ(home), timeout=3600).stdout)


def assert_nothing_else_was_fetched(hub: HubStandIn, name: str) -> None:
    """Assert that every byte of the wanted files was sent once, and nothing else."""
    official, (tree,) = OFFICIAL[name], hub.repos[OFFICIAL[name].repo].commits.values()
    wanted = {path for path in tree if path in (*SMALL, "model.safetensors")}
    assert hub.sent == {(official.repo, path): tree[path].size for path in wanted}
    assert {request.file for request in hub.requests if "/api/" not in request.path} == wanted


@pytest.mark.slow
def test_verify_an_official_repository(hub: HubStandIn, tmp_path: Path) -> None:
    """The whole path of `gpt2 verify distilbert/distilgpt2`: listing, download, hashes, cache, mapping, transformers, tokens.

    It is the smallest official model. gpt2 takes 1.5 times as long; the README has it as `gpt2 verify random:gpt2`.
    """
    name = "distilgpt2"
    require_room(tmp_path, disk=1e9, memory=56 * official_size(name).num_parameters())
    commit = add(hub, name)
    begin = time.perf_counter()
    report = report_of(hub, tmp_path, "-m", "gpt2", "verify", OFFICIAL[name].repo, "--json", "-")
    print(f"{name}: {time.perf_counter() - begin:.0f} s")
    assert report["ok"] is True
    assert (report["model"], report["revision"]) == (OFFICIAL[name].repo, commit)
    assert [check["id"] for check in report["checks"] if check["skipped"]] == []
    assert_nothing_else_was_fetched(hub, name)
    hub.requests.clear()
    info = report_of(hub, tmp_path, "-m", "gpt2", "info", name, "--offline", "--json", "-")
    assert hub.requests == []
    (tree,) = hub.repos[OFFICIAL[name].repo].commits.values()
    assert info["revision"] == commit
    assert info["parameters"] == official_size(name).num_parameters()
    files = {file["name"]: file for file in info["files"]}
    assert files["model.safetensors"]["sha256"] == tree["model.safetensors"].sha256
    assert files["model.safetensors"]["size"] == OFFICIAL[name].size
    assert files["config.json"]["sha256"] == hashlib.sha256(small_files(name)["config.json"]).hexdigest()
    assert len(info["dropped"]) == official_size(name).n_layer
