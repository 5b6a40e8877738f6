"""``gpt2 verify --device``: judge what a device computes of a model, in every dtype; the verdict as text and JSON."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from gpt2.checkpoint.checkpoint import model_with, open_checkpoint
from gpt2.checkpoint.loading import require_device, require_intact
from gpt2.checkpoint.names import DEFAULT, FLOATS, ModelName, Name
from gpt2.decoder import Decoder
from gpt2.devices.judge import Judge, Verdict
from gpt2.errors import InputError
from gpt2.measure.environment import Environment, environment
from gpt2.measure.metrics import Progress, silent, token_losses
from gpt2.measure.placement import device_name
from gpt2.measure.replay import Replay
from gpt2.measure.rounding import FORWARD_RATIO, TRAINING_RATIO, rounded_weights
from gpt2.measure.tracing import block_of, layer_of, points, trace
from gpt2.model import GPT2
from gpt2.optim import AdamW
from gpt2.pages.reports import Interrupted, Line, Printed, Section, Styled, as_json, bold, dim, yellow

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOKENS, LONG = 24, 1024
PARAMETERS = 200e6  # of a larger model, as many blocks are judged as have so many


@dataclass(frozen=True)
class DeviceReport(Printed):
    """In ``verdicts``, of each operator, condition and dtype the first wrong result, else the one with the largest ratio."""

    model: str
    device: str
    coverage: str
    verdicts: tuple[Verdict, ...]
    first_wrong: Verdict | None  # in the order of computation
    environment: Environment
    seed: int
    seconds: float
    stopped: str = ""  # "interrupted" if it ended early

    @property
    def ok(self) -> bool:
        """Whether all was judged and an arithmetic explains every error. An imprecise one, such as TF32, is no bug."""
        return self.verdict in ("right", "imprecise")

    @property
    def verdict(self) -> str:
        """Return "right", "imprecise" (in a coarser arithmetic), "incomplete" (lacks an operator), "wrong", "interrupted"."""
        if self.first_wrong is not None:
            return "wrong"
        return self.stopped or ("incomplete" if self.missing else "imprecise" if self.arithmetics else "right")

    @property
    def missing(self) -> dict[str, str]:
        """What PyTorch has not implemented for the device, and the operators that need it."""
        return {each.missing: self._operators(missing=each.missing) for each in self.verdicts if each.missing}

    @property
    def arithmetics(self) -> dict[str, str]:
        """What is less precise than the dtype that was asked for: each arithmetic's name, and the lines that turn it off."""
        found: dict[str, dict[str, None]] = {}
        for each in self.verdicts:
            if each.arithmetic not in (None, each.dtype):
                found.setdefault(each.arithmetic, {})[each.advice] = None
        return {name: "; ".join(filter(None, lines)) for name, lines in found.items()}

    def to_json(self) -> str:
        """Return the report as JSON."""
        own = {name: getattr(self, name) for name in ("verdict", "ok", "arithmetics", "missing")}
        verdicts = [{**vars(each), "ok": each.arithmetic is not None, "ratio": each.ratio} for each in self.verdicts]
        return as_json({**own, **vars(self), "seconds": round(self.seconds, 2), "verdicts": verdicts})

    def sections(self) -> Iterator[Section]:
        """Yield a row for each condition, what is imprecise or wrong, and the verdict."""
        version, dtypes = self.environment.versions["torch"], list(dict.fromkeys(each.dtype for each in self.verdicts))
        yield Section(note=("\n", bold(self.model), "  on  ", bold(self.device), f", torch {version}"))
        rule = "the error against float64 on the CPU, over what rounding explains (up to 2 holds, 3 of training)."
        yield Section(note=dim(f"{self.coverage}\nEach operator alone, then the whole model: {rule}\n"))
        rows = list[list[Line]]()
        for row in dict.fromkeys(each.condition for each in self.verdicts):
            own = [[x for x in self.verdicts if (x.condition, x.dtype) == (row, dtype)] for dtype in dtypes]
            rows.append([row, *map(_cell, own)])
        yield Section(columns=("condition", *dtypes), rows=rows)
        for name, advice in self.arithmetics.items():
            off = f"\n    turn it off: {advice}" if advice else ""
            yield Section(note=(yellow(name), f": {self._operators(arithmetic=name)}{off}"))
        for name, operators in self.missing.items():
            yield Section(note=(yellow(f"not implemented on this device: {name}"), f"  ({operators})"))
        yield from (Section(note=(Styled("✗", "red"), f" {each.sentence}")) for each in self.verdicts if each.wrong)
        colour = {"wrong": "red", "right": "green"}.get(self.verdict, "yellow")
        said = {
            "wrong": self.first_wrong.sentence if self.first_wrong else "",
            "interrupted": "nothing wrong before",
            "incomplete": f"right in all that it has, lacks {', '.join(self.missing)}",
            "imprecise": f"right, with {', '.join(self.arithmetics)}",
            "right": "every operator and the whole model, in every dtype",
        }[self.verdict]
        end = dim(f"  in {self.seconds:.1f} s"), "\n"
        yield Section(note=("\n", Styled(self.verdict.upper(), f"bold {colour}"), f"  {said}", *end))

    def _operators(self, **having: str) -> str:
        own = [each for each in self.verdicts if having.items() <= vars(each).items()]
        return ", ".join(dict.fromkeys(f"{each.operator} in {each.dtype}" for each in own))


def _cell(verdicts: list[Verdict]) -> Line:
    if bad := [each for each in verdicts if each.arithmetic is None]:
        return Styled(f"✗ {bad[0].operator}", "bold red") if any(each.wrong for each in bad) else yellow("incomplete")
    coarse = dict.fromkeys(str(each.arithmetic) for each in verdicts if each.arithmetic != each.dtype)
    return yellow(", ".join(coarse)) if coarse else f"× {max((each.ratio for each in verdicts), default=0):.2f}"


def verify_device(
    name: Name = DEFAULT,
    device: "str | torch.device" = "auto",
    *,
    dtypes: Iterable[torch.dtype] | None = None,
    seed: int = 0,
    revision: str | None = None,
    offline: bool = False,
    progress: Progress = silent,
) -> DeviceReport:
    """Judge whether a device computes a model as precisely as rounding allows: each operator alone, then the whole model.

    ``device`` is "cpu", "cuda:1", "mps" ..., or "auto": the first of cuda, mps and cpu that is here. ``dtypes`` are float32,
    bfloat16 and float16, or some of them; default: the name's ``:dtype`` suffix, else all. ``seed`` draws the token ids.
    Raises InputError: no such model or device, another dtype, one in which the model overflows, or too little memory there.
    Interrupted: Ctrl-C; its ``report`` has what was judged before.
    """
    started = time.perf_counter()
    target = require_device(device)
    parsed = ModelName.parse(name, FLOATS, revision=revision)
    kinds = tuple(dtypes or (DTYPES if parsed.dtype is None else (getattr(torch, parsed.dtype),)))
    if not set(kinds) <= set(DTYPES):
        raise InputError(f"{name}: a device is judged in float32, bfloat16 or float16; choose one of them, as in gpt2:bf16")
    checkpoint = open_checkpoint(replace(parsed, dtype=None), offline=offline)
    progress("loading")
    model = _first_blocks(checkpoint.load(torch.float32))
    require_intact(model, str(name))
    judge, config, stopped = Judge(target, progress), model.config, ""
    ids = torch.randint(config.vocab_size, (2, TOKENS), generator=torch.Generator().manual_seed(seed))[:, : config.n_positions]
    ids[0, -1], ids[1, 0] = config.vocab_size - 1, ids[0, 0]  # the table's last row, and an id that occurs twice
    try:
        for judge.dtype in kinds:
            rounded = rounded_weights(model, judge.dtype)
            _operators(rounded, ids, judge)
            _whole(rounded, ids, judge)
    except KeyboardInterrupt:
        stopped = "interrupted"
    size = f"{config.n_layer} of {checkpoint.config.n_layer} blocks, {config.num_parameters():,} parameters"
    verdicts, env, seconds = tuple(judge.worst.values()), environment(kinds, target), time.perf_counter() - started
    report = DeviceReport(checkpoint.name, device_name(target), size, verdicts, judge.first_wrong, env, seed, seconds, stopped)
    if stopped:
        raise Interrupted(report)
    return report


def _first_blocks(model: GPT2, most: float = PARAMETERS) -> GPT2:
    """Return a model of the first blocks, at least one, with the same parameters: at most so many."""
    block = sum(p.numel() for p in model.h[0].parameters())
    outside = model.config.num_parameters() - block * model.config.n_layer
    count = max(1, min(model.config.n_layer, int((most - outside) / block)))
    named = ((name, p.detach()) for name, p in model.named_parameters() if (layer_of(name) or 0) < count)
    return model_with(replace(model.config, n_layer=count), named)


def _operators(model: GPT2, ids: Tensor, judge: Judge) -> None:
    """Judge every call of PyTorch under each condition: forwards, backwards, and in AdamW steps."""
    with torch.no_grad(), Replay(model, judge.dtype, partial(judge, "one row, attention step by step", FORWARD_RATIO)):
        trace(model, ids[:1])
    for condition, read in _readings(model, ids).items():
        with torch.no_grad(), Replay(model, judge.dtype, partial(judge, condition, FORWARD_RATIO)):
            read()
    with Replay(model, judge.dtype, partial(judge, "training", TRAINING_RATIO)) as training:
        logits = model(ids[:, :-1])
    training(token_losses, logits, ids[:, 1:]).mean().backward()
    for parameter in model.h[0].parameters():
        if judge.dtype == torch.float32 and parameter.grad is not None:
            training(_adamw, parameter.detach(), parameter.grad.to(judge.dtype).double())
    model.zero_grad()


def _readings(model: GPT2, ids: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Return what reads tokens under each condition; those of a cache need those before them."""
    decoder, half, mask = Decoder(model), ids.size(1) // 2, torch.ones_like(ids)
    mask[1:, : ids.size(1) // 3] = 0  # padding on the left of all rows but the first
    long = ids.flatten().repeat(LONG)[None, : min(LONG, model.config.n_positions)]
    readings: dict[str, Callable[[], Tensor]] = {
        "a batch": partial(model, ids),
        "a batch with padding": partial(model, ids, attention_mask=mask),
        f"a row of {long.size(1)} tokens": partial(_first_blocks(model, 0).hidden, long),
    }
    for padding, seen in ("", None), (", with padding", mask):
        cache = model.new_cache(len(ids), ids.size(1))
        cache.keys.zero_(), cache.values.zero_()
        before, then = (None if seen is None else seen[:, :end] for end in (half, half + 1))
        readings[f"a cached prompt{padding}"] = partial(decoder.prefill, ids[:, :half], cache, before)
        readings[f"one token after cached ones{padding}"] = partial(decoder.decode, ids[:, half : half + 1], cache, then)
        readings[f"several tokens after cached ones{padding}"] = partial(decoder.decode, ids[:, half + 1 :], cache, seen)
    return readings


def _adamw(weight: Tensor, gradient: Tensor) -> Tensor:
    """Return how far two steps move a weight; in float64 they are not fused, since rounding is known of each operator."""
    parameter = nn.Parameter(weight.clone())
    fused = weight.dtype != torch.float64
    optimizer = AdamW([parameter], 1e-2, (0.9, 0.95), weight_decay=0.1, fused=fused, foreach=False)
    for scale in (1.0, -0.5):
        parameter.grad = gradient * scale
        optimizer.step()
    return parameter.detach() - weight


def _whole(model: GPT2, ids: Tensor, judge: Judge) -> None:
    """Judge the model from end to end: every traced point, each condition's logits, and loss and gradients by block."""
    names, weights = zip(*((name, p.detach()) for name, p in model.named_parameters()), strict=True)
    blocks = list(dict.fromkeys(map(block_of, names)))

    @torch.no_grad()
    def forward(ids: Tensor, *weights: Tensor) -> list[Tensor]:
        own = model_with(model.config, zip(names, weights, strict=True))
        return [*trace(own, ids).values(), *(read() for read in _readings(own, ids).values())]

    def gradients(ids: Tensor, *weights: Tensor) -> list[Tensor]:
        own = model_with(model.config, zip(names, weights, strict=True))
        losses = token_losses(own(ids[:, :-1]), ids[:, 1:])
        found = list(zip(names, torch.autograd.grad(losses.mean(), list(own.parameters())), strict=True))
        return [losses, *(torch.cat([g.flatten() for name, g in found if block_of(name) == block]) for block in blocks)]

    places, inputs = [*points(model.config.n_layer), *_readings(model, ids)], (ids, *weights)
    judge("end to end", FORWARD_RATIO, "the whole model", places, forward, inputs)
    judge("end to end", TRAINING_RATIO, "the whole model, backward", ["losses", *blocks], gradients, inputs)
