"""The trace as llm.c's debug state: read back by a reader of its own, as ports in other languages read it."""

from pathlib import Path

import numpy as np
import torch
from support.commands import refusal
from support.llmc_layouts import read_state
from support.random_models import random_model

import gpt2
from gpt2.cli.main import main
from gpt2.config import GPT2Config

IDS = np.random.default_rng(0).integers(0, 300, (2, 6))


def test_it_holds_what_was_traced(model: str, tmp_path: Path) -> None:
    """Logits of a padded vocabulary, a gradient not turned: the port that reads them is called wrong, and is right."""
    traced = gpt2.trace(model, ids=IDS[:, :-1], targets=IDS[:, 1:], gradients=True, dtype="float64")
    state = read_state(traced.save(tmp_path / "debug_state.bin"), traced.config)
    assert (state["ids"].tolist(), state["targets"].tolist()) == (IDS[:, :-1].tolist(), IDS[:, 1:].tolist())
    np.testing.assert_array_equal(state["logits"], traced.arrays["logits"].float())
    assert state["loss"] == traced.arrays["loss"].float()
    for name, gradient in state["gradients"].items():
        np.testing.assert_array_equal(gradient, traced.arrays[f"grad.{name}"].float(), err_msg=name)
    content = bytearray((tmp_path / "debug_state.bin").read_bytes())
    content[-1] ^= 1
    (tmp_path / "debug_state.bin").write_bytes(content)
    changed = read_state(tmp_path / "debug_state.bin", traced.config)["gradients"]
    differ = [name for name, gradient in changed.items() if not np.array_equal(gradient, traced.arrays[f"grad.{name}"].float())]
    assert differ == ["ln_f.bias"]


def test_the_command_needs_no_flag_for_it(model: str, tmp_path: Path) -> None:
    """It always holds gradients; of ids from a file the last of a row can only be a next id."""
    (tmp_path / "text.txt").write_text("When shall we three meet again In thunder, lightning, or in rain?\n" * 3)
    assert main(["trace", model, "--out", str(tmp_path / "a.bin"), "--text", str(tmp_path / "text.txt"), "--tokens", "7"]) == 0
    config = gpt2.load(model).config
    state = read_state(tmp_path / "a.bin", config)
    assert state["ids"].shape == (4, 7)
    assert state["ids"].flatten()[1:].tolist() == state["targets"].flatten()[:-1].tolist()
    np.save(tmp_path / "ids.npy", IDS)
    assert main(["trace", model, "--out", str(tmp_path / "b.bin"), "--ids", str(tmp_path / "ids.npy")]) == 0
    state = read_state(tmp_path / "b.bin", config)
    assert (state["ids"].tolist(), state["targets"].tolist()) == (IDS[:, :-1].tolist(), IDS[:, 1:].tolist())


def test_what_it_cannot_hold_is_refused(model: str, tmp_path: Path) -> None:
    """A target of -100 is an index in C."""
    out = tmp_path / "a.bin"
    assert "compute them too" in refusal(gpt2.trace(model, ids=IDS).save, out)
    assert "needs the next id of each token" in refusal(gpt2.trace(model, ids=IDS, gradients=True).save, out)
    whole = {"ids": IDS[:, :-1], "targets": IDS[:, 1:], "gradients": True}
    assert "in float16" in refusal(gpt2.trace(model, **whole, dtype="float16").save, out)
    odd = random_model(GPT2Config(300, 8, 8, 1, 2, n_inner=9), dtype=torch.float32)
    folder = gpt2.save(odd, None, tmp_path / "odd")
    assert "a feed-forward of 9" in refusal(gpt2.trace(str(folder), **whole).save, out)
    assert not out.exists()
    assert "give one for each id" in refusal(gpt2.trace, model, ids=IDS, targets=IDS[:, 1:])
    assert "give ids too" in refusal(gpt2.trace, model, targets=IDS)
    assert "the id 300" in refusal(gpt2.trace, model, ids=IDS, targets=IDS + 300 - IDS[0, 0])
