"""Decoder in the style of the large training frameworks: per-head interleaved query_key_value, vocabulary padded for speed."""

import torch
from torch import nn
from torch.nn import functional as F

from support.ports import put


def pad_to(n, multiple=64):
    return (n + multiple - 1) // multiple * multiple


class ParallelAttention(nn.Module):
    def __init__(self, hidden_size, num_attention_heads):
        super().__init__()
        self.num_heads = num_attention_heads
        self.head_dim = hidden_size // num_attention_heads
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states, ltor_mask):
        b, s, h = hidden_states.shape
        mixed = self.query_key_value(hidden_states).view(b, s, self.num_heads, 3 * self.head_dim)
        query, key, value = mixed.transpose(1, 2).split(self.head_dim, dim=-1)
        attention_scores = torch.matmul(query, key.transpose(-1, -2)) / self.head_dim**0.5 + ltor_mask
        attention_probs = F.softmax(attention_scores, dim=-1)
        context = torch.matmul(attention_probs, value).transpose(1, 2).reshape(b, s, h)
        return self.dense(context)


class ParallelMLP(nn.Module):
    def __init__(self, hidden_size, ffn_hidden_size):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(hidden_size, ffn_hidden_size)
        self.dense_4h_to_h = nn.Linear(ffn_hidden_size, hidden_size)

    def forward(self, hidden_states):
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(hidden_states), approximate="tanh"))


class ParallelTransformerLayer(nn.Module):
    def __init__(self, hidden_size, num_attention_heads, ffn_hidden_size):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden_size)
        self.attention = ParallelAttention(hidden_size, num_attention_heads)
        self.post_attention_layernorm = nn.LayerNorm(hidden_size)
        self.mlp = ParallelMLP(hidden_size, ffn_hidden_size)

    def forward(self, hidden_states, ltor_mask):
        hidden_states = hidden_states + self.attention(self.input_layernorm(hidden_states), ltor_mask)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class GPTModel(nn.Module):
    def __init__(self, vocab_size, max_position_embeddings, hidden_size, num_layers, num_attention_heads, ffn_hidden_size):
        super().__init__()
        self.word_embeddings = nn.Embedding(pad_to(vocab_size), hidden_size)
        self.position_embeddings = nn.Embedding(max_position_embeddings, hidden_size)
        self.layers = nn.ModuleList(
            [ParallelTransformerLayer(hidden_size, num_attention_heads, ffn_hidden_size) for _ in range(num_layers)]
        )
        self.final_layernorm = nn.LayerNorm(hidden_size)
        size = max_position_embeddings
        self.register_buffer("position_ids", torch.arange(size).unsqueeze(0))
        self.register_buffer("ltor_mask", -1e9 * torch.triu(torch.ones(1, 1, size, size), diagonal=1))

    def forward(self, input_ids):
        s = input_ids.size(1)
        hidden_states = self.word_embeddings(input_ids) + self.position_embeddings(self.position_ids[:, :s])
        for layer in self.layers:
            hidden_states = layer(hidden_states, self.ltor_mask[:, :, :s, :s])
        return F.linear(self.final_layernorm(hidden_states), self.word_embeddings.weight)


def build(config):
    return GPTModel(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head, config.inner)


def fill(module, state):
    module.word_embeddings.weight.zero_()
    module.word_embeddings.weight[: len(state["wte.weight"])] = state["wte.weight"]
    put(module, state, {"position_embeddings": "wpe", "final_layernorm": "ln_f"})
    for i, layer in enumerate(module.layers):
        put(layer, state, {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}, f"h.{i}.")
        put(layer, state, {"attention.dense": "attn.c_proj.T"}, f"h.{i}.")
        put(layer.mlp, state, {"dense_h_to_4h": "c_fc.T", "dense_4h_to_h": "c_proj.T"}, f"h.{i}.mlp.")
        own = layer.attention.query_key_value
        for leaf in ("weight", "bias"):
            rows = state[f"h.{i}.attn.c_attn.{leaf}"].t().unflatten(0, (3, layer.attention.num_heads, -1))
            getattr(own, leaf).copy_(rows.transpose(0, 1).flatten(0, 2))
