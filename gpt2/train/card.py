"""The card of a run: what its folder records, as a README.md with curves in ``best/``."""

import json
import math
import shlex
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path, PurePath
from typing import Any

from gpt2 import __version__
from gpt2.checkpoint import card
from gpt2.checkpoint.card import CURVES, Base, CardFacts, Training
from gpt2.checkpoint.checkpoint import open_path
from gpt2.checkpoint.containers import read_json
from gpt2.checkpoint.names import WEIGHTS
from gpt2.checkpoint.saving import sha256
from gpt2.data.chat import ChatFormat
from gpt2.data.files import read_all
from gpt2.errors import InputError
from gpt2.train.folders import writing
from gpt2.train.metrics import accuracy
from gpt2.train.plot import plot
from gpt2.train.recipe import Recipe, build
from gpt2.train.runs import METRICS, RECIPE, row_of
from gpt2.train.state import BEST, HELD_OUT, TEXT


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


def record_of(folder: Path) -> CardFacts | None:
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
    base, own, table = None if init is None else Base.of(init), data.path or data.tokens, best.get("confusion")
    figures = [_figures(row) for row in (best, *([first] if base and not table and first["step"] == 0 else []))]
    labels = [*read_json(folder / BEST / "config.json")["id2label"].values()] if table else []
    tiny, play = data.source == "tinyshakespeare", data.source.removeprefix("play:").removeprefix("all-")
    scored = f"{best['val_documents']:,} documents" if table else f"{best['val_tokens']:,} tokens"
    training = Training(
        command=shlex.join(["gpt2", "train", f"{recipe.name}.toml", *([] if init is None else ["--init", _last(init)])]),
        settings=settings(recipe),
        text=(PurePath(own).name or "a folder of texts") if own else "tiny Shakespeare" if tiny else f"Shakespeare's {play}",
        dataset="karpathy/tiny_shakespeare" if tiny and not own else None,
        protocol=f"{scored}: {_protocol(recipe)}",
        figures={kind: [row[kind] for row in figures] for kind in figures[0]},
        classes=[f"{labels[at]}: {row[at]:,} of {sum(row):,} right" for at, row in enumerate(table or ())],
        unchanged=best["step"] == 0 and len(evaluated) > 1,
        sample=best.get("sample"),
        facts=[
            f"Steps: {rows[-1]['step']:,} of {recipe.steps:,}; this is step {best['step']:,}, the best",
            f"Held-out loss at step {evaluated[-1]['step']:,}, the last: {evaluated[-1]['val_loss']:.4f}",
            f"Held out: {'the file val.bin, ' if data.tokens else ''}{held_out}; sha256 of all tokens {text_sha256}",
            f"Made with gpt2-toolkit {__version__}, torch {version('torch')}",
        ],
    )
    opened, weights = open_path(folder / BEST), {WEIGHTS: sha256(folder / BEST / WEIGHTS)}
    facts = (str(opened.dtype).removeprefix("torch."), weights, opened.config, ChatFormat.read(folder / BEST), base)
    return CardFacts(folder.resolve().name, "hf", *facts, training=training)


def settings(recipe: Recipe) -> str:
    """Return a TOML file that `gpt2 train` reads as this recipe, without the folders of its texts, which are private."""
    data = replace(recipe.data, path=_last(recipe.data.path), tokens=_last(recipe.data.tokens))
    flat = replace(recipe, data=data, description="", expect=0.0, takes="").flat()
    return "\n".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in flat.items())


def _figures(row: dict[str, Any]) -> dict[str, float]:
    """Return an evaluation's figures as they are shown."""
    loss: float = row["val_loss"]
    if table := row.get("confusion"):
        figures = {"accuracy": accuracy(table), "loss": loss}
    else:
        figures = {"loss": loss, "perplexity": math.exp(min(loss, 700)), "bits_per_byte": row["val_bits_per_byte"]}
    return {kind: round(value, 4) for kind, value in figures.items()}


def _protocol(recipe: Recipe) -> str:
    """Return how held-out tokens are scored, in words."""
    data, context = recipe.data, recipe.context
    if data.label:
        return f"the class of {data.label}, after at most the first {context - 1} tokens"
    windows = f"documents cut off at {context} tokens" if data.padded else f"windows of {context} tokens without overlap"
    return windows + ", attention within a document" * data.reset + ", prompts read and not scored" * bool(data.prompt)


def _last(path: str) -> str:
    """Return the last part of an absolute path or one outside the folder; any other text as it is."""
    return PurePath(path).name if PurePath(path).is_absolute() or path.startswith(("~", "..")) else path
