"""GPT-2 from scratch: load any checkpoint, prove it equal to transformers, fine-tune it.

    import gpt2
    model = gpt2.load("shakespeare-mini")
    tok = gpt2.load_tokenizer("shakespeare-mini")
    print(tok.decode(gpt2.generate(model, tok.encode("ROMEO:\\n"), 60, temperature=0.8, seed=0)))
    print(gpt2.verify("shakespeare-mini").table())

A name below imports its module when it is first used: ``import gpt2`` does not import torch.
"""

from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any

from gpt2.garbage import uncollected

if TYPE_CHECKING:
    from gpt2.checkpoint.loading import load as load, load_tokenizer as load_tokenizer
    from gpt2.checkpoint.saving import save as save
    from gpt2.comparison.ranking import Comparisons as Comparisons
    from gpt2.comparison.results import Comparison as Comparison
    from gpt2.comparison.run import compare as compare
    from gpt2.config import GPT2Config as GPT2Config
    from gpt2.devices.run import DeviceReport as DeviceReport, verify_device as verify_device
    from gpt2.errors import CheckpointError as CheckpointError, InputError as InputError
    from gpt2.generation import generate as generate
    from gpt2.model import GPT2 as GPT2
    from gpt2.parity.report import Report as Report
    from gpt2.parity.run import verify as verify
    from gpt2.port.diagnosis import Diagnosis as Diagnosis, diagnose as diagnose, diagnose_step as diagnose_step
    from gpt2.port.mapping import MappingReport as MappingReport, load_into as load_into
    from gpt2.port.mapping.checkpoint import checkpoint_of as checkpoint_of
    from gpt2.traces.run import Trace as Trace, trace as trace

__version__ = "0.1.0"

_HOME = {
    "GPT2": "model",
    "GPT2Config": "config",
    "CheckpointError": "errors",
    "Comparison": "comparison.results",
    "Comparisons": "comparison.ranking",
    "DeviceReport": "devices.run",
    "Diagnosis": "port.diagnosis",
    "InputError": "errors",
    "MappingReport": "port.mapping",
    "Report": "parity.report",
    "Trace": "traces.run",
    "checkpoint_of": "port.mapping.checkpoint",
    "compare": "comparison.run",
    "diagnose": "port.diagnosis",
    "diagnose_step": "port.diagnosis",
    "generate": "generation",
    "load": "checkpoint.loading",
    "load_into": "port.mapping",
    "load_tokenizer": "checkpoint.loading",
    "save": "checkpoint.saving",
    "trace": "traces.run",
    "verify": "parity.run",
    "verify_device": "devices.run",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gpt2' has no attribute {name!r}")
    with uncollected():  # a sixth of the time
        value = getattr(import_module(f"gpt2.{_HOME[name]}"), name)
    if isinstance(value, FunctionType) and not hasattr(value, "__signature__"):
        value = import_module("gpt2.options").signed(value)
        value.__module__ = __name__  # where pickle looks it up
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
