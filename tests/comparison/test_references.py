"""What a side showed, kept: references and traces as files and as sides of a comparison."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checks import refused
from support.commands import mistake, refusal
from support.random_models import TEXT, write_checkpoint

import gpt2
from gpt2.checkpoint.containers.safetensors_file import SafetensorsFile
from gpt2.cli.main import main
from gpt2.comparison.pairs import save_reference
from gpt2.comparison.run import compare
from gpt2.comparison.settings import Settings
from gpt2.comparison.sides.opening import open_passage, open_side
from gpt2.data.bpe import chars_of
from gpt2.errors import CheckpointError
from gpt2.measure.texts import open_text

text = pytest.fixture(scope="module")(lambda documents: documents)


@pytest.fixture(scope="module")
def model(base: Path) -> str:
    return str(base)


@pytest.fixture(scope="module")
def saved(model: str, text: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("reference") / "ref.safetensors"
    return f"trace:{save_reference(model, path, Settings(on=text, tokens=200))}"


def test_a_side_equals_its_own_reference_and_another_does_not(model: str, saved: str, text: str) -> None:
    """Rows that are off by one, rounded or renormalised would show as a difference; a blind comparison shows none at all."""
    same = compare(saved, model)
    assert same.distributions.kl_ab.max == same.distributions.kl_ba.max == same.distributions.js.max == 0
    assert "bits per byte" in same.table()
    alone = compare(model, f"{model}:bf16", on=text, tokens=200)
    later = compare(saved, f"{model}:bf16")
    assert later.distributions == alone.distributions  # every figure, with its interval
    assert later.distributions.kl_ab.mean.value > 0
    assert (later.text, later.a.files) == (alone.text, alone.a.files)
    both = compare(saved, saved)  # without any tokenizer
    assert both.distributions.a.score.bytes == alone.distributions.a.score.bytes
    several = compare(saved, f"{model}:bf16", model)
    assert [one.distributions.kl_ab.mean.value > 0 for one in several.candidates[1:]] == [True, False]


def test_intervals_are_over_whole_documents(model: str, saved: str, text: str, tmp_path: Path) -> None:
    """Without an end of text, and in a reference, they were over blocks of tokens, which hold the truth half of the time."""
    chars = str(write_checkpoint(tmp_path / "chars", chars_of(TEXT)))
    on = Settings(on=text, tokens=200)
    for name, reader, settings in ((model, model, on), (chars, chars, on), (saved, model, Settings())):
        parts = open_text(text).laid_out(gpt2.load_tokenizer(reader))
        expected = [number for number, own in enumerate(parts) for _ in own][1:200]
        assert open_passage([open_side(name)], settings).bootstrap(0).block.tolist() == expected
        assert expected[-1] == 2


@pytest.mark.parametrize("dtype", ["f64", "bf16"])
def test_all_logits_come_back_to_the_last_bit(model: str, text: str, tmp_path: Path, dtype: str) -> None:
    """A reference that rounds, or keeps the rows of another place, makes a model differ from itself."""
    path = save_reference(f"{model}:{dtype}", tmp_path / "ref.safetensors", Settings(on=f"{text}:context=16", tokens=60))
    assert compare(f"trace:{path}", f"{model}:{dtype}").distributions.js.max == 0
    assert load_file(path)["logits"].dtype == {"f64": torch.float64, "bf16": torch.bfloat16}[dtype]


def test_saving_beside_a_comparison_is_saving_alone(
    model: str, text: str, saved: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The forward passes are shared: one window lost or repeated would write another file."""
    out = tmp_path / "beside.safetensors"
    assert main(["compare", model, f"{model}:bf16", "--on", text, "--tokens", "200", "--save", str(out), "--json", "-"]) == 0
    assert out.read_bytes() == Path(saved.removeprefix("trace:")).read_bytes()
    assert f"wrote {out}" in capsys.readouterr().err
    words = "compare", saved, model, "--save", str(tmp_path / "x.safetensors")
    assert "is a file of what was shown already" in mistake(capsys, *words)
    assert "cannot be written" in refusal(save_reference, model, tmp_path / "none" / "a.safetensors", Settings(on=text, tokens=9))
    assert [path.name for path in tmp_path.iterdir()] == ["beside.safetensors"]


def test_what_gpt2_trace_and_another_program_wrote_are_sides(model: str, text: str, tmp_path: Path) -> None:
    """Each row of a trace is run alone: predictions across two rows, or of a row's first token, would be nonsense."""
    path = gpt2.trace(model, text=text, tokens=20, dtype="float64").save(tmp_path / "t.safetensors")
    found = compare(f"trace:{path}", model)
    assert found.distributions.tokens == 4 * 19
    assert found.distributions.kl_ab.max < 1e-10
    assert len(found.activations.points) == 5 + 14 * 2
    assert max(point.error for point in found.activations.points) < 1e-5
    assert compare(f"trace:{path}", f"{model}:bf16").distributions.kl_ab.max > 1e-6
    arrays = load_file(path)
    save_file({"idx": arrays["ids"][1], "logits": arrays["logits"][1]}, tmp_path / "other.safetensors")  # of one row
    other = compare(f"trace:{tmp_path / 'other.safetensors'}", model)
    assert other.distributions.tokens == 19
    assert other.distributions.kl_ab.max < 1e-10


def forged(saved: str, out: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], object]) -> str:
    """A reference with other claims."""
    path = Path(saved.removeprefix("trace:"))
    arrays, about = load_file(path), json.loads(SafetensorsFile(path).metadata["about"])
    change(about, arrays)
    save_file(arrays, out, {"about": json.dumps(about)})
    return f"trace:{out}"


def test_no_claim_is_believed(saved: str, tmp_path: Path) -> None:
    """False claims were tracebacks of torch, and a file that was cut off too."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(Path(saved.removeprefix("trace:")).read_bytes()[:-9])
    with pytest.raises(CheckpointError):
        open_side(f"trace:{path}")
    assert open_side(forged(saved, path, lambda about, arrays: None)).recording.tokenizer  # what is forged is read, if it is true
    claims: list[dict] = [{"windows": {"context": "16"}}, {"side": []}, {"text": None}, {"side": {"dtype": 5}}]
    claims += [{"side": {"files": files}} for files in ({"a": 5}, ["x"], {"a": None})]  # a traceback of `--json`
    held = [("ids", array) for array in (torch.full((200,), -1), torch.full((200,), 10**6), torch.zeros(3), torch.zeros(2, 2, 2))]
    held += [("token_bytes", torch.ones(3).double()), ("logits", torch.zeros(199, dtype=torch.int32))]
    changes = [lambda about, arrays, claim=claim: about.update(claim) for claim in claims]
    changes += [lambda about, arrays, array=array: arrays.update([array]) for array in held]
    for change in changes:
        refused(partial(open_side, forged(saved, path, change)), "is damaged")


def test_a_reference_of_something_else_is_one_line(
    model: str, saved: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Compared with another text or tokenizer, every figure would be wrong, with nothing to see."""
    assert "leave --on out" in refusal(compare, saved, model, on="twelfth-night")
    assert "another tokenizer" in refusal(compare, saved, "shakespeare-mini")
    path = save_reference(model, tmp_path / "b.safetensors", Settings(on=text, tokens=100))
    assert "different texts" in refusal(compare, saved, f"trace:{path}")
    assert "holds no array named ids" in mistake(capsys, "compare", f"trace:{model}/model.safetensors", model)
    assert "gpt2 trace MODEL --out FILE.safetensors" in mistake(capsys, "compare", "trace:none.npz", model)
    assert "give a name that ends in .safetensors" in mistake(capsys, "compare", model, "--save", "ref.npz")
    broken = {"ids": torch.arange(4), "logits": torch.full((4, 300), torch.nan)}
    save_file(broken, tmp_path / "nan.safetensors")
    assert "not finite" in mistake(capsys, "compare", f"trace:{tmp_path / 'nan.safetensors'}", model)
    assert "trace:FILE" in mistake(capsys, "compare", model, "http://127.0.0.1:8080/v1#gpt2")
