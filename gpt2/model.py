"""All of GPT-2.

Sources:
    [1] Radford et al., "Language Models are Unsupervised Multitask Learners", 2019: sizes, pre-layer-norm, the extra final
        norm, and residual projections scaled by 1/sqrt(N) at initialisation.
    [2] Radford et al., "Improving Language Understanding by Generative Pre-Training", 2018: learned positions, tanh-GELU,
        N(0, 0.02), where dropout goes.
    [3] Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv:1606.08415: the tanh approximation.
    [4] openai/gpt-2, src/model.py: weights stored [in, out] ("Conv1D"), q, k, v in one projection.

Shapes: B batch, T tokens now, S tokens seen (cache included), H heads, K head size, D = H K width, F feed-forward width,
V vocabulary, P positions. Modules are named as the checkpoint names them, so a key, a gradient and a traced activation all
speak of the same thing. Nothing here reads files, computes a loss, or prints.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.config import GPT2Config
from gpt2.kv_cache import KVCache

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    # The first three are one function, 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), under three names [3].
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,  # exact: x times the normal distribution function
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}

AttentionFunction = Callable[[Tensor, Tensor, Tensor, Tensor | None, float, float], Tensor]


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float) -> Tensor:
    """Attention through PyTorch's fused kernel: the default path.

    ``q`` is (B, H, T, K), ``k`` and ``v`` are (B, H, S, K), ``mask`` is boolean and broadcasts to (B, H, T, S), True where a
    query may look. ``mask=None`` is plain causal attention: T == S, or one query that sees everything. Returns (B, H, T, K).
    """
    causal = mask is None and q.size(-2) > 1
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale)


def eager_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float) -> Tensor:
    """The same attention spelt out, for reading and for tracing; arguments as in :func:`sdpa_attention`."""
    if mask is None:
        mask = causal_mask(q.size(-2), k.size(-2), q.device)
    scores = q @ k.transpose(-1, -2) * scale  # (B, H, T, S)
    weights = F.softmax(scores.masked_fill(~mask, -math.inf), dim=-1)
    return F.dropout(weights, dropout) @ v  # (B, H, T, K); the caller passes 0 outside training


def eager_attention_upcast(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float) -> Tensor:
    """``reorder_and_upcast_attn``: scale first, then scores and softmax in at least float32 (Mistral GPT-2, stanford-crfm)."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        return eager_attention(q.to(dtype) * scale, k.to(dtype), v.to(dtype), mask, 1.0, dropout).to(v.dtype)


def causal_mask(queries: int, keys: int, device: torch.device | str | None = None) -> Tensor:
    """(T, S) boolean, True where query t, standing at position S - T + t, may look: itself and whatever came before."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


class Conv1D(nn.Module):
    """An affine map whose weight is stored [in, out], as in OpenAI's code, where it was a convolution of width one [4]."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_in, n_out))
        self.bias = nn.Parameter(torch.empty(n_out))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight)
        return y.view(*x.shape[:-1], y.size(-1))

    def extra_repr(self) -> str:
        return f"{self.weight.size(0)} -> {self.weight.size(1)}"


class Attention(nn.Module):
    """Causal multi-head self-attention; q, k and v come from one projection, in that order."""

    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        self.layer, self.n_head = layer, config.n_head
        self.scale = 1 / math.sqrt(config.head_dim) if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= layer + 1
        self.attn_pdrop = config.attn_pdrop
        self.attend: AttentionFunction = eager_attention_upcast if config.reorder_and_upcast_attn else sdpa_attention
        self.c_attn = Conv1D(config.n_embd, 3 * config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_embd)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x: Tensor, mask: Tensor | None, cache: KVCache | None) -> Tensor:
        heads = self.c_attn(x).unflatten(-1, (3, self.n_head, -1))  # (B, T, 3, H, K)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()  # each (B, H, T, K)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)  # (B, H, S, K)
        y = self.attend(q, k, v, mask, self.scale, self.attn_pdrop if self.training else 0.0)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).flatten(2)))  # (B, T, D)


class MLP(nn.Module):
    """The feed-forward: widen, bend, narrow. No dropout inside."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = Conv1D(config.n_embd, config.inner)
        self.c_proj = Conv1D(config.inner, config.n_embd)
        self.activation = ACTIVATIONS[config.activation_function]
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x: Tensor) -> Tensor:
        return self.resid_dropout(self.c_proj(self.activation(self.c_fc(x))))


class Block(nn.Module):
    """Two residual branches, each with its norm in front, so the stream itself is never normalised [1]."""

    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = Attention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, mask: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), mask, cache)
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """GPT-2 with its tied head.

    ``GPT2(config)`` draws fresh weights from torch's global generator. ``initialise=False`` leaves every parameter as
    untouched memory, which costs nothing: the loader then puts mapped tensors in their place.
    """

    def __init__(self, config: GPT2Config, *, initialise: bool = True) -> None:
        super().__init__()
        self.config = config
        # from_pretrained, because Embedding's own constructor would fill the largest tensor of all with normals.
        self.wte = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.n_embd), freeze=False)
        self.wpe = nn.Embedding.from_pretrained(torch.empty(config.n_positions, config.n_embd), freeze=False)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        if initialise:
            self.initialise()

    @torch.no_grad()
    def initialise(self, generator: torch.Generator | None = None) -> None:
        """N(0, 0.02) for matrices and embeddings, 0 for biases, 1 and 0 for norms [2].

        Each block adds two branches to the stream, so their projections (both ``c_proj``) shrink by 1/sqrt(2 n_layer), and
        the stream's variance does not grow with depth [1].
        """
        std = self.config.initializer_range
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                parameter.normal_(0, std / math.sqrt(2 * self.config.n_layer), generator=generator)
            elif ".ln_" in f".{name}":
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.normal_(0, std, generator=generator)

    def forward(self, ids: Tensor, *, attention_mask: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """Token ids (B, T) to logits (B, T, V); arguments as in :meth:`hidden`."""
        return self.head(self.hidden(ids, attention_mask=attention_mask, cache=cache))

    def hidden(
        self, ids: Tensor, *, attention_mask: Tensor | None = None, cache: KVCache | None = None, rows: Tensor | None = None
    ) -> Tensor:
        """Token ids (B, T), int64, to the final normed stream (B, T, D).

        ``attention_mask`` (B, S), nonzero for real tokens and zero for padding, covers the cached tokens too; positions then
        count real tokens only, so a row padded on the left computes what it would compute alone. What comes out at padding
        means nothing. With ``cache``, ``ids`` continue the cached tokens, and are added to them. ``rows`` (B, T, D) are the
        embeddings of ``ids``, from whoever has looked them up already.

        Raises:
            ValueError: more tokens than ``n_positions``, or an ``attention_mask`` of another shape than (B, S).
        """
        past = 0 if cache is None else cache.length
        tokens, seen = ids.size(1), past + ids.size(1)
        if seen > self.config.n_positions:
            raise ValueError(f"{seen} tokens do not fit the model's {self.config.n_positions} positions")
        if attention_mask is None:
            positions = torch.arange(past, seen, device=ids.device)  # (T,)
            mask = None if past == 0 or tokens == 1 else causal_mask(tokens, seen, ids.device)
        else:
            if attention_mask.shape != (ids.size(0), seen):
                given = tuple(attention_mask.shape)
                raise ValueError(f"attention_mask is {given}; it must cover cached and new tokens, {(ids.size(0), seen)}")
            real = attention_mask.bool()  # (B, S)
            positions = (real.cumsum(-1) - 1).clamp(min=0)[:, past:]  # (B, T)
            causal = causal_mask(tokens, seen, ids.device)
            # Padding looks at itself (the diagonal), or its softmax would divide zero by zero and poison every later layer.
            mask = causal & real[:, None, None, :] | causal.triu(past)  # (B, 1, T, S)
        x = self.drop((self.wte(ids) if rows is None else rows) + self.wpe(positions))  # (B, T, D)
        for block in self.h:
            x = block(x, mask, cache)
        if cache is not None:
            cache.advance(tokens)
        return self.ln_f(x)

    def head(self, hidden: Tensor) -> Tensor:
        """Final stream (..., D) to logits (..., V), through the transposed token embedding."""
        return F.linear(hidden, self.wte.weight)

    def use_attention(self, attend: AttentionFunction) -> GPT2:
        """Compute attention with ``attend`` in every block: :func:`sdpa_attention`, or :func:`eager_attention` to read along."""
        for block in self.h:
            block.attn.attend = attend  # type: ignore[union-attr]  # to torch's types it is some module
        return self

    def new_cache(self, batch: int = 1, capacity: int | None = None) -> KVCache:
        """An empty cache in this model's dtype, on its device."""
        return KVCache(self.config, batch, capacity, dtype=self.wte.weight.dtype, device=self.wte.weight.device)
