"""One process or many: who we are, what we agree on, and whose gradients are averaged. The engine is torch's own.

Rank 0 alone touches the run's folder and speaks. Everything else every rank does alike: each takes its slice of the one batch
that all of them draw, and what decides how the run goes on (a loss, a signal, a mistake) is agreed on before anyone acts on it.
So N processes compute what one does with the same batch, apart from the order in which sums are rounded, and from dropout, whose
masks are drawn for each rank's rows. With the same N a run repeats itself bit for bit.

Sources: Li et al., "PyTorch Distributed" (DDP), 2020; Zhao et al., "PyTorch FSDP", 2023; `torch.distributed.fsdp.fully_shard`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpt2.errors import InputError
from gpt2.train.recipe import Recipe

T = TypeVar("T")
PATIENCE = timedelta(minutes=10)  # for a machine that fell silent; gloo's own 30 minutes are long, and a save may take a few


class PeerLost(Exception):
    """Another process of the job is gone, so this one cannot go on: the launcher begins all of them again."""


@dataclass(frozen=True)
class Ranks:
    """This process among ``size``; alone, everything below costs nothing."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def together(self, act: Callable[[], T]) -> T:
        """``act()`` on every rank; an :class:`InputError` of any is raised by all, so that none waits for one that gave up."""
        if self.size == 1:
            return act()
        result, fault = None, None
        try:
            result = act()
        except InputError as error:
            fault = str(error)
        faults: list[str | None] = [None] * self.size
        dist.all_gather_object(faults, fault)
        for met in faults:
            if met is not None:
                raise InputError(met)
        return result

    def first(self, act: Callable[[], T]) -> T:
        """``act()`` on rank 0 alone; every rank gets what it returned, or its :class:`InputError`."""
        result = self.together(act if self.rank == 0 else lambda: None)
        if self.size == 1:
            return result
        shared = [result]
        dist.broadcast_object_list(shared, 0)
        return shared[0]

    def sum(self, *values: float) -> list[float]:
        """Over all ranks, in float64."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def notes(self) -> tuple[str, ...]:
        """What a reader should know of how the work is shared, a line each."""
        lines = () if self.device.type == "cpu" else (f"on {self.device.type}",)
        if self.size > 1:
            lines += (f"{self.size} processes share each batch",)
        return (*lines, f"begun again after a process was lost (restart {attempt()})") if attempt() else lines

    def any(self, flag: bool) -> bool:
        return self.sum(float(flag))[0] > 0

    def part(self, recipe: Recipe) -> Recipe:
        """The recipe as this rank works through it: its rows of a batch, in as many parts as keep to the recipe's memory.

        Raises:
            InputError: the batch does not divide.
        """
        rows, left = divmod(recipe.batch_size, self.size)
        parts = max(1, recipe.grad_accum // self.size)
        if left or rows % parts:
            raise InputError(
                f"recipe: batch_size {recipe.batch_size} in {recipe.grad_accum} parts does not divide among {self.size} "
                f"processes; set batch_size to a multiple of {self.size * parts}"
            )
        return replace(recipe, batch_size=rows, grad_accum=parts)


ALONE = Ranks()


def own_rank() -> int:
    """This process's, before it has joined."""
    return int(os.environ.get("RANK", 0))


def attempt() -> int:
    """How often the launcher has begun this job again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """The ranks of the job that `torchrun` or :mod:`gpt2.train.launch` started this process for; alone where nobody did.

    Raises:
        InputError: no such device here.
        PeerLost: another process died.
    """
    rank, size, local = (
        int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    mine = _device(device, local)
    if size == 1:
        yield Ranks(device=mine)
        return
    backend = "cpu:gloo,cuda:nccl" if mine.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=PATIENCE)
        yield Ranks(rank, size, mine)
    except RuntimeError as error:  # what gloo and NCCL raise when a connection closes has no type of its own
        if not isinstance(error, dist.DistError) and not any(word in str(error) for word in ("gloo", "NCCL", "onnection")):
            raise
        raise PeerLost(f"rank {rank}: another process of this job is gone") from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _device(name: str, local: int) -> torch.device:
    found = torch.accelerator.current_accelerator(check_available=True) if torch.accelerator.is_available() else None
    if name == "cpu" or (name == "auto" and found is None):
        return torch.device("cpu")
    if found is None or name not in ("auto", found.type):
        raise InputError(
            f"recipe: device is {name!r}, and this machine has {found.type if found else 'a CPU alone'}; set device=auto"
        )
    if local >= torch.accelerator.device_count():
        raise InputError(f"{local + 1} processes on a machine with {torch.accelerator.device_count()} devices; start as many")
    torch.accelerator.set_device_index(local)
    return torch.device(found.type, local)


def spread(model: nn.Module, ranks: Ranks) -> nn.Module:
    """``model`` with rank 0's parameters, on this rank's own device; the others need not be able to read them from anywhere."""
    for parameter in model.parameters():
        if ranks.size > 1:
            dist.broadcast(parameter.data, 0)
        # Out of the mapped file, whose pages would otherwise be copied one by one in the first step; and to an address as even as
        # any other, because some kernels sum in another order where it is not, and a resumed run would drift from the first.
        parameter.data = parameter.data.to(ranks.device, copy=True)
    return model


def wrap(scored: nn.Module, recipe: Recipe, ranks: Ranks) -> nn.Module:
    """``scored``, a module around ``scored.model`` that returns a loss, so that its gradients are those of the whole batch.

    ``recipe.parallel`` "ddp" keeps all of the model on every rank, "fsdp" a slice of each parameter, its gradient and its
    moments. The tied embedding is one parameter of the outermost group, gathered once for both of its uses.
    """
    if ranks.size == 1:
        return scored
    wrapped = _replicated(scored, ranks) if recipe.parallel == "ddp" else _sliced(scored, ranks)
    # DDP sorts gradients into other buckets after its first backward pass, and sums within them in another order; FSDP takes the
    # first module that is called for the outermost. That pass is made here, so that no step of a run that goes on is summed
    # otherwise than in a run never stopped; in the shape of all others, for which alone blocks may have to be compiled.
    part = ranks.part(recipe)
    ids = torch.zeros(part.batch_size // part.grad_accum, recipe.context, dtype=torch.long, device=ranks.device)
    wrapped(ids, ids).backward()
    wrapped.zero_grad(set_to_none=True)
    return wrapped


def _replicated(scored: nn.Module, ranks: Ranks) -> nn.Module:
    on_gpu = None if ranks.device.type == "cpu" else [ranks.device.index]
    return nn.parallel.DistributedDataParallel(scored, device_ids=on_gpu, gradient_as_bucket_view=True)


def _sliced(scored: nn.Module, ranks: Ranks) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    for block in getattr(scored.model, "h", ()):
        fully_shard(block, mesh=mesh)
    return fully_shard(scored, mesh=mesh)


@contextmanager
def synchronised(wrapped: nn.Module, now: bool) -> Iterator[None]:
    """Around one part of a batch: its gradients are exchanged now, or wait for those of the last part."""
    if hasattr(wrapped, "no_sync") and not now:
        with wrapped.no_sync():
            yield
        return
    if sharded(wrapped):
        wrapped.set_requires_gradient_sync(now)
    yield


@contextmanager
def whole(wrapped: nn.Module) -> Iterator[None]:
    """Inside, every parameter is here in full, to be evaluated or copied with no word to the other ranks.

    FSDP frees that memory afterwards, so nothing may keep a view of it, as numpy and the saving of a tensor do.
    """
    groups = [module for module in wrapped.modules() if sharded(module)]
    for group in groups:
        group.set_reshard_after_forward(False, recurse=False)
        group.unshard()
    try:
        yield
    finally:
        for group in groups:
            group.set_reshard_after_forward(group is not wrapped, recurse=False)
            group.reshard()


def gathered(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state in full, on the CPU: "INDEX.NAME" to tensor. Every rank must ask."""
    return {
        f"{index}.{name}": _full(value).detach().cpu().contiguous()
        for index, entry in optimizer.state_dict()["state"].items()
        for name, value in entry.items()
    }


def restore(optimizer: torch.optim.Optimizer, stored: dict[str, Tensor] | None, ranks: Ranks) -> None:
    """Fill ``optimizer`` with what :func:`gathered` gave on any number of ranks, and rank 0 has read again."""
    shapes = ranks.first(lambda: {key: (tensor.shape, tensor.dtype) for key, tensor in stored.items()})
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, (shape, dtype) in shapes.items():
        index, name = key.split(".", 1)
        tensor = stored[key] if ranks.rank == 0 else torch.empty(shape, dtype=dtype)
        if ranks.size > 1:
            dist.broadcast(tensor, 0)
        state.setdefault(int(index), {})[name] = _like(tensor, parameters[int(index)])
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def sharded(module: nn.Module) -> bool:
    """Whether FSDP keeps but a slice of this module's parameters here."""
    return hasattr(module, "unshard")


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """``tensor``, which is here in full, as this rank keeps ``parameter``; a step count is everyone's."""
    if not hasattr(parameter, "placements") or tensor.ndim == 0:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None)


def norm_of(gradients: Tensor) -> float:
    """A gradient's norm as `clip_grad_norm_` returns it, of this rank's slices alone or not."""
    return _full(gradients).item()
