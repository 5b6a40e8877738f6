"""The checks of verify: each compares our model with transformers' at many points."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from gpt2.checkpoint.checkpoint import AdaptedCheckpoint, StoredCheckpoint
from gpt2.checkpoint.containers.mapped_file import require_whole_files
from gpt2.checkpoint.containers.safetensors_file import SafetensorsFile
from gpt2.checkpoint.keys import from_file, layer, to_file
from gpt2.checkpoint.loading import require_vocabulary
from gpt2.config import GPT2Config
from gpt2.decoder import Decoder
from gpt2.generation import generate
from gpt2.measure.metrics import Progress, differing_bits, relative_error, worst_relative_error
from gpt2.measure.tracing import points, root_of, trace
from gpt2.model import GPT2
from gpt2.pages.reports import dtype_label
from gpt2.parity import reference
from gpt2.parity.report import EXACT, Check, Point

SEQUENCES = (16, 32)  # number of training sequences: at least and at most
SEQUENCE_COST = 4e9  # budget of parameters times sequences
GREEDY_TOKENS = 32
TRACE_BYTES = 256e6  # limit for the attention maps of one traced pass
LOGIT_FLOPS = 5e11  # limit for one float64 pass over the windows

Build = Callable[[Path, torch.dtype | None], GPT2]


@dataclass(frozen=True)
class Probe:
    """The token ids to run: whole contexts, a window short enough to trace, and sequences to train on."""

    windows: Tensor  # (W, P)
    traced: Tensor  # (1, T)
    sequences: Tensor  # (16 to 32, t + 1)

    @classmethod
    def draw(cls, config: GPT2Config, seed: int) -> Probe:
        """Draw the ids: enough windows to contain every id of the vocabulary once, as far as the budget allows."""
        generator = torch.Generator().manual_seed(seed)
        vocab, context = config.vocab_size, config.n_positions
        affordable = max(1, int(LOGIT_FLOPS / (2 * config.num_parameters() * context)))
        count = min(math.ceil(vocab / context), affordable)
        ids = torch.randperm(vocab, generator=generator)
        padding = torch.randint(vocab, (max(0, count * context - vocab),), generator=generator)
        windows = torch.cat((ids, padding))[: count * context].view(count, context)
        length = int(math.sqrt(TRACE_BYTES / (16 * config.n_layer * config.n_head)))
        length = max(8, min(context, length // 32 * 32))
        number = min(SEQUENCES[1], max(SEQUENCES[0], int(SEQUENCE_COST / config.num_parameters())))
        sequences = torch.randint(vocab, (number, min(context, 64) + 1), generator=generator)
        return cls(windows, windows[:1, :length], sequences)

    def coverage(self, config: GPT2Config) -> str:
        seen = self.windows.unique().numel()
        return f"{seen:,} of {config.vocab_size:,} ids at all {config.n_positions:,} positions"

    def padded(self, config: GPT2Config) -> tuple[Tensor, Tensor]:
        """Return three rows (3, T), one without padding and two with padding on the left, and their mask."""
        row = self.traced[0]
        rows = torch.stack((row, row.flip(0), (row + 1) % config.vocab_size))
        mask = torch.ones_like(rows)
        mask[1, : len(row) // 3] = 0
        mask[2, : len(row) // 2] = 0
        return rows, mask


@dataclass(frozen=True)
class Subject:
    """One set of weights as our model (made by ``build``) and as transformers' model; rounding is judged in ``dtype``."""

    checkpoint: StoredCheckpoint
    folder: Path  # the files that transformers reads
    build: Build
    dtype: torch.dtype
    probe: Probe
    progress: Progress

    def ours(self, dtype: torch.dtype | None) -> GPT2:
        """Build our model; ``None`` means the dtype of the files."""
        return self.build(self.checkpoint.path, dtype)

    def reference(self, dtype: torch.dtype) -> nn.Module:
        return reference.load_reference(self.folder, dtype)

    @property
    def config(self) -> GPT2Config:
        return self.checkpoint.config

    @property
    def adapted(self) -> frozenset[str]:
        """The parameters that have a LoRA adapter merged into them."""
        return frozenset(self.checkpoint.adapter.factors if isinstance(self.checkpoint, AdaptedCheckpoint) else ())


def weights(subject: Subject) -> Check:
    """Compare every stored tensor with our parameter, read by the safetensors library; merged ones go to :func:`adapter`."""
    parameters = {name: tensor for name, tensor in subject.ours(None).state_dict().items() if name not in subject.adapted}
    require_whole_files()
    rows = []
    for key, stored in _stored(subject.checkpoint):
        ours = parameters.pop(from_file(key), None)
        if ours is None:
            continue  # a buffer or the tied head, which the loader checked and dropped
        stored = stored.squeeze(0) if stored.ndim == 3 else stored  # OpenAI's files keep a convolution width of 1
        stored = stored.to(ours.dtype)  # the loader converts mixed dtypes to the widest, without loss
        rows.append((from_file(key), differing_bits(ours, stored) if ours.shape == stored.shape else stored.numel()))
    if any(name.endswith(".bias") for name, _ in rows):
        rows += [(f"{name} (not in the files)", tensor.numel()) for name, tensor in parameters.items()]
    else:  # nanoGPT without biases
        rows += [(f"{name} (not in the files: zeros)", int(tensor.count_nonzero())) for name, tensor in parameters.items()]
    return Check.exact("weights", f"bits of {len(rows)} tensors", "stored", rows)


def adapter(subject: Subject) -> list[Check]:
    """Compare every weight that has a merged adapter with the reference, in float64; no check without an adapter."""
    if not subject.adapted:
        return []
    ours, expected = subject.ours(torch.float64).state_dict(), subject.reference(torch.float64).state_dict()
    rows = [(name, worst_relative_error(ours[name], expected[to_file(name)])) for name in ours if name in subject.adapted]
    return [Check.mapping("adapter", f"{len(rows)} merged matrices", rows)]


def _stored(checkpoint: StoredCheckpoint) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor as the file stores it, transposed to [in, out] if the file stores its matrices as [out, in]."""
    from safetensors import safe_open

    transposed = checkpoint.assignment.transposed
    for file in dict.fromkeys(checkpoint.assignment.files.values()):
        with safe_open(file.path, "pt") if isinstance(file, SafetensorsFile) else nullcontext() as opened:
            for key in file.entries:
                tensor = file.read(key) if opened is None else opened.get_tensor(key)
                matrix = tensor.ndim == 2 and layer(from_file(key)) is not None
                yield key, tensor.t() if transposed and matrix else tensor


@torch.no_grad()
def forward(subject: Subject) -> list[Check]:
    """Compare a forward pass: activations, logits, cache, padding, rounding, greedy text."""
    probe, progress, config = subject.probe, subject.progress, subject.config
    progress("float64: activations, cache and padding")
    model, ours = subject.reference(torch.float64), subject.ours(torch.float64)
    expected, exact = _expected(model, probe, config), _outputs(ours, probe, config)
    errors = {name: worst_relative_error(exact.get(name, MISSING), tensor) for name, tensor in expected.items()}
    logits = [("logits (window 0)", errors["logits (window 0)"])]
    for index, window in enumerate(probe.windows[1:], 1):
        progress(f"float64: logits, window {index + 1} of {len(probe.windows)}")
        logits.append((f"logits (window {index})", worst_relative_error(ours(window[None]), model(window[None]).logits)))
    checks = [
        Check.mapping("activations", f"{len(points(config.n_layer))} points", [(p, errors[p]) for p in points(config.n_layer)]),
        Check.mapping("logits", f"{len(logits)} full contexts", logits),
        Check.mapping("cache", "read in three parts", _cached(exact, expected)),
        Check.mapping("padding", "three rows", [(name, error) for name, error in errors.items() if "padded" in name]),
    ]
    checks[1] = replace(checks[1], points=(*checks[1].points, _every_embedding(ours, model)))
    prompt = probe.traced[:, : min(8, config.n_positions // 2)]
    text = _greedy(ours, model, prompt, min(GREEDY_TOKENS, config.n_positions - prompt.size(1)))
    del model, ours, exact
    gc.collect()

    progress(f"{dtype_label(subject.dtype)}: rounding")
    rounded = _outputs(subject.ours(subject.dtype), probe, config)
    reference_rounded = _expected(subject.reference(subject.dtype), probe, config)
    rows = [
        (name, relative_error(rounded.get(name, MISSING), tensor), relative_error(reference_rounded[name], tensor))
        for name, tensor in expected.items()
    ]
    return [*checks, Check.rounding("rounding", f"{len(rows)} points", subject.dtype, rows), text]


MISSING = torch.tensor(math.nan)  # stands for a missing point: NaN fails any bound


def _outputs(ours: GPT2, probe: Probe, config: GPT2Config) -> dict[str, Tensor]:
    """Return our model's activations and its logits (whole text, through the cache, padded), by point."""
    rows, mask = probe.padded(config)
    window = probe.windows[:1]
    padded = {"": ours(rows, attention_mask=mask), ", cached": _read_in_parts(ours, rows, mask)}
    return {
        **trace(ours, probe.traced),
        "logits (window 0)": ours(window),
        "logits (window 0, cached)": _read_in_parts(ours, window),
        **{
            f"logits (padded row {index}{how})": logits[index, keep]
            for how, logits in padded.items()
            for index, keep in enumerate(mask.bool())
        },
    }


def _expected(model: nn.Module, probe: Probe, config: GPT2Config) -> dict[str, Tensor]:
    """Return transformers' values at the same points: a cached or padded text must give what it gives alone."""
    traced = trace(model, probe.traced)
    if list(traced) != points(config.n_layer):
        raise RuntimeError(f"the trace of transformers' model lacks {set(points(config.n_layer)) - set(traced)}")
    logits = model(probe.windows[:1]).logits
    alone = [model(row[keep.bool()][None]).logits[0] for row, keep in zip(*probe.padded(config), strict=True)]
    padded = {f"logits (padded row {index}{how})": row for how in ("", ", cached") for index, row in enumerate(alone)}
    return {**traced, "logits (window 0)": logits, "logits (window 0, cached)": logits, **padded}


def _every_embedding(ours: GPT2, model: nn.Module) -> Point:
    """Count the entries that differ when each id of the vocabulary goes through both embeddings; 0 may differ."""
    ids = torch.arange(ours.config.vocab_size).split(8192)
    return Point("wte (every id)", float(sum(differing_bits(ours.wte(part), root_of(model).wte(part)) for part in ids)), 0.0)


def _parts(length: int) -> dict[str, list[int]]:
    """Return the lengths of the parts in which the cache reads a text: a prompt, then single tokens, then a chunk."""
    half, single = length // 2, min(16, length // 4)
    return {"prefill": [half], "single tokens": [1] * single, "chunk": [length - half - single]}


def _read_in_parts(ours: GPT2, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the logits of (B, T) ids read through the cache; single tokens are read as generation reads them."""
    cache, decoder, logits = ours.new_cache(len(ids)), Decoder(ours), []
    for size in itertools.chain(*_parts(ids.size(1)).values()):
        end = cache.length + size
        part, seen = ids[:, cache.length : end], None if mask is None else mask[:, :end]
        one = size == 1 and cache.length > 0
        logits.append(decoder.decode(part, cache, seen) if one else ours(part, cache=cache, attention_mask=seen))
    return torch.cat(logits, dim=1)


def _cached(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> Iterator[tuple[str, float]]:
    """Yield the error of each part of a text that was read through the cache."""
    pair = ours["logits (window 0, cached)"], expected["logits (window 0)"]
    parts = _parts(pair[0].size(1))
    pieces = [logits.split([sum(sizes) for sizes in parts.values()], dim=1) for logits in pair]
    for part, *both in zip(parts, *pieces, strict=True):
        yield f"logits ({part})", worst_relative_error(*both)


def _greedy(ours: GPT2, model: nn.Module, prompt: Tensor, new_tokens: int) -> Check:
    """Compare greedy ids with and without a cache, in float64, where rounding does not decide near-ties."""
    expected = reference.reference_generate(model, prompt, new_tokens, use_cache=True)
    runs = {
        "transformers without cache": reference.reference_generate(model, prompt, new_tokens, use_cache=False),
        "ours with cache": generate(ours, prompt, new_tokens, temperature=0),
        "ours without cache": generate(ours, prompt, new_tokens, temperature=0, use_cache=False),
    }
    rows = [(f"text ({name})", int((ids != expected).sum())) for name, ids in runs.items()]
    return Check.exact("text", f"{new_tokens} greedy tokens", "float64", rows)


def tokens(subject: Subject) -> Check:
    """Compare the ids and texts of both tokenizers on samples; no check if the model has no tokenizer."""
    ours = subject.checkpoint.own_tokenizer()
    if ours is None:
        return Check("tokens", EXACT, "ids and text", "", skipped="the model comes without a tokenizer")
    require_vocabulary(ours, subject.config, str(subject.checkpoint.path))
    subject.progress("tokens")
    tokenizer = reference.reference_tokenizer(subject.folder)
    known = set("".join(SAMPLES)) if ours.eot is not None else {ours.decode([i]) for i in range(ours.n_vocab)}
    rows = []
    for index, sample in enumerate(SAMPLES):
        sample = "".join(character for character in sample if character in known)
        ids, expected = ours.encode(sample), reference.reference_ids(tokenizer, sample)
        same = ids == expected and ours.decode(ids) == tokenizer.decode(expected, clean_up_tokenization_spaces=False)
        rows.append((f"tokens (sample {index})", not same))
    return Check.exact("tokens", f"{len(rows)} texts and back", "", rows)


SAMPLES = (
    "MACBETH:\nIs this a dagger which I see before me,\nThe handle toward my hand?\n",
    "Hello world, it's 2026; they've paid $1,234.56 (or so they'd say).",
    "  leading,   repeated\t\ttabs\n\n\nand newlines \r\n trailing   ",
    "naïve café, Ærøskøbing, Füße, ǅ, ﬁligree",
    "Пушкин — Шекспир; Σίσυφος; שלום; سلام; हिन्दी; ไทย",
    "日本語のテキスト、中文文本，한국어",
    "👩‍👩‍👧 🇩🇪 e\u0301 \u200b\u00a0\ufeff 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "def f(x):\n    return {'a': [x**2, -1e-9]}  # ok\n",
    "I'LL we'll can't 'tis O'Brien's ''' \"quoted\" ...--- ???!!!",
    "\x00\x01\x7f control \x85 \u2028 \u3000 characters",
)
