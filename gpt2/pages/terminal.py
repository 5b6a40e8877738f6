"""A rich console that lets no text send control sequences to the terminal."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from gpt2.errors import printable


class Terminal(Console):
    """Stdout; on a terminal, control characters are shown as symbols. rich adds its colours later, so they stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            plain = segment.control is not None or not self.is_terminal
            yield segment if plain else Segment(printable(segment.text), segment.style)
