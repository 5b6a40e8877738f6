"""The side ``trace:FILE``: what another side showed, read from a reference, a ``gpt2 trace``, or llama.cpp's KL base file."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.comparison.llama_base import is_llama_base, read_llama_base
from gpt2.comparison.reference_file import FORMAT, TRACE_PREFIX, Reference, about_of, read_reference
from gpt2.comparison.sides.side import Model, Recording, Running, Shown, Side, Top
from gpt2.config import GPT2Config
from gpt2.data.files import read_all
from gpt2.errors import CheckpointError, InputError
from gpt2.measure import dumps
from gpt2.measure.npy import read_npz
from gpt2.measure.tracing import Recorded, grouped, layer_of, points
from gpt2.measure.windows import RowWindows

TRACE_FORMAT = "gpt2-toolkit trace"
MAX_LAYERS = 1000
MAX_ABOUT = 1 << 24  # bytes of what a trace says of itself
MAX_SIZE = 1 << 20  # ids and positions of a dump that does not tell its model's
SQUARE = ("attn.scores", "attn.weights")  # points with a row of T for each token
LLMC_VOCABULARY = 50257  # llm.c's debug state does not tell it

SAID: dict[str, Any] = dict.fromkeys(("name", "implementation", "dtype"), str) | dict.fromkeys(("config", "files"), dict)
SAID |= {"revision": str | None, "parameters": int | None}  # of what a reference says of its side

Rows = Callable[[slice], Tensor]  # the logits (R, V) of some of the scored tokens


@dataclass(frozen=True, eq=False)
class TraceSide(Side):
    """A recording: it shows what its file holds, on the text that it was made with."""

    name: str
    shows: frozenset[Shown]
    model: Model
    rows: Rows
    recording: Recording  # never None here
    likeliest: Callable[[], Top] | None = None  # where only these are known
    activations: Mapping[str, Tensor] = field(default_factory=dict)  # of the first row, (1, T, ...)
    config: GPT2Config | None = None

    @classmethod
    def open(cls, name: str) -> TraceSide:
        """Open ``trace:FILE``. Raises InputError, CheckpointError: nothing there, damaged, or nothing that can be compared."""
        path = Path(name.removeprefix(TRACE_PREFIX)).expanduser()
        if not path.exists():
            raise InputError(f"{name}: no such file; give one that gpt2 compare --save, gpt2 trace or llama.cpp wrote")
        if is_llama_base(path):
            return cls._llama_base(name, path)
        if path.suffix == ".safetensors" and (about := about_of(path)) is not None and about["format"] == FORMAT:
            return cls._reference(name, path)
        return cls._trace(name, path)

    @classmethod
    def _reference(cls, name: str, path: Path) -> TraceSide:
        reference = read_reference(path)
        about = reference.about
        try:
            side, text = about["side"], about["text"]
            wrong = [field for field, kind in SAID.items() if not isinstance(side[field], kind)]
            wrong += [field for field in ("name", "sha256", "told") if not isinstance(text[field], str)]
            if wrong:
                raise TypeError(f"{wrong[0]} is of another kind")
            known = text["name"], text["sha256"], text["told"], about["tokenizer"]
            how = f"{side['implementation']}, saved by gpt2-toolkit {about['version']}"
            parts = {field.name: side.get(field.name) for field in dataclasses.fields(Model)}
            config = GPT2Config(**side["config"]) if side["config"] else None
        except (KeyError, TypeError, AttributeError, InputError) as error:
            raise CheckpointError(f"{path}: what is said of the side is not known here ({error}); save it again") from None
        lengths = reference.file.read("token_bytes").long()
        recording = Recording(reference.ids, reference.windows, *known, reference.vocab, lengths)
        model = Model(**{**parts, "name": name, "implementation": how, "official": None})
        activations = _in_order(reference, min(len(recording.ids), recording.windows.context))
        shows = {Shown.LOGITS if reference.whole else Shown.TOP} | ({Shown.ACTIVATIONS} if activations else set())

        @cache
        def likeliest() -> Top:
            ids, logp, target, _ = reference.top()
            return Top(target, ids.long(), logp)

        return cls(name, frozenset(shows), model, reference.logits, recording, likeliest, activations, config)

    @classmethod
    def _llama_base(cls, name: str, path: Path) -> TraceSide:
        base = read_llama_base(path)
        recording = Recording(base.ids, base.windows, path.name, "", "the second half of each chunk", None, base.vocab, None)
        how = "llama.cpp --kl-divergence-base: log-probabilities in 16 bits, e^-16 of the largest at least"
        return cls(name, frozenset({Shown.LOGITS}), Model(name, how, "", None, None, {}, {}), base.logits, recording)

    @classmethod
    def _trace(cls, name: str, path: Path) -> TraceSide:
        about = _about(path)
        config = None if about is None else GPT2Config(**about["config"])
        shape = config or GPT2Config(vocab_size=MAX_SIZE, n_positions=MAX_SIZE)
        if path.suffix == ".bin":
            shape = GPT2Config(vocab_size=LLMC_VOCABULARY, n_positions=MAX_SIZE)
        dump = dumps.read(path, shape)
        logits = dump.arrays.get("logits")
        batch, tokens = dump.ids.shape
        if logits is None or logits.ndim < 2 or logits.shape not in ((batch, tokens, logits.size(-1)), (tokens, logits.size(-1))):
            raise InputError(f"{path}: holds no array named logits for its {batch} x {tokens} ids; write it with gpt2 trace")
        if tokens < 2:
            raise InputError(f"{path}: has rows of one token, so none is predicted; trace longer rows")
        vocab, rows = logits.size(-1), logits.reshape(batch, tokens, -1)[:, :-1].flatten(0, 1)
        if int(dump.ids.max()) >= vocab:
            raise InputError(f"{path}: holds the id {int(dump.ids.max())} and logits of {vocab:,} ids; write it again")
        text, told = (about or {}).get("ids_from", path.name), "every token of a row but its first; each row is run alone"
        recording = Recording(dump.ids.flatten(), RowWindows(tokens - 1), str(text), "", told, None, vocab, None)
        model = Model(name, "a program that wrote its logits", "", None, None, {}, {})
        traced = {}
        if about and config:
            how = f"gpt2 trace {about['version']}, computed in float64"
            known = config.num_parameters(), dataclasses.asdict(config), dict(about["files"])
            model = Model(name, how, about["stored"], about["revision"], *known)
            if all(point in dump.arrays for point in points(config.n_layer)):
                traced = {point: dump.arrays[point][:1] for point in points(config.n_layer)}
        shows = frozenset({Shown.LOGITS, *([Shown.ACTIVATIONS] if traced else [])})
        return cls(name, shows, model, rows.__getitem__, recording, None, traced, config)

    @property
    def vocab_size(self) -> int:
        return self.recording.vocab

    @contextmanager
    def running(self) -> Iterator[Replay]:
        yield Replay(self)

    def describe(self, versions: dict[str, str], *, hashes: bool = True) -> Model:
        return self.model


class Replay(Running):
    """A recording in use: it answers when it is asked for its own windows, in their order."""

    def __init__(self, side: TraceSide) -> None:
        windows = list(side.recording.windows.of(len(side.recording.ids)))
        ends = itertools.accumulate(window.end - window.first for window in windows)
        self._side, self._windows = side, itertools.cycle(zip(windows, ends, strict=True))

    def _next(self, inputs: Tensor) -> tuple[int, slice]:
        """Return how many inputs of the next window are not scored, and the places of those that are, counted over the text.

        After the last window the first one is next. Raises InputError: it is asked for another text.
        """
        window, end = next(self._windows)
        if not torch.equal(inputs.cpu().long(), self._side.recording.ids[window.start : window.end]):
            raise InputError(f"{self._side.name}: a recording answers for its own text only; compare it without another")
        return window.first - window.start, slice(end - (window.end - window.first), end)

    def logits(self, ids: Tensor) -> Tensor:
        """Return logits (B, T, V); the ones after inputs that are not scored are 0."""
        places = [self._next(inputs) for inputs in ids]
        return torch.stack([F.pad(self._side.rows(scored), (0, 0, before, 0)) for before, scored in places])

    def top(self, ids: Tensor) -> Top:
        assert self._side.likeliest is not None
        before, scored = self._next(ids[:-1])
        return self._side.likeliest().at(scored).after(before)

    def blocks(self, ids: Tensor) -> Iterator[Recorded]:
        """Yield the kept activations, cut to the length of ``ids`` (1, T). Raises InputError: they are of other ids."""
        tokens, held = ids.size(1), next(iter(self._side.activations.values())).size(1)
        if tokens > held or not torch.equal(ids[0].long(), self._side.recording.ids[:tokens]):
            raise InputError(f"{self._side.name}: holds activations of its first {held} tokens; compare it without another text")
        cut = {
            name: tensor[:, :, :tokens, :tokens] if name.endswith(SQUARE) else tensor[:, :tokens]
            for name, tensor in self._side.activations.items()
        }
        yield from grouped(cut)


def _in_order(reference: Reference, tokens: int) -> dict[str, Tensor]:
    """Return the kept activations in the order of computation. Raises CheckpointError: one is none of the first tokens'."""
    kept = reference.activations
    order = points(1 + min(max((layer_of(name) or 0 for name in kept), default=0), MAX_LAYERS))
    for name, tensor in kept.items():
        square = name.endswith(SQUARE)
        length = tensor.size(-1 if square else 1) if tensor.ndim >= (4 if square else 2) else 0
        if name not in order or not 1 <= length <= tokens or tensor.size(0) != 1 or not tensor.is_floating_point():
            raise CheckpointError(f"{reference.path}: holds an array {name!r} that is no activation of its text; save it again")
    return {name: kept[name] for name in order if name in kept}


def _about(path: Path) -> dict[str, Any] | None:
    """Return what ``gpt2 trace`` wrote beside its arrays; None for another program's dump."""
    try:
        if path.suffix == ".safetensors":
            about: Any = about_of(path)
        elif path.suffix == ".npz":
            about = json.loads(dict(read_npz(path, MAX_ABOUT, "about.json"))["about.json"].tobytes())
        else:
            about = json.loads(read_all(path / "index.json", MAX_ABOUT))
    except (OSError, ValueError, KeyError, RecursionError):
        return None  # the arrays' reader says what is wrong
    if not isinstance(about, dict) or about.get("format") != TRACE_FORMAT:
        return None
    try:
        GPT2Config(**about["config"])
        _ = about["version"], about["revision"], about["stored"], dict(about["files"])
    except (KeyError, TypeError, ValueError, InputError) as error:
        raise CheckpointError(f"{path}: what gpt2 trace wrote of itself is damaged ({error}); write it again") from None
    return about
