"""``onnx/FILE_OR_DIR``: a graph from ``input_ids`` to ``logits``, with or without a cache, run by ONNX Runtime."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.comparison.sides.engine import EngineSide, engine
from gpt2.comparison.sides.side import Running
from gpt2.errors import InputError
from gpt2.measure.user_code import error_line

PREFIX = "onnx/"
NAMES = ("model.onnx", "decoder_model.onnx", "decoder_model_merged.onnx", "onnx/model.onnx")
TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64, "tensor(int32)": np.int32}


@dataclass(frozen=True)
class OnnxSide(EngineSide):
    package: ClassVar[str] = "onnxruntime"

    @classmethod
    def open(cls, name: str) -> OnnxSide:
        path = Path(name.removeprefix(PREFIX)).expanduser()
        engine("onnxruntime", "onnx", name)
        if path.is_dir():
            graphs = sorted(path.glob("*.onnx"))
            known = [path / each for each in NAMES if (path / each).is_file()]
            if not known and len(graphs) != 1:
                raise InputError(f"{name}: the folder holds {len(graphs)} .onnx files and no model.onnx; name one of them")
            path = known[0] if known else graphs[0]
        if not path.is_file():
            raise InputError(f"{name}: {path} is not a file; give a graph, as in onnx/model.onnx, or its folder")
        return cls(name, path)

    @property
    def files(self) -> tuple[Path, ...]:
        data = self.path.with_name(f"{self.path.name}.data"), self.path.with_name(f"{self.path.name}_data")
        return (self.path, *(path for path in data if path.is_file()))

    @cached_property
    def _config(self) -> dict[str, Any]:
        """The ``config.json`` beside the graph, or in the folder above it; empty if there is none."""
        for folder in (self.folder, self.folder.parent):
            if (file := folder / "config.json").is_file():
                try:
                    found = json.loads(file.read_text(encoding="utf-8"))
                except ValueError as error:
                    raise InputError(f"{file}: is not JSON ({error}); write it again") from None
                return found if isinstance(found, dict) else {}
        return {}

    @property
    def n_positions(self) -> int | None:
        return self._config.get("n_positions")

    @property
    def vocab_size(self) -> int | None:
        return self._config.get("vocab_size")

    @contextmanager
    def running(self) -> Iterator[Running]:
        package = engine("onnxruntime", "onnx", self.name)
        options = package.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        try:
            session = package.InferenceSession(str(self.path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its exceptions have no common base
            raise InputError(f"{self.name}: ONNX Runtime cannot open it ({error_line(error)}); export the graph again") from None
        yield RunningGraph(session, self.name, self._config)


@dataclass(frozen=True)
class RunningGraph(Running):
    session: Any
    name: str
    config: dict[str, Any]

    def logits(self, ids: Tensor) -> Tensor:
        inputs = {each.name: each for each in self.session.get_inputs()}
        if "input_ids" not in inputs:
            raise InputError(f"{self.name}: the graph takes {', '.join(inputs)}; export one that takes input_ids")
        rows, length = inputs["input_ids"].shape
        if isinstance(length, int) and length < ids.size(1):
            raise InputError(f"{self.name}: the graph takes {length} tokens; compare with --on TEXT:context={length}")
        padded = F.pad(ids, (0, length - ids.size(1))) if isinstance(length, int) else ids  # later tokens change nothing
        parts = padded.split(rows) if isinstance(rows, int) else (padded,)
        return torch.cat([self._run(part, inputs) for part in parts])[:, : ids.size(1)]

    def _run(self, ids: Tensor, inputs: dict[str, Any]) -> Tensor:
        feeds = {name: self._feed(name, each.shape, ids).astype(TYPES.get(each.type, bool)) for name, each in inputs.items()}
        outputs = [each.name for each in self.session.get_outputs()]
        wanted = "logits" if "logits" in outputs else outputs[0]
        try:
            (logits,) = self.session.run([wanted], feeds)
        except Exception as error:
            raise InputError(f"{self.name}: ONNX Runtime: {error_line(error)}; export the graph again") from None
        if logits.ndim != 3 or logits.shape[:2] != tuple(ids.shape):
            shape = tuple(logits.shape)
            raise InputError(f"{self.name}: its output {wanted} has the shape {shape}, not (rows, tokens, vocabulary)")
        return torch.from_numpy(logits)

    def _feed(self, name: str, shape: list[Any], ids: Tensor) -> np.ndarray[Any, Any]:
        rows, tokens = ids.shape
        if name == "input_ids":
            return ids.numpy()
        if name == "attention_mask":
            return np.ones((rows, tokens))
        if name == "position_ids":
            return np.tile(np.arange(tokens), (rows, 1))
        if name == "use_cache_branch":
            return np.zeros(1)
        if name.startswith("past") and len(shape) == 4:  # an empty cache: (rows, heads, 0, width of a head)
            heads, width = self.config.get("n_head"), self.config.get("n_embd", 0)
            heads = shape[1] if isinstance(shape[1], int) else heads
            width = shape[3] if isinstance(shape[3], int) else heads and width // heads
            if heads and width:
                return np.zeros((rows, heads, 0, width))
        raise InputError(f"{self.name}: the graph needs an input {name} {shape}, which is not known here; export one without it")
