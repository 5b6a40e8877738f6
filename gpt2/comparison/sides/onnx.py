"""``onnx/FILE_OR_DIR``: a graph from ``input_ids`` to ``logits``, with or without a cache, run by ONNX Runtime."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.checkpoint.containers import read_json
from gpt2.comparison.sides.engine import EngineSide
from gpt2.errors import InputError

NAMES = ("model.onnx", "decoder_model.onnx", "decoder_model_merged.onnx", "onnx/model.onnx")
TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64, "tensor(int32)": np.int32}


@dataclass(eq=False)
class OnnxSide(EngineSide):
    prefix, package, module, extra = "onnx/", "onnxruntime", "onnxruntime", "onnx"
    wanted = "a graph, as in onnx/model.onnx, or its folder"

    def located(self) -> Path:
        if not self.path.is_dir():
            return super().located()
        graphs = [file for name in NAMES if (file := self.path / name).is_file()][:1] or sorted(self.path.glob("*.onnx"))
        if len(graphs) != 1:
            raise InputError(f"{self.name}: the folder holds {len(graphs) or 'no'} .onnx files; give the path of one")
        return graphs[0]

    @property
    def parts(self) -> tuple[Path, ...]:
        data = self.path.with_name(f"{self.path.name}.data"), self.path.with_name(f"{self.path.name}_data")
        return (self.path, *(path for path in data if path.is_file()))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The whole numbers of the ``config.json`` beside the graph, or in the folder above it; none if there is none."""
        files = (folder / "config.json" for folder in (self.folder, self.folder.parent))
        found = next((read_json(file) for file in files if file.is_file()), {})
        return {name: value for name, value in found.items() if isinstance(value, int)}

    n_positions = property(lambda self: self.sizes.get("n_positions"))
    vocab_size = property(lambda self: self.sizes.get("vocab_size"))

    def load(self, stack: ExitStack) -> Any:
        package = self.engine()
        options = package.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
        return self.ask(lambda: package.InferenceSession(str(self.path), options, providers=["CPUExecutionProvider"]))

    def run(self, ids: Tensor) -> Tensor:
        inputs = {each.name: each for each in self.program.get_inputs()}
        if "input_ids" not in inputs:
            raise InputError(f"{self.name}: the graph takes {', '.join(inputs)}; export one that takes input_ids")
        rows, length = inputs["input_ids"].shape
        if isinstance(length, int) and length < ids.size(1):
            raise InputError(f"{self.name}: the graph takes {length} tokens; compare with --on TEXT:context={length}")
        padded = F.pad(ids, (0, length - ids.size(1))) if isinstance(length, int) else ids  # later tokens change nothing
        if isinstance(rows, int):  # a graph of so many rows: those that lack are copies of the first
            padded = torch.cat((padded, padded[:1].expand(-len(ids) % rows, -1)))
        parts = padded.split(rows) if isinstance(rows, int) else (padded,)
        return torch.cat([self._run(part, inputs) for part in parts])[: len(ids), : ids.size(1)]

    def _run(self, ids: Tensor, inputs: dict[str, Any]) -> Tensor:
        ones = np.ones(ids.shape)
        feeds = {"input_ids": ids.numpy(), "attention_mask": ones, "position_ids": ones.cumsum(1) - 1}
        feeds["use_cache_branch"] = np.zeros(1)
        feeds |= {name: self._empty(each, len(ids)) for name, each in inputs.items() if name not in feeds}
        feeds = {name: feeds[name].astype(TYPES.get(each.type, bool)) for name, each in inputs.items()}
        outputs = [each.name for each in self.program.get_outputs()]
        wanted = "logits" if "logits" in outputs else outputs[0]
        (logits,) = self.ask(lambda: self.program.run([wanted], feeds))
        if logits.ndim != 3 or logits.shape[:2] != tuple(ids.shape):
            raise InputError(f"{self.name}: its output {wanted} has the shape {logits.shape}, not (rows, tokens, vocabulary)")
        return torch.from_numpy(logits)

    def _empty(self, each: Any, rows: int) -> np.ndarray[Any, Any]:
        """Return the empty cache that the graph takes as an input: (rows, heads, 0, width of a head)."""
        if each.name.startswith("past") and len(each.shape) == 4:
            heads, width = (size if isinstance(size, int) else 0 for size in each.shape[1::2])
            heads = heads or self.sizes.get("n_head", 0)
            width = width or self.sizes.get("n_embd", 0) // max(1, heads)
            if heads and width:
                return np.zeros((rows, heads, 0, width))
        raise InputError(f"{self.name}: the graph needs an input {each.name} {each.shape}; export one without it")
