"""``gpt2 info``: what a checkpoint is."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gpt2.cli.common import add_command, add_json, add_model, size, write_json
from gpt2.errors import printable

if TYPE_CHECKING:
    from gpt2.checkpoint.describe import Description

EXAMPLES = """\
  gpt2 info                          the embedded checkpoint
  gpt2 info gpt2-medium              an official one, from the Hub or its cache
  gpt2 info ./my-model --json -      a local directory, as JSON
  gpt2 info random:gpt2-xl:bf16      what a size would need, without a file"""


def add(commands: Any) -> None:
    parser = add_command(commands, "info", "show config, parameters by part, files with sha256, and memory needed", EXAMPLES)
    add_model(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from gpt2.checkpoint.describe import describe

    found = describe(args.model, revision=args.revision, offline=args.offline)
    if args.json:
        write_json(args.json, _json(found))
    if args.json != "-":
        print(printable(_text(found)))
    return 0


def _json(found: Description) -> str:
    body = {
        **asdict(found),
        "parameters": found.config.num_parameters(),
        "parameters_by_part": found.config.parameters_by_part(),
        "memory_bytes": {"weights": found.weights_bytes, "cache": found.cache_bytes, "training": found.training_bytes},
    }
    return json.dumps(body, indent=2)


def _text(found: Description) -> str:
    config, total = found.config, found.config.num_parameters()
    lines = [printable(found.name, one_line=True) + (f" @ {found.revision}" if found.revision else "")]
    lines += [f"  {printable(found.path, one_line=True)}"] if found.path else []
    lines += [f"  {line}" for line in (found.container, *found.notes)] if found.path else []
    lines += ["", "config"]
    lines += [f"  {key:32} {value}" for key, value in asdict(config).items()]
    lines += ["", f"parameters  {total:,}"]
    lines += [f"  {part:32} {count:>13,}  {count / total:6.1%}" for part, count in config.parameters_by_part().items()]
    lines += ["", f"memory in {found.dtype}"]
    lines += [f"  {'to run: weights':32} {size(found.weights_bytes):>13}"]
    lines += [f"  {'        and a full cache':32} {size(found.cache_bytes):>13}"]
    lines += [f"  {'to train: AdamW in float32':32} {size(found.training_bytes):>13}  activations come on top"]
    if found.files:
        lines += ["", f"files: {found.official}"]
        for file in found.files:
            lines += [f"  {printable(file.name, one_line=True):32} {size(file.size):>13}", f"    sha256 {file.sha256}"]
    if found.dropped:
        lines += [
            "",
            f"seen and dropped: {len(found.dropped)} tensors without information",
            f"  {', '.join(found.dropped[:2])}, ...",
        ]
    return "\n".join(lines)
