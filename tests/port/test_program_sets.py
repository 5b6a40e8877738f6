"""The eighth and the eleventh to fourteenth sets of programs: right but for their faults, at each value that they show."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.programs import eighth, eleventh, fourteenth, thirteenth, twelfth
from support.programs.checked import Dump, check

SETS = {
    eighth: eighth.EighthBed,
    eleventh: eleventh.EleventhBed,
    twelfth: twelfth.TwelfthBed,
    thirteenth: thirteenth.ThirteenthBed,
    fourteenth: fourteenth.FourteenthBed,
}
BATCH = {"encoded": "embedded", "ln1": "ln_1", "preatt": "scores", "att": "weights", "atty": "mixed", "attproj": "attended"}
BATCH |= {"residual2": "middle", "ln2": "ln_2", "fch": "up", "fch_gelu": "act", "fcproj": "fed", "residual3": "result"}
LECTURE = {"emb": "embedded", "norm1": "ln_1", "query": "q", "key": "k", "value": "v", "wei": "weights", "heads": "mixed"}
LECTURE |= {"att": "attended", "shortcut": "middle", "norm2": "ln_2", "fc1": "up", "gelu": "act", "ff": "fed", "block": "result"}
RUNNER = {"emb": "embedded", "xb": "ln_1", "score": "scores", "att": "weights", "xb att": "mixed", "xb2": "attended"}
RUNNER |= {"x att": "middle", "xb ffn": "ln_2", "hb": "up", "hb act": "act", "xb ffn out": "fed", "x": "result"}
KERNELS = {"embed": "embedded", "norm1": "ln_1", "probs": "weights", "mix": "mixed", "attnOut": "attended", "mid": "middle"}
KERNELS |= {"norm2": "ln_2", "hidden": "up", "gelu": "act", "mlpOut": "fed", "blockOut": "result", "normF": "final"}
HOOKED = {"resid_pre": "embedded", "ln1.normalized": "ln_1", "attn_scores": "scores", "pattern": "weights", "z": "mixed"}
HOOKED |= {"attn_out": "attended", "resid_mid": "middle", "ln2.normalized": "ln_2", "pre": "up", "post": "act"}
HOOKED |= {"mlp_out": "fed", "resid_post": "result", "ln_final.normalized": "final"}
OPS = {"inp": "embedded", "norm_1": "ln_1", "c_attn": "qkv", "Qcur": "q", "Kcur": "k", "Vcur": "v", "KQ_masked": "scores"}
OPS |= {"KQ_soft_max": "weights", "KQV_merged": "mixed", "attn_proj": "attended", "inpFF": "middle", "norm_2": "ln_2"}
OPS |= {"fc": "up", "ffn_out": "fed", "inpL": "result", "result_norm": "final"}
CLOSURES = {"norm1": "ln_1", "joined": "mixed", "norm2": "ln_2", "down": "fed", "out": "result", "normed": "final"}
EIGHTH = {"both": "qkv", "merged": "mixed", "keys": "k", "values": "v"}
FLATTENED = {"h0": "embedded", "N1": "ln_1", "Q": "q", "K": "k", "U": "v", "S": "scores", "P": "weights", "Y": "mixed"}
FLATTENED |= {"A": "attended", "mid": "middle", "N2": "ln_2", "F": "up", "G": "act", "M": "fed", "h": "result", "hf": "final"}
CHUNKED = {"in": "embedded", "norm_a": "ln_1", "dots": "scores", "probs": "weights", "blend": "mixed", "attn_out": "attended"}
CHUNKED |= {"mid": "middle", "norm_m": "ln_2", "fc": "up", "fc_act": "act", "mlp_out": "fed", "out": "result", "last": "final"}
SESSION = {"start": "embedded", "first": "ln_1", "queries": "q", "keys": "k", "values": "v", "pattern": "weights"}
SESSION |= {"heads": "mixed", "attention": "attended", "between": "middle", "second": "ln_2", "wide": "up", "bent": "act"}
SESSION |= {"narrow": "fed", "end": "result", "normed": "final"}
STATISTICS = ("ln1_mean", "ln1_rstd", "ln2_mean", "ln2_rstd")
DUMPS = {
    "notebook": Dump(names=EIGHTH, heads_in_width=False, tokens_first=True, least=1e-4),
    "blocked": Dump(names=EIGHTH, absent=("q", "scores"), heads_in_width=False, least=1e-4),
    "pipeline": Dump(absent=("qkv",), heads_in_width=False, least=1e-4),
    "functional": Dump(without=("positions",), heads_in_width=False),
    "batch": Dump(names=BATCH | {"lnf": "final"}, without=STATISTICS, absent=("q", "k", "v")),
    "stream": Dump(names={"context": "mixed", "hidden": "up", "active": "act", "out": "result"}, without=("positions",)),
    "lecture": Dump(names=LECTURE, absent=("qkv",), heads_in_width=False),
    "runner": Dump(names=RUNNER, absent=("qkv",), heads_after_tokens=True),
    "kernels": Dump(names=KERNELS, absent=("q", "k", "v")),
    "hooked": Dump(names=HOOKED, without=("embed", "pos_embed", "ln1.scale", "ln2.scale", "ln_final.scale"), absent=("qkv",)),
    "ops": Dump(names=OPS),
    "closures": Dump(names=CLOSURES, heads_in_width=False),
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
