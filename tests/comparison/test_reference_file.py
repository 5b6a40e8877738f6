"""A reference is read as it was written, to the last bit, and no damage to its file goes unseen."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.references import forged

from gpt2.checkpoint.containers.safetensors_file import SafetensorsFile
from gpt2.comparison.reference_file import ReferenceWriter, about_of, read_reference
from gpt2.errors import CheckpointError, InputError
from gpt2.measure.windows import RowWindows, Windows

IDS = torch.arange(40) % 23
ABOUT = {"side": {"name": "a"}}


def logits(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(39, 24, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)


def write(path: Path, rows: torch.Tensor, top: int = 0, windows: Windows | None = None) -> Path:
    lengths = torch.arange(23) + 1
    writer = ReferenceWriter(path, ABOUT, IDS, windows or Windows(16), 23, top=top, token_bytes=lengths)
    with writer.open():
        for part in rows.split(7):
            writer.add(part)
    return path


def stop(writer: ReferenceWriter) -> None:
    writer.add(logits()[:3])
    raise KeyboardInterrupt


def read_all(path: Path) -> object:
    reference = read_reference(path)
    return reference.logits(slice(None)) if reference.whole else reference.top()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_all_logits_come_back_to_the_last_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    """A reference that rounds makes a model differ from itself; the padding of the vocabulary is not kept."""
    reference = read_reference(write(tmp_path / "a.safetensors", logits(dtype)))
    assert torch.equal(reference.logits(slice(None)), logits(dtype)[:, :23])
    assert reference.ids.tolist() == IDS.tolist()
    assert (reference.windows, reference.vocab, reference.about["side"]) == (Windows(16), 23, {"name": "a"})
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_the_likeliest_tokens_and_the_rest_are_all_of_it(tmp_path: Path) -> None:
    """A tail that does not add up to 1 makes every bound on KL wrong."""
    windows = RowWindows(9, skipped=2)
    rows = logits()[: sum(span.end - span.first for span in windows.of(40))]
    reference = read_reference(write(tmp_path / "a.safetensors", rows, top=4, windows=windows))
    assert reference.windows == windows
    top, exact = reference.top(), rows[:, :23].double().log_softmax(-1)
    assert torch.equal(top["top_ids"].long(), exact.topk(4).indices)
    torch.testing.assert_close(top["top_logp"], exact.topk(4).values, rtol=0, atol=1e-13)
    assert (exact.scatter(1, top["top_ids"].long(), -torch.inf).exp().sum(1) - top["rest"]).abs().max() < 1e-14
    targets = torch.cat([IDS[span.first + 1 : span.end + 1] for span in windows.of(40)])
    assert (top["target_logp"] - exact.gather(1, targets[:, None])[:, 0]).abs().max() < 1e-13


@pytest.mark.parametrize("top", [0, 4])
def test_no_flipped_byte_goes_unseen(tmp_path: Path, top: int) -> None:
    """safetensors has no checksum: a flipped bit years later would be a difference of the model."""
    path = write(tmp_path / "a.safetensors", logits(), top=top)
    whole = path.read_bytes()
    for at in range(9, len(whole), 41 if top else 101):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        if whole[at - 20 : at + 20].find(b'"format":"pt"') < 0:  # which no reader needs
            with pytest.raises(CheckpointError):
                read_all(path)
    path.write_bytes(whole[:-3])
    with pytest.raises(CheckpointError, match="not fully covered"):
        read_reference(path)


def test_no_claim_of_a_file_is_believed(tmp_path: Path) -> None:
    """Claims with right checksums reached torch: a negative id, an infinite vocabulary and a shape that is not were tracebacks,
    a vocabulary of 10^15 a table of its size."""
    whole, likeliest = (write(tmp_path / f"{top}.safetensors", logits(), top=top) for top in (0, 4))
    claims: list[tuple[str, Any]] = [("vocab", 10**15), ("vocab", math.inf), ("vocab", 20), ("vocab", 0), ("vocab", "many")]
    claims += [("windows", {"context": size, "stride": None, "guide": False}) for size in (16.5, -1, "16")]
    claims += [("windows", {"context": 16, "stride": stride, "guide": False}) for stride in (0, 17, 4.5)]
    for path in (whole, likeliest):
        assert read_reference(forged(path, lambda about, arrays: None)).vocab == 23  # what is forged is read, if it is true
        for field, value in claims:
            with pytest.raises(CheckpointError, match="is damaged"):
                read_reference(forged(path, lambda about, arrays, f=field, v=value: about.update({f: v})))
        for name, array in {
            "ids": IDS.int() - 1,
            "ids ": IDS.int() + 1,
            "ids  ": IDS[:1].int(),
            "ids   ": IDS.float(),
            "token_bytes": -torch.ones(39, dtype=torch.int32),
            "token_bytes ": torch.ones(3, dtype=torch.int32),
            "top_ids" if path == likeliest else "logits": torch.zeros(39, 23, dtype=torch.int64),
        }.items():
            with pytest.raises(CheckpointError, match="is damaged"):
                read_reference(forged(path, lambda about, arrays, n=name, a=array: arrays.update({n.strip(): a})))
    negative = {"windows": {"context": 39, "stride": None, "guide": False, "skipped": -3}}
    longer = {"logits": torch.zeros(42, 23), "token_bytes": torch.zeros(42, dtype=torch.int32)}  # as many as -3 asks for
    with pytest.raises(CheckpointError, match="not whole numbers"):
        read_reference(forged(whole, lambda about, arrays: (about.update(negative), arrays.update(longer))))
    none = {"top_ids": torch.zeros(39, 0, dtype=torch.int32), "top_logp": torch.zeros(39, 0, dtype=torch.float64)}
    save_file(load_file(likeliest) | none, tmp_path / "none.safetensors", SafetensorsFile(likeliest).metadata)
    with pytest.raises(CheckpointError, match="is damaged"):
        read_reference(tmp_path / "none.safetensors")


def test_a_foreign_file_and_a_failed_run(tmp_path: Path) -> None:
    """Half of a reference must not lie under its name, and weights are not a reference."""
    save_file({"wte": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    assert about_of(tmp_path / "model.safetensors") is None
    with pytest.raises(CheckpointError, match="is not a reference"):
        read_reference(tmp_path / "model.safetensors")
    writer = ReferenceWriter(tmp_path / "b.safetensors", ABOUT, IDS, Windows(16), 23)
    with pytest.raises(KeyboardInterrupt), writer.open():
        stop(writer)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    with pytest.raises(InputError, match="cannot be written"):
        write(tmp_path / "none" / "a.safetensors", logits())
