"""Files that `gpt2 diagnose` is to answer in one line, and the exit code of each: 0 equal, 1 mismatch, 2 bad input."""

import shutil
from pathlib import Path

HERE = Path(__file__).parent / "hostile"  # files.txt has each file behind a line "=== NAME"; all import sound.py
RUN = {"sound": 0, "beside": 0, "prints": 0, "returns_flat": 0, "hangs_at_the_end": 0, "training_dropout": 1}
TEXTS = dict(part.split("\n", 1) for part in (HERE / "files.txt").read_text().split("=== ")[1:])
HOSTILE = {name: RUN.get(name, 2) for name in sorted([*TEXTS, "sound"])}


def write_hostile(folder: Path) -> None:
    """Write every file into a new folder."""
    shutil.copytree(HERE, folder, ignore=shutil.ignore_patterns("*.txt", "__pycache__"))
    for name, text in TEXTS.items():
        (folder / f"{name}.py").write_text(text)
