"""Decoder in the style of the large training frameworks: per-head interleaved query_key_value, vocabulary padded for speed."""

import torch
from torch import nn
from torch.nn import functional as F


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


@torch.no_grad()
def fill(module, state):
    vocab = state["wte.weight"].size(0)
    module.word_embeddings.weight.zero_()
    module.word_embeddings.weight[:vocab] = state["wte.weight"]
    module.position_embeddings.weight.copy_(state["wpe.weight"])
    module.final_layernorm.load_state_dict({k: state[f"ln_f.{k}"] for k in ("weight", "bias")})
    for i, layer in enumerate(module.layers):
        p = {key.removeprefix(f"h.{i}."): value for key, value in state.items() if key.startswith(f"h.{i}.")}
        n, k = layer.attention.num_heads, layer.attention.head_dim
        w = p["attn.c_attn.weight"].T.reshape(3, n, k, n * k).transpose(0, 1).reshape(3 * n * k, n * k)
        b = p["attn.c_attn.bias"].reshape(3, n, k).transpose(0, 1).reshape(-1)
        layer.attention.query_key_value.load_state_dict({"weight": w, "bias": b})
        for target, name in (
            (layer.attention.dense, "attn.c_proj"),
            (layer.mlp.dense_h_to_4h, "mlp.c_fc"),
            (layer.mlp.dense_4h_to_h, "mlp.c_proj"),
        ):
            target.load_state_dict({"weight": p[f"{name}.weight"].T, "bias": p[f"{name}.bias"]})
        layer.input_layernorm.load_state_dict({k: p[f"ln_1.{k}"] for k in ("weight", "bias")})
        layer.post_attention_layernorm.load_state_dict({k: p[f"ln_2.{k}"] for k in ("weight", "bias")})
