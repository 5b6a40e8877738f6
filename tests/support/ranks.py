"""A job of several processes on this machine."""

import os
import socket
from collections.abc import Callable

import torch

from gpt2.errors import InputError
from gpt2.train import parallel
from support.training import forkserver


def member(rank, size, port, work, results):
    """Run one rank of a job in a process of its own."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        results.put((rank, work(rank)))
    except InputError as error:
        results.put((rank, f"error: {error}"))
    except parallel.PeerLost:
        results.put((rank, "lost"))


def job(size: int, work: Callable[[int], object]) -> list:
    """The results of ``work(rank)`` on every rank, or its one-line error."""
    context = forkserver()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = context.Queue()
    ranks = [context.Process(target=member, args=(rank, size, port, work, results)) for rank in range(size)]
    for process in ranks:
        process.start()
    found = dict(results.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(30)
        assert process.exitcode == 0
    return [found[rank] for rank in range(size)]
