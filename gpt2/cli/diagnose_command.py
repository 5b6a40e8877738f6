"""``gpt2 diagnose``: show where a user's implementation differs from GPT-2, and why."""

import argparse
import math
import shutil
import sys
from typing import TYPE_CHECKING

from gpt2.cli.common import Status, add_offline, say, write_result
from gpt2.errors import InputError, printable

if TYPE_CHECKING:
    from gpt2.port.diagnosis.report import Diagnosis

HELP = "say why somebody's GPT-2 is almost right: where, what, and the fix"
EXAMPLES = """\
  gpt2 diagnose port.py:build                        against the embedded checkpoint
  gpt2 diagnose port.py:build --model gpt2           against the official weights
  gpt2 diagnose port.py --model ./my-model           FILE.py alone means FILE.py:build
  gpt2 diagnose port.py:build --json -               for programs: verdict, first_divergence, causes
  gpt2 diagnose dump.npz --model gpt2                what a program in any language wrote
  gpt2 diagnose --run 'python port.py {ids} {out}' --model gpt2
  gpt2 diagnose --run './port {text} {out}' --model gpt2
  gpt2 diagnose --run 'node port.js {text} {out} {model}/model.safetensors' --model gpt2

port.py has a function that returns your module:

  def build(checkpoint_dir):                         # the folder with config.json and model.safetensors
      model = MyGPT()
      model.load_state_dict(my_own_loading(checkpoint_dir))
      return model                                   # maps ids (B, T) to logits (B, T, V)

A dump (.npz, .safetensors, a directory of .npy, llm.c's debug state .bin) holds the token ids under the name ids, shape (T,) or
(B, T), the logits, and any intermediate values in any layout, under any names. The more it holds, the more can be said.

--run runs a program for its dump: {ids} is a .npy file of token ids, shape (T,), int64; {text} the same ids as text, in one line;
{out} the path to write to: add .npz or .safetensors, or make a directory of .npy files of it; {model} a folder with config.json
and model.safetensors. Each is one word, spaces and all. No shell reads the command: quotes group words, and |, >, * and $NAME
mean nothing. Ten lines of NumPy, C and JavaScript that write a dump are in gpt2/port/README.md; in NumPy:

  ids = np.load(sys.argv[1])                         # (T,)
  kept = {}                                          # any names: kept["q3"] = q, kept["after block 3"] = x
  logits = my_gpt2(ids, kept)
  np.savez(sys.argv[2], ids=ids, logits=logits, **kept)

With def build(): the weights are put in for you, as gpt2.load_into does. The file is run: diagnose only files you trust.

exit code: 0 equal, 1 it differs, 2 it could not be built or run"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help = "a Python file and the function in it that returns the module, or a dump of arrays"
    parser.add_argument("what", nargs="?", metavar="WHAT", help=help)
    parser.add_argument("--run", dest="program", metavar="CMD", help="in place of WHAT: a program that writes a dump")
    parser.add_argument("--model", default="shakespeare-mini", metavar="MODEL", help="the right weights (default: %(default)s)")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a Hub repository")
    add_offline(parser)
    help = "seconds for a file's import, build and first forward, or for a program (default: %(default)g)"
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help=help)


def run(args: argparse.Namespace) -> int:
    if not 0 < args.timeout < math.inf:
        raise InputError(f"--timeout {args.timeout}: give a number of seconds above 0, such as 60")
    diagnosis = _diagnosis(args)
    width = min(shutil.get_terminal_size((110, 24)).columns, 140)
    write_result(args.json, diagnosis.to_json, lambda: say(diagnosis.table(width)))
    return 0 if diagnosis.ok else 1


def _diagnosis(args: argparse.Namespace) -> "Diagnosis":
    if (args.what is None) == (args.program is None):
        both = "not both" if args.what else "such as port.py:build, dump.npz, or --run 'python port.py {ids} {out}'"
        raise InputError(f"give WHAT to diagnose or --run CMD, {both}")
    if args.program is not None:
        return _program(args)
    from gpt2.port.dump.reading import is_dump

    if is_dump(args.what):
        import gpt2

        with Status(f"reading {args.what}"):
            return gpt2.diagnose(args.what, args.model, revision=args.revision, offline=args.offline)
    from gpt2.port.diagnosis.runner import run

    with Status(f"running {args.what}"):
        return run(args.what, args.model, timeout=args.timeout, revision=args.revision, offline=args.offline)


def _program(args: argparse.Namespace) -> "Diagnosis":
    from gpt2.port.dump.programs import ProgramError, diagnose_program

    try:
        with Status(f"running {args.program}"):
            return diagnose_program(args.program, args.model, timeout=args.timeout, revision=args.revision, offline=args.offline)
    except ProgramError as error:
        for line in error.printed:
            print(f"  | {printable(line)}", file=sys.stderr)
        raise
