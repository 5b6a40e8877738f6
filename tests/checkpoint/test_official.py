"""The official files by their hashes, and the small files that other tests take for theirs."""

import hashlib
import json

import pytest
from support.official_repositories import small_files

from gpt2.checkpoint.official import GIT_BLOBS, OFFICIAL_FILES, WEIGHTS, official_files, other_than_official
from gpt2.config import official_size


@pytest.mark.parametrize("name", OFFICIAL_FILES)
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
