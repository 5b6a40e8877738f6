"""The bounds of KL hold for rows as servers show them, against the KL of the whole rows."""

import math

import torch

from gpt2.comparison.bounds import _places
from gpt2.comparison.server_checks import shown_kl
from gpt2.comparison.sides.side import Top


def test_a_right_token_that_is_not_among_the_likeliest_keeps_the_bounds() -> None:
    """Servers show the right token beside the likeliest; its small probability was taken for the largest of those left out."""
    p = torch.tensor([[0.3, 0.2, 0.2, 0.1, 0.1, 0.1 - 1e-6 - 1e-8, 1e-6, 1e-8]], dtype=torch.float64)
    q = torch.tensor([[0.2, 0.2, 0.2, 0.1, 0.1, 0.01, 1e-4, 0.19 - 1e-4]], dtype=torch.float64)
    target = 6
    shown = [0, 1, 2, target]  # three likeliest and the right token; token 7 is left out, and p gives it almost nothing
    top = Top(q[:, target].log(), torch.tensor([shown]), q[:, shown].log())
    forward, _, backward, backward_high, *_ = (column.item() for column in _places(p.log(), top, torch.tensor([target])))
    assert 0 < forward <= (p * (p / q).log()).sum().item()
    assert 0 < backward <= (q * (q / p).log()).sum().item() <= backward_high < math.inf
    assert shown_kl(p.log(), top).item() == forward
