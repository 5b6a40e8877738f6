"""The table of what programs may do in place of GPT-2: a file for each kind of edit."""

from gpt2.port.alternatives import activations, attention, layouts, loading, masks, norms, outside, precision, wiring
from gpt2.port.alternatives.alternative import FAMILIES, Alternative
from gpt2.port.graph import Model

EDITS = (activations, norms, attention, masks, layouts, wiring, loading, outside, precision)


def table(model: Model) -> list[Alternative]:
    """Return every alternative for a model; no two have one label."""
    return [one for make in FAMILIES for one in make(model)]
