"""What a recorded activation was computed with is read off its argument and its result."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gpt2.port.dump.fits.observed import Observed
from gpt2.port.dump.fits.wiring import activation_fit

MUTANTS = {
    "another power of the root": lambda x: 0.5 * x * (1 + torch.tanh(0.6 * (x + 0.06 * x**3))),
    "constants exchanged": lambda x: 0.5 * x * (1 + torch.tanh(0.044715 * (x + math.sqrt(2 / math.pi) * x**3))),
    "error function, steeper": lambda x: 0.5 * x * (1 + torch.erf(1.5 * x)),
    "sigmoid": lambda x: x * torch.sigmoid(1.3 * x),
}


def observed(x: Tensor, y: Tensor) -> Observed:
    """A result that was stored in float16."""
    gelu = torch.nn.functional.gelu(x, approximate="tanh")
    return Observed(y.half().double(), 2.0**-11 * y.abs() + 1e-7, 1e-6, gelu, 0)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_other_constants_of_gelu_are_read_off_rounded_results(mutant: str) -> None:
    """The rounded results stood for the function itself, and all that followed from them seemed to be another fault."""
    x = 1.5 * torch.randn(2, 12, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = MUTANTS[mutant](x)
    fit = activation_fit(observed(x, y), x, torch.ones(2, 12, dtype=torch.bool))
    assert fit is not None
    assert [fault.id for fault in fit.faults] == ["gelu-variant"]
    assert float((fit.value - y).square().mean()) < 0.1 * float((y.half() - y).square().mean())


def test_a_function_of_another_form_is_not_called_a_gelu_with_constants() -> None:
    """Two constants bend to much; a wave is none of those."""
    x = torch.randn(2, 12, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    fit = activation_fit(observed(x, x + x.sin()), x, torch.ones(2, 12, dtype=torch.bool))
    assert fit is None or "none of those known" in fit.faults[0].detail
