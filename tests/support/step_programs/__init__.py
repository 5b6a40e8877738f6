"""A training program outside of torch, to test `diagnose` on dumps of steps: what it dumps, in which layout and names."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from support.patches import patched
from support.steps import CONFIG, our_model

LEVELS = {  # what is dumped: losses, gradients, clipped gradients, parameters before and after, Adam's moments
    "all": "lgcbpq",
    "moments": "lgbpqm",
    "usual": "lgpq",
    "gradients": "lg",
    "parameters": "lbp",
    "loss": "l",
}
LAYOUTS = ("plain", "transposed", "stacked", "flat", "apart")  # apart: q, k and v, stacked and transposed, as in JAX
SETTINGS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "clip": 1.0, "grad_accum": 1}
NEEDS_PARTS = {"parts-summed", "last-part"}
_TABLE = tomllib.loads(Path(__file__).with_name("faults.toml").read_text())
PATCHES = {word: row["patch"] for rows in (_TABLE["numpy"], _TABLE["others"]) for word, row in rows.items()}
FAULTS = {word: (row["ids"].split(), row["shows"]) for word, row in _TABLE["numpy"].items()}  # causes, any of which says it
PROGRAM = Path(__file__).with_name("numpy_steps.py").read_text()
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Dumped:
    """A program's run with faults, as words, and how it is dumped."""

    line: str
    level: str = "usual"
    layout: str = "plain"
    dtype: str = "float32"
    compute: str = "float32"
    steps: int = 2
    same: bool = False  # all steps have one batch
    targets: bool = True
    seed: int = 0
    settings: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.line or 'right'} / {self.level} {self.layout} {self.dtype} {self.steps}"

    @property
    def words(self) -> list[str]:
        return self.line.split()

    @property
    def given(self) -> dict[str, float]:
        parts = {"grad_accum": 2} if NEEDS_PARTS & set(self.words) else {}
        clip = {"clip": 0.0} if self.level == "gradients" else {}
        return {**SETTINGS, **parts, **clip, **self.settings}

    def overrides(self) -> dict[str, float]:
        """The settings as diagnose takes them."""
        return {name if name == "grad_accum" else f"optim.{name}": value for name, value in self.given.items()}

    @property
    def shown(self) -> list[str]:
        """The faults that this level of dump can show."""
        return [word for word in self.words if set(FAULTS[word][1]) & set(LEVELS[self.level])]

    def arrays(self) -> Arrays:
        """The dump."""
        weights = {name: t.numpy() for name, t in our_model().state_dict().items()}
        batches = batches_of(self)
        return dumped(self, weights, batches, trained(self, weights, batches))


def trained(run: Dumped, weights: Mapping[str, np.ndarray], batches: list) -> list[dict]:
    """What each step of the NumPy program with the faults of a run computes."""
    namespace: dict[str, Any] = {"__name__": run.line}
    source = patched(PROGRAM, (pair for word in run.words for pair in zip(PATCHES[word][::2], PATCHES[word][1::2], strict=True)))
    exec(compile(source, run.line, "exec"), namespace)  # our own text
    return namespace["train"](weights, CONFIG.n_head, batches, run.given, np.dtype(run.compute).type)


def batches_of(run: Dumped) -> list[tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(7)
    found = []
    for _ in range(run.steps):
        ids = generator.integers(0, CONFIG.vocab_size, (4, 13))
        ids[0, 2] = ids[2, 5] = 0
        y = ids[:, 1:].copy()
        if not run.targets:
            y[:, -1] = -1
        found.append((ids[:, :-1], y))
    return found[:1] * run.steps if run.same else found


def dumped(run: Dumped, weights: Mapping[str, np.ndarray], batches: list, records: Iterable[Mapping]) -> Arrays:
    """The arrays of a run under shuffled names."""
    return renamed(run, batches, named(run, weights, records))


def named(run: Dumped, weights: Mapping[str, np.ndarray], records: Iterable[Mapping]) -> Arrays:
    """The arrays of a run: "before ...", "loss0", "raw0 ...", "used0 ...", "after0 ...", "m0 ...", "v0 ..."."""
    kinds, floats = LEVELS[run.level], {}
    if "b" in kinds:
        floats |= laid(weights, run.layout, "before")
    for n, record in enumerate(records):
        if "l" in kinds:
            floats[f"loss{n}"] = np.asarray(record["loss"])
        for kind, words in (("g", ("raw",)), ("c", ("used",)), ("p", ("after",)), ("m", ("m", "v"))):
            for word in words if kind in kinds else ():
                floats |= laid(record[word], run.layout, f"{word}{n}")
    return floats


def renamed(run: Dumped, batches: list, floats: Mapping[str, np.ndarray]) -> Arrays:
    """The dump of these arrays: names that say nothing."""
    names = [f"t{n}" for n in range(len(floats))]
    random.Random(run.seed).shuffle(names)
    arrays = {name: np.array(t).astype(run.dtype) for name, t in zip(names, floats.values(), strict=True)}
    return {**given_ids(run, batches), **dict(sorted(arrays.items()))}


def given_ids(run: Dumped, batches: list) -> Arrays:
    """The ids of all steps, or of the one batch, and the next ids."""
    ids, y = batches[0] if run.same else (np.stack(each) for each in zip(*batches, strict=True))
    return {"ids": ids, **({"next": y} if run.targets else {})}


def laid(tensors: Mapping[str, np.ndarray], layout: str, word: str) -> Arrays:
    """Parameters or gradients in a layout."""
    turned = {}
    for name in (name for name in our_model().state_dict() if name in tensors):
        inside = name.startswith("h.")
        turns = layout in ("transposed", "flat", "apart") and tensors[name].ndim == 2 and inside
        turned[name] = tensors[name].T if turns else tensors[name]
        if layout == "apart" and "c_attn" in name:
            thirds = zip("qkv", np.split(turned.pop(name), 3), strict=True)
            turned |= {name.replace("c_attn", letter): part for letter, part in thirds}
    if layout == "flat":
        return {word: np.concatenate([t.ravel() for t in turned.values()])}
    if layout not in ("stacked", "apart"):
        return {f"{word} {name}": t for name, t in turned.items()}
    return {
        f"{word} {name}": np.stack([turned[name.replace("h.0.", f"h.{n}.")] for n in range(CONFIG.n_layer)])
        if name.startswith("h.0.")
        else t
        for name, t in turned.items()
        if name.startswith("h.0.") or not name.startswith("h.")
    }
