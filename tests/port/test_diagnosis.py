"""`gpt2.diagnose`: wrong weights, wrong behaviour, the order of causes and the report. Ports: test_diagnosis_ports.py."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from support.commands import refusal
from support.faulty import TWO as CONFIG
from support.ports import PORTS
from torch import Tensor, nn

import gpt2
from gpt2.measure.dumps import is_dump
from gpt2.port.alternatives.entries import likeness
from gpt2.port.diagnosis import diagnose
from gpt2.port.recording.dispatch import run_deterministically
from gpt2.port.terms.causes import CAUSES, Cause
from gpt2.port.terms.places import EVERY, Place, collapsed
from gpt2.port.terms.ranking import ranked
from gpt2.port.terms.report import Diagnosis, Divergence


def port(model: gpt2.GPT2) -> nn.Module:
    """nanoGPT's structure with the checkpoint in it."""
    module = PORTS["nano"].build(model.config)
    PORTS["nano"].fill(module, model.state_dict())
    return module


D, K = CONFIG.n_embd, CONFIG.head_dim
CHANGES = {  # weights of a fault of one tensor each, with its cause; mistakes of reading a file are in test_diagnosis_ports.py
    "h.1.mlp.c_fc.weight": [(lambda w: torch.cat((w[:26], torch.zeros_like(w[26:]))), "not-loaded")],
    "h.1.ln_2.weight": [(torch.ones_like, "not-loaded")],
    "h.1.attn.c_attn": [
        (lambda w: w.view(3, -1, K, D).transpose(0, 1).reshape(w.shape), "head-layout"),
        (lambda w: w.roll(1, 0), "head-layout"),
    ],
}


@pytest.mark.parametrize(("where", "change", "id"), [(where, *one) for where, rows in CHANGES.items() for one in rows])
def test_a_wrong_weight_is_named(where: str, change: Callable[[Tensor], Tensor], id: str, two: gpt2.GPT2) -> None:
    """These loading mistakes still let the model generate text; the cause must name the right tensor."""
    module = port(two)
    parameter = module.get_parameter(f"transformer.{where.removesuffix('.weight')}.weight")
    parameter.data = change(parameter.data)
    before = copy.deepcopy(module.state_dict())
    found = diagnose(module, two)
    assert (found.verdict, {one.id for one in found.causes}) == ("mismatch", {id})
    assert found.causes[0].where.startswith(where)
    assert found.causes[0].confidence == 1.0
    assert all(torch.equal(tensor, module.state_dict()[key]) for key, tensor in before.items()), "it must be given back unchanged"


def test_a_padded_vocabulary_is_not_a_fault(two: gpt2.GPT2) -> None:
    """Columns of minus infinity beyond the vocabulary are what a program adds for speed."""
    found = diagnose(Around(port(two), lambda x: F.pad(x, (0, 5), value=-torch.inf)), two)
    assert (found.ok, found.causes) == (True, ()), found.table()


@torch.no_grad()
def folded(module: nn.Module) -> nn.Module:
    """Put each block's norm into the layer that reads it, in float32: the same function, and other weights."""
    for block in module.transformer.h:
        for norm, layer in ((block.ln_1, block.attn.c_attn), (block.ln_2, block.mlp.c_fc)):
            layer.bias += layer.weight @ norm.bias
            layer.weight *= norm.weight
            norm.weight.fill_(1.0)
            norm.bias.zero_()
    return module


def test_a_right_module_with_other_weights_is_right(two: gpt2.GPT2) -> None:
    """Norms that were folded into the next layers, in float32, were called parameters drawn at random."""
    found = diagnose(folded(port(two)), two)
    assert (found.ok, found.causes) == (True, ()), found.table()
    assert "compute the same" in found.notes[0]
    ends = {"logits-softmaxed": lambda x: x - x.mean(-1, keepdim=True), "logits-scaled": lambda x: 15 * (x / 15).tanh()}
    for id, end in ends.items():
        assert [one.id for one in diagnose(Around(folded(port(two)), end), two).causes] == [id]
    wrong = folded(port(two))
    with torch.no_grad():
        wrong.transformer.h[1].mlp.c_proj.bias[3] += 1e-3
    assert diagnose(wrong, two).verdict == "mismatch"


def test_a_single_entry_is_enough(two: gpt2.GPT2) -> None:
    """One wrong number, in a row that a probe of a few tokens does not read, must be found."""
    module = port(two)
    with torch.no_grad():
        module.transformer.wpe.weight[CONFIG.n_positions - 1, 3] += 0.5
    assert diagnose(module, two).causes[0].where.startswith("wpe")


def test_a_module_that_was_never_loaded_gets_that_cause_and_is_diagnosed_as_filled(two: gpt2.GPT2) -> None:
    """An author who forgot to load the weights must see that first, and then whether the rest is right."""
    module = PORTS["nano"].build(CONFIG)
    found = diagnose(module, two)
    assert (found.verdict, [one.id for one in found.causes]) == ("mismatch", ["not-loaded"])
    assert (found.causes[0].where, found.first_divergence.point) == ("all weights", "wte")
    assert diagnose(module, two, fill=True).ok


class Around(nn.Module):
    """A correct port, with a function applied to its logits."""

    def __init__(self, inner: nn.Module, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.after = inner, after

    def forward(self, ids: Tensor) -> Tensor:
        found = self.inner(ids)
        return self.after(found[0] if isinstance(found, tuple) else getattr(found, "logits", found))


@pytest.mark.parametrize(
    ("after", "id"),
    [
        (lambda x: F.dropout(x, 0.1), "dropout-active"),
        (lambda x: x + torch.randn_like(x) * 1e-3, "not-deterministic"),
        pytest.param(lambda x: x - x.mean(0, keepdim=True), "batch-dependent", marks=pytest.mark.slow),
        (lambda x: F.pad(x, (0, 5)), "padded-vocab"),
    ],
)
def test_behaviour(after: Callable[[Tensor], Tensor], id: str, two: gpt2.GPT2) -> None:
    """One run of one batch cannot show these. A row that is zero alone was said to differ by inf; others by random numbers."""
    module, reports = Around(port(two), after), set()
    for _ in range(2):
        reports.add(diagnose(module, two).causes)
        torch.rand(1)
    ((cause, *_),) = reports
    assert cause.id == id
    assert " inf" not in cause.evidence


def test_training_mode_is_said_first(two: gpt2.GPT2) -> None:
    """Somebody who forgot eval() saw other logits in each call, and was told that the module is right."""
    module = port(two).train()
    found = diagnose(module, two)
    assert found.ok
    assert found.notes[0].endswith("call .eval() before you use it")
    assert module.training
    assert diagnose(module.eval(), two).notes == ()
    module.train().eval = Mock(side_effect=NotImplementedError)
    assert diagnose(module, two).notes[0].endswith("export it in eval mode, for it has no .eval()")


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (7, "diagnose takes a torch.nn.Module, the path of a dump, a mapping of arrays, or a model's name, and was given int"),
        pytest.param(nn.Embedding(67, 67), "Embedding: nothing in its forward weighs projections", marks=pytest.mark.slow),
        (PORTS["nano"].build(gpt2.GPT2Config(**{**vars(CONFIG), "n_embd": 24})), "its width is 24, the checkpoint's 20"),
    ],
)
def test_a_module_that_cannot_be_diagnosed_is_refused_in_one_line(module: nn.Module, said: str, two: gpt2.GPT2) -> None:
    """A traceback would look like our bug."""
    assert said in refusal(diagnose, module, two)


def test_models_are_named_or_given_and_in_this_order(two: gpt2.GPT2, tmp_path: Path) -> None:
    """A name was read as a dump's path, and the right model in the first place ended in an AttributeError."""
    name = str(gpt2.save(two, None, tmp_path / "own"))
    found = diagnose(name, two)
    assert (found.verdict, found.module, found.checkpoint) == ("equal", name, "a model")
    assert not is_dump("shakespeare-mini")
    assert "the right model, a name or a GPT2; it was given Linear as the second" in refusal(diagnose, two, nn.Linear(2, 2))


def test_nan_is_followed_to_its_first_array_and_the_author_s_line(two: gpt2.GPT2) -> None:
    """'Your logits are NaN' leaves the author with a thousand operators to look at."""
    module = port(two)
    with torch.no_grad():
        module.transformer.h[1].mlp.c_fc.bias[2] = torch.nan
        module.transformer.h[0].ln_1.bias[:2] = torch.inf
    first = r"3 damaged values \(2 of transformer.h.0.ln_1.bias, 1 of transformer.h.1.mlp.c_fc.bias\), .*; the first"
    with pytest.raises(gpt2.InputError, match=first + " array .* NaN.*nano.py, line"):
        diagnose(module, two)
    with pytest.raises(
        gpt2.InputError, match=r"are NaN from position 0 on; .* result of log, of shape .*test_diagnosis.py, line"
    ):
        diagnose(Around(port(two), lambda x: (-x.square() - 1).log()), two)


def test_a_forward_that_fails_names_the_author_s_line(two: gpt2.GPT2) -> None:
    """A message of torch alone does not say which of a hundred lines has the wrong shape."""
    with pytest.raises(gpt2.InputError, match=r"RuntimeError: shape .*test_diagnosis.py, line \d+: .*lambda x: x.view\(3, 5\)"):
        diagnose(Around(port(two), lambda x: x.view(3, 5)), two)


class Bigrams(nn.Module):
    """The embedding and the head, and nothing between."""

    def __init__(self, wte: Tensor) -> None:
        super().__init__()
        self.wte = nn.Parameter(wte.detach().clone())

    def forward(self, ids: Tensor) -> Tensor:
        return self.wte[ids] @ self.wte.t()


def test_a_module_that_holds_the_checkpoint_s_weights_is_no_other_kind_of_model(two: gpt2.GPT2) -> None:
    """A GPT-2 whose blocks were replaced by nn.Identity was refused."""
    found = diagnose(Bigrams(two.wte.weight), two)
    assert {"layer-missing", "final-norm-missing"} <= {one.id for one in found.causes}, found.table()
    with pytest.raises(gpt2.InputError, match="weights cannot be put in for you; load them yourself"):
        diagnose(Bigrams(torch.randn_like(two.wte.weight)), two, fill=True)


def test_a_slow_module_is_tried_on_few_tokens(two: gpt2.GPT2, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that goes through attention number by number took hours for the full context."""
    monkeypatch.setattr("gpt2.port.module.runs.MOST_OPERATORS", 0)
    found = diagnose(port(two), two)
    assert found.ok
    assert "23 tokens were not tried" in found.notes[-1]


def test_likeness_describes_numbers() -> None:
    """A layer that was never loaded is recognised by its initial distribution."""
    assert "all 1" in likeness(torch.ones(9, dtype=torch.float64))
    assert "as a fresh nn.Linear is" in likeness(nn.Linear(64, 64).weight.detach().double())
    assert "at random (std 0.02)" in likeness(torch.randn(4000, generator=torch.Generator().manual_seed(0)).double() * 0.02)


def test_deterministic_mode_removes_randomness_and_narrow_casts() -> None:
    """Otherwise nothing behind a dropout could be compared in float64. The first call of an operator always goes the long way."""
    x = torch.randn(4, 5, dtype=torch.float64)
    half, masks = torch.full_like(x, 0.5), (torch.bernoulli, lambda p: torch.bernoulli(p, 0.5), lambda p: p.bernoulli_(0.5))
    drops = [lambda x, mask=mask: x * mask(half.clone()) / 0.5 for mask in masks]
    for drop in 2 * [*drops, lambda x: F.dropout(x, 0.5, True), lambda x: torch.native_dropout(x, 0.5, True)[0]]:
        result, mode = run_deterministically(lambda drop=drop: drop(x @ torch.eye(5).double()).float() + torch.randn(4, 5))
        assert torch.equal(result, x)
        assert (result.dtype, mode.casts, mode.draws) == (torch.float64, {"float32"}, ["randn"])
        assert [(one.after, torch.equal(one.value, x)) for one in mode.dropouts] == [(5, True)]
        dropped, watching = run_deterministically(lambda drop=drop: drop(x), keep_random=True)
        assert not torch.equal(dropped, x)
        assert len(watching.dropouts) == 1


def placed(id: str, *places: Place, effect: float | None = None) -> Cause:
    return Cause(id, places, "detail", "evidence", 1.0, effect=effect)


def test_causes_are_sorted_by_effect_and_consequences_dropped() -> None:
    """Users act on the first cause, and it was an epsilon where the last norm was missing as well."""
    causes = [placed("gelu-variant", Place(n, "mlp.act"), effect=2.0 + n) for n in range(3)]
    small, unknown = placed("rmsnorm", Place(0, "ln_1"), effect=0.1), placed("position-offset", Place(None, "wpe"))
    follows = placed("missing-bias", Place(0, "ln_1.bias"))
    found = ranked([unknown, small, follows, *causes], 3, lambda cause: 3.0 if cause.id == "position-offset" else None)
    assert [(one.id, one.effect) for one in found] == [("gelu-variant", 4.0), ("position-offset", 3.0), ("rmsnorm", 0.1)]
    assert [one.id for one in ranked([unknown, small], 3)] == ["rmsnorm", "position-offset"]


def test_only_what_all_blocks_have_is_named_for_all() -> None:
    """A fault in two of three blocks, said of all, would have a right block changed."""
    norms = tuple(Place(n, "ln_1") for n in range(3))
    assert (collapsed(norms[1:], 3), collapsed(norms, 3)) == (norms[1:], (Place(EVERY, "ln_1"),))


def test_every_cause_has_a_fix_of_one_line() -> None:
    """Users copy the fix from the terminal."""
    assert all(fix and "\n" not in fix for fix in CAUSES.values())


FOUND = Diagnosis(
    "mismatch",
    Divergence("h.0.mlp.act", 2.4e-4),
    (replace(placed("gelu-variant", Place(EVERY, "mlp")), detail="your activation is the exact GELU"),),
    ("a note",),
    "MyGPT",
    "gpt2",
    float("inf"),
)


def test_the_table() -> None:
    """The table gives verdict, place, cause, evidence and fix in this order, within 80 columns."""
    table = FOUND.table(80)
    words = ["MISMATCH  first at h.0.mlp.act (error 2.4e-04)", "gelu-variant", "how we know", "fix", "a note"]
    assert [table.index(word) for word in words] == sorted(table.index(word) for word in words)
    assert max(map(len, table.splitlines())) <= 80
    assert "EQUAL  logits within 1.0e-15" in Diagnosis("equal", None, (), logits_error=1e-15).table()


def test_the_json() -> None:
    """Other programs read these keys; infinity and NaN become null."""
    shown = json.loads(FOUND.to_json())
    assert shown["first_divergence"] == {"point": "h.0.mlp.act", "layer": 0, "error": 2.4e-4}
    assert set(shown["causes"][0]) == {"id", "where", "detail", "evidence", "confidence", "fix", "effect"}
    assert shown["logits_error"] is None
    assert json.loads(Diagnosis("equal", None, ()).to_json())["first_divergence"] is None
