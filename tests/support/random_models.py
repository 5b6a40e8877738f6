"""Models with random weights in which every parameter matters: no bias is 0, no norm's weight is 1."""

from collections.abc import Mapping

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.model import GPT2


def random_model(
    config: GPT2Config, std: float = 0.4, bias_std: float | None = None, *, dtype: torch.dtype = torch.float64, seed: int = 0
) -> GPT2:
    """Draw every parameter from N(0, std), the norms' weights from N(1, std); the result is in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    model = GPT2(config, initialise=False).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if ".ln_" in f".{name}" and name.endswith("weight") else 0.0
            deviation = bias_std if bias_std is not None and name.endswith("bias") else std
            parameter.normal_(mean, deviation, generator=generator)
    return model


def model_of(config: GPT2Config, weights: Mapping[str, Tensor]) -> GPT2:
    """A model of these weights, by its own names, in eval mode."""
    model = GPT2(config, initialise=False).to(weights["wte.weight"].dtype)
    model.load_state_dict(weights)
    return model.eval()
