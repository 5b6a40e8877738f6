"""Every notebook runs from top to bottom, and prints what is committed with it."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
ROUNDING = re.compile(r"to the last\s+bit|(to )?\d(\.\d)?e-1\d")  # what another processor's last digits make of an error


VARIES = "varies"  # the tag of a cell that prints times, or what a training step's last digits have grown into


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    """What each cell printed, and the kinds of what it showed; of cells that vary, that they printed."""
    found = []
    for cell in notebook.cells:
        outputs = cell.get("outputs", [])
        text = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
        varies = VARIES in cell.metadata.get("tags", []) and text
        found.append("#" if varies else " ".join(ROUNDING.sub("#", text).split()))  # wherever that wraps the lines
        found += [kind for output in outputs for kind in sorted(output.get("data", {}))]
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_whole(path: Path) -> None:
    """One with a cell that was never run, a warning in its middle, or megabytes of pictures is not fit to be read."""
    committed = nbformat.read(path, 4)
    cells = [cell for cell in committed.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell.outputs if output.get("name") == "stderr"]
    assert any(printed(committed)), "committed with its outputs"
    assert path.stat().st_size < 600_000
    lines = [line for cell in cells for line in cell.source.splitlines()]
    assert sum(line.startswith('MODEL = "shakespeare-mini"') for line in lines) == 1, "one line to change for official weights"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_it_prints(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook that was last run a year ago teaches what was true a year ago."""
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    committed = nbformat.read(path, 4)
    fresh = nbformat.read(path, 4)
    NotebookClient(fresh, timeout=280, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for now, then in zip(printed(fresh), printed(committed), strict=True):
        assert now == then


def test_there_are_notebooks() -> None:
    """A glob that finds nothing passes everything."""
    assert NOTEBOOKS
