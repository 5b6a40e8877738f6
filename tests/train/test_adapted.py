"""A run with adapters trains and stores the adapters alone, and resumes like any other run."""

import json
import os
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import load_file
from support.commands import refusal
from support.training import flip, metrics, outcome, stop_at

import gpt2
from gpt2.checkpoint.files import is_adapter
from gpt2.errors import InputError
from gpt2.train.loop import train
from gpt2.train.recipe import Lora, build, read


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
    """If a folder holds a model and an adapter, transformers with PEFT loads the adapter and looks for its base: so it lies
    one level deeper."""
    best = gpt2.load(str(run / "best")).state_dict()
    assert all(torch.equal(tensor, best[name]) for name, tensor in gpt2.load(str(run / "best" / "adapter")).state_dict().items())
    assert not (run / "best" / "adapter_config.json").exists()
    said = json.loads((run / "best" / "adapter" / "adapter_config.json").read_text())
    assert (said["base_model_name_or_path"], said["r"], said["lora_alpha"]) == (os.path.abspath(init), 2, 4.0)
    assert gpt2.load_tokenizer(str(run / "step-12")).n_vocab == gpt2.load_tokenizer(init).n_vocab
    listed = json.loads((run / "best" / "manifest.json").read_text())
    assert "adapter/adapter_model.safetensors" in listed


def test_compare_shows_the_rank_of_each_change(run, init, text):
    """The rank of each change shows LoRA: 2 of 16 where there is an adapter, 0 elsewhere."""
    report = gpt2.compare(init, str(run / "best"), on=str(text), tokens=64)
    ranks = {tensor.name: tensor.rank for tensor in report.weights.tensors if tensor.rank is not None}
    assert {name for name, rank in ranks.items() if rank == 2} == {
        f"h.0.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    assert {rank for name, rank in ranks.items() if not name.startswith("h.")} == {0}
    assert "2 of 16" in report.table()


# Resuming


@pytest.mark.parametrize("steps", [(1,), (5, 6, 11), (4, 8)])
def test_a_stopped_run_ends_with_the_undisturbed_runs_bytes(lora, init, run, tmp_path, steps):
    """Adapters or dropout masks that are drawn again after a resume change the last bit of a weight."""
    for step in steps:
        assert train(lora, tmp_path / "run", init=init, report=stop_at(step)).step == step
    assert train(lora, tmp_path / "run", init=init).stopped == "finished"
    assert outcome(tmp_path / "run") == outcome(run)


def test_adapters_never_go_on_beside_a_damaged_base(lora, init, tmp_path):
    train(lora, tmp_path / "run", init=init, report=stop_at(4))
    flip(tmp_path / "run" / "base" / "model.safetensors")
    with pytest.raises(InputError, match=r"base: model\.safetensors does not have the sha256.*--fresh"):
        train(lora, tmp_path / "run", init=init)
    assert train(lora, tmp_path / "run", init=init, fresh=True).stopped == "finished"


# Refused before a file is written


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"targets": ("c_atn",)}, "no projection 'c_atn' (did you mean c_attn?)"),
        ({"targets": ()}, "the list is empty"),
        ({"r": -1}, "lora.r is -1"),
        ({"alpha": 0.0}, "lora.alpha is 0.0"),
        ({"dropout": 1.0}, "lora.dropout is 1.0"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(lora, init, tmp_path, settings, says):
    assert says in refusal(lambda: train(replace(lora, lora=replace(lora.lora, **settings)), tmp_path / "run", init=init))
    assert not (tmp_path / "run").exists()


def test_adapters_need_a_model(lora, tmp_path):
    """Adapters beside random frozen weights learn next to nothing."""
    assert "lora: starts from a model; name it, as in --init gpt2 or --init shakespeare-mini" in refusal(
        train, lora, tmp_path / "run"
    )
    assert not (tmp_path / "run").exists()


def test_the_recipe_and_what_may_be_set_of_it():
    recipe = read("finetune-lora")
    assert (recipe.lora.r, recipe.lora.alpha, recipe.lora.targets) == (8, 16.0, ("c_attn", "c_proj", "c_fc"))
    assert read("finetune-lora", ["lora.r=4", "lora.targets=c_attn, mlp.c_proj"]).lora.targets == ("c_attn", "mlp.c_proj")
    assert read("finetune-lora", ['lora.targets=["c_fc"]']).lora.targets == ("c_fc",)
    for override, says in (("lora.rank=4", "unknown key 'lora.rank'"), ("lora.targets=3", "lora.targets is a list of names")):
        assert says in refusal(read, "finetune-lora", [override])
    assert build(json.loads(json.dumps(asdict(recipe))), "its own JSON") == recipe
