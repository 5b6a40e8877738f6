"""What a step trains on: its labels, and the average that its loss is, read from the gradient of its logits.

For logits l with p = softmax(l), label k and weight w, the gradient of a mean cross-entropy is w (p - 1_k). A label smoothing
of s gives w (p - (1 - s) 1_k - s/V), and logits times c give w c (softmax(c l) - 1_k). So each row says what it was trained on.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.port.step.causes import StepFindings
from gpt2.port.step.watching import Forward

IGNORED = -100  # a target that is not trained on
BOUND = 1e-7  # relative error of a row that a formula explains; float32 constants reach 1e-8
ODD = 1e-5  # of one that is no cross-entropy
EVEN = 1e-6  # relative difference of weights that are meant to be equal
BETTER = 30  # times smaller is the error of a formula that has one more number
READ = "read from the gradient of the logits, position by position"
AVERAGED, PADDING = "accumulation-average-wrong", "padding-in-average"
PADDED = {PADDING, AVERAGED, "loss-average-wrong"}  # what shows where some targets are -100
PAD = "labels = labels.masked_fill(attention_mask == 0, -100)  # or another padding token than the end of text"
UNEQUAL = '(F.cross_entropy(logits, targets, reduction="sum") / all_targets).backward()  # all_targets: of all parts'
Told = tuple[str, str, str]  # a cause, what the step does, and the corrected line if it is not the table's


class StepBatch(NamedTuple):
    """Tokens (B, T + 1), and the right labels (B, T): the next token of each, IGNORED where there is none to learn."""

    tokens: Tensor
    targets: Tensor

    @property
    def ids(self) -> Tensor:
        """What the model reads, (B, T)."""
        return self.tokens[:, :-1]


@dataclass
class LossReading:
    """What one call was trained on, by position of its batch (B, T).

    ``labels``: int64, IGNORED where the weight is zero. ``weights``: float64. ``parts``: the number of the forward pass.
    ``error``: of the worst row, relative. ``unmatched``: rows of ids that are not of the batch.
    """

    labels: Tensor
    weights: Tensor
    parts: Tensor
    smoothing: float = 0.0
    factor: float = 1.0  # of the logits
    error: float = 0.0
    unmatched: int = 0


def read_loss(forwards: Iterable[Forward], batch: StepBatch) -> LossReading | None:
    """Return what a call on a batch was trained on; None if no gradient of the logits was seen."""
    trained = [(one, one.gradient) for one in forwards if one.gradient is not None]
    if not trained:
        return None
    blank, size = torch.full_like(batch.ids, IGNORED), trained[0][0].logits.shape[-1]
    reading = LossReading(blank, torch.zeros(blank.shape, dtype=torch.float64), blank.clone())
    logits, gradient = torch.zeros(2, *blank.shape, size, dtype=torch.float64)
    for number, (forward, given) in enumerate(trained):
        both = (one.cpu().double().reshape(len(forward.ids), -1, size) for one in (forward.logits, given))
        for ids, own, slope in zip(forward.ids.cpu(), *both, strict=True):
            count = min(len(ids), batch.tokens.shape[1])  # of a row that may be shorter or longer than the batch's
            rows = (batch.tokens[:, :count] == ids[:count]).all(1).nonzero()[:1, 0]
            reading.unmatched += not len(rows)
            known = slope[: blank.shape[1]].abs().amax(-1) > 0
            for row in rows:
                gradient[row, : len(known)] += slope[: len(known)]
                logits[row, : len(known)][known] = own[: len(known)][known]
                reading.parts[row, : len(known)] = number
    trains = gradient.abs().amax(-1) > 0
    columns = gradient.abs().amax((0, 1)).nonzero().flatten().tolist()  # those that pad the vocabulary may be cut off
    size = max(columns, default=size - 1) + 1
    at, wanted = logits[trains][:, :size], gradient[trains][:, :size]
    if not len(wanted):
        return reading
    rows, labels = torch.arange(len(wanted)), wanted.argmin(-1)

    def fitted(smoothing: float, factor: float) -> tuple[float, Tensor]:
        """Return the error of the worst row, and the weight of each (n,), for these numbers."""
        made = (factor * at).softmax(-1).sub_(smoothing / size)
        made[rows, labels] -= 1 - smoothing
        weights = (wanted * made).sum(-1) / made.square().sum(-1).clamp(min=1e-300)
        left = (wanted - weights[:, None] * made).abs().amax(-1) / wanted.abs().amax(-1)
        return float(left.max()), weights / factor

    reading.error, weights = fitted(0.0, 1.0)
    for numbers in _free_numbers(wanted[0], at[0], int(labels[0])) if reading.error > BOUND else ():
        error, own = fitted(*numbers)
        if error < reading.error / BETTER:
            reading.error, weights, (reading.smoothing, reading.factor) = error, own, numbers
    reading.weights[trains], reading.labels[trains] = weights, labels
    return reading


def _free_numbers(wanted: Tensor, at: Tensor, label: int) -> tuple[tuple[float, float], ...]:
    """Return the smoothing of labels alone, and the factor of logits alone, that explain a gradient (V,) of logits ``at`` best.

    A smoothing of s adds w (1_k - 1/V) s. Without one, logarithms of entries but the label's are linear in the logits.
    """
    hot = F.one_hot(torch.tensor(label), len(at)).double()
    basis = torch.stack([at.softmax(-1) - hot, hot - 1 / len(at)], -1)
    weight, smoothed = torch.linalg.lstsq(basis, wanted[:, None], driver="gelsd").solution
    x, log = at[wanted > 0], wanted[wanted > 0].log()
    x, log = x - x.mean(), log - log.mean()
    return (float(smoothed / weight), 1.0), (0.0, float(log @ x / (x @ x)))


def judge_loss(findings: StepFindings, reading: LossReading | None, batch: StepBatch, end: int | None, *shares: float) -> None:
    """Add the causes in what a call was trained on; ``shares``: what the step may multiply its gradient by; ``end`` of text."""
    if reading is None:
        words = "the logits of your step were not seen (does it call the module?), so its loss was not judged"
        findings.leave_open("loss", words)
        return
    right = torch.where(batch.targets >= 0, 1 / int((batch.targets >= 0).sum()), 0.0).double()
    same = (reading.labels == batch.targets) | (reading.weights == 0)
    square = torch.where(same, (reading.weights - right) ** 2, reading.weights**2 + right**2).sum()
    findings.differ("loss", float((square / (right**2).sum()).sqrt()))
    if reading.unmatched:
        findings.notes.append("your step runs the model on other ids than those that it is given; their rows are not judged")
        findings.unknown |= {"loss"} if bool((reading.parts == IGNORED).all(1).any()) else set()  # given rows were never seen
    if reading.error > ODD:
        findings.leave_open("loss", f"the gradient of your logits is no cross-entropy of them (error {reading.error:.1e})")
    if "loss" in findings.unknown:
        return
    for id, detail, fix in (*_labels(batch, reading.labels, end), *_weights(batch, reading, shares)):
        findings.add(id, "gradient" if id == "gradient-scaled" else "loss", detail, READ, fix)
    if reading.smoothing > 1e-6:
        findings.add("label-smoothing", "loss", f"a label smoothing of {reading.smoothing:.4g}", READ)
    if abs(reading.factor - 1) > 1e-6:
        findings.add("logits-scaled", "loss", f"the logits are multiplied by {reading.factor:.6g} before the softmax", READ)


def _other_labels(batch: StepBatch) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the right labels (B, T), and what people train on in their place: the cause, and words."""
    ids, right = batch.ids, batch.targets
    yield "", "", right
    yield "labels-not-shifted", "each position learns the token that it reads", ids
    for end in (torch.full_like(right[:, -1:], IGNORED), right[:, -1:]):
        yield "labels-shifted-twice", "each position learns the token after the next", torch.cat([right[:, 1:], end], 1)
    yield "labels-wrong", "each position learns the token before", torch.cat([ids[:, :1], ids[:, :-1]], 1)
    yield PADDING, "targets of -100 are trained on", right.clamp(min=0)


def _labels(batch: StepBatch, labels: Tensor, end_of_text: int | None) -> Iterator[Told]:
    """Yield the causes in the labels (B, T), with what they are: other ones, and positions that are left out."""
    right, trained = batch.targets, labels != IGNORED
    ways, found = list(_other_labels(batch)), None
    for end in (None, -1):  # of all positions; of all but the last
        found = found or next((way for way in ways if bool((labels == way[2])[:, :end][trained[:, :end]].all())), None)
    if found is None:
        yield "labels-wrong", f"{int((labels != right)[trained].sum())} of {int(trained.sum())} positions have another label", ""
        return
    id, words, expected = found
    if id:
        yield id, words, ""
    if bool((labels != expected)[:, -1][trained[:, -1]].any()):
        yield "last-token-in-loss", f"the last token learns one that does not follow: {int(labels[0, -1])} in the first row", ""
    missing = ~trained & (expected >= 0) & (right >= 0) & trained.any()
    one = len(expected[missing].unique()) == 1 and bool(missing[:, :-1].any())  # a token, which may be the last
    if bool(missing[:, -1].any()) and bool((missing | (right < 0))[:, -1].all()) and labels.shape[1] > 1 and not one:
        yield "last-token-missing", "the last position of each row has no label", ""
        missing[:, -1] = False
    left = expected[missing]
    if len(left.unique()) == 1 and bool(((expected == left[0]) == missing)[:, :-1].all()):
        token = int(left[0])
        yield "token-ignored", f"positions with the label {token} are not trained on", PAD if token == end_of_text else ""
    elif len(left):
        yield "tokens-left-out", f"{int(missing.sum())} of {missing.numel()} positions are not trained on", ""


def _averages(count: int, length: float, parts: int, padded: int) -> Iterator[tuple[float, str, str]]:
    """Yield what a wrong average of ``count`` tokens, ``length`` a row, multiplies the mean by; its causes; and words."""
    summed, apart = "loss-not-averaged", "accumulation-not-averaged"
    if parts > 1:
        yield parts, apart, f"the sum over {parts} parts"
        yield count / parts, summed, "the sum over the tokens of each part"
        for power in (1, 2):
            yield parts**-power, AVERAGED, f"the mean over {parts} parts, divided by their number again"
        yield count, f"{summed} {apart}", "the sum over all tokens and parts"
        yield count * parts / padded, f"{PADDING} {apart}", "the sum over parts, each divided by all its targets"
        yield length * parts, f"{summed} {apart}", "the sum over the tokens of a row, and over parts"
    yield count, summed, "the sum over all tokens"
    yield length, summed, "the sum over the tokens of a row"
    yield count / padded, PADDING, "the sum, divided by all targets, ignored ones too"


def _weights(batch: StepBatch, reading: LossReading, shares: Sequence[float]) -> Iterator[Told]:
    """Yield the causes in the weights of the positions: a factor of all, or weights that differ."""
    trained, total = reading.labels != IGNORED, float(reading.weights.sum())
    factor = next((one for one in shares if abs(total * one - 1) <= EVEN), shares[0])
    weights, parts = reading.weights[trained] * factor, reading.parts[trained]
    if not len(weights):
        yield "gradient-scaled", "the gradient is zero", ""
        return
    low, high, total, count = float(weights.min()), float(weights.max()), float(weights.sum()), len(weights)
    if high - low > EVEN * abs(high):
        words = f"positions weigh between {low * count:.4g} and {high * count:.4g} of the mean's"
        own = [weights[parts == part] for part in parts.unique()]
        if len(own) > 1 and all(float(one.max() - one.min()) <= EVEN * abs(high) for one in own):
            yield AVERAGED, f"each part is averaged alone, however many targets it has; {words}", UNEQUAL
        else:
            yield "loss-average-wrong", words, ""
    elif abs(total - 1) > EVEN:
        ways = _averages(count, count / int(trained.any(1).sum()), len(parts.unique()), batch.targets.numel())
        plain = factor != 1 and abs(total / factor - 1) <= EVEN  # the mean, whose gradient is scaled afterwards
        way = next((way for way in ways if not plain and abs(total / way[0] - 1) <= EVEN), None)
        if way is None:
            yield "gradient-scaled", f"the gradient is {total:.6g} times that of the mean loss", ""
        else:
            yield from ((id, f"the gradient is that of {way[2]}: {total:.6g} times the mean's", "") for id in way[1].split())


def judge_dropout(findings: StepFindings, found: Iterable[float], wanted: float | None) -> None:
    """Compare the probabilities of the dropouts that are active in a step with the expected one; None: only report them."""
    said = ", ".join(f"{p:g}" for p in sorted(set(found)))
    if said and wanted is None:
        findings.notes.append(f"read off: dropout of {said} (it was left out of the comparison)")
    elif said and not wanted:
        findings.add("dropout-active", "h.*", f"dropout of {said} is active in the step", "seen in its operators")
    elif wanted and not said:
        findings.add("dropout-missing", "h.*", f"no dropout is active, not {wanted:g}", "its operators")
