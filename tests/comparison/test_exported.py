"""`export --check` passes right files in every installed program, and refuses a file with one wrong tensor in each of them."""

import json
from pathlib import Path

import pytest
import torch
from support.random_models import changed, write_checkpoint

import gpt2
from gpt2.checkpoint.export import Export, export
from gpt2.checkpoint.gguf_writer import as_stored
from gpt2.checkpoint.loading import load
from gpt2.cli.main import main
from gpt2.comparison import exported
from gpt2.comparison.exported import PACKAGES, check_export, rounded

LONG = ("hf", None), ("hf:fp16", None), ("gguf", "f16"), ("gguf", "bf16")
KINDS = [("gguf", "q8_0"), ("llmc", None), *(pytest.param(*kind, marks=pytest.mark.slow) for kind in LONG)]
PROGRAMS = {"hf": {"transformers", "CTranslate2"}, "gguf": {"gguf package", "llama.cpp"}, "llmc": set()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")  # small logits, whose errors in float16 have squares below its numbers
    return changed(write_checkpoint(folder / "base", n_embd=64), folder / "model", lambda model: model.ln_f.weight.mul_(0.05))


@pytest.fixture(scope="module")
def wrong(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, with one square matrix left as nn.Linear keeps it."""
    model = load(str(source))
    proj = model.h[1].attn.c_proj
    proj.weight = torch.nn.Parameter(proj.weight.detach().t().contiguous())
    return gpt2.save(model, gpt2.load_tokenizer(str(source)), tmp_path_factory.mktemp("wrong") / "model")


@pytest.mark.parametrize(("format", "type"), KINDS)
def test_a_right_export_passes_everywhere_and_one_wrong_tensor_nowhere(
    source: Path, wrong: Path, tmp_path: Path, format: str, type: str | None
) -> None:
    """A check that compares a file with itself, or with too wide a tolerance, passes the wrong file. In fp16 none passed."""
    format, colon, dtype = format.partition(":")
    done = export(name := f"{source}{colon}{dtype}", tmp_path / "right", format=format, type=type)
    check = check_export(done)
    opened = {each.program for each in check.opened}
    assert opened | {program for program, _ in check.missing} == {"gpt2"} | PROGRAMS[format]
    assert check.ok, check.table()
    assert all(each.ok for each in check.opened), check.table()
    assert (check.rounding > 1e-5) == (format == "gguf")

    bad = export(f"{wrong}{colon}{dtype}", tmp_path / "wrong", format=format, type=type)
    refused = check_export(Export(**{**vars(bad), "model": name}))
    assert not refused.ok
    for each in refused.opened:
        assert each.ok is False, refused.table()
        assert each.error is None or each.error > 3 * each.allowed
    assert "h.1.attn.c_proj.weight has other values than the source" in refused.opened[0].note


def test_kept_parts_are_checked_in_their_own_precision_without_an_engine(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allowance must not come from the file's type alone: kept matrices are not rounded. A missing engine is a line."""
    found = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "llama_cpp" else found(name))
    check = check_export(export(str(source), tmp_path, format="gguf", type="q8_0", keep=("h.0", "wte")))
    assert check.ok, check.table()
    assert check.missing == (("llama.cpp", PACKAGES["llama_cpp"][1]),)
    assert "not installed: pip install 'gpt2-toolkit[llamacpp]'" in check.table()


def test_the_command_exits_1_where_a_file_was_damaged(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One flipped bit of one weight; and a file that no program opens is a line, not a traceback."""
    command = ["export", str(source), str(tmp_path), "--format", "gguf", "--check"]
    assert main([*command, "--json", "-"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["check"]["ok"] is True
    assert {each["program"] for each in body["check"]["opened"]} >= {"gpt2", "gguf package"}

    right, file = exported.check_export, tmp_path / "model.gguf"
    data = file.read_bytes()
    for damaged, refused in ((data[:-5] + bytes([data[-5] ^ 0x10]) + data[-4:], 1), (data[:5000], 2)):

        def check(done: Export, damaged: bytes = damaged, **settings: object) -> object:
            file.write_bytes(damaged)
            return right(done, **settings)

        monkeypatch.setattr(exported, "check_export", check)
        assert main(command) == 1
        out = capsys.readouterr().out
        assert out.count("DIFFERS") >= refused
        assert "Traceback" not in out


@pytest.mark.parametrize("type", ["f16", "bf16", "q8_0"])
def test_rounding_is_the_writers_although_written_apart(source: Path, type: str) -> None:
    """The check's own rounding must be that of the format, or right files would be refused; zeros and ties included."""
    torch.manual_seed(0)
    tensor = torch.randn(64, 96)
    tensor[:32, 0] = 0.0
    tensor[32:, 1] = torch.arange(32) * 127.0 / 254  # halves of a step
    assert torch.equal(rounded("h.0.mlp.c_fc.weight", tensor, type), as_stored("h.0.mlp.c_fc.weight", tensor, type))
