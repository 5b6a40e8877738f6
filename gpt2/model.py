"""The GPT-2 model: token ids to logits.

Sources:
    [1] Radford et al., "Language Models are Unsupervised Multitask Learners", 2019: sizes, pre-layer-norm, the extra final
        norm, and residual projections scaled by 1/sqrt(N) at initialisation.
    [2] Radford et al., "Improving Language Understanding by Generative Pre-Training", 2018: learned positions, tanh-GELU,
        N(0, 0.02), where dropout goes.
    [3] Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv:1606.08415: the tanh approximation.
    [4] openai/gpt-2, src/model.py: weights stored [in, out] ("Conv1D"), q, k, v in one projection.

Shapes: B batch, T tokens of this pass, S tokens of this pass and the cache, H heads, K head size, D = H K width,
F feed-forward width, V vocabulary, P positions. Modules have the names that the checkpoint uses, so that a tensor of a file,
a gradient and a traced activation share one name. This module reads no files, computes no loss and prints nothing.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.config import GPT2Config
from gpt2.errors import require_memory
from gpt2.kv_cache import KVCache
from gpt2.options import require_type

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    # Three names of one function: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) [3].
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,  # the exact form: x times the normal cumulative distribution function
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}

AttentionFunction = Callable[[Tensor, Tensor, Tensor, Tensor | None, float, float], Tensor]


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float) -> Tensor:
    """Compute attention with PyTorch's fused kernel; this is the default.

    ``q`` is (B, H, T, K), ``k`` and ``v`` are (B, H, S, K). ``mask`` is boolean and broadcasts to (B, H, T, S); True means that
    the query may attend to the key. ``mask=None`` is causal attention with T == S, or one query that attends to every key.
    Returns (B, H, T, K).
    """
    causal = mask is None and q.size(-2) > 1
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale)


def eager_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float) -> Tensor:
    """Compute the same attention step by step, for reading and tracing; arguments as in :func:`sdpa_attention`."""
    if mask is None:
        mask = causal_mask(q.size(-2), k.size(-2), q.device)
    scores = q @ k.transpose(-1, -2) * scale  # (B, H, T, S)
    weights = F.softmax(scores.masked_fill(~mask, -math.inf), dim=-1)
    return F.dropout(weights, dropout) @ v  # (B, H, T, K); outside training the caller passes a dropout of 0


def eager_attention_upcast(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float) -> Tensor:
    """Scale q first, then compute scores and softmax in at least float32.

    Models with ``reorder_and_upcast_attn`` in their config need this (stanford-crfm's Mistral GPT-2).
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        return eager_attention(q.to(dtype) * scale, k.to(dtype), v.to(dtype), mask, 1.0, dropout).to(v.dtype)


def causal_mask(queries: int, keys: int, device: torch.device | str | None = None) -> Tensor:
    """Return a boolean (T, S): query t is at position S - T + t and attends to itself and to all earlier positions."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


class Conv1D(nn.Module):
    """An affine map with its weight stored as [in, out]; OpenAI's code implements it as a convolution of width 1 [4]."""

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
    """Causal multi-head self-attention. One projection computes q, k and v, in that order."""

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
    """The feed-forward: expand to F features, apply the activation, project back to D. Dropout only at the end."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = Conv1D(config.n_embd, config.inner)
        self.c_proj = Conv1D(config.inner, config.n_embd)
        self.activation = ACTIVATIONS[config.activation_function]
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x: Tensor) -> Tensor:
        return self.resid_dropout(self.c_proj(self.activation(self.c_fc(x))))  # (B, T, D) -> (B, T, F) -> (B, T, D)


class Block(nn.Module):
    """Attention and feed-forward, each added to the residual stream; each normalises its own input (pre-layer-norm [1])."""

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
    """GPT-2 with its language-modelling head, whose weight is the token embedding (tied), or ``lm_head``'s own.

    ``GPT2(config)`` draws new weights from torch's global generator. ``initialise=False`` allocates the parameters without
    writing to them, so that building takes no time and no physical memory; the loader then replaces them.
    """

    name = "the model"  # of its checkpoint, for messages

    def __init__(self, config: GPT2Config, *, initialise: bool = True) -> None:
        super().__init__()
        self.config: GPT2Config = require_type("GPT2: config", config, GPT2Config)
        # Embedding's own constructor would fill the largest tensors with random numbers; from_pretrained does not.
        self.wte = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.n_embd), freeze=False)
        self.wpe = nn.Embedding.from_pretrained(torch.empty(config.n_positions, config.n_embd), freeze=False)
        self.drop = nn.Dropout(config.embd_pdrop)
        blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.h: Sequence[Block] = blocks  # type: ignore[assignment]  # gives model.h[0].attn a type
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        if not config.tie_word_embeddings:  # a row for each token, as in the token embedding
            self.lm_head = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.n_embd), freeze=False)
        if initialise:
            self.initialise()

    @torch.no_grad()
    def initialise(self, generator: torch.Generator | None = None) -> None:
        """Draw matrices and embeddings from N(0, 0.02); set biases to 0, norms to weight 1 and bias 0 [2].

        Each block adds two branches to the residual stream. Dividing their last projections (both ``c_proj``) by
        sqrt(2 n_layer) keeps the variance of the stream from growing with depth [1].
        """
        needed = sum(parameter.nbytes for parameter in self.parameters() if parameter.device.type == "cpu")
        require_memory(needed, f"{self.config.num_parameters():,} parameters", "choose a smaller model")
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
        """Compute logits (B, T, V) from token ids (B, T); arguments as in :meth:`hidden`."""
        return self.head(self.hidden(ids, attention_mask=attention_mask, cache=cache))

    def hidden(
        self,
        ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
        rows: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Compute the residual stream after the last norm, (B, T, D), from token ids (B, T), int64.

        ``attention_mask`` (B, S) is nonzero for real tokens and zero for padding, cached tokens included. Positions then count
        real tokens only, so that a row with padding on its left gives the same result as alone. The output at padding has no
        meaning. With ``cache``, the ``ids`` continue the cached tokens and their keys and values are appended. ``rows``
        (B, T, D) are the embeddings of ``ids``, if the caller has looked them up already. ``documents`` (B, T) number the
        document of each token, for training without cache and padding: attention and positions begin anew with each.

        Raises:
            ValueError: ids that are not (B, T), more than ``n_positions`` tokens, or an ``attention_mask`` that is not (B, S).
        """
        if ids.ndim != 2:
            raise ValueError(f"ids are {tuple(ids.shape)}; give rows of them, (B, T), as in ids[None]")
        past = 0 if cache is None else cache.length
        tokens, seen = ids.size(1), past + ids.size(1)
        if seen > self.config.n_positions:
            raise ValueError(f"{seen} tokens do not fit the model's {self.config.n_positions} positions")
        if documents is not None:
            visible = causal_mask(tokens, tokens, ids.device) & (documents[:, :, None] == documents[:, None, :])  # (B, T, T)
            positions = visible.sum(-1) - 1  # (B, T)
            mask: Tensor | None = visible[:, None]
        elif attention_mask is None:
            positions = torch.arange(past, seen, device=ids.device)  # (T,)
            mask = None if past == 0 or tokens == 1 else causal_mask(tokens, seen, ids.device)
        else:
            if attention_mask.shape != (ids.size(0), seen):
                given = tuple(attention_mask.shape)
                raise ValueError(f"attention_mask is {given}; it must cover cached and new tokens, {(ids.size(0), seen)}")
            real = attention_mask.bool()  # (B, S)
            positions = (real.cumsum(-1) - 1).clamp(min=0)[:, past:]  # (B, T)
            causal = causal_mask(tokens, seen, ids.device)
            # Padding attends to itself (the diagonal). Without any key its softmax would be 0/0, and NaN would spread.
            mask = causal & real[:, None, None, :] | causal.triu(past)  # (B, 1, T, S)
        x = self.drop((self.wte(ids) if rows is None else rows) + self.wpe(positions))  # (B, T, D)
        for block in self.h:
            x = block(x, mask, cache)
        if cache is not None:
            cache.advance(tokens)
        return self.ln_f(x)

    @property
    def head_table(self) -> nn.Embedding:
        """The table (V, D) whose rows give the logits: the token embedding, if the head is tied."""
        return self.wte if self.config.tie_word_embeddings else self.lm_head

    def head(self, hidden: Tensor) -> Tensor:
        """Compute logits (..., V) from the output of :meth:`hidden` (..., D), one by each row of :attr:`head_table`."""
        return F.linear(hidden, self.head_table.weight)

    def with_tables(self, change: Callable[[Tensor], Tensor]) -> "GPT2":
        """Replace the rows (V, D) of the token embedding, and of an untied head, by ``change`` of them; return the model."""
        for table in dict.fromkeys((self.wte, self.head_table)):
            table.weight = nn.Parameter(change(table.weight.detach()))
            table.num_embeddings = len(table.weight)
        self.config = replace(self.config, vocab_size=len(self.wte.weight))
        return self

    def use_attention(self, attend: AttentionFunction) -> "GPT2":
        """Make every block compute attention with ``attend``, such as :func:`eager_attention`; return the model."""
        for block in self.h:
            block.attn.attend = attend
        return self

    def new_cache(self, batch: int = 1, capacity: int | None = None) -> KVCache:
        """Return an empty cache of this model's dtype, on its device."""
        return KVCache(self.config, batch, capacity, dtype=self.wte.weight.dtype, device=self.wte.weight.device)
