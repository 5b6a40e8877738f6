"""Store and reopen a run that trains LoRA adapters.

The frozen weights are written once, to ``base/``, so the run no longer needs the model it started from. A checkpoint holds only
the adapters, in PEFT's layout; ``best/`` holds the merged model, and its adapters in ``adapter/``.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from gpt2.checkpoint.files import ADAPTER as CONFIG
from gpt2.checkpoint.keys import to_file
from gpt2.checkpoint.peft_files import PREFIX, WEIGHTS, save_adapter
from gpt2.checkpoint.saving import save
from gpt2.data import Tokenizer
from gpt2.errors import InputError
from gpt2.lora import adapters, chosen_projections, inject, merged
from gpt2.model import GPT2
from gpt2.train.recipe import Recipe

BASE, ADAPTER = "base", "adapter"
FILES = (CONFIG, WEIGHTS)


def check(recipe: Recipe, init: str | None) -> None:
    """Refuse adapters without a pretrained model, or on projections that GPT-2 does not have, before anything is read."""
    if not recipe.lora.r:
        return
    chosen_projections(recipe.lora.targets)
    if init is None:
        raise InputError(f"{recipe.name}: adapters need a pretrained model; name one with --init")


def adapt(model: GPT2, recipe: Recipe, checkpoint: Path | None) -> str:
    """Put the recipe's adapters into ``model``, read from ``checkpoint`` or new; return a line for the log."""
    lora = recipe.lora
    inject(model, lora.r, lora.alpha, lora.dropout, lora.targets, seed=recipe.seed)
    if checkpoint is not None:
        stored = load_file(checkpoint / WEIGHTS)
        for name, module in adapters(model).items():
            for which in "AB":
                getattr(module, f"lora_{which}").data = stored[f"{PREFIX}{to_file(name)}.lora_{which}.weight"].clone()
    trained, total = (sum(p.numel() for p in model.parameters() if p.requires_grad or every) for every in (False, True))
    return (
        f"LoRA of rank {lora.r} on {', '.join(lora.targets)}: {trained:,} parameters trained beside {total - trained:,} frozen "
        f"({trained / (total - trained):.2%})"
    )


def save_model(model: GPT2, tokenizer: Tokenizer, directory: Path, init: str | None, *, whole: bool) -> None:
    """Write ``model`` into a new directory; of one with adapters only those, or, if ``whole``, also the merged model."""
    if not adapters(model):
        save(model, tokenizer, directory)
    elif whole:
        save(merged(model), tokenizer, directory)
        save_adapter(model, directory / ADAPTER, init)
    else:
        save_adapter(model, directory, init)
        tokenizer.save(directory, n_positions=model.config.n_positions)
