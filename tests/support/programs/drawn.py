"""Pairs of faults drawn at random, for programs: combinations that were not used to develop the diagnosis of dumps."""

import random

import numpy as np

from support.programs import LINES, Home, Program, read_dump

# Faults of the whole model, for which no block is drawn.
WHOLE = (
    "position-",
    "embedding-",
    "final-",
    "logits-",
    "untied",
    "extra-norm-embed",
    "not-loaded-ln_f",
    "way",
    "wpe-",
    "wrong-tok",
)
APART = ("layer-", "weights-reversed", "wrong-all-first", "annotated")  # what comes after them has another block's number


def draw_pairs(n: int, seed: int, home: Home, language: str, level: str) -> list[Program]:
    """``n`` programs of two faults each, of different causes, both of which change the logits by more than rounding."""
    draw, found = random.Random(seed), {}
    words = sorted({word.partition("@")[0] for word in LINES[language].split()})
    words = [word for word in words if not any(part in word for part in APART)]
    while len(found) < n:
        pair = draw.sample(words, 2)
        blocks = draw.sample(range(home.config.n_layer), 2)
        line = " ".join(
            word if any(part in word for part in WHOLE) else f"{word}@{block}" for word, block in zip(pair, blocks, strict=True)
        )
        program = Program(language, line, level)
        ids = [ids[0] for ids in program.causes.values()]
        if ids[0] != ids[1] and line not in found and _both_count(program, home):
            found[line] = program
    return list(found.values())


def _both_count(program: Program, home: Home) -> bool:
    """Whether leaving out either fault changes the logits, which float16 could still show."""
    one, other = program.line.split()
    whole, *less = (_logits(Program(program.language, line, "logits"), home) for line in (program.line, one, other))
    return all(np.abs(whole - rest).max() > 1e-2 * np.abs(whole).std() for rest in less)


def _logits(program: Program, home: Home) -> np.ndarray:
    return next(array for array in read_dump(home.dump(program)).values() if array.dtype.kind == "f")
