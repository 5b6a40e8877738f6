"""The only training loop: from scratch, or from a pretrained model.

Every random number of step ``n`` (which windows, which units dropout spares) is a function of the seed and of ``n`` alone, so
a run that is interrupted and goes on computes, bit for bit, what it would have computed undisturbed.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from ..checkpoint.load import load, load_tokenizer
from ..checkpoint.save import write_file
from ..compare.measure import LanguageScore, language_score
from ..config import GPT2Config
from ..data import Tokenizer, shakespeare
from ..data.batches import batch
from ..errors import InputError
from ..generate import generate
from ..model import GPT2
from . import state
from .optim import adamw, learning_rate
from .recipe import Recipe


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


Report = Callable[[Started | Logged | Evaluated], None]


def train(
    recipe: Recipe, folder: str | Path, *, init: str | None = None, fresh: bool = False, report: Report = lambda event: None
) -> Result:
    """Run ``recipe`` in ``folder``: from scratch, or from the model named ``init``.

    A folder that holds this very run goes on from its newest intact checkpoint; one that holds another is refused, unless
    ``fresh`` clears it. Ctrl-C or SIGTERM finishes the step, saves, and returns a result that says "interrupted".

    Raises:
        InputError: text, model, recipe or folder do not work together.
    """
    folder = Path(folder)
    model, tokenizer = _start(recipe, init)
    train_text, val_text = texts(recipe)
    tokenizer = tokenizer or _new_tokenizer(recipe, train_text, val_text)
    if model is None:
        model = _new_model(recipe, tokenizer)
    train_ids, val_ids = (np.array(tokenizer.encode(text), dtype=np.int32) for text in (train_text, val_text))
    for name, ids in (("training", train_ids), ("validation", val_ids)):
        if len(ids) < recipe.context + 1:
            raise InputError(
                f"the {name} text has {len(ids)} tokens, too few for a context of {recipe.context}; "
                "use a longer text or --set context=..."
            )
    token_bytes = torch.tensor([len(tokenizer.token_bytes(i)) for i in range(tokenizer.n_vocab)])
    optimizer = adamw(model, recipe.optim)
    notes = _claim(folder, recipe, init, fresh)
    found, skipped = state.newest_intact(folder)
    progress = state.restore(found, optimizer, model) if found else state.Progress(step=0)
    metrics = _Metrics(folder / "metrics.jsonl", progress.step)
    report(Started(recipe, model.config, len(train_ids), len(val_ids), progress.step, (*notes, *skipped)))

    def evaluate(progress: state.Progress) -> state.Progress:
        score = language_score(
            model, torch.from_numpy(val_ids).long(), token_bytes, context=recipe.context, batch_size=recipe.batch_size
        )
        best = progress.best_loss is None or score.loss < progress.best_loss
        if best:
            progress = replace(progress, best_loss=score.loss, best_step=progress.step, evals_since_best=0)
            state.save_best(folder, model, tokenizer, progress)
        else:
            progress = replace(progress, evals_since_best=progress.evals_since_best + 1)
        metrics.write(step=progress.step, val_loss=score.loss, val_bits_per_byte=score.bits_per_byte)
        report(Evaluated(progress.step, score, best, _sample(model, tokenizer, val_ids, recipe)))
        return progress

    if progress.step == 0:
        progress = evaluate(progress)
    stopped, pace = "finished", _Pace(progress.step, recipe)
    with _interruptions() as interrupted:
        while progress.step < recipe.steps:
            if recipe.patience and progress.evals_since_best >= recipe.patience:
                stopped = "early"
                break
            lr = learning_rate(progress.step, recipe.steps, recipe.optim)
            loss, norm = _step(model, optimizer, train_ids, recipe, progress.step, lr)
            progress = replace(progress, step=progress.step + 1)
            if progress.step % recipe.log_every == 0 or progress.step == recipe.steps:
                logged = Logged(progress.step, loss, lr, norm, *pace(progress.step))
                metrics.write(**asdict(logged))
                report(logged)
            last = progress.step == recipe.steps
            if progress.step % recipe.eval_every == 0 or last:
                progress = evaluate(progress)
                pace.pause(progress.step)
            if progress.step % recipe.save_every == 0 or last or interrupted():
                state.save(folder, model, tokenizer, optimizer, progress)
            if interrupted() and not last:
                stopped = "interrupted"
                break
    metrics.close()
    return Result(folder, progress.step, progress.best_loss, progress.best_step, stopped)


def texts(recipe: Recipe) -> tuple[str, str]:
    """Training and validation text of a recipe."""
    data = recipe.data
    if data.path:
        text = shakespeare.read_text(data.path)
    elif data.source == "plays":
        return shakespeare.training_text(), shakespeare.held_out_text()
    elif data.source.startswith("play:"):
        text = shakespeare.play(data.source.removeprefix("play:"))
    elif data.source == "tinyshakespeare":
        text = shakespeare.tiny_shakespeare()
    else:
        raise InputError(
            f"recipe: data.source is {data.source!r}; give plays, play:NAME or tinyshakespeare, or set data.path to a text file"
        )
    return shakespeare.split(text, 1 - data.held_out)


def _start(recipe: Recipe, init: str | None) -> tuple[GPT2 | None, Tokenizer | None]:
    """The pretrained model and its tokenizer, or nothing yet: a model from scratch needs the text's vocabulary first."""
    if init is None:
        if recipe.context > recipe.model.n_positions:
            raise InputError(f"recipe: context {recipe.context} exceeds model.n_positions {recipe.model.n_positions}; lower it")
        return None, None
    model, tokenizer = load(init, dtype="float32"), load_tokenizer(init)
    if recipe.context > model.config.n_positions:
        raise InputError(
            f"recipe: context {recipe.context} exceeds the {model.config.n_positions} positions of {init}; use --set context=..."
        )
    if tokenizer.n_vocab > model.config.vocab_size:
        raise InputError(
            f"{init}: the tokenizer has {tokenizer.n_vocab} entries, the model {model.config.vocab_size}; use its own tokenizer"
        )
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = recipe.dropout
        elif hasattr(module, "attn_pdrop"):
            module.attn_pdrop = recipe.attn_dropout
    return model.train(), tokenizer


def _new_tokenizer(recipe: Recipe, train_text: str, val_text: str) -> Tokenizer:
    """A vocabulary from the training text; characters also from the validation text, which must be spellable."""
    if recipe.data.tokenizer == "chars":
        from ..data.chars import Chars

        return Chars.from_text(train_text + val_text)
    from ..data.bpe import train_bpe

    return train_bpe(train_text, recipe.data.vocab_size)


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
    torch.manual_seed(np.random.SeedSequence((recipe.seed, step)).generate_state(1, np.uint64)[0])
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


def _claim(folder: Path, recipe: Recipe, init: str | None, fresh: bool) -> list[str]:
    """Make ``folder`` this run's, or find that it is; refuse another run's."""
    ours = json.dumps({"init": init, **json.loads(recipe.to_json())}, indent=2) + "\n"
    theirs = folder / "recipe.json"
    try:
        if fresh and theirs.is_file():
            for path in (*folder.glob("step-*"), folder / "best"):
                shutil.rmtree(path, ignore_errors=True)
            for name in ("recipe.json", "metrics.jsonl"):
                (folder / name).unlink(missing_ok=True)
        if theirs.is_file():
            if theirs.read_text() != ours:
                raise InputError(f"{folder}: holds a run of another recipe; choose another --out, or start anew with --fresh")
            return [f"{folder}: going on with the run that is there"]
        folder.mkdir(parents=True, exist_ok=True)
        write_file(theirs, ours.encode())
    except OSError as error:
        raise InputError(f"{folder}: cannot write there ({error.strerror or error}); choose another --out") from None
    return []


class _Metrics:
    """``metrics.jsonl``: one line per logged step or evaluation. On resume, what the lost steps wrote is cut off."""

    def __init__(self, path: Path, step: int) -> None:
        kept = []
        if path.is_file():
            for line in path.read_text().splitlines():
                try:
                    row = json.loads(line)
                except ValueError:
                    break  # a line that was being written when the run was killed
                if row["step"] <= step:
                    kept.append(line + "\n")
        write_file(path, "".join(kept).encode())
        self.file = open(path, "a", buffering=1)  # noqa: SIM115 - open as long as the run

    def write(self, **row: float) -> None:
        self.file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()


class _Pace:
    """Tokens per second since the last log, and the time left at the pace of the whole run; evaluations do not count."""

    def __init__(self, step: int, recipe: Recipe) -> None:
        self.recipe, self.first, self.last = recipe, step, step
        self.since, self.spent = time.perf_counter(), 0.0

    def __call__(self, step: int) -> tuple[float, float]:
        now = time.perf_counter()
        elapsed = max(now - self.since, 1e-9)
        self.spent += elapsed
        speed = (step - self.last) * self.recipe.batch_size * self.recipe.context / elapsed
        self.last, self.since = step, now
        return speed, self.spent / (step - self.first) * (self.recipe.steps - step)

    def pause(self, step: int) -> None:
        """Restart the clock after work that is not training; unlogged steps up to here go uncounted."""
        self.first += step - self.last
        self.last, self.since = step, time.perf_counter()


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
            before[number] = signal.signal(number, note)
    except ValueError:  # not the main thread, which alone may handle signals
        before.clear()
    try:
        yield lambda: bool(met)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
