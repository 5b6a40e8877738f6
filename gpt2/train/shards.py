"""Write the checkpoints of an FSDP run from all ranks at once: each writes its own rows, and none gathers the whole.

The layout is that of torch.distributed.checkpoint's ``HuggingFaceStorageWriter``; README.md says why its writer is not used.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt2.checkpoint.containers.safetensors_file import INFO, OFFSETS, name_of
from gpt2.checkpoint.keys import to_file
from gpt2.checkpoint.saving import safetensors_file, save_config, sha256, write_file, write_json
from gpt2.data import Tokenizer
from gpt2.model import GPT2
from gpt2.train.bigram import Bigram
from gpt2.train.folders import appearing, writing
from gpt2.train.parallel import Ranks, moments
from gpt2.train.recipe import Recipe
from gpt2.train.state import OPTIMIZER, Progress, prune


def by_all(folder: Path, model: GPT2 | Bigram, recipe: Recipe, ranks: Ranks) -> bool:
    """Return whether all ranks write the checkpoints: weights are sharded, and every rank can write to rank 0's ``folder``."""
    if ranks.size == 1 or recipe.parallel != "fsdp" or recipe.lora.r or isinstance(model, Bigram):
        return False
    with ExitStack() as stack:

        def mark() -> str:
            with writing(folder):
                return stack.enter_context(tempfile.NamedTemporaryFile(prefix=".seen-", dir=folder)).name

        name = Path(ranks.first(mark)).name
        return not ranks.any(not (os.access(folder / name, os.R_OK) and os.access(folder, os.W_OK)))


def save(
    folder: Path, model: GPT2, tokenizer: Tokenizer, optimizer: torch.optim.Optimizer, progress: Progress, ranks: Ranks
) -> None:
    """Write ``folder/step-N``, as :func:`gpt2.train.state.save` does. Every rank must call this."""
    target, hashes = folder / f"step-{progress.step}", dict[str, str]()
    with ExitStack() as stack:

        def begin() -> str:
            with writing(folder):
                aside = stack.enter_context(appearing(target, hashes))
                (aside / OPTIMIZER).mkdir(parents=True)
                save_config(model.config, model.wte.weight.dtype, aside)
                tokenizer.save(aside, n_positions=model.config.n_positions)
                write_json(aside / "progress.json", asdict(progress))
            return aside.name

        aside = folder / ranks.first(begin)
        weights: dict[str, Any] = {to_file(name): tensor for name, tensor in model.named_parameters()}
        own_moments = moments(optimizer)

        def write() -> dict[str, str]:
            name, written = name_of(ranks.rank), {}
            with writing(folder):
                for inside, tensors in ((name, weights), (f"{OPTIMIZER}/{name}", own_moments)):
                    _write(aside / inside, tensors, ranks)
                    written[inside] = sha256(aside / inside)
            return written

        for written in ranks.gathered(ranks.together(write)):
            hashes.update(written)
        ranks.first(stack.close)  # the folder gets its name
    ranks.first(lambda: prune(folder, progress))


def _write(path: Path, tensors: Mapping[str, Any], ranks: Ranks) -> None:
    """Write this rank's rows; of tensors that all ranks have whole, rank 0 writes the one copy."""
    rows: dict[str, Tensor] = {}
    starts: dict[str, dict[str, list[int]]] = {}
    for name, tensor in tensors.items():
        if hasattr(tensor, "to_local"):
            (chunk,) = tensor.__create_chunk_list__()  # DCP's protocol
            rows[name], starts[name] = tensor.to_local(), {OFFSETS: list(chunk.offsets)}
        elif ranks.rank == 0:
            rows[name], starts[name] = tensor, {OFFSETS: [0] * tensor.ndim}
    write_file(path, safetensors_file(rows, {INFO: json.dumps(starts), "DCP_VERSION": "1.0"}))
