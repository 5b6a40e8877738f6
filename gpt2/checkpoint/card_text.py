"""The text of a model card: metadata and Markdown, from a model's record alone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gpt2.checkpoint.cache import COMMIT
from gpt2.errors import printable

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

CURVES = "curves.png"
BLOCK = "<!-- {0} -->\n{1}\n<!-- /{0} -->"  # parts that are rewritten in a card that a person has edited
BLOCKS = ("figures", "measured")
LIBRARIES = {"hf": "transformers", "gguf": "gguf"}

Record = dict[str, Any]


def figures(record: Record) -> dict[str, dict[str, float]]:
    """Return the held-out figures of the model ("this") and of its base ("base"), where the record has them."""
    run = record.get("training") or {}
    rows = run.get("evaluations") or []
    best = next((row for row in rows if row["step"] == run.get("best_step")), None)
    chosen = {"this": best, "base": rows[0] if rows and record.get("base") and rows[0]["step"] == 0 else None}
    return {
        who: {
            "loss": round(row["loss"], 4),
            "perplexity": round(math.exp(min(row["loss"], 700)), 2),
            "bits_per_byte": round(row["bits_per_byte"], 4),
        }
        for who, row in chosen.items()
        if row
    }


def render(record: Record) -> str:
    """Return the whole card: metadata and text."""
    title = printable(record["title"], one_line=True)
    parts = [f"# {title}", *_about(record), *([block("figures", record)] if figures(record) else [])]
    parts += [*_samples(record), *_usage(record), *_training(record), block("measured", record), *_limits(record)]
    return f"---\n{metadata(record)}\n---\n\n" + "\n\n".join(parts) + "\n"


def metadata(record: Record) -> str:
    """Return the metadata block in YAML, by the Hub's own library."""
    from huggingface_hub import ModelCardData

    base, run, form = record.get("base") or {}, record.get("training") or {}, record["format"]
    found = results(record)
    tags = ["gpt2", "gpt2-toolkit"] + (["lora"] if run.get("lora") else [])
    data = ModelCardData(
        base_model=base.get("id"),
        datasets=run.get("datasets"),
        eval_results=found or None,
        model_name=record["title"] if found else None,
        language=record.get("language"),
        library_name=LIBRARIES.get(form),
        license=record.get("license"),
        metrics=["perplexity"] if found else None,
        pipeline_tag="text-generation",
        tags=tags,
    )
    return data.to_yaml()


def results(record: Record) -> list[EvalResult]:
    """Return the model's held-out figures with their protocol; none of an export in another dtype, which nobody has measured."""
    from huggingface_hub import EvalResult

    ours = figures(record).get("this")
    if not ours or (record.get("export") or {}).get("rounded"):
        return []
    run = record["training"]
    protocol = {"context": run["context"], "protocol": run["protocol"]}
    protocol |= {"tokens": run["val_tokens"]} if run.get("val_tokens") else {}
    names = {
        "perplexity": "perplexity per token",
        "loss": "cross-entropy, nats per token",
        "bits_per_byte": "bits per UTF-8 byte",
    }
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=run["datasets"][0] if run.get("datasets") else "text",
            dataset_name=run["text"],
            dataset_split="held out",
            metric_type=kind,
            metric_value=ours[kind],
            metric_name=f"{name}, {run['protocol']}",
            metric_args=protocol,
        )
        for kind, name in names.items()
    ]


def pattern(name: str) -> str:
    """Return a regular expression of a part with its marks, or of a fenced block (``fence``), in which no part begins."""
    return rf"(?m)^(?P<fence>```+)[\s\S]*?\n(?P=fence)$|^<!-- {name} -->\n[\s\S]*?\n<!-- /{name} -->"


def block(name: str, record: Record) -> str:
    """Return a part between its marks."""
    return BLOCK.format(name, "\n\n".join(_figures(record) if name == "figures" else _measured(record)))


def _about(record: Record) -> Iterator[str]:
    base, run, export = (record.get(key) or {} for key in ("base", "training", "export"))
    config = record["config"]
    shape = f"{config['n_layer']} layers, {config['n_embd']} wide, {config['n_head']} heads, {config['n_positions']} positions"
    made = "A GPT-2"
    if run:
        made = "A GPT-2 fine-tuned from " + _name(base) if base else "A GPT-2 trained from scratch"
        made += f" on {_code(run['text'])}"
    elif export:
        made = f"{_name(base)}, converted"
    yield f"{made}: {record['parameters']:,} parameters ({shape}), stored in {record['dtype']}."
    if base.get("license"):
        yield f"The licence of {_name(base)} is {base['license']}." + (
            "" if record.get("license") else " This model states none."
        )


def _name(base: Record) -> str:
    pinned = f" at {base['revision'][:12]}" if COMMIT.fullmatch(base.get("revision") or "") else ""
    return (f"[{base['id']}](https://huggingface.co/{base['id']})" if "id" in base else _code(base["name"])) + pinned


def repository(record: Record) -> str:
    """Return the model's name on the Hub; OWNER/NAME before it is published."""
    return str(record.get("repo", "OWNER/NAME"))


def _usage(record: Record) -> Iterator[str]:
    repo = repository(record)
    yield "## Use"
    lines = [
        "import gpt2  # pip install gpt2-toolkit",
        "",
        f'model = gpt2.load("{repo}")  # this repository, or its folder',
        f'tok = gpt2.load_tokenizer("{repo}")',
        'ids = gpt2.generate(model, tok.encode("The "), max_new_tokens=50, seed=0)',
        "print(tok.decode(ids))",
    ]
    yield _fenced("\n".join(lines), "python")
    if record["format"] == "hf":
        yield f'Or with transformers: `pipeline("text-generation", "{repo}")`. `gpt2 verify {repo}` compares both.'
    elif record["format"] == "gguf":
        yield f"Or with llama.cpp: `llama-cli -hf {repo}`."


def _training(record: Record) -> Iterator[str]:
    run, export = record.get("training") or {}, record.get("export")
    if run:
        yield "## Training"
        recipe = run["recipe"]
        yield _fenced(run["command"], "sh")
        if run.get("preset"):
            yield f"{_code(run['preset'])} is a recipe of gpt2-toolkit; the settings after `--set` replace its own."
        rows = {
            "steps": f"{run['steps_done']:,} of {recipe['steps']:,}; this is step {run['best_step']:,}, the best",
            "a step": f"{recipe['batch_size']} windows of {run['context']} tokens, AdamW, rate {recipe['optim']['lr']:g}",
            "text": f"{_code(run['text'])}; held out: {run['held_out']}",
            "tokens of the text": f"sha256 `{run['text_sha256']}`",
            **{name: f"sha256 `{digest}`" for name, digest in run["weights"].items()},
            "made with": ", ".join(f"{name} {version}" for name, version in run["versions"].items()),
        }
        yield "\n".join(["| | |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in rows.items())])
        if run.get("curves"):
            yield f"![Loss by step: training thin, held out bold]({CURVES})"
        yield f"<details><summary>All settings</summary>\n\n{_fenced(json.dumps(recipe, indent=1), 'json')}\n\n</details>"
    if export:
        yield "## Conversion"
        yield f"{_code(export['command'])} wrote these files:"
        yield "\n".join(f"- `{name}`, sha256 `{digest}`" for name, digest in record["weights"].items())
        if export["notes"]:
            yield "\n".join(f"- {printable(note, one_line=True)}" for note in export["notes"])


def _figures(record: Record) -> Iterator[str]:
    found, run = figures(record), record.get("training") or {}
    if not found:
        return
    yield "## Held-out text"
    heads = [title for who, title in (("this", "this model"), ("base", "the base model")) if who in found]
    rows = [f"| | {' | '.join(heads)} |", f"| --- |{' --- |' * len(heads)}"]
    titles = (("loss", "loss, nats per token", 4), ("perplexity", "perplexity", 2), ("bits_per_byte", "bits per byte", 4))
    for kind, title, digits in titles:
        rows.append(f"| {title} | {' | '.join(f'{each[kind]:.{digits}f}' for each in found.values())} |")
    yield "\n".join(rows)
    tokens = f"{run['val_tokens']:,} tokens" if run.get("val_tokens") else "the held-out text"
    told = [f"Measured on {tokens}: {run['protocol']}; float32, no dropout."]
    if (record.get("export") or {}).get("rounded"):
        told.append("They were measured before the conversion rounded the weights.")
    told.append("Perplexities compare only between models with the same tokenizer; bits per byte always do.")
    yield " ".join(told)


def _measured(record: Record) -> Iterator[str]:
    measured = record.get("measured") or {}
    yield "## Checked"
    if not measured:
        yield "Not yet verified. `gpt2 publish --measure` compares the files with transformers and with the base."
    if verdict := measured.get("verify"):
        word = "EQUAL" if verdict["ok"] else "NOT EQUAL"
        yield f"`gpt2 verify`: **{word}** to transformers {verdict['transformers']} ({verdict['checks']})."
    if change := measured.get("compare"):
        yield f"What changed, by `{change['command'].replace('OWNER/NAME', repository(record))}`:"
        yield "\n".join(["| | |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in change["rows"].items())])


def _samples(record: Record) -> Iterator[str]:
    run = record.get("training") or {}
    if run.get("sample"):
        yield "## A sample"
        yield "Not selected: the text at that step, after the first held-out tokens (temperature 0.8, top-p 0.95)."
        yield _fenced(run["sample"], "text")


def _limits(record: Record) -> Iterator[str]:
    run, base = record.get("training") or {}, record.get("base")
    yield "## Limits"
    lines = [f"It reads at most {record['config']['n_positions']:,} tokens, and writes what is likely, not what is true."]
    if run:
        lines.append("The step was chosen by the same held-out text, so the figures are slightly optimistic.")
        if run["last_loss"] > figures(record)["this"]["loss"] + 1e-4:
            lines.append(f"Longer training made it worse: held-out loss {run['last_loss']:.4f} at step {run['steps_done']:,}.")
        if base:
            lines.append(f"It keeps the biases of {_name(base)}, and may repeat passages of its training text word for word.")
    if record.get("license") is None:
        lines.append("No licence is stated: whether you may use it depends on the text and on the base.")
    yield "\n".join(f"- {line}" for line in lines)


def _fenced(text: str, kind: str) -> str:
    """Return a code block that its text cannot end."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{kind}\n{printable(text)}\n{fence}"


def _code(text: str) -> str:
    return f"`{printable(text, one_line=True).replace('`', chr(39))}`"
