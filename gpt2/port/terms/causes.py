"""A cause, and the table of every one that ``gpt2 diagnose`` can name.

``python -m gpt2.port.terms.causes`` prints ``CAUSES.md``.

The ids are a contract: ``--json`` prints them and other programs match on them. In the corrected lines ``x`` is the residual
stream (B, T, D); ``q``, ``k``, ``v`` are (B, H, T, K); ``w`` is the checkpoint's tensor, stored [in, out].
"""

import sys
from dataclasses import dataclass, replace

from gpt2.port.terms.places import Place, joined

SURE, LIKELY = 1.0, 0.8  # confidence: reproduces the whole run; reproduces its place only


BLOCK = "x = x + attn(ln_1(x)); x = x + mlp(ln_2(x))"
SCORES = "scores = q @ k.transpose(-1, -2) / sqrt(head_size)"
MASKED = "scores.masked_fill(torch.ones(T, T).triu(1).bool(), -inf)"
EMBEDDED = "x = wte(ids) + wpe(torch.arange(T))"
HEAD = "logits = ln_f(x) @ wte.weight.t()"
RUN = "for block in h: x = block(x)"
LOADED = "load_state_dict(..., strict=True), or gpt2.load_into(module, MODEL)"
SPLIT = "q, k, v = (x @ w + b).split(n_embd, -1)"
HEADS = f"{SPLIT}; q = q.view(B, T, n_head, head_size).transpose(1, 2)  # and back: y.transpose(1, 2).reshape(B, T, n_embd)"
NORM = "(x - mean) / sqrt(var + eps) * weight + bias"
CACHED = "k = cat(past_k, k, dim=-2); positions = arange(past, past + T); the mask's last T rows"
PADDED = "positions = (mask.cumsum(-1) - 1).clamp(min=0); scores.masked_fill(~mask.bool()[:, None, None], -inf)"
SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Weights": {
        "transposed": ("a matrix is transposed", "linear.weight.copy_(w.t())  # the file stores [in, out], nn.Linear [out, in]"),
        "not-loaded": ("a parameter does not hold the checkpoint's values", LOADED),
        "wrong-tensor": ("a parameter holds another tensor of the checkpoint", "copy the tensor of this name: {where}"),
        "qkv-order": ("queries, keys and values are taken from wrong places", f"{SPLIT}  # of c_attn"),
        "head-layout": ("heads and their units are read in another order", HEADS),
        "missing-bias": ("a checkpoint's bias has no place", "nn.Linear(n_in, n_out, bias=True), with the checkpoint's bias"),
        "untied-head": ("the head has its own weights", "lm_head.weight = wte.weight  # logits = x @ wte.weight.t()"),
        "reduced-precision": ("numbers were rounded to a narrower dtype", "load in float32: no .half(), no .bfloat16()"),
        "padded-vocab": ("there are more logits than tokens", "logits = logits[..., :vocab_size]"),
    },
    "Normalisation": {
        "layernorm-eps": ("another epsilon in the layer norm", "nn.LayerNorm(n_embd, eps=1e-5)"),
        "layernorm-unbiased-variance": ("the variance is divided by D - 1", "x.var(-1, keepdim=True, unbiased=False)"),
        "layernorm-not-normalising": ("the input is scaled and shifted, not normalised", NORM),
        "layernorm-without-affine": ("no scale and no shift", "nn.LayerNorm(n_embd), with the weight and bias of the file"),
        "rmsnorm": ("the norm does not subtract the mean", f"nn.LayerNorm(n_embd), not nn.RMSNorm: {NORM}"),
        "layernorm-axis": ("the norm runs over the wrong axis", f"{NORM}  # mean and var over dim=-1 of (B, T, D)"),
        "post-norm": ("norms stand after the branches", BLOCK),
        "norm-missing": ("a norm before a branch is missing", BLOCK),
        "final-norm-missing": ("the norm before the head is missing", HEAD),
        "norms-swapped": ("a norm has another norm's weights, or two have changed places", BLOCK),
    },
    "Feed-forward": {
        "gelu-variant": ("another activation", 'nn.GELU(approximate="tanh")  # 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))'),
        "ffn-dropout": ("dropout inside the feed-forward", "x = c_proj(gelu(c_fc(x)))  # dropout only after it, and in training"),
    },
    "Attention": {
        "scale-missing": ("the scores are not scaled", SCORES),
        "scale-by-width": ("the scores are scaled by the width, not the head size", f"{SCORES}  # n_embd // n_head, not n_embd"),
        "scale-twice": ("the scores are scaled twice", f"{SCORES}, once; scaled_dot_product_attention does it itself"),
        "scale-inverse-layer": ("the scores are scaled by the layer's number", f"{SCORES}, in every layer"),
        "scale-wrong": ("the scores are multiplied by another factor", SCORES),
        "mask-missing": ("attention sees the future", f"{MASKED}.softmax(-1)"),
        "mask-strict": ("a token cannot see itself", f"{MASKED}  # triu(1), not triu(0)"),
        "mask-multiplied": ("masked scores are zero, not minus infinity", f"{MASKED}.softmax(-1), not scores * mask"),
        "mask-off-by-one": ("a token sees the next one", f"{MASKED}  # triu(1), not triu(2)"),
        "softmax-axis": ("the softmax runs over the wrong axis", "scores.softmax(dim=-1)  # over the keys"),
        "softmax-missing": ("there is no softmax", "weights = scores.masked_fill(future, -inf).softmax(-1)"),
        "output-projection-missing": ("attention has no output projection", "return c_proj(y)"),
        "value-projection-wrong": ("attention mixes something else than values", "y = weights @ v  # the last third of c_attn"),
    },
    "Positions and embeddings": {
        "position-missing": ("no positions are added", EMBEDDED),
        "position-offset": ("positions do not begin at row 0", EMBEDDED),
        "position-sinusoidal": ("positions are sines, and not learned", f"{EMBEDDED}  # wpe is a parameter of the checkpoint"),
        "rotary-positions": ("queries and keys are turned by their position", f"{SCORES}  # q and k as c_attn gives them"),
        "embedding-scaled": ("the embeddings are scaled", f"{EMBEDDED}  # no factor"),
    },
    "Wiring": {
        "residual-missing": ("a branch replaces the stream", BLOCK),
        "residual-from-normed": ("a branch is added to the normalised stream", f"{BLOCK}  # x as it was before the norm"),
        "residual-scaled": ("a branch or its sum is scaled", f"{BLOCK}  # no factor"),
        "parallel-block": ("attention and feed-forward run in parallel", f"{BLOCK}  # the second sees the first's result"),
        "layer-order": ("blocks are in another order", f"{RUN}  # h.0 first"),
        "layer-missing": ("a block does not run", f"{RUN}  # all of them"),
        "layer-repeated": ("a block runs more than once", f"{RUN}  # each once"),
        "extra-norm": ("a norm that GPT-2 does not have", "x = wte(ids) + wpe(pos); blocks; ln_f: no other norm"),
        "logits-scaled": ("the logits are scaled", f"{HEAD}  # no factor"),
        "extra-bias": ("a bias that GPT-2 does not have", "lm_head = nn.Linear(n_embd, vocab_size, bias=False)"),
        "logits-softmaxed": ("probabilities come out, not logits", "return logits  # the loss and the sampler take the softmax"),
    },
    "Behaviour": {
        "dropout-active": ("dropout does not stop in eval mode", "F.dropout(x, p, training=self.training), or nn.Dropout"),
        "not-deterministic": ("the same ids give other logits every time", "draw no random number in eval mode"),
        "cache-inconsistent": ("other logits with the cache than without", CACHED),
        "batch-dependent": ("a row's logits depend on the other rows", "keep the batch axis first, and apart, in each view"),
        "padding-wrong": ("other logits for a padded row than for the row alone", PADDED),
    },
}
CAUSES = {id: fix for rows in SECTIONS.values() for id, (_, fix) in rows.items()}  # the corrected line
HEADING = """\
# What `gpt2 diagnose` can name in a forward pass

The ids of the causes in `gpt2 diagnose MODULE_OR_DUMP --json`, for programs that match on them. They do not change. The report of
a cause says more than its id: where it is, how we know, and the corrected line. Some mistakes are the same computation under two
names (queries, keys and values taken from wrong places are also heads read in another order); then either id may be named.
"""


def document() -> str:
    """Return ``CAUSES.md``: a table for each section."""
    parts = [HEADING]
    for title, rows in SECTIONS.items():
        listed = [f"| `{id}` | {means} |" for id, (means, _) in rows.items()]
        parts.append("\n".join(["", f"## {title}", "", "| id | means |", "| --- | --- |", *listed, ""]))
    return "".join(parts)


@dataclass(frozen=True)
class Cause:
    """One fault of a program, and what is known of it; its words are made when they are printed.

    ``id`` is a key of :data:`CAUSES`, or of the table of a training step. ``detail``: what the program does. ``evidence``: how we
    know. ``confidence``: 0 to 1. ``mend``: the corrected line, if it is not that of the table. Causes of one id and ``kind`` are
    one fault in several places, for a detail that names a block. ``effect``: how far it alone moves a logit, at most; None if
    that is unknown. ``held``: parameters at these places do it, by what they hold.
    """

    id: str
    places: tuple[Place, ...]
    detail: str
    evidence: str = ""
    confidence: float = SURE
    mend: str | None = None
    kind: str = ""
    effect: float | None = None
    held: bool = False

    @classmethod
    def at(cls, id: str, part: str, detail: str, kind: str = "", layer: int | None = None, mend: str | None = None) -> "Cause":
        """Return what a program does at a part of a block, or outside the blocks."""
        return cls(id, (Place.at(layer, part),), detail, mend=mend, kind=kind)

    @property
    def place(self) -> Place:
        return self.places[0]

    def within(self, layer: int) -> "Cause":
        """Return the same in a block; what is outside the blocks stays there."""
        return replace(self, places=tuple(Place.at(layer, place.part, place.share) for place in self.places))

    @property
    def where(self) -> str:
        """The places in words: traced points, tensors or parts of them; a star means every block (``h.*.mlp.act``)."""
        return joined(self.places)

    @property
    def fix(self) -> str:
        """The corrected line."""
        return (self.mend or CAUSES[self.id]).replace("{where}", self.where)


if __name__ == "__main__":
    sys.stdout.write(document())
