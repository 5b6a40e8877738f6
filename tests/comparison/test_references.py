"""What a side showed, kept: our references, traces and llama.cpp's KL base files, as files and as sides of a comparison."""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checks import refused
from support.commands import refusal
from support.random_models import write_checkpoint

import gpt2
from gpt2.checkpoint.containers.safetensors_file import SafetensorsFile
from gpt2.cli.main import main
from gpt2.comparison.llama_base import is_llama_base, read_llama_base
from gpt2.comparison.passage import Settings, open_passage
from gpt2.comparison.reference_file import TOP, ReferenceWriter, _checksums, about_of, checksum, read_reference
from gpt2.comparison.run import compare
from gpt2.comparison.saving import Keep, save_reference
from gpt2.comparison.sides.opening import open_side
from gpt2.errors import CheckpointError, InputError
from gpt2.measure.windows import RowWindows, Windows

IDS = torch.arange(40) % 23
ABOUT = {"side": {"name": "a"}}


def forged(path: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], object]) -> Path:
    """Write a reference again with other claims, and the checksums that fit them."""
    arrays, about = load_file(path), about_of(path)
    change(about, arrays)
    about["checked"] = checksum({n: array for n, array in arrays.items() if n in ("ids", "token_bytes") or n.startswith("at.")})
    rows = tuple(arrays[name] for name in (TOP if "rest" in arrays else ("logits",)))
    crc = torch.tensor(_checksums(rows))[:, None]
    arrays["crc32"] = (crc >> torch.tensor([0, 8, 16, 24]) & 255).to(torch.uint8)
    text = json.dumps(about)
    out = path.with_name("forged.safetensors")
    save_file(arrays, out, {"about": text, "about_crc32": str(zlib.crc32(text.encode()))})
    return out


def rounded_row(logits: np.ndarray) -> bytes:
    """One scored token: the step and the lowest log-probability as float32, and every logit in steps above the lowest."""
    logits = logits.astype(np.float32)
    high = logits.max()
    low = max(logits.min(), high - 16)
    log_sum = np.float32(np.log(np.exp((logits - high).astype(np.float64)).sum()))
    step = np.float32((high - low) / 65535)
    steps = np.zeros(len(logits) + len(logits) % 2, np.uint16)
    if step:
        steps[: len(logits)] = np.where(logits > low, np.rint((logits - low) / step), 0)
    return struct.pack("<2f", step, low - high - log_sum) + steps.astype("<u2").tobytes()


def write_llama_base(path: Path, ids: np.ndarray, logits: np.ndarray) -> Path:
    """Write chunks of ids (C, T) and all their logits (C, T, V); the second half of each chunk is kept, without its last."""
    chunks, context = ids.shape
    head = b"_logits_" + struct.pack("<3i", context, logits.shape[-1], chunks) + ids.astype("<i4").tobytes()
    rows = (rounded_row(logits[c, t]) for c in range(chunks) for t in range(context // 2, context - 1))
    path.write_bytes(head + b"".join(rows))
    return path


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
    (ids, logp, target, rest), exact = reference.top(), rows[:, :23].double().log_softmax(-1)
    assert torch.equal(ids.long(), exact.topk(4).indices)
    torch.testing.assert_close(logp, exact.topk(4).values, rtol=0, atol=1e-13)
    assert (exact.scatter(1, ids.long(), -torch.inf).exp().sum(1) - rest).abs().max() < 1e-14
    targets = torch.cat([IDS[span.first + 1 : span.end + 1] for span in windows.of(40)])
    assert (target - exact.gather(1, targets[:, None])[:, 0]).abs().max() < 1e-13


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
    refused(lambda: read_reference(path), "not fully covered")


def test_no_claim_of_a_file_is_believed(tmp_path: Path) -> None:
    """Claims with right checksums reached torch: a negative id, an infinite vocabulary and a shape that is not were tracebacks,
    a vocabulary of 10^15 a table of its size."""
    whole, likeliest = (write(tmp_path / f"{top}.safetensors", logits(), top=top) for top in (0, 4))
    claims: list[tuple[str, Any]] = [("vocab", 10**15), ("vocab", math.inf), ("vocab", 20), ("vocab", 0), ("vocab", "many")]
    claims += [("windows", {"context": size, "stride": None, "guide": False}) for size in (16.5, -1, "16")]
    claims += [("windows", {"context": 16, "stride": stride, "guide": False}) for stride in (0, 17, 4.5)]
    for path in (whole, likeliest):
        assert read_reference(forged(path, lambda about, arrays: None)).vocab == 23  # what is forged is read, if it is true
        held = [("ids", array) for array in (IDS.int() - 1, IDS.int() + 1, IDS[:1].int(), IDS.float())]
        held += [("token_bytes", array) for array in (-torch.ones(39, dtype=torch.int32), torch.ones(3, dtype=torch.int32))]
        held += [("top_ids" if path == likeliest else "logits", torch.zeros(39, 23, dtype=torch.int64))]
        changes = [lambda about, arrays, claim=claim: about.update([claim]) for claim in claims]
        changes += [lambda about, arrays, claim=claim: arrays.update([claim]) for claim in held]
        for change in changes:
            refused(partial(read_reference, forged(path, change)), "is damaged")
    negative = {"windows": {"context": 39, "stride": None, "guide": False, "skipped": -3}}
    longer = {"logits": torch.zeros(42, 23), "token_bytes": torch.zeros(42, dtype=torch.int32)}  # as many as -3 asks for
    with pytest.raises(CheckpointError, match="not whole numbers"):
        read_reference(forged(whole, lambda about, arrays: (about.update(negative), arrays.update(longer))))
    none = {"top_ids": torch.zeros(39, 0, dtype=torch.int32), "top_logp": torch.zeros(39, 0, dtype=torch.float64)}
    save_file(load_file(likeliest) | none, tmp_path / "none.safetensors", SafetensorsFile(likeliest).metadata)
    refused(lambda: read_reference(tmp_path / "none.safetensors"), "is damaged")


def test_a_foreign_file_and_a_failed_run(tmp_path: Path) -> None:
    """Half of a reference must not lie under its name, and weights are not a reference."""
    save_file({"wte": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    assert about_of(tmp_path / "model.safetensors") is None
    refused(lambda: read_reference(tmp_path / "model.safetensors"), "is not a reference")
    writer = ReferenceWriter(tmp_path / "b.safetensors", ABOUT, IDS, Windows(16), 23)
    with pytest.raises(KeyboardInterrupt), writer.open():
        stop(writer)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert "cannot be written" in refusal(write, tmp_path / "none" / "a.safetensors", logits())


# The sides


@pytest.fixture(scope="module")
def model(base: Path) -> str:
    return str(base)


@pytest.fixture(scope="module")
def saved(model: str, text: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    keep = Keep(tmp_path_factory.mktemp("reference") / "ref.safetensors", activations=True)
    return f"trace:{save_reference(model, keep, Settings(on=text, tokens=200))}"


def test_a_side_equals_its_own_reference_and_another_does_not(model: str, saved: str, text: str, tmp_path: Path) -> None:
    """Rows that are off by one, rounded or renormalised would show as a difference; a blind comparison shows none at all."""
    same = compare(saved, model)
    assert same.ok
    assert same.distributions.kl_ab.max == same.distributions.kl_ba.max == same.distributions.js.max == 0
    assert len(same.activations.points) == 5 + 14 * 2
    assert same.bits_per == "bits per byte"
    alone = compare(model, f"{model}:bf16", on=text, tokens=200)
    later = compare(saved, f"{model}:bf16")
    assert later.distributions == alone.distributions  # every figure, with its interval
    assert later.activations == alone.activations
    assert later.distributions.kl_ab.mean.value > 0
    assert later.text == alone.text
    short = Keep(tmp_path / "short.safetensors", activations=True)  # than the context: its activations were refused
    assert compare(f"trace:{save_reference(model, short, Settings(on=text, tokens=20))}", model).ok
    both = compare(saved, saved)  # without any tokenizer
    assert both.distributions.a.score.bytes == alone.distributions.a.score.bytes
    assert "trace:" in both.table(80)


def test_saving_beside_a_comparison_is_saving_alone(
    model: str, text: str, saved: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The forward passes are shared: a tee that loses or repeats a window would write another file."""
    out, top = tmp_path / "beside.safetensors", tmp_path / "top.safetensors"
    arguments = ["compare", model, f"{model}:bf16", "--on", text, "--tokens", "200", "--save", str(out), "--save-activations"]
    assert main([*arguments, "--json", "-"]) == 0
    assert out.read_bytes() == Path(saved.removeprefix("trace:")).read_bytes()
    assert f"wrote {out}" in capsys.readouterr().err
    assert main(["compare", model, "--on", text, "--save", str(top), "--save-top", "5"]) == 0
    about = json.loads(top.read_bytes()[8:].split(b'"about":', 1)[1].split(b'","about_crc32')[0] + b'"')
    assert json.loads(about)["side"]["files"].keys() >= {"config.json", "model.safetensors"}


@pytest.mark.parametrize("form", ["t.safetensors", "t.npz", "t"])
def test_what_gpt2_trace_wrote_is_a_side(model: str, text: str, tmp_path: Path, form: str) -> None:
    """Each row of a trace is run alone: predictions across two rows, or of a row's first token, would be nonsense."""
    gpt2.trace(model, text=text, tokens=20, dtype="float64").save(tmp_path / form)
    found = compare(f"trace:{tmp_path / form}", model)
    assert found.distributions.tokens == 4 * 19
    assert found.distributions.kl_ab.max < 1e-10
    assert max(point.error for point in found.activations.points) < 1e-5
    other = compare(f"trace:{tmp_path / form}", f"{model}:bf16")
    assert other.distributions.kl_ab.max > 1e-6


def test_llama_cpps_base_file_is_a_side(model: str, tmp_path: Path) -> None:
    """Its 16 bits cost less than 1e-3 nats; the second half of a chunk read as the first would cost whole nats."""
    ids = torch.randint(200, (4, 32), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = gpt2.load(model)(ids)
    path = write_llama_base(tmp_path / "base.kld", ids.numpy(), logits.numpy())
    found = compare(f"trace:{path}", model)
    assert found.distributions.tokens == 4 * 15
    assert found.distributions.kl_ab.max < 1e-6
    assert found.distributions.same_top.value > 0.98
    assert "16 bits" in found.a.implementation


def test_a_reference_of_something_else_is_one_line(
    model: str, saved: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Compared with another text, tokenizer or a damaged file, every figure would be wrong, with nothing to see."""
    reference = Path(saved.removeprefix("trace:"))
    damaged = tmp_path / "damaged.safetensors"
    data = bytearray(reference.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    refused(lambda: compare(f"trace:{damaged}", model), "checksum")
    assert "leave --on out" in refusal(compare, saved, model, on="twelfth-night")
    assert "cannot be matched" in refusal(compare, saved, "shakespeare-mini")
    side, other = open_side(saved), gpt2.load_tokenizer("shakespeare-mini")
    assert "another tokenizer" in refusal(open_passage, [side, side], [None, other], Settings())
    save_reference(model, Keep(tmp_path / "b.safetensors"), Settings(on=text, tokens=100))
    assert "different texts" in refusal(compare, saved, f"trace:{tmp_path / 'b.safetensors'}")
    assert main(["compare", f"trace:{damaged}", model]) == 2
    assert main(["compare", f"trace:{model}/model.safetensors", model]) == 2
    assert main(["compare", "trace:none.safetensors", model]) == 2
    assert main(["compare", model, "--save", "ref.npz"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 4


def test_what_a_reference_says_of_its_side_is_not_believed(saved: str) -> None:
    """An activation without a dimension, or scores with three, were tracebacks; so was a side whose config is a list."""
    reference = Path(saved.removeprefix("trace:"))
    for name, shape in (("embed", ()), ("h.0.attn.scores", (1, 2, 5)), ("embed", (1, 5000, 8)), ("h.9999", (1, 5, 8))):
        held = {f"at.{name}": torch.zeros(shape)}
        path = forged(reference, lambda about, arrays, held=held: arrays.update(held))
        refused(partial(open_side, f"trace:{path}"), "no activation of its text")
    for claim in ({"config": [1]}, {"parameters": "many"}, {"name": None}):
        path = forged(reference, lambda about, arrays, claim=claim: about["side"].update(claim))
        refused(partial(open_side, f"trace:{path}"), "is not known here")


def test_kl_from_the_likeliest_tokens_is_bounded_from_both_sides(model: str, saved: str, text: str, tmp_path: Path) -> None:
    """A bound on the wrong side of what all logits give promises too much; the likeliest tokens of another place are no bound."""
    keep, coarse = Keep(tmp_path / "top.safetensors", top=20), f"{model}:bf16"
    top = f"trace:{save_reference(model, keep, Settings(on=text, tokens=200))}"
    for pair, whole in (((top, coarse), (saved, coarse)), ((coarse, top), (coarse, saved))):
        bounds, exact = compare(*pair).bounds, compare(*whole).distributions
        assert 0 < bounds.kl_low.value < exact.kl_ab.mean.value < bounds.kl_high.value
        assert bounds.assumed == (pair[0] == coarse)  # that what is left out is like the shown
        assert bounds.same_top == exact.same_top
        assert bounds.ratio.value == pytest.approx(exact.ratio.value, rel=1e-9)
    assert compare(top, model).bounds.kl_low.value < 1e-15


def test_two_recordings_of_which_one_holds_the_likeliest_tokens(model: str, saved: str, text: str, tmp_path: Path) -> None:
    """The checks of a server run our side with less context, which a recording cannot do: it was refused as another text."""
    keep = Keep(tmp_path / "top.safetensors", top=5)
    top = f"trace:{save_reference(str(write_checkpoint(tmp_path / 'other', seed=1)), keep, Settings(on=text, tokens=200))}"
    bounds = compare(saved, top).bounds
    assert bounds.kl_low.value == pytest.approx(compare(model, top).bounds.kl_low.value, rel=0.01)
    assert bounds.findings[-1].id in ("weights-nearly-equal", "other-model")  # which is said where nothing explains it


def test_a_side_without_a_tokenizer_is_saved_with_its_partners(model: str, text: str, tmp_path: Path) -> None:
    """Only its partner knows the size of a port's vocabulary: saving a port ended in a traceback."""
    port = tmp_path / "port_to_save.py"
    port.write_text("import gpt2\n\n\ndef build(folder):\n    return gpt2.load(folder)\n")
    keep = Keep(tmp_path / "port.safetensors")
    compare(str(port), model, on=text, tokens=100, save=keep)
    found = compare(f"trace:{keep.path}", model)
    assert found.distributions.kl_ab.max < 1e-12
    assert found.bits_per == "bits per byte"


# llama.cpp's file

CHUNKS = np.random.default_rng(0).integers(0, 61, (3, 8))
CHUNK_LOGITS = np.random.default_rng(1).normal(0, 6, (3, 8, 61))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_llama_base(tmp_path / "base.kld", CHUNKS, CHUNK_LOGITS)


def test_every_row_is_the_prediction_of_its_token(path: Path) -> None:
    """A row read for its neighbour's token, or with the padding of an odd vocabulary, gives a wrong model's figures."""
    base = read_llama_base(path)
    assert is_llama_base(path)
    assert base.ids.tolist() == CHUNKS.flatten().tolist()
    spans = list(base.windows.of(len(base.ids)))
    assert [(span.start, span.first, span.end) for span in spans] == [(0, 4, 7), (8, 12, 15), (16, 20, 23)]
    exact = torch.from_numpy(CHUNK_LOGITS[:, 4:7].reshape(-1, 61)).log_softmax(-1)
    read = base.logits(slice(None))
    near = exact > exact.amax(1, keepdim=True) - 16
    assert (read - exact)[near].abs().max() < 16 / 65535
    assert (read[~near] >= exact[~near]).all()  # raised to the lowest that fits


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data[:-10], "does not notice a full disk"),
        (lambda data: data + b"\0", "it is damaged"),
        (lambda data: data[:10], "is not a file of llama.cpp's"),
        (lambda data: data[:8] + struct.pack("<3i", 8, 0, 3) + data[20:], "states 3 chunks"),
        (lambda data: data[:20] + struct.pack("<i", 61) + data[24:], "outside its vocabulary"),
        (lambda data: data[:116] + struct.pack("<f", float("nan")) + data[120:], "row 0 holds no"),
    ],
)
def test_a_damaged_file_is_one_line(path: Path, change, says: str) -> None:
    """llama.cpp's writer ignores errors, so a file that is cut short is common; its rows would be another chunk's."""
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InputError, match=says):
        read_llama_base(path).logits(slice(None))
