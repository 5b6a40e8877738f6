"""Shapes that ports are tried at, and ids for them."""

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from support import hf_layouts
from support.ports import Port

# Sizes that no two symbols share (V, P, D, F, H, K, L all differ), and sizes that nearly all share: F == 3D, H == K, P == D.
APART = GPT2Config(vocab_size=67, n_positions=23, n_embd=20, n_layer=3, n_head=4, n_inner=52, bos_token_id=0, eos_token_id=0)
ALIKE = GPT2Config(vocab_size=48, n_positions=16, n_embd=16, n_layer=4, n_head=4, n_inner=48, bos_token_id=0, eos_token_id=0)
CONFIGS = {"tiny": hf_layouts.TINY, "apart": APART, "alike": ALIKE}


def some_ids(port: Port, config: GPT2Config, batch: int) -> Tensor:
    """(B, T), T the most that the port takes."""
    return torch.randint(config.vocab_size, (batch, port.context(config)), generator=torch.Generator().manual_seed(1))
