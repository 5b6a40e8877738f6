"""What a model may be called: the embedded one, the official ones, random weights, and a dtype behind any of them."""

import difflib
import os
import re
from collections.abc import Collection

from gpt2.config import OFFICIAL_SIZES, official_size
from gpt2.errors import InputError

DEFAULT = "shakespeare-mini"
OFFICIAL = {
    "gpt2": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
    "distilgpt2": "distilbert/distilgpt2",
}
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)  # org/name on the Hub
DTYPES = {
    **dict.fromkeys(("fp32", "float32", "f32"), "float32"),
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16", "f16"), "float16"),
    **dict.fromkeys(("fp64", "float64", "f64"), "float64"),
}

INT8 = "int8"  # not a dtype that weights come in: they are quantised on load


def did_you_mean(name: str, known: Collection[str]) -> str:
    """A hint at the known name that is written most like this one; "" if none is."""
    close = difflib.get_close_matches(name.lower(), known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def split_dtype(name: str | os.PathLike[str], *, runs: bool = False) -> tuple[str, str | None]:
    """``"gpt2:bf16"`` -> ``("gpt2", "bfloat16")``; no suffix -> ``(name, None)``. A path that exists is never split.

    ``runs`` says that the model is only to be run, for which ``:int8`` will do as well (:mod:`gpt2.int8`).

    Raises InputError for an unknown suffix, except on ``random:...``, whose fields :func:`parse_random` judges.
    """
    name = os.fspath(name)
    head, colon, suffix = name.rpartition(":")
    if not colon or "/" in suffix or "\\" in suffix or os.path.exists(os.path.expanduser(name)):
        return name, None
    if suffix in DTYPES and head != "random":
        return head, DTYPES[suffix]
    if suffix == INT8 and head != "random":
        if runs:
            return head, INT8
        raise InputError(f"{name}: eight bits are for running a model (generate, compare, bench); leave :int8 out here")
    if name.startswith("random:"):
        return name, None
    raise InputError(f"unknown dtype {suffix!r} in {name!r}: use one of {', '.join(DTYPES)}")


def parse_random(name: str) -> tuple[str, int] | None:
    """``"random:gpt2:7"`` -> ``("gpt2", 7)``; seed 0 unless given; None when the name does not start with ``random:``."""
    if not name.startswith("random:"):
        return None
    size, colon, seed = name.removeprefix("random:").partition(":")
    official_size(size)  # raises an InputError that lists the sizes
    if colon and not (seed.isascii() and seed.isdecimal() and len(seed) < 20):
        sizes = ", ".join(OFFICIAL_SIZES)
        raise InputError(f"bad seed {seed!r} in {name!r}: write random:SIZE:SEED with a whole number; sizes are {sizes}")
    return size, int(seed or 0)
