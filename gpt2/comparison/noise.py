"""Measure the floor of noise: how far one model's logits move when only the way of computing them changes.

``gpt2 compare MODEL --noise`` runs a model on one text in other batches, with padding, with a cache, with other attention
kernels, other numbers of threads, on every device at hand and in other dtypes. None of these should matter, and all of them
round differently. A difference between two models means something only above what these differences make.

The baseline is each row of the text alone, without padding or cache, in the model's own dtype.
"""

from __future__ import annotations

import copy
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpt2.checkpoint.names import DEFAULT
from gpt2.comparison.noise_result import CloseCall, Noise, Way
from gpt2.comparison.passage import open_passage
from gpt2.comparison.results import Scored
from gpt2.comparison.sides.checkpoint_side import CheckpointSide
from gpt2.comparison.ways import PADDING, PIECE, Run, alone, attending, in_pieces, one_at_a_time, padded, together
from gpt2.data import Tokenizer
from gpt2.errors import InputError, machine_memory
from gpt2.generation import generate
from gpt2.measure.estimates import Bootstrap
from gpt2.measure.metrics import Progress, relative_error, silent
from gpt2.measure.per_token import likeliest, measure_rows
from gpt2.model import GPT2, eager_attention
from gpt2.pages.reports import dtype_label, environment

TOKENS = 1024  # of the text, by default
ROW = 256  # tokens of a row
PROMPTS, PROMPT, NEW_TOKENS = 8, 16, 48
CLOSE_CALLS = 10
LOGIT_BYTES = 20  # held of each logit: the baseline's in float32, and those of a way in float64, as rows and put together
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
KERNELS = {
    "attention kernel: flash": SDPBackend.FLASH_ATTENTION,
    "attention kernel: memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "attention kernel: cuDNN": SDPBackend.CUDNN_ATTENTION,
    "attention kernel: math": SDPBackend.MATH,
}


def _ways(side: CheckpointSide, model: GPT2, skipped: list[tuple[str, str]]) -> Iterator[tuple[str, str, torch.dtype, Run]]:
    """Yield (group, name, dtype, run) of every other way to compute; what it loads is freed before the next."""
    own, device = side.dtype, model.wte.weight.device
    yield "batch", "all rows in one batch", own, together(model)
    yield "padding", f"{PADDING} tokens of padding on the left", own, padded(model)
    yield "cache", f"with a cache, {PIECE} tokens at a time", own, in_pieces(model)
    yield "cache", "with a cache, one token at a time", own, one_at_a_time(model)
    with attending(model, eager_attention):
        yield "kernel", "attention step by step", own, alone(model)
    for name, backend in KERNELS.items():
        if device.type == "cpu" and backend not in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
            continue
        with sdpa_kernel([backend]):
            yield "kernel", name, own, alone(model)
    if device.type == "cpu" and torch.backends.mkldnn.is_available():
        with torch.backends.mkldnn.flags(enabled=False):
            yield "kernel", "matrix products without oneDNN", own, alone(model)
    threads = torch.get_num_threads()
    for count in sorted({1, 2, os.cpu_count() or 1} - {threads}):
        torch.set_num_threads(count)
        try:
            yield "threads", f"{count} thread{'s' * (count > 1)} instead of {threads}", own, alone(model)
        finally:
            torch.set_num_threads(threads)
    for other in _accelerators():
        if own != torch.int8:
            there = copy.deepcopy(model).to(other)
            yield "device", f"on {other}", own, _elsewhere(there, other)
            if other.type == "cuda" and own == torch.float32:
                before = torch.backends.cuda.matmul.allow_tf32
                torch.backends.cuda.matmul.allow_tf32 = True
                try:
                    yield "device", f"on {other}, with TF32", own, _elsewhere(there, other)
                finally:
                    torch.backends.cuda.matmul.allow_tf32 = before
            del there
    if not _accelerators():
        skipped.append(("device", "this machine has no accelerator"))
    for dtype in DTYPES:
        if dtype != own and own != torch.int8:
            yield "dtype", f"in {dtype_label(dtype)}", dtype, alone(side.checkpoint.load(dtype))


def _accelerators() -> list[torch.device]:
    kinds = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return [torch.device(kind) for kind, there in kinds.items() if there]


def _elsewhere(model: GPT2, device: torch.device) -> Run:
    run = alone(model)
    return lambda rows: run(rows.to(device)).cpu()


@torch.inference_mode()
def measure_noise(
    name: str = DEFAULT,
    *,
    on: str | None = None,
    tokens: int | None = None,
    seed: int = 0,
    offline: bool = False,
    progress: Progress = silent,
) -> Noise:
    """Run one model in every way that should give the same logits, and measure how far they part.

    Args:
        name: a model as for :func:`gpt2.load`.
        on, seed, offline: as for :func:`gpt2.compare`.
        tokens: use this many tokens of the text (default: 1024).

    Raises:
        InputError: no such model or text, or too few tokens.
    """
    started = time.perf_counter()
    side = CheckpointSide.open(name, offline=offline)
    if side.by_transformers:
        raise InputError(f"{name}: --noise runs our implementation; leave out hf/")
    tokenizer = side.tokenizer()
    passage = open_passage(on, TOKENS if tokens is None else tokens, [side], [tokenizer], seed, offline=offline)
    ids = passage.ids
    vocab = side.config.vocab_size if tokenizer is None else min(side.config.vocab_size, tokenizer.n_vocab)
    needed, memory = LOGIT_BYTES * len(ids) * vocab, machine_memory()
    if needed > memory / 2:
        sizes = f"need about {needed / 1e9:,.1f} GB, more than half of this machine's {memory / 1e9:,.1f}"
        raise InputError(f"{name}: the logits of {len(ids):,} tokens {sizes}; give --tokens with a smaller number")
    progress("loading the model")
    model = side.checkpoint.load()
    length = min(ROW, max(2, side.config.n_positions - PADDING), len(ids))
    rows = ids[: len(ids) // length * length].view(-1, length)
    texts, first_new = _texts(model, ids, length)
    progress("noise: the baseline")
    with _quiet():
        baseline = _Baseline(alone(model), rows, texts, first_new, vocab, seed)
        ways: list[Way] = []
        skipped: list[tuple[str, str]] = []
        for group, what, dtype, run in _ways(side, model, skipped):
            progress(f"noise: {what}")
            try:
                ways.append(baseline.measure(group, what, dtype_label(dtype), run))
            except (RuntimeError, ValueError) as error:  # a kernel that this device lacks; too few positions for padding
                skipped.append((what, next(iter(str(error).splitlines()), "")))
    env = environment([side.dtype])
    return Noise(
        model=side.describe(env.versions),
        text=Scored(passage.scored.name, passage.scored.sha256, rows.numel(), length, length, ""),
        rows=len(rows),
        ways=tuple(ways),
        skipped=tuple(skipped),
        close_calls=baseline.close_calls(ways, tokenizer),
        prompts=len(texts),
        new_tokens=texts.size(1) - first_new,
        environment=env,
        seed=seed,
        seconds=time.perf_counter() - started,
    )


class _Baseline:
    """The model's logits on rows of the text and on its own greedy texts, against which every other way is measured."""

    def __init__(self, run: Run, rows: Tensor, texts: Tensor, prompt: int, vocab: int, seed: int) -> None:
        self.rows, self.texts, self.prompt, self.vocab = rows, texts, prompt, vocab
        self.logits = self._run(run, rows)  # (R, T, V)
        top, values = likeliest(self.logits.flatten(0, 1).cpu(), 2)
        self.top, self.margins = top, values[:, 0] - values[:, 1]  # (R T, 2), (R T,)
        self.next = self._next(run)  # (P, new)
        # The texts were generated with a cache: up to here they are also the baseline's own.
        self.own = (self.next == texts[:, prompt:]).int().cumprod(1).sum(1)
        self.bootstrap = Bootstrap(rows.size(0) * (rows.size(1) - 1), seed)

    def _run(self, run: Run, rows: Tensor) -> Tensor:
        return run(rows)[..., : self.vocab]

    def _next(self, run: Run) -> Tensor:
        logits = self._run(run, self.texts[:, :-1])[:, self.prompt - 1 :]
        ids, _ = likeliest(logits.flatten(0, 1).cpu(), 1)
        return ids.view(len(self.texts), -1)

    def measure(self, group: str, name: str, dtype: str, run: Run) -> Way:
        logits = self._run(run, self.rows)
        kl = torch.cat(
            [measure_rows(a[:-1], b[:-1], row[1:], 1)[2] for a, b, row in zip(self.logits, logits, self.rows, strict=True)]
        )
        largest = max((a.double() - b.double()).abs().max().item() for a, b in zip(self.logits, logits, strict=True))
        top, _ = likeliest(logits.flatten(0, 1).cpu(), 1)
        parted = []
        for ours, theirs, own in zip(self.next, self._next(run), self.own.tolist(), strict=True):
            differing = (ours[: own + 1] != theirs[: own + 1]).nonzero()
            parted.append(int(differing[0]) if len(differing) else None)
        return Way(
            group=group,
            name=name,
            dtype=dtype,
            logit=largest,
            error=relative_error(logits, self.logits),
            kl=self.bootstrap.mean(kl),
            kl_max=kl.max().item(),
            flipped=int((top[:, 0] != self.top[:, 0]).sum()),
            hanging=int((self.margins <= 2 * largest).sum()) if largest > 0 else 0,
            parts_at=tuple(parted),
        )

    def close_calls(self, ways: Sequence[Way], tokenizer: Tokenizer | None) -> tuple[CloseCall, ...]:
        """Return the places where the two likeliest tokens are closest, and the ways whose error may exchange them."""
        length, calls = self.rows.size(1), []

        def shown(ids: list[int]) -> str:
            return " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)

        for at in self.margins.argsort()[:CLOSE_CALLS].tolist():
            row, place = divmod(at, length)
            margin = self.margins[at].item()
            names = tuple(way.name for way in ways if margin <= 2 * way.logit and way.logit > 0)
            before = self.rows[row, max(0, place - 7) : place + 1].tolist()
            first, second = ([token] for token in self.top[at].tolist())
            calls.append(CloseCall(at, shown(before), shown(first), shown(second), margin, names))
        return tuple(call for call in calls if call.ways)


def _texts(model: GPT2, ids: Tensor, length: int) -> tuple[Tensor, int]:
    """Return greedy texts (P, prompt and new tokens), and the number of tokens of a prompt."""
    prompt = max(1, min(PROMPT, length // 4))
    starts = range(0, len(ids) - prompt + 1, max(1, (len(ids) - prompt) // (PROMPTS - 1) if PROMPTS > 1 else 1))
    prompts = torch.stack([ids[start : start + prompt] for start in starts][:PROMPTS])
    new_tokens = min(NEW_TOKENS, length - prompt)
    return generate(model, prompts, new_tokens, temperature=0), prompt


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what PyTorch says of a kernel that this device lacks; it raises RuntimeError as well."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
