"""The only training loop: from scratch, or from a pretrained model.

Every random number of step ``n`` (which windows, which units dropout spares) is a function of the seed and of ``n`` alone, so
a run that is interrupted and goes on computes, bit for bit, what it would have computed undisturbed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from gpt2.checkpoint.containers.mapped_file import require_whole_files
from gpt2.config import GPT2Config
from gpt2.data import Tokenizer
from gpt2.errors import InputError
from gpt2.measure.allocator import keep_freed_memory
from gpt2.measure.metrics import LanguageScore, language_score
from gpt2.measure.windows import Windows
from gpt2.model import GPT2
from gpt2.train import adapted, divergence, models, parallel, state
from gpt2.train.bigram import Bigram, BigramConfig
from gpt2.train.corpus import Corpus, corpus
from gpt2.train.divergence import Rewind
from gpt2.train.estimate import peak_memory
from gpt2.train.events import Diverged, Estimated, Evaluated, Listener, Logged, Result, Started
from gpt2.train.feed import Feed
from gpt2.train.interrupt import interruptions
from gpt2.train.loss import Scored
from gpt2.train.metrics import Metrics, Pace, parted
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

    A folder that holds this very run goes on from its newest intact checkpoint; one that holds another is refused, unless
    ``fresh`` clears it. Ctrl-C or SIGTERM finishes the step (and an evaluation under way), saves, and returns a result that
    says "interrupted"; a second one acts at once. Memory that is freed stays with the process (:mod:`gpt2.measure.allocator`).

    In a process that `torchrun` or :mod:`gpt2.train.launch` started, the ranks of the job share each batch; only
    rank 0 needs the folder and ``init``, and only it reports.

    Raises:
        InputError: text, model, recipe or folder do not work together, the run diverged, or the disk is full.
        PeerLost: another process of the job died.
    """
    recipe, folder = recipe.resolved(init), Path(folder)
    keep_freed_memory()
    adapted.check(recipe, init)
    rewound: Rewind | None = None
    signals: list[int] = []
    with parallel.joined(recipe.device) as ranks:
        while True:
            try:
                return _train(recipe, folder, init, fresh and not rewound, report, ranks, rewound, signals)
            except Rewind as wanted:
                rewound = wanted


def _train(
    asked: Recipe,
    folder: Path,
    init: str | None,
    fresh: bool,
    report: Listener,
    ranks: Ranks,
    rewound: Rewind | None,
    signals: list[int],
) -> Result:
    """:func:`train`, until it is to be rewound; ``rewound`` says that it just was, and why."""
    mine: list[Start] = []  # rank 0's alone

    def begin() -> tuple[Recipe, GPT2Config | BigramConfig, Tokenizer, str, Progress | None, tuple[str, ...]]:
        until_the_end.enter_context(state.locked(folder))
        mine.append(start(asked, folder, init, fresh, ranks))
        return mine[0].recipe, mine[0].model.config, mine[0].text.tokenizer, mine[0].text.sha256, mine[0].progress, mine[0].notes

    with ExitStack() as until_the_end:
        ranks.part(asked)  # refused before anything is opened
        recipe, config, tokenizer, sha256, progress, notes = ranks.first(begin)
        part = ranks.part(recipe)
        text = ranks.together(lambda: mine[0].text if mine else _the_same(corpus(recipe, tokenizer), sha256, ranks))
        model = parallel.spread(mine[0].model if mine else models.hollow(config, recipe), ranks)
        models.prepare(model, recipe)
        scored = parallel.wrap(Scored(model), recipe, ranks)
        optimizer = adamw(model, recipe.optim)
        if progress:
            parallel.restore(optimizer, mine[0].moments if mine else None, ranks)
        mine.clear()
        if progress and rewound:
            progress = replace(progress, rewinds=progress.rewinds + 1, skips=0)
        writes = folder if ranks.rank == 0 else None
        metrics = ranks.together(lambda: until_the_end.enter_context(Metrics(writes, progress, tensorboard=recipe.tensorboard)))
        interrupted = until_the_end.enter_context(interruptions(signals))
        feed = Feed(text.train_ids, ranks)
        run = _Run(recipe, part, folder, ranks, model, scored, tokenizer, optimizer, text, feed, metrics, report)
        run.tell(
            Started(
                recipe,
                config,
                len(text.train_ids),
                len(text.val_ids),
                progress.step if progress else 0,
                peak_memory(model, part, ranks.size if recipe.parallel == "fsdp" else 1),
                (*notes, *ranks.notes()),
            )
        )
        if rewound:
            run.write(step=progress.step, rewound_from=rewound.step, diverged=rewound.why)
            run.save(progress)  # so that a process killed before the next checkpoint does not rewind a second time
        return run(progress, interrupted)


def _the_same(text: Corpus, sha256: str, ranks: Ranks) -> Corpus:
    if text.sha256 != sha256:
        raise InputError(f"rank {ranks.rank} finds another text than rank 0; put the same files on every machine")
    return text


@dataclass(frozen=True)
class _Run:
    """What stays the same from the first step to the last."""

    recipe: Recipe
    part: Recipe  # this rank's
    folder: Path
    ranks: Ranks
    model: GPT2 | Bigram
    scored: nn.Module  # the model's loss, whose gradients are those of the whole batch
    tokenizer: Tokenizer
    optimizer: torch.optim.Optimizer
    text: Corpus
    feed: Feed
    metrics: Metrics
    report: Listener

    def __call__(self, progress: Progress | None, interrupted: Callable[[], bool]) -> Result:
        """From where the run stands (None: nowhere yet) to its end, whichever of the three comes first."""
        recipe = self.recipe
        begins = progress is None
        pace = Pace(progress.step if progress else 0, recipe, tokens_at_peak(recipe, self.model.config, self.ranks))
        with pace.paused(pace.first):
            progress = self.evaluate(Progress(step=0)) if begins else progress
        stopped = self.ended(progress, interrupted)
        if begins and stopped:
            self.save(progress)
        while not stopped:
            lr = learning_rate(progress.step, recipe.steps, recipe.optim)
            drawn = replace(recipe, seed=(recipe.seed + progress.rewinds) % 2**63)  # after a rewind other windows, other dropout
            limit = divergence.limit(progress.best_loss, self.tokenizer.n_vocab)
            require_whole_files()
            loss, norm = _step(self.scored, self.optimizer, self.feed, drawn, progress.step, lr, limit)
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
        return Result(self.folder, progress.step, progress.best_loss, progress.best_step, stopped)

    def ended(self, progress: Progress, interrupted: Callable[[], bool]) -> str:
        """How the run ends here, or nothing: then it goes on."""
        stop = self.ranks.any(interrupted())
        if progress.step >= self.recipe.steps:
            return "finished"
        if self.recipe.patience and progress.evals_since_best >= self.recipe.patience:
            return "early"
        return "interrupted" if stop else ""

    def diverged(self, progress: Progress, fault: str) -> None:
        """Log a step that went wrong, and stop, go on, or rewind, as the recipe says and while it makes sense."""
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
        """Score the whole validation text, and keep the model if it is the best so far."""
        with parallel.whole(self.scored):
            score = self.score()
            if not math.isfinite(score.loss):
                if progress.step and self.recipe.on_divergence == "rewind":
                    self.diverged(progress, f"validation loss {score.loss}")
                remedy = "lower optim.lr" if progress.step else "the model it starts from is broken"
                raise InputError(f"step {progress.step}: the validation loss is {score.loss}; {remedy} (nothing of it was saved)")
            best = progress.best_loss is None or score.loss < progress.best_loss
            plain = self.plain()
            if best:
                progress = replace(progress, best_loss=score.loss, best_step=progress.step, evals_since_best=0)
                self.ranks.first(lambda: state.save_best(self.folder, plain, self.tokenizer, progress))
            else:
                progress = replace(progress, evals_since_best=progress.evals_since_best + 1)
            self.write(step=progress.step, val_loss=score.loss, val_bits_per_byte=score.bits_per_byte)
            sample = self.ranks.first(lambda: models.sample(plain, self.tokenizer, self.text.val_ids, self.recipe))
        self.tell(Evaluated(progress.step, score, best, sample, parted(self.metrics.rows, progress.best_step)))
        return progress

    def score(self) -> LanguageScore:
        """Of the validation text, whose windows the ranks share."""
        ids = torch.from_numpy(self.text.val_ids).long()
        lengths = torch.tensor([len(self.tokenizer.token_bytes(i)) for i in range(self.tokenizer.n_vocab)])
        rows = self.part.batch_size // self.part.grad_accum  # as many as a step holds in memory at a time
        context = self.recipe.context
        if self.ranks.size == 1:
            return language_score(self.model, ids, lengths, Windows(context), batch_size=rows)
        windows = -(-(len(ids) - 1) // context)
        first, end = (windows * rank // self.ranks.size * context for rank in (self.ranks.rank, self.ranks.rank + 1))
        mine = ids[first : end + 1]
        part = language_score(self.model, mine, lengths, Windows(context), batch_size=rows) if len(mine) > 1 else None
        total, tokens, n_bytes = self.ranks.sum(*((part.loss * part.tokens, part.tokens, part.bytes) if part else (0, 0, 0)))
        return LanguageScore(total / tokens, int(tokens), int(n_bytes), context, context)

    def save(self, progress: Progress) -> None:
        moments = parallel.gathered(self.optimizer)
        self.ranks.together(self.metrics.sync)
        with parallel.whole(self.scored):
            plain = self.plain()
            self.ranks.first(lambda: state.save(self.folder, plain, self.tokenizer, moments, progress) and None)

    def plain(self) -> GPT2 | Bigram | None:
        """On rank 0, the model as one process has it; where the ranks have slices, :func:`parallel.whole` must be around this."""
        if self.ranks.rank != 0:
            return None
        return models.copied(self.model, self.recipe) if parallel.sharded(self.scored) else self.model

    def write(self, **row: object) -> None:
        self.ranks.together(lambda: self.metrics.write(**row))

    def tell(self, event: object) -> None:
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
    """One optimizer step; returns the whole batch's loss and the gradient's norm before clipping.

    Where either is not finite, or the loss is above ``limit``, the weights stay as they were.
    """
    scored.train()
    ranks = feed.ranks
    part = ranks.part(recipe)
    seed = np.random.SeedSequence((recipe.seed, step, ranks.rank))  # rank 0's is that of one process
    _seed(seed.generate_state(1, np.uint64)[0].item(), ranks.device)
    x, y = (windows.chunk(part.grad_accum) for windows in feed(recipe, step))
    losses = []  # read when all parts are under way: a GPU would stand idle at every single reading
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
    """torch.manual_seed for the devices that a step draws from; that of every kind of device, for each of which that is not here
    it writes down the whole stack, takes 2 % of a step of a small model.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
