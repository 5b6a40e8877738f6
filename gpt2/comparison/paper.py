"""What the GPT-2 paper reports of the official models, to stand beside what was measured.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, table 3, zero-shot.
"""

from __future__ import annotations

from dataclasses import dataclass

SIZES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
PROTOCOLS = {
    "wikitext2": "detokenised by rules that were not published, and per original token",
    "lambada": "the last word with a filter of stop words, whose list was not published",
}
TABLE: dict[str, dict[str, tuple[float, ...]]] = {
    "wikitext2": {"perplexity": (29.41, 22.76, 19.93, 18.34)},
    "lambada": {"perplexity": (35.13, 15.60, 10.87, 8.63), "accuracy": (0.4599, 0.5548, 0.6012, 0.6324)},
}


@dataclass(frozen=True)
class PaperFigure:
    """A figure of the paper's table 3 with its protocol, which is another one than ours."""

    model: str
    metric: str  # "perplexity", or the "accuracy" of last words
    value: float
    protocol: str


def paper_figures(model: str, text: str) -> tuple[PaperFigure, ...]:
    """Return what the paper reports of a model on a text, both by the names that compare takes; nothing for other names."""
    name, _, _ = model.removeprefix("hf/").partition(":")
    name, (task, _, _) = name.rpartition("openai-community/")[2], text.partition(":")
    if name not in SIZES or task not in TABLE:
        return ()
    at = SIZES.index(name)
    return tuple(PaperFigure(name, metric, row[at], PROTOCOLS[task]) for metric, row in TABLE[task].items())
