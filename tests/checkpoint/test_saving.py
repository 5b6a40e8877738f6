"""Saved checkpoints: transformers opens them unedited, their bytes are reproducible, and a failed write leaves the old files."""

import dataclasses
import io
import json
import logging as python_logging
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support import random_models
from support.checks import PROC, all_same, content, refused, report_of
from support.hf_layouts import TINY, weights

from gpt2.checkpoint.containers.safetensors_file import SafetensorsFile
from gpt2.checkpoint.loading import load_tokenizer
from gpt2.checkpoint.saving import save, sha256, write_file, write_json
from gpt2.config import GPT2Config
from gpt2.data.bpe import chars_of
from gpt2.errors import InputError
from gpt2.model import GPT2

UNUSUAL = {"activation_function": "gelu", "scale_attn_by_inverse_layer_idx": True, "layer_norm_epsilon": 1e-3}
ODD = dataclasses.replace(TINY, n_inner=20, bos_token_id=None, **UNUSUAL)


def model_of(config: GPT2Config = TINY, seed: int = 0, dtype: torch.dtype = torch.float32) -> GPT2:
    return random_models.model_of(config, weights(config, seed, dtype))


@pytest.mark.parametrize("config", [TINY, ODD], ids=["usual", "odd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_transformers_opens_it_unedited(tmp_path: Path, config: GPT2Config, dtype: torch.dtype) -> None:
    """transformers calls a parameter under another name "newly initialized", warns, and gives wrong logits."""
    from transformers import GPT2LMHeadModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = model_of(config, dtype=dtype)
    save(model, None, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())  # llama.cpp's converter fails without n_ctx
    assert (raw["architectures"], raw["n_ctx"], f"torch.{raw['dtype']}") == (["GPT2LMHeadModel"], 16, str(dtype))
    log = io.StringIO()
    handler = python_logging.StreamHandler(log)
    logging.add_handler(handler)
    try:
        theirs, problems = GPT2LMHeadModel.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    finally:
        logging.remove_handler(handler)
    assert log.getvalue() == ""
    assert {key: value for key, value in problems.items() if value} == {}
    state = theirs.state_dict()
    assert all_same({name: state[f"transformer.{name}"] for name in model.state_dict()}, model.state_dict())
    assert theirs.lm_head.weight is theirs.transformer.wte.weight
    for field in dataclasses.fields(config):
        assert getattr(theirs.config, field.name) == getattr(config, field.name)
    told = theirs.generation_config.eos_token_id, theirs.generation_config.bos_token_id, raw["model_type"]
    assert told == (config.eos_token_id, config.bos_token_id, "gpt2")
    if dtype == torch.float64:
        ids = torch.arange(12).reshape(2, 6) * 5
        theirs.set_attn_implementation("eager")
        with torch.no_grad():
            torch.testing.assert_close(model(ids), theirs(ids).logits, rtol=1e-10, atol=1e-10)


def test_the_tokenizer_goes_along(tmp_path: Path) -> None:
    """Without a tokenizer a checkpoint's ids have no meaning; transformers warns beyond `model_max_length`."""
    tokenizer = chars_of("To be, or not to be\n")
    save(model_of(), tokenizer, tmp_path)
    assert load_tokenizer(str(tmp_path)).fingerprint == tokenizer.fingerprint
    assert load_tokenizer(f"{tmp_path}/model.safetensors").fingerprint == tokenizer.fingerprint
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["model_max_length"] == 16
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_tensors_are_written_aligned_and_in_order(tmp_path: Path) -> None:
    """A float32 tensor after an odd number of halves could not be mapped; a view must not be written in its memory order."""
    model = model_of(dataclasses.replace(TINY, vocab_size=61, n_embd=9), dtype=torch.float16)
    model.ln_f.float()
    truth = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for block in model.h:
        block.mlp.c_fc.weight = torch.nn.Parameter(block.mlp.c_fc.weight.detach().T.contiguous().T)
    save(model, None, tmp_path)
    file = SafetensorsFile(tmp_path / "model.safetensors")
    assert all(entry.start % entry.dtype.itemsize == 0 for entry in file.entries.values())
    assert all_same({name: file.read(f"transformer.{name}") for name in truth}, truth)


HARMS: dict[str, Callable[[GPT2], object]] = {
    "meta": lambda model: model.to("meta"),
    "wrapped": lambda model: setattr(model.h[0].attn, "c_attn", torch.nn.Sequential(model.h[0].attn.c_attn)),
    "extra": lambda model: setattr(model, "lora_a", torch.nn.Parameter(torch.zeros(1))),
    "shape": lambda model: setattr(model.wpe, "weight", torch.nn.Parameter(torch.zeros(17, 12))),
    "dtype": lambda model: setattr(model.wte, "weight", torch.nn.Parameter(torch.zeros(61, 12).char(), requires_grad=False)),
}


@pytest.mark.parametrize("harm", HARMS)
def test_what_is_not_a_plain_model_is_refused_before_anything_is_written(tmp_path: Path, harm: str) -> None:
    """Adapters that are not merged, or a wrapped module, would write keys that no other program knows."""
    model = model_of()
    HARMS[harm](model)
    refused(lambda: save(model, None, tmp_path / "new"), "not a plain GPT-2's; unwrap it, or merge", error=InputError)
    refused(lambda: save(model.h[0], None, tmp_path / "new"), "a Block is no GPT2 of gpt2.load", error=InputError)
    refused(lambda: save(model_of(), model, tmp_path / "new"), "cannot save a GPT2 as a tokenizer", error=InputError)
    refused(lambda: save(model_of(), None, ""), "a path has an empty name", error=InputError)  # was written into this folder
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("step", "failing"), [*product(("fsync", "replace"), range(3)), ("tokenizer", 0)])
def test_a_failed_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch, step: str, failing: int) -> None:
    """The n-th fsync or rename fails, or the tokenizer cannot be written: nothing new may lie beside old files."""
    save(model_of(seed=1), None, tmp_path)
    tokenizer = chars_of("ab") if step == "tokenizer" else None
    where, name = (os, step) if tokenizer is None else (tokenizer, "save")
    before, calls, real = content(tmp_path), [], getattr(where, name)

    def broken(*arguments: Any, **settings: Any) -> None:
        calls.append(arguments)
        if len(calls) > failing:
            raise OSError(28, "No space left on device")
        real(*arguments, **settings)

    monkeypatch.setattr(where, name, broken)
    says = "No space left on device); choose another folder, or make room"
    refused(lambda: save(model_of(ODD, seed=2), tokenizer, tmp_path), says, str(tmp_path), error=InputError)
    monkeypatch.undo()
    assert content(tmp_path) == before, "the old files, and nothing beside them"


def test_a_place_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    """mkdir raises FileExistsError or NotADirectoryError."""
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        refused(lambda place=place: save(model_of(), None, place), "cannot write the checkpoint", error=InputError)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_reader_sees_old_or_new_and_never_half(tmp_path: Path) -> None:
    """A file written in place shows a reader its first half; here the old file stays open and complete."""
    path = tmp_path / "x"
    write_file(path, b"old")
    with open(path, "rb") as reader:
        seen = []

        def pieces() -> Any:
            for piece in (b"ne", memoryview(b"w")):
                seen.append(path.read_bytes())
                yield piece

        write_file(path, pieces())
        assert seen == [b"old", b"old"]
        assert reader.read() == b"old"
    assert path.read_bytes() == b"new"
    assert sha256(path) == "11507a0e2f5e69d5dfa40a62a1bd7b6ee57e6bcd85c67c9b8431b36fff21c437"
    write_json(path, {"a": [1]})
    assert path.read_bytes() == b'{\n  "a": [\n    1\n  ]\n}\n'
    assert os.listdir(tmp_path) == ["x"]


PEAK = """
import json, re, sys, torch
from pathlib import Path
from gpt2.checkpoint.saving import save
from gpt2.config import GPT2Config
from gpt2.model import GPT2

def memory(field):  # in bytes: VmRSS, or VmHWM, the peak
    return int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

save(GPT2(GPT2Config(5, 4, 4, 1, 1)), None, sys.argv[1])
model = GPT2(GPT2Config(10_000, 512, 1024, 3, 16), initialise=False)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.fill_(1.5)
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
save(model, None, sys.argv[1])
print(json.dumps([memory("VmHWM") - before, sum(parameter.nbytes for parameter in model.parameters())]))
"""


@PROC
def test_saving_makes_no_second_copy(tmp_path: Path) -> None:
    """The library's `save` builds the file in memory first: 6 GB more for gpt2-xl at the end of a run."""
    peak, size = report_of(PEAK, tmp_path)
    print(f"peak {peak / size:.4f} of {size:,} bytes")
    assert size > 150e6
    assert peak < 0.05 * size
    assert (tmp_path / "model.safetensors").stat().st_size > size
