"""Run a model on another device, with ids and logits that stay on the CPU."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


def device_name(device: torch.device) -> str:
    """Return the device as a report names it: ``"cpu"``, ``"mps"``, ``"cuda:0 (NVIDIA H100)"``."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def placed(model: Model, device: torch.device) -> Model:
    """Move ``model`` to ``device`` and return it; from then on it takes tensors from anywhere, and its logits are on the CPU."""
    if device.type == "cpu":
        return model

    def arrive(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(_to, args)), {name: _to(value) for name, value in kwargs.items()}

    def _to(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, Tensor):
            return output.cpu()
        output.logits = output.logits.cpu()  # transformers'
        return output

    model.to(device)
    model.register_forward_pre_hook(arrive, with_kwargs=True)
    model.register_forward_hook(leave)
    return model
