"""The parts of a MODEL's name, and what it may be on this machine."""

from pathlib import Path
from typing import Any

import pytest
from support.commands import refusal

from gpt2.checkpoint.checkpoint import resolve
from gpt2.checkpoint.names import FLOATS, RUNS, ModelName, RandomWeights


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2", ("gpt2", None, None)),
        ("gpt2:bf16", ("gpt2", None, "bfloat16")),
        ("gpt2:int8", ("gpt2", None, "int8")),
        ("org/name@refs/pr/1", ("org/name", "refs/pr/1", None)),
        ("org/name@v1:float16", ("org/name", "v1", "float16")),
        ("./dir/x.safetensors:fp64", ("./dir/x.safetensors", None, "float64")),
        ("./dir/no@x", ("./dir/no@x", None, None)),
        ("random:gpt2", ("random:gpt2", None, None, RandomWeights("gpt2", 0))),
        ("random:gpt2:3", ("random:gpt2:3", None, None, RandomWeights("gpt2", 3))),
        ("random:gpt2-xl:7:bf16", ("random:gpt2-xl:7", None, "bfloat16", RandomWeights("gpt2-xl", 7))),
        ("odd:dir/model", ("odd:dir/model", None, None)),
        (r"C:\models\gpt2", (r"C:\models\gpt2", None, None)),
        ("run:bf16", ("run:bf16", None, None)),  # a path that exists is not split
        ("run:bf16:fp32", ("run:bf16", None, "float32")),
        ("run@v1", ("run@v1", None, None)),
    ],
)
def test_the_parts_of_a_name(name: str, expected: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Base, revision and dtype, and what random weights are drawn from."""
    for folder in ("run:bf16", "run@v1"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)
    parsed = ModelName.parse(name)
    assert (parsed.base, parsed.revision, parsed.dtype, parsed.random) == (*expected, None)[:4]


@pytest.mark.parametrize(
    ("name", "beside", "match"),
    [
        ("gpt2", {"use": FLOATS, "dtype": "int8"}, "eight bits are for running a model"),
        ("gpt2@v1:bf16", {"dtype": "fp16"}, "is wanted here; leave out"),
        ("gpt2@v1:bf16", {"revision": "v2"}, "disagree"),
        ("random:gpt2", {"revision": "v1"}, "random:gpt2 has no revisions"),
        *((f"random:{bad}", {}, "gpt2-medium") for bad in ("", "gpt3", "gpt2:x", "gpt2:-1", "gpt2:", "gpt2:1:2")),
        (f"random:gpt2:{2**63}", {}, "within 0 .. 2**63"),
    ],
)
def test_a_name_that_contradicts_itself_or_its_use(name: str, beside: dict[str, Any], match: str) -> None:
    """No file holds int8 weights, and transformers cannot verify them: int8 is for running a model only."""
    assert match in refusal(ModelName.parse, name, **beside)
    assert ModelName.parse("gpt2@v1:bf16", FLOATS, dtype="bf16", revision="v1") == ModelName.parse("gpt2@v1:bf16", FLOATS)
    assert ModelName.parse("gpt2", RUNS, dtype="int8").dtype == "int8"


def test_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder wins over a repository of the same name, but not over an official short name: many folders contain a ``gpt2``."""
    (tmp_path / "out/step-2000").mkdir(parents=True)
    (tmp_path / "a@b").mkdir()
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "ckpt.pt").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("out/step-2000", "ckpt.pt", "a@b", "./gpt2", str(tmp_path), "~/ckpt.pt"):
        source = resolve(name)
        assert (source.name, source.revision) == (name, None)
        assert source.path == Path(name).expanduser()
    assert "has no revisions" in refusal(resolve, "out/step-2000", revision="main")
    assert "no such file or directory: ./out/step-200 (did you mean step-2000?)" in refusal(resolve, "./out/step-200")


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("gtp2", "did you mean gpt2?"),
        ("GPT2-Medium", "did you mean gpt2-medium?"),
        ("shakespear-mini", "did you mean shakespeare-mini?"),
        ("", "unknown model ''"),
        ("a/b/c", "a/b/c: no such folder"),
        ("random:gpt2", "unknown model"),
        ("gpt2@", "cannot be a revision"),
        ("org/name@../../etc", "cannot be a revision"),
        ("two words", "unknown model"),
        *((path, "no such file or directory") for path in ("./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "../nowhere")),
    ],
)
def test_unknown_names(name: str, match: str) -> None:
    assert match in refusal(resolve, name)
