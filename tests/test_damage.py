"""One look at the weights names what no model can compute with, and remarks on what is far too large."""

import json
import math
from pathlib import Path

import pytest
import torch
from support.commands import refusal, watch_a_fork
from support.random_models import write_checkpoint

import gpt2
from gpt2.checkpoint.describe import describe
from gpt2.cli.main import main
from gpt2.damage import look, require_finite
from gpt2.parity import run
from gpt2.port.diagnosis import runner


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38, -1e30])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_look_names_tensor_entry_and_value(value: float, transposed: bool) -> None:
    """A mean or a sum would say that something is wrong, and not where; a maximum alone misses -inf."""
    intact = {"small": torch.full((3,), 0.5), "zeros": torch.zeros(2), "ids": torch.tensor([1 << 40]), "none": torch.zeros(0, 3)}
    tensors = intact | {"bad": torch.ones(4, 5), "later": torch.ones(4)}
    tensors["bad"][2, 3] = value
    tensors["bad"] = tensors["bad"].t() if transposed else tensors["bad"]
    found = look(tensors.items())
    assert found.counts == {"bad": 1}
    assert found.damage.startswith(f"a damaged value: bad{[3, 2] if transposed else [2, 3]} is {value:.0g}")
    assert found.damage.endswith("usually 0.5")
    assert look(intact.items()).damage == look(intact.items()).outlier == ""


def test_the_worst_of_many_is_named() -> None:
    """A file whose second half is garbage: the line stays a line, and a NaN is not hidden behind a large number."""
    tensors = {f"{name}.weight": torch.ones(2) for name in "abcde"}
    for name, value in zip("abcd", (1e30, math.inf, math.nan, 1e38), strict=True):
        tensors[f"{name}.weight"][1] = value
    counted = "4 damaged values (1 of a.weight, 1 of b.weight, 1 of c.weight and 1 more tensors), the worst: c.weight[1] is nan"
    assert look(tensors.items()).damage.startswith(counted)


def test_a_large_value_is_remarked_on_and_not_refused() -> None:
    """A model may be built with large numbers, so that its attention chooses: it computes, and nobody calls it broken."""
    tensors = {"a": torch.ones(2), "b": torch.ones(2)}
    for value, remarked in ((99.0, False), (1001.0, True), (1e18, True)):
        tensors["b"][0] = value
        found = look(tensors.items())
        assert (found.damage, bool(found.outlier)) == ("", remarked)
    tensors["a"] *= 1e15
    assert look(tensors.items()).outlier == ""


def test_logits_are_judged_by_their_numbers() -> None:
    """The weights of a float16 model may all be usable, and its logits not; then the dtype is named."""
    model = torch.nn.Linear(2, 2).half()
    bad = torch.tensor([[1.0, math.inf]])
    require_finite(bad[:, :1])
    assert "the dtype is too small; load it in float32" in refusal(require_finite, bad, "m", model)
    model.weight.data[1, 0] = 6e4
    assert "weight[1, 0] is 6e+04" in refusal(require_finite, bad, "m", model)
    model.bias.data[1] = math.nan
    assert "it holds a damaged value: bias[1] is nan" in refusal(require_finite, bad, "m", model)


def damaged(folder: Path, name: str, place: tuple[int, ...], value: float, source: str = "shakespeare-mini") -> Path:
    model = gpt2.load(source)
    model.get_parameter(name).data[place] = value
    return gpt2.save(model, gpt2.load_tokenizer(source), folder)


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return damaged(tmp_path_factory.mktemp("damaged"), "h.0.mlp.c_fc.weight", (0, 77), 1e38)


COMMANDS = (
    "verify {bad} --quick",
    "compare {good} {bad} --tokens 40",
    "compare {good} {port} --tokens 40",
    "generate {bad} --prompt a --max-new-tokens 2",
    "generate {bad}:int8 --prompt a --max-new-tokens 2",
    "generate {good} --draft {bad} --temperature 0 --prompt a --max-new-tokens 2",
    "export {bad} {out}",
    "export {port} {out}",
    "diagnose {port} --model {good}",
    "diagnose {good} --model {bad}",
    "explore {bad} --html {out}.html",
    "trace {bad} --out {out}.npz --tokens 4",
    "bench {bad} --pairs 1 --context 8 --tokens 2",
    "train finetune-shakespeare --init {bad} --out {out}",
    "verify {bad} --device cpu",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_names_the_damaged_value(
    command: str, bad: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flipped bit of an exponent: verify blamed the machine, compare and generate the dtype."""
    monkeypatch.setattr(runner, "watch", watch_a_fork)
    port = tmp_path / "port.py"
    port.write_text(f"import gpt2\n\ndef build():\n    return gpt2.load({str(bad)!r})\n")
    names = {"bad": bad, "good": "shakespeare-mini", "port": f"{port}:build", "out": tmp_path / "out"}
    assert main(command.format(**names).split()) == 2
    err = capsys.readouterr().err
    assert "h.0.mlp.c_fc.weight[0, 77] is 1e+38" in err
    assert not any(blamed in err for blamed in ("float32", "machine", "dtype"))


def test_info_and_notes_name_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`info` describes a damaged file, since that is what it is asked for; a usable outlier is a note elsewhere."""
    monkeypatch.setattr(run, "MORE_DRAWS", 1)
    found = describe(str(damaged(tmp_path / "damaged", "h.1.attn.c_attn.bias", (5,), -math.inf)))
    assert found.notes[0].startswith("DAMAGED: holds a damaged value: h.1.attn.c_attn.bias[5] is -inf")
    assert found.not_finite == {"h.1.attn.c_attn.bias": 1}
    large = str(damaged(tmp_path / "large", "h.1.attn.c_attn.bias", (5,), 1e8, str(write_checkpoint(tmp_path / "tiny"))))
    said = "h.1.attn.c_attn.bias[5] is 1e+08"
    assert said in describe(large).notes[0]
    for command in (f"generate {large} --max-new-tokens 1", f"export {large} {tmp_path / 'out'}", f"verify {large} --quick"):
        main(command.split())
        assert said in "".join(capsys.readouterr())
    assert f"{said}, too large for float16" in refusal(gpt2.load, f"{large}:float16")
    assert describe().notes == ()


def test_a_port_may_have_a_mask_of_minus_infinity(tmp_path: Path) -> None:
    """A mask is often a parameter that is not trained: nothing in it is damaged, and compare must not refuse the port."""
    port, model = tmp_path / "port.py", str(write_checkpoint(tmp_path / "model"))
    port.write_text(
        "import gpt2, torch\n\n"
        "class Port(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        f"        self.model = gpt2.load({model!r})\n"
        "        self.mask = torch.nn.Parameter(torch.full((4, 4), -torch.inf).triu(1), requires_grad=False)\n\n"
        "    def forward(self, ids):\n"
        "        return self.model(ids)\n\n"
        "def right():\n    return Port()\n"
    )
    out = tmp_path / "out.json"
    assert main(["compare", model, f"{port}:right", "--tokens", "40", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["distributions"]["same_top"]["value"] == 1
