"""Damage Keras' HDF5 and Flax's MessagePack files: bytes of the headers and of the data, cuts, lengths at their limits."""

import random
from pathlib import Path

from gpt2.checkpoint.files import open_file
from support.fuzz import Subject, changed_bytes, read_every_way
from support.old_layouts import flax, flax_tree, keras, packed


def prepare(folder: Path) -> Subject:
    """One file of each kind, and another of each to copy bytes from."""
    truth = flax(folder)
    keras(folder)
    keras(folder / "other", chunks=True)
    part = packed(flax_tree({name: tensor for name, tensor in truth.items() if "h.0" in name}))
    paths = folder / "tf_model.h5", folder / "flax_model.msgpack"
    pairs = [(paths[0].read_bytes(), (folder / "other/tf_model.h5").read_bytes()), (paths[1].read_bytes(), part)]
    read = list(paths)  # both at first, then the damaged one

    def damage(pick: random.Random) -> None:
        kind = pick.randrange(2)
        read[:] = [paths[kind]]
        paths[kind].write_bytes(changed_bytes(pick, *pairs[kind]))

    def read_all() -> None:
        for path in read:
            read_every_way(open_file(path), 20)

    return Subject(damage, read_all)
