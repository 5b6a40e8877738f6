"""The right training steps of tests/support/steps end at the right parameters, and every cause has a faulty step."""

import pytest
from support.steps import CONFIG, MEANINGS, Settings, Step, module_of, our_model
from support.steps.reference import apart, batches, right_run, run
from support.steps.right import RIGHT_STEPS

from gpt2.port.step.causes import STAGE, STAGES

ROUNDING = 1e-8  # of the learning rate: float64, where a gradient of zero is all rounding
COUNT = 3  # steps
SAMPLE = ("groups, fused", "tied by hand: gradients added, values copied", "autocast with GradScaler")


def gap(step, kind: str) -> float:
    """How far a step's parameters are from the right ones after any of a few steps, in units of the learning rate."""
    data = batches(step.settings, COUNT, CONFIG.vocab_size)
    expected = right_run(module_of(kind).double(), step.settings, data, CONFIG.vocab_size)
    return apart(run(step.module().double(), step.make_step, data), expected, step.settings.lr)


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (one not in SAMPLE)) for one in RIGHT_STEPS])
@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_right_steps_end_at_the_right_parameters(name):
    """A right step that is wrong would count a true diagnosis as a false alarm."""
    step = RIGHT_STEPS[name]
    assert gap(step, step.kind) < ROUNDING


def test_a_faulty_step_ends_at_other_parameters():
    """Negative control of the computation above."""
    assert gap(Step("eps-inside"), "nano") > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("padded", ["", "x"])
@pytest.mark.parametrize("changes", [{}, {"grad_accum": 2}, {"clip": 0.0}, {"warmup": 3, "steps": 12, "min_lr": 1e-4}], ids=str)
def test_a_script_without_faults_is_right_in_all_settings(changes, padded):
    """A fault is the only difference between a faulty step and the right one, also where some targets are -100."""
    assert gap(Step("", Settings(padded=padded).changed(changes)), "nano") < ROUNDING


def test_every_cause_of_a_step_has_a_fault():
    """A cause without a fault would never be tested."""
    assert {meaning.ids[0] for meaning in MEANINGS.values()} == set(STAGE)
    assert {meaning.stage for meaning in MEANINGS.values()} == set(STAGES)


def test_every_module_is_tied():
    """A module whose head is a parameter of its own trains another model: no step of it is right."""
    for kind in {step.kind for step in RIGHT_STEPS.values()}:
        assert sum(p.numel() for p in module_of(kind).parameters()) == sum(p.numel() for p in our_model().parameters())
