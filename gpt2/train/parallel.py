"""Data-parallel training with torch.distributed: ranks, broadcasts, DDP and FSDP2.

Only rank 0 reads and writes the run's folder, and logs. All ranks draw the same batch, and each computes its slice. Losses,
signals and errors are shared before any rank acts on them. So N processes compute the same as one, except for rounding and
dropout masks, and with the same N a run is reproducible bit for bit.

Sources: Li et al., "PyTorch Distributed" (DDP), 2020; Zhao et al., "PyTorch FSDP", 2023; `torch.distributed.fsdp.fully_shard`.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpt2.errors import InputError
from gpt2.train.recipe import Recipe

if TYPE_CHECKING:  # takes seconds to import; only FSDP needs it
    from torch.distributed.fsdp import FSDPModule

T = TypeVar("T")
SILENCE_TIMEOUT = timedelta(minutes=10)  # gloo's default is 30; a save may take a few minutes
PATIENCE = timedelta(days=7)


class PeerLost(Exception):
    """Another process of the job died, so this one cannot go on; the launcher restarts all of them."""


@dataclass(frozen=True)
class Ranks:
    """This process's rank among ``size``; with size 1 no method communicates."""

    rank: int = 0
    size: int = 1
    leads: bool = True  # the first process of its machine
    patient: Any = None  # a process group for waits of hours, while another rank tokenizes
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def together(self, act: Callable[[], T], *, patient: bool = False) -> T:
        """Run ``act()`` on every rank; if one raises InputError, all do. Only a ``patient`` one may take over SILENCE_TIMEOUT."""
        if self.size == 1:
            return act()
        result: Any = None
        message = None
        try:
            result = act()
        except InputError as error:
            message = str(error)
        for fault in filter(None, self.gathered(message, self.patient if patient else None)):
            raise InputError(fault)
        return result

    def first(self, act: Callable[[], T]) -> T:
        """Run ``act()`` on rank 0 only; every rank gets its result or its InputError."""
        if self.size == 1:
            return act()
        shared: list[Any] = [self.together(act if self.rank == 0 else lambda: None)]
        dist.broadcast_object_list(shared, 0)
        return shared[0]

    def gathered(self, own: T, group: Any = None) -> list[T]:
        """Return every rank's ``own``, on every rank."""
        found: list[Any] = [own] * self.size
        if self.size > 1:
            dist.all_gather_object(found, own, group)
        return found

    def sum(self, *values: float) -> list[float]:
        """Sum each value over all ranks, in float64."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def notes(self) -> tuple[str, ...]:
        """Return lines for the log about device, processes and restarts."""
        device = "" if self.device.type == "cpu" else f"on {self.device.type}"
        processes = f"{self.size} processes share each batch" if self.size > 1 else ""
        restarted = f"restarted after a process was lost (restart {restarts()})" if restarts() else ""
        return tuple(filter(None, (device, processes, restarted)))

    def any(self, flag: bool) -> bool:
        return self.sum(float(flag))[0] > 0

    def part(self, recipe: Recipe) -> Recipe:
        """Return this rank's recipe, with its rows of a batch; raise InputError if the batch does not divide."""
        rows, left = divmod(recipe.batch_size, self.size)
        parts = max(1, recipe.grad_accum // self.size)
        if left or rows % parts:
            given = f"recipe: batch_size {recipe.batch_size} in {recipe.grad_accum} parts"
            remedy = f"set batch_size to a multiple of {self.size * parts}"
            raise InputError(f"{given} does not divide among {self.size} processes; {remedy}")
        return replace(recipe, batch_size=rows, grad_accum=parts)


ALONE = Ranks()


def own_rank() -> int:
    """Return this process's rank, even before it has joined the group."""
    return int(os.environ.get("RANK", 0))


def restarts() -> int:
    """Return how often the launcher has restarted this job."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """Join the job of `torchrun` or :mod:`gpt2.train.launch`, if any (else size is 1); raise PeerLost if a process died."""
    rank, local, size = own_rank(), int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    own = _device(device, local)
    if size == 1:
        yield Ranks(device=own)
        return
    backend = "cpu:gloo,cuda:nccl" if own.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=SILENCE_TIMEOUT)
        yield Ranks(rank, size, local == 0, dist.new_group(backend="gloo", timeout=PATIENCE), own)
    except RuntimeError as error:  # gloo and NCCL raise no type of their own when a connection closes
        if not isinstance(error, dist.DistError) and not any(word in str(error) for word in ("gloo", "NCCL", "onnection")):
            raise
        raise PeerLost(f"rank {rank}: another process of this job is gone") from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _device(name: str, local: int) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True) if torch.accelerator.is_available() else None
    if name == "cpu" or (name == "auto" and accelerator is None):
        return torch.device("cpu")
    if accelerator is None or name not in ("auto", accelerator.type):
        here = accelerator.type if accelerator else "only a CPU"
        raise InputError(f"recipe: device is {name!r}, and this machine has {here}; set device=auto")
    if local >= torch.accelerator.device_count():
        raise InputError(f"{local + 1} processes on a machine with {torch.accelerator.device_count()} devices; start as many")
    torch.accelerator.set_device_index(local)
    return torch.device(accelerator.type, local)


def broadcast(model: nn.Module, ranks: Ranks) -> None:
    """Copy rank 0's parameters to ``model``, on this rank's device."""
    for parameter in model.parameters():
        if ranks.size > 1:
            dist.broadcast(parameter.data, 0)
        # A copy, for two reasons: pages of a mapped file would be copied one by one in the first step; and kernels sum in another
        # order at an unaligned address, so a resumed run would drift from the first.
        parameter.data = parameter.data.to(ranks.device, copy=True)


def wrap(scored: nn.Module, recipe: Recipe, ranks: Ranks) -> nn.Module:
    """Wrap ``scored`` by DDP (whole model per rank) or FSDP (a shard), so that its gradients are those of the whole batch.

    The outermost FSDP group holds the tied embedding, which is gathered once for both of its uses.
    """
    if ranks.size == 1:
        return scored
    if recipe.parallel == "ddp":
        on_gpu = None if ranks.device.type == "cpu" else [ranks.device.index]
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(scored, device_ids=on_gpu, gradient_as_bucket_view=True)
    else:
        wrapped = _shard(scored, ranks)
    # DDP rebuilds its buckets after its first backward pass, and then sums in another order; FSDP takes the first module called
    # for the outermost. This pass settles both, so that a resumed run sums as an undisturbed one does. It has the shape of all
    # other steps, so nothing is compiled twice.
    part = ranks.part(recipe)
    ids = torch.zeros(part.batch_size // part.grad_accum, recipe.context, dtype=torch.long, device=ranks.device)
    wrapped(ids, ids).backward()
    wrapped.zero_grad(set_to_none=True)
    return wrapped


def _shard(scored: nn.Module, ranks: Ranks) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    for block in getattr(scored.model, "h", ()):
        fully_shard(block, mesh=mesh)
    fully_shard(scored, mesh=mesh)
    return scored


@contextmanager
def synchronised(wrapped: nn.Module, now: bool) -> Iterator[None]:
    """Around one part of a batch: exchange its gradients ``now``, or later with those of the last part."""
    if isinstance(wrapped, nn.parallel.DistributedDataParallel) and not now:
        with wrapped.no_sync():
            yield
        return
    if sharded(wrapped):
        wrapped.set_requires_gradient_sync(now)
    yield


@contextmanager
def whole(wrapped: nn.Module) -> Iterator[None]:
    """Gather every parameter for the time of the block; FSDP frees them afterwards, so keep no view (numpy and save do)."""
    root: object = wrapped
    groups = [module for module in wrapped.modules() if sharded(module)]
    for group in groups:
        group.set_reshard_after_forward(False, recurse=False)
        group.unshard()
    try:
        yield
    finally:
        for group in groups:
            group.set_reshard_after_forward(group is not root, recurse=False)
            group.reshard()


def gathered(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return :func:`moments` whole, on the CPU. Every rank must call this."""
    return {key: full(value).detach().cpu().contiguous() for key, value in moments(optimizer).items()}


def moments(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state on this rank, "INDEX.NAME" to tensor."""
    state = optimizer.state_dict()["state"]
    return {f"{index}.{name}": value for index, entry in state.items() for name, value in entry.items()}


def restore(optimizer: torch.optim.Optimizer, stored: dict[str, Tensor], ranks: Ranks) -> None:
    """Fill ``optimizer`` with the result of :func:`gathered`, of any number of ranks; ``stored`` is empty except on rank 0."""
    shapes = ranks.first(lambda: {key: (tensor.shape, tensor.dtype) for key, tensor in stored.items()})
    parameters: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, (shape, dtype) in shapes.items():
        index, name = key.split(".", 1)
        tensor, parameter = stored[key] if ranks.rank == 0 else torch.empty(shape, dtype=dtype), parameters[int(index)]
        if ranks.size > 1:
            dist.broadcast(tensor, 0)
        if hasattr(parameter, "full_tensor") and tensor.ndim > 0:  # keep this rank's shard; a step count stays whole
            from torch.distributed.tensor import distribute_tensor

            whole = tensor.to(parameter.device)
            tensor = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        state.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def sharded(module: object) -> "TypeGuard[FSDPModule]":
    """Return whether FSDP keeps only a shard of this module's parameters on this rank."""
    return hasattr(module, "unshard")


def full(tensor: Any) -> Tensor:
    """Return the whole tensor, also if this rank holds only a shard of it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
