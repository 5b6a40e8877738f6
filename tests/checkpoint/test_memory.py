"""Memory for loading: each byte is read once, and each element is copied at most once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checks import PROC, mapped
from support.hf_layouts import TINY, turned, weights, write_config, write_weights
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2.checkpoint.checkpoint import open_path

# A new module's norms are ones and zeros until they are replaced; one view may have two names.
NO_COPY = ("aten::empty", "aten::fill_", "aten::zero_", "aten::_unsafe_view")


class Copies(TorchDispatchMode):
    """Count the elements that torch writes: copies, conversions, and other operators that make tensors from tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view and not func.name().startswith(NO_COPY):
            self.elements += result.numel()
        return result


def read_so_far() -> int:
    """Bytes that this process has read from files."""
    return int(Path("/proc/self/io").read_text().split()[1])


CONFIG = type(TINY)(vocab_size=2000, n_positions=64, n_embd=96, n_layer=2, n_head=3)
MATRICES = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


@PROC
@pytest.mark.parametrize("how", ["mapped", "unaligned", "converted", "converted, unaligned", "turned", "turned, unaligned"])
def test_a_tensor_is_copied_at_most_once(how: str, tmp_path: Path) -> None:
    """Mapped: no copy; unaligned: one read; another dtype: one read and conversion; transposed: a view of either."""
    tensors = weights(CONFIG)
    if "turned" in how:  # nn.Linear's orientation
        tensors = turned(tensors)
    path = write_config(tmp_path / "checkpoint", CONFIG) / "model.safetensors"
    write_weights(path, tensors, start=3 if "unaligned" in how else 0)
    size = CONFIG.num_parameters()
    dtype = torch.bfloat16 if "converted" in how else torch.float32
    with Copies():  # a first load, for the modules it imports
        open_path(path.parent).load(dtype)
    before = read_so_far()
    idle = read_so_far() - before
    before = read_so_far()
    with Copies() as copies:
        model = open_path(path.parent).load(dtype)
    read = read_so_far() - before - idle
    parameters = dict(model.named_parameters())
    in_file = [any(p.data_ptr() in span for span, _ in mapped(path)) for p in parameters.values()]
    overhead = path.stat().st_size - 4 * size + 20_000  # header, config, and the bytes that identify the container
    if how in ("mapped", "turned"):
        assert all(in_file)
        assert read < overhead
    else:
        assert not any(in_file)
        assert 4 * size <= read < 4 * size + overhead, "each byte from the file, and none twice"
    assert copies.elements == (size if "converted" in how else 0), "each element converted once, and nothing else is copied"
    views = {name for name, p in parameters.items() if not p.is_contiguous()}
    assert views == ({name for name in parameters if name.endswith(MATRICES)} if "turned" in how else set())


def test_the_counter_counts() -> None:
    """Negative control: the counter must see copies, and views are none."""
    source = torch.ones(3, 4)
    for copy in (source.clone, source.T.contiguous, source.bfloat16, lambda: torch.cat([source]), lambda: source.T.reshape(-1)):
        with Copies() as copies:
            copy()
        assert copies.elements == 12, copy
    with Copies() as copies:
        torch.nn.Parameter(source.T.view(4, 3)[:2])
        torch.empty(3, 4)
    assert copies.elements == 0
