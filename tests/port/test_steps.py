"""The training steps of tests/support/steps are what they say: faulty ones end at other parameters, right ones at the same."""

from functools import cache

import pytest
from support.steps import (
    CONFIG,
    MEANINGS,
    STAGES,
    STYLES,
    Settings,
    WithSettings,
    functional,
    module_of,
    our_model,
)
from support.steps.reference import apart, batches, right_run, run
from support.steps.right import RIGHT_STEPS

from gpt2.port.step.causes import STAGE

ROUNDING = 1e-8  # of the learning rate: float64, where a gradient of zero is all rounding
COUNT = 3  # steps

RIGHT_SAMPLE = ("fused", "written over lists", "tied by hand: gradients added, values copied", "autocast with GradScaler")


@cache
def expected(kind: str, settings: Settings) -> list:
    data = batches(settings, COUNT, CONFIG.vocab_size)
    decays = {"decays": functional.decays} if kind == "vmapped" else {}  # it has a bias for each head
    return right_run(module_of(kind).double(), settings, data, CONFIG.vocab_size, **decays)


def gap(step, kind: str) -> float:
    """How far a step's parameters are from the right ones after any of a few steps, in units of the learning rate."""
    data = batches(step.settings, COUNT, CONFIG.vocab_size)
    found = run(step.module().double(), step.make_step, data)
    return apart(found, expected(kind, step.settings), step.settings.lr)


def of_each(names, quick):
    """Test parameters, of which those not in ``quick`` are slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in quick)) for name in names]


@pytest.mark.parametrize("name", of_each(RIGHT_STEPS, RIGHT_SAMPLE))
@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_right_steps_end_at_the_right_parameters(name):
    """A right step that is wrong would count a true diagnosis as a false alarm."""
    step = RIGHT_STEPS[name]
    assert gap(step, step.kind) < ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["", "prompt"])
@pytest.mark.parametrize("changes", [{}, {"grad_accum": 2}, {"clip": 0.0}, {"warmup": 3, "steps": 12, "min_lr": 1e-4}], ids=str)
def test_a_script_without_faults_is_right_in_all_settings(changes, prompt):
    """A fault is the only difference between a faulty step and the right one, also where some targets are -100."""
    step = WithSettings("plain", "", Settings(prompt=prompt).changed(changes))
    assert gap(step, STYLES["plain"]) < ROUNDING


def test_every_cause_of_a_step_has_a_fault():
    """A cause without a fault would never be tested."""
    assert {meaning.ids[0] for meaning in MEANINGS.values()} == set(STAGE)
    assert {meaning.stage for meaning in MEANINGS.values()} == set(STAGES)


def test_every_module_is_tied():
    """A module whose head is a parameter of its own trains another model: no step of it is right."""
    for kind in {step.kind for step in RIGHT_STEPS.values()}:
        assert sum(p.numel() for p in module_of(kind).parameters()) == sum(p.numel() for p in our_model().parameters())
