"""Dumps of other programs: a right one is equal in any dtype and layout, a fault is named with its place."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from port.test_walk import CONFIG, IDS, checkpoint
from torch import Tensor

import gpt2
from gpt2.errors import InputError
from gpt2.measure.tracing import trace
from gpt2.model import GPT2
from gpt2.port.alternatives import table
from gpt2.port.alternatives.candidates import Candidate
from gpt2.port.graph import Model
from gpt2.port.recording.pool import Pool
from gpt2.port.terms.budget import Budget, Spent
from gpt2.port.terms.report import Diagnosis
from gpt2.port.terms.tolerance import measured

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
MODEL = checkpoint()


def faulty(**changes: object) -> GPT2:
    """Our model with another setting: the fault is in the formula, and the weights are right."""
    return checkpoint(replace(CONFIG, **changes))


def laid_out(traced: dict[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """The same values as other programs hold them: anonymous, in any order, flat, split, stacked, transposed, with others."""
    draw, heads, out = random.Random(seed), CONFIG.n_head, []
    for point, value in traced.items():
        if point.endswith(("attn.q", "attn.k", "attn.v", "attn.heads")) and draw.random() < 0.5:
            value = value.unflatten(-1, (heads, -1)).transpose(1, 2)
            value = draw.choice([value, value.flatten(0, 1), value.mT])  # heads in the batch; keys turned
        elif point != "logits":
            flat = value.flatten(0, 1)
            value = draw.choice([value, value.flatten(), flat, value.transpose(0, 1), flat.transpose(0, 1)])
        out.append(value.contiguous())
    out += [torch.randn(2, 8, CONFIG.n_embd), torch.ones(8, 8).tril(), torch.arange(8.0), torch.full((8, 8), -1e9).triu(1)]
    draw.shuffle(out)
    return {f"t{number}": value for number, value in enumerate(out)}


def dump(traced: dict[str, Tensor], dtype: torch.dtype, ids: Tensor = IDS) -> dict[str, Tensor]:
    return {name: value.to(dtype) for name, value in traced.items()} | {"ids": ids}


def causes(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    return [(cause.id, cause.where) for cause in diagnosis.causes]


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [*DTYPES[1:3], *(pytest.param(one, marks=pytest.mark.slow) for one in DTYPES[::3])], ids=str)
def test_a_right_dump_is_equal_and_a_fault_is_named(dtype: torch.dtype) -> None:
    """A tolerance that is too narrow calls rounding a fault; one that is too wide calls the other GELU right."""
    right, wrong = (laid_out(trace(model, IDS)) for model in (MODEL, faulty(activation_function="gelu")))
    diagnosis = gpt2.diagnose(dump(right, dtype), MODEL)
    assert (diagnosis.verdict, diagnosis.causes, diagnosis.seen) == ("equal", (), "dump")
    diagnosis = gpt2.diagnose(dump(wrong, dtype), MODEL)
    assert (diagnosis.verdict, diagnosis.first_divergence.point) == ("mismatch", "h.0.mlp.act")
    assert causes(diagnosis) == [("gelu-variant", "h.*.mlp.act")]


@pytest.mark.kernels
def test_a_fault_near_the_tolerance_is_named() -> None:
    """Every stage was within the tolerance and the logits were not, so a small wrong epsilon was undetermined."""
    arrays = laid_out(trace(faulty(layer_norm_epsilon=1e-6, n_layer=1), IDS), seed=1)
    said = gpt2.diagnose(dump(arrays, torch.float32), faulty(layer_norm_epsilon=2.5e-6, n_layer=1))
    assert causes(said) == [("layernorm-eps", "h.0.ln_1, h.0.ln_2")]


def by_level(traced: dict[str, Tensor], level: str) -> dict[str, Tensor]:
    """The values of a dump that shows one tensor a block, or the logits alone, by names that say nothing."""
    shown = ["logits"] if level == "logits" else ["embed", "h.1", "h.0", "logits"]
    return {f"x{number}": traced[point] for number, point in enumerate(shown)}


@pytest.mark.parametrize("level", ["block", pytest.param("logits", marks=pytest.mark.slow)])
def test_less_in_a_dump_still_names_a_fault(level: str) -> None:
    """Most programs show their logits only: every known fault is tried in our own forward pass."""
    diagnosis = gpt2.diagnose(dump(by_level(trace(MODEL, IDS), level), torch.float16), MODEL)
    assert (diagnosis.verdict, diagnosis.causes) == ("equal", ())
    wrong = trace(faulty(activation_function="gelu"), IDS)
    diagnosis = gpt2.diagnose(dump(by_level(wrong, level), torch.float32), MODEL)
    assert (diagnosis.seen, causes(diagnosis)) == ({"block": "dump"}.get(level, level), [("gelu-variant", "h.*.mlp.act")])


@pytest.mark.slow
def test_faults_of_two_branches_are_found_between_the_tensors_recorded() -> None:
    """The search behind a stream between the branches began at the block's start, so one fault hid the other."""
    wrong = faulty(activation_function="gelu")
    wrong.h[1].attn.c_proj.bias.data.zero_()
    traced = trace(wrong, IDS)
    arrays = {f"x{n}{stage}": traced[f"h.{n}.{stage}".rstrip(".")] for n in range(2) for stage in ("mid", "")}
    diagnosis = gpt2.diagnose(dump(arrays | {"y": traced["logits"]}, torch.float32), MODEL)
    assert causes(diagnosis) == [("gelu-variant", "h.*.mlp.act"), ("missing-bias", "h.1.attn.c_proj")]


@pytest.mark.slow
def test_a_last_norm_without_bias_is_no_bias_of_the_head() -> None:
    """The head's bias was fitted, which gives the same logits as a norm without its own."""
    wrong = checkpoint()
    for name, parameter in wrong.named_parameters():
        if "ln_" in name and name.endswith("bias"):
            parameter.data.zero_()
    traced = trace(wrong, IDS)
    arrays = {f"x{n}": traced[f"h.{n}.mid"] for n in range(2)} | {"y": traced["logits"]}
    assert causes(gpt2.diagnose(dump(arrays, torch.float32), MODEL)) == [("missing-bias", "h.*.ln_1, h.*.ln_2, ln_f")]


def test_some_numbers_and_integers_are_no_training_step() -> None:
    """Five foreign numbers were taken for losses of a step, so a right dump was not equal; a mask's infinity was refused."""
    right = dump(by_level(trace(MODEL, IDS[:1]), "block"), torch.float32, IDS[0])
    draw = torch.Generator().manual_seed(1)
    foreign = {"a": torch.arange(8), "b": torch.randn(5, generator=draw), "c": torch.ones(8, 8).tril()}
    foreign |= {"d": torch.tensor(-torch.inf), "e": torch.full((8, 8), -torch.inf).triu(1)[3]}  # of a mask
    assert gpt2.diagnose(right | foreign, MODEL).verdict == "equal"


def test_zeros_in_a_dump_are_no_product_of_weights_that_are_zero() -> None:
    """Where a projection was not dumped and an array of its size is zero, its weight and bias were said to be zero."""
    traced = trace(faulty(activation_function="gelu"), IDS)
    del traced["h.1.attn.c_proj"]
    arrays = dump(traced, torch.float32) | {"cache": torch.zeros(2, 8, CONFIG.n_embd)}
    assert causes(gpt2.diagnose(arrays, MODEL)) == [("gelu-variant", "h.*.mlp.act")]


def test_a_dump_without_logits_or_with_nan_in_them_is_refused() -> None:
    """Both are mistakes of the dumping, to be said in a line."""
    with pytest.raises(InputError, match="holds no logits"):
        gpt2.diagnose({"ids": IDS, "x": torch.zeros(2, 8, 21)}, MODEL)
    with pytest.raises(InputError, match=r"no logits \(2, 8, 67\).*: the array model.Logits has \(8, 66\); .*--model"):
        gpt2.diagnose({"ids": IDS, "x": torch.zeros(2, 8, 21), "model.Logits": torch.zeros(8, 66)}, MODEL)
    logits = MODEL(IDS).detach().float().numpy()
    logits[1, 3:] = np.nan
    with pytest.raises(InputError, match="are NaN from position 3 on"):
        gpt2.diagnose({"ids": IDS, "x": logits}, MODEL)


def two_faults() -> dict[str, Tensor]:
    """A program of one row that divides variances by D - 1 and splits heads by a view alone; it dumps no heads, q, k or v."""
    own = Model(MODEL.state_dict(), CONFIG, IDS[:1])
    every = table(own)
    norms = next(one for one in every if one.label.startswith("ln_1 ln_2 ln_f layernorm-unbiased-variance"))
    heads = next(one for one in every if "cut out by view(B, H, T, K)" in one.label)
    blocks = ((one, n) for one in (norms, heads) for n in range(CONFIG.n_layer))
    program = Candidate((*blocks, (norms, None))).program
    assert program is not None
    kept = ("ln_1", "ln_2", "ln_f", "attn.weights", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "logits", "embed")
    values = {name: value for name, value in own.trace(program).items() if name.endswith(kept) or name == "h.0"}
    return {name if name == "logits" else f"t{n}": value for n, (name, value) in enumerate(values.items())}


@pytest.mark.slow
def test_weights_that_are_recorded_show_how_heads_were_split_and_the_walk_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without recorded heads the walk was lost in the attention after minutes. A further, needless search took minutes."""

    def never(*_: object) -> None:
        raise AssertionError("operators were fitted")

    monkeypatch.setattr("gpt2.port.search.explainer.node_fit", never)
    diagnosis = gpt2.diagnose(dump(two_faults(), torch.float32, IDS[:1]), MODEL)
    assert causes(diagnosis) == [("layernorm-unbiased-variance", "h.*.ln_1, h.*.ln_2, ln_f"), ("head-layout", "h.*.attn")]


def test_every_search_in_a_dump_ends_where_its_budget_is_spent() -> None:
    """Sums of products were compared without a look at the limit, so a lost walk went on for a minute beyond it."""
    tolerance = measured(MODEL, IDS, trace(MODEL, IDS), torch.float32)
    pool = Pool(tolerance)
    pool.budget = Budget(0)
    pool.add(torch.randn(2, 8, CONFIG.n_embd))
    with pytest.raises(Spent):
        pool.find(torch.randn(2, 8, CONFIG.n_embd))
