"""``gpt2 info``: show a checkpoint's config, parameters, files and memory needs."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from gpt2.cli.common import ModelSettings, finish
from gpt2.errors import printable, size

if TYPE_CHECKING:
    from gpt2.checkpoint.describe import Description

EXAMPLES = """\
  gpt2 info                          the embedded checkpoint
  gpt2 info gpt2-medium              an official one, from the Hub or its cache
  gpt2 info ./my-model --json -      a local directory, as JSON
  gpt2 info random:gpt2-xl:bf16      the memory that a size needs; no file is read"""


def run(args: ModelSettings) -> int:
    from gpt2.checkpoint.describe import describe
    from gpt2.measure.environment import environment

    description = describe(args.model, revision=args.revision, offline=args.offline)
    config = description.config
    body = asdict(description) | {"environment": asdict(environment([])), "parameters": config.num_parameters()}
    body |= {"parameters_by_part": config.parameters_by_part(), "memory_bytes": description.memory_bytes}
    return finish(args, body, printable(_text(description)))


def _text(description: "Description") -> str:
    config, total, memory = description.config, description.config.num_parameters(), description.memory_bytes
    lines = [printable(description.name, one_line=True) + (f" @ {description.revision}" if description.revision else "")]
    lines += [f"  {printable(description.path, one_line=True)}"] if description.path else []
    lines += [f"  {line}" for line in (description.container, *description.notes)] if description.path else []
    lines += ["", "config", *(f"  {key:32} {value}" for key, value in asdict(config).items()), "", f"parameters  {total:,}"]
    lines += [f"  {part:32} {count:>13,}  {count / total:6.1%}" for part, count in config.parameters_by_part().items()]
    lines += ["", f"memory in {description.dtype}"]
    lines += [f"  {'to run: weights':32} {size(memory['weights']):>13}"]
    lines += [f"  {'        and a full cache':32} {size(memory['cache']):>13}"]
    lines += [f"  {'to train: AdamW in float32':32} {size(memory['training']):>13}  activations come on top"]
    if description.files:
        lines += ["", f"files: {description.official}"]
        for file in description.files:
            lines += [f"  {printable(file.name, one_line=True):32} {size(file.size):>13}", f"    sha256 {file.sha256}"]
    if dropped := description.dropped:
        lines += ["", f"dropped: {len(dropped)} tensors without information", f"  {', '.join(dropped[:2])}, ..."]
    return "\n".join(lines)
