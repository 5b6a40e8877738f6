"""verify: our model against transformers' over the same files, by the rules of what "equal" means.

Mapping and rounding are told apart. In float64 both implementations must agree to 1e-10 at every point, which no bug survives
and no honest implementation fails. In the dtype asked for, ours may stray from that float64 run at most 1.5 times as far as
transformers itself does, so the bound scales with the model, the depth and the dtype, and nobody has to choose a tolerance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from gpt2.checkpoint.configs import config_of
from gpt2.checkpoint.containers.mapped_file import require_whole_files
from gpt2.checkpoint.files import files_of, open_weights
from gpt2.checkpoint.hub import Source, resolve
from gpt2.checkpoint.loading import load_path
from gpt2.checkpoint.names import DEFAULT, DTYPES, parse_random, split_dtype
from gpt2.checkpoint.saving import sha256
from gpt2.errors import InputError
from gpt2.model import GPT2
from gpt2.parity import checks, reference, training
from gpt2.parity.checks import Build, Probe, Subject
from gpt2.parity.report import Report, environment


def _load(path: Path, dtype: torch.dtype | None) -> GPT2:
    return load_path(path, dtype=dtype)


def verify(
    name: str = DEFAULT,
    *,
    dtype: str = "float32",
    seed: int = 0,
    revision: str | None = None,
    offline: bool = False,
    build: Build = _load,
    progress: Callable[[str], None] = lambda what: None,
) -> Report:
    """Hold our model against transformers' on the same weights.

    Args:
        name: a model name as in :func:`gpt2.load`; ``random:SIZE`` is written to a temporary folder by transformers first.
        dtype: the precision whose rounding is judged; a ``:dtype`` suffix on the name says the same.
        seed: draws the token ids.
        build: makes the model under test from (directory, dtype); the controls of the test suite put broken ones here.
        progress: told in words what is going on.

    Raises:
        InputError: no such model, or files that do not make one.
    """
    started = time.perf_counter()
    base, suffix = split_dtype(name)
    rounding = getattr(torch, suffix or DTYPES.get(dtype) or _unknown(dtype))
    with _on_disk(base, revision, offline, progress) as (source, theirs):
        config = config_of(source.path, open_weights(source.path))
        probe = Probe.draw(config, seed)

        def stage(what: str) -> None:
            require_whole_files()
            progress(what)

        subject = Subject(source.path, theirs, config, build, rounding, probe, stage)
        tokens = checks.tokens(subject)  # first, because a damaged vocabulary should not take ten seconds to be found
        found = [checks.weights(subject), *checks.forward(subject), *training.training(subject), tokens]
        files = {path.name: sha256(path) for path in files_of(source.path)}
        told = "" if theirs == source.path else " (given our tensors: it cannot open these files itself)"
    env = environment(str(rounding).removeprefix("torch."), "cpu")
    return Report(
        model=source.name,
        reference=f"transformers {env.versions['transformers']}{told}",
        revision=source.revision,
        parameters=config.num_parameters(),
        n_layer=config.n_layer,
        coverage=probe.coverage(config),
        checks=tuple(found),
        files=files,
        environment=env,
        seed=seed,
        seconds=time.perf_counter() - started,
    )


@contextmanager
def _on_disk(name: str, revision: str | None, offline: bool, progress: Callable[[str], None]) -> Iterator[tuple[Source, Path]]:
    """What we read, and the directory that transformers reads: the same files wherever it can open them."""
    random = parse_random(name)
    source = None if random else resolve(name, revision=revision, offline=offline)
    with reference.directory(source.path if source else None, random, progress) as folder:
        yield source or Source(name, folder, None), folder


def _unknown(dtype: str) -> str:
    raise InputError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
