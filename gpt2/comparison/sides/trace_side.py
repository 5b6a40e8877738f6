"""The side ``trace:FILE``: what another side showed, whole logits in a safetensors file, and how ``compare --save`` writes one.

README.md lists other files that are such a side. In one of ``--save`` N are the tokens, M the scored ones in the order of the
windows, V the vocabulary::

    token_bytes   (V,) float64: the bytes that each token stands for; zeros where no tokenizer was known
    ids           (N,) int64
    documents     (N,) int64: the number of each one's document; only of a text of several
    logits        (M, V), as the side gave them

Its metadata's ``about`` is JSON: the side with its files' sha256, the text with its windows, versions and machine.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2 import __version__
from gpt2.checkpoint.containers.safetensors_file import SafetensorsFile
from gpt2.checkpoint.saving import raw_bytes, safetensors_header
from gpt2.comparison.passage import Passage, Scored
from gpt2.comparison.sides.side import ComparedModel, Side, environment_of
from gpt2.config import GPT2Config
from gpt2.data.files import writing, written_aside
from gpt2.errors import CheckpointError, InputError, user_path
from gpt2.measure.dumps import IDS
from gpt2.measure.metrics import Logits
from gpt2.measure.tracing import Recorded, grouped, points
from gpt2.measure.windows import RowWindows, Window, Windows
from gpt2.options import require_type
from gpt2.pages.reports import as_json

PREFIX, SUFFIX = "trace:", ".safetensors"
FORMAT, TRACE_FORMAT = "gpt2-toolkit reference", "gpt2-toolkit trace"
SQUARE = ("attn.scores", "attn.weights")  # points with a row of T for each token


@dataclass(eq=False)
class TraceSide(Side):
    """A recording: it shows what its file holds, on the text that it was made with."""

    prefix: ClassVar[str] = PREFIX
    name: str
    model: ComparedModel
    rows: Tensor  # the logits (M, V) of the scored tokens, mapped
    recording: Passage  # never None here
    activations: Mapping[str, Tensor] = field(default_factory=dict)  # of the first row, (1, T, ...)
    config: GPT2Config | None = None

    @classmethod
    def open(cls, name: str) -> "TraceSide":
        """Open ``trace:FILE``. Raises InputError, CheckpointError: nothing there, damaged, or nothing that can be compared."""
        path = user_path(name.removeprefix(PREFIX))
        if path.suffix != SUFFIX or not path.exists():
            how = f"gpt2 compare A --save FILE{SUFFIX} writes one, and gpt2 trace MODEL --out FILE{SUFFIX}"
            what = "no such file" if path.suffix == SUFFIX else f"a side is a {SUFFIX} file"
            raise InputError(f"{name}: {what}; {how}")
        file = SafetensorsFile(path)
        key = next((key for key in IDS if key in file.entries), IDS[0])
        if missing := [each for each in (key, "logits") if each not in file.entries]:
            raise InputError(f"{path}: holds no array named {missing[0]}; save ids, and the logits of every token")
        try:
            side = cls._of(name, file, file.read(key).long())
            ids, windows = side.recording.ids, side.recording.windows
            scored = sum(window.end - window.first for window in windows.of(len(ids)))
            if side.rows.shape != (scored, side.vocab_size) or not side.rows.is_floating_point():
                raise ValueError(f"its logits are not of {scored:,} scored tokens")
            if not 0 <= int(ids.min()) <= int(ids.max()) < side.vocab_size:
                raise ValueError(f"an id is outside its vocabulary of {side.vocab_size:,}")
        except (KeyError, ValueError, TypeError, AttributeError, IndexError, RuntimeError) as error:
            raise CheckpointError(f"{path}: is damaged, or not what it says ({error}); write it again") from None
        return side

    @classmethod
    def _of(cls, name: str, file: SafetensorsFile, ids: Tensor) -> "TraceSide":
        """Return the side of a file: one that ``--save`` wrote, or rows (B, T) by another program, ``gpt2 trace`` among them."""
        about: dict[str, Any] = {}
        with suppress(KeyError, ValueError, TypeError, RecursionError):  # what another program says is not read
            said = json.loads(file.metadata["about"])
            about = said if said["format"] in (FORMAT, TRACE_FORMAT) else {}
        rows, traced, side = file.read("logits"), dict[str, Tensor](), about.get("side", about)
        lengths = documents = None
        config, vocab = GPT2Config(**side["config"]) if side.get("config") else None, rows.size(-1)
        windows: Windows
        if about.get("format") == FORMAT:
            windows, text = Windows(**about["windows"]), Scored(**about["text"])
            lengths = known.reshape(vocab) if (known := file.read("token_bytes")).any() else None
            documents = file.read("documents").reshape(ids.shape) if "documents" in file.entries else None
        else:
            batch, tokens = (ids := ids if ids.ndim == 2 else ids[None]).shape
            windows, rows = RowWindows(tokens - 1), rows.reshape(batch, tokens, vocab)[:, :-1].flatten(0, 1)
            told = "every token of a row but its first; each row is run alone"
            text = Scored(about.get("ids_from", file.path.name), "", ids.numel(), windows.context, windows.step, told)
            names = [point for point in points(config.n_layer if config else 0) if config and point in file.entries]
            traced = {point: file.read(point)[:1] for point in names}
            if any(each.size(-1 if point.endswith(SQUARE) else 1) != tokens for point, each in traced.items()):
                raise ValueError("its activations are not of its tokens")
        by = f"{side.get('implementation', 'float64')}, saved by gpt2-toolkit {about['version']}" if about else "another program"
        dtype, parameters = side.get("dtype", side.get("stored", "")), config.num_parameters() if config else None
        if not isinstance(files := side.get("files", {}), dict) or not all(isinstance(each, str) for each in files.values()):
            raise ValueError("its side's files are not names, each with a hash")
        model = ComparedModel(name, by, dtype, side.get("revision"), parameters, side.get("config", {}), files)
        for part, value in ((part, getattr(each, part.name)) for each in (text, model) for part in fields(each)):
            require_type(part.name, value, part.type)
        passage = Passage(ids.flatten(), windows, text, None, about.get("tokenizer"), lengths, documents)
        return cls(name, model, rows, passage, traced, config)

    vocab_size = property(lambda self: self.rows.size(-1))
    shows = property(lambda self: frozenset({"logits", *(["activations"] if self.activations else [])}))

    def load(self, stack: ExitStack) -> Iterator[tuple[Window, Tensor]]:
        """Return the recording's windows with the logits of their scored tokens, again and again."""
        windows = list(self.recording.windows.of(len(self.recording.ids)))
        lengths = [window.end - window.first for window in windows]
        return itertools.cycle(zip(windows, self.rows.split(lengths), strict=True))

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits (B, T, V), 0 after inputs that are not scored; after the last window the first one is next.

        Raises InputError: it is asked for another text.
        """
        answers = []
        for inputs in ids:
            window, rows = next(self.program)
            if not torch.equal(inputs.cpu().long(), self.recording.ids[window.start : window.end]):
                raise InputError(f"{self.name}: a recording answers for its own text only; compare it without another")
            answers.append(F.pad(rows, (0, 0, window.first - window.start, 0)))
        return torch.stack(answers)

    def blocks(self, ids: Tensor) -> Iterator[Recorded]:
        """Yield the activations, cut to the length of ``ids`` (1, T). Raises InputError: they are of other ids."""
        tokens, held = ids.size(1), self.recording.windows.context + 1
        if tokens > held or not torch.equal(ids[0].long(), self.recording.ids[:tokens]):
            raise InputError(f"{self.name}: holds activations of its first {held} tokens; compare it without another text")
        every = self.activations.items()
        yield from grouped({name: x[..., :tokens, :tokens] if name.endswith(SQUARE) else x[:, :tokens] for name, x in every})

    def describe(self) -> ComparedModel:
        return self.model


def require_name(path: str | Path) -> Path:
    """Return the path of a reference that will be written. Raises InputError: another suffix."""
    if Path(path).suffix != SUFFIX:
        raise InputError(f"--save {path}: a reference is a safetensors file; give a name that ends in {SUFFIX}")
    return user_path(path)


@contextmanager
def saving(path: Path, side: Side, passage: Passage) -> Iterator[Logits]:
    """Return the side's ``logits``, which must be asked for the passage's windows in order, and which keeps them in a file.

    Raises InputError: the side is such a file, the size of its vocabulary is not known, or the file cannot be written.
    """
    tokenizer, vocab = side.text_tokenizer, side.vocab
    if side.recording is not None:
        raise InputError(f"{side.name}: is a file of what was shown already; leave --save out")
    if not vocab:
        raise InputError(f"{side.name}: the size of its vocabulary is not known; save it beside a MODEL that has a tokenizer")
    env, spans = environment_of([side]), list(passage.windows.of(len(passage.ids)))
    said = {"side": side.describe(), "text": passage.scored, "environment": env}
    said |= {"tokenizer": tokenizer.fingerprint if tokenizer else None, "windows": vars(passage.windows)}
    about = as_json({"format": FORMAT, "version": __version__, **said}, None)
    lengths = passage.token_bytes(tokenizer)[:vocab].double() if tokenizer else torch.zeros(vocab, dtype=torch.float64)
    known = {"token_bytes": lengths, "ids": passage.ids}
    if passage.documents is not None and passage.documents[-1] > passage.documents[0]:
        known["documents"] = passage.documents
    shape, rest = (sum(span.end - span.first for span in spans), vocab), iter(spans)

    def keeping(ids: Tensor) -> Tensor:
        output = side.logits(ids)
        for row in output:
            span = next(rest)
            if span is spans[0]:  # the header needs the type of the logits
                logits = torch.empty(shape, dtype=row.dtype, device="meta")
                header, _ = safetensors_header({**known, "logits": logits}, {"about": about})
                file.write(header)
                for each in known.values():
                    file.write(raw_bytes(each))
            file.write(raw_bytes(row[span.first - span.start :]))
        return output

    with writing(path), written_aside(path) as file:
        yield keeping
        assert next(rest, None) is None, "a window was not asked for"
