"""Read and write a run's folder: its recipe, and checkpoints that are written atomically, in safetensors and JSON only.

The folder holds ``recipe.json``, ``metrics.jsonl``, ``step-N/`` (the newest two, with all that resuming needs) and ``best/`` (the
lowest validation loss). ``gpt2.load`` and transformers open ``step-N/`` and ``best/`` (of an FSDP run's ``step-N/``,
:mod:`gpt2.train.shards`, only ``gpt2.load``). A run resumes from the newest checkpoint whose files all match its manifest.

A run that trains adapters writes the frozen weights once, to ``base/``. Its ``step-N/`` holds only the adapters, in PEFT's
layout; ``best/`` holds the merged model, and its adapters in ``adapter/``.
"""

import contextlib
import json
import math
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Self, get_type_hints

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gpt2.checkpoint.card import edited_card
from gpt2.checkpoint.containers.safetensors_file import NAME
from gpt2.checkpoint.files import open_weights
from gpt2.checkpoint.names import ADAPTER
from gpt2.checkpoint.peft_files import WEIGHTS
from gpt2.checkpoint.saving import CARD, safetensors_file, unlike_manifest, write_file, write_json
from gpt2.config import number, quoted
from gpt2.data import Tokenizer, documents
from gpt2.data.chat import ChatFormat
from gpt2.data.files import read_all
from gpt2.errors import InputError
from gpt2.model import GPT2
from gpt2.train import models
from gpt2.train.bigram import Bigram
from gpt2.train.corpus import Corpus
from gpt2.train.folders import appearing, writing
from gpt2.train.recipe import Recipe, build
from gpt2.train.runs import METRICS, RECIPE, parsed

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

KEEP = 2
BEST, BASE = "best", "base"
STEP = re.compile(r"step-(\d+)")
ASIDE = re.compile(r"\.(step-\d+|best|base)\.(partial|old)|\.seen-\w+")  # what a killed process leaves
MODEL_FILES, ADAPTER_FILES = ("config.json", "model.safetensors"), (ADAPTER, WEIGHTS)
RESUME_FILES = ("optimizer.safetensors", "progress.json")  # beside the model or its adapters
OPTIMIZER = "optimizer"  # folder of the ranks' parts of the moments; their parts of the model are beside it
TEXT, HELD_OUT = "text_sha256", "held_out"  # in recipe.json, beside the recipe's own keys and `init`
CLEARING = "clearing"  # the same, while --fresh removes the run that was there before
KEPT_TEXT = 1 << 24  # characters of held-out documents that a run's folder keeps
SHAPE = ("init ", "model.", "data.tokenizer ", "data.vocab_size ", "data.add_tokens ")  # keys that decide the model itself
# Keys of a recipe that do not change what it computes, or only how sums are rounded.
NOT_COMPARED = ("name", "description", "expect", "takes", "needs_init", "tensorboard", "wandb", "device", "parallel")
Files = Mapping[str, bytes | Iterable[bytes | memoryview]]  # name -> content, or its pieces in order


@dataclass(frozen=True)
class Progress:
    """The state of a run after ``step`` steps."""

    step: int
    best_loss: float | None = None
    best_step: int = 0
    evals_since_best: int = 0
    skips: int = 0  # skipped steps in a row
    rewinds: int = 0  # rewinds in the whole run; each changes the windows that follow

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the progress.json of a checkpoint. Raises OSError, ValueError: there is none, or a number in it is none."""
        raw, values = parsed(read_all(folder / "progress.json").decode()), dict[str, Any]()
        for name, kind in get_type_hints(cls).items():
            value = raw.get(name, getattr(cls, name, ""))
            values[name] = number(value, int, 0) if kind is int else value if value == math.inf else number(value, float)
            if values[name] is None and (kind is int or value is not None):
                raise ValueError(f"{name} of progress.json is {quoted(value)}")
        return cls(**values)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create ``folder`` and lock it against other runs until this process ends; on Windows there is no lock."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = None if fcntl is None else os.open(folder, os.O_RDONLY)
    try:
        if handle is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(f"{folder}: another process is training there; wait for it or choose another --out") from None
            except OSError:  # a file system without locks
                pass
        yield
    finally:
        if handle is not None:
            os.close(handle)
        with contextlib.suppress(OSError):  # removes only empty folders, after a failed start
            for each in made:
                each.rmdir()


def resumable(folder: Path, recipe: Recipe, init: str | None, fresh: bool) -> Recipe | None:
    """Return ``recipe`` with the precision of the run in ``folder``, which may have fewer steps; None: a new run."""
    try:
        raw = json.loads(read_all(folder / RECIPE))
    except FileNotFoundError:
        if taken := [p.name for p in (*checkpoints(folder), folder / BEST, folder / METRICS) if p.exists()]:
            raise InputError(f"{folder}: holds {taken[0]} but no {RECIPE}, so it is not a run; choose another --out") from None
        return None
    except (OSError, ValueError, RecursionError):
        raw = None
    if not isinstance(raw, dict) or "init" not in raw or "steps" not in raw:
        raise InputError(f"{folder}/{RECIPE}: not the recipe of a run; choose another --out")
    if fresh:
        if init is not None and Path(init).exists() and Path(init).resolve().is_relative_to(folder.resolve()):
            raise InputError(f"{init}: is in {folder}, which --fresh would clear; choose another --out")
        return None
    there, here = _comparable(raw, f"{folder}/{RECIPE}"), _comparable({"init": init, **asdict(recipe)}, "recipe")
    if recipe.precision == "auto":  # a new measurement might decide otherwise
        here["precision"] = there["precision"]
    for end in ("steps", "epochs"):
        if there[end] < here[end] or (end == "steps" and here["epochs"]):  # epochs are steps once the text is read
            there[end] = here[end]
    if differ := [f"{key} {there.get(key)!r} there, {here.get(key)!r} here" for key in here if there.get(key) != here[key]]:
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        remedy = f"choose another --out, or start anew with --fresh{_from_its_weights(folder, differ)}"
        raise InputError(f"{folder}: holds a run of another recipe ({'; '.join(differ[:3])}{more}); {remedy}")
    return None if CLEARING in raw else replace(recipe, precision=here["precision"])


def _from_its_weights(folder: Path, differ: Iterable[str]) -> str:
    """Return the advice to begin another run from the weights in ``folder``; "" if ``differ`` decides the model's shape."""
    newest = next((path for path in checkpoints(folder) if not _fault(path)), None)
    if newest is None or any(each.startswith(SHAPE) for each in differ):
        return ""
    other = next(out for n in count(2) if not (out := folder.with_name(f"{folder.name}-{n}")).exists())
    return f"; to begin from its weights, add to the command: {shlex.join(['--init', str(newest), '--out', str(other)])}"


def recover(folder: Path) -> None:
    """Give each directory its name back if a process was killed between the two renames that replace it."""
    with writing(folder):
        for old in folder.glob(".*.old"):
            if ASIDE.fullmatch(old.name) and not (whole := folder / old.name[1:].removesuffix(".old")).exists():
                os.rename(old, whole)


def claim(folder: Path, recipe: Recipe, init: str | None, text: Corpus, fresh: bool) -> int:
    """Write the recipe and what is known of the text into ``folder``; return the steps of the run that was there before, or 0.

    What a killed process left is removed; everything if ``fresh``: then the new recipe replaces the old one first, so that a
    start after a kill goes on clearing, and never resumes what is left of the old run.
    """
    path, run = folder / RECIPE, {"init": init, TEXT: text.sha256, HELD_OUT: text.held_out, **asdict(recipe)}
    with writing(folder):
        there = json.loads(read_all(path)) if path.is_file() else None
        if there is not None and (fresh or CLEARING in there):
            write_json(path, {**run, CLEARING: True})
            for old in (*checkpoints(folder), *(path for path in (folder / BEST, folder / BASE) if path.exists())):
                shutil.rmtree(old)
            (folder / METRICS).unlink(missing_ok=True)
            there = None
        for aside in [p for p in folder.iterdir() if ASIDE.fullmatch(p.name)]:
            shutil.rmtree(aside) if aside.is_dir() else aside.unlink()
        if there is not None and there.get(TEXT, text.sha256) != text.sha256:
            remedy = "restore that text, choose another --out, or start anew with --fresh"
            raise InputError(f"{folder}: the text is not the one this run began with; {remedy}")
        before = there["steps"] if there else 0
        if there is None and sum(len(each.text) for each in text.held) < KEPT_TEXT:
            write_file(folder / documents.HELD_OUT, _held_out(recipe, text).encode())
        if before != recipe.steps:
            write_json(path, run)
    return before


def _held_out(recipe: Recipe, text: Corpus) -> str:
    """Return the held-out documents as lines of JSON: a text for ``compare --on``, and a case for ``--cases`` where it is one."""
    lines, form = list[str](), ChatFormat.of_template(recipe.data.prompt) or ChatFormat("", "")
    for each in text.held:
        line = {"text": each.prompt + each.text}
        if recipe.data.label:
            line = {"text": each.prompt, "label": each.text}
        elif recipe.data.prompt:
            line |= {"question": each.prompt.removeprefix(form.before).removesuffix(form.after), "answer": each.text}
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    return "".join(lines)


def save(folder: Path, model: GPT2 | Bigram, tokenizer: Tokenizer, optimizer: Mapping[str, Tensor], progress: Progress) -> None:
    """Write ``folder/step-N``, then remove all but the newest :data:`KEEP` checkpoints up to it."""
    files: Files = {"optimizer.safetensors": safetensors_file(optimizer), "progress.json": json.dumps(asdict(progress)).encode()}
    write_whole(folder / f"step-{progress.step}", model, tokenizer, files)
    prune(folder, progress)


def prune(folder: Path, progress: Progress) -> None:
    """Remove all but the newest checkpoints up to this one. (A later one was damaged and skipped, and must not count.)"""
    with writing(folder):
        for old in [path for path in checkpoints(folder) if _step(path) <= progress.step][KEEP:]:
            shutil.rmtree(old)


def save_best(folder: Path, model: GPT2 | Bigram, tokenizer: Tokenizer, progress: Progress) -> None:
    """Write ``folder/best``: the model and its step; a README.md there that a person has edited is kept."""
    files = {"progress.json": json.dumps(asdict(progress)).encode()}
    with contextlib.suppress(InputError):  # no file that can be read
        files |= {CARD: edited} if (edited := edited_card(folder / BEST)) is not None else {}
    write_whole(folder / BEST, model, tokenizer, files)


def model_of(folder: Path, checkpoint: Path) -> Path:
    """Return the directory with the checkpoint's weights: itself, or the run's intact ``base/`` if it has only adapters."""
    if not (checkpoint / ADAPTER).is_file():
        return checkpoint
    base = folder / BASE
    if fault := unlike_manifest(base):
        raise InputError(f"{base}: {fault}, and the adapters of this run need it; restore it, or start anew with --fresh")
    return base


def checkpoints(folder: Path) -> list[Path]:
    """Return the ``step-N`` directories, newest first."""
    return sorted((path for path in folder.glob("step-*") if STEP.fullmatch(path.name)), key=_step, reverse=True)


def newest_intact(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint whose files all match its manifest, and a line for each newer one that was skipped.

    If ``best/`` is damaged, a checkpoint before it is taken, from which it is made again. Raises InputError: there is none.
    """
    best, skipped, after, made = folder / BEST, list[str](), False, 0
    lost = unlike_manifest(best) if best.exists() else ""
    with contextlib.suppress(OSError, ValueError):  # unknown: then no checkpoint is before it
        made = Progress.read(best).step
    for path in checkpoints(folder):
        fault = _fault(path)
        if not fault and lost and _step(path) >= made:
            fault, after = f"not before {best.name}/, in which {lost}", True
        if not fault:
            return path, skipped
        skipped.append(f"{path}: {fault}; skipped")
    if after:
        raise InputError(f"{best}: {lost}, and no checkpoint is before it; restore it from a copy, or start anew with --fresh")
    return None, skipped


def stored(path: Path) -> tuple[dict[str, Tensor], Progress]:
    """Read the optimizer's state and the progress from a checkpoint that :func:`newest_intact` returned."""
    try:
        if (path / OPTIMIZER).is_dir():
            moments = {name: file.read(name, mapped=False) for name, file in open_weights(path / OPTIMIZER).items()}
        else:
            moments = load_file(path / "optimizer.safetensors")
        return moments, Progress.read(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise InputError(f"{path}: cannot be resumed ({error}); start anew with --fresh") from None


def _comparable(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a run's ``init`` and recipe as one flat table; keys missing in an older file take their defaults."""
    known = {key: value for key, value in raw.items() if key not in ("init", TEXT, HELD_OUT, CLEARING, *NOT_COMPARED)}
    return {"init": raw["init"], **build(known, where).flat()}


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def write_whole(target: Path, model: GPT2 | Bigram, tokenizer: Tokenizer, files: Files) -> None:
    """Write a model's directory with these files atomically."""
    with appearing(target) as aside:
        init = json.loads(read_all(target.parent / RECIPE))["init"]
        models.save(model, tokenizer, aside, init, whole=target.name == BEST)
        for name, content in files.items():
            write_file(aside / name, content)


def _fault(path: Path) -> str:
    """Return what is wrong with a checkpoint directory; "" if nothing."""
    if any(NAME.fullmatch(file.name) for file in path.glob("*")):
        needed: tuple[str, ...] = MODEL_FILES[:1] + RESUME_FILES[1:]
    else:
        needed = (ADAPTER_FILES if any((path / name).exists() for name in ADAPTER_FILES) else MODEL_FILES) + RESUME_FILES
    return unlike_manifest(path, needed)
