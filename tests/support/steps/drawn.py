"""Training steps with two or three faults of different stages, drawn at random."""

from __future__ import annotations

import random
import warnings
from functools import cache

from support.steps import (
    CONFIG,
    FAULTY_STEPS,
    MEANINGS,
    PLAIN,
    STAGES,
    STYLES,
    Step,
    WithSettings,
    kind_of,
    module_of,
    patches_of,
    words_of,
)
from support.steps.faults import Settings, patched
from support.steps.reference import apart, batches, right_run, run

# They are seen in a run other than the first, at random, or only with padding: each is tried alone.
APART = {"moments-kept", "dropout", *(word for word, meaning in MEANINGS.items() if "prompt" in meaning.settings)}
# A fault that leaves nothing of another: without moments there are no betas, without a clip no norm.
MOMENTS = {"betas-swapped", "betas-default", "uncorrected", "corrected-late", "eps-inside", "eps-before-correction", "eps-1e-6"}
EMPTIED = {
    "sgd": MOMENTS | {"amsgrad", "adam", "decay-coupled", "moments-lost"},
    "moments-lost": MOMENTS | {"amsgrad"},
    "last-micro-batch": {"accumulation-summed", "accumulation-halved", "step-per-micro-batch", "clipped-early"},
    "step-per-micro-batch": {"accumulation-summed", "accumulation-halved", "clipped-early", "not-zeroed"},
    "ranks-summed": {"accumulation-summed", "accumulation-halved", "last-micro-batch", "step-per-micro-batch"},
    "untied": {"tied-twice", "embedding-detached", "head-left-out"},
    "blocks-frozen": {"block-detached", "branch-detached"},
}
SEEN = 1e-5  # of the learning rate


def draw(n: int, seed: int) -> list[Step]:
    """``n`` steps with two or three faults of different stages, each of which changes the parameters."""
    chance, found = random.Random(seed), {}
    while len(found) < n:
        style = chance.choice(list(STYLES))
        stages = chance.sample(STAGES, chance.choice((2, 2, 3)))
        words = [
            chance.choice([word for word in words_of(style) if MEANINGS[word].stage == stage and word not in APART])
            for stage in sorted(stages, key=STAGES.index)
        ]
        step = Step(style, " ".join(words))
        firsts = {meaning.ids[0] for meaning in step.meanings.values()}
        if (
            step.name in FAULTY_STEPS
            or len(firsts) < len(words)
            or not _fit(words)
            or patched(PLAIN, patches_of(step.words)) is None
        ):
            continue
        if _all_count(step):
            found[step.name] = step
    return list(found.values())


def _fit(words: list[str]) -> bool:
    """Whether the faults need the same settings, and none leaves nothing of another."""
    needs: dict[str, float] = {}
    for word in words:
        for key, value in MEANINGS[word].settings.items():
            if needs.setdefault(key, value) != value:
                return False
    return not any(EMPTIED.get(word, set()) & set(words) for word in words)


@cache
def _right(style: str, settings: Settings) -> list:
    return right_run(module_of(kind_of(style)).double(), settings, batches(settings, 4, CONFIG.vocab_size), CONFIG.vocab_size)


def _all_count(step: Step) -> bool:
    """Whether each fault changes the parameters of the whole, and the whole is not the right one."""

    def found(words: tuple[str, ...]) -> list:
        less = WithSettings(step.style, " ".join(words), step.settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run(less.module().double(), less.make_step, batches(step.settings, 4, CONFIG.vocab_size))

    whole, lr = found(step.words), step.settings.lr
    others = [found(tuple(word for word in step.words if word != left_out)) for left_out in step.words]
    return all(apart(whole, other, lr) > SEEN for other in (*others, _right(step.style, step.settings)))
