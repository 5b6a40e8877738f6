"""Run the ``gpt2`` command. Exit codes: 0 success, 1 a check failed, 2 bad input, 130 interrupted."""

import argparse
import gc
import io
import os
import re
import signal
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn, get_type_hints

from gpt2 import __version__
from gpt2.cli import EARLY
from gpt2.cli.common import with_activation
from gpt2.errors import InputError, did_you_mean, out_of_memory, panicked, printable
from gpt2.options import add_options, read, require_sense
from gpt2.pages.streams import outlasting_readers

COMMANDS = {
    "info": "show config, parameters by part, files with sha256, and memory needed",
    "verify": "check that our model equals transformers' on the same weights",
    "compare": "measure how models differ, from weights to words",
    "explore": "look inside a forward pass: predictions by layer, attention by head",
    "diagnose": "say why somebody's GPT-2 is almost right: where, what, and the fix",
    "trace": "write every intermediate of the reference on a few tokens, to compare another program with",
    "generate": "continue a prompt, streamed to stdout",
    "train": "train from scratch or fine-tune, with a recipe",
    "export": "write a model as a directory that other programs open",
    "publish": "send a model and its card to the Hub, in one commit",
    "bench": "time loading, prefill, decode and a training step against transformers",
}


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with the arguments, and which command or option is alike."""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # of --help on a full disk, InputError
        super().exit(status, message)

    def error(self, message: str) -> NoReturn:
        if wrong := re.match(r"argument COMMAND: invalid choice: '(.*?)'", message, re.DOTALL):
            message = f"no command {wrong[1]!r}{did_you_mean(wrong[1], COMMANDS)}"
        elif wrong := re.match(r"unrecognized arguments: (--[^\s=]+)", message):
            message += did_you_mean(wrong[1], re.findall(r"--[\w-]+", self.format_help()))
        raise InputError(f"{message}; see {self.prog} --help")


class Help(argparse.RawDescriptionHelpFormatter):
    """Fits the examples to the terminal: prose is wrapped, and a comment without room in its column stands below its example."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines, prose = list[str](), list[str]()
        for line in [*text.splitlines(), ""]:
            if line and not line.startswith(" "):
                prose.append(line)
                continue
            lines += textwrap.wrap(" ".join(prose), width)
            prose.clear()
            parted = re.fullmatch(r"( *\S.*?) {2,}(\S.*)", line) if len(line) > width else None
            command, comment = parted.groups() if parted else (line, "")
            row, *options = re.split(r" (?=--)", command) if len(command) > width else [command]
            for option in options:
                if len(f"{row} {option}") > width - 2:
                    lines.append(f"{row} \\")
                    row = f"    {option}"
                else:
                    row = f"{row} {option}"
            lines += [row, *textwrap.wrap(comment, width, initial_indent=" " * 6, subsequent_indent=" " * 6)]
        return "\n".join(lines).rstrip()


def parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of a command line; of the commands, only the one that is given knows its options."""
    top = Parser(
        prog="gpt2",
        description="Load GPT-2 checkpoints, prove them equal to transformers, say where models differ and why, generate, and "
        "fine-tune.",
        epilog="A MODEL is shakespeare-mini (embedded, the default), gpt2, gpt2-medium, gpt2-large, gpt2-xl, distilgpt2, "
        "org/name[@revision], a local directory or file (safetensors, .bin, nanoGPT's ckpt.pt, OpenAI's TensorFlow files, Keras' "
        ".h5, Flax' .msgpack, GGUF, llm.c's), or random:SIZE[:SEED]; each may end in :bf16 and the like, and one that does not "
        "say its activation in :gelu_new. Exit codes: 0 success, 1 a check failed, 2 bad input, 130 interrupted.",
    )
    top.add_argument("--version", action="version", version=f"gpt2-toolkit {__version__}")
    help = 'print what makes the Tab key complete gpt2\'s commands, as in: eval "$(gpt2 --completion bash)"'
    top.add_argument("--completion", choices=("bash", "zsh", "fish"), help=help)
    commands = top.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    every = bool(words) and words[0].startswith("--c")  # --completion
    for name, help in COMMANDS.items():
        parser = commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.", formatter_class=Help)
        parser.set_defaults(parser=parser)
        if every or name in words:  # the others' files are not read
            parser.epilog = f"examples:\n{file_of(name).EXAMPLES}"
            add_options(parser, settings_of(name))
    return top


def file_of(command: str) -> ModuleType:
    return import_module(f"gpt2.cli.{command}_command")


def settings_of(command: str) -> type:
    """Return the dataclass that a command's ``run`` takes."""
    return get_type_hints(file_of(command).run)["args"]


def complete(top: argparse.ArgumentParser, shell: str) -> int:
    """Print a shell's script for the Tab key. Raises InputError: the package that writes it is missing."""
    try:
        shtab = import_module("shtab")
    except ModuleNotFoundError:
        raise InputError("--completion needs the package shtab; install it with pip install 'gpt2-toolkit[completion]'") from None
    print(shtab.complete(top, shell))
    return 0


def share_cores() -> None:
    """Let OpenMP's threads sleep while they wait, unless the user chose otherwise; call it before torch is imported.

    By default they spin: beside another busy process, for threads that do not run, and a command takes several times as long.
    libgomp, LLVM's and Intel's OpenMP all read OMP_WAIT_POLICY, once, when they are loaded.
    """
    if not any(name in os.environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


@outlasting_readers()
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, or print the help without one; return the exit code. Bad input prints one line on stderr."""
    share_cores()
    if argv is None:  # the process is ours; importing torch makes objects that stay: fewer searches through all of them
        gc.set_threshold(*gc.get_threshold()[:2], 1000)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a Windows pipe's code page lacks many characters
            stream.reconfigure(errors="backslashreplace")
    words, name = list(sys.argv[1:] if argv is None else argv), "gpt2"
    try:
        top = parser(words)
        args, unknown = top.parse_known_args(words)
        name = f"gpt2 {args.command}" if args.command else name
        if unknown:  # refused by the command's own parser, which knows its options
            getattr(args, "parser", top).error(f"unrecognized arguments: {' '.join(unknown)}")
        if args.command is None and args.completion is None:
            top.print_help()
            return 0
        if args.completion is not None:
            return complete(top, args.completion)
        settings: Any = with_activation(read(settings_of(args.command), args))
        require_sense(settings)
        code: int = file_of(args.command).run(settings)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        if argv is None and EARLY:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        print(f"{name}: interrupted", file=sys.stderr)
        if argv is None and EARLY:  # another Ctrl-C ends the process, without a traceback
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        return 130
    except BaseException as error:
        if (line := line_of(error)) is None:
            raise
        print(f"{name}: {line}", file=sys.stderr)
        return 2


def line_of(error: BaseException) -> str | None:
    """Return what a user is told of an error; None if it is a bug of ours, whose traceback is shown."""
    if isinstance(error, InputError):
        return str(error)
    if isinstance(error, MemoryError | RuntimeError | OSError) and out_of_memory(error):
        return "not enough memory for this; choose a smaller model, batch or context"
    if isinstance(error, OSError) and error.filename is not None:
        said = f"{error.filename}: {error.strerror}; see that it is there, and that you may use it"
        return printable(str(InputError(said)), one_line=True)
    if isinstance(error, FileNotFoundError):  # without a name, as os.getcwd's is, but also that of some libraries
        with suppress(FileNotFoundError):
            os.getcwd()
            return None
        return "the working folder has been deleted; change to another"
    return str(InputError(f"a library failed on these files ({error}); fetch or write them again")) if panicked(error) else None


if EARLY:
    signal.signal(signal.SIGINT, signal.default_int_handler)
