"""A run with adapters trains and stores the adapters alone, and resumes like any other run."""

import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from support.commands import refusal
from support.training import flip, metrics, stop_at

import gpt2
from gpt2.checkpoint.files import is_adapter
from gpt2.errors import InputError
from gpt2.train.loop import train
from gpt2.train.recipe import Lora


@pytest.fixture(scope="module")
def init(whole):
    """The base model of the adapters."""
    return str(whole / "best")


@pytest.fixture(scope="module")
def lora(recipe):
    return replace(recipe, name="lora", lora=Lora(r=2, alpha=4.0, dropout=0.1))


@pytest.fixture(scope="module")
def run(lora, init, tmp_path_factory):
    """The undisturbed run; read only."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    events = []
    assert train(lora, folder, init=init, report=events.append).stopped == "finished"
    assert "512 parameters trained beside" in events[0].notes[-1]
    return folder


def test_only_the_adapters_are_trained_and_they_learn(run, init):
    before, after = gpt2.load(init).state_dict(), gpt2.load(str(run / "best")).state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"h.0.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
    losses = [row["val_loss"] for row in metrics(run) if "val_loss" in row]
    assert min(losses[1:]) < losses[0]


def test_a_checkpoint_holds_the_adapters_alone(run, init):
    """The frozen weights are stored once, not in every checkpoint, and equal the initial ones bit for bit."""
    assert [path.name for path in run.rglob("model.safetensors")].count("model.safetensors") == 2  # base/ and best/
    assert is_adapter(run / "step-12")
    base = gpt2.load(str(run / "base")).state_dict()
    assert all(torch.equal(tensor, base[name]) for name, tensor in gpt2.load(init).state_dict().items())
    moments = load_file(run / "step-12" / "optimizer.safetensors")
    means = [tensor.numel() for name, tensor in moments.items() if name.endswith("exp_avg")]
    assert sum(means) == 512  # r (in + out) of each projection


def test_best_is_the_merged_model_with_its_adapter_beside(run, init, tmp_path):
    """If a folder holds a model and an adapter, transformers with PEFT loads the adapter: so it lies one level deeper."""
    best = gpt2.load(str(run / "best")).state_dict()
    assert all(torch.equal(tensor, best[name]) for name, tensor in gpt2.load(str(run / "best" / "adapter")).state_dict().items())
    assert not (run / "best" / "adapter_config.json").exists()
    said = json.loads((run / "best" / "adapter" / "adapter_config.json").read_text())
    assert (said["base_model_name_or_path"], said["r"], said["lora_alpha"]) == (os.path.abspath(init), 2, 4.0)
    assert gpt2.load_tokenizer(str(run / "step-12")).n_vocab == gpt2.load_tokenizer(init).n_vocab
    listed = json.loads((run / "best" / "manifest.json").read_text())
    assert "adapter/adapter_model.safetensors" in listed


def test_adapters_never_go_on_beside_a_damaged_base(lora, init, tmp_path):
    train(lora, tmp_path / "run", init=init, report=stop_at(4))
    flip(tmp_path / "run" / "base" / "model.safetensors")
    with pytest.raises(InputError, match=r"base: model\.safetensors does not have the sha256.*--fresh"):
        train(lora, tmp_path / "run", init=init)
    assert train(lora, tmp_path / "run", init=init, fresh=True).stopped == "finished"


def test_a_target_that_is_none_is_refused_before_a_file_is_written(lora, init, tmp_path):
    """The other refusals are those of the recipe and of gpt2/lora.py."""
    misspelt = replace(lora, lora=replace(lora.lora, targets=("c_atn",)))
    assert "no projection 'c_atn' (did you mean c_attn?)" in refusal(train, misspelt, tmp_path / "run", init=init)
    assert not (tmp_path / "run").exists()
