"""The options of a command and the keywords of its function: the fields of one frozen dataclass, each written once."""

import argparse
import inspect
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial, wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, Union, cast, get_args, get_origin

from gpt2.config import SMALL
from gpt2.errors import InputError, did_you_mean, require_writable, user_path

S = TypeVar("S")
F = TypeVar("F", bound=Callable[..., Any])
OWN = (*SMALL, "recipe.json", "metrics.jsonl", "model.safetensors", "README.md")  # names in the folder of a model or a run
PICTURE = "Loss curves of gpt2 train plot"  # its title, by which such a picture is known
# How each kind of result begins, an .npz also ends: only such a file may be replaced by the next one.
RESULTS = (
    rb'\{\s*"json_version": \d',
    rb'.{8}\{"__metadata__":\{"format":"pt","about":"\{\\"format\\": \\"gpt2-toolkit ',  # a trace, or what --save keeps
    rb"PK.*about\.json\.npy.{22}\Z",
    rb"\xc7\xd7\x34\x01",  # llm.c's debug state, which has no room for a mark of ours
    rb"<!doctype html>\s<html.{,200}; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-",
    rb"(\x89PNG.*Title\0|<\?xml.*<title>)" + PICTURE.encode(),
)


def option(help: str, metavar: str | None = None, default: Any = None, **how: Any) -> Any:
    """Return a field that is ``--name`` on the command line. Its type says how it is read; a tuple is given again and again.

    ``how``: argparse's ``choices``, the ``least`` of a number, ``writes``, if a result goes there, or ``placed``, an argument
    without a name, of which a tuple takes the rest. A field that is made otherwise is a keyword of the function alone.
    """
    return field(default=default, metadata={"help": help, "metavar": metavar, **how})


def argument(help: str, metavar: str, default: Any = MISSING, **how: Any) -> Any:
    return option(help, metavar, default, placed=True, **how)


def device_option(what: str = "where the model runs", default: str | None = "cpu") -> Any:
    return option(f"{what}: cpu, cuda, cuda:1, mps, or auto for the first of cuda, mps and cpu that is here", "D", default)


def setting(override: str) -> tuple[str, str]:
    """Split ``key=value``. Raises InputError: it is something else."""
    key, separator, text = (part.strip() for part in override.partition("="))
    if not separator or not key:
        raise InputError(f"--set {override}: write key=value, as in optim.lr=3e-4")
    return key, text


def whole(text: str) -> int:
    """Read a whole number that fits 64 bits."""
    with suppress(ValueError):
        if abs(value := int(text)) < 2**63:
            return value
    raise argparse.ArgumentTypeError(f"invalid int value: {text[:40]!r}")


seed_option = partial(option, default=0, least=0)
revision_option = partial(option, "branch, tag or commit of a Hub repository", "REV")
offline_option = partial(option, "make no request; use what the cache holds", default=False)


@dataclass(frozen=True, kw_only=True)
class Command:
    """What every command takes; its help stands behind the command's own options."""

    json: str | None = option("write the result as JSON to FILE; - is stdout, and nothing else goes there", "FILE", writes=True)
    WITHOUT_EFFECT: ClassVar[dict[str, tuple[str, ...]]] = {}  # beside an option that is given: those that then have none


def flag_of(each: "Field[Any]") -> str:
    """Return what a field is called on the command line."""
    return each.metadata["metavar"] if "placed" in each.metadata else f"--{each.name.replace('_', '-')}"


def help_of(each: "Field[Any]") -> str:
    """Return what a field means, and its default if it has one."""
    default, help = each.default, str(each.metadata["help"])
    if default is MISSING or default is None or default is False or default == ():
        return help
    return f"{help} (default: {f'{default:g}' if isinstance(default, float) else default})".lstrip()


def add_options(parser: argparse.ArgumentParser, settings: type) -> None:
    """Add each field to a parser. What it parses holds only what was given; :func:`read` knows the defaults."""
    for each in sorted(fields(settings), key=lambda each: each.name == "json"):
        if "help" not in each.metadata:
            continue
        kind = each.type
        assert not isinstance(kind, str) or kind.startswith("str"), f"{each.name}: its type is written as a text"
        how: dict[str, Any] = {"help": help_of(each), "default": argparse.SUPPRESS}
        kinds, several, optional = get_args(kind) or (kind,), get_origin(kind) is tuple, each.default is not MISSING
        if kind is bool:
            how["action"] = "store_true"
        else:
            how |= {key: each.metadata[key] for key in ("metavar", "choices") if key in each.metadata}
            how["type"] = whole if int in kinds else float if float in kinds else None
        if "placed" in each.metadata:
            how |= {"nargs": "*" if several else "?"} if optional else {}
            parser.add_argument(each.name, **how)
            continue
        if several:
            how["action"] = "append"
        parser.add_argument(flag_of(each), dest=each.name, required=not optional, **how)


def read(settings: type[S], given: argparse.Namespace) -> S:
    """Return the settings that a parser of :func:`add_options` read."""
    names, values = {each.name for each in fields(settings)}, vars(given)  # type: ignore[arg-type]
    if any(v == [] or [] in v for v in values.values() if isinstance(v, list)):  # argparse drops it
        raise InputError("-- is no value of an option; give another one")
    return settings(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if name in names})


def require_sense(settings: Command) -> None:
    """Raise InputError: a number below its least, an option without effect, or an output that cannot be written."""
    for each in fields(settings):
        value, least = getattr(settings, each.name), each.metadata.get("least")
        if least is not None and value is not None and not value >= least:
            raise InputError(f"{flag_of(each)} {value}: give {least} or more")
    for mode, names in settings.WITHOUT_EFFECT.items():
        for each in changed(settings, mode):
            require_unused(settings, flag_of(each), names)
    require_outputs(settings)


def require_outputs(settings: Command) -> None:
    """Raise InputError: an output cannot be written, or would replace a file that is neither empty nor an earlier result."""
    outputs = [each for each in fields(settings) if "writes" in each.metadata]
    others = [vars(settings)[a.name] for a in fields(settings) if not {"prompt", "stop", "writes"} & {a.name, *a.metadata}]
    texts = [str(text) for value in others for text in (value if isinstance(value, tuple) else (value,))]
    words = [word for text in texts for word in (text, *re.split(r"[:=]|^(?:hf|llama\.cpp|ct2|onnx)/", text))]  # trace:FILE
    paths = (user_path(word) if word.startswith("~/") else word for word in words)
    read, taken = list(filter(os.path.exists, paths)), dict[Path, str]()
    written = [user_path(vars(settings)[each.name] or os.devnull) for each in outputs]
    folders = {Path(os.path.realpath(path)) for path in [*read, *written] if os.path.isdir(path)}
    for flag, metavar, given in ((flag_of(each), each.metadata["metavar"], getattr(settings, each.name)) for each in outputs):
        if given is None or (given == "-" and flag == "--json"):
            continue
        if given in ("-", ""):
            why = "-: only --json goes to stdout" if given else "is empty"
            raise InputError(f"{flag} {why}; give a path")
        if metavar == "FILE":
            require_writable(flag, given)
        place = Path(os.path.realpath(user_path(given)))
        if place.is_file() and any(map(place.samefile, read)):
            taken[place] = "is read too"
        elif not _is_result(place) if place.is_file() else place.name in OWN and folders & {*place.parents}:
            taken[place] = "is a model's or your own file"
        if use := taken.get(place):
            raise InputError(f"{flag} {given}: {use}, and would be lost; give another path")
        if place.is_file() or not place.exists():  # all may go to /dev/null
            taken[place] = f"is what {flag} writes"


def _is_result(path: Path) -> bool:
    """Return whether a file is empty, or begins (an .npz: and ends) as what a command writes."""
    with path.open("rb") as file:
        ends = file.read(1000)
        file.seek(max(0, path.stat().st_size - 300))
        ends += file.read()
    return not ends or re.match(b"|".join(RESULTS), ends, re.DOTALL) is not None


def require_unused(settings: Any, mode: str, names: Sequence[str]) -> None:
    """Raise InputError if one of the named fields is given, which has no effect with ``mode``."""
    for each in changed(settings, *names):
        raise InputError(f"{flag_of(each)} has no effect with {mode}; leave it out")


def changed(settings: Any, *names: str) -> "list[Field[Any]]":
    """Return those of the named fields that are not left at their defaults."""
    by_name = {each.name: each for each in fields(settings)}
    return [by_name[name] for name in names if getattr(settings, name) != by_name[name].default]


def pick(settings: Any, *names: str) -> dict[str, Any]:
    """Return the named settings, as a function takes them."""
    return {name: getattr(settings, name) for name in names}


KINDS: dict[Any, tuple[str, Any]] = {  # of a value: its words, and what is taken for it
    NoneType: ("None", NoneType),
    bool: ("True or False", Real | None),
    int: ("a whole number", Integral),
    float: ("a number", Real),
    str: ("a text", str),
    Path: ("a path", str | os.PathLike),
    Callable: ("a function", Callable),
}


def require_type(name: str, value: Any, kind: Any) -> Any:
    """Return a value; numbers of torch and NumPy become Python's. Raises InputError: another type, or a number that is too large.

    Lists, model names and annotations that are written as texts are left to the function's own check.
    """
    kinds = [get_origin(each) or each for each in (get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,))]
    if not all(isinstance(each, type) and each not in (list, Sequence, os.PathLike, inspect.Parameter.empty) for each in kinds):
        return value  # the function's own check has better words
    words, taken = zip(*(KINDS.get(each, (f"a {each.__name__}", each)) for each in kinds), strict=True)
    value = value.item() if getattr(value, "shape", None) == () and not isinstance(value, taken) else value
    if not isinstance(value, taken) or (isinstance(value, int) and abs(value) >= 2**64):
        shown = repr(value)[:60] if isinstance(value, str | Real | None) else f"of type {type(value).__name__}"
        raise InputError(f"{name} is {shown}; give {' or '.join(words)}")
    return bool(value) if bool in kinds else int(value) if isinstance(value, Integral) else value


def signed(function: F, settings: type | None = None) -> F:
    """Return a function that shows the fields as its keywords, in signature and docstring, in place of its ``**options``.

    Another keyword is a TypeError that names the function and the nearest one, a value of another type an InputError.
    """
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    keyword = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    more = [keyword(each.name, default=each.default, annotation=each.type) for each in (fields(settings) if settings else ())]
    known = {each.name: each for each in (*own, *more) if each.kind is not inspect.Parameter.VAR_POSITIONAL}

    @wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        for name, value in options.items():
            if name not in known:
                near = did_you_mean(name, known) or f"; it has {', '.join(known)}"
                raise TypeError(f"{function.__name__}() has no keyword {name!r}{near}")
            options[name] = require_type(f"{function.__name__}: {name}", value, known[name].annotation)
        return function(*args, **options)

    checked.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
    if settings:
        told = "".join(f"\n    {each.name}: {help_of(each)}" for each in fields(settings) if "help" in each.metadata)
        checked.__doc__ = f"{inspect.getdoc(function)}\n\nKeywords:{told}"
    return cast(F, checked)
