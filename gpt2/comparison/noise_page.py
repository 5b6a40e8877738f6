"""Build the HTML page of the floor of noise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpt2.comparison.bar_plots import way_bars
from gpt2.comparison.page import again
from gpt2.pages.rendering import render

if TYPE_CHECKING:
    from gpt2.comparison.noise_result import Noise


def page(noise: Noise) -> str:
    """Return the page as HTML text."""
    command = again([noise.model.name], noise.text, noise.seed, "--noise")
    return render("noise", c=noise, bars=way_bars(noise.ways), command=command, data={})
