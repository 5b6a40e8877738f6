"""``gpt2 verify --device``: judge every operator of a model on a device, in every dtype."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from gpt2.checkpoint.checkpoint import open_checkpoint
from gpt2.checkpoint.containers.mapped_file import require_whole_files
from gpt2.checkpoint.loading import require_device
from gpt2.checkpoint.names import DEFAULT, VERIFIES, ModelName
from gpt2.devices.arithmetic import PRODUCTS
from gpt2.devices.case import Case, Material, backward_of
from gpt2.devices.cases import forward_cases
from gpt2.devices.judge import Device, Verdict, judge
from gpt2.devices.report import DeviceReport
from gpt2.devices.training import adamw_cases, model_cases
from gpt2.errors import InputError
from gpt2.measure.metrics import Progress, silent
from gpt2.pages.reports import Interrupted, dtype_label, environment

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def verify_device(
    name: str = DEFAULT,
    device: str | torch.device | Device = "auto",
    *,
    dtypes: Iterable[torch.dtype] | None = None,
    operators: Iterable[str] | None = None,
    seed: int = 0,
    revision: str | None = None,
    offline: bool = False,
    progress: Progress = silent,
) -> DeviceReport:
    """Judge whether a device computes a model's operators as precisely as its arithmetic allows.

    Args:
        name: a model name as in :func:`gpt2.load`. Its shapes, weights and activations are what the operators run on.
        device: "cpu", "cuda", "cuda:1", "mps", or "auto": the first of cuda, mps and cpu that is here.
        dtypes: float32, bfloat16 and float16, or some of them; default: the name's ``:dtype`` suffix, else all.
        operators: judge only those whose names begin so, such as "attention"; default: all, and a whole model.
        seed: draws the token ids.

    Raises:
        InputError: no such model, device or operator, float64, or too little memory there. CheckpointError: it cannot be read.
        Interrupted: Ctrl-C; its ``report`` has the cases that were judged before.
    """
    started = time.perf_counter()
    own = device if isinstance(device, Device) else Device.of(require_device(device))
    parsed = ModelName.parse(name, VERIFIES, revision=revision)
    own_dtypes = DTYPES if parsed.dtype is None else (getattr(torch, parsed.dtype),)
    kinds = own_dtypes if dtypes is None else tuple(dtypes)
    if not set(kinds) <= set(DTYPES):
        raise InputError(
            f"{name}: a device is judged in float32, bfloat16 or float16, beside float64 on the CPU; choose one of them"
        )
    checkpoint = open_checkpoint(replace(parsed, dtype=None), offline=offline)
    progress("loading")
    material = Material.of(checkpoint.load(torch.float32).eval(), seed)
    require_whole_files()
    verdicts: list[Verdict] = []
    wanted = None if operators is None else tuple(operators)

    def report(stopped: str = "") -> DeviceReport:
        config = checkpoint.config
        return DeviceReport(
            model=checkpoint.name,
            device=own.name,
            coverage=f"{config.num_parameters():,} parameters · width {config.n_embd}, {config.n_head} heads, up to "
            f"{config.n_positions} tokens, vocabulary {config.vocab_size:,} · {len(verdicts)} cases",
            verdicts=tuple(_one_product(verdicts)),
            environment=environment(kinds, own.target),
            seed=seed,
            seconds=time.perf_counter() - started,
            stopped=stopped,
        )

    try:
        with torch.random.fork_rng(devices=[]):
            for case in _cases(material):
                if wanted is None or case.operator.startswith(wanted):
                    for dtype in (each for each in kinds if each in case.dtypes):
                        progress(f"{own.name}: {case.name}, {dtype_label(dtype)}")
                        verdicts.append(judge(own, case, dtype))
    except KeyboardInterrupt:
        raise Interrupted(report("interrupted")) from None
    if not verdicts:
        raise InputError(f"nothing to judge: no operator's name begins with {' or '.join(wanted or ())!r}, in the dtypes given")
    return report()


def _one_product(verdicts: list[Verdict]) -> Iterator[Verdict]:
    """Give all matrix products the name of the coarsest: inputs of 1e-6 tell float16 from TF32, which are equal elsewhere."""
    coarsest = {each.arithmetic: each for each in verdicts if each.arithmetic in PRODUCTS}
    name = next((name for name in reversed(PRODUCTS) if name in coarsest), None)
    for each in verdicts:
        yield replace(each, arithmetic=name, advice=coarsest[name].advice) if each.arithmetic in PRODUCTS and name else each


def _cases(material: Material) -> Iterator[Case]:
    """Yield all cases in the order of computation: forward, backward, AdamW, whole model."""
    yield from forward_cases(material)
    yield from (backward_of(case) for case in reversed([*forward_cases(material)]) if case.trained)
    yield from adamw_cases(material)
    yield from model_cases(material)
