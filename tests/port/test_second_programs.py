"""Programs that were written after the diagnosis of dumps, until the ninth set: right but for their faults."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.programs import fifth, fourth, seventh, sixth
from support.programs.bed import Bed
from support.programs.second import FAULTS, SHAPES, SecondBed

import gpt2
from gpt2.port.dump import examination

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Bed:
    return SecondBed(tmp_path_factory.mktemp("second") / "bed", SHAPES[0])


def need(program: str) -> None:
    if program == "nested" and not shutil.which("node"):
        pytest.skip("the JavaScript program was not run: node is not installed")


@pytest.mark.parametrize("program", FAULTS)
def test_each_program_is_right_but_for_its_faults(program: str, bed: Bed) -> None:
    """A mistake in a program, or a switch that does nothing, would be counted as the engine's."""
    need(program)
    check(bed, program, FAULTS[program])


def test_the_program_in_rust_is_right_but_for_its_faults(tmp_path: Path) -> None:
    """As above, for the fourth set; and a right program that dumps keys turned and heads merged into the batch is equal."""
    if not fourth.compiler():
        pytest.skip("the Rust program was not run: no rustc is installed that runs")
    bed = fourth.RustBed(tmp_path / "bed", fourth.SHAPES[1])
    check(bed, "rust", [fault for fault in fourth.RUST if fault != "padded vocabulary"])
    assert gpt2.diagnose(str(bed.dump("rust", [], "full", "float32", seed=0)), gpt2.load(str(bed.model))).verdict == "equal"


@pytest.mark.parametrize("program", fifth.FAULTS)
def test_each_program_of_the_fifth_set_is_right_but_for_its_faults(program: str, tmp_path: Path) -> None:
    """As above, for the fifth set; and what makes no difference makes none."""
    if reason := fifth.missing(program):
        pytest.skip(f"the Java program was not run: {reason}")
    bed = fifth.FifthBed(tmp_path / "bed", fifth.SHAPES[2])
    check(bed, program, fifth.FAULTS[program])
    for harmless in fifth.sixty.HARMLESS if program == "sixty" else ():
        apart = bed.run(program, [harmless])[1]["logits"] - bed.run(program)[1]["logits"]
        assert np.abs(apart).max() < 1e-12


@pytest.mark.parametrize("program", sixth.FAULTS)
def test_each_program_of_the_sixth_set_is_right_but_for_its_faults(program: str, tmp_path: Path) -> None:
    """As above, for the sixth set."""
    if reason := sixth.missing(program):
        pytest.skip(f"this program was not run: {reason}")
    bed = sixth.SixthBed(tmp_path / "bed", sixth.SHAPES[2])
    check(bed, program, sixth.FAULTS[program])
    apart = bed.run(program, [sixth.HARMLESS[program]])[1]["logits"] - bed.run(program)[1]["logits"]
    assert np.abs(apart).max() < 1e-12


@pytest.mark.parametrize("program", seventh.FAULTS)
def test_each_program_of_the_seventh_set_is_right_but_for_its_faults(program: str, tmp_path: Path) -> None:
    """As above, for the seventh set."""
    if reason := seventh.missing(program):
        pytest.skip(f"this program was not run: {reason}")
    check(seventh.SeventhBed(tmp_path / "bed", seventh.SHAPES[0]), program, seventh.FAULTS[program])


def test_an_unknown_attention_is_not_named_where_each_token_sees_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unscaled products of keys with keys give weights near 1 on the diagonal: the values themselves, recorded in any case."""
    if not fourth.compiler():
        pytest.skip("the Rust program was not run: no rustc is installed that runs")
    monkeypatch.setattr(examination, "SECONDS", {True: 12.0, False: 12.0})
    bed = fourth.RustBed(tmp_path / "bed", fourth.SHAPES[1])
    said = gpt2.diagnose(str(bed.dump("rust", ["rotary"], "full", "float32", seed=1)), gpt2.load(str(bed.model)))
    assert {cause.id for cause in said.causes} <= {"rotary-positions"}


def check(bed: Bed, program: str, faults: Iterable[str]) -> None:
    ids, right = bed.run(program)
    with torch.no_grad():
        truth = gpt2.load(str(bed.model)).double()(torch.from_numpy(np.atleast_2d(ids))).numpy()
    truth = truth.reshape(*ids.shape, -1)
    size = np.sqrt((truth**2).mean())
    assert np.abs(right["logits"] - truth).max() < 1e-12 * size
    for fault in faults:
        assert np.abs(bed.run(program, [fault])[1]["logits"] - truth).max() > 5e-5 * size, fault


def test_scores_multiplied_by_two_are_diagnosed_without_a_traceback(tmp_path: Path) -> None:
    """The walk kept a value of one head where GPT-2 has several, and comparing the two ended the diagnosis."""
    bed = SecondBed(tmp_path / "bed", SHAPES[2])
    dump = bed.dump("cached", ["by 2"], "full", "float64", seed=1)
    assert gpt2.diagnose(str(dump), gpt2.load(str(bed.model))).verdict == "mismatch"
