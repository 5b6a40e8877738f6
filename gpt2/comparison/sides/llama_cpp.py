"""``llama.cpp/FILE.gguf``: a GGUF file, run by llama.cpp itself, quantised types that our loader does not read included."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from gpt2.comparison.sides.engine import EngineSide, EngineTokenizer, engine
from gpt2.comparison.sides.side import Running
from gpt2.data import Tokenizer
from gpt2.errors import InputError

PREFIX = "llama.cpp/"
LONGEST_TOKEN = 4096  # bytes
FILE_TYPE = "LLAMA_FTYPE_"  # llama.cpp's names of the types of a whole file begin so: LLAMA_FTYPE_MOSTLY_Q4_K_M


@dataclass(frozen=True)
class LlamaCppSide(EngineSide):
    package: ClassVar[str] = "llama_cpp_python"

    @classmethod
    def open(cls, name: str) -> LlamaCppSide:
        path = Path(name.removeprefix(PREFIX)).expanduser()
        engine("llama_cpp", "llamacpp", name)
        if not path.is_file():
            raise InputError(f"{name}: {path} is not a file; give a GGUF file, as in llama.cpp/model.gguf")
        return cls(name, path)

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.path,)

    @cached_property
    def _vocabulary(self) -> Any:
        """The file's metadata and tokenizer, without its weights."""
        package = engine("llama_cpp", "llamacpp", self.name)
        parameters = package.llama_model_default_params()
        parameters.vocab_only = True
        return self._opened(lambda: package._internals.LlamaModel(path_model=str(self.path), params=parameters, verbose=False))

    def _opened(self, load: Callable[[], Any]) -> Any:
        try:
            return load()
        except ValueError as error:
            raise InputError(f"{self.name}: llama.cpp cannot open it ({error}); give a GGUF file that it runs") from None

    @cached_property
    def _metadata(self) -> dict[str, str]:
        return self._vocabulary.metadata()

    @property
    def n_positions(self) -> int | None:
        return int(self._metadata.get(f"{self._metadata.get('general.architecture')}.context_length", 0)) or None

    @property
    def vocab_size(self) -> int:
        return self._vocabulary.n_vocab()

    @property
    def stored(self) -> str:
        file_type = int(self._metadata.get("general.file_type", -1))
        package = engine("llama_cpp", "llamacpp", self.name)
        names = [key for key in dir(package) if key.startswith(FILE_TYPE) and getattr(package, key) == file_type]
        return names[0].removeprefix(FILE_TYPE).removeprefix("MOSTLY_").removeprefix("ALL_") if names else ""

    def tokenizer(self) -> Tokenizer | None:
        if self._metadata.get("tokenizer.ggml.model", "none") in ("none", "no_vocab"):
            return None
        model, piece = self._vocabulary, engine("llama_cpp", "llamacpp", self.name).llama_token_to_piece
        buffer = ctypes.create_string_buffer(LONGEST_TOKEN)
        lengths = (piece(model.vocab, token, buffer, LONGEST_TOKEN, 0, True) for token in range(model.n_vocab()))
        tokens = [buffer.raw[:length] for length in lengths]  # the buffer is read after it is written
        return EngineTokenizer(tokens, lambda text: model.tokenize(text.encode(), False, False), f"llama.cpp {self.path.name}")

    @contextmanager
    def running(self) -> Iterator[Running]:
        """Load the file; keys and values are cached in float32, so that the difference is the file's, not the cache's."""
        threads, size = torch.get_num_threads(), self.n_positions or 1024
        sizes = {"n_ctx": size, "n_batch": size, "n_ubatch": size, "n_threads": threads, "n_threads_batch": threads}
        settings = {**sizes, "logits_all": True, "type_k": 0, "type_v": 0, "flash_attn": False, "verbose": False}
        package = engine("llama_cpp", "llamacpp", self.name)
        llama = self._opened(lambda: package.Llama(str(self.path), **settings))
        try:
            yield RunningLlama(llama)
        finally:
            llama.close()


@dataclass(frozen=True)
class RunningLlama(Running):
    llama: Any

    def logits(self, ids: Tensor) -> Tensor:
        rows = []
        for row in ids.tolist():
            self.llama.reset()
            self.llama.eval(row)
            rows.append(torch.tensor(self.llama.scores[: len(row)]))
        return torch.stack(rows)
