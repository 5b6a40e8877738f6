"""Model names and the Hub client, against a real server on loopback."""

import json
import os
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from support.checks import content as files_in
from support.commands import refusal
from support.hub_client import fetch_as_others
from support.hub_client import resolve as run
from support.hub_standin import HubStandIn

from gpt2.checkpoint.checkpoint import resolve
from gpt2.checkpoint.hub import WARM_PATIENCE
from gpt2.checkpoint.names import DEFAULT, EXPORTS, RUNS, VERIFIES, ModelName, RandomWeights

CONFIG = b'{"model_type": "gpt2"}'
WEIGHTS = bytes(range(256)) * 4096  # 1 MiB; these tests never read its content
OFFLINE = {"name": "org/name", "offline": True}
FILES = {"config.json": CONFIG, "vocab.json": b'{"a": 0}', "merges.txt": b"#version: 0.2\n", "model.safetensors": WEIGHTS}
LFS = ("model.safetensors",)


@pytest.fixture
def hub():
    with HubStandIn() as server:
        yield server


def content(result: dict, file: str) -> bytes:
    return Path(result["path"], file).read_bytes()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2", ("gpt2", None, None)),
        ("gpt2:bf16", ("gpt2", None, "bfloat16")),
        ("gpt2:f32", ("gpt2", None, "float32")),
        ("gpt2:int8", ("gpt2", None, "int8")),
        ("gpt2@v1", ("gpt2", "v1", None)),
        ("org/name@refs/pr/1", ("org/name", "refs/pr/1", None)),
        ("org/name@v1:float16", ("org/name", "v1", "float16")),
        ("./dir/x.safetensors:fp64", ("./dir/x.safetensors", None, "float64")),
        ("./dir/no@x", ("./dir/no@x", None, None)),
        ("random:gpt2", ("random:gpt2", None, None, RandomWeights("gpt2", 0))),
        ("random:gpt2:3", ("random:gpt2:3", None, None, RandomWeights("gpt2", 3))),
        ("random:gpt2:bf16", ("random:gpt2", None, "bfloat16", RandomWeights("gpt2", 0))),
        ("random:gpt2-xl:7:bf16", ("random:gpt2-xl:7", None, "bfloat16", RandomWeights("gpt2-xl", 7))),
        ("random:gpt2:3:int8", ("random:gpt2:3", None, "int8", RandomWeights("gpt2", 3))),
        ("odd:dir/model", ("odd:dir/model", None, None)),
        (r"C:\models\gpt2", (r"C:\models\gpt2", None, None)),
        ("run:bf16", ("run:bf16", None, None)),  # a path that exists is not split
        ("run:bf16:fp32", ("run:bf16", None, "float32")),
        ("run@v1", ("run@v1", None, None)),
    ],
)
def test_the_parts_of_a_name(name: str, expected: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Base, revision and dtype, and what random weights are drawn from."""
    for folder in ("run:bf16", "run@v1"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)
    parsed = ModelName.parse(name)
    assert (parsed.base, parsed.revision, parsed.dtype, parsed.random) == (*expected, None)[:4]


@pytest.mark.parametrize(
    ("name", "beside", "match"),
    [
        ("gpt2:int8", {"use": VERIFIES}, "gpt2:int8: eight bits are for running a model"),
        ("gpt2:int8", {"use": EXPORTS}, "gpt2:int8: eight bits are for running a model"),
        ("gpt2", {"use": VERIFIES, "dtype": "int8"}, "eight bits are for running a model"),
        ("gpt2@v1:bf16", {"dtype": "fp16"}, "give one of them"),
        ("gpt2@v1:bf16", {"revision": "v2"}, "disagree"),
        ("random:gpt2", {"revision": "v1"}, "random:gpt2 has no revisions"),
        *((f"random:{bad}", {}, "gpt2-medium") for bad in ("", "gpt3", "gpt2:x", "gpt2:-1", "gpt2:", "gpt2:1:2")),
        (f"random:gpt2:{2**63}", {}, "within 0 .. 2**63"),
    ],
)
def test_a_name_that_contradicts_itself_or_its_use(name: str, beside: dict[str, Any], match: str) -> None:
    """No file holds int8 weights, and transformers cannot verify them: int8 is for running a model only."""
    assert match in refusal(ModelName.parse, name, **beside)
    assert ModelName.parse("gpt2@v1:bf16", EXPORTS, dtype="bf16", revision="v1") == ModelName.parse("gpt2@v1:bf16", VERIFIES)
    assert ModelName.parse("gpt2", RUNS, dtype="int8").dtype == "int8"


def test_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder wins over a repository of the same name, but not over an official short name: many folders contain a ``gpt2``."""
    (tmp_path / "out/step-2000").mkdir(parents=True)
    (tmp_path / "a@b").mkdir()
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "ckpt.pt").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("out/step-2000", "ckpt.pt", "a@b", "./gpt2", str(tmp_path), "~/ckpt.pt"):
        source = resolve(name)
        assert (source.name, source.revision) == (name, None)
        assert source.path == Path(name).expanduser()
    assert "has no revisions" in refusal(resolve, "out/step-2000", revision="main")
    assert "no such file or directory: ./out/step-200 (did you mean step-2000?)" in refusal(resolve, "./out/step-200")


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("gtp2", "did you mean gpt2?"),
        ("GPT2-Medium", "did you mean gpt2-medium?"),
        ("shakespear-mini", "did you mean shakespeare-mini?"),
        ("", "unknown model ''"),
        ("a/b/c", "no such folder; gpt2 train RECIPE --out a/b/c makes one"),
        ("random:gpt2", "unknown model"),
        ("gpt2@", "cannot be a revision"),
        ("org/name@../../etc", "cannot be a revision"),
        ("two words", "unknown model"),
        *((path, "no such file or directory") for path in ("./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "../nowhere")),
    ],
)
def test_unknown_names(name: str, match: str) -> None:
    assert match in refusal(resolve, name)


def test_download_cold_warm_offline(hub: HubStandIn, tmp_path: Path) -> None:
    """Redirects, revisions and the fetched files; then warm and offline. The server counts requests."""
    extra = {"pytorch_model.bin": b"pickle", "tf_model.h5": b"tf", "onnx/model.onnx": b"onnx", "README.md": b"#"}
    first = hub.add_repo("openai-community/gpt2", FILES | extra, lfs=(*LFS, "pytorch_model.bin"))
    hub.tag("openai-community/gpt2", "v1", first)
    main = hub.add_repo("openai-community/gpt2", FILES | extra | {"vocab.json": b'{"b": 0}'}, lfs=LFS)
    pull = hub.add_repo("openai-community/gpt2", FILES | {"vocab.json": b'{"c": 0}'}, lfs=LFS, branch="refs/pr/1")
    shards = {f"model-0000{i}-of-00002.safetensors": WEIGHTS[i:] for i in (1, 2)}
    sharded = {"config.json": CONFIG, "model.safetensors.index.json": b"{}"} | shards
    hub.add_repo("new/name", sharded, lfs=tuple(shards))
    hub.alias("old/name", "new/name")
    hub.alias("gpt2", "openai-community/gpt2")
    environ = hub.environ(tmp_path, HF_TOKEN="hf_secret")

    names = ["gpt2", "gpt2@v1", "openai-community/gpt2@refs/pr/1", {"name": "gpt2", "revision": first}, "old/name"]
    cold = run(environ, *names)
    assert [result.get("revision", result) for result in cold[:4]] == [main, first, pull, first]
    assert cold[0]["name"] == "openai-community/gpt2"
    assert [content(result, "vocab.json") for result in cold[:3]] == [b'{"b": 0}', b'{"a": 0}', b'{"c": 0}']
    assert content(cold[0], "model.safetensors") == WEIGHTS
    assert sorted(path.name for path in Path(cold[0]["path"]).iterdir()) == sorted(FILES)
    assert sorted(path.name for path in Path(cold[4]["path"]).iterdir()) == sorted(sharded)
    assert cold[0]["hashed"] == len(WEIGHTS)
    assert cold[1]["hashed"] == 0  # the same blob, in another commit's snapshot
    assert any(request.cdn for request in hub.requests)
    assert all((request.authorization is None) == request.cdn for request in hub.requests)
    assert not any(re.search("bin|h5|onnx|README", request.path) for request in hub.requests)

    hub.requests.clear()
    warm = run(environ, *names)
    assert [result["revision"] for result in warm] == [result["revision"] for result in cold]
    assert [result["hashed"] for result in warm] == [0] * 5
    assert [request.path for request in hub.requests] == [
        "/api/models/openai-community/gpt2/revision/main",
        "/api/models/openai-community/gpt2/revision/v1",
        "/api/models/openai-community/gpt2/revision/refs%2Fpr%2F1",
        "/api/models/old/name/revision/main",
        "/api/models/new/name/revision/main",
    ]  # and none for a commit

    hub.requests.clear()
    flagged = run(environ, *({"name": n, "offline": True} if isinstance(n, str) else n for n in names), "new/other")
    by_variable = run(environ | {"HF_HUB_OFFLINE": "1"}, *names, "gpt2@v9")
    assert [r.get("revision") for r in flagged[:5]] == [r["revision"] for r in cold]
    assert [r.get("revision") for r in by_variable[:5]] == [r["revision"] for r in cold]
    assert "holds no copy of openai-community/gpt2 at v9: run once online" in by_variable[5]["message"]
    assert [request.path for request in hub.requests] == ["/api/models/new/other/revision/main"]

    # Online, a moved branch is noticed; other files are not fetched again.
    moved = hub.add_repo("openai-community/gpt2", FILES | {"vocab.json": b'{"d": 0}'}, lfs=LFS)
    hub.requests.clear()
    (after,) = run(environ, "gpt2")
    assert (after["revision"], content(after, "vocab.json")) == (moved, b'{"d": 0}')
    assert not any(request.method == "GET" and request.cdn for request in hub.requests)


def test_every_refusal_is_one_line_that_says_what_to_do(hub: HubStandIn, tmp_path: Path) -> None:
    hub.add_repo("openai-community/gpt2", FILES)
    hub.add_repo("gated/model", FILES)
    hub.gate("gated/model")
    hub.add_repo("no/config", {"model.safetensors": WEIGHTS})
    hub.add_repo("no/weights", {"config.json": CONFIG})
    hub.add_repo("other/formats", {"config.json": CONFIG, "rust_model.ot": WEIGHTS, "onnx/model.onnx": WEIGHTS})
    hub.add_repo("half/adapter", {"README.md": b"#", "adapter_model.safetensors": WEIGHTS})
    hub.add_repo("many/models", {f"q{bits}.gguf": WEIGHTS for bits in range(2, 9)} | {"README.md": b"#"})
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
    for name, result in zip(refusals, run(hub.environ(tmp_path), *refusals), strict=True):
        kind, *parts = refusals[name]
        assert result.get("error") == kind, (name, result)
        assert all(part in result["message"] for part in parts), (name, result["message"])
    assert not any(request.cdn for request in hub.requests)
    assert not any("/resolve/" in request.path and "/gated/" not in request.path for request in hub.requests)

    (tmp_path / "file").write_bytes(b"")
    (disk,) = run(hub.environ(tmp_path / "file"), "gpt2")
    assert disk["error"] == "CheckpointError"
    assert f"cannot store or read openai-community/gpt2 in the cache {tmp_path}/file" in disk["message"]


ADAPTER = {"adapter_config.json": b"{}", "adapter_model.safetensors": WEIGHTS[2:]}
PICKLED = {"config.json": CONFIG, "pytorch_model.bin": WEIGHTS[1:]}
BIN_SHARDS = {"pytorch_model.bin.index.json": b"{}"} | {f"pytorch_model-0000{i}-of-00002.bin": WEIGHTS[i:] for i in (1, 2)}
SHARDS = {"model.safetensors.index.json": b"{}"} | {f"model-0000{i}-of-00002.safetensors": WEIGHTS[i:] for i in (1, 2)}
GGUF = {"gpt2.Q8_0.gguf": WEIGHTS, "README.md": b"#"}
OPENAI = {"checkpoint": b"", "encoder.json": b"{}", "hparams.json": b"{}", "vocab.bpe": b"", "model.ckpt.index": b"i"}
OPENAI |= {"model.ckpt.data-00000-of-00001": WEIGHTS}


FORMS = {
    "bin": (PICKLED | {"tf_model.h5": b"tf"}, [*PICKLED]),
    "bin shards": ({"config.json": CONFIG} | BIN_SHARDS, ["config.json", *BIN_SHARDS]),
    "bin over its shards": (PICKLED | BIN_SHARDS, [*PICKLED]),
    "shards over bin": (PICKLED | BIN_SHARDS | SHARDS, ["config.json", *SHARDS]),
    "one file": (PICKLED | BIN_SHARDS | SHARDS | {"model.safetensors": WEIGHTS}, ["config.json", "model.safetensors"]),
    "bin over others": (PICKLED | GGUF | {"ckpt.pt": WEIGHTS}, [*PICKLED]),
    "gguf": (GGUF, ["gpt2.Q8_0.gguf"]),
    "nanoGPT": ({"ckpt.pt": WEIGHTS, "vocab.json": b"{}", "training_args.bin": b"args"}, ["vocab.json", "ckpt.pt"]),
    "old": ({"config.json": CONFIG, "tf_model.h5": WEIGHTS, "flax_model.msgpack": b"f"}, ["config.json", "flax_model.msgpack"]),
    "OpenAI": (OPENAI | {"model.ckpt.meta": WEIGHTS, "events.out.tfevents": b"log"}, [*OPENAI]),
    "adapter": (ADAPTER | {"vocab.json": b"{}", "training_args.bin": b"args"}, ["vocab.json", *ADAPTER]),
    "deeper": ({**PICKLED, "deep/model.safetensors": WEIGHTS, "model-1-of-2/../../x.safetensors": WEIGHTS}, [*PICKLED]),
}


def test_one_form_of_the_weights_is_fetched(hub: HubStandIn, tmp_path: Path) -> None:
    """Both would double the download, and a .bin may run code. Each is hashed, fetched again when damaged, complete offline."""
    names = {f"org/{form.replace(' ', '-')}": FORMS[form] for form in FORMS}
    for name, (files, fetched) in names.items():
        hub.add_repo(name, files, lfs=tuple(file for file in files if files[file] in (WEIGHTS, WEIGHTS[1:], WEIGHTS[2:])))
        hub.corrupt(name, fetched[-1], times=1)
    results = run(hub.environ(tmp_path), *names, *({"name": name, "offline": True} for name in names))
    for name, online, offline in zip(names, results[: len(names)], results[len(names) :], strict=True):
        files, fetched = names[name]
        assert online["path"] == offline["path"]
        assert files_in(Path(online["path"])) == {file: files[file] for file in fetched}
        asked = {request.file for request in hub.requests if f"/{name}/" in request.path and "/api/models/" not in request.path}
        assert asked <= {*fetched, ".gitattributes"}


def test_what_another_program_left_damaged_is_fetched_again(hub: HubStandIn, tmp_path: Path) -> None:
    """The client checks no hash: what it left in the cache is hashed on our first load, and once."""
    hub.add_repo("org/name", FILES, lfs=LFS)
    for name in ("model.safetensors", "config.json"):
        hub.corrupt("org/name", name, times=1)
    folder = Path(fetch_as_others(hub, tmp_path, "snapshot_download('org/name')"))
    assert all((folder / name).read_bytes() != FILES[name] for name in ("model.safetensors", "config.json"))
    offline, online, again = run(hub.environ(tmp_path), OFFLINE, "org/name", "org/name")
    assert offline["error"] == "CheckpointError"
    assert "run once online" in offline["message"]
    assert files_in(Path(online["path"])) == FILES
    pointer = len(CONFIG)  # else its hash might equal the declared one
    assert (online["hashed"], again["hashed"]) == (2 * len(WEIGHTS) + pointer, 0)


@pytest.mark.parametrize("symlinks", [True, False])
def test_a_flipped_byte_is_mended_once_and_refused_twice(hub: HubStandIn, tmp_path: Path, symlinks: bool) -> None:
    """With symlinks, and without (Windows), where the hash comes from the commit's listing, not from the blob's name."""
    for name in ("once/large", "once/small", "always/large", "always/small"):
        hub.add_repo(name, FILES, lfs=LFS)
        times = 1 if name.startswith("once") else float("inf")
        hub.corrupt(name, "model.safetensors" if name.endswith("large") else "vocab.json", times=times)
    environ = hub.environ(tmp_path, **({} if symlinks else {"HF_HUB_DISABLE_SYMLINKS": "1"}))
    large, small, refused_large, refused_small = run(environ, *hub.repos)
    for mended in (large, small):
        assert files_in(Path(mended["path"])) == FILES
        assert Path(mended["path"], "model.safetensors").is_symlink() == symlinks
    for refused, name in ((refused_large, "model.safetensors"), (refused_small, "vocab.json")):
        assert refused["error"] == "CheckpointError"
        declared = next(iter(hub.repos["always/large"].commits.values()))[name].etag
        assert re.search(rf"{name} hashes to [0-9a-f]{{40,64}}, the Hub declares {declared}", refused["message"])
        assert declared not in refused["message"].split("declares")[0]
    # No damaged file stays in the cache for another program.
    left = [path for path in (tmp_path / "hub").glob("models--always--*/snapshots/*/*")]
    assert {path.name for path in left} >= {"config.json", "merges.txt"}
    assert all(path.read_bytes() == FILES[path.name] for path in left)


def test_a_file_that_changes_after_it_was_verified_is_hashed_again(hub: HubStandIn, tmp_path: Path) -> None:
    hub.add_repo("org/name", FILES, lfs=LFS)
    (first,) = run(hub.environ(tmp_path), "org/name")
    weights = Path(first["path"], "model.safetensors")
    weights.write_bytes(b"\0" + WEIGHTS[1:-1] + b"\0")
    offline, online = run(hub.environ(tmp_path), OFFLINE, "org/name")
    assert "model.safetensors hashes to" in offline["message"]
    assert content(online, "model.safetensors") == WEIGHTS

    # A blob may be a link to the client's store of shared blobs or to a folder of the user. Its target must not be deleted.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(WEIGHTS[:-1] + b"\0")
    blob = weights.parent / weights.readlink()
    blob.unlink()
    blob.symlink_to(elsewhere)
    (mended,) = run(hub.environ(tmp_path), "org/name")
    assert content(mended, "model.safetensors") == WEIGHTS
    assert elsewhere.read_bytes() == WEIGHTS[:-1] + b"\0"

    # A copy is not trusted for its timestamps: `cp -p` and `rsync -a` keep size and mtime even if the bytes were damaged.
    shutil.copytree(tmp_path / "hub", tmp_path / "copy", symlinks=True)
    blob = (tmp_path / "copy" / weights.relative_to(tmp_path / "hub")).resolve()
    before = blob.stat()
    blob.write_bytes(WEIGHTS[:-1] + b"\0")
    os.utime(blob, ns=(before.st_atime_ns, before.st_mtime_ns))
    (copied,) = run(hub.environ(tmp_path, HF_HUB_CACHE=str(tmp_path / "copy"), HF_HUB_OFFLINE="1"), "org/name")
    assert "model.safetensors hashes to" in copied["message"]


def test_an_incomplete_cache_is_filled_online_and_refused_offline(hub: HubStandIn, tmp_path: Path) -> None:
    """Another program may have fetched the tokenizer or config.json alone; an interrupted download leaves a part."""
    commit = hub.add_repo("org/name", FILES, lfs=LFS)
    fetch_as_others(hub, tmp_path, "snapshot_download('org/name', allow_patterns=['vocab.json', 'merges.txt'])")
    (tokenizer,) = run(hub.environ(tmp_path), OFFLINE)
    assert "holds only a part of org/name at main (merges.txt, vocab.json)" in tokenizer["message"]
    shutil.rmtree(tmp_path / "hub")
    fetch_as_others(hub, tmp_path, "hf_hub_download('org/name', 'config.json')")
    alone, filled = run(hub.environ(tmp_path), OFFLINE, f"org/name@{commit}")
    assert alone["error"] == "InputError"
    assert "holds only a part of org/name at main (config.json), without the weights: run once online" in alone["message"]
    assert files_in(Path(filled["path"])) == FILES
    for name in ("vocab.json", "model.safetensors"):
        Path(filled["path"], name).unlink()
        refused, filled = run(hub.environ(tmp_path), OFFLINE, f"org/name@{commit}")
        assert f"), without {name}: run once online" in refused["message"]
        assert content(filled, name) == FILES[name]


@pytest.mark.parametrize("blob", [False, True], ids=["entry", "blob"])
def test_a_shard_that_another_program_left_out_is_named_and_fetched(hub: HubStandIn, tmp_path: Path, blob: bool) -> None:
    """Only the index says that it belongs there: offline it was called a path that cannot be read."""
    shards = {f"model-0000{n}-of-00002.safetensors": bytes(range(200)) * 9 * n for n in (1, 2)}
    index = {"model.safetensors.index.json": json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}).encode()}
    hub.add_repo("org/name", {"config.json": CONFIG, **index, **shards}, lfs=tuple(shards))
    fetch_as_others(hub, tmp_path, "snapshot_download('org/name')")
    (gone,) = (tmp_path / "hub").glob("*/snapshots/*/model-00002-*")
    gone.resolve().unlink()
    None if blob else gone.unlink()
    named, filled, whole = run(hub.environ(tmp_path), OFFLINE, "org/name", OFFLINE)
    assert f"), without {gone.name}: run once online" in named["message"]
    assert filled["path"] == whole["path"]
    assert gone.read_bytes() == shards[gone.name]


def test_a_dead_hub_gives_up_quickly_or_falls_back_on_a_warm_cache(hub: HubStandIn, tmp_path: Path) -> None:
    """The client alone retries for 23 s, and waits for ever for a silent listing. Servers that refuse, stay silent or fail: a
    warm cache is used soon; a cold one has the client's own limit."""
    commit = hub.add_repo("org/name", FILES, lfs=LFS)
    assert run(hub.environ(tmp_path / "warm"), "org/name")[0]["revision"] == commit
    hub.outage = 503
    down, warm = run(hub.environ(tmp_path / "cold"), "org/name") + run(hub.environ(tmp_path / "warm"), "org/name")
    assert "cannot reach the Hub" in down["message"]
    assert warm["revision"] == commit
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections, never answers
        mute = {"HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        assert WARM_PATIENCE == 3
        hurry = "from gpt2.checkpoint import hub; hub.WARM_PATIENCE = 0.3"
        (soon,) = run(hub.environ(tmp_path / "warm", **mute), "org/name", before=hurry)
        (hung,) = run(hub.environ(tmp_path / "cold", HF_HUB_ETAG_TIMEOUT="1", **mute), "org/name")
    assert soon["revision"] == commit
    assert "no answer in 0.3 s" in soon["stderr"] or "timed out" in soon["stderr"]
    assert hung["open_questions"] == 0, "no thread may wait for ever in a program that goes on"
    hub.close()
    (cold,), (warm,) = run(hub.environ(tmp_path / "cold"), "gpt2"), run(hub.environ(tmp_path / "warm"), "org/name")
    for refused in (down, hung, cold):
        assert refused["error"] == "InputError"
        for way_out in ("--offline", "a local directory", "HF_ENDPOINT"):
            assert way_out in refused["message"]
    assert warm["revision"] == commit
    assert "gpt2 INFO cannot reach" in warm["stderr"]


def test_embedded_checkpoint_missing_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("gpt2.checkpoint.checkpoint.__file__", str(tmp_path / "gpt2/checkpoint/checkpoint.py"))
    assert "reinstall" in refusal(resolve, DEFAULT)
