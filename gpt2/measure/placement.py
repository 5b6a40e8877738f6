"""Run a model on another device, with ids and logits that stay on the CPU; what PyTorch lacks there."""

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

Model = TypeVar("Model", bound=nn.Module)


def device_name(device: torch.device) -> str:
    """Return the device as a report names it: ``"cpu"``, ``"mps"``, ``"cuda:0 (NVIDIA H100)"``."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def placed(model: Model, device: torch.device) -> Model:
    """Move ``model`` to ``device`` and return it; from then on it takes tensors from anywhere, and its logits are on the CPU."""
    if device.type == "cpu":
        return model

    def arrive(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(Tensor, lambda x: x.to(device), (args, kwargs))

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return output.cpu()
        output.logits = output.logits.cpu()  # transformers'
        return output

    model.to(device)
    model.register_forward_pre_hook(arrive, with_kwargs=True)
    model.register_forward_hook(leave)
    return model


def on_device(device: torch.device, run: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return on the CPU what ``run`` gives for copies of the inputs on the device."""
    return [result.detach().to("cpu", copy=True) for result in run(*(x.to(device, copy=True) for x in inputs))]


def missing_kernel(raised: Exception) -> str:
    """Return what PyTorch says it has no kernel for on this device; empty if it says something else."""
    said = " ".join(str(raised).split())
    kernel = re.search(r"""["'](\w+)["'] not implemented for ['"](\w+)""", said)  # "gelu_cuda" not implemented for 'Half'
    if kernel is not None:
        return f"{kernel[1]} for {kernel[2]}"
    if "only supported when" in said:  # pack_vnni2 is only supported when avx512 is supported
        return said[:80]
    if isinstance(raised, NotImplementedError) or "is not supported on" in said:  # BFloat16 is not supported on MPS
        name = re.search(r"\w+::\w+", said)
        return name[0] if name is not None else said[:80] or "this operator"
    return ""
