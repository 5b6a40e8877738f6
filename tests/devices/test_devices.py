"""The device verdict: simulated devices that only round are passed by name, and wrong ones are named."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import reduce
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.devices import IMPRECISE, SECOND, WRONG, Simulated, said
from support.random_models import write_checkpoint
from torch.nn.attention import SDPBackend, sdpa_kernel

import gpt2
from gpt2.bench import Bench, machine
from gpt2.checkpoint.loading import require_device
from gpt2.cli import generate_command
from gpt2.cli.main import main
from gpt2.comparison.sides.checkpoint_side import CheckpointSide
from gpt2.comparison.sides.side import environment_of
from gpt2.devices import run
from gpt2.devices.arithmetic import Arithmetic, arithmetics, to_tf32
from gpt2.devices.case import Case
from gpt2.devices.judge import Device, judge
from gpt2.devices.run import verify_device
from gpt2.measure.placement import placed

MODEL = "shakespeare-mini"


def check(simulated: Simulated, imprecise: bool, operators: list[str] | None = None) -> None:
    report = verify_device(MODEL, simulated.device, dtypes=[simulated.dtype], operators=operators)
    assert report.ok is imprecise, said(report)
    assert all(each in said(report) for each in simulated.says), said(report)


NAMED = {each.name: each for each in (*IMPRECISE, *WRONG, *SECOND)}


@pytest.mark.parametrize(
    ("name", "operators"),
    [
        ("TF32 products", ["matrix product", "scores"]),
        ("sums in another order", ["matrix product"]),
        ("attention reads the first row's mask in a batch", ["softmax", "attention"]),
        ("a matrix product reads a transposed weight in order", ["layer norm", "matrix product"]),
        ("GELU overflows", ["GELU", "residual"]),
        ("a copy into a view lands at its memory's start", ["cache"]),
        ("AdamW reads a transposed parameter in order", ["AdamW"]),
    ],
)
def test_a_device_is_told_by_its_operators(name: str, operators: list[str]) -> None:
    """A device that only rounds must not be called wrong, and a wrong one must be named; the slow test has all of them."""
    check(NAMED[name], NAMED[name] in IMPRECISE, operators)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_every_simulated_device_is_named(name: str) -> None:
    """All operators are judged, so the wrong one must be the first that is named, and none of the others."""
    check(NAMED[name], NAMED[name] in IMPRECISE)


def test_this_cpu_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Negative control of all the above: the CPU's own kernels must not be called wrong, and the command says so."""
    file, page = tmp_path / "verdict.json", tmp_path / "verdict.html"
    command = ["verify", str(write_checkpoint(tmp_path / "tiny")), "--device", "cpu", "--json", str(file), "--html", str(page)]
    assert main(command) == 0
    assert "RIGHT" in capsys.readouterr().out
    assert "RIGHT" in page.read_text()
    body = json.loads(file.read_text())
    assert body["verdict"] == "right"
    assert {each["dtype"] for each in body["verdicts"]} == {"float32", "bfloat16", "float16"}


def test_a_wrong_kernel_of_the_cpu_does_not_excuse_itself() -> None:
    """The CPU's own kernels are the finest arithmetic: judged by themselves alone, any result of theirs would pass."""

    def unscaled(attend, q, k, v, scale=None, **rest):
        return attend(q, k, v, scale=scale if q.dtype == torch.float64 else None, **rest)

    with Simulated("", (), functions={F.scaled_dot_product_attention: unscaled}).device.context():
        report = verify_device(MODEL, Device(torch.device("cpu"), "cpu"), dtypes=[torch.float32], operators=["attention"])
    assert not report.ok


def test_another_kernel_of_attention_is_right() -> None:
    """A device has kernels of its own; PyTorch's plain one stands for them."""
    device = Device(torch.device("cpu"), "math kernel", lambda: sdpa_kernel(SDPBackend.MATH))
    assert verify_device(MODEL, device, dtypes=[torch.float32, torch.bfloat16], operators=["attention"]).ok


def test_a_bias_of_zeros_does_not_excuse_a_wrong_kernel() -> None:
    """Zeros are no subnormal numbers: else, beside a zero bias, the CPU's own kernels explained any error of theirs."""
    wrong = Case(
        "product",
        "zero bias",
        lambda x, b: (2 * x + b if x.dtype != torch.float64 else x + b,),
        (torch.ones(8, 16), torch.zeros(16)),
    )
    assert not judge(Device(torch.device("cpu"), "cpu"), wrong, torch.float32).ok


def test_a_device_without_memory_is_not_called_wrong() -> None:
    """A small GPU that computes right must not read that its attention is wrong, because the model does not fit."""

    class Full(Device):
        def run(self, function, inputs):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    with pytest.raises(gpt2.InputError, match="full is out of memory at residual sum: x \\+ y, float32; judge it with a smaller"):
        verify_device(MODEL, Full(torch.device("cpu"), "full"), operators=["residual"])


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (NotImplementedError("The operator 'aten::gelu' is not currently implemented for the MPS device."), "aten::gelu"),
        (NotImplementedError("Could not run 'aten::gelu.out' with arguments from the 'CUDA' backend."), "aten::gelu"),
        (RuntimeError("\"gelu_cuda\" not implemented for 'Half'"), "gelu_cuda for Half"),
        (TypeError("BFloat16 is not supported on MPS"), "BFloat16 is not supported on MPS"),
        (RuntimeError("CUDA error: misaligned address"), None),
    ],
)
def test_an_operator_that_a_device_lacks_is_not_wrong(error: Exception, name: str | None) -> None:
    """A backend without a kernel read as one that computes wrong numbers. Control: another error is still wrong."""

    def lacking(*args, **rest):
        raise error

    device = Simulated("", (), functions={F.gelu: lacking}).device
    report = gpt2.verify_device(MODEL, device, dtypes=[torch.float32], operators=["GELU", "residual sum"])
    assert not report.ok
    if name is None:
        assert report.verdict == "wrong"
        return
    assert (report.verdict, list(report.missing)) == ("incomplete", [name])
    assert f"not implemented on this device: {name}" in report.table()
    assert json.loads(report.to_json())["first_wrong"] is None


def test_ctrl_c_leaves_the_cases_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    """Minutes of judging a device were lost; and a report of half the cases must not say RIGHT."""
    judged = []

    def interrupting(*args):
        if len(judged) == 4:
            raise KeyboardInterrupt  # as Python does at SIGINT
        judged.append(judge(*args))
        return judged[-1]

    monkeypatch.setattr(run, "judge", interrupting)
    assert main(["verify", MODEL, "--device", "cpu", "--json", str(tmp_path / "x.json")]) == 130
    body = json.loads((tmp_path / "x.json").read_text())
    assert (body["ok"], body["verdict"], len(body["verdicts"])) == (False, "interrupted", 4)
    assert "INTERRUPTED  nothing wrong in the 4 cases before" in capsys.readouterr().out


def test_ctrl_c_while_a_device_is_judged_keeps_the_diagnosis(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`gpt2 diagnose --device` lost minutes of diagnosis, and its --json, at Ctrl-C in the part that follows."""

    def interrupting(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "judge", interrupting)
    gpt2.trace(MODEL, tokens=16).save(tmp_path / "dump.npz")
    out = tmp_path / "x.json"
    assert main(["diagnose", str(tmp_path / "dump.npz"), "--model", MODEL, "--device", "cpu", "--json", str(out)]) == 130
    body = json.loads(out.read_text())
    assert (body["verdict"], body["device"]["verdict"], body["device"]["verdicts"]) == ("equal", "interrupted", [])


def test_verify_takes_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command has --device, and Python had another function only; what has no effect there must be refused."""
    monkeypatch.setattr(run, "_cases", lambda material: iter([next(run.forward_cases(material))]))
    assert gpt2.verify(MODEL, device="cpu").verdict == "right"
    for unused in ({"quick": True}, {"dtype": "bfloat16"}, {"build": lambda path, dtype: gpt2.load(MODEL)}):
        with pytest.raises(gpt2.InputError, match="leave the others out"):
            gpt2.verify(MODEL, device="cpu", **unused)


def test_a_dtype_of_the_name_is_the_one_that_is_judged(capsys: pytest.CaptureFixture[str]) -> None:
    """It was ignored; and float64 is what the others are compared with."""
    report = verify_device(f"{MODEL}:bf16", "cpu", operators=["residual"])
    assert {each.dtype for each in report.verdicts} == {"bfloat16"}
    assert main(["verify", f"{MODEL}:fp64", "--device", "cpu"]) == 2
    assert "judged in float32, bfloat16 or float16" in capsys.readouterr().err


def test_nothing_judged_is_not_right() -> None:
    """A misspelt operator selected no case, and of no case all were right."""
    with pytest.raises(gpt2.InputError, match="nothing to judge: no operator's name begins with 'atention'"):
        verify_device(MODEL, "cpu", operators=["atention"])


@pytest.mark.parametrize("kind", ["cuda", "cpu", "mps"])
def test_the_lines_that_turn_an_arithmetic_off_are_settings(kind: str) -> None:
    """A line that names another thing than torch knows changes nothing, and no error says so."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for arithmetic in arithmetics(dtype, kind):
            setting = arithmetic.advice.partition(" = ")[0]
            if setting:
                reduce(getattr, setting.split(".")[1:], torch)
    sums = {each.name: each.advice for each in arithmetics(torch.float16, "cuda")}
    assert "accumulation" in sums["every sum rounded to float16"]


def test_nothing_asks_a_device_for_float64(tmp_path: Path) -> None:
    """MPS has no float64: a tensor of it there raises, and the verdict would be a traceback."""
    seen = set()

    class Watching(Device):
        def run(self, function, inputs):
            seen.update(each.dtype for each in inputs)
            results = super().run(function, inputs)
            seen.update(each.dtype for each in results)
            return results

    assert verify_device(str(write_checkpoint(tmp_path / "tiny")), Watching(torch.device("cpu"), "watched")).ok
    assert seen == {torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool}


def test_tf32_keeps_ten_bits() -> None:
    """A model that keeps another number of bits would call TF32 a bug, or excuse one."""
    x = torch.tensor([1 + 2**-10, 1 + 2**-11, 1 + 2**-11 + 2**-20, -3.0, float("inf"), 0.0])
    assert to_tf32(x).tolist() == [1 + 2**-10, 1.0, 1 + 2**-10, -3.0, float("inf"), 0.0]


def test_an_arithmetic_sums_in_its_own_dtype() -> None:
    """Sums of 16-bit numbers in float32 lose nothing here; sums in 16 bits do, so the two must be told apart."""
    a, b = torch.ones(1, 1000).bfloat16(), torch.ones(1000, 1).bfloat16()
    wide, (partial, every, _) = Arithmetic("sums in float32"), arithmetics(torch.bfloat16)
    results = [each.run(lambda a, b: (a @ b,), (a, b))[0].item() for each in (wide, partial, every)]
    assert results[0] == 1000
    assert results[2] == 256
    assert results[1] != results[2]


@pytest.mark.parametrize(
    "command",
    [
        "verify",
        "generate",
        "bench",
        "explore --html x.html",
        "trace --out x.npz",
        "compare shakespeare-mini shakespeare-mini:bf16",
        "diagnose port.py",
    ],
)
def test_a_device_that_is_not_here_is_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A traceback from inside torch says neither what was asked nor what this machine has."""
    assert main([*command.split(), "--device", "cuda:7"]) == 2
    said = capsys.readouterr().err
    assert "no device 'cuda:7' here; this machine has" in said
    assert said.count("\n") == 1


def test_mps_is_not_asked_for_float64() -> None:
    """Loading float64 weights there ended in a traceback from inside torch; the check needs no MPS."""
    with pytest.raises(gpt2.InputError, match="mps has no float64"):
        require_device("mps", torch.float64)


def test_a_report_names_the_device_that_was_used() -> None:
    """Figures of a GPU were reported under "cpu"; the meta device stands for one."""
    sides = [CheckpointSide.open(MODEL, device=device) for device in ("cpu", "meta")]
    assert [environment_of([side]).device for side in sides] == ["cpu", "meta"]
    assert Bench("gpt2", 1, "float32", 5, (), machine("transformers"), "cuda:1 (H100)").table().splitlines()[2] == "cuda:1 (H100)"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),  # torch on Windows
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes."),  # JAX
    ],
)
def test_a_full_gpu_is_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that does not fit the GPU is the user's to choose smaller, not a traceback from inside torch."""

    def full(*args, **kwargs):
        raise error

    monkeypatch.setattr(generate_command, "run", full)
    assert main(["generate", "--prompt", "x"]) == 2
    assert capsys.readouterr().err == "gpt2 generate: not enough memory for this; choose a smaller model, batch or context\n"


def test_a_placed_model_takes_ids_to_its_device() -> None:
    """Ids that stay on the CPU meet weights elsewhere, and logits elsewhere meet float64 on the CPU: both must be copied.

    The meta device stands for an accelerator: what arrives there runs, and only copying the logits back is refused.
    """
    model = placed(gpt2.load(), torch.device("meta"))
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        model(torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.slow
def test_the_check_of_a_gpu_runs_through_on_the_cpu(tmp_path: Path) -> None:
    """It must be complete before a GPU is seen: a script that fails there costs the only hour with one."""
    script = Path(__file__).parents[2] / "tools" / "check_gpu.py"
    command = [sys.executable, str(script), "--device", "cpu", "--pairs", "1", "--out", str(tmp_path / "found")]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    body = json.loads((tmp_path / "found.json").read_text())
    assert body["ok"]
    assert body["resume"]["kills"] > 0
    assert body["verdict"]["verdict"]["verdict"] == "right"
    assert len((tmp_path / "found.md").read_text().splitlines()) == len(body["rows"]) + 4
