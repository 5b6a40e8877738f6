"""Measurements at the start of a run, and the settings chosen from them."""

import itertools
import json
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest
import torch
from support.training import outcome, stored
from torch.utils.flop_counter import FlopCounterMode

from gpt2.config import GPT2Config
from gpt2.model import GPT2, eager_attention
from gpt2.train import cost
from gpt2.train.bigram import BigramConfig
from gpt2.train.loop import Logged, Started, train
from gpt2.train.loss import Scored
from gpt2.train.parallel import ALONE
from gpt2.train.recipe import Lora, Recipe

CPU = torch.device("cpu")


def sized(width: int, n_layer: int = 2) -> GPT2:
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2(GPT2Config(65, 32, width, n_layer, 2, **rates, bos_token_id=0, eos_token_id=0))


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
        Scored(model)(ids, ids).backward()
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


def test_a_rate_is_that_of_the_best_run(monkeypatch):
    """A clock that stops before the work ends would make every run look slow."""
    now, real, times = [0.0], torch.mm, itertools.cycle([0.03, 0.01, 0.02])

    def mm(*args, **settings):
        now[0] += next(times)
        return real(*args, **settings)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch, "mm", mm)
    rate = cost.gemm_rate(sized(128).config, Recipe(batch_size=8, context=32), CPU, "float32")
    assert rate == pytest.approx(2 * 256 * 128 * 512 / 0.01)


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
        "import json, sys; from gpt2.train.recipe import build; from gpt2.train.loop import train;"
        "train(build(json.loads(sys.argv[1]), 'recipe'), sys.argv[2])"
    )

    def run(steps_recipe, folder):
        subprocess.run([sys.executable, "-c", script, json.dumps(asdict(steps_recipe)), str(folder)], check=True)

    run(compiled, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "step-6")  # as if killed before its last checkpoint
    run(compiled, tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
