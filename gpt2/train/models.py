"""Make, prepare, sample and save the models that a run trains: GPT-2, with or without LoRA adapters, and the bigram baseline."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch.utils.checkpoint import checkpoint

from gpt2.checkpoint import saving
from gpt2.checkpoint.keys import to_file
from gpt2.checkpoint.loading import require_rows, rows_note
from gpt2.checkpoint.peft_files import PREFIX, WEIGHTS, save_adapter
from gpt2.config import GPT2Config, quoted
from gpt2.data import Tokenizer
from gpt2.data.batches import slices
from gpt2.errors import InputError
from gpt2.generation import generate, rows_with_tokens
from gpt2.lora import adapters, inject, merged
from gpt2.model import GPT2, Attention
from gpt2.train import classify
from gpt2.train.bigram import Bigram, BigramConfig, save_bigram
from gpt2.train.classify import Classifier
from gpt2.train.corpus import Corpus
from gpt2.train.recipe import Recipe

ADAPTER = "adapter"  # folder of the adapters beside a merged model
NOISE = 0.01  # of a new token's row, in standard deviations of all rows
Forward = Callable[..., torch.Tensor]


def new(recipe: Recipe, tokenizer: Tokenizer) -> GPT2 | Bigram:
    """Return a new model of the recipe's shape, initialised with its seed."""
    if recipe.model.kind == "bigram":
        return Bigram(BigramConfig(tokenizer.n_vocab))
    sizes = asdict(recipe.model)
    del sizes["kind"]
    rates: dict[str, Any] = {"resid_pdrop": recipe.dropout, "embd_pdrop": recipe.dropout, "attn_pdrop": recipe.attn_dropout}
    torch.manual_seed(recipe.seed)
    return GPT2(GPT2Config(tokenizer.n_vocab, **sizes, **rates, bos_token_id=tokenizer.eot, eos_token_id=tokenizer.eot))


def empty(config: GPT2Config | BigramConfig, recipe: Recipe, classes: Sequence[str] = ()) -> GPT2 | Bigram:
    """Return an uninitialised model of that shape, with the recipe's adapters, or a head for ``classes``."""
    if isinstance(config, BigramConfig):
        return Bigram(config)
    model = Classifier(config, classes, initialise=False) if classes else GPT2(config, initialise=False)
    if recipe.lora.r:
        adapt(model, recipe, None)
    return model


def copied(model: GPT2 | Bigram, recipe: Recipe) -> GPT2 | Bigram:
    """Return a copy of the model on the CPU."""
    copy = empty(model.config, recipe)
    for target, parameter in zip(copy.parameters(), model.parameters(), strict=True):
        target.data = parameter.detach().to("cpu", copy=True)
    return copy.train(model.training)


def with_tokens(model: GPT2, tokenizer: Tokenizer, recipe: Recipe) -> tuple[GPT2, Tokenizer]:
    """Return the model and its tokenizer with the recipe's ``data.add_tokens``; both unchanged if they have them already.

    A new token's row is the mean of the rows that its text had before (README.md says why), with noise of a hundredth of all
    rows' spread, so that tokens with equal parts can part. Old rows stay.
    """
    grown = tokenizer.with_tokens(recipe.data.add_tokens)
    if grown is tokenizer:
        return model, tokenizer
    rows = max(model.config.vocab_size, grown.n_vocab)  # a padded embedding has rows to spare
    generator = torch.Generator().manual_seed(recipe.seed)

    def with_rows(old: torch.Tensor) -> torch.Tensor:
        table = torch.cat((old, old.new_empty(rows - len(old), old.size(1))))
        spread = old[: tokenizer.n_vocab].std(0)  # (D,)
        for token in range(min(len(old), tokenizer.n_vocab), grown.n_vocab):  # an earlier token without a row gets one too
            noise = torch.randn(old.size(1), generator=generator) * spread * NOISE
            ids = [i for i in tokenizer.encode(grown.decode([token])) if i < len(old)] if grown.holds(token) else []
            table[token] = (old[ids] if ids else old).mean(0) + noise
        return table

    return model.with_tables(with_rows), grown


def added(tokenizer: Tokenizer, ids: np.ndarray, recipe: Recipe) -> str:
    """Return a line for the log: how often each token of ``data.add_tokens`` stands in the training text; "" without any."""
    tokens = recipe.data.add_tokens
    found = {token: tokenizer.encode(token)[0] for token in tokens}
    counts = [f"{quoted(token)} {sum((ids[part] == i).sum() for part in slices(ids)):,}" for token, i in found.items()]
    return f"new tokens, and how often the training text has them: {', '.join(counts)}" if tokens else ""


def check(model: GPT2 | Bigram, text: Corpus, recipe: Recipe, name: str) -> None:
    """Raise an InputError if the recipe, or a token of the text, does not fit the model."""
    if isinstance(model, Bigram):
        return
    if recipe.context > model.config.n_positions:
        most = model.config.n_positions
        raise InputError(f"recipe: context {recipe.context} exceeds the {most} positions of {name}; use --set context={most}")
    for ids in (text.train_ids, text.val_ids) if rows_note(text.tokenizer, model.config, name) else ():
        require_rows([int(ids[part].max()) for part in slices(ids)], text.tokenizer, model.config, name)


def adapt(model: GPT2, recipe: Recipe, directory: Path | None) -> str:
    """Put the recipe's adapters into ``model``, read from a checkpoint's ``directory`` or new; return a line for the log."""
    lora = recipe.lora
    inject(model, lora.r, lora.alpha, lora.dropout, lora.targets, seed=recipe.seed)
    if directory is not None:
        stored = load_file(directory / WEIGHTS)
        for name, module in adapters(model).items():
            for which in "AB":
                getattr(module, f"lora_{which}").data = stored[f"{PREFIX}{to_file(name)}.lora_{which}.weight"].clone()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters()) - trained
    parts = f"{trained:,} parameters trained beside {frozen:,} frozen ({trained / frozen:.2%})"
    return f"LoRA of rank {lora.r} on {', '.join(lora.targets)}: {parts}"


def prepare(model: GPT2 | Bigram, recipe: Recipe) -> None:
    """Set the recipe's dropout; compile the blocks or checkpoint their activations if it says so."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = recipe.dropout
        elif isinstance(module, Attention):
            module.attn_pdrop = recipe.attn_dropout
    for block in getattr(model, "h", ()):
        if recipe.compile:
            block.forward = _in_training(torch.compile(block.forward, dynamic=False), block.forward)
        if recipe.checkpointing:  # the backward pass computes the intermediates again
            block.forward = _in_training(partial(checkpoint, block.forward, use_reentrant=False), block.forward)


def _in_training(changed: Forward, forward: Forward) -> Forward:
    """Return what calls ``changed`` in training, whose inputs have one shape; in evaluations and samples ``forward``."""
    return lambda *inputs: changed(*inputs) if torch.is_grad_enabled() else forward(*inputs)


def sample(model: GPT2 | Bigram, tokenizer: Tokenizer, beginning: np.ndarray, recipe: Recipe) -> str:
    """Generate a text after its first tokens."""
    prompt, count = [int(i) for i in beginning], recipe.sample_tokens
    if not count or isinstance(model, Classifier):
        return ""
    if isinstance(model, Bigram):
        return tokenizer.decode(model.sample(prompt, count, recipe.seed))
    rows = rows_with_tokens(tokenizer, model.config)
    ids = generate(model, prompt, count, temperature=0.8, top_p=0.95, seed=recipe.seed, stop=tokenizer.eot, rows=rows)
    return tokenizer.decode(ids)


def save(model: GPT2 | Bigram, tokenizer: Tokenizer, directory: Path, init: str | None, *, whole: bool) -> None:
    """Write ``model`` into a new directory: of a model with adapters only these, or, if ``whole``, also the merged model."""
    if isinstance(model, Bigram):
        save_bigram(model, tokenizer, directory)
    elif isinstance(model, Classifier):
        classify.save(model, tokenizer, directory)
    elif not adapters(model):
        saving.save(model, tokenizer, directory)
    elif whole:
        saving.save(merged(model), tokenizer, directory)
        save_adapter(model, directory / ADAPTER, init)
    else:
        save_adapter(model, directory, init)
        tokenizer.save(directory, n_positions=model.config.n_positions)
