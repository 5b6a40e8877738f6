"""Publish a model's folder to the Hub in one commit: choose its files, check model and card, upload, and read the result back."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2.checkpoint import card
from gpt2.checkpoint.cache import COMMIT, Declared, digest_of
from gpt2.checkpoint.checkpoint import AdaptedCheckpoint, open_path
from gpt2.checkpoint.describe import File
from gpt2.checkpoint.export import TOKENIZER_FILES
from gpt2.checkpoint.files import ADAPTER, INDEX, require_small
from gpt2.checkpoint.hub import MAX_ANSWER, explained, list_files, moving, no_hub, one_line, request_headers
from gpt2.checkpoint.loading import require_finite, rows_note
from gpt2.checkpoint.names import REPOSITORY
from gpt2.checkpoint.peft_files import WEIGHTS as ADAPTER_WEIGHTS
from gpt2.checkpoint.saving import MANIFEST, sha256, unlike_manifest
from gpt2.config import quoted
from gpt2.data.files import opened
from gpt2.errors import InputError

if TYPE_CHECKING:
    from httpx2 import Client, Request, Response
    from huggingface_hub import HfApi

ADAPTERS = (ADAPTER, ADAPTER_WEIGHTS, f"adapter/{ADAPTER}", f"adapter/{ADAPTER_WEIGHTS}")
BESIDE = {"config.json", "generation_config.json", "LICENSE", *ADAPTERS, card.CARD, card.CURVES, card.RECORD, *TOKENIZER_FILES}
PATH = "a path of this machine"
# What must not be sent unseen, by its name for the user. Of weights only the first bytes are searched, their header.
PRIVATE = {
    "a token": rb"\b(?:hf_|api_org_|sk-|gh[pousr]_|github_pat_|glpat-|npm_|pypi-|AIza|A[KS]IA|xox[a-z]-|xapp-|ya29\.)[\w-]{16,}"
    rb"|(?i:(?:api|access|secret|auth)[_-]?(?:key|token|secret)|passw(?:or)?d)[\"']? *[:=] *[\"']?[^\s\"'<]{8,}",
    "a key": rb"-----BEGIN [A-Z ]*PRIVATE KEY",
    PATH: rb"(?:/home/|/Users/|/root/|(?<!\w)/(?:scratch|mnt|media|Volumes|workspace|lustre|gpfs)/"
    rb'|\b[A-Za-z]:\\{1,2}Users\\{1,2})[\w.+/-]+|"base_model_name_or_path": *"[~./][^"]*"',
}
HEAD, LARGE = 1 << 20, (".safetensors", ".gguf")
PATIENCE, SLOWEST = 60.0, 10_000  # seconds for an answer or until something moves; bytes a second that an upload has at least
# Headers of an answer that are not passed on: of a body that is decoded, and how long the client would sleep.
DROPPED = ("content-encoding", "content-length", "transfer-encoding", "ratelimit", "ratelimit-policy", "retry-after")
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
    name the repository. ``private`` says which files hold what looks like a token or a private path.
    """

    folder: Path
    files: tuple[File, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    written: Mapping[str, bytes]
    private: tuple[str, ...]


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

    The weights that the model is read from are sent, and by name: config, tokenizer, card, record, curves, LoRA adapter. With
    ``repo``, card and record name it; the record may be another than the folder's.

    Raises InputError: not OWNER/NAME, no such folder, its model does not load or computes no numbers, its weights are in another
    format, a file is a link that leads out of it, or its card claims what its record does not have.
    """
    if repo is not None:
        _require_name(repo)
    given, folder = Path(folder), Path(folder).expanduser().resolve()
    if not folder.is_dir():
        raise InputError(f"{given}: not a folder; give the one that gpt2 export or gpt2 train made, such as out/run/best")
    weights, notes = _check_model(folder, given)
    present = sorted(entry.relative_to(folder).as_posix() for entry in folder.rglob("*") if not entry.is_dir())
    names = [name for name in present if name in weights | BESIDE]
    for path in [folder / name for name in names]:
        if not (path.resolve().is_file() and path.resolve().is_relative_to(folder)):
            what = f"{given}/{path.relative_to(folder)}: a link that leads out of the folder, or no file"
            raise InputError(f"{what}; put a copy of the file there")
        if path.suffix not in LARGE:
            require_small(path)
    files = {name: File(name, (folder / name).stat().st_size, sha256(folder / name)) for name in names}
    notes += card.check(folder, {name: file.sha256 for name, file in files.items()})
    if (folder / MANIFEST).exists() and (damage := unlike_manifest(folder, weights)):
        raise InputError(f"{given}: {damage}; restore it from a copy, or, if you changed it yourself, remove {MANIFEST}")
    record, written, private = record or card.read_record(folder), dict[str, bytes](), list[str]()
    if repo and record and card.CARD in files:
        written, _ = card.contents(folder, record | {"repo": repo})
    files |= {name: File(name, len(content), hashlib.sha256(content).hexdigest()) for name, content in written.items()}
    for name in files:
        with opened(folder / name) as file:
            content = written.get(name) or file.read(HEAD if name.endswith(LARGE) else -1)
        for what, pattern in PRIVATE.items():
            if found := re.search(pattern, content):
                text = found[0].decode(errors="replace")
                private.append(f"{name} holds {f'{text}, ' if what == PATH else f'{text[:7]}..., which looks like '}{what}")
    left_out = tuple(name for name in present if name not in names)
    return Plan(folder, tuple(files.values()), left_out, (*notes, *private), written, tuple(private))


def _require_name(repo: str) -> None:
    if not REPOSITORY.fullmatch(repo):
        raise InputError(f"{quoted(repo)} is not OWNER/NAME; give your name on the Hub and the model's, such as me/macbeth")


def _check_model(folder: Path, given: Path) -> tuple[set[str], list[str]]:
    """Load the model and compute logits; return the files of its weights, and remarks. Raises InputError: it cannot be sent."""
    checkpoint = open_path(folder)
    if isinstance(checkpoint, AdaptedCheckpoint):
        weights = {ADAPTER_WEIGHTS}
    else:
        weights = {container.path.name for container in checkpoint.assignment.files.values()}
        if others := sorted(name for name in weights if not name.endswith(LARGE)):
            what = f"the weights are read from {others[0]}, which is not sent"
            raise InputError(f"{given}: {what}; gpt2 export {given} DIR writes safetensors")
        weights |= {INDEX} if len(weights) > 1 else set()
    model, tokenizer = checkpoint.load(), checkpoint.own_tokenizer()
    require_finite(model, str(folder))
    if tokenizer is None:
        return weights, ["there is no tokenizer in the folder: nobody can type a prompt"]
    return weights, rows_note(tokenizer, model.config, str(folder))


def look(repo: str, planned: Plan, *, public: bool) -> Target:
    """Ask the Hub for the repository; nothing is sent.

    Raises InputError: not OWNER/NAME, no token, no answer, or a public repository where a private one is wanted.
    """
    _require_name(repo)
    with explained(repo, refused=_refused), _careful():
        from huggingface_hub.errors import RepositoryNotFoundError
        from huggingface_hub.utils import validate_repo_id

        validate_repo_id(repo)
        api = _api()
        url = f"{api.endpoint}/{repo}"
        try:
            info = api.model_info(repo)
        except RepositoryNotFoundError:
            return Target(repo, url, not public, None)
        others = {str(file.rfilename) for file in info.siblings or ()} - {file.name for file in planned.files}
        commit = _commit(info.sha)
    if info.id != repo:
        raise InputError(f"{repo} is called {quoted(info.id)} now; give that name")
    if info.private is not True and not public:
        raise InputError(f"{url} is public already; add --public, or choose another name for a private one")
    return Target(repo, url, info.private is True, commit, tuple(sorted(others - {".gitattributes"})))


def send(planned: Plan, target: Target) -> Published:
    """Create the repository if need be, upload, commit, and compare what the Hub lists with the plan.

    Large files that the Hub has already are not sent again, so a broken upload goes on. The commit fails if the repository has
    changed since :func:`look`. Raises InputError: the Hub refuses or does not answer.
    """
    with explained(target.repo, refused=_refused), _careful():
        from huggingface_hub import CommitOperationAdd

        api = _api()
        if target.commit is None:
            api.create_repo(target.repo, private=target.private)
        sent = {file.name: planned.written.get(file.name) or planned.folder / file.name for file in planned.files}
        files = [CommitOperationAdd(name, content) for name, content in sent.items()]
        message = f"Upload {len(files)} files with gpt2 publish"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a card without metadata, which the plan's notes say
            done = api.create_commit(target.repo, files, commit_message=message, parent_commit=target.commit)
        commit = _commit(done.oid)
        stored = list_files(target.repo, commit)
    wrong = [file.name for file in planned.files if not _arrived(file, sent[file.name], stored.get(file.name))]
    return Published(commit, f"{target.url}/commit/{commit}", tuple(wrong))


def _commit(sha: object) -> str:
    if not (isinstance(sha, str) and COMMIT.fullmatch(sha)):
        raise _garbled("names no commit")
    return sha


@contextlib.contextmanager
def _careful() -> Iterator[None]:
    """Let the client follow no redirect to another host, which it would send the files to, and wait for nothing without end.

    So it sends over git LFS: over Xet, the Hub's chunked storage, its requests are not its own.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    factory, without_xet = _http._GLOBAL_CLIENT_FACTORY, constants.HF_HUB_DISABLE_XET

    def careful() -> Client:
        client = factory()
        client.timeout = PATIENCE  # of each step: to connect, to write, to read
        client.event_hooks = {**client.event_hooks, "response": [*client.event_hooks["response"], _stay]}
        client.send = partial(_whole_answer, client.send)  # type: ignore[method-assign]
        return client

    _http.set_client_factory(careful)
    constants.HF_HUB_DISABLE_XET = True
    try:
        yield
    finally:
        _http.set_client_factory(factory)
        constants.HF_HUB_DISABLE_XET = without_xet


def _stay(answer: Response) -> None:
    """Raise InputError if an answer leads to another host, or to the same without encryption."""
    asked = answer.request.url
    there = asked.join(answer.headers["location"]) if answer.has_redirect_location else asked
    if (there.scheme, there.netloc) != (asked.scheme, asked.netloc):
        what = f"{asked.host} sends the upload on to {there.scheme}://{there.netloc.decode()}"
        raise InputError(f"{what}, where nothing was sent; if that is your Hub, set HF_ENDPOINT to it")


def _whole_answer(send: Any, request: Request, **options: Any) -> Response:
    """Send a request and return the whole answer. Raises InputError: it is too long, or not there in time."""
    seconds, body = 2 * PATIENCE + int(request.headers.get("content-length", 0)) / SLOWEST, bytearray()

    def whole() -> Response:
        with contextlib.closing(send(request, **{**options, "stream": True})) as answer:
            for chunk in answer.iter_bytes():
                body.extend(chunk)
                if len(body) > MAX_ANSWER:
                    raise _garbled("its answer does not end")
        headers = [(name, value) for name, value in answer.headers.multi_items() if name.lower() not in DROPPED]
        return type(answer)(answer.status_code, headers=headers, content=bytes(body), request=answer.request)

    try:
        return moving(whole, lambda: None, seconds)
    except TimeoutError:
        raise _garbled(f"no answer in {seconds:.0f} s") from None


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
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    cause = (error.__cause__ or error) if isinstance(error, RuntimeError) else error  # the client names the file around it
    if isinstance(cause, InputError):
        return cause
    if isinstance(cause, HfHubHTTPError):
        hub, status = constants.ENDPOINT, cause.response.status_code
        said = one_line(Exception(cause.response.headers.get("X-Error-Message") or "no reason given"))[:160]
        what = REFUSALS.get(status, DOWN if status >= 500 else "{said}; correct it and publish again")
        return InputError(f"{hub} answers {status} for {repo}: {what.format(hub=hub, owner=repo.partition('/')[0], said=said)}")
    if isinstance(error, HTTPError | OSError | RuntimeError):
        return InputError(f"the upload to {repo} broke off ({one_line(cause)}): check the network and {AGAIN}")
    if isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError | UnicodeError):  # the checks of the card
        return InputError(f"{repo}: {one_line(cause)}; correct it and publish again")
    return _garbled(f"{type(error).__name__}: {one_line(error)}")


def _garbled(why: str) -> InputError:
    return InputError(str(no_hub(why)).replace("use --offline", AGAIN))
