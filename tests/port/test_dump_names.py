"""Faults of a dump that were called undetermined, or by another name, at a level at which the values show which they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from port.test_dump import MODEL, causes, dump
from port.test_walk import IDS
from torch import Tensor

import gpt2
from gpt2.port.deadline import Deadline
from gpt2.port.dump.candidates import Candidate
from gpt2.port.dump.evaluate import Evaluator, Lens, Span
from gpt2.port.dump.examination import computed_in
from gpt2.port.dump.table import Table
from gpt2.port.fits.lacking import looks_dropped
from gpt2.port.graph import Formula, Model, Program, Site, State

LAYERS = MODEL.config.n_layer
SIMULATION = Model(MODEL.state_dict(), MODEL.config, IDS)
LEVELS: dict[str, Callable[[str], bool]] = {
    "full": lambda point: not point.endswith(("attn.mixed", "ln_1")),
    "mid": lambda point: point.endswith(".mid"),
    "logits": lambda point: False,
}


def everywhere(stage: str, make: Callable[[int], Formula]) -> Program:
    return Program({n: {stage: make(n)} for n in range(LAYERS)})


def skipped(layer: int) -> Program:
    return Program({layer: {"": lambda c, s: s["x"]}})


def shown(program: Program, level: str) -> dict[str, Tensor]:
    """What a program with these stages dumps."""
    traced = SIMULATION.trace(program)
    kept = {point: value for point, value in traced.items() if point.startswith(("h.", "embed")) and LEVELS[level](point)}
    return kept | {"logits": traced["logits"]}


def wide_scores(c: Site, s: State) -> Tensor:
    return s["attn.qh"] @ s["attn.ks"].mT * MODEL.config.n_embd**-0.5


def zero_scores(layer: int) -> Formula:
    return lambda c, s: c.right("attn.scores", s) * 0.0


def first_columns(layer: int) -> Formula:
    bias = SIMULATION.site(layer)["mlp.c_fc.bias"].clone()
    bias[:10] = 0.0
    return lambda c, s: c.right("mlp.c_fc", s) - bias


@pytest.mark.parametrize("level", ["full", "mid", pytest.param("logits", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("program", "cause"),
    [
        (everywhere("attn.scores", zero_scores), ("scale-wrong", "h.*.attn")),  # 1 / n in integers
        (Program(order=(0,) * LAYERS), ("wrong-tensor", "h.")),
        (skipped(LAYERS - 1), ("layer-missing", f"h.{LAYERS - 1}")),
    ],
)
def test_a_fault_is_named_at_each_level(program: Program, cause: tuple[str, str], level: str) -> None:
    """A factor of zero was called a cache, one block's weights in all blocks a block that runs again, and a last block that
    does not run was undetermined where the stream behind attention alone is dumped."""
    (found,) = causes(gpt2.diagnose(dump(shown(program, level), torch.float16), MODEL))
    assert (found[0], found[1].startswith(cause[1])) == (cause[0], True)


def test_a_bias_of_some_columns_is_missing() -> None:
    """It was called another tensor's bias, because it is not the checkpoint's."""
    values = SIMULATION.trace(everywhere("mlp.c_fc", first_columns))
    (cause,) = gpt2.diagnose(
        dump({p: v for p, v in values.items() if p in SIMULATION.trace(Program())}, torch.float32), MODEL
    ).causes
    assert (cause.id, "columns 10 to" in cause.detail) == ("missing-bias", True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_factor_is_named_by_what_it_is(dtype: torch.dtype) -> None:
    """Where the walk had no time, a fit gave the number of a factor that has a name."""
    wide = everywhere("attn.scores", lambda n: wide_scores)
    assert causes(gpt2.diagnose(dump(shown(wide, "full"), dtype), MODEL)) == [("scale-by-width", "h.*.attn")]


@pytest.mark.slow
def test_the_logits_of_a_token_may_be_moved_beside_another_fault() -> None:
    """Logits with their mean taken off were compared as they are, so that no fault before them came near."""
    relu = everywhere("mlp.act", lambda n: lambda c, s: s["mlp.c_fc"].relu())
    logits = SIMULATION.trace(relu)["logits"]
    centred = {"logits": logits - logits.mean(-1, keepdim=True)}
    assert {one for one, _ in causes(gpt2.diagnose(dump(centred, torch.float32), MODEL))} == {"gelu-variant", "logits-softmaxed"}


def test_a_few_arrays_of_more_digits_are_no_sign_of_float64() -> None:
    """Noise in float64 beside a dump in float16 made the search begin three times, each with a third of the time."""
    half, single, double = (torch.linspace(0.1, 1, 5, dtype=torch.float64).to(dtype) for dtype in HALF_TO_DOUBLE)
    assert computed_in(half, [half, half, double]) == ([torch.float32], torch.float16)
    assert computed_in(single, [double]) == ([torch.float32, torch.float64], None)
    assert computed_in(double, [single, single]) == ([torch.float32, torch.float64], None)
    assert computed_in(double, [double, torch.ones(2, dtype=torch.float32)]) == ([torch.float64, torch.float32], None)


HALF_TO_DOUBLE = (torch.float16, torch.float32, torch.float64)


def first_queries(layer: int) -> Formula:
    return lambda c, s: c.right("attn.scores", {**s, "attn.qh": s["attn.qh"][:, :1].expand_as(s["attn.qh"])})


def early_bias(layer: int) -> Formula:
    weight, bias = (SIMULATION.site(layer)[f"ln_1.{leaf}"] for leaf in ("weight", "bias"))
    return lambda c, s: c.right("ln_1", s) - bias + bias * weight


def branch_alone(layer: int) -> Formula:
    return lambda c, s: SIMULATION.norm(f"h.{layer}.ln_2", s["attn.c_proj"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "cause"),
    [
        (everywhere("attn.scores", first_queries), ("head-layout", "h.*.attn.c_attn (q)")),
        (everywhere("ln_1", early_bias), ("layernorm-without-affine", "h.*.ln_1")),
        (everywhere("ln_2", branch_alone), ("residual-missing", "h.*.ln_2")),
    ],
)
def test_more_faults_are_named_from_the_logits(program: Program, cause: tuple[str, str]) -> None:
    """They were undetermined."""
    assert causes(gpt2.diagnose(dump(shown(program, "logits"), torch.float32), MODEL)) == [cause]


@pytest.mark.slow
def test_streams_of_several_programs_pass_each_variant() -> None:
    """A block that takes the embeddings ended a search for pairs with an exception, where streams were computed together."""
    row = SIMULATION.on_ids(IDS[:1])
    lens = Lens(row, Span(0, LAYERS, "logits", None, row.trace(Program())["logits"]))
    wholes = [Candidate(tuple((one, n) for n in range(LAYERS))) for one in Table.of(SIMULATION).blocks]
    Evaluator(lens, [one.program or Program() for one in wholes], Deadline()).alone()  # rows of a state, which is no dict


def test_dropout_is_known_by_its_zeros() -> None:
    """A drop of whole tokens, features or regions, and zeros below which nothing is, are other faults; so are hidden scores."""
    drawn = torch.Generator().manual_seed(0)
    value = torch.randn(24, 48, generator=drawn, dtype=torch.float64)
    random = torch.rand(24, 48, generator=drawn) < 0.1
    assert looks_dropped(value * ~random, 12)
    region = torch.zeros(24, 48, dtype=torch.bool)
    region[:12, :24] = True
    for other in (torch.zeros(24, 48, dtype=torch.bool), random[:, :1].expand_as(random), random[:1].expand_as(random), region):
        assert not looks_dropped(value * ~other, 12)
    assert not looks_dropped(value.relu(), 12)
    scores = torch.randn(12, 8, 12, generator=drawn, dtype=torch.float64) * torch.ones(12, 12).tril()[:, None]
    assert not looks_dropped(scores.view(24, 48), 12)
