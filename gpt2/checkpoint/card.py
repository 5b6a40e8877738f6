"""Model cards: a README.md that the Hub understands, filled from a record, and checked against it before it is published.

``gpt2-record.json`` holds what is known of a model: the run that trained it, the export that made its files, what was measured.
Every figure of the card comes from there; `card.md.jinja` is its text.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from gpt2.checkpoint.cache import COMMIT, official_name, storage
from gpt2.checkpoint.export import Export
from gpt2.checkpoint.names import DEFAULT, FLOATS, OFFICIAL, REPOSITORY, ModelName
from gpt2.checkpoint.saving import CARD as CARD
from gpt2.checkpoint.saving import sha256
from gpt2.config import GPT2Config
from gpt2.data.chat import ChatFormat
from gpt2.data.files import read, read_all, write
from gpt2.errors import InputError, printable

RECORD, CURVES = "gpt2-record.json", "curves.png"
PARTS = ("base", "training", "export", "measured")  # of a record, each an object or nothing
# The parts that are rewritten in a card that a person has edited. They are no part of a fenced block.
BLOCK = re.compile(
    r"^(?P<fence>```+)[\s\S]*?\n(?P=fence)$|^<!-- (?P<name>figures|measured) -->\n[\s\S]*?\n<!-- /(?P=name) -->", re.MULTILINE
)

Record = dict[str, Any]
_line = partial(printable, one_line=True)


def facts(folder: Path, format: str, dtype: str, config: GPT2Config, weights: Mapping[str, str]) -> Record:
    """Return what every record says of a model in ``folder``; ``weights`` are its files' sha256."""
    of_model = {"parameters": config.num_parameters(), "config": asdict(config)}
    chat = (found := ChatFormat.read(folder)) and asdict(found)
    return {"title": folder.resolve().name, "format": format, "weights": weights, "dtype": dtype, "chat": chat, **of_model}


def base_of(name: str) -> Record:
    """Return what a card says of the model ``name`` that another one was made from; its licence only where it is known."""
    parsed, base = ModelName.parse(name), Record(name=name)
    official = None if parsed.local else official_name(parsed.base)
    if official or parsed.base == DEFAULT:
        base |= {"license": "apache-2.0" if official == "distilgpt2" else "mit", "language": "en"}
    elif parsed.local:
        inner = _own_record(parsed).get("base") or {}
        base |= {key: inner[key] for key in ("id", "license", "language") if re.fullmatch(r"[\w./-]+", str(inner.get(key, "")))}
        base["name"] = Path(parsed.base).expanduser().resolve().name  # the folders above it are private
    # A name without a cache is a path that has moved.
    if official or (not parsed.local and REPOSITORY.fullmatch(parsed.base) and storage(parsed.base).is_dir()):
        base |= {"id": OFFICIAL.get(official or "", parsed.base)} | ({"revision": parsed.revision} if parsed.revision else {})
    return base


def of_export(done: Export, revision: str | None, command: str) -> Record:
    """Return the record of exported files, with the training record of their source if it has one."""
    kept = _own_record(ModelName.parse(done.model, revision=revision))
    run = kept.get("training") or {}
    if not run or run.get("classes"):  # an export is the language model, without the head for classes
        run, base = {}, base_of(done.model if revision is None else f"{done.model}@{revision}")
        kept = {"license": base.get("license"), "language": base.get("language")} | kept | {"base": base}
    weights = {file.name: file.sha256 for file in done.files if file.name.endswith((".safetensors", ".gguf", ".bin"))}
    rounded = (kept.get("export") or {}).get("rounded") or FLOATS.get(done.type, done.type) != kept.get("dtype")
    return {
        **{key: kept.get(key) for key in ("base", "license", "language")},
        **facts(Path(done.directory), done.format, done.type, done.config, weights),
        "training": run,
        "export": {"command": command, "notes": list(done.notes), "rounded": bool(run) and rounded},
    }


def render(record: Record, where: Path = Path(RECORD)) -> str:
    """Return the whole card. Raises InputError: the record lacks a part."""
    import jinja2
    from huggingface_hub import ModelCardData

    text = Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8")
    form = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    form.add_extension("jinja2.ext.do")
    form.filters.update(line=_line, code=_code, fenced=_fenced, named=_named, json=partial(json.dumps, indent=1))
    form.filters["metadata"] = lambda values: ModelCardData(**values).to_yaml()
    known = {"repo": "OWNER/NAME", "license": None, "language": None, "chat": None, **record}
    try:
        text = form.from_string(text).render(known | {part: record.get(part) or {} for part in PARTS})
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, jinja2.UndefinedError):
        raise InputError(f"{where}: lacks a part that the card needs; remove it, or write the folder again") from None
    return re.sub("\n{3,}", "\n\n", text).replace("\0", "\n")


def _code(text: str) -> str:
    return f"`{_line(text).replace('`', chr(39))}`"


def _fenced(text: str, kind: str) -> str:
    """Return a code block that its text cannot end. ``render`` turns each NUL, which no printable text has, into a line's end."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{kind}\n{printable(text)}\n{fence}".replace("\n", "\0")


def _named(base: Record) -> str:
    pinned = f" at {base['revision'][:12]}" if COMMIT.fullmatch(base.get("revision") or "") else ""
    return (f"[{base['id']}](https://huggingface.co/{base['id']})" if "id" in base else _code(base["name"])) + pinned


def write_card(directory: Path, record: Record) -> str:
    """Write the card and the record into ``directory``; return a remark, or ""."""
    files, remark = contents(directory, record)
    write(directory, files)
    return remark


def contents(directory: Path, record: Record) -> tuple[dict[str, bytes], str]:
    """Return the card and the record by name of file, and a remark, or ""; nothing is written.

    A README.md that somebody else wrote, or edited, is kept: only its blocks with figures, and the repository, are renewed.
    """
    remark, edited, text = "", edited_card(directory), render(record, directory / RECORD)
    if edited is not None:
        remark = f"{directory / CARD} is not as gpt2 wrote it, so it is kept"
        due = {found["name"]: found[0] for found in BLOCK.finditer(text) if found["name"]}
        text = edited.decode(errors="replace").replace("OWNER/NAME", record.get("repo", "OWNER/NAME"))
        text = BLOCK.sub(lambda found: found[0] if found["fence"] else due.get(found["name"], ""), text)
    record = {**record, "card_sha256": None if remark else hashlib.sha256(text.encode()).hexdigest()}
    return {CARD: text.encode(), RECORD: (json.dumps(record, indent=2) + "\n").encode()}, remark


def edited_card(directory: Path) -> bytes | None:
    """Return the README.md in ``directory`` if somebody wrote or edited it. Raises InputError: the record is damaged."""
    if not (directory / CARD).exists():
        return None
    content, written = read(directory / CARD), (read_record(directory) or {}).get("card_sha256")
    return None if hashlib.sha256(content).hexdigest() == written else content


def read_record(directory: Path) -> Record | None:
    """Return the record in a model's folder, or None. Raises InputError: it is damaged."""
    path = directory / RECORD
    try:
        record = json.loads(read_all(path))
    except (FileNotFoundError, NotADirectoryError):  # also of a module's file
        return None
    except (OSError, ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or not all(isinstance(record.get(name) or {}, dict) for name in ("weights", *PARTS)):
        raise InputError(f"{path}: not a record that gpt2 wrote; remove it, or write the folder again")
    return record


def _own_record(name: ModelName) -> Record:
    """Return the record in a local model's folder; {} if there is none, or if it is of other weights than the folder's."""
    folder = Path(name.base).expanduser()
    record = (name.local and name.base != DEFAULT and read_record(folder)) or {}
    weights = (record.get("weights") or {}).items()
    if not record or not all((folder / file).is_file() and sha256(folder / file) == digest for file, digest in weights):
        return {}
    render(record, folder / RECORD)  # raises
    return record


def check(folder: Path, hashes: Mapping[str, str]) -> Iterator[str]:
    """Yield remarks on the card in ``folder``, whose files have these hashes.

    Raises InputError: the card cannot be read, or claims figures or a base that the record does not have, or the record is of
    other weights.
    """
    if CARD not in hashes:
        yield f"there is no {CARD}: the model will have an empty page"
        return
    path, record = folder / CARD, read_record(folder)
    claims, license = _claims(read(path).decode(errors="replace"), path)
    if record is None:
        yield f"there is no {RECORD}" + (", so nothing supports what the card claims" if claims else "")
        return
    if (record.get("training") or {}).get("unchanged"):
        yield "the weights are the initial ones, unchanged: no step of the run was better than they are"
    for name, digest in (record.get("weights") or {}).items():
        if hashes.get(name) != digest:
            raise InputError(f"{folder}: {RECORD} is of another {name}; remove it and {CARD}, or write the model again")
    known, _ = _claims(render(record, folder / RECORD), path)
    if unknown := [what for what, text in claims if (what, text) not in known]:
        raise InputError(f"{path}: claims {unknown[0]}, which {RECORD} does not say; correct the card")
    if license is None:
        yield f"the card states no licence: add 'license: ...' to the first lines of {CARD} if you may grant one"


def _claims(text: str, path: Path) -> tuple[list[tuple[str, str]], str | None]:
    """Return what a card says of figures and base: each claim's name for the user, and its text; and the licence."""
    from huggingface_hub import ModelCard
    from yaml import YAMLError

    try:
        data: Any = ModelCard(text if text.lstrip().startswith("---") else f"---\n\n---\n{text}").data
    except (YAMLError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: its metadata cannot be read ({' '.join(str(error).split())[:160]})") from None
    claims = [(f"{result.metric_type} {result.metric_value}", "") for result in data.eval_results or ()]
    claims += [(f"base_model {data.base_model}", "")] if data.base_model is not None else []
    blocks = [(f"other figures in its part {found['name']!r}", found[0]) for found in BLOCK.finditer(text) if found["name"]]
    return claims + blocks, data.license
