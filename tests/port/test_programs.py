"""GPT-2s that are no torch modules, in NumPy, C and JavaScript: right but for their faults, and equal where they have none."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.programs.checked import check
from support.programs.fourteenth import FAULTS, SHAPES, FourteenthBed, missing

import gpt2

# A program's names of our values, and the values of ours that it does not show.
FLATTENED = {"h0": "embedded", "N1": "ln_1", "Q": "q", "K": "k", "U": "v", "S": "scores", "P": "weights", "Y": "mixed"}
FLATTENED |= {"A": "attended", "mid": "middle", "N2": "ln_2", "F": "up", "G": "act", "M": "fed", "h": "result", "hf": "final"}
CHUNKED = {"in": "embedded", "norm_a": "ln_1", "dots": "scores", "probs": "weights", "blend": "mixed", "attn_out": "attended"}
CHUNKED |= {"mid": "middle", "norm_m": "ln_2", "fc": "up", "fc_act": "act", "mlp_out": "fed", "out": "result", "last": "final"}
SESSION = {"start": "embedded", "first": "ln_1", "queries": "q", "keys": "k", "values": "v", "pattern": "weights"}
SESSION |= {"heads": "mixed", "attention": "attended", "between": "middle", "second": "ln_2", "wide": "up", "bent": "act"}
SESSION |= {"narrow": "fed", "end": "result", "normed": "final"}
SHOWN = {"flattened": (FLATTENED, ("qkv",)), "chunked": (CHUNKED, ("q", "k", "v")), "session": (SESSION, ("qkv",))}

each_program = pytest.mark.parametrize(
    "program", [pytest.param(name, marks=[pytest.mark.slow] * (name != "flattened")) for name in FAULTS]
)


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> FourteenthBed:
    return FourteenthBed(tmp_path_factory.mktemp("programs") / "bed", SHAPES[0])


def need(program: str) -> None:
    if lacks := missing(program):
        pytest.skip(f"this program was not run: {lacks}")


@each_program
def test_each_program_is_right_but_for_its_faults(program: str, bed: FourteenthBed) -> None:
    """A mistake in a program, or a patch that does nothing, would be counted as the engine's."""
    need(program)
    check(bed, program, FAULTS[program], *SHOWN[program])


@each_program
def test_a_right_program_is_equal(program: str, tmp_path: Path) -> None:
    """Control: rounding to a dtype, and arrays of something else, must not be called a fault."""
    need(program)
    other = FourteenthBed(tmp_path / "other", SHAPES[1])  # of another size
    for level, dtype in (("full", "float16"), ("full", "float64"), ("block", "float32"), ("logits", "float16")):
        said = gpt2.diagnose(str(other.dump(program, (), level, dtype, seed=8)), str(other.model))
        assert (said.verdict, said.causes) == ("equal", ()), (level, dtype)
        assert said.seen == "dump"  # the noise is an array like another
