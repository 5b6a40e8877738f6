"""What a page says of how a comparison was made: the command, the models with their files, the text, versions and machine."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from string import ascii_lowercase

from gpt2.comparison.sides.side import Model, Scored
from gpt2.comparison.sides.trace_side import PREFIX as TRACE_PREFIX
from gpt2.measure.environment import Environment
from gpt2.pages.reports import Section


def made_with(models: Sequence[Model], text: Scored, environment: Environment, **options: object) -> Section:
    """Return the section of a page that says how to make it again; of models in memory as a call in Python."""
    if not any(model.name.startswith(TRACE_PREFIX) for model in models):  # which hold their own text
        options = ({"on": text.name} if text.sha256 else {}) | {"tokens": text.tokens, **options}
    words = [word for name, value in options.items() for word in (f"--{name}", *([] if value is True else [str(value)]))]
    rows = [("command", shlex.join(["gpt2", "compare", *(model.name for model in models), *words, "--html", "report.html"]))]
    if any(model.in_memory for model in models):
        names = (letter if model.in_memory else repr(model.name) for letter, model in zip(ascii_lowercase, models, strict=False))
        rows = [("call", f"gpt2.compare({', '.join((*names, *(f'{name}={value!r}' for name, value in options.items())))})")]
    for model in models:
        size = "" if model.parameters is None else f"{model.parameters:,} parameters"
        known: tuple[object, ...] = f"run by {model.implementation}", model.dtype, size, model.revision, model.official
        rows.append((model.name, ", ".join(str(each) for each in known if each)))
        rows += [(f"{model.name}, {name}", f"sha256 {digest}") for name, digest in model.files.items()]
    rows += [("text", " ".join(filter(None, (text.name, text.sha256 and f"sha256 {text.sha256}", text.told))))]
    rows += [("versions", ", ".join(f"{name} {version}" for name, version in environment.versions.items()))]
    threads = f"{environment.threads} thread{'s' * (environment.threads != 1)}"
    rows += [("machine", f"{environment.device}, {threads}; {environment.machine}")]
    return Section("Made with", columns=("", ""), rows=rows, for_pages=True)
