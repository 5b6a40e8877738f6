"""Damaged TensorFlow checkpoints for `support/fuzz.py`, mostly with valid checksums, so that later checks are reached."""

import random
from pathlib import Path

from gpt2.checkpoint.containers.tensorflow_file import TensorBundle, checkpoint_prefix, read_hparams
from gpt2.config import GPT2Config
from support.checks import all_same, content
from support.fuzz import Subject, changed_bytes
from support.tf_bundle import between, block, closed, entry, handle, header, openai, sealed, table

SMALL = GPT2Config(vocab_size=5, n_positions=3, n_embd=4, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
INDEX, DATA = "model.ckpt.index", "model.ckpt.data-00000-of-00001"


def resealed(pick: random.Random, rows: list[tuple[bytes, bytes]]) -> bytes:
    """An index with a wrong entry, key, block or block position, and valid checksums."""
    hurt = pick.randrange(4)

    def change(data: bytes, one_in: int = 1) -> bytes:
        return changed_bytes(pick, data, data) if pick.randrange(one_in) == 0 else data

    if hurt == 0:
        chosen = pick.randrange(len(rows))
        changed = [(key, change(value) if n == chosen else value) for n, (key, value) in enumerate(rows)]
        return table(changed, pick.choice([1, 100, 10**6]), pick.choice([1, 3, 16]))
    if hurt == 1:
        changed = [(change(key, 8) if key else key, value) for key, value in rows]
        return table(changed if pick.randrange(2) else sorted(changed), pick.choice([1, 100, 10**6]))
    out, handles = b"", []
    for start in range(0, len(rows), 6):
        data = block(rows[start : start + 6], pick.choice([1, 3, 16]))
        data = change(data, 3) if hurt == 2 else data
        bound = between(rows[: start + 6][-1][0], rows[start + 6][0] if start + 6 < len(rows) else None)
        place = handle(len(out), len(data))
        handles.append((bound, change(place, 3) if hurt == 3 else place))
        out += sealed(data)
    return closed(out, handles)


def prepare(folder: Path) -> Subject:
    openai(folder, SMALL)
    honest, whole = content(folder), TensorBundle(folder / "model.ckpt")
    truth = {name: whole.read(name).clone() for name in whole.entries}
    rows, start, hurt = [(b"", header())], 0, [""]
    for name, tensor in truth.items():
        rows.append((name.encode(), entry(1, tensor.shape, 0, start, honest[DATA][start : start + tensor.nbytes])))
        start += tensor.nbytes
    assert table(rows) == honest[INDEX]

    def damage(pick: random.Random) -> None:
        for name, data in honest.items():
            (folder / name).write_bytes(data)
        hurt[0] = pick.choice([INDEX, "resealed", "resealed", "resealed", DATA, "checkpoint", "hparams.json"])
        if hurt[0] == "resealed":
            (folder / INDEX).write_bytes(resealed(pick, rows))
        else:
            (folder / hurt[0]).write_bytes(changed_bytes(pick, honest[hurt[0]], honest[INDEX]))

    def read() -> None:
        prefix = checkpoint_prefix(folder)
        assert prefix == folder / "model.ckpt"
        read_hparams(folder / "hparams.json")
        bundle = TensorBundle(prefix)
        tensors = {name: bundle.read(name, mapped=len(name) % 2 == 0) for name in bundle.entries}
        assert hurt[0] == "resealed" or all_same(tensors, truth)

    return Subject(damage, read)
