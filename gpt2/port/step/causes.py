"""The table of every cause that ``gpt2 diagnose --step`` can name, with its corrected line; the ids are a contract.

What each stage of a step shows is collected in a :class:`Stage`, and :func:`concluded` makes the diagnosis of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpt2.port.diagnosis.causes import KnownCause
from gpt2.port.diagnosis.report import SURE, Cause, Diagnosis, Divergence

STAGES = ("loss", "gradient", "clip", "update")  # in the order of a step
Places = Callable[[Sequence[str]], str]  # the checkpoint's names for parameters, in words
SHIFTED = "F.cross_entropy(model(x).flatten(0, 1), y.flatten())  # y[:, t] is the token after x[:, t]"
MEAN = 'F.cross_entropy(logits, targets)  # reduction="mean": over all tokens of the batch'
PARTS = "(loss / grad_accum).backward(), for each of grad_accum equal parts"
ZEROED = "optimizer.zero_grad() once for each step, before the first backward()"
TIED = "lm_head.weight = wte.weight  # one parameter, with gradients from both uses"
ORDER = "loss.backward() for all parts; clip_grad_norm_(model.parameters(), 1.0); optimizer.step()"
CLIPPED = "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)  # after backward(), before optimizer.step()"
ADAMW = "torch.optim.AdamW(groups, lr, betas=(0.9, 0.95), eps=1e-8)"
GROUPS = "groups: weight_decay for p.ndim >= 2, and 0.0 for biases and norms"
DECOUPLED = "p -= lr * weight_decay * p, apart from the gradient: torch.optim.AdamW, not Adam"
RATE = 'for group in optimizer.param_groups: group["lr"] = rate(step)  # step from 0, set before optimizer.step()'
EPS = "p -= lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + 1e-8)  # t from 1"
BACKWARD = "compare each derivative with autograd's, one operation at a time, or with gpt2 trace --gradients"
_TABLE: dict[str, tuple[str, str, str]] = {
    # The loss
    "labels-not-shifted": ("loss", "each position learns the token that it reads", SHIFTED),
    "labels-shifted-twice": ("loss", "each position learns the token after the next", SHIFTED),
    "labels-wrong": ("loss", "positions learn other tokens than the next", SHIFTED),
    "last-token-in-loss": ("loss", "the last position has a wrong label", SHIFTED),
    "last-token-missing": ("loss", "the last position is not trained on", SHIFTED),
    "token-ignored": ("loss", "a token of the vocabulary is taken for padding", "ignore_index=-100, which is no token"),
    "tokens-left-out": ("loss", "some positions are not trained on", MEAN),
    "loss-not-averaged": ("loss", "the loss is a sum, not a mean", MEAN),
    "loss-average-wrong": ("loss", "positions have unequal weights in the loss", MEAN),
    "padding-in-average": ("loss", "ignored targets are counted in the average", "loss.sum() / (y != -100).sum()"),
    "accumulation-not-averaged": ("loss", "the parts of a batch are summed, not averaged", PARTS),
    "accumulation-average-wrong": ("loss", "the parts of a batch are averaged wrongly", PARTS),
    "label-smoothing": ("loss", "the labels are smoothed", "label_smoothing=0.0"),
    "logits-scaled": ("loss", "the logits of the loss are scaled", "F.cross_entropy(logits, targets)  # no temperature"),
    "logits-half-precision": ("loss", "the loss is computed in half precision", "F.cross_entropy(logits.float(), targets)"),
    "dropout-active": ("loss", "dropout is active", "dropout=0.0 in the model, if that is what you train with"),
    "dropout-missing": ("loss", "dropout is not active", "model.train() before training"),
    # The gradients
    "gradient-not-zeroed": ("gradient", "the gradient of the step before is still in it", ZEROED),
    "accumulation-last-only": ("gradient", "only the last part of a batch is in the gradient", ZEROED),
    "gradient-scaled": ("gradient", "the gradient is scaled", "(loss / grad_accum).backward()  # no other factor"),
    "tied-gradient-lost": ("gradient", "the token embedding lacks the gradient of one of its two uses", TIED),
    "tied-gradient-doubled": ("gradient", "a gradient of the token embedding is counted twice", TIED),
    "gradient-detached": ("gradient", "a part gets no gradient", "no .detach(), .data or torch.no_grad() in the forward pass"),
    "backward-wrong": ("gradient", "a derivative in the backward pass is wrong", BACKWARD),
    "parameters-frozen": ("gradient", "parameters are frozen", "p.requires_grad_(True) for all parameters"),
    # Clipping
    "clip-missing": ("clip", "the gradient is not clipped", CLIPPED),
    "clip-unwanted": ("clip", "the gradient is clipped", "no clip_grad_norm_, or optim.clip as it is"),
    "clip-by-value": ("clip", "each entry is clipped, not the norm", CLIPPED),
    "clip-per-tensor": ("clip", "each parameter's gradient is clipped alone", CLIPPED),
    "clip-norm": ("clip", "the gradient is clipped by another norm", f"{CLIPPED}, norm_type=2.0"),
    "clip-threshold": ("clip", "the gradient is clipped to another norm", CLIPPED),
    "clip-before-accumulation": ("clip", "the gradient is clipped before all parts are added", ORDER),
    "clip-before-unscaling": ("clip", "the scaled gradient is clipped", f"scaler.unscale_(optimizer); {CLIPPED}"),
    # The update
    "optimizer-sgd": ("update", "the optimizer is SGD", ADAMW),
    "optimizer-other": ("update", "the optimizer is another one than AdamW", ADAMW),
    "amsgrad": ("update", "the second moment never falls (AMSGrad)", f"{ADAMW}  # amsgrad=False"),
    "decay-coupled": ("update", "the decay is added to the gradient", DECOUPLED),
    "decay-on-all": ("update", "biases and norms decay too", GROUPS),
    "decay-on-norms": ("update", "norms decay too", GROUPS),
    "decay-on-biases": ("update", "biases decay too", GROUPS),
    "decay-not-on-embeddings": ("update", "the embeddings do not decay", GROUPS),
    "decay-missing": ("update", "weights do not decay", GROUPS),
    "decay-wrong": ("update", "the decay is another", GROUPS),
    "decay-without-rate": ("update", "the decay is not multiplied by the rate", "p -= lr * weight_decay * p"),
    "decay-after-update": ("update", "the decay comes after the update", "p -= lr * weight_decay * p, then p -= lr * direction"),
    "bias-correction-missing": ("update", "the moments are not corrected for their start at zero", EPS),
    "bias-correction-step": ("update", "the moments are corrected for another step", EPS),
    "eps-inside-root": ("update", "eps is added inside the root", EPS),
    "eps-before-correction": ("update", "eps is added before the root is corrected", EPS),
    "eps-wrong": ("update", "another eps", f"{ADAMW}"),
    "betas-swapped": ("update", "the betas have changed places", ADAMW),
    "betas-wrong": ("update", "other betas", ADAMW),
    "rate-wrong": ("update", "another rate", RATE),
    "schedule-step": ("update", "the schedule is off by a step", RATE),
    "schedule-wrong": ("update", "another schedule", RATE),
    "momentum-kept": (
        "update",
        "moments are kept from one training to the next",
        "a new optimizer, with its own state, in make_step",
    ),
    "momentum-lost": ("update", "the moments begin at zero in every step", "make the optimizer once, outside of step"),
    "parameter-missing": ("update", "the optimizer lacks parameters", "AdamW(model.parameters(), ...): all of them, in groups"),
    "parameter-twice": ("update", "parameters are updated twice in a step", "each parameter in one group of one optimizer"),
    "step-per-micro-batch": ("update", "each part of a batch makes a step of its own", ORDER),
    "update-skipped": ("update", "a step changes nothing", "GradScaler with a smaller init_scale, or bfloat16 without one"),
}
CAUSES = {id: KnownCause(title, fix) for id, (_, title, fix) in _TABLE.items()}
STAGE = {id: stage for id, (stage, _, _) in _TABLE.items()}


def cause(id: str, where: str, detail: str, evidence: str = "", confidence: float = SURE, fix: str | None = None) -> Cause:
    """Return a cause of this table; ``detail`` says what the step does, ``evidence`` how we know."""
    return Cause(id, where, detail, evidence, confidence, CAUSES[id].fix if fix is None else fix)


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
    once = {(one.id, one.where): one for stage in stages.values() for one in stage.causes}.values()
    causes = sorted(once, key=lambda one: (-round(one.confidence, 2), STAGES.index(STAGE[one.id])))
    earlier, first, said = ((), None, ()) if forward is None else (forward.causes, forward.first_divergence, forward.notes)
    right = all(stage.explained for stage in stages.values()) and (forward is None or forward.ok)
    verdict = "mismatch" if causes or earlier else "equal" if right else "undetermined"
    if verdict != "equal" and first is None:
        early = [n for n in STAGES if any(STAGE[one.id] == n for one in causes) or not stages[n].explained]
        at = early[0] if early else "update"
        first = Divergence(at, None, stages[at].error or max(stage.error for stage in stages.values()))
    notes = dict.fromkeys([*said, *notes, *(note for name in STAGES for note in stages[name].notes)])
    return Diagnosis(verdict, first if verdict != "equal" else None, (*earlier, *causes), tuple(notes), source)
