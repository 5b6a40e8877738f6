"""Export any model that loads: in Hugging Face's layout, as one GGUF file, or for llm.c."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gpt2.checkpoint.checkpoint import Checkpoint, StoredCheckpoint, open_checkpoint
from gpt2.checkpoint.containers.gguf_file import NoTokenizer
from gpt2.checkpoint.describe import File
from gpt2.checkpoint.files import folder_of
from gpt2.checkpoint.gguf_writer import TANH_GELU, TYPES, gguf_pieces
from gpt2.checkpoint.llmc_writer import model_pieces, require_expressible, tokenizer_file
from gpt2.checkpoint.loading import require_usable, rows_note
from gpt2.checkpoint.names import FLOATS, WEIGHTS, ModelName
from gpt2.checkpoint.saving import save, write_file, writing
from gpt2.config import SMALL, GPT2Config, quoted
from gpt2.data import Tokenizer
from gpt2.data.chat import FILE as CHAT
from gpt2.data.files import LEGACY
from gpt2.errors import InputError, user_path
from gpt2.model import GPT2

FORMATS = ("hf", "gguf", "llmc")
GGUF_FILE = "model.gguf"
LLMC_FILES = ("model.bin", "tokenizer.bin")
TOKENIZER_FILES = (*SMALL[2:], "encoder.json", "vocab.bpe")  # without the configs
OF_DTYPE = {torch.float64: "f32", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Export:
    """What was written. ``type`` is how the matrices are stored; ``notes`` list differences from the source."""

    model: str
    directory: str
    format: str
    type: str
    config: GPT2Config
    files: tuple[File, ...]
    notes: tuple[str, ...]
    keep: tuple[str, ...] = ()


def export(
    source: str | Checkpoint,
    directory: str | Path,
    *,
    format: str = "hf",
    type: str | None = None,
    keep: Sequence[str] = (),
    revision: str | None = None,
    offline: bool = False,
) -> Export:
    """Write a model, by name (as in :func:`gpt2.load`) or opened, to ``directory``, with its tokenizer if it has one.

    ``hf`` writes what :func:`gpt2.save` writes, in the model's dtype. ``gguf`` writes ``model.gguf`` with its matrices as
    ``type`` ("f32", "f16", "bf16", "q8_0"; default: the model's dtype); the parts
    in ``keep``, such as "h.0" or "h.3.mlp", stay in the model's dtype. ``llmc`` writes ``model.bin``, bfloat16 for a model in
    bfloat16 and float32 for others, and ``tokenizer.bin``. An embedding with more rows than the tokenizer has tokens
    is cropped. The same model gives the same bytes, also from such an export. A reader never sees a half-written file.

    Raises InputError: no such model, a format that cannot express it, a directory that cannot be written or holds another
    tokenizer. CheckpointError: the model cannot be read.
    """
    name = source if isinstance(source, str) else source.name
    if format not in FORMATS:
        raise InputError(f"unknown format {quoted(format)}; known: {', '.join(FORMATS)}")
    if type is not None and format != "gguf":
        raise InputError(f"type {quoted(type)} is for gguf; {format} keeps the model's dtype, so name that: {name}:bf16")
    if type is not None and type not in TYPES:
        raise InputError(f"unknown type {quoted(type)}; known: {', '.join(TYPES)}")
    if keep and (format != "gguf" or type is None):
        raise InputError("keep names parts that a gguf of another type leaves in the model's dtype; give that type, such as q8_0")
    directory, checkpoint = user_path(directory), opened(source, revision, offline)
    written = map(directory.joinpath, {"gguf": (GGUF_FILE,), "llmc": LLMC_FILES}.get(format, ("",)))
    if any(place.exists() and any(map(place.samefile, _read(checkpoint))) for place in written):
        raise InputError(f"{directory}: is read too, and would be lost; choose another folder")
    model, tokenizer, notes = exported_model(checkpoint)
    if format == "hf":
        mine = {CHAT} if tokenizer is not None and tokenizer.chat else set[str]()
        mine |= set() if tokenizer is None else {*tokenizer.texts(model.config.n_positions), *LEGACY}
        if left := [name for name in TOKENIZER_FILES if name not in mine and (directory / name).exists()]:
            raise InputError(f"{directory}: holds {left[0]} of another tokenizer; choose another folder, or remove it")
        save(model, tokenizer, directory)
        type = str(model.wte.weight.dtype).removeprefix("torch.")
        names = ["config.json", "generation_config.json", WEIGHTS, *sorted(TOKENIZER_FILES)]
        notes += _unlike_others(model.config)
    elif format == "llmc":
        type, more = _write_llmc(model, tokenizer, directory, name)
        names, notes = list(LLMC_FILES), notes + more
    else:
        own = OF_DTYPE[model.wte.weight.dtype]
        type = type or own
        if keep and type == own:
            raise InputError(f"keep has no effect: the model is in {own} already; leave it out, or choose another type")
        content, more = gguf_pieces(model, tokenizer, type, name, keep, own)
        more += [f"kept in {own}: {', '.join(keep)}"] if keep else []
        with writing(directory):
            write_file(directory / GGUF_FILE, content)
        names, notes = [GGUF_FILE], notes + more
    files = tuple(File.of(directory / name) for name in names if (directory / name).is_file())
    return Export(name, str(directory), format, type, model.config, files, tuple(notes), tuple(keep))


def _write_llmc(model: GPT2, tokenizer: Tokenizer | None, directory: Path, name: str) -> tuple[str, list[str]]:
    """Write llm.c's files; return the type of the weights, and what the files cannot express."""
    dtype, config, notes = model.wte.weight.dtype, model.config, []
    type = "bf16" if dtype == torch.bfloat16 else "f32"
    if dtype == torch.float64:
        notes.append("float64 weights are rounded to float32")
    require_expressible(config, name)
    tokens = None
    if tokenizer is not None:
        eot = tokenizer.eot if tokenizer.eot is not None else config.eos_token_id
        try:
            tokens = tokenizer_file(tokenizer, eot or 0)
        except ValueError as error:
            notes.append(f"without its tokenizer: {error}")
        else:
            notes += ["without an end of text, for which llm.c takes token 0"] if eot is None else []
            notes += ["without its chat format, which llm.c's files cannot hold"] if tokenizer.chat else []
    path, tokenizer_path = (directory / file for file in LLMC_FILES)
    if tokens is None and tokenizer_path.exists():
        raise InputError(f"{directory}: holds {tokenizer_path.name} of another model; choose another folder, or remove it")
    with writing(directory):
        write_file(path, model_pieces(model, type, name))
        if tokens is not None:
            write_file(tokenizer_path, tokens)
    return type, notes


def opened(source: str | Checkpoint, revision: str | None, offline: bool) -> Checkpoint:
    """Return a checkpoint, opened by its name if need be."""
    if isinstance(source, str):
        return open_checkpoint(ModelName.parse(source, FLOATS, revision=revision), offline=offline)
    return source


def _read(checkpoint: Checkpoint) -> set[Path]:
    """Return the files of a checkpoint, or that a module was filled from, and the folders they are in: a link may lead there."""
    held = checkpoint.assignment.files.values() if isinstance(checkpoint, StoredCheckpoint) else ()
    files = {getattr(checkpoint, "path", Path(checkpoint.name)), *(file.path for file in held)}
    return {place for file in files if file.exists() for place in (file, folder_of(file), folder_of(file.resolve()))}


def exported_model(checkpoint: Checkpoint) -> tuple[GPT2, Tokenizer | None, list[str]]:
    """Return the model as it is exported, its tokenizer, and notes on differences from the source."""
    model = checkpoint.load()
    outlier = require_usable(model, checkpoint.name).outlier
    notes = [*([outlier] if outlier else []), *(checkpoint.assignment.notes if isinstance(checkpoint, StoredCheckpoint) else ())]
    try:
        tokenizer = checkpoint.tokenizer()
    except NoTokenizer as error:
        return model, None, [*notes, f"without a tokenizer: {error}"]
    notes, n_vocab = [*notes, *rows_note(tokenizer, model.config, checkpoint.name)], tokenizer.n_vocab
    if n_vocab < model.config.vocab_size:
        notes.append(f"embedding cropped from {model.config.vocab_size:,} rows to the tokenizer's {n_vocab:,}")
        model.with_tables(lambda rows: rows[:n_vocab])
    config = model.config
    for field in ("bos_token_id", "eos_token_id"):
        if (token := getattr(config, field)) is not None and token >= config.vocab_size:
            end = tokenizer.eos if tokenizer.eos is None or tokenizer.eos < config.vocab_size else None
            config = GPT2Config(**{**vars(config), field: end})
            notes.append(f"{field} {token:,} is beyond the vocabulary, written as {end}")
    model.config = config
    return model, tokenizer, notes


def _unlike_others(config: GPT2Config) -> list[str]:
    """List what other readers of Hugging Face's layout get wrong about a config, according to their sources."""
    notes = []
    if config.scale_attn_by_inverse_layer_idx or not config.scale_attn_weights:
        notes.append("only transformers knows its scaling of attention: CTranslate2, vLLM, llama.cpp leave it out or refuse it")
    if config.reorder_and_upcast_attn:
        notes.append("reorder_and_upcast_attn: vLLM refuses it")
    if config.layer_norm_epsilon != 1e-5:
        notes.append(f"layer_norm_epsilon {config.layer_norm_epsilon:g}: CTranslate2 computes with 1e-05")
    llama = [] if config.inner == 4 * config.n_embd else [f"a feed-forward of {config.inner:,} for {4 * config.n_embd:,}"]
    llama += [] if config.activation_function in TANH_GELU else [f"{config.activation_function} for the tanh GELU"]
    if llama:
        notes.append(f"llama.cpp's converter takes {' and '.join(llama)}, without a word")
    return notes
