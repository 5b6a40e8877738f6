"""One file of a data set on the Hub, known beforehand by its hash, so that what is measured on it means the same everywhere.

The commit and the sha256 stand in the code: no branch is followed, no listing read, and a copy in the cache is used without a
request. The transport, its patience and the check of the hash are the weights' own (:mod:`gpt2.checkpoint.download`).
"""

from dataclasses import dataclass
from pathlib import Path

from gpt2.checkpoint.cache import Declared, discard, snapshot
from gpt2.checkpoint.download import fetch
from gpt2.checkpoint.hub_api import commit_of
from gpt2.checkpoint.hub_errors import explained, firm, unreachable
from gpt2.checkpoint.verified import digest
from gpt2.errors import InputError


@dataclass(frozen=True)
class DatasetFile:
    """A file at a commit of a data set's repository."""

    repo: str  # "org/name"
    commit: str  # 40 hex
    path: str
    sha256: str
    size: int  # bytes


def dataset_file(file: DatasetFile, *, offline: bool = False) -> Path:
    """The file in the Hub's cache on this machine, with the hash it must have; downloaded where it is not there yet.

    Raises:
        InputError: it is not in the cache, and the Hub does not answer or must not be asked. CheckpointError: wrong bytes.
    """
    with explained(file.repo, file.commit):
        from huggingface_hub import constants
        from huggingface_hub.errors import HTTPError

        local = snapshot(file.repo, file.commit, "dataset") / file.path
        if local.is_file() and digest(local, file.sha256) == file.sha256:
            return local
        way_out = f"fetch {file.path} of the data set {file.repo} yourself, and put it at {local}"
        if offline or constants.is_offline_mode():
            what = "a damaged copy" if local.is_file() else "no copy"
            raise InputError(
                f"offline, and the cache {constants.HF_HUB_CACHE} holds {what} of {file.path} of {file.repo}: run once online "
                f"(no --offline, no HF_HUB_OFFLINE=1), or {way_out}"
            )
        try:  # limited in time, which the download is not
            commit_of(file.repo, file.commit, "dataset")
        except HTTPError as error:
            if firm(error):
                raise
            raise unreachable(file.repo, error, f"or {way_out}") from error
        discard(local)
        fetch(file.repo, local, Declared(file.sha256, file.size))
        return local
