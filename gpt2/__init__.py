"""GPT-2 from scratch: load any checkpoint, prove it equal to transformers, fine-tune it.

    import gpt2
    model = gpt2.load("shakespeare-mini")
    tok = gpt2.load_tokenizer("shakespeare-mini")
    print(tok.decode(gpt2.generate(model, tok.encode("ROMEO:\\n"), 60, temperature=0.8, seed=0)))
    print(gpt2.verify("shakespeare-mini").table())

Nothing heavy is imported until one of the names below is used.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint.adapt import MappingReport, load_into
    from .checkpoint.load import load, load_tokenizer
    from .checkpoint.save import save
    from .compare.comparison import Comparison
    from .compare.diagnose import Diagnosis, diagnose
    from .compare.pair import compare
    from .compare.report import Report
    from .compare.run import verify
    from .config import GPT2Config
    from .errors import CheckpointError, InputError
    from .generate import generate
    from .model import GPT2

__version__ = "0.1.0"

_HOME = {
    "GPT2": "model",
    "GPT2Config": "config",
    "CheckpointError": "errors",
    "Comparison": "compare.comparison",
    "Diagnosis": "compare.diagnose",
    "InputError": "errors",
    "MappingReport": "checkpoint.adapt",
    "Report": "compare.report",
    "compare": "compare",
    "diagnose": "compare.diagnose",
    "generate": "generate",
    "load": "checkpoint.load",
    "load_into": "checkpoint.adapt",
    "load_tokenizer": "checkpoint.load",
    "save": "checkpoint.save",
    "verify": "compare.run",
}

__all__ = [
    "GPT2",
    "CheckpointError",
    "Comparison",
    "Diagnosis",
    "GPT2Config",
    "InputError",
    "MappingReport",
    "Report",
    "compare",
    "diagnose",
    "generate",
    "load",
    "load_into",
    "load_tokenizer",
    "save",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gpt2' has no attribute {name!r}")
    module = import_module(f".{_HOME[name]}", __name__)
    value = module if name == "compare" else getattr(module, name)  # that package is called itself
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps ``gpt2.generate`` the function: importing the submodule of that name would otherwise bind the module there."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "compare" or not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
