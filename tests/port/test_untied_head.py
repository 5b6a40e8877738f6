"""A checkpoint whose head has values of its own: modules are filled, and a head that a port ties or loads wrongly is named."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.random_models import random_model
from torch import Tensor, nn

import gpt2
from gpt2.config import GPT2Config
from gpt2.model import GPT2

CONFIG = GPT2Config(vocab_size=67, n_positions=32, n_embd=24, n_layer=2, n_head=3, bos_token_id=0, eos_token_id=0)
UNTIED = replace(CONFIG, tie_word_embeddings=False)
IDS = torch.randint(67, (2, 20), generator=torch.Generator().manual_seed(1))


class Port(nn.Module):
    """A GPT-2 of other names, with a Linear for its head, or the token embedding's matrix in it."""

    def __init__(self, source: GPT2 | None = None, tied: bool = False) -> None:
        super().__init__()
        body = random_model(CONFIG, 0.1, dtype=torch.float32, seed=9) if source is None else source
        self.words, self.places, self.layers, self.last = body.wte, body.wpe, body.h, body.ln_f
        self.out = nn.Linear(24, 67, bias=False)
        if source is not None:
            self.out.weight = nn.Parameter(source.head_table.weight.detach().clone())
        if tied:
            self.out.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.size(1)))
        for layer in self.layers:
            x = layer(x)
        return self.out(self.last(x))


@pytest.fixture
def ours() -> GPT2:
    return random_model(UNTIED, 0.3, dtype=torch.float32)


def test_a_module_is_filled_with_both_matrices(ours: GPT2) -> None:
    port = Port()
    assert gpt2.load_into(port, ours).ok
    assert torch.equal(port.out.weight, ours.lm_head.weight)
    assert torch.equal(port.words.weight, ours.wte.weight)
    assert gpt2.diagnose(port, ours).verdict == "equal"


def permuted(port: Port) -> None:
    port.out.weight = nn.Parameter(port.out.weight.detach().roll(1, 0))


@pytest.mark.parametrize(
    "spoil", [permuted, lambda port: setattr(port.out, "weight", port.words.weight)], ids=["permuted", "tied"]
)
def test_a_wrong_head_is_named(ours: GPT2, spoil: Callable[[Port], object]) -> None:
    port = Port(ours)
    assert gpt2.diagnose(port, ours).verdict == "equal"
    spoil(port)
    diagnosis = gpt2.diagnose(port, ours)
    assert diagnosis.verdict == "mismatch"
    assert ("wrong-tensor", "lm_head.weight") in [(cause.id, cause.where) for cause in diagnosis.causes]


@pytest.mark.slow
def test_a_dump_is_compared_with_the_head_s_own_matrix(ours: GPT2) -> None:
    """A program that takes the token embedding for the head has the fault that GPT-2's own checkpoints rule out."""
    hidden = ours.hidden(IDS).detach()
    verdicts = [
        gpt2.diagnose({"ids": IDS.numpy(), "logits": F.linear(hidden, table).detach().numpy()}, ours)
        for table in (ours.lm_head.weight, ours.wte.weight)
    ]
    assert [each.verdict for each in verdicts] == ["equal", "mismatch"]
    assert [cause.id for cause in verdicts[1].causes] == ["untied-head"]


def adamw(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.slow
def test_two_gradients_are_right_where_there_are_two_matrices(ours: GPT2) -> None:
    """With a tied checkpoint, a head of its own is a mistake in a step; here it is none."""
    settings = {"optim.lr": 1e-3, "optim.beta2": 0.99, "optim.weight_decay": 0.0, "optim.clip": 0.0}
    tied = random_model(CONFIG, 0.3, dtype=torch.float32)
    for model, causes in ((ours, set()), (tied, {"tied-gradient-lost"})):
        diagnosis = gpt2.diagnose_step(Port(model), adamw, model, settings=settings)
        assert {cause.id for cause in diagnosis.causes} == causes


def test_a_trace_holds_the_head(ours: GPT2, tmp_path: Path) -> None:
    gpt2.save(ours, None, tmp_path / "model")
    traced = gpt2.trace(str(tmp_path / "model"), ids=IDS, gradients=True, steps=1)
    assert traced.arrays["grad.lm_head.weight"].shape == (67, 24)
    assert "step1.lm_head.weight" in traced.arrays
