"""GPT-2s that are no torch modules, in NumPy, C and JavaScript: they are as faulty as they say, and dump what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.programs import DTYPES, LANGUAGES, LEVELS, PROGRAMS, SIZES, Home, Program, missing, read_dump, shuffled
from support.programs.reference import expected_logits

import gpt2

BOUNDS = {"numpy": 1e-10, "c": 2e-4, "javascript": 1e-10}  # of a logit over the root mean square; C computes in float32
LOGITS = {"numpy": "logits", "c": "logits", "javascript": "y"}
QUICK = (
    *("gelu-erf@1", "eps-1e-3@1.ln_2", "rmsnorm", "scale-by-heads", "mask-strict@1", "softmax-heads", "heads-merged-wrongly"),
    *("position-offset", "post-norm", "residual-from-normed", "qkv-kvq", "transposed-q@1", "wrong-fc@0", "untied-head"),
)


def slow_unless(quick: bool, *values: str) -> object:
    return pytest.param(*values, marks=[] if quick else pytest.mark.slow)


each_language = pytest.mark.parametrize("language", [slow_unless(name == "numpy", name) for name in LANGUAGES])
each_program = pytest.mark.parametrize(
    "name",
    [
        slow_unless(one.language == "numpy" and one.line in QUICK, name)
        for number, (name, one) in enumerate(PROGRAMS.items())
        if number % 3 == 0 or (one.language == "numpy" and one.line in QUICK)
    ],
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(tmp_path_factory.mktemp("programs") / "tiny")


def need(language: str) -> None:
    if lacks := missing(language):
        pytest.skip(f"the {language} programs were not run: {lacks}")


def logits_of(program: Program, home: Home) -> np.ndarray:
    """(B, T, V) in float64, from what the program dumped."""
    found = read_dump(home.dump(program))[LOGITS[program.language]]
    return found if found.ndim == 3 else found[None]


def error(found: np.ndarray, expected: torch.Tensor) -> float:
    """The largest difference over the root mean square; of as many rows as the program ran."""
    wanted = expected.numpy()[: len(found)]
    return float(np.abs(found - wanted).max() / np.sqrt((wanted**2).mean()))


@each_language
def test_a_program_without_faults_is_right(language: str, home: Home) -> None:
    """Control: a mistake in the program itself would be counted as the fault under test."""
    need(language)
    program = Program(language, "")
    assert error(logits_of(program, home), expected_logits(program, home)) < BOUNDS[language]


@each_program
def test_a_faulty_program_is_as_faulty_as_it_says(name: str, home: Home) -> None:
    """A switch that does another thing than its name would count right diagnoses as wrong ones."""
    program = PROGRAMS[name]
    need(program.language)
    found, expected = logits_of(program, home), expected_logits(program, home)
    assert expected is not None
    bound = 1e-6 if "sinusoidal" in program.line else BOUNDS[program.language]  # torch rounds that table to float32
    assert error(found, expected) < bound
    right = expected_logits(Program(program.language, ""), home)
    assert error(found, right) > 10 * error(found, expected), "the fault shows far beyond rounding"


@each_language
def test_a_dump_has_its_level_and_dtype(language: str, home: Home) -> None:
    """Half-precision numbers written by hand would be another rounding than NumPy's, and a level might hold too much."""
    need(language)
    whole, counts = {}, {}
    for level in LEVELS:
        for dtype in DTYPES:
            arrays = read_dump(home.dump(Program(language, "", level), dtype, "float32"))
            floats = {name: array for name, array in arrays.items() if array.dtype.kind == "f"}
            assert {array.dtype for array in floats.values()} == {np.dtype(dtype)}
            whole[level, dtype], counts[level] = floats, len(floats)
            for name, array in floats.items():
                exact = whole[level, "float16"][name] if dtype == "float16" else array.astype(np.float16)
                assert np.array_equal(whole[level, "float16"][name], exact), f"{level} {dtype} {name}"
    layers = home.config.n_layer
    assert counts["logits"] == 1
    assert layers < counts["block"] <= layers + 2
    assert counts["full"] > 10 * layers


@pytest.mark.slow
def test_another_size_is_right_too(tmp_path: Path) -> None:
    """A size written into a program by hand would hold at one shape only."""
    home = Home(tmp_path / "wider", SIZES["wider"])
    for language in LANGUAGES:
        if not missing(language):
            program = Program(language, "")
            assert error(logits_of(program, home), expected_logits(program, home)) < BOUNDS[language]


@pytest.mark.parametrize(
    ("language", "level"),
    [slow_unless((language, level) == ("numpy", "full"), language, level) for language in LANGUAGES for level in LEVELS],
)
def test_a_right_program_is_equal(language: str, level: str, home: Home) -> None:
    """Control: rounding to a dtype, and arrays of something else, must not be called a fault."""
    need(language)
    for dtype in DTYPES:
        path = shuffled(home.dump(Program(language, "", level), dtype, "float32", foreign=8), seed=8)
        diagnosis = gpt2.diagnose(str(path), str(home.model))
        assert (diagnosis.verdict, diagnosis.causes) == ("equal", ()), dtype
        assert diagnosis.seen == "dump"  # the noise is an array like another


@pytest.mark.slow
@pytest.mark.parametrize("level", ["full", "block"])
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("gelu-relu@1", ("gelu-variant", "h.1.mlp.act")),
        ("residual-halved@1", ("residual-scaled", "h.1")),
        ("mask-missing", ("mask-missing", "h.*.attn")),
    ],
)
def test_a_large_model_is_searched_from_few_values(
    fault: str, cause: tuple[str, str], level: str, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The edited node alone is looked at, the first tokens, in float32; a stream in float64 that enters them was an error."""
    monkeypatch.setattr("gpt2.port.graph.SMALL", 0)
    diagnosis = gpt2.diagnose(str(home.dump(Program("numpy", fault, level))), str(home.model))
    assert [(cause.id, cause.where) for cause in diagnosis.causes] == [cause]
