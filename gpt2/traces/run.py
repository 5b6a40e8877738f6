"""``gpt2.trace``: compute the reference's numbers on a few tokens, to compare another program with."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt2 import __version__
from gpt2.checkpoint.checkpoint import Checkpoint, open_checkpoint
from gpt2.checkpoint.loading import require_device, require_intact
from gpt2.checkpoint.names import DEFAULT, FLOATS, ModelName, Name
from gpt2.checkpoint.saving import sha256
from gpt2.config import GPT2Config, quoted
from gpt2.errors import InputError
from gpt2.measure.dumps import as_ids
from gpt2.measure.environment import Environment, dtype_label, environment
from gpt2.measure.metrics import Progress, silent
from gpt2.measure.placement import placed
from gpt2.measure.tracing import layer_of
from gpt2.pages.reports import Printed, Section, as_json, numbers
from gpt2.traces import arrays
from gpt2.traces.arrays import meaning
from gpt2.traces.batch import NO_TARGET, TokenRows, default_batch, read_ids
from gpt2.traces.files import write

FIRST = 3  # values shown of each array
STORED = ("float32", "float64", "float16")  # NumPy has no bfloat16
MAX_STEPS = 1000
Targets = Tensor | np.ndarray
Ids = str | Path | Targets | list[int] | list[list[int]]


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
        return write(path, self.arrays, self.about)

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


def trace(
    name: Name = DEFAULT,
    *,
    ids: Ids | None = None,
    targets: Targets | None = None,
    text: str | Path | None = None,
    tokens: int | None = None,
    gradients: bool = False,
    steps: int = 0,
    settings: Mapping[str, object] | None = None,
    dtype: "str" = "float32",
    device: "str | torch.device | None" = None,
    revision: str | None = None,
    offline: bool = False,
    progress: Progress = silent,
) -> Trace:
    """Run a model on a few tokens in float64 on the CPU, and return every intermediate under the checkpoint's names.

    Args:
        name: a model name as in :func:`gpt2.load`; with a suffix such as ``:bf16`` its weights are rounded first.
        ids: token ids, (T,) or (B, T), or a file of them: ``.npy``, or a text of whole numbers, one line a row. Default: 4 rows
            of 64 tokens of Twelfth Night; random ids for a model without a tokenizer.
        targets: the next id of each of the ``ids``, of the same shape, -100 where there is none. Default: the next one in the
            row, and none for its last.
        text: a text to take the ids from, by name or file as in ``gpt2 compare --on``.
        tokens: how many tokens a row has.
        gradients: also compute ``loss``, the mean next-token cross-entropy in nats, and its gradient by every parameter.
        steps: train for so many AdamW steps on the same batch; add every parameter after each (``step1.wte.weight``) and
            ``losses``, before the first step and after each.
        settings: of these steps, by a recipe's keys: optim.lr, optim.beta1, optim.beta2, optim.weight_decay, optim.clip. Default:
            a recipe's. The rate is constant, eps 1e-8; matrices and embeddings decay; there is no dropout.
        device: run in float32 there instead, as for :func:`gpt2.load`: what a device computes, not the reference.
        dtype: what the arrays are kept in: "float32", "float64" or "float16".

    Raises:
        InputError: no such model, ids, text or dtype, ids outside the vocabulary, more tokens than positions, or values that
            ``dtype`` cannot hold. CheckpointError: the checkpoint cannot be read.
    """
    if (kept_name := FLOATS.get(str(dtype), str(dtype))) not in STORED:
        raise InputError(f"unknown dtype {quoted(dtype)} to store arrays in; use {', '.join(STORED)}")
    kept: torch.dtype = getattr(torch, kept_name)
    if settings and not steps:
        raise InputError("settings are of training steps, and none are asked for; give steps")
    if not 0 <= steps <= MAX_STEPS:
        raise InputError(f"steps is {steps}; give 0 to {MAX_STEPS}")
    optim = arrays.optim_of(settings or {})
    where = None if device is None else require_device(device)
    checkpoint = open_checkpoint(ModelName.parse(name, FLOATS, revision=revision), offline=offline)
    batch = _batch(checkpoint, ids, targets, text, tokens, offline)
    copies = gradients + steps
    arrays.require_room(checkpoint.config, batch, copies, kept.itemsize, trains=bool(copies))
    progress("sha256 of the files")
    files = {file: sha256(path) for file, path in checkpoint.files().items()}
    progress("loading")
    model = checkpoint.load().double() if where is None else placed(checkpoint.load().float(), where)
    require_intact(model, name := str(name))
    found = dict(arrays.forward(model, batch, kept, progress))
    if gradients or steps:
        progress("gradients")
        found |= arrays.gradients(model, batch, kept, loss_only=not gradients)
    if steps:
        found |= arrays.step(model, batch, steps, optim, kept, progress)
    env = environment([model.wte.weight.dtype], model.wte.weight.device)
    made = found, checkpoint.config, files, env, arrays.described(optim) if steps else {}
    return Trace(name, checkpoint.revision, batch.source, kept_name, *made)


def _batch(
    checkpoint: Checkpoint, ids: Ids | None, targets: Targets | None, text: str | Path | None, tokens: int | None, offline: bool
) -> TokenRows:
    if ids is None:
        if targets is not None:
            raise InputError("targets are the next ids of given ids; give ids too")
        return default_batch(checkpoint, text, tokens, offline=offline)
    if text is not None or tokens is not None:
        raise InputError(f"ids are given, so {'text' if text is not None else 'tokens'} has no effect; give one of them")
    what = str(ids) if isinstance(ids, str | Path) else "ids"
    rows = as_ids(read_ids(ids) if isinstance(ids, str | Path) else ids, what, checkpoint.config)
    if targets is None:
        following = torch.cat((rows[:, 1:], rows.new_full((len(rows), 1), NO_TARGET)), dim=1)
    else:
        following = as_ids(targets, "targets", checkpoint.config, also=NO_TARGET)
        if following.shape != rows.shape:
            raise InputError(f"targets: have the shape {list(following.shape)}, the ids {list(rows.shape)}; give one for each id")
    return TokenRows(rows, following, "the ids given" if what == "ids" else what)
