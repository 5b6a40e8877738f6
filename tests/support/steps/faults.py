"""Names of the faults of training steps: the causes that say each rightly, its stage, and the settings in which it shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

STAGES = ("loss", "gradient", "clip", "update")


@dataclass(frozen=True)
class Settings:
    """What a step should do, in a recipe's keys: the rate follows warm-up and cosine, decay is on matrices and embeddings.

    With a ``prompt`` some targets are -100, and are not trained on.
    """

    lr: float = 1e-3
    min_lr: float = 1e-3
    warmup: int = 0
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    clip: float = 1.0
    steps: int = 1000
    batch_size: int = 4
    grad_accum: int = 1
    context: int = 8
    dropout: float = 0.0
    prompt: str = ""

    def overrides(self) -> tuple[str, ...]:
        """All of them as the command line takes them: ``optim.lr=0.001``."""
        tables = dict.fromkeys(("lr", "min_lr", "warmup", "beta1", "beta2", "weight_decay", "clip"), "optim.") | {
            "prompt": "data."
        }
        return tuple(f"{tables.get(key, '')}{key}={value}" for key, value in vars(self).items() if value != "")

    def changed(self, changes: Mapping[str, float | str]) -> Settings:
        return replace(self, **changes)


@dataclass(frozen=True)
class Meaning:
    """The meaning of a fault's name.

    ``ids`` are the causes that describe it, the best first; ``implied`` are causes that follow from it and are true as well: what
    an optimizer lacks, its zero_grad leaves alone. ``settings`` are those in which it shows.
    """

    stage: str
    ids: tuple[str, ...]
    settings: Mapping[str, float | str] = field(default_factory=dict)
    implied: tuple[str, ...] = ()


def _mean(stage: str, ids: str, *, implied: str = "", **settings: float | str) -> Meaning:
    return Meaning(stage, tuple(ids.split()), settings, tuple(implied.split()))


def words(text: str) -> list[str]:
    return text.split()


SCHEDULE = {"warmup": 3, "steps": 12, "min_lr": 1e-4}

MEANINGS: dict[str, Meaning] = {
    # The loss.
    "unshifted": _mean("loss", "labels-not-shifted"),
    "shifted-twice": _mean("loss", "labels-shifted-twice"),
    "rolled": _mean("loss", "last-token-in-loss"),  # the last position is to predict the row's first token
    "last-missing": _mean("loss", "last-token-missing"),
    "summed": _mean("loss", "loss-not-averaged"),
    "summed-by-row": _mean("loss", "loss-not-averaged loss-average-wrong"),  # a sum over the tokens of a row, a mean over rows
    "padding-averaged": _mean("loss", "padding-in-average loss-average-wrong", prompt="prompt"),
    "zero-ignored": _mean("loss", "token-ignored"),  # token 0 is taken for padding
    "smoothed": _mean("loss", "label-smoothing"),
    "temperature": _mean("loss", "logits-scaled"),
    "half-logits": _mean("loss", "logits-half-precision"),
    "dropout": _mean("loss", "dropout-active"),
    "accumulation-summed": _mean("loss", "accumulation-not-averaged", grad_accum=2),
    "accumulation-halved": _mean("loss", "accumulation-average-wrong gradient-scaled", grad_accum=2),
    "accumulation-by-mean": _mean("loss", "accumulation-average-wrong loss-average-wrong", prompt="prompt", grad_accum=2),
    # The gradients.
    "not-zeroed": _mean("gradient", "gradient-not-zeroed"),
    "last-micro-batch": _mean("gradient", "accumulation-last-only", grad_accum=2),  # zeroed before each micro-batch
    "embedding-detached": _mean("gradient", "tied-gradient-lost"),
    "head-detached": _mean("gradient", "tied-gradient-lost"),
    "untied": _mean("gradient", "tied-gradient-lost"),  # head and embedding begin equal, and each goes its own way
    "tied-twice": _mean("gradient", "tied-gradient-doubled"),
    "block-detached": _mean("gradient", "gradient-detached"),
    "branch-detached": _mean("gradient", "gradient-detached parameters-frozen"),
    "positions-frozen": _mean("gradient", "parameters-frozen parameter-missing"),
    "blocks-frozen": _mean("gradient", "parameters-frozen parameter-missing"),
    "times-batch": _mean("gradient", "gradient-scaled"),
    "ranks-summed": _mean("gradient", "gradient-summed gradient-scaled accumulation-not-averaged"),
    # Clipping.
    "unclipped": _mean("clip", "clip-missing"),
    "unclipped-at-first": _mean("clip", "clip-missing"),  # in the first two steps, as in a warm-up
    "clipped-by-value": _mean("clip", "clip-by-value"),
    "clipped-by-tensor": _mean("clip", "clip-per-tensor"),
    "clipped-harder": _mean("clip", "clip-threshold"),
    "clipped-early": _mean("clip", "clip-before-accumulation", grad_accum=2),
    "clipped-scaled": _mean("clip", "clip-before-unscaling clip-threshold"),
    "clipped-by-maximum": _mean("clip", "clip-norm"),
    "clipped-by-sum": _mean("clip", "clip-norm"),
    "clipped-after": _mean("clip", "clip-missing"),  # the optimizer has stepped already
    "clipped-unasked": _mean("clip", "clip-unwanted", clip=0.0),
    # The update.
    "decay-coupled": _mean("update", "decay-coupled optimizer-adam"),
    "decay-on-all": _mean("update", "decay-on-all"),
    "decay-on-norms": _mean("update", "decay-on-norms decay-on-all"),
    "decay-on-biases": _mean("update", "decay-on-biases decay-on-all"),
    "decay-not-on-embeddings": _mean("update", "decay-not-on-embeddings"),
    "decay-missing": _mean("update", "decay-missing"),
    "decay-tenth": _mean("update", "decay-wrong"),
    "decay-without-rate": _mean("update", "decay-without-rate decay-wrong"),
    "decay-after": _mean("update", "decay-after-update"),
    "uncorrected": _mean("update", "bias-correction-missing"),
    "corrected-late": _mean("update", "bias-correction-step"),  # by the next step's factors
    "eps-inside": _mean("update", "eps-inside-root"),
    "eps-before-correction": _mean("update", "eps-before-correction eps-inside-root eps-wrong"),
    "eps-1e-6": _mean("update", "eps-wrong"),
    "betas-swapped": _mean("update", "betas-swapped"),
    "betas-default": _mean("update", "betas-wrong"),
    "rate-doubled": _mean("update", "rate-wrong"),
    "schedule-late": _mean("update", "schedule-step", **SCHEDULE),
    "schedule-early": _mean("update", "schedule-step", **SCHEDULE),
    "schedule-linear": _mean("update", "schedule-wrong", warmup=1, steps=6, min_lr=1e-4),
    "warmup-missing": _mean("update", "schedule-wrong rate-wrong", **SCHEDULE),
    "warmup-from-zero": _mean("update", "schedule-wrong schedule-step", **SCHEDULE),  # the first step has a rate of 0
    "amsgrad": _mean("update", "amsgrad"),
    "moments-kept": _mean("update", "momentum-kept"),  # from one make_step to the next
    "moments-lost": _mean("update", "momentum-lost"),  # a new optimizer for every step
    "sgd": _mean("update", "optimizer-sgd"),
    "adam": _mean("update", "optimizer-adam decay-coupled"),
    "biases-left-out": _mean("update", "parameter-missing parameters-frozen", implied="gradient-not-zeroed"),
    "head-left-out": _mean("update", "parameter-missing parameters-frozen", implied="gradient-not-zeroed"),
    "stepped-twice": _mean("update", "parameter-twice"),  # the embedding is in two optimizers
    "step-per-micro-batch": _mean("update", "step-per-micro-batch", grad_accum=2),
    "overflow": _mean("update", "update-skipped"),  # the scaler's first scale overflows
}
