"""Ports with faults drawn at random: combinations that were not used to develop `diagnose`."""

import random

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from support.faulty import LINES, Faulty
from support.ports import logits

# Faults of the whole model: no block is drawn for them.
WHOLE = (
    *("position-", "embedding-", "final-", "logits-", "untied", "padded", "extra-norm-embed", "not-loaded-wpe"),
    "not-loaded-ln_f",
    "on-the-way",
    "wpe-",
    "wrong-tokens",
    "wrong-all",
)
# Faults of behaviour and of the order of blocks: they interact with others, so they are not combined.
APART = ("cache", "padding", "dropout", "noise", "counts", "batch", "layer-", "weights-reversed", "masked-first", "annotated")


def draw(n: int, seed: int, config: GPT2Config, directory) -> list[Faulty]:
    """Draw ``n`` ports of two or three faults in different blocks; each fault changes the logits."""
    chance, found = random.Random(seed), {}
    while len(found) < n:
        architecture = chance.choice([name for name in LINES if name not in ("compiled", "attentions")])
        known = sorted({word.partition("@")[0] for line in LINES[architecture] for word in line.split()})
        words = chance.sample([word for word in known if not any(part in word for part in APART)], chance.choice((2, 2, 3)))
        blocks = chance.sample(range(config.n_layer), len(words))
        line = " ".join(
            word if any(part in word for part in WHOLE) else f"{word}@{block}" for word, block in zip(words, blocks, strict=True)
        )
        port = Faulty(architecture, line)
        if _ambiguous(port.line.split(), config):
            continue
        causes = [ids[0] for ids in port.causes.values()]
        if len(set(causes)) == len(causes) and _all_count(port, config, directory):
            found[port.name] = port
    return list(found.values())


def _ambiguous(words: list[str], config: GPT2Config) -> bool:
    """Whether two descriptions are the same function.

    In block 1 of four heads, 2 sqrt(K) is sqrt(D). A norm before block 0 and none in it is either an extra and a missing one,
    or a norm without its affine part.
    """
    return ("scale-inverse-layer@1" in words and config.n_head == 4) or {"ln_1-missing@0", "extra-norm-embed"} <= set(words)


@torch.no_grad()
def _all_count(port: Faulty, config: GPT2Config, directory) -> bool:
    ids = torch.randint(config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))

    def run(line: str) -> Tensor:
        module = Faulty(port.architecture, line).build(config, directory).double()
        return logits(module, ids, config.vocab_size + 100)

    whole, words = run(port.line), port.line.split()
    less = [run(" ".join(word for word in words if word != left_out)) for left_out in words]
    return all(one.shape != whole.shape or not torch.allclose(one, whole, rtol=0, atol=1e-8) for one in less)
