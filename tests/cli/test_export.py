"""``gpt2 export`` as a user runs it: exit codes, output, and the JSON for other programs."""

import hashlib
from pathlib import Path

import pytest
import torch
from support.commands import ASSET, mistake, printed
from support.random_models import write_checkpoint

import gpt2
from gpt2.cli.main import main


def same_weights(one: Path, other: Path) -> bool:
    a, b = gpt2.load(str(one)).state_dict(), gpt2.load(str(other)).state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_hf_is_the_default(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The embedded checkpoint has this layout already, so the export equals it."""
    assert main(["export", "shakespeare-mini", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written.keys() == {path.name for path in ASSET.iterdir()}
    for name in written.keys() - {"model.safetensors", "README.md"}:  # the first is of an older release
        assert written[name] == (ASSET / name).read_bytes()
    assert same_weights(tmp_path, ASSET)
    first, *lines = out.splitlines()
    assert first == f"shakespeare-mini -> {tmp_path}  hf, float32, 1,915,360 parameters"
    digest = hashlib.sha256(written["model.safetensors"]).hexdigest()
    assert [line.split() for line in lines if digest in line] == [["model.safetensors", "7.7", "MB", "sha256", digest]]
    assert len(lines) == len(written)


MINE = """
import gpt2
import torch
from torch import nn


def build():
    print("built")
    return gpt2.load("tiny")


def needs(checkpoint_dir):
    return gpt2.load(checkpoint_dir)


class Odd(nn.Module):
    def __init__(self):  # parameters by numbers: names that no table knows
        super().__init__()
        model = gpt2.GPT2(gpt2.load("tiny").config)
        self.shell = [model.to("meta").eval()]
        self.names = [name for name, _ in model.named_parameters()]
        self.p = nn.ParameterList(torch.zeros(p.shape) for p in model.parameters())

    def forward(self, ids):
        return torch.func.functional_call(self.shell[0], dict(zip(self.names, self.p)), (ids,))


def odd():
    return Odd()


def breaks():
    raise ValueError("no weights here")
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a user's own module, in the working folder, beside its checkpoint."""
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "tiny")
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


@pytest.mark.parametrize("format", ["hf", *(pytest.param(one, marks=pytest.mark.slow) for one in ("gguf", "llmc"))])
def test_a_module_is_exported_as_the_checkpoint_that_it_holds(format: str, mine: Path, capsys: pytest.CaptureFixture) -> None:
    """From a FILE.py:build, with what it prints kept out of the output, and a card that does not name private folders."""
    assert main(["export", f"{mine}:build", "out", "--format", format, "--check"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{mine}:build -> out  {format}, {'float32' if format == 'hf' else 'f32'}, 72,576 parameters\n")
    assert "built" not in out
    assert "built" in err
    assert "note: without a tokenizer: a module has none\n" in out
    assert "gpt2          ok         every value of 28 tensors" in out
    opened = "out" if format == "hf" else {"gguf": "out/model.gguf", "llmc": "out/model.bin"}[format]
    assert same_weights(Path(opened), Path("tiny"))
    assert str(mine.parent) not in Path("out/README.md").read_text()
    assert "`mine.py`, converted" in Path("out/README.md").read_text()


def test_tensors_are_read_by_the_names_of_the_module_that_they_belong_to(mine: Path, capsys: pytest.CaptureFixture) -> None:
    """A file with an author's own names was a dead end, although the author's module knows what they are."""
    stored = {f"module.p.{n}": tensor for n, tensor in enumerate(gpt2.load("tiny").state_dict().values())}
    torch.save({"state_dict": stored}, "odd.pt")
    assert "gpt2 export odd.pt DIR --like FILE.py:build" in mistake(capsys, "info", "odd.pt")
    said = printed(capsys, "export", "odd.pt", "out", "--like", "mine.py:odd")
    assert "note: the tensors of odd.pt were read by the names of mine.py:odd" in said
    assert same_weights(Path("out"), Path("tiny"))
    assert "is read too" in mistake(capsys, "export", "odd.pt", ".", "--like", "mine.py:odd")  # replaced config.json and weights
    torch.save({**stored, "module.p.0": torch.zeros(3, 3), "other": torch.zeros(2)}, "odd.pt")  # controls: it must fit
    said = mistake(capsys, "export", "odd.pt", "again", "--like", "mine.py:odd")
    assert "odd.pt: does not fit mine.py:odd: unknown: other; misshapen: p.0; give the module" in said
    assert "--like mine" in mistake(capsys, "export", "odd.pt", "again", "--like", "mine")
    assert not Path("again").exists()


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("mine.py:needs", [], "mine.py:needs: needs() takes a checkpoint's folder; compare it with a MODEL, or write a fun"),
        ("mine.py:breaks", [], "mine.py:breaks: ValueError: no weights here; gpt2 diagnose mine.py:breaks finds out why"),
        ("mine.py:none", [], "mine.py: has no function none; it has build, needs, odd, breaks"),
        ("yours.py:build", [], "yours.py: no such file; there are mine.py; give a Python file and a function in it"),
        ("mine.py:build", ["--revision", "v1"], "mine.py:build: has no revisions, only models of the Hub do: leave out"),
    ],
)
def test_a_module_that_cannot_be_exported_writes_nothing(
    model: str, options: list[str], message: str, mine: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["export", model, "out", *options]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"gpt2 export: {message}")
    assert not Path("out").exists()
