"""Model cards: a README.md that `huggingface_hub` fills from a record, and checks that a card claims no more than its record.

``gpt2-record.json`` holds what is known of a model: the run that trained it, the export that made its files.
Every figure of the card comes from there; `card.md.jinja` is its text. A card that a person has edited is left as it is.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from gpt2.checkpoint.export import Export
from gpt2.checkpoint.hub import COMMIT
from gpt2.checkpoint.names import DEFAULT, FLOATS, OFFICIAL, REPOSITORY, ModelName
from gpt2.checkpoint.official import official_name
from gpt2.checkpoint.saving import CARD as CARD
from gpt2.checkpoint.saving import sha256
from gpt2.config import GPT2Config
from gpt2.data.chat import ChatFormat
from gpt2.data.files import read, read_all, write
from gpt2.errors import InputError, printable

RECORD, CURVES, PLACEHOLDER = "gpt2-record.json", "curves.png", "OWNER/NAME"  # of the repository, until it is published
PARTS = ("base", "training", "export")  # of a record, each an object or nothing
FIGURES = re.compile(r"<!-- figures -->[\s\S]*?<!-- /figures -->")

Record = dict[str, Any]
_line = partial(printable, one_line=True)


def facts(folder: Path, format: str, dtype: str, config: GPT2Config, weights: Mapping[str, str]) -> Record:
    """Return what every record says of a model in ``folder``; ``weights`` are its files' sha256."""
    of_model = {"parameters": config.num_parameters(), "config": asdict(config)}
    chat = (found := ChatFormat.read(folder)) and asdict(found)
    return {"title": folder.resolve().name, "format": format, "weights": weights, "dtype": dtype, "chat": chat, **of_model}


def base_of(name: str) -> Record:
    """Return what a card says of the model ``name`` that another one was made from; its licence only where it is known."""
    from huggingface_hub import constants

    parsed, base = ModelName.parse(name), Record(name=name)
    official = None if parsed.local else official_name(parsed.base)
    if official or parsed.base == DEFAULT:
        base |= {"license": "apache-2.0" if official == "distilgpt2" else "mit", "language": "en"}
    elif parsed.local:
        inner = _own_record(parsed).get("base") or {}
        base |= {key: inner[key] for key in ("id", "license", "language") if re.fullmatch(r"[\w./-]+", str(inner.get(key, "")))}
        base["name"] = Path(parsed.base).expanduser().resolve().name  # the folders above it are private
    cached = Path(constants.HF_HUB_CACHE, f"models--{parsed.base.replace('/', '--')}")  # without it, a path that has moved
    if official or (not parsed.local and REPOSITORY.fullmatch(parsed.base) and cached.is_dir()):
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
    from huggingface_hub import EvalResult, ModelCard, ModelCardData
    from jinja2 import UndefinedError

    known = {"repo": PLACEHOLDER, "license": None, "language": None, "chat": None, **record}
    known |= {part: record.get(part) or {} for part in PARTS}
    base, run = known["base"], known["training"]
    task = "text-classification" if run.get("classes") else "text-generation"
    try:
        results, shown = list[EvalResult](), {} if known["export"].get("rounded") or not run else run["figures"]
        for kind, values in shown.items():
            texts = {"dataset_type": (run["datasets"] or ["text"])[0], "dataset_name": run["text"], "dataset_split": "held out"}
            metric = {
                "metric_type": kind,
                "metric_value": values[0],
                "metric_name": f"{kind.replace('_', ' ')}, {run['protocol']}",
            }
            args = {"context": run["context"], "protocol": run["protocol"], "tokens": run.get("val_tokens")}
            results.append(EvalResult(task_type=task, **texts, **metric, metric_args=args))
        data = ModelCardData(
            base_model=base.get("id"),
            datasets=run.get("datasets"),
            language=known["language"],
            library_name={"hf": "transformers", "gguf": "gguf"}.get(known["format"]),
            license=known["license"],
            metrics=["accuracy" if run.get("classes") else "perplexity"] if results else None,
            pipeline_tag=task,
            tags=["gpt2", "gpt2-toolkit"] + ["lora"] * bool(run and run["recipe"]["lora"]["r"]),
            **({"model_name": known["title"], "eval_results": results} if results else {}),
        )
        template = str(Path(__file__).with_name("card.md.jinja"))
        text = str(ModelCard.from_template(data, template, **known, **HELPERS))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, UndefinedError):
        raise InputError(f"{where}: lacks a part that the card needs; remove it, or write the folder again") from None
    return re.sub("\n{3,}", "\n\n", text).replace("\0", "\n").rstrip() + "\n"


def _code(text: str) -> str:
    return f"`{_line(text).replace('`', chr(39))}`"


def _fenced(text: str, kind: str) -> str:
    """Return a code block that its text cannot end. ``render`` turns each NUL, which no printable text has, into a line's end."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{kind}\n{printable(text)}\n{fence}".replace("\n", "\0")


def _named(base: Record) -> str:
    pinned = f" at {base['revision'][:12]}" if COMMIT.fullmatch(base.get("revision") or "") else ""
    return (f"[{base['id']}](https://huggingface.co/{base['id']})" if "id" in base else _code(base["name"])) + pinned


HELPERS: dict[str, Any] = {
    "line": _line,
    "code": _code,
    "fenced": _fenced,
    "named": _named,
    "json": partial(json.dumps, indent=1),
}


def write_card(directory: Path, record: Record) -> str:
    """Write the card and the record into ``directory``; return a remark, or ""."""
    files = contents(directory, record)
    write(directory, files)
    return "" if CARD in files else f"{directory / CARD} is not as gpt2 wrote it, so it is left as it is"


def contents(directory: Path, record: Record) -> dict[str, bytes]:
    """Return the record, and the card unless somebody wrote or edited the one there, by name of file; nothing is written."""
    text = render(record, directory / RECORD).encode()
    card = {} if edited_card(directory) is not None else {CARD: text}
    record = {**record, "card_sha256": hashlib.sha256(text).hexdigest() if card else None}
    return card | {RECORD: (json.dumps(record, indent=2) + "\n").encode()}


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
    return claims + [("other figures", block) for block in FIGURES.findall(text)], data.license
