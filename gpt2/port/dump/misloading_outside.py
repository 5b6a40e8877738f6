"""List the known faults of loading outside the blocks: embeddings, positions, last norm and head, as stages of a simulation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from gpt2.port.diagnosis.search import Fault
from gpt2.port.dump.misloading import normed, rounded
from gpt2.port.dump.simulation import Simulation, Stage, Stages
from gpt2.port.dump.variants import Replaced, Variant


def outside_variants() -> Iterator[Variant]:
    """Yield faults of loading outside the blocks: rows in other places, a reshaped position table."""
    for by in (1, -1, 2, -2):
        words = f"token t reads the checkpoint's row t {'-' if by > 0 else '+'} {abs(by)}"
        for head in (True, False):
            where = words if head else f"{words}, in the embedding and not in the head"
            yield _outside(f"rows {by} {head}", Fault("wrong-tensor", "wte", where), partial(_moved, by, head))
    for first in ("its own id", "id 0", "the last token's id"):
        words = f"each token is given the embedding of the token before it, the first that of {first}"
        fault = Fault("wrong-tensor", "wte", words)
        yield _outside(f"tokens late {first}", fault, partial(_late, first), all_tokens="last" in first)
    words = "the position table was reshaped where it had to be transposed"
    yield _outside("wpe reshaped", Fault("transposed", "wpe", words), _reshaped_positions)


def rounded_outside(dtype: str) -> Variant:
    """Return the rounding of embeddings, positions, last norm and head."""
    fault = Fault("reduced-precision", "", f"the weights are the checkpoint's rounded to {dtype}")
    return _outside(f"outside rounded to {dtype}", fault, partial(_all_rounded, dtype))


def _outside(label: str, fault: Fault, replaced: Replaced, *, all_tokens: bool = False) -> Variant:
    return Variant(label, lambda layer: (fault,), replaced, outside=True, all_tokens=all_tokens)


def _embedded(simulation: Simulation, words: Tensor, positions: Tensor) -> Stages:
    value = words[simulation.ids] + positions[: simulation.ids.shape[1]]
    return {"embed": lambda s: value}


def _moved(by: int, head: bool, simulation: Simulation, layer: int) -> Stages:
    words = simulation.state["wte.weight"]
    value = words[(simulation.ids - by) % len(words)] + simulation.state["wpe.weight"][: simulation.ids.shape[1]]
    stages: dict[str, Stage] = {"embed": lambda s: value}
    return stages | ({"head": lambda s: words.roll(by, 0)} if head else {})  # made when it runs: hundreds of programs wait


def _late(first: str, simulation: Simulation, layer: int) -> Stages:
    ids, words = simulation.ids, simulation.state["wte.weight"]
    start = {"its own id": ids[:, :1], "id 0": 0 * ids[:, :1], "the last token's id": ids[:, -1:]}[first]
    value = words[torch.cat([start, ids[:, :-1]], 1)] + simulation.state["wpe.weight"][: ids.shape[1]]
    return {"embed": lambda s: value}


def _reshaped_positions(simulation: Simulation, layer: int) -> Stages:
    wpe = simulation.state["wpe.weight"]
    return _embedded(simulation, simulation.state["wte.weight"], wpe.reshape(wpe.shape[::-1]).t())


def _all_rounded(dtype: str, simulation: Simulation, layer: int) -> Stages:
    names = ("wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias")
    quantised = dtype.startswith("int8")  # matrices alone
    wte, wpe, weight, bias = (
        simulation.state[name] if quantised and name.startswith("ln_f") else rounded(simulation.state[name], dtype)
        for name in names
    )
    norm = normed(simulation, "x", weight, bias)
    head = {"head": lambda s: rounded(simulation.state["wte.weight"], dtype)}  # made when it runs, as in _moved
    return {**_embedded(simulation, wte, wpe), "ln_f": norm, **head}
