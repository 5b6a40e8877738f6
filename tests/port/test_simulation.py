"""Faults are found from logits alone, or from one tensor a block, by switching them on in our own forward pass."""

import math
from dataclasses import replace

import pytest
import torch
from port.test_alternatives import alternatives, ids as mutated_ids, logits, model as mutated
from support.faulty.loading import weights
from support.random_models import model_of
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.measure.metrics import worst_relative_error
from gpt2.measure.tracing import trace
from gpt2.model import GPT2
from gpt2.port.alternatives import loading, norms, table
from gpt2.port.alternatives.alternative import Alternative, Schedule, Which, scheduled
from gpt2.port.alternatives.candidates import Candidate
from gpt2.port.alternatives.outside import orders, sequence_faults
from gpt2.port.dump.simulating import DumpExplainer, Explanation
from gpt2.port.graph import ORDER, Entrance, Model, Program
from gpt2.port.search.batch import Batch
from gpt2.port.search.matching import Faults, PartSearch
from gpt2.port.search.part import Part
from gpt2.port.terms.budget import Budget, few_threads

CONFIG = GPT2Config(vocab_size=29, n_positions=11, n_embd=12, n_layer=2, n_head=3, n_inner=20, bos_token_id=0, eos_token_id=0)
STREAMS = ("embed", "h.0", "h.1", "logits")


@pytest.fixture(scope="module")
def model() -> GPT2:
    return model_of(CONFIG, {name: tensor.double() for name, tensor in weights(CONFIG).items()})


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(CONFIG.vocab_size, (2, 7), generator=torch.Generator().manual_seed(3))


def explained(
    model: GPT2, ids: Tensor, evidence: dict[str, Tensor], tolerance: float | dict[str, float] = 1e-9, work: float = math.inf
) -> Explanation:
    allowed = tolerance if isinstance(tolerance, dict) else dict.fromkeys(evidence, tolerance)
    own = Model(model.state_dict(), model.config, ids, budget=Budget(work))
    return DumpExplainer(own, evidence, allowed).explanation()


def run(part: Part, some: list[Candidate]) -> list[tuple[Candidate, Tensor]]:
    """Each candidate with its values (B, T, X) at the end of a part."""
    return [pair for few, values in Batch(part).values(some) for pair in zip(few, values, strict=True)]


def named(explanation: Explanation) -> list[list[tuple[str, str]]]:
    """Each hypothesis as its faults' ids and places."""
    return [[(one.id, ", ".join(map(str, one.places))) for one in each.faults] for each in explanation.hypotheses]


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("a token sees the last 3 tokens", "no window"),
        ("attention's result goes through an activation", "no activation but behind c_fc"),
        ("positions begin anew in each call", "torch.arange(past, past + T)"),
        ("keys and values are rounded to float16", "keep the cache in float32"),
    ],
)
def test_a_fault_says_its_own_correction(words: str, fix: str, model: GPT2, ids: Tensor) -> None:
    """The cause's line was printed: a window was to be mended as a token that cannot see itself, positions by themselves."""
    one = next(one for one in table(Model(model.state_dict(), CONFIG, ids)) if one.words.startswith(words))
    sites = tuple((one, n) for n in range(CONFIG.n_layer)) if one.edits else ((one, None),)
    (found,) = Candidate(sites).causes(CONFIG.n_layer)
    assert found.fix is not None
    assert fix in found.fix


@torch.no_grad()
def wrong_by(model: GPT2, ids: Tensor, faults: dict[str, tuple[int | None, ...]]) -> dict[str, Tensor]:
    """The simulation's values with faults, each by a part of its label, in these blocks."""
    simulation = Model(model.state_dict(), CONFIG, ids)
    every = table(simulation)
    known = {part: next(one for one in every if part in one.label) for part in faults}
    program = Candidate(tuple((known[part], layer) for part, layers in faults.items() for layer in layers)).program
    assert program is not None
    return simulation.trace(program)


def test_as_many_faults_of_later_tokens_are_tried_wherever_they_begin(model: GPT2, ids: Tensor) -> None:
    """All shifts of positions were kept: 12 GB for token 500 at gpt2's shape. Scores of 768 heads and 1,024 tokens: 3 GB."""
    simulation = Model(model.state_dict(), CONFIG, ids)
    faults = Faults(part := Part(simulation, "logits", None, {"logits": model(ids).detach()}, {}))
    early, late = (faults.since(token) for token in (2, 6))
    assert len(late) <= len(early) + 3
    assert table(simulation.on_ids(ids[:, :3])) is not table(simulation)
    simulation._parameters = 1 << 40  # a large model, whose search in float32 had no limit of work
    wrong = model(ids).detach() + (torch.arange(ids.shape[1]) >= 6)[:, None]  # four right tokens told no fault of later ones
    late = PartSearch(Part(simulation, "logits", None, {"logits": wrong}, {"logits": 1e-9}))
    assert (late.few.tokens, next(late._ways())[0]) == (7, "caches")  # last, they met the end of the work
    assert Batch(part, 1).model.budget is simulation.budget


def test_no_fault_is_the_model_itself(model: GPT2, ids: Tensor) -> None:
    """With one head, a bias that is added once for each head was tried, and said to be added 1 times."""
    config = replace(CONFIG, n_head=1)
    words = [one.words for one in loading.biases(Model(model.state_dict(), config, ids)) if "is added 1" in one.words]
    assert words == []
    assert [one.detail for one in sequence_faults([0, 0], 1)] == ["it runs 2 times; the blocks run are h.0, h.0"]


def test_faults_in_several_blocks_are_found_one_after_the_other(model: GPT2, ids: Tensor) -> None:
    """The search must go on from the program's own stream, or a second fault is never seen."""
    values = wrong_by(model, ids, {"is ReLU;": (0,), "the scores are not scaled": (1,), "without the last norm": (None,)})
    explanation = explained(model, ids, {point: values[point] for point in STREAMS})
    assert named(explanation)[0] == [
        ("gelu-variant", "h.0.mlp.act"),
        ("scale-missing", "h.1.attn"),
        ("final-norm-missing", "ln_f"),
    ]
    assert (explanation.last_right, explanation.first_wrong) == ("logits", "h.0")


@pytest.mark.slow
def test_only_the_last_position_and_a_padded_vocabulary(model: GPT2, ids: Tensor) -> None:
    """Programs that generate show the last position only, and many pad the vocabulary."""
    logits = wrong_by(model, ids, {"is ReLU;": (0, 1)})["logits"]
    padded = torch.cat([logits[:, -1:], torch.zeros(2, 1, 3, dtype=torch.float64)], -1)
    assert named(explained(model, ids, {"logits": padded}))[0] == [("gelu-variant", "h.*.mlp.act")]


def test_one_tensor_a_block_names_the_block_that_nothing_explains(model: GPT2, ids: Tensor) -> None:
    """An unknown fault must be said to be unknown, at its place, and what follows must not be blamed."""
    with torch.no_grad():
        values = trace(model, ids)
        start = values["h.0"] + 0.3 * torch.randn(values["h.0"].shape, generator=torch.Generator().manual_seed(1)).double()
        simulation = Model(model.state_dict(), CONFIG, ids)
        rest = simulation.trace(Program(), Entrance(1, {"x": start}))
    evidence = {"embed": values["embed"], "h.0": start, "h.1": rest["h.1"], "logits": rest["logits"]}
    explanation = explained(model, ids, evidence, 1e-9, 100_000)
    assert (explanation.last_right, explanation.first_wrong, explanation.unexplained) == ("embed", "h.0", "h.0")
    assert not explanation.hypotheses


@pytest.mark.slow
def test_a_fault_that_is_hardly_nearer_than_the_right_formula_is_not_named(model: GPT2, ids: Tensor) -> None:
    """Rounding just above the tolerance was called another epsilon, which came just below it."""
    right, wrong = trace(model, ids), wrong_by(model, ids, {"ln_1 layernorm-eps: epsilon 1e-06;": (1,)})
    between = {point: 0.45 * right[point] + 0.55 * wrong[point] for point in STREAMS}
    allowed = {point: 0.5 * worst_relative_error(wrong[point], right[point]) + 1e-12 for point in STREAMS}
    explanation = explained(model, ids, between, allowed)
    assert (explanation.unexplained, explanation.hypotheses) == ("h.1", ())


def test_a_head_of_its_own_is_seen_where_there_are_enough_positions(model: GPT2) -> None:
    """Unknown weights fit any logits of a few positions, and none of many unless the head is all that is wrong."""
    ids = torch.randint(CONFIG.vocab_size, (2, 11), generator=torch.Generator().manual_seed(4))
    head = torch.randn(CONFIG.vocab_size, CONFIG.n_embd, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    with torch.no_grad():
        hidden = model.hidden(ids)
        few = explained(model, ids[:, :3], {"logits": hidden[:, :3] @ head.T}, 1e-9, 0)
        logits = (hidden @ head.T, (hidden @ model.wte.weight.T).flip(-1), hidden.square() @ head.T)
        many, shuffled, wrong = (explained(model, ids, {"logits": one}, 1e-9, 0) for one in logits)
    own, other = [[("untied-head", "logits")]], [[("wrong-tensor", "logits")]]
    assert [named(one) for one in (few, many, shuffled, wrong)] == [[], own, other, []]


@pytest.mark.slow
def test_logits_that_are_the_same_everywhere_show_no_bias(model: GPT2, ids: Tensor) -> None:
    """A norm over a batch of one row erases everything, and a fitted bias then gave any logits that no position changes."""
    logits = torch.randn(CONFIG.vocab_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert not explained(model, ids[:1], {"logits": logits.expand(1, ids.shape[1], -1)}, 1e-9, 400_000).hypotheses
    with torch.no_grad():
        biased = model(ids[:1]) + logits
    explanation = explained(model, ids[:1], {"logits": biased}, 1e-9, 400_000)
    assert [fault.id for fault in explanation.hypotheses[0].faults] == ["extra-bias"]


def test_a_fault_of_the_last_norm_is_no_head_of_its_own(model: GPT2) -> None:
    """Free weights of the head make up for a wrong last norm; the known fault must be preferred."""
    ids = torch.randint(CONFIG.vocab_size, (2, 11), generator=torch.Generator().manual_seed(4))
    values = wrong_by(model, ids, {"the weight is not applied": (None,)})
    shown = {point: values[point] for point in ("embed", "h.1", "logits")}
    assert named(explained(model, ids, shown))[0] == [("layernorm-without-affine", "ln_f")]


OF_PROMPTS = ("is ReLU;", "gelu-variant"), ("without transposing back", "head-layout")


@pytest.mark.parametrize(("part", "id"), [("", ""), *(pytest.param(*one, marks=pytest.mark.slow) for one in OF_PROMPTS)])
def test_a_fault_of_the_prompt_alone_is_found(part: str, id: str) -> None:
    """A prompt is computed in one piece, and steps after it need no mask and no merging: there, the same code may be right."""
    calls = ((0, 4), *((n, n + 1) for n in range(4, 9)))
    one = next((one for one in alternatives() if part and part in one.label), None)
    shown = logits(scheduled(one, Schedule("", calls, Which.FIRST)) if one else None)
    explanation = explained(mutated(), mutated_ids(), {"logits": shown})
    assert (explanation.first_wrong is None) == (not part)
    if part:
        first = explanation.hypotheses[0].faults
        assert [one.id for one in first] == [id], named(explanation)
        assert "in the first 4 tokens alone" in first[0].detail


def test_of_two_equal_explanations_the_commoner_mistake_comes_first() -> None:
    """They came in the order of trying. An explanation with fewer faults still comes before a common one with more."""

    def candidate(*ids: str) -> Candidate:
        return Candidate(((Alternative(ids[0], ids[0], {}, "ln_1", also=tuple((id, id) for id in ids[1:])), 0),))

    common, rare, both = candidate("layernorm-axis"), candidate("parallel-block"), candidate("gelu-variant", "layernorm-axis")
    assert sorted([rare, both, common], key=lambda one: one.order_of_naming) == [common, rare, both]


@torch.no_grad()
def test_each_program_gives_in_a_batch_what_it_gives_alone(model: GPT2, ids: Tensor) -> None:
    """A value of another row or shape would rule out the true fault. A norm over tokens took axes of a batch for a stream's."""
    exact = Model(model.state_dict(), CONFIG, ids)
    right = exact.trace(Program())
    parts = [Part(exact, end, None, {end: right[end]}, {}) for end in ("logits", "ln_f")]
    for layer, end in ((0, "h.0.mid"), (1, "h.1.attn.heads")):  # from a stage of a block to one of another
        state = {"x": right["x" if layer else "embed"], **{node: right[f"h.{layer}.{node}"] for node in ("ln_1", "attn.q")}}
        parts.append(Part(exact, end, Entrance(layer, state, ORDER["attn.q"]), {end: right[end]}, {}))
    for part in parts:
        some = [*Faults(part).singles()][:: 23 if part is parts[0] else 11]
        some += [Candidate(((one, None),)) for one in norms.formulas(exact) if one.outside and part.end == "ln_f"]
        some += [Candidate(order=order) for order in orders(CONFIG.n_layer) if part is parts[0]]
        values = run(part, [one for one in some if one.program is not None])
        for one, value in values:
            assert torch.allclose(value, part.values(one)[part.end], equal_nan=True), one
        assert len(values) > 20


@pytest.mark.slow
def test_no_fault_explains_an_unknown_computation(model: GPT2, ids: Tensor) -> None:
    """Among thousands of faults one may come near by chance. In float16's tolerance, which is the widest."""
    simulation = Model(model.state_dict(), CONFIG, ids)
    sines = Program({n: {"mlp.act": lambda c, s: (2 * s["mlp.c_fc"]).sin()} for n in range(CONFIG.n_layer)})
    logits = simulation.trace(sines)["logits"]
    with few_threads(0):
        simulation.budget = Budget(500_000)
        found = DumpExplainer(simulation, {"logits": logits}, {"logits": 0.01}).explanation()
    assert not found.hypotheses
    assert found.first_wrong == "logits"
