"""What a dump may be: any container and layout of the ids, and one clear line for what cannot be read."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import hf_layouts
from support.commands import refusal

from gpt2.measure.dumps import dump_of, is_dump, read, read_npy, read_npz

CONFIG = hf_layouts.TINY
IDS = np.array([[1, 2, 3], [4, 5, 6]])
LOGITS = np.zeros((2, 3, 61), np.float32)


def test_every_container_gives_the_same_dump(tmp_path: Path) -> None:
    """A name, dtype or byte order lost on the way would be taken for a fault of the program."""
    np.savez(tmp_path / "a.npz", ids=IDS.astype(np.int32), logits=LOGITS.astype(">f4"), mask=np.ones(3, bool), words=["a"])
    for write, name in ((save_file, "a.safetensors"), (torch.save, "a.pt")):
        write({"ids": torch.tensor(IDS), "logits": torch.tensor(LOGITS)}, tmp_path / name)
        assert is_dump(tmp_path / name)
    (tmp_path / "d" / "deep").mkdir(parents=True)
    np.save(tmp_path / "d" / "deep" / "logits.npy", LOGITS)
    np.save(tmp_path / "d" / "tokens.npy", IDS[0])
    (tmp_path / "d" / "index.json").write_text("{}")
    npz, folder, *others = (read(tmp_path / name, CONFIG) for name in ("a.npz", "d", "a.safetensors", "a.pt"))
    assert all(torch.equal(npz.ids, each.ids) and torch.equal(npz.arrays["logits"], each.arrays["logits"]) for each in others)
    assert torch.equal(npz.ids[:1], folder.ids)
    assert (list(folder.arrays), list(npz.arrays)) == (["deep/logits"], ["logits"])
    half = torch.tensor([1.5, -2]).bfloat16()
    jax = half.view(torch.int16).numpy().view("V2")  # as NumPy reads JAX's bfloat16
    given = dump_of({"x/IDX": IDS[0].tolist(), "a": half, "b": np.float16([1]), "c": jax}, CONFIG)
    assert given.ids.tolist() == [[1, 2, 3]]
    assert all(torch.equal(given.arrays[name], half) for name in "ac")
    for other in ("V4", "i1,i1", "f2,"):  # no bfloat16
        assert "save numbers" in refusal(dump_of, {"ids": IDS, "a": np.zeros(2, other)}, CONFIG)


def test_training_steps_are_refused_and_said() -> None:
    """Gradients were taken for values of a forward pass, or the user was told that the logits are missing."""
    of_a_step = {"ids": IDS, "loss": np.float32([4]), "g": np.zeros((61, CONFIG.n_embd))}
    for arrays in ({"ids": IDS[None], "logits": LOGITS}, of_a_step):
        assert "training steps are not read from a dump; diagnose the step itself" in refusal(dump_of, arrays, CONFIG)


def test_the_debug_state_of_llmc_is_read(tmp_path: Path) -> None:
    """Its ids and logits lie one behind the other, with no names: a wrong offset would read the targets as logits."""
    logits = np.random.default_rng(0).normal(size=(2, 3, 61)).astype("<f4")
    header = np.zeros(256, "<i4")
    header[:4] = 20240327, 2, 2, 3
    whole = b"".join(a.tobytes() for a in (header, IDS.astype("<i4"), (IDS + 1).astype("<i4"), logits, np.float32([4.5, 1, 2])))
    (tmp_path / "state.bin").write_bytes(whole)
    dump = read(tmp_path / "state.bin", CONFIG)
    assert dump.ids.tolist() == IDS.tolist()
    assert torch.equal(dump.arrays["logits"], torch.tensor(logits))
    for content, words in ((whole[:1200], "it is cut short"), (whole[:40], "is cut short"), (b"\1" + whole, "not with llm.c")):
        (tmp_path / "bad.bin").write_bytes(content)
        assert words in refusal(read, tmp_path / "bad.bin", CONFIG)


BAD = {
    "padding": ({"ids": IDS, "attention_mask": np.array([[0, 1, 1], [1, 1, 1]]), "logits": LOGITS}, "dump one row without it"),
    "no ids": ({"logits": LOGITS}, "holds no token ids; give integers, in a dump under the name ids"),
    "out of range": ({"ids": IDS + 60, "logits": LOGITS}, "holds the id 6"),
    "negative": ({"ids": IDS - 2, "logits": LOGITS}, "holds the id -1"),
    "four axes": ({"ids": IDS[None, None], "logits": LOGITS}, "has shape (1, 1, 2, 3), and ids are (T,) or (B, T)"),
    "fractions": ({"ids": IDS + 0.5, "logits": LOGITS}, "holds float64 values that are not ids"),
    "rounded": ({"ids": np.full(3, 2048, np.float16), "logits": LOGITS}, "holds float16 values that are not ids"),  # or 2049
    "unsigned": ({"ids": np.full(3, 2**64 - 1, np.uint64), "logits": LOGITS}, f"holds the id {2**63 - 1}"),
    "too long": ({"ids": np.zeros(17, int), "logits": LOGITS}, "has 17 tokens in a row, and the model has 16 positions"),
    "no floats": ({"ids": IDS, "logits": IDS}, "holds no floating-point arrays beside the ids"),
    "empty": ({"ids": IDS[:, :0], "logits": LOGITS}, "has shape (2, 0)"),
    "words": ({"ids": np.array(["a"]), "logits": LOGITS}, "holds no token ids; give integers"),
}


@pytest.mark.parametrize("case", BAD)
def test_arrays_that_are_no_dump(case: str) -> None:
    """A traceback, or a diagnosis of nonsense, would hide the mistake."""
    arrays, words = BAD[case]
    assert words in refusal(dump_of, arrays, CONFIG)


def test_files_that_are_no_dump(tmp_path: Path) -> None:
    """Cut files and pickles come from other machines."""
    np.savez(tmp_path / "a.npz", ids=IDS, logits=LOGITS)
    whole = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.npz").write_bytes(b"")
    np.savez(tmp_path / "objects.npz", ids=IDS, logits=np.array([{}], object))
    (tmp_path / "none").mkdir()
    np.save(tmp_path / "x.npy", IDS)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "ids.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:90])
    save_file({"ids": torch.tensor(IDS)}, tmp_path / "cut.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "cut.safetensors").read_bytes()[:-1])
    said = {
        "cut.npz": "cut.npz: cannot be read",
        "empty.npz": "empty.npz: cannot be read",
        "objects.npz": "Object arrays cannot be loaded",
        "none": "is a directory without .npy files",
        "damaged": "NumPy cannot read it",
        "cut.safetensors": "not a whole safetensors file",
        "x.npy": "is not a dump; a single array is not a dump",
        "nowhere.npz": "no such file or directory",
    }
    for name, words in said.items():
        assert words in refusal(read, tmp_path / name, CONFIG), name


def test_a_wrong_array_is_refused_and_a_right_header_shown(tmp_path: Path) -> None:
    """Programs in C write them by hand: NumPy reads float64 called float32 as other numbers, and ends in its own tracebacks."""
    np.save(tmp_path / "right.npy", LOGITS)
    whole = (tmp_path / "right.npy").read_bytes()
    for wrong, said in ((whole + b"1234", "the file has more than the 1,464 bytes of (2, 3, 61) of float32"), (whole[:99], "")):
        (tmp_path / "x.npy").write_bytes(wrong)
        with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("x.npy", wrong)
        for message in (refusal(read_npy, tmp_path / "x.npy"), refusal(lambda: list(read_npz(tmp_path / "x.npz")))):
            assert said in message
            assert "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 16), }" in message
