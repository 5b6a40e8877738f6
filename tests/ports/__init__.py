"""GPT-2 as other people write it: modules of every structure we have met, for `load_into` and `diagnose` to be tried on.

Each file is one port, written as its author would, who has never heard of this project. It has `build(config)`, a module from
ids (B, T) to logits (B, T, V) (alone, first in a tuple, or as `.logits`), and `fill(module, state)`: the author's own loading
of a checkpoint, which proves in tests/test_ports.py that the port itself is right. `state` is by `gpt2.checkpoint.keys.TABLE`.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.config import GPT2Config


@dataclass(frozen=True)
class Port:
    """What a test needs to know of a port.

    ``lacks`` are the families of the checkpoint's table that it has no place for; ``room`` is the number of tokens that it takes,
    as a multiple of the checkpoint's positions; ``note`` says in words what is missing, "" where nothing is.
    """

    name: str
    description: str
    lacks: tuple[str, ...] = ()
    room: float = 1.0
    note: str = ""

    @property
    def complete(self) -> bool:
        """Whether it can hold all of the checkpoint."""
        return not self.lacks and self.room >= 1

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(f"{__name__}.{self.name}")

    def build(self, config: GPT2Config) -> nn.Module:
        """A fresh module of this port, in eval mode, from a fixed seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.module.build(config).eval()

    @property
    def fill(self) -> Callable[[nn.Module, dict[str, Tensor]], None]:
        return self.module.fill

    def context(self, config: GPT2Config) -> int:
        """The most tokens that both the port and the checkpoint can take."""
        return min(config.n_positions, int(self.room * config.n_positions))


def logits(output: Any, vocabulary: int) -> Tensor:
    """(B, T, V) out of whatever a port returns, padding of the vocabulary cut off."""
    if isinstance(output, tuple):
        output = output[0]
    return getattr(output, "logits", output)[..., :vocabulary]


QKV_BIAS, OUT_BIAS = "h.{}.attn.c_attn.bias", "h.{}.attn.c_proj.bias"
FC_BIAS, MLP_BIAS = "h.{}.mlp.c_fc.bias", "h.{}.mlp.c_proj.bias"
NORM_BIASES = ("h.{}.ln_1.bias", "h.{}.ln_2.bias", "ln_f.bias")

PORTS: dict[str, Port] = {
    port.name: port
    for port in (
        Port("nano", "one file, ModuleDict, fused Linear, SDPA, own LayerNorm, tied head, returns (logits, loss)"),
        Port("hub_like", "Conv1D, tril and masked-score buffers, optional key-value cache, returns an object with .logits"),
        Port("heads_list", "tutorial: a module per head with its own query, key, value; blocks in Sequential; head with bias"),
        Port("einsum", "projections as (H, D, K) and (H, K, D) tensors, LayerNorm w/b, untied W_U (D, V) with b_U"),
        Port("encoder_layer", "nn.TransformerEncoderLayer(norm_first) with tanh-GELU and a float mask"),
        Port("deutsch", "German names, separate q, k, v, LayerNorm with skala/versatz, schicht_0 ..., untied head, nested"),
        Port("flat_list", "functional: one ParameterList, no submodule, no name; embeddings stored as (D, V) and (D, P)"),
        Port("scan", "layers stacked in single tensors (L, D, 3, H, K), as JAX ports scan them"),
    )
}
