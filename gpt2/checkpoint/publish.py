"""Publish a model's folder to the Hub in one commit: choose files, check model and card, upload, compare what was stored."""

import io
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpt2.checkpoint import card
from gpt2.checkpoint.checkpoint import AdaptedCheckpoint, open_path
from gpt2.checkpoint.describe import File
from gpt2.checkpoint.files import require_small
from gpt2.checkpoint.hub import explained, hashes_of
from gpt2.checkpoint.loading import require_usable, rows_note
from gpt2.checkpoint.names import ADAPTER, INDEX, REPOSITORY
from gpt2.checkpoint.peft_files import WEIGHTS as ADAPTER_WEIGHTS
from gpt2.checkpoint.saving import CARD, MANIFEST, unlike_manifest
from gpt2.config import SMALL, quoted
from gpt2.data.client import one_line
from gpt2.data.files import opened
from gpt2.errors import InputError, user_path

BESIDE = {*SMALL, "encoder.json", "vocab.bpe", "LICENSE", CARD, card.CURVES}
BESIDE |= {place + name for place in ("", "adapter/") for name in (ADAPTER, ADAPTER_WEIGHTS)}
WEIGHTS = (".safetensors", ".gguf")
AGAIN = "run it again, what the Hub has is not sent again"


@dataclass(frozen=True)
class Plan:
    """What would be sent to ``repo``: files with size and sha256; the names of other files; remarks for the user.

    ``content`` has each file's path, or its bytes if they are not the folder's; ``hashes`` those by which the Hub may list it.
    """

    repo: str
    files: tuple[File, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    content: Mapping[str, bytes | Path]
    hashes: Mapping[str, tuple[str, str, str]]


@dataclass(frozen=True)
class Repository:
    """A repository before the upload: ``commit`` is its newest one, or None if it must be created."""

    url: str
    private: bool
    commit: str | None


def plan(folder: str | Path, repo: str) -> Plan:
    """Choose the files of ``folder`` to publish, and check them; no request is made, and the folder is not changed.

    Raises InputError: not OWNER/NAME, no such folder, its model does not load or computes no numbers, its weights are in another
    format, a file is a link that leads out of it, or its card has other figures than gpt2 wrote.
    """
    if not REPOSITORY.fullmatch(repo):
        raise InputError(f"{quoted(repo)} is not OWNER/NAME; give your name on the Hub and the model's, such as me/macbeth")
    given, folder = Path(folder), Path(os.path.realpath(user_path(folder)))
    if not folder.is_dir():
        raise InputError(f"{given}: not a folder; give the one that gpt2 export or gpt2 train made, such as out/run/best")
    weights, notes = _check_model(folder, given)
    present = sorted(entry.relative_to(folder).as_posix() for entry in folder.rglob("*") if not entry.is_dir())
    content: dict[str, bytes | Path] = {name: folder / name for name in present if name in weights | BESIDE}
    for name in content:
        if not ((path := Path(os.path.realpath(folder / name))).is_file() and path.is_relative_to(folder)):
            raise InputError(f"{given}/{name}: a link that leads out of the folder, or no file; put a copy of the file there")
        if not name.endswith(WEIGHTS):
            require_small(folder / name)
    hashes = {name: _hashes(held) for name, held in content.items()}
    text, remarks = card.check(folder, repo, {name: each[0] for name, each in hashes.items()})
    if (folder / MANIFEST).exists() and (damage := unlike_manifest(folder, weights)):
        raise InputError(f"{given}: {damage}; restore it from a copy, or, if you changed it yourself, remove {MANIFEST}")
    if text is not None:
        content[CARD] = text.encode()
        hashes[CARD] = _hashes(text.encode())
    sizes = {name: held.stat().st_size if isinstance(held, Path) else len(held) for name, held in content.items()}
    files = tuple(File(name, sizes[name], hashes[name][0]) for name in content)
    left_out = tuple(name for name in present if name not in content)
    return Plan(repo, files, left_out, (*notes, *remarks), content, hashes)


def _hashes(held: bytes | Path) -> tuple[str, str, str]:
    with opened(held) if isinstance(held, Path) else io.BytesIO(held) as file:
        return hashes_of(file)


def _check_model(folder: Path, given: Path) -> tuple[set[str], list[str]]:
    """Load the model and compute logits; return the files of its weights, and remarks. Raises InputError: it cannot be sent."""
    checkpoint, weights = open_path(folder), {ADAPTER_WEIGHTS}
    if not isinstance(checkpoint, AdaptedCheckpoint):
        weights = {container.path.name for container in checkpoint.assignment.files.values()}
    if others := sorted(name for name in weights if not name.endswith(WEIGHTS)):
        what = f"the weights are read from {others[0]}, which is not sent"
        raise InputError(f"{given}: {what}; gpt2 export {given} DIR writes safetensors")
    weights |= {INDEX} if len(weights) > 1 else set()
    model, tokenizer = checkpoint.load(), checkpoint.own_tokenizer()
    require_usable(model, str(folder))
    if tokenizer is None:
        return weights, ["there is no tokenizer in the folder: nobody can type a prompt"]
    return weights, rows_note(tokenizer, model.config, str(folder))


def look(planned: Plan, *, public: bool) -> Repository:
    """Ask the Hub for the repository; nothing is sent. Raises InputError: no token or answer, or public and not ``public``."""
    repo = planned.repo
    with explained(repo, otherwise=AGAIN):
        from huggingface_hub import HfApi, constants, get_token
        from huggingface_hub.errors import RepositoryNotFoundError

        if not get_token():
            raise InputError("not logged in to the Hub: run `hf auth login` or set HF_TOKEN, with a token that may write")
        url = f"{constants.ENDPOINT}/{repo}"
        try:
            info = HfApi().model_info(repo)
        except RepositoryNotFoundError:
            return Repository(url, not public, None)
    if info.private is not True and not public:
        raise InputError(f"{url} is public already; add --public, or choose another name for a private one")
    return Repository(url, info.private is True, info.sha)


def send(planned: Plan, target: Repository) -> tuple[str, list[str]]:
    """Create the repository if need be, upload, and commit; return the commit, and the files whose hash there is another.

    The commit fails if the repository has changed since :func:`look`. Raises InputError: the Hub refuses or does not answer.
    """
    with explained(planned.repo, otherwise=AGAIN), warnings.catch_warnings():
        from huggingface_hub import CommitOperationAdd, HfApi, RepoFile

        warnings.simplefilter("ignore")  # of a card without metadata, which the plan's notes say
        api = HfApi()
        if target.commit is None:
            api.create_repo(planned.repo, private=target.private)
        files = [CommitOperationAdd(name, held) for name, held in planned.content.items()]
        try:
            message = f"Upload {len(files)} files with gpt2 publish"
            done = api.create_commit(planned.repo, files, commit_message=message, parent_commit=target.commit)
        except ValueError as error:  # the Hub's check of the card
            raise InputError(f"{planned.repo}: {one_line(error)}; correct it and publish again") from error
        rows = api.list_repo_tree(planned.repo, revision=done.oid, recursive=True)
        stored = {row.path: row.lfs.sha256 if row.lfs else row.blob_id for row in rows if isinstance(row, RepoFile)}
    return done.oid, [name for name, hashes in planned.hashes.items() if stored.get(name) not in hashes]
