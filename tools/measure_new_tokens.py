"""Measure what data.add_tokens does to the other tokens: before a step, and after a fine-tune that never sees the new ones.

    python tools/measure_new_tokens.py [--init MODEL] [--steps 100]

The text is Macbeth; the new tokens do not stand in it. Beside the same fine-tune without new tokens: the probability that the new
tokens take, and KL over the old tokens (renormalised). Controls: another seed of the same fine-tune, and new rows drawn as when
training from scratch. Ends stdout with one JSON line.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import gpt2
from gpt2.data import shakespeare
from gpt2.train import models
from gpt2.train.loop import train
from gpt2.train.recipe import read

TOKENS = ("<|question|>", "<|answer|>", " telephone", "HAL 9000:")


def log_probabilities(model: gpt2.GPT2, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(rows).double().log_softmax(-1) for rows in ids.split(4)])


def beside(after: Tensor, before: Tensor) -> dict[str, float]:
    """Return the probability of new tokens, and KL(before || after) over the old ones, nats per token."""
    size = before.size(-1)
    kl = (before.exp() * (before - after[..., :size].log_softmax(-1))).sum(-1)
    taken = after[..., size:].exp().sum(-1)
    return {"taken": float(taken.mean()), "taken_max": float(taken.max()), "kl": float(kl.mean()), "kl_max": float(kl.max())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--init", default="shakespeare-mini")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    plain = read("finetune-shakespeare", [f"steps={args.steps}", f"eval_every={args.steps}", f"save_every={args.steps}"])
    new = replace(plain, data=replace(plain.data, add_tokens=TOKENS))
    tokenizer = gpt2.load_tokenizer(args.init)
    ids = torch.tensor(tokenizer.encode(shakespeare.play("twelfth-night"))[: 32 * 256]).view(-1, 256)
    start = log_probabilities(gpt2.load(args.init), ids)
    model, _ = models.with_tokens(gpt2.load(args.init), tokenizer, new)
    rows = {"before a step": beside(log_probabilities(model, ids), start)}
    model.wte.weight.data[tokenizer.n_vocab :] = torch.randn(len(TOKENS), model.config.n_embd) * model.config.initializer_range
    rows["before a step, rows as from scratch"] = beside(log_probabilities(model, ids), start)
    with tempfile.TemporaryDirectory() as folder:
        ends = {}
        for name, recipe in {"plain": plain, "new": new, "seed": replace(plain, seed=plain.seed + 1)}.items():
            print(name, file=sys.stderr)
            train(recipe, Path(folder, name), init=args.init)
            ends[name] = log_probabilities(gpt2.load(str(Path(folder, name, f"step-{args.steps}"))), ids)
    rows[f"after {args.steps} steps"] = beside(ends["new"], ends["plain"])
    rows[f"after {args.steps} steps, another seed and no new tokens"] = beside(ends["seed"], ends["plain"])
    rows[f"the {args.steps} steps themselves"] = beside(ends["plain"], start)
    for name, row in rows.items():
        print(f"{name:60}" + "  ".join(f"{key} {value:.2e}" for key, value in row.items()))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
