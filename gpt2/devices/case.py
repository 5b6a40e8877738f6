"""What is judged on a device: an operator under one condition, as PyTorch calls on inputs of the model's own shapes.

A case is a function of tensors: the same calls run on the CPU in float64, on the device, and in a model of its arithmetic.
Views are made inside it: copying a non-contiguous tensor to a device may make it contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.devices.arithmetic import Run
from gpt2.measure.rounding import TRAINING_RATIO
from gpt2.measure.tracing import Recorded, trace
from gpt2.model import GPT2

ROWS, TOKENS = 2, 24
# Of one operator the error of many entries varies little; 16-bit partial sums reach 1.7 times what rounding explains.
OPERATOR_RATIO = 1.5
IN_ORDER = "it reads a non-contiguous input as if it were contiguous"


@dataclass(frozen=True)
class Case:
    """An operator under one condition. ``wrong`` are mistakes, each with the function that a device with it would compute.

    ``inputs`` are float32 (rounded to the dtype before they are used), integers or booleans. ``other_ways`` compute the same in
    another order of steps.
    """

    operator: str
    condition: str
    run: Run
    inputs: tuple[Tensor, ...]
    wrong: tuple[tuple[str, Run], ...] = ()
    other_ways: tuple[Run, ...] = ()
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    trained: bool = True  # whether a backward pass goes through it
    ratio: float = OPERATOR_RATIO  # how many times what rounding explains its error may be
    wrong_gradients: tuple[tuple[str, Run], ...] = ()  # mistakes of the backward pass, of inputs and outputs' gradients

    @property
    def name(self) -> str:
        return f"{self.operator}: {self.condition}"


@dataclass(frozen=True)
class Material:
    """A model in float32 on the CPU, token ids (2, T), and what its first block computes of them."""

    model: GPT2
    ids: Tensor
    traced: Recorded

    @classmethod
    def of(cls, model: GPT2, seed: int) -> Material:
        config = model.config
        tokens = min(TOKENS, config.n_positions)
        ids = torch.randint(config.vocab_size, (ROWS, tokens), generator=torch.Generator().manual_seed(seed))
        ids[0, -1], ids[1, 0] = config.vocab_size - 1, ids[0, 0]  # the table's last row, and an id that occurs twice
        return cls(model, ids, trace(first_blocks(model, 1), ids))

    @property
    def config(self) -> GPT2Config:
        return self.model.config

    def weight(self, name: str) -> Tensor:
        return self.model.get_parameter(name).detach()

    def normal(self, *shape: int, seed: int = 1) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def first_blocks(model: GPT2, count: int) -> GPT2:
    """Return a model of the first ``count`` blocks, with the same parameters."""
    config = replace(model.config, n_layer=min(count, model.config.n_layer))
    with torch.device("meta"):
        short = GPT2(config, initialise=False)
    short.load_state_dict(
        {name: tensor for name, tensor in model.state_dict().items() if name in short.state_dict()}, assign=True
    )
    return short.eval()


def backward_of(case: Case) -> Case:
    """Return the case of the gradients by every floating-point input, given random gradients of the outputs."""
    outputs = case.run(*(tensor.clone() for tensor in case.inputs))
    generator = torch.Generator().manual_seed(2)
    upstream = tuple(torch.randn(out.shape, generator=generator) for out in outputs)

    def gradients(function: Run) -> Run:
        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            given, above = inputs[: len(case.inputs)], inputs[len(case.inputs) :]
            leaves = [each.detach().requires_grad_(each.is_floating_point()) for each in given]
            with torch.enable_grad():
                results = function(*leaves)
                wanted = [leaf for leaf in leaves if leaf.requires_grad]
                return torch.autograd.grad(results, wanted, above)

        return run

    def ones(*inputs: Tensor) -> Sequence[Tensor]:
        given, above = inputs[: len(case.inputs)], inputs[len(case.inputs) :]
        return gradients(case.run)(*given, *map(torch.ones_like, above))

    wrong = tuple((what, gradients(function)) for what, function in case.wrong)
    wrong = (*case.wrong_gradients, ("it ignores the gradient from above", ones), *wrong)
    inputs = (*case.inputs, *upstream)
    named = replace(case, operator=f"{case.operator}, backward", ratio=TRAINING_RATIO)
    return replace(named, run=gradients(case.run), inputs=inputs, wrong=wrong)


def strided(case: Case, view: Callable[[Tensor], Tensor], base: Tensor, condition: str) -> Case:
    """Return ``case`` with its first input as the ``view`` of ``base``, and the mistake of ignoring the strides."""

    def wrong(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        return tuple(case.run(x.reshape(view(x).shape), *rest))

    return replace(
        case,
        condition=condition,
        run=lambda x, *rest: case.run(view(x), *rest),
        inputs=(base, *case.inputs[1:]),
        wrong=((IN_ORDER, wrong),),
    )
