"""How fast is a prompt read? Ours beside transformers and other people's GPT-2s, in turn, each in a process of its own.

    python tools/bench_prefill.py [MODEL] [--shape 1x128 --shape 1x1024 --shape 8x512] [--nanogpt nanoGPT/model.py]

What is timed is (B, T) ids to the logits (B, V) of what follows; transformers once so, and once as most people call it, with
the logits of every position. Beside it, how much of this machine's own GEMM speed that is: the floating point operations of
the matrix products and of attention, over the time, over what torch.mm reaches in the same minute on the shape of c_fc.
Ends stdout with one JSON line.
"""

from __future__ import annotations

from pathlib import Path

import torch
from beside import AllLogits, chosen, errors, finish, measured, parser, room

from gpt2.bench import seconds
from gpt2.config import GPT2Config


def operations(config: GPT2Config, rows: int, tokens: int) -> float:
    """Multiplications and additions of one prefill: four projections a block, causal attention, one row of logits each."""
    d, f = config.n_embd, config.inner
    block = 2 * rows * tokens * (4 * d * d + 2 * d * f) + 2 * rows * tokens * (tokens + 1) * d
    return config.n_layer * block + 2 * rows * d * config.vocab_size


def peak(config: GPT2Config, tokens: int) -> float:
    """Operations a second of torch.mm on (tokens, D) times (D, F), the best of several: a limit is what was reached at all."""
    a, b = torch.randn(max(tokens, 1024), config.n_embd), torch.randn(config.n_embd, config.inner)
    return 2 * a.size(0) * b.numel() / min(seconds(lambda: torch.mm(a, b)) for _ in range(12))


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--shape", action="append", metavar="BxT", help="(default: 1x128, 1x1024, 8x512)")
    arguments.add_argument("--nanogpt", type=Path, metavar="FILE", help="nanoGPT's model.py")
    args = arguments.parse_args()
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.shape or ("1x128", "1x1024", "8x512")]
    results = []
    with room(args.model) as here:
        config = here.model.config
        rows, positions = max(rows for rows, _ in shapes), config.n_positions
        every = here.transformers(kind=AllLogits)
        sides = [here.ours(), here.transformers(), every, here.nanogpt(args.nanogpt), here.llama("f32", rows, positions)]
        sides = chosen([*sides, here.ctranslate2("float32")], args.only)
        generator = torch.Generator().manual_seed(0)
        for rows, tokens in shapes:
            ids = torch.randint(config.vocab_size, (rows, tokens), generator=generator)
            run = lambda side, ids=ids: side.prefill_seconds(ids)  # noqa: E731
            before = peak(config, rows * tokens)
            found = measured(f"prefill {rows} x {tokens}", rows * tokens, sides, run, args.pairs)
            limit = max(before, peak(config, rows * tokens))
            rate = found["sides"]["ours"]["tokens/s"]["median"] / (rows * tokens) * operations(config, rows, tokens)
            print(f"  ours is at {rate / 1e9:.0f} GFLOP/s, {rate / limit:.0%} of the {limit / 1e9:.0f} that torch.mm reaches")
            results.append({**found, "ours flops": rate, "gemm flops": limit, "share": rate / limit})
        ids = torch.randint(config.vocab_size, (1, min(256, positions)), generator=generator)
        accuracy = errors(here.model, [side for side in sides if side is not every], ids)
        return finish("prefill", args.model, here.absent, {"results": results, "largest logit error": accuracy})


if __name__ == "__main__":
    raise SystemExit(main())
