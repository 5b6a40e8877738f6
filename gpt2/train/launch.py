"""Several processes on this machine, as `torchrun --standalone` starts them, and begun again when one is lost."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from gpt2.errors import InputError

OUTCOME = "GPT2_TRAIN_OUTCOME"  # environment variable: the file that takes rank 0's exit code
RESTARTS = 3  # of a job whose process was lost; a fault that comes back every time must come to an end
GRACE = 600  # seconds that a step and its checkpoint may take after Ctrl-C, before what is left is killed


def launch(arguments: list[str], nproc: int) -> int:
    """`gpt2 ARGUMENTS` in ``nproc`` processes on this machine, all begun again when one dies; the exit code of rank 0's.

    On Ctrl-C or SIGTERM the processes get :data:`GRACE` seconds to come to an end.

    Raises:
        InputError: they died :data:`RESTARTS` times and once more.
    """
    for chatter in map(logging.getLogger, ("torch.distributed.elastic", "torch.multiprocessing")):
        chatter.addHandler(logging.NullHandler())
        chatter.propagate = False  # what they would tell is told here and by rank 0, in one line
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # a shared store holds the dead round's keys: restarts fail
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // nproc)))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # whatever this machine's name resolves to
    with tempfile.TemporaryDirectory() as folder:
        outcome = Path(folder) / "outcome"
        os.environ[OUTCOME] = str(outcome)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=str(os.getpid()),
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=RESTARTS,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "gpt2", *arguments)
        except SignalException:
            return 130
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            how = f"signal {-failure.exitcode}" if failure.exitcode < 0 else f"exit code {failure.exitcode}"
            raise InputError(f"process {rank} of {nproc} was lost {RESTARTS + 1} times ({how})") from None
        finally:
            del os.environ[OUTCOME]
        return int(outcome.read_text())


def leave(code: int) -> int:
    """What a process that has come to its end, good or bad, exits with. To torch's agent any code but 0 is a process lost, and
    all begin again: so under :func:`launch` it is 0, and the launcher finds the code itself in a file.
    """
    outcome = os.environ.get(OUTCOME)
    if outcome is None:
        return code
    if os.environ["RANK"] == "0":
        Path(outcome).write_text(str(code))
    return 0
