"""The baseline of the tutorials: a table that says, for every token, how likely each token is to follow it.

It is no GPT-2 and does not pretend to be one: its config says `model_type: bigram`, so ``gpt2.load`` refuses it by name, and
only this module reads it. But it is trained, judged, saved and gone on with by the same loop, on the same windows, so its loss
is what any model must beat to have learnt more than which token follows which.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from gpt2.checkpoint.loading import load_path
from gpt2.checkpoint.saving import write_file, write_json
from gpt2.data import Tokenizer
from gpt2.model import GPT2

TYPE = "bigram"


@dataclass(frozen=True)
class BigramConfig:
    """Size of the table. It looks at one token only, so a window may be as long as one likes."""

    vocab_size: int
    n_positions: int = 2**31 - 1

    def num_parameters(self) -> int:
        return self.vocab_size**2


class Bigram(nn.Module):
    """Row ``a`` of the table ``wte`` (V, V) is the logits of what follows token ``a``; zeros, knowing nothing, to begin with."""

    def __init__(self, config: BigramConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding.from_pretrained(torch.zeros(config.vocab_size, config.vocab_size), freeze=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids (B, T) to logits (B, T, V)."""
        return self.wte(ids.to(self.wte.weight.device))

    @torch.inference_mode()
    def sample(self, ids: list[int], max_new_tokens: int, seed: int) -> list[int]:
        """``ids`` and a continuation."""
        generator, ids = torch.Generator().manual_seed(seed), list(ids)
        for _ in range(max_new_tokens):
            ids.append(int(torch.multinomial(self.wte.weight[ids[-1]].softmax(0).cpu(), 1, generator=generator)))
        return ids


def save_bigram(model: Bigram, tokenizer: Tokenizer, directory: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer's files to ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", {"model_type": TYPE, "vocab_size": model.config.vocab_size})
    write_file(directory / "model.safetensors", save({"wte.weight": model.wte.weight.detach().cpu().contiguous()}))
    tokenizer.save(directory, n_positions=1024)


def load_model(directory: Path) -> GPT2 | Bigram:
    """What a run saved in ``directory``, whose files were found intact: a GPT-2 in float32, or what :func:`save_bigram` wrote."""
    config = json.loads((directory / "config.json").read_text())
    if config.get("model_type") != TYPE:
        return load_path(directory, dtype=torch.float32)
    model = Bigram(BigramConfig(config["vocab_size"]))
    model.wte.weight.data = load_file(directory / "model.safetensors")["wte.weight"]
    return model
