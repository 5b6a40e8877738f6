"""The wheel holds every file of the package, and works in an empty folder."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import gpt2

ROOT = Path(__file__).parents[1]


def run(*command: str | Path, cwd: Path) -> str:
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=outside, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_is_whole_and_does_the_main_job_from_an_empty_folder(tmp_path: Path) -> None:
    """A template or recipe that is not in the wheel is missing for users only."""
    from flit_core import buildapi

    dist, empty = tmp_path / "dist", tmp_path / "empty"
    dist.mkdir(), empty.mkdir()
    files = (path for path in (ROOT / "gpt2").rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    inside = {path.relative_to(ROOT).as_posix() for path in files}
    with contextlib.chdir(ROOT):
        sdist = dist / buildapi.build_sdist(dist)
    shutil.unpack_archive(sdist, tmp_path / "unpacked", filter="data")
    with contextlib.chdir(next((tmp_path / "unpacked").iterdir())):
        wheel = dist / buildapi.build_wheel(dist)  # so the former has all that it has
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert {name for name in names if ".dist-info/" not in name} == inside
    assert {"gpt2/py.typed", f"gpt2_toolkit-{gpt2.__version__}.dist-info/licenses/LICENSE"} <= names
    assert "License-Expression: MIT\n" in metadata

    venv.create(tmp_path / "venv")
    binaries = tmp_path / "venv" / "bin"
    own = Path(run(binaries / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=empty).strip())
    pip = [sys.executable, "-m", "pip", "--python", binaries / "python"]
    run(*pip, "install", "-q", "--no-deps", "--no-index", "--no-compile", wheel, cwd=empty)
    # Only now: otherwise pip would find the same version and skip the installation. A folder in a .pth is searched last, and
    # its own .pth files, such as an editable install, are not read.
    (own / "lent.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
    place = run(binaries / "python", "-c", "import gpt2; print(gpt2.__file__)", cwd=empty).strip()
    assert Path(place).is_relative_to(own)
    for command in ((binaries / "gpt2",), (binaries / "python", "-m", "gpt2")):
        assert run(*command, "--version", cwd=empty) == f"gpt2-toolkit {gpt2.__version__}\n"
    commands = ["verify", "--quick", "--json", "found"], ["train", "--list"], ["explore", "--html", "page.html"]
    code = f"from gpt2.cli.main import main; assert not [words for words in {commands} if main(words)]"  # torch begins once
    assert "shakespeare-mini" in run(binaries / "python", "-c", code, cwd=empty)
    assert json.loads((empty / "found").read_text())["verdict"] == "equal"
    assert sorted(path.name for path in empty.iterdir()) == ["found", "page.html"]
