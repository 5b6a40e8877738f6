"""``gpt2 publish`` against a Hub on loopback that takes uploads: what is sent, what is refused, what comes back."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checks import content
from support.commands import mistake, refusal
from support.hub_standin import HubStandIn
from support.ranks import toml
from support.training import flip

import gpt2
from gpt2.checkpoint.card import edited_card
from gpt2.checkpoint.publish import Plan, Repository, look, plan, send
from gpt2.cli.main import main
from gpt2.train.card import write_card
from gpt2.train.recipe import Recipe

TOKEN = "hf_" + "writer" * 5


@pytest.fixture(scope="session")
def trained(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The best model of a tiny run, with its card; read only."""
    run = Path(shutil.copytree(whole, tmp_path_factory.mktemp("trained") / "tiny"))
    assert write_card(run) == ""
    return run / "best"


@pytest.fixture
def model(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(trained, tmp_path / "model"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    """A Hub where TOKEN may write to ``me``, and this process as its client, over git LFS."""
    from huggingface_hub import constants

    with HubStandIn() as hub:
        hub.tokens[TOKEN] = ("me",)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        settings = {"ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": False, "HF_HOME": str(tmp_path / "home")}
        settings |= {"HF_HUB_CACHE": str(tmp_path / "home" / "hub"), "HF_HUB_DISABLE_XET": True}
        settings |= {"HUGGINGFACE_CO_URL_TEMPLATE": hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"}
        for name, value in settings.items():
            monkeypatch.setattr(constants, name, value)
        yield hub


def test_what_comes_back_is_what_was_sent(trained: Path, hub: HubStandIn, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """A byte lost on the way, a second commit, optimizer state or a token in public view would each go unnoticed."""
    before = content(trained)
    assert main(["publish", str(trained), "me/tiny", "--yes", "--json", "-"]) == 0
    out, err = capfd.readouterr()
    assert content(trained) == before
    result = json.loads(out)
    assert TOKEN not in out + err
    assert hub.repos["me/tiny"].private
    assert len(hub.messages) == 1
    there = hub.files("me/tiny")
    shown = {file["name"]: file["sha256"] for file in result["files"]}
    assert {name: hashlib.sha256(sent).hexdigest() for name, sent in there.items()} == shown
    assert there["README.md"].count(b"me/tiny") == before["README.md"].count(b"OWNER/NAME") > 0
    assert edited_card(Path(shutil.copytree(trained, tmp_path / "copy"))) is None
    (tmp_path / "copy" / "README.md").write_bytes(there["README.md"])  # what comes back is not taken for edited
    assert edited_card(tmp_path / "copy") is None
    assert all(sent == before[name] for name, sent in there.items() if name != "README.md")
    names = {"README.md", "curves.png", "config.json", "model.safetensors", "tokenizer.json"}
    assert set(there) == names | {"generation_config.json", "tokenizer_config.json"}
    assert set(result["not_sent"]) == {"manifest.json", "progress.json"}
    back, sent = (gpt2.load(name).state_dict() for name in (f"me/tiny@{result['commit']}", str(trained)))
    assert all(torch.equal(back[name], sent[name]) for name in sent)
    assert gpt2.load_tokenizer("me/tiny").encode("to") == gpt2.load_tokenizer(str(trained)).encode("to")
    received = hub.put.total()
    assert main(["publish", str(trained), "me/tiny", "--yes"]) == 0
    assert "nothing has changed" in capfd.readouterr().out
    assert hub.put.total() == received


def test_a_file_that_changes_after_it_was_shown_is_told(model: Path, hub: HubStandIn, capsys, monkeypatch) -> None:
    """What was sent is not what was checked: a large file (the Hub lists sha256) and a small one. Control: the test above."""

    def change(planned: Plan, *, public: bool) -> Repository:
        flip(model / "model.safetensors")
        (model / "config.json").write_text("{}")
        return look(planned, public=public)

    monkeypatch.setattr("gpt2.checkpoint.publish.look", change)
    assert main(["publish", str(model), "me/tiny", "--yes"]) == 1
    assert "the Hub stored other bytes of config.json, model.safetensors; the folder changed" in capsys.readouterr().out


def test_nothing_is_sent_without_a_yes(trained: Path, hub: HubStandIn, capsys: pytest.CaptureFixture) -> None:
    """A script that forgot --yes must not publish, and a dry run must not even ask the Hub. Both wrote into the user's folder."""
    before = content(trained)
    assert main(["publish", str(trained), "me/tiny", "--dry-run"]) == 0
    assert "model.safetensors" in capsys.readouterr().out
    assert not hub.requests
    assert main(["publish", str(trained), "me/tiny"]) == 2
    assert "--yes" in capsys.readouterr().err
    assert {request.method for request in hub.requests} == {"GET"}
    assert not hub.repos
    assert content(trained) == before


def test_private_unless_told_otherwise(trained: Path, hub: HubStandIn, capsys: pytest.CaptureFixture) -> None:
    """The default would leak a model through a repository that is public already."""
    hub.add_repo("me/open", {"pytorch_model.bin": b"another model"})
    assert "public already; add --public" in mistake(capsys, "publish", str(trained), "me/open", "--yes")
    assert not hub.messages
    assert main(["publish", str(trained), "me/open", "--yes", "--public"]) == 0
    assert hub.files("me/open")["pytorch_model.bin"] == b"another model"
    assert main(["publish", str(trained), "me/new", "--yes", "--public"]) == 0
    assert not hub.repos["me/new"].private
    assert main(["publish", str(trained), "me/mine", "--yes", "--private"]) == 0
    assert hub.repos["me/mine"].private
    assert main(["publish", str(trained), "me/mine", "--private", "--public"]) == 2
    assert b'gpt2.load("me/new")' in hub.files("me/new")["README.md"]


def test_a_run_whose_card_cannot_be_written_has_its_result(trained: Path, recipe: Recipe, tmp_path: Path, capsys) -> None:
    """The command exited 2 and said nothing of the losses, after a run that had ended well."""
    run = shutil.copytree(trained.parent, tmp_path / "tiny")
    (run / "best" / "README.md").write_text("version https://git-lfs")
    argv = ["train", str(toml(recipe, tmp_path / "tiny.toml")), "--out", str(run)]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert "note: no model card was written: " in err
    assert "best validation loss" in out


def test_a_refusal_is_one_line_with_what_to_do(trained: Path, hub: HubStandIn, capsys) -> None:
    """The client's errors are pages long, and say nothing of what to do."""
    hub.fails["/commit/"] = (500, "so it was ordered")
    assert main(["publish", str(trained), "me/tiny", "--yes"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("gpt2 publish: ")
    assert "500 for me/tiny" in line
    assert "run it again, what the Hub has is not sent again" in line
    assert TOKEN not in line
    assert not hub.messages


def test_who_may_not_write_is_told(trained: Path, hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong or missing token, another owner, and a commit that came in between."""
    planned = plan(trained, "me/tiny")
    other = replace(planned, repo="you/tiny")
    assert "403 for you/tiny" in refusal(lambda: send(other, look(other, public=False)))
    assert "not OWNER/NAME" in refusal(plan, trained, "tiny")  # --dry-run only plans
    hub.add_repo("me/tiny", {})
    target = look(planned, public=True)
    hub.add_repo("me/tiny", {"README.md": b"in between"})
    assert "changed meanwhile" in refusal(send, planned, target)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "401" in refusal(look, planned, public=False)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(trained / "none"))
    assert "not logged in" in refusal(look, planned, public=False)


def edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return change


def other_weights(scale: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        save_file({name: tensor * scale for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})

    return change


def no_card_and_a_flip(folder: Path) -> None:
    """A small weight of another sign: only the hashes show it."""
    flip(folder / "model.safetensors")
    (folder / "README.md").unlink()


def to_a_link(folder: Path) -> None:
    shutil.move(folder / "config.json", folder.parent / "private.json")
    (folder / "config.json").symlink_to("../private.json")


def to_itself(folder: Path) -> None:
    (folder / "README.md").unlink()
    (folder / "README.md").symlink_to("README.md")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (other_weights(0.5), "is of another model.safetensors"),
        (other_weights(float("nan")), "is nan, not finite"),
        (to_a_link, "leads out of the folder"),
        (to_itself, "leads out of the folder, or no file"),
        (edit("config.json", '"n_embd": 16', '"n_embd": 17'), "n_embd"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors"),
        (no_card_and_a_flip, "model.safetensors does not have the sha256 that manifest.json states"),
    ],
)
def test_a_folder_that_does_not_load_or_has_another_card_is_refused(model: Path, change: Callable, says: str) -> None:
    """A page on the Hub is believed: its card must be of these weights, and its files a model."""
    (note,) = plan(model, "me/tiny").notes
    assert note.startswith("the card states no licence: if you may grant one, add 'license: ...' to README.md's")
    change(model)
    assert says in refusal(plan, model, "me/tiny")


def test_only_a_model_s_own_files_are_sent(model: Path) -> None:
    """A run's folder also holds optimizer state, and a user's folder may hold keys."""
    others = {".env", "optimizer.safetensors", "notes.txt", "sub/model.safetensors", "evil.py", "secrets.gguf"}
    others |= {"model-00001-of-00002.safetensors", "model.safetensors.index.json"}
    for name in others:
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text("secret")
    planned = plan(model, "me/tiny")
    sent = {file.name for file in planned.files}
    assert others <= set(planned.left_out)
    assert not others & sent
