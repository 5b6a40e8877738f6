"""Hundreds of GPT-2s with known faults, in nine architectures, to test `diagnose`.

An architecture is a file with `build(config, faults)`, in the style of its typical authors, and `fill(module, state)`, the
author's loading. A port is an architecture and a line of faults (`faults.py` defines the words); faults of the weights are
mistakes in reading the file (`loading.py`). tests/port/test_diagnosis_ports.py finds a fault of each cause, and the
architectures without faults equal.
"""

import importlib
import tomllib
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from gpt2.config import GPT2Config
from support.faulty.faults import MEANINGS, Faults, Meaning, matches
from support.faulty.loading import read, write

__all__ = ["ARCHITECTURES", "CONFIG", "COVERING", "FAULTY", "MEANINGS", "SOUND", "Faults", "Faulty", "matches", "write"]

# All sizes differ.
CONFIG = GPT2Config(vocab_size=67, n_positions=23, n_embd=20, n_layer=3, n_head=4, n_inner=52, bos_token_id=0, eos_token_id=0)

ARCHITECTURES = {
    "fused": "modules all the way down, one fused Linear, attention spelt out, tied",
    "functions": "bare functions over flat parameters, no submodule; separate projections",
    "heads": "a ModuleList of single heads, an untied head",
    "einsum3d": "einsum over (H, D, K) tensors, an untied head",
    "italiano": "another language, separate projections, scaled_dot_product_attention",
    "conv1d": "Conv1D, the checkpoint's names, cache, attention mask, an object out",
    "compiled": "fused, through torch.compile",
    "scanned": "layers stacked in single tensors, time first, bmm",
    "attentions": "attention in forms that no tutorial has; separate projections",
}


@dataclass(frozen=True)
class Faulty:
    """A port and its faults.

    ``line`` is the faults, "" for none. ``filled`` if `load_into` loads the checkpoint, and not the author's own code.
    """

    architecture: str
    line: str
    filled: bool = False

    @property
    def name(self) -> str:
        return f"{self.architecture}: {self.line or 'sound'}{' (load_into)' if self.filled else ''}"

    @property
    def faults(self) -> Faults:
        return Faults(self.line)

    @property
    def causes(self) -> dict[str, tuple[str, ...]]:
        """For each word of a fault: the ids of the causes that describe it, the best first."""
        return {word: MEANINGS[word].ids for word in self.faults.sites if word in MEANINGS}

    @staticmethod
    def meaning(word: str) -> Meaning:
        return MEANINGS[word]

    @property
    def points(self) -> tuple[str, ...]:
        """Points where the port may first differ from GPT-2; () if its logits need not differ."""
        return self.faults.first()

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
LINES: dict[str, list[str]] = {name: [*one["single"].split(), *one["several"]] for name, one in _FOUND.items()}


def _named(*ports: Faulty) -> dict[str, Faulty]:
    return {port.name: port for port in ports}


FAULTY = _named(
    *(Faulty(name, line) for name, lines in LINES.items() for line in lines),
    *(Faulty(name, line, filled=True) for name, lines in _LOADED.items() for line in lines),
)


def _covering(ports: dict[str, Faulty]) -> list[str]:
    """Names of a third of the ports: each fault, alone where it can be, from the architecture with the fewest so far.

    So each id of a cause is there as well. One port of each architecture that `load_into` fills is added.
    """
    homes: dict[str, list[str]] = {}
    for name, port in ports.items():
        for key in port.causes if not port.filled else [port.architecture]:
            homes.setdefault(key, []).append(name)
    chosen, there = Counter[str](), dict[str, None]()
    for names in homes.values():
        if not there.keys() & {*names}:
            name = min(names, key=lambda name: (len(ports[name].causes), chosen[ports[name].architecture]))
            chosen[ports[name].architecture] += 1
            there[name] = None
    return list(there)


COVERING = _covering(FAULTY)
# The same architectures without a fault.
_RIGHT = [Faulty(name, "") for name in LINES]
SOUND = _named(
    *_RIGHT,
    *(Faulty(name, line) for name, lines in _SOUND.items() for line in lines.split()),
    *(replace(port, filled=True) for port in _RIGHT),
)
