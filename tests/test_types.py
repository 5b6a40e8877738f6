"""A type checker accepts the public API and refuses a wrong use of it."""

import ast
import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import gpt2

ROOT = Path(__file__).parents[1]


def test_every_public_name_is_in_the_file_that_the_checker_reads() -> None:
    """Each public name must be in the checked file; a new one would not be checked."""
    tree = ast.parse((ROOT / "tests" / "support" / "public_api.py").read_text())
    used = {
        n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "gpt2"
    }
    assert used == set(gpt2.__all__)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="no mypy here; it is in the extra test")
def test_a_type_checker_finds_nothing_in_the_public_api(tmp_path: Path) -> None:
    """py.typed promises types: a missing or wrong type is an error in the user's editor."""
    (tmp_path / "bad.py").write_text("import gpt2\nids: int = gpt2.generate(gpt2.load('gpt2'), [1], top_k='50')\n")
    (tmp_path / "typo.py").write_text("from transformers import AutoTokenizer\nAutoTokenizer.from_pretraned('gpt2')\n")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    command = [sys.executable, "-m", "mypy", "--cache-dir", os.devnull, "--no-error-summary", *settings["files"]]
    said = subprocess.run([*command, *tmp_path.iterdir()], cwd=ROOT, capture_output=True, text=True)
    lines = [line for line in said.stdout.splitlines() if "error:" in line]
    assert {Path(line.partition(":")[0]).name for line in lines} == {"bad.py", "typo.py"}, said.stdout + said.stderr
    assert said.stderr == ""
