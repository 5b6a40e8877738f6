"""Check a port's logits: their shape, columns beyond the vocabulary, and their difference from our model's."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.checkpoint.checkpoint import model_with
from gpt2.config import GPT2Config
from gpt2.errors import InputError
from gpt2.measure.metrics import worst_relative_error
from gpt2.port.terms.causes import SURE, Cause
from gpt2.port.terms.places import Place

MIN_SHARE = 1e-9  # a smaller share of the probability is rounding
MOST_KEPT = 6e7  # numbers of logits that a reference keeps, 480 MB: of one text of gpt2's whole context, which takes 10 s


class Reference:
    """A GPT-2 with the weights ``state``, perhaps with its own head (V, D) and ``bias`` (V,): maps ids (B, T) to logits."""

    def __init__(self, config: GPT2Config, state: Mapping[str, Tensor], head: Tensor | None = None) -> None:
        self.model = model_with(config, ((name, tensor.double()) for name, tensor in state.items()))
        self.model.requires_grad_(False)
        self.own_head, self.bias = head, torch.zeros(())
        self.kept: dict[tuple[object, ...], Tensor] = {}  # logits without the bias, of texts at the first positions

    def __call__(self, ids: Tensor, positions: Tensor | slice = slice(None)) -> Tensor:
        """Return the logits of tokens at ``positions`` (T,), from 0 on if none are given."""
        if positions != slice(None):
            return self._logits(ids, positions) + self.bias
        key = (*ids.shape, *ids.flatten().tolist())
        if (made := self.kept.get(key)) is None:
            made = self._logits(ids, positions)
            if made.numel() + sum(one.numel() for one in self.kept.values()) < MOST_KEPT:
                self.kept[key] = made
        return made + self.bias if self.bias.ndim else made

    def _logits(self, ids: Tensor, positions: Tensor | slice) -> Tensor:
        wpe = self.model.wpe.weight
        self.model.wpe.weight = nn.Parameter(wpe[positions], requires_grad=False)
        hidden = self.model.hidden(ids.cpu())
        self.model.wpe.weight = wpe
        return self.model.head(hidden) if self.own_head is None else F.linear(hidden, self.own_head.to(hidden))


def error_of(mine: Tensor, right: Tensor) -> float:
    """Return the worst relative error of a port's logits, for the columns and positions that it returns."""
    return worst_relative_error(mine[..., : right.shape[-1]].to("cpu", torch.float64), right[:, -mine.shape[1] :])


def require_logits(logits: Tensor, ids: Tensor, config: GPT2Config, who: str) -> Tensor:
    """Return (B, T', V') logits of (B, T) ``ids``; T' is T, or 1 (last position only). Raises InputError."""
    (batch, length), given = ids.shape, tuple(logits.shape)
    if logits.ndim != 3 or logits.shape[0] != batch or logits.shape[1] not in (1, length) or logits.shape[2] < config.vocab_size:
        hint = "; return logits = x @ wte.weight.t()" if given[-1:] == (config.n_embd,) else ""
        wanted = (*ids.shape, config.vocab_size)
        raise InputError(f"{who}: for ids of shape {tuple(ids.shape)} it returns {given}, and logits are {wanted}{hint}")
    return logits


def padding_causes(logits: Tensor, config: GPT2Config) -> tuple[list[Cause], list[str]]:
    """Return causes and notes on columns beyond the vocabulary; a cause if they get any probability."""
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
    return [Cause("padded-vocab", (Place(None, "logits"),), words, evidence, SURE, fix)], []
