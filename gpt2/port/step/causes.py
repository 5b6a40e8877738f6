"""The table of every cause that ``gpt2 diagnose --step`` can name, with its corrected line; the ids are a contract.

What the comparison of each stage of a step shows is collected in :class:`StepFindings`.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from gpt2.port.terms.causes import SURE, Cause
from gpt2.port.terms.places import Place
from gpt2.port.terms.report import Diagnosis, Divergence

SHIFTED = "F.cross_entropy(model(x).flatten(0, 1), y.flatten())  # y[:, t] is the token after x[:, t]"
MEAN = 'F.cross_entropy(logits, targets)  # reduction="mean": over all tokens of the batch'
PARTS = "(loss / grad_accum).backward()  # for each of grad_accum equal parts"
CLIPPED = "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)  # after backward(), before optimizer.step()"
ADAMW = "torch.optim.AdamW(groups, lr, betas=(0.9, 0.95), eps=1e-8)"
GROUPS = 'groups = [{"params": [p], "weight_decay": weight_decay * (p.ndim >= 2)} for p in model.parameters()]'
RATE = 'for group in optimizer.param_groups: group["lr"] = rate(step)  # step from 0, set before optimizer.step()'
EPS = "p -= lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + 1e-8)  # t from 1"
# By stage, in the order of a step: corrected lines, and the causes that each of them mends.
_TABLE: dict[str, dict[str, str]] = {
    "loss": {
        SHIFTED: "labels-not-shifted labels-shifted-twice labels-wrong last-token-in-loss last-token-missing",
        MEAN: "tokens-left-out loss-not-averaged loss-average-wrong",
        PARTS: "accumulation-not-averaged accumulation-average-wrong",
        "ignore_index=-100, which is no token, and labels by the attention mask": "token-ignored",
        "F.cross_entropy(logits, targets, ignore_index=-100)  # over the targets that are not": "padding-in-average",
        "F.cross_entropy(logits, targets)  # label_smoothing=0.0": "label-smoothing",
        "F.cross_entropy(logits, targets)  # no temperature": "logits-scaled",
        "F.cross_entropy(logits.float(), targets)": "logits-half-precision",
        "dropout=0.0 in the model, if that is what you train with": "dropout-active",
        "model.train()  # before training": "dropout-missing",
    },
    "gradient": {
        "optimizer.zero_grad()  # once for each step, before the first backward()": "gradient-not-zeroed accumulation-last-only",
        "lm_head.weight = wte.weight  # one parameter, with gradients from both uses": "tied-gradient-lost tied-gradient-doubled",
        "(loss / grad_accum).backward()  # no other factor": "gradient-scaled",
        "no .detach(), .data or torch.no_grad() in the forward pass": "gradient-detached",
        "compare each derivative with autograd's, one operation at a time, or with gpt2 trace --gradients": "backward-wrong",
        "for p in model.parameters(): p.requires_grad_(True)": "parameters-frozen",
    },
    "clip": {
        CLIPPED: "clip-missing clip-by-value clip-per-tensor clip-threshold",
        "pass  # no clip_grad_norm_, or optim.clip as it is": "clip-unwanted",
        f"{CLIPPED}; norm_type=2.0": "clip-norm",
        f"{CLIPPED}: once, for all parts": "clip-before-accumulation",
        f"scaler.unscale_(optimizer); {CLIPPED}": "clip-before-unscaling",
    },
    "update": {
        ADAMW: "optimizer-sgd optimizer-other eps-wrong betas-swapped betas-wrong",
        f"{ADAMW}  # amsgrad=False": "amsgrad",
        f"{ADAMW}  # not Adam, which adds the decay to the gradient": "decay-coupled",
        GROUPS: "decay-on-all decay-on-norms decay-on-biases decay-not-on-embeddings decay-missing decay-wrong",
        "p -= lr * weight_decay * p": "decay-without-rate",
        "p -= lr * weight_decay * p; p -= lr * direction": "decay-after-update",
        EPS: "bias-correction-missing bias-correction-step eps-inside-root eps-before-correction",
        RATE: "rate-wrong schedule-step schedule-wrong",
        f"{ADAMW}  # in make_step, with its own state": "momentum-kept",  # from one training to the next
        f"{ADAMW}  # once, outside of step": "momentum-lost",  # zero in every step
        f"{GROUPS}  # all of them": "parameter-missing",  # from the optimizer
        f"{GROUPS}  # each of them once, in one optimizer": "parameter-twice",
        "optimizer.step()  # once, after backward() of all parts": "step-per-micro-batch",
        "scaler = torch.amp.GradScaler(device, init_scale=1024.0)  # or bfloat16 without one": "update-skipped",
        "with torch.autocast(device, dtype): loss = ...  # and weights in float32": "update-rounded",
    },
}
STAGES = tuple(_TABLE)
STAGE = {id: stage for stage, rows in _TABLE.items() for ids in rows.values() for id in ids.split()}
FIXES = {id: fix for rows in _TABLE.values() for fix, ids in rows.items() for id in ids.split()}


@dataclass
class StepFindings:
    """What the stages of a step gave: ``errors`` of stages, those that are ``unknown``; ``places``: names."""

    places: Callable[[Collection[str]], tuple[Place, ...]]
    causes: list[Cause] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)

    def add(self, id: str, where: str | Collection[str], detail: str, seen: str = "", fix: str = "", sure: float = SURE) -> None:
        """Add a cause, once for each place: a part, or parameters. ``detail``: what the step does; ``seen``: how we know."""
        places = (Place(None, where),) if isinstance(where, str) else self.places(where)
        if (id, places) not in [(one.id, one.places) for one in self.causes]:
            self.causes.append(Cause(id, places, detail, seen, sure, fix or FIXES[id]))

    def leave_open(self, stage: str, why: str) -> None:
        """Say that not all of a stage is explained, and why."""
        self.unknown.add(stage)
        self.notes.append(why)

    def differ(self, stage: str, error: float) -> None:
        """Note how far a stage is from the reference's."""
        self.errors[stage] = max(error, self.errors.get(stage, 0.0))

    def diagnosis(self, forward: Diagnosis) -> Diagnosis:
        """Return the diagnosis of the step; ``forward`` is that of its forward pass, whose causes and notes come first."""
        causes = sorted(self.causes, key=lambda one: (-round(one.confidence, 2), STAGES.index(STAGE[one.id])))
        verdict = "mismatch" if causes or forward.causes else "undetermined" if self.unknown or not forward.ok else "equal"
        at = next((stage for stage in STAGES if stage in {STAGE[one.id] for one in causes} | self.unknown), STAGES[-1])
        own = Divergence(at, self.errors.get(at) or max(self.errors.values(), default=0.0))
        first = None if verdict == "equal" else forward.first_divergence or own
        notes = tuple(dict.fromkeys([*forward.notes, *self.notes]))
        return Diagnosis(verdict, first, (*forward.causes, *causes), notes, forward.module)
