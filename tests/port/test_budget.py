"""The limit of the searches in a port: of work, which is the same on every machine, and one of the clock."""

import itertools
import time

import pytest
import torch
from port.test_walk import IDS, checkpoint

import gpt2
from gpt2.measure.tracing import trace
from gpt2.port.terms import budget
from gpt2.port.terms.budget import ELEMENTS, PRODUCTS, Budget, Spent

MODEL = checkpoint()
LATE = "the search ended at its limit of 0 s, because this machine is slow or busy; not tried: "


def undetermined() -> dict[str, torch.Tensor]:
    """A dump of most values of a program whose second block no formula explains."""
    model = checkpoint()
    with torch.no_grad():
        model.h[1].mlp.c_fc.weight += 0.1 * torch.randn(21, 52, generator=torch.Generator().manual_seed(1))
        model.h[1].ln_1.weight.copy_(model.h[1].ln_1.weight.flip(0).cumsum(0))
    shown = {point: value.float() for point, value in trace(model, IDS).items() if "attn" not in point}
    return {**shown, "ids": IDS}


def test_the_parts_of_a_budget_end_where_its_shares_are_spent() -> None:
    """A part that kept its own account would let the whole search do several times its work."""
    whole = Budget(100)
    part = whole.part(4)
    part.spend(5, 10 * ELEMENTS, 9 * PRODUCTS)
    assert (part.left, whole.left) == (1, 76)
    part.check()
    whole.spend(1)  # whoever computes something
    assert (part.spent, whole.spent, whole.part(2).left) == (True, False, 37.5)
    with pytest.raises(Spent):
        part.check()
    assert not Budget().spent
    assert Budget(0).spent


def test_the_same_work_is_done_on_a_slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """With limits of CPU time, a busy or slow machine found no cause where another one named it."""
    reports, work, looks = [], [], itertools.count()
    for slower in (0.0, 0.05):  # seconds that go by between two looks at a clock
        for name, clock in [(name, getattr(time, name)) for name in ("monotonic", "process_time", "perf_counter")]:
            monkeypatch.setattr(time, name, lambda clock=clock, slower=slower: clock() + slower * next(looks))
        for limit in (1_000, 4_000):
            made = Budget(limit)
            monkeypatch.setattr("gpt2.port.dump.examination.of_model", lambda parameters, made=made: made)
            reports.append(gpt2.diagnose(undetermined(), MODEL).table())
            work.append(made.done)
    assert reports[:2] == reports[2:]
    assert work[:2] == work[2:]
    assert 1_000 <= work[0] < 4_000 <= work[1] < 10_000
    assert "the search ended at its limit of work; not tried: " in reports[0]


def test_the_clock_ends_a_search_and_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one limit of the clock is for a machine of another kind; a report that does not name it would be taken for final."""
    monkeypatch.setattr(budget, "CLOCK", 0.0)
    dump = undetermined()
    assert any(note.startswith(LATE) for note in gpt2.diagnose(dump, MODEL).notes)
    (note,) = (one for one in gpt2.diagnose({"logits": dump["logits"], "ids": IDS}, MODEL).notes if one.startswith(LATE))
    assert note.removeprefix(LATE).split(", ")[:2] == ["single faults", "caches"]
