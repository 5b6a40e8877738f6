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
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..checkpoint.load import load, load_tokenizer, require_vocabulary
from ..compare.measure import LanguageScore, language_score
from ..config import GPT2Config
from ..data import Tokenizer, from_directory
from ..data.batches import batch
from ..errors import InputError
from ..generate import generate
from ..model import GPT2
from . import adapted, divergence, state
from .allocator import keep_freed_memory
from .bigram import Bigram, BigramConfig, load_model
from .corpus import corpus
from .divergence import Rewind
from .estimate import peak_memory
from .loss import Scored
from .metrics import Metrics, Pace, parted
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
    memory: int = 0  # bytes, an estimate of the peak
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Estimated:
    """Told once, after the first :data:`ESTIMATE_AFTER` steps: how long the rest will take, evaluations and all."""

    step: int
    seconds_left: float


@dataclass(frozen=True)
class Diverged:
    """A step that never reached the weights, and what the recipe's ``on_divergence`` made of it."""

    step: int
    why: str
    action: str


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
    warning: str = ""


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    folder: Path
    step: int
    best_loss: float
    best_step: int
    stopped: str  # "finished", "early" or "interrupted"


Listener = Callable[[Started | Logged | Evaluated | Estimated | Diverged], None]
ESTIMATE_AFTER = 10  # steps


def train(
    recipe: Recipe, folder: str | Path, *, init: str | None = None, fresh: bool = False, report: Listener = lambda event: None
) -> Result:
    """Run ``recipe`` in ``folder``: from scratch, or from the model named ``init``.

    A folder that holds this very run goes on from its newest intact checkpoint; one that holds another is refused, unless
    ``fresh`` clears it. Ctrl-C or SIGTERM finishes the step (and an evaluation under way), saves, and returns a result that
    says "interrupted"; a second one acts at once. Memory that is freed stays with the process (:mod:`gpt2.train.allocator`).

    Raises:
        InputError: text, model, recipe or folder do not work together, the run diverged, or the disk is full.
    """
    recipe, folder = recipe.resolved(init), Path(folder)
    keep_freed_memory()
    adapted.check(recipe, init)
    rewound: Rewind | None = None
    while True:
        try:
            return _train(recipe, folder, init, fresh and not rewound, report, rewound)
        except Rewind as wanted:
            rewound = wanted


def _train(recipe: Recipe, folder: Path, init: str | None, fresh: bool, report: Listener, rewound: Rewind | None) -> Result:
    """:func:`train`, until it is to be rewound; ``rewound`` says that it just was, and why."""
    with state.locked(folder):
        goes_on = state.holds(folder, recipe, init, fresh)
        notes = [f"{folder}: going on with the run that is there"] if goes_on else []
        found, skipped = state.newest_intact(folder) if goes_on else (None, [])
        if found:
            model, tokenizer = load_model(state.model_of(folder, found)), from_directory(found)
        elif init is not None:
            model, tokenizer = load(init, dtype="float32"), load_tokenizer(init)
        else:
            model, tokenizer = None, None
        text = corpus(recipe, tokenizer)
        tokenizer = text.tokenizer
        model = model or _new_model(recipe, tokenizer)
        _fit(model, tokenizer, recipe, init or "the recipe's model")
        state.claim(folder, recipe, init, text.sha256, fresh)
        if recipe.lora.r:
            if not found:
                state.save_base(folder, model, tokenizer)
            notes.append(adapted.adapt(model, recipe, found))
        optimizer = adamw(model, recipe.optim)
        progress = state.restore(found, optimizer) if found else None
        if progress and rewound:
            progress = replace(progress, rewinds=progress.rewinds + 1, skips=0)
        with Metrics(folder, progress, tensorboard=recipe.tensorboard) as metrics, _interruptions() as interrupted:
            run = _Run(recipe, folder, model, Scored(model), tokenizer, optimizer, text.train_ids, text.val_ids, metrics, report)
            report(
                Started(
                    recipe,
                    model.config,
                    len(text.train_ids),
                    len(text.val_ids),
                    progress.step if progress else 0,
                    peak_memory(model, recipe),
                    (*notes, *skipped),
                )
            )
            if rewound:
                metrics.write(step=progress.step, rewound_from=rewound.step, diverged=rewound.why)
                run.save(progress)  # so that a process killed before the next checkpoint does not rewind a second time
            return run(progress, interrupted)


@dataclass(frozen=True)
class _Run:
    """What stays the same from the first step to the last."""

    recipe: Recipe
    folder: Path
    model: GPT2
    scored: nn.Module  # the same model with its loss, perhaps wrapped: what a step calls
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
        pace = Pace(progress.step if progress else 0, recipe)
        with pace.paused(pace.first):
            progress = self.evaluate(Progress(step=0)) if begins else progress
        stopped = self.ended(progress, interrupted)
        if begins and stopped:
            self.save(progress)
        while not stopped:
            lr = learning_rate(progress.step, recipe.steps, recipe.optim)
            drawn = replace(recipe, seed=(recipe.seed + progress.rewinds) % 2**63)  # after a rewind other windows, other dropout
            limit = divergence.limit(progress.best_loss, self.tokenizer.n_vocab)
            loss, norm = _step(self.scored, self.optimizer, self.train_ids, drawn, progress.step, lr, limit)
            fault = divergence.fault(loss, norm, limit)
            progress = replace(progress, step=progress.step + 1, skips=progress.skips + 1 if fault else 0)
            if fault:
                self.diverged(progress, fault)
            last = progress.step == recipe.steps
            if progress.step - pace.began == ESTIMATE_AFTER:
                self.report(Estimated(progress.step, pace.seconds_left(progress.step)))
            if (progress.step % recipe.log_every == 0 or last) and not fault:
                logged = Logged(progress.step, loss, lr, norm, *pace(progress.step))
                self.metrics.write(**asdict(logged))
                self.report(logged)
            if progress.step % recipe.eval_every == 0 or last:
                with pace.paused(progress.step):
                    progress = self.evaluate(progress)
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

    def diverged(self, progress: Progress, fault: str) -> None:
        """Log a step that went wrong, and stop, go on, or rewind, as the recipe says and while it makes sense."""
        action = self.recipe.on_divergence
        last_resort = {
            "stop": "",
            "skip": f"{divergence.MAX_SKIPS} steps in a row" if progress.skips >= divergence.MAX_SKIPS else "",
            "rewind": f"{divergence.MAX_REWINDS} rewinds did not help" if progress.rewinds >= divergence.MAX_REWINDS else "",
        }[action]
        if action == "rewind" and not state.checkpoints(self.folder):
            last_resort = "no checkpoint to rewind to"
        action = "stop" if last_resort else action
        self.metrics.write(step=progress.step, diverged=fault, action=action)
        self.metrics.sync()
        self.report(Diverged(progress.step, fault, action))
        if action == "rewind":
            raise Rewind(progress.step, fault)
        if action == "stop":
            reason = f" ({last_resort})" if last_resort else ""
            raise InputError(
                f"step {progress.step}: {fault}; the run diverged{reason}, lower optim.lr (checkpoints before it are kept)"
            )

    def evaluate(self, progress: Progress) -> Progress:
        """Score the whole validation text, and keep the model if it is the best so far."""
        recipe, ids = self.recipe, torch.from_numpy(self.val_ids).long()
        lengths = torch.tensor([len(self.tokenizer.token_bytes(i)) for i in range(self.tokenizer.n_vocab)])
        rows = recipe.batch_size // recipe.grad_accum  # as many as a step holds in memory at a time
        score = language_score(self.model, ids, lengths, context=recipe.context, batch_size=rows)
        if not math.isfinite(score.loss):
            if progress.step and recipe.on_divergence == "rewind":
                self.diverged(progress, f"validation loss {score.loss}")
            remedy = "lower optim.lr" if progress.step else "the model it starts from is broken"
            raise InputError(f"step {progress.step}: the validation loss is {score.loss}; {remedy} (nothing of it was saved)")
        best = progress.best_loss is None or score.loss < progress.best_loss
        if best:
            progress = replace(progress, best_loss=score.loss, best_step=progress.step, evals_since_best=0)
            state.save_best(self.folder, self.model, self.tokenizer, progress)
        else:
            progress = replace(progress, evals_since_best=progress.evals_since_best + 1)
        self.metrics.write(step=progress.step, val_loss=score.loss, val_bits_per_byte=score.bits_per_byte)
        sample = _sample(self.model, self.tokenizer, self.val_ids, recipe)
        self.report(Evaluated(progress.step, score, best, sample, parted(self.metrics.rows, progress.best_step)))
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
    if recipe.checkpointing:
        for block in getattr(model, "h", ()):
            block.forward = _checkpointed(block.forward)
    for parameter in model.parameters():
        # Out of the mapped file, whose pages would otherwise be copied one by one in the first step; and to an address as even as
        # any other, because some kernels sum in another order where it is not, and a resumed run would drift from the first.
        parameter.data = parameter.data.clone()


def _checkpointed(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``forward``, whose intermediate results are not kept for the backward pass but computed again there."""
    return lambda *inputs: checkpoint(forward, *inputs, use_reentrant=False) if torch.is_grad_enabled() else forward(*inputs)


def _new_model(recipe: Recipe, tokenizer: Tokenizer) -> GPT2 | Bigram:
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


def _step(
    scored: nn.Module,
    optimizer: torch.optim.Optimizer,
    ids: np.ndarray,
    recipe: Recipe,
    step: int,
    lr: float,
    limit: float = math.inf,
) -> tuple[float, float]:
    """One optimizer step; returns the batch's loss and the gradient's norm before clipping.

    Where either is not finite, or the loss is above ``limit``, the weights stay as they were.
    """
    scored.train()
    device = next(scored.parameters()).device
    torch.manual_seed(np.random.SeedSequence((recipe.seed, step)).generate_state(1, np.uint64)[0].item())
    x, y = (
        torch.from_numpy(part).to(device) for part in batch(ids, recipe.context, recipe.batch_size, seed=recipe.seed, step=step)
    )
    total = 0.0
    for part_x, part_y in zip(x.chunk(recipe.grad_accum), y.chunk(recipe.grad_accum), strict=True):
        with torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bf16"):
            loss = scored(part_x, part_y) / recipe.grad_accum
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(scored.parameters(), recipe.optim.clip or math.inf).item()
    for group in optimizer.param_groups:
        group["lr"] = lr
    if not divergence.fault(total, norm, limit):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total, norm


def _sample(model: GPT2, tokenizer: Tokenizer, val_ids: np.ndarray, recipe: Recipe) -> str:
    """What the model writes after the first words of the validation text."""
    if not recipe.sample_tokens:
        return ""
    prompt = [int(i) for i in val_ids[:8]]
    if isinstance(model, Bigram):
        return tokenizer.decode(model.sample(prompt, recipe.sample_tokens, recipe.seed))
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
