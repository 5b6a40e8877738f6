"""The sides that another program runs: what they share, and llama.cpp, CTranslate2 and ONNX Runtime."""

import ctypes
import hashlib
import importlib
import json
from abc import abstractmethod
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.checkpoint.containers import read_json
from gpt2.comparison.sides.side import Side
from gpt2.data import Tokenizer, from_directory, holds_tokenizer
from gpt2.errors import InputError, user_path

LONGEST_TOKEN = 4096  # bytes
FILE_TYPE = "LLAMA_FTYPE_"  # llama.cpp's names of the types of a whole file begin so: LLAMA_FTYPE_MOSTLY_Q4_K_M
CT2_TOKENS: dict[str, Callable[[str], Any]] = {"vocabulary.json": json.loads, "vocabulary.txt": str.splitlines}
NAMES = ("model.onnx", "decoder_model.onnx", "decoder_model_merged.onnx", "onnx/model.onnx")
TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64, "tensor(int32)": np.int32}


@dataclass(eq=False)
class EngineSide(Side):
    """A file or folder that another program runs, one row at a time, since neighbours in a batch move a row in int8 engines."""

    name: str
    path: Path
    shows = frozenset({"logits"})
    prefix: ClassVar[str]  # of the name
    package: ClassVar[str]  # on PyPI
    module: ClassVar[str]  # that is imported
    extra: ClassVar[str]  # of this project, which installs it
    otherwise: ClassVar[str] = ""  # what can be done without it
    wanted: ClassVar[str]  # what the user gives, in words
    batched: ClassVar[bool] = True  # whether it runs several rows together

    @classmethod
    def open(cls, name: str) -> Self:
        """Open a side by name. Raises InputError: the program is not installed, or there is no such model."""
        side = cls(name, user_path(name.removeprefix(cls.prefix)))
        side.engine()
        side.path = side.located()
        return side

    def engine(self) -> Any:
        """Import the program. Raises InputError, with the command that installs it, if it is not installed."""
        try:
            return importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name != self.module:
                raise
            how = f"install it with pip install 'gpt2-toolkit[{self.extra}]'{self.otherwise}"
            raise InputError(f"{self.name}: needs the package {self.module}; {how}") from None

    def located(self) -> Path:
        """Return the model's file or folder. Raises InputError: it is not there."""
        if not self.path.is_file():
            raise InputError(f"{self.name}: {self.path} is not a file; give {self.wanted}")
        return self.path

    files = property(lambda self: {path.name: path for path in self.parts})
    size = property(lambda self: sum(path.stat().st_size for path in self.parts))
    folder = property(lambda self: self.path if self.path.is_dir() else self.path.parent)
    parts = property(lambda self: (self.path,))  # the files of the model

    @abstractmethod
    def run(self, ids: Tensor) -> Tensor:
        """Return what the program says of the rows of ``ids`` (B, T), run together."""

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([self.run(row[None]) for row in ids])

    @cached_property
    def tokenizer(self) -> Tokenizer | None:  # type: ignore[override]  # read-only
        """The tokenizer beside the model."""
        return from_directory(self.folder) if holds_tokenizer(self.folder) else None

    @property
    def implementation(self) -> str:  # type: ignore[override]
        with suppress(PackageNotFoundError):
            return f"{self.package} {version(self.package)}"
        return self.package


class EngineTokenizer(Tokenizer):
    """A tokenizer that lives in an engine: its entries as bytes, and its own encoding."""

    def __init__(self, tokens: list[bytes], encode: Callable[[str], list[int]], kind: str) -> None:
        super().__init__(dict(enumerate(tokens)))
        self._encode, self._kind = encode, kind

    @property
    def fingerprint(self) -> str:
        """Sha256 of the entries and the engine: two different tokenizers may only be compared on a text."""
        body = b"".join(len(token).to_bytes(4, "big") + token for token in self._bytes if token is not None)
        return hashlib.sha256(self._kind.encode() + b"\0" + body).hexdigest()

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return self._encode(text)

    def texts(self, n_positions: int) -> dict[str, str | bytes]:
        raise InputError(f"{self._kind}: its tokenizer cannot be written as files; export the model that it was made from")


@dataclass(eq=False)
class LlamaCppSide(EngineSide):
    """``llama.cpp/FILE.gguf``: run by llama.cpp itself, quantised types that our loader does not read included."""

    prefix, package, module, extra = "llama.cpp/", "llama_cpp_python", "llama_cpp", "llamacpp"
    wanted, batched = "a GGUF file, as in llama.cpp/model.gguf", False
    otherwise = ", or leave llama.cpp/ out: F32, F16, BF16 and Q8_0 are also read here"

    @cached_property
    def _vocabulary(self) -> Any:
        """The file's metadata and tokenizer, without its weights."""
        package = self.engine()
        parameters = package.llama_model_default_params()
        parameters.vocab_only = True
        return self.ask(lambda: package._internals.LlamaModel(path_model=str(self.path), params=parameters, verbose=False))

    _metadata = property(lambda self: self._vocabulary.metadata())
    vocab_size = property(lambda self: self._vocabulary.n_vocab())

    @property
    def n_positions(self) -> int | None:
        return int(self._metadata.get(f"{self._metadata.get('general.architecture')}.context_length", 0)) or None

    @property
    def stored(self) -> str:  # type: ignore[override]  # read-only
        package, file_type = self.engine(), int(self._metadata.get("general.file_type", -1))
        names = [key for key in dir(package) if key.startswith(FILE_TYPE) and getattr(package, key) == file_type]
        return names[0].removeprefix(FILE_TYPE).removeprefix("MOSTLY_").removeprefix("ALL_") if names else ""

    @cached_property
    def tokenizer(self) -> Tokenizer | None:  # type: ignore[override]
        if self._metadata.get("tokenizer.ggml.model", "none") in ("none", "no_vocab"):
            return None
        model, piece = self._vocabulary, self.engine().llama_token_to_piece
        buffer = ctypes.create_string_buffer(LONGEST_TOKEN)
        lengths = (piece(model.vocab, token, buffer, LONGEST_TOKEN, 0, True) for token in range(model.n_vocab()))
        tokens = [buffer.raw[:length] for length in lengths]  # the buffer is read after it is written
        return EngineTokenizer(tokens, lambda text: model.tokenize(text.encode(), False, False), f"llama.cpp {self.path.name}")

    def load(self, stack: ExitStack) -> Any:
        self._room, self._file = 0, stack.enter_context(ExitStack())

    def run(self, ids: Tensor) -> Tensor:
        if ids.size(1) > self._room:  # of the longest window so far: all of its positions take memory for their logits
            self._file.close()
            self.program = self._file.enter_context(closing(self._load(ids.size(1))))
            self._room = ids.size(1)
        rows = []
        for row in ids.tolist():
            self.program.reset()
            self.program.eval(row)
            rows.append(torch.tensor(self.program.scores[: len(row)]))
        return torch.stack(rows)

    def _load(self, size: int) -> Any:
        """Load the weights for ``size`` tokens, with a cache in float32: the difference is then the file's, not the cache's."""
        if self.n_positions is not None and size > self.n_positions:
            what = f"predicts from {self.n_positions:,} tokens, and is asked to from {size:,}"
            raise InputError(f"{self.name}: {what}; give a shorter context, as in --on TEXT:context={self.n_positions}")
        threads, package = torch.get_num_threads(), self.engine()
        sizes = {"n_ctx": size, "n_batch": size, "n_ubatch": size, "n_threads": threads, "n_threads_batch": threads}
        settings = {**sizes, "logits_all": True, "type_k": 0, "type_v": 0, "flash_attn": False, "verbose": False}
        return self.ask(lambda: package.Llama(str(self.path), **settings))


@dataclass(eq=False)
class CTranslate2Side(EngineSide):
    """``ct2/DIR``: a folder that CTranslate2's converter wrote."""

    prefix, package, module, extra = "ct2/", "ctranslate2", "ctranslate2", "ctranslate2"

    def located(self) -> Path:
        file = self.path / "model.bin"
        if not file.is_file():
            raise InputError(f"{self.name}: there is no {file}; give the folder that ct2-transformers-converter wrote")
        return self.path

    parts = property(lambda self: tuple(filter(Path.is_file, (self.path / "model.bin", self.path / "config.json"))))

    @property
    def vocab_size(self) -> int | None:
        file = next((file for name in CT2_TOKENS if (file := self.path / name).is_file()), None)
        return None if file is None else len(self.ask(lambda: CT2_TOKENS[file.name](file.read_text(encoding="utf-8"))))

    def load(self, stack: ExitStack) -> Any:
        threads = torch.get_num_threads()  # "default" keeps the type of the stored weights
        load = self.engine().Generator
        return self.ask(lambda: load(str(self.path), compute_type="default", intra_threads=threads))

    def run(self, ids: Tensor) -> Tensor:
        advice = "give a shorter context, as in --on TEXT:context=512"
        return torch.from_numpy(np.array(self.ask(lambda: self.program.forward_batch(ids.tolist()), advice)))


@dataclass(eq=False)
class OnnxSide(EngineSide):
    """``onnx/FILE_OR_DIR``: a graph from ``input_ids`` to ``logits``, with or without a cache, run by ONNX Runtime."""

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
        rows = rows if isinstance(rows, int) else len(ids)
        padded = torch.cat((padded, padded[:1].expand(-len(ids) % rows, -1)))  # rows that a graph wants are copies of the first
        return torch.cat([self._run(part, inputs) for part in padded.split(rows)])[: len(ids), : ids.size(1)]

    def _run(self, ids: Tensor, inputs: dict[str, Any]) -> Tensor:
        ones = np.ones(ids.shape)
        feeds = {"input_ids": ids.numpy(), "attention_mask": ones, "position_ids": ones.cumsum(1) - 1}
        feeds |= {"use_cache_branch": np.zeros(1)}
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
