"""Load a model or its tokenizer by name: ``gpt2.load`` and ``gpt2.load_tokenizer``."""

from collections.abc import Iterable

import torch
from torch import nn

from gpt2.checkpoint.checkpoint import open_checkpoint, resolve, tokenizer_of
from gpt2.checkpoint.containers import require_whole_files, whole
from gpt2.checkpoint.names import DEFAULT, RUNS, ModelName, Name
from gpt2.config import GPT2Config, quoted
from gpt2.damage import ADVICE, Look, look, require_finite
from gpt2.data import Tokenizer
from gpt2.errors import InputError
from gpt2.model import GPT2


def load(
    name: Name = DEFAULT,
    *,
    dtype: "str | torch.dtype | None" = None,
    device: "str | torch.device" = "cpu",
    revision: str | None = None,
    offline: bool = False,
    activation_function: str | None = None,
) -> GPT2:
    """Load GPT-2 weights into our model, in eval mode.

    Args:
        name: ``shakespeare-mini`` (embedded), ``gpt2`` and its official siblings, ``org/name[@revision]``, a directory or
            file in any container that :mod:`gpt2.checkpoint.files` opens, or ``random:SIZE[:SEED]``; each with an optional
            ``:dtype`` suffix.
        dtype: "float32", "bf16", ..., or "int8" (inference only, :mod:`gpt2.int8`). Default: the stored dtype; if tensors
            differ, the narrowest dtype that holds all of them.
        device: where the weights go: "cpu", "cuda", "cuda:1", "mps", "auto".
        revision: branch, tag or commit of a Hub repository.
        offline: make no request; use only the cache.
        activation_function: of the feed-forward, for a file that does not say it (nanoGPT's); also a suffix of the name,
            as in "ckpt.pt:gelu_new".

    On the CPU in the stored dtype, weights are views of the memory-mapped file: pages are read on first use, and changes stay
    in this process. (The official gpt2's file is not aligned, so it is read at once.) Matrices stored [out, in] become
    transposed views. A conversion holds a few megabytes of the source at a time. If a mapped file is truncated while in use,
    the process may end (:mod:`gpt2.checkpoint.containers`).

    Raises:
        InputError: no such model, dtype or device. CheckpointError: it cannot be read, or its tensors do not fit its config.
    """
    asked = None if dtype is None else str(dtype).removeprefix("torch.")
    parsed = ModelName.parse(name, RUNS, dtype=asked, revision=revision, activation=activation_function)
    device = require_device(device)
    checkpoint = open_checkpoint(parsed, offline=offline)
    return checkpoint.load(device=require_device(device, checkpoint.dtype))


def load_tokenizer(name: Name = DEFAULT, *, revision: str | None = None, offline: bool = False) -> Tokenizer:
    """Load a model's tokenizer; names as in :func:`load`. Raises InputError: no such model, or no intact tokenizer files."""
    parsed = ModelName.parse(name, RUNS, revision=revision)
    if parsed.random is not None:
        return open_checkpoint(parsed).tokenizer()  # raises InputError
    return tokenizer_of(resolve(parsed, offline=offline).path, offline=offline)


def rows_note(tokenizer: Tokenizer, config: GPT2Config, name: str) -> list[str]:
    """Return a line that names the added tokens without a row in the embedding, such as [PAD]; [] if all have one.

    Raises InputError: a token of the vocabulary itself has none, so that it is another model's.
    """
    tokens = [i for i in range(config.vocab_size, tokenizer.n_vocab) if tokenizer.holds(i)]
    if any(i not in tokenizer.added for i in tokens):
        entries = f"the tokenizer has {tokenizer.n_vocab:,} entries, the model {config.vocab_size:,}"
        raise InputError(f"{name}: wrong vocabulary, {entries}; put the model's own tokenizer there")
    named = ", ".join(f"{quoted(tokenizer.token(i))} ({i})" for i in tokens[:3]) + (" ..." if len(tokens) > 3 else "")
    return [f"no row in the embedding for {len(tokens):,} of the tokenizer's added tokens: {named}"] if tokens else []


def require_rows(ids: Iterable[int], tokenizer: Tokenizer, config: GPT2Config, name: str) -> None:
    """Raise InputError if one of the ids has no row in the embedding."""
    if (highest := max(ids, default=0)) >= config.vocab_size:
        token = quoted(tokenizer.token(highest)) if tokenizer.holds(highest) else "of the tokenizer's template"
        rows = f"{config.vocab_size:,} rows"
        remedy = "leave it out, or give the model a row for it, as transformers' resize_token_embeddings does"
        raise InputError(f"{name}: the token {token} (id {highest:,}) has no row in the embedding of {rows}; {remedy}")


def require_intact(model: nn.Module, name: str) -> Look:
    """Return a look at a model's weights. Raises InputError, which names tensor, entry and value: some are damaged."""
    found = look(whole(model.named_parameters()))
    if found.damage:
        raise InputError(f"{name}: holds {found.damage}; {ADVICE}")
    return found


def require_usable(model: GPT2, name: str) -> Look:
    """Do the same, and raise InputError too if a logit of the first ids is NaN or infinite."""
    ids = torch.arange(min(16, model.config.n_positions, model.config.vocab_size), device=model.wte.weight.device)[None]
    found = require_intact(model, name)
    with torch.inference_mode():
        require_whole_files()
        require_finite(model(ids), name, model)
    return found


def require_device(asked: str | torch.device, dtype: torch.dtype | None = None) -> torch.device:
    """Return the device, checked before gigabytes are downloaded; "auto" is the first of cuda, mps and cpu that is here.

    Raises InputError: this machine lacks it, or it is MPS and cannot hold ``dtype``.
    """
    if isinstance(asked, str) and asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(asked)
        if not (unfit := device.type == "mps" and dtype == torch.float64):
            torch.zeros(1, device=device).item()  # meta holds nothing
    except (RuntimeError, AssertionError, NotImplementedError, TypeError, OverflowError, ValueError):
        here = "this machine has no accelerator, use cpu"
        if torch.accelerator.is_available():
            here = f"this machine has cpu and {torch.accelerator.device_count()} x {torch.accelerator.current_accelerator()}"
        raise InputError(f"no device {quoted(str(asked))} here; {here}") from None
    if unfit:
        raise InputError("mps has no float64; give the model another dtype, as in gpt2:float32")
    return device
