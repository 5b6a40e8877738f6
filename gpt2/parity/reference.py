"""The reference: transformers' GPT-2 over the same files. The only module that imports transformers, and only when called."""

from __future__ import annotations

import gc
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from gpt2.checkpoint.checkpoint import AdaptedCheckpoint, Checkpoint, StoredCheckpoint
from gpt2.checkpoint.configs import read_config
from gpt2.checkpoint.files import ADAPTER, INDEX, LAYOUTS, WEIGHTS
from gpt2.checkpoint.hub_errors import check_environment
from gpt2.checkpoint.keys import to_file
from gpt2.config import GPT2Config
from gpt2.errors import CheckpointError, InputError
from gpt2.measure.metrics import Progress, silent


def _transformers() -> Any:
    """The library, without its progress bars."""
    check_environment()
    try:
        import transformers
    except ImportError as error:
        raise InputError(f"the reference needs transformers, which does not import ({error}); pip install transformers") from None
    transformers.logging.disable_progress_bar()
    return transformers


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' advice from stderr."""
    library = logging.getLogger("transformers")
    before = library.level
    library.setLevel(logging.ERROR)
    try:
        yield
    finally:
        library.setLevel(before)


def opens(checkpoint: StoredCheckpoint) -> bool:
    """Whether transformers reads a checkpoint itself: its own file names and orientation, no biases left out, a config.json.

    It would also open some that it misreads (a key it does not know is left at random values), so they are not left to it.
    """
    path, assignment = checkpoint.path, checkpoint.assignment
    if not path.is_dir() or not (path / "config.json").is_file() or (path / ADAPTER).is_file():
        return False  # and where an adapter lies beside a model, PEFT, if it is there, would add it
    if not any((path / name).is_file() for single, index, _ in LAYOUTS for name in (single, index)):
        return False
    usual = all(key in (name, to_file(name)) for name, key in assignment.sources.items())
    return usual and not assignment.turned and not assignment.absent


@contextmanager
def directory(checkpoint: Checkpoint, progress: Progress = silent) -> Iterator[Path]:
    """A directory that transformers reads: the checkpoint's, or a temporary one that it wrote, with weights of our loading.

    Those of an adapter are merged in float64, so that no rounding of the sum is part of the reference.
    """
    if isinstance(checkpoint, StoredCheckpoint) and opens(checkpoint):
        yield checkpoint.path
        return
    with tempfile.TemporaryDirectory(prefix="gpt2-reference-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        progress("writing the weights as transformers does")
        dtype = torch.float64 if isinstance(checkpoint, AdaptedCheckpoint) else checkpoint.stored
        save_with_transformers(checkpoint.config, checkpoint.load(dtype).state_dict(), folder)
        with suppress(InputError):  # no tokenizer there, or a damaged one: the check of tokens tells which
            checkpoint.tokenizer().save(folder, n_positions=checkpoint.config.n_positions)
        gc.collect()
        yield folder


def load_reference(path: Path, dtype: torch.dtype) -> nn.Module:
    """``GPT2LMHeadModel`` from a local directory, in eval mode, with its default attention, "sdpa".

    ``reorder_and_upcast_attn`` is switched off in float64, where transformers' version of it would compute in float32.
    """
    library = _transformers()
    config = _their_config(read_config(path))
    if dtype == torch.float64:
        config.reorder_and_upcast_attn = False
    safe = any((path / name).is_file() for name in (WEIGHTS, INDEX))
    with _opening(path):
        model = library.GPT2LMHeadModel.from_pretrained(
            path, config=config, dtype=dtype, attn_implementation="sdpa", local_files_only=True, use_safetensors=safe
        )
    return model.eval()


def _their_config(config: GPT2Config) -> Any:
    """transformers' config object, made from ours: nothing in config.json that our allow-list leaves out reaches it."""
    raw = {key: value for key, value in config.to_hf().items() if key not in ("architectures", "model_type", "dtype", "n_ctx")}
    with _quiet():
        return _transformers().GPT2Config(**raw)


@contextmanager
def _opening(path: Path) -> Iterator[None]:
    """Report what transformers cannot open as an error of one line."""
    try:
        with _quiet():
            yield
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise CheckpointError(f"{path}: transformers cannot open it ({reason}); repair the files") from error


def reference_tokenizer(path: Path) -> Any:
    """The tokenizer that transformers makes of the same directory, reading special tokens in text as plain text, as ours does."""
    library = _transformers()
    with _opening(path):
        return library.AutoTokenizer.from_pretrained(path, local_files_only=True, config=_their_config(read_config(path)))


def reference_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of ``text`` by transformers' tokenizer."""
    with _quiet():
        return tokenizer(text, add_special_tokens=False)["input_ids"]


def reference_generate(model: nn.Module, ids: Tensor, new_tokens: int, *, use_cache: bool) -> Tensor:
    """Greedy continuation by transformers' own ``generate``: (B, T) to (B, T + new)."""
    settings = _transformers().GenerationConfig(
        do_sample=False, max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0, use_cache=use_cache
    )
    with _quiet():
        generate = cast("Callable[..., Tensor]", model.generate)
        return generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)


def save_with_transformers(config: GPT2Config, weights: dict[str, Tensor], directory: Path) -> None:
    """Put ``weights`` (our names) into a ``GPT2LMHeadModel`` and let it ``save_pretrained``."""
    library = _transformers()
    with _quiet():
        with torch.device("meta"):
            model = library.GPT2LMHeadModel(_their_config(config))
        missing, unexpected = model.load_state_dict({to_file(n): t for n, t in weights.items()}, strict=False, assign=True)
        if unexpected or missing not in ([], ["lm_head.weight"]):
            raise RuntimeError(f"transformers' GPT-2 has other parameters: missing {missing}, unexpected {unexpected}")
        model.tie_weights()
        model.save_pretrained(directory)
