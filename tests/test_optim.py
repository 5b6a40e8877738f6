"""The learning-rate schedule in closed form, and AdamW by the book: which parameters decay too."""

import math

import pytest
import torch

from gpt2.config import GPT2Config
from gpt2.model import GPT2
from gpt2.optim import Optim, adamw, learning_rate


def test_schedule_has_its_closed_form_values():
    """Possible bugs: a warm-up that starts at rate 0, a cosine over the wrong number of steps."""
    optim = Optim(lr=1.0, min_lr=0.1, warmup=4)
    assert [learning_rate(step, 104, optim) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert learning_rate(4, 104, optim) == 1.0
    assert learning_rate(54, 104, optim) == pytest.approx(0.55, abs=1e-12)  # half-way: the mean of lr and min_lr
    assert learning_rate(29, 104, optim) == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2, abs=1e-12)
    assert learning_rate(104, 104, optim) == learning_rate(999, 104, optim) == pytest.approx(0.1, abs=1e-12)
    rates = [learning_rate(step, 104, optim) for step in range(4, 105)]
    assert rates == sorted(rates, reverse=True)
    # without warm-up, and with one that is longer than the run
    assert learning_rate(0, 10, Optim(lr=1.0, min_lr=0.0, warmup=0)) == 1.0
    assert learning_rate(4, 5, Optim(lr=1.0, min_lr=0.0, warmup=10)) == 0.5
    assert learning_rate(10, 10, Optim(lr=1.0, min_lr=0.0, warmup=10)) == 1.0


def test_a_step_is_adamw_by_the_book():
    """Betas, decay and rate must reach the optimizer: one step computed by hand (Loshchilov and Hutter, algorithm 2)."""
    torch.manual_seed(0)
    model = GPT2(GPT2Config(11, 8, 8, 1, 2))
    optim = Optim(lr=0.03, beta1=0.8, beta2=0.9, weight_decay=0.5)
    optimizer = adamw(model, optim)
    before = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    gradients = []
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        gradients.append({name: p.grad.double() for name, p in model.named_parameters()})
        optimizer.step()
    for name, parameter in model.named_parameters():
        expected, m, v = before[name], 0.0, 0.0
        for t, gradient in enumerate((g[name] for g in gradients), start=1):
            m = 0.8 * m + 0.2 * gradient
            v = 0.9 * v + 0.1 * gradient.square()
            expected = expected * (1 - 0.03 * (0.5 if parameter.ndim > 1 else 0.0))
            expected = expected - 0.03 * (m / (1 - 0.8**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-8)
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-5, atol=1e-6)
