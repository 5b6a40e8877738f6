"""What a run costs: the memory estimated before it, the machine's speed, and the settings chosen from these."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch
from support import forks
from support.training import outcome, stored
from torch.utils.flop_counter import FlopCounterMode

from gpt2.config import GPT2Config
from gpt2.model import GPT2, eager_attention
from gpt2.optim import adamw
from gpt2.train import cost, models
from gpt2.train.bigram import BigramConfig
from gpt2.train.loop import Logged, Started, train
from gpt2.train.loss import WithLoss
from gpt2.train.parallel import ALONE
from gpt2.train.recipe import Lora, Recipe

CPU = torch.device("cpu")


def sized(width: int, n_layer: int = 2, context: int = 32, dropout: float = 0.0, attn_dropout: float = 0.0) -> GPT2:
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": attn_dropout}
    return GPT2(GPT2Config(65, context, width, n_layer, 4, **rates, bos_token_id=0, eos_token_id=0))


def kept(model, ids, precision="float32") -> int:
    """Bytes of the distinct storages that one step keeps for the backward pass, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()} | {ids.untyped_storage().data_ptr()}
    sizes, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # else its address could be reused
        return tensor

    bf16 = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), bf16:
        WithLoss(model)(ids, ids)
    return sum(sizes.values())


@pytest.mark.parametrize(("dropout", "attn_dropout", "width"), [(0.0, 0.0, 96), (0.1, 0.0, 64), (0.1, 0.1, 96)])
def test_activations_are_what_autograd_keeps(dropout, attn_dropout, width):
    """An estimate that is too low by half makes a long run swap."""
    context = 128
    recipe = Recipe(batch_size=8, grad_accum=2, context=context, dropout=dropout, attn_dropout=attn_dropout)
    model = sized(width, 4, context, dropout, attn_dropout)
    measured = kept(model.train(), torch.zeros(4, context, dtype=torch.long))
    logits = 4 * context * 65 * 4  # temporary; not kept for the backward pass
    assert cost.passing(model.config, recipe) - logits == pytest.approx(measured, rel=0.12)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_in_bf16_and_computed_again(checkpointing):
    """With bfloat16 and checkpointing gpt2-medium fits into 8 GB; an estimate without them would refuse it."""
    recipe = Recipe(batch_size=4, context=128, dropout=0.0, precision="bf16", checkpointing=checkpointing)
    model = sized(64, 8, 128)
    models.prepare(model, recipe)
    casts = sum(p.nbytes // 2 for p in model.parameters() if p.ndim > 1)
    measured = kept(model.train(), torch.zeros(4, 128, dtype=torch.long), "bf16")
    logits = 4 * 128 * 65 * (4 + 2) + 65 * 64 * 2
    if checkpointing:  # inputs of every block and of the last norm; a block's own activations are counted later
        assert measured == pytest.approx((8 + 1) * 4 * 128 * 64 * 4, rel=0.02)
    else:
        assert cost.passing(recipe=recipe, config=model.config) - logits + casts == pytest.approx(measured, rel=0.15)


def test_computed_again_is_computed_the_same(recipe, tmp_path):
    """Recomputing with other dropout masks would give gradients of another function."""
    steps = replace(recipe, steps=4)
    train(steps, tmp_path / "kept")
    train(replace(steps, checkpointing=True), tmp_path / "again")
    name = "step-4/model.safetensors"
    assert stored(tmp_path / "kept")[name] == stored(tmp_path / "again")[name]
    train(replace(steps, precision="bf16"), tmp_path / "bf16")
    assert stored(tmp_path / "kept")[name] != stored(tmp_path / "bf16")[name]


def test_what_stands_is_weights_gradients_and_moments():
    model = sized(32, context=16)
    optimizer = adamw(model, Recipe().optim)
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    optimizer.step()
    tensors = [t for p in model.parameters() for t in (p, p.grad, *optimizer.state[p].values()) if t.numel() > 1]
    assert cost.lasting(model) == sum(t.nbytes for t in tensors)
    model.wte.weight.requires_grad_(False)  # as a run with adapters freezes it
    assert cost.lasting(model) == sum(t.nbytes for t in tensors) - 3 * model.wte.weight.nbytes


@pytest.fixture
def rates(monkeypatch):
    """Set the measured speeds of the machine, in operations per second."""
    given = {"float32": 1e9, "bf16": 8e9}
    monkeypatch.setattr(cost, "gemm_rate", lambda config, recipe, device, precision: given[precision])
    return given


def test_operations_are_what_torch_counts():
    """Without the backward pass, or with it counted once, the utilisation is wrong by a factor of two and looks plausible."""
    model, ids = sized(64, 3).use_attention(eager_attention), torch.zeros(2, 32, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        WithLoss(model)(ids, ids).backward()
    whole_square = 3 * 3 * 2 * (32 - 1) * 64  # eager attention computes the full square: more operations per token
    assert cost.operations(model.config, 32) + whole_square == pytest.approx(counter.get_total_flops() / 64, rel=1e-6)


@pytest.mark.parametrize(("low", "chosen"), [(8e9, "bf16"), (1.2e9, "float32"), (0.5e9, "float32")])
def test_precision_is_chosen_by_measurement_and_says_why(rates, low, chosen):
    """bfloat16 is half as fast on one machine and twelve times as fast on another: it must be measured."""
    rates["bf16"] = low
    recipe, why = cost.decide_precision(Recipe(precision="auto"), sized(128).config, ALONE)
    assert recipe.precision == chosen
    assert why.startswith(f"precision {chosen}")
    assert f"{low / 1e9:,.0f}" in why
    assert cost.decide_precision(Recipe(precision="bf16"), sized(128).config, ALONE) == (Recipe(precision="bf16"), "")


def test_where_products_say_nothing_nothing_is_said(rates):
    assert cost.decide_precision(Recipe(precision="auto"), sized(64).config, ALONE)[0].precision == "float32"
    assert cost.tokens_at_peak(Recipe(), sized(64).config, ALONE) == 0
    assert cost.tokens_at_peak(Recipe(lora=Lora(r=4)), sized(128).config, ALONE) == 0
    assert cost.tokens_at_peak(Recipe(), BigramConfig(65), ALONE) == 0
    assert cost.tokens_at_peak(Recipe(), sized(128).config, ALONE) == 1e9 / cost.operations(sized(128).config, 256)


def test_a_run_keeps_the_precision_it_began_with(recipe, tmp_path, rates, monkeypatch):
    """A resumed run must not measure the precision again: another precision would change the result."""
    monkeypatch.setattr(cost, "MIN_WIDTH", 1)
    events, auto = [], replace(recipe, precision="auto", eval_every=12, steps=8)
    train(auto, tmp_path / "run", report=events.append)
    begun = next(event for event in events if isinstance(event, Started))
    assert begun.recipe.precision == "bf16"
    assert any("GFLOP/s" in note for note in begun.notes)
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["precision"] == "bf16"
    rates["bf16"] = 1e6
    train(auto, tmp_path / "run", report=events.append)  # it resumes, and is not refused as another recipe
    assert [e.recipe.precision for e in events if isinstance(e, Started)] == ["bf16", "bf16"]
    train(replace(auto, precision="bf16"), tmp_path / "asked")
    assert stored(tmp_path / "run") == stored(tmp_path / "asked")


def test_the_share_of_the_peak_is_logged_where_there_is_one(recipe, tmp_path, rates, monkeypatch):
    events = []
    train(replace(recipe, steps=2), tmp_path / "narrow", report=events.append)
    assert all(event.mfu == 0 for event in events if isinstance(event, Logged))
    assert "mfu" not in (tmp_path / "narrow" / "metrics.jsonl").read_text()
    monkeypatch.setattr(cost, "MIN_WIDTH", 1)
    events.clear()
    train(replace(recipe, steps=2), tmp_path / "run", report=events.append)
    logged = next(event for event in events if isinstance(event, Logged))
    width = next(event for event in events if isinstance(event, Started)).config
    assert logged.mfu == pytest.approx(logged.tokens_per_second * cost.operations(width, 16) / 1e9)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert next(line["mfu"] for line in map(json.loads, lines) if "loss" in line) == logged.mfu


@pytest.mark.slow
def test_a_compiled_run_goes_on_to_the_same_bits(recipe, tmp_path):
    """A resume compiles again in another process: the result must have the same bits."""
    compiled = replace(recipe, compile=True, steps=6, eval_every=6, save_every=3)
    script = (
        "import json, sys; import torch._inductor.config as inductor; from gpt2.train.loop import train;"
        "from gpt2.train.recipe import build; inductor.compile_threads = inductor.cpp.simdlen = 1;"  # less C++: no SIMD
        "inductor.cpp.vec_isa_ok = True; train(build(json.loads(sys.argv[1]), 'recipe'), sys.argv[2])"
    )
    words = ("-c", script, json.dumps(asdict(compiled)))
    forks.run(*words, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "step-6")  # as if killed before its last checkpoint
    environ = {**os.environ, "PYTHONHASHSEED": "1"}  # the fork's is that of the tests, at random
    subprocess.run([sys.executable, *words, tmp_path / "run"], check=True, env=environ)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
