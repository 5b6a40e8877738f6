"""What rounding explains: it covers every right order of summing, kernel and thread count, and refuses imprecise models."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.imprecise import IMPRECISE, Imprecise, tf32
from support.random_models import random_model, write_checkpoint
from support.summation import ORDERS, summing
from torch import Tensor, nn

from gpt2.checkpoint.checkpoint import open_path
from gpt2.config import GPT2Config
from gpt2.measure.metrics import relative_error
from gpt2.measure.rounding import FORWARD_RATIO, noisy_results, root_mean_square, rounded_weights, rounding_noise
from gpt2.measure.tracing import trace
from gpt2.model import GPT2
from gpt2.parity import reference, run
from gpt2.parity.report import ROUNDING, Check, Point, Report
from gpt2.parity.run import verify

TIGHT = 3.0  # times the smallest error of a right order: a figure far above all of them would let bugs through


def model_of(number: int) -> tuple[GPT2, Tensor]:
    """A model of each kind, in float64, and ids."""
    width, heads = ((16, 2), (24, 3), (40, 5), (64, 4), (96, 8), (128, 2))[number % 6]
    activation = ("gelu_new", "gelu", "relu", "silu")[number % 4]
    config = GPT2Config(60 + number, 40, width, 1 + number % 3, heads, activation_function=activation)
    model = random_model(config, (0.02, 0.1, 0.3)[number % 3], seed=number)
    return model, torch.randint(config.vocab_size, (6, 32), generator=torch.Generator().manual_seed(number))


def explained_by(model: GPT2, ids: Tensor) -> dict[str, float]:
    """What rounding to float32 explains: the root mean square of a few noisy runs."""
    exact, weights = trace(model, ids), rounded_weights(model, torch.float32)
    runs = []
    for seed in range(4):
        with rounding_noise(torch.float32, seed):
            runs.append(trace(weights, ids))
    return {name: root_mean_square([relative_error(run[name], exact[name]) for run in runs]) for name in exact}


def errors(model: GPT2, ids: Tensor, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """The errors of a run in ``dtype``, by this process's kernels."""
    exact = trace(model, ids)
    return {name: relative_error(value, exact[name]) for name, value in trace(model.to(dtype), ids).items()}


@pytest.mark.parametrize("numbers", [range(0, 30, 6), pytest.param(range(12), marks=pytest.mark.slow)], ids=["five", "each kind"])
def test_it_covers_every_order_of_summing_and_is_not_far_above(numbers: range) -> None:
    """With a bound from one machine's kernels, right models of another machine were called different."""
    for number in numbers:
        model, ids = model_of(number)
        exact, explained = trace(model, ids), explained_by(model, ids)
        smallest = dict.fromkeys(exact, float("inf"))
        model.float()
        for name, order in ORDERS.items():
            with summing(order):
                found = {point: relative_error(value, exact[point]) for point, value in trace(model, ids).items()}
            assert all(error <= FORWARD_RATIO * explained[point] for point, error in found.items()), (number, name)
            smallest = {point: min(error, smallest[point]) for point, error in found.items()}
        assert explained["logits"] <= TIGHT * smallest["logits"], number


@pytest.mark.kernels
def test_it_covers_this_machine_s_kernels() -> None:
    """The rule's figure is the same in each process; the kernels' errors are not. `.ci/run` tries other kernels and threads."""
    for number in range(0, 30, 5):  # one of each width
        explained = explained_by(*model_of(number))
        late = {name: error / explained[name] for name, error in errors(*model_of(number)).items() if error > 0}
        assert max(late.values()) <= FORWARD_RATIO, (number, late)


@pytest.mark.kernels
def test_a_sum_over_the_whole_vocabulary_is_covered_in_every_order() -> None:
    """The account ended at 4,096 terms, but where n_embd is 2, kernels add all 50,257 in turn: a right model was different."""
    generator, widths = torch.Generator().manual_seed(0), (1, 2, 4, 8, 64)
    a, wide = (torch.randn(shape, generator=generator) for shape in ((64, 50_257), (50_257, sum(widths))))
    with summing(ORDERS["one after another"]):  # a column at a time gives the same
        every = (a @ wide).split(widths, 1)
    for b, in_turn in zip((part.contiguous() for part in wide.split(widths, 1)), every, strict=True):
        exact = a.double() @ b.double()
        explained = relative_error(
            noisy_results(lambda a, b: [a @ b], [a.double(), b.double()], torch.float32, None, 0)[0], exact
        )
        assert relative_error(a @ b, exact) <= FORWARD_RATIO * explained
        assert relative_error(in_turn, exact) <= FORWARD_RATIO * explained <= 2 * FORWARD_RATIO * relative_error(in_turn, exact)


# In units of what rounding explains: our error, transformers', and how far the two are apart.
MACHINE = {
    "usual": ((1.9, 1.9, 0.1), "equal", ""),
    "the machine's": ((3.9, 3.8, 0.2), "equal", "both are × 3.90 what rounding explains"),
    "the machine's, and large": ((9.0, 9.1, 0.2), "imprecise", "nothing can be said of ours"),
    "ours alone": ((3.9, 0.9, 3.8), "mismatch", "DIFFERENT"),
    "ours alone, far": ((900.0, 0.9, 900.0), "mismatch", "DIFFERENT"),
    "both, not alike": ((3.9, 4.1, 2.5), "imprecise", "nothing can be said of ours"),
    "transformers' alone": ((0.9, 9.0, 9.0), "imprecise", "nothing can be said of ours"),
}


@pytest.mark.parametrize("case", MACHINE)
def test_errors_that_both_models_share_are_the_machine_s(case: str) -> None:
    """Such a model was called different, or the machine was blamed for an error of three times what rounding explains."""
    (ours, theirs, apart), verdict, said = MACHINE[case]
    point = Point("h.0.mlp.c_fc", ours * 1e-7, FORWARD_RATIO * 1e-7, 1e-7, theirs * 1e-7, apart * 1e-7)
    made = next(refused(each) for each in IMPRECISE if each.name in QUICK)  # which another test runs
    report = replace(made, checks=(Check("rounding", ROUNDING, "1 point", "float32", (point,)),), stopped="")
    assert (report.verdict, report.ok) == (verdict, verdict == "equal")
    assert said in " ".join(report.table(100).split())
    assert ("This machine" in report.table(100)) == (case == "the machine's")


@pytest.mark.kernels
def test_the_figure_does_not_depend_on_the_machine() -> None:
    """Two noisy runs with other seeds agree, and a run without noise has none."""
    model, ids = model_of(3)
    exact = trace(model, ids)["logits"]
    sizes = []
    for seed in range(4):
        with rounding_noise(torch.float32, seed):
            sizes.append(relative_error(trace(model, ids)["logits"], exact))
    assert max(sizes) < 1.25 * min(sizes)
    assert torch.equal(trace(model, ids)["logits"], exact)


@cache
def refused(each: Imprecise) -> Report:
    """``verify`` of the embedded model, made imprecise."""

    def build(path: Path, dtype: torch.dtype | None) -> GPT2:
        model = open_path(path).load(dtype)
        each.apply(model)
        return model

    with pytest.MonkeyPatch.context() as patch:
        if each.training:  # far beyond the bound: few random errors are enough
            patch.setattr(run, "MORE_DRAWS", 1)
        return verify("shakespeare-mini", dtype=each.dtype, build=build, quick=not each.training)


QUICK = tuple(f"inputs of all products of {count} bits" for count in (18, 21))  # on both sides of the bound
CASES = [
    pytest.param(each, id=f"{each.name}, {each.dtype}", marks=() if each.name in QUICK else pytest.mark.slow)
    for each in IMPRECISE
]


@pytest.mark.kernels
@pytest.mark.parametrize("each", CASES)
def test_an_imprecise_model_is_refused_from_the_stated_size_on(each: Imprecise) -> None:
    """A rule that transformers' own luck decides lets these through. Three, each just below the bound, are accepted."""
    report = refused(each)
    assert report.ok is not each.refused
    first = report.first_divergence
    assert first is None or first.explained is not None, "it is right in float64"


def test_a_process_that_computes_imprecisely_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With products in bfloat16, transformers erred as much as we did, and verify said EQUAL at 10,000 times float32's error."""
    load = reference.load_reference

    def coarse(*given: Any) -> nn.Module:
        model = load(*given)
        for name, module in model.named_modules():
            if name.endswith("c_fc"):
                module.register_forward_pre_hook(lambda _, given: (tf32(given[0]),) if given[0].dtype == torch.float32 else None)
        return model

    monkeypatch.setattr(reference, "load_reference", coarse)
    monkeypatch.setattr(run, "MORE_DRAWS", 1)  # far beyond the bound: few random errors are enough
    monkeypatch.setenv("MKL_CBWR", "AUTO")  # a setting to be named
    report = verify(str(write_checkpoint(tmp_path / "model")), quick=True)
    assert not report.ok
    assert (report.verdict, json.loads(report.to_json())["verdict"]) == ("imprecise", "imprecise")
    assert report.imprecise.name == "h.0.mlp.c_fc"
    text = " ".join(report.table(100).split())
    assert "IMPRECISE this process computes float32 imprecisely: transformers' own error at h.0.mlp.c_fc is" in text
    assert "MKL_CBWR = AUTO" in text.partition("Set here: ")[2]
    assert "unset it and verify again" in text


@pytest.mark.slow
def test_a_difference_by_rounding_alone_says_how_far_over_the_bound_it_is() -> None:
    """A ratio alone does not tell what it is of, nor that the function is right."""
    text = " ".join(refused(next(each for each in IMPRECISE if each.name == "a cache in float16")).table(100).split())
    assert "DIFFERENT first at logits (single tokens): × " in text
    assert "what rounding to float32 explains, at most × 2 is right; transformers' is × " in text
    assert "It is the same function in float64" in text
