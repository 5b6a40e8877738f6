"""GPT-2 as other people write it: modules of every structure we have met, for `load_into` and `diagnose` to be tried on.

Each file is one port, written as its author would, who has never heard of this project. It has `build(config)`, a module from
ids (B, T) to logits (B, T, V) (alone, first in a tuple, or as `.logits`), and `fill(module, state)`: the author's own loading
of a checkpoint, which shows in tests/port/test_ports.py that the port itself is right. `state` has the names of
`gpt2.checkpoint.keys.TABLE`.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn

from gpt2.config import GPT2Config


@dataclass(frozen=True)
class Port:
    """What a test needs to know of a port.

    ``note`` says in words why it cannot hold the checkpoint as it is, "" if it can. ``lacks`` are the families of the
    checkpoint's table that it has no place for; ``room`` is the number of tokens that it takes, as a multiple of the
    checkpoint's positions; ``spare`` is in the names of parameters that are no part of GPT-2 and change nothing;
    ``whole_windows`` if it takes as many tokens as it has positions, and no fewer.
    """

    name: str
    description: str
    note: str = ""
    lacks: tuple[str, ...] = ()
    room: float = 1.0
    exact: bool = True
    spare: str = ""
    whole_windows: bool = False

    @property
    def complete(self) -> bool:
        """Whether it can hold all of the checkpoint, as it is."""
        return not self.note

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

    def weights(self, module: nn.Module) -> dict[str, Tensor]:
        """What the checkpoint fills: the parameters, or the floating buffers of a module that has no parameters."""
        found = dict(module.named_parameters()) or dict(module.named_buffers())
        return {name: tensor for name, tensor in found.items() if not (self.spare and self.spare in name)}


def logits(module: nn.Module, ids: Tensor, vocabulary: int) -> Tensor:
    """(B, T, V) out of whatever a port returns: in a tuple, a dictionary, an object, padded, or of the last position only."""

    def once(tokens: Tensor) -> Tensor:
        output = module(tokens)
        if isinstance(output, dict):
            output = output["logits"]
        if isinstance(output, tuple):
            output = next(one for one in output if one is not None and one.ndim == 3)
        return getattr(output, "logits", output)[..., :vocabulary]

    found = once(ids)
    if found.size(1) == ids.size(1):
        return found
    return torch.cat([once(ids[:, : length + 1]) for length in range(ids.size(1))], dim=1)


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
        Port("mha", "nn.MultiheadAttention, mlp as nn.Sequential, layer1, layer2 ... as attributes, positions (1, P, D)"),
        Port("interleaved", "fused projection interleaved per head (H, 3, K), vocabulary padded to 64, -1e9 mask and id buffers"),
        Port("kqv", "fused in the order k, q, v; time first (T, B, D) inside; three levels deep; mlp declared before attention"),
        Port("prenorm", "fused (K, H, 3), heads merged (K, H), PreNorm wrappers, last norm inside the head's nn.Sequential"),
        Port("russkiy", "Russian names, gamma/beta, head as an untied Parameter, positions (P, D), blocks in a ModuleDict"),
        Port(
            "pinyin", "Chinese names, scale/shift, ln_2 declared before ln_1, q scaled before the product, blocks in Sequential"
        ),
        Port("espanol", "Spanish names, the whole model one nn.Sequential, v and k before q, twice the positions", room=2.0),
        Port("letters", "one ParameterDict a0, b0 ...; words and positions in one table, each norm a (2, D) tensor"),
        Port(
            "channels", "nn.Conv1d of width one over (B, D, T), norms (1, D, 1), kinds in lists of their own, positions (1, D, P)"
        ),
        Port(
            "backwards",
            "declared in reverse: head first, ln_f before the blocks, blocks run from last to first; tied, with a bias",
        ),
        Port("kv_joint", "built in bfloat16, to_q beside to_kv, all norms in one list, cache of k^T"),
        Port("one_hot", "embeddings as Linear over one-hot vectors, a module per head with an output projection of its own"),
        Port("dense", "einsum kernels (D, H, K) and (H, K, D), gamma/beta, embeddings in ParameterDicts"),
        Port("augmented", "each bias is the last row of its matrix"),
        Port("lecture", "the tutorial as it is: a module per head, without biases", "no qkv bias", (QKV_BIAS,)),
        Port("no_out_bias", "separate q, k, v with biases, output without", "no attention output bias", (OUT_BIAS,)),
        Port(
            "bare",
            "no biases anywhere, not in the norms either",
            "no biases at all",
            (QKV_BIAS, OUT_BIAS, FC_BIAS, MLP_BIAS, *NORM_BIASES),
        ),
        Port("short", "fused (3, H, D, K), norms in ParameterLists", "half the positions", room=0.5),
        Port("closure", "feed-forward and embeddings are lambdas over the module's own layers; softmax as exp over sum; untied"),
        Port("last_only", "logits of the last position only; parts in ModuleDicts, blocks layer_01, layer_02 ..."),
        Port("adapters", "low-rank A and B beside every weight, B zero", spare="lora_"),
        Port("stepwise", "a recurrent network: one token at a time, lists of keys and values, heads cut out by slicing"),
        Port("sharded", "tensor parallel over two ranks: columns, rows, heads and vocabulary cut unevenly, sums added up"),
        Port("lazy", "nn.LazyLinear: no weight has a shape before the first call"),
        Port("frozen", "weights are buffers, no parameters; q, k, v concatenated on every call"),
        Port("fixed", "whole windows only, custom autograd.Function, in-place arithmetic, a loop over heads", whole_windows=True),
        Port("equalised", "every matrix multiplied by 1/sqrt(n_in) whenever it is used", exact=False),
        Port("centred", "norms store their distance from one, positions are scaled down whenever they are used", exact=False),
        Port("shifted", "ids begin at 1 and positions at 2, tables with rows that are never read; returns a dictionary"),
        Port(
            "tiled",
            "flash attention over tiles; a value head that the logits do not see; returns (values, logits)",
            spare="value_",
        ),
        Port("vmapped", "pure functions of one sequence and one head, under torch.vmap; parameters in a tree of modules"),
    )
}
