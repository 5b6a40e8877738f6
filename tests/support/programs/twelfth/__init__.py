"""A twelfth set: ordinary mistakes of GPT-2 ports in NumPy, C and JavaScript, by an author who knew nothing of the engine.

``lecture`` is NumPy in classes as in lectures and books: a list of heads in each block, matrices (out, in) as in torch;
``runner`` is C in the manner of llama2.c: one token of one row at a time, with caches of keys and values;
``kernels`` is node as for WebGPU: one flat memory, and kernels that are given places in it.
"""

from ..files import Written
from . import lecture

_SET = Written(__file__, lecture.run)
FAULTS, LISTS, PAIRS, SHAPES, DUMPS = _SET.FAULTS, _SET.LISTS, _SET.PAIRS, _SET.SHAPES, _SET.DUMPS
TwelfthBed = _SET.BED
missing = TwelfthBed.missing
