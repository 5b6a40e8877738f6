"""A mapped weight file that is cut short: a one-line error before the next part of a job, not SIGBUS."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support import forks

import gpt2
from gpt2.checkpoint import containers

# Cut the file right after the model was loaded from it, as a download in place would.
COMMAND = """
import os, sys
from pathlib import Path
cut = sys.argv.pop(1)  # never the embedded model, of which this is a copy
from gpt2.checkpoint.checkpoint import StoredCheckpoint
real = StoredCheckpoint.load
def load(checkpoint, *args, **settings):
    model = real(checkpoint, *args, **settings)
    if str(checkpoint.path) == cut:
        os.truncate(Path(cut, "model.safetensors"), 100_000)
    return model
StoredCheckpoint.load = load
from gpt2.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


COMMANDS = (
    ["generate", "MODEL", "--prompt", "O"],
    ["compare", "MODEL", "shakespeare-mini", "--tokens", "16"],
    ["export", "MODEL", "OUT"],
    ["verify", "MODEL", "--quick"],
    ["explore", "MODEL", "--json", "-"],
    ["train", "finetune-lora", "--init", "MODEL", "--out", "OUT", "--set", "data.source=play:hamlet"],
)


@pytest.mark.parametrize("words", [*COMMANDS[:3], *(pytest.param(each, marks=pytest.mark.slow) for each in COMMANDS[3:])])
def test_a_file_cut_short_is_one_line(tmp_path: Path, words: list[str]) -> None:
    """The process ended with "Bus error" in a shell, and with no message under a scheduler."""
    model = shutil.copytree(Path(gpt2.__file__).parent / "assets" / "shakespeare-mini", tmp_path / "model")
    places = {"MODEL": str(model), "OUT": str(tmp_path / "out")}
    err = forks.run("-c", COMMAND, model, *(places.get(word, word) for word in words), status=2).stderr
    assert "Traceback" not in err
    last = err.splitlines()[-1]
    assert last.startswith(f"gpt2 {words[0]}: ")
    assert "model.safetensors" in last


def test_a_file_that_is_whole_or_gone_or_longer_is_none(tmp_path: Path) -> None:
    """Negative controls: a mapping stays valid when the file is deleted, replaced or made longer."""
    model = shutil.copytree(Path(gpt2.__file__).parent / "assets" / "shakespeare-mini", tmp_path / "model")
    loaded = gpt2.load(str(model))
    expected = gpt2.generate(loaded, [1, 2, 3], 5, temperature=0)
    weights = model / "model.safetensors"
    with weights.open("ab") as file:
        file.write(b"more")
    containers.require_whole_files()
    weights.unlink()
    weights.write_bytes(b"another")
    containers.require_whole_files()
    assert gpt2.generate(loaded, [1, 2, 3], 5, temperature=0) == expected
