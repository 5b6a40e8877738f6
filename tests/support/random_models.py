"""Models with random weights in which every parameter matters: no bias is 0, no norm's weight is 1."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gpt2
from gpt2.config import GPT2Config
from gpt2.data.bpe import train_bpe
from gpt2.data.library import LibraryTokenizer
from gpt2.model import GPT2

TEXT = "First Witch:\nWhen shall we three meet again\nIn thunder, lightning, or in rain?\n\n" * 20


def random_model(
    config: GPT2Config, std: float = 0.4, bias_std: float | None = None, *, dtype: torch.dtype = torch.float64, seed: int = 0
) -> GPT2:
    """Draw every parameter from N(0, std), the norms' weights from N(1, std); the result is in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    model = GPT2(config, initialise=False).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if ".ln_" in f".{name}" and name.endswith("weight") else 0.0
            deviation = bias_std if bias_std is not None and name.endswith("bias") else std
            parameter.normal_(mean, deviation, generator=generator)
    return model


def model_of(config: GPT2Config, weights: Mapping[str, Tensor]) -> GPT2:
    """A model of these weights, given by its own names, in eval mode."""
    model = GPT2(config, initialise=False).to(weights["wte.weight"].dtype)
    model.load_state_dict(weights)
    return model.eval()


def uneven_model(vocab: int, positions: int = 8, seed: int = 0) -> GPT2:
    """A float64 model with predictions far from uniform, so that positions and context have an effect."""
    return random_model(GPT2Config(vocab, positions, 16, 2, 2), 0.3, seed=seed)


own_tokenizer = cache(partial(train_bpe, TEXT, 300))


def write_checkpoint(folder: Path, tokenizer: LibraryTokenizer | None = None, seed: int = 0, **changes: Any) -> Path:
    """Save a tiny model with random weights and a tokenizer; the default tokenizer is trained on :data:`TEXT`."""
    tokenizer = tokenizer or own_tokenizer()
    eot = tokenizer.eot
    sizes = {"n_positions": 32, "n_embd": 48, "n_layer": 2, "n_head": 4, "bos_token_id": eot, "eos_token_id": eot}
    torch.manual_seed(seed)
    model = GPT2(GPT2Config(tokenizer.n_vocab, **{**sizes, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return gpt2.save(model, tokenizer, folder)


def changed(base: Path, folder: Path, change: Callable[[GPT2], object]) -> Path:
    """Save a copy of a checkpoint with parameters changed by ``change(model)``."""
    model = gpt2.load(str(base))
    with torch.no_grad():
        change(model)
    return gpt2.save(model, gpt2.load_tokenizer(str(base)), folder)


def noisy(size: float, name: str = "") -> Callable[[GPT2], object]:
    """Add noise of a standard deviation to the parameters whose name begins with ``name``."""

    def change(model: GPT2) -> None:
        for number, (own, parameter) in enumerate(model.named_parameters()):
            if own.startswith(name):
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)), alpha=size)

    return change
