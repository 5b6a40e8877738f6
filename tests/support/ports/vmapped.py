"""GPT-2 for one sequence and one head, written as pure functions; torch.vmap gives it heads and a batch."""

import torch
from torch import nn
from torch.func import vmap


def norm(x, p):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + 1e-5) * p["scale"] + p["offset"]


def head(x, p):
    q, k, v = (x @ p[f"w_{name}"] + p[f"b_{name}"] for name in "qkv")
    scores = q @ k.T / k.shape[-1] ** 0.5
    past = torch.ones(len(x), len(x), device=x.device).tril().bool()
    return torch.where(past, scores, -1e30).softmax(-1) @ v @ p["w_o"]


def block(x, p):
    heads = {name: p["heads"][name] for name in p["heads"]}
    x = x + vmap(head, in_dims=(None, 0))(norm(x, p["norm_1"]), heads).sum(0) + p["bias_o"]
    hidden = nn.functional.gelu(norm(x, p["norm_2"]) @ p["w_in"] + p["b_in"], approximate="tanh")
    return x + hidden @ p["w_out"] + p["b_out"]


def gpt2(ids, p):
    x = p["words"][ids] + p["places"][: len(ids)]
    for layer in p["layers"]:
        x = block(x, layer)
    return norm(x, p["norm"]) @ p["words"].T


class Tree(nn.Module):
    """A nested dictionary of arrays, as a module."""

    def __init__(self, tree):
        super().__init__()
        self.leaves = nn.ParameterDict({k: v for k, v in tree.items() if isinstance(v, torch.Tensor)})
        self.branches = nn.ModuleDict({k: Tree(v) for k, v in tree.items() if isinstance(v, dict)})
        self.lists = nn.ModuleDict({k: nn.ModuleList(map(Tree, v)) for k, v in tree.items() if isinstance(v, list)})

    def tree(self):
        found = dict(self.leaves) | {k: branch.tree() for k, branch in self.branches.items()}
        return found | {k: [one.tree() for one in many] for k, many in self.lists.items()}


class Vmapped(nn.Module):
    def __init__(self, vocab, context, d, depth, heads, f):
        super().__init__()
        k = d // heads

        def w(*shape):
            return torch.randn(*shape) * 0.02

        def scale_and_offset():
            return {"scale": torch.ones(d), "offset": torch.zeros(d)}

        layers = [
            {
                "heads": {f"w_{x}": w(heads, d, k) for x in "qkv"}
                | {f"b_{x}": w(heads, k) for x in "qkv"}
                | {"w_o": w(heads, k, d)},
                "bias_o": w(d),
                "w_in": w(d, f),
                "b_in": w(f),
                "w_out": w(f, d),
                "b_out": w(d),
                "norm_1": scale_and_offset(),
                "norm_2": scale_and_offset(),
            }
            for _ in range(depth)
        ]
        self.parameters_ = Tree({"words": w(vocab, d), "places": w(context, d), "layers": layers, "norm": scale_and_offset()})

    def forward(self, ids):
        return vmap(gpt2, in_dims=(0, None))(ids, self.parameters_.tree())


def build(config):
    return Vmapped(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head, config.inner)


def fill(module, state):
    def write(leaves, names, at=""):
        for leaf, name in names.items():
            leaves[leaf].copy_(state[at + name].reshape(leaves[leaf].shape))

    p = module.parameters_.tree()
    write(p, {"words": "wte.weight", "places": "wpe.weight"})
    write(p["norm"], {"scale": "ln_f.weight", "offset": "ln_f.bias"})
    for i, layer in enumerate(p["layers"]):
        for n in "12":
            write(layer[f"norm_{n}"], {"scale": f"ln_{n}.weight", "offset": f"ln_{n}.bias"}, f"h.{i}.")
        write(
            layer, {"w_in": "c_fc.weight", "b_in": "c_fc.bias", "w_out": "c_proj.weight", "b_out": "c_proj.bias"}, f"h.{i}.mlp."
        )
        write(layer, {"bias_o": "attn.c_proj.bias"}, f"h.{i}.")
        write(layer["heads"], {f"b_{x}": f"{x}.bias" for x in "qkv"} | {"w_o": "attn.c_proj.weight"}, f"h.{i}.")
        for x in "qkv":
            heads = layer["heads"][f"w_{x}"]
            heads.copy_(state[f"h.{i}.{x}.weight"].unflatten(1, (len(heads), -1)).transpose(0, 1))
