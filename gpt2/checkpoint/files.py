"""Open what lies at a path: the container of the weights, the file that holds each tensor, and the config.

Some containers state their sizes: nanoGPT's `model_args`, OpenAI's `hparams.json`, GGUF's metadata, llm.c's header. If
config.json is there too, both must agree: no tensor's shape shows the number of heads, and a wrong one would load.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpt2.checkpoint.containers import Container, MappedFile, gguf_file, listed, read_json, refuse_other_format, shown
from gpt2.checkpoint.containers.flax_file import FlaxFile
from gpt2.checkpoint.containers.gguf_file import GGUFFile
from gpt2.checkpoint.containers.keras_file import SIGNATURE, KerasFile
from gpt2.checkpoint.containers.llmc_file import MODEL, OTHER_FILES, LlmcFile, magic_of
from gpt2.checkpoint.containers.safetensors_file import NAME, RowShards, SafetensorsFile
from gpt2.checkpoint.containers.tensorflow_file import TensorBundle, checkpoint_prefix
from gpt2.checkpoint.containers.torch_file import TorchFile
from gpt2.checkpoint.keys import HEAD, SYNONYMS, from_file, sizes
from gpt2.checkpoint.names import ADAPTER, LAYOUTS, OLD_LAYOUTS, WEIGHTS
from gpt2.config import OFFICIAL_SIZES, SMALL, GPT2Config, quoted
from gpt2.data.files import LIMIT
from gpt2.errors import CheckpointError, InputError

# Suffixes of a single weights file in a folder without the names above.
LONE = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")
BESIDE = {*SMALL, ADAPTER, "hparams.json", "checkpoint", "encoder.json", "vocab.bpe", *(index for _, index, _ in LAYOUTS)}
# What trainers write beside the weights, with the same suffixes.
TRAINERS = re.compile(r"(optimizer|scheduler|scaler|rng_state\w*|training_args|\w*optim_states)\.(bin|pt|pth)", re.ASCII)
PART = re.compile(r"-\d{5}-of-\d{5}(?=\.)", re.ASCII)
# (layers, width) -> heads of published shapes: OpenAI's and minGPT's (karpathy/minGPT, mingpt/model.py), whose state dicts do
# not contain the number of heads.
HEADS = {(size.n_layer, size.n_embd): size.n_head for size in OFFICIAL_SIZES.values()}
HEADS |= {(8, 512): 16, (6, 192): 6, (4, 128): 4, (3, 48): 3}
SIZES = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
HOW = "say another with --set activation_function=NAME"
TENSORFLOW = re.compile(r"(.+)\.(index|meta|data-\d{5}-of-\d{5})", re.ASCII)


def open_weights(path: Path) -> dict[str, Container]:
    """Return the open file of each tensor of a checkpoint, given a directory or a file. The content decides, not the name.

    The formats are safetensors and torch.save's (HF's ``.bin``, nanoGPT's ``ckpt.pt``, minGPT's), with or without shards; the
    parts that the ranks of a training run wrote; OpenAI's TensorFlow files; Keras' and Flax's; GGUF; llm.c's. Raises
    CheckpointError: no weights, a missing shard, or shards unlike their index.
    """
    if not path.is_dir():
        return _by_tensor([open_file(path)])
    for single, index, suffix in LAYOUTS:
        if os.path.lexists(path / single):  # whatever it is: its reader says what is no file
            return _by_tensor([open_file(path / single)])
        if os.path.lexists(path / index):
            return _shards(path / index, suffix)
    if rows := [file.name for file in _files(path) if NAME.fullmatch(file.name)]:
        return _by_tensor([RowShards(path, rows)])
    if (path / "checkpoint").is_file():
        refuse_other_format(MappedFile(path / "checkpoint"))
    if (prefix := checkpoint_prefix(path)) is not None:
        return _by_tensor([TensorBundle(prefix)])
    if old := [path / name for name in OLD_LAYOUTS if os.path.lexists(path / name)]:
        return _by_tensor([open_file(old[0])])
    if os.path.lexists(path / ADAPTER):
        what = f"a LoRA adapter, not a model; gpt2 export {path} DIR writes the model that it makes of its base"
        raise CheckpointError(f"{path}: {what}")
    lone = [file for file in _files(path) if file.suffix in LONE and magic_of(file) not in OTHER_FILES]
    lone = [file for file in lone if not TRAINERS.fullmatch(file.name)]
    if len(lone) != 1:
        raise CheckpointError(f"{path}: no {WEIGHTS} there; {what_is_there(path)}")
    return _by_tensor([open_file(lone[0])])


def open_file(path: Path) -> Container:
    """Open one weights file in the format that its first bytes show."""
    if (bundle := TENSORFLOW.fullmatch(path.name)) and os.path.lexists(path.with_name(f"{bundle[1]}.index")):
        return TensorBundle(path.with_name(bundle[1]))
    head = MappedFile(path).bytes(0, 9)
    if not head.endswith(b"\0{") and not head.startswith((b"P", b"\x80", b"G")):
        refuse_other_format(MappedFile(path))
    if head.startswith(b"GGUF"):
        return GGUFFile(path)
    if head.startswith(b"PK\x03\x04") or (head.startswith(b"\x80") and not head.endswith(b"\0{")):
        return TorchFile(path)
    if int.from_bytes(head[:4], "little") in (MODEL, *OTHER_FILES):
        return LlmcFile(path)
    if head.startswith(SIGNATURE):
        return KerasFile(path)
    if path.suffix == ".msgpack":  # it has no signature: any bytes are a beginning of some MessagePack
        return FlaxFile(path)
    if head and path.suffix != ".safetensors" and not head.endswith(b"\0{"):
        known = "safetensors, torch.save's, HDF5, .msgpack, GGUF, llm.c's, a TensorFlow .index (to compare: onnx/FILE, ct2/DIR)"
        beside = f"lies beside the weights; give {path.parent}" if path.suffix == ".json" else ""
        raise CheckpointError(f"{path}: {beside or f'does not begin as weights do; give {known}'}")
    return SafetensorsFile(path)


def _shards(index: Path, suffix: str) -> dict[str, Container]:
    stated = read_json(index).get("weight_map")
    weight_map = stated if isinstance(stated, dict) else {}
    shards = list(weight_map.values())
    name = rf"[\w.-]+{re.escape(suffix)}"
    if not shards or not all(isinstance(shard, str) and re.fullmatch(name, shard, re.ASCII) for shard in shards):
        raise CheckpointError(f"{index}: has no weight_map to bare names of {suffix} files; correct it, or fetch it again")
    held = _by_tensor([open_file(index.parent / shard) for shard in sorted(set(shards))])
    # A tied copy may be left out.
    there = {key: shard for key, shard in weight_map.items() if key in held or from_file(key) != HEAD}
    wrong = [key for key, shard in there.items() if key not in held or held[key].path.name != shard]
    wrong += [key for key in held if key not in weight_map]
    if wrong:
        raise CheckpointError(f"{index}: disagrees with its shards about {listed(wrong)}; fetch the checkpoint again")
    return held


def what_is_there(path: Path) -> str:
    """Say what a directory holds instead of a checkpoint, and what to do about it."""
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        return f"the folder cannot be read ({error.strerror}), give another"
    steps = [name for name in names if re.fullmatch(r"(step|checkpoint)-\d{1,9}", name, re.ASCII)]
    steps.sort(key=lambda name: -int(name.rpartition("-")[2]))
    for name in ("best", *steps, *(f"snapshots/{one.name}" for one in path.glob("snapshots/*"))):
        if (path / name / WEIGHTS).is_file():
            kind = "the Hub's cache" if "/" in name else "a training run"
            return f"it is the folder of {kind}, give {path / name}"
    if any(name.endswith(".distcp") for name in names):
        return f"shards of a run; python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} model.pt joins them"
    if "zero_to_fp32.py" in names:
        return "shards of DeepSpeed; the folder's own program joins them: python zero_to_fp32.py . out"
    several = [name for name in names if name.endswith(LONE) and not TRAINERS.fullmatch(name)]
    if parts := [name for name in several if PART.search(name)]:
        return f"{listed(parts)} are parts of one model, told by an index: fetch {PART.sub('', parts[0])}.index.json too"
    if len(several) > 1:
        return f"{listed(several)} could each be it, give one of them"
    if others := [name for name in names if name.endswith((".ot", ".onnx", ".tflite", ".xml", "_CHECKPOINT_METADATA"))]:
        return f"{listed(others)} cannot be opened; give the safetensors or PyTorch file of the same model"
    return f"the folder holds {listed(names, 6)}; give the one with the weights" if names else "the folder is empty"


def is_adapter(path: Path) -> bool:
    """Return whether a directory holds an adapter and no model; with both, the model is used."""
    held = os.path.lexists
    return held(path / ADAPTER) and not any(held(path / name) for pair in LAYOUTS for name in pair[:2])


def folder_of(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def files_of(path: Path, weights: Iterable[Container]) -> list[Path]:
    """List the files that a checkpoint is read from: its ``weights``, config, vocabulary; whatever else is there may be large.

    Raises CheckpointError: one of the small files is larger than any of its name.
    """
    if path.is_file():
        return [path]
    own = {container.path for container in weights}
    beside = [require_small(file) for file in _files(path) if file.name in BESIDE]
    return sorted({*beside, *(f for f in _files(path) if f in own or NAME.fullmatch(f.name) or TENSORFLOW.fullmatch(f.name))})


def require_small(file: Path) -> Path:
    """Return a file that has no weights. Raises CheckpointError: it is too large for one, and is not hashed."""
    if (size := file.stat().st_size) > LIMIT:
        raise CheckpointError(f"{file}: has {size:,} bytes, and such a file at most {LIMIT:,}; fetch it again, or remove it")
    return file


def _files(path: Path) -> list[Path]:
    try:
        return sorted(entry for entry in path.iterdir() if not entry.is_dir())
    except OSError:
        return []


def _by_tensor(files: list[Container]) -> dict[str, Container]:
    held: dict[str, Container] = {}
    for file in files:
        for name in file.entries:
            if name in held:
                raise CheckpointError(f"{file.path}: {shown(name)} is also in {held[name].path.name}; fetch the checkpoint again")
            held[name] = file
    return held


def read_config(path: Path) -> GPT2Config:
    where = folder_of(path) / "config.json"
    if not os.path.lexists(where):
        raise CheckpointError(f"{path}: no config.json there; {what_is_there(where.parent)}")
    return GPT2Config.from_hf(read_json(where), str(where))


def config_of(path: Path, files: Mapping[str, Container], activation: str | None = None) -> tuple[GPT2Config, str]:
    """Return the config of an opened checkpoint, and a line on what is assumed of it: the activation, which not all files say.

    ``activation`` is the user's word for it. Raises CheckpointError: no source, sources that disagree, or not a GPT-2.
    """
    config, assumed = _stated(path, files)
    if activation not in (None, config.activation_function) and not assumed:
        what = f"it says activation_function {config.activation_function} itself; leave {activation} out, or correct its config"
        raise CheckpointError(f"{path}: {what}")
    if activation is not None:
        return replace(config, activation_function=activation), ""
    return config, assumed and f"assumed: activation_function {config.activation_function}, {assumed}; {HOW}"


def _stated(path: Path, files: Mapping[str, Container]) -> tuple[GPT2Config, str]:
    """Return the config that the files state or show, and why its activation is assumed; "" if they state that too."""
    file = next(iter(files.values()), None)
    if isinstance(file, gguf_file.GGUFFile):
        return gguf_file.config_of(file), ""
    raw: Mapping[str, Any] = {}
    where = file.path if file is not None else path
    if isinstance(file, TensorBundle) and os.path.lexists(hparams := where.parent / "hparams.json"):
        raw, where = read_json(hparams), hparams
    if isinstance(file, TorchFile) and file.model_args:
        raw = file.model_args
    if isinstance(file, LlmcFile):
        raw = file.sizes
    stated = _sizes(raw, where)
    if os.path.lexists(folder_of(path) / "config.json"):
        written = read_config(path)
        if odd := [name for name in SIZES if getattr(written, name) != stated.get(name, getattr(written, name))]:
            both = ", ".join(f"{name} {getattr(written, name)} and {quoted(stated[name])}" for name in odd)
            raise CheckpointError(f"{path}: config.json and the checkpoint itself disagree: {both}; remove the wrong config.json")
        return written, ""
    if not stated:
        return _from_shapes(path, files), "since there is no config.json"
    if not isinstance(file, TorchFile):
        return _checked(stated, where), ""
    return _from_nanogpt(raw, stated, where, files), "since nanoGPT's files do not say it, and it was gelu_new until June 2023"


def _sizes(raw: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Return the sizes that a file states, under any of their names. Raises CheckpointError: it states two for one."""
    stated: dict[str, Any] = {}
    for key, value in raw.items():
        if (name := SYNONYMS.get(key, key)) in SIZES and value is not None and stated.setdefault(name, value) != value:
            raise CheckpointError(f"{where}: says {name} {quoted(stated[name])} and {key} {quoted(value)}; correct it")
    return stated


def _from_nanogpt(raw: Mapping[str, Any], stated: Mapping[str, Any], where: Path, files: Mapping[str, Container]) -> GPT2Config:
    """Convert nanoGPT's model_args (karpathy/nanoGPT, train.py and model.py), of which ``stated`` are the sizes.

    The MLP has the exact GELU since June 2023. Files without ``bias`` are from before February 2023.
    """
    known = {**_shown(files), **stated}
    config = _checked({name: known[name] for name in SIZES if name in known}, where)
    dropout = raw.get("dropout", 0.0)
    dropout = dropout if isinstance(dropout, float | int) else 0.0
    activation = "gelu" if "bias" in raw or _exact(files) else "gelu_new"
    return replace(config, activation_function=activation, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)


def _exact(files: Mapping[str, Container]) -> bool:
    """Return whether the names are of minGPT of 2020 and those after it, who call PyTorch's GELU: the exact one."""
    return any(re.search(r"\bblocks\.0\.", key) for key in files)


def _from_shapes(path: Path, files: Mapping[str, Container]) -> GPT2Config:
    """Return the config of a bare state dict of a published shape; other shapes do not determine the number of heads."""
    shown = _shown(files)
    heads = HEADS.get((shown.get("n_layer", 0), shown.get("n_embd", 0)))
    if heads is None or not {"vocab_size", "n_positions"} <= shown.keys():
        what = f"the tensors do not tell the number of heads; put one beside them with {', '.join(SIZES)}"
        raise CheckpointError(f"{path}: no config.json there, and {what}")
    inner = shown.pop("n_inner", None)
    known: dict[str, Any] = {"n_head": heads, "n_inner": None if inner == 4 * shown["n_embd"] else inner}
    known |= {"activation_function": "gelu"} if _exact(files) else {}
    return _checked(shown | known, path)


def _shown(files: Mapping[str, Container]) -> dict[str, int]:
    return sizes({from_file(key): file.entries[key].shape for key, file in files.items()})


def _checked(fields: Mapping[str, Any], where: Path) -> GPT2Config:
    """Build a config with GPT-2's end-of-text token if the vocabulary contains it; a bad field raises CheckpointError."""
    if missing := [name for name in SIZES if name not in fields]:
        raise CheckpointError(f"{where}: does not say {listed(missing)}; put a config.json beside it")
    end = 50256  # <|endoftext|> of OpenAI's vocabulary
    known = isinstance(fields["vocab_size"], int) and fields["vocab_size"] > end
    try:
        return GPT2Config(**fields, **dict.fromkeys(("bos_token_id", "eos_token_id"), end if known else None))
    except InputError as error:
        raise CheckpointError(f"{where}: {str(error).removeprefix('config: ')}; is it a GPT-2's?") from None
