"""The device verdict: simulated devices that only round are passed by name, and wrong ones are named."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from support.commands import refusal
from support.devices import RIGHT, WRONG, Simulated, simulated
from support.random_models import write_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gpt2
from gpt2.bench import Bench, machine
from gpt2.checkpoint.loading import require_device
from gpt2.cli.main import main
from gpt2.comparison.sides.checkpoint_side import CheckpointSide
from gpt2.comparison.sides.side import environment_of
from gpt2.devices import judge, run
from gpt2.devices.judge import Judge, Verdict
from gpt2.devices.run import DeviceReport, verify_device
from gpt2.measure.environment import environment
from gpt2.measure.metrics import silent
from gpt2.measure.placement import missing_kernel, placed
from gpt2.measure.replay import Replay
from gpt2.measure.rounding import coarser_arithmetics

DTYPES = {"float32", "bfloat16", "float16"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny"), n_embd=24, scale_attn_by_inverse_layer_idx=True))


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("shallow"), n_embd=24, n_layer=1))


QUICK = ("TF32", "ignored gradient")
CASES = [pytest.param(x, id=x.name, marks=() if x.name.startswith(QUICK) else pytest.mark.slow) for x in RIGHT + WRONG]


@pytest.mark.parametrize("case", CASES)
def test_what_a_device_does_is_named(case: Simulated, tiny: str, shallow: str) -> None:
    """TF32 was taken for a bug; and a wrong operator must be named by place and condition, excused by no coarser arithmetic."""
    with simulated(case.replaced):
        report = verify_device(tiny if "h.1." in case.says else shallow, "cpu", dtypes=[case.dtype])
    said = report.first_wrong.sentence if report.first_wrong else f"{report.verdict}: {report.arithmetics}"
    assert case.says in said
    assert report.ok is (case in RIGHT)


def test_this_cpu_is_right_and_not_asked_for_float64(shallow: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Negative control: the CPU's own kernels must not be called wrong. MPS has no float64: a tensor of it there raises."""
    seen = set()

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            seen.update(x.dtype for x in tree_leaves((args, result)) if isinstance(x, torch.Tensor))
            return result

    file, page = tmp_path / "verdict.json", tmp_path / "verdict.html"
    with simulated({}, Watching()):
        assert main(["verify", shallow, "--device", "cpu", "--json", str(file), "--html", str(page)]) == 0
    assert "RIGHT" in capsys.readouterr().out
    assert "RIGHT" in page.read_text()
    body = json.loads(file.read_text())
    assert (body["verdict"], {each["dtype"] for each in body["verdicts"]}) == ("right", DTYPES)
    assert seen == {torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool}


def test_a_result_of_few_numbers_is_not_judged_by_luck() -> None:
    """Of tiny-gpt2 (n_embd 2) a CPU was WRONG: few random errors may all be small, and a right result looks wrong beside them."""
    for seed in range(150):
        found = Judge(torch.device("cpu"), silent)
        generator = torch.Generator().manual_seed(seed)
        a, b = (torch.randn(shape, generator=generator).double() for shape in ((2, 46), (46, 2)))
        found("a batch", 2.0, "mm", "h.0", lambda a, b: [a @ b], [a, b])
        assert [verdict.arithmetic for verdict in found.worst.values()] == ["float32"], seed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_in_16_bits_are_judged_by_their_partial_sums(dtype: torch.dtype) -> None:
    """Neighbouring rows have one sign, so sums in turn go far from the result; and float16 has no small numbers."""
    x, rows = torch.randn(64, 2, generator=torch.Generator().manual_seed(0)), torch.ones(64, 2)
    rows[32:], size = -0.95, 1e-6 if dtype == torch.float16 else 1.0
    upstream = (size * rows * (1 + x.abs() / 8)).to(dtype).double()

    def run(x: torch.Tensor, upstream: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_(), *(torch.ones(2, dtype=x.dtype, requires_grad=True) for _ in "wb")]
        return list(torch.autograd.grad(F.layer_norm(leaves[0], (2,), *leaves[1:]), leaves, upstream))

    found = Judge(torch.device("cpu"), silent, dtype)
    found("training", 3.0, "layer_norm, backward", "ln_f", run, [x.to(dtype).double(), upstream])
    assert [verdict.arithmetic for verdict in found.worst.values()] == [verdict.dtype for verdict in found.worst.values()]


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_equal_numbers_have_equal_errors_in_16_bits(dtype: torch.dtype) -> None:
    """A row of tiny-gpt2's attention was imprecise: its few different weights have few different errors, which add up."""
    signs = torch.randint(2, (1, 1, 1024, 1), generator=torch.Generator().manual_seed(0)) * 2 - 1
    inputs = [(size * signs).to(dtype).double() for size in (0.3, 0.02, 0.02)]
    found = Judge(torch.device("cpu"), silent, dtype)
    attention = partial(F.scaled_dot_product_attention, is_causal=True)
    found("a row of 1024 tokens", 2.0, "attention", "h.0", lambda q, k, v: [attention(q, k, v)], inputs)
    assert [verdict.arithmetic for verdict in found.worst.values()] == [verdict.dtype for verdict in found.worst.values()]


def test_a_call_that_takes_a_list_is_repeated() -> None:
    """torch.cat and torch.stack take lists: without them a call is not seen, or is repeated on the wrong memory."""
    calls, one = [], torch.ones(1).double()
    with Replay(gpt2.load(), torch.float32, lambda *call: calls.append(call)):
        torch.cat([one, one])
    assert [run(2 * one)[0].tolist() for _, _, run, _ in calls] == [[2, 2]]


def test_what_only_the_whole_model_shows_is_named(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators that are right one by one may be wrong one after another; then the first traced point must be named."""

    def late(device, run, inputs):
        results = original(device, run, inputs)
        return [*results[:20], *(1.5 * x for x in results[20:])]  # no operator alone has as many results

    original = judge.on_device
    monkeypatch.setattr(judge, "on_device", late)
    monkeypatch.setattr(run, "_operators", lambda *_: None)
    report = verify_device(tiny, "cpu", dtypes=[torch.float32])
    assert report.first_wrong.sentence.startswith("h.1.attn.v: the whole model is wrong for end to end, float32")


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (NotImplementedError("The operator 'aten::gelu' is not currently implemented for the MPS device."), "aten::gelu"),
        (NotImplementedError("Could not run 'aten::gelu.out' with arguments from the 'CUDA' backend."), "aten::gelu"),
        (RuntimeError("\"gelu_cuda\" not implemented for 'Half'"), "gelu_cuda for Half"),
        (TypeError("BFloat16 is not supported on MPS"), "BFloat16 is not supported on MPS"),
        (RuntimeError("CUDA error: misaligned address"), ""),
    ],
)
def test_what_pytorch_lacks_is_told_from_other_errors(error: Exception, name: str) -> None:
    """A backend without a kernel read as one that computes wrong numbers."""
    assert missing_kernel(error) == name


@pytest.mark.parametrize(
    "error", [NotImplementedError("aten::gelu"), torch.OutOfMemoryError("out of memory"), RuntimeError("lost")]
)
def test_an_operator_that_a_device_lacks_is_not_wrong(error: Exception, shallow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without a kernel, or without memory, must not read as one that computes wrong numbers. Control: another error."""

    def lacking(*args, **rest):
        raise error

    monkeypatch.setattr(run, "_readings", lambda *_: {})  # one row and training are enough
    with simulated({F.gelu: lacking}):
        if isinstance(error, torch.OutOfMemoryError):
            with pytest.raises(gpt2.InputError, match="cpu is out of memory at gelu; judge it with a smaller model"):
                verify_device(shallow, "cpu", dtypes=[torch.float32])
            return
        report = verify_device(shallow, "cpu", dtypes=[torch.float32])
    assert not report.ok
    if report.verdict == "incomplete":
        assert "not implemented on this device: aten::gelu  (gelu in float32, gelu, backward" in report.table()
    else:
        assert "gelu is wrong for one row, attention step by step, float32: it raises: lost" in report.first_wrong.sentence
    assert report.verdict == ("incomplete" if isinstance(error, NotImplementedError) else "wrong")


@pytest.mark.parametrize("command", ["verify", "diagnose"])
def test_ctrl_c_leaves_what_was_judged(command: str, tiny: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Minutes of judging a device, or of a diagnosis before, were lost; and a report of half of it must not say RIGHT."""
    judged, original = [], judge.on_device

    def interrupting(*args):
        if len(judged) == 4:
            raise KeyboardInterrupt  # as Python does at SIGINT
        judged.append(args)
        return original(*args)

    monkeypatch.setattr(judge, "on_device", interrupting)
    gpt2.trace(tiny, tokens=16).save(tmp_path / "dump.npz")
    what, out = [tiny] if command == "verify" else [str(tmp_path / "dump.npz"), "--model", tiny], tmp_path / "x.json"
    assert main([command, *what, "--device", "cpu", "--json", str(out)]) == 130
    body = json.loads(out.read_text())
    device = body if command == "verify" else body["device"]
    assert (device["ok"], device["verdict"], bool(device["verdicts"])) == (False, "interrupted", True)
    assert command == "verify" or body["verdict"] == "equal"


def test_verify_takes_a_device_and_a_dtype(shallow: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What has no effect with a device must be refused; and float64 is what the others are compared with."""
    report = gpt2.verify(f"{shallow}:bf16", device="cpu")
    assert (report.verdict, {each.dtype for each in report.verdicts}) == ("right", {"bfloat16"})
    for unused in ({"quick": True}, {"dtype": "bfloat16"}, {"build": lambda path, dtype: gpt2.load()}):
        assert "leave the others out" in refusal(gpt2.verify, shallow, device="cpu", **unused)
    assert main(["verify", f"{shallow}:fp64", "--device", "cpu"]) == 2
    assert "judged in float32, bfloat16 or float16" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["cuda", "cpu", "mps"])
def test_the_lines_that_turn_an_arithmetic_off_are_settings(kind: str) -> None:
    """A line that names another thing than torch knows changes nothing, and no error says so."""
    lines = [each.off for dtype in DTYPES for each in coarser_arithmetics(getattr(torch, dtype), kind) if each.off]
    for line in lines:
        reduce(getattr, line.partition(" = ")[0].split(".")[1:], torch)
    assert len(lines) == {"cuda": 5, "cpu": 2, "mps": 0}[kind]


@pytest.mark.parametrize("command", ["verify", "generate", "trace --out x.npz", "diagnose port.py"])
def test_a_device_that_is_not_here_is_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A traceback from inside torch says neither what was asked nor what this machine has."""
    assert main([*command.split(), "--device", "cuda:7"]) == 2
    said = capsys.readouterr().err
    assert "no device 'cuda:7' here; this machine has" in said
    assert said.count("\n") == 1


def test_mps_is_not_asked_for_float64() -> None:
    """Loading float64 weights there ended in a traceback from inside torch; the check needs no MPS."""
    assert "mps has no float64" in refusal(require_device, "mps", torch.float64)


def test_a_report_names_the_device_that_was_used() -> None:
    """Figures of a GPU were reported under "cpu"; the meta device stands for one."""
    sides = [replace(CheckpointSide.open("shakespeare-mini"), device=torch.device(device)) for device in ("cpu", "meta")]
    assert [environment_of([side]).device for side in sides] == ["cpu", "meta"]
    assert Bench("gpt2", 1, "float32", 5, (), machine(), "cuda:1 (H100)").table().splitlines()[1] == "cuda:1 (H100)"


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

    monkeypatch.setattr("gpt2.checkpoint.loading.load", Mock(side_effect=error))
    assert main(["generate", "--prompt", "x"]) == 2
    assert capsys.readouterr().err == "gpt2 generate: not enough memory for this; choose a smaller model, batch or context\n"


def test_a_placed_model_takes_ids_to_its_device() -> None:
    """Ids must be copied to the weights, and logits back: on the meta device, for an accelerator, that alone is refused."""
    model = placed(gpt2.load(), torch.device("meta"))
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        model(torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.slow
def test_the_check_of_a_gpu_runs_through_on_the_cpu(tmp_path: Path) -> None:
    """It must be complete before a GPU is seen: a script that fails there costs the only hour with one."""
    script, tiny = Path(__file__).parents[2] / "tools" / "check_gpu.py", write_checkpoint(tmp_path / "model", n_positions=1024)
    options = "--device", "cpu", "--model", tiny, "--pairs", "1", "--out", tmp_path / "found"
    run = subprocess.run([sys.executable, script, *options], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    body = json.loads((tmp_path / "found.json").read_text())
    assert body["ok"]
    assert body["resume"]["kills"] > 0
    assert body["verdict"]["verdict"]["verdict"] == "right"
    assert len((tmp_path / "found.md").read_text().splitlines()) == len(body["rows"]) + 4


def test_cudas_fused_attention_is_told_its_own_line() -> None:
    """Seen on an H100: the line that turns TF32 products off leaves the fused attention of float32 as it is."""
    tf32 = next(one for one in coarser_arithmetics(torch.float32, "cuda") if one.operands)
    asked = Judge(torch.device("cuda"), silent)
    off = [asked._off(tf32, operator) for operator in ("addmm", "scaled_dot_product_attention, backward")]
    assert off == [tf32.off, "torch.backends.cuda.enable_mem_efficient_sdp(False)"]
    verdicts = [Verdict(str(n), "a batch", "float32", "h.0", 1.0, 1.0, tf32.name, advice) for n, advice in enumerate(off)]
    report = DeviceReport("a model", "cuda", "", tuple(verdicts), None, environment(["float32"]), 0, 1.0)
    assert report.arithmetics == {tf32.name: "; ".join(off)}
