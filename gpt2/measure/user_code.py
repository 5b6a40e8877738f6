"""Import a user's Python file, call its function, and find the logits in what the module returns."""

import functools
import importlib.util
import inspect
import math
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gpt2.data.files import read_all
from gpt2.errors import InputError, user_path, words_of

OURS = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, Path(__file__).parent))  # torch, and this package
PYTHON = sysconfig.get_paths()["stdlib"]


@dataclass(frozen=True)
class Target:
    path: Path
    name: str

    @property
    def shown(self) -> str:
        return f"{self.path.name}:{self.name}"


def target(text: str, default: str = "build") -> Target:
    """Parse ``FILE.py:build``; ``FILE.py`` alone means the ``default``. Raises InputError if there is no such file."""
    file, colon, name = text.rpartition(":")
    if not colon or name.endswith(".py") or os.sep in name:
        file, name = text, default
    path = user_path(file)
    if path.is_dir():
        raise InputError(f"{file}: is a directory; give the Python file that builds your model, as in {path / 'port.py'}:build")
    try:
        read_all(path, 1 << 26)  # no module has so many bytes
    except OSError as error:
        near = sorted(p.name for p in path.parent.glob("*.py"))[:5] if not path.exists() and path.parent.is_dir() else []
        there = f"; there are {', '.join(near)}" if near else ""
        what = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise InputError(f"{file}: {what}{there}; give a Python file and a function in it, as in port.py:build") from None
    if not name.isidentifier():
        raise InputError(f"{text}: {name!r} is not the name of a function; write {path.name}:build")
    return Target(path.resolve(), name)


def function_of(file: Path, name: str) -> Callable[..., Any]:
    """Import the file, unless it is imported, and return its function ``name``."""
    sys.argv = [str(file)]
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(file) and callable(getattr(module, name, None)):
            return getattr(module, name)
    sys.path.insert(0, str(file.parent))
    module_name = file.stem if file.stem.isidentifier() and file.stem not in sys.modules else f"port_{abs(hash(file))}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise InputError(f"{file.name}: is not a Python file; give one that ends in .py")
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[..., Any] | None = getattr(module, name, None)
    if callable(function):
        return function
    own = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
    there = f"; it has {', '.join(own[:6])}" if own else ""
    takes = "checkpoint_dir" if name != "make_step" else "model"
    raise InputError(f"{file.name}: has no function {name}{there}; write {name}({takes}), or name another: {file.name}:NAME")


def builder(build: Callable[..., Any], file: Path, name: str) -> tuple[Callable[..., Any], bool]:
    """Return the function, or the class, that builds the module, and whether it takes the checkpoint's folder."""
    try:
        parameters = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):
        return build, True
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if isinstance(build, type):  # it takes sizes, and no folder
        if not required:
            return build, False
        call = f"{name}({', '.join(p.name for p in required)})"
        raise InputError(f"{file.name}: {call} needs values: give them defaults, or write build() that returns a {name}")
    if len(required) > 1 or any(p.kind is p.KEYWORD_ONLY for p in required):
        call = f"{name}({', '.join(p.name for p in required)})"
        raise InputError(f"{file.name}: {call} is called with the checkpoint's folder, or nothing; give the others defaults")
    return build, bool(positional)


def module_of(built: Any, target: Target) -> nn.Module:
    """Return what the user's function returned, if it is a module. Raises InputError: it is none."""
    if isinstance(built, nn.Module):
        return built
    what = f"{type(built).__name__}; return the torch.nn.Module"
    if isinstance(built, type):
        what = f"the class {built.__name__}; return an instance of it"
    raise InputError(f"{target.path.name}: {target.name}() returned {what}")


def logits_of(output: Any, ids: Tensor, vocabulary: int | None = None) -> Tensor:
    """Return the logits (B, T', V) in what a module returned for ``ids`` (B, T); raise ValueError if there are none.

    They are ``output.logits``, else the tensor that has a row for each token or sequence, and as many columns as the
    ``vocabulary``, or more where it is padded; if no tensor has, the first of three axes, or two. (B * T, V) becomes (B, T, V).
    """
    named = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
    inside = dict(output) if isinstance(output, dict) else getattr(output, "__dict__", None) or output
    parts = tree_leaves(inside) if named is None else [named]
    candidates = [part for part in parts if isinstance(part, Tensor) and part.is_floating_point() and part.ndim >= 2]
    if not candidates:
        raise ValueError(f"its forward returns {type(output).__name__} with no logits in it")

    def unlikeness(part: Tensor) -> tuple[bool, float, bool]:
        rows, columns = part.shape[:-1].numel(), part.shape[-1]
        columns_apart = 0.0 if vocabulary is None else columns - vocabulary if columns >= vocabulary else math.inf
        return rows not in (ids.numel(), len(ids)) or columns_apart == math.inf, columns_apart, part.ndim == 2

    logits = min(candidates, key=unlikeness)
    if logits.is_meta:
        raise ValueError("its logits are on the meta device, and hold nothing")
    if logits.ndim == 2 and len(logits) in (ids.numel(), len(ids)):
        return logits.unflatten(0, (len(ids), -1))
    return logits


def place_in(frames: Iterable[traceback.FrameSummary]) -> str:
    """Return the innermost line of the user's own code among ``frames``, in brackets, else of a library but torch; or ""."""
    others = [frame for frame in frames if not frame.filename.startswith(("<", *OURS))]
    own = [frame for frame in others if "-packages" not in frame.filename and not frame.filename.startswith(PYTHON)]
    libraries = [frame for frame in others if "-packages" in frame.filename]
    return next((f" ({Path(one.filename).name}, line {one.lineno}: {one.line})" for one in reversed(own or libraries)), "")


def error_place(error: BaseException | None) -> str:
    """Return the user's line that led to an error, or to one that it follows from, as :func:`place_in` does."""
    while error is not None:
        if place := place_in(traceback.extract_tb(error.__traceback__)):
            return place
        error = error.__cause__ or error.__context__
    return ""


def error_line(error: BaseException) -> str:
    """Return an exception of the user's code in one line."""
    lines = words_of(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


def error_at(error: BaseException) -> str:
    """Return an exception of the user's code in one line, with the user's line of code."""
    return error_line(error) + error_place(error)


def row_by_row(kind: type[nn.Module], flat: bool, vocabulary: int, why: str) -> type[nn.Module]:
    """Return a class of modules that take (1, T) ids alone, or, if ``flat``, (T): their rows are run one after the other.

    Other arguments are passed on, row by row what is (B, T), as masks are. ``why``: the failure with two rows.
    """

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, ids: Tensor, /, **given: Any) -> Any:
        set_back = kept_by(self)

        def call(n: int) -> Any:
            set_back()  # a row must not read what another one left, as a cache
            rows = {name: x for name, x in given.items() if isinstance(x, Tensor) and x.ndim == 2 and len(x) == len(ids)}
            row, *others = (x[n] if flat else x[n : n + 1] for x in (ids, *rows.values()))
            return kind.forward(self, row, **given | dict(zip(rows, others, strict=True)))

        if len(ids) == 1:  # with what it returns beside the logits
            return call(0)
        return torch.cat([logits_of(call(n), ids[n : n + 1], vocabulary) for n in range(len(ids))])

    return kind_of(kind, forward=forward, row_by_row=why)


def kept_by(module: nn.Module) -> Callable[[], None]:
    """Return what sets a module's attributes, and what is in its lists and dictionaries, back to what they are now."""
    plain = [vars(part) for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
    held = [*plain, *(value for one in plain for value in one.values() if isinstance(value, list | dict))]
    kept: list[tuple[Any, Any]] = [(x, list(x) if isinstance(x, list) else dict(x)) for x in held]

    def set_back() -> None:
        for now, before in kept:
            if now or before:  # one that stays empty may refuse to change
                now.clear()
                now.extend(before) if isinstance(before, list) else now.update(before)

    return set_back


def kind_of(kind: type[nn.Module], **members: Any) -> type[nn.Module]:
    """Return a class like ``kind`` with other ``members``, of which ``kind`` is not told: it may register its subclasses."""
    unseen = type("Unseen", (nn.Module,), {"__init_subclass__": classmethod(lambda cls, **_: None)})
    return type(kind.__name__, (unseen, kind), members)
