"""The checks of verify: each compares one thing in our model and in transformers', at many points."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
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
from gpt2.measure.metrics import FLOAT64_BOUND, differing_bits, relative_error, worst_relative_error
from gpt2.measure.tracing import points, root_of, trace
from gpt2.model import GPT2
from gpt2.parity import reference
from gpt2.parity.report import EXACT, MAPPING, ROUNDING, Check, Point, points_of

ROUNDING_RATIO = 1.5
SEQUENCES = (16, 32)  # trained on: at least and at most
SEQUENCE_COST = 4e9  # parameters times sequences, where there are fewer than the most
GREEDY_TOKENS = 32
TRACE_BYTES = 256e6  # what the attention maps of one traced pass may take
LOGIT_FLOPS = 5e11  # what one float64 pass over the windows may cost

Build = Callable[[Path, torch.dtype | None], GPT2]


@dataclass(frozen=True)
class Probe:
    """The token ids that are run: whole contexts, a window short enough to trace, and sequences to train on."""

    windows: Tensor  # (W, P)
    traced: Tensor  # (1, T)
    sequences: Tensor  # (16 to 32, t + 1)

    @classmethod
    def draw(cls, config: GPT2Config, seed: int) -> Probe:
        """As many windows as it takes to show every id of the vocabulary once, or as the budget allows."""
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


@dataclass(frozen=True)
class Subject:
    """The model that ``build`` makes of ``checkpoint``, to be judged in ``dtype`` beside the one that ``theirs`` holds."""

    checkpoint: StoredCheckpoint
    theirs: Path  # the directory that transformers reads
    build: Build
    dtype: torch.dtype
    probe: Probe
    progress: Callable[[str], None]

    @property
    def path(self) -> Path:
        return self.checkpoint.path

    @property
    def config(self) -> GPT2Config:
        return self.checkpoint.config

    @property
    def adapted(self) -> frozenset[str]:
        """The parameters into which a LoRA adapter is merged."""
        return frozenset(self.checkpoint.adapter.factors if isinstance(self.checkpoint, AdaptedCheckpoint) else ())


def weights(subject: Subject) -> Check:
    """Every tensor of the files against the parameter it became; safetensors are read by their own library, not by us.

    Tensors that an adapter is merged into are left to :func:`adapter`.
    """
    parameters = subject.build(subject.path, None).state_dict()
    parameters = {name: tensor for name, tensor in parameters.items() if name not in subject.adapted}
    require_whole_files()
    rows = []
    for key, theirs in _stored(subject.checkpoint):
        ours = parameters.pop(from_file(key), None)
        if ours is None:
            continue  # a buffer or the tied head: the loader saw what it is before it dropped it
        theirs = theirs.squeeze(0) if theirs.ndim == 3 else theirs  # OpenAI's files: the width of the convolution
        theirs = theirs.to(ours.dtype)  # the loader widens a file of mixed dtypes, without loss
        wrong = differing_bits(ours, theirs) if ours.shape == theirs.shape else theirs.numel()
        rows.append((from_file(key), float(wrong)))
    if any(name.endswith(".bias") for name, _ in rows):
        rows += [(f"{name} (not in the files)", float(tensor.numel())) for name, tensor in parameters.items()]
    else:  # nanoGPT without biases
        rows += [(f"{name} (not in the files: zeros)", float(tensor.count_nonzero())) for name, tensor in parameters.items()]
    return Check("weights", EXACT, f"bits of {len(rows)} tensors", "stored", points_of(rows, 0.0))


def adapter(subject: Subject) -> list[Check]:
    """Every weight with an adapter merged in against the reference's, in float64; no check where there is no adapter."""
    if not subject.adapted:
        return []
    ours = subject.build(subject.path, torch.float64).state_dict()
    theirs = reference.load_reference(subject.theirs, torch.float64).state_dict()
    rows = ((name, worst_relative_error(ours[name], theirs[to_file(name)])) for name in ours if name in subject.adapted)
    return [Check("adapter", MAPPING, f"{len(subject.adapted)} merged matrices", "float64", points_of(rows, FLOAT64_BOUND))]


def _stored(checkpoint: StoredCheckpoint) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint as its own file has it, the matrices turned to [in, out] if the whole file has them so."""
    from safetensors import safe_open

    turned = checkpoint.assignment.turned
    for file in dict.fromkeys(checkpoint.assignment.files.values()):
        with safe_open(file.path, "pt") if isinstance(file, SafetensorsFile) else nullcontext() as stored:
            for key in file.entries:
                tensor = file.read(key) if stored is None else stored.get_tensor(key)
                matrix = tensor.ndim == 2 and layer(from_file(key)) is not None
                yield key, tensor.t() if turned and matrix else tensor


@torch.no_grad()
def forward(subject: Subject) -> list[Check]:
    """Everything a forward pass shows: activations, logits, cache, padding, rounding, greedy text."""
    path, config, build, dtype = subject.path, subject.config, subject.build, subject.dtype
    probe, progress = subject.probe, subject.progress
    theirs, ours = reference.load_reference(subject.theirs, torch.float64), build(path, torch.float64)
    progress("float64: every activation")
    ruler, traced = trace(theirs, probe.traced), trace(ours, probe.traced)
    if list(ruler) != points(config.n_layer):
        raise RuntimeError(f"the trace of transformers' model lacks {set(points(config.n_layer)) - set(ruler)}")
    activations = points_of(((name, worst_relative_error(_at(traced, name), ruler[name])) for name in ruler), FLOAT64_BOUND)
    logits = []
    for index, window in enumerate(probe.windows):
        progress(f"float64: logits, window {index + 1} of {len(probe.windows)}")
        expected = theirs(window[None]).logits
        logits.append((f"logits (window {index})", worst_relative_error(ours(window[None]), expected)))
        if index == 0:
            logits_ruler = expected
    every = _every_embedding(ours, theirs)
    progress("float64: cache and padding")
    cached = points_of(_cached(ours, probe.windows[:1], logits_ruler), FLOAT64_BOUND)
    rows, mask = _padded_rows(probe.traced[0], config.vocab_size)
    padded_ruler = _their_padded(theirs, rows, mask)
    padded = points_of(
        ((name, worst_relative_error(*pair)) for name, pair in _padded(ours, rows, mask, padded_ruler)), FLOAT64_BOUND
    )
    prompt = probe.traced[:, : min(8, config.n_positions // 2)]
    text = _greedy(ours, theirs, prompt, min(GREEDY_TOKENS, config.n_positions - prompt.size(1)))
    del theirs, ours
    gc.collect()

    label = str(dtype).removeprefix("torch.")
    progress(f"{label}: rounding")
    theirs, ours = reference.load_reference(subject.theirs, dtype), build(path, dtype)
    theirs_traced, ours_traced = trace(theirs, probe.traced), trace(ours, probe.traced)
    compared = [(name, _at(ours_traced, name), theirs_traced[name], ruler[name]) for name in ruler]
    their_logits = theirs(probe.windows[:1]).logits
    compared.append(("logits (window 0)", ours(probe.windows[:1]), their_logits, logits_ruler))
    compared.append(("logits (window 0, cached)", _read_in_parts(ours, probe.windows[:1]), their_logits, logits_ruler))
    their_padded = _their_padded(theirs, rows, mask)
    for (name, (got, expected)), (_, (_, reference_got)) in zip(
        _padded(ours, rows, mask, padded_ruler), _padded(ours, rows, mask, their_padded), strict=True
    ):
        compared.append((name, got, reference_got, expected))
    return [
        Check("activations", MAPPING, f"{len(activations)} points", "float64", activations),
        Check("logits", MAPPING, f"{len(logits)} full contexts", "float64", points_of(logits, FLOAT64_BOUND) + every),
        Check("cache", MAPPING, "read in three parts", "float64", cached),
        Check("padding", MAPPING, "three rows", "float64", padded),
        Check("rounding", ROUNDING, f"{len(compared)} points", label, tuple(_rounding(compared))),
        text,
    ]


def _rounding(rows: list[tuple[str, Tensor, Tensor, Tensor]]) -> Iterator[Point]:
    """(name, ours, theirs, ruler) to points: our distance from the ruler, bounded by 1.5 times theirs."""
    for name, ours, theirs, ruler in rows:
        error = relative_error(theirs, ruler)
        yield Point(name, relative_error(ours, ruler), ROUNDING_RATIO * error, error)


def _every_embedding(ours: GPT2, theirs: nn.Module) -> tuple[Point, ...]:
    """Each id of the vocabulary through both lookups: 0 entries may differ."""
    wrong = 0
    for ids in torch.arange(ours.config.vocab_size).split(8192):
        wrong += differing_bits(ours.wte(ids), root_of(theirs).wte(ids))
    return (Point("wte (every id)", float(wrong), 0.0),)


def _at(traced: dict[str, Tensor], name: str) -> Tensor:
    """A traced point; NaN, which no bound forgives, where the model never emitted it."""
    return traced.get(name, torch.tensor(math.nan))


def _parts(length: int) -> dict[str, list[int]]:
    """How a text is read through the cache: as a prompt, then token by token, then in one chunk."""
    half, single = length // 2, min(16, length // 4)
    return {"prefill": [half], "single tokens": [1] * single, "chunk": [length - half - single]}


def _read_in_parts(ours: GPT2, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Logits of (B, T) ids that were read through the cache, part by part; single tokens as generation reads them."""
    cache, decoder, logits = ours.new_cache(len(ids)), Decoder(ours), []
    for size in itertools.chain(*_parts(ids.size(1)).values()):
        end = cache.length + size
        part, seen = ids[:, cache.length : end], None if mask is None else mask[:, :end]
        one = size == 1 and cache.length > 0
        logits.append(decoder.decode(part, cache, seen) if one else ours(part, cache=cache, attention_mask=seen))
    return torch.cat(logits, dim=1)


def _cached(ours: GPT2, ids: Tensor, expected: Tensor) -> Iterator[tuple[str, float]]:
    got, done = _read_in_parts(ours, ids), 0
    for part, sizes in _parts(ids.size(1)).items():
        end = done + sum(sizes)
        yield f"logits ({part})", worst_relative_error(got[:, done:end], expected[:, done:end])
        done = end


def _padded_rows(row: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Three different rows, (3, T): whole, padded on the left by a third, and by a half; and their mask."""
    rows = torch.stack((row, row.flip(0), (row + 1) % vocab))
    mask = torch.ones_like(rows)
    mask[1, : len(row) // 3] = 0
    mask[2, : len(row) // 2] = 0
    return rows, mask


def _their_padded(theirs: nn.Module, rows: Tensor, mask: Tensor) -> list[Tensor]:
    """transformers' logits for each row, read alone and without padding: what a padded row must not differ from."""
    return [theirs(row[keep.bool()][None]).logits[0] for row, keep in zip(rows, mask, strict=True)]


def _padded(ours: GPT2, rows: Tensor, mask: Tensor, expected: list[Tensor]) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Our logits at each row's real tokens beside ``expected``, in one pass and through the cache."""
    for how, got in (("", ours(rows, attention_mask=mask)), (", cached", _read_in_parts(ours, rows, mask))):
        for index, keep in enumerate(mask.bool()):
            yield f"logits (padded row {index}{how})", (got[index, keep], expected[index])


def _greedy(ours: GPT2, theirs: nn.Module, prompt: Tensor, new_tokens: int) -> Check:
    """Greedy ids in float64, where no near-tie hides behind rounding: with and without a cache, on both sides."""
    expected = reference.reference_generate(theirs, prompt, new_tokens, use_cache=True)
    runs = {
        "transformers without cache": reference.reference_generate(theirs, prompt, new_tokens, use_cache=False),
        "ours with cache": generate(ours, prompt, new_tokens, temperature=0),
        "ours without cache": generate(ours, prompt, new_tokens, temperature=0, use_cache=False),
    }
    rows = [(f"text ({name})", float((ids != expected).sum())) for name, ids in runs.items()]
    return Check("text", EXACT, f"{new_tokens} greedy tokens", "float64", points_of(rows, 0.0))


def tokens(subject: Subject) -> Check:
    """Ids and text of both tokenizers on samples of everything a text may hold; nothing where the model has no tokenizer."""
    ours = subject.checkpoint.own_tokenizer()
    if ours is None:
        return Check("tokens", EXACT, "ids and text", "", skipped="the model comes without a tokenizer")
    require_vocabulary(ours, subject.config, str(subject.path))
    subject.progress("tokens")
    theirs = reference.reference_tokenizer(subject.theirs)
    known = set("".join(SAMPLES)) if ours.eot is not None else {ours.decode([i]) for i in range(ours.n_vocab)}
    rows = []
    for index, sample in enumerate(SAMPLES):
        sample = "".join(character for character in sample if character in known)
        ids = ours.encode(sample)
        expected = reference.reference_ids(theirs, sample)
        same = ids == expected and ours.decode(ids) == theirs.decode(expected, clean_up_tokenization_spaces=False)
        rows.append((f"tokens (sample {index})", float(not same)))
    return Check("tokens", EXACT, f"{len(rows)} texts and back", "", points_of(rows, 0.0))


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
