"""Causes in the loss: compare what each position was trained on with the next token, and its weight with the mean's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpt2.port.diagnosis.report import Cause, Diagnosis, Divergence
from gpt2.port.step.causes import STAGE, STAGES, cause, ranked
from gpt2.port.step.losses import BOUND, NOTHING, LossReading
from gpt2.port.step.sessions import Batch

SEEN = "read from the gradient of the logits, position by position"
SUMMED = "loss-not-averaged"
Places = Callable[[Sequence[str]], str]  # the checkpoint's names for parameters, in words
EVEN = 1e-6  # relative difference of weights that are meant to be equal


@dataclass
class Stage:
    """What one stage of a step gave: causes, notes, whether they explain all of it, and how far it is from the reference's."""

    causes: list[Cause] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    explained: bool = True
    error: float = 0.0

    def leave_open(self, why: str) -> None:
        """Say that not all of this stage is explained, and why."""
        self.explained = False
        self.notes.append(why)

    def absorb(self, more: Stage) -> None:
        """Add what another comparison of this stage gave."""
        self.causes += more.causes
        self.notes += more.notes
        self.explained, self.error = self.explained and more.explained, max(self.error, more.error)


def concluded(stages: Mapping[str, Stage], forward: Diagnosis | None, notes: Iterable[str], source: str) -> Diagnosis:
    """Return the diagnosis of a step by its ``stages``; ``forward`` is that of its forward pass, whose causes come first."""
    causes = ranked([one for stage in stages.values() for one in stage.causes])
    earlier, first, said = ((), None, ()) if forward is None else (forward.causes, forward.first_divergence, forward.notes)
    right = all(stage.explained for stage in stages.values()) and (forward is None or forward.ok)
    verdict = "mismatch" if causes or earlier else "equal" if right else "undetermined"
    if verdict != "equal" and first is None:
        early = [n for n in STAGES if any(STAGE[one.id] == n for one in causes) or not stages[n].explained]
        first = Divergence(early[0] if early else "update", None, max(stage.error for stage in stages.values()))
    notes = dict.fromkeys([*said, *notes, *(note for name in STAGES for note in stages[name].notes)])
    return Diagnosis(verdict, first if verdict != "equal" else None, (*earlier, *causes), tuple(notes), source)


def loss_stage(batch: Batch, reading: LossReading, factor: float) -> Stage:
    """Return the causes in one reading of the loss; ``factor`` is what the step multiplies its gradient by before the update."""
    stage = Stage(error=_distance(batch, reading))
    if reading.unmatched:
        stage.notes.append("your step runs the model on other ids than those that it is given; their rows are not judged")
    if reading.error > max(BOUND, 1e-5):
        stage.leave_open(f"the gradient of your logits is no cross-entropy of them (error {reading.error:.1e})")
        return stage
    stage.causes += _labels(batch, reading)
    if reading.smoothing > 1e-6:
        detail = f"a label smoothing of {reading.smoothing:.4g}"
        stage.causes.append(cause("label-smoothing", "loss", detail, SEEN))
    if abs(reading.temperature - 1) > 1e-6:
        detail = f"the logits are multiplied by {reading.temperature:.6g} before the softmax"
        stage.causes.append(cause("logits-scaled", "loss", detail, SEEN))
    stage.causes += _weights(reading, factor)
    return stage


def _distance(batch: Batch, reading: LossReading) -> float:
    """Return the relative distance of the weights on labels from those of the mean over the next tokens."""
    y = batch.y
    count = int((y >= 0).sum())
    right = torch.where(y >= 0, 1 / count, 0.0).double()
    same = (reading.labels == y) | (reading.weights == 0)
    square = torch.where(same, (reading.weights - right) ** 2, reading.weights**2 + right**2).sum()
    return float((square / (right**2).sum()).sqrt())


def _labels(batch: Batch, reading: LossReading) -> list[Cause]:
    ids, y, labels = batch.ids, batch.y, reading.labels
    trained = labels != NOTHING
    if not bool(trained.any()):
        return []
    beyond = torch.cat([ids[:, 2:], torch.full_like(ids[:, :1], NOTHING)], 1)
    found: list[Cause] = []
    expected = y
    if not bool((labels == y)[trained].all()):
        if bool((labels == batch.x)[trained].all()):
            expected = batch.x
            found.append(cause("labels-not-shifted", "loss", "the label of each position is the token that it reads", SEEN))
        elif bool((labels == beyond)[trained].all()):
            expected = beyond
            found.append(cause("labels-shifted-twice", "loss", "the label of each position is the token after the next", SEEN))
        elif bool((labels == y)[:, :-1][trained[:, :-1]].all()):
            last = labels[:, -1]
            rolled = bool((last == batch.x[:, 0]).all()) or bool((last == batch.x[:, 0].roll(-1)).all())
            what = "the first token of the row (or of the next)" if rolled else f"token {int(last[0])}"
            expected = torch.cat([y[:, :-1], last[:, None]], 1)
            found.append(cause("last-token-in-loss", "loss", f"the label of the last position is {what}", SEEN))
        else:
            count = int((labels != y)[trained].sum())
            return [cause("labels-wrong", "loss", f"{count} of {int(trained.sum())} positions have another label", SEEN)]
    return found + _left_out(~trained & (expected >= 0), expected)


def _left_out(missing: Tensor, expected: Tensor) -> list[Cause]:
    if not bool(missing.any()):
        return []
    left = expected[missing]
    whole_column = bool(missing[:, -1].all())
    if whole_column and not bool(missing[:, :-1].any()):
        return [cause("last-token-missing", "loss", "the last position of each row has no label", SEEN)]
    rest = missing.clone()
    found = []
    if whole_column and missing.shape[1] > 1:
        found = [cause("last-token-missing", "loss", "the last position of each row has no label", SEEN)]
        rest[:, -1] = False
        left = expected[rest]
    if len(left.unique()) == 1 and bool(((expected == left[0]) == rest)[:, :-1].all()):
        detail = f"positions with the label {int(left[0])} are not trained on"
        return [*found, cause("token-ignored", "loss", detail, SEEN)]
    detail = f"{int(missing.sum())} of {missing.numel()} positions are not trained on"
    return [cause("tokens-left-out", "loss", detail, SEEN)]


def _weights(reading: LossReading, factor: float) -> list[Cause]:
    """Return the causes in the weights of the positions: a factor of all, or weights that differ."""
    trained = reading.labels != NOTHING
    weights = reading.weights[trained] * factor
    if not len(weights):
        return []
    low, high = float(weights.min()), float(weights.max())
    parts = sorted(set(reading.parts[trained].tolist()))
    total, count = float(weights.sum()), int(trained.sum())
    if high - low > EVEN * abs(high):
        return [cause("loss-average-wrong", "loss", f"positions weigh between {low * count:.4g} and {high * count:.4g}", SEEN)]
    if abs(total - 1) <= EVEN:
        return []
    rows = [int(trained[reading.parts.eq(part).any(1)].any(1).sum()) for part in parts]
    names = _factors(count, len(parts), max(rows), int(trained.sum(1).max()))
    for value, ids, words in names:
        if abs(total / value - 1) <= EVEN:
            if factor != 1 and abs(float(reading.weights.sum()) - 1) <= EVEN:
                break
            return [cause(id, "loss", f"the gradient is that of {words}: {total:.6g} times the mean's", SEEN) for id in ids]
    scaled = f"the gradient is {total:.6g} times that of the mean loss"
    return [cause("gradient-scaled", "gradient", scaled, SEEN)]


def wrong_averages(count: int, length: float, parts: int) -> list[tuple[float, str, str]]:
    """Return what a wrong average multiplies the mean by, of the loss or its gradient: the number, the cause, and words.

    ``count`` tokens are trained on, ``length`` in each row. ``parts``: of a batch.
    """
    several = [
        (float(parts), "accumulation-not-averaged", f"the sum over {parts} parts"),
        (1 / parts, "accumulation-average-wrong", f"the mean over {parts} parts, divided by their number again"),
        (count / parts, SUMMED, "the sum over the tokens of each part"),
    ]
    sums = [(float(count), SUMMED, "the sum over all tokens"), (length, SUMMED, "the sum over the tokens of a row")]
    return several * (parts > 1) + sums


def _factors(count: int, parts: int, rows: int, length: int) -> list[tuple[float, tuple[str, ...], str]]:
    """Return what a gradient may be multiplied by: the number, the causes, and words."""
    both = SUMMED, "accumulation-not-averaged"
    several: list[tuple[float, tuple[str, ...], str]] = [
        (1 / parts**2, ("accumulation-average-wrong",), f"the mean over {parts} parts, divided by their number again"),
        (count, both, "the sum over all tokens and parts"),
        (length * parts, both, "the sum over the tokens of a row, and over parts"),
    ]
    usual = [(value, (id,), words) for value, id, words in wrong_averages(count, length, parts)]
    scaled = rows, ("gradient-scaled",), "the mean, times the number of rows"
    return [*usual[:-2], *several * (parts > 1), *usual[-2:], scaled]


def padding_stage(batch: Batch, reading: LossReading, factor: float) -> list[Cause]:
    """Return the causes that show where some targets are -100, in a loss that is right elsewhere."""
    y = batch.y
    ignored = y < 0
    weights = reading.weights * factor
    if bool((weights[ignored] != 0).any()):
        return [cause("padding-in-average", "loss", "targets of -100 are trained on", SEEN)]
    trained = weights[~ignored]
    count = int((~ignored).sum())
    if float(trained.max() - trained.min()) <= EVEN * float(trained.max()):
        if abs(float(trained.sum()) - 1) <= EVEN:
            return []
        if abs(float(trained[0]) * y.numel() - 1) <= EVEN:
            return [cause("padding-in-average", "loss", "the sum is divided by all targets, ignored ones too", SEEN)]
    parts = len(set(reading.parts[reading.labels != NOTHING].tolist()))
    words = f"positions weigh between {float(trained.min()) * count:.4g} and {float(trained.max()) * count:.4g} of the mean's"
    if parts > 1:
        return [
            cause(
                "accumulation-average-wrong", "loss", f"each part is averaged alone, however many targets it has; {words}", SEEN
            )
        ]
    return [cause("loss-average-wrong", "loss", words, SEEN)]


def dropout_stage(probabilities: Iterable[float], wanted: float | None) -> Stage:
    """Compare the ``probabilities`` of the dropouts that are active in a step with the expected one; None: only report them."""
    stage = Stage()
    found = sorted(set(probabilities))
    said = ", ".join(f"{p:g}" for p in found)
    if wanted is None:
        stage.notes.append(f"read off: dropout of {said} (it was left out of the comparison)")
    elif wanted == 0 and found:
        detail = f"dropout of {said} is active in the step"
        stage.causes.append(cause("dropout-active", "h.*", detail, "seen in its operators"))
    elif wanted and not found:
        stage.causes.append(cause("dropout-missing", "h.*", f"no dropout is active, not {wanted:g}", "its operators"))
    return stage
