"""How common each mistake is among people: which of several explanations that fit a dump equally well is named first.

The numbers are of 217 public reports of wrong GPT-2 programs, those of the seventh and eighth set of programs, whose sources are
listed in tests/support/programs/seventh/SOURCES.md and eighth/SOURCES.md.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpt2.port.fault import Fault

# By cause, how many reports, and why people make the mistake.
REPORTS: dict[str, tuple[int, str]] = {
    "gelu-variant": (23, "most libraries call another function GELU"),
    "head-layout": (20, "a view does not move memory, and views of heads are easily confused"),
    "position-offset": (16, "a cache must count on, and tables begin at 0 or 1"),
    "mask-missing": (10, "the result looks right without a mask, and a prompt's steps need one of another shape"),
    "missing-bias": (9, "many later models have no biases"),
    "wrong-tensor": (7, "names are copied from line to line"),
    "output-projection-missing": (7, "diagrams of attention end with the values"),
    "transposed": (6, "the file stores [in, out], most libraries want [out, in]"),
    "layernorm-unbiased-variance": (6, "it is what torch.std and torch.var do by default"),
    "scale-by-width": (6, "d in the paper's formula is taken for the model's width"),
    "mask-multiplied": (6, "zero is taken for nothing, before a softmax"),
    "softmax-axis": (6, "the default axis is another one in some libraries"),
    "residual-from-normed": (6, "the norm writes over the variable of the stream"),
    "final-norm-missing": (6, "it stands in no diagram of a block"),
    "layernorm-axis": (5, "it is taken for a batch norm, or axes are not given"),
    "qkv-order": (5, "c_attn's columns may be read by thirds or by heads"),
    "logits-softmaxed": (5, "the end of the model and the sampler are confused"),
    "reduced-precision": (5, "half precision, and tables of functions"),
    "residual-missing": (5, "a sum is forgotten"),
    "layernorm-eps": (4, "defaults differ, and it may stand in or beside the root"),
    "layernorm-not-normalising": (4, "a parenthesis, or a root that is forgotten"),
    "post-norm": (4, "the first Transformer had it so"),
    "mask-strict": (4, "the diagonal is counted from 0 or 1"),
    "layernorm-without-affine": (4, "the parameters are forgotten"),
    "scale-wrong": (3, "another factor of the scores"),
    "scale-missing": (3, "the factor is forgotten"),
    "untied-head": (3, "the file has no tensor of the head's own"),
    "embedding-scaled": (3, "the first Transformer did so"),
    "value-projection-wrong": (3, "q, k and v are mixed up"),
    "position-missing": (3, "a line is forgotten"),
    "dropout-active": (2, "a function without a module does not stop in eval mode"),
    "extra-norm": (2, "a line is written twice"),
    "cache-inconsistent": (2, "the wrong slot, or another block's"),
    "logits-scaled": (2, "a temperature, or a soft cap, in the model"),
    "scale-twice": (2, "the library's function scales as well"),
    "layer-missing": (2, "the loop's variable is not carried on"),
}
SELDOM = 1  # reports of all other causes, at most


def rarity(faults: Iterable[Fault]) -> int:
    """Return minus the number of reports of the least common of ``faults``: less is more common."""
    return -min((REPORTS.get(fault.id, (SELDOM, ""))[0] for fault in faults), default=0)
