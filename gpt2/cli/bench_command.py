"""``gpt2 bench``: measure the speed on this machine, of our implementation and of transformers."""

from dataclasses import dataclass

from gpt2.cli.common import ModelSettings, finish
from gpt2.options import device_option, option, pick
from gpt2.pages.streams import Status

EXAMPLES = """\
  gpt2 bench                                      the embedded model, in seconds
  gpt2 bench random:gpt2                          the official shape with random weights; no download
  gpt2 bench gpt2:bf16 --batch 8 --context 512    weights in bfloat16, eight prompts of 512 tokens
  gpt2 bench random:gpt2:int8                     int8 inference, compared with transformers in float32
  gpt2 bench random:gpt2-medium --pairs 9 --json -

Both implementations run in turn in one process, with the same weights and threads. The figure is the ratio of each pair. Set
the number of threads with OMP_NUM_THREADS. The exit code is 0 whatever the result."""


@dataclass(frozen=True, kw_only=True)
class BenchSettings(ModelSettings):
    device: str = device_option("where both run")
    pairs: int = option("measurements of each", "N", 5)
    batch: int = option("rows at a time", "B", 1)
    context: int = option("tokens of a prompt", "T", 128)
    tokens: int = option("tokens to decode after it", "N", 32)


def run(args: BenchSettings) -> int:
    with Status(f"opening {args.model}") as status:
        from gpt2.bench import bench

        how = pick(args, "pairs", "batch", "context", "tokens", "device", "revision", "offline")
        result = bench(args.model, **how, progress=status)
    return finish(args, result, result.table())
