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
        otherwise = f", or give {path} without llama.cpp/: F32, F16, BF16 and Q8_0 are also read here"
        engine("llama_cpp", "llamacpp", name, otherwise)
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
        """Load the file when it is first asked, with room for the windows that it is asked about.

        A context of the file's own length would take memory for the logits of all its places.
        """
        running = RunningLlama(self.load)
        try:
            yield running
        finally:
            running.close()

    def load(self, size: int) -> Any:
        """Load the weights for ``size`` tokens, with a cache in float32: the difference is then the file's, not the cache's."""
        threads = torch.get_num_threads()
        sizes = {"n_ctx": size, "n_batch": size, "n_ubatch": size, "n_threads": threads, "n_threads_batch": threads}
        settings = {**sizes, "logits_all": True, "type_k": 0, "type_v": 0, "flash_attn": False, "verbose": False}
        package = engine("llama_cpp", "llamacpp", self.name)
        return self._opened(lambda: package.Llama(str(self.path), **settings))


class RunningLlama(Running):
    def __init__(self, load: Callable[[int], Any]) -> None:
        self._load, self._size = load, 0
        self._llama: Any = None

    def logits(self, ids: Tensor) -> Tensor:
        if ids.size(1) > self._size:
            self.close()
            self._llama, self._size = self._load(ids.size(1)), ids.size(1)
        llama, rows = self._llama, []
        for row in ids.tolist():
            llama.reset()
            llama.eval(row)
            rows.append(torch.tensor(llama.scores[: len(row)]))
        return torch.stack(rows)

    def close(self) -> None:
        if self._llama is not None:
            self._llama.close()
            self._llama, self._size = None, 0
