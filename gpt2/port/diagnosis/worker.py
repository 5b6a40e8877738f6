"""The process that runs a port: import, build, one forward, diagnosis; writes ``answer.json`` in its folder.

The port's output is not read. A stage that takes too long ends the process, which does not wait for the port's threads.
"""

import contextlib
import faulthandler
import itertools
import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpt2.checkpoint.checkpoint import Checkpoint, StoredCheckpoint, open_checkpoint
from gpt2.checkpoint.names import FLOATS, ModelName
from gpt2.checkpoint.saving import save_official
from gpt2.errors import InputError, out_of_memory, words_of
from gpt2.measure.user_code import Target, builder, error_line, error_place, function_of, module_of
from gpt2.model import GPT2
from gpt2.port.diagnosis import diagnose, diagnose_step
from gpt2.port.diagnosis.runner import PROGRESS
from gpt2.port.recording.forward import Borrowed, ForwardError, device_of
from gpt2.port.recording.recorder import give_shapes
from gpt2.port.terms import budget

SEARCH = 0.75  # of the time for the whole diagnosis, after which its search ends and reports
NO_GPU = re.compile(
    r"not compiled with CUDA|NVIDIA driver|CUDA-capable|No CUDA GPUs|CUDA error|support for mps|MPS backend|cuda.is_available"
)


def main(folder: str) -> None:
    """Do what ``order.json`` in ``folder`` says, and end the process."""
    place, asked = Path(folder), os.dup(0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    threading.Thread(target=_end_with, args=(asked, place), daemon=True).start()
    with open(place / "where", "w") as where:
        faulthandler.enable(where)
        order = json.loads((place / "order.json").read_text())

        def begin(stage: str) -> None:
            """Note the stage; if it takes too long, ``faulthandler`` writes the stack to ``where`` and ends the process.

            This works while the interpreter is busy, and needs no signal, which Windows lacks.
            """
            (place / "stage").write_text(stage)
            faulthandler.dump_traceback_later(order["whole" if stage == "diagnosis" else "short"], exit=True, file=where)

        budget.CLOCK = min(budget.CLOCK, SEARCH * order["whole"])
        (place / "partial").write_text(_answer(place, order, begin))
        (place / "partial").rename(place / "answer.json")  # whole, or not at all where the disk is full
        os._exit(0)  # do not wait for the port's threads or exit handlers


def _end_with(asked: int, folder: Path) -> None:
    """End this process and those that it started, and remove the folder, when the process that asked for it is gone."""
    os.read(asked, 1)
    shutil.rmtree(folder, ignore_errors=True)
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _answer(place: Path, order: dict[str, Any], begin: Callable[[str], None]) -> str:
    file, name, failure, calls = Path(order["file"]), order["name"], None, itertools.count(1)
    returns = "the module"

    def tell(what: str) -> None:
        """Write a stage of the diagnosis for the process that shows progress."""
        with contextlib.suppress(OSError):  # progress is not worth a diagnosis
            (place / PROGRESS).write_text(what)

    try:
        begin("loading")
        name_of_model = ModelName.parse(order["model"], FLOATS, revision=order["revision"])
        checkpoint = open_checkpoint(name_of_model, offline=order["offline"])
        model = checkpoint.load()
        directory = _directory(checkpoint, model, place)
        begin("import")
        build, takes_directory = builder(function_of(file, name), file, name)
        begin("build")
        module = module_of(build(str(directory)) if takes_directory else build(), Target(file, name))
        begin("forward")
        failure = _once(module, model)
        begin("diagnosis")
        if "step" in order:

            def watch(stage: str) -> None:
                tell(f"running call {next(calls)} of your step" if stage == "step" else "comparing it with the reference's")
                begin(stage)

            file, name, returns = Path(order["step_file"]), order["step"], "a step that returns the loss"
            begin("import")
            make_step = function_of(file, name)
            begin("diagnosis")
            settings, fill = order["settings"], not takes_directory
            diagnosis = diagnose_step(module, make_step, model, settings=settings, fill=fill, watch=watch)
        else:
            if isinstance(build, type):
                module.eval()  # its mode is of our making
            diagnosis = diagnose(module, model, fill=not takes_directory, progress=tell)
        return json.dumps({**asdict(diagnosis), "checkpoint": order["model"], "module": f"{file.name}:{name}"})
    except InputError as error:
        if failure is not None and isinstance(error, ForwardError):  # the first call's error names the user's line
            return json.dumps({"error": _one_line(failure, file)})
        at = error_place(error)
        return json.dumps({"error": str(error) + (at if at not in str(error) else "")})
    except BaseException as error:  # the port may raise anything
        return json.dumps({"error": _one_line(error, file, f"{name} has to return {returns}")})


def _directory(checkpoint: Checkpoint, model: GPT2, place: Path) -> Path:
    """Return a folder with ``config.json`` and weights: the checkpoint's, or one written in the official layout."""
    as_stored = type(checkpoint) is StoredCheckpoint and checkpoint.dtype == checkpoint.stored  # no adapter, its own dtype
    if isinstance(checkpoint, StoredCheckpoint) and as_stored and (checkpoint.path / "config.json").is_file():
        return checkpoint.path
    return save_official(model, None, place / "checkpoint")


def _once(module: nn.Module, model: GPT2) -> Exception | None:
    """Call the module once, so that a hang meets the short time limit; return the error. It keeps no state of that."""
    give_shapes(module, model.config, type(module).__name__)
    device, length = device_of(module), min(8, model.config.n_positions)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), Borrowed(module):
            module.eval()(torch.arange(2 * length, device=device).view(2, length) % model.config.vocab_size)
    except Exception as error:
        return error
    return None


def _one_line(error: BaseException, file: Path, contract: str = "") -> str:
    """Return one line: the error, the user's line of code, and what to do; ``contract``: what a function has to return."""
    if isinstance(error, SyntaxError):
        return f"{Path(error.filename or file).name}, line {error.lineno}: {error.msg}; Python cannot read it"
    at, shown = error_place(error), words_of(error)
    words = error_line(error) if isinstance(error, Exception) else type(error).__name__
    if isinstance(error, SystemExit):
        what = f"it calls sys.exit({error.code if error.code is not None else ''}){at}; {contract}"
    elif isinstance(error, ModuleNotFoundError):
        what = f"{shown}{at}; install it beside gpt2-toolkit"
    elif NO_GPU.search(shown):
        what = f"it needs a GPU, and there is none here{at}; leave the module on the CPU ({words})"
    elif out_of_memory(error):
        what = f"not enough memory{at}; build it with the checkpoint's sizes ({words})"
    else:
        what = f"{words}{at}"
    return f"{file.name}: {what}"
