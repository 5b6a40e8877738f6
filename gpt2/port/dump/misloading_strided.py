"""List the faults of a file that stacks each kind of tensor over the blocks: a block's tensor begins at a wrong multiple."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gpt2.port.diagnosis.search import Fault
from gpt2.port.dump.misloading import READERS, reading
from gpt2.port.dump.simulation import Simulation, Stages
from gpt2.port.dump.variants import Variant

WIDE = ("attn.c_attn", "mlp.c_fc", "mlp.c_proj")  # of more numbers than width times width


def strided_variants(simulation: Simulation) -> Iterator[Variant]:
    """Yield tensors of which block n's begins n squares of the width behind the first's, or n widths, if it is a bias."""
    width = simulation.config.n_embd
    if simulation.config.n_layer == 1:
        return
    for module in WIDE:
        for name, turned in ((f"{module}.weight", False), (f"{module}.weight", True), (f"{module}.bias", False)):
            stride, size = width * width if name.endswith("weight") else width, simulation.weights(0)[name].numel()
            if size == stride:
                continue
            words = f"block n reads it from number {stride} n on of all blocks' tensors, which have {size} each"
            words += ", stored as [out, in]" * turned
            fault = Fault("wrong-tensor", name, words)
            yield replace(Variant.of(f"{name} {words}", [fault], partial(_strided, name, turned, stride)), shared=True)


def _strided(name: str, turned: bool, stride: int, simulation: Simulation, layer: int) -> Stages:
    if layer == 0:
        return {}

    this = object()

    def held() -> dict[str, Tensor]:
        return simulation.remember("strided", this, make)  # of one variant and block at a time

    def make() -> dict[str, Tensor]:
        size = simulation.weights(0)[name].numel()
        first, begin = divmod(layer * stride, size)
        both = [simulation.weights(n)[name] for n in (first, min(first + 1, layer))]
        flat = torch.cat([(one.T if turned else one).flatten() for one in both])
        shape = both[0].T.shape if turned else both[0].shape
        own = flat[begin : begin + size].view(shape)
        return {name: own.T if turned else own}

    return {stage: reading(simulation, layer, stage, held) for stage in READERS[name.rpartition(".")[0]]}
