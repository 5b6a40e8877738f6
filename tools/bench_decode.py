"""How fast are tokens made one at a time? Ours beside transformers and other people's GPT-2s, in turn, each a process of its own.

    python tools/bench_decode.py [MODEL] [--batch 1 --batch 8] [--context 64] [--tokens 48]
    python tools/bench_decode.py --positions 50 900          ours alone: what a longer past costs

What is timed is greedy steps after a prompt has been read: ours through gpt2.generate's own stream, transformers by bare passes
with its cache (its generate would add to that), llama.cpp by llama_decode, CTranslate2 by its own loop. Beside it, the share of
this machine's memory bandwidth: the bytes of every weight that a step must read, over the time, over what reading a tensor of
that size takes in the same minute. Ends stdout with one JSON line.
"""

from __future__ import annotations

import torch
from beside import chosen, errors, finish, measured, parser, room

from gpt2.bench import interleaved, ratio, seconds


def bandwidth(nbytes: int) -> float:
    """Bytes a second of reading ``nbytes`` once, the best of several: a limit is what was reached at all."""
    whole = torch.ones(nbytes // 4)
    return whole.nbytes / min(seconds(whole.sum) for _ in range(6))


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--batch", action="append", type=int, metavar="B", help="rows at a time (default: 1 and 8)")
    arguments.add_argument("--context", type=int, default=64, metavar="T", help="tokens of each prompt (default: %(default)s)")
    arguments.add_argument("--tokens", type=int, default=48, metavar="N", help="steps that are timed (default: %(default)s)")
    arguments.add_argument("--dtype", action="append", help="of ours (default: float32, bf16, int8)")
    arguments.add_argument("--positions", type=int, nargs=2, metavar="P", help="ours alone, after P tokens")
    args = arguments.parse_args()
    generator = torch.Generator().manual_seed(0)
    dtypes = args.dtype or ["float32", "bf16", "int8"]
    with room(args.model) as here:
        config = here.model.config
        if args.positions:
            near, far = (torch.randint(config.vocab_size, (1, at), generator=generator) for at in args.positions)
            results = {}
            for dtype in dtypes:
                side = here.ours(dtype)
                both = {
                    key: lambda side=side, ids=ids: side.decode(ids, args.tokens) for key, ids in (("near", near), ("far", far))
                }
                found = interleaved(both, args.pairs)
                results[dtype] = vars(ratio(found["near"], found["far"]))
                print(f"{side.name}: speed after {far.size(1)} over speed after {near.size(1)} tokens: {ratio(*found.values())}")
            return finish("decode by position", args.model, [], {"positions": args.positions, "results": results})
        results = []
        for rows in args.batch or [1, 8]:
            ids = torch.randint(config.vocab_size, (rows, args.context), generator=generator)
            positions = args.context + args.tokens + 16
            sides = [here.transformers(), *(here.ours(dtype) for dtype in dtypes), here.transformers("bfloat16")]
            sides += [here.llama(stored, rows, positions) for stored in ("f32", "bf16", "q8_0")]
            sides += [here.ctranslate2(dtype) for dtype in ("float32", "int8")]
            sides = chosen(sides, args.only)
            what = f"decode, batch {rows}, after {args.context} tokens"
            weights = 4 * (config.num_parameters() - config.n_positions * config.n_embd)
            before = bandwidth(weights)
            found = measured(what, rows * args.tokens, sides, lambda side, ids=ids: side.decode(ids, args.tokens), args.pairs)
            limit = max(before, bandwidth(weights))
            if "ours" in found["sides"]:
                rate = found["sides"]["ours"]["tokens/s"]["median"] / rows * weights
                share = f"{rate / limit:.0%} of the {limit / 1e9:.1f} that a sum of that size does"
                print(f"  ours reads {rate / 1e9:.1f} GB/s, {share}")
                found |= {"ours bytes/s": rate, "bandwidth": limit, "share": rate / limit}
            results.append(found)
        accuracy = errors(here.model, sides, ids[:1].expand(rows, -1))
        return finish("decode", args.model, here.absent, {"results": results, "largest logit error": accuracy})


if __name__ == "__main__":
    raise SystemExit(main())
