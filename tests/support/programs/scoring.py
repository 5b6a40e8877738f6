"""Decide whether the diagnosis of a dump was right: the rule for modules, and what a dump can show of a place."""

from dataclasses import replace

from gpt2.config import GPT2Config
from support.faulty.scoring import Row, blocks, score
from support.programs import Program


def score_dump(program: Program, diagnosis, config: GPT2Config, seconds: float, cpu: float) -> Row:
    """As :func:`score`, but another epsilon need not be seen in every block: where variances are large it changes nothing."""
    row = score(program, diagnosis, config, seconds, cpu)
    words = [word for word in program.causes if word.startswith("eps-")]
    if row.located or len(words) != len(program.causes):
        return row
    places = [cause.where for cause in diagnosis.causes if cause.id == "layernorm-eps"]
    right = {block for word in words for block in program.faults.layers(word, config.n_layer)}
    at_a_norm = ".ln_" in f".{row.point}" or program.level == "block"  # which holds no norm
    return replace(row, located=at_a_norm and bool(places) and blocks(places, config.n_layer) <= right)
