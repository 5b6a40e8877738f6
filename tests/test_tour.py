"""What the README shows is what its commands print: each is run, in order, in one folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONSOLE = re.findall(r"^```console\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
SERVES = "gpt2 explore shakespeare-mini out/macbeth/best"  # until Ctrl-C; tests/cli/test_explore.py
PORT = """
from torch import cat, nn, ones_like, arange

import gpt2


class Head(nn.Module):
    def __init__(self, width, size):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, size, bias=False) for _ in range(3))

    def forward(self, x):
        scores = self.query(x) @ self.key(x).mT / self.key.out_features**0.5
        return scores.masked_fill(ones_like(scores).tril() == 0, float("-inf")).softmax(-1) @ self.value(x)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = nn.ModuleList(Head(width, width // heads) for _ in range(heads))
        self.proj = nn.Linear(width, width)
        self.net = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x):
        x = self.ln1(x)
        x = x + self.proj(cat([head(x) for head in self.heads], -1))
        x = self.ln2(x)
        return x + self.net(x)


class Port(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.words, self.places = nn.Embedding(c.vocab_size, c.n_embd), nn.Embedding(c.n_positions, c.n_embd)
        self.blocks = nn.Sequential(*(Block(c.n_embd, c.n_head) for _ in range(c.n_layer)))
        self.last = nn.LayerNorm(c.n_embd)

    def forward(self, ids):
        return self.last(self.blocks(self.words(ids) + self.places(arange(ids.size(1))))) @ self.words.weight.t()


def build():
    return Port(gpt2.load("shakespeare-mini").config)
"""


def shown() -> list[tuple[str, str]]:
    """Each command of the README and what is shown below it; training first, because others read what it writes."""
    found = []
    for block in CONSOLE:
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output))
    return sorted(found, key=lambda each: not each[0].startswith("gpt2 train"))


def words(text: str) -> list[str]:
    """The words of an output, however it is wrapped, without what depends on the machine: times, speeds, and the last digits
    of rounding with the place where it is largest.
    """
    text = re.sub(r"(\d\.\de[-+]\d\d|× \d\.\d\d).*(\n {40}.*)?", "ROUNDING", text)  # and what is wrapped in its column
    text = re.sub(r"[\d,]+ tok/s .*left|[\d.]+ s\b", "TIME", text)
    text = re.sub(r"\d+ threads?\b", "THREADS", text)
    return [word for word in text.split() if set(word) != {"─"}]


def holds(output: str, wanted: str) -> str:
    """What of ``wanted`` does not come in ``output``, in order; ``...`` stands for any number of lines."""
    there, at = words(output), 0
    for chunk in re.split(r"^\.\.\.$", wanted, flags=re.MULTILINE):
        part = words(chunk)
        while at + len(part) <= len(there) and there[at : at + len(part)] != part:
            at += 1
        if at + len(part) > len(there):
            return chunk
        at += len(part)
    return ""


@pytest.mark.slow
def test_every_command_of_the_tour_prints_what_is_shown(tmp_path: Path) -> None:
    """Output that was pasted once and changed since is a promise that nobody keeps."""
    (tmp_path / "my_port.py").write_text(PORT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "COLUMNS": "80"}
    commands = [(command, output) for command, output in shown() if command != SERVES]
    assert len(commands) >= 7
    for command, output in commands:
        run = [sys.executable, "-m", *shlex.split(command)]
        done = subprocess.run(run, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == (1 if "MISMATCH" in output else 0), done.stdout
        missing = holds(done.stdout, output)
        assert not missing, f"{command}\n{missing}\n--- is not in what it printed ---\n{done.stdout}"


@pytest.mark.slow
def test_the_python_shown_runs(tmp_path: Path) -> None:
    block = re.search(r"^```python\n(import gpt2\n.*?)^```$", README, re.DOTALL | re.MULTILINE)[1]
    code = block.replace("logits = ", "import torch\nids_tensor = torch.tensor([[1, 2]])\nlogits = ") + "\nassert report.ok\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_comparison_sees_a_difference() -> None:
    """The control: a figure changed, a line left out, two chunks exchanged; but not a time, a wrapped line, or a rounding."""
    output = "best 3.3490 at step 200\nin 41 s\nworst 2.6e-08 wte\nabout one\ntwo three\nend\n"
    assert not holds(output, "best 3.3490 at step 200\nin 7 s\n...\nabout one two\nthree\n")
    assert not holds(output, "worst 9.9e-09 ln_f\n...\nend\n")
    assert holds(output, "best 3.3491 at step 200\n")
    assert holds(output, "best 3.3490 at step 200\nworst 2.6e-08\n")
    assert holds(output, "end\n...\nbest 3.3490 at step 200\n")
