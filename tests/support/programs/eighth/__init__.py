"""An eighth set: a sample of what people get wrong in a GPT's forward pass, one fault for each public report that a search gave.

Three programs: ``notebook`` in NumPy, ``blocked`` in C++ with a cache, ``pipeline`` in JavaScript; SOURCES.md says how reports
were found, and has a line for each. "erf (2)" is the same mistake as "erf", reported of another program: what is reported more
often is there more often. Where a fault has two ids, the words beside it say why either is right.
"""

from collections.abc import Iterable

from ..files import Written
from . import notebook

_SET = Written(__file__, notebook.run)
FAULTS, LISTS, PAIRS, SHAPES, DUMPS = _SET.FAULTS, _SET.LISTS, _SET.PAIRS, _SET.SHAPES, _SET.DUMPS


class EighthBed(_SET.BED):
    """The models and programs of this set."""

    def switches(self, faults: Iterable[str]) -> set[str]:
        """Return the mistakes that ``faults`` are reports of: their names without a number."""
        return {fault.partition(" (")[0] for fault in faults}


missing = EighthBed.missing
