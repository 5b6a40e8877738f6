"""What the commands share: common arguments, and how each ends: with a page, JSON, or text."""

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from gpt2.checkpoint.names import DEFAULT
from gpt2.config import ACTIVATIONS
from gpt2.errors import InputError, printable, size, user_path
from gpt2.options import Command, argument, offline_option, option, require_outputs, revision_option
from gpt2.pages.streams import say

if TYPE_CHECKING:
    from gpt2.checkpoint.describe import File

S = TypeVar("S", bound=Any)
JSON_VERSION = 4  # rises when a key is removed or changes its meaning (AGENTS.md)


def set_option(own: str = "") -> Any:
    """Return ``--set``: the activation of a model, and the command's ``own`` settings, which it then reads itself."""
    help = f"{own}activation_function=NAME of a checkpoint that does not say it, such as nanoGPT's"
    return option(help, "KEY=VALUE", (), own=own)


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Command):
    """What every command takes that reads one model."""

    model: str = argument("which model", "MODEL", DEFAULT)
    revision: str | None = revision_option()
    set: tuple[str, ...] = set_option()
    offline: bool = offline_option()


def with_activation(settings: S) -> S:
    """Move ``--set activation_function=NAME`` into the names of the models. Raises InputError: no activation, or no setting."""
    key, by_name = "activation_function=", {each.name: each for each in fields(settings)}
    given = settings.set if "set" in by_name else ()
    chosen = [each.removeprefix(key) for each in given if each.startswith(key)]
    others = tuple(each for each in given if not each.startswith(key))
    if others and by_name["set"].metadata.get("own") == "":
        raise InputError(f"--set {others[0]}: the one setting here is {key}NAME; leave it out")
    for name in chosen:
        if name not in ACTIVATIONS:
            raise InputError(f"--set {key}{name}: is no activation known here; give one of {', '.join(ACTIVATIONS)}")
    if not chosen:
        return settings
    named = {name: model for name in ("model", "other", "init", "a", "b") if (model := getattr(settings, name, None))}
    for name, model in named.items():
        if name not in ("a", "b") or os.path.exists(user_path(model.removeprefix("hf/"))):  # compare takes more than models
            named[name] = ":".join([model, *chosen])
    return replace(settings, set=others, **named)


def finish(args: Command, result: Any, text: str | None = None, code: int | None = None) -> int:
    """Write the page and the JSON of a result where ``args`` say, or show it; return the exit code, by default from its ``ok``.

    A result is a report, which prints itself unless a ``text`` stands for it; or the object of --json.
    """
    if html := getattr(args, "html", None):
        result.save_html(html)
        wrote(html)
    if args.json is not None:
        body = result if isinstance(result, dict) else json.loads(result.to_json())
        written = json.dumps({"json_version": JSON_VERSION, **body}, indent=2)
        if args.json == "-":
            text = written
        else:
            from gpt2.data.files import write_output

            require_outputs(args)  # again: the command may have written a file of that name
            write_output(args.json, written + "\n", "--json ")
    if text is None:
        from gpt2.pages.terminal import Terminal

        result.print(Terminal(highlight=False))
    elif text:
        say(text)
    return int(not getattr(result, "ok", True)) if code is None else code


def wrote(path: str, remark: str = "") -> None:
    """Report on stderr what was written."""
    print(f"wrote {printable(path, one_line=True)}{remark}", file=sys.stderr)


def note(text: str) -> None:
    """Print a remark on stderr."""
    print(f"note: {printable(text)}", file=sys.stderr)


def listed(files: "Iterable[File]", notes: Iterable[str], digits: int = 64) -> list[str]:
    """Return the lines of files, with ``digits`` of their hash, and of notes."""
    dots = "..." if digits < 64 else ""
    lines = [f"  {file.name:33} {size(file.size):>9}  sha256 {file.sha256[:digits]}{dots}" for file in files]
    return lines + [f"  note: {note}" for note in notes]
