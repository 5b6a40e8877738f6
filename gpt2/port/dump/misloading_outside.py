"""List the known faults of loading outside the blocks: embeddings, positions, last norm and head, as stages of a simulation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from gpt2.port.diagnosis.search import Fault
from gpt2.port.dump.fits.rounding import narrowed
from gpt2.port.dump.misloading import normed
from gpt2.port.dump.simulation import Simulation, Stage, Stages, State
from gpt2.port.dump.variants import Replaced, Variant


def outside_variants(simulation: Simulation) -> Iterator[Variant]:
    """Yield faults of loading outside the blocks: rows in other places, a reshaped position table, ids in too few bits."""
    largest = int(simulation.ids.max())
    for bits in (bits for bits in (8, 16) if largest >= 1 << (bits - 1)):
        for signed in (False, True):
            if signed or largest >= 1 << bits:
                name = f"{'' if signed else 'u'}int{bits}"
                words = f"ids are stored as {name}, which has no room for all tokens"
                fault = Fault("wrong-tensor", "wte", words, fix="store token ids as int32 or int64")
                yield _outside(f"ids {name}", fault, partial(_narrow_ids, bits, signed))
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


def end_variants(simulation: Simulation) -> Iterator[Variant]:
    """Yield faults of loading behind the blocks: of the last norm and its parameters, and of the head's table."""
    words = "the head's table was reshaped where it had to be transposed"
    fault = Fault("transposed", "logits", words)
    yield _outside("head reshaped", fault, lambda simulation, layer: {"head": partial(_reshaped_table, simulation)})
    for by in (1, -1):
        moved = Fault("wrong-tensor", "logits", f"the head's row of token t is the checkpoint's row t {'-' if by > 0 else '+'} 1")
        yield _outside(f"head rows {by}", moved, partial(_head_moved, by))


def _reshaped_table(simulation: Simulation, _: State) -> Tensor:
    table = simulation.table
    return table.reshape(table.shape[::-1]).t()


def _head_moved(by: int, simulation: Simulation, layer: int) -> Stages:
    return {"head": lambda s: simulation.table.roll(by, 0)}


def _narrow_ids(bits: int, signed: bool, simulation: Simulation, layer: int) -> Stages:
    ids = simulation.ids % (1 << bits)
    ids = torch.where(signed & (ids >= 1 << (bits - 1)), ids - (1 << bits), ids) % len(simulation.state["wte.weight"])
    return _embedded(simulation, simulation.state["wte.weight"], simulation.state["wpe.weight"], ids)


def rounded_outside(dtype: str) -> Variant:
    """Return the rounding of embeddings, positions, last norm and head."""
    fault = Fault("reduced-precision", "", f"the weights are the checkpoint's rounded to {dtype}")
    return _outside(f"outside rounded to {dtype}", fault, partial(_all_rounded, dtype))


def _outside(label: str, fault: Fault, replaced: Replaced, *, all_tokens: bool = False) -> Variant:
    return Variant(label, lambda layer: (fault,), replaced, outside=True, all_tokens=all_tokens)


def _embedded(simulation: Simulation, words: Tensor, positions: Tensor, ids: Tensor | None = None) -> Stages:
    value = words[simulation.ids if ids is None else ids] + positions[: simulation.ids.shape[1]]
    return {"embed": lambda s: value}


def _moved(by: int, head: bool, simulation: Simulation, layer: int) -> Stages:
    words = simulation.state["wte.weight"]
    value = words[(simulation.ids - by) % len(words)] + simulation.state["wpe.weight"][: simulation.ids.shape[1]]
    stages: dict[str, Stage] = {"embed": lambda s: value}
    return stages | (
        {"head": lambda s: simulation.table.roll(by, 0)} if head else {}
    )  # made when it runs: hundreds of programs wait


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
        simulation.state[name] if quantised and name.startswith("ln_f") else narrowed(dtype, simulation.state[name])
        for name in names
    )
    norm = normed(simulation, "x", weight, bias)
    head = {"head": lambda s: narrowed(dtype, simulation.table)}  # made when it runs, as in _moved
    return {**_embedded(simulation, wte, wpe), "ln_f": norm, **head}
