"""Memory for loading: at most 1.05 times the size of the weights at any moment, and at most one copy of each tensor."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checks import PROC
from support.hf_layouts import TINY, masks, official, turned, weights, write_config, write_weights
from support.official_repositories import require_room
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2.checkpoint.keys import expected
from gpt2.checkpoint.loading import load_path
from gpt2.config import official_size

LIMIT = 1.05  # times the size of the loaded weights, on top of a process that only imports torch


# Prints what its process needed.
CHILD = """
import json, re, sys
import torch
torch.set_num_threads(1)
torch.zeros(1)
figures = {}
if len(sys.argv) > 1:
    import gpt2
    model = gpt2.load(sys.argv[1])
    with torch.inference_mode():  # reads every page, so that mapped weights count in full
        figures["sum"] = sum(float(p.view(-1)[:: 4096 // p.element_size()].sum()) for p in model.parameters())
    figures["bytes"] = sum(p.nbytes for p in model.parameters())
status = open("/proc/self/status").read()
for key, name in (("peak", "VmHWM"), ("anonymous", "RssAnon")):
    figures[key] = int(re.search(name + r":\\s+(\\d+) kB", status)[1]) * 1024
print(json.dumps(figures))
"""


def child(*args: object, code: str = CHILD) -> dict[str, float]:
    """What a fresh process needed."""
    return json.loads(subprocess.run([sys.executable, "-c", code, *map(str, args)], stdout=subprocess.PIPE, check=True).stdout)


def write(size: str, layout: str, folder: Path) -> Path:
    """A float32 file of an official size, a tensor at a time: aligned, or as openai-community/gpt2 has it (masks, odd bytes)."""
    config = official_size(size)
    masked = masks(config) if layout == "official" else {}
    shapes = expected(config) | {name: tuple(mask.shape) for name, mask in masked.items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
    text += b" " * ((3 if layout == "official" else 0) - len(text) & 7)
    with open(write_config(folder, config) / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            file.write(masked.get(name, torch.full(shape, 0.02)).numpy().data)
    return folder


@PROC
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "gpt2-xl"])
@pytest.mark.parametrize("layout", ["official", "aligned"])
def test_loading_needs_the_size_of_the_weights(layout: str, name: str, tmp_path: Path) -> None:
    """There must be no second copy: of the file before its conversion, or of the model before it is filled.

    Measured relative to a process that has loaded a tiny model: the loading code, a fixed 6 MB, is 2.5 % of gpt2 in bfloat16.
    """
    parameters = official_size(name).num_parameters()
    require_room(tmp_path, disk=4.5 * parameters, memory=5.2 * parameters)
    official(tmp_path / "tiny")
    floor = child(tmp_path / "tiny")
    path = write(name, layout, tmp_path / layout)

    def measure(dtype: str, code: str = CHILD) -> dict[str, float]:
        found = child(f"{path}:{dtype}", code=code)
        ratios = {f"{key} / size": (found[key] - floor[key]) / found["bytes"] for key in ("peak", "anonymous")}
        print(name, layout, dtype, ratios)
        return found | ratios

    for dtype, size in (("float32", 4), ("bf16", 2)):
        measured = measure(dtype)
        assert measured["bytes"] == size * parameters
        assert measured["peak / size"] <= LIMIT
        assert measured["peak / size"] > 0.98, "every page was read, or the figure says nothing"
        if (layout, dtype) == ("aligned", "float32"):
            assert measured["anonymous / size"] < 0.01, "nothing of a mapped file is this process's own"
    if name == "gpt2":
        careless = CHILD.replace("gpt2.load(sys.argv[1])", "gpt2.load(sys.argv[1][:-5]).to(torch.bfloat16)")
        assert measure("bf16", careless)["peak / size"] > 1.5, "the control: float32 first, then bfloat16"


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


def spans(path: Path) -> list[range]:
    """Address ranges where a file is mapped in this process."""
    rows = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    return [range(*(int(end, 16) for end in row[0].split("-"))) for row in rows]


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
        load_path(path.parent, dtype=dtype)
    before = read_so_far()
    idle = read_so_far() - before
    before = read_so_far()
    with Copies() as copies:
        model = load_path(path.parent, dtype=dtype)
    read = read_so_far() - before - idle
    parameters = dict(model.named_parameters())
    in_file = [any(p.data_ptr() in span for span in spans(path)) for p in parameters.values()]
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
    """Negative control: the counter must see copies."""
    source = torch.ones(3, 4)
    for copy in (
        lambda: source.clone(),
        lambda: source.T.contiguous(),
        lambda: source.to(torch.bfloat16),
        lambda: torch.empty(3, 4).copy_(source),
        lambda: torch.cat([source]),
        lambda: source.T.reshape(-1),
    ):
        with Copies() as copies:
            copy()
        assert copies.elements == 12, copy
    with Copies() as copies:
        torch.nn.Parameter(source.T.view(4, 3)[:2])
        torch.empty(3, 4)
    assert copies.elements == 0
