"""A thirteenth set: ordinary mistakes of GPT-2 ports in NumPy, C and JavaScript, by an author who knew nothing of the engine.

``hooked`` is NumPy with einsum, a matrix for each head and the weights of all layers stacked, in the manner of TransformerLens;
``ops`` is C in the manner of ggml: tensors with sizes and strides, views of them, a memory of keys, a prompt in chunks;
``closures`` is node in functions that return functions: a text is an array of rows, a block a function of it.
"""

from ..files import Written
from . import hooked

_SET = Written(__file__, hooked.run)
FAULTS, LISTS, PAIRS, SHAPES, DUMPS = _SET.FAULTS, _SET.LISTS, _SET.PAIRS, _SET.SHAPES, _SET.DUMPS
ThirteenthBed = _SET.BED
missing = ThirteenthBed.missing
