"""``gpt2 diagnose``: show where a user's implementation differs from GPT-2, and why."""

import argparse
import math
import shutil
from typing import TYPE_CHECKING

from gpt2.cli.common import Status, add_offline, say, write_result
from gpt2.errors import InputError

if TYPE_CHECKING:
    from gpt2.port.diagnosis.report import Diagnosis

HELP = "say why somebody's GPT-2 is almost right: where, what, and the fix"
EXAMPLES = """\
  gpt2 diagnose port.py:build                        against the embedded checkpoint
  gpt2 diagnose port.py:build --model gpt2           against the official weights
  gpt2 diagnose port.py --model ./my-model           FILE.py alone means FILE.py:build
  gpt2 diagnose port.py:build --json -               for programs: verdict, first_divergence, causes
  gpt2 diagnose dump.npz --model gpt2                what a program in any language wrote

port.py has a function that returns your module:

  def build(checkpoint_dir):                         # the folder with config.json and model.safetensors
      model = MyGPT()
      model.load_state_dict(my_own_loading(checkpoint_dir))
      return model                                   # maps ids (B, T) to logits (B, T, V)

A dump (.npz, .safetensors, a directory of .npy, llm.c's debug state .bin) holds the token ids under the name ids, shape (T,) or
(B, T), the logits, and any intermediate values in any layout, under any names. The more it holds, the more can be said.

With def build(): the weights are put in for you, as gpt2.load_into does. The file is run: diagnose only files you trust.

exit code: 0 equal, 1 it differs, 2 it could not be built or run"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help = "a Python file and the function in it that returns the module, or a dump of arrays"
    parser.add_argument("what", metavar="WHAT", help=help)
    parser.add_argument("--model", default="shakespeare-mini", metavar="MODEL", help="the right weights (default: %(default)s)")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a Hub repository")
    add_offline(parser)
    help = "seconds for its import, build and first forward (default: %(default)g)"
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help=help)


def run(args: argparse.Namespace) -> int:
    if not 0 < args.timeout < math.inf:
        raise InputError(f"--timeout {args.timeout}: give a number of seconds above 0, such as 60")
    diagnosis = _diagnosis(args)
    width = min(shutil.get_terminal_size((110, 24)).columns, 140)
    write_result(args.json, diagnosis.to_json, lambda: say(diagnosis.table(width)))
    return 0 if diagnosis.ok else 1


def _diagnosis(args: argparse.Namespace) -> "Diagnosis":
    from gpt2.port.dump.reading import is_dump

    if is_dump(args.what):
        import gpt2

        with Status(f"reading {args.what}"):
            return gpt2.diagnose(args.what, args.model, revision=args.revision, offline=args.offline)
    from gpt2.port.diagnosis.runner import run

    with Status(f"running {args.what}"):
        return run(args.what, args.model, timeout=args.timeout, revision=args.revision, offline=args.offline)
