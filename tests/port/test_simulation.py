"""Faults are found from logits alone, or from one tensor a block, by switching them on in our own forward pass."""

from __future__ import annotations

import math

import pytest
import torch
from support.faulty.loading import weights
from support.random_models import model_of
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.measure.metrics import worst_relative_error
from gpt2.measure.tracing import trace
from gpt2.model import GPT2
from gpt2.port.dump.candidates import Candidate, Table
from gpt2.port.dump.explaining import Explanation, explain
from gpt2.port.dump.simulation import Program, Simulation

CONFIG = GPT2Config(vocab_size=29, n_positions=11, n_embd=12, n_layer=2, n_head=3, n_inner=20, bos_token_id=0, eos_token_id=0)
STREAMS = ("embed", "h.0", "h.1", "logits")


@pytest.fixture(scope="module")
def model() -> GPT2:
    return model_of(CONFIG, {name: tensor.double() for name, tensor in weights(CONFIG).items()})


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(CONFIG.vocab_size, (2, 7), generator=torch.Generator().manual_seed(3))


def explained(model: GPT2, ids: Tensor, evidence: dict[str, Tensor], tolerance: float = 1e-9) -> Explanation:
    return explain(model, ids, evidence, dict.fromkeys(evidence, tolerance), math.inf)


def named(explanation: Explanation) -> list[list[tuple[str, str]]]:
    """Each hypothesis as its faults' ids and places."""
    return [[(one.id, ", ".join(map(str, one.places))) for one in each.faults] for each in explanation.hypotheses]


def test_without_a_fault_the_simulation_is_the_model(model: GPT2, ids: Tensor) -> None:
    """A stage that differs from our model would make every program faulty."""
    ours, values = trace(model, ids), Simulation(model.state_dict(), CONFIG, ids).trace(Program())
    errors = {point: worst_relative_error(values[point], ours[point]) for point in ours if point in values}
    errors = {point: error for point, error in errors.items() if not point.endswith("scores")}  # our trace has 0 where masked
    assert set(errors) >= {"embed", "h.1.attn.heads", "h.1.mid", "h.1", "ln_f", "logits"}
    assert max(errors.values()) < 1e-13


def test_a_right_program_has_no_fault(model: GPT2, ids: Tensor) -> None:
    """A fault without an effect must not be offered as an explanation of right logits."""
    with torch.no_grad():
        explanation = explained(model, ids, {"logits": model(ids)})
    assert explanation.right
    assert not explanation.hypotheses


def test_noise_has_no_explanation(model: GPT2, ids: Tensor) -> None:
    """A search that fits whatever it is given would explain noise."""
    with torch.no_grad():
        logits = model(ids)
        noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        explanation = explain(model, ids, {"logits": logits + 0.1 * noise}, {"logits": 1e-9}, 0.0)
    assert not explanation.right
    assert not explanation.hypotheses
    assert explanation.first_wrong == "logits"


@torch.no_grad()
def wrong_by(model: GPT2, ids: Tensor, labels: dict[str, tuple[int | None, ...]]) -> dict[str, Tensor]:
    """The simulation's values with the variants of these labels, in these blocks."""
    simulation = Simulation(model.state_dict(), CONFIG, ids)
    table = Table.of(simulation)
    known = {one.label: one for one in (*table.blocks, *table.embeddings, *table.ends)}
    program = Candidate(tuple((known[label], layer) for label, layers in labels.items() for layer in layers)).program(simulation)
    assert program is not None
    return simulation.trace(program)


@pytest.mark.parametrize(
    ("labels", "causes"),
    [
        ({"act gelu": (0, 1)}, [("gelu-variant", "h.*.mlp.act")]),
        ({"weights missing": (1,)}, [("mask-missing", "h.1.attn")]),
        ({"ln_f no norm": (None,)}, [("final-norm-missing", "ln_f")]),
    ],
)
def test_a_fault_is_found_from_logits_alone(model: GPT2, ids: Tensor, labels: dict, causes: list) -> None:
    """Most programs show their logits and nothing else."""
    assert named(explained(model, ids, {"logits": wrong_by(model, ids, labels)["logits"]}))[0] == causes


def test_faults_in_several_blocks_are_found_one_after_the_other(model: GPT2, ids: Tensor) -> None:
    """The search must go on from the program's own stream, or a second fault is never seen."""
    values = wrong_by(model, ids, {"act relu": (0,), "scale none": (1,), "ln_f no norm": (None,)})
    explanation = explained(model, ids, {point: values[point] for point in STREAMS})
    assert named(explanation)[0] == [
        ("gelu-variant", "h.0.mlp.act"),
        ("scale-missing", "h.1.attn"),
        ("final-norm-missing", "ln_f"),
    ]
    assert (explanation.last_right, explanation.first_wrong) == ("logits", "h.0")
