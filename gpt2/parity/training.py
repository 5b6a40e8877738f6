"""The checks of training: loss, every parameter's gradient, and AdamW steps, ours against transformers', block by block.

In float64, two long sequences. In ``dtype``, 2 to 16 short ones, each by itself: a near-tie in a softmax may decide its error.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from gpt2.checkpoint.keys import PREFIX
from gpt2.measure.allocator import give_back_freed_memory
from gpt2.measure.environment import dtype_label
from gpt2.measure.metrics import errors_of_both, relative_error, split, token_losses, worst_relative_error
from gpt2.measure.rounding import TRAINING_RATIO, root_mean_square
from gpt2.parity.checks import FIRST_SEQUENCES, Subject, head_of, hidden_of
from gpt2.parity.forward import MISSING
from gpt2.parity.streaming import Receive, Streamed, Weights, lockstep, take_gradients, taking_turns

STEPS = 2  # of AdamW: the first shows groups and bias correction, the second the moments
PART, SMALL = 8192, 65_536  # AdamW moves so many rows of a matrix at a time, and tensors of fewer entries together
LOOKUP, HEAD = "wte.weight (lookup)", "wte.weight (head)"  # the two parts of a tied embedding's gradient
UNTIED = "lm_head.weight"  # the parameter of an untied head: both have a gradient of their own


@dataclass(frozen=True)
class Step:
    """What one model gives at one point of its backward pass: the gradients of one sequence, or of all outside the blocks."""

    layer: int | None
    row: int
    gradients: dict[str, Tensor]
    parameters: Weights
    losses: Tensor | None = None  # (B, T)

    @property
    def names(self) -> list[str]:
        return [*self.gradients, *(["loss"] if self.losses is not None else [])]

    def __getitem__(self, name: str) -> Tensor:
        """Return a gradient or the losses; NaN if it is missing."""
        found = self.losses if name == "loss" else self.gradients.get(name)
        return MISSING if found is None else found


Errors = defaultdict[str, tuple[list[float], ...]]  # of a parameter in each sequence: ours, transformers', apart, noisy
NOTHING = Step(-1, -1, {}, {})  # where a walk has ended, and before its backward pass
Walk = Callable[[Callable[[Step], None]], None]
Streams = Callable[[Receive], AbstractContextManager[Streamed]]


def _backward(subject: Subject, model: nn.Module, sequences: Tensor, streamed: Streams) -> Walk:
    """Return a walk through the backward pass of each sequence's mean loss, summed over the (B, T + 1) ``sequences``."""

    def give_back(_: Tensor | None = None) -> None:
        give_back_freed_memory(subject.bytes)

    def walk(emit: Callable[[Step], None]) -> None:
        with streamed(lambda *block: emit(Step(*block))) as context:
            with taking_turns(partial(emit, NOTHING)):
                hidden = hidden_of(model, sequences[:, :-1])
            leaf = hidden.detach().requires_grad_()
            logits = head_of(model, leaf)
            logits.register_hook(give_back)  # what the loss leaves: the gradient of the embedding does not fit there
            loss = token_losses(logits, sequences[:, 1:])
            del logits
            loss.mean(-1).sum().backward()
            losses = loss.detach()
            del loss  # and with it the logits
            give_back()  # for the next model's
            tied = UNTIED not in context.outside
            head = {name: p for name, p in context.outside.items() if name == ("wte.weight" if tied else UNTIED)}
            emit(Step(None, 0, {HEAD if tied else UNTIED: gradient for gradient in take_gradients(head).values()}, head, losses))
            hidden.backward(leaf.grad)
            outside = take_gradients({name: p for name, p in context.outside.items() if name != UNTIED})
            outside |= {LOOKUP: outside.pop("wte.weight")} if tied else {}
            emit(Step(None, 0, outside, context.outside))

    return walk


@dataclass
class _Optimizer:
    """AdamW for one model in ``dtype``, a block at a time."""

    ids: Tensor  # (n,): the tokens of the sequences, whose rows of the embedding get both parts of the gradient
    dtype: torch.dtype
    kept: defaultdict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    def changes(self, step: Step) -> dict[str, Tensor]:
        """Return the change of each parameter by AdamW steps on the gradients of the first sequences, once all were seen."""
        seen = dict[str, tuple[Tensor, list[Tensor]]]()
        for name, gradient in step.gradients.items():
            if name == HEAD:
                self.kept[HEAD] = [gradient[self.ids].to(self.dtype)]
            elif name in (LOOKUP, UNTIED, "wte.weight"):
                whole, rows = ("wte.weight" if name == LOOKUP else name), gradient[self.ids].to(self.dtype)
                rows = rows + self.kept.pop(HEAD)[0] if name == LOOKUP else rows
                seen[whole] = step.parameters[whole].detach()[self.ids].to(self.dtype), [rows] * STEPS
            elif step.row < STEPS:
                kept = self.kept[name]
                kept += [gradient.to(self.dtype)] * (STEPS if step.layer is None else 1)
                if len(kept) == STEPS:
                    seen[name] = step.parameters[name].detach().to(self.dtype), self.kept.pop(name)
        return _changes(seen)


def _square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor)) ** 2


def _changes(seen: dict[str, tuple[Tensor, list[Tensor]]]) -> dict[str, Tensor]:
    """Return by how much AdamW moves each parameter with one step on each of its gradients, in float64.

    AdamW divides each gradient by its own size. With the usual eps of 1e-8 a gradient of pure rounding error (that of every key
    bias, zero in exact arithmetic) takes a full step, and a few such entries decide the figure: over eight seeds our error was
    0.1 to 4 times that of transformers. With an eps as large as the gradients, a step's error is in proportion to its gradient's.
    """
    changes = {name: torch.empty_like(start, dtype=torch.float64) for name, (start, _) in seen.items()}
    tensors = [(start, changes[name], *each) for name, (start, each) in seen.items()]
    parts = [part for own in tensors for part in zip(*(split(each, PART) for each in own), strict=True)]
    small = [part for part in parts if part[0].numel() <= SMALL]
    for together in filter(None, [small, *([part] for part in parts if part[0].numel() > SMALL)]):
        starts, moved, *steps = zip(*together, strict=True)
        parameters = [nn.Parameter(start.clone()) for start in starts]
        kinds = [(0.1, [p for p in parameters if p.ndim >= 2]), (0.0, [p for p in parameters if p.ndim < 2])]
        groups = [{"params": members, "weight_decay": decay} for decay, members in kinds]
        optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-2, fused=True)
        for step in steps:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient
            optimizer.step()
        for parameter, start, change in zip(parameters, starts, moved, strict=True):
            torch.sub(parameter.detach().double(), start.double(), out=change)
    return changes


def gradients(subject: Subject) -> None:
    """Compare loss, gradients and AdamW steps in float64, and that clipping's norm is of each of these parameters once."""
    findings, sequences = subject.findings, subject.probe.long
    models = {"transformers": subject.reference, "ours": subject.ours}
    runs = {model: partial(subject.exactly, model, f"float64: gradients, {name}") for name, model in models.items()}
    walks = [_backward(subject, model, sequences, run) for model, run in runs.items()]
    theirs, own = (_Optimizer(sequences[:, :-1].unique(), torch.float64) for _ in models)
    worst, compared = dict[str, float](), set[str]()
    with closing(lockstep(*walks)) as steps:
        for expected, ours in ((a or NOTHING, b or NOTHING) for a, b in steps):
            if expected.losses is not None:
                findings.mapping("loss", "loss", worst_relative_error(ours["loss"], expected.losses))
                findings.settle("loss")
            compared |= expected.gradients.keys()
            for name, gradient in expected.gradients.items():
                worst[name] = max(worst_relative_error(ours[name], gradient), worst.get(name, 0.0))
            moved = own.changes(ours)
            for name, change in theirs.changes(expected).items():
                findings.mapping("adamw", name, worst_relative_error(moved.get(name, MISSING), change))
            if expected.layer is None or expected.row == len(sequences) - 1:
                for name in expected.gradients:
                    findings.mapping("gradients", name, worst.pop(name))
                _settle(subject, expected)
            expected.gradients.clear()
            ours.gradients.clear()
    names = {id(p): name.removeprefix(PREFIX) for name, p in subject.ours.named_parameters()}
    listed = sorted(names.get(id(p), "") for p in subject.ours.parameters())
    right = sorted({"wte.weight" if name in (HEAD, LOOKUP) else name for name in compared})
    findings.mapping("gradients", "norm, as clipping computes it", float(listed != right))
    findings.settle("gradients", "adamw")


def rounded_gradients(subject: Subject) -> None:
    """Compare loss, gradients and AdamW steps in ``dtype`` with the float64 run, for both models.

    A few sequences are enough for a parameter if our error in each is within the bound; else the root mean square of all decides.
    """
    findings, sequences = subject.findings, subject.probe.short
    errors: Errors = defaultdict(lambda: tuple([] for _ in range(3 + subject.draws)))
    _round(subject, sequences[:FIRST_SEQUENCES], errors, last=False)
    if errors:
        _round(subject, sequences[FIRST_SEQUENCES:], errors, last=True)
    findings.settle("loss-rounding", "gradients-rounding", "adamw-rounding")


def _round(subject: Subject, sequences: Tensor, errors: Errors, last: bool) -> None:
    """Add the points that these sequences decide, the ``last`` ones all; the errors of the others stay in ``errors``."""
    findings, label, undecided = subject.findings, dtype_label(subject.dtype), set(errors)
    exact = partial(subject.exactly, subject.reference, "float64: gradients of short sequences, transformers")
    walks = [_backward(subject, subject.reference, sequences, exact)]
    models = {"ours": subject.ours_rounded, "transformers": subject.reference_rounded}
    for name, model in models.items():
        walks.append(_backward(subject, model, sequences, partial(subject.rounded, model, f"{label}: gradients, {name}")))
    for number in range(subject.draws):
        models[f"noisy {number}"] = noisy = subject.noisy()
        seed = 2 + 2 * number + last
        noisily = partial(subject.noisily, noisy, "float64: gradients of short sequences", seed)
        walks.append(_backward(subject, noisy, sequences, noisily))
    ids = sequences[:, :-1].unique()
    optimizers = [_Optimizer(ids, torch.float64), *(_Optimizer(ids, subject.dtype) for _ in models)]

    def decide(check: str, name: str) -> None:
        if name not in errors:
            return
        each = zip(*errors[name], strict=True)  # of a sequence, in the order of Errors
        if last or all(ours <= TRAINING_RATIO * root_mean_square(noise) for ours, _, _, *noise in each):
            found = [root_mean_square(values) for values in errors.pop(name)]
            findings.rounding(check, name, found[:3], found[3:])

    with closing(lockstep(*walks)) as steps:
        for row in steps:  # each model's step is let go before the next one's; ours waits for transformers'
            expected, own, own_changes, moved = next(row) or NOTHING, NOTHING, dict[str, Tensor](), list[float]()
            changes = {} if last else optimizers[0].changes(expected)
            for number, step in enumerate((each or NOTHING for each in row), start=1):
                for name in expected.names if number > 1 else ():
                    if last and name not in undecided:
                        continue
                    if number > 2:  # a noisy model
                        errors[name][number].append(relative_error(step[name], expected[name]))
                        continue
                    for place, error in enumerate(errors_of_both(own[name], step[name], expected[name])):
                        errors[name][place].append(error)
                if not last:
                    changed = optimizers[number].changes(step)
                    if changes:
                        moved += [_whole(changed, changes), *([_whole(own_changes, changed)] if number == 2 else [])]
                    own_changes = changed if number == 1 else {}
                    del changed
                if number == 1:
                    own = step
                else:
                    own.gradients.clear()
                    step.gradients.clear()
                    if expected.layer is None:  # gradients of the embedding: the next model's is as large
                        give_back_freed_memory(subject.bytes)
            if moved:
                inside = "ln_f" if "ln_f.weight" in changes else f"h.{expected.layer}"
                where = inside if expected.layer is not None else UNTIED if UNTIED in changes else "wte, wpe"
                findings.rounding("adamw-rounding", f"{where} (all parameters)", moved[:3], moved[3:])
            if expected.losses is not None:
                decide("loss-rounding", "loss")
            if expected.layer is None or expected.row == len(sequences) - 1:
                for name in expected.gradients:
                    decide("gradients-rounding", name)
                _settle(subject, expected)
            expected.gradients.clear()
            if last and not errors:
                return


def _settle(subject: Subject, step: Step) -> None:
    """End a block's step; before and behind the blocks, give back the memory of what is freed, where nothing else fits."""
    subject.findings.settle()
    if step.layer in (0, subject.config.n_layer):
        give_back_freed_memory(subject.bytes)


def _whole(changes: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the relative error of a block's whole change; a bias alone has too few entries for a stable figure."""
    error = size = 0.0
    for name, change in expected.items():
        error += _square(changes.get(name, MISSING) - change)
        size += _square(change)
    return math.sqrt(error / size)
