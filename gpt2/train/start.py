"""Open a run's folder: resume from its newest intact checkpoint, or begin from the recipe or the model named by --init."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from torch import Tensor

from gpt2.checkpoint.loading import load, load_tokenizer, require_intact
from gpt2.config import GPT2Config
from gpt2.data import Tokenizer, from_directory
from gpt2.data.chat import ChatFormat
from gpt2.errors import user_path
from gpt2.lora import chosen_projections
from gpt2.model import GPT2
from gpt2.optim import learning_rate
from gpt2.train import models, state
from gpt2.train.bigram import Bigram, BigramConfig, load_model
from gpt2.train.classify import classifier
from gpt2.train.corpus import Corpus, corpus
from gpt2.train.cost import decide_precision
from gpt2.train.parallel import Ranks
from gpt2.train.recipe import Recipe
from gpt2.train.state import Progress


@dataclass(frozen=True)
class Start:
    """A run before its first step, as rank 0 reads it; the other ranks get the result of :meth:`shared`."""

    recipe: Recipe  # with its precision decided
    config: GPT2Config | BigramConfig
    tokenizer: Tokenizer
    sha256: str  # of the text's tokens
    progress: Progress | None  # None: a new run
    notes: tuple[str, ...]
    model: GPT2 | Bigram | None  # with its adapters if any
    text: Corpus | None
    moments: dict[str, Tensor]  # the optimizer's; empty for a new run

    def shared(self) -> Self:
        """Return it without weights and moments, and without a text in token files, which every rank maps itself."""
        text = None if self.text is None or self.text.mapped else self.text
        return replace(self, model=None, text=text, moments={})


def start(recipe: Recipe, folder: Path, init: str | None, fresh: bool, ranks: Ranks) -> Start:
    """Open the locked ``folder`` for this run; after an InputError its checkpoints are unchanged."""
    if recipe.lora.r:
        chosen_projections(recipe.lora.targets)  # raises for unknown names before anything is read
    resumed = state.resumable(folder, recipe, init, fresh)
    notes = [f"{folder}: resuming the run in it"] if resumed else []
    if resumed:
        state.recover(folder)
    checkpoint, skipped = state.newest_intact(folder) if resumed else (None, [])
    model: GPT2 | Bigram | None = None
    tokenizer: Tokenizer | None = None
    if checkpoint:
        model, tokenizer = load_model(state.model_of(folder, checkpoint)), from_directory(checkpoint)
    elif init is not None:
        model, tokenizer = models.with_tokens(load(init, dtype="float32"), load_tokenizer(init), recipe)
        require_intact(model, init)
    text = corpus(recipe, tokenizer, scratch=init is None)
    if text.tokenizer.eot is not None and not text.classes:  # else an answer has no end
        text.tokenizer.chat = ChatFormat.of_template(recipe.data.prompt) or text.tokenizer.chat
    model = model or models.new(recipe, text.tokenizer)
    if text.classes and isinstance(model, GPT2):
        model = classifier(model, text.classes, recipe.seed, checkpoint or (user_path(init) if init else None))
    models.check(model, text, recipe, init or "the recipe's model")
    notes.append(models.added(text.tokenizer, text.train_ids, recipe))
    recipe, said = in_steps(resumed or recipe, text)
    notes.append(said)
    recipe, why = decide_precision(recipe, model.config, ranks)
    notes.append(why)
    before = state.claim(folder, recipe, init, text, fresh)
    if recipe.lora.r:
        assert isinstance(model, GPT2), "a bigram with adapters is refused when the recipe is read"
        if not checkpoint:
            state.write_whole(folder / state.BASE, model, text.tokenizer, {})
        notes.append(models.adapt(model, recipe, checkpoint))
    moments, progress = state.stored(checkpoint) if checkpoint else ({}, None)
    if progress and before < recipe.steps:
        notes.append(_later_end(progress.step, before, recipe))
    config, about = model.config, (*filter(None, notes), *skipped)
    return Start(recipe, config, text.tokenizer, text.sha256, progress, about, model, text, moments)


def in_steps(recipe: Recipe, text: Corpus) -> tuple[Recipe, str]:
    """Return the recipe with its ``epochs`` as steps, and a line that says so; "" if it counts in steps already.

    An epoch is each window of the text once, or as many random windows as have its tokens.
    """
    if not recipe.epochs:
        return recipe, ""
    stride = recipe.data.stride or recipe.context
    windows = max(1, (len(text.train_ids) - 1 - recipe.context) // stride + 1)
    steps = max(1, math.ceil(recipe.epochs * windows / recipe.batch_size))
    what = f"{windows:,} windows of {recipe.context} tokens, {recipe.batch_size} in a step"
    return replace(recipe, steps=steps), f"epochs={recipe.epochs:g} are {steps:,} steps: {what}"


def _later_end(step: int, before: int, recipe: Recipe) -> str:
    """Return a line for the log about a run that goes on to a later end, and what this changes in its rate."""
    optim, end = recipe.optim, f"the run now ends at step {recipe.steps:,}, not {before:,}"
    if step <= optim.warmup or optim.lr == optim.min_lr:
        return f"{end}; its rate so far does not depend on the end, so this is the run of {recipe.steps:,} steps, bit for bit"
    rates = [learning_rate(step, steps, optim) for steps in (before, recipe.steps)]
    falls = f"falls to {optim.min_lr:.1e} at the later end: {rates[1]:.1e} from here on, where it was {rates[0]:.1e}"
    return f"{end}; its rate {falls}, so it is not the run of {recipe.steps:,} steps from the beginning"
