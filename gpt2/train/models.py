"""Make, prepare, sample and save the models that a run trains: GPT-2 and the bigram baseline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from gpt2.checkpoint.loading import require_vocabulary
from gpt2.config import GPT2Config
from gpt2.data import Tokenizer
from gpt2.errors import InputError
from gpt2.generation import generate
from gpt2.model import GPT2, Attention
from gpt2.train import adapted
from gpt2.train.bigram import Bigram, BigramConfig, save_bigram
from gpt2.train.recipe import Recipe


def empty(config: GPT2Config | BigramConfig, recipe: Recipe) -> GPT2 | Bigram:
    """A model of that shape with the recipe's adapters; its parameters are not initialised."""
    if isinstance(config, BigramConfig):
        return Bigram(config)
    model = GPT2(config, initialise=False)
    if recipe.lora.r:
        adapted.adapt(model, recipe, None)
    return model


def copied(model: GPT2 | Bigram, recipe: Recipe) -> GPT2 | Bigram:
    """A copy of the model on the CPU."""
    copy = empty(model.config, recipe)
    for target, parameter in zip(copy.parameters(), model.parameters(), strict=True):
        target.data = parameter.detach().to("cpu", copy=True)
    return copy.train(model.training)


def check(model: GPT2 | Bigram, tokenizer: Tokenizer, recipe: Recipe, name: str) -> None:
    """Refuse a recipe or tokenizer that does not fit the model."""
    if isinstance(model, Bigram):
        return
    if recipe.context > model.config.n_positions:
        raise InputError(
            f"recipe: context {recipe.context} exceeds the {model.config.n_positions} positions of {name}; "
            f"use --set context={model.config.n_positions}"
        )
    require_vocabulary(tokenizer, model.config, name)


def prepare(model: GPT2 | Bigram, recipe: Recipe) -> None:
    """Set the recipe's dropout, and compile or checkpoint the blocks if it says so."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = recipe.dropout
        elif isinstance(module, Attention):
            module.attn_pdrop = recipe.attn_dropout
    for block in getattr(model, "h", ()):
        if recipe.compile:
            block.forward = _compiled(block.forward)
        if recipe.checkpointing:
            block.forward = _checkpointed(block.forward)


def _compiled(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``forward``, compiled for training, which has one shape. Evaluations and samples have many, and are not compiled."""
    compiled = torch.compile(forward, dynamic=False)
    return lambda *inputs: compiled(*inputs) if torch.is_grad_enabled() else forward(*inputs)


def _checkpointed(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``forward`` with activation checkpointing: its intermediates are recomputed in the backward pass."""
    return lambda *inputs: checkpoint(forward, *inputs, use_reentrant=False) if torch.is_grad_enabled() else forward(*inputs)


def new(recipe: Recipe, tokenizer: Tokenizer) -> GPT2 | Bigram:
    if recipe.model.kind == "bigram":
        return Bigram(BigramConfig(tokenizer.n_vocab))
    sizes = asdict(recipe.model)
    del sizes["kind"]
    config = GPT2Config(
        tokenizer.n_vocab,
        **sizes,
        resid_pdrop=recipe.dropout,
        embd_pdrop=recipe.dropout,
        attn_pdrop=recipe.attn_dropout,
        bos_token_id=tokenizer.eot,
        eos_token_id=tokenizer.eot,
    )
    torch.manual_seed(recipe.seed)
    return GPT2(config)


def sample(model: GPT2 | Bigram, tokenizer: Tokenizer, val_ids: np.ndarray, recipe: Recipe) -> str:
    """Text that the model generates after the first tokens of the validation text."""
    if not recipe.sample_tokens:
        return ""
    prompt = [int(i) for i in val_ids[:8]]
    if isinstance(model, Bigram):
        return tokenizer.decode(model.sample(prompt, recipe.sample_tokens, recipe.seed))
    return tokenizer.decode(generate(model, prompt, recipe.sample_tokens, temperature=0.8, top_p=0.95, seed=recipe.seed))


def save(model: GPT2 | Bigram, tokenizer: Tokenizer, directory: Path, init: str | None, *, whole: bool) -> None:
    """Write ``model`` into a new directory; ``whole`` as in :func:`gpt2.train.adapted.save_model`."""
    if isinstance(model, Bigram):
        save_bigram(model, tokenizer, directory)
    else:
        adapted.save_model(model, tokenizer, directory, init, whole=whole)
