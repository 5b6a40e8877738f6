"""Tests that come from the table of alternatives itself: each changes something, is named, and has a name of its own."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from inspect import isfunction
from pkgutil import iter_modules

import numpy as np
import pytest
import torch
from support.checks import mostly_slow
from support.faulty.loading import weights
from support.random_models import model_of
from torch import Tensor, nn

import gpt2
from gpt2.config import GPT2Config
from gpt2.measure.tracing import points, trace
from gpt2.model import GPT2
from gpt2.port import alternatives as package, graph
from gpt2.port.alternatives import FAMILIES, alternative, table
from gpt2.port.alternatives.alternative import Alternative, Changed, Schedule, Which, in_calls, scheduled
from gpt2.port.alternatives.candidates import Candidate
from gpt2.port.alternatives.outside import standing
from gpt2.port.graph import ROWS, TEXT, Calls, Edits, Formula, Model, Program, Site
from gpt2.port.recording.pool import collect
from gpt2.port.search.batch import Moved, by_node, in_rows
from gpt2.port.search.walk import Walked, search
from gpt2.port.terms.causes import CAUSES

SIZES = {"vocab_size": 29, "bos_token_id": 0, "eos_token_id": 0}
CONFIG = GPT2Config(n_positions=15, n_embd=12, n_layer=2, n_head=3, n_inner=20, **SIZES)
TOKENS = 9
CALLS: tuple[Calls, ...] = (((0, TOKENS),), ((0, 4), (4, 8), (8, 9)), tuple((n, n + 1) for n in range(TOKENS)))
NOTHING = 1e-9  # a change of logits that is none
# Alternatives that change nothing, by a part of their label: why.
SILENT = {
    "rounded (0.797": "the constant has enough digits",
    **dict.fromkeys((f"become -{n:g}," for n in (1e2, 1e3, 1e4, 1e5, 1e9)), "the exponential of so small a score is zero"),
    f"the last {TOKENS - 1} tokens alone, itself among them, and the first": "so many tokens are all",
}
SHOWN: dict[str, Callable[[str], bool]] = {  # of the traced values, beside the logits
    "full": lambda point: True,
    "usual": lambda point: point.startswith(("h.", "embed")) and not point.endswith(("attn.mixed", "ln_1")),
    "block": lambda point: point.startswith("h.") and point.count(".") == 1,
    "mid": lambda point: point.endswith(".mid"),
    "logits": lambda point: False,
}
# Causes that are one computation in some alternatives of theirs.
SAME = {
    frozenset(one)
    for one in (
        ("qkv-order", "head-layout"),
        ("qkv-order", "value-projection-wrong"),
        ("qkv-order", "wrong-tensor"),
        ("norms-swapped", "wrong-tensor"),
        ("layer-repeated", "wrong-tensor"),  # one block's weights in all: that block, run again
        ("mask-strict", "cache-inconsistent"),
        ("mask-missing", "cache-inconsistent"),
        ("mask-strict", "value-projection-wrong"),  # a token sees itself alone: its own value
    )
}


@cache
def model() -> GPT2:
    return model_of(CONFIG, {name: tensor.double() for name, tensor in weights(CONFIG).items()})


@cache
def ids() -> Tensor:
    return torch.randint(CONFIG.vocab_size, (2, TOKENS), generator=torch.Generator().manual_seed(3))


@cache
def right() -> Model:
    return Model(model().state_dict(), CONFIG, ids())


@cache
def alternatives() -> tuple[Alternative, ...]:
    return tuple(table(Model(model().state_dict(), CONFIG, ids())))


def in_turn(m: Model, blocks: Mapping[int, Edits], embed: Formula | None = None, calls: Calls = ()) -> Tensor:
    """The stream (B, T, D) of a program that computes its text call by call, with a cache of keys and values."""
    out, cache = [], dict[tuple[int, str], Tensor]()
    for begin, end in calls or ((0, m.ids.shape[1]),):
        x = (embed or graph.RIGHT["embed"])(Site(m, 0, begin, end), {})
        for layer, state in enumerate({} for _ in range(CONFIG.n_layer)):
            state["x"] = x
            for node in graph.NODES:
                state[node] = graph.computed(Site(m, layer, begin, end), state, node, blocks.get(layer, {}))
                if node in ("attn.kh", "attn.vh"):
                    before = [cache[layer, node]] if begin else []
                    state[node] = cache[layer, node] = torch.cat([*before, state[node]], 2)
            x = state[""]
        out.append(x)
    return torch.cat(out, 1)


@torch.no_grad()
def logits(one: Alternative | None, calls: Calls = CALLS[0], given: Tensor | None = None) -> Tensor:
    """What a program gives that has the alternative everywhere, and reads its text in these calls."""
    m = Model(model().state_dict(), CONFIG, ids() if given is None else given)
    outside = {} if one is None else one.outside
    blocks = {} if one is None else {n: one.at(n) for n in range(CONFIG.n_layer)}
    x = in_turn(m, blocks, outside.get("embed"), tuple((a, min(e, m.ids.shape[1])) for a, e in calls if a < m.ids.shape[1]))
    site = Site(m, 0, 0, m.ids.shape[1])
    normed = (outside.get("ln_f") or graph.RIGHT["ln_f"])(site, {"x": x})
    return normed @ (outside.get("head") or graph.RIGHT["head"])(site, {}).T


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def test_programs_that_share_a_formula_have_its_value_for_their_own_nodes() -> None:
    """It is computed once where it reads GPT-2's nodes alone: a program that changed one of them had the value of another."""
    seen = list[Tensor]()
    edits: Edits = {"attn.q": lambda c, s: seen.append(s["ln_1"]) or -s["ln_1"]}
    every = [{"ln_1": lambda c, s: 2 * s["x"]} | edits, edits, edits, {"ln_1": lambda c, s: 3 * s["x"]} | edits]
    site, x, moved = right().site(0), right().embed(), Moved()
    batch = {"x": x.expand(4, *x.shape)}
    for node, own in by_node(every).items():
        batch[node] = in_rows(site, node, {}, batch, own, 4, set(), moved)
    normed = site.right("ln_1", batch)[0]
    assert apart(batch["attn.q"], -torch.stack([2 * x, normed, normed, 3 * x])) == 0
    assert len(seen) == 3


@pytest.mark.parametrize("calls", CALLS)
def test_without_an_alternative_the_graph_is_the_model(calls: Calls) -> None:
    """A node that differs from our model, in any schedule, would make every program faulty."""
    with torch.no_grad():
        assert apart(logits(None, calls), model()(ids())) < 1e-13
    ours, values = trace(model(), ids()), Model(model().state_dict(), CONFIG, ids()).trace(Program())
    assert {"embed", "h.1.attn.heads", "h.1.mid", "h.1", "ln_f", "logits"} <= ours.keys() & values.keys()
    assert max(apart(values[point], ours[point]) for point in ours.keys() & values.keys()) < 1e-13


def test_every_file_adds_to_the_table_and_every_cause_is_known() -> None:
    """A function that no table names adds nothing, and a cause without a row ends a report with an exception."""
    files = (import_module(f"gpt2.port.alternatives.{one.name}") for one in iter_modules(package.__path__))
    every = {make for file in files for make in vars(file).values() if isfunction(make)}
    yielding = {make for make in every if make.__annotations__ == {"model": Model, "return": Iterator[Alternative]}}
    assert yielding == {*FAMILIES, standing}
    assert {id for one in alternatives() for id, _ in ((one.id, ""), *one.also)} <= CAUSES.keys()
    labels = [one.label for make in FAMILIES for one in make(Model(model().state_dict(), CONFIG, ids()))]
    assert len(labels) == len(set(labels)), "two alternatives of one label, of which one is never tried"


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_each_alternative_shows_and_is_finite(every: int) -> None:
    """An alternative that changes nothing is offered for right logits; one that is NaN at once is never the program's."""
    right = [logits(None, calls) for calls in CALLS]
    silent, endless = set(), []
    for one in alternatives()[::every]:
        for calls, expected in zip(CALLS, right, strict=True):
            made = logits(one, calls)
            assert made.shape == expected.shape, one.label
            if not bool(made.isfinite().all()) and calls == CALLS[0]:
                endless.append(one.label)
            if not apart(made, expected) < NOTHING:
                break
        else:
            silent.add(one.label)
    assert not {label for label in silent if not any(part in label for part in SILENT)}
    assert not endless


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_an_alternative_says_what_its_values_depend_on(every: int) -> None:
    """A search in large models looks at the first tokens of the first row: a fault that makes them depend on others is missed."""
    few, swapped = ids()[:1, :3], torch.stack([ids()[0], ids()[1].flip(0)])
    for one in alternatives()[::every]:
        whole = logits(one)
        later = one.sees != ROWS and not apart(whole[:1, :3], logits(one, given=few)) < NOTHING
        rows = not apart(whole[0], logits(one, given=swapped)[0]) < NOTHING
        assert not later or one.sees in (TEXT, ROWS), one.label
        assert not rows or one.sees == ROWS, one.label


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
@torch.no_grad()
def test_calls_give_what_a_program_computes_that_reads_its_text_so(every: int) -> None:
    """Attention that is computed call by call from a whole text must be what the graph gives call by call."""
    calls = CALLS[1]
    m = Model(model().state_dict(), CONFIG, ids())
    compared = 0
    for one in [one for one in alternatives() if one.sees != ROWS][::every]:
        outside = in_calls(calls, one.outside)
        there = in_turn(m, {n: in_calls(calls, one.at(n)) for n in range(CONFIG.n_layer)}, outside.get("embed"))
        here = in_turn(m, {n: one.at(n) for n in range(CONFIG.n_layer)}, one.outside.get("embed"), calls)
        compared += 1
        assert torch.allclose(here, there, atol=1e-9, equal_nan=True), one.label
    assert compared > 800 / every


def test_a_fault_of_some_calls_is_in_these_alone() -> None:
    """Steps after a prompt may have the fault, or the prompt alone."""
    relu = next(one for one in alternatives() if "is ReLU;" in one.words)
    calls = ((0, 4), *((n, n + 1) for n in range(4, TOKENS)))
    right, wrong = logits(None), logits(relu)
    for which, tokens in ((Which.FIRST, slice(0, 4)), (Which.LATER, slice(4, None))):
        made = logits(scheduled(relu, Schedule("", calls, which)))
        assert apart(made[:, tokens], right[:, tokens]) > 1e-3
    assert apart(logits(scheduled(relu, Schedule("", calls, Which.FIRST)))[:, :4], wrong[:, :4]) < NOTHING


def test_two_edits_of_one_node_are_merged_if_one_changes_what_is_there() -> None:
    """A factor of the scores beside another comparison is two faults; two comparisons at once cannot be."""
    double, compared = Changed("attn.scores", lambda c, y: 2 * y), {"attn.scores": lambda c, s: s["attn.kh"] @ s["attn.kh"].mT}
    both = alternative.merged(compared, {"attn.scores": double})
    assert both is not None
    assert alternative.merged(compared, dict(compared)) is None
    simulation = Model(model().state_dict(), CONFIG, ids())
    one, two = (simulation.trace(Program({0: edits}))["h.0.attn.scores"] for edits in (compared, both))
    assert torch.allclose(2 * one, two)


@pytest.mark.slow
def test_two_causes_of_one_computation_stand_together() -> None:
    """If two causes give the same numbers, the report must say so; a new alternative that repeats an old one is useless."""
    values = {one.label: (one.id, logits(one).flatten()) for one in alternatives() if not one.steps and not one.also}
    order = sorted(values, key=lambda label: float(values[label][1].sum()))
    right, twins = logits(None).flatten(), set()
    for label, other in itertools.chain.from_iterable(zip(order, order[step:], strict=False) for step in (1, 2, 3)):
        (id, one), (other_id, two) = values[label], values[other]
        if id != other_id and apart(one, two) < NOTHING and apart(one, right) > NOTHING:
            twins.add((frozenset((id, other_id)), label, other))
    assert {pair for pair, *_ in twins} <= SAME, [one for one in twins if one[0] not in SAME]


@cache
def drawn(count: int, seed: int) -> list[tuple[Alternative, Calls, str]]:
    """Alternatives with the calls in which their program reads its text, and what is seen of it."""
    generator = torch.Generator().manual_seed(seed)
    right, out = [logits(None, calls) for calls in CALLS], []
    ways = [one.calls for one in alternative.schedules(Model(model().state_dict(), CONFIG, ids()))]
    for number in torch.randperm(len(alternatives()), generator=generator).tolist():
        one = alternatives()[number]
        calls = ways[int(torch.randint(len(ways), (1,), generator=generator))] if one.steps else CALLS[0]
        made = logits(one, calls)
        size = float(right[0].square().mean().sqrt())
        if bool(made.isfinite().all()) and apart(made, right[0]) > 1e-2 * size:
            out.append((one, calls, ("block", "module", "logits", "full")[len(out) % 4]))
        if len(out) == count:
            break
    return out


def everywhere(one: Alternative) -> Candidate:
    """The alternative in all blocks, and outside them."""
    return Candidate((*((one, n) for n in range(CONFIG.n_layer) if one.edits), *[(one, None)] * bool(one.outside)))


def dumped(program: Program | None, level: str, dtype: torch.dtype = torch.float32) -> dict[str, np.ndarray]:
    """The dump of a program at a level, by names that say nothing."""
    assert program is not None
    values = Model(model().state_dict(), CONFIG, ids()).trace(program)
    kept = {"logits": values.pop("logits"), **{f"t{n}": x for n, (point, x) in enumerate(values.items()) if SHOWN[level](point)}}
    return {"ids": ids().numpy(), **{key: value.to(dtype).numpy() for key, value in kept.items()}}


@pytest.mark.slow
def test_a_fault_of_a_prompt_in_chunks_is_named() -> None:
    """Servers read a long prompt some tokens at a time, and then single tokens, often by another function."""
    calls = ((0, 3), (3, 6), *((n, n + 1) for n in range(6, TOKENS)))
    for words, which in (("the future too", Which.ALL), ("sees those of its own call alone", Which.SEVERAL)):
        one = next(one for one in alternatives() if one.words.endswith(words))
        said = gpt2.diagnose(dumped(everywhere(scheduled(one, Schedule("", calls, which))).program, "full"), model())
        assert said.causes[0].id == one.id
        assert "first 6 tokens are read 3 at a time" in said.causes[0].detail


class Mutant(nn.Module):
    """Our own model with alternatives, as somebody's module."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.model, self.program = model(), program

    def forward(self, given: Tensor) -> Tensor:
        return Model(model().state_dict(), CONFIG, given).trace(self.program)["logits"]


def walked(whole: Candidate) -> Walked:
    """What is found in a module that has these alternatives."""
    program = whole.program
    assert program is not None
    return search(collect(Mutant(program), ids(), CONFIG), model().state_dict(), model(), right())


def whole_of(label: str, block: int | None) -> Candidate:
    """The alternative with this part of its label, in one block or in all; or blocks of other numbers."""
    if label.startswith("blocks"):
        return Candidate(order=tuple(map(int, label.split()[1:])))
    one = next(one for one in alternatives() if label in one.label)
    return everywhere(one) if block is None else Candidate(((one, block),))


ONE_BLOCK, LAST = ("blocks 0 0", None), ("layer-missing: it does not run", 1)
IN_MODULES: list[tuple[str, int | None]] = [
    *(("ln_2 layernorm-eps: epsilon 1e-06;", 1), ("ln_f final-norm-missing", None), ("gelu-variant: quick:", 1)),
    *(("mask-missing: every", 1), ("mask-strict: a token sees only", 1), ("mask-off-by-one", 0), ("the queries are mixed", 1)),
    *(("positions begin at row 1", None), ("token embeddings are multiplied by 0.5", None)),
    *(("residual-missing: attention's result replaces", 0), ("residual-missing: the feed-forward's result replaces", 1)),
]
IN_DUMPS: list[tuple[str, int | None, str]] = [
    *((*ONE_BLOCK, "usual"), (*LAST, "mid"), ("cache-inconsistent: the softmax divides by one more", None, "full")),
    *((*ONE_BLOCK, "logits"), (*LAST, "logits"), (*ONE_BLOCK, "mid"), (*LAST, "usual")),
    ("scale-by-width: the scores are divided by the root", None, "usual"),
    ("every token sees the whole", 1, "logits"),
    ("memory as (head, batch, token, unit)", None, "full"),
    ("attention's result is dropped", None, "full"),
    ("ln_1 layernorm-axis: the norm runs over all tokens, for each feature, as a batch norm", None, "full"),
]


@pytest.mark.parametrize(("label", "block"), mostly_slow(IN_MODULES, 3))
def test_a_module_with_an_alternative_has_this_cause_at_this_place_and_no_other(label: str, block: int | None) -> None:
    """A cause beside the true one, or another place, makes the user change correct code."""
    whole = whole_of(label, block)
    result, (wanted,) = walked(whole), whole.causes(CONFIG.n_layer)
    assert [(cause.id, cause.places) for cause in result.causes] == [(wanted.id, wanted.places)]
    assert result.explained
    right, wrong = (Model(model().state_dict(), CONFIG, ids()).trace(p) for p in (Program(), whole.program))
    shown = next(point for point in points(CONFIG.n_layer) if point in right and apart(right[point], wrong[point]) > NOTHING)
    assert result.first.point == (wanted.places[0].name if shown == "embed" else shown)


@pytest.mark.parametrize(("label", "block", "level"), mostly_slow(IN_DUMPS, 4))
def test_a_dump_of_a_program_with_an_alternative_has_this_cause_at_this_place_and_no_other(
    label: str, block: int | None, level: str
) -> None:
    """One block's weights in all blocks were a block that runs again. In the precision that hides most, too."""
    whole = whole_of(label, block)
    (wanted,) = whole.causes(CONFIG.n_layer)
    for dtype in (torch.float32, torch.float16)[: 1 + (level == "usual")]:
        said = gpt2.diagnose(dumped(whole.program, level, dtype), model())
        assert [(cause.id, cause.where) for cause in said.causes] == [(wanted.id, wanted.where)], dtype


@pytest.mark.slow
@pytest.mark.parametrize(("label", "block", "level"), [("is ReLU;", 1, "block"), ("mask-missing: every", None, "full")])
def test_a_large_model_is_searched_in_part(label: str, block: int | None, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The edited node alone is looked at, the first tokens, in float32; a stream in float64 that enters them was an error."""
    monkeypatch.setattr(graph, "SMALL", 0)
    whole = whole_of(label, block)
    (wanted,) = whole.causes(CONFIG.n_layer)
    said = gpt2.diagnose(dumped(whole.program, level, torch.float64), model())
    assert [(cause.id, cause.where) for cause in said.causes] == [(wanted.id, wanted.where)]


def said_of(one: Alternative, calls: Calls, level: str) -> list[str]:
    """The ids of the causes that are found in our own model with an alternative."""
    weights = one.id == "reduced-precision" and "weights" in one.words  # a module's are compared before the walk
    if level == "module" and calls == CALLS[0] and not weights:
        found = walked(everywhere(one))
        return [cause.id for cause in found.causes if found.explained]
    dump = {"ids": ids().numpy(), "logits": logits(one, calls).float().numpy()}
    if level in ("block", "full") and calls == CALLS[0]:
        dump = dumped(everywhere(one).program, level)
    said = gpt2.diagnose(dump, model())
    return [cause.id for cause in said.causes] or [said.verdict]


def named(one: Alternative, calls: Calls, level: str) -> None:
    """The alternative's cause must be the first, or one of the same computation."""
    said, accepted = said_of(one, calls, level), {id for id, _ in ((one.id, ""), *one.also)}
    assert said, (one.label, level)
    assert said[0] in accepted or any({said[0], id} in SAME for id in accepted), (one.label, calls, level, said)


@pytest.mark.parametrize(
    ("count", "seed", "number"),
    [*((4, 1, n) for n in (1, 3)), *(pytest.param(8, 2, n, marks=pytest.mark.slow) for n in range(8))],
)
def test_a_mutant_of_our_model_is_named(count: int, seed: int, number: int) -> None:
    """Every line of the table must be found by the search, in any schedule and from few values."""
    named(*drawn(count, seed)[number])


def test_factors_of_the_scores_that_agree_in_the_last_block_are_two() -> None:
    """One by the layer's number was left out as one by the width: here both are 1/4 in the last of two blocks."""
    config = GPT2Config(n_positions=4, n_embd=16, n_layer=2, n_head=4, **SIZES)
    own = Model(GPT2(config).state_dict(), config, torch.tensor([[1, 2]]))
    assert "scale-inverse-layer" in {one.id for one in table(own)}
