"""The training loop, for training from scratch and for fine-tuning.

All random numbers of step ``n`` (windows, dropout) depend only on the seed and on ``n``. So an interrupted and resumed run is
bit-identical to an undisturbed one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from gpt2.checkpoint.containers.mapped_file import require_whole_files
from gpt2.data import Tokenizer
from gpt2.errors import InputError
from gpt2.measure.allocator import keep_freed_memory
from gpt2.measure.metrics import LanguageScore, language_score
from gpt2.measure.windows import Windows
from gpt2.model import GPT2
from gpt2.train import adapted, divergence, models, parallel, state
from gpt2.train.bigram import Bigram
from gpt2.train.corpus import Corpus, corpus
from gpt2.train.divergence import Rewind
from gpt2.train.estimate import peak_memory
from gpt2.train.events import Diverged, Estimated, Evaluated, Event, Listener, Logged, Result, Started
from gpt2.train.feed import Feed
from gpt2.train.interrupt import interruptions
from gpt2.train.loss import Scored
from gpt2.train.metrics import Metrics, Pace, overfitting
from gpt2.train.optim import adamw, learning_rate
from gpt2.train.parallel import Ranks
from gpt2.train.recipe import Recipe
from gpt2.train.speed import tokens_at_peak
from gpt2.train.start import Start, start
from gpt2.train.state import Progress

__all__ = ["Diverged", "Estimated", "Evaluated", "Logged", "Result", "Started", "train"]

ESTIMATE_AFTER = 10  # steps


def train(
    recipe: Recipe, folder: str | Path, *, init: str | None = None, fresh: bool = False, report: Listener = lambda event: None
) -> Result:
    """Run ``recipe`` in ``folder``: from scratch, or from the model named ``init``.

    If ``folder`` holds a run of the same recipe, the run resumes from the newest intact checkpoint. A folder with another run is
    refused, unless ``fresh`` clears it. Ctrl-C or SIGTERM finishes the step (and an evaluation in progress), saves, and returns a
    result that says "interrupted"; a second signal acts at once. The process keeps freed memory (:mod:`gpt2.measure.allocator`).

    In a process started by `torchrun` or :mod:`gpt2.train.launch`, the ranks of the job share each batch. Only rank 0 needs the
    folder and ``init``, and only rank 0 reports.

    Raises:
        InputError: text, model, recipe or folder do not work together, the run diverged, or the disk is full.
        PeerLost: another process of the job died.
    """
    recipe, folder = recipe.resolved(init), Path(folder)
    keep_freed_memory()
    adapted.check(recipe, init)
    rewind: Rewind | None = None
    signals: list[int] = []
    with parallel.joined(recipe.device) as ranks:
        while True:
            begin = partial(start, recipe, folder, init, fresh and not rewind, ranks)
            try:
                return _train(recipe, folder, begin, ranks, report, rewind, signals)
            except Rewind as request:
                rewind = request


def _train(
    recipe: Recipe,
    folder: Path,
    begin: Callable[[], Start],
    ranks: Ranks,
    report: Listener,
    rewind: Rewind | None,
    signals: list[int],
) -> Result:
    """Train until the run ends or must be rewound; ``rewind`` says that it just was.

    A function of its own, because DDP's objects must be gone before the process group is destroyed: freeing them later hangs.
    """
    with ExitStack() as stack:
        run, progress, started = _open(recipe, folder, begin, ranks, report, stack)
        interrupted = stack.enter_context(interruptions(signals))
        run.tell(started)
        return run(run.rewound(progress, rewind) if rewind else progress, interrupted)


def _open(
    recipe: Recipe, folder: Path, begin: Callable[[], Start], ranks: Ranks, report: Listener, stack: ExitStack
) -> tuple[_Run, Progress | None, Started]:
    """Make the run ready on every rank. ``stack`` holds the folder's lock and the metrics file until the run ends.

    Returns the run, the progress of the checkpoint it resumes from (None: a new run), and the event that announces it. Only rank
    0 calls ``begin``, which reads the folder, the text and the weights; it broadcasts what the others need.
    """
    ranks.part(recipe)  # refuse a batch that does not divide before anything is opened

    def lock_and_begin() -> Start | None:
        if ranks.rank != 0:
            return None
        stack.enter_context(state.locked(folder))
        return begin()

    own = ranks.together(lock_and_begin)
    agreed = ranks.first(lambda: own.agreed if own else None)
    assert agreed is not None, "rank 0 has begun"
    recipe, progress = agreed.recipe, agreed.progress
    text = ranks.together(lambda: own.text if own else _same_text(corpus(recipe, agreed.tokenizer), agreed.sha256, ranks))
    model = own.model if own else models.empty(agreed.config, recipe)
    parallel.broadcast(model, ranks)
    models.prepare(model, recipe)
    scored = parallel.wrap(Scored(model), recipe, ranks)
    optimizer = adamw(model, recipe.optim)
    if progress:
        parallel.restore(optimizer, own.moments if own else None, ranks)
    writes = folder if ranks.rank == 0 else None
    metrics = ranks.together(lambda: stack.enter_context(Metrics(writes, progress, tensorboard=recipe.tensorboard)))
    part, feed = ranks.part(recipe), Feed(text.train_ids, ranks)
    run = _Run(recipe, part, folder, ranks, model, scored, agreed.tokenizer, optimizer, text, feed, metrics, report)
    memory = peak_memory(model, part, ranks.size if recipe.parallel == "fsdp" else 1)
    step, notes = progress.step if progress else 0, (*agreed.notes, *ranks.notes())
    return run, progress, Started(recipe, agreed.config, len(text.train_ids), len(text.val_ids), step, memory, notes)


def _same_text(text: Corpus, sha256: str, ranks: Ranks) -> Corpus:
    if text.sha256 != sha256:
        raise InputError(f"rank {ranks.rank} reads another text than rank 0; put the same files on every machine")
    return text


@dataclass(frozen=True)
class _Run:
    """One run: everything that stays the same from the first step to the last."""

    recipe: Recipe
    part: Recipe  # this rank's
    folder: Path
    ranks: Ranks
    model: GPT2 | Bigram
    scored: nn.Module  # returns the loss; its gradients are those of the whole batch
    tokenizer: Tokenizer
    optimizer: torch.optim.Optimizer
    text: Corpus
    feed: Feed
    metrics: Metrics
    report: Listener

    def __call__(self, resumed: Progress | None, interrupted: Callable[[], bool]) -> Result:
        """Train to the end: all steps done, early stopping, or an interruption. ``resumed`` is None for a new run."""
        recipe = self.recipe
        pace = Pace(resumed.step if resumed else 0, recipe, tokens_at_peak(recipe, self.model.config, self.ranks))
        with pace.paused(pace.first):
            progress = resumed or self.evaluate(Progress(step=0))
        stopped = self.ended(progress, interrupted)
        if stopped and not resumed:
            self.save(progress)
        while not stopped:
            lr = learning_rate(progress.step, recipe.steps, recipe.optim)
            seeded = replace(recipe, seed=(recipe.seed + progress.rewinds) % 2**63)  # a rewind changes windows and dropout
            limit = divergence.limit(progress.best_loss, self.tokenizer.n_vocab)
            require_whole_files()
            loss, norm = _step(self.scored, self.optimizer, self.feed, seeded, progress.step, lr, limit)
            fault = divergence.fault(loss, norm, limit)
            progress = replace(progress, step=progress.step + 1, skips=progress.skips + 1 if fault else 0)
            if fault:
                self.diverged(progress, fault)
            last = progress.step == recipe.steps
            if progress.step - pace.began == ESTIMATE_AFTER:
                self.tell(Estimated(progress.step, pace.seconds_left(progress.step)))
            if (progress.step % recipe.log_every == 0 or last) and not fault:
                logged = Logged(progress.step, loss, lr, norm, *pace(progress.step))
                self.write(**{name: value for name, value in asdict(logged).items() if name != "mfu" or value})
                self.tell(logged)
            if progress.step % recipe.eval_every == 0 or last:
                with pace.paused(progress.step):
                    progress = self.evaluate(progress)
            stopped = self.ended(progress, interrupted)
            if stopped or progress.step % recipe.save_every == 0:
                self.save(progress)
        assert progress.best_loss is not None, "every run is evaluated before its first step"
        return Result(self.folder, progress.step, progress.best_loss, progress.best_step, stopped)

    def rewound(self, progress: Progress | None, rewind: Rewind) -> Progress:
        """The progress of the checkpoint that the run was rewound to, logged and saved.

        Saved at once, so that a process killed before the next checkpoint does not rewind a second time.
        """
        assert progress is not None, "a run is rewound only where it has a checkpoint"
        progress = replace(progress, rewinds=progress.rewinds + 1, skips=0)
        self.write(step=progress.step, rewound_from=rewind.step, diverged=rewind.why)
        self.save(progress)
        return progress

    def ended(self, progress: Progress, interrupted: Callable[[], bool]) -> str:
        """Why the run ends here ("finished", "early", "interrupted"); "" where it goes on."""
        stop = self.ranks.any(interrupted())
        if progress.step >= self.recipe.steps:
            return "finished"
        if self.recipe.patience and progress.evals_since_best >= self.recipe.patience:
            return "early"
        return "interrupted" if stop else ""

    def diverged(self, progress: Progress, fault: str) -> None:
        """Log a diverged step; then stop, skip it, or rewind, as the recipe says. Too many skips or rewinds stop the run."""
        action = self.recipe.on_divergence
        last_resort = {
            "stop": "",
            "skip": f"{divergence.MAX_SKIPS} steps in a row" if progress.skips >= divergence.MAX_SKIPS else "",
            "rewind": f"{divergence.MAX_REWINDS} rewinds did not help" if progress.rewinds >= divergence.MAX_REWINDS else "",
        }[action]
        if action == "rewind" and not self.ranks.first(lambda: len(state.checkpoints(self.folder))):
            last_resort = "no checkpoint to rewind to"
        action = "stop" if last_resort else action
        self.write(step=progress.step, diverged=fault, action=action)
        self.ranks.together(self.metrics.sync)
        self.tell(Diverged(progress.step, fault, action))
        if action == "rewind":
            raise Rewind(progress.step, fault)
        if action == "stop":
            reason = f" ({last_resort})" if last_resort else ""
            raise InputError(
                f"step {progress.step}: {fault}; the run diverged{reason}, lower optim.lr (checkpoints before it are kept)"
            )

    def evaluate(self, progress: Progress) -> Progress:
        """Score the whole validation text, and save the model if it is the best so far."""
        with parallel.whole(self.scored):
            score = self.score()
            if not math.isfinite(score.loss):
                if progress.step and self.recipe.on_divergence == "rewind":
                    self.diverged(progress, f"validation loss {score.loss}")
                remedy = "lower optim.lr" if progress.step else "the initial model is broken, choose another one"
                raise InputError(f"step {progress.step}: the validation loss is {score.loss}; {remedy} (this step was not saved)")
            best = progress.best_loss is None or score.loss < progress.best_loss
            if best:
                progress = replace(progress, best_loss=score.loss, best_step=progress.step, evals_since_best=0)
            else:
                progress = replace(progress, evals_since_best=progress.evals_since_best + 1)
            sample = self.ranks.first(partial(self.keep_and_sample, progress, best))
            self.write(step=progress.step, val_loss=score.loss, val_bits_per_byte=score.bits_per_byte)
        self.tell(Evaluated(progress.step, score, best, sample, overfitting(self.metrics.rows, progress.best_step)))
        return progress

    def keep_and_sample(self, progress: Progress, best: bool) -> str:
        """On rank 0: save the model if it is the best so far, and return a text that it generates."""
        model = self.plain()
        if best:
            state.save_best(self.folder, model, self.tokenizer, progress)
        return models.sample(model, self.tokenizer, self.text.val_ids, self.recipe)

    def score(self) -> LanguageScore:
        """Score the validation text; the ranks share its windows."""
        ids = torch.from_numpy(self.text.val_ids).long()
        lengths = torch.tensor([len(self.tokenizer.token_bytes(i)) for i in range(self.tokenizer.n_vocab)])
        rows = self.part.batch_size // self.part.grad_accum  # as many as a training step holds in memory
        context = self.recipe.context
        if self.ranks.size == 1:
            return language_score(self.model, ids, lengths, Windows(context), batch_size=rows)
        windows = -(-(len(ids) - 1) // context)
        first, end = (windows * rank // self.ranks.size * context for rank in (self.ranks.rank, self.ranks.rank + 1))
        own = ids[first : end + 1]
        part = language_score(self.model, own, lengths, Windows(context), batch_size=rows) if len(own) > 1 else None
        total, tokens, n_bytes = self.ranks.sum(*((part.loss * part.tokens, part.tokens, part.bytes) if part else (0, 0, 0)))
        return LanguageScore(total / tokens, int(tokens), int(n_bytes), context, context)

    def save(self, progress: Progress) -> None:
        moments = parallel.gathered(self.optimizer)
        self.ranks.together(self.metrics.sync)
        with parallel.whole(self.scored):
            self.ranks.first(lambda: state.save(self.folder, self.plain(), self.tokenizer, moments, progress) and None)

    def plain(self) -> GPT2 | Bigram:
        """The model with whole parameters. Under FSDP, call this inside :func:`parallel.whole`."""
        return models.copied(self.model, self.recipe) if parallel.sharded(self.scored) else self.model

    def write(self, **row: object) -> None:
        self.ranks.together(lambda: self.metrics.write(**row))

    def tell(self, event: Event) -> None:
        if self.ranks.rank == 0:
            self.report(event)


def _step(
    scored: nn.Module,
    optimizer: torch.optim.Optimizer,
    feed: Feed,
    recipe: Recipe,
    step: int,
    lr: float,
    limit: float = math.inf,
) -> tuple[float, float]:
    """Run one optimizer step; return the whole batch's loss (nats per token) and the gradient norm before clipping.

    The weights stay unchanged where loss or norm is not finite, or the loss is above ``limit``.
    """
    scored.train()
    ranks = feed.ranks
    part = ranks.part(recipe)
    seed = np.random.SeedSequence((recipe.seed, step, ranks.rank))  # rank 0's is that of one process
    _seed(seed.generate_state(1, np.uint64)[0].item(), ranks.device)
    x, y = (windows.chunk(part.grad_accum) for windows in feed(recipe, step))
    losses = []  # read after the last part is launched: each read waits for the GPU
    for index in range(part.grad_accum):
        with (
            parallel.synchronised(scored, index == part.grad_accum - 1),
            torch.autocast(ranks.device.type, torch.bfloat16, enabled=recipe.precision == "bf16"),
        ):
            loss = scored(x[index], y[index]) / part.grad_accum
        loss.backward()
        losses.append(loss.detach())
    feed.ahead(recipe, step + 1)
    total = ranks.sum(sum(each.item() for each in losses))[0] / ranks.size
    norm = parallel.norm_of(torch.nn.utils.clip_grad_norm_(scored.parameters(), recipe.optim.clip or math.inf))
    for group in optimizer.param_groups:
        group["lr"] = lr
    if not divergence.fault(total, norm, limit):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total, norm


def _seed(seed: int, device: torch.device) -> None:
    """Seed the CPU and ``device``. ``torch.manual_seed`` also formats a stack trace for every missing backend; this costs 2 % of
    a small model's step.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
