"""The bigram baseline of the tutorials: a table with the logits of the next token for every token.

It trains in the same loop, on the same windows: a model that beats its loss has learnt more than pairs of tokens. Its config says
`model_type: bigram`, which only this module reads.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from gpt2.checkpoint.checkpoint import open_path
from gpt2.checkpoint.saving import write_file, write_json
from gpt2.data import Tokenizer
from gpt2.data.files import read_all
from gpt2.model import GPT2

TYPE = "bigram"


@dataclass(frozen=True)
class BigramConfig:
    """Size of the table; the number of positions is not limited, because the model reads one token only."""

    vocab_size: int
    n_positions: int = 2**31 - 1

    def num_parameters(self) -> int:
        return self.vocab_size**2


class Bigram(nn.Module):
    """Row ``a`` of the table ``wte`` (V, V) has the logits of the token after ``a``; initialised with zeros."""

    def __init__(self, config: BigramConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding.from_pretrained(torch.zeros(config.vocab_size, config.vocab_size), freeze=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits (B, T, V) for token ids (B, T)."""
        return self.wte(ids.to(self.wte.weight.device))

    @torch.inference_mode()
    def sample(self, ids: list[int], max_new_tokens: int, seed: int) -> list[int]:
        """Return ``ids`` with a sampled continuation."""
        generator, ids = torch.Generator().manual_seed(seed), list(ids)
        for _ in range(max_new_tokens):
            ids.append(int(torch.multinomial(self.wte.weight[ids[-1]].softmax(0).cpu(), 1, generator=generator)))
        return ids


def save_bigram(model: Bigram, tokenizer: Tokenizer, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", {"model_type": TYPE, "vocab_size": model.config.vocab_size})
    write_file(directory / "model.safetensors", save({"wte.weight": model.wte.weight.detach().cpu().contiguous()}))
    tokenizer.save(directory, n_positions=1024)


def load_model(directory: Path) -> GPT2 | Bigram:
    """Load a GPT-2 in float32, or a bigram table, from a checkpoint that has passed its hash check."""
    config = json.loads(read_all(directory / "config.json"))
    if config.get("model_type") != TYPE:
        return open_path(directory).load(torch.float32)
    model = Bigram(BigramConfig(config["vocab_size"]))
    model.wte.weight.data = load_file(directory / "model.safetensors")["wte.weight"]
    return model
