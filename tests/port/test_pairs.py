"""All pairs of known faults are run on the first tokens, in one batch; those that give them are run on all."""

from __future__ import annotations

import pytest
import torch
from support.checks import mostly_slow
from support.faulty.loading import weights
from support.random_models import model_of
from torch import Tensor

import gpt2
from gpt2.config import GPT2Config
from gpt2.measure.metrics import worst_relative_error
from gpt2.model import GPT2
from gpt2.port.deadline import Deadline, few_threads
from gpt2.port.dump.candidates import Candidate
from gpt2.port.dump.evaluate import Evaluator
from gpt2.port.dump.explaining import Explainer
from gpt2.port.dump.lenses import Lens, Lenses, Span
from gpt2.port.dump.pairing import Pairing
from gpt2.port.dump.segments import Segment
from gpt2.port.dump.table import Table
from gpt2.port.graph import ORDER, ROWS, Entrance, Model, Program

CONFIG = GPT2Config(vocab_size=29, n_positions=11, n_embd=12, n_layer=2, n_head=3, n_inner=20, bos_token_id=0, eos_token_id=0)
IDS = torch.randint(CONFIG.vocab_size, (2, 6), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def model() -> GPT2:
    return model_of(CONFIG, {name: tensor.double() for name, tensor in weights(CONFIG).items()})


def logits_of(own: Model) -> Segment:
    """The whole forward pass."""
    return Segment(own, "logits", None, {"logits": own.trace(Program())["logits"]}, {})


def candidates(simulation: Model) -> list[Candidate]:
    """Every common fault in all blocks or outside them, and the wrong sequences of blocks."""
    every = Table.of(simulation).singles(logits_of(simulation))
    return [one for one in every if not one.rare and not one.is_local and all(not two.crosses for two, _ in one.sites)]


def wrong(model: GPT2, *labels: str, point: str = "logits") -> Tensor:
    """The logits, or another value, of a program with faults, each by a part of its label.

    They are in all blocks, outside them, or in one ("ReLU@1").
    """
    simulation = Model(model.state_dict(), CONFIG, IDS)
    known = {next(iter(one.labels)): one for one in candidates(simulation) if len(one.labels) == 1}
    every = Table.of(simulation).blocks
    whole = Candidate()
    for label in labels:
        part, _, block = label.partition("@")
        if block:
            whole = whole.with_(Candidate(((next(one for one in every if part in one.label), int(block)),)))
        else:
            whole = whole.with_(next(one for name, one in known.items() if part in name))
    program = whole.program
    assert program is not None
    return simulation.trace(program)[point]


def lenses(model: GPT2, rows: int = 2) -> Lenses:
    """The views of all that a program computes."""
    exact = Model(model.state_dict(), CONFIG, IDS[:rows])
    return Lenses(exact, Span(0, CONFIG.n_layer, "logits", None, model(IDS[:rows]).detach()))


@torch.no_grad()
def test_each_program_gives_in_a_batch_what_it_gives_alone(model: GPT2) -> None:
    """A value that is taken from another row, or of another shape, would rule out the true fault: in any batch, in any part."""
    of = lenses(model)
    every = Table.of(of.exact).singles(logits_of(of.exact))
    programs = [one.program or Program() for one in every]
    right, pieces = of.exact.trace(Program()), [Lens(of.exact, of.span)]
    for layer, end in ((0, "h.0.mid"), (1, "h.1.attn.heads")):  # from a stage of a block to one of another
        state = {"x": right["x" if layer else "embed"], **{node: right[f"h.{layer}.{node}"] for node in ("ln_1", "attn.q")}}
        pieces.append(Lens(of.exact, Span(layer, layer + 1, end, Entrance(layer, state, ORDER["attn.q"]), right[end])))
    for lens in pieces:
        some = [one for one in programs[:: 23 if lens is pieces[0] else 31] if lens.span.reaches(one)]
        some = some if lens is pieces[0] else [one for one in some if not (one.outside or one.order or one.run)]
        span = lens.span
        for program, value in zip(some, Evaluator(lens, some, Deadline()).alone(), strict=True):
            if span.entrance is None:
                expected = of.exact.trace(program)[span.end]
            else:
                expected = of.exact.stages(program, span.first, span.last, span.entrance, span.until)["end"]
            assert torch.allclose(value, expected, equal_nan=True), program
        assert len(some) > 20


@torch.no_grad()
@pytest.mark.parametrize("tokens", mostly_slow([3, 1]))
def test_a_pair_gives_here_what_it_gives_alone(model: GPT2, tokens: int) -> None:
    """A stage that is taken from another pair's rows would rule out the true pair; so would another order of rows."""
    of = lenses(model)
    lens = of.first(tokens, None)
    faults = candidates(of.exact)
    assert any(two.sees == ROWS for one in faults for two, _ in one.sites)
    runner = Evaluator(lens, [one.program or Program() for one in faults], Deadline())
    draw = torch.randint(1, len(faults) + 1, (400, 2), generator=torch.Generator().manual_seed(tokens))
    odd = [number for number, one in enumerate(faults, 1) if one.order or "one head" in str(one.labels)]
    some = torch.cat([draw, torch.cartesian_prod(torch.tensor(odd), draw[:40, 0])])
    some = some[~runner.clash()[some[:, 0], some[:, 1]]]
    assert len(some) > 300
    assert odd
    compared = 0
    for numbers, values in runner.values(some):
        for (one, other), value in zip(some[numbers].tolist(), values, strict=True):
            together = faults[one - 1].with_(faults[other - 1]).program
            assert together is not None
            expected = lens.model.trace(together)["logits"]
            if bool(value.isfinite().all() and expected.isfinite().all()):
                labels = faults[one - 1].labels | faults[other - 1].labels
                assert worst_relative_error(value, expected) < 1e-4, labels
                compared += 1
    assert compared > 0.8 * len(some), "so many cannot be run in one batch"


def test_no_pair_replaces_one_stage_twice(model: GPT2) -> None:
    """The second formula would take the first one's place, and a pair be named of which one fault does nothing."""
    programs = [
        Program({0: {"mlp.act": lambda c, s: s["mlp.c_fc"].relu()}}),
        Program({0: {"mlp.act": lambda c, s: s["mlp.c_fc"].sigmoid()}}),
        Program({}, {"ln_f": lambda c, s: s["x"]}),
        Program(order=(1, 0)),
        Program(order=(0,)),
    ]
    clash = Evaluator(lenses(model).first(1), programs, Deadline()).clash()
    assert clash[1, 2]
    assert clash[4, 5]
    assert not clash[1, 3]
    assert not clash[3, 4]


@pytest.mark.slow  # the whole search
@pytest.mark.parametrize(
    ("labels", "causes"),
    [
        (("is ReLU;", "without the last norm"), {"gelu-variant", "final-norm-missing"}),  # both change the first token
        (("a token sees the one after it@0", "is ReLU;@1"), {"mask-off-by-one", "gelu-variant"}),  # in one block each
        (("the scores are not scaled@0", "divided by the root@1"), {"scale-missing", "scale-by-width"}),  # neither changes it
        (("the softmax runs over the batch", "is ReLU;"), {"softmax-axis", "gelu-variant"}),  # by one a row sees others
    ],
)
def test_two_faults_are_found_among_all_pairs(model: GPT2, labels: tuple[str, ...], causes: set[str]) -> None:
    """Pairs were tried beside the nearest single faults, which two faults at once need not be: 13 of 24 were found.

    A dump, in float32, with foreign arrays beside the logits.
    """
    noise = torch.randn(5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    foreign = {"noise": noise.numpy(), "mask": torch.ones(6, 6).tril().long().numpy()}
    diagnosis = gpt2.diagnose({"ids": IDS.numpy(), "a": wrong(model, *labels).float().numpy(), **foreign}, model)
    assert {cause.id for cause in diagnosis.causes} == causes


@pytest.mark.slow
def test_a_dump_with_arrays_at_no_known_place_is_as_well_off_as_its_logits(model: GPT2) -> None:
    """The values, which are wrong and of a stream's size, were taken for results of branches: no pair gave them there."""
    labels = ("is ReLU;", "without the last norm")
    arrays = {f"x{n}": wrong(model, *labels, point=f"h.{n}.attn.v") for n in range(CONFIG.n_layer)}
    given = {name: value.float().numpy() for name, value in (arrays | {"a": wrong(model, *labels)}).items()}
    diagnosis = gpt2.diagnose({"ids": IDS.numpy()} | given, model)
    assert {cause.id for cause in diagnosis.causes} == {"gelu-variant", "final-norm-missing"}


@pytest.mark.slow
def test_of_many_pairs_none_explains_an_unknown_computation(model: GPT2) -> None:
    """Among hundreds of thousands of pairs one may come near by chance. In float16's tolerance, which is the widest."""
    simulation = Model(model.state_dict(), CONFIG, IDS)
    sines = Program({n: {"mlp.act": lambda c, s: (2 * s["mlp.c_fc"]).sin()} for n in range(CONFIG.n_layer)})
    logits = simulation.trace(sines)["logits"]
    with few_threads(0):
        found = Explainer(simulation, {"logits": logits}, {"logits": 0.01}, Deadline(5)).explanation()
    assert not found.hypotheses
    assert not found.right


def test_no_fault_makes_no_pair(model: GPT2) -> None:
    """Bug: where each fault that comes near crosses from one row to another, an empty tensor had no truth values: a traceback."""
    assert not list(Pairing(lenses(model), [], 1e-6, Deadline()).rounds())
