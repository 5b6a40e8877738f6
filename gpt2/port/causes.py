"""Print ``CAUSES.md``, what `gpt2 diagnose` can name in a forward pass, from the table: ``python -m gpt2.port.causes``."""

from __future__ import annotations

import sys

from gpt2.port.terms.causes import SECTIONS

HEAD = """\
# What `gpt2 diagnose` can name in a forward pass

The ids of the causes in `gpt2 diagnose MODULE_OR_DUMP --json`, for programs that match on them. They do not change. The report of
a cause says more than its id: where it is, how we know, and the corrected line. Some mistakes are the same computation under two
names (queries, keys and values taken from wrong places are also heads read in another order); then either id may be named.
"""


def document() -> str:
    """Return the document: a table for each section."""
    parts = [HEAD]
    for title, rows in SECTIONS.items():
        listed = [f"| `{id}` | {means} |" for id, (means, _) in rows.items()]
        parts.append("\n".join(["", f"## {title}", "", "| id | means |", "| --- | --- |", *listed, ""]))
    return "".join(parts)


if __name__ == "__main__":
    sys.stdout.write(document())
