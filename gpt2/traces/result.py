"""The result of ``gpt2.trace``: arrays by name, and everything that is needed to compute them again."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from gpt2 import __version__
from gpt2.config import GPT2Config
from gpt2.measure.environment import Environment, dtype_label
from gpt2.measure.tracing import layer_of
from gpt2.pages.reports import Printed, Section, as_json, numbers
from gpt2.traces.arrays import meaning
from gpt2.traces.files import write

FIRST = 3  # values shown of each array


@dataclass(frozen=True)
class Trace(Printed):
    """What the reference computes on ``arrays["ids"]``: float64 arithmetic, kept in ``dtype``.

    ``arrays`` are tensors by name, in the order of computation: ``ids`` (B, T), int32; the points of a forward pass under the
    checkpoint's names (``h.0.attn.q``, ``logits``; :mod:`gpt2.measure.tracing`); with gradients ``targets``, ``loss`` and
    ``grad.wte.weight``; with steps ``losses`` and ``step1.wte.weight``. ``ids_from`` says where the ids came from, ``files``
    are the checkpoint's with their sha256.
    """

    model: str
    revision: str | None
    ids_from: str
    dtype: str
    arrays: Mapping[str, Tensor] = field(repr=False)
    config: GPT2Config
    files: Mapping[str, str]
    environment: Environment
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def about(self) -> dict[str, Any]:
        """Everything but the arrays' values, as it is written beside them."""
        items = self.arrays.items()
        rows = [{"name": n, "shape": list(x.shape), "dtype": dtype_label(x.dtype), "meaning": meaning(n)} for n, x in items]
        return {
            "format": "gpt2-toolkit trace",
            "version": __version__,
            "model": self.model,
            "revision": self.revision,
            "ids_from": self.ids_from,
            "computed": "float64",
            "stored": self.dtype,
            "config": self.config,
            "files": dict(self.files),
            "environment": self.environment,
            **({"settings": dict(self.settings)} if self.settings else {}),
            "arrays": rows,
        }

    def save(self, path: str | Path) -> Path:
        """Write the arrays: ``.safetensors``, ``.npz``, llm.c's ``.bin``, or a directory of ``.npy`` with ``index.json``.

        All is written aside, synced and renamed. ``.bin`` holds ids, targets, logits, loss and gradients, in float32.

        Raises InputError: another suffix, a folder with other files in it, no room, or for ``.bin`` no gradients, a token
        without a next one, or a model that llm.c cannot express.
        """
        return write(Path(path), self.arrays, self.about)

    def to_json(self, indent: int | None = 2) -> str:
        """Return everything but the arrays, with their names, shapes and meanings, and the loss."""
        losses = {name: self.arrays[name].tolist() for name in ("loss", "losses") if name in self.arrays}
        return as_json({**self.about, **losses}, indent)

    def sections(self) -> Iterator[Section]:
        """Yield where the ids are from, a table of the first block and the residual stream, and the number of arrays."""
        count, tokens = self.arrays["ids"].shape
        yield Section(note=f"{self.model}: {count} x {tokens} tokens of {self.ids_from}")
        rows = []
        for name, tensor in self.arrays.items():
            block = layer_of(name)
            if name.startswith(("grad.", "step")) or (block and name != f"h.{block}"):
                continue
            values = tensor.flatten()
            shown = values[:FIRST].tolist() + ([] if values.numel() <= FIRST else ["..."])
            texts = [f"{value:.6g}" if isinstance(value, float) else str(value) for value in shown]
            rms = f"{values.double().square().mean().sqrt().item():.4g}" if values.is_floating_point() else ""
            rows.append((name, "x".join(map(str, tensor.shape)), rms, " ".join(texts)))
        yield Section(columns=("array", "shape", *numbers("RMS"), "first values"), rows=rows)
        size, left_out = sum(tensor.nbytes for tensor in self.arrays.values()), len(self.arrays) - len(rows)
        more = f", {left_out} of them not shown" if left_out else ""
        yield Section(note=f"{len(self.arrays)} arrays{more}, {self.dtype}, {size / 1e6:,.1f} MB; computed in float64")
