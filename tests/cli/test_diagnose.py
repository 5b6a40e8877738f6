"""`gpt2 diagnose FILE.py:build`: for any file, one clear line or a clean result, and the right exit code."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support import forks
from support.commands import alive, as_json, mistake, printed, refusal, watch_a_fork
from support.faulty import CONFIG, write
from support.faulty.exits import HOSTILE, write_hostile

import gpt2
from gpt2.cli.main import main
from gpt2.port.diagnosis import runner
from gpt2.port.terms.report import Diagnosis, Divergence

# Words that the message must contain, for each refused file.
SAID = {
    "hangs_in_forward": "did not end in 3 s (hangs_in_forward.py, line 8, in forward)",
    "crashes_in_build": "(crashes_in_build.py, line 7:",
    "crashes_in_forward": "(crashes_in_forward.py, line 8:",
    "exits": "it calls sys.exit(0) (exits.py, line 7",
    "imports_what_is_not_there": "No module named 'a_package_that_nobody_has_installed'",
    "needs_more": "build(checkpoint_dir, device, compile)",
    "no_build": "has no function build; it has",
    "no_module": "build() returned OrderedDict",
    "class_and_no_instance": "return an instance of it",
    "returns_nan": "its logits are NaN from position 0 on",
    "returns_a_nan_weight": "layers.0.up.weight[0, 0] is nan",
    "returns_hidden": "it returns (2, 8, 20), and logits are (2, 8, 67); return logits",
    "too_big": "not enough memory (too_big.py, line 7",
    "wants_gpu": "needs a GPU, and there is none here (wants_gpu.py, line 7",
}
assert set(SAID) == {name for name, code in HOSTILE.items() if code == 2}  # without words, the exit code alone would be held
DEFAULT = ("prints",)
REAL = (*DEFAULT, "hangs_at_the_end", "hangs_in_forward")  # a real process: how it ends is what they are about


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_hostile(folder.with_name(f"{folder.name}-hostile"))
    return write(folder, CONFIG)


@pytest.mark.parametrize("name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in HOSTILE])
def test_whatever_the_file_does_the_answer_is_clear(
    name: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A file that hangs, exits with 0 or prints JSON must not change what a program reads from our JSON."""
    if name not in REAL:
        monkeypatch.setattr(runner, "watch", watch_a_fork)
    words = ["diagnose", f"{checkpoint}-hostile/{name}.py:build", "--model", str(checkpoint), "--json", "-"]
    assert main([*words, "--timeout", "3" if "hangs_in" in name else "30"]) == HOSTILE[name]
    out, err = capfd.readouterr()
    if HOSTILE[name] == 2:
        assert out == ""
        assert err.count("\n") == 1
        assert err.startswith("gpt2 diagnose: ")
        assert SAID[name] in err
    else:
        assert json.loads(out)["verdict"] == ("equal" if HOSTILE[name] == 0 else "mismatch")
        assert err == ""


def test_an_undetermined_verdict_is_exit_code_1(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CI pipelines branch on it: "differs, and no known cause explains it" must not pass a build."""
    found = Diagnosis("undetermined", Divergence("h.0.ln_1", 0.5), causes=(), logits_error=0.5)
    monkeypatch.setattr(runner, "run", lambda *args, **kwargs: found)
    assert main(["diagnose", "port.py:build"]) == 1


def test_another_checkpoint_is_diagnosed_without_a_port(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """To compare two checkpoints, a port had to be written that loads the one. A file, and a folder."""
    theirs = gpt2.load(str(checkpoint))
    with torch.no_grad():
        theirs.h[1].attn.c_proj.weight.copy_(theirs.h[1].attn.c_proj.weight.t().clone())
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    shutil.copy(checkpoint / "config.json", tmp_path)
    file = str(tmp_path / "model.safetensors")
    found = as_json(capsys, "diagnose", file, "--model", str(checkpoint), code=1)
    assert [(one["id"], one["where"]) for one in found["causes"]] == [("transposed", "h.1.attn.c_proj.weight")]
    assert found["module"] == file
    assert "EQUAL" in printed(capsys, "diagnose", str(checkpoint), "--model", str(checkpoint))
    assert "unknown model 'gtp2'" in mistake(capsys, "diagnose", "gtp2")


@pytest.mark.parametrize("text", ["{", "5", "[]", "[" * 100_000, '{"verdict": "equal"}', '{"causes": [1], "notes": []}', "\xff"])
def test_a_damaged_answer_is_one_line(text: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file runs in the process that writes the answer, and may write there too: it was our traceback."""
    (tmp_path / "port.py").write_text("def build(): ...")
    write_answer = lambda command, folder, *rest: (folder / "answer.json").write_text(text, encoding="latin-1")  # noqa: E731
    monkeypatch.setattr(runner, "watch", write_answer)
    said = refusal(runner.run, str(tmp_path / "port.py"), str(checkpoint))
    assert "port.py:build: the answer of its process is damaged (" in said


ENDLESS = """
import pathlib, subprocess, sys, time
import gpt2

def build():
    return gpt2.load("shakespeare-mini")

def make_step(model):
    def step(x, y):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        pathlib.Path(__file__).with_name("pid").write_text(str(child.pid))
        time.sleep(600)
    return step

def exits(model):
    return lambda x, y: sys.exit(3)
"""


@pytest.mark.slow
def test_a_step_that_never_ends_is_seen_to_run_and_is_ended(tmp_path: Path) -> None:
    """A long diagnosis with nothing on the screen looks like a hang; a step that hangs must not run on, nor what it started."""
    (tmp_path / "port.py").write_text(ENDLESS)
    seen: list[str] = []
    file = str(tmp_path / "port.py")
    for timeout in (3, 20, 80, 320):  # of each stage: on a busy machine, importing torch alone may take longer
        said = refusal(runner.run, file, "shakespeare-mini", step=file, timeout=timeout, progress=seen.append)
        if "one call of its step" in said:
            break
    assert f"one call of its step(x, y) did not end in {timeout} s (port.py, line 12" in said
    assert seen[-1] == "running call 1 of your step"
    wait_until(lambda: not alive((tmp_path / "pid").read_text()))
    said = refusal(runner.run, file, "shakespeare-mini", step=f"{file}:exits", timeout=timeout)
    assert "line 16: return lambda x, y: sys.exit(3)); exits has to return a step that returns the loss" in said  # the module


@pytest.mark.slow
def test_the_process_ends_with_the_command(tmp_path: Path) -> None:
    """After a job's time limit ended the command, its worker and a process of that kept running; its folder stayed."""
    (tmp_path / "port.py").write_text(
        "import os, pathlib, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path / 'aside')!r}).write_text(f'{{os.getpid()}} {{child.pid}}')\n"
        f"os.rename({str(tmp_path / 'aside')!r}, {str(tmp_path / 'pids')!r})\n"
        "while True:\n    pass\n"
    )
    (tmp_path / "temporary").mkdir()
    code = "import sys; from gpt2.cli.main import main; main(sys.argv[1:])"
    environ = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    process = forks.Fork("-c", code, "diagnose", tmp_path / "port.py", environ=environ)
    wait_until((tmp_path / "pids").exists)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    process.kill()
    process.wait()
    try:
        wait_until(lambda: not any(alive(pid) for pid in pids) and not list((tmp_path / "temporary").iterdir()))
    finally:
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)


def wait_until(happened: Callable[[], bool]) -> None:
    for _ in range(600):
        if happened():
            return
        time.sleep(0.05)
    pytest.fail("it did not happen in 30 s")


def test_a_build_without_arguments_is_filled(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`build()` returns a fresh module, and `random:` models have no folder."""
    monkeypatch.setattr(runner, "watch", watch_a_fork)
    (tmp_path / "gpt2.py").write_text(  # this name must not hide our module
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\nfrom support.ports import PORTS\n"
        f"def build():\n    import gpt2\n    return PORTS['nano'].build(gpt2.load({str(checkpoint)!r}).config)\n"
    )
    found = runner.run(str(tmp_path / "gpt2.py"), str(checkpoint))
    assert found.ok, found.table()
    assert found.module == "gpt2.py:build"
