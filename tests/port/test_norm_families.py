"""Norms over other axes, logits that are changed in the end, streams that are not carried on: families that no list has."""

from pathlib import Path

import pytest
import torch
from support.programs.bed import Bed, Shape

import gpt2
from gpt2.config import GPT2Config
from gpt2.model import GPT2
from gpt2.port.alternative import Alternative
from gpt2.port.alternatives.moments import WAYS, readings
from gpt2.port.alternatives.norms import normed, of_moments
from gpt2.port.diagnosis.last_step import STEPS
from gpt2.port.dump.candidates import Candidate
from gpt2.port.dump.fits.normalising import Norm
from gpt2.port.dump.fits.observed import Observed
from gpt2.port.dump.simulation import Program, Simulation

D = 24


def observed(value: torch.Tensor, right: torch.Tensor) -> Observed:
    return Observed(value, 1e-7 * value.abs(), 1e-6, right, 0)


def test_a_norm_over_any_axis_is_read_off_with_its_divisor_and_epsilon() -> None:
    """Norms over other axes were read off with the checkpoint's epsilon and a biased variance alone: one that divides by n - 1
    as well ended undetermined. A result that is no norm of its input must stay unknown."""
    torch.manual_seed(3)
    x, weight, bias = 2 * torch.randn(2, 9, D).double() + 0.5, 1 + 0.3 * torch.randn(D).double(), 0.2 * torch.randn(D).double()
    norm = Norm("ln_1", weight, bias, 1e-5, {}, {}, 3)
    right, rows = torch.layer_norm(x, (D,), weight, bias, 1e-5), torch.ones(2, 9, dtype=torch.bool)
    found = readings(x.shape, 3)
    assert len(found) > 20
    for words, reading in found.items():
        for way in WAYS:
            value = way.normed(x, reading(x), 1e-3) * weight + bias
            if float((value - right).abs().max()) < 1e-3:
                continue
            fit = norm.fit(observed(value, right), x, rows)
            assert fit is not None, (words, way)
            assert "layernorm-axis" in [fault.id for fault in fit.faults], (words, way)
            assert torch.allclose(fit.value, value, atol=1e-4), (words, way)
    assert norm.fit(observed(torch.randn(2, 9, D).double(), right), x, rows) is None


def program(w: dict[str, torch.Tensor], ids: torch.Tensor, heads: int, layers: int, fault: str) -> dict[str, torch.Tensor]:
    """A GPT-2 of a few lines, with a fault."""
    kept: dict[str, torch.Tensor] = {}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        z = torch.layer_norm(x, x.shape[-1:], eps=1e-5)
        if fault == "norm over tokens":
            z = (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 2e-3)
        return z * w[f"{name}.weight"] + w[f"{name}.bias"]

    tokens = ids.shape[1]
    at = torch.arange(ids.numel()).view(ids.shape) if fault == "positions go on" else torch.arange(tokens)
    x = embedded = w["wte.weight"][ids] + w["wpe.weight"][at]
    for n in range(layers):
        x = embedded if fault == "embedding again" else x
        p = {name.removeprefix(f"h.{n}."): one for name, one in w.items() if name.startswith(f"h.{n}.")}
        a = kept[f"{n} a"] = norm(x, f"h.{n}.ln_1")
        both = kept[f"{n} qkv"] = a @ p["attn.c_attn.weight"] + p["attn.c_attn.bias"]
        q, k, v = (one.unflatten(-1, (heads, -1)).transpose(1, 2) for one in both.chunk(3, -1))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        y = kept[f"{n} y"] = mixed @ p["attn.c_proj.weight"] + p["attn.c_proj.bias"]
        m = kept[f"{n} m"] = x + y + (a if fault == "norm added as well" else 0)
        f = norm(m, f"h.{n}.ln_2") @ p["mlp.c_fc.weight"] + p["mlp.c_fc.bias"]
        f = kept[f"{n} f"] = torch.nn.functional.gelu(f, approximate="tanh")
        x = kept[f"{n} x"] = m + f @ p["mlp.c_proj.weight"] + p["mlp.c_proj.bias"]
    logits = norm(x, "ln_f") @ w["wte.weight"].T
    kept["logits"] = STEPS[fault].formula(logits) if fault in STEPS else logits
    return kept


CAUSES = {
    "": "",
    "each token's mean logit is taken off": "logits-softmaxed",
    "norm over tokens": "layernorm-axis",
    "embedding again": "layer-missing",
    "norm added as well": "residual-from-normed",
    "positions go on": "position-offset",
    **dict.fromkeys([words for words, step in STEPS.items() if step.id == "logits-scaled"][::4], "logits-scaled"),
}
FIRST = ("", "each token's mean logit is taken off")


SEEN = [
    *((fault, level) for fault in FIRST for level in ("full", "logits")),
    *(
        pytest.param(fault, ("full", "logits")[n % 2], marks=pytest.mark.slow)
        for n, fault in enumerate(CAUSES)
        if fault not in FIRST
    ),
]


@pytest.mark.parametrize(("fault", "level"), SEEN)
def test_a_family_is_named_from_all_values_and_from_the_logits(tmp_path: Path, fault: str, level: str) -> None:
    """These ended undetermined, or with the head's weights as a false cause. Without a fault, the program is equal."""
    bed = Bed(tmp_path, Shape(2, 16, 2, 61, 21, 9, 5))
    w = {name: torch.from_numpy(one).double() for name, one in bed.weights.items()}
    kept = program(w, torch.from_numpy(bed.ids), 2, 2, fault)
    arrays = {f"t{n}" if name != "logits" else name: one.numpy() for n, (name, one) in enumerate(kept.items())}
    shown = arrays if level == "full" else {"logits": arrays["logits"]}
    said = gpt2.diagnose({"ids": bed.ids, **shown}, str(bed.model))
    assert (said.verdict == "equal") == (not fault)
    assert [cause.id for cause in said.causes][:1] == [CAUSES[fault]] * bool(fault), said.causes


def test_a_last_norm_over_other_axes_runs_over_each_stream_of_a_batch_by_itself() -> None:
    """Beside a last norm over the tokens, others were ranked in a batch of streams, whose axes it took for those of one: an
    exception, or another norm."""
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=31, n_positions=8, n_embd=12, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None)
    simulation = Simulation(GPT2(config).state_dict(), config, torch.randint(0, 31, (2, 7)))
    streams = torch.randn(3, 2, 7, 12).double()
    for words, reading in readings((2, 7, 12), 2).items():
        program = Program(outside={"ln_f": normed("ln_f", of_moments(reading, WAYS[0], 1e-5))})
        alone = torch.stack([simulation.normed(program, one) for one in streams])
        assert torch.equal(simulation.normed(program, streams), alone), words


def test_of_two_equal_explanations_the_commoner_mistake_comes_first() -> None:
    """They came in the order of trying. An explanation with fewer faults still comes before a common one with more."""

    def candidate(*ids: str) -> Candidate:
        return Candidate(((Alternative(ids[0], ids[0], where="ln_1", also=tuple((id, id) for id in ids[1:])), 0),))

    common, rare, both = candidate("layernorm-axis"), candidate("parallel-block"), candidate("gelu-variant", "layernorm-axis")
    assert sorted([rare, both, common], key=lambda one: one.order_of_naming) == [common, rare, both]
