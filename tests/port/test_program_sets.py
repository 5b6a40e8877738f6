"""The eighth, thirteenth and fourteenth sets of programs: right but for their faults, at each value that they show."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.programs import eighth, fourteenth, thirteenth
from support.programs.checked import Dump, check

SETS = {eighth: eighth.EighthBed, thirteenth: thirteenth.ThirteenthBed, fourteenth: fourteenth.FourteenthBed}
FLATTENED = {"h0": "embedded", "N1": "ln_1", "Q": "q", "K": "k", "U": "v", "S": "scores", "P": "weights", "Y": "mixed"}
FLATTENED |= {"A": "attended", "mid": "middle", "N2": "ln_2", "F": "up", "G": "act", "M": "fed", "h": "result", "hf": "final"}
CHUNKED = {"in": "embedded", "norm_a": "ln_1", "dots": "scores", "probs": "weights", "blend": "mixed", "attn_out": "attended"}
CHUNKED |= {"mid": "middle", "norm_m": "ln_2", "fc": "up", "fc_act": "act", "mlp_out": "fed", "out": "result", "last": "final"}
SESSION = {"start": "embedded", "first": "ln_1", "queries": "q", "keys": "k", "values": "v", "pattern": "weights"}
SESSION |= {"heads": "mixed", "attention": "attended", "between": "middle", "second": "ln_2", "wide": "up", "bent": "act"}
SESSION |= {"narrow": "fed", "end": "result", "normed": "final"}
DUMPS = {name: Dump(**shown) for where in SETS if where is not fourteenth for name, shown in where.DUMPS.items()} | {
    "flattened": Dump(names=FLATTENED, absent=("qkv",), heads_in_width=False),
    "chunked": Dump(names=CHUNKED, absent=("q", "k", "v")),
    "session": Dump(names=SESSION, absent=("qkv",)),
}
CASES = [
    pytest.param(where, program, marks=[] if program == "notebook" else pytest.mark.slow)
    for where in SETS
    for program in where.FAULTS
]


@pytest.mark.parametrize(("where", "program"), CASES)
def test_each_program_is_right_but_for_its_faults(where: object, program: str, tmp_path: Path) -> None:
    """A mistake in a program, or a switch that does nothing, would be counted as the engine's."""
    if reason := where.missing(program):
        pytest.skip(f"this program was not run: {reason}")
    faults = [fault for fault in where.FAULTS[program] if "convention" not in fault]  # that one is lost in rounding
    check(SETS[where](tmp_path / "bed", where.SHAPES[0]), program, faults, DUMPS[program])
