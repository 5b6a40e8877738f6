"""Start several training processes on this machine, as `torchrun --standalone` does, and restart them if one dies."""

import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from gpt2.errors import InputError

OUTCOME = "GPT2_TRAIN_OUTCOME"  # environment variable: path of the file for rank 0's exit code
RESTARTS = 3  # maximum, so that a permanent fault ends the job
GRACE = 600  # seconds for the last step and its checkpoint after Ctrl-C, before the processes are killed


def launch(arguments: list[str], nproc: int) -> int:
    """Run `gpt2 ARGUMENTS` in ``nproc`` processes, restart all when one dies, and return rank 0's exit code."""
    for library in map(logging.getLogger, ("torch.distributed.elastic", "torch.multiprocessing")):
        library.addHandler(logging.NullHandler())
        library.propagate = False  # rank 0 and this function report errors in one line
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # a shared store keeps old keys, and restarts fail
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // nproc)))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # use loopback, not the address of this machine's name
    with tempfile.TemporaryDirectory() as folder:
        outcome = Path(folder) / "outcome"
        os.environ[OUTCOME] = str(outcome)
        meeting: dict[str, Any] = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0", "local_addr": "127.0.0.1"}
        logs, job = DefaultLogsSpecs(log_dir=folder), str(os.getpid())
        config = LaunchConfig(1, 1, nproc, run_id=job, max_restarts=RESTARTS, logs_specs=logs, **meeting)
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
    """Return this process's exit code: 0 under :func:`launch`, because torch's agent restarts the job after any other."""
    outcome = os.environ.get(OUTCOME)
    if outcome is None:
        return code
    if os.environ["RANK"] == "0":
        Path(outcome).write_text(str(code))
    return 0
