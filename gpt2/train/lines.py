"""Say a run's events in lines for a terminal: a listener of :func:`gpt2.train.loop.train`."""

import sys

from gpt2.errors import printable, size
from gpt2.train.evaluation import slowest
from gpt2.train.metrics import Diverged, Estimated, Evaluated, Event, Logged, Result, Started, accuracy
from gpt2.train.recipe import Recipe

ENDS = {"finished": "finished", "early": "stopped early, no longer improving", "interrupted": "interrupted and saved"}
ACTIONS = {"stop": "stopping", "skip": "skipped", "rewind": "going back to the newest checkpoint, and on with different windows"}


def show(event: Event) -> None:
    """Print one training event to stderr, control characters as symbols."""
    at = f"step {event.step:6}  "
    match event:
        case Logged():
            # above 1, the peak was measured on a busy machine
            share = f"  {event.mfu:.0%} of peak speed" if 0 < event.mfu <= 1 else ""
            text = f"{at}loss {event.loss:.4f}  lr {event.lr:.1e}  |g| {event.grad_norm:5.2f}  "
            text += f"{event.tokens_per_second:7,.0f} tok/s{share}  {_duration(event.seconds_left)} left"
        case Evaluated(val=val):
            text = f"{at}validation loss {val.loss:.4f}  perplexity {val.perplexity:.2f}  {val.bits_per_byte:.4f} bits/byte"
            if event.confusion is not None:
                right = f"accuracy {accuracy(event.confusion):.1%} of {val.tokens:,} documents"
                text = f"{at}validation loss {val.loss:.4f}  {right}"
            text += f"  (all tokens {event.val_all.loss:.4f})" if event.val_all else ""
            text += "  best so far" if event.best else ""
            text += f"  ({slower})" if (slower := slowest(event.rank_tokens_per_second)) else ""
            text += "".join(f"\n  | {line}" for line in event.sample.strip().splitlines())
            text += f"\nwarning: {event.warning}" if event.warning else ""
        case Estimated():
            text = f"after {event.step} steps: {_duration(event.seconds_left)} to go, evaluations included"
        case Diverged():
            text = f"{at}{event.why}: {ACTIONS[event.action]}"
        case _:
            text = _started(event)
    print(printable(text), file=sys.stderr, flush=True)


def _started(event: Started) -> str:
    recipe, config = event.recipe, event.config
    lines = [*event.notes, f"{recipe.name}: {recipe.description}"]
    lines.append(
        f"{config.num_parameters():,} parameters · {event.train_tokens:,} training and {event.val_tokens:,} validation tokens\n"
        f"{recipe.steps} steps of {recipe.batch_size} x {recipe.context} = {recipe.batch_size * recipe.context:,} tokens"
    )
    known = "" if recipe.data.path else f"\n{promise(recipe)}"  # of the recipe's own text
    lines.append(f"about {size(event.memory)} of memory beside torch's own{known}")
    return "\n".join([*lines, *([f"going on after step {event.step}"] if event.step else [])])


def ended(result: Result, recipe: Recipe) -> str:
    """Say how a run ended, and where its best model is."""
    text = f"{ENDS[result.stopped]} at step {result.step}\nbest validation loss {result.best_loss:.4f} at step "
    text += f"{result.best_step}: {printable(str(result.folder / 'best'), one_line=True)}"
    if not result.best_step and result.step >= min(recipe.eval_every, recipe.steps):
        text += "\nit holds the initial weights, unchanged: training never improved on them; lower optim.lr, or give more text"
    return text


def promise(recipe: Recipe) -> str:
    loss = f"expected validation loss {recipe.expect:g}" if recipe.expect else ""
    return " · ".join(filter(None, (loss, recipe.takes))) or "no expected loss"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"
