"""The table of what programs may do in place of GPT-2: a file for each kind of edit."""

from types import ModuleType

from gpt2.port.alternatives import activations, attention, layouts, loading, masks, norms, outside, precision, wiring
from gpt2.port.alternatives.alternative import FAMILIES, Alternative
from gpt2.port.graph import Model

EDITS = (activations, norms, attention, masks, layouts, wiring, loading, outside, precision)


def table(model: Model, *kinds: ModuleType) -> list[Alternative]:
    """Return every alternative for a model, or those of some files; no two have one label."""
    names = {kind.__name__ for kind in kinds or EDITS}
    made = (one for make in FAMILIES if make.__module__ in names for one in make(model))
    return list({one.label: one for one in made}.values())
