"""`gpt2 diagnose --run`: run a user's program on our ids and read its dump; any failure gives one clear line."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.programs.fourteenth import FourteenthBed, Shape

import gpt2
from gpt2.cli.main import main
from gpt2.errors import InputError
from gpt2.port.diagnosis.programs import diagnose_program


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> FourteenthBed:
    return FourteenthBed(tmp_path_factory.mktemp("run") / "tiny", Shape(3, 20, 4, 67, 23, 16, 0))


def script(folder: Path, code: str, arguments: str = "{ids} {out}") -> str:
    """The command that runs these lines of Python; its arguments are `ids`, `out` and the given extra ones."""
    file = folder / "my program.py"
    numpy = "import numpy as np\n" * ("np." in code)  # takes a tenth of a second
    file.write_text(f"import sys\nids, out, *more = sys.argv[1:]\n{numpy}{code}\n")
    return f"{shlex.quote(sys.executable)} {shlex.quote(str(file))} {arguments}"


def test_a_program_gets_ids_as_array_and_text_and_the_model(tmp_path: Path, home: FourteenthBed) -> None:
    """A program that reads another file than the announced one computes something else; with a shell, `>` would be one."""
    code = (
        "array = np.load(ids); assert array.dtype == np.int64 and open(more[0]).read() == ' '.join(map(str, array)) + '\\n'\n"
        "from safetensors.numpy import load_file; assert more[2:] == ['>', '$HOME', '*']\n"
        "held, given = load_file(more[1] + '/model.safetensors'), np.load(__file__[:-3] + '.npz')\n"
        "assert all((held[name] == given[name]).all() for name in held); np.savez(out, a=given[str(array)])"
    )
    model, ids = gpt2.load(str(home.model)), torch.randint(67, (1, 16), generator=torch.Generator().manual_seed(1))
    right = {str(ids[0].numpy()): model(ids)[0], **model.state_dict()}
    np.savez(tmp_path / "my program.npz", **{name: value.detach().numpy() for name, value in right.items()})
    command = script(tmp_path, code, "{ids} {out} {text} {model} > $HOME '*'")
    found = diagnose_program(command, str(home.model), timeout=60)
    assert (found.verdict, found.module) == ("equal", command)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("python 'port.py {ids} {out}", "no closing quotation"),
        ("python port.py {out}", "name {out}, and {ids} or {text}"),
        ("no-such-program {ids} {out}", "no-such-program: cannot be started (No such file"),
        ("raise ValueError('shape (3,)')", "ended with exit code 1: ValueError: shape (3,); correct it, or CMD"),
        ("print('so \\x1b[31mred'); sys.exit(9)", "ended with exit code 9: so \u241b[31mred"),
        ("print('done')", "ended with 0, and wrote nothing at {out}; write {out}.npz"),
        ("import time; time.sleep(60)", "did not end in 0.5 s; give it longer with --timeout"),
        ("np.savez(out, ids=np.arange(16))", "{out}.npz: holds no floating-point arrays"),
    ],
)
def test_a_program_that_fails_is_one_line(command: str, words: str, tmp_path: Path, home: FourteenthBed, capsys) -> None:
    """The user needs what the program said, and not a traceback of ours."""
    limit = "0.5" if "sleep" in command else "60"
    command = command if "{" in command else script(tmp_path, command)
    assert main(["diagnose", "--run", command, "--model", str(home.model), "--timeout", limit]) == 2
    said = capsys.readouterr().err.strip()
    assert words in said
    assert "\n" not in said
    assert main(["diagnose"]) == 2
    assert "give WHAT to diagnose or --run CMD" in capsys.readouterr().err


@pytest.mark.slow
def test_a_program_that_draws_random_numbers_is_told_as_that(tmp_path: Path) -> None:
    """Nobody called eval(): a search in one draw of dropout found nothing, and asked for more arrays."""
    code = "i = np.load(ids); np.savez(out + '.npz', ids=i, logits=np.random.default_rng({}).normal(size={}) * np.ones((3, 67)))"
    home = FourteenthBed(tmp_path / "one block", Shape(1, 20, 4, 67, 3, 3, 0))
    found = diagnose_program(script(tmp_path, code.format("", (3, 67))), str(home.model), timeout=60)
    assert [(cause.id, "eval()" in cause.detail) for cause in found.causes] == [("not-deterministic", True)]
    again = diagnose_program(script(tmp_path, code.format(0, 1)), str(home.model), timeout=60)
    assert "not-deterministic" not in again.table()


PROGRAMS = (Path(gpt2.__file__).parent / "port" / "PROGRAMS.md").read_text()

MAINS = Path(__file__).parents[1] / "support" / "programs" / "mains"
TOOLS = {"python": sys.executable, "c": "gcc", "js": "node", "rust": "rustc", "go": "go"}


def tensors(home: FourteenthBed, faults: list[str]) -> dict[str, np.ndarray]:
    """Intermediates of our NumPy program for the ids of every program: rows (N, M) in float32, and the ids."""
    home.ids = torch.randint(67, (1, 16), generator=torch.Generator().manual_seed(1)).numpy()
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
def test_the_lines_shown_dump(language: str, tmp_path: Path, home: FourteenthBed, capsys: pytest.CaptureFixture[str]) -> None:
    """Users copy these lines: a correct program must compare as equal, and the fault of a wrong one must be named."""
    if shutil.which(TOOLS[language]) is None:
        pytest.skip(f"no {TOOLS[language]} on this machine")
    for code, faults in enumerate(([], ["feed-forward added to its norm"])):
        folder = tmp_path / str(code)
        folder.mkdir()
        command = program(language, folder, tensors(home, faults))
        assert main(["diagnose", "--run", command, "--model", str(home.model), "--json", "-"]) == code
        answer = json.loads(capsys.readouterr().out)
        assert (answer["seen"], answer["module"]) == ("dump", command)
        assert [(cause["id"], cause["where"]) for cause in answer["causes"]] == [("residual-from-normed", "h.*")] * code


def test_ids_are_those_given_unless_the_dump_has_others(tmp_path: Path, home: FourteenthBed) -> None:
    """The diagnosis must use the ids that the program ran."""
    expected = gpt2.load(str(home.model))(torch.arange(9)[None])[0].detach().numpy()
    np.save(tmp_path / "logits.npy", expected)
    code = f"np.savez(out, a=np.load({str(tmp_path / 'logits.npy')!r}), ids=np.arange(9))"
    diagnosis = diagnose_program(script(tmp_path, code), str(home.model), timeout=30)
    assert diagnosis.verdict == "equal"
    code = f"np.savez(out, a=np.load({str(tmp_path / 'logits.npy')!r}))"
    with pytest.raises(InputError, match=r"\{out\}"):  # 9 rows of logits, and 16 ids
        diagnose_program(script(tmp_path, code), str(home.model), timeout=30)
