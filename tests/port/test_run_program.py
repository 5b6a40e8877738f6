"""`gpt2 diagnose --run`: run a user's program on our ids and find its output; any failure gives one clear line."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
from support import forks
from support.checks import mostly_slow
from support.commands import alive
from support.programs.bed import Shape
from support.programs.fourteenth import FourteenthBed

import gpt2
from gpt2.checkpoint.checkpoint import Checkpoint, open_checkpoint
from gpt2.checkpoint.names import VERIFIES, ModelName
from gpt2.cli.main import main
from gpt2.errors import InputError
from gpt2.port.diagnosis.runner import watch
from gpt2.port.dump.programs import ProgramError, diagnose_program, given_ids, run_program, split

Answer = TypeVar("Answer")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> FourteenthBed:
    return FourteenthBed(tmp_path_factory.mktemp("run") / "tiny", Shape(3, 20, 4, 67, 23, 16, 0))


@pytest.fixture(scope="module")
def checkpoint(home: FourteenthBed) -> Checkpoint:
    return open_checkpoint(ModelName.parse(str(home.model), VERIFIES))


def script(folder: Path, code: str, arguments: str = "{ids} {out}", name: str = "program.py") -> str:
    """The command that runs these lines of Python; its arguments are `ids`, `out` and the given extra ones."""
    file = folder / name
    file.write_text(f"import sys\nids, out, *more = sys.argv[1:]\n{code}\n")
    return f"{shlex.quote(sys.executable)} {shlex.quote(str(file))} {arguments}"


SAVE = "import numpy as np; np.savez(out, logits=np.zeros((16, 67)), ids=np.load(ids))"


def test_the_ids_come_as_an_array_and_as_text_and_the_model_as_a_folder(
    tmp_path: Path, checkpoint: Checkpoint, home: FourteenthBed
) -> None:
    """A program that reads another file than the announced one computes something else."""
    code = (
        "import numpy as np; array = np.load(ids); assert array.shape == (16,) and array.dtype == np.int64\n"
        "assert open(more[0]).read() == ' '.join(map(str, array)) + '\\n'\n"
        "np.savez(out, model=np.frombuffer(more[1].encode(), np.uint8), ids=array)"
    )
    with run_program(script(tmp_path, code, "{ids} {out} {text} {model}"), checkpoint, timeout=30) as dump:
        arrays = np.load(dump.path)
        assert arrays["model"].tobytes().decode() == str(home.model.resolve())
        assert arrays["ids"].tolist() == dump.ids[0].tolist()
        assert int(dump.ids.max()) < home.shape.vocab
        left = dump.path
    assert not left.parent.exists(), "nothing is left behind"


@pytest.mark.parametrize(
    ("code", "suffix"),
    [
        ("import numpy as np; np.savez(open(out, 'wb'), a=np.zeros(3))", ".npz"),
        ("open(out, 'wb').write((2).to_bytes(8, 'little') + b'{}')", ".safetensors"),
        ("open(out + '.safetensors', 'wb').write(b'?')", ".safetensors"),
        ("import os; os.mkdir(out)", ""),
    ],
)
def test_what_it_wrote_is_found(code: str, suffix: str, tmp_path: Path, checkpoint: Checkpoint) -> None:
    """A program that writes to {out} literally gives a file without a suffix that shows its format."""
    with run_program(script(tmp_path, code), checkpoint, timeout=30) as dump:
        assert dump.path.suffix == suffix
        assert dump.path.is_dir() == (not suffix)


def test_no_shell_reads_the_command(tmp_path: Path, checkpoint: Checkpoint) -> None:
    """With a shell, a path with spaces would be two words, and `; rm -rf` in a file's name a command."""
    folder = tmp_path / "my port; touch stolen $HOME"
    folder.mkdir()
    code = SAVE + "\nopen(more[0], 'w').write(' '.join(more[1:]))"
    said = tmp_path / "said"
    command = script(folder, code, f"{{ids}} {{out}} {said} > '*' '{{curly}} |' && $HOME")
    with run_program(command, checkpoint, timeout=30):
        assert said.read_text() == "> * {curly} | && $HOME"
    assert not [path for path in (Path("stolen"), folder / "stolen") if path.exists()]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", "an empty command"),
        ("python 'port.py {ids} {out}", "no closing quotation"),
        ("python port.py {ids}", "has no {out}"),
        ("python port.py {out}", "has neither {ids}"),
    ],
)
def test_a_command_that_cannot_work_is_refused(command: str, words: str) -> None:
    """A program without the path for its output would run for an hour and then fail."""
    with pytest.raises(InputError) as error:
        split(command)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("code", "words", "printed"),
    [
        ("print('loading'); raise ValueError('shape (3,)')", "ended with exit code 1", "ValueError: shape (3,)"),
        ("print('done')", "wrote nothing at {out}", "done"),
        ("import os; os.abort()", "was killed by SIGABRT", None),
        ("import os; print('to stderr', file=sys.stderr); os._exit(7)", "ended with exit code 7", "to stderr"),
        ("import os; os.mkdir(out); open(out + '.npz', 'w')", "wrote {out} and {out}.npz", None),
    ],
)
def test_a_program_that_fails_says_how(
    code: str, words: str, printed: str | None, tmp_path: Path, checkpoint: Checkpoint
) -> None:
    """The user needs the traceback of the user's program, not ours."""
    with pytest.raises(ProgramError) as error, run_program(script(tmp_path, code), checkpoint, timeout=30):
        pass
    assert words in str(error.value)
    assert printed is None or error.value.printed[-1] == printed


def test_only_the_last_lines_are_shown(tmp_path: Path, checkpoint: Checkpoint) -> None:
    """A program that prints each weight would fill the terminal."""
    code = "for n in range(100_000): print('line', n)\nsys.exit(3)"
    with pytest.raises(ProgramError) as error, run_program(script(tmp_path, code), checkpoint, timeout=30):
        pass
    assert error.value.printed == tuple(f"line {n}" for n in range(99_980, 100_000))


@pytest.mark.parametrize(("program", "words"), [("no-such-program", "on PATH"), ("./gone", "no such file"), ("{file}", "chmod")])
def test_a_program_that_cannot_be_started(program: str, words: str, tmp_path: Path, checkpoint: Checkpoint) -> None:
    """A misspelt name must not end in a traceback."""
    file = tmp_path / "not-executable"
    file.write_text("#!/bin/sh\n")
    command = f"{program.format(file=file)} {{ids}} {{out}}"
    with pytest.raises(ProgramError) as error, run_program(command, checkpoint, timeout=30):
        pass
    assert words in str(error.value)


def waited(answer: Callable[[], Answer]) -> Answer:
    """The answer as soon as it says something, within 30 seconds."""
    for _ in range(600):
        if said := answer():
            return said
        time.sleep(0.05)
    return answer()


@pytest.mark.skipif(os.name == "nt", reason="no process groups")
def test_when_time_is_up_its_children_end_too(tmp_path: Path, checkpoint: Checkpoint) -> None:
    """Child processes of a hanging program would keep using the GPU."""
    pid = tmp_path / "pid"
    command = f"sh -c 'sleep 600 & echo $! > {pid}; echo waiting; wait' {{ids}} {{out}}"
    with pytest.raises(ProgramError) as error, run_program(command, checkpoint, timeout=1):
        pass
    assert "did not end in 1 s" in str(error.value)
    assert error.value.printed == ("waiting",)
    assert waited(lambda: not alive(pid.read_text().strip())), "the child still runs"


LEAVING = """
import os, subprocess, sys, time
child = [sys.executable, "-c", "import os, time; open(os.sys.argv[1], 'a').write(f'{os.getpid()} '); time.sleep(600)", more[0]]
subprocess.Popen(child, start_new_session=True)
if os.fork() == 0:
    os.setsid()
    subprocess.Popen(child, env={}, start_new_session=True)
    os._exit(0)
while len(open(more[0], "a+").seek(0) or open(more[0]).read().split()) < 2:
    time.sleep(0.01)
"""


ENDINGS = ["sys.exit(3)", "os.kill(os.getppid(), 15)", "time.sleep(600)", "os.kill(os.getppid(), 19)", "os.kill(os.getppid(), 9)"]
ENDINGS += ["os.kill(os.getpid(), 19)"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("ending", mostly_slow(ENDINGS, 2))
def test_children_that_have_left_its_session_end_too(ending: str, tmp_path: Path, checkpoint: Checkpoint) -> None:
    """Bug: after setsid, and as orphans without our environment, they outlived a program that ended, hung or stopped itself,
    or its parent."""
    command = script(tmp_path, LEAVING + ending, f"{{ids}} {{out}} {tmp_path / 'pids'}")
    with pytest.raises(ProgramError), run_program(command, checkpoint, timeout=2):
        pass
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_children_that_live_for_a_millisecond_end_too(tmp_path: Path) -> None:
    """Bug: each starts the next and ends, so that no walk through /proc met one: they went on."""
    file = tmp_path / "generations"
    comet = """
    if os.fork() == 0:
        os.setsid()
        while time.time() < end:
            open(sys.argv[1], "a").write("x")
            if os.fork():
                os._exit(0)
    time.sleep(0.3)
    """
    begin = "import os, sys, time; end = time.time() + 5"
    assert watch([sys.executable, "-S", "-c", begin + textwrap.dedent(comet), str(file)], tmp_path, 20.0) == 0
    generations = file.stat().st_size
    time.sleep(0.3)
    assert file.stat().st_size == generations > 5


PROGRAMS = (Path(gpt2.__file__).parent / "port" / "PROGRAMS.md").read_text()

MAINS = Path(__file__).parents[1] / "support" / "programs" / "mains"
TOOLS = {"python": sys.executable, "c": "gcc", "js": "node", "rust": "rustc", "go": "go"}


def tensors(home: FourteenthBed, checkpoint: Checkpoint, faults: list[str]) -> dict[str, np.ndarray]:
    """Intermediates of our NumPy program for the ids of every program: rows (N, M) in float32, and the ids."""
    home.ids = given_ids(checkpoint.config).numpy()
    ids, arrays = home.run("flattened", faults, "float32")
    return {"ids": ids[0].astype(np.int32), **{name: array.reshape(-1, array.shape[-1]) for name, array in arrays.items()}}


def flat(arrays: dict[str, np.ndarray], file: Path) -> None:
    """The ids, then two sizes and the values of each array."""
    ids, *others = arrays.values()
    sizes = (np.array(array.shape, np.int32).tobytes() for array in others)
    file.write_bytes(ids.tobytes() + b"".join(size + array.tobytes() for size, array in zip(sizes, others, strict=True)))


def block(language: str) -> str:
    """The lines of PROGRAMS.md that dump."""
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", PROGRAMS, re.DOTALL)
    return found[0]


def around(language: str, kept: Path, tokens: int) -> str:
    """A program around the lines of PROGRAMS.md, that gets the tensors and checks the ids."""
    text = (MAINS / f"{language}.txt").read_text()
    return text.replace("@dump@", block(language)).replace("@tensors@", str(kept)).replace("@tokens@", str(tokens))


def program(language: str, folder: Path, arrays: dict[str, np.ndarray]) -> str:
    """A program around the lines of PROGRAMS.md, and its command."""
    kept, tokens = folder / "tensors", len(arrays["ids"])
    if language == "python":
        np.savez(kept, **arrays)
        (folder / "my_gpt2.py").write_text(around("python", kept, tokens))
        (folder / "port.py").write_text(block("python"))
        return f"{shlex.quote(sys.executable)} {folder / 'port.py'} {{ids}} {{out}}"
    flat(arrays, kept)
    source = folder / f"port.{language}"
    source.write_text(around(language, kept, tokens))
    if language == "js":
        return f"node {source} {{text}} {{out}}"
    options = {"c": ["-Wall", "-Werror"], "rust": ["-Dwarnings", "--edition=2021"], "go": ["build"]}[language]
    environment = {**os.environ, "GO111MODULE": "off", "GOCACHE": str(folder.parent / "go")}
    command = [TOOLS[language], *options, "-o", str(folder / "port"), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=120, env=environment)
    return f"{folder / 'port'} {{text}} {{out}}"


@pytest.mark.parametrize("language", [pytest.param(name, marks=() if name == "python" else pytest.mark.slow) for name in TOOLS])
def test_the_lines_shown_dump(
    language: str, tmp_path: Path, home: FourteenthBed, checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    """Users copy these lines: a correct program must compare as equal, and the fault of a wrong one must be named."""
    if shutil.which(TOOLS[language]) is None:
        pytest.skip(f"no {TOOLS[language]} on this machine")
    for code, faults in enumerate(([], ["feed-forward added to its norm"])):
        folder = tmp_path / str(code)
        folder.mkdir()
        command = program(language, folder, tensors(home, checkpoint, faults))
        assert main(["diagnose", "--run", command, "--model", str(home.model), "--json", "-"]) == code
        answer = json.loads(capsys.readouterr().out)
        assert answer["seen"] == "dump"
        assert answer["module"] == command
        assert [(cause["id"], cause["where"]) for cause in answer["causes"]] == [("residual-from-normed", "h.*")] * code


def test_ids_are_those_given_unless_the_dump_has_others(tmp_path: Path, home: FourteenthBed) -> None:
    """The diagnosis must use the ids that the program ran, and say so."""
    expected = gpt2.load(str(home.model))(torch.arange(9)[None])[0].detach().numpy()
    np.save(tmp_path / "logits.npy", expected)
    code = f"import numpy as np; np.savez(out, a=np.load({str(tmp_path / 'logits.npy')!r}), ids=np.arange(9))"
    diagnosis = diagnose_program(script(tmp_path, code), str(home.model), timeout=30)
    assert diagnosis.verdict == "equal"
    assert any("the dump's count" in note for note in diagnosis.notes)
    code = f"import numpy as np; np.savez(out, a=np.load({str(tmp_path / 'logits.npy')!r}))"
    with pytest.raises(InputError, match=r"\{out\}"):  # 9 rows of logits, and 16 ids
        diagnose_program(script(tmp_path, code), str(home.model), timeout=30)


def test_a_program_that_draws_random_numbers_is_told_so_first(tmp_path: Path, home: FourteenthBed) -> None:
    """Its numbers follow from no formula: the search took a minute, and named a fault that was not there."""
    code = "import os, numpy as np; noise = np.frombuffer(os.urandom(16 * 67), np.uint8).reshape(16, 67) / 99.0\n"
    command = script(tmp_path, f"{code}np.savez(out, embed=np.ones((16, 8)), logits=noise)")
    found = diagnose_program(command, str(home.model), timeout=30)
    assert [one.id for one in found.causes] == ["not-deterministic"]
    assert found.causes[0].evidence.startswith("logits is the first array that differs, of 1 in 2")


def test_training_steps_that_a_program_dumps_are_judged(
    tmp_path: Path, home: FourteenthBed, checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--run` compared the forward pass alone: a wrong loss in the same dump was called equal."""
    ids = given_ids(checkpoint.config)
    logits = gpt2.load(str(home.model))(ids[:, :-1]).detach()
    loss = torch.nn.functional.cross_entropy(logits[0], ids[0, 1:]).numpy()
    for factor, verdict, causes in ((1, "equal", []), (15, "mismatch", ["loss-not-averaged"])):
        arrays = {"ids": ids[:, :-1].numpy(), "next": ids[:, 1:].numpy(), "logits": logits.numpy(), "loss": factor * loss}
        np.savez(tmp_path / f"{factor}.npz", **arrays)
        command = script(tmp_path, f"import shutil; shutil.copy({str(tmp_path / f'{factor}.npz')!r}, out + '.npz')")
        words = ["diagnose", "--run", command, "--model", str(home.model), "--set", "optim.lr=1e-3", "--json", "-"]
        assert main(words) == bool(causes)
        answer = json.loads(capsys.readouterr().out)
        assert (answer["verdict"], [cause["id"] for cause in answer["causes"]]) == (verdict, causes)


def test_the_command_line_shows_what_the_program_said(
    tmp_path: Path, home: FourteenthBed, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2; the program's last lines, then ours; its control characters must not reach the terminal."""
    code = main(["diagnose", "--run", script(tmp_path, "print('so \\x1b[31mred'); sys.exit(9)"), "--model", str(home.model)])
    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    assert printed.err.splitlines()[0] == "  | so ␛[31mred"
    assert printed.err.splitlines()[1].startswith("gpt2 diagnose: --run: ")
    assert "ended with exit code 9" in printed.err
    for words in (["diagnose"], ["diagnose", "dump.npz", "--run", "x {ids} {out}"]):
        assert main(words) == 2
        assert "give WHAT to diagnose or --run CMD" in capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="no process groups")
def test_ctrl_c_ends_the_program_with_its_children(tmp_path: Path, home: FourteenthBed) -> None:
    """A training run on a GPU would go on after Ctrl-C, and every attempt would leave a copy of the weights in /tmp."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    code = (
        "import os, subprocess, time; child = subprocess.Popen(['sleep', '60'])\n"
        "open(more[0], 'w').write(f'{os.getpid()} {child.pid}\\n'); time.sleep(60)"
    )
    command = script(tmp_path, code, f"{{ids}} {{out}} {tmp_path / 'pids'} {{model}}")
    environ = {**os.environ, "TMPDIR": str(temporary)}
    run = forks.start("-m", "gpt2", "diagnose", "--run", command, "--model", home.model, environ=environ)
    pids = waited(lambda: (tmp_path / "pids").read_text() if (tmp_path / "pids").exists() else "").split()
    assert len(list(temporary.iterdir())) == 1
    run.send_signal(signal.SIGINT)
    try:
        assert run.communicate(timeout=30)[1] == "gpt2 diagnose: interrupted\n"
    finally:
        run.kill()
    assert run.returncode == 130
    assert len(pids) == 2
    assert waited(lambda: not any(alive(pid) for pid in pids)), "they still run"
    assert not list(temporary.iterdir()), "the throw-away folder is still there"
