"""GPT-2s with known faults, in seven architectures, to test `diagnose`.

An architecture is a file with `build(config, faults)`, in the style of its typical authors, and `fill(module, state)`, the
author's loading. A port is an architecture and a line of faults (`faults.py` defines the words); faults of the weights are
mistakes in reading the file (`loading.py`). An architecture has the faults that its way of writing makes a case of its own;
tests/port/test_alternatives.py has the others, from the table. tests/port/test_diagnosis_ports.py finds each of these ports
faulty, and the architectures without faults equal.
"""

import importlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from gpt2.config import GPT2Config
from support.faulty.faults import Faults
from support.faulty.loading import read, write

__all__ = ["ARCHITECTURES", "CONFIG", "FAULTY", "ONE", "SOUND", "TWO", "Faults", "Faulty", "write"]

# All sizes differ.
CONFIG = GPT2Config(vocab_size=67, n_positions=23, n_embd=20, n_layer=3, n_head=4, n_inner=52, bos_token_id=0, eos_token_id=0)
ONE, TWO = (replace(CONFIG, n_layer=layers) for layers in (1, 2))  # a diagnosis takes a half of the time, and two thirds

ARCHITECTURES = {
    "fused": "modules all the way down, one fused Linear, attention spelt out, tied",
    "heads": "a ModuleList of single heads, an untied head",
    "einsum3d": "einsum over (H, D, K) tensors, an untied head",
    "italiano": "another language, separate projections, scaled_dot_product_attention, keys and values kept",
    "conv1d": "Conv1D, the checkpoint's names, cache, attention mask, an object out",
    "compiled": "fused, through torch.compile",
}


@dataclass(frozen=True)
class Faulty:
    """A port and its faults.

    ``line`` is the faults, "" for none. ``filled`` if `load_into` loads the checkpoint, and not the author's own code. ``truth``
    is the point where it first differs from GPT-2, and the causes ("id place") that name its faults, the worst first.
    """

    architecture: str
    line: str
    filled: bool = False
    truth: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.architecture}: {self.line or 'sound'}{' (load_into)' if self.filled else ''}"

    @property
    def faults(self) -> Faults:
        return Faults(self.line)

    def build(self, config: GPT2Config, directory: str | Path) -> nn.Module:
        """The module, filled by its author unless `load_into` must fill it; from a fixed seed, in eval mode."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            file = importlib.import_module(f"{__name__}.{self.architecture}")
            module = file.build(config, self.faults)
        if not self.filled:
            with torch.no_grad():
                file.fill(module, read(directory, config, self.faults))
        return module.eval()


_FOUND = tomllib.loads(Path(__file__).with_name("lines.toml").read_text())
_LOADED, _SOUND = _FOUND.pop("load_into"), _FOUND.pop("sound")


def _named(found: Mapping[str, Mapping[str, Sequence[str]]], filled: bool = False) -> dict[str, Faulty]:
    ports = [Faulty(name, line, filled, tuple(truth)) for name, lines in found.items() for line, truth in lines.items()]
    return {port.name: port for port in ports}


FAULTY = _named(_FOUND) | _named(_LOADED, filled=True)
# The same architectures without a fault.
SOUND = _named({name: {"": (), **dict.fromkeys(_SOUND.get(name, ()), ())} for name in ARCHITECTURES})
