"""A training program in C, `loop_steps.c`, with gradients by hand over flat buffers: its faults, and running it.

It was written after the engine, and not used to develop it.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np

from gpt2.config import GPT2Config
from support.programs import flat_weights, missing

__all__ = ["FAULTS", "missing", "run"]

HERE = Path(__file__).parent
# Language -> word -> causes, any of which says it rightly; what shows it, as in numpy_steps.
FAULTS = {
    "c": {
        "unshifted": ("labels-not-shifted", "lgp"),
        "previous": ("labels-wrong", "lg"),
        "last-missing": ("last-token-missing", "lg"),
        "summed": ("loss-not-averaged", "lg"),
        "parts-summed": ("accumulation-not-averaged", "lg"),
        "not-zeroed": ("gradient-not-zeroed", "p"),
        "tied-lost": ("tied-gradient-lost", "gp"),
        "rows-overwritten": ("tied-gradient-lost gradient-detached", "g"),
        "positions-without-gradient": ("gradient-detached", "g"),
        "bias-without-gradient": ("parameters-frozen gradient-detached", "g"),
        "norm-derivative": ("backward-wrong", "g"),
        "scale-lost-backward": ("backward-wrong", "g"),
        "gelu-derivative": ("backward-wrong", "g"),
        "residual-gradient-lost": ("backward-wrong", "g"),
        "unclipped": ("clip-missing", "p"),
        "clipped-by-value": ("clip-by-value", "p"),
        "clipped-by-tensor": ("clip-per-tensor", "p"),
        "norm-without-root": ("clip-norm clip-threshold", "q"),
        "betas-swapped": ("betas-swapped", "p"),
        "rate-tenth": ("rate-wrong", "p"),
        "corrected-late": ("bias-correction-step", "p"),
        "uncorrected": ("bias-correction-missing", "p"),
        "decay-on-all": ("decay-on-all", "p"),
        "embeddings-left-out": ("parameter-missing", "p"),
        "decay-coupled": ("decay-coupled", "p"),
        "second-not-squared": ("optimizer-other", "p"),
        "eps-inside": ("eps-inside-root", "p"),
        "eps-before": ("eps-before-correction", "p"),
        "eps-1e-3": ("eps-wrong", "p"),
        "decay-after": ("decay-after-update", "p"),
        "moments-lost": ("momentum-lost", "p"),
    }
}


@cache
def _compiled() -> Path:
    folder = tempfile.TemporaryDirectory()
    _compiled.folder = folder  # type: ignore[attr-defined]  # removed when this process ends
    binary = Path(folder.name) / "loop_steps"
    command = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(binary), str(HERE / "loop_steps.c"), "-lm"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return binary


def run(
    line: str, config: GPT2Config, weights: Mapping[str, np.ndarray], batches: list, s: Mapping[str, float]
) -> dict[str, np.ndarray]:
    """Train on batches of (ids, next ids), one a step. Returns arrays by name: l, g, c, b or p, the step, the tensor."""
    head = np.frombuffer(flat_weights(config, weights)[:24], "<i4")
    sizes = [*head, *batches[0][0].shape, len(batches), s["grad_accum"]]
    numbers = [s[name] for name in ("lr", "beta1", "beta2", "weight_decay", "clip")]
    ids = [np.concatenate([batch[n].ravel() for batch in batches]).astype("<i4").tobytes() for n in (0, 1)]
    content = np.array(sizes, "<i4").tobytes() + np.array(numbers, "<f8").tobytes() + flat_weights(config, weights)[24:]
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "run.bin", Path(folder) / "out"
        path.write_bytes(content + b"".join(ids))
        subprocess.run([str(_compiled()), str(path), str(out), line], check=True, capture_output=True, timeout=120)
        return {file.stem: np.load(file) for file in sorted(out.glob("*.npy"))}
