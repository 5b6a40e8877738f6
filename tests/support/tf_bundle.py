"""TensorFlow checkpoints in its Saver's layout, by its `tensor_bundle.proto`; tests build invalid files of the parts."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import google_crc32c
import torch
from torch import Tensor

from gpt2.config import GPT2Config
from support.hf_layouts import TINY, weights

MAGIC = bytes.fromhex("57fb808b247547db")
KINDS = {torch.float32: 1, torch.int32: 3, torch.int64: 9, torch.bfloat16: 14, torch.float16: 19}

# OpenAI's names (openai/gpt-2, src/model.py) for our parameters.
OUTSIDE = {"wte.weight": "model/wte", "wpe.weight": "model/wpe", "ln_f.weight": "model/ln_f/g", "ln_f.bias": "model/ln_f/b"}
LEAVES = {"weight": "w", "bias": "b"}


def varint(number: int) -> bytes:
    out = b""
    while number >= 128:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


def field(number: int, value: int | bytes) -> bytes:
    """A protobuf field, varint or bytes; absent if it is 0, as in proto3."""
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    return varint(number << 3) + varint(value) if value else b""


def fixed32(number: int, value: int) -> bytes:
    return varint(number << 3 | 5) + value.to_bytes(4, "little") if value else b""


def header(shards: int = 1, endianness: int = 0, version: bytes = field(1, 1)) -> bytes:
    """BundleHeaderProto."""
    return field(1, shards) + field(2, endianness) + field(3, version)


def entry(kind: int, shape: Iterable[int], shard: int, offset: int, data: bytes) -> bytes:
    """BundleEntryProto."""
    dims = b"".join(field(2, field(1, size)) for size in shape)
    return field(1, kind) + field(2, dims) + field(3, shard) + field(4, offset) + field(5, len(data)) + fixed32(6, checksum(data))


def checksum(data: bytes) -> int:
    """The CRC rotated right by 15 bits, plus a constant."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) % 2**32


def block(rows: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Entries that share no prefix of their keys, and the position of the first one."""
    out = b"".join(b"\0" + varint(len(key)) + varint(len(value)) + key + value for key, value in rows)
    return out + bytes(4) + (1).to_bytes(4, "little")


def sealed(content: bytes, compression: int = 0) -> bytes:
    content += bytes([compression])
    return content + checksum(content).to_bytes(4, "little")


def table(rows: list[tuple[bytes, bytes]]) -> bytes:
    """The whole index, rows in the given order, in one block: TensorFlow's have 256 KiB, and a GPT-2's index has 75 kB."""
    content = block(rows)
    return closed(sealed(content), [(rows[-1][0], handle(0, len(content)))])


def handle(start: int, size: int) -> bytes:
    """The handle of a block: its offset and size."""
    return varint(start) + varint(size)


def closed(out: bytes, handles: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Data blocks and the rest of the file: an empty block, the block that lists them, the footer."""
    whole = bytearray(out)
    places = b""
    for content in (block([]), block(handles)):
        places += handle(len(whole), len(content))
        whole += sealed(content)
    return bytes(whole) + places.ljust(40, b"\0") + MAGIC


def write(prefix: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Write a bundle; return the index."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    rows, content = [(b"", header())], b""
    for name in sorted(tensors, key=str.encode):
        tensor = tensors[name]
        data = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
        rows.append((name.encode(), entry(KINDS[tensor.dtype], tensor.shape, 0, len(content), data)))
        content += data
    prefix.with_name(f"{prefix.name}.data-00000-of-00001").write_bytes(content)
    index = prefix.with_name(f"{prefix.name}.index")
    index.write_bytes(table(rows))
    return index


def name_of(ours: str) -> str:
    """OpenAI's name for one of our parameters."""
    if ours in OUTSIDE:
        return OUTSIDE[ours]
    _, layer, *modules, leaf = ours.split(".")
    norm = {"weight": "g", "bias": "b"} if modules[0].startswith("ln") else LEAVES
    return "/".join(["model", f"h{layer}", *modules, norm[leaf]])


def openai(directory: Path, config: GPT2Config = TINY, more: Mapping[str, Tensor] = MappingProxyType({})) -> dict[str, Tensor]:
    """Write a model as OpenAI's `download_model.py` does, without graph and tokenizer; return the parameters by our names."""
    truth = weights(config)
    matrices = {name for name, tensor in truth.items() if tensor.ndim == 2 and name.startswith("h.")}
    write(directory / "model.ckpt", {name_of(name): t[None] if name in matrices else t for name, t in truth.items()} | {**more})
    line = 'model_checkpoint_path: "model.ckpt"\n'
    (directory / "checkpoint").write_text(line + f"all_{line}".replace("path", "paths"))
    sizes = {"n_vocab": config.vocab_size, "n_ctx": config.n_positions}
    sizes |= {name: getattr(config, name) for name in ("n_embd", "n_head", "n_layer")}
    (directory / "hparams.json").write_text(json.dumps(sizes))
    return truth
