"""Files from a Hub on loopback, in real processes: what is fetched, asked again and refused, and what a signal leaves."""

import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi
from support import forks
from support.checks import content
from support.hub_standin import HubStandIn

from gpt2.checkpoint.hub import explained
from gpt2.errors import CheckpointError, InputError

CONFIG = b'{"model_type": "gpt2"}'
WEIGHTS = bytes(range(251)) * 8_000  # 2 MB, with a prime period; these tests never read its content
FILES = {"config.json": CONFIG, "vocab.json": b'{"a": 0}', "merges.txt": b"#version: 0.2\n", "model.safetensors": WEIGHTS}
LFS = ("model.safetensors",)
# Resolve every case and print the result, with the files that were hashed.
SCRIPT = """
import json, logging, sys
from gpt2.checkpoint import hub
from gpt2.checkpoint.checkpoint import resolve
from gpt2.errors import InputError
hash, hashed = hub.hashes_of, []
hub.hashes_of = lambda stream: (hashed.append(stream.name.rpartition("/")[2]), hash(stream))[1]
logging.basicConfig(level="WARNING")
logging.getLogger("gpt2").setLevel("INFO")
for case in json.loads(sys.argv[1]):
    hashed.clear()
    try:
        source = resolve(**case)
        print(json.dumps(dict(path=str(source.path), revision=source.revision, hashed=sorted(hashed))))
    except InputError as error:
        print(json.dumps(dict(error=type(error).__name__, message=str(error))))
"""
# Root may write anywhere unless it drops that right (capset with no capabilities, for version 3 and this process).
WITHOUT_PRIVILEGES = """
import ctypes, os
if os.geteuid() == 0:
    assert ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()) == 0
"""


@pytest.fixture
def hub():
    with HubStandIn() as server:
        server.add_repo("org/name", FILES, lfs=LFS)
        yield server


def cases(*names: str | dict[str, Any]) -> str:
    return json.dumps([{"name": name} if isinstance(name, str) else name for name in names])


def resolving(hub: HubStandIn, home: Path, *names: str | dict[str, Any], **environ: str) -> forks.Fork:
    return forks.Fork("-c", SCRIPT, cases(*names), environ=hub.environ(home, **environ), strict=True)


def results(process: forks.Fork) -> list[dict[str, Any]]:
    """The result of each name: ``path``, ``revision`` and ``hashed``, or ``error`` and ``message``; the process' stderr."""
    done = forks.finished(process)
    found = [json.loads(line) | {"stderr": done.stderr} for line in done.stdout.splitlines()]
    assert all(result.get("message", "").isprintable() for result in found)
    return found


def resolve(hub: HubStandIn, home: Path, *names: str | dict[str, Any], **environ: str) -> list[dict[str, Any]]:
    return results(resolving(hub, home, *names, **environ))


def others(hub: HubStandIn, home: Path, call: str, **environ: str) -> str:
    """What another program gets that calls ``call`` of the Hub's client."""
    words = ("-c", f"import huggingface_hub; print(huggingface_hub.{call})")
    return forks.run(*words, environ=hub.environ(home, **environ)).stdout.strip()


def asked(hub: HubStandIn) -> list[str]:
    """The requests since the last call."""
    paths = [f"{request.method} {request.path}" for request in hub.requests]
    hub.requests.clear()
    return paths


OFFLINE = {"name": "org/name", "offline": True}


def test_cold_warm_offline_and_what_is_asked(hub: HubStandIn, tmp_path: Path) -> None:
    """A warm load asks where the branch points, a pinned or an offline one nothing; nothing is hashed twice."""
    first = hub.repos["org/name"].refs["main"]
    clutter = {"pytorch_model.bin": b"pickle", "tf_model.h5": b"tf", "onnx/model.onnx": b"onnx", "README.md": b"#"}
    commit = hub.add_repo("org/name", FILES | clutter | {"vocab.json": b'{"b": 0}'}, lfs=LFS)
    cold, pinned = resolve(hub, tmp_path, "org/name", f"org/name@{first}")
    assert (cold["revision"], pinned["revision"]) == (commit, first)
    assert content(Path(cold["path"])) == FILES | {"vocab.json": b'{"b": 0}'}
    assert content(Path(pinned["path"])) == FILES
    assert cold["hashed"] == sorted(FILES)
    assert pinned["hashed"] == ["vocab.json"], "the others are the same blobs"
    assert not any(name in path for path in asked(hub) for name in clutter)

    warm = resolve(hub, tmp_path, "org/name", f"org/name@{first}")
    assert asked(hub) == ["GET /api/models/org/name/revision/main"]
    flagged = resolve(hub, tmp_path, OFFLINE)
    variable = resolve(hub, tmp_path, "org/name", "org/other", HF_HUB_OFFLINE="1")
    assert [result["revision"] for result in (*warm, *flagged, variable[0])] == [commit, first, commit, commit]
    assert [result["hashed"] for result in (*warm, *flagged, variable[0])] == [[]] * 4
    assert "holds no copy of org/other at main: run once online" in variable[1]["message"]
    assert asked(hub) == []

    moved = hub.add_repo("org/name", FILES | {"vocab.json": b'{"c": 0}'}, lfs=LFS)
    (after,) = resolve(hub, tmp_path, "org/name")
    assert after["revision"] == moved
    assert not any(path.startswith("GET") and "safetensors" in path for path in asked(hub))
    call = "hf_hub_download('org/name', 'model.safetensors')"
    assert others(hub, tmp_path, call, HF_HUB_OFFLINE="1") == f"{after['path']}/model.safetensors", "other programs find it"


SHARDS = {"model.safetensors.index.json": b"{}"} | {f"model-0000{i}-of-00002.safetensors": WEIGHTS[i:] for i in (1, 2)}
BIN_SHARDS = {"pytorch_model.bin.index.json": b"{}"} | {f"pytorch_model-0000{i}-of-00002.bin": WEIGHTS[i:] for i in (1, 2)}
PICKLED = {"config.json": CONFIG, "pytorch_model.bin": WEIGHTS[1:]}
ADAPTER = {"adapter_config.json": b"{}", "adapter_model.safetensors": WEIGHTS[2:]}
GGUF = {"gpt2.Q8_0.gguf": WEIGHTS, "README.md": b"#"}
OPENAI = {"checkpoint": b"", "encoder.json": b"{}", "hparams.json": b"{}", "vocab.bpe": b"", "model.ckpt.index": b"i"}
OPENAI |= {"model.ckpt.data-00000-of-00001": WEIGHTS}
FORMS = {
    "bin": (PICKLED | {"tf_model.h5": b"tf"}, [*PICKLED]),
    "bin-shards": ({"config.json": CONFIG} | BIN_SHARDS, ["config.json", *BIN_SHARDS]),
    "shards-over-bin": (PICKLED | BIN_SHARDS | SHARDS, ["config.json", *SHARDS]),
    "one-file": (PICKLED | SHARDS | {"model.safetensors": WEIGHTS}, ["config.json", "model.safetensors"]),
    "gguf": (GGUF, ["gpt2.Q8_0.gguf"]),
    "nanoGPT": ({"ckpt.pt": WEIGHTS, "vocab.json": b"{}", "training_args.bin": b"args"}, ["vocab.json", "ckpt.pt"]),
    "old": ({"config.json": CONFIG, "tf_model.h5": WEIGHTS, "flax_model.msgpack": b"f"}, ["config.json", "flax_model.msgpack"]),
    "OpenAI": (OPENAI | {"model.ckpt.meta": WEIGHTS, "events.out.tfevents": b"log"}, [*OPENAI]),
    "adapter": (ADAPTER | {"vocab.json": b"{}", "training_args.bin": b"args"}, ["vocab.json", *ADAPTER]),
    "deeper": ({**PICKLED, "deep/model.safetensors": WEIGHTS}, [*PICKLED]),
}


def test_one_form_of_the_weights_is_fetched(hub: HubStandIn, tmp_path: Path) -> None:
    """Both would double the download, and a .bin may run code. Each is complete offline."""
    for form, (files, _) in FORMS.items():
        hub.add_repo(f"org/{form}", files, lfs=tuple(file for file in files if len(files[file]) > 1_000_000))
    online = resolve(hub, tmp_path, *(f"org/{form}" for form in FORMS))
    offline = resolve(hub, tmp_path, *(f"org/{form}" for form in FORMS), HF_HUB_OFFLINE="1")
    for (files, fetched), here, later in zip(FORMS.values(), online, offline, strict=True):
        assert content(Path(here["path"])) == {file: files[file] for file in fetched}
        assert later["path"] == here["path"]


def test_every_refusal_is_one_line_that_says_what_to_do(hub: HubStandIn, tmp_path: Path) -> None:
    """Nothing is downloaded of a repository that cannot be used."""
    hub.add_repo("openai-community/gpt2", FILES)
    hub.add_repo("gated/model", FILES)
    hub.repos["gated/model"].gated = True
    hub.add_repo("no/config", {"model.safetensors": WEIGHTS})
    hub.add_repo("no/weights", {"config.json": CONFIG})
    hub.add_repo("other/formats", {"config.json": CONFIG, "rust_model.ot": WEIGHTS, "onnx/model.onnx": WEIGHTS})
    hub.add_repo("half/adapter", {"README.md": b"#", "adapter_model.safetensors": WEIGHTS})
    hub.add_repo("many/models", {f"q{bits}.gguf": WEIGHTS for bits in range(2, 9)})
    refusals = {
        "nobody/nothing": ("InputError", "no repository nobody/nothing", "and no such path here", "hf auth login"),
        "openai-community/gtp2": ("InputError", "did you mean openai-community/gpt2?"),
        "gpt2@v9": ("InputError", "openai-community/gpt2 has no revision 'v9'"),
        "gpt2@" + "0" * 40: ("InputError", "has no revision '0000"),
        "gated/model": ("InputError", "gated/model is gated", f"{hub.endpoint}/gated/model", "hf auth login"),
        "no/config": ("CheckpointError", "no/config has no config.json"),
        "no/weights": ("CheckpointError", "no/weights has no model.safetensors", "no weights to load"),
        "other/formats": ("CheckpointError", "has no model.safetensors (only onnx/model.onnx, rust_model.ot): choose a revision"),
        "half/adapter": ("CheckpointError", "has no model.safetensors (only adapter_model.safetensors): choose"),
        "many/models": ("CheckpointError", "(only q2.gguf, q3.gguf, q4.gguf and more): fetch the right one of these 7 yourself"),
        "a--b/c": ("InputError", "a--b/c cannot be a repository"),
    }
    for name, result in zip(refusals, resolve(hub, tmp_path, *refusals), strict=True):
        kind, *parts = refusals[name]
        assert result.get("error") == kind, (name, result)
        assert all(part in result["message"] for part in parts), (name, result["message"])
    assert not any(path.startswith("GET") and "/resolve/" in path for path in asked(hub))
    (tmp_path / "file").write_bytes(b"")
    (disk,) = resolve(hub, tmp_path, "gpt2", HF_HUB_CACHE=f"{tmp_path}/file")
    assert disk["error"] == "CheckpointError"
    assert f"cannot store or read openai-community/gpt2 in the cache {tmp_path}/file" in disk["message"]
    (home,) = resolve(hub, tmp_path / "file", "gpt2")
    assert "the Hub's settings cannot be used" in home["message"]


@pytest.mark.parametrize("links", [pytest.param(True, marks=pytest.mark.slow), False], ids=["links", "copies"])
def test_other_bytes_are_refused_and_fetched_at_the_next_run(hub: HubStandIn, tmp_path: Path, links: bool) -> None:
    """The client accepts a flipped byte. Without links (Windows) the hash comes from the listing, not from a blob's name."""
    settings = {} if links else {"HF_HUB_DISABLE_SYMLINKS": "1"}
    for name in ("model.safetensors", "vocab.json"):
        hub.corrupt("org/name", name)
        (refused,) = resolve(hub, tmp_path / name, "org/name", **settings)
        assert refused["error"] == "CheckpointError"
        (declared,) = {tree[name].etag if links else tree[name].oid for tree in hub.repos["org/name"].commits.values()}
        assert f"{name} hashes to " in refused["message"]
        assert f", the Hub declares {declared}: the damaged file was removed, run it again" in refused["message"]
        (again,) = resolve(hub, tmp_path / name, "org/name", **settings)
        assert content(Path(again["path"])) == FILES
        assert Path(again["path"], name).is_symlink() == links


def test_what_another_program_left_damaged_is_found(hub: HubStandIn, tmp_path: Path) -> None:
    """Its file is hashed on our first load. Offline it is refused and stays; online it is removed. A user's file never is."""
    hub.corrupt("org/name", "model.safetensors")
    file = Path(others(hub, tmp_path, "snapshot_download('org/name')"), "model.safetensors")
    offline, online, again = resolve(hub, tmp_path, OFFLINE, "org/name", "org/name")
    assert "run once online" in offline["message"]
    assert "run it again" in online["message"]
    assert content(Path(again["path"])) == FILES
    mine = tmp_path / "mine"  # a blob may be a link to a folder of the user
    mine.write_bytes(WEIGHTS[:-1] + b"\0")
    file.resolve().unlink()
    (file.parent / os.readlink(file)).symlink_to(mine)
    refused, mended = resolve(hub, tmp_path, "org/name", "org/name")
    assert "model.safetensors hashes to" in refused["message"]
    assert file.read_bytes() == WEIGHTS
    assert mended["path"] == str(file.parent)
    assert mine.read_bytes() == WEIGHTS[:-1] + b"\0"
    # `cp -p` and `rsync -a` keep size and mtime even if the bytes were damaged: a copy is hashed again.
    shutil.copytree(tmp_path / "hub", tmp_path / "copy", symlinks=True)
    blob = (tmp_path / "copy" / file.relative_to(tmp_path / "hub")).resolve()
    before = blob.stat()
    blob.write_bytes(WEIGHTS[:-1] + b"\0")
    os.utime(blob, ns=(before.st_atime_ns, before.st_mtime_ns))
    (copied,) = resolve(hub, tmp_path, "org/name", HF_HUB_CACHE=str(tmp_path / "copy"), HF_HUB_OFFLINE="1")
    assert "model.safetensors hashes to" in copied["message"]


def test_a_part_of_a_cache_is_filled_online_and_named_offline(hub: HubStandIn, tmp_path: Path) -> None:
    """Another program may have fetched the tokenizer or config.json alone; files may have been deleted."""
    commit = hub.repos["org/name"].refs["main"]
    others(hub, tmp_path, "snapshot_download('org/name', allow_patterns=['vocab.json', 'merges.txt'])")
    (tokenizer,) = resolve(hub, tmp_path, OFFLINE)
    assert "holds only a part of org/name at main (merges.txt, vocab.json), without config.json" in tokenizer["message"]
    shutil.rmtree(tmp_path / "hub")
    others(hub, tmp_path, "hf_hub_download('org/name', 'config.json')")
    alone, filled = resolve(hub, tmp_path, OFFLINE, f"org/name@{commit}")
    assert "(config.json), without the weights: run once online" in alone["message"]
    assert content(Path(filled["path"])) == FILES
    for name in ("vocab.json", "model.safetensors"):
        Path(filled["path"], name).unlink()
        refused, filled = resolve(hub, tmp_path, OFFLINE, f"org/name@{commit}")
        assert f"), without {name}: run once online" in refused["message"]
        assert content(Path(filled["path"])) == FILES


def test_a_shard_that_another_program_left_out_is_named(hub: HubStandIn, tmp_path: Path) -> None:
    """Only the index says that it belongs there: offline it was called a path that cannot be read."""
    shards = [name for name in SHARDS if name.endswith("rs")]
    index = json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}).encode()
    hub.add_repo("org/name", {"config.json": CONFIG, **SHARDS, "model.safetensors.index.json": index}, lfs=tuple(shards))
    for name in ("config.json", "model.safetensors.index.json", shards[0]):
        others(hub, tmp_path, f"hf_hub_download('org/name', '{name}')")
    named, whole = resolve(hub, tmp_path, OFFLINE, "org/name")
    assert f"), without {shards[1]}: run once online" in named["message"]
    assert Path(whole["path"], shards[1]).read_bytes() == SHARDS[shards[1]]


@pytest.mark.parametrize("filled_by", ["snapshot_download('org/name')", "us"])
def test_a_complete_cache_that_is_read_only_serves_online(hub: HubStandIn, tmp_path: Path, filled_by: str) -> None:
    """Another user's complete cache could only be used offline, although nothing needs to be written."""
    resolve(hub, tmp_path, "org/name") if filled_by == "us" else others(hub, tmp_path, filled_by)
    places = [tmp_path / "hub", *(place for place in (tmp_path / "hub").rglob("*") if not place.is_symlink())]
    for place in places:
        os.chown(place, 12345, 12345) if os.geteuid() == 0 else None
        place.chmod(0o555 if place.is_dir() else 0o444)
    for record in (tmp_path / "hub").rglob("trees/*.json"):
        record.chmod(0o000)  # the client writes it for its own user alone
    asked(hub)
    done = forks.run("-c", WITHOUT_PRIVILEGES + SCRIPT, cases("org/name", OFFLINE), environ=hub.environ(tmp_path))
    for place in places:
        place.chmod(0o755)
    assert [json.loads(line)["revision"] for line in done.stdout.splitlines()] == [hub.repos["org/name"].refs["main"]] * 2
    assert asked(hub) == ["GET /api/models/org/name/revision/main"]


@pytest.mark.slow
def test_a_hub_that_does_not_answer(hub: HubStandIn, tmp_path: Path) -> None:
    """A whole cache serves; else one line names ways out. The client waits for ever for a silent server."""
    (warm,) = resolve(hub, tmp_path / "warm", "org/name")
    hub.fails[""] = (503, "down")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections, never answers
        mute = {"HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}", "HF_HUB_ETAG_TIMEOUT": "1"}
        homes = ("warm", "cold", "warm", "cold")
        running = [resolving(hub, tmp_path / home, "org/name", **({} if i < 2 else mute)) for i, home in enumerate(homes)]
        for home, process in zip(homes, running, strict=True):
            (found,) = results(process)
            ways = ("org/name", "--offline", "a local directory") if home == "cold" else ()
            assert found.get("path") == (warm["path"] if home == "warm" else None)
            assert all(way in found["message"] for way in ways)
    hub.close()
    assert "using the cached" in resolve(hub, tmp_path / "warm", "org/name")[0]["stderr"]


@pytest.mark.parametrize("bug", [AssertionError, TypeError, KeyError, ValueError])
def test_a_bug_of_ours_is_no_trouble_of_the_network(bug: type[Exception], tmp_path: Path) -> None:
    """Any exception in our own lines became "check the network". Control: one that the client raises."""
    with pytest.raises(bug, match="ours"), explained("org/name"):
        raise bug("ours")
    with pytest.raises(InputError, match="check the network"), explained("org/name"):
        HfApi(endpoint="http://127.0.0.1:1").model_info("org/name")
    with pytest.raises(CheckpointError, match="check its disk"), explained("org/name"):
        raise OSError(28, "No space left on device")


def start(hub: HubStandIn, home: Path) -> forks.Fork:
    return forks.Fork("-m", "gpt2", "info", "org/name", environ=hub.environ(home))


@pytest.mark.parametrize(("name", "number"), [("model.safetensors", signal.SIGINT), ("config.json", signal.SIGKILL)])
def test_a_download_that_a_signal_ended_is_done_again(hub: HubStandIn, tmp_path: Path, name: str, number: int) -> None:
    """The client's threads wait for their files after a Ctrl-C, and a part of a file must not be taken for it."""
    hub.hold("org/name", name, after=len(FILES[name]) // 2)
    process = start(hub, tmp_path)
    while not hub.sent[f"org/name/{name}"] and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    if number == signal.SIGINT:
        assert (process.returncode, err.splitlines()[-1]) == (130, "gpt2 info: interrupted")
        assert "Traceback" not in err
    (again,) = resolve(hub, tmp_path, "org/name")
    assert content(Path(again["path"])) == FILES


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        *(({"HF_ENDPOINT": place}, "HF_ENDPOINT") for place in ("nonsense", "http://127.0.0.1:port", "http://[")),
        ({"HF_HUB_ETAG_TIMEOUT": "abc"}, "HF_HUB_ETAG_TIMEOUT=abc"),
        ({"HTTP_PROXY": "nonsense://127.0.0.1"}, "HTTP_PROXY"),
        ({"HTTP_PROXY": "http://me:hf_secret@127.0.0.1:9"}, "HTTP_PROXY"),
        ({"SSL_CERT_FILE": "/nowhere.pem"}, "SSL_CERT_FILE"),
        ({"HF_TOKEN": "hf_secret\x07"}, "the token holds characters that no token has"),
    ],
)
def test_a_wrong_setting_is_named(hub: HubStandIn, tmp_path: Path, environ: dict[str, str], says: str) -> None:
    """A bad proxy blamed HF_ENDPOINT, a bad limit gave a traceback, a bad token is in the client's message."""
    (result,) = resolve(hub, tmp_path, "org/name", **environ)
    assert says in result["message"]
    assert "hf_secret" not in result["message"] + result["stderr"]


def test_a_wrong_setting_is_named_where_transformers_is_imported(hub: HubStandIn, tmp_path: Path) -> None:
    """transformers imports the client, which fails: `gpt2 verify` gave a traceback for a local model."""
    done = forks.run("-m", "gpt2", "verify", environ=hub.environ(tmp_path, HF_HUB_ETAG_TIMEOUT="abc"), status=2)
    assert done.stderr.count("\n") == 1, done.stderr
    assert "HF_HUB_ETAG_TIMEOUT=abc" in done.stderr


@pytest.mark.parametrize(("status", "says"), [(401, "correct HF_TOKEN"), (429, "wait some minutes and run it again, or log in")])
def test_a_refused_request_is_named(hub: HubStandIn, tmp_path: Path, status: int, says: str) -> None:
    """A refused token, and a rate limit, were blamed on the network."""
    hub.fails["revision"] = (status, "ordered")
    message = resolve(hub, tmp_path, "org/name", HF_TOKEN="hf_old")[0]["message"]
    assert f"answers {status} for org/name (ordered): " in message
    assert says in message
