"""``gpt2 train``: train a model from scratch, or fine-tune one with --init."""

import json
import shutil
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2.cli.common import say, size, write_result
from gpt2.errors import InputError, printable
from gpt2.options import argument, json_option, option

if TYPE_CHECKING:
    from gpt2.train.loop import Diverged, Estimated, Evaluated, Logged, Started
    from gpt2.train.recipe import Recipe

EXAMPLES = """\
  gpt2 train --list                                                     list the recipes
  gpt2 train finetune-texts --settings                                  list its settings, for --set
  gpt2 train shakespeare-mini --out out/mini                            the embedded model, from scratch
  gpt2 train finetune-shakespeare --init shakespeare-mini               fine-tune it on a play that it has not seen
  gpt2 train finetune-texts --init gpt2 --set data.path=my.txt          fine-tune GPT-2 on your text
  gpt2 train --list-data finetune-shakespeare --init shakespeare-mini   show documents, tokens and the first windows
  gpt2 train shakespeare-mini --set data.tokenizer=chars --set optim.lr=1e-3 --out out/chars
  gpt2 train shakespeare-mini --nproc 2                                 two processes share each batch
  torchrun --nnodes 2 --nproc-per-node 8 ... -m gpt2 train RECIPE       several machines (see the README)
  gpt2 train plot out/mini out/chars --out curves.svg                   loss curves of runs, to PNG or SVG

The same command again resumes from the newest intact checkpoint. Ctrl-C finishes the step and saves."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    recipe: str | None = argument("a recipe's name or the path of a TOML file; or plot, followed by runs", "RECIPE", None)
    runs: tuple[str, ...] = argument("after plot: folders of runs", "RUN", ())
    list: bool = option("list the recipes with their descriptions", default=False)
    settings: bool = option("list the recipe's keys with value and meaning, for --set", default=False)
    list_data: bool = option("show what would be trained on, and train nothing", default=False)
    init: str | None = option("fine-tune this model instead of training from scratch", "MODEL")
    out: str | None = option("folder of the run (default: out/RECIPE); for plot, the picture (default: loss.png)", "DIR")
    set: tuple[str, ...] = option("override a key of the recipe; may be repeated", "KEY=VALUE", ())
    nproc: int = option("share each batch among N processes on this machine", "N", 1)
    fresh: bool = option("start again in a folder that holds a run", default=False)
    json: str | None = json_option()


def run(args: TrainSettings) -> int:
    from gpt2.train.recipe import names, read

    if args.list:
        recipes = {name: read(name) for name in names()}
        body = {
            name: {"description": each.description, "expect": each.expect or None, "takes": each.takes, "needs": each.data.needs}
            for name, each in recipes.items()
        }
        write_result(args.json, body, lambda: say(_list(recipes)))
        return 0
    if args.recipe == "plot":
        if args.json:
            raise InputError("--json has no effect with plot: the numbers are in RUN/metrics.jsonl; leave it out")
        from gpt2.train.plot import plot

        print(printable(str(plot(args.runs, args.out or "loss.png")), one_line=True), file=sys.stderr)
        return 0
    if args.runs:
        raise InputError(f"{args.runs[0]}: give one recipe only; gpt2 train plot RUN... takes several runs")
    if args.recipe is None:
        raise InputError(f"which recipe? one of {', '.join(names())}, or the path of a TOML file")
    if args.settings:
        keys = read(args.recipe, args.set).settings()
        write_result(args.json, keys, lambda: say(_keys(keys)))
        return 0
    if args.list_data:
        from gpt2.train.listing import list_data

        listing = list_data(read(args.recipe, args.set), args.init)
        write_result(args.json, asdict(listing), lambda: say(listing.table()))
        return 0
    if args.nproc < 1:
        raise InputError(f"--nproc {args.nproc}: give the number of processes, 1 or more")
    from gpt2.train.launch import launch, leave
    from gpt2.train.parallel import PeerLost, own_rank

    if args.nproc > 1:
        read(args.recipe, args.set).check(args.init)
        return launch(_words(args), args.nproc)
    try:
        return leave(_train(args))
    except InputError as error:
        if own_rank() == 0:
            print(f"gpt2 train: {error}", file=sys.stderr)
        return leave(2)
    except PeerLost as error:
        print(f"gpt2 train: {error}", file=sys.stderr)
        return 1  # the launcher then starts all ranks again


def _list(recipes: "dict[str, Recipe]") -> str:
    """List each recipe's name, description, expected loss and duration, and what it needs."""
    needs = {name: f"needs {recipe.data.needs}" if recipe.data.needs else "" for name, recipe in recipes.items()}
    return _wrapped((name, (recipe.description, _promise(recipe), needs[name])) for name, recipe in recipes.items())


def _keys(keys: dict[str, dict[str, Any]]) -> str:
    """List each key with its value, its meaning, and the default where that is another."""
    rows = []
    for key, each in keys.items():
        value, default = (json.dumps(each[name], ensure_ascii=False) for name in ("value", "default"))
        rows.append((key, (value if default in (value, '""') else f"{value} (default {default})", each["meaning"])))
    return _wrapped(rows)


def _wrapped(rows: Iterable[tuple[str, Iterable[str]]]) -> str:
    """Return rows of a name and the texts beside it, one below the other, wrapped to the terminal."""
    width = max(min(shutil.get_terminal_size((80, 24)).columns, 100), 60) - 25
    lines = []
    for name, texts in rows:
        parts = [line for text in texts for line in textwrap.wrap(text, width)]
        lines += [f"{head:24} {part}" for head, part in zip([name, *[""] * len(parts)], parts, strict=False)]
    return "\n".join(lines)


def _words(args: TrainSettings) -> list[str]:
    options = {"--init": args.init, "--out": args.out, "--json": args.json}
    words = [f"{name}={value}" for name, value in options.items() if value is not None]
    words += [*(f"--set={each}" for each in args.set), *(["--fresh"] if args.fresh else [])]
    return ["train", str(args.recipe), *words]


def _train(args: TrainSettings) -> int:
    """Train in this process, alone or as one rank of a job; rank 0 prints the result."""
    from gpt2.train.loop import train
    from gpt2.train.parallel import own_rank, restarts
    from gpt2.train.recipe import read

    recipe = read(str(args.recipe), args.set)
    fresh = args.fresh and not restarts()  # a restarted job keeps its checkpoints
    result = train(recipe, args.out or f"out/{recipe.name}", init=args.init, fresh=fresh, report=show)
    if own_rank() == 0:
        from gpt2.train.card import write_card

        best = Path(result.folder) / "best"
        try:
            remark = write_card(Path(result.folder))
        except InputError as error:  # the run is saved, and its result must be told
            remark = f"no model card was written: {error}"
        if remark:
            print(f"note: {printable(remark)}", file=sys.stderr)
        body = {**asdict(result), "folder": str(result.folder), "best": str(best)}
        text = f"{_ENDS[result.stopped]} at step {result.step}\nbest validation loss {result.best_loss:.4f} at step "
        text += f"{result.best_step}: {printable(str(best), one_line=True)}"
        if not result.best_step and result.step >= min(recipe.eval_every, recipe.steps):
            unchanged = "it holds the initial weights, unchanged: training never improved on them"
            text += f"\n{unchanged}; lower optim.lr, or give more text"
        write_result(args.json, body, lambda: say(text))
    return 130 if result.stopped == "interrupted" else 0


_ENDS = {"finished": "finished", "early": "stopped early, no longer improving", "interrupted": "interrupted and saved"}
_ACTIONS = {"stop": "stopping", "skip": "skipped", "rewind": "going back to the newest checkpoint, and on with different windows"}


def show(event: "Started | Logged | Evaluated | Estimated | Diverged") -> None:
    """Print one training event to stderr, control characters as symbols."""
    from gpt2.train.evaluation import slowest
    from gpt2.train.loop import Diverged, Estimated, Evaluated, Logged

    at = f"step {event.step:6}  "
    match event:
        case Logged():
            # above 1, the peak was measured on a busy machine
            share = f"  {event.mfu:.0%} of peak speed" if 0 < event.mfu <= 1 else ""
            text = f"{at}loss {event.loss:.4f}  lr {event.lr:.1e}  |g| {event.grad_norm:5.2f}  "
            text += f"{event.tokens_per_second:7,.0f} tok/s{share}  {_duration(event.seconds_left)} left"
        case Evaluated(val=val):
            text = f"{at}validation loss {val.loss:.4f}  perplexity {val.perplexity:.2f}  {val.bits_per_byte:.4f} bits/byte"
            if event.accuracy is not None:
                text = f"{at}validation loss {val.loss:.4f}  accuracy {event.accuracy:.1%} of {val.tokens:,} documents"
            text += f"  (all tokens {event.val_all.loss:.4f})" if event.val_all else ""
            text += "  best so far" if event.best else ""
            text += f"  ({slower})" if (slower := slowest(event.rank_tokens_per_second)) else ""
            text += "".join(f"\n  | {line}" for line in event.sample.strip().splitlines())
            text += f"\nwarning: {event.warning}" if event.warning else ""
        case Estimated():
            text = f"after {event.step} steps: {_duration(event.seconds_left)} to go, evaluations included"
        case Diverged():
            text = f"{at}{event.why}: {_ACTIONS[event.action]}"
        case _:
            text = _started(event)
    print(printable(text), file=sys.stderr, flush=True)


def _started(event: "Started") -> str:
    recipe, config = event.recipe, event.config
    lines = [*event.notes, f"{recipe.name}: {recipe.description}"]
    lines.append(
        f"{config.num_parameters():,} parameters · {event.train_tokens:,} training and {event.val_tokens:,} validation tokens · "
        f"{recipe.steps} steps of {recipe.batch_size} x {recipe.context} = {recipe.batch_size * recipe.context:,} tokens"
    )
    known = "" if recipe.data.path else f" · {_promise(recipe)}"  # of the recipe's own text
    lines.append(f"about {size(event.memory)} of memory beside torch's own{known}")
    return "\n".join([*lines, *([f"going on after step {event.step}"] if event.step else [])])


def _promise(recipe: "Recipe") -> str:
    loss = f"expected validation loss {recipe.expect:g}" if recipe.expect else "no expected loss"
    return f"{loss} · {recipe.takes}" if recipe.takes else loss


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"
