"""The twelfth set of programs, by an author who did not know the engine: right but for their faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.programs import twelfth
from support.programs.checked import Dump, check

LECTURE = {"emb": "embedded", "norm1": "ln_1", "query": "q", "key": "k", "value": "v", "wei": "weights", "heads": "mixed"}
LECTURE |= {"att": "attended", "shortcut": "middle", "norm2": "ln_2", "fc1": "up", "gelu": "act", "ff": "fed", "block": "result"}
RUNNER = {"emb": "embedded", "xb": "ln_1", "score": "scores", "att": "weights", "xb att": "mixed", "xb2": "attended"}
RUNNER |= {"x att": "middle", "xb ffn": "ln_2", "hb": "up", "hb act": "act", "xb ffn out": "fed", "x": "result"}
KERNELS = {"embed": "embedded", "norm1": "ln_1", "probs": "weights", "mix": "mixed", "attnOut": "attended", "mid": "middle"}
KERNELS |= {"norm2": "ln_2", "hidden": "up", "gelu": "act", "mlpOut": "fed", "blockOut": "result", "normF": "final"}
DUMPS = {
    "lecture": Dump(names=LECTURE, absent=("qkv",), heads_in_width=False),
    "runner": Dump(names=RUNNER, absent=("qkv",), heads_after_tokens=True),
    "kernels": Dump(names=KERNELS, absent=("q", "k", "v")),
}


@pytest.mark.slow
@pytest.mark.parametrize("program", twelfth.FAULTS)
def test_each_program_of_the_twelfth_set_is_right_but_for_its_faults(program: str, tmp_path: Path) -> None:
    """A mistake in a program, or a switch that does nothing, would be counted as the engine's."""
    if reason := twelfth.missing(program):
        pytest.skip(f"this program was not run: {reason}")
    check(twelfth.TwelfthBed(tmp_path / "bed", twelfth.SHAPES[0]), program, twelfth.FAULTS[program], DUMPS[program])
