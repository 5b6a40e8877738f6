"""Model cards: a README.md that `huggingface_hub` fills from a :class:`CardFacts`; one that a person has edited is left alone.

The last line has the sha256 of what is above it: so an edited card is known.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpt2.checkpoint.export import Export
from gpt2.checkpoint.names import DEFAULT, OFFICIAL, REPOSITORY, ModelName
from gpt2.checkpoint.official import official_name
from gpt2.checkpoint.saving import CARD
from gpt2.config import GPT2Config
from gpt2.data.chat import ChatFormat
from gpt2.data.files import read, write
from gpt2.errors import InputError, printable, user_path

CURVES, PLACEHOLDER = "curves.png", "OWNER/NAME"  # of the repository, until it is published
WEIGHTS = re.compile(r"^- `(.+)`, sha256 `(\w{64})`$", re.MULTILINE)
MARK = re.compile(r"(?s)(.*)<!-- gpt2-toolkit wrote this: sha256 (\w{64}) -->\n")


@dataclass(frozen=True)
class Base:
    """The model that another one was made from: a name to show; repository, revision and licence where they are known."""

    name: str
    id: str | None = None
    revision: str | None = None
    license: str | None = None

    @classmethod
    def of(cls, name: str) -> "Base":
        """Return the base that a MODEL's name is; of a path only its last part, because the folders above it are private."""
        parsed = ModelName.parse(name)
        official = official_name(parsed.base)
        if parsed.base == DEFAULT:
            return cls(name, license="mit")
        if parsed.local or not (official or REPOSITORY.fullmatch(parsed.base)):
            return cls(user_path(parsed.base).resolve().name if parsed.local else name)
        license = {None: None, "distilgpt2": "apache-2.0"}.get(official, "mit")
        return cls(name, OFFICIAL.get(official or "", parsed.base), parsed.revision, license)


@dataclass(frozen=True)
class Training:
    """What a run says of its best model. ``figures`` by name: the model's, then the base's if that was measured too."""

    command: str
    settings: str  # as the TOML file that the command names
    text: str
    dataset: str | None  # of the Hub
    protocol: str
    figures: dict[str, list[float]]
    classes: list[str]  # a line for each
    unchanged: bool
    sample: str | None
    facts: list[str]  # other lines


@dataclass(frozen=True)
class CardFacts:
    """What a card says of a model's files; ``weights`` has their sha256. Without ``training`` it is a conversion of ``base``."""

    title: str
    format: str
    dtype: str
    weights: Mapping[str, str]
    config: GPT2Config
    chat: ChatFormat | None
    base: Base | None
    notes: tuple[str, ...] = ()
    training: Training | None = None


def of_export(done: Export, revision: str | None) -> CardFacts:
    """Return the record of exported files."""
    folder, base = Path(done.directory).resolve(), Base.of(done.model if revision is None else f"{done.model}@{revision}")
    weights = {file.name: file.sha256 for file in done.files if file.name.endswith((".safetensors", ".gguf", ".bin"))}
    return CardFacts(folder.name, done.format, done.type, weights, done.config, ChatFormat.read(folder), base, done.notes)


def render(record: CardFacts) -> str:
    """Return the whole card."""
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    run, base = record.training, record.base or Base("")
    task = "text-classification" if run and run.classes else "text-generation"
    data = ModelCardData(
        base_model=base.id,
        datasets=[run.dataset] if run and run.dataset else None,
        library_name={"hf": "transformers", "gguf": "gguf"}.get(record.format),
        license=base.license,
        pipeline_tag=task,
        tags=["gpt2", "gpt2-toolkit"],
    )
    if run:
        named = partial(EvalResult, task_type=task, dataset_type=run.dataset or "text", dataset_name=run.text)
        data.model_name, figures = record.title, ((kind, values[0]) for kind, values in run.figures.items())
        data.eval_results = [named(metric_type=k, metric_value=value, metric_name=f"{k}, {run.protocol}") for k, value in figures]
    known: dict[str, Any] = {**vars(record), "line": partial(printable, one_line=True), "code": _code, "fenced": _fenced}
    card = str(ModelCard.from_template(data, str(Path(__file__).with_name("card.md.jinja")), repo=PLACEHOLDER, **known))
    return _marked(re.sub("\n{3,}", "\n\n", card).replace("\0", "\n").rstrip() + "\n\n")


def _code(text: str) -> str:
    return f"`{printable(text, one_line=True).replace('`', chr(39))}`"


def _fenced(text: str, kind: str) -> str:
    """Return a code block that its text cannot end. ``render`` turns each NUL, which no printable text has, into a line's end."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{kind}\n{printable(text)}\n{fence}".replace("\n", "\0")


def _marked(text: str) -> str:
    return f"{text}<!-- gpt2-toolkit wrote this: sha256 {hashlib.sha256(text.encode()).hexdigest()} -->\n"


def _own(text: str) -> str | None:
    """Return what stands above a card's last line; None if a person wrote or edited the card."""
    mark = MARK.fullmatch(text)
    return mark[1] if mark and _marked(mark[1]) == text else None


def write_card(folder: Path, record: CardFacts) -> str:
    """Write the card into ``folder``, unless a person has edited the one there; return a remark on that, or ""."""
    if edited_card(folder) is not None:
        return f"{folder / CARD} is not as gpt2 wrote it, so it is left as it is"
    write(folder, {CARD: render(record)})
    return ""


def remark_of(write: Callable[[], str]) -> str:
    """Return the remark of a function that writes a card, or why none was written: the model is there, which must be told."""
    try:
        return write()
    except InputError as error:
        return f"no model card was written: {error}"


def edited_card(folder: Path) -> bytes | None:
    """Return the README.md in ``folder`` if somebody wrote or edited it."""
    content = read(folder / CARD) if (folder / CARD).exists() else b""
    return content if content and _own(content.decode(errors="replace")) is None else None


def check(folder: Path, repo: str, hashes: Mapping[str, str]) -> tuple[str | None, list[str]]:
    """Return the card with ``repo`` in it if nobody has edited it, and remarks; ``hashes`` are of the folder's files.

    Raises InputError: the card is of other weights.
    """
    if CARD not in hashes:
        return None, [f"there is no {CARD}: the model will have an empty page"]
    text = read(folder / CARD).decode(errors="replace")
    for name, digest in WEIGHTS.findall(text):
        if hashes.get(name) != digest:
            raise InputError(f"{folder / CARD} is of another {name}; remove it, or write the model again")
    licensed = re.match(r"\s*---\n(?:(?!---\n).*\n)*?license:", text)
    notes = [] if licensed else [f"the card states no licence: if you may grant one, add 'license: ...' to {CARD}'s first lines"]
    if (own := _own(text)) is None:
        return None, [*notes, f"{CARD} is not as gpt2 wrote it, and is sent as it is, its figures unchecked"]
    return _marked(own.replace(PLACEHOLDER, repo)), notes
