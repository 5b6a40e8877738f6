"""``gpt2.compare``: two models in every respect, or several against the first; a training run's folder is its checkpoints."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack, overload

from gpt2.checkpoint.names import DEFAULT
from gpt2.comparison.many_results import Comparisons
from gpt2.comparison.pairs import compare_sides
from gpt2.comparison.passage import THRESHOLD, CaseTable, Settings
from gpt2.comparison.results import Comparison
from gpt2.config import number
from gpt2.data.files import read_all
from gpt2.errors import InputError, user_path
from gpt2.measure.metrics import Progress
from gpt2.model import GPT2

STEP = re.compile(r"step-(\d+)")
TEXTS = "texts are read as on='my.jsonl', one {\"text\": ...} a line; ids of your own, with their logits, as trace:FILE"
MODULES = "for another torch.nn.Module give FILE.py:build, or gpt2.checkpoint_of(module).load()"
Given = str | os.PathLike[str] | GPT2  # a model or its name


class Options(TypedDict, total=False):
    """What :func:`compare` takes, however many the models are."""

    on: str | None
    tokens: int | None
    seed: int
    dtype: str | None
    device: str
    offline: bool
    progress: Progress


class PairOptions(Options, total=False):
    """What it takes of two models alone."""

    threshold: float
    blame: bool
    save: str | Path | None
    cases: str | CaseTable | None


@overload
def compare(a: Given = ..., b: Given = ..., **options: Unpack[PairOptions]) -> Comparison: ...


@overload
def compare(a: Given, b: Given, c: Given, /, *others: Given, **options: Unpack[Options]) -> Comparisons: ...


def compare(
    a: Given = DEFAULT, b: Given = f"hf/{DEFAULT}", *others: Given, **options: Unpack[PairOptions]
) -> Comparison | Comparisons:
    """Compare two models: weights, activations, distributions over a text, and generated words.

    If both have the same weights and differ in dtype or implementation, each is also compared with a float64 run. With more than
    two, each model is compared with the first, one after the other (:func:`gpt2.comparison.pairs.compare_sides`).

    Args:
        a, b, others: models in memory, each a ``GPT2``; names as for :func:`gpt2.load`, each with an optional ``:dtype`` suffix;
            ``hf/gpt2``, ``trace:FILE``, ``FILE.py:build``, ``llama.cpp/FILE.gguf``, ``ct2/DIR``, ``onnx/FILE_OR_DIR``.
            The folder of a training run stands for all its checkpoints, in the order of steps.
        on: the text: a file, ``-`` for stdin, or a name that :func:`gpt2.measure.texts.open_text` knows, with options.
        tokens: use this many tokens from the beginning; 0 means all. Default: 8192, or the whole text if its protocol needs it,
            as for published figures on WikiText-2.
        threshold: a relative error of an activation (default: 1e-3); the result names the first point above it.
        seed: seeds the bootstrap, sampled continuations, and random ids if neither model has a tokenizer.
        dtype: the dtype of a model whose name gives none; default: as stored.
        device: where checkpoints run, as for :func:`gpt2.load`; float64 runs, and what other engines run, stay on the CPU.
        blame: also put parts of b into a and measure what each carries, for models of one shape (:mod:`gpt2.comparison.blame`).
        save: keep the logits of ``a`` in this safetensors file, for the side ``trace:FILE``.
        cases: a table of questions, which both are asked too: a file, or a :class:`gpt2.comparison.passage.CaseTable`.

    Raises:
        InputError: no such model or text; threshold, blame, save or cases with more than two models.
        CheckpointError: a checkpoint whose tensors do not fit its config.
    """
    return compare_named((a, b, *others), **options)


def compare_named(given: Sequence[Given], *, hashes: bool = True, **options: Any) -> Comparison | Comparisons:
    """Compare models as :func:`compare` does, from a list; of several without the ``hashes`` of their files."""
    known, settings = [_model(each) for each in given], Settings(**options)
    if settings.on is not None and not isinstance(settings.on, str):
        raise InputError(f"on={type(settings.on).__name__}: give the name of a text, or of a file with it; {TEXTS}")
    models = [saved for each in known for saved in ([Saved(each)] if isinstance(each, GPT2) else with_checkpoints(each))]
    if len(models) > 2 and (settings.threshold != THRESHOLD or settings.blame or settings.save or settings.cases):
        raise InputError("threshold, blame, save and cases are for two models; leave them or the other models out")
    return compare_sides([each.model for each in models], [each.step for each in models], settings, hashes=hashes)


def _model(given: object) -> str | GPT2:
    """Return a model, or its name. Raises InputError: it is something else, or a text."""
    if isinstance(given, str) and len(given.split()) > 2 and os.sep not in given and not user_path(given).exists():
        raise InputError(f"compare takes models, and {given[:40]!r} reads like a text; {TEXTS}")
    if isinstance(given, GPT2):
        return given
    if isinstance(given, str | os.PathLike):
        return os.fspath(given)
    how = MODULES if hasattr(given, "forward") else TEXTS
    raise InputError(f"compare takes models, GPT2 or their names, and was given {type(given).__name__}; {how}")


@dataclass(frozen=True)
class Saved:
    """One checkpoint of a run; ``step`` is None for a model that is no checkpoint of one."""

    model: str | GPT2
    step: int | None = None


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
    try:
        step = json.loads(read_all(folder / "progress.json"))["step"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return number(step, int, 0)
