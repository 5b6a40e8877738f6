"""The process that a port runs in: import, build, one forward, diagnosis. Its answer goes to ``answer.json`` in its folder.

What the port prints is not read, and the process ends without waiting for the port's threads.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import inspect
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, TextIO

import torch
from torch import nn

from gpt2.checkpoint.checkpoint import AdaptedCheckpoint, Checkpoint, StoredCheckpoint, open_checkpoint
from gpt2.checkpoint.names import VERIFIES, ModelName
from gpt2.errors import InputError
from gpt2.model import GPT2
from gpt2.port.diagnosis import diagnose
from gpt2.port.recording.forward import ForwardError, error_line

NO_GPU = re.compile(
    r"not compiled with CUDA|NVIDIA driver|CUDA-capable|No CUDA GPUs|CUDA error|support for mps|MPS backend|cuda.is_available"
)


def main(folder: str) -> None:
    """Do what ``order.json`` in ``folder`` asks for, and end the process."""
    place = Path(folder)
    with open(place / "where", "w") as where:
        faulthandler.enable(where)
        order = json.loads((place / "order.json").read_text())
        stage = Stages(place, where, order["short"], order["whole"])
        answer = _answer(place, order, stage)
        aside = place / "answer.partial"
        aside.write_text(answer)
        aside.replace(place / "answer.json")
        stage("done")
        os._exit(0)  # without waiting for its threads or exit handlers


class Stages:
    """Tells the parent which stage begins, and where the process is when that takes too long.

    ``faulthandler`` writes the stack to ``where`` at the moment when the parent gives up. Its thread does not need the
    interpreter, and no signal is needed, which Windows does not have.
    """

    def __init__(self, place: Path, where: TextIO, short: float, whole: float) -> None:
        self.file, self.where, self.short, self.whole = place / "stage", where, short, whole

    def __call__(self, name: str) -> None:
        with open(self.file, "a") as file:  # never replaced: the parent may have it open, which Windows refuses
            file.write(f"{name} {time.monotonic()}\n")
        faulthandler.dump_traceback_later(self.whole if name == "diagnosis" else self.short, file=self.where)


def _answer(place: Path, order: dict[str, Any], stage: Stages) -> str:
    file, name, failure = Path(order["file"]), order["name"], None
    try:
        stage("loading")
        name_of_model = ModelName.parse(order["model"], VERIFIES, revision=order["revision"])
        checkpoint = open_checkpoint(name_of_model, offline=order["offline"])
        model = checkpoint.load()
        directory = _directory(checkpoint, model, place)
        stage("import")
        build = _build_of(_imported(file), file, name)
        takes_directory = _takes_directory(build, file, name)
        stage("build")
        module = build(str(directory)) if takes_directory else build()
        if not isinstance(module, nn.Module):
            what = (
                f"the class {module.__name__}; return an instance of it"
                if isinstance(module, type)
                else f"{type(module).__name__}; return the torch.nn.Module"
            )
            raise InputError(f"{file.name}: {name}() returned {what}")
        stage("forward")
        failure = _once(module, model)
        stage("diagnosis")
        diagnosis = diagnose(module, model, fill=not takes_directory)
        return json.dumps({**json.loads(diagnosis.to_json()), "checkpoint": order["model"], "module": f"{file.name}:{name}"})
    except InputError as error:
        if failure is not None and isinstance(error, ForwardError):  # the first call failed already, with the user's line
            return json.dumps({"error": _one_line(failure, file, name)})
        return json.dumps({"error": str(error) + _where(error, file)})
    except BaseException as error:  # of any kind: the port raised it
        return json.dumps({"error": _one_line(error, file, name)})


def _directory(checkpoint: Checkpoint, model: GPT2, place: Path) -> Path:
    """A folder with ``config.json`` and weights: the checkpoint's own, or one written as the official repositories have it."""
    if (
        isinstance(checkpoint, StoredCheckpoint)
        and not isinstance(checkpoint, AdaptedCheckpoint)
        and checkpoint.dtype == checkpoint.stored
        and (checkpoint.path / "config.json").is_file()
    ):
        return checkpoint.path
    from safetensors.torch import save_file

    folder = place / "checkpoint"
    folder.mkdir()
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.config.to_hf(), indent=2))
    return folder


def _imported(file: Path) -> ModuleType:
    """The file as a module, with its own folder to import from."""
    sys.argv = [str(file)]
    sys.path.insert(0, str(file.parent))
    name = file.stem if file.stem.isidentifier() and file.stem not in sys.modules else f"port_{abs(hash(file))}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InputError(f"{file.name}: is no Python file; give one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _build_of(module: ModuleType, file: Path, name: str) -> Callable[..., Any]:
    build: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(build):
        own = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        there = f"; it has {', '.join(own[:6])}" if own else ""
        raise InputError(
            f"{file.name}: has no function {name}{there}; write {name}(checkpoint_dir), or name another: {file.name}:NAME"
        )
    return build


def _takes_directory(build: Callable[..., Any], file: Path, name: str) -> bool:
    try:
        parameters = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):
        return True
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(required) > 1 or any(p.kind is p.KEYWORD_ONLY for p in required):
        shown = ", ".join(p.name for p in required)
        raise InputError(
            f"{file.name}: {name}({shown}) is called with the checkpoint's folder, or nothing; give the others defaults"
        )
    return bool(positional)


def _once(module: nn.Module, model: GPT2) -> Exception | None:
    """Call the module once, so that a hang meets the short time limit; the error if it fails."""
    device = next((tensor.device for tensor in [*module.parameters(), *module.buffers()]), torch.device("cpu"))
    length = min(8, model.config.n_positions)
    try:
        modes = [(part, part.training) for part in module.modules()]
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            module.eval()(torch.arange(2 * length, device=device).view(2, length) % model.config.vocab_size)
        for part, training in modes:
            part.training = training
    except Exception as error:
        return error
    return None


def _one_line(error: BaseException, file: Path, name: str) -> str:
    """One line: what, where in the user's code, what to do."""
    at = _where(error, file)
    if isinstance(error, SyntaxError):
        return f"{Path(error.filename or file).name}, line {error.lineno}: {error.msg}; Python cannot read it"
    if isinstance(error, SystemExit):
        return (
            f"{file.name}: it calls sys.exit({error.code if error.code is not None else ''}){at}; {name} has to return the module"
        )
    if isinstance(error, KeyboardInterrupt):
        return f"{file.name}: it was interrupted{at}; run it again"
    if isinstance(error, ModuleNotFoundError):
        return f"{file.name}: {error}{at}; install it beside gpt2-toolkit"
    if isinstance(error, EOFError):
        return f"{file.name}: it waits for input{at}; {name} has to do without"
    words = error_line(error) if isinstance(error, Exception) else type(error).__name__
    if NO_GPU.search(str(error)):
        return f"{file.name}: it needs a GPU, and there is none here{at}; leave the module on the CPU ({words})"
    if isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error):
        return f"{file.name}: not enough memory{at}; build it with the checkpoint's sizes ({words})"
    return f"{file.name}: {words}{at}"


def _where(error: BaseException, file: Path) -> str:
    """The user's innermost line in what led to an error."""
    seen: BaseException | None = error
    while seen is not None:
        line = _line(seen.__traceback__, file)
        if line:
            return line
        seen = seen.__cause__ or seen.__context__
    return ""


def _line(trace: TracebackType | None, file: Path) -> str:
    own = [frame for frame in traceback.extract_tb(trace) if Path(frame.filename).parent == file.parent]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno}: {own[-1].line})" if own else ""
