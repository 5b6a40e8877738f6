"""``gpt2.compare``: two models in every respect, or several against the first; a training run's folder is its checkpoints."""

import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ParamSpec, Protocol, cast, overload

from gpt2.checkpoint.names import DEFAULT
from gpt2.comparison.pairs import Saved, compare_sides
from gpt2.comparison.ranking import Comparisons
from gpt2.comparison.results import Comparison
from gpt2.comparison.settings import Settings
from gpt2.comparison.sides.opening import KINDS, PORT
from gpt2.config import number
from gpt2.data.documents import NAMED
from gpt2.data.files import read_all
from gpt2.errors import InputError, user_path
from gpt2.measure.texts import NAMES
from gpt2.model import GPT2
from gpt2.options import changed, signed

STEP = re.compile(r"step-(\d+)")
TEXTS = "texts are read as on='my.jsonl', one {\"text\": ...} a line; ids of your own, with their logits, as trace:FILE"
MODULES = "for another torch.nn.Module give FILE.py:build, or gpt2.checkpoint_of(module).load()"
Given = str | os.PathLike[str] | GPT2  # a model or its name
P = ParamSpec("P")


class Compares(Protocol[P]):
    """:func:`compare`, with the fields of ``Settings`` as its keywords."""

    @overload
    def __call__(self, a: Given = ..., b: Given = ..., *args: P.args, **settings: P.kwargs) -> Comparison: ...

    @overload
    def __call__(self, a: Given, b: Given, c: Given, /, *others: Given, **settings: Any) -> Comparisons: ...


def _with_keywords(settings: Callable[P, Settings]) -> Callable[[Callable[..., Comparison | Comparisons]], Compares[P]]:
    return lambda function: cast(Compares[P], signed(function, Settings))


@_with_keywords(Settings)
def compare(a: Given = DEFAULT, b: Given = f"hf/{DEFAULT}", *others: Given, **options: Any) -> Comparison | Comparisons:
    """Compare two models: weights, activations, distributions over a text, and generated words.

    With more than two, each model is compared with the first, one after the other (:func:`gpt2.comparison.pairs.compare_sides`).

    Args:
        a, b, others: models in memory, each a ``GPT2``; names as for :func:`gpt2.load`, each with an optional ``:dtype`` suffix;
            ``hf/gpt2``, ``trace:FILE``, ``FILE.py:build``, ``llama.cpp/FILE.gguf``, ``ct2/DIR``, ``onnx/FILE_OR_DIR``.
            The folder of a training run stands for all its checkpoints, in the order of steps.
        dtype: that of a model whose name gives none; default: as stored.
        progress: called with a few words at each stage.

    Raises:
        InputError: no such model or text; threshold, blame, save or cases with more than two models.
        CheckpointError: a checkpoint whose tensors do not fit its config.
    """
    return compare_named((a, b, *others), Settings(**options))


def compare_named(given: Sequence[Given], settings: Settings) -> Comparison | Comparisons:
    """Compare models as :func:`compare` does, from a list."""
    known = [_model(each) for each in given]
    if settings.on is not None and not isinstance(settings.on, str | os.PathLike):
        raise InputError(f"on={type(settings.on).__name__}: give the name of a text, or of a file with it; {TEXTS}")
    models = [saved for each in known for saved in ([Saved(each)] if isinstance(each, GPT2) else with_checkpoints(each))]
    for each in changed(settings, "threshold", "blame", "save", "cases") if len(models) > 2 else ():
        run = "; a run's folder is all its checkpoints, RUN/best the best one" if len(models) > len(known) else ""
        raise InputError(f"{each.name} is for two models, and these are {len(models)}; leave it or the other models out{run}")
    as_is = (isinstance(one, GPT2) or PORT.fullmatch(one) or one.startswith(tuple(k.prefix for k in KINDS)) for one in known)
    for each in changed(settings, "dtype", "device") if all(as_is) else ():
        what = "models in memory, ports, traces and engines, which are compared as they are"
        raise InputError(f"{each.name} has no effect on {what}; leave it out")
    return compare_sides(models, settings)


def _model(given: object) -> str | GPT2:
    """Return a model, or its name. Raises InputError: it is something else, or a text."""
    if isinstance(given, GPT2):
        return given
    if isinstance(given, str | os.PathLike):
        name = os.fspath(given)
        words = len(name.split()) > 2 and os.sep not in name and not user_path(name).exists()
        if words or name in NAMES or Path(name).suffix.lower() in {*NAMED} - {""}:
            raise InputError(f"compare takes models, and {name[:40]!r} reads like a text; {TEXTS}")
        return name
    how = MODULES if hasattr(given, "forward") else TEXTS
    raise InputError(f"compare takes models, GPT2 or their names, and was given {type(given).__name__}; {how}")


def with_checkpoints(name: str) -> tuple[Saved, ...]:
    """Return a run's checkpoints in place of its folder, or the name alone. Raises InputError: a run without a checkpoint."""
    head, colon, dtype = name.rpartition(":")
    if not colon or os.path.isdir(user_path(name)):
        head, dtype = name, ""
    suffix = f":{dtype}" if dtype else ""
    folder = user_path(head)
    if not folder.is_dir() or (folder / "config.json").exists() or not (folder / "recipe.json").exists():
        return (Saved(name),)
    saved = []
    for entry in folder.iterdir():
        step = STEP.fullmatch(entry.name)
        if (step or entry.name == "best") and entry.is_dir():
            saved.append(Saved(f"{head.rstrip('/')}/{entry.name}{suffix}", int(step[1]) if step else _step(entry)))
    if not saved:
        raise InputError(f"{head}: a run's folder without a checkpoint; train it for longer, or give a model")
    return tuple(sorted(saved, key=lambda each: (each.step is None, each.step, str(each.model))))


def _step(folder: Path) -> int | None:
    """Return the step of the best checkpoint, as the run recorded it."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        return number(json.loads(read_all(folder / "progress.json"))["step"], int, 0)
    return None
