"""Build the HTML page of the floor of noise."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from gpt2.comparison.bar_plots import way_bars
from gpt2.pages.rendering import render

if TYPE_CHECKING:
    from gpt2.comparison.noise_result import Noise


def page(noise: Noise) -> str:
    """Return the page as HTML text."""
    return render("noise", c=noise, bars=way_bars(noise.ways), command=command(noise), data={})


def command(noise: Noise) -> str:
    """Return the command that makes this page again."""
    parts = ["gpt2", "compare", noise.model.name, "--noise", "--tokens", str(noise.text.tokens), "--seed", str(noise.seed)]
    parts += ["--on", noise.text.name] if noise.text.sha256 else []
    return shlex.join([*parts, "--html", "noise.html"])
