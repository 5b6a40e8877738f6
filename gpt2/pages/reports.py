"""JSON of all reports, and the base of those that a terminal and a page print."""

from __future__ import annotations

import io
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from gpt2.pages.sections import Section


def as_json(body: dict[str, Any], indent: int | None = 2) -> str:
    """Convert a report to JSON; infinity and NaN become the strings "inf", "-inf" and "nan"."""
    return json.dumps(_plain(body), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Printed(ABC):
    """A report that a terminal and a page print; subclasses yield its sections, the first of which names it."""

    command: ClassVar[str] = "gpt2 verify"  # that makes it
    script: ClassVar[str] = "report"  # of its page

    @abstractmethod
    def sections(self) -> Iterator[Section]:
        """Yield what is shown, from top to bottom."""

    def page_data(self) -> dict[str, Any]:
        """Return what the page's script needs."""
        return {}

    def print(self, console: Console) -> None:
        """Write the report to a rich console."""
        for section in self.sections():
            for part in section.printed():
                console.print(part, highlight=False)

    def table(self, width: int = 100) -> str:
        """Return the report as plain text, ``width`` columns wide (80 or more)."""
        from rich.console import Console

        written = io.StringIO()
        self.print(Console(file=written, width=width, color_system=None, force_jupyter=False))
        return written.getvalue()

    def html(self) -> str:
        """Return the report as one self-contained page."""
        from gpt2.pages.rendering import render

        data, (heading, *sections) = self.page_data(), self.sections()
        return render("report", self.script, data, command=self.command, heading=heading.note, sections=sections)

    def save_html(self, path: str | Path) -> None:
        """Write :meth:`html`. Raises InputError: the file cannot be written."""
        from gpt2.data.files import write_output

        write_output(path, self.html())


class Interrupted(KeyboardInterrupt):
    """Ctrl-C within a long check; ``report`` has what was found before."""

    def __init__(self, report: Any) -> None:
        super().__init__("interrupted")
        self.report = report
