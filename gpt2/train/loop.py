"""The only training loop: from scratch, or from a pretrained model.

Every random number of step ``n`` (which windows, which units dropout spares) is a function of the seed and of ``n`` alone, so
a run that is interrupted and goes on computes, bit for bit, what it would have computed undisturbed.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from ..checkpoint.load import load, load_path, load_tokenizer, require_vocabulary
from ..compare.measure import LanguageScore, language_score
from ..config import GPT2Config
from ..data import Tokenizer, from_directory
from ..data.batches import batch
from ..errors import InputError
from ..generate import generate
from ..model import GPT2
from . import state
from .corpus import corpus
from .metrics import Metrics, Pace
from .optim import adamw, learning_rate
from .recipe import Recipe
from .state import Progress


@dataclass(frozen=True)
class Started:
    """Told once, before the first step."""

    recipe: Recipe
    config: GPT2Config
    train_tokens: int
    val_tokens: int
    step: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Logged:
    """A logged step; ``seconds_left`` is an estimate. ``loss`` is the training loss of this step's batch, nats per token."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    seconds_left: float


@dataclass(frozen=True)
class Evaluated:
    """The whole validation text scored, and a sample of what the model now writes."""

    step: int
    val: LanguageScore
    best: bool
    sample: str = ""


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    folder: Path
    step: int
    best_loss: float
    best_step: int
    stopped: str  # "finished", "early" or "interrupted"


Listener = Callable[[Started | Logged | Evaluated], None]


def train(
    recipe: Recipe, folder: str | Path, *, init: str | None = None, fresh: bool = False, report: Listener = lambda event: None
) -> Result:
    """Run ``recipe`` in ``folder``: from scratch, or from the model named ``init``.

    A folder that holds this very run goes on from its newest intact checkpoint; one that holds another is refused, unless
    ``fresh`` clears it. Ctrl-C or SIGTERM finishes the step (and an evaluation under way), saves, and returns a result that
    says "interrupted"; a second one acts at once.

    Raises:
        InputError: text, model, recipe or folder do not work together, the run diverged, or the disk is full.
    """
    folder = Path(folder)
    with state.locked(folder):
        goes_on = state.holds(folder, recipe, init, fresh)
        notes = [f"{folder}: going on with the run that is there"] if goes_on else []
        found, skipped = state.newest_intact(folder) if goes_on else (None, [])
        if found:
            model, tokenizer = load_path(found, dtype=torch.float32), from_directory(found)
        elif init is not None:
            model, tokenizer = load(init, dtype="float32"), load_tokenizer(init)
        else:
            model, tokenizer = None, None
        text = corpus(recipe, tokenizer)
        tokenizer = text.tokenizer
        model = model or _new_model(recipe, tokenizer)
        _fit(model, tokenizer, recipe, init or "the recipe's model")
        state.claim(folder, recipe, init, text.sha256, fresh)
        optimizer = adamw(model, recipe.optim)
        progress = state.restore(found, optimizer) if found else None
        with Metrics(folder, progress) as metrics, _interruptions() as interrupted:
            run = _Run(recipe, folder, model, tokenizer, optimizer, text.train_ids, text.val_ids, metrics, report)
            report(
                Started(
                    recipe,
                    model.config,
                    len(text.train_ids),
                    len(text.val_ids),
                    progress.step if progress else 0,
                    (*notes, *skipped),
                )
            )
            return run(progress, interrupted)


@dataclass(frozen=True)
class _Run:
    """What stays the same from the first step to the last."""

    recipe: Recipe
    folder: Path
    model: GPT2
    tokenizer: Tokenizer
    optimizer: torch.optim.Optimizer
    train_ids: np.ndarray
    val_ids: np.ndarray
    metrics: Metrics
    report: Listener

    def __call__(self, progress: Progress | None, interrupted: Callable[[], bool]) -> Result:
        """From where the run stands (None: nowhere yet) to its end, whichever of the three comes first."""
        recipe = self.recipe
        begins = progress is None
        progress = self.evaluate(Progress(step=0)) if begins else progress
        stopped = self.ended(progress, interrupted)
        if begins and stopped:
            self.save(progress)
        pace = Pace(progress.step, recipe)
        while not stopped:
            lr = learning_rate(progress.step, recipe.steps, recipe.optim)
            loss, norm = _step(self.model, self.optimizer, self.train_ids, recipe, progress.step, lr)
            progress = replace(progress, step=progress.step + 1)
            last = progress.step == recipe.steps
            if progress.step % recipe.log_every == 0 or last:
                logged = Logged(progress.step, loss, lr, norm, *pace(progress.step))
                self.metrics.write(**asdict(logged))
                self.report(logged)
            if progress.step % recipe.eval_every == 0 or last:
                progress = self.evaluate(progress)
                pace.pause(progress.step)
            stopped = self.ended(progress, interrupted)
            if stopped or progress.step % recipe.save_every == 0:
                self.save(progress)
        return Result(self.folder, progress.step, progress.best_loss, progress.best_step, stopped)

    def ended(self, progress: Progress, interrupted: Callable[[], bool]) -> str:
        """How the run ends here, or nothing: then it goes on."""
        if progress.step >= self.recipe.steps:
            return "finished"
        if self.recipe.patience and progress.evals_since_best >= self.recipe.patience:
            return "early"
        return "interrupted" if interrupted() else ""

    def evaluate(self, progress: Progress) -> Progress:
        """Score the whole validation text, and keep the model if it is the best so far."""
        recipe, ids = self.recipe, torch.from_numpy(self.val_ids).long()
        lengths = torch.tensor([len(self.tokenizer.token_bytes(i)) for i in range(self.tokenizer.n_vocab)])
        score = language_score(self.model, ids, lengths, context=recipe.context, batch_size=recipe.batch_size)
        if not math.isfinite(score.loss):
            remedy = "lower optim.lr" if progress.step else "the model it starts from is broken"
            raise InputError(f"step {progress.step}: the validation loss is {score.loss}; {remedy} (nothing of it was saved)")
        best = progress.best_loss is None or score.loss < progress.best_loss
        if best:
            progress = replace(progress, best_loss=score.loss, best_step=progress.step, evals_since_best=0)
            state.save_best(self.folder, self.model, self.tokenizer, progress)
        else:
            progress = replace(progress, evals_since_best=progress.evals_since_best + 1)
        self.metrics.write(step=progress.step, val_loss=score.loss, val_bits_per_byte=score.bits_per_byte)
        self.report(Evaluated(progress.step, score, best, _sample(self.model, self.tokenizer, self.val_ids, recipe)))
        return progress

    def save(self, progress: Progress) -> None:
        self.metrics.sync()
        state.save(self.folder, self.model, self.tokenizer, self.optimizer, progress)


def _fit(model: GPT2, tokenizer: Tokenizer, recipe: Recipe, name: str) -> None:
    """See that the recipe fits the model, and make the model ready to be trained."""
    config = model.config
    if recipe.context > config.n_positions:
        raise InputError(
            f"recipe: context {recipe.context} exceeds the {config.n_positions} positions of {name}; "
            f"use --set context={config.n_positions}"
        )
    require_vocabulary(tokenizer, config, name)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = recipe.dropout
        elif hasattr(module, "attn_pdrop"):
            module.attn_pdrop = recipe.attn_dropout
    for parameter in model.parameters():
        # Out of the mapped file, whose pages would otherwise be copied one by one in the first step; and to an address as even as
        # any other, because some kernels sum in another order where it is not, and a resumed run would drift from the first.
        parameter.data = parameter.data.clone()


def _new_model(recipe: Recipe, tokenizer: Tokenizer) -> GPT2:
    config = GPT2Config(
        tokenizer.n_vocab,
        **asdict(recipe.model),
        resid_pdrop=recipe.dropout,
        embd_pdrop=recipe.dropout,
        attn_pdrop=recipe.attn_dropout,
        bos_token_id=tokenizer.eot,
        eos_token_id=tokenizer.eot,
    )
    torch.manual_seed(recipe.seed)
    return GPT2(config)


def _step(
    model: GPT2, optimizer: torch.optim.Optimizer, ids: np.ndarray, recipe: Recipe, step: int, lr: float
) -> tuple[float, float]:
    """One optimizer step; returns the batch's loss and the gradient's norm before clipping."""
    model.train()
    torch.manual_seed(np.random.SeedSequence((recipe.seed, step)).generate_state(1, np.uint64)[0].item())
    x, y = (
        torch.from_numpy(part).to(model.wte.weight.device)
        for part in batch(ids, recipe.context, recipe.batch_size, seed=recipe.seed, step=step)
    )
    total = 0.0
    for part_x, part_y in zip(x.chunk(recipe.grad_accum), y.chunk(recipe.grad_accum), strict=True):
        loss = F.cross_entropy(model(part_x).flatten(0, 1), part_y.flatten()) / recipe.grad_accum
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.optim.clip or math.inf).item()
    if not math.isfinite(total) or not math.isfinite(norm):
        raise InputError(
            f"step {step + 1}: loss {total}, gradient norm {norm}; the run diverged, "
            "lower optim.lr (checkpoints before it are kept)"
        )
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total, norm


def _sample(model: GPT2, tokenizer: Tokenizer, val_ids: np.ndarray, recipe: Recipe) -> str:
    """What the model writes after the first words of the validation text."""
    if not recipe.sample_tokens:
        return ""
    prompt = [int(i) for i in val_ids[:8]]
    return tokenizer.decode(generate(model, prompt, recipe.sample_tokens, temperature=0.8, top_p=0.95, seed=recipe.seed))


@contextmanager
def _interruptions() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM raise a flag that the loop reads between steps; a second one acts at once, as it would have."""
    met: list[int] = []
    before: dict[int, object] = {}

    def note(number: int, frame: object) -> None:
        met.append(number)
        for handled, handler in before.items():
            signal.signal(handled, handler)

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, note) or signal.SIG_DFL  # None: set from outside Python
    except ValueError:  # not the main thread, which alone may handle signals
        before.clear()
    try:
        yield lambda: bool(met)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
