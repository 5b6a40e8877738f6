"""The environment of a measurement: what two reports must share to be compared."""

import os
import platform
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from operator import attrgetter

import torch

from gpt2 import __version__

# What a user can set that changes how sums round, or that makes products imprecise.
VARIABLES = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA")
PACKAGES = ("torch", "transformers", "safetensors", "tokenizers", "tiktoken", "numpy")


@dataclass(frozen=True)
class Environment:
    """What two reports must share to be compared; ``settings`` are those that differ from PyTorch's defaults."""

    versions: dict[str, str]
    dtype: str
    device: str
    threads: int
    machine: str
    processor: str = ""
    capability: str = ""  # the widest instructions that PyTorch's own kernels use, such as "AVX512"
    blas: str = ""  # the library of matrix products, such as "mkl"
    settings: dict[str, str] = field(default_factory=dict)


def environment(dtypes: Iterable[torch.dtype], device: torch.device | str = "cpu") -> Environment:
    """Return this process's environment; ``dtypes`` are the models', in order, and ``device`` is where they ran."""
    versions = {"gpt2-toolkit": __version__, "python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
    dtype = " and ".join(dict.fromkeys(dtype_label(dtype) for dtype in dtypes))
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    kernels = torch.backends.cpu.get_cpu_capability(), blas()
    return Environment(versions, dtype, str(device), torch.get_num_threads(), machine, processor(), *kernels, rounding_settings())


@cache
def blas() -> str:
    """Return the library that PyTorch's matrix products on the CPU come from, such as "mkl" or "open"."""
    named = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    return named[1] if named else "unknown"


@cache
def processor() -> str:
    """Return the processor's name, as Linux tells it, else as Python does."""
    with suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def rounding_settings() -> dict[str, str]:
    """Return the settings of this process that change how PyTorch rounds, where they are not the default."""
    found = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    with suppress(RuntimeError):  # raised where only a backend's own setting was changed; that follows
        if (precision := torch.get_float32_matmul_precision()) != "highest":
            found["torch.set_float32_matmul_precision"] = precision
    for name in ("mkldnn.matmul", "cuda.matmul")[: 1 + torch.cuda.is_available()]:
        backend = attrgetter(name)(torch.backends)
        if (precision := getattr(backend, "fp32_precision", "none")) not in ("none", "ieee"):
            found[f"torch.backends.{name}.fp32_precision"] = precision
    return found


def dtype_label(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
