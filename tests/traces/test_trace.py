"""``gpt2.trace``: the numbers are GPT-2's, of the ids that were asked for, and every form that is written holds them all."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from support.commands import mistake, refusal
from support.oracle import assert_same, oracle
from support.random_models import write_checkpoint

import gpt2
from gpt2.checkpoint.saving import sha256
from gpt2.cli.main import main
from gpt2.measure.tracing import points
from gpt2.traces.arrays import meaning
from gpt2.traces.files import ABOUT, INDEX

IDS = np.random.default_rng(0).integers(0, 300, (2, 5))


@pytest.fixture(scope="module")
def traced(model: str) -> gpt2.Trace:
    return gpt2.trace(model, ids=IDS, gradients=True, dtype="float64")


def loss_of(module: gpt2.GPT2) -> torch.Tensor:
    """The mean cross-entropy of each next id, from log-probabilities picked one at a time."""
    logs = module(torch.from_numpy(IDS)).log_softmax(-1)
    return -sum(logs[b, t, IDS[b, t + 1]] for b in range(2) for t in range(4)) / 8


def test_logits_are_those_of_the_paper(model: str, traced: gpt2.Trace) -> None:
    """A reference that is wrong makes every port that agrees with it wrong; the control is one bias changed."""
    module = gpt2.load(model).double()
    weights = {name: tensor.detach() for name, tensor in module.named_parameters()}
    for row, logits in zip(IDS, traced.arrays["logits"], strict=True):
        assert_same(logits, oracle(weights, module.config, row.tolist()))
    weights["h.1.mlp.c_fc.bias"] = weights["h.1.mlp.c_fc.bias"] + 1e-3
    with pytest.raises(AssertionError):
        assert_same(traced.arrays["logits"][0], oracle(weights, module.config, IDS[0].tolist()))


def test_gradients_are_the_loss_s_slopes(model: str, traced: gpt2.Trace) -> None:
    """By finite differences along one direction for each: the gradient of another loss, or of a transposed matrix, fails."""
    module = gpt2.load(model).double().requires_grad_(False)
    assert traced.arrays["loss"].item() == pytest.approx(loss_of(module).item(), rel=1e-12)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in module.named_parameters():
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        sides = []
        for step in (1e-5, -2e-5, 1e-5):
            parameter.add_(direction, alpha=step)
            sides.append(loss_of(module).item())
        slope = (sides[0] - sides[1]) / 2e-5
        wanted = (traced.arrays[f"grad.{name}"] * direction).sum().item()
        assert wanted == pytest.approx(slope, rel=1e-5, abs=1e-8), name


def test_every_array_is_there_once_and_explained(traced: gpt2.Trace) -> None:
    """An array without a meaning, or one of the wrong shape, is one that nobody can compare."""
    parameters = [f"grad.{name}" for name in gpt2.load(traced.model).state_dict()]
    assert list(traced.arrays) == ["ids", *points(2), "targets", "loss", *parameters]
    assert (traced.arrays["ids"].tolist(), traced.arrays["loss"].shape) == (IDS.tolist(), ())
    assert traced.arrays["targets"].tolist() == [[*row[1:], -100] for row in IDS.tolist()]
    logits, targets = (traced.arrays[name].flatten(0, 1) for name in ("logits", "targets"))
    loss = torch.nn.functional.cross_entropy(logits, targets.long())  # -100: left out by default
    assert loss.item() == pytest.approx(traced.arrays["loss"].item(), rel=1e-12)
    letters = {"B": 2, "T": 5, "D": 48, "F": 192, "H": 4, "V": 300, "1": 1}
    for name, tensor in traced.arrays.items():
        text = meaning(name)
        assert len(text) > 10
        if "(" in text and text.endswith(")"):
            shape = text.rpartition("(")[2].rstrip(")").split(", ")
            assert [letters[letter] for letter in shape] == list(tensor.shape), name


def read(path: Path) -> tuple[dict[str, np.ndarray], dict]:
    """The arrays and the description of a written trace, by other libraries."""
    if path.is_dir():
        about = json.loads((path / INDEX).read_text())
        return {row["name"]: np.load(path / row["file"]) for row in about["arrays"]}, about
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as opened:
            arrays = dict(opened)
        return arrays, json.loads(arrays.pop(ABOUT).tobytes())
    with safe_open(path, "np") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}, json.loads(opened.metadata()["about"])  # noqa: SIM118


@pytest.mark.parametrize(("name", "dtype"), [("t.safetensors", "float64"), ("t.npz", "float32"), ("t", "float16")])
def test_what_is_written_is_what_was_computed(traced: gpt2.Trace, name: str, dtype: str, tmp_path: Path) -> None:
    """A form that drops, renames or rounds an array."""
    kept = gpt2.trace(traced.model, ids=IDS, gradients=True, dtype=dtype)
    for _ in range(2):  # the second replaces the first
        path = kept.save(tmp_path / name)
    assert [entry.name for entry in tmp_path.iterdir()] == [name]
    arrays, about = read(path)
    assert set(arrays) == set(traced.arrays)
    for key, exact in traced.arrays.items():
        wanted = exact.numpy() if key in ("ids", "targets") else exact.numpy().astype(dtype)
        assert (arrays[key].dtype, arrays[key].shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_array_equal(arrays[key], wanted, err_msg=key)
    assert about["files"]["model.safetensors"] == sha256(Path(traced.model, "model.safetensors"))
    assert about["environment"]["versions"]["gpt2-toolkit"] == gpt2.__version__
    assert [row["name"] for row in about["arrays"]] == list(traced.arrays)
    assert all(row["shape"] == list(arrays[row["name"]].shape) and row["meaning"] for row in about["arrays"])


@pytest.mark.parametrize(
    ("name", "dtype"), [("t.safetensors", "float16"), pytest.param("t.bin", "float32", marks=pytest.mark.slow)]
)
def test_diagnose_calls_ours_equal_and_a_broken_one_not(model: str, name: str, dtype: str, tmp_path: Path) -> None:
    """The reference has to pass its own judge, or nobody's program can; test_dumps.py reads every container."""
    module = gpt2.load(model)
    with torch.no_grad():
        module.h[1].mlp.c_fc.bias.zero_()
    broken = str(gpt2.save(module, None, tmp_path / "broken"))
    for traced, code in ((model, 0), (broken, 1)):
        given = gpt2.trace(traced, ids=IDS[:, :-1], targets=IDS[:, 1:], gradients=True, dtype=dtype)
        assert main(["diagnose", str(given.save(tmp_path / name)), "--model", model]) == code


def test_ids_of_every_kind_of_file(model: str, tmp_path: Path) -> None:
    """Ids that are read as other ids make a right program look wrong."""
    np.save(tmp_path / "two.npy", IDS.astype(np.uint16))
    np.save(tmp_path / "one.npy", IDS[0].astype(np.int32))
    (tmp_path / "two.txt").write_text("\n".join(" ".join(map(str, row)) for row in IDS) + "\n\n")
    (tmp_path / "two.json").write_text(json.dumps(IDS.tolist(), indent=None).replace("],", "],\n"))
    (tmp_path / "one.txt").write_text(", ".join(map(str, IDS[0])))
    (tmp_path / "column.txt").write_text("\n".join(map(str, IDS[0])))
    for file in tmp_path.iterdir():
        expected = IDS if file.stem == "two" else IDS[:1]
        assert gpt2.trace(model, ids=file).arrays["ids"].tolist() == expected.tolist(), file.name
    assert gpt2.trace(model, ids=IDS[0].tolist()).arrays["ids"].tolist() == IDS[:1].tolist()
    assert gpt2.trace(model, ids=torch.from_numpy(IDS)).arrays["ids"].tolist() == IDS.tolist()


def test_by_default_the_ids_are_a_text_s(tmp_path: Path) -> None:
    """Two rows or more, or a program's dump cannot show which dimension is the batch; next ids go on in the next row."""
    by_default = gpt2.trace(gradients=True).arrays
    assert by_default["ids"].shape == (4, 64)
    assert by_default["ids"].flatten()[1:].tolist() == by_default["targets"].flatten()[:-1].tolist()
    assert "TWELFTH" not in gpt2.load_tokenizer().decode(by_default["ids"][1].tolist())
    text = tmp_path / "short.txt"
    text.write_text("To be, or not to be")
    short = gpt2.trace(text=str(text)).arrays["ids"]
    assert len(short) == 2
    assert gpt2.load_tokenizer().decode(short.flatten().tolist()) in text.read_text()
    assert gpt2.trace(text=str(text), tokens=3).arrays["ids"].shape[1] == 3


MISTAKES = [
    ("--out x.zip", "unknown form '.zip'; give a file that ends in .safetensors, .npz"),
    ("--out none/x.npz", "existing folder"),
    ("--out full", "holds 'mine'"),
    ("--out x.npz --ids none.npy", "none.npy: cannot be read"),
    ("--out x.npz --ids words.txt", "line 2 has 'be'"),
    ("--out x.npz --ids uneven.txt", "a line has 1 ids and the first 2"),
    ("--out x.npz --ids float.npy", "holds float64"),
    ("--out x.npz --ids large.npy", "holds the id 2048, and the model knows 0 to 2,047"),
    ("--out x.npz --ids long.npy", "257 tokens in a row, and the model has 256 positions"),
    ("--out x.npz --ids cube.npy", "shape (1, 1, 1)"),
    ("--out x.npz --ids one.npy --tokens 3", "--tokens has no effect with --ids"),
    ("--out x.npz --ids one.npy --gradients", "no token has a next one"),
    ("--out x.bin --ids one.npy", "the last id of each row is predicted, never read"),
    ("--out x.npz --tokens 0", "0 tokens in a row"),
    ("--out x.npz --text words.txt --tokens 100", "too few"),
    ("--out x.npz --dtype bf16", "unknown dtype"),
    ("random:distilgpt2 --out x.npz --text words.txt", "has no tokenizer"),
]


@pytest.mark.parametrize(("arguments", "says"), MISTAKES, ids=[arguments for arguments, _ in MISTAKES])
def test_mistakes_are_one_line_and_write_nothing(
    arguments: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A trace of other ids than were meant is worse than none."""
    monkeypatch.chdir(tmp_path)
    for name, array in {
        "float": np.full(3, 0.5),
        "large": np.array([0, 2048]),
        "long": np.zeros(257, dtype=int),
        "cube": np.zeros((1, 1, 1), dtype=int),
        "one": np.array([7]),
    }.items():
        np.save(f"{name}.npy", array)
    for name, text in {"words": "1 2\n3 be", "uneven": "1 2\n3"}.items():
        Path(f"{name}.txt").write_text(text)
    Path("full").mkdir()
    Path("full/mine").touch()
    there = sorted(path.name for path in tmp_path.rglob("*"))
    assert says in mistake(capsys, "trace", *arguments.split())
    assert sorted(path.name for path in tmp_path.rglob("*")) == there


def test_a_full_disk_leaves_the_trace_that_was_there(traced: gpt2.Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference that is half of one run and half of another."""
    for name in ("t.safetensors", "t.npz", "t"):
        path = traced.save(tmp_path / name)
        before, _ = read(path)
        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            other = gpt2.trace(traced.model, ids=IDS[:, :3])
            assert "No space left" in refusal(other.save, path)
        after, _ = read(path)
        assert all(np.array_equal(after[key], before[key]) for key in before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t", "t.npz", "t.safetensors"]


def test_a_value_that_float16_cannot_hold_is_said(tmp_path: Path) -> None:
    """An infinity in a reference looks like a fault of the program that is compared with it."""
    folder = write_checkpoint(tmp_path)
    model = gpt2.load(str(folder))
    with torch.no_grad():
        model.h[0].mlp.c_proj.bias += 1e6
    gpt2.save(model, None, tmp_path / "wide")
    said = refusal(gpt2.trace, str(tmp_path / "wide"), ids=IDS, dtype="float16")
    assert "h.0.mlp.c_proj: has values that float16 cannot hold" in said


def test_the_command_writes_shows_and_says_as_json(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The table is what a person compares by hand: it has to be of the file that was written."""
    out = tmp_path / "t.npz"
    assert main(["trace", "--out", str(out), "--tokens", "4"]) == 0
    shown = capsys.readouterr().out
    first = read(out)[0]["logits"].flatten()[0]
    assert f"{first:.6g}" in shown
    assert all(len(line) <= 110 for line in shown.splitlines())
    assert main(["trace", "--out", str(out), "--tokens", "4", "--gradients", "--json", "-"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["loss"] == pytest.approx(float(read(out)[0]["loss"]))
    assert body["ids_from"].startswith("twelfth-night")
