"""Write a GPT-2 for llm.c: its checkpoint, its tokenizer, and its debug state, in pieces.

Source: karpathy/llm.c, train_gpt2.py (write_model, write_tokenizer, write_state); layout: containers/llmc_file.py.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from gpt2.checkpoint.containers import require_whole_files
from gpt2.checkpoint.containers.llmc_file import BFLOAT16, FLOAT32, MODEL, STATE, TOKENIZER, header, is_matrix, order, padded_rows
from gpt2.checkpoint.gguf_writer import require_formulas
from gpt2.checkpoint.saving import raw_bytes
from gpt2.config import GPT2Config
from gpt2.data import Tokenizer
from gpt2.model import GPT2

VERSIONS = {"f32": FLOAT32, "bf16": BFLOAT16}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
STATE_VERSION = TOKENIZER_VERSION = 2
MAX_TOKEN = 255  # bytes
Pieces = Iterator[bytes | memoryview]


def require_expressible(config: GPT2Config, name: str) -> None:
    """Raise InputError if llm.c would compute another function."""
    more = {
        f"a feed-forward of {config.inner:,}": config.inner != 4 * config.n_embd,
        f"layer_norm_epsilon {config.layer_norm_epsilon:g}": config.layer_norm_epsilon != 1e-5,
        "an untied head": not config.tie_word_embeddings,
    }
    has = "llm.c has the tanh GELU, a feed-forward of 4 times the width, an epsilon of 1e-05, plain scaled scores, a tied head"
    require_formulas(config, f"{name}: cannot be expressed for llm.c", has, more)


def model_pieces(model: GPT2, type: str, name: str) -> Pieces:
    """Return a checkpoint's pieces in order, as ``type`` ("f32", "bf16"). Raises InputError: llm.c cannot express the model."""
    config, state = model.config, model.state_dict()
    require_expressible(config, name)
    sizes = (config.n_positions, config.vocab_size, config.n_layer, config.n_head, config.n_embd, padded_rows(config.vocab_size))
    return _pieces(header(MODEL, VERSIONS[type], *sizes), _as_stored(state, config, DTYPES[type]))


def tokenizer_file(tokenizer: Tokenizer, eot: int) -> bytes:
    """Return the tokenizer's file: each token's length and bytes. Raises ValueError: a token does not fit one byte of length."""
    content = bytearray(header(TOKENIZER, TOKENIZER_VERSION, tokenizer.n_vocab, eot))
    for number in range(tokenizer.n_vocab):
        token = tokenizer.token_bytes(number) if tokenizer.holds(number) else b""
        if not 1 <= len(token) <= MAX_TOKEN:
            raise ValueError(f"llm.c's tokens have 1 to {MAX_TOKEN} bytes, and token {number} has {len(token):,}")
        content += bytes([len(token)]) + token
    return bytes(content)


def state_pieces(
    config: GPT2Config, ids: Tensor, targets: Tensor, logits: Tensor, loss: Tensor, gradients: Mapping[str, Tensor]
) -> Pieces:
    """Return a debug state's pieces: ids and next ids (B, T), logits (B, T, V), the loss, every parameter's gradient."""
    numbers = iter([ids.to(torch.int32), targets.to(torch.int32), logits.float(), loss.float()])
    return _pieces(header(STATE, STATE_VERSION, *ids.shape), numbers, _as_stored(gradients, config, torch.float32))


def _as_stored(tensors: Mapping[str, Tensor], config: GPT2Config, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield the tensors in the file's order and orientation, the token embedding padded with zeros."""
    for name in order(config.n_layer):
        tensor = tensors[name].detach()
        yield (tensor.t() if is_matrix(name) else tensor).to(dtype)
        if name == "wte.weight":
            yield torch.zeros(padded_rows(config.vocab_size) - config.vocab_size, config.n_embd, dtype=dtype)


def _pieces(first: bytes, *groups: Iterator[Tensor]) -> Pieces:
    yield first
    for group in groups:
        for tensor in group:
            require_whole_files()
            yield raw_bytes(tensor)
