"""Interrupted downloads: killed processes, cut connections, damaged partial files, two processes. The server counts requests."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from support import hub_client
from support.commands import refusal
from support.forks import Fork
from support.hub_standin import HubStandIn, Request

from gpt2.checkpoint.cache import Declared
from gpt2.checkpoint.download import fetch

WEIGHTS = bytes(range(251)) * 30_000  # 7.5 MB; with a prime period, so that a misplaced piece is noticed
SIZE = len(WEIGHTS)
FILES = {"config.json": b'{"model_type": "gpt2"}', "model.safetensors": WEIGHTS}
LFS = ("model.safetensors",)
CUT = 5_000_000

HURRY = "from gpt2.checkpoint import download; download.PAUSES = (0.01,) * len(download.PAUSES)"
NO_LOCKS = "from huggingface_hub import utils; utils.WeakFileLock = contextlib.nullcontext"
WINDOWS = """
import errno, fcntl, os
real = os.fsync
def fsync(fd):
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "Bad file descriptor")
    real(fd)
os.fsync = fsync
del os.O_NOFOLLOW
"""


@pytest.fixture
def hub():
    with HubStandIn() as server:
        server.add_repo("org/name", FILES, lfs=LFS)
        yield server


def start(hub: HubStandIn, home: Path, before: str = "", **environ: str) -> Fork:
    return hub_client.start(hub.environ(home, **environ), "org/name", before=before)


def finish(process: Fork) -> dict[str, Any]:
    (result,) = hub_client.finish(process)
    return result


def resolve(hub: HubStandIn, home: Path, before: str = "", **environ: str) -> dict[str, Any]:
    return finish(start(hub, home, before, **environ))


def weights_of(result: dict[str, Any]) -> bytes:
    assert "path" in result, result
    return Path(result["path"], "model.safetensors").read_bytes()


def unfinished(home: Path) -> list[Path]:
    return sorted((home / "hub/models--org--name/blobs").glob("*.incomplete"))


def size_of(file: Path) -> int:
    """Bytes of a partial file; 0 once it has its final name, as a small file may."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def kill_in_the_middle(hub: HubStandIn, home: Path) -> Path:
    """Kill a download that has `CUT` bytes; return its partial file."""
    hub.hold("org/name", "model.safetensors", after=CUT)
    process = start(hub, home)
    deadline = time.monotonic() + 30
    while not (left := unfinished(home)) or size_of(left[0]) < CUT:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.communicate(timeout=30)
    return left[0]


def asked(requests: list[Request]) -> list[str | None]:
    """The Range header of each request for the weights."""
    return [request.range for request in requests if request.cdn and request.method == "GET"]


def test_a_killed_download_goes_on_from_where_it_was(hub: HubStandIn, tmp_path: Path) -> None:
    """After a SIGKILL or a power cut, 5 of gpt2-xl's 6 GB were fetched again."""
    left = kill_in_the_middle(hub, tmp_path)
    assert left.stat().st_size == CUT
    inode = left.stat().st_ino
    result = resolve(hub, tmp_path)
    assert weights_of(result) == WEIGHTS
    assert asked(hub.requests) == [None, f"bytes={CUT}-"]
    assert hub.sent["org/name", "model.safetensors"] == SIZE, "not a byte twice"
    assert unfinished(tmp_path) == []
    file = Path(result["path"], "model.safetensors")
    assert file.is_symlink(), "in the client's own layout"
    assert file.stat().st_ino == inode, "renamed, whole, and not copied a byte at a time"
    assert file.resolve().name == next(iter(hub.repos["org/name"].commits.values()))["model.safetensors"].sha256
    before = len(hub.requests)
    hub_client.fetch_as_others(hub, tmp_path, "hf_hub_download('org/name', 'model.safetensors')")
    assert not asked(hub.requests[before:]), "the client takes it for its own"


@pytest.mark.parametrize(
    ("leftover", "ranges"),
    [
        (WEIGHTS[:100] + b"\0" + WEIGHTS[101:CUT], [f"bytes={CUT}-", None]),
        (WEIGHTS, []),
        (WEIGHTS + b"\0", [None]),
    ],
    ids=["damaged", "whole", "too long"],
)
def test_a_leftover_is_used_if_its_bytes_are_right(hub: HubStandIn, tmp_path: Path, leftover: bytes, ranges: list) -> None:
    """A bad block in a partial file must be found by the hash; the file is then fetched again."""
    (tree,) = hub.repos["org/name"].commits.values()
    left = tmp_path / "hub/models--org--name/blobs" / f"{tree['model.safetensors'].sha256}.gpt2-toolkit.incomplete"
    left.parent.mkdir(parents=True)
    left.write_bytes(leftover)
    assert weights_of(resolve(hub, tmp_path)) == WEIGHTS
    assert asked(hub.requests) == ranges
    assert unfinished(tmp_path) == []


def test_a_cut_connection_is_taken_up_again(hub: HubStandIn, tmp_path: Path) -> None:
    """An unreliable connection must resume. If no more bytes arrive, the download must end."""
    hub.drop("org/name", "model.safetensors", after=2_000_000, times=2)
    result = resolve(hub, tmp_path / "flaky", HURRY)
    assert weights_of(result) == WEIGHTS
    assert asked(hub.requests) == [None, "bytes=2000000-", "bytes=4000000-"]
    assert hub.sent["org/name", "model.safetensors"] == SIZE

    hub.requests.clear()
    left = kill_in_the_middle(hub, tmp_path / "dead")
    hub.drop("org/name", "model.safetensors", after=0)
    result = resolve(hub, tmp_path / "dead", HURRY)
    assert result["error"] == "InputError"
    assert "run it again, it goes on from where it was" in result["message"]
    assert asked(hub.requests) == [None] + [f"bytes={CUT}-"] * 4
    assert left.stat().st_size == CUT


@pytest.mark.parametrize(
    ("setting", "value", "ranges"),
    [
        # It sends the whole file: appending it to the part would be wrong.
        ("ranges", False, [None, f"bytes={CUT}-"]),
        # The real Hub compresses for clients that accept it: a part of the compressed file is not a part of the file.
        pytest.param("gzip", True, [None, f"bytes={CUT}-"], marks=pytest.mark.slow),
        # The host of large files refused ranges for a time: the partial file stayed, and every later run failed.
        ("range_refusal", 403, [None, f"bytes={CUT}-", None]),
        ("range_refusal", 416, [None, f"bytes={CUT}-", None]),
    ],
)
def test_a_killed_download_goes_on_from_any_server(hub: HubStandIn, tmp_path: Path, setting, value, ranges: list) -> None:
    """A server that ignores ranges, compresses, or refuses ranges."""
    hub.gzip = setting == "gzip"
    kill_in_the_middle(hub, tmp_path)
    setattr(hub, setting, value)
    assert weights_of(resolve(hub, tmp_path)) == WEIGHTS
    assert asked(hub.requests) == ranges
    assert unfinished(tmp_path) == []


def test_a_server_without_ranges_that_breaks_off_ends(hub: HubStandIn, tmp_path: Path) -> None:
    """Each connection brings the same first half."""
    hub.ranges = False
    hub.drop("org/name", "model.safetensors", after=SIZE // 2)
    assert "broke off" in resolve(hub, tmp_path, HURRY)["message"]
    assert len(asked(hub.requests)) == 1 + 3


@pytest.mark.slow
def test_a_silent_server_is_asked_again(hub: HubStandIn, tmp_path: Path) -> None:
    """A connection that is open and sends nothing must time out."""
    hub.hold("org/name", "model.safetensors", after=CUT)
    environment = {"HF_HUB_DOWNLOAD_TIMEOUT": "1"}
    assert weights_of(resolve(hub, tmp_path, HURRY, **environment)) == WEIGHTS
    assert asked(hub.requests) == [None, f"bytes={CUT}-"]


def test_an_error_for_now_is_waited_out_and_a_refusal_is_final(hub: HubStandIn, tmp_path: Path) -> None:
    hub.fail("org/name", "model.safetensors", 503, times=2)
    assert weights_of(resolve(hub, tmp_path / "busy", HURRY)) == WEIGHTS
    hub.requests.clear()
    hub.fail("org/name", "model.safetensors", 403)
    result = resolve(hub, tmp_path / "refused", HURRY)
    assert "answers 403 for org/name" in result["message"]
    assert asked(hub.requests) == [None]


def test_a_download_without_links_where_only_what_is_written_can_be_synced(hub: HubStandIn, tmp_path: Path) -> None:
    """On Windows os.fsync fails with EBADF on a file opened for reading, and no flag disables links."""
    result = resolve(hub, tmp_path, WINDOWS, HF_HUB_DISABLE_SYMLINKS="1")
    assert weights_of(result) == WEIGHTS
    assert not any(file.is_symlink() for file in Path(result["path"]).iterdir())


def test_two_processes_at_once(hub: HubStandIn, tmp_path: Path) -> None:
    """One process downloads, the others wait for it."""
    meet(hub, tmp_path)
    assert hub.sent["org/name", "model.safetensors"] == SIZE


@pytest.mark.slow
def test_two_processes_at_once_where_locks_do_nothing(hub: HubStandIn, tmp_path: Path) -> None:
    """Without locks all processes write one file, which must be correct. They meet by chance, so it repeats."""
    for attempt in range(8):
        hub.sent.clear()
        meet(hub, tmp_path / str(attempt), NO_LOCKS)
        if hub.sent["org/name", "model.safetensors"] > SIZE:
            return
    pytest.fail("they never met")


def meet(hub: HubStandIn, home: Path, before: str = "") -> None:
    """Download the same file in three processes at once, with pauses."""
    hub.drop("org/name", "model.safetensors", after=3_000_000, times=2)
    results = [finish(process) for process in [start(hub, home, before) for _ in range(3)]]
    assert [weights_of(result) for result in results] == [WEIGHTS] * 3
    assert unfinished(home) == []


def test_stale_leftovers_are_swept_away(hub: HubStandIn, tmp_path: Path) -> None:
    """Each failed attempt of the client leaves up to 6 GB. Files that may be in use must stay."""
    blobs = tmp_path / "hub/models--org--name/blobs"
    blobs.mkdir(parents=True)
    for name, hours in (("a" * 64 + ".0123abcd", 25), ("b" * 64 + ".gpt2-toolkit", 25), ("c" * 64 + ".0123abcd", 1)):
        (blobs / f"{name}.incomplete").write_bytes(b"part")
        os.utime(blobs / f"{name}.incomplete", (time.time() - hours * 3600,) * 2)
    (tree,) = hub.repos["org/name"].commits.values()
    ours = blobs / f"{tree['model.safetensors'].sha256}.gpt2-toolkit.incomplete"
    ours.write_bytes(WEIGHTS[:CUT])
    os.utime(ours, (0, 0))  # a download may resume after weeks
    assert weights_of(resolve(hub, tmp_path)) == WEIGHTS
    assert [path.name[0] for path in unfinished(tmp_path)] == ["c"]
    assert asked(hub.requests) == [f"bytes={CUT}-"]


@pytest.mark.parametrize("symlinks", [True, False])
def test_what_another_program_fetched_meanwhile_is_used(hub: HubStandIn, tmp_path: Path, symlinks: bool) -> None:
    """If the blob exists, nothing is downloaded, the partial file is removed, and a dangling link is repaired."""
    ((commit, tree),) = hub.repos["org/name"].commits.items()
    storage = tmp_path / "hub/models--org--name"
    blob = storage / "blobs" / tree["model.safetensors"].sha256
    link = storage / "snapshots" / commit / "model.safetensors"
    for folder in (blob.parent, link.parent):
        folder.mkdir(parents=True)
    blob.write_bytes(WEIGHTS)
    blob.with_name(f"{blob.name}.gpt2-toolkit.incomplete").write_bytes(WEIGHTS[:CUT])
    link.symlink_to("../../blobs/gone")
    result = resolve(hub, tmp_path, **({} if symlinks else {"HF_HUB_DISABLE_SYMLINKS": "1"}))
    assert weights_of(result) == WEIGHTS
    assert link.is_symlink() == symlinks
    assert asked(hub.requests) == []
    assert unfinished(tmp_path) == []


def test_a_declared_hash_that_is_none_is_no_path(tmp_path: Path) -> None:
    """The hash names a file in the cache: a server's `../../x` would write anywhere."""
    asked = ("org/name", tmp_path / "snapshots/0", "model.safetensors", Declared("../../../../x", 3))
    assert "declares no hash for model.safetensors" in refusal(fetch, *asked)
    assert list(tmp_path.iterdir()) == []
