"""Hostile or broken servers and caches: only the cache is changed, and each error is one line."""

import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import forks, hub_client
from support.checks import content
from support.hub_client import MINE, beside, fetch_as_others, plant
from support.hub_standin import Answer, HubStandIn, Request

WEIGHTS = bytes(range(251)) * 8_000  # 2 MB
FILES = {"config.json": b'{"model_type": "gpt2"}', "model.safetensors": WEIGHTS}
LFS = ("model.safetensors",)
Rewrite = Callable[[Request, Answer], Answer]


@pytest.fixture
def hub():
    with HubStandIn() as server:
        server.add_repo("org/name", FILES, lfs=LFS)
        yield server


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The cache's folder, five levels deep: `../../..` of any file in it is still below `tmp_path`."""
    return tmp_path / "a/b/c/d/home"


# Root may write anywhere unless it drops that capability (prctl PR_CAPBSET_DROP, CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH).
WITHOUT_PRIVILEGES = """
import ctypes, os, sys
if os.geteuid() == 0:
    for capability in (1, 2):
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def resolve(hub: HubStandIn, home: Path, name: str = "org/name", offline: bool = False, **environ: str) -> dict[str, Any]:
    """The result of one process: a path, or the line of an InputError; other errors fail the test."""
    home.mkdir(parents=True, exist_ok=True)
    (result,) = hub_client.resolve(hub.environ(home, **environ), {"name": name, "offline": offline})
    assert result.get("error", "InputError") in ("InputError", "CheckpointError"), result
    return result


def storage(home: Path) -> Path:
    return home / "hub/models--org--name"


def with_header(header: str, value: str) -> Rewrite:
    """Add this header to every answer about a file."""

    def rewrite(request: Request, answer: Answer) -> Answer:
        about_a_file = "/resolve" in request.path and answer.status < 400
        return replace(answer, headers=answer.headers | {header: value}) if about_a_file else answer

    return rewrite


def answering(part: str, body: bytes, status: int = 200, **headers: str) -> Rewrite:
    """Give this answer to every request with ``part`` in its path."""

    def rewrite(request: Request, answer: Answer) -> Answer:
        wanted = part in request.path and "resolve" not in request.path
        return Answer(status, answer.headers | headers, body) if wanted else answer

    return rewrite


def resolve_each(hub: HubStandIn, home: Path, rewrites: Iterable[Rewrite]) -> list[dict[str, Any]]:
    """The results for several repositories of the same files, each with a different change of the server's answers."""
    ways = {f"org/name-{number}": rewrite for number, rewrite in enumerate(rewrites)}
    for name in ways:
        hub.add_repo(name, FILES, lfs=LFS)

    def rewrite(request: Request, answer: Answer) -> Answer:
        return next((way(request, answer) for name, way in ways.items() if f"/{name}/" in request.path), answer)

    hub.rewrite = rewrite
    home.mkdir(parents=True, exist_ok=True)
    return hub_client.resolve(hub.environ(home), *ways)


def test_no_header_becomes_a_path(hub: HubStandIn, home: Path) -> None:
    """A small file's ETag named a link out of the cache; when the hash was wrong, the link's target was deleted."""
    plant(home.parents[4], home)
    before = beside(home.parents[4], home)
    places = [f"{'../' * up}victim" for up in (1, 4, 5, 7)]
    rewrites = [with_header(header, f'"{place}"') for header in ("ETag", "X-Linked-Etag") for place in places]
    for result in resolve_each(hub, home, [*rewrites, *(with_header("X-Repo-Commit", place) for place in places)]):
        assert content(Path(result["path"])) == FILES
    assert beside(home.parents[4], home) == before


def test_a_commit_is_forty_hex_digits(hub: HubStandIn, home: Path) -> None:
    """The client makes folders, a listing and a ref named after the server's commit id."""
    plant(home.parents[4], home)
    before = beside(home.parents[4], home)
    wrong = ["../" * 4 + "new", "../" * 4 + "victim", "/tmp/gpt2-never", "main", "0" * 39, "0" * 41, "A" * 40, ""]
    infos = [json.dumps({"id": "org/name", "sha": sha, "siblings": []}).encode() for sha in wrong]
    for result in resolve_each(hub, home, [answering("/revision/", info) for info in infos]):
        assert "does not answer as a Hub does" in result["message"]
    assert beside(home.parents[4], home) == before
    assert not list((home / "hub").glob("models--*")), "refused before anything is created"


def test_a_commit_and_a_ref_are_no_paths(hub: HubStandIn, home: Path) -> None:
    """A server must not answer with another commit than the requested one; the client joins the text of `refs/main` to a path."""
    (commit,) = hub.repos["org/name"].commits
    (storage(home) / "refs").mkdir(parents=True)
    (storage(home) / "refs/main").write_text("../../../..")
    (storage(home) / "snapshots").mkdir()
    assert "offline" in resolve(hub, home, offline=True)["message"]
    hub.rewrite = with_header("X-Repo-Commit", "0" * 40)
    for name in (f"org/name@{commit}", "org/name"):
        assert resolve(hub, home, name)["revision"] == commit
    assert [folder.name for folder in (storage(home) / "snapshots").iterdir()] == [commit]


def test_the_token_stays_with_the_hub(hub: HubStandIn, home: Path) -> None:
    """A server may say that the next page of a listing is on another host; only the cursor is taken from that link."""
    hub.rows_per_page = 1

    def elsewhere(request: Request, answer: Answer) -> Answer:
        link = answer.headers.get("Link", "").replace(hub.endpoint, hub.cdn)
        return replace(answer, headers=answer.headers | {"Link": link}) if link and "/tree/" in request.path else answer

    hub.rewrite = elsewhere
    assert "path" in resolve(hub, home, HF_TOKEN="hf_secret")
    assert all((request.authorization is None) == request.cdn for request in hub.requests)
    assert sum("/tree/" in request.path for request in hub.requests) == len(FILES)


def test_a_planted_link_is_removed_and_never_followed(hub: HubStandIn, home: Path) -> None:
    """A snapshot entry that links out of the cache has a wrong hash; the link's target was deleted."""
    folder = Path(resolve(hub, home)["path"])
    victim = plant(home.parents[4], home)[0]
    for name in FILES:
        (folder / name).unlink()
        (folder / name).symlink_to(victim)
    result = resolve(hub, home)
    assert victim.read_text() == MINE
    assert content(Path(result["path"])) == FILES


def test_only_a_blob_of_this_repository_is_removed(hub: HubStandIn, home: Path) -> None:
    """A blob of another repository, or a file that looks like a blob, must not be deleted."""
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
    """The partial file's name is predictable: through a link, the download overwrote a user's file."""
    victim = plant(home.parents[4], home)[0]
    (tree,) = hub.repos["org/name"].commits.values()
    part = storage(home) / "blobs" / f"{tree['model.safetensors'].sha256}.gpt2-toolkit.incomplete"
    part.parent.mkdir(parents=True)
    {"link": part.symlink_to, "hard link": part.hardlink_to, "pipe": lambda _: os.mkfifo(part)}[kind](victim)
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
        assert f"{storage(home) / name} is a link" in result["message"]
    else:
        assert "path" in result


def test_a_pipe_in_a_snapshot_does_not_hang(hub: HubStandIn, home: Path) -> None:
    folder = Path(resolve(hub, home)["path"])
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    assert "holds only a part of" in resolve(hub, home, offline=True)["message"]
    assert Path(resolve(hub, home)["path"], "config.json").read_bytes() == FILES["config.json"]


def tree(rows: Callable[[list[dict[str, Any]]], Any]) -> Rewrite:
    """The listing with a change."""

    def rewrite(request: Request, answer: Answer) -> Answer:
        listing = "/tree/" in request.path and answer.body
        return replace(answer, body=json.dumps(rows(json.loads(answer.body))).encode()) if listing and answer.body else answer

    return rewrite


ODD_ANSWERS: list[tuple[Rewrite, str]] = [
    (answering("/revision/", b'{"id": "org/name"}'), "names no commit"),
    (answering("/revision/", b"<html>Welcome to the airport</html>"), "is not JSON"),
    (answering("/revision/", b"[" * 100_000), "is not JSON"),
    (answering("/revision/", b"9" * 5_000), "is not JSON"),
    (answering("/revision/", b"null"), "names no commit"),
    (answering("/revision/", b"\xff\xfe"), "is not JSON"),
    (answering("/tree/", b"<html>Not here</html>"), "is not JSON"),
    (answering("/tree/", b'{"error": "no"}'), "its listing is not a list"),
    (answering("/tree/", b"[[]]"), "a row that is not a file"),
    (answering("/tree/", b"", 404), "lists none of its files (404)"),
    (answering("/tree/", b"[]"), "has no model.safetensors (no weights to load)"),
    (answering("/tree/", b"[]", Link='<http://[/x?cursor=1>; rel="next"'), "has no next page"),
    (answering("/tree/", b"[]", Link='</x?cursor=MQ%3D%3D>; rel="next"'), "does not end"),
    (tree(lambda rows: [row | {"path": None} for row in rows]), "without a path and a size"),
    (tree(lambda rows: [{"path": row["path"]} for row in rows]), "without a path and a size"),
    (tree(lambda rows: [row | {"oid": None, "lfs": None} for row in rows]), "declares no hash for config.json"),
]


def test_an_answer_that_no_hub_gives_is_one_line(hub: HubStandIn, home: Path) -> None:
    """Invalid answers gave tracebacks or blamed the network: no commit, a null hash, a listing that is HTML or an object."""
    results = resolve_each(hub, home, [rewrite for rewrite, _ in ODD_ANSWERS])
    for result, (_, message) in zip(results, ODD_ANSWERS, strict=True):
        assert message in result["message"]
        assert hub.endpoint in result["message"] or "org/name" in result["message"]


def test_a_body_without_an_end_is_not_read_to_its_end(hub: HubStandIn, home: Path) -> None:
    """The client read the whole body of an error response for its message."""
    endless = Answer(403, {"Transfer-Encoding": "chunked"}, b"1000\r\n" + b"x" * 4096 + b"\r\n")
    hub.rewrite = lambda request, answer: endless
    assert f"{hub.endpoint} answers 403 for org/name" in resolve(hub, home)["message"]


def test_a_question_has_a_limit_in_time(hub: HubStandIn, home: Path) -> None:
    """The listing had no timeout: a server that stopped in the middle blocked the command for ever. A warm cache serves then."""
    parts = {"org/name": "/revision/", "org/other": "/tree/"}
    hub.add_repo("org/other", FILES, lfs=LFS)
    commits = [resolve(hub, home, name)["revision"] for name in parts]
    for name in parts:
        hub.add_repo(name, FILES | {"config.json": b"{}"}, lfs=LFS)

    def wait(request: Request, answer: Answer) -> Answer:
        if any(f"/{name}{part}" in request.path for name, part in parts.items()):
            hub.wait_until_closed(60)
        return answer

    hub.rewrite = wait
    environs = [hub.environ(place, HF_HUB_ETAG_TIMEOUT="1") for place in (home, home / "cold")]
    waiting = [hub_client.start(environ, name) for environ in environs for name in parts]
    *warm, cold, colder = [hub_client.finish(process)[0] for process in waiting]
    assert [result["revision"] for result in warm] == commits
    for result, name in ((cold, "org/name"), (colder, "org/other")):
        assert f"cannot reach the Hub at {hub.endpoint} for {name}" in result["message"]


def test_a_hub_that_asks_to_wait(hub: HubStandIn, home: Path) -> None:
    """429 was treated as an outage: the requested wait was ignored, and the message blamed the network. A number of 5,000 digits
    is one to the client, and none to Python.
    """
    for seconds, says in (("9" * 5000, " s more"), (300, "300 s")):
        hub.limit(seconds)
        assert says in (refused := resolve(hub, home)["message"])
        assert "rate limited" in refused
    hub.limit(0, times=2)  # a request
    asked = []

    def limited(request: Request, answer: Answer) -> Answer:
        asked.append(request)
        first = request.cdn and sum(one.cdn for one in asked) == 1
        return Answer(429, {"RateLimit": '"resolvers";r=0;t=1'}, b"") if first else answer

    hub.rewrite = limited  # the download too
    waited = resolve(hub, home)
    assert Path(waited["path"], "model.safetensors").read_bytes() == WEIGHTS
    assert waited["stderr"].count("rate limited by") == 3
    assert "waiting 1 s" in waited["stderr"]
    hub.limit(300)
    assert resolve(hub, home)["path"] == waited["path"], "a cache that can serve does not wait"


def test_a_mirror_without_sha256(hub: HubStandIn, home: Path) -> None:
    """The file was downloaded twice and refused, although git's hash of the LFS pointer identifies a large file as well."""
    hub.lists_sha256 = False
    result = resolve(hub, home)
    assert Path(result["path"], "model.safetensors").read_bytes() == WEIGHTS
    assert "model.safetensors: the Hub's listing has no sha256 for it" in result["stderr"]
    assert hub.sent["org/name", "model.safetensors"] == len(WEIGHTS)
    again = resolve(hub, home)
    assert "sha256" not in again["stderr"], "checked once"
    hub.corrupt("org/name", "model.safetensors", times=1)
    assert Path(resolve(hub, home.parent / "b")["path"], "model.safetensors").read_bytes() == WEIGHTS, "and damage is seen"


def test_a_mirror_whose_hashes_of_large_files_are_its_own(hub: HubStandIn, home: Path) -> None:
    """Only the size can be checked: the file is used, fetched once, and a warning names it."""
    large = FILES | {"model.safetensors": bytes(11 << 20)}
    hub.add_repo("org/name", large, lfs=LFS)
    hub.lists_sha256 = False
    hub.rewrite = tree(lambda rows: [row | ({"oid": "a" * 40} if row["path"] == "model.safetensors" else {}) for row in rows])
    for _ in range(2):
        result = resolve(hub, home)
        assert result["stderr"].count("model.safetensors: org/name declares no sha256 for it, so it is used unverified") == 1
    assert hub.sent["org/name", "model.safetensors"] == 11 << 20


def test_other_programs_find_our_files_offline(hub: HubStandIn, home: Path) -> None:
    """The layout is the client's: transformers opens our downloads without the network."""
    path = resolve(hub, home)["path"]
    for call, expected in {
        "snapshot_download('org/name')": path,
        "hf_hub_download('org/name', 'config.json')": f"{path}/config.json",
        "scan_cache_dir().warnings": "[]",
    }.items():
        assert fetch_as_others(hub, home, call, HF_HUB_OFFLINE="1") == expected


def test_a_complete_cache_that_is_read_only_serves_online(hub: HubStandIn, home: Path) -> None:
    """Another user's complete cache could only be used offline, although nothing needs to be written. Or one of ours."""
    hub.add_repo("org/ours", FILES, lfs=LFS)
    for name in ("org/name", "org/ours"):
        fetch_as_others(hub, home, f"snapshot_download('{name}')")
    resolve(hub, home, "org/ours")
    for place in (home / "hub", *(home / "hub").rglob("*")):
        if not place.is_symlink():
            os.chown(place, 12345, 12345) if os.geteuid() == 0 else None
            place.chmod(0o555 if place.is_dir() else 0o444)
    for record in (home / "hub").rglob("trees/*.json"):
        record.chmod(0o000)
    before = sorted((home / "hub").rglob("*"))
    results = hub_client.resolve(hub.environ(home), "org/name", "org/ours", within=[sys.executable, "-c", WITHOUT_PRIVILEGES])
    for place in (home / "hub", *(home / "hub").rglob("*")):
        if place.is_dir() and not place.is_symlink():
            place.chmod(0o755)
    assert [result["revision"] for result in results] == [next(iter(repo.commits)) for repo in hub.repos.values()]
    assert sorted((home / "hub").rglob("*")) == before


PAGE = "HUB/org/name/resolve/main/config.json?"  # answers every request with 200 and some JSON


@pytest.mark.parametrize(
    ("environ", "messages"),
    [
        *(({"HF_ENDPOINT": place}, ["HF_ENDPOINT"]) for place in ("nonsense", "http://127.0.0.1:port", "http://[", PAGE)),
        ({"HF_HUB_ETAG_TIMEOUT": "abc"}, ["HF_HUB_ETAG_TIMEOUT=abc is not a whole number of seconds"]),
        ({"HF_HUB_DOWNLOAD_TIMEOUT": "-1"}, ["HF_HUB_DOWNLOAD_TIMEOUT=-1 is not a whole number of seconds"]),
        ({"HTTP_PROXY": "nonsense://127.0.0.1"}, ["no connection can be set up", "correct or unset HTTP_PROXY"]),
        ({"HTTP_PROXY": "http://127.0.0.1:port"}, ["no connection can be set up", "correct or unset HTTP_PROXY"]),
        ({"HTTP_PROXY": "http://127.0.0.1:9"}, ["cannot reach the Hub", "the proxy in HTTP_PROXY"]),
        ({"SSL_CERT_FILE": "/nowhere.pem"}, ["no connection can be set up", "correct or unset SSL_CERT_FILE"]),
        ({"HF_TOKEN": "hf_é"}, ["token holds characters that no token has"]),
        ({"HF_TOKEN": "hf_one hf_two\x07"}, ["token holds characters that no token has"]),
    ],
)
def test_a_wrong_setting_is_named(hub: HubStandIn, home: Path, environ: dict[str, str], messages: list[str]) -> None:
    """With a bad proxy or token the message blamed HF_ENDPOINT; an invalid limit gave a traceback."""
    result = resolve(hub, home, **{key: value.replace("HUB", hub.endpoint) for key, value in environ.items()})
    assert all(message in result["message"] for message in messages), result["message"]


def test_a_refused_token_is_named(hub: HubStandIn, home: Path) -> None:
    said = {"X-Error-Message": "Invalid credentials in Authorization header"}
    hub.rewrite = lambda request, answer: Answer(401, said, b"") if request.authorization else answer
    assert "refuses the token (401): correct HF_TOKEN" in resolve(hub, home, HF_TOKEN="hf_old")["message"]
    assert "path" in resolve(hub, home)


def test_a_wrong_setting_is_named_where_transformers_is_imported(hub: HubStandIn, home: Path) -> None:
    """transformers imports the client, which fails: `gpt2 verify` gave a traceback for a local model."""
    done = forks.run("-m", "gpt2", "verify", environ=hub.environ(home, HF_HUB_ETAG_TIMEOUT="abc"), status=2)
    assert done.stderr.count("\n") == 1, done.stderr
    assert "HF_HUB_ETAG_TIMEOUT=abc is not a whole number of seconds" in done.stderr
