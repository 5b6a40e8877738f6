"""Servers and caches that mean harm, or only speak badly: nothing outside the cache is touched, and each ends in one line."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.hub_standin import Answer, HubStandIn, Request

ROOT = Path(__file__).parents[2]
WEIGHTS = bytes(range(251)) * 8_000  # 2 MB
FILES = {"config.json": b'{"model_type": "gpt2"}', "model.safetensors": WEIGHTS}
LFS = ("model.safetensors",)
MINE = "mine, not the cache's"

RESOLVE = """
import json, logging, sys, time
logging.basicConfig(level="INFO", format="%(message)s")
from gpt2.errors import InputError
from gpt2.checkpoint import hub
begin = time.monotonic()
try:
    source = hub.resolve(sys.argv[1], offline="offline" in sys.argv)
    out = {"path": str(source.path), "revision": source.revision}
except InputError as error:
    out = {"error": str(error)}
print(json.dumps(out | {"seconds": time.monotonic() - begin}))
"""


@pytest.fixture
def hub():
    with HubStandIn() as server:
        server.add_repo("org/name", FILES, lfs=LFS)
        yield server


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The cache's place, five folders deep: `../../..` of any file in it is still below `tmp_path`."""
    return tmp_path / "a/b/c/d/home"


def resolve(hub: HubStandIn, home: Path, *args: str, **environ: str) -> dict[str, Any]:
    """What came of one process: a path, or one line; anything but an InputError is a failure here."""
    home.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-W", "error", "-c", RESOLVE, *(args or ("org/name",))]
    environment = hub.environ(home, **environ) | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert "\n" not in result.get("error", "")
    assert "\x1b" not in result.get("error", "") + done.stderr
    return result | {"stderr": done.stderr}


def storage(home: Path) -> Path:
    return home / "hub/models--org--name"


def outside(home: Path) -> dict[str, str]:
    """All that lies beside the cache."""
    top = home.parents[4]
    return {
        str(file.relative_to(top)): file.read_text() for file in top.rglob("*") if file.is_file() and home not in file.parents
    }


def plant(home: Path) -> list[Path]:
    """A file of the user's wherever a path out of the cache could lead."""
    home.mkdir(parents=True, exist_ok=True)
    files = [folder / "victim" for folder in home.parents[:5]]
    for file in files:
        file.write_text(MINE)
    return files


def told(header: str, value: str) -> Callable[[Request, Answer], Answer]:
    """Every answer about a file has this header."""

    def rewrite(request: Request, answer: Answer) -> Answer:
        about_a_file = "/resolve" in request.path and answer.status < 400
        return replace(answer, headers=answer.headers | {header: value}) if about_a_file else answer

    return rewrite


def saying(part: str, body: bytes, status: int = 200, **headers: str) -> Callable[[Request, Answer], Answer]:
    """Whatever is asked for with ``part`` in its path gets this answer."""

    def rewrite(request: Request, answer: Answer) -> Answer:
        wanted = part in request.path and "resolve" not in request.path
        return Answer(status, answer.headers | headers, body) if wanted else answer

    return rewrite


# ---- nothing that a server says is a path ------------------------------------------------------------------------------


@pytest.mark.parametrize("header", ["ETag", "X-Linked-Etag", "X-Repo-Commit"])
@pytest.mark.parametrize("up", [1, 4, 5, 7])
def test_no_header_becomes_a_path(hub: HubStandIn, home: Path, header: str, up: int) -> None:
    """A small file's ETag named a link out of the cache; when its hash was wrong, the file that it led to was deleted."""
    plant(home)
    before = outside(home)
    hub.rewrite = told(header, f'"{"../" * up}victim"' if "tag" in header.lower() else "../" * up + "victim")
    result = resolve(hub, home)
    assert outside(home) == before
    assert Path(result["path"], "config.json").read_bytes() == FILES["config.json"]


@pytest.mark.parametrize(
    "sha", ["../" * 4 + "new", "../" * 4 + "victim", "/tmp/gpt2-never", "main", "0" * 39, "0" * 41, "A" * 40, ""]
)
def test_a_commit_is_forty_hex_digits(hub: HubStandIn, home: Path, sha: str) -> None:
    """The client makes folders, a listing and a ref of whatever the server calls the commit."""
    plant(home)
    before = outside(home)
    hub.rewrite = saying("/revision/", json.dumps({"id": "org/name", "sha": sha, "siblings": []}).encode())
    result = resolve(hub, home)
    assert outside(home) == before
    assert "does not answer as a Hub does" in result["error"]
    assert not storage(home).exists(), "refused before anything is created"


def test_a_pinned_commit_is_the_commit_that_is_used(hub: HubStandIn, home: Path) -> None:
    """A server that answers another commit than the one asked for must not choose what is loaded."""
    (commit,) = hub.repos["org/name"].commits
    hub.rewrite = told("X-Repo-Commit", "0" * 40)
    result = resolve(hub, home, f"org/name@{commit}")
    assert result["revision"] == commit
    assert [folder.name for folder in (storage(home) / "snapshots").iterdir()] == [commit]


def test_a_ref_in_a_shared_cache_is_no_path(hub: HubStandIn, home: Path) -> None:
    """The client joins the text of `refs/main` to a path."""
    (storage(home) / "refs").mkdir(parents=True)
    (storage(home) / "refs/main").write_text("../../../..")
    (storage(home) / "snapshots").mkdir()
    assert "offline" in resolve(hub, home, "org/name", "offline")["error"]
    assert resolve(hub, home)["revision"] in hub.repos["org/name"].commits


def test_the_token_stays_with_the_hub(hub: HubStandIn, home: Path) -> None:
    """The next page of a listing may be said to lie on another host: only the place in the listing is taken from there."""
    hub.rows_per_page = 1

    def elsewhere(request: Request, answer: Answer) -> Answer:
        link = answer.headers.get("Link", "").replace(hub.endpoint, hub.cdn)
        return replace(answer, headers=answer.headers | {"Link": link}) if link and "/tree/" in request.path else answer

    hub.rewrite = elsewhere
    assert "path" in resolve(hub, home, HF_TOKEN="hf_secret")
    assert all((request.authorization is None) == request.cdn for request in hub.requests)
    assert sum("/tree/" in request.path for request in hub.requests) == len(FILES)


# ---- links and pipes that somebody planted in a shared cache -----------------------------------------------------------


def test_a_planted_link_is_removed_and_never_followed(hub: HubStandIn, home: Path) -> None:
    """A snapshot's entry that leads out of the cache: its hash is wrong, and the file behind it was deleted."""
    folder = Path(resolve(hub, home)["path"])
    victim = plant(home)[0]
    for name in FILES:
        (folder / name).unlink()
        (folder / name).symlink_to(victim)
    result = resolve(hub, home)
    assert victim.read_text() == MINE
    assert {name: Path(result["path"], name).read_bytes() for name in FILES} == FILES


def test_only_a_blob_of_this_repository_is_removed(hub: HubStandIn, home: Path) -> None:
    """Another repository's blob, and a file that only looks like a blob, are not ours to delete."""
    folder = Path(resolve(hub, home)["path"])
    other = home / "hub/models--other--name/blobs" / ("a" * 64)
    other.parent.mkdir(parents=True)
    other.write_text(MINE)
    inner = storage(home) / "blobs/config.json"
    inner.write_text(MINE)
    for target in (other, inner):
        (folder / "config.json").unlink()
        (folder / "config.json").symlink_to(os.path.relpath(target, folder))
        assert resolve(hub, home)["path"] == str(folder)
        assert target.read_text() == MINE


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe"])
def test_a_partial_file_is_a_regular_file_of_its_own(hub: HubStandIn, home: Path, kind: str) -> None:
    """Its name can be known beforehand: through a link the download was written into somebody's file."""
    victim = plant(home)[0]
    (tree,) = hub.repos["org/name"].commits.values()
    part = storage(home) / "blobs" / f"{tree['model.safetensors'].sha256}.gpt2-toolkit.incomplete"
    part.parent.mkdir(parents=True)
    if kind == "link":
        part.symlink_to(victim)
    elif kind == "hard link":
        part.hardlink_to(victim)
    else:
        os.mkfifo(part)
    result = resolve(hub, home)
    assert victim.read_text() == MINE
    assert Path(result["path"], "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("name", ["blobs", "snapshots", "refs", "gpt2-toolkit"])
def test_a_folder_of_the_cache_that_is_a_link_is_not_written_to(hub: HubStandIn, home: Path, name: str) -> None:
    elsewhere = home.parent / "elsewhere"
    elsewhere.mkdir(parents=True)
    (elsewhere / f"{'a' * 64}.old.incomplete").write_text(MINE)
    os.utime(elsewhere / f"{'a' * 64}.old.incomplete", (0, 0))
    storage(home).mkdir(parents=True)
    (storage(home) / name).symlink_to(elsewhere)
    result = resolve(hub, home)
    assert [file.read_text() for file in elsewhere.rglob("*")] == [MINE]
    if name in ("blobs", "snapshots"):
        assert f"{storage(home) / name} is a link" in result["error"]
    else:
        assert "path" in result


def test_a_pipe_in_a_snapshot_does_not_hang(hub: HubStandIn, home: Path) -> None:
    folder = Path(resolve(hub, home)["path"])
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    assert "holds only a part of" in resolve(hub, home, "org/name", "offline")["error"]
    assert Path(resolve(hub, home)["path"], "config.json").read_bytes() == FILES["config.json"]
