"""Open the weights at a path: detect the container, and find the file that holds each tensor."""

from __future__ import annotations

import re
from pathlib import Path

from gpt2.checkpoint.containers import Container, listed, read_json, refuse_other_format, shown
from gpt2.checkpoint.containers.flax_file import FlaxFile
from gpt2.checkpoint.containers.gguf_file import GGUFFile
from gpt2.checkpoint.containers.keras_file import SIGNATURE, KerasFile
from gpt2.checkpoint.containers.llmc_file import MODEL, OTHER_FILES, LlmcFile, magic_of
from gpt2.checkpoint.containers.mapped_file import MappedFile
from gpt2.checkpoint.containers.safetensors_file import NAME, RowShards, SafetensorsFile
from gpt2.checkpoint.containers.tensorflow_file import TensorBundle, checkpoint_prefix
from gpt2.checkpoint.containers.torch_file import TorchFile
from gpt2.checkpoint.keys import HEAD, from_file
from gpt2.data.files import link_to_nothing
from gpt2.errors import CheckpointError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
# transformers' names of weights, preferred ones first: one file, or an index of shards.
LAYOUTS = ((WEIGHTS, INDEX, ".safetensors"), ("pytorch_model.bin", "pytorch_model.bin.index.json", ".bin"))
# Names of older releases, which transformers 5 does not open; always one file.
OLD_LAYOUTS = ("flax_model.msgpack", "tf_model.h5")
# Suffixes of a single weights file in a folder without the names above.
LONE = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")
# What trainers write beside the weights, with the same suffixes.
TRAINERS = re.compile(r"(optimizer|scheduler|scaler|rng_state\w*|training_args|\w*optim_states)\.(bin|pt|pth)", re.ASCII)
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
        if (path / single).is_file():
            return _by_tensor([open_file(path / single)])
        if (path / index).is_file():
            return _shards(path / index, suffix)
    if rows := [file.name for file in _files(path) if NAME.fullmatch(file.name)]:
        return _by_tensor([RowShards(path, rows)])
    if (prefix := checkpoint_prefix(path)) is not None:
        return _by_tensor([TensorBundle(prefix)])
    if old := [path / name for name in OLD_LAYOUTS if (path / name).is_file()]:
        return _by_tensor([open_file(old[0])])
    if (path / ADAPTER).is_file():
        what = f"a LoRA adapter, not a model; gpt2 export {path} DIR writes the model that it makes of its base"
        raise CheckpointError(f"{path}: {what}")
    lone = [file for file in _files(path) if file.suffix in LONE and magic_of(file) not in OTHER_FILES]
    lone = [file for file in lone if not TRAINERS.fullmatch(file.name)]
    if len(lone) != 1:
        raise CheckpointError(f"{path}: no {WEIGHTS} there; {what_is_there(path)}")
    return _by_tensor([open_file(lone[0])])


def open_file(path: Path) -> Container:
    """Open one weights file in the format that its first bytes show."""
    if (bundle := TENSORFLOW.fullmatch(path.name)) and path.with_name(f"{bundle[1]}.index").is_file():
        return TensorBundle(path.with_name(bundle[1]))
    head = MappedFile(path).bytes(0, 9)
    if not head.endswith(b"\0{") and not head.startswith((b"P", b"\x80", b"G")):
        refuse_other_format(MappedFile(path))
    if head.startswith(b"GGUF"):
        return GGUFFile(path)
    if head.startswith(b"PK\x03\x04") or (head.startswith(b"\x80") and not head.endswith(b"\0{")):
        return TorchFile(path)
    if magic_of(path) in (MODEL, *OTHER_FILES):
        return LlmcFile(path)
    if head.startswith(SIGNATURE):
        return KerasFile(path)
    if path.suffix == ".msgpack":  # it has no signature: any bytes are a beginning of some MessagePack
        return FlaxFile(path)
    if path.suffix not in LONE and not head.endswith(b"\0{"):
        raise CheckpointError(
            f"{path}: does not begin as weights do; give safetensors, torch.save's, HDF5, .msgpack, GGUF, llm.c's, or an .index"
        )
    return SafetensorsFile(path)


def _shards(index: Path, suffix: str) -> dict[str, Container]:
    stated = read_json(index).get("weight_map")
    weight_map = stated if isinstance(stated, dict) else {}
    shards = list(weight_map.values())
    name = rf"[\w.-]+{re.escape(suffix)}"
    if not shards or not all(isinstance(shard, str) and re.fullmatch(name, shard, re.ASCII) for shard in shards):
        raise CheckpointError(f"{index}: has no weight_map from tensors to {suffix} files beside it; fetch it again")
    held = _by_tensor([open_file(index.parent / shard) for shard in sorted(set(shards))])
    there = {
        key: shard for key, shard in weight_map.items() if key in held or from_file(key) != HEAD
    }  # a tied copy may be left out
    wrong = [key for key, shard in there.items() if key not in held or held[key].path.name != shard]
    wrong += [key for key in held if key not in weight_map]
    if wrong:
        raise CheckpointError(f"{index}: disagrees with its shards about {listed(wrong)}; fetch the checkpoint again")
    return held


def what_is_there(path: Path) -> str:
    """Say what a directory holds instead of a checkpoint, and what to do about it."""
    try:
        names = sorted(entry.name for entry in path.iterdir())
        if gone := next((f"{name} is {why}" for name in names if (why := link_to_nothing(path / name))), None):
            return gone
    except OSError as error:
        return f"the folder cannot be read ({error.strerror}), give another"
    steps = sorted((name for name in names if re.fullmatch(r"step-\d{1,9}", name, re.ASCII)), key=lambda name: int(name[5:]))
    for name in ("best", *reversed(steps)):
        if (path / name / WEIGHTS).is_file():
            return f"it is the folder of a training run, give {path / name}"
    if any(name.endswith(".distcp") for name in names):
        return f"shards of a run; python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} model.pt joins them"
    several = [name for name in names if name.endswith(LONE) and not TRAINERS.fullmatch(name)]
    if len(several) > 1:
        return f"{listed(several)} could each be it, give one of them"
    if others := [name for name in names if name.endswith((".ot", ".onnx", ".tflite"))]:
        return f"{listed(others)} cannot be opened; give the safetensors or PyTorch file of the same model"
    return f"the folder holds {listed(names, 6)}; give the one with the weights" if names else "the folder is empty"


def folder_of(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def files_of(path: Path) -> list[Path]:
    """List the files of a checkpoint: weights, configs, vocabularies."""
    if path.is_file():
        return [path]
    return [
        file
        for file in _files(path)
        if file.suffix in (".json", ".txt", ".bpe", ".model", *LONE) or TENSORFLOW.fullmatch(file.name)
    ]


def _files(path: Path) -> list[Path]:
    try:
        return sorted(entry for entry in path.iterdir() if entry.is_file())
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
