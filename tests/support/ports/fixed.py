"""Whole windows only, as the data loader cuts them: (batch, context), never shorter. Hand-written autograd, work in place."""

import torch
from torch import nn

from support.ports.parts import GPT, Block, fill, future

__all__ = ["build", "fill"]


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


class Layer(Block):
    NORM, NAMES = Norm, "norm_1 norm_a norm_2 norm_m"

    def attend(self, x):
        b, t, d = x.shape
        qkv = self.qkv(x).view(b, t, 3, self.n_head, -1)
        heads = x.new_zeros(b, self.n_head, t, d // self.n_head)
        for h in range(self.n_head):
            q, k, v = qkv[:, :, :, h].unbind(2)
            scores = torch.baddbmm(x.new_zeros(1), q, k.transpose(1, 2), beta=0, alpha=(d // self.n_head) ** -0.5)
            heads[:, h] = torch.bmm(scores.masked_fill_(future(scores), -torch.inf).softmax(-1), v)
        return self.out(heads.permute(0, 2, 1, 3).reshape(b, t, d))

    def feed(self, x):
        hidden = self.up(x)
        cube = torch.pow(hidden, 3).mul_(0.044715).add_(hidden).mul_((2 / torch.pi) ** 0.5).tanh_().add_(1)
        return self.down(cube.mul_(hidden).mul_(0.5))


class WindowGPT(GPT):
    BLOCK, NORM, NAMES = Layer, Norm, "words word places place last norm"

    def embed(self, windows):
        assert windows.shape[1] == self.place.num_embeddings, "cut the text into whole windows"
        x = self.word(windows)
        x += self.place(torch.arange(windows.shape[1]))
        return x


build = WindowGPT
