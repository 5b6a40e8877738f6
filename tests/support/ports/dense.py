"""After the multi-backend library's layers: EinsumDense kernels (D, H, K), gamma and beta, a reversible embedding."""

import torch
from torch import nn


class EinsumDense(nn.Module):
    def __init__(self, equation, kernel_shape, bias_shape):
        super().__init__()
        self.equation = equation
        self.kernel = nn.Parameter(torch.empty(kernel_shape))
        self.bias = nn.Parameter(torch.zeros(bias_shape))
        nn.init.trunc_normal_(self.kernel, std=0.02)

    def forward(self, inputs):
        return torch.einsum(self.equation, inputs, self.kernel) + self.bias


class LayerNormalization(nn.Module):
    def __init__(self, dim, epsilon=1e-5):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))
        self.beta = nn.Parameter(torch.zeros(dim))
        self.epsilon = epsilon

    def forward(self, inputs):
        variance, mean = torch.var_mean(inputs, dim=-1, keepdim=True, correction=0)
        inv = torch.rsqrt(variance + self.epsilon) * self.gamma
        return inputs * inv + (self.beta - mean * inv)


class CachedMultiHeadAttention(nn.Module):
    def __init__(self, dim, num_heads, key_dim):
        super().__init__()
        self._key_dim = key_dim
        for name in ("query", "key", "value"):
            setattr(self, f"_{name}_dense", EinsumDense("btd,dhk->bthk", (dim, num_heads, key_dim), (num_heads, key_dim)))
        self._output_dense = EinsumDense("bthk,hkd->btd", (num_heads, key_dim, dim), (dim,))

    def forward(self, inputs, attention_mask):
        query = self._query_dense(inputs) * self._key_dim**-0.5
        scores = torch.einsum("bqhk,bshk->bhqs", query, self._key_dense(inputs))
        scores = torch.softmax(scores.masked_fill(~attention_mask, -1e10), dim=-1)
        return self._output_dense(torch.einsum("bhqs,bshk->bqhk", scores, self._value_dense(inputs)))


class TransformerDecoder(nn.Module):
    def __init__(self, dim, num_heads, intermediate_dim):
        super().__init__()
        self._self_attention_layer = CachedMultiHeadAttention(dim, num_heads, dim // num_heads)
        self._self_attention_layer_norm = LayerNormalization(dim)
        self._feedforward_intermediate_dense = EinsumDense("btd,df->btf", (dim, intermediate_dim), (intermediate_dim,))
        self._feedforward_output_dense = EinsumDense("btf,fd->btd", (intermediate_dim, dim), (dim,))
        self._feedforward_layer_norm = LayerNormalization(dim)

    def forward(self, x, mask):
        x = x + self._self_attention_layer(self._self_attention_layer_norm(x), mask)
        y = self._feedforward_intermediate_dense(self._feedforward_layer_norm(x))
        return x + self._feedforward_output_dense(nn.functional.gelu(y, approximate="tanh"))


class Backbone(nn.Module):
    def __init__(self, vocabulary_size, sequence_length, num_layers, num_heads, hidden_dim, intermediate_dim):
        super().__init__()
        self.token_embedding = nn.ParameterDict({"embeddings": torch.randn(vocabulary_size, hidden_dim) * 0.02})
        self.position_embedding = nn.ParameterDict({"embeddings": torch.randn(sequence_length, hidden_dim) * 0.02})
        self.transformer_layers = nn.ModuleList(
            TransformerDecoder(hidden_dim, num_heads, intermediate_dim) for _ in range(num_layers)
        )
        self.layer_norm = LayerNormalization(hidden_dim)

    def forward(self, token_ids):
        n = token_ids.shape[1]
        x = self.token_embedding["embeddings"][token_ids] + self.position_embedding["embeddings"][:n]
        mask = torch.arange(n, device=token_ids.device)[:, None] >= torch.arange(n, device=token_ids.device)
        for layer in self.transformer_layers:
            x = layer(x, mask)
        return self.layer_norm(x)


class CausalLM(nn.Module):
    def __init__(self, **sizes):
        super().__init__()
        self.backbone = Backbone(**sizes)

    def forward(self, token_ids):
        return self.backbone(token_ids) @ self.backbone.token_embedding["embeddings"].T


def build(config):
    return CausalLM(
        vocabulary_size=config.vocab_size,
        sequence_length=config.n_positions,
        num_layers=config.n_layer,
        num_heads=config.n_head,
        hidden_dim=config.n_embd,
        intermediate_dim=config.inner,
    )


@torch.no_grad()
def fill(module, state):
    def dense(target, weight, bias):
        target.kernel.copy_(weight.reshape(target.kernel.shape))
        target.bias.copy_(bias.reshape(target.bias.shape))

    def norm(target, name):
        target.gamma.copy_(state[name + ".weight"])
        target.beta.copy_(state[name + ".bias"])

    backbone = module.backbone
    backbone.token_embedding["embeddings"].copy_(state["wte.weight"])
    backbone.position_embedding["embeddings"].copy_(state["wpe.weight"])
    norm(backbone.layer_norm, "ln_f")
    for i, layer in enumerate(backbone.transformer_layers):
        attention = layer._self_attention_layer
        weights, biases = state[f"h.{i}.attn.c_attn.weight"].chunk(3, -1), state[f"h.{i}.attn.c_attn.bias"].chunk(3)
        dense(attention._query_dense, weights[0], biases[0])
        dense(attention._key_dense, weights[1], biases[1])
        dense(attention._value_dense, weights[2], biases[2])
        for target, name in (
            (attention._output_dense, "attn.c_proj"),
            (layer._feedforward_intermediate_dense, "mlp.c_fc"),
            (layer._feedforward_output_dense, "mlp.c_proj"),
        ):
            dense(target, state[f"h.{i}.{name}.weight"], state[f"h.{i}.{name}.bias"])
        norm(layer._self_attention_layer_norm, f"h.{i}.ln_1")
        norm(layer._feedforward_layer_norm, f"h.{i}.ln_2")
