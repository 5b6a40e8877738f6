"""Publish a model's folder to the Hub in one commit: choose its files, check model and card, upload, and read the result back."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2.checkpoint import card
from gpt2.checkpoint.cache import Declared, digest_of
from gpt2.checkpoint.checkpoint import open_path
from gpt2.checkpoint.containers import read_json
from gpt2.checkpoint.describe import File
from gpt2.checkpoint.export import TOKENIZER_FILES
from gpt2.checkpoint.files import ADAPTER, INDEX, what_is_there
from gpt2.checkpoint.hub_api import explained, list_files, one_line, request_headers
from gpt2.checkpoint.loading import require_finite, rows_note
from gpt2.checkpoint.names import REPOSITORY
from gpt2.checkpoint.peft_files import WEIGHTS as ADAPTER_WEIGHTS
from gpt2.checkpoint.saving import MANIFEST, sha256, unlike_manifest
from gpt2.config import quoted
from gpt2.errors import InputError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

ADAPTERS = (ADAPTER, ADAPTER_WEIGHTS, f"adapter/{ADAPTER}", f"adapter/{ADAPTER_WEIGHTS}")
SENT = {
    *("config.json", "generation_config.json", "special_tokens_map.json", INDEX, "LICENSE", *ADAPTERS),
    *(card.CARD, card.CURVES, card.RECORD, *TOKENIZER_FILES),
}
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|[\w+-][\w.+-]*\.gguf", re.ASCII)
AGAIN = "run it again, what the Hub has is not sent again"
DOWN = "the Hub is busy or down; run it again later, what it has is not sent again"
# Status of a refusal -> what to do; {said} is the Hub's own reason, {hub} its address.
REFUSALS = {
    401: "the token is not valid; run `hf auth login`, or correct HF_TOKEN",
    402: "{said}; see the plan at {hub}/settings/billing",
    403: "the token may not write to {owner}; make one that may at {hub}/settings/tokens",
    404: "the repository is gone or renamed; look at {hub}/{owner}",
    **dict.fromkeys((409, 412), "the repository changed meanwhile; run it again"),
    408: DOWN,
    413: "too large for the Hub; split the weights into shards, or ask the Hub for more room",
    429: "too many requests; wait some minutes and " + AGAIN,
}


@dataclass(frozen=True)
class Plan:
    """What would be sent of ``folder``: files with size and sha256; the names of other files; remarks for the user.

    ``written`` has the content of the files that are sent otherwise than they are in the folder: the card and the record, which
    name the repository.
    """

    folder: Path
    files: tuple[File, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    written: Mapping[str, bytes]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class Target:
    """A repository before the upload: ``commit`` is its newest one, or None if it must be created."""

    repo: str
    url: str
    private: bool
    commit: str | None
    others: tuple[str, ...] = ()  # files there that the upload does not replace


@dataclass(frozen=True)
class Published:
    """The commit that the Hub made, and the files whose hash there is not the hash that was shown."""

    commit: str
    url: str
    wrong: tuple[str, ...]


def plan(folder: str | Path, repo: str | None = None, record: card.Record | None = None) -> Plan:
    """Choose the files of ``folder`` to publish, and check them; no request is made, and the folder is not changed.

    Only a model's own files are sent: safetensors or GGUF, config, tokenizer, card, record, curves, LoRA adapter. With ``repo``,
    card and record name it; the record may be another than the folder's.

    Raises InputError: not OWNER/NAME, no such folder, its model does not load or computes no numbers, its weights are in another
    format, a file is a link that leads out of it, or its card claims what its record does not have.
    """
    if repo is not None:
        _require_name(repo)
    given, folder = Path(folder), Path(folder).expanduser().resolve()
    if not folder.is_dir():
        raise InputError(f"{given}: not a folder; give the one that gpt2 export or gpt2 train made, such as out/run/best")
    present = sorted(entry.relative_to(folder).as_posix() for entry in folder.rglob("*") if not entry.is_dir())
    names = [name for name in present if name in SENT or WEIGHTS.fullmatch(name)]
    for name in names:
        target = (folder / name).resolve()
        if not (target.is_file() and target.is_relative_to(folder)):
            raise InputError(f"{given}/{name}: a link that leads out of the folder; put a copy of the file there")
    if not any(WEIGHTS.fullmatch(name) or name in ADAPTERS[:2] for name in names):
        there = what_is_there(folder)
        advice = "" if "training run" in there else f". gpt2 export {given} DIR writes safetensors"
        raise InputError(f"{given}: no model.safetensors and no .gguf there; {there}{advice}")
    files = {name: File(name, (folder / name).stat().st_size, sha256(folder / name)) for name in names}
    notes = _check_model(folder, names)
    for name in names:
        base = str(read_json(folder / name).get("base_model_name_or_path")) if name.endswith(ADAPTER) else ""
        notes += [f"{name} names {base}, a path of this machine"] if base.startswith(("/", "~", ".")) else []
    notes += card.check(folder, {name: file.sha256 for name, file in files.items()})
    if MANIFEST in present and (damage := unlike_manifest(folder)):
        raise InputError(f"{given}: {damage}; restore it from a copy, or, if you changed it yourself, remove {MANIFEST}")
    record, written = record or card.read_record(folder), dict[str, bytes]()
    if repo and record and card.CARD in files:
        written, _ = card.contents(folder, record | {"repo": repo})
    files |= {name: File(name, len(content), hashlib.sha256(content).hexdigest()) for name, content in written.items()}
    left_out = tuple(name for name in present if name not in names)
    return Plan(folder, tuple(files.values()), left_out, tuple(notes), written)


def _require_name(repo: str) -> None:
    if not REPOSITORY.fullmatch(repo):
        raise InputError(f"{quoted(repo)} is not OWNER/NAME; give your name on the Hub and the model's, such as me/macbeth")


def _check_model(folder: Path, names: list[str]) -> list[str]:
    """Load the model and compute logits; return remarks. Raises InputError or CheckpointError: it cannot be published."""
    checkpoint = open_path(folder)
    weights = {container.path.name for container in checkpoint.assignment.files.values()}
    if ADAPTER not in names and (others := weights - set(names)):
        raise InputError(
            f"{folder}: the weights are read from {min(others)}, which is not sent; gpt2 export {folder} DIR writes safetensors"
        )
    model, tokenizer = checkpoint.load(), checkpoint.own_tokenizer()
    require_finite(model, str(folder))
    if tokenizer is None:
        return ["there is no tokenizer in the folder: nobody can type a prompt"]
    return rows_note(tokenizer, model.config, str(folder))


def look(repo: str, planned: Plan, *, public: bool) -> Target:
    """Ask the Hub for the repository; nothing is sent.

    Raises InputError: not OWNER/NAME, no token, no answer, or a public repository where a private one is wanted.
    """
    _require_name(repo)
    with explained(repo, refused=_refused):
        from huggingface_hub.errors import RepositoryNotFoundError
        from huggingface_hub.utils import validate_repo_id

        validate_repo_id(repo)
        api = _api()
        url = f"{api.endpoint}/{repo}"
        try:
            info = api.model_info(repo, timeout=30)
        except RepositoryNotFoundError:
            return Target(repo, url, not public, None)
    if info.id != repo:
        raise InputError(f"{repo} is called {info.id} now; give that name")
    if not info.private and not public:
        raise InputError(f"{url} is public already; add --public, or choose another name for a private one")
    others = {file.rfilename for file in info.siblings or ()} - {file.name for file in planned.files} - {".gitattributes"}
    return Target(repo, url, bool(info.private), info.sha, tuple(sorted(others)))


def send(planned: Plan, target: Target) -> Published:
    """Create the repository if need be, upload, commit, and compare what the Hub lists with the plan.

    Large files that the Hub has already are not sent again, so a broken upload goes on. The commit fails if the repository has
    changed since :func:`look`. Raises InputError: the Hub refuses or does not answer.
    """
    with explained(target.repo, refused=_refused):
        from huggingface_hub import CommitOperationAdd

        api = _api()
        if target.commit is None:
            api.create_repo(target.repo, private=target.private)
        sent = {file.name: planned.written.get(file.name) or planned.folder / file.name for file in planned.files}
        files = [CommitOperationAdd(name, content) for name, content in sent.items()]
        message = f"Upload {len(files)} files with gpt2 publish"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a card without metadata, which the plan's notes say
            commit = api.create_commit(target.repo, files, commit_message=message, parent_commit=target.commit).oid
        stored = list_files(target.repo, commit)
    wrong = [file.name for file in planned.files if not _arrived(file, sent[file.name], stored.get(file.name))]
    return Published(commit, f"{target.url}/commit/{commit}", tuple(wrong))


def _arrived(file: File, sent: bytes | Path, stored: Declared | None) -> bool:
    """Return whether the Hub holds the content that the plan showed; of a small file it lists git's hash."""
    from huggingface_hub.utils.sha import git_hash

    if stored is None or len(stored.digest) == 64:
        return stored is not None and stored.digest == file.sha256
    if isinstance(sent, bytes):
        return hashlib.sha256(sent).hexdigest() == file.sha256 and git_hash(sent) == stored.digest
    with sent.open("rb") as stream:
        return digest_of(stream, stored.digest, sent) == stored.digest and sha256(sent) == file.sha256


def _api() -> HfApi:
    """Return the Hub's client. Raises InputError: there is no token, or no network is allowed."""
    from huggingface_hub import HfApi, constants

    if constants.is_offline_mode():
        raise InputError("HF_HUB_OFFLINE is set, and publishing needs the Hub: unset it, or try --dry-run")
    if "authorization" not in request_headers():
        raise InputError("not logged in to the Hub: run `hf auth login` or set HF_TOKEN, with a token that may write")
    return HfApi()


def _refused(repo: str, error: Exception) -> InputError:
    """Return what went wrong in one line, without the token."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    cause = (error.__cause__ or error) if isinstance(error, RuntimeError) else error  # the client names the file around it
    if isinstance(cause, HfHubHTTPError):
        hub, status = constants.ENDPOINT, cause.response.status_code
        said = one_line(Exception(cause.response.headers.get("X-Error-Message") or "no reason given"))[:160]
        what = REFUSALS.get(status, DOWN if status >= 500 else "{said}; correct it and publish again")
        return InputError(f"{hub} answers {status} for {repo}: {what.format(hub=hub, owner=repo.partition('/')[0], said=said)}")
    if isinstance(error, ValueError):  # the client's own checks, and the Hub's of the card
        return InputError(f"{repo}: {one_line(cause)}; correct it and publish again")
    xet = "" if constants.HF_HUB_DISABLE_XET else "; HF_HUB_DISABLE_XET=1 sends over plain HTTP"
    return InputError(f"the upload to {repo} broke off ({one_line(cause)}): check the network and {AGAIN}{xet}")
