"""Two models in, one report out.

The package is called as its main function, :func:`gpt2.compare.pair.compare`, whose help has all of it::

    gpt2.compare(a, b, on=None, tokens=None, threshold=1e-3, seed=0, dtype=None, offline=False) -> Comparison

    report = gpt2.compare("gpt2", "out/step-2000", on="my.txt")
    print(report.table())
    report.save_html("report.html")
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .comparison import Comparison


class _Callable(ModuleType):
    """The package bears the name of its main function, and is called as it."""

    def __call__(self, a: str = "shakespeare-mini", b: str = "hf/shakespeare-mini", **settings: Any) -> Comparison:
        """Compare two models by name, from weights to words; settings as in :func:`gpt2.compare.pair.compare`."""
        from .pair import compare

        return compare(a, b, **settings)


sys.modules[__name__].__class__ = _Callable
