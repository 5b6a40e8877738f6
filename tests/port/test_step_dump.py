"""Dumps of training steps: a right program's is called equal, and what is wrong in a faulty one is named."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.commands import mistake
from support.step_programs import FAULTS, LEVELS, Dumped, batches_of, given_ids, named, trained
from support.step_programs.scoring import score
from support.steps import our_model

import gpt2
from gpt2.port.step.causes import Findings
from gpt2.port.step.clipping import ClipKind, Norms, read_clipping
from gpt2.port.step.expected import Gradients, Predictor
from gpt2.port.step.gradients import Comparison
from gpt2.port.step.records import Gradient, Update
from gpt2.port.step.rule_search import RuleSearch
from gpt2.port.step.rules import Rule, Track, directions, fit
from gpt2.port.step.search import Search
from gpt2.port.step.settings import Settings
from gpt2.port.step.tracks import Run

SLOW = pytest.mark.slow


HALF = {"dtype": "float16"}
# A program's faults, how it is dumped, and what must be said: nothing for a right one, and whatever names the fault for "?".
QUICK = [
    ("", {"layout": "transposed"}, "equal", ()),  # its rounding was taken for a fault
    ("unshifted", {"layout": "stacked"}, "mismatch", "?"),  # modules alone were diagnosed
    ("summed", {"layout": "stacked"}, "mismatch", "?"),
    # Key biases stand still within rounding: they were missing after the first step, and the dump was equal in silence.
    ("eps-inside", {"level": "moments", "layout": "apart"}, "mismatch", "?"),
    # float16 hides the decay: a fault was called equal, or other betas with another rate; norms that never change were taken
    # for those before the step, with their rounding, and all gradients were called detached.
    ("unclipped", HALF, "undetermined", ()),
    ("scaled", HALF, "mismatch", ("gradient-scaled",)),
    ("norms-left-out", HALF, "mismatch", ("parameter-missing",)),
    ("sgd", HALF, "undetermined", ()),
    # At a rate of 1e-4 it hides all changes of weights near 1: a right program had a missing parameter, or other rates.
    ("", {**HALF, "settings": {"lr": 1e-4}}, "undetermined", ()),
]
SLOWLY = [
    *(("", {"level": level, "layout": "transposed"}, "equal", ()) for level in LEVELS if level != "usual"),
]


@pytest.mark.parametrize(("line", "how", "verdict", "said"), [*QUICK, *(pytest.param(*one, marks=SLOW) for one in SLOWLY)])
def test_a_program(line: str, how: dict, verdict: str, said: tuple[str, ...] | str) -> None:
    """Dumps of programs that are not in torch, right and wrong ones."""
    run = Dumped(line, **how)
    row = score(run)
    assert row.verdict == verdict, row.flaw()
    assert row.right if said == "?" else row.said == said, row.flaw()


# Faults that no row above names: of the loss and gradients beside those of clipping and the update; wrong derivatives alone.
REST = [word for word in FAULTS if word not in {*(line for line, _, verdict, _ in QUICK if verdict == "mismatch"), "temperature"}]
ALONE = [word for word in REST if "backward-wrong" in FAULTS[word][0]]
EARLY, LATE = ([word for word in REST if bool(set("lg") & set(FAULTS[word][1])) == early] for early in (True, False))
PAIRS = [" ".join(pair) for pair in itertools.zip_longest((word for word in EARLY if word not in ALONE), LATE, fillvalue="")]


@SLOW
@pytest.mark.parametrize(("level", "layout"), [("usual", "plain"), ("moments", "apart")])
def test_every_fault_is_named(level: str, layout: str) -> None:
    """Adam's moments were taken for clipped gradients, and key biases, whose gradient is rounding, made every program faulty."""
    rows = [score(Dumped(line, level, layout)) for line in [*PAIRS, *ALONE][level == "moments" :: 2]]
    assert not [row.flaw() for row in rows if not row.right]
    assert score(Dumped("", level, layout)).verdict == "equal"


@SLOW
def test_a_rule_of_few_parameters_names_no_cause() -> None:
    """A step counted once for each tensor was called another eps, another rate and decay on norms: what fitted few tensors."""
    run = Dumped("")
    diagnosis = gpt2.diagnose(dump_of(run, "counted-per-tensor"), our_model(), settings=run.overrides())
    assert (diagnosis.verdict, diagnosis.causes) == ("undetermined", ()), diagnosis.table()


def test_half_precision_that_hides_all_changes_is_said() -> None:
    """The report asked for the parameters after the step, which the dump had, and did not say what was undetermined."""
    run = Dumped("sgd", "usual", dtype="float16", settings={"lr": 1e-6})
    diagnosis = gpt2.diagnose(run.arrays(), our_model(), settings=run.overrides())
    assert (diagnosis.verdict, diagnosis.causes) == ("undetermined", ())
    assert "half precision" in " ".join(diagnosis.notes)
    assert "not judged" not in " ".join(diagnosis.notes)


def test_a_fault_before_a_wrong_derivative_is_named_beside_it() -> None:
    """Gradients were called right down to a part, although a weight's gradient before it was wrong, and this had no cause."""
    generator = torch.Generator().manual_seed(0)
    right = {n: torch.randn(p.shape, generator=generator).double() for n, p in our_model().state_dict().items()}
    backward = ("h.0.attn.", "h.0.ln_1.", "wpe.", "wte.")
    got = {n: torch.randn(p.shape, generator=generator).double() if n.startswith(backward) else p for n, p in right.items()}
    got["h.1.mlp.c_fc.weight"] = 3 * right["h.1.mlp.c_fc.weight"]
    wrong = [n for n in got if got[n] is not right[n]]
    made = Gradients(right, {"wte.weight": right["wte.weight"]}, {"wte.weight": right["wte.weight"]})
    findings = Findings(", ".join)
    Comparison(findings, dict.fromkeys(right, 1e-9), 0.0, 0.0, 1e-3, "", derivatives=True).judge(got, wrong, 1.0, made)
    assert [(one.id, one.where) for one in findings.causes] == [
        ("backward-wrong", "h.0.ln_2"),
        ("gradient-scaled", "h.1.mlp.c_fc.weight"),
    ]


@pytest.mark.parametrize(
    ("level", "steps", "same"), [("usual", 2, False), ("all", 2, False), ("usual", 3, True), ("parameters", 3, True)]
)
def test_a_first_step_at_a_rate_of_zero_is_a_step(level: str, steps: int, same: bool) -> None:
    """A warm-up from 0 moves nothing in the first step: its gradients were taken for clipped ones, and called detached.

    With one batch for all steps, only the losses say how many there are, and gradients of two steps differ little.
    """
    run = Dumped("", level, steps=steps, same=same, settings={"warmup": 2})
    arrays = dump_of(run, "warmup-from-zero")
    diagnosis = gpt2.diagnose(arrays, our_model(), settings=run.overrides())
    assert [cause.id for cause in diagnosis.causes] == ["schedule-wrong"], diagnosis.table()
    assert f"{steps} steps" in diagnosis.notes[0]
    assert gpt2.diagnose(arrays, our_model()).verdict == "equal"


def test_an_update_that_cannot_be_examined_is_no_equality() -> None:
    """Without the gradients of the second step and all parameters before it, nothing is known of the update."""
    run = Dumped("", "moments", "apart")
    arrays = named(run, before(), trained(run, before(), batches_of(run)))
    later = {n for n in arrays if n.startswith("raw1") or (n.endswith(("ln_1.bias", "ln_2.bias")) and "before" not in n)}
    arrays = {name: a for name, a in arrays.items() if name not in later}
    diagnosis = gpt2.diagnose({**given_ids(run, batches_of(run)), **arrays}, our_model())
    assert diagnosis.verdict == "undetermined"
    assert "h.*.ln_1.bias" in " ".join(diagnosis.notes)


@SLOW
def test_our_own_steps_are_equal_and_a_changed_gradient_is_not() -> None:
    """`gpt2 trace --steps` and `gpt2 diagnose` disagreed about what a right step is. Nothing said that a parameter without a
    gradient was not judged."""
    traced = gpt2.trace(tokens=8, gradients=True, steps=2, settings={"optim.lr": 1e-3})
    arrays = {name: tensor.numpy() for name, tensor in traced.arrays.items() if not name.startswith(("h.", "ln_f"))}
    assert gpt2.diagnose(arrays, settings={"optim.lr": 1e-3, "optim.beta1": 0.9, "optim.beta2": 0.99}).ok
    one = gpt2.trace(tokens=8, gradients=True, steps=1, settings={"optim.lr": 1e-3}).arrays
    lacking = {n: a.numpy() for n, a in one.items() if not n.startswith(("h.", "ln_f")) and n != "grad.h.1.ln_1.bias"}
    assert "the update of h.1.ln_1.bias was not judged" in " ".join(gpt2.diagnose(lacking).notes)
    changed = dict(arrays)
    changed["grad.h.1.mlp.c_fc.weight"] = 3 * arrays["grad.h.1.mlp.c_fc.weight"]
    cause = gpt2.diagnose(changed).causes[0]
    assert (cause.id, cause.where) == ("gradient-scaled", "h.1.mlp.c_fc.weight")


@SLOW
def test_the_debug_state_of_llmc_holds_a_loss_and_gradients(tmp_path: Path) -> None:
    """The gradients in llm.c's debug state were not read, so a wrong one was called equal."""
    path = tmp_path / "state.bin"
    rows = np.arange(40).reshape(2, 20)
    gpt2.trace(ids=rows[:, :-1], targets=rows[:, 1:], gradients=True).save(path)
    assert gpt2.diagnose(path).ok
    content = bytearray(path.read_bytes())
    last = np.frombuffer(content, np.float32)[-128:]  # the final norm's bias
    last[:] = 0
    path.write_bytes(content)
    cause = gpt2.diagnose(path).causes[0]
    assert (cause.id, cause.where) == ("gradient-detached", "ln_f.bias")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda arrays: {n: np.full_like(a, np.nan) if a.ndim == 2 and a.dtype.kind == "f" else a for n, a in arrays.items()},
            "NaN",
        ),
        (lambda arrays: {"ids": arrays["ids"], "a": np.zeros((5, 6, 7), np.float32)}, "holds no loss, gradient or parameter"),
        (lambda arrays: {"ids": arrays["ids"], **before(), **{f"{n}!": a for n, a in before().items()}}, "no parameter changes"),
    ],
)
def test_a_bad_dump_is_one_line(change, words: str) -> None:
    """A dump without what it should hold ended in a traceback, or was called equal."""
    run = Dumped("", "usual")
    with pytest.raises(gpt2.InputError, match=words) as caught:
        gpt2.diagnose(change(run.arrays()), our_model(), settings=run.overrides())
    assert "\n" not in str(caught.value)


def before() -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in our_model().state_dict().items()}


def dump_of(run: Dumped, word: str) -> dict[str, np.ndarray]:
    """The dump of a program with something that is no fault in the table."""
    return replace(run, line=word).arrays()


def test_gradients_that_clipping_cannot_have_made_are_no_traceback() -> None:
    """A gradient that was set to zero was divided by; one that had grown gave a limit that is no number."""
    raw = {name: torch.ones(3) for name in "ab"}

    def read(a: float, b: float):
        used = {"a": a * raw["a"], "b": b * raw["b"]}
        return read_clipping([[Update(held=Gradient.of(raw), gradient=Gradient.of(used))]], 1.0)

    assert read(0.5, 0.0).clip.kind is ClipKind.PARAMETER
    assert read(1.0, 2.0).odd


def test_a_temperature_is_found_without_many_backward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search computed the gradients of the whole model some forty times, without a limit of time."""
    factors = []
    gradients = Predictor.gradients

    def counted(self, state, step, formula):
        factors.append(formula.factor)
        return gradients(self, state, step, formula)

    monkeypatch.setattr(Predictor, "gradients", counted)
    row = score(Dumped("temperature", "usual"))
    assert row.right, row.flaw()
    assert sum(factor != 1.0 for factor in factors) <= 3
    tried = len(factors)
    factors.clear()
    monkeypatch.setattr("gpt2.port.dump.examination.SECONDS", {True: 0.0})
    score(Dumped("temperature", "usual"))
    assert set(factors) == {1.0}
    assert len(factors) < tried / 4, f"{tried} backward passes, and {len(factors)} behind the deadline"


@pytest.mark.parametrize(
    "rule",
    [
        Rule(beta1=0.88, beta2=0.93, eps=3e-7),
        pytest.param(Rule(amsgrad=True), marks=pytest.mark.slow),
        Rule(coupled=0.03),
        Rule(correction="late", beta2=0.95),
    ],
)
def test_the_search_finds_a_rule_again(rule: Rule) -> None:
    """A search that stops at the nearest usual constants would report them as the author's."""
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(6, 50, generator=generator, dtype=torch.float64).numpy()
    gradient = 1e-2 * torch.randn(6, 50, generator=generator, dtype=torch.float64).numpy()
    track = Track("w", before, gradient, 0 * before, (before == before).any(1))
    track = Track("w", before, gradient, -1e-3 * directions(rule, track) - 1e-4 * before, track.seen)
    found = Search([track], Settings()).best().rule
    assert found == rule
    assert fit(track, found).rates == pytest.approx(1e-3)


@pytest.mark.parametrize(("limit", "found"), [(1e-5, False), (0.5, True)])
def test_a_limit_that_cuts_every_entry_is_not_guessed(limit: float, found: bool) -> None:
    """Adam takes the signs alone where all is cut off, so every smaller limit fits; the smallest one tried was named."""
    gradient = np.random.default_rng(0).standard_normal((3, 50))
    cut = Track("w", np.zeros((3, 50)), np.clip(gradient, -limit, limit), gradient, np.ones(3, dtype=bool))
    track = Track("w", cut.before, gradient, -1e-3 * directions(Rule(), cut), cut.seen)
    search = RuleSearch([[Run({"w": track}, Norms([Gradient()] * 3))]], ["w"], Settings())
    _, near = search._nearest(ClipKind.ENTRY, Rule())
    assert (near is not None and near.limit == pytest.approx(limit, rel=0.01)) == found


def test_settings_belong_to_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt setting of a dump was ignored, so that another one was judged."""
    np.savez(tmp_path / "d.npz", **Dumped("", "loss").arrays())
    assert "optim.rate" in mistake(capsys, "diagnose", str(tmp_path / "d.npz"), "--set", "optim.rate=1")
