"""The logits that a faulty program must have, computed in torch by ports of tests/support/faulty that other hands wrote."""

import torch
from torch import Tensor

import gpt2
from gpt2.model import GPT2, eager_attention
from support.faulty import LINES, Faulty
from support.ports import logits
from support.programs import Home, Program

KNOWN = {name: {word.partition("@")[0] for line in lines for word in line.split()} for name, lines in LINES.items()}
KNOWN["fused"] |= {"no-norm-bias"}
KNOWN["fused"] -= {"position-sinusoidal"}  # whose table is in float32 there
KNOWN["italiano"] -= {"no-norm-bias"}  # whose last norm keeps its bias there


@torch.no_grad()
def expected_logits(program: Program, home: Home) -> Tensor | None:
    """(B, T, V) in float64 of a program's faults, one or several; None if no port of torch has them all."""
    words = [word.partition("@")[0] for word in program.line.split()]
    if not words:
        return gpt2.load(str(home.model), dtype="float64")(home.ids)
    if words == ["mask-strict"] and program.language == "c":
        return _first_token_alone(program, home)
    architecture = next((name for name, known in KNOWN.items() if known >= set(words) and name != "compiled"), None)
    if architecture is None:
        return None
    module = Faulty(architecture, program.line).build(home.config, home.model).double()
    if "untied-head" in words:
        head = module.head.weight
        head.copy_((0.02 * torch.arange(head.numel(), dtype=torch.float64).sin()).view_as(head))
    return logits(module, home.ids, home.config.vocab_size)


def _first_token_alone(program: Program, home: Home) -> Tensor:
    """`mask-strict` in a loop over the tokens before: the first sees none, and its attention is zero."""
    model: GPT2 = gpt2.load(str(home.model), dtype="float64")
    faulty = program.faults.layers("mask-strict", home.config.n_layer)

    def attend(q, k, v, mask, scale, dropout):
        before = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool).tril(-1)
        before[0, 0] = True  # the softmax of nothing is not a number
        y = eager_attention(q, k, v, before, scale, dropout)
        return torch.cat([torch.zeros_like(y[..., :1, :]), y[..., 1:, :]], dim=-2)

    for layer in faulty:
        model.h[layer].attn.attend = attend
    return model(home.ids)
