"""`gpt2 diagnose --run`: somebody's program is run on our ids, and what it leaves is found; whatever it does, one clear line."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support.programs import Home

from gpt2.checkpoint.checkpoint import Checkpoint, open_checkpoint
from gpt2.checkpoint.names import VERIFIES, ModelName
from gpt2.errors import InputError
from gpt2.port.dump.programs import ProgramError, run_program, split


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(tmp_path_factory.mktemp("run") / "tiny")


@pytest.fixture(scope="module")
def checkpoint(home: Home) -> Checkpoint:
    return open_checkpoint(ModelName.parse(str(home.model), VERIFIES))


def script(folder: Path, code: str, arguments: str = "{ids} {out}", name: str = "program.py") -> str:
    """The command that runs these lines of Python, `ids`, `out` and whatever is given after them being its arguments."""
    file = folder / name
    file.write_text(f"import sys\nids, out, *more = sys.argv[1:]\n{code}\n")
    return f"{shlex.quote(sys.executable)} {shlex.quote(str(file))} {arguments}"


SAVE = "import numpy as np; np.savez(out, logits=np.zeros((16, 67)), ids=np.load(ids))"


def test_the_ids_come_as_an_array_and_as_text_and_the_model_as_a_folder(
    tmp_path: Path, checkpoint: Checkpoint, home: Home
) -> None:
    """A program that reads another file than the one it was promised computes something else."""
    code = (
        "import numpy as np; array = np.load(ids); assert array.shape == (16,) and array.dtype == np.int64\n"
        "assert open(more[0]).read() == ' '.join(map(str, array)) + '\\n'\n"
        "np.savez(out, model=np.frombuffer(more[1].encode(), np.uint8), ids=array)"
    )
    with run_program(script(tmp_path, code, "{ids} {out} {text} {model}"), checkpoint, timeout=30) as dump:
        arrays = np.load(dump.path)
        assert arrays["model"].tobytes().decode() == str(home.model.resolve())
        assert arrays["ids"].tolist() == dump.ids[0].tolist()
        assert int(dump.ids.max()) < home.config.vocab_size
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
    """A program that writes to {out} as it stands has no suffix to tell what it wrote."""
    with run_program(script(tmp_path, code), checkpoint, timeout=30) as dump:
        assert dump.path.suffix == suffix
        assert dump.path.is_dir() == (not suffix)


def test_no_shell_reads_the_command(tmp_path: Path, checkpoint: Checkpoint) -> None:
    """A path with spaces would be two words, and `; rm -rf` of a file's name a command."""
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
    """A program that never learns where to write would run for an hour first."""
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
    """The traceback of the user's program is what the user needs, not ours."""
    with (
        pytest.raises(ProgramError) as error,
        run_program(script(tmp_path, code), checkpoint, timeout=30),
    ):
        pass
    assert words in str(error.value)
    assert printed is None or error.value.printed[-1] == printed


def test_only_the_last_lines_are_shown(tmp_path: Path, checkpoint: Checkpoint) -> None:
    """A program that prints each weight would fill the screen."""
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


@pytest.mark.skipif(os.name == "nt", reason="no process groups")
def test_when_time_is_up_its_children_end_too(tmp_path: Path, checkpoint: Checkpoint) -> None:
    """A hanging program's children would go on holding the GPU."""
    pid = tmp_path / "pid"
    command = f"sh -c 'sleep 600 & echo $! > {pid}; echo waiting; wait' {{ids}} {{out}}"
    with pytest.raises(ProgramError) as error, run_program(command, checkpoint, timeout=1):
        pass
    assert "did not end in 1 s" in str(error.value)
    assert error.value.printed == ("waiting",)
    for _ in range(100):
        state = Path(f"/proc/{pid.read_text()}/stat")
        if not state.exists() or state.read_text().split(")")[-1].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the child still runs")
