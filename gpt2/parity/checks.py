"""What verify compares: the token ids to run, the two models, and the checks of files, tokens and merged adapters."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn

from gpt2.checkpoint.checkpoint import AdaptedCheckpoint, StoredCheckpoint
from gpt2.checkpoint.containers import require_whole_files, whole
from gpt2.checkpoint.containers.safetensors_file import SafetensorsFile
from gpt2.checkpoint.keys import HEAD, PREFIX, from_file, layer, share, to_file
from gpt2.checkpoint.loading import rows_note
from gpt2.config import GPT2Config
from gpt2.damage import look
from gpt2.data import Tokenizer
from gpt2.data.adapter import auto_ids, auto_tokenizer, quiet
from gpt2.data.auto import transformers_reads
from gpt2.data.library import LibraryTokenizer
from gpt2.measure.metrics import differing_bits, worst_relative_error
from gpt2.measure.rounding import rounding_noise
from gpt2.measure.tracing import root_of
from gpt2.model import GPT2
from gpt2.parity import reference
from gpt2.parity.findings import Findings
from gpt2.parity.streaming import Converted, Receive, Streamed

log = logging.getLogger("gpt2")
SEQUENCES = 16  # whose gradients' rounding is judged
FIRST_SEQUENCES = 2  # judged first; the others only where one of these is over the bound
SHORT, LONG = 32, 128  # tokens of a sequence for rounding, and for float64
ROW = 32  # tokens of a traced row
QUICK = 128  # tokens of the one text that ``quick`` reads in place of whole contexts
KEPT_BYTES = 64e6  # float64 parameters of blocks that are kept, if one block is not larger
LOGIT_FLOPS = 5e11  # limit for one float64 pass over the windows

Build = Callable[[Path, torch.dtype | None], GPT2]
Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Probe:
    """The token ids to run.

    ``windows`` (W, P) are whole contexts, or (1, 128) the beginning of one. ``rows`` (3, T) are traced, and also read with
    padding on the left. ``short`` (16, t + 1) and ``long`` (2, L + 1) are sequences to train on.
    """

    windows: Tensor
    rows: Tensor
    short: Tensor
    long: Tensor

    @classmethod
    def draw(cls, config: GPT2Config, seed: int, quick: bool = False) -> "Probe":
        """Draw the ids: enough windows to contain every id of the vocabulary once, as far as the budget allows, or one short."""
        generator = torch.Generator().manual_seed(seed)
        vocab, context = config.vocab_size, config.n_positions
        affordable = max(1, int(LOGIT_FLOPS / (2 * config.num_parameters() * context)))
        count = min(math.ceil(vocab / context), affordable)
        ids = torch.randperm(vocab, generator=generator)
        padding = torch.randint(vocab, (max(0, count * context - vocab),), generator=generator)
        windows = torch.cat((ids, padding))[: count * context].view(count, context)
        shapes = (3, min(context, ROW)), (SEQUENCES, min(context, SHORT) + 1), (2, min(context, LONG) + 1)
        drawn = (torch.randint(vocab, shape, generator=generator) for shape in shapes)
        return cls(windows[:1, :QUICK] if quick else windows, *drawn)

    def coverage(self, config: GPT2Config) -> str:
        seen = self.windows.unique().numel()
        tokens = self.windows.size(1)
        which = "all" if tokens == config.n_positions else "the first"
        return f"{seen:,} of {config.vocab_size:,} ids at {which} {tokens:,} positions"

    def padded(self) -> tuple[Tensor, Tensor]:
        """Return the rows (3, T) behind padding on the left, of which the first has none, and their mask."""
        tokens = self.rows.size(1)
        counts = 0, tokens // 3, tokens // 2
        shifted = torch.stack([row.roll(count) for row, count in zip(self.rows, counts, strict=True)])
        return shifted, (torch.arange(tokens) >= torch.tensor(counts)[:, None]).long()


@dataclass
class Subject:
    """One set of weights as our model (made by ``build``) and as transformers' model; rounding is judged in ``dtype``."""

    checkpoint: StoredCheckpoint
    folder: Path  # the files that transformers reads
    build: Build
    dtype: torch.dtype
    probe: Probe
    findings: Findings
    draws: int = 1  # times as many runs with random errors as are usual
    outside: Converted = field(default_factory=lambda: Converted(torch.float64))

    @cached_property
    def blocks(self) -> Converted:
        """The blocks' parameters in float64: those of one block, or of a small model's every block."""
        names = self.ours.named_parameters()
        return Converted(torch.float64, limit=max(KEPT_BYTES, 8 * sum(p.numel() for name, p in names if name.startswith("h.0."))))

    @cached_property
    def ours(self) -> GPT2:
        """Our model as stored; its parameters are views of the mapped file. A merged adapter is in float64."""
        return self.build(self.checkpoint.path, torch.float64 if self.adapted else None)

    @cached_property
    def reference(self) -> nn.Module:
        """transformers' model as stored, to run in float64: ``reorder_and_upcast_attn`` would compute in float32."""
        config = replace(self.config, reorder_and_upcast_attn=False)
        return self._shared(reference.load_reference(self.folder, next(self.ours.parameters()).dtype, config))

    @cached_property
    def ours_rounded(self) -> GPT2:
        """Our model in ``dtype``, as a user loads it."""
        return self._shared(self.build(self.checkpoint.path, self.dtype))

    @contextmanager
    def noisily(self, model: nn.Module, what: str, seed: int, receive: Receive | None = None) -> Iterator[Streamed]:
        """Return a context in which a ``noisy`` model computes in float64, each result off by a rounding to ``dtype``."""
        exactly = self.exactly(model, f"{what}, with random rounding errors", receive)
        with exactly as streamed, rounding_noise(self.dtype, seed) as streamed.again:
            yield streamed

    @cached_property
    def reference_rounded(self) -> nn.Module:
        """transformers' model in ``dtype``."""
        if next(self.reference.parameters()).dtype == self.dtype:  # loading it again would give the same, and take its memory
            return _copy(self.reference, self.config.reorder_and_upcast_attn)
        return self._shared(reference.load_reference(self.folder, self.dtype, self.config))

    def noisy(self) -> nn.Module:
        """Return transformers' model of the weights in ``dtype``, to run in float64 with noise (:mod:`gpt2.measure.rounding`)."""
        return _copy(self.reference_rounded, False)

    def _shared(self, model: Model) -> Model:
        """Let ``model`` use our copy of each parameter in memory, where every bit is the same."""
        stored = dict(self.ours.named_parameters())
        require_whole_files()
        for key, parameter in model.named_parameters():
            own = stored.get(key.removeprefix(PREFIX))
            if own is None or (own.shape, own.dtype) != (parameter.shape, parameter.dtype) or not own.is_contiguous():
                continue
            if not differing_bits(own, parameter):
                parameter.data = own.data
        return model

    def exactly(self, model: nn.Module, what: str, receive: Receive | None = None) -> Streamed:
        """Return a context in which the stored ``model`` computes in float64, one block at a time."""
        return Streamed(model, self.blocks, self.outside, self._pulse(what), receive)

    def rounded(self, model: nn.Module, what: str, receive: Receive | None = None) -> Streamed:
        """Return a context in which ``model`` computes in ``dtype``, and its backward pass goes one block at a time."""
        weights = Converted(self.dtype)
        return Streamed(model, weights, weights, self._pulse(what), receive)

    def _pulse(self, what: str) -> Callable[[int], None]:
        count = self.config.n_layer

        def pulse(layer: int) -> None:
            require_whole_files()
            self.findings.progress(f"{what}: {f'block {layer + 1} of {count}' if layer < count else 'final norm'}")

        return pulse

    @property
    def config(self) -> GPT2Config:
        return self.checkpoint.config

    @property
    def bytes(self) -> int:
        """What the model and its logits of a whole context take in float64: a narrow model has more in its logits."""
        return 8 * (self.config.num_parameters() + self.config.vocab_size * self.config.n_positions)

    @property
    def adapted(self) -> frozenset[str]:
        """The parameters that a LoRA adapter changed."""
        return self.checkpoint.changed if isinstance(self.checkpoint, AdaptedCheckpoint) else frozenset()


def _copy(model: nn.Module, upcasts: bool) -> nn.Module:
    """Return a copy of transformers' model on the same memory, whose attention computes in float32 if it ``upcasts``."""
    copy = deepcopy(model, {id(p): nn.Parameter(p.data) for p in model.parameters()})
    for block in root_of(copy).h:
        vars(block.attn)["reorder_and_upcast_attn"] = upcasts
    return copy


def hidden_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Return what the final norm gives (B, T, D), by the model's own code."""
    if isinstance(model, GPT2):
        return model.hidden(ids)
    return model.get_submodule("transformer")(ids, use_cache=False).last_hidden_state


def head_of(model: nn.Module, hidden: Tensor) -> Tensor:
    """Return the logits (B, T, V) of what the final norm gives, by the model's own code."""
    if isinstance(model, GPT2):
        return model.head(hidden)
    return model.get_submodule("lm_head")(hidden)


def weights(subject: Subject) -> None:
    """Compare every stored tensor with our parameter, read by the safetensors library; merged ones go to :func:`adapter`."""
    parameters = {name: tensor for name, tensor in subject.ours.state_dict().items() if name not in subject.adapted}
    require_whole_files()
    add, found, absent = partial(subject.findings.exact, "weights"), set(), set(subject.checkpoint.assignment.absent)
    for name, count in look(whole(subject.ours.state_dict().items())).counts.items():
        add(f"{name} (not finite)", count)  # no two models can be equal on them
    for key, stored in _stored(subject.checkpoint):
        name, third = share(from_file(key))
        ours = parameters.get(name, parameters["wte.weight"] if name == HEAD else None)
        if ours is None:
            continue  # a buffer or another head, which the loader checked and dropped
        found.add(name if name in parameters else "wte.weight")
        ours = ours if third is None else ours.chunk(3, -1)[third]
        stored = stored.squeeze(0) if stored.ndim == 3 else stored  # OpenAI's files keep a convolution width of 1
        stored = stored.to(ours.dtype)  # the loader converts mixed dtypes to the widest, without loss
        what = f"{name} (tied)" if name not in parameters else name if third is None else f"{name} ({'qkv'[third]})"
        add(what, differing_bits(ours, stored) if ours.shape == stored.shape else stored.numel())
    for name, tensor in parameters.items():
        if name in absent and name not in found:  # biases, of nanoGPT for example
            add(f"{name} (not in the files: zeros)", int(tensor.count_nonzero()))
        elif name not in found:
            add(f"{name} (not in the files)", tensor.numel())


def adapter(subject: Subject) -> None:
    """Compare every weight that has a merged adapter with the reference, in float64."""
    ours, expected = subject.ours.state_dict(), subject.reference.state_dict()
    for name in ours:
        if name in subject.adapted:
            subject.findings.mapping("adapter", name, worst_relative_error(ours[name], expected[to_file(name)]))


def embeddings(subject: Subject) -> None:
    """Count the entries that differ when each id of the vocabulary goes through both embeddings; none may."""
    ids = torch.arange(subject.config.vocab_size).split(8192)
    ours, theirs = subject.ours.wte, root_of(subject.reference).wte
    with torch.no_grad():
        subject.findings.exact("logits", "wte (every id)", sum(differing_bits(ours(part), theirs(part)) for part in ids))


def _stored(checkpoint: StoredCheckpoint) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor as the file stores it, transposed to [in, out] if the file stores its matrices as [out, in]."""
    transposed = checkpoint.assignment.transposed
    for file in dict.fromkeys(checkpoint.assignment.files.values()):
        with safe_open(file.path, "pt") if isinstance(file, SafetensorsFile) else nullcontext() as opened:
            for key in file.entries:
                tensor = file.read(key) if opened is None else opened.get_tensor(key)
                matrix = tensor.ndim == 2 and layer(share(from_file(key))[0]) is not None
                yield key, tensor.t() if transposed and matrix else tensor


def tokens(subject: Subject) -> None:
    """Compare the ids and texts of both tokenizers on samples, also with special tokens, and with a prompt's template."""
    findings, ours = subject.findings, subject.checkpoint.own_tokenizer()
    if ours is None:
        findings.skipped["tokens"] = "the model comes without a tokenizer"
        return
    for note in rows_note(ours, subject.config, str(subject.checkpoint.path)):
        log.warning("%s", note)
    if ours.by_transformers:
        findings.skipped["tokens"] = "run by transformers"
        return
    tokenizer = auto_tokenizer(ours.folder if ours.folder and transformers_reads(ours.folder) else subject.folder)
    with quiet():
        for index, sample in enumerate((*SAMPLES, *_own_samples(ours))):
            if isinstance(ours, LibraryTokenizer) and ours.letters:
                sample = "".join(character for character in sample if character in ours.vocab)
            ids, expected = ours.encode(sample), auto_ids(tokenizer, sample)
            same = ids == expected and ours.decode(ids) == tokenizer.decode(expected, clean_up_tokenization_spaces=False)
            same &= ours.encode(sample, special=True) == auto_ids(tokenizer, sample, special=True)
            same &= ours.encode_prompt(sample) == auto_ids(tokenizer, sample, template=True)
            findings.exact("tokens", f"tokens (sample {index})", not same)


def _own_samples(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield texts with this tokenizer's added tokens, in and beside words and spaces, and with tokens from all its vocabulary."""
    added = list(getattr(tokenizer, "matched", {})) + list(tokenizer.special_tokens)
    for token in added[:16] + added[-16:]:
        yield f"a{token}b {token} c\u00e9 {token.upper()}, {token}."
    known = [i for i in range(tokenizer.n_vocab) if tokenizer.holds(i)]
    for start in range(0, 8):
        yield tokenizer.decode(known[start :: max(8, len(known) // 25)])


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
    "ＦＵＬＬ width ﬃ ① Ⅳ ½ İSTANBUL Straße ΑΣ Å \u212b ``quoted'' 한\u1112\u1161\u11ab",
    "\x00\x01\x7f control \x85 \u2028 \u3000 characters",
)
