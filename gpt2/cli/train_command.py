"""``gpt2 train``: train a model from scratch, or fine-tune one with --init."""

import json
import shutil
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gpt2.cli.common import finish, note, wrote
from gpt2.errors import InputError
from gpt2.options import Command, argument, option, pick, require_outputs, require_unused

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
OUT = "folder of the run (default: out/RECIPE); for plot, the picture (default: loss.png here)"


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Command):
    recipe: str | None = argument("a recipe's name or the path of a TOML file; or plot, followed by runs", "RECIPE", None)
    runs: tuple[str, ...] = argument("after plot: folders of runs", "RUN", ())
    list: bool = option("list the recipes with their descriptions", default=False)
    settings: bool = option("list the recipe's keys with value and meaning, for --set", default=False)
    list_data: bool = option("show what would be trained on, and train nothing", default=False)
    init: str | None = option("fine-tune this model instead of training from scratch", "MODEL")
    out: str | None = option(OUT, "DIR", writes=True)
    set: tuple[str, ...] = option("override a key of the recipe; may be repeated", "KEY=VALUE", ())
    nproc: int = option("share each batch among N processes on this machine", "N", 1, least=1)
    fresh: bool = option("start again in a folder that holds a run", default=False)


def run(args: TrainSettings) -> int:
    from gpt2.train.recipe import names, read

    if args.list:
        from gpt2.train.lines import promise

        body, rows = {}, []
        for name in names():
            each = read(name)
            body[name] = pick(each, "description", "takes") | {"expect": each.expect or None, "needs": each.data.needs}
            needs = f"needs {each.data.needs}" if each.data.needs else ""
            rows.append((name, (each.description, promise(each), needs)))
        return finish(args, body, _wrapped(rows))
    if args.recipe == "plot":
        require_unused(args, "plot: the numbers are in RUN/metrics.jsonl", ("json",))
        from gpt2.train.plot import plot

        require_outputs(replace(args, out=(out := args.out or "loss.png")))
        wrote(str(plot(args.runs, out).absolute()))
        return 0
    if args.runs:
        raise InputError(f"{args.runs[0]}: give one recipe only; gpt2 train plot RUN... takes several runs")
    if args.recipe is None:
        raise InputError(f"which recipe? one of {', '.join(names())}, or the path of a TOML file")
    if args.settings:
        keys = read(args.recipe, args.set).settings()
        return finish(args, keys, _keys(keys))
    if args.list_data:
        from gpt2.train.listing import list_data

        listing = list_data(read(args.recipe, args.set), args.init)
        return finish(args, asdict(listing), listing.table())
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
    """Return the command line of one process of a job."""
    words = [f"--{name}={value}" for name, value in pick(args, "init", "out", "json").items() if value is not None]
    return ["train", str(args.recipe), *words, *(f"--set={each}" for each in args.set), *(["--fresh"] if args.fresh else [])]


def _train(args: TrainSettings) -> int:
    """Train in this process, alone or as one rank of a job; rank 0 prints the result."""
    from gpt2.train.lines import ended, show
    from gpt2.train.loop import train
    from gpt2.train.parallel import own_rank, restarts
    from gpt2.train.recipe import read

    recipe = read(str(args.recipe), args.set)
    fresh = args.fresh and not restarts()  # a restarted job keeps its checkpoints
    result = train(recipe, args.out or f"out/{recipe.name}", init=args.init, fresh=fresh, report=show)
    if own_rank() == 0:
        from gpt2.checkpoint.card import remark_of
        from gpt2.train.card import write_card

        if remark := remark_of(partial(write_card, Path(result.folder))):
            note(remark)
        body = {**asdict(result), "folder": str(result.folder), "best": str(Path(result.folder) / "best")}
        finish(args, body, ended(result, recipe))
    return 130 if result.stopped == "interrupted" else 0
