"""A report is a list of sections; a terminal and a page print the same ones. JSON is made of the results themselves."""

import io
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


@dataclass(frozen=True)
class Styled:
    """A text with a style: words of rich's, such as "bold red", which are also classes of the page's style sheet."""

    text: str
    style: str


bold, dim, yellow = (partial(Styled, style=style) for style in ("bold", "dim", "yellow"))
Line = str | Styled | Sequence[str | Styled]  # untrusted text: nothing in it is read as markup


@dataclass(frozen=True)
class Column:
    """A column of a table. ``wrap``: whether its cells may take several lines; the first column's do not, unless it says so."""

    title: str = ""
    right: bool = False
    wrap: bool | None = None


def numbers(*titles: str) -> tuple[Column, ...]:
    """Return columns of numbers, which are right-aligned."""
    return tuple(Column(title, right=True) for title in titles)


@dataclass(frozen=True)
class Section:
    """A part of a report: a title, a note, a table and a picture, of which some may be missing.

    An empty note is an empty line, a row without cells a line between two groups of rows. ``chart`` draws the picture as HTML,
    when a page is made. Pages alone show a section that is ``for_pages``, or has a chart and no rows; there ``tiles`` shows the
    rows (name, figure, remark) as large figures.
    """

    title: str = ""
    note: Line | None = None
    columns: Sequence[str | Column] = ()
    rows: Sequence[Sequence[Line]] = ()
    chart: Callable[[], str] | None = None
    for_pages: bool = False
    tiles: bool = False

    @property
    def typed_columns(self) -> list[Column]:
        return [Column(each) if isinstance(each, str) else each for each in self.columns]

    @property
    def verdict(self) -> bool:
        """Whether this is a sentence in bold, which a page puts at its head."""
        return not self.title and any("bold" in style for _, style in pieces(self.note))

    def printed(self) -> "Iterator[RenderableType]":
        """Yield what a terminal shows of it, as rich's texts and tables."""
        from rich.text import Text

        if self.for_pages or (self.chart is not None and not self.rows):
            return
        if self.title:
            yield Text.assemble("\n", (self.title, "bold"), "  ", (plain(self.note), "dim"))
        elif self.note is not None:
            yield Text.assemble(*pieces(self.note))
        if self.columns:
            yield self._table()

    def _table(self) -> "RenderableType":
        from rich import box
        from rich.table import Table
        from rich.text import Text

        headed = any(column.title for column in self.typed_columns)
        padding = (0, 1 if headed else 3 if self.tiles else 2, 0, 0)
        look = box.SIMPLE_HEAD if headed else None
        table = Table(box=look, pad_edge=False, padding=padding, show_header=headed, header_style="dim")
        for number, column in enumerate(self.typed_columns):
            wrap = bool(number) if column.wrap is None else column.wrap
            table.add_column(column.title, justify="right" if column.right else "left", overflow="fold", no_wrap=not wrap)
        for row in self.rows:
            if row:
                table.add_row(*(Text.assemble(*pieces(cell)) for cell in row))
            else:
                table.add_section()
        return table


def pieces(line: Line | None) -> list[tuple[str, str]]:
    """Return the texts of a line, each with its style."""
    parts = [line] if isinstance(line, str | Styled) else line or ()
    return [(part, "") if isinstance(part, str) else (part.text, part.style) for part in parts]


def plain(line: Line | None) -> str:
    """Return a line without its styles."""
    return "".join(text for text, _ in pieces(line))


class Printed(ABC):
    """A report that a terminal and a page print; subclasses yield its sections, the first of which names it."""

    command: ClassVar[str] = "gpt2 verify"  # that makes it
    script: ClassVar[str] = ""  # of its page

    @abstractmethod
    def sections(self) -> Iterator[Section]:
        """Yield what is shown, from top to bottom."""

    def origin(self, page: str) -> Iterator[Section]:
        """Yield what a page alone shows at its end: how to make the file ``page`` again. It may read large files."""
        yield from ()

    def page_data(self) -> dict[str, Any]:
        """Return what the page's script needs."""
        return {}

    def print(self, console: "Console") -> None:
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

    def html(self, page: str = "report.html", **values: Any) -> str:
        """Return the report as the file ``page``, which needs no other; a subclass may give more ``values`` for its template."""
        from gpt2.pages.rendering import render

        data, (heading, *sections) = self.page_data(), (*self.sections(), *self.origin(page))
        shown = {"command": self.command, "heading": heading.note, "sections": sections}
        return render(self.script, data, pieces=pieces, plain=plain, **shown, **values)

    def save_html(self, path: str | Path) -> None:
        """Write :meth:`html`. Raises InputError: the file cannot be written."""
        from gpt2.data.files import write_output

        write_output(path, self.html(str(path)))


def as_json(body: dict[str, Any], indent: int | None = 2) -> str:
    """Convert a report to JSON; infinity and NaN become the strings "inf", "-inf", "nan". A dataclass may have ``figures``."""
    return json.dumps(_plain(body), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        value = value.figures if hasattr(value, "figures") else vars(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Interrupted(KeyboardInterrupt):
    """Ctrl-C within a long check; ``report`` has what was found before."""

    def __init__(self, report: Any) -> None:
        super().__init__("interrupted")
        self.report = report
