"""Check the shape of a port's logits, and the columns that are beyond the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.errors import InputError
from gpt2.port.diagnosis.causes import PlacedCause
from gpt2.port.diagnosis.places import Place
from gpt2.port.diagnosis.report import SURE

MIN_SHARE = 1e-9  # a share of the probability that is more than rounding


def require_logits(logits: Tensor, ids: Tensor, config: GPT2Config, who: str) -> Tensor:
    """(B, T', V') logits of (B, T) ``ids``: T' is T, or 1 where a port returns the last position only.

    Raises:
        InputError: another shape, or NaN.
    """
    batch, length = ids.shape
    given = tuple(logits.shape)
    if logits.ndim == 2 and logits.shape[0] == batch:
        logits = logits[:, None]
    if logits.ndim != 3 or logits.shape[0] != batch or logits.shape[1] not in (1, length) or logits.shape[2] < config.vocab_size:
        hint = "; return logits = x @ wte.weight.t()" if given[-1:] == (config.n_embd,) else ""
        hint = "; leave them as they are, and flatten them for the loss only" if given[:1] == (batch * length,) else hint
        wanted = (*ids.shape, config.vocab_size)
        raise InputError(f"{who}: for ids of shape {tuple(ids.shape)} it returns {given}, and logits are {wanted}{hint}")
    if bool(logits.isnan().any()):
        where = int(logits.isnan().any(-1).any(0).nonzero()[0])
        raise InputError(
            f"{who}: its logits are NaN from position {where} on; look for a division by zero, or a softmax over nothing but -inf"
        )
    return logits


def padding_causes(logits: Tensor, config: GPT2Config) -> tuple[list[PlacedCause], list[str]]:
    """Causes and notes on columns beyond the vocabulary: a cause where they get any probability."""
    extra = logits.shape[-1] - config.vocab_size
    if extra <= 0:
        return [], []
    share = float(logits.softmax(-1)[..., config.vocab_size :].sum(-1).max())
    words = f"your logits have {logits.shape[-1]:,} columns, the vocabulary {config.vocab_size:,} tokens"
    if not share > MIN_SHARE:
        return [], [f"{words}: the rest is so low that it takes no probability"]
    wins = float((logits.argmax(-1) >= config.vocab_size).double().mean())
    evidence = f"the {extra:,} others take up to {share:.1%} of the probability"
    evidence += f", and are the most likely token at {wins:.0%} of the positions" if wins else ""
    fix = f"logits = logits[..., :{config.vocab_size}]  # or set the others to -inf"
    return [PlacedCause("padded-vocab", (Place(None, "logits"),), words, evidence, SURE, fix)], []


def without_padding(logits: Tensor, config: GPT2Config) -> Tensor:
    """Only the columns of the vocabulary, in float64."""
    return logits[..., : config.vocab_size].to("cpu", torch.float64)
