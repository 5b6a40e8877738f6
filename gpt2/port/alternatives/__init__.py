"""The table of what programs may do in place of GPT-2: a file for each kind of edit."""

from collections.abc import Callable, Iterator

from gpt2.port.alternatives import activations, attention, layouts, loading, masks, norms, outside, precision, wiring
from gpt2.port.alternatives.alternative import Alternative
from gpt2.port.graph import Model

FAMILIES: tuple[Callable[[Model], Iterator[Alternative]], ...] = (
    activations.activations,
    *(attention.scales, attention.comparisons),
    *(layouts.layouts, layouts.head_counts),
    *(norms.formulas, norms.numbers),
    *(loading.matrices, loading.biases, loading.other_blocks),
    *(masks.masks, masks.softmaxes),
    *(wiring.sums, wiring.whole_blocks, wiring.reroutes),
    *(outside.positions, outside.embeddings),
    *(precision.values, precision.parameters),
)


def table(model: Model) -> list[Alternative]:
    """Return every alternative for a model; no two have one label. They are made once."""
    return model.always("alternatives", lambda: [one for make in FAMILIES for one in make(model)])
