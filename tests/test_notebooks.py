"""Every notebook runs from top to bottom, and prints its committed output."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from support import forks

import gpt2
from gpt2.config import GPT2Config
from gpt2.model import GPT2

LINE = 'MODEL = "shakespeare-mini"'  # the line to change for official weights
NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
assert NOTEBOOKS, "a glob that finds nothing passes everything"
QUICK = [path for path in NOTEBOOKS if path.stem[:2] not in ("04", "05", "07", "08")]  # these train
SHORTER = {  # a reader's run, and a test's, which shows the same
    "STEPS = 500": "STEPS = 240",
    "len(train_ids) - T - 1, (16, 1)": "len(train_ids) - T - 1, (8, 1)",
    "step, lr=3e-3": "step, lr=4e-3",
    "chain(3)": "chain(2)",  # with and without a residual stream, as three are
    "nothing) for _ in range(3)": "nothing) for _ in range(2)",
    "LayerNorm) for _ in range(3)": "LayerNorm) for _ in range(2)",
    "model(windows[:, :-1]).flatten(0, 1), windows[:, 1:]": "model(windows[::3, :-1]).flatten(0, 1), windows[::3, 1:]",
    "STEPS // 10": "STEPS // 2",  # points of a curve that is drawn
    "STEPS = 320": "STEPS = 160",
    "T, 96, 3, 4": "T, 32, 2, 4",
    "AdamW(model.parameters())": "AdamW(model.parameters(), fused=True)",
    "lr=4e-3), torch": "lr=6e-3), torch",
    "len(learned) - T, (32, 1)": "len(learned) - T, (16, 1)",
    '"macbeth")[:4_000]': '"macbeth")[:2_000]',  # a text half as long is learnt by heart as soon
    "everything[2_000:]": "everything[1_000:]",
    "everything[:2_000]": "everything[:1_000]",
    "    recipe = read(recipe, [*TEXT,": """
    (folder / "part.txt").write_text(learned_from[-150_000:] + judged_on[:4_000])
    part = f"data.path={folder / 'part.txt'}", f"data.held_out={4 / 154:.12f}", *["model.n_layer=2"] * (recipe != "bigram")
    recipe = read(recipe, [*part,""",  # a part of the text, and a third of the blocks
    "steps=1000": "steps=60",
    'steps=500", "eval_every=100", "optim.warmup=20", "optim.lr=2': 'steps=60", "eval_every=60", "optim.warmup=9", "optim.lr=3',
    'steps=200", "eval_every=40': 'steps=25", "eval_every=25',
    'steps=90", "batch_size=4", "eval_every=18': 'steps=4", "batch_size=4", "eval_every=4',
    'steps=260", "eval_every=52': 'steps=72", "eval_every=72',
    'steps=184", "eval_every=46': 'steps=28", "eval_every=28',
    '"patience=4"': '"patience=2", "batch_size=4", "eval_tokens=1536"',
    '"optim.lr=8e-4", "dropout=0", "eval_every=12"': '"optim.lr=1.6e-3", "dropout=0", "eval_every=6", "optim.warmup=10"',
    'steps=120", "eval_every=40': 'steps=24", "eval_every=24", "eval_tokens=1024',
    "tokens=2048": "tokens=1024",
    "for n in range(4)": "for n in range(1)",  # runs that are timed
}
FROM_NOTHING = "# Inside GPT-2"  # begins the notebook whose kernel is a process of its own, as Jupyter starts it
MODULES = f"{forks.WITH_TRANSFORMERS} matplotlib.pyplot ipykernel.kernelapp"
EXERCISE = "exercise"  # the tag of a cell that checks a reader's answer
ANSWERS = tomllib.loads((Path(__file__).parent / "support" / "exercises.toml").read_text())
ROUNDING = re.compile(r"to the last\s+bit|,?\s*(to\s+)?\d(\.\d)?e-(0[6-9]|1\d)")  # errors of some processors, left out if 0
VARIES = "varies"  # the tag of a cell that prints times, or figures that depend on a training step's last digits


@pytest.fixture(autouse=True)
def nothing_is_written_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a kernel that is killed leaves its temporary folders
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    """The text that each cell printed and the types of its displays; for cells that vary, only whether they printed."""
    found = []
    for cell in notebook.cells:
        outputs = cell.get("outputs", [])
        text = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
        varies = VARIES in cell.metadata.get("tags", []) and text
        found.append("#" if varies else " ".join(ROUNDING.sub("", text).split()))  # at any line width
        found += [kind for output in outputs for kind in sorted(output.get("data", {}))]
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_whole(path: Path) -> None:
    """A committed notebook must have no cell that was never run, no warning, and no megabytes of pictures."""
    committed = nbformat.read(path, 4)
    cells = [cell for cell in committed.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell.outputs if output.get("name") == "stderr"]
    assert any(printed(committed)), "committed with its outputs"
    assert path.stat().st_size < 600_000
    lines = [line for cell in cells for line in cell.source.splitlines()]
    assert sum(line.startswith(LINE) for line in lines) == 1, "one line to change for official weights"
    exercises = [cell for cell in cells if EXERCISE in cell.metadata.get("tags", [])]
    assert [cell.outputs[0].text for cell in exercises] == ["to do\n"] * 3
    assert re.search(r"\(0\d_\w+\.ipynb\)", committed.cells[-1].source), "a link to the next one"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_it_prints(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook that was last run long ago may show outdated results; an exercise may refuse every answer, or none."""
    committed, fresh = nbformat.read(path, 4), shortened(path)
    tasks = [cell.source for cell in fresh.cells if EXERCISE in cell.metadata.get("tags", [])]
    own = ANSWERS[path.stem[:2]]
    answers = [task.replace("answer = ...", f"answer = {own[kind][n]}") for n, task in enumerate(tasks) for kind in own]
    fresh.cells += map(nbformat.v4.new_code_cell, answers)
    execute(fresh, tmp_path, monkeypatch)
    assert printed(fresh)[-len(answers) :] == ["right", "not yet"] * 3
    del fresh.cells[-len(answers) :]
    for now, then in zip(printed(fresh), printed(committed), strict=True):
        assert now == then


@pytest.mark.slow
@pytest.mark.parametrize("path", QUICK, ids=lambda path: path.stem)
def test_one_line_changes_the_model(path: Path, tmp_path: Path) -> None:
    """Depth, width and number of heads must be read from the model, not written down. Nothing is diagnosed: that takes long."""
    torch.manual_seed(0)
    sizes = {"n_positions": 320, "n_embd": 48, "n_layer": 3, "n_head": 3, "bos_token_id": None, "eos_token_id": None}
    model = GPT2(GPT2Config(vocab_size=2048, **sizes))
    gpt2.save(model, gpt2.load_tokenizer("shakespeare-mini"), tmp_path / "another")
    code = "\n".join(cell.source for cell in shortened(path).cells if cell.cell_type == "code")
    search = "import unittest.mock\ngpt2.diagnose = gpt2.diagnose_step = unittest.mock.MagicMock()\n"  # its shapes: tests/port
    code = code.replace(LINE, f'{search}plt.switch_backend("agg")\nMODEL = "{tmp_path / "another"}"')
    forks.run("-c", code, cwd=tmp_path, modules=MODULES, timeout=300)


def shortened(path: Path) -> nbformat.NotebookNode:
    notebook = nbformat.read(path, 4)
    for cell in notebook.cells:
        for long, short in SHORTER.items():
            cell.source = cell.source.replace(long, short)
    return notebook


def execute(notebook: nbformat.NotebookNode, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the cells in Jupyter's kernel, which is a fork: to import torch, matplotlib and the rest takes it 4 s of CPU."""
    if FROM_NOTHING not in notebook.cells[0].source:
        monkeypatch.setattr("jupyter_client.provisioning.local_provisioner.launch_kernel", launch)
    from nbclient import NotebookClient

    # Otherwise only a kernel that imports matplotlib itself shows its figures; and a figure is drawn once, not cut to its size.
    inline = ["--matplotlib=inline", "--InlineBackend.print_figure_kwargs=bbox_inches="]
    place = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=300, extra_arguments=inline, resources=place, shutdown_kernel="immediate").execute()


def launch(command: list[str], env: Mapping[str, str], cwd: str, **pipes: Any) -> forks.Fork:
    return forks.Fork(*command[1:], environ=env, cwd=Path(cwd), modules=MODULES)
