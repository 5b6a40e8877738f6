"""``llama.cpp/FILE.gguf``: a GGUF file, run by llama.cpp itself, quantised types that our loader does not read included."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gpt2.comparison.sides.engine import EngineSide, EngineTokenizer
from gpt2.data import Tokenizer
from gpt2.errors import InputError

LONGEST_TOKEN = 4096  # bytes
FILE_TYPE = "LLAMA_FTYPE_"  # llama.cpp's names of the types of a whole file begin so: LLAMA_FTYPE_MOSTLY_Q4_K_M


@dataclass(eq=False)
class LlamaCppSide(EngineSide):
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
    def stored(self) -> str:  # type: ignore[override]  # read-only
        package, file_type = self.engine(), int(self._metadata.get("general.file_type", -1))
        names = [key for key in dir(package) if key.startswith(FILE_TYPE) and getattr(package, key) == file_type]
        return names[0].removeprefix(FILE_TYPE).removeprefix("MOSTLY_").removeprefix("ALL_") if names else ""

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
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
