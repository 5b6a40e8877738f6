"""Publish a model's folder to the Hub in one commit: choose its files, check model and card, upload, and read the result back."""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2.checkpoint import card, hub
from gpt2.checkpoint.checkpoint import AdaptedCheckpoint, open_path
from gpt2.checkpoint.describe import File
from gpt2.checkpoint.files import ADAPTER, INDEX, require_small
from gpt2.checkpoint.loading import require_usable, rows_note
from gpt2.checkpoint.names import REPOSITORY
from gpt2.checkpoint.peft_files import WEIGHTS as ADAPTER_WEIGHTS
from gpt2.checkpoint.saving import MANIFEST, sha256, unlike_manifest
from gpt2.config import quoted
from gpt2.data.files import SMALL, opened, read
from gpt2.errors import InputError

if TYPE_CHECKING:
    from httpx2 import Client, Request, Response
    from huggingface_hub import HfApi

BESIDE = {*SMALL, "encoder.json", "vocab.bpe", "LICENSE", card.CARD, card.CURVES, card.RECORD}
BESIDE |= {place + name for place in ("", "adapter/") for name in (ADAPTER, ADAPTER_WEIGHTS)}
PATH = "a path of this machine"
# What must not be sent unseen, by its name for the user. Of large weights only the first bytes are searched, their header.
PRIVATE = {
    "a token": rb"\b(?:hf_|api_org_|sk-|gh[pousr]_|github_pat_|glpat-|npm_|pypi-|AIza|A[KS]IA|xox[a-z]-|xapp-|ya29\.)[\w-]{16,}"
    rb"|(?i:(?:api|access|secret|auth)[_-]?(?:key|token|secret)|passw(?:or)?d)[\"']? *[:=] *[\"']?[^\s\"'<]{8,}",
    "a key": rb"-----BEGIN [A-Z ]*PRIVATE KEY",
    PATH: rb"(?:/home/|/Users/|/root/|(?<!\w)/(?:scratch|mnt|media|Volumes|workspace|lustre|gpfs)/"
    rb'|\b[A-Za-z]:\\{1,2}Users\\{1,2})[\w.+/-]+|"base_model_name_or_path": *"[~./][^"]*"',
}
WEIGHTS, HEAD, LARGE = (".safetensors", ".gguf"), 1 << 20, 10 << 20  # bytes; what is larger, the Hub lists by its sha256
PATIENCE, SLOWEST = 60.0, 10_000  # seconds for an answer or until something moves; bytes a second that an upload has at least
# Headers of an answer that are passed on; not how long the client would sleep, nor of a body that is decoded.
KEPT = ("X-Error-Code", "X-Error-Message", "Content-Type", "ETag", "Link")
AGAIN = "run it again, what the Hub has is not sent again"
# Status of a refusal -> what to do; {said} is the Hub's own reason, {hub} its address.
REFUSALS = {
    401: "the token is not valid; run `hf auth login`, or correct HF_TOKEN",
    402: "{said}; see the plan at {hub}/settings/billing",
    403: "the token may not write to {owner}; make one that may at {hub}/settings/tokens",
    404: "the repository is gone or renamed; look at {hub}/{owner}",
    **dict.fromkeys((409, 412), "the repository changed meanwhile; run it again"),
    413: "too large for the Hub; split the weights into shards, or ask the Hub for more room",
    429: "too many requests; wait some minutes and " + AGAIN,
    503: "the Hub is busy or down; run it again later, what it has is not sent again",
}


@dataclass(frozen=True)
class Plan:
    """What would be sent to ``repo``: files with size and sha256; the names of other files; remarks for the user.

    ``content`` has the bytes of each file, or its path if it is large. ``private`` says which files hold what looks like a token
    or a private path.
    """

    repo: str
    files: tuple[File, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    content: Mapping[str, bytes | Path]
    private: tuple[str, ...]


@dataclass(frozen=True)
class Target:
    """A repository before the upload: ``commit`` is its newest one, or None if it must be created."""

    url: str
    private: bool
    commit: str | None
    others: tuple[str, ...] = ()  # files there that the upload does not replace


def plan(folder: str | Path, repo: str, record: card.Record | None = None) -> Plan:
    """Choose the files of ``folder`` to publish, and check them; no request is made, and the folder is not changed.

    The weights that the model is read from are sent, and by name: config, tokenizer, card, record, curves, LoRA adapter. Card and
    record name ``repo``; the record may be another than the folder's.

    Raises InputError: not OWNER/NAME, no such folder, its model does not load or computes no numbers, its weights are in another
    format, a file is a link that leads out of it, or its card claims what its record does not have.
    """
    if not REPOSITORY.fullmatch(repo):
        raise InputError(f"{quoted(repo)} is not OWNER/NAME; give your name on the Hub and the model's, such as me/macbeth")
    given, folder = Path(folder), Path(folder).expanduser().resolve()
    if not folder.is_dir():
        raise InputError(f"{given}: not a folder; give the one that gpt2 export or gpt2 train made, such as out/run/best")
    weights, notes = _check_model(folder, given)
    present = sorted(entry.relative_to(folder).as_posix() for entry in folder.rglob("*") if not entry.is_dir())
    content: dict[str, bytes | Path] = {}
    for name in [name for name in present if name in weights | BESIDE]:
        path = folder / name
        if not (path.resolve().is_file() and path.resolve().is_relative_to(folder)):
            raise InputError(f"{given}/{name}: a link that leads out of the folder, or no file; put a copy of the file there")
        content[name] = path if name.endswith(WEIGHTS) and path.stat().st_size > LARGE else read(require_small(path))
    files = {name: _file(name, held) for name, held in content.items()}
    notes += card.check(folder, {name: file.sha256 for name, file in files.items()})
    if (folder / MANIFEST).exists() and (damage := unlike_manifest(folder, weights)):
        raise InputError(f"{given}: {damage}; restore it from a copy, or, if you changed it yourself, remove {MANIFEST}")
    if (record := record or card.read_record(folder)) and card.CARD in files:
        written, _ = card.contents(folder, record | {"repo": repo})
        content |= written
        files |= {name: _file(name, held) for name, held in written.items()}
    private = tuple(f"{name} holds {what}" for name, held in content.items() for what in _private(held))
    left_out = tuple(name for name in present if name not in content)
    return Plan(repo, tuple(files.values()), left_out, (*notes, *private), content, private)


def _file(name: str, held: bytes | Path) -> File:
    if isinstance(held, Path):
        return File(name, held.stat().st_size, sha256(held))
    return File(name, len(held), hashlib.sha256(held).hexdigest())


def _private(held: bytes | Path) -> Iterator[str]:
    """Yield what in a file looks like a token, a key or a private path."""
    with opened(held) if isinstance(held, Path) else io.BytesIO(held) as file:
        head = file.read(HEAD if isinstance(held, Path) else -1)
    for what, pattern in PRIVATE.items():
        if found := re.search(pattern, head):
            text = found[0].decode(errors="replace")
            yield f"{text}, {what}" if what == PATH else f"{text[:7]}..., which looks like {what}"


def _check_model(folder: Path, given: Path) -> tuple[set[str], list[str]]:
    """Load the model and compute logits; return the files of its weights, and remarks. Raises InputError: it cannot be sent."""
    checkpoint = open_path(folder)
    if isinstance(checkpoint, AdaptedCheckpoint):
        weights = {ADAPTER_WEIGHTS}
    else:
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


def look(planned: Plan, *, public: bool) -> Target:
    """Ask the Hub for the repository; nothing is sent. Raises InputError: no token or answer, or public and not ``public``."""
    repo = planned.repo
    with _client(repo) as api:
        from huggingface_hub.errors import RepositoryNotFoundError

        url = f"{api.endpoint}/{repo}"
        try:
            info = api.model_info(repo)
        except RepositoryNotFoundError:
            return Target(url, not public, None)
        others = {str(file.rfilename) for file in info.siblings or ()} - {*planned.content, ".gitattributes"}
        commit = hub.require_commit(info.sha)
    if info.id != repo:
        raise InputError(f"{repo} is called {quoted(info.id)} now; give that name")
    if info.private is not True and not public:
        raise InputError(f"{url} is public already; add --public, or choose another name for a private one")
    return Target(url, info.private is True, commit, tuple(sorted(others)))


def send(planned: Plan, target: Target) -> tuple[str, list[str]]:
    """Create the repository if need be, upload, and commit; return the commit, and the files whose hash there is another.

    Large files that the Hub has already are not sent again, so a broken upload goes on. The commit fails if the repository has
    changed since :func:`look`. Raises InputError: the Hub refuses or does not answer.
    """
    with _client(planned.repo) as api:
        from huggingface_hub import CommitOperationAdd
        from huggingface_hub.utils.sha import git_hash

        if target.commit is None:
            api.create_repo(planned.repo, private=target.private)
        files = [CommitOperationAdd(name, held) for name, held in planned.content.items()]
        message = f"Upload {len(files)} files with gpt2 publish"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a card without metadata, which the plan's notes say
            done = api.create_commit(planned.repo, files, commit_message=message, parent_commit=target.commit)
        commit = hub.require_commit(done.oid)
        listed = {name: row.digest for name, row in hub.list_files(planned.repo, commit).items()}
    # The Hub may list git's hash of a small file.
    git = {name: git_hash(held) for name, held in planned.content.items() if isinstance(held, bytes)}
    wrong = [file.name for file in planned.files if listed.get(file.name) not in (file.sha256, git.get(file.name, file.sha256))]
    return commit, wrong


@contextlib.contextmanager
def _client(repo: str) -> Iterator[HfApi]:
    """Yield the Hub's client, which sends over git LFS: over Xet, the Hub's chunked storage, its requests are not its own.

    Raises InputError: there is no token, no network is allowed, or what the block raises, in one line.
    """
    hub.check_environment()
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils import _http

    if constants.is_offline_mode():
        raise InputError("HF_HUB_OFFLINE is set, and publishing needs the Hub: unset it, or try --dry-run")
    if "authorization" not in hub.request_headers():
        raise InputError("not logged in to the Hub: run `hf auth login` or set HF_TOKEN, with a token that may write")
    factory, without_xet = _http._GLOBAL_CLIENT_FACTORY, constants.HF_HUB_DISABLE_XET

    def careful() -> Client:
        client = factory()
        client.timeout = PATIENCE  # of each step: to connect, to write, to read
        client.send = partial(_whole_answer, client.send)  # type: ignore[method-assign]
        return client

    _http.set_client_factory(careful)
    constants.HF_HUB_DISABLE_XET = True
    try:
        yield HfApi()
    except Exception as error:  # an answer can lead the client to any
        raise _refused(repo, error) from error
    finally:
        _http.set_client_factory(factory)
        constants.HF_HUB_DISABLE_XET = without_xet


def _whole_answer(send: Callable[..., Response], request: Request, **options: Any) -> Response:
    """Send a request and return the whole answer.

    Raises InputError: it is too long, comes too late, or leads elsewhere, where the client would send the files and the token.
    """
    seconds = 2 * PATIENCE + int(request.headers.get("content-length", 0)) / SLOWEST

    def whole() -> Response:
        with contextlib.closing(send(request, **{**options, "stream": True, "follow_redirects": False})) as answer:
            if answer.has_redirect_location:
                there = request.url.join(answer.headers["location"])
                shown = hub.one_line(Exception(there.copy_with(query=None, fragment=None, userinfo=b"")))  # these may be secret
                what = f"{request.url.host} sends the upload on to {shown}, where nothing was sent"
                raise InputError(f"{what}; give the repository's name there, or set HF_ENDPOINT if that is your Hub")
            headers = {name: answer.headers[name] for name in KEPT if name in answer.headers}
            return type(answer)(answer.status_code, headers=headers, content=hub.body_of(answer), request=request)

    try:
        return hub.moving(whole, lambda: None, seconds)
    except TimeoutError:
        raise hub.no_hub(f"no answer in {seconds:.0f} s") from None


def _refused(repo: str, error: Exception) -> InputError:
    """Return what went wrong in one line, without the token."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

    cause = (error.__cause__ or error) if isinstance(error, RuntimeError) else error  # the client names the file around it
    why, endpoint = hub.one_line(cause), constants.ENDPOINT
    if isinstance(cause, InputError):
        return InputError(str(cause).replace("use --offline", AGAIN))
    if isinstance(cause, HfHubHTTPError):
        status, why = cause.response.status_code, cause.response.headers.get("X-Error-Message") or "no reason given"
        what = REFUSALS.get(status, REFUSALS[503] if status == 408 or status >= 500 else "{said}; correct it and publish again")
        what = what.format(hub=endpoint, owner=repo.partition("/")[0], said=hub.one_line(Exception(why))[:160])
        return InputError(f"{endpoint} answers {status} for {repo}: {what}")
    if isinstance(error, HTTPError | OSError | RuntimeError):
        return InputError(f"the upload to {repo} broke off ({why}): check the network and {AGAIN}")
    if type(error) is ValueError or isinstance(error, HFValidationError):  # the checks of the card, and of the name
        return InputError(f"{repo}: {why}; correct it and publish again")
    return InputError(str(hub.no_hub(f"{type(error).__name__}: {why}")).replace("use --offline", AGAIN))
