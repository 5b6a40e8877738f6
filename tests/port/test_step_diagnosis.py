"""`diagnose_step` names the faults of training steps and says nothing of right ones. tools/step_table.py measures them all."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.steps import FAULTY_STEPS, module_of, our_model
from support.steps.right import RIGHT_STEPS
from support.steps.scoring import diagnosis_of, score_step
from torch.func import functional_call, grad, vmap

import gpt2
from gpt2.errors import InputError
from gpt2.port.step.clipping import read_clipping
from gpt2.port.step.records import Gradient, Sampled, Update
from gpt2.port.step.rules import ROUNDED, Rule, Track, directions, fit, recognised_rule
from gpt2.port.step.settings import StepSettings
from gpt2.port.terms.causes import Cause
from gpt2.port.terms.places import Place
from gpt2.port.terms.report import Diagnosis, Divergence

RIGHT = "groups, fused"


def row(line):
    return score_step(line, FAULTY_STEPS[line], diagnosis_of(FAULTY_STEPS[line]))


def test_the_causes_of_two_faults_are_named():
    """A loss curve that nobody else gets: the labels are the inputs. The second fault, in the update, must be found too."""
    found = row("unshifted decay-coupled")
    assert found.perfect, found.flaws()


def stepping(losses_of, optimizer=lambda ps: torch.optim.AdamW(ps, lr=3e-4), prepare=lambda model: model):
    """`make_step` of a step that adds the gradients of the losses that ``losses_of(model, x, y)`` yields."""

    def make_step(model):
        prepare(model)
        own = optimizer(model.parameters())

        def step(x, y):
            own.zero_grad()
            total = 0.0
            for loss in losses_of(model, x, y):
                loss.backward()
                total += float(loss.detach())
            own.step()
            return total

        return step

    return make_step


def loss_of(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def mean(model, x, y):
    yield loss_of(model, x, y)


def halves(model, x, y):
    return [loss_of(model, a, b) / 4 for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]


def test_a_bias_without_effect_need_not_move():
    """Bug: the gradient of a key's bias is rounding, so SGD does not move it; it was called missing from the optimizer."""
    make_step = stepping(mean, lambda ps: torch.optim.SGD(ps, lr=1e-3))
    said = gpt2.diagnose_step(module_of("heads"), make_step, our_model())
    assert "parameter-missing" not in [cause.id for cause in said.causes], said.table()


def test_a_fault_of_padded_and_of_usual_batches_is_named_once():
    """It was listed twice, where the settings have a prompt: once from the batches in which some targets are -100."""
    settings = {"grad_accum": 2, "data.prompt": "p"}
    causes = gpt2.diagnose_step(our_model(), stepping(halves), our_model(), settings=settings).causes
    places = [(one.id, one.where) for one in causes]
    assert places.count(("accumulation-average-wrong", "loss")) == 1
    assert len(set(places)) == len(places)
    with pytest.raises(InputError, match=r"model alone.*missing 1 required"):
        gpt2.diagnose_step(our_model(), lambda model, lr: None, our_model())


def accumulated(mend: str):
    """A step of two parts with unequal numbers of targets, each averaged alone, or as ``mend`` says."""

    def losses(model, x, y):
        names = {"F": F, "all_targets": (y != -100).sum()}
        for a, targets in zip(x.chunk(2), y.chunk(2), strict=True):
            logits, targets = model(a).flatten(0, 1), targets.flatten()
            yield eval(mend or "F.cross_entropy(logits, targets) / 2", names, {"logits": logits, "targets": targets})

    return stepping(losses)


def padded_with_end_of_text(mend: str):
    """A step that takes every end of text for padding, or leaves out labels as ``mend`` says."""

    def losses(model, x, labels):
        names = {"labels": labels, "attention_mask": torch.ones_like(labels), "end": model.config.eos_token_id}
        yield loss_of(model, x, eval(mend or "labels.masked_fill(labels == end, -100)", names))

    return stepping(losses)


def in_half_precision(mend: str):
    """A step whose weights are kept in bfloat16, or in float32 and computed as ``mend`` says."""

    def losses(model, x, y):
        mean = "F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())"
        space = {"torch": torch, "F": F, "model": model, "x": x, "y": y, "device": "cpu", "dtype": torch.bfloat16}
        exec(mend.replace("...", mean) if mend else f"loss = {mean}", space)
        yield space["loss"]

    return stepping(losses, prepare=lambda model: model if mend else model.bfloat16())


@pytest.mark.parametrize(
    ("faulty", "id", "settings"),
    [
        (accumulated, "accumulation-average-wrong", {"grad_accum": 2, "data.prompt": "p"}),
        (padded_with_end_of_text, "token-ignored", {}),
        (in_half_precision, "update-rounded", {}),
    ],
)
def test_a_correction_that_is_carried_out_heals_the_step(faulty, id: str, settings: dict[str, object]) -> None:
    """The line that was printed was the one that the user already had: `(loss / grad_accum)`, `ignore_index=-100`; weights in
    bfloat16 were called detached from the gradient, by their own rounding."""
    (cause,) = gpt2.diagnose_step(our_model(), faulty(""), our_model(), settings=settings).causes
    assert cause.id == id
    mend = cause.fix.partition("  #")[0].rpartition("mask: " if "mask" in cause.fix else "precision: ")[2]
    assert gpt2.diagnose_step(our_model(), faulty(mend), our_model(), settings=settings).ok, mend


@pytest.mark.parametrize(
    ("line", "words"), [("clipped-harder", "parameters(), 1)"), ("decay-tenth", "weight_decay=0.1"), ("rate-doubled", "lr=0.001")]
)
def test_the_fix_of_a_wrong_number_has_the_right_one(line, words):
    """The fix was the line that the user had, with the number left out."""
    (cause,) = diagnosis_of(FAULTY_STEPS[line]).causes
    assert words in cause.fix


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTY_STEPS)
def test_the_causes_of_faults_are_named(name):
    """A fault of one stage must not hide one of another, nor be taken for another."""
    found = row(name)
    assert found.perfect, found.flaws()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RIGHT_STEPS if name not in (RIGHT, "torch.compile")])
def test_right_steps_are_equal(name):
    """Other ways to write the same training are no faults: parts are averaged, also where nothing shows it."""
    diagnosis = diagnosis_of(RIGHT_STEPS[name])
    assert diagnosis.verdict == "equal", diagnosis.table()


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
    step = RIGHT_STEPS["groups"]
    module = step.module()
    module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.detach().clone())
    module.transformer["ln_f"].weight.data += 0.1
    diagnosis = gpt2.diagnose_step(module, step.make_step, our_model(), settings=step.settings.overrides())
    assert "tied-gradient-lost" in [cause.id for cause in diagnosis.causes], diagnosis.table()
    assert any("were not compared" in note for note in diagnosis.notes)


# A right step but for its settings, which nobody gives.
unset = stepping(mean, lambda ps: torch.optim.AdamW(ps, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.02))


@pytest.mark.slow
def test_settings_that_are_not_given_are_read_off() -> None:
    """Without expectations a rate or a decay on norms is no fault, but a sentence."""
    found = gpt2.diagnose_step(our_model(), unset, our_model())
    assert found.verdict == "equal"
    for words in ("rate of 0.0003", "betas of 0.9 and 0.95", "weight decay of 0.02, on", "norms", "no clipping"):
        assert words in " ".join(found.notes)


def per_example(model):
    """A step whose gradients are those of each example alone: the module runs within vmap."""
    params = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss_fn(params, row, answers):
        return F.cross_entropy(functional_call(model, params, (row[None],))[0], answers)

    return lambda x, y: len(vmap(grad(loss_fn), (None, 0, 0))(params, x, y))


@pytest.mark.parametrize(
    ("maker", "words"),
    [
        (lambda model: unset(our_model()), "no parameter"),
        (per_example, r"torch\.func.*whole batch"),  # it would look as if it never called its module
        pytest.param(lambda model: lambda x, y: model(x).sum() * float("nan"), "loss of nan", marks=pytest.mark.slow),
        pytest.param(lambda model: lambda x, y: model(x.view(7, -1)).sum(), "batch_size", marks=pytest.mark.slow),
        pytest.param(lambda model: None, "return a function step", marks=pytest.mark.slow),
    ],
)
def test_a_bad_step_is_one_line(maker, words: str) -> None:
    """A traceback of ours hides what the user has to change."""
    with pytest.raises(InputError, match=words) as caught:
        gpt2.diagnose_step(our_model(), maker, our_model())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("line", "words"), [("optim.lrr=1", r"did you mean optim\.lr"), ("optim.lr=fast", "give a number")])
def test_settings_are_refused_by_name(line: str, words: str) -> None:
    """A misspelt key would leave a setting unknown, and its fault unsaid."""
    with pytest.raises(InputError, match=words):
        StepSettings.of([line])
    assert StepSettings.of(["optim.lr=3e-4", "data.prompt="]) == StepSettings(lr=3e-4)


def test_a_mismatch_is_no_number_that_is_zero_for_a_reader() -> None:
    """``first at update (error 6.4e-17)`` made people look for rounding where a rule was another one."""
    cause = Cause("decay-coupled", (Place.of("wte.weight"),), "", mend=" ")
    found = [Diagnosis("mismatch", Divergence("update", error), (cause,), (), "a step") for error in (6.4e-17, 0.25)]
    heads = [one.table().splitlines()[0] for one in found]
    assert heads == ["MISMATCH  first at update", "MISMATCH  first at update (error 2.5e-01)"]


@pytest.mark.parametrize(
    ("rule", "known"),
    [
        (Rule(beta1=0.8, beta2=0.98, eps=1e-6), True),
        (Rule(coupled=0.05), True),
        (Rule(correction="late", beta2=0.95), True),
        (Rule(beta1=0.88, beta2=0.93, eps=3e-7), False),
        (Rule(coupled=0.03), False),
    ],
)
def test_constants_that_nobody_writes_are_no_usual_ones(rule: Rule, known: bool) -> None:
    """The nearest usual constants would be reported as the author's: what none of the table gives is left open."""
    draw = np.random.default_rng(0)
    before, gradient, seen = draw.standard_normal((6, 50)), 1e-2 * draw.standard_normal((6, 50)), np.ones(6, dtype=bool)
    change = -1e-3 * directions(rule, Track(before, gradient, before, seen)) - 1e-4 * before
    track = Track(before, gradient, change, seen)
    found, error = recognised_rule([track], StepSettings())
    assert (error <= ROUNDED) == known
    if known:
        assert found == rule
        assert fit(track, found).rates == pytest.approx(1e-3)


def test_gradients_that_clipping_cannot_have_made_are_no_traceback() -> None:
    """A gradient that was set to zero was divided by; one that had grown gave a limit that is no number."""

    def read(a: float, b: float):
        sizes = ({"a": 1.0, "b": 1.0}, {"a": a, "b": b})
        held, used = (Gradient({n: Sampled.of(f * torch.ones(3)) for n, f in some.items()}) for some in sizes)
        return read_clipping([[Update(held=held, gradient=used)]], 1.0)

    assert "b" in read(0.5, 0.0).odd
    assert read(1.0, 2.0).odd
