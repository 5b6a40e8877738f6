"""The official files by their hashes, and the vocabulary that other tests take for theirs."""

import hashlib

from support.tokenizers import openai_vocabulary

from gpt2.checkpoint.official import GIT_BLOBS, OFFICIAL_FILES, official_files, other_than_official


def test_the_vocabulary_is_the_official_one() -> None:
    """Tests that read OpenAI's own files would otherwise read ours."""
    for file, name in zip(openai_vocabulary(), ("vocab.json", "merges.txt"), strict=True):
        content = file.read_bytes()
        assert {files[name] for files in OFFICIAL_FILES.values()} == {digest := hashlib.sha256(content).hexdigest()}
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        assert GIT_BLOBS[digest] == blob, "by which the Hub's listing knows it"


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
