"""An eleventh set: ordinary mistakes of GPT-2 ports in NumPy, C and JavaScript, by an author who knew nothing of the engine.

``functional`` is NumPy in pure functions, a batch at once, heads by reshape and transpose; ``batch`` is C in the manner of
llm.c: all rows and tokens at once, a buffer of activations, weights stacked by kind; ``stream`` is node that generates: the
prompt, then one token at a time with growing lists of past keys and values.
"""

from ..files import Written
from . import functional

_SET = Written(__file__, functional.run)
FAULTS, LISTS, PAIRS, SHAPES, DUMPS = _SET.FAULTS, _SET.LISTS, _SET.PAIRS, _SET.SHAPES, _SET.DUMPS
EleventhBed = _SET.BED
missing = EleventhBed.missing
