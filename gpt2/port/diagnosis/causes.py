"""Every cause that ``gpt2 diagnose`` knows: what it is in a line, and what the corrected code computes.

The ids are firm: they are what ``--json`` says, and what others match on. In the corrected lines ``x`` is the stream (B, T, D);
``q``, ``k``, ``v`` are (B, H, T, K); ``w`` is the checkpoint's tensor, stored [in, out].
"""

from __future__ import annotations

from typing import NamedTuple

from gpt2.port.diagnosis.report import Cause


class Known(NamedTuple):
    title: str
    fix: str


CAUSES: dict[str, Known] = {
    # Weights
    "transposed": Known(
        "a matrix lies on its side", "linear.weight.copy_(w.t())  # the checkpoint stores [in, out], nn.Linear [out, in]"
    ),
    "not-loaded": Known(
        "a parameter does not hold the checkpoint's values", "load_state_dict(..., strict=True), or gpt2.load_into(module, MODEL)"
    ),
    "wrong-tensor": Known("a parameter holds another tensor of the checkpoint", "copy the tensor of this name: {where}"),
    "qkv-order": Known(
        "queries, keys and values have changed places", "q, k, v = (x @ c_attn.weight + c_attn.bias).split(n_embd, dim=-1)"
    ),
    "head-layout": Known(
        "heads and their units are read in another order than they are stored",
        "q = q.view(B, T, n_head, head_size).transpose(1, 2)  # and back: y.transpose(1, 2).reshape(B, T, n_embd)",
    ),
    "missing-bias": Known(
        "a bias of the checkpoint has no place", "nn.Linear(n_in, n_out, bias=True), with the checkpoint's bias in it"
    ),
    "untied-head": Known("the head has weights of its own", "lm_head.weight = wte.weight  # logits = x @ wte.weight.t()"),
    "reduced-precision": Known(
        "the weights were rounded to a narrower dtype",
        "load the checkpoint in float32 and keep it so: no .half(), no .bfloat16()",
    ),
    "padded-vocab": Known("there are more logits than tokens", "logits = logits[..., :vocab_size]"),
    # Normalisation
    "layernorm-eps": Known("another epsilon in the layer norm", "nn.LayerNorm(n_embd, eps=1e-5)"),
    "layernorm-unbiased-variance": Known("the variance is divided by D - 1", "x.var(-1, keepdim=True, unbiased=False)"),
    "layernorm-not-normalising": Known(
        "scale and shift are applied to the input, not to the normalised input", "weight * (x - mean) / sqrt(var + eps) + bias"
    ),
    "layernorm-without-affine": Known(
        "the norm has no scale and shift",
        "nn.LayerNorm(n_embd)  # elementwise_affine=True, with the checkpoint's weight and bias",
    ),
    "rmsnorm": Known(
        "the norm does not subtract the mean",
        "nn.LayerNorm(n_embd), not nn.RMSNorm: (x - mean) / sqrt(var + eps) * weight + bias",
    ),
    "layernorm-axis": Known(
        "the norm runs over another axis than the width",
        "(x - x.mean(-1, keepdim=True)) / sqrt(x.var(-1, keepdim=True, unbiased=False) + eps) * weight + bias",
    ),
    "post-norm": Known("norms stand after the branches", "x = x + attn(ln_1(x)); x = x + mlp(ln_2(x))"),
    "norm-missing": Known("a norm before a branch is missing", "x = x + attn(ln_1(x)); x = x + mlp(ln_2(x))"),
    "final-norm-missing": Known("the norm before the head is missing", "logits = ln_f(x) @ wte.weight.t()"),
    "norms-swapped": Known("two norms have changed places", "x = x + attn(ln_1(x)); x = x + mlp(ln_2(x))"),
    # Feed-forward
    "gelu-variant": Known("another activation", 'nn.GELU(approximate="tanh")  # 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))'),
    "ffn-dropout": Known(
        "dropout inside the feed-forward", "x = c_proj(gelu(c_fc(x)))  # dropout only after it, and only while training"
    ),
    # Attention
    "scale-missing": Known("the scores are not scaled", "scores = q @ k.transpose(-1, -2) / sqrt(head_size)"),
    "scale-by-width": Known(
        "the scores are divided by the root of the width, not of a head's size",
        "scores = q @ k.transpose(-1, -2) / sqrt(head_size)  # n_embd // n_head, not n_embd",
    ),
    "scale-twice": Known(
        "the scores are scaled twice",
        "scores = q @ k.transpose(-1, -2) / sqrt(head_size), once; scaled_dot_product_attention does it itself",
    ),
    "scale-inverse-layer": Known(
        "the scores are also divided by the layer's number", "scores = q @ k.transpose(-1, -2) / sqrt(head_size), in every layer"
    ),
    "scale-wrong": Known("the scores are multiplied by another factor", "scores = q @ k.transpose(-1, -2) / sqrt(head_size)"),
    "mask-missing": Known("attention sees the future", "scores.masked_fill(torch.ones(T, T).triu(1).bool(), -inf).softmax(-1)"),
    "mask-strict": Known(
        "a token cannot see itself", "scores.masked_fill(torch.ones(T, T).triu(1).bool(), -inf)  # triu(1), not triu(0)"
    ),
    "mask-multiplied": Known(
        "masked scores are zero instead of minus infinity", "scores.masked_fill(future, -inf).softmax(-1), not scores * mask"
    ),
    "mask-off-by-one": Known(
        "a token sees the next one", "scores.masked_fill(torch.ones(T, T).triu(1).bool(), -inf)  # triu(1), not triu(2)"
    ),
    "softmax-axis": Known("the softmax runs over the wrong axis", "scores.softmax(dim=-1)  # over the keys"),
    "softmax-missing": Known("the scores weigh the values as they are", "weights = scores.masked_fill(future, -inf).softmax(-1)"),
    "output-projection-missing": Known("attention has no output projection", "return c_proj(y)"),
    "value-projection-wrong": Known(
        "attention mixes something else than the values", "y = weights @ v, where v is the last third of c_attn"
    ),
    # Positions and embeddings
    "position-missing": Known("no positions are added", "x = wte(ids) + wpe(torch.arange(T))"),
    "position-offset": Known("positions do not begin at row 0", "x = wte(ids) + wpe(torch.arange(T))"),
    "position-sinusoidal": Known(
        "positions are sines instead of the learned ones",
        "x = wte(ids) + wpe(torch.arange(T))  # wpe is a parameter of the checkpoint",
    ),
    "embedding-scaled": Known("the embeddings are scaled", "x = wte(ids) + wpe(torch.arange(T))  # no factor"),
    # Wiring
    "residual-missing": Known(
        "a branch replaces the stream instead of being added to it", "x = x + attn(ln_1(x)); x = x + mlp(ln_2(x))"
    ),
    "residual-from-normed": Known(
        "a branch is added to the normalised stream", "x = x + attn(ln_1(x))  # the sum takes x as it was before the norm"
    ),
    "residual-scaled": Known("a branch or its sum is scaled", "x = x + attn(ln_1(x)); x = x + mlp(ln_2(x))  # no factor"),
    "parallel-block": Known(
        "attention and feed-forward run side by side",
        "x = x + attn(ln_1(x)); x = x + mlp(ln_2(x))  # the second sees the first's result",
    ),
    "layer-order": Known("blocks are in another order", "for block in h: x = block(x)  # h.0 first"),
    "layer-missing": Known("a block does not run", "for block in h: x = block(x)  # all of them"),
    "layer-repeated": Known("a block runs more than once", "for block in h: x = block(x)  # each once"),
    "extra-norm": Known("a norm that GPT-2 does not have", "x = wte(ids) + wpe(pos); blocks; ln_f: no other norm"),
    "logits-scaled": Known("the logits are scaled", "logits = ln_f(x) @ wte.weight.t()  # no factor"),
    "extra-bias": Known("a bias that GPT-2 does not have", "lm_head = nn.Linear(n_embd, vocab_size, bias=False)"),
    "logits-softmaxed": Known(
        "the output is probabilities, not logits", "return logits  # softmax belongs to the loss and to the sampler"
    ),
    # Behaviour
    "dropout-active": Known("dropout does not stop in eval mode", "F.dropout(x, p, training=self.training), or nn.Dropout"),
    "not-deterministic": Known("the same ids give other logits every time", "draw no random number in eval mode"),
    "cache-inconsistent": Known(
        "with its cache it computes something else than without",
        "k = cat(past_k, k, dim=-2); positions = arange(past, past + T); the mask's last T rows",
    ),
    "batch-dependent": Known(
        "a row's logits depend on the other rows", "no operation may cross the batch axis: view and transpose keep it first"
    ),
    "padding-wrong": Known(
        "a padded row gives other logits than the same row alone",
        "positions = (mask.cumsum(-1) - 1).clamp(min=0); scores.masked_fill(~mask.bool()[:, None, None], -inf)",
    ),
}


def cause(id: str, where: str, detail: str, evidence: str, confidence: float, fix: str | None = None) -> Cause:
    """A :class:`Cause` of a known id, with its usual ``fix`` unless one that fits better is given."""
    return Cause(id, where, detail, evidence, confidence, (fix or CAUSES[id].fix).replace("{where}", where))
