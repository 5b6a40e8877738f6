"""GPT-2s that are no torch modules, in NumPy: right but for their faults, and equal where they have none."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.programs.fourteenth import FAULTS, SHAPES, FourteenthBed

import gpt2
from gpt2.measure.tracing import trace

each_program = pytest.mark.parametrize("program", FAULTS)


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> FourteenthBed:
    return FourteenthBed(tmp_path_factory.mktemp("programs") / "bed", SHAPES[0])


def ours(bed: FourteenthBed) -> dict[str, np.ndarray]:
    """Our own model's values in float64, with its fused projection."""
    values = {
        point: value.numpy() for point, value in trace(gpt2.load(str(bed.model)).double(), torch.from_numpy(bed.ids)).items()
    }
    for n in range(bed.shape.layers):
        values[f"h.{n}.qkv"] = np.concatenate([values[f"h.{n}.attn.{part}"] for part in "qkv"], -1)
    return values


def point_of(value: np.ndarray, values: dict[str, np.ndarray]) -> str:
    """The point of our model that has this value (B, T, ...) or (B, H, T, ...); of scores, what is not masked."""
    if value.ndim == 4 and value.shape[2] != value.shape[3]:
        value = value.swapaxes(1, 2).reshape(*value.shape[::2], -1)
    past = np.tri(value.shape[-2]) > 0 if value.ndim == 4 else True
    (found,) = (
        point
        for point, own in values.items()
        if own.shape == value.shape
        and np.abs(np.where(past, own - value, 0)).max() <= 1e-12 * np.abs(np.where(past, own, 0)).max()
    )
    return found


@each_program
def test_each_program_is_right_but_for_its_faults(program: str, bed: FourteenthBed) -> None:
    """A mistake in a program, or a patch that does nothing, would be counted as the engine's."""
    values, right = ours(bed), bed.run(program)[1]
    shown = {point_of(value, values) for value in right.values()}
    assert len(shown) == len(right) > 12 * bed.shape.layers
    for fault in FAULTS[program]:
        wrong = bed.run(program, [fault], "float32")[1]["logits"]
        assert np.isfinite(wrong).all(), fault
        assert np.linalg.norm(wrong - right["logits"]) > 1e-3 * np.linalg.norm(right["logits"]), fault


@each_program
def test_a_right_program_is_equal(program: str, tmp_path: Path) -> None:
    """Control: rounding to a dtype, and arrays of something else, must not be called a fault."""
    other = FourteenthBed(tmp_path / "other", SHAPES[1])  # of another size
    for level, dtype in (("full", "float16"), ("full", "float64"), ("block", "float32"), ("logits", "float16")):
        said = gpt2.diagnose(str(other.dump(program, (), level, dtype, seed=8)), str(other.model))
        assert (said.verdict, said.causes) == ("equal", ()), (level, dtype)
        assert said.seen == "dump"  # the noise is an array like another
