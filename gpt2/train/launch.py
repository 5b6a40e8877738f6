"""Several processes on this machine, as `torchrun --standalone` starts them, and begun again when one is lost."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..errors import InputError

T = TypeVar("T")
RESTARTS = 3  # of a job whose process was lost; a fault that comes back every time must come to an end
GRACE = 600  # seconds that a step and its checkpoint may take after Ctrl-C, before what is left is killed


def launch(work: Callable[[T], int], argument: T, nproc: int) -> int:
    """``work(argument)`` in ``nproc`` processes on this machine, all begun again when one dies; what rank 0's returned.

    Both must be picklable. On Ctrl-C or SIGTERM the processes get :data:`GRACE` seconds to come to an end.

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
    with tempfile.TemporaryDirectory() as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=str(os.getpid()),
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=RESTARTS,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        try:
            return elastic_launch(config, work)(argument)[0]
        except SignalException:
            return 130
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            why = failure.message["message"] if isinstance(failure.message, dict) else failure.message
            raise InputError(f"process {rank} of {nproc} died {RESTARTS + 1} times; the last time: {why}") from None
