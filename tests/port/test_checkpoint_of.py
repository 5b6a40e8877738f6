"""`checkpoint_of`: every port comes back bit for bit with its config, or is refused in one line that says why."""

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import hf_layouts
from support.checks import mostly_slow
from support.commands import refusal
from support.faulty import TWO as SIZES, Faulty
from support.ports import CONFIGS, PORTS, Port, logits
from torch import Tensor, nn

import gpt2
from gpt2 import GPT2, checkpoint_of, diagnose, load_into
from gpt2.checkpoint.checkpoint import Checkpoint, model_with
from gpt2.config import ACTIVATIONS, GPT2Config
from gpt2.measure.metrics import FLOAT64_BOUND, worst_relative_error

CONFIG = GPT2Config(50, 12, 16, 1, 4, bos_token_id=None, eos_token_id=None)
FLOAT64 = {name for name, port in PORTS.items() if not port.exact}  # in float32 they hold other numbers than the checkpoint's
NOT = "GPT2: cannot become a GPT-2 checkpoint: "
POSITIONS = {"heads": 1, "lecture": 1}  # rows of their own beyond the checkpoint's
PADDED = {"interleaved": 64}  # the multiple to which a vocabulary is padded


def filled(port: Port, config: GPT2Config) -> tuple[nn.Module, dict[str, Tensor]]:
    """A port that `load_into` has filled, in float32 where that holds the same numbers, and the weights."""
    state = hf_layouts.weights(config)
    module = port.build(config).to(torch.float64 if port.name in FLOAT64 else torch.float32)
    gpt2.load_into(module, model_with(config, state.items()))
    return module, state


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param(name, sizes, marks=[] if sizes == "alike" and n % 9 == 0 else pytest.mark.slow)
        for n, name in enumerate(PORTS)
        for sizes in ("alike", *(("tiny", "apart")[n % 2 : n % 2 + 1] if n % 3 == 0 else ()))  # equal sizes are the hardest case
    ],
)
def test_every_port_that_load_into_fills_comes_back_bit_for_bit(name: str, sizes: str) -> None:
    """A transposed square matrix, two heads exchanged or a wrong row of a table would be saved as somebody's model."""
    port, config = PORTS[name], CONFIGS[sizes]
    module, state = filled(port, config)
    found = checkpoint_of(module)
    rows, multiple = config.n_positions + POSITIONS.get(name, 0), PADDED.get(name, 1)
    wanted = {"vocab_size": -(-config.vocab_size // multiple) * multiple, "n_positions": rows, "bos_token_id": None}
    assert found.config == replace(config, **wanted, eos_token_id=None)
    assert found.dtype == (torch.float64 if name in FLOAT64 else torch.float32)
    lacking = {family.format(layer) for family in port.lacks for layer in range(config.n_layer)}
    for key, tensor in state.items():
        back = found.weights[key].float()
        shared = min(len(back), len(tensor))
        assert torch.equal(back[:shared], torch.zeros_like(tensor) if key in lacking else tensor[:shared]), key
        assert len(back) == len(tensor) or not back[shared:].any() or key == "wpe.weight", key
    assert any("a bias that it lacks is zero" in note for note in found.notes) == bool(lacking)


def variants() -> list[dict[str, Any]]:
    """Every activation, with each scaling and epsilon in turn."""
    epsilons = itertools.cycle((1e-5, 1e-6, 1e-12, 0.0, 3e-3))
    flags = itertools.product(ACTIVATIONS, (True, False), (True, False))
    names = ("activation_function", "scale_attn_weights", "scale_attn_by_inverse_layer_idx")
    return [dict(zip(names, values, strict=True)) | {"layer_norm_epsilon": next(epsilons)} for values in flags][::3]


@pytest.mark.slow
@pytest.mark.parametrize("last", ["drawn", "zero"])
def test_the_config_is_found_from_what_the_module_computes(last: str) -> None:
    """No tensor shows an activation, an epsilon or a scale. Where last projections are zero, no logit shows them either."""
    same = {"gelu_fast": "gelu_new", "gelu_pytorch_tanh": "gelu_new", "swish": "silu"}
    for changes in variants():
        config = replace(CONFIG, n_layer=2, n_inner=20, **changes)  # a scale by layer shows in the second
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module = GPT2(config)
        for key, parameter in module.named_parameters():
            if last == "zero" and ".c_proj." in key:
                nn.init.zeros_(parameter)
        activation = config.activation_function
        assert checkpoint_of(module).config == replace(config, activation_function=same.get(activation, activation)), changes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint for the architectures of tests/support/faulty."""
    directory = tmp_path_factory.mktemp("faulty")
    hf_layouts.official(directory, SIZES)
    return directory


# A port with a fault that no config and no weights can express: architecture, fault, words of the refusal.
REFUSED = [
    ("fused", "gelu-relu@1", "your feed-forward computes, with each of 9 activations, something else than GPT-2's (error of"),
    ("fused", "eps-1e-6@1.ln_1", "something else than GPT-2's"),
    ("heads", "rmsnorm", "your embeddings, last norm or head compute something else than GPT-2's"),
    ("fused", "scale-by-width@0", "your attention computes something else than GPT-2's (error of the logits"),
    ("italiano", "embedding-scaled", "something else than GPT-2's"),
    ("fused", "noise", "something else than GPT-2's"),
    ("fused", "parallel", "something else than GPT-2's"),
    ("fused", "post-norm", "your norms stand after the branches, GPT-2's before them"),
    ("fused", "final-norm-missing", "your module has no last norm"),
    ("fused", "output-projection-missing@0", "no parameter takes the place of h.0.attn.c_proj.weight"),
    ("fused", "head-bias", "head.bias (norm"),
    ("fused", "heads-split-wrongly", "your attention mixes up heads and positions"),
    ("fused", "layer-repeated@1", "layer-repeated at h.1: your attention runs 2 times"),
    ("fused", "position-sinusoidal", "your module has no learned positions"),
]


@pytest.mark.parametrize(("architecture", "fault", "words"), mostly_slow(REFUSED))
def test_a_module_that_computes_something_else_is_refused_with_the_place(
    architecture: str, fault: str, words: str, folder: Path
) -> None:
    """Saved with the nearest config, it would be another model, and nobody would know."""
    said = refusal(checkpoint_of, Faulty(architecture, fault).build(SIZES, folder), "port.py:build")
    assert said.startswith("port.py:build: cannot become a GPT-2 checkpoint: ")
    assert words in said


def error(module: nn.Module, found: Checkpoint) -> float:
    """Of the logits of our model with what was found, in float64, against the module's."""
    ids = torch.randint(found.config.vocab_size, (2, 11), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = logits(module.double(), ids, found.config.vocab_size)
        return worst_relative_error(found.load(torch.float64)(ids), expected)


# A port with a fault that a config or weights express, and the config's fields.
EXPRESSED: list[tuple[str, str, dict[str, Any]]] = [
    ("fused", "gelu-erf eps-1e-6", {"activation_function": "gelu", "layer_norm_epsilon": 1e-6}),
    ("fused", "scale-missing", {"scale_attn_weights": False}),
    ("italiano", "scale-inverse-layer", {"scale_attn_by_inverse_layer_idx": True}),
    ("heads", "layer-missing@1", {"n_layer": 1, "n_positions": 24}),
    ("fused", "padded-vocab", {"vocab_size": 72}),
    ("fused", "untied-head", {"tie_word_embeddings": False}),
    ("compiled", "untied-head", {"tie_word_embeddings": False}),
    ("fused", "value-from-key", {}),
    ("italiano", "heads-halved", {"n_head": 2}),
    ("fused", "transposed-proj", {}),
]


@pytest.mark.parametrize(("architecture", "fault", "fields"), mostly_slow(EXPRESSED))
def test_what_a_config_expresses_is_saved_as_it_is(architecture: str, fault: str, fields: dict[str, Any], folder: Path) -> None:
    """A fault against one checkpoint is a model of its own: its logits must be kept, whatever GPT-2's own would be."""
    module = Faulty(architecture, fault).build(SIZES, folder)
    found = checkpoint_of(module)
    assert found.config == replace(SIZES, bos_token_id=None, eos_token_id=None, **fields)
    assert error(module, found) <= FLOAT64_BOUND


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_module_stays_as_it_was(dtype: torch.dtype) -> None:
    """It runs in float64 with other weights: none may stay, nor may the checkpoint change when training goes on."""
    module = GPT2(CONFIG).train().to(dtype)
    module.h[0].eval()
    module.wpe.weight.requires_grad_(False)
    before, state = copy.deepcopy(module), [(p, p.data_ptr(), p.dtype, p.requires_grad) for p in module.parameters()]
    generator, modes = torch.get_rng_state(), [part.training for part in module.modules()]
    found = checkpoint_of(module)
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before.parameters(), strict=True))
    assert [(p, p.data_ptr(), p.dtype, p.requires_grad) for p in module.parameters()] == state
    assert [part.training for part in module.modules()] == modes
    assert torch.equal(torch.get_rng_state(), generator)
    for parameter in [*module.parameters(), *found.load().parameters()]:
        parameter.data.zero_()
    assert all(torch.equal(found.weights[name], parameter) for name, parameter in before.named_parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_dtype_is_the_module_s(dtype: torch.dtype) -> None:
    module = GPT2(CONFIG).to(dtype)
    module.wpe.weight.data = module.wpe.weight.data.to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float16)
    found = checkpoint_of(module)
    assert found.dtype == found.stored == dtype
    assert all(torch.equal(found.weights[name], parameter.to(dtype)) for name, parameter in module.named_parameters())


def adapted(scale: float) -> nn.Module:
    module = PORTS["adapters"].build(CONFIG)
    module.lm_head.weight = module.token_embedding.weight
    for name, parameter in module.named_parameters():
        if name.endswith("lora_b") and "blocks" in name:
            nn.init.constant_(parameter, scale)
    return module


def broken(value: float) -> nn.Module:
    module = GPT2(CONFIG)
    module.h[0].mlp.c_fc.weight.data[3, 4] = value
    return module


class Cropped(GPT2):
    """Returns fewer logits than its embedding has rows."""

    def __init__(self, config: GPT2Config, logits: int) -> None:
        super().__init__(config)
        self.logits = logits

    def forward(self, ids: Tensor, **_: Any) -> Tensor:
        return super().forward(ids)[..., : self.logits]


class OnlyFloat32(GPT2):
    def forward(self, ids: Tensor, **_: Any) -> Tensor:
        if self.wte.weight.dtype != torch.float32:
            raise TypeError("float32, please")
        return super().forward(ids)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("gpt2", "checkpoint_of reads a torch.nn.Module, and was given str; build the module first"),
        (nn.Embedding(64, 4), "Embedding: cannot become a GPT-2 checkpoint: nothing in its forward weighs projections of"),
        (
            OnlyFloat32(CONFIG),
            "OnlyFloat32: its forward fails in float64 (TypeError: float32, please (test_checkpoint_of.py, line ",
        ),
        (broken(torch.inf), f"{NOT}h.0.mlp.c_fc.weight holds a damaged value: h.0.mlp.c_fc.weight[3, 4] is inf, not finite"),
        (broken(1e38), f"{NOT}h.0.mlp.c_fc.weight holds a damaged value: h.0.mlp.c_fc.weight[3, 4] is 1e+38, too large"),
        (adapted(0.1), "GPTModel: cannot become a GPT-2 checkpoint: your module has low-rank adapters (blocks.0."),
    ],
)
def test_a_module_that_cannot_be_read_is_refused_in_one_line(module: nn.Module, message: str) -> None:
    assert refusal(checkpoint_of, module).startswith(message)


def test_as_many_logits_as_rows_of_the_embedding() -> None:
    """A module of 2,048 tokens that returned 7 logits was written as a model of 7 tokens, and diagnosed as equal to one."""
    config = replace(CONFIG, vocab_size=2048)
    for count in (7, 1023):
        said = refusal(checkpoint_of, Cropped(config, count))
        assert f"it returns {count:,} logits and embeds 2,048 tokens" in said
    small = GPT2(replace(config, vocab_size=7))
    assert "it returns 7 logits and embeds 2,048 tokens" in refusal(diagnose, Cropped(config, 7), small)
    report = load_into(Cropped(config, 7), small)
    assert "it returns 7 logits and embeds 2,048 tokens" in report.problems[0]
    for count in (2041, 2048):  # the rest is padding, to a round number
        assert checkpoint_of(Cropped(config, count)).config.vocab_size == count


def test_notes_say_what_was_left_out_or_differs(folder: Path) -> None:
    """Each of these is no reason to refuse, and none may stay unsaid."""
    notes = {
        "verified with float64 where its forward casts to float32": Faulty("fused", "softmax-upcast").build(SIZES, folder),
        "its logits differ, as with a constant in float32, by ": Faulty("fused", "gelu-erf-rounded").build(SIZES, folder),
        "a norm's scale is one: 'h.*.ln_1.weight', 'h.*.ln_1.bias'": Faulty("fused", "no-affine@0.ln_1").build(SIZES, folder),
        "left out, as no logit depends on them: token_embedding.lora_a": adapted(0.0),
        "rounded, as it uses its parameters scaled or shifted: ": filled(PORTS["centred"], SIZES)[0].float(),
    }
    for words, module in notes.items():
        (note,) = checkpoint_of(module).notes
        assert words in note
        assert not words.endswith(" by ") or 1e-11 < float(note.split()[-1]) < 1e-7


def test_what_was_read_is_saved_and_loaded_again(tmp_path: Path) -> None:
    """A checkpoint in memory must be as good as one of files: load, export, int8."""
    module, state = filled(PORTS["mha"], CONFIG)
    found = checkpoint_of(module)
    gpt2.save(found.load(), None, tmp_path)
    assert all(torch.equal(tensor, state[name]) for name, tensor in gpt2.load(str(tmp_path)).state_dict().items())
    assert gpt2.load(str(tmp_path)).config == found.config
    assert found.load(torch.int8).wte.weight.shape == (50, 16)
    assert (found.own_tokenizer(), found.files()) == (None, {})


def test_positions_in_a_buffer_are_read_as_well() -> None:
    """A table of sines is no parameter, and no less a part of the model."""
    module = GPT2(CONFIG)
    table = torch.sin(torch.arange(12.0)[:, None] * torch.arange(1.0, 17.0))
    del module.wpe.weight
    module.wpe.register_buffer("weight", table)
    assert torch.equal(checkpoint_of(module).weights["wpe.weight"], table)


def test_a_module_built_in_inference_mode_is_read_and_filled() -> None:
    """torch refuses to change such tensors elsewhere: it was said to fail in float64, and `load_into` had a traceback."""
    with torch.inference_mode():
        module = GPT2(CONFIG)
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    found = checkpoint_of(module)
    assert all(torch.equal(found.weights[key], tensor) for key, tensor in before.items())
    assert all(torch.equal(tensor, before[key]) for key, tensor in module.state_dict().items())
    assert found.load().wte.weight.requires_grad_().is_leaf  # and can be trained
    assert diagnose(module, found.load()).verdict == "equal"
    other = GPT2(CONFIG)
    assert load_into(module, other).ok
    assert all(torch.equal(tensor, other.state_dict()[key]) for key, tensor in module.state_dict().items())
    assert not torch.is_inference_mode_enabled()


class Filled(GPT2):
    def forward(self, ids: Tensor, **_: Any) -> Tensor:
        return super().forward(ids) + 0 * torch.full((1,), torch.finfo(self.wte.weight.dtype).min)

    def __call__(self, ids: Tensor, **_: Any) -> Tensor:  # torch runs no hook of it
        return self.forward(ids) if len(ids) == 1 else torch.cat([self(row[None]) for row in ids]) @ torch.eye(CONFIG.vocab_size)


def test_a_module_that_makes_tensors_in_the_default_dtype_is_run_in_float64() -> None:
    """A stranger's right module was refused, as float64's least number is none; the default stayed float64, for all threads."""
    module, defaults = Filled(CONFIG).eval(), set[torch.dtype]()
    report = load_into(module, ours := checkpoint_of(module).load())
    diagnosis = diagnose(module, ours, progress=lambda _: defaults.add(torch.get_default_dtype()))
    assert (report.ok, diagnosis.ok, report.logits_error is None) == (True, True, False)
    assert diagnosis.logits_error < FLOAT64_BOUND
    assert "it was run with float64 as that default" in diagnosis.notes[0]
    assert defaults == {torch.get_default_dtype()} == {torch.float32}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch's own, of quantize_dynamic
@pytest.mark.parametrize("judge", [checkpoint_of, lambda module: load_into(module, GPT2(CONFIG))])
def test_packed_int8_layers_are_named(judge: Callable[[nn.Module], object]) -> None:
    """Their numbers are hidden: it was said that nothing weighs projections, and `diagnose` found a batch-dependent row."""
    module = torch.ao.quantization.quantize_dynamic(
        nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50)), {nn.Linear}, dtype=torch.qint8
    )
    assert " has packed int8 weights, as of torch.ao's quantize_dynamic, which hide the numbers; " in refusal(judge, module)
    assert "which int8 only approximates" in refusal(judge, gpt2.load("shakespeare-mini:int8"))
