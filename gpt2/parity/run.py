"""Verify that our model equals transformers' model on the same files. README.md in this folder has the definition of equal."""

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any, ParamSpec, Protocol, cast, overload

import torch

from gpt2.checkpoint.checkpoint import Checkpoint, StoredCheckpoint, open_checkpoint, open_path
from gpt2.checkpoint.loading import require_intact
from gpt2.checkpoint.names import DEFAULT, FLOATS, ModelName, Name, dtype_name
from gpt2.checkpoint.official import Official, official_files
from gpt2.checkpoint.saving import save, sha256
from gpt2.damage import ADVICE
from gpt2.devices.run import DeviceReport, verify_device
from gpt2.errors import InputError
from gpt2.measure.allocator import give_back_freed_memory
from gpt2.measure.environment import environment
from gpt2.measure.placement import missing_kernel
from gpt2.model import GPT2
from gpt2.options import changed, pick, signed
from gpt2.pages.reports import Interrupted
from gpt2.parity import checks, reference
from gpt2.parity.checks import Probe, Subject
from gpt2.parity.findings import DifferenceFound, Findings
from gpt2.parity.forward import forward
from gpt2.parity.record import RecordReport, compute, public_record
from gpt2.parity.report import AT_DIFFERENCE, INTERRUPTED, RUNNING, Report
from gpt2.parity.settings import VerifySettings
from gpt2.parity.training import gradients, rounded_gradients

MORE_DRAWS = 8  # times as many runs with random errors, before rounding errors make a model differ
MORE_BYTES = 1e9  # of a large model fewer, but two: each has a gradient of the embedding in float64
P = ParamSpec("P")


class Verifies(Protocol[P]):
    """:func:`verify`, with the fields of ``VerifySettings`` as its keywords."""

    @overload
    def __call__(self, name: Name | GPT2 = ..., *args: P.args, **settings: P.kwargs) -> Report: ...

    @overload
    def __call__(self, name: Name = ..., *, device: str | torch.device, **settings: Any) -> DeviceReport: ...


def _with_keywords(settings: Callable[P, VerifySettings]) -> Callable[[Callable[..., Report | DeviceReport]], Verifies[P]]:
    return lambda function: cast(Verifies[P], signed(function, VerifySettings))


@_with_keywords(VerifySettings)
def verify(name: Name | GPT2 = DEFAULT, *, device: "str | torch.device | None" = None, **options: Any) -> Report | DeviceReport:
    """Compare our model with transformers' on the same weights, one block at a time.

    Args:
        name: a model name as in :func:`gpt2.load`; of ``random:SIZE``, transformers writes the weights to a temporary folder.
            Or a model, as one's own loop trained it: its weights are written to a temporary folder, which transformers reads.
        device: judge this device instead, as :func:`gpt2.verify_device` does, with ``seed``, ``revision``, ``offline`` and
            ``progress`` alone.
        dtype: the precision in which rounding is judged; a ``:dtype`` suffix on the name does the same.
        build: makes the model under test from (directory, dtype), a dtype of ``None`` is that of the files; default: our loader.
        progress: called with a few words at each stage.
        watch: called with the report so far after each step. A difference by rounding may be gone in a later one.

    Raises:
        InputError: no such model, files that do not make one, ``record`` with weights that are not official, or an argument
            that has no effect with ``device``.
        Interrupted: Ctrl-C; it has the report so far.
    """
    settings = VerifySettings(**options)
    if device is not None:
        if isinstance(name, GPT2) or changed(settings, "dtype", "build", "quick", "keep_going", "record", "watch"):
            raise InputError("verify: device takes a name, seed, revision, offline and progress alone; leave the others out")
        return verify_device(name, device, **pick(settings, "seed", "revision", "offline", "progress"))
    if not isinstance(name, GPT2):
        return _verified(name, settings)
    model, shown = name, name.name or "a model"
    if settings.record:
        raise InputError(f"{shown}: --record is of official files, and this is a model in memory; leave it out")
    own = settings.build or (lambda _, dtype: copy.deepcopy(model).eval().to("cpu", dtype))
    with TemporaryDirectory() as saved:
        save(model, None, saved)
        require_intact(model, shown)
        found = _verified(saved, replace(settings, build=own, revision=None))
    return replace(found, model=shown)


def _verified(name: Name, settings: VerifySettings) -> Report:
    progress, watch, build = settings.progress, settings.watch, settings.build
    started = time.perf_counter()
    parsed = ModelName.parse(name, FLOATS, revision=settings.revision)
    rounding = getattr(torch, parsed.dtype or dtype_name(settings.dtype, FLOATS))
    checkpoint = open_checkpoint(replace(parsed, dtype=None), offline=settings.offline)
    progress("sha256 of the files")
    files = {file: sha256(path) for file, path in checkpoint.files().items()}
    official, recorded = _official(checkpoint, files)
    if settings.record and recorded is None:
        raise InputError(f"{name}: --record is of the official weights, and this is {official or 'random'}; leave it out")
    env = environment([rounding])
    with reference.directory(checkpoint, progress) as folder:
        ours = checkpoint if isinstance(checkpoint, StoredCheckpoint) else open_path(folder)  # random: as transformers wrote it
        files = files or {file: sha256(path) for file, path in ours.files().items()}
        given = "" if folder == ours.path else " (given our tensors: it cannot open these files itself)"
        if damage := (seen := ours.look()).damage:
            raise InputError(f"{name}: holds {damage}; {ADVICE}")
        probe = Probe.draw(ours.config, settings.seed, settings.quick)
        findings = Findings(rounding, settings.quick, settings.keep_going, progress)

        def report(stopped: str = "", public: RecordReport | None = None) -> Report:
            config, used = ours.config, f"transformers {env.versions['transformers']}{given}"
            models = checkpoint.name, used, checkpoint.revision, config.num_parameters(), config.n_layer, probe.coverage(config)
            measured = findings.checks(stopped), files, env, settings.seed, time.perf_counter() - started
            return Report(*models, *measured, official, public, stopped, ours.assumed, seen.outlier)

        if watch is not None:
            findings.watch = lambda: watch(report(RUNNING))
        make = build or (lambda _, dtype: ours.load(dtype))  # from the files that are mapped already
        subject = Subject(ours, folder, make, rounding, probe, findings)
        try:
            _compare(subject)
            public = None
            if recorded is not None and all(check.ok for check in findings.checks()):
                model = make(ours.path, torch.float32)
                public = compute(recorded, public_record(), model, ours.own_tokenizer(), settings.record, progress)
            return report("", public)
        except DifferenceFound:
            return report(AT_DIFFERENCE)
        except (RuntimeError, NotImplementedError) as error:
            if not (missing := missing_kernel(error)):
                raise
            chosen = " and ".join(env.settings)
            remedy = f"unset {chosen}, or verify in float32" if chosen else "verify in float32"
            raise InputError(f"{name}: PyTorch cannot compute {env.dtype} on this machine ({missing}); {remedy}") from None
        except KeyboardInterrupt:
            raise Interrupted(report(INTERRUPTED)) from None


def _compare(subject: Subject) -> None:
    """Run every check. Raises DifferenceFound: one does not hold, and the run is to stop there."""
    findings = subject.findings
    give_back_freed_memory(subject.bytes)  # of the files that transformers wrote
    findings.progress("tokens")
    checks.tokens(subject)  # first, because a damaged vocabulary should be reported at once
    findings.settle("tokens")
    findings.progress("weights")
    checks.weights(subject)
    findings.settle("weights")
    checks.adapter(subject)
    checks.embeddings(subject)
    findings.settle("adapter")
    for stage in (forward,) if findings.quick else (forward, gradients, rounded_gradients):
        give_back_freed_memory(subject.bytes)  # a stage's tensors have other sizes, and do not fit the holes of the one before
        _decide(stage, subject)


def _decide(stage: Callable[[Subject], None], subject: Subject) -> None:
    """Run a stage; again, with more random errors, where rounding alone speaks against a model: a few may all be small ones."""
    findings, subject.draws = subject.findings, 1
    before, finished = {id: len(points) for id, points in findings.points.items()}, set(findings.finished)
    try:
        stage(subject)
    except DifferenceFound:
        if not findings.only_rounding(before):
            raise
    if findings.only_rounding(before):
        findings.points, findings.finished = {id: points[: before[id]] for id, points in findings.points.items()}, finished
        embedding = 8 * subject.config.vocab_size * subject.config.n_embd
        subject.draws = min(MORE_DRAWS, max(2, int(MORE_BYTES / embedding)))
        give_back_freed_memory(subject.bytes)
        stage(subject)


def _official(checkpoint: Checkpoint, files: dict[str, str]) -> tuple[Official | None, str | None]:
    """Return whether the files are official, and the model whose official weights are loaded; None for random weights."""
    if not isinstance(checkpoint, StoredCheckpoint):
        return None, None
    official = official_files(files, checkpoint.name)
    loaded = {file.path.name for file in checkpoint.assignment.files.values()}
    return official, official.model if loaded <= set(official.weights) else None
