"""Run transformers' GPT-2 as the reference on the same files. transformers is imported here and in gpt2/data/adapter.py."""

import gc
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.checkpoint.checkpoint import AdaptedCheckpoint, Checkpoint, StoredCheckpoint
from gpt2.checkpoint.files import read_config
from gpt2.checkpoint.keys import to_file
from gpt2.checkpoint.names import ADAPTER, INDEX, LAYOUTS, WEIGHTS
from gpt2.config import GPT2Config
from gpt2.data.adapter import quiet
from gpt2.data.client import check_environment
from gpt2.errors import CheckpointError, InputError
from gpt2.garbage import uncollected
from gpt2.measure.metrics import Progress, silent


def _transformers() -> Any:
    """Import transformers without its progress bars."""
    check_environment()
    try:
        with uncollected():
            import transformers

            hasattr(transformers, "GPT2LMHeadModel")  # imports its file, and most of what is left
    except ImportError as error:
        raise InputError(f"the reference needs transformers, which does not import ({error}); pip install transformers") from None
    transformers.logging.disable_progress_bar()
    return transformers


def opens(checkpoint: StoredCheckpoint) -> bool:
    """Return whether transformers reads this checkpoint directly and correctly; it leaves unknown keys at random values."""
    path, assignment = checkpoint.path, checkpoint.assignment
    if not path.is_dir() or not (path / "config.json").is_file() or (path / ADAPTER).is_file():
        return False  # if PEFT is installed, transformers would add an adapter that lies beside a model
    if not any((path / name).is_file() for single, index, _ in LAYOUTS for name in (single, index)):
        return False
    names = (to_file,) if not assignment.tied else (to_file, str)  # without its prefix, transformers knows no head
    usual = all(held in {(name_of(name),) for name_of in names} for name, held in assignment.sources.items())
    plain = all(file.plain for file in assignment.files.values())
    return plain and usual and not assignment.transposed and not assignment.absent


@contextmanager
def directory(checkpoint: Checkpoint, progress: Progress = silent) -> Iterator[Path]:
    """Yield a directory for transformers: the checkpoint's, or a temporary one with our weights (adapters merged in float64)."""
    if isinstance(checkpoint, StoredCheckpoint) and opens(checkpoint):
        yield checkpoint.path
        return
    with tempfile.TemporaryDirectory(prefix="gpt2-reference-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        progress("writing the weights as transformers does")
        dtype = torch.float64 if isinstance(checkpoint, AdaptedCheckpoint) else checkpoint.stored
        save_with_transformers(checkpoint.config, checkpoint.load(dtype).state_dict(), folder)
        with suppress(InputError):  # no tokenizer, or a damaged one: the check of tokens reports it
            checkpoint.tokenizer().save(folder, n_positions=checkpoint.config.n_positions)
        gc.collect()
        yield folder


def load_reference(path: Path, dtype: torch.dtype, stated: GPT2Config | None = None) -> nn.Module:
    """Load ``GPT2LMHeadModel`` in eval mode, without ``reorder_and_upcast_attn`` in float64 (it would use float32).

    Its config is ``stated``, or that of the files, which may say that a head is tied where its values are not. Raises
    CheckpointError: transformers cannot open the files.
    """
    config = _transformers_config(stated or read_config(path))
    if dtype == torch.float64:
        config.reorder_and_upcast_attn = False
    safe = any((path / name).is_file() for name in (WEIGHTS, INDEX))
    try:
        with quiet():
            model = _transformers().GPT2LMHeadModel.from_pretrained(
                path, config=config, dtype=dtype, attn_implementation="sdpa", local_files_only=True, use_safetensors=safe
            )
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise CheckpointError(f"{path}: transformers cannot open it ({reason}); repair the files") from error
    return model.eval()


def _transformers_config(config: GPT2Config) -> Any:
    """Build transformers' config from ours, so that only keys that we check reach it."""
    raw = {key: value for key, value in config.to_hf().items() if key not in ("architectures", "model_type", "dtype", "n_ctx")}
    library = _transformers()
    with quiet():
        return library.GPT2Config(**raw)


def reference_cache(model: nn.Module) -> Any:
    """Return an empty key-value cache for a model of ``load_reference``: the second argument of its call, which fills it.

    It is given by position because its name differs: ``past_key_values`` until transformers 5.23, ``cache`` from 5.24.
    """
    return _transformers().DynamicCache(config=model.config)


def save_with_transformers(config: GPT2Config, weights: dict[str, Tensor], directory: Path) -> None:
    """Save ``weights`` (our names) with the ``save_pretrained`` of transformers' ``GPT2LMHeadModel``."""
    library = _transformers()
    with quiet():
        with torch.device("meta"):
            model = library.GPT2LMHeadModel(_transformers_config(config))
        missing, unexpected = model.load_state_dict({to_file(n): t for n, t in weights.items()}, strict=False, assign=True)
        if unexpected or missing not in ([], ["lm_head.weight"]):
            raise RuntimeError(f"transformers' GPT-2 has other parameters: missing {missing}, unexpected {unexpected}")
        model.tie_weights()
        model.save_pretrained(directory)
