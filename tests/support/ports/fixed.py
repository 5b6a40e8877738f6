"""Whole windows only, as the data loader cuts them: (batch, context), never shorter. Hand-written autograd, work in place."""

import torch
from torch import nn

from support.ports import put


class LayerNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        centred = x - x.mean(-1, keepdim=True)
        rstd = centred.square().mean(-1, keepdim=True).add_(1e-5).rsqrt_()
        normal = centred.mul_(rstd)
        ctx.save_for_backward(normal, rstd, weight)
        return torch.addcmul(bias, normal, weight)

    @staticmethod
    def backward(ctx, grad):
        normal, rstd, weight = ctx.saved_tensors
        inner = grad * weight
        inner = inner - inner.mean(-1, keepdim=True) - normal * (inner * normal).mean(-1, keepdim=True)
        return inner * rstd, (grad * normal).flatten(0, -2).sum(0), grad.flatten(0, -2).sum(0)


class Norm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))

    def forward(self, x):
        return LayerNormFunction.apply(x, self.weight, self.bias)


class Block(nn.Module):
    def __init__(self, d, heads, f, context):
        super().__init__()
        self.heads = heads
        self.norm_a, self.norm_m = Norm(d), Norm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, f), nn.Linear(f, d)
        self.register_buffer("future", torch.ones(context, context).triu(1).bool(), persistent=False)

    def forward(self, x):
        b, t, d = x.shape
        qkv = self.qkv(self.norm_a(x)).view(b, t, 3, self.heads, -1)
        heads = x.new_zeros(b, self.heads, t, d // self.heads)
        for h in range(self.heads):
            q, k, v = qkv[:, :, :, h].unbind(2)
            scores = torch.baddbmm(x.new_zeros(1), q, k.transpose(1, 2), beta=0, alpha=(d // self.heads) ** -0.5)
            heads[:, h] = torch.bmm(scores.masked_fill_(self.future, -torch.inf).softmax(-1), v)
        x = x + self.out(heads.permute(0, 2, 1, 3).reshape(b, t, d))
        hidden = self.up(self.norm_m(x))
        cube = torch.pow(hidden, 3).mul_(0.044715).add_(hidden).mul_((2 / torch.pi) ** 0.5).tanh_().add_(1)
        return x + self.down(cube.mul_(hidden).mul_(0.5))


class WindowGPT(nn.Module):
    def __init__(self, vocab, context, d, depth, heads, f):
        super().__init__()
        self.context = context
        self.word, self.place = nn.Embedding(vocab, d), nn.Embedding(context, d)
        self.blocks = nn.ModuleList(Block(d, heads, f, context) for _ in range(depth))
        self.norm = Norm(d)
        self.register_buffer("ids", torch.arange(context))

    def forward(self, windows):
        assert windows.shape[1] == self.context, "cut the text into whole windows"
        x = self.word(windows)
        x += self.place(self.ids)
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.linear(self.norm(x), self.word.weight)


def build(config):
    return WindowGPT(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head, config.inner)


def fill(module, state):
    put(module, state, {"word": "wte", "place": "wpe", "norm": "ln_f"})
    for i, block in enumerate(module.blocks):
        put(block, state, {"norm_a": "ln_1", "qkv": "attn.c_attn.T", "out": "attn.c_proj.T"}, f"h.{i}.")
        put(block, state, {"norm_m": "ln_2", "up": "mlp.c_fc.T", "down": "mlp.c_proj.T"}, f"h.{i}.")
