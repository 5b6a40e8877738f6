"""Model cards: a README.md that the Hub understands, rendered from a record, and checked against it before it is published.

``gpt2-record.json`` holds what is known of a model: the run that trained it, the export that made its files, what was measured.
Every figure of the card comes from there (:mod:`gpt2.checkpoint.card_text`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2.checkpoint.cache import storage
from gpt2.checkpoint.card_text import BLOCKS, Record, block, pattern, render, repository, results
from gpt2.checkpoint.names import DEFAULT, OFFICIAL, REPOSITORY, ModelName
from gpt2.checkpoint.saving import sha256, write_file
from gpt2.errors import InputError

if TYPE_CHECKING:
    from gpt2.checkpoint.export import Export

CARD, RECORD = "README.md", "gpt2-record.json"
LICENCES = {name: "mit" for name in OFFICIAL} | {"distilgpt2": "apache-2.0", DEFAULT: "mit"}
STORED = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}  # GGUF's and llm.c's types


def base_of(name: str) -> Record:
    """Return what a card says of the model ``name`` that another one was made from; its licence only where it is known."""
    parsed = ModelName.parse(name)
    official = next((short for short, repo in OFFICIAL.items() if parsed.base in (short, repo)), None)
    base: Record = {"name": name}
    if official or parsed.base == DEFAULT:
        base |= {"license": LICENCES[official or DEFAULT], "language": "en"}
    if parsed.local and parsed.base != DEFAULT:
        path = Path(parsed.base).expanduser()
        kept = _own_record(path)
        inner = kept.get("base") or {}
        base |= {key: inner[key] for key in ("id", "license", "language") if re.fullmatch(r"[\w./-]+", str(inner.get(key, "")))}
        base["name"] = path.resolve().name  # the folders above it are private
        if isinstance(weights := kept.get("weights"), dict):
            base["sha256"] = next(iter(weights.values()), None)
    elif official or (REPOSITORY.fullmatch(parsed.base) and storage(parsed.base).is_dir()):  # not a path that has moved
        base |= {"id": OFFICIAL.get(official or "", parsed.base), "revision": parsed.revision}
    return {key: value for key, value in base.items() if value is not None}


def of_export(done: Export, revision: str | None, command: str) -> Record:
    """Return the record of exported files, with the training record of their source if it has one."""
    source = ModelName.parse(done.model, revision=revision)
    path = Path(source.base).expanduser()
    kept = _own_record(path) if source.local and source.base != DEFAULT else {}
    run = kept.get("training")
    base = kept.get("base") if run else base_of(done.model if revision is None else f"{done.model}@{revision}")
    weights = {file.name: file.sha256 for file in done.files if file.name.endswith((".safetensors", ".gguf", ".bin"))}
    wide = STORED.get(done.type, done.type)
    return {
        "title": Path(done.directory).resolve().name,
        "format": done.format,
        "weights": weights,
        "dtype": done.type,
        "parameters": done.config.num_parameters(),
        "config": {key: getattr(done.config, key) for key in ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size")},
        "base": base,
        "license": kept.get("license") if kept else (base or {}).get("license"),
        "language": kept.get("language") if kept else (base or {}).get("language"),
        "training": run and run | {"curves": False},
        "export": {"command": command, "notes": list(done.notes), "rounded": bool(run) and wide != kept["dtype"]},
    }


def write_card(directory: Path, record: Record) -> str:
    """Write the card and the record into ``directory``; return a remark, or ""."""
    files, remark = _card(directory, record)
    for name, content in files.items():
        write_file(directory / name, content)
    return remark


def for_repository(directory: Path, record: Record, repo: str) -> dict[str, bytes]:
    """Return the card and the record by file name, with the repository in place of OWNER/NAME; nothing is written."""
    with _complete(directory):
        return _card(directory, record | {"repo": repo})[0]


def _card(directory: Path, record: Record) -> tuple[dict[str, bytes], str]:
    """Return the card and the record by name of file, and a remark, or "".

    A README.md that somebody else wrote, or edited, is kept: only its blocks with figures, and the repository, are renewed.
    """
    remark, edited = "", edited_card(directory)
    text = render(record)
    if edited is not None:
        text, remark = edited.decode(errors="replace"), f"{directory / CARD} is not as gpt2 wrote it, so it is kept"
        text = text.replace("OWNER/NAME", repository(record))
        for name in BLOCKS:
            new = block(name, record)
            text = re.sub(pattern(name), lambda found, new=new: found[0] if found["fence"] else new, text)  # type: ignore[misc]
    own = {} if remark else {"card_sha256": hashlib.sha256(text.encode()).hexdigest()}
    kept = {key: value for key, value in record.items() if key != "card_sha256"} | own
    return {CARD: text.encode(), RECORD: (json.dumps(kept, indent=2) + "\n").encode()}, remark


def edited_card(directory: Path) -> bytes | None:
    """Return the README.md in ``directory`` if somebody wrote or edited it. Raises InputError: the record is damaged."""
    content = (directory / CARD).read_bytes() if (directory / CARD).is_file() else None
    written = (read_record(directory) or {}).get("card_sha256")
    return None if content is None or hashlib.sha256(content).hexdigest() == written else content


def read_record(directory: Path) -> Record | None:
    """Return the record in a model's folder, or None. Raises InputError: it is damaged."""
    path = directory / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError):
        record = None
    parts = ("weights", "base", "training", "export", "measured")
    if not isinstance(record, dict) or not all(isinstance(record.get(name) or {}, dict) for name in parts):
        raise InputError(f"{path}: not a record that gpt2 wrote; remove it, or write the folder again")
    return record


def _own_record(directory: Path) -> Record:
    """Return the record in a model's folder; {} if there is none, or if it is of other weights than the folder's."""
    record = read_record(directory) or {}
    weights = record.get("weights") or {}
    if not all((directory / name).is_file() and sha256(directory / name) == digest for name, digest in weights.items()):
        return {}
    if record:
        with _complete(directory):
            render(record)
    return record


@contextlib.contextmanager
def _complete(directory: Path) -> Iterator[None]:
    """Turn what a record lacks into an InputError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        raise InputError(
            f"{directory / RECORD}: lacks a part that the card needs; remove it, or write the folder again"
        ) from None


def check(folder: Path, hashes: Mapping[str, str]) -> Iterator[str]:
    """Yield remarks on the card in ``folder``, whose files have these hashes.

    Raises InputError: the card cannot be read, or it claims figures or a base that the record does not have, or the record is of
    other weights.
    """
    if CARD not in hashes:
        yield f"there is no {CARD}: the model will have an empty page"
        return
    from huggingface_hub import ModelCard, ModelCardData
    from yaml import YAMLError

    text = (folder / CARD).read_text(encoding="utf-8", errors="replace")
    try:
        claimed = ModelCard(text).data if text.startswith("---") else None
        assert claimed is None or isinstance(claimed, ModelCardData)
    except (YAMLError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{folder / CARD}: its metadata cannot be read ({' '.join(str(error).split())[:160]})") from None
    record = read_record(folder)
    if record is None:
        claims = claimed is not None and claimed.eval_results
        yield f"there is no {RECORD}" + (", so nothing supports the figures of the card" if claims else "")
        return
    for name, digest in (record.get("weights") or {}).items():
        if hashes.get(name) != digest:
            raise InputError(f"{folder}: {RECORD} is of another {name}; remove it and {CARD}, or write the model again")
    with _complete(folder):
        wanted = {(result.metric_type, result.metric_value) for result in results(record)}
        blocks = {name: block(name, record) for name in BLOCKS}
    for result in (claimed.eval_results or []) if claimed else []:
        if (result.metric_type, result.metric_value) not in wanted:
            raise InputError(
                f"{folder / CARD}: claims {result.metric_type} {result.metric_value}, and {RECORD} has no such figure; correct it"
            )
    base = (record.get("base") or {}).get("id")
    if claimed and claimed.base_model is not None and claimed.base_model != base:
        raise InputError(f"{folder / CARD}: claims base_model {claimed.base_model}, and {RECORD} says {base}; correct the card")
    for name in BLOCKS:
        if any(found[0] != blocks[name] for found in re.finditer(pattern(name), text) if not found["fence"]):
            raise InputError(f"{folder / CARD}: its part {name!r} is not what {RECORD} says; correct the card")
    if claimed is None:
        yield f"{CARD} has no metadata block"
    elif claimed.license is None:
        yield f"the card states no licence: add 'license: ...' to the first lines of {CARD} if you may grant one"
