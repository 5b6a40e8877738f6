"""Model cards: a README.md that the Hub understands, rendered from a record, and checked against it before it is published.

``gpt2-record.json`` holds what is known of a model: the run that trained it, the export that made its files, what was measured.
Every figure of the card comes from there; `card.md.jinja` is its text.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2.checkpoint.cache import COMMIT, official_name, storage
from gpt2.checkpoint.names import DEFAULT, OFFICIAL, REPOSITORY, ModelName
from gpt2.checkpoint.saving import CARD as CARD
from gpt2.checkpoint.saving import sha256
from gpt2.data.chat import ChatFormat
from gpt2.data.files import read, read_all, write
from gpt2.errors import InputError, printable

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

    from gpt2.checkpoint.export import Export
    from gpt2.config import GPT2Config

RECORD, CURVES = "gpt2-record.json", "curves.png"
LICENCES = {name: "mit" for name in OFFICIAL} | {"distilgpt2": "apache-2.0", DEFAULT: "mit"}
STORED = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}  # GGUF's and llm.c's types
PARTS = ("base", "training", "export", "measured")  # of a record, each an object or nothing
# Kind of figure -> its row in the card, its name in the metadata, its digits after the point.
METRICS = {
    "accuracy": ("accuracy", "accuracy", 4),
    "loss": ("loss, nats per {each}", "cross-entropy, nats per {each}", 4),
    "perplexity": ("perplexity", "perplexity per {each}", 2),
    "bits_per_byte": ("bits per byte", "bits per UTF-8 byte", 4),
}
TASKS = ("text-generation", "text-classification")  # without classes, and with
# The parts that are rewritten in a card that a person has edited. They are no part of a fenced block.
BLOCK = re.compile(
    r"^(?P<fence>```+)[\s\S]*?\n(?P=fence)$|^<!-- (?P<name>figures|measured) -->\n[\s\S]*?\n<!-- /(?P=name) -->", re.MULTILINE
)

Record = dict[str, Any]


def facts(folder: Path, format: str, dtype: str, config: GPT2Config, weights: Mapping[str, str]) -> Record:
    """Return what every record says of a model in ``folder``; ``weights`` are its files' sha256."""
    sizes = ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size")
    of_model = {"parameters": config.num_parameters(), "config": {key: getattr(config, key) for key in sizes}}
    chat = (found := ChatFormat.read(folder)) and asdict(found)
    return {"title": folder.resolve().name, "format": format, "weights": weights, "dtype": dtype, "chat": chat, **of_model}


def base_of(name: str) -> Record:
    """Return what a card says of the model ``name`` that another one was made from; its licence only where it is known."""
    parsed = ModelName.parse(name)
    official, base = official_name(parsed.base), Record(name=name)
    if official or parsed.base == DEFAULT:
        base |= {"license": LICENCES[official or DEFAULT], "language": "en"}
    if parsed.local and parsed.base != DEFAULT:
        kept = _own_record(path := Path(parsed.base).expanduser())
        inner = kept.get("base") or {}
        base |= {key: inner[key] for key in ("id", "license", "language") if re.fullmatch(r"[\w./-]+", str(inner.get(key, "")))}
        base["name"] = path.resolve().name  # the folders above it are private
        base["sha256"] = next(iter(kept.get("weights", {}).values()), None)
    elif official or (REPOSITORY.fullmatch(parsed.base) and storage(parsed.base).is_dir()):  # not a path that has moved
        base |= {"id": OFFICIAL.get(official or "", parsed.base), "revision": parsed.revision}
    return {key: value for key, value in base.items() if value is not None}


def of_export(done: Export, revision: str | None, command: str) -> Record:
    """Return the record of exported files, with the training record of their source if it has one."""
    source = ModelName.parse(done.model, revision=revision)
    kept = _own_record(Path(source.base).expanduser()) if source.local and source.base != DEFAULT else {}
    run = kept.get("training") or {}
    run = {} if run.get("classes") else run  # an export is the language model, without the head for classes
    base = kept.get("base") if run else base_of(done.model if revision is None else f"{done.model}@{revision}")
    weights = {file.name: file.sha256 for file in done.files if file.name.endswith((".safetensors", ".gguf", ".bin"))}
    rounded = bool(run) and STORED.get(done.type, done.type) != kept["dtype"]
    return {
        **facts(Path(done.directory), done.format, done.type, done.config, weights),
        "base": base,
        **{key: (kept or base or {}).get(key) for key in ("license", "language")},
        "training": run and run | {"curves": False},
        "export": {"command": command, "notes": list(done.notes), "rounded": rounded},
    }


def never_improved(record: Record) -> bool:
    """Return whether the weights are those that the training began with, because no evaluation of later steps was better."""
    run = record.get("training") or {}
    return run.get("best_step") == 0 and len(run.get("evaluations") or ()) > 1


def figures(record: Record) -> dict[str, list[float]]:
    """Return the held-out figures of the model, each with the base's behind it, where the record has them."""
    run = record.get("training") or {}
    rows = {row["step"]: row for row in run.get("evaluations") or ()}
    begins = record.get("base") and not run.get("classes")  # a base has no head for classes
    shown = [rows[step] for step in (run.get("best_step"), 0 if begins else None) if step in rows]
    found = [row | ({} if "accuracy" in row else {"perplexity": math.exp(min(row["loss"], 700))}) for row in shown]
    kinds = [kind for kind in METRICS if found and kind in found[0]]
    return {kind: [round(row[kind], METRICS[kind][2]) for row in found] for kind in kinds}


def results(record: Record) -> list[EvalResult]:
    """Return the model's held-out figures with their protocol; none of an export in another dtype, which nobody has measured."""
    from huggingface_hub import EvalResult

    ours, run = figures(record), record.get("training") or {}
    if not ours or (record.get("export") or {}).get("rounded"):
        return []
    protocol = {key: run[name] for key, name in (("context", "context"), ("protocol", "protocol"), ("tokens", "val_tokens"))}
    shared: Record = {
        "task_type": TASKS[bool(run.get("classes"))],
        "dataset_type": run["datasets"][0] if run.get("datasets") else "text",
        "dataset_name": run["text"],
        "dataset_split": "held out",
        "metric_args": {key: value for key, value in protocol.items() if value},
    }
    each = "document" if run.get("classes") else "token"
    names = {kind: f"{METRICS[kind][1].format(each=each)}, {run['protocol']}" for kind in ours}
    return [EvalResult(metric_type=kind, metric_value=ours[kind][0], metric_name=names[kind], **shared) for kind in ours]


def render(record: Record, where: Path = Path(RECORD)) -> str:
    """Return the whole card: metadata, by the Hub's own library, and text. Raises InputError: the record lacks a part."""
    import jinja2
    from huggingface_hub import ModelCardData

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"line": _line, "code": _code, "fenced": _fenced, "named": _named, "table": _table}
    environment.filters |= {"json": lambda value: json.dumps(value, indent=1)}
    template = environment.from_string(Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8"))
    known = {"repo": "OWNER/NAME", "license": None, "chat": None, **record} | {part: record.get(part) or {} for part in PARTS}
    run, base = known["training"], known["base"]
    try:
        found, ours, classes = results(record), figures(record), run.get("classes") or []
        rows = [["", "this model", "the base model"][: 1 + len(ours["loss"])]] if ours else []
        for kind, values in ours.items():
            title, _, digits = METRICS[kind]
            rows += [[title.format(each="document" if classes else "token"), *(f"{value:.{digits}f}" for value in values)]]
        said = [["true class", *(f"said {_code(name)}" for name in classes)]]
        said += [[_code(classes[n]), *(f"{count:,}" for count in row)] for n, row in enumerate(run.get("confusion") or ())]
        data = ModelCardData(
            base_model=base.get("id"),
            datasets=run.get("datasets"),
            eval_results=found or None,
            model_name=record["title"] if found else None,
            language=record.get("language"),
            library_name={"hf": "transformers", "gguf": "gguf"}.get(record["format"]),
            license=record.get("license"),
            metrics=["accuracy" if classes else "perplexity"] if found else None,
            pipeline_tag=TASKS[bool(classes)],
            tags=["gpt2", "gpt2-toolkit"] + (["lora"] if run.get("lora") else []),
        )
        text = template.render(
            known,
            metadata=data.to_yaml(),
            figures=rows,
            classes=classes,
            confusion=said,
            best_loss=ours["loss"][0] if ours else math.inf,
            unchanged=never_improved(record),
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, jinja2.UndefinedError):
        raise InputError(f"{where}: lacks a part that the card needs; remove it, or write the folder again") from None
    return re.sub("\n{3,}", "\n\n", text).replace("\0", "\n")


def blocks(text: str) -> dict[str, str]:
    """Return the parts of a card that are rewritten when a person has edited it, by name."""
    return {found["name"]: found[0] for found in BLOCK.finditer(text) if found["name"]}


def _line(text: str) -> str:
    return printable(text, one_line=True)


def _code(text: str) -> str:
    return f"`{_line(text).replace('`', chr(39))}`"


def _fenced(text: str, kind: str) -> str:
    """Return a code block that its text cannot end. ``render`` turns each NUL, which no printable text has, into a line's end."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{kind}\n{printable(text)}\n{fence}".replace("\n", "\0")


def _named(base: Record) -> str:
    pinned = f" at {base['revision'][:12]}" if COMMIT.fullmatch(base.get("revision") or "") else ""
    return (f"[{base['id']}](https://huggingface.co/{base['id']})" if "id" in base else _code(base["name"])) + pinned


def _table(rows: Iterable[Iterable[object]]) -> str:
    head, *body = ([f" {_line(str(cell))}".rstrip() for cell in row] for row in rows)
    return "\n".join(f"|{' |'.join(cells)} |" for cells in (head, [" ---"] * len(head), *body))


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
        remark, new = f"{directory / CARD} is not as gpt2 wrote it, so it is kept", blocks(text)
        text = edited.decode(errors="replace").replace("OWNER/NAME", record.get("repo", "OWNER/NAME"))
        text = BLOCK.sub(lambda found: found[0] if found["fence"] else new.get(found["name"], ""), text)
    own = {} if remark else {"card_sha256": hashlib.sha256(text.encode()).hexdigest()}
    kept = {key: value for key, value in record.items() if key != "card_sha256"} | own
    return {CARD: text.encode(), RECORD: (json.dumps(kept, indent=2) + "\n").encode()}, remark


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


def _own_record(directory: Path) -> Record:
    """Return the record in a model's folder; {} if there is none, or if it is of other weights than the folder's."""
    record = read_record(directory) or {}
    weights = (record.get("weights") or {}).items()
    if not all((directory / name).is_file() and sha256(directory / name) == digest for name, digest in weights):
        return {}
    if record:
        render(record, directory / RECORD)  # raises
    return record


def check(folder: Path, hashes: Mapping[str, str]) -> Iterator[str]:
    """Yield remarks on the card in ``folder``, whose files have these hashes.

    Raises InputError: the card cannot be read, or it claims figures or a base that the record does not have, or the record is of
    other weights.
    """
    if CARD not in hashes:
        yield f"there is no {CARD}: the model will have an empty page"
        return
    path, text, record = folder / CARD, read(folder / CARD).decode(errors="replace"), read_record(folder)
    from huggingface_hub import ModelCard, ModelCardData
    from yaml import YAMLError

    try:
        claimed = ModelCard(text).data if text.startswith("---") else ModelCardData()
        assert isinstance(claimed, ModelCardData)
    except (YAMLError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: its metadata cannot be read ({' '.join(str(error).split())[:160]})") from None
    claims = [(result.metric_type, result.metric_value) for result in claimed.eval_results or ()]
    if record is None:
        yield f"there is no {RECORD}" + (", so nothing supports the figures of the card" if claims else "")
        return
    if never_improved(record):
        yield "the weights are the initial ones, unchanged: no step of the run was better than they are"
    for name, digest in (record.get("weights") or {}).items():
        if hashes.get(name) != digest:
            raise InputError(f"{folder}: {RECORD} is of another {name}; remove it and {CARD}, or write the model again")
    due, base = blocks(render(record, folder / RECORD)), (record.get("base") or {}).get("id")
    stated = [(result.metric_type, result.metric_value) for result in results(record)]
    if false := [f"{kind} {value}" for kind, value in claims if (kind, value) not in stated]:
        raise InputError(f"{path}: claims {false[0]}, and {RECORD} has no such figure; correct it")
    if claimed.base_model not in (None, base):
        raise InputError(f"{path}: claims base_model {claimed.base_model}, and {RECORD} says {base}; correct the card")
    for found in BLOCK.finditer(text):
        if (name := found["name"]) and found[0] != due.get(name, ""):
            raise InputError(f"{path}: its part {name!r} is not what {RECORD} says; correct the card")
    if claimed.license is None:
        yield f"the card states no licence: add 'license: ...' to the first lines of {CARD} if you may grant one"
