"""The training loop, for training from scratch and for fine-tuning.

Random numbers of step ``n`` depend only on the seed and ``n``, so a resumed run is bit-identical to an uninterrupted one.
"""

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpt2.checkpoint.containers import require_whole_files
from gpt2.errors import InputError, require_memory, user_path
from gpt2.measure.allocator import keep_freed_memory
from gpt2.model import GPT2
from gpt2.optim import adamw, learning_rate
from gpt2.train import models, parallel, shards, state
from gpt2.train.bigram import Bigram
from gpt2.train.corpus import Corpus, corpus
from gpt2.train.cost import peak_memory, tokens_at_peak
from gpt2.train.evaluation import scores
from gpt2.train.loss import WithLoss
from gpt2.train.metrics import Diverged, Estimated, Evaluated, Event, Logged, Metrics, Pace, Result, Started
from gpt2.train.parallel import Ranks
from gpt2.train.recipe import Recipe
from gpt2.train.runs import overfitting
from gpt2.train.start import Start, start
from gpt2.train.state import Progress
from gpt2.train.step import MAX_REWINDS, MAX_SKIPS, Feed, Rewind, fault_of, loss_limit, optimizer_step

__all__ = ["Diverged", "Estimated", "Evaluated", "Logged", "Result", "Started", "train"]

ESTIMATE_AFTER = 10  # steps
Listener = Callable[[Event], None]


def train(
    recipe: Recipe, folder: str | Path, *, init: str | None = None, fresh: bool = False, report: Listener = lambda event: None
) -> Result:
    """Run ``recipe`` in ``folder``: from scratch, or from the model named ``init``.

    A run of the same recipe in ``folder`` is resumed from its newest intact checkpoint; another run is an error, unless ``fresh``
    deletes it. Ctrl-C or SIGTERM finishes the step (and an evaluation in progress), saves, and returns a result that says
    "interrupted"; a second signal acts at once. In a process started by `torchrun` or :mod:`gpt2.train.launch`, the ranks share
    each batch; only rank 0 needs the folder and ``init``, and reports.

    Raises InputError: text, model, recipe or folder do not fit together, the run diverged, or the disk is full. Raises PeerLost:
    another process of the job died.
    """
    recipe.check(init)
    recipe, folder = recipe.resolved(init), user_path(folder)
    keep_freed_memory()
    rewind: Rewind | None = None
    signals: list[int] = []
    with parallel.joined(recipe.device) as ranks:
        while True:
            begin = partial(start, recipe, folder, init, fresh and not rewind, ranks)
            try:
                return _train(partial(_Run, recipe, begin, folder, ranks, report), rewind, signals)
            except Rewind as request:
                rewind = request.with_traceback(None)  # whose frames hold the model and the moments


def _train(opened: Callable[[ExitStack], "_Run"], rewind: Rewind | None, signals: list[int]) -> Result:
    """Train until the end or a rewind. Separate, because freeing DDP's objects after the process group is destroyed hangs."""
    with ExitStack() as stack:
        run = opened(stack)
        interrupted = stack.enter_context(interruptions(signals))
        run.announce()
        return run(run.rewound(rewind) if rewind else run.resumed, interrupted)


class _Run:
    """One run, opened on every rank, with everything that stays the same in all steps."""

    def __init__(
        self, recipe: Recipe, begin: Callable[[], Start], folder: Path, ranks: Ranks, report: Listener, stack: ExitStack
    ) -> None:
        """Open the run; only rank 0 calls ``begin``. ``stack`` keeps the folder's lock and the metrics file until the end."""
        self.folder, self.ranks, self.report = folder, ranks, report
        ranks.part(recipe)  # raises for a batch that does not divide, before anything is opened

        def lock_and_begin() -> Start | None:
            if ranks.rank != 0:
                return None
            stack.enter_context(state.locked(folder))
            return begin()

        own = ranks.together(lock_and_begin, patient=True)
        shared = ranks.first(lambda: own.shared() if own else None)
        started = own or shared
        assert started is not None, "rank 0 has begun"

        def read_text() -> Corpus:
            text = started.text or corpus(recipe, started.tokenizer, check=ranks.leads)
            if text.sha256 not in (started.sha256, ""):
                raise InputError(f"rank {ranks.rank} reads another text than rank 0; put the same files on every machine")
            return text

        self.recipe = recipe = started.recipe
        self.part = ranks.part(recipe)  # this rank's part of the recipe
        self.tokenizer, self.resumed = started.tokenizer, started.progress  # None: a new run
        # The first process of each machine writes or checks its token files; then the others map them.
        text = ranks.together(lambda: read_text() if ranks.leads else None, patient=True)
        self.text = ranks.together(lambda: text or read_text())
        self.model = started.model or models.empty(started.config, recipe, self.text.classes)
        parallel.broadcast(self.model, ranks)
        models.prepare(self.model, recipe)
        self.feed = Feed(self.text.train_ids, ranks, marks=self.text.train_marks, end=self.text.end)
        self.scored = parallel.wrap(WithLoss(self.model, partial=self.feed.partial), recipe, ranks)  # gradients of a whole batch
        self.optimizer = adamw(self.model, recipe.optim)
        if self.resumed:
            parallel.restore(self.optimizer, started.moments, ranks)
        self.by_all = shards.by_all(folder, self.model, recipe, ranks)
        every = "every process writes its part of a checkpoint" if self.by_all else ""
        self.notes = tuple(filter(None, (*started.notes, *self.text.notes, *ranks.notes(), every)))
        leads = ranks.rank == 0
        self.metrics = ranks.together(
            lambda: stack.enter_context(closing(Metrics(folder, self.resumed, recipe))) if leads else None
        )

    def announce(self) -> None:
        recipe, text = self.recipe, self.text
        memory = peak_memory(self.model, self.part, self.ranks.size if recipe.parallel == "fsdp" else 1)
        if self.part.device == "cpu" or not torch.cuda.is_available():
            require_memory(memory, f"{recipe.batch_size} windows of {recipe.context} tokens", "lower batch_size or context")
        step = self.resumed.step if self.resumed else 0
        self.tell(Started(recipe, self.model.config, len(text.train_ids), len(text.val_ids), step, memory, self.notes))

    def __call__(self, resumed: Progress | None, interrupted: Callable[[], bool]) -> Result:
        """Train until all steps are done, early stopping, or an interruption; ``resumed`` is None for a new run."""
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
            limit = loss_limit(progress.best_loss, self.tokenizer.n_vocab)
            require_whole_files()
            loss, norm = optimizer_step(self.scored, self.optimizer, self.feed, seeded, progress.step, lr, limit)
            pace.tokens += recipe.batch_size * self.feed.width
            fault = fault_of(loss, norm, limit)
            progress = replace(progress, step=progress.step + 1, skips=progress.skips + 1 if fault else 0)
            if fault:
                self.diverged(progress, fault)
            last = progress.step == recipe.steps
            if progress.step - pace.began == ESTIMATE_AFTER:
                self.tell(Estimated(progress.step, pace.seconds_left(progress.step)))
            if (progress.step % recipe.log_every == 0 or last) and not fault and (loss or norm):
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

    def rewound(self, rewind: Rewind) -> Progress:
        """Return the checkpoint's progress, saved at once so that a killed process does not rewind a second time."""
        assert self.resumed is not None, "a run is rewound only where it has a checkpoint"
        progress = replace(self.resumed, rewinds=self.resumed.rewinds + 1, skips=0)
        self.write(step=progress.step, rewound_from=rewind.step, diverged=rewind.why)
        self.save(progress)
        return progress

    def ended(self, progress: Progress, interrupted: Callable[[], bool]) -> str:
        """Return why the run ends here ("finished", "early", "interrupted"), or ""."""
        stop = self.ranks.any(interrupted())
        if progress.step >= self.recipe.steps:
            return "finished"
        if self.recipe.patience and progress.evals_since_best >= self.recipe.patience:
            return "early"
        return "interrupted" if stop else ""

    def diverged(self, progress: Progress, fault: str) -> None:
        """Log a diverged step; then stop, skip it, or rewind, as the recipe says. Too many skips or rewinds stop the run."""
        action = self.recipe.on_divergence
        last_resort = ""
        if action == "skip" and progress.skips >= MAX_SKIPS:
            last_resort = f" ({MAX_SKIPS} steps in a row)"
        elif action == "rewind" and not self.ranks.first(lambda: len(state.checkpoints(self.folder))):
            last_resort = " (no checkpoint to rewind to)"
        elif action == "rewind" and progress.rewinds >= MAX_REWINDS:
            last_resort = f" ({MAX_REWINDS} rewinds did not help)"
        action = "stop" if last_resort else action
        self.write(step=progress.step, diverged=fault, action=action)
        self.ranks.together(lambda: self.metrics.sync() if self.metrics else None)
        self.tell(Diverged(progress.step, fault, action))
        if action == "rewind":
            raise Rewind(progress.step, fault)
        if action == "stop":
            diverged = f"step {progress.step}: {fault}; the run diverged{last_resort}"
            raise InputError(f"{diverged}, lower optim.lr (checkpoints before it are kept)")

    def evaluate(self, progress: Progress) -> Progress:
        """Score the whole validation text, and save the model if it is the best so far."""
        with parallel.whole(self.scored):
            score, every, by_rank, table = scores(self.model, self.text, self.recipe, self.ranks)
            if not math.isfinite(score.loss):
                if progress.step and self.recipe.on_divergence == "rewind":
                    self.diverged(progress, f"validation loss {score.loss}")
                remedy = "lower optim.lr" if progress.step else "the initial model is broken, choose another one"
                raise InputError(f"step {progress.step}: the validation loss is {score.loss}; {remedy} (this step was not saved)")
            progress = replace(progress, evals_since_best=progress.evals_since_best + 1)
            if best := progress.best_loss is None or score.loss < progress.best_loss:
                progress = replace(progress, best_loss=score.loss, best_step=progress.step, evals_since_best=0)
            sample = self.ranks.first(partial(self.keep_and_sample, progress, best))
            row = {"val_loss": score.loss, "val_bits_per_byte": score.bits_per_byte, "val_tokens": score.tokens, "sample": sample}
            if table:
                row = {"val_loss": score.loss, "val_documents": score.tokens, "confusion": table, "sample": ""}
            row |= {"val_loss_all": every.loss} if every else {}
            row |= {"rank_tokens_per_second": by_rank} if by_rank else {}
            self.write(step=progress.step, **row)
        warning = overfitting(self.metrics.rows, progress.best_step) if self.metrics else ""
        self.tell(Evaluated(progress.step, score, best, sample, warning, every, by_rank, table))
        return progress

    def keep_and_sample(self, progress: Progress, best: bool) -> str:
        """On rank 0, save the model if ``best``, and return a text that it generates."""
        model = self.plain()
        if best:
            state.save_best(self.folder, model, self.tokenizer, progress)
        return models.sample(model, self.tokenizer, self.text.beginning(), self.recipe)

    def save(self, progress: Progress) -> None:
        self.ranks.together(lambda: self.metrics.sync() if self.metrics else None)
        if self.by_all and isinstance(self.model, GPT2):
            return shards.save(self.folder, self.model, self.tokenizer, self.optimizer, progress, self.ranks)
        moments = parallel.gathered(self.optimizer)
        with parallel.whole(self.scored):
            self.ranks.first(lambda: state.save(self.folder, self.plain(), self.tokenizer, moments, progress))

    def plain(self) -> GPT2 | Bigram:
        """Return the model with whole parameters; under FSDP, call this inside :func:`parallel.whole`."""
        return models.copied(self.model, self.recipe) if parallel.sharded(self.scored) else self.model

    def write(self, **row: object) -> None:
        self.ranks.together(lambda: self.metrics.write(**row) if self.metrics else None)

    def tell(self, event: Event) -> None:
        if self.ranks.rank == 0:
            self.report(event)


@contextmanager
def interruptions(signals: list[int]) -> Iterator[Callable[[], bool]]:
    """Record the first Ctrl-C or SIGTERM in the caller's list, which is read between steps; a second signal acts at once."""
    before: dict[int, Any] = {}

    def note(number: int, frame: object) -> None:
        signals.append(number)
        restore()

    def restore() -> None:
        for handled, handler in before.items():
            signal.signal(handled, handler)

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, note) or signal.SIG_DFL  # None: set from outside Python
    except ValueError:  # only the main thread may handle signals
        before.clear()
    try:
        yield lambda: bool(signals)
    finally:
        restore()
