"""The thirteenth set of programs, by an author who did not know the engine: right but for their faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.programs import thirteenth
from support.programs.checked import Dump, check

HOOKED = {"resid_pre": "embedded", "ln1.normalized": "ln_1", "attn_scores": "scores", "pattern": "weights", "z": "mixed"}
HOOKED |= {"attn_out": "attended", "resid_mid": "middle", "ln2.normalized": "ln_2", "pre": "up", "post": "act"}
HOOKED |= {"mlp_out": "fed", "resid_post": "result", "ln_final.normalized": "final"}
OPS = {"inp": "embedded", "norm_1": "ln_1", "c_attn": "qkv", "Qcur": "q", "Kcur": "k", "Vcur": "v", "KQ_masked": "scores"}
OPS |= {"KQ_soft_max": "weights", "KQV_merged": "mixed", "attn_proj": "attended", "inpFF": "middle", "norm_2": "ln_2"}
OPS |= {"fc": "up", "ffn_out": "fed", "inpL": "result", "result_norm": "final"}
CLOSURES = {"norm1": "ln_1", "joined": "mixed", "norm2": "ln_2", "down": "fed", "out": "result", "normed": "final"}
DUMPS = {
    "hooked": Dump(names=HOOKED, without=("embed", "pos_embed", "ln1.scale", "ln2.scale", "ln_final.scale"), absent=("qkv",)),
    "ops": Dump(names=OPS),
    "closures": Dump(names=CLOSURES, heads_in_width=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("program", thirteenth.FAULTS)
def test_each_program_of_the_thirteenth_set_is_right_but_for_its_faults(program: str, tmp_path: Path) -> None:
    """A mistake in a program, or a switch that does nothing, would be counted as the engine's."""
    if reason := thirteenth.missing(program):
        pytest.skip(f"this program was not run: {reason}")
    check(thirteenth.ThirteenthBed(tmp_path / "bed", thirteenth.SHAPES[0]), program, thirteenth.FAULTS[program], DUMPS[program])
