"""`diagnose_step` names the faults of training steps and says nothing of right ones. tools/step_table.py measures them all."""

import json

import pytest
import torch
import torch.nn.functional as F
from support.steps import FAULTY_STEPS, SECOND_STEPS, THIRD_STEPS, Settings, WithSettings, our_model
from support.steps.drawn import draw
from support.steps.right import RIGHT_STEPS
from support.steps.scoring import diagnosis_of, score_step
from torch.func import functional_call, grad, vmap

import gpt2
from gpt2.port.diagnosis.report import Cause, Diagnosis, Divergence

TWO = "handmade: unshifted decay-coupled"
RIGHT = "fused"

# A step of every stage and style; the slow ones, about a second each.
SAMPLE = (
    "loop: rolled",
    "loop: half-logits",
    "loop: accumulation-summed",
    "loop: untied",
    "loop: clipped-early",
    "loop: unclipped-at-first",
    "loop: schedule-late",
    "loop: warmup-from-zero",
    "loop: summed",
    "loop: dropout",
    "handmade: tied-twice",
    "loop: clipped-by-value",
    "trainer: stepped-twice",
    "handmade: not-zeroed",
    "handmade: eps-inside",
    "handmade: moments-kept",
    "handmade: moments-lost",
    "handmade: decay-after",
    "trainer: block-detached",
    "trainer: clipped-scaled",
    "trainer: betas-default",
    "trainer: overflow",
    "handmade: last-missing not-zeroed corrected-late",
)
RIGHT_SAMPLE = (
    "losses of two parts summed, one backward pass",
    "groups, kqv",
    "written over lists",
    "shifts by itself, over one more token",
    "functional_call",
    "no clipping",
    "autocast with GradScaler",
    "tied by hand: gradients added, values copied",
    "update within the backward pass",
    "a module that returns the loss alone",
    "warm-up, then cosine",
    "logits.float()",
)


def row(name: str):
    step = FAULTY_STEPS[name]
    return score_step(name, step.style, step.meanings, diagnosis_of(step), 0.0)


def check(name: str) -> None:
    found = row(name)
    assert found.perfect, found.flaws()


def test_the_causes_of_two_faults_are_named():
    """A loss curve that nobody else gets: the labels are the inputs. The second fault, in the update, must be found too."""
    check(TWO)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_the_causes_of_faults_are_named(name):
    """A fault of one stage must not hide one of another, nor be taken for another."""
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT_SAMPLE)
def test_right_steps_are_equal(name):
    """Other ways to write the same training are no faults."""
    diagnosis = diagnosis_of(RIGHT_STEPS[name])
    assert diagnosis.verdict == "equal", diagnosis.table()


@pytest.mark.slow
def test_faults_drawn_at_random_are_found():
    """The engine must not know the combinations that it was written with only: 9 of 10 faults of drawn steps are named."""
    rows = [score_step(step.name, step.style, step.meanings, diagnosis_of(step), 0.0) for step in draw(8, 20)]
    assert sum(row.first for row in rows) >= len(rows) - 1, [row.flaws() for row in rows]
    assert sum(not row.missed for row in rows) >= len(rows) - 1, [row.flaws() for row in rows]


def test_a_right_step_is_equal_and_its_module_untouched():
    """A false alarm sends an author to look for nothing; and the author goes on with the module, which must not be trained."""
    step = RIGHT_STEPS[RIGHT]
    module = step.module()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    diagnosis = gpt2.diagnose_step(module, step.make_step, our_model(), settings=step.settings.overrides())
    assert json.loads(diagnosis.to_json())["verdict"] == "equal"
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(p.grad is None and p.requires_grad and p.dtype == torch.float32 for p in module.parameters())


@pytest.mark.slow
def test_a_head_of_its_own_is_named_where_the_forward_pass_differs_too():
    """The gradients are not compared then: scripts with a head of their own and another GELU were told of the GELU only."""
    step = RIGHT_STEPS["groups, nano"]
    module = step.module()
    module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.detach().clone())
    module.transformer["ln_f"].weight.data += 0.1
    diagnosis = gpt2.diagnose_step(module, step.make_step, our_model(), settings=step.settings.overrides())
    assert "tied-gradient-lost" in [cause.id for cause in diagnosis.causes], diagnosis.table()
    assert any("were not compared" in note for note in diagnosis.notes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["functional: accumulation-summed", "functional: clipped-by-value", "closures: sgd"])
def test_faults_of_steps_whose_gradients_are_in_no_grad_are_named(name):
    """Gradients by torch.func never reach .grad: every parameter looked detached, no clipping or share was seen; SGD with
    clipping was taken for SGD of changing rates without it."""
    step = (SECOND_STEPS | THIRD_STEPS)[name]
    found = score_step(step.name, step.style, step.meanings, diagnosis_of(step), 0.0)
    assert found.perfect, found.flaws()


@pytest.mark.slow
def test_a_right_step_by_torch_func_is_equal():
    """The gradients of its parts are averaged where nothing shows it; a sum would be called a fault."""
    diagnosis = diagnosis_of(WithSettings("functional", "", Settings(grad_accum=2)))
    assert diagnosis.verdict == "equal", diagnosis.table()


def per_example(model):
    """A step whose gradients are those of each example alone, averaged: the module runs within vmap."""
    params = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss_fn(params, row, answers):
        return F.cross_entropy(functional_call(model, params, (row[None],))[0], answers)

    def step(x, y):
        grads = vmap(grad(loss_fn), (None, 0, 0))(params, x, y)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p -= 1e-3 * grads[name].mean(0)
        return 1.0

    return step


def test_gradients_of_each_example_alone_are_refused_in_words_that_say_so():
    """Within vmap no batch can be seen; the step would look as if it never called its module."""
    with pytest.raises(gpt2.InputError, match=r"vmap.*whole batch"):
        gpt2.diagnose_step(our_model(), per_example, our_model())


def test_a_mismatch_is_no_number_that_is_zero_for_a_reader() -> None:
    """``first at update (error 6.4e-17)`` made people look for rounding where a rule was another one."""
    cause = Cause("decay-coupled", "wte.weight", "", "", 1.0, "")
    found = [Diagnosis("mismatch", Divergence("update", None, error), (cause,), (), "a step") for error in (6.4e-17, 0.25)]
    assert [one.table().splitlines()[0] for one in found] == [
        "MISMATCH  first at update",
        "MISMATCH  first at update (error 2.5e-01)",
    ]
