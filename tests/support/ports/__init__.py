"""GPT-2 as other people write it: modules of every known structure, to test `load_into` and `diagnose`.

Each file is one port, in the style of an author outside this project; `parts.py` is what many have in common. It has
`build(config)`, a module from ids (B, T) to logits (B, T, V) (alone, first in a tuple, or as `.logits`), and
`fill(module, state)`: the author's own loading of a checkpoint, by which tests/port/test_load_into_ports.py shows that it is
correct. The architectures of tests/support/faulty are ports too: without faults, or with a missing bias only.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor, nn

from gpt2.config import GPT2Config
from support import hf_layouts
from support.faulty import CONFIG
from support.faulty.faults import Faults
from support.faulty.loading import named_parts, put

__all__ = ["ALIKE", "CONFIGS", "PORTS", "Port", "logits", "put"]

# CONFIG: all sizes differ. ALIKE: nearly all are equal (F == 3D, H == K, P == D).
ALIKE = GPT2Config(vocab_size=48, n_positions=16, n_embd=16, n_layer=2, n_head=4, n_inner=48, bos_token_id=0, eos_token_id=0)
CONFIGS = {"tiny": hf_layouts.TINY, "apart": CONFIG, "alike": ALIKE}


@dataclass(frozen=True)
class Port:
    """A port and its properties for the tests.

    ``lacks`` are the families of the checkpoint's table without a place in the port; ``exact`` is false if it stores other
    numbers than the checkpoint's; ``spare`` is a part of the names of parameters that are not in GPT-2 and have no effect.
    ``home`` is its module within tests/support, and ``options`` go to that module's `build`.
    """

    name: str
    description: str
    lacks: tuple[str, ...] = ()
    exact: bool = True
    spare: str = ""
    home: str = ""
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether it can hold the whole checkpoint unchanged."""
        return not self.lacks

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(f"support.{self.home or 'ports.' + self.name}")

    def build(self, config: GPT2Config) -> nn.Module:
        """A fresh module of this port, in eval mode, from a fixed seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.module.build(config, **self.options).eval()

    @torch.no_grad()
    def fill(self, module: nn.Module, state: Mapping[str, Tensor]) -> None:
        """The author's own loading of a checkpoint."""
        self.module.fill(module, named_parts(state))

    def some_ids(self, config: GPT2Config, batch: int) -> Tensor:
        """Random ids (B, T) of a whole context."""
        return torch.randint(config.vocab_size, (batch, config.n_positions), generator=torch.Generator().manual_seed(1))

    def weights(self, module: nn.Module) -> dict[str, Tensor]:
        """The tensors that the checkpoint fills: the parameters, or the floating-point buffers of a module without parameters."""
        found = dict(module.named_parameters()) or dict(module.named_buffers())
        return {name: tensor for name, tensor in found.items() if not (self.spare and self.spare in name)}


def logits(module: nn.Module, ids: Tensor, vocabulary: int) -> Tensor:
    """Logits (B, T, V) from any output of a port: in a tuple (widest), a dictionary, an object, padded, flat, or last alone."""

    def once(tokens: Tensor) -> Tensor:
        output = module(tokens)
        if isinstance(output, dict):
            output = output["logits"]
        if isinstance(output, tuple):
            output = max((one for one in output if isinstance(one, Tensor) and one.ndim > 1), key=lambda one: one.size(-1))
        output = getattr(output, "logits", output)
        return output.reshape(len(tokens), -1, output.size(-1))[..., :vocabulary]

    found = once(ids)
    if found.size(1) == ids.size(1):
        return found
    return torch.cat([once(ids[:, : length + 1]) for length in range(ids.size(1))], dim=1)


QKV_BIAS, OUT_BIAS = "h.{}.attn.c_attn.bias", "h.{}.attn.c_proj.bias"
ALL_BIASES = tuple(f"h.{{}}.{part}.bias" for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "ln_1", "ln_2"))
RIGHT = {"faults": Faults("")}

_PORTS = (
    Port("heads", "a module per head, each with its own query, key, value", home="faulty.heads", options=RIGHT),
    Port("einsum3d", "projections as (H, D, K) and (H, K, D) tensors, untied W_U (D, V)", home="faulty.einsum3d", options=RIGHT),
    Port("conv1d", "Conv1D, key-value cache, attention mask, an object with .logits", home="faulty.conv1d", options=RIGHT),
    Port("nano", "one file, ModuleDict, fused Linear, SDPA, own LayerNorm, tied head, returns (logits, loss)"),
    Port("encoder_layer", "nn.TransformerEncoderLayer(norm_first) with tanh-GELU and a float mask"),
    Port("mha", "nn.MultiheadAttention, mlp as nn.Sequential, layer1, layer2 ... as attributes, positions (1, P, D)"),
    Port("interleaved", "fused projection interleaved per head (H, 3, K), vocabulary padded to 64, -1e9 mask and id buffers"),
    Port("last_only", "logits of the last position only"),
    Port("adapters", "low-rank A and B beside every weight, B zero", spare="lora_"),
    Port("lazy", "nn.LazyLinear: no weight has a shape before the first call; the head has a bias"),
    Port("frozen", "weights are buffers, no parameters"),
    Port("centred", "norms store their distance from one; matrices and positions are scaled when they are used", exact=False),
    # These cannot hold all of the checkpoint.
    Port("bare", "nano without biases, in norms too", (*ALL_BIASES, "ln_f.bias"), home="ports.nano", options={"bias": False}),
    Port("lecture", "heads without biases", (QKV_BIAS,), home="faulty.heads", options={"faults": Faults("no-qkv-bias")}),
    Port("no_out_bias", "fused without a bias", (OUT_BIAS,), home="faulty.fused", options={"faults": Faults("no-out-bias")}),
)
PORTS = {port.name: port for port in _PORTS}
