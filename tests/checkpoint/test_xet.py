"""Large files over Xet if the client can; over HTTP if that fails, or if a partial file exists."""

from pathlib import Path
from typing import Any

import pytest
from support import hub_client
from support.hub_standin import HubStandIn
from support.xet_standin import XetStandIn

pytest.importorskip("hf_xet")

WEIGHTS = bytes(range(251)) * 160_000  # 40 MB: three blocks
FILES = {"config.json": b'{"model_type": "gpt2"}', "model.safetensors": WEIGHTS}
IMPATIENT = "from gpt2.checkpoint import xet; xet.XET_PATIENCE = 1.0"


@pytest.fixture
def hub():
    with HubStandIn() as server:
        server.add_repo("org/name", FILES, lfs=("model.safetensors",))
        server.xet = XetStandIn(server)
        yield server


def resolve(hub: HubStandIn, home: Path, offline: bool = False, **environ: str) -> dict[str, Any]:
    settings = hub.environ(home, **{"HF_HUB_DISABLE_XET": "0"} | environ)
    (result,) = hub_client.resolve(settings, {"name": "org/name", "offline": offline}, before=IMPATIENT)
    folder = Path(result["path"])
    blobs = folder.parents[1] / "blobs"
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert (folder / "model.safetensors").resolve().parent == blobs
    assert len(list(blobs.iterdir())) == len(FILES), "nothing is left behind"
    return result


def asked_over_http(hub: HubStandIn) -> list[str | None]:
    return [request.range for request in hub.requests if request.path.startswith("/lfs/")]


def test_a_large_file_comes_over_xet_and_is_hashed(hub: HubStandIn, tmp_path: Path) -> None:
    """Control: both servers count; no byte of the weights comes over HTTP."""
    result = resolve(hub, tmp_path)
    assert hub.xet.sent >= len(WEIGHTS)
    assert asked_over_http(hub) == []
    mode = Path(result["path"], "model.safetensors").stat().st_mode & 0o777
    assert mode == (tmp_path / "hub").stat().st_mode & 0o666, "readable to whom the cache is readable"
    before = len(hub.requests)
    resolve(hub, tmp_path, offline=True)
    assert len(hub.requests) == before


@pytest.mark.parametrize("fault", ["refused", "damaged", "silent", "no token"])
def test_what_xet_cannot_do_is_done_over_http(hub: HubStandIn, tmp_path: Path, fault: str) -> None:
    """The client accepts a flipped byte in a block, and retries a dead storage for minutes."""
    if fault == "no token":
        hub.rewrite = lambda request, answer: type(answer)(403, {}, b"") if "xet-read-token" in request.path else answer
    else:
        setattr(hub.xet, *{"refused": ("status", 403), "damaged": ("damaged", True), "silent": ("silent", True)}[fault])
    assert "model.safetensors: not over Xet (" in resolve(hub, tmp_path)["stderr"]
    assert asked_over_http(hub) == [None]


def test_a_part_is_gone_on_with_over_http(hub: HubStandIn, tmp_path: Path) -> None:
    """Xet cannot resume a partial file: 5 of 6 GB would be downloaded again."""
    (tree,) = hub.repos["org/name"].commits.values()
    part = tmp_path / "hub/models--org--name/blobs" / f"{tree['model.safetensors'].sha256}.gpt2-toolkit.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(WEIGHTS[:30_000_000])
    resolve(hub, tmp_path)
    assert hub.xet.sent == 0
    assert asked_over_http(hub) == ["bytes=30000000-"]


def test_xet_is_left_alone_where_it_is_disabled(hub: HubStandIn, tmp_path: Path) -> None:
    resolve(hub, tmp_path, HF_HUB_DISABLE_XET="1")
    assert hub.xet.sent == 0
    assert asked_over_http(hub) == [None]
