"""Tiny Keras and Flax checkpoints as transformers 4 wrote them: HDF5 by h5py, MessagePack by msgpack, without our code."""

from pathlib import Path
from typing import Any

import h5py
import msgpack
import numpy as np
from torch import Tensor

from gpt2.config import GPT2Config
from support.hf_layouts import TINY, weights, write_config


def keras_path(name: str) -> str:
    """The path of a parameter in tf_model.h5: `h.0.ln_1.weight` -> `.../h_._0/ln_1/gamma:0`."""
    *modules, leaf = name.split(".")
    if modules[0] == "h":
        modules[:2] = [f"h_._{modules[1]}"]
    if modules[-1].startswith("ln_"):
        leaf = {"weight": "gamma", "bias": "beta"}[leaf]
    if modules == ["wpe"]:
        leaf = "embeddings"
    return "/".join(("transformer", "tfgp_t2lm_head_model", "transformer", *modules, f"{leaf}:0"))


def keras(directory: Path, config: GPT2Config = TINY, **storage: Any) -> dict[str, Tensor]:
    """Write tf_model.h5; the biases of the matrices are (1, n), and attributes list the names."""
    truth = weights(config)
    with h5py.File(write_config(directory, config) / "tf_model.h5", "w") as file:
        file.attrs["layer_names"] = [b"transformer"]
        file.create_group("transformer").attrs["weight_names"] = [keras_path(name).encode() for name in truth]
        for name, tensor in truth.items():
            array = tensor.numpy()
            array = array[None] if array.ndim == 1 and ".ln_" not in f".{name}" else array
            file.create_dataset(keras_path(name), data=array, **storage)
    return truth


def flax_tree(truth: dict[str, Tensor]) -> dict[str, Any]:
    """The parameters as Flax nests them; a kernel is [out, in]."""
    tree: dict[str, Any] = {}
    for name, tensor in truth.items():
        *modules, leaf = name.split(".")
        inner = tree
        for module in ("transformer", *modules):
            inner = inner.setdefault(module, {})
        if leaf == "weight":
            leaf = "scale" if modules[-1].startswith("ln_") else "embedding" if len(modules) == 1 else "kernel"
        inner[leaf] = np.ascontiguousarray(tensor.t() if leaf == "kernel" else tensor)
    return tree


def packed(tree: dict[str, Any]) -> bytes:
    """MessagePack of nested maps whose leaves are arrays, in the extension that Flax defines."""

    def default(array: np.ndarray) -> msgpack.ExtType:
        return msgpack.ExtType(1, msgpack.packb((array.shape, array.dtype.name, array.tobytes()), use_bin_type=True))

    return msgpack.packb(tree, default=default, strict_types=True)


def flax(directory: Path, config: GPT2Config = TINY) -> dict[str, Tensor]:
    """Write flax_model.msgpack."""
    truth = weights(config)
    (write_config(directory, config) / "flax_model.msgpack").write_bytes(packed(flax_tree(truth)))
    return truth
