"""All the layouts in which an array may hold parameters: a tensor, transposed, a stack over the layers, a flat vector of all.

A *unit* is a parameter by the checkpoint's name, or a third of ``attn.c_attn`` ("h.0.attn.c_attn.weight:q").
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from gpt2.checkpoint.containers.llmc_file import order
from gpt2.config import GPT2Config
from gpt2.port.step.expected import TABLE

LETTERS = "qkv"
MAX_PADDED_ROWS = 128  # of the token embedding
View = dict[str, Tensor]  # arrays by unit, in the checkpoint's layout


def units_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's tensors by unit."""
    thirds = ((name, tensor.chunk(3, -1)) for name, tensor in state.items() if ".attn.c_attn." in name)
    return {**state, **{f"{name}:{letter}": part for name, parts in thirds for letter, part in zip(LETTERS, parts, strict=True)}}


def joined(view: Mapping[str, Tensor]) -> View:
    """Return the tensors by the checkpoint's names: thirds are put together where all three are there."""
    whole = {name: tensor for name, tensor in view.items() if ":" not in name}
    for name in {name.partition(":")[0] for name in view} - whole.keys():
        parts = [view[one] for letter in LETTERS if (one := f"{name}:{letter}") in view]
        whole |= {name: torch.cat(parts, -1)} if len(parts) == len(LETTERS) else {}
    return whole


class Layouts:
    """All the ways in which arrays may hold the parameters of a model with these ``shapes``."""

    def __init__(self, units: Mapping[str, Tensor], config: GPT2Config) -> None:
        self.shapes = {name: tuple(tensor.shape) for name, tensor in units.items()}
        self.layers, self.vocabulary, self.width = config.n_layer, config.vocab_size, config.n_embd
        self.by_size: dict[int, list[str]] = {}
        for name, tensor in units.items():
            self.by_size.setdefault(tensor.numel(), []).append(name)
        whole = [name for name in self.shapes if ":" not in name]
        self.total = sum(units[name].numel() for name in whole)
        self.orders = [whole, list(order(self.layers)), sorted(whole)]

    def views(self, array: Tensor) -> Iterator[View]:
        """Yield every view of an array."""
        for name in self.by_size.get(array.numel(), ()):
            yield from ({name: tensor} for tensor in _oriented(array, self.shapes[name]))
        squeezed = array.squeeze()
        for padded in (squeezed, squeezed.t()) if squeezed.ndim == 2 else ():
            if self.vocabulary < padded.shape[0] <= self.vocabulary + MAX_PADDED_ROWS and padded.shape[1] == self.width:
                yield {TABLE: padded[: self.vocabulary]}
        if array.ndim > 1 and array.shape[0] == self.layers:
            for name in self.by_size.get(array[0].numel(), ()):
                if name.startswith("h.0."):
                    names = [name.replace("h.0.", f"h.{layer}.", 1) for layer in range(self.layers)]
                    for laid in zip(*(_oriented(part, self.shapes[name]) for part in array), strict=True):
                        yield dict(zip(names, laid, strict=True))
        if array.ndim <= 2 and array.numel() >= self.total - self.vocabulary * self.width:
            yield from self._flat(array.reshape(-1))

    def _flat(self, flat: Tensor) -> Iterator[View]:
        padding = flat.numel() - self.total
        if padding < 0 or padding % self.width or padding > MAX_PADDED_ROWS * self.width:
            return
        for names, turned in itertools.product(self.orders, (False, True)):
            view, at = View(), 0
            for name in names:
                shape, size = self.shapes[name], math.prod(self.shapes[name])
                turn = turned and len(shape) == 2 and name.startswith("h.")
                part = flat[at : at + size]
                view[name] = part.reshape(shape[::-1]).t() if turn else part.reshape(shape)
                at += size + padding * (name == TABLE)
            yield view


def _oriented(array: Tensor, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Yield an array as a tensor of ``shape``, as it is and transposed."""
    squeezed = array.squeeze()
    if len(shape) == 1:
        yield from [array.reshape(shape)] if squeezed.ndim <= 2 else []
        return
    if squeezed.ndim != 2 or tuple(squeezed.shape) == shape:
        yield array.reshape(shape)
    if squeezed.ndim != 2 or tuple(squeezed.shape) == shape[::-1]:
        yield array.reshape(shape[::-1]).t()
