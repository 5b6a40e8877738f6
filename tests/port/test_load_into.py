"""`load_into` on faulty modules: the weights are placed, the fault is named, and the module's state is restored."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support import hf_layouts
from support.checks import mostly_slow
from support.commands import refusal
from support.faulty import TWO as CONFIG, Faulty, write
from support.ports import PORTS, parts
from torch import Tensor, nn

import gpt2
from gpt2 import GPT2, InputError
from gpt2.config import GPT2Config
from gpt2.port.anatomy.anatomy import Anatomy
from gpt2.port.mapping import LogitsCheck, load_into
from gpt2.port.mapping.filling import fill
from gpt2.port.mapping.mapping import ZERO, WeightMap
from gpt2.port.mapping.report import MappingReport
from gpt2.port.recording.forward import Borrowed
from gpt2.port.recording.recorder import record_probe


def checkpoint(config: GPT2Config = CONFIG, **changed: float) -> GPT2:
    """Random weights; a tensor whose name ends in a key of `changed` has that value in every entry."""
    model = GPT2(config, initialise=False).eval()
    model.load_state_dict(hf_layouts.weights(config))
    for name, parameter in model.named_parameters():
        for end, value in changed.items():
            if name.endswith(end.replace("__", ".")):
                parameter.data.fill_(value)
    return model


class Port(parts.GPT):
    """A right port: a matrix each for queries, keys and values."""

    class BLOCK(parts.Block):
        ORDER = "norm_1 q k v out norm_2 up down"

    def __init__(self, config: GPT2Config = CONFIG) -> None:
        torch.manual_seed(0)
        super().__init__(config)


ANYTHING = "your module computes something else than GPT-2; `gpt2 diagnose` says where it departs"
ALL_PLACED = "rmsnorm not-normalising gelu-relu scale-missing mask-missing softmax-queries residual-missing parallel"
MIXED = "head-layout at h.*.attn: your attention mixes up heads and positions"
# Architecture, fault, words of the report, and a part of the names that stay unchanged.
FAULTS = [
    ("fused", "heads-split-wrongly", MIXED, None),
    ("fused", "heads-merged-wrongly", MIXED, None),
    ("italiano", "value-from-query", "as h.0.attn.c_attn.weight (q) and as h.0.attn.c_attn.weight (v), which differ", ".porta."),
    ("italiano", "value-identity", "at h.*.attn.c_attn.weight (v): you have no projection for v", ".porta."),
    ("fused", "output-projection-missing", "at h.*.attn.c_proj.weight: you have no projection here", ".proj."),
    ("fused", "post-norm", "post-norm at h.*: your norms stand after the branches", None),
    ("fused", "post-norm final-norm-missing", "final-norm-missing at ln_f: your module has no last norm", "ln_f"),
    ("fused", "ln_1-missing", "norm-missing at h.*.ln_1: your attention has no norm before it", ".ln_1."),
    ("fused", "final-norm-missing", "final-norm-missing at ln_f: your module has no last norm", "ln_f"),
    ("fused", "position-sinusoidal", "position-missing at wpe: your module has no learned positions", "wpe"),
    ("fused", "position-missing", "what your module lacks is the only difference from the checkpoint", "wpe"),
    ("fused", "layer-missing@1", "layer-missing at h.1: your forward runs 1 of the checkpoint's 2 blocks", "blocks.1."),
    ("fused", "layer-repeated@1", "layer-repeated at h.1: your attention runs 2 times", None),
    ("fused", "noise", "your module gives other logits every time", None),
]
PLACED = [("fused", word, f"all weights are placed, but {ANYTHING}", None) for word in ALL_PLACED.split()]


@cache
def filled() -> nn.Module:
    """A right port with the checkpoint's weights, which is only read."""
    module = Port()
    load_into(module, checkpoint())
    return module


@cache
def report_of(port: str) -> MappingReport:
    """What `load_into` says of a port of tests/support/ports; several tests read it."""
    return load_into(PORTS[port].build(CONFIG), checkpoint())


def sentences(report: MappingReport) -> str:
    return "\n".join((*report.ambiguous, *report.problems, *report.notes, *report.unfilled.values(), *report.idle.values()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("checkpoint"), CONFIG)


# Every fourth of the formulas is quick, and every second of what has a sentence of its own.
@pytest.mark.parametrize(("architecture", "fault", "sentence", "unfilled"), [*mostly_slow(PLACED, 4), *mostly_slow(FAULTS, 2)])
def test_a_port_with_a_fault_is_filled_by_its_structure_and_refused(
    architecture: str, fault: str, sentence: str, unfilled: str | None, folder: Path
) -> None:
    """If the mapping needed correct logits, a faulty port could not be filled, and these ports need a diagnosis."""
    filled = Faulty(architecture, fault).build(CONFIG, folder)
    module, before = (Faulty(architecture, fault, filled=True).build(CONFIG, folder) for _ in range(2))
    report = load_into(module, str(folder))
    assert not report.ok
    assert report.logits_error > 1e-5
    assert sentence in sentences(report)
    for name, parameter in module.named_parameters():
        left = unfilled is not None and unfilled in name
        assert torch.equal(parameter, (before if left else filled).get_parameter(name)), name


def swapped(entries: Tensor, a: slice, b: slice) -> Tensor:
    entries = entries.clone()
    entries[a], entries[b] = entries[b].clone(), entries[a].clone()
    return entries


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("blocks.1.q.weight", lambda e: swapped(e, slice(0, 5), slice(5, 10))),  # two heads of q, but not of k
        ("blocks.1.out.weight", lambda e: e.t().contiguous()),  # the square one, transposed
        ("blocks.0.norm_1.weight", lambda e: swapped(e, slice(3, 4), slice(4, 5))),
        ("places.weight", lambda e: e.roll(1, 0)),
        ("words.weight", lambda e: swapped(e, slice(66, 67), slice(65, 66))),  # two tokens of 67
        ("blocks.1.up.bias", lambda e: e.where(torch.arange(52) != 51, ZERO)),  # one entry set to zero
    ],
)
def test_a_wrong_mapping_is_refused(name: str, change: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: the check must find a single wrong entry in any place, written or read."""
    entries, right = WeightMap.entries, filled()
    monkeypatch.setattr(
        WeightMap, "entries", lambda self, source: (change if source.name == name else lambda e: e)(entries(self, source))
    )
    report = load_into(Port(), checkpoint())
    assert not report.ok
    assert report.logits_error > 1e-6
    assert ANYTHING in sentences(report)
    with pytest.raises(InputError, match=r"something else than GPT-2's|is added where GPT-2 adds nothing"):
        gpt2.checkpoint_of(right)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"n_embd": 24}, "your width is 24, the checkpoint's 20"),
        ({"n_layer": 1}, "layer-missing at h.1: your forward runs 1 of the checkpoint's 2 blocks"),
        ({"n_layer": 3}, "your number of blocks is 3, the checkpoint's 2"),
        ({"n_head": 2}, "head-layout at h.*.attn: your attention has 2 heads, the checkpoint 4"),
        ({"n_inner": 48}, "your feed-forward width is 48, the checkpoint's 52"),
        ({"vocab_size": 60}, "your vocabulary is 60, the checkpoint's 67"),
    ],
)
def test_another_size_is_reported(changes: dict[str, int], sentence: str, in_a_notebook: None) -> None:
    """Tensors that fit are placed; each difference gives a sentence instead of a shape error."""
    model, module = checkpoint(), Port(replace(CONFIG, **changes))
    before = copy.deepcopy(module)
    report = load_into(module, model)
    assert sentence in report.problems
    assert not report.ok
    assert ("NOT ALL IN PLACE, though the logits agree" in report.table()) == ("vocab_size" in changes)
    if "n_embd" in changes:
        assert report.logits_error is None
        assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before.parameters(), strict=True))
        assert report.rows == ()
        assert set(report.unfilled) == {name for name, _ in module.named_parameters()}
    else:
        assert torch.equal(module.blocks[0].q.weight, model.h[0].attn.c_attn.weight[:, :20].T)


def test_the_json_of_a_port_that_gives_nan_is_json() -> None:
    """`Infinity` is not valid JSON: strict parsers refuse it."""
    model = checkpoint()
    model.ln_f.weight.data[0] = torch.nan
    report = load_into(Port(), model)
    assert not report.ok
    assert json.loads(report.to_json(), parse_constant=pytest.fail)["logits_error"] == "inf"


def test_a_norm_behind_the_embeddings_is_said() -> None:
    """Nothing of the checkpoint is put in a wrong place."""
    module = Port()
    module.extra = nn.LayerNorm(20)
    module.embed = lambda ids: module.extra(module.words(ids) + module.places.weight[: ids.shape[1]])
    report = load_into(module, checkpoint())
    assert not report.ok
    assert "a norm that GPT-2 does not have" in sentences(report)
    assert all(torch.equal(one, one.new_full((20,), name == "weight")) for name, one in module.extra.named_parameters())


def test_a_parameter_that_is_used_in_two_ways_is_said() -> None:
    """It can be right for one of the ways only: bug: one was picked, and nothing told which parameter to look at."""
    module = Port()
    module.embed = lambda ids: F.embedding(ids, 2 * module.words.weight) + module.places.weight[: ids.shape[1]]
    report = load_into(module, checkpoint())
    assert report.ambiguous == ("words.weight is used times 1 and times 2; it is filled for the first",)
    assert torch.equal(module.words.weight, checkpoint().wte.weight)
    assert not report.ok


def test_a_tensor_that_the_checkpoint_lacks_is_an_error() -> None:
    """Bug: its entries became NaN in the user's module."""
    module = Port()
    state = {name: tensor for name, tensor in checkpoint().state_dict().items() if name != "h.1.mlp.c_fc.bias"}
    with torch.no_grad(), Borrowed(module) as borrowed:
        mapping = WeightMap(Anatomy(record_probe(borrowed, CONFIG, "Port")), CONFIG)
        with pytest.raises(KeyError, match=r"h\.1\.mlp\.c_fc\.bias"):
            fill(borrowed, mapping, state)


def test_more_rows_or_fewer_than_the_checkpoint_s_are_said() -> None:
    """nanoGPT pads to 50,304: initial values there would change every softmax. Fewer positions are right where they fit."""
    report = load_into(Port(replace(CONFIG, n_positions=11)), checkpoint())
    assert report.ok
    assert "your module has 11 positions, the checkpoint 23: the first 11 are filled" in report.notes
    module = Port(replace(CONFIG, vocab_size=72, n_positions=30))
    rest = module.places.weight[23:].clone()
    report = load_into(module, checkpoint())
    assert report.ok
    assert "your vocabulary is padded from 67 to 72 entries: the rest is zero" in report.notes
    assert not module.words.weight[67:].any()
    assert "places.weight has more rows than the checkpoint's 23 positions fill: the rest is left as it is" in report.notes
    assert torch.equal(module.places.weight[23:], rest)


def test_each_missing_tensor_has_its_line() -> None:
    """Bug: missing biases were one line without their sizes, and a norm's shift was left out beside its scale."""
    module = Port()
    module.last = nn.LayerNorm(20, elementwise_affine=False)
    for block in module.blocks:
        block.k, block.v, block.out = (nn.Linear(20, 20, bias=False) for _ in range(3))
    lines = load_into(module, checkpoint()).problems
    for begin in (
        "missing-bias at h.*.attn.c_attn.bias (k), h.*.attn.c_attn.bias (v): you have no bias for k, v here; the checkpoint",
        "missing-bias at h.*.attn.c_proj.bias: you have no bias here; the checkpoint's is not zero (norm ",
        "layernorm-without-affine at ln_f.weight: your norm has no scale; the checkpoint's is not one (off by ",
        "missing-bias at ln_f.bias: your norm has no shift; the checkpoint's is not zero (norm ",
    ):
        assert sum(line.startswith(begin) for line in lines) == 1, (begin, lines)


def test_what_has_no_effect_is_not_missed() -> None:
    """Softmax does not see what is added to all scores of a query; a scale of one, or a shift of zero, does nothing."""
    module = Port()
    module.last = nn.LayerNorm(20, elementwise_affine=False)
    for block in module.blocks:
        block.k = nn.Linear(20, 20, bias=False)
    report = load_into(module, checkpoint(ln_f__weight=1.0, ln_f__bias=0.0))
    assert report.ok
    assert report.unused["h.0.attn.c_attn.bias"] == "k: without effect"
    assert report.unused["ln_f.bias"] == "all of it: without effect"


class Stateful(Port):
    """A module that counts its calls, caches a mask in its weights' dtype, keeps a running buffer, and has dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.mask = 0, None
        self.register_buffer("seen", torch.zeros(3))
        self.dropout = nn.Dropout(0.5)

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        self.seen += ids.float().mean()
        if self.mask is None:
            self.mask = torch.ones(1, dtype=self.words.weight.dtype)
        return self.dropout(super().forward(ids)) * self.mask


@pytest.mark.parametrize("fails", [False, True])
def test_all_is_put_back_but_the_weights(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A float64 mask in a cache breaks the next call in float32; a module left in eval mode trains without dropout."""
    module = Stateful().train()
    module.blocks[1].eval()
    module.words.weight.requires_grad_(False)
    identities = [
        (parameter, parameter.data_ptr(), parameter.dtype, parameter.requires_grad) for parameter in module.parameters()
    ]
    modes = [part.training for part in module.modules()]
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    generator = torch.get_rng_state()
    if fails:
        monkeypatch.setattr(LogitsCheck, "judge", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            load_into(module, checkpoint())
        assert all(torch.equal(tensor, weights[name]) for name, tensor in module.state_dict().items())
    else:
        assert load_into(module, checkpoint()).ok
        assert not torch.equal(module.last.weight, weights["last.weight"])
    assert [(p, p.data_ptr(), p.dtype, p.requires_grad) for p in module.parameters()] == identities
    assert [part.training for part in module.modules()] == modes
    assert (module.calls, module.mask, module.seen.tolist()) == (0, None, [0, 0, 0])
    assert torch.equal(torch.get_rng_state(), generator)
    module.eval()(torch.tensor([[1, 2]]))
    assert module.mask.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_module_keeps_its_dtype(dtype: torch.dtype) -> None:
    """The check runs in float64; the weights must be rounded once, from the checkpoint to the module's dtype."""
    model, module = checkpoint(), Port().to(dtype)
    assert load_into(module, model).ok
    assert torch.equal(module.places.weight, model.wpe.weight.to(dtype))


class Shared(nn.Linear):
    """One head's projection, which every head computes."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super(Shared, self).forward(x) for _ in range(CONFIG.n_head)], -1)


def test_heads_that_compute_with_the_same_weights_share_them() -> None:
    """A stranger's heads all computed with the first one's: as each result was another, nothing was said."""
    module = Port()
    for block in module.blocks:
        block.q, block.k, block.v = (Shared(20, 20 // CONFIG.n_head) for _ in "qkv")
    words = "(q), h.*.attn.c_attn (k), h.*.attn.c_attn (v): your attention's 4 heads share 1 head of queries, keys and values"
    assert sum(words in problem for problem in load_into(module, checkpoint()).problems) == 1


class OnlyFloat32(Port):
    def forward(self, ids: Tensor) -> Tensor:
        if self.words.weight.dtype != torch.float32:
            raise TypeError("float32, please")
        return super().forward(ids)


@pytest.mark.parametrize("right", [True, False])
def test_a_module_that_refuses_float64_is_judged_by_its_rounding(right: bool) -> None:
    """Its float32 error may be about as large as our model's, not much larger."""
    module = OnlyFloat32()
    if not right:
        module.blocks[1].feed = lambda x: module.blocks[1].down(F.gelu(module.blocks[1].up(x)))
    report = load_into(module, checkpoint())
    assert report.logits_error is None
    assert report.ok == right
    assert "in float32" in report.logits_note
    assert "(in float64 yours fails: TypeError: float32, please (test_load_into.py, line" in report.logits_note


def test_a_constant_in_float32_is_distinguished_from_a_fault() -> None:
    """The GELU of a well-known book takes the square root of 2/pi in float32: an error of 1e-9, with the right formula."""
    module = Port()
    module.register_forward_hook(lambda _, given, logits: logits * torch.tensor(1 / 3) * 3)
    report = load_into(module, checkpoint())
    assert not report.ok
    assert 1e-10 < report.logits_error < 1e-6
    assert "as if it kept a constant in float32" in sentences(report)


class Made(nn.Module):
    """A function of some parts and the ids, as a module."""

    def __init__(self, function: Callable[["Made", Tensor], object], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, ids: Tensor) -> object:
        return self.function(self, ids)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("gpt2", "load_into fills a torch.nn.Module, and was given str; build the module first"),
        (nn.Embedding(67, 67), "Embedding: nothing in its forward weighs projections of the tokens by one another"),
        (nn.Linear(4, 4), "Linear: its forward fails on ids of shape (2, 5): RuntimeError"),
        (nn.Embedding(4, 4), "Embedding: its forward fails on ids of shape (2, 5): IndexError: index out of range in self"),
        (
            Made(lambda m, ids: None, table=nn.Embedding(67, 20)),
            "Made: its forward fails on ids of shape (2, 5): ValueError: its forward returns NoneType with no logits in it",
        ),
        (Made(lambda m, ids: torch.ones(67, 20)[ids]), "Made: it has no parameters to fill; register its weights"),
        (nn.Linear(4, 4, device="meta"), "Linear: its parameters are on the meta device and hold nothing; build it on the cpu"),
        (nn.Sequential(nn.LazyLinear(4)), "Sequential: its parameters have no shapes yet, and its forward fails"),
    ],
)
def test_a_module_that_is_not_gpt2_is_refused_in_one_line(module: nn.Module, message: str) -> None:
    """The message must say why the module was not filled."""
    assert refusal(load_into, module, checkpoint()).startswith(message)


def test_a_model_like_gpt2_is_refused_with_the_differences() -> None:
    """A gated feed-forward, RMS norms, no positions: the report lists the differences in sentences, without a traceback."""
    module = Port(replace(CONFIG, n_layer=1))
    (block,) = module.blocks
    block.norm_1, block.norm_2, module.last, block.gate = nn.RMSNorm(20), nn.RMSNorm(20), nn.RMSNorm(20), nn.Linear(20, 52)
    block.feed = lambda x: block.down(F.silu(block.gate(x)) * block.up(x))
    module.embed = lambda ids: module.words(ids)
    report = load_into(module, checkpoint())
    assert not report.ok
    assert "layer-missing at h.1: your forward runs 1 of the checkpoint's 2 blocks" in report.problems
    assert "position-missing at wpe: your module has no learned positions" in report.problems


@pytest.mark.parametrize(
    ("port", "name", "sources", "words"),
    [
        ("heads", "all_blocks.1.sa.heads.3.query.weight", "h.1.attn.c_attn.weight", "columns 15:20, transposed"),
        ("lazy", "head.bias", "", "zeros"),
        ("einsum3d", "blocks.0.attn.W_K", "h.0.attn.c_attn.weight", "columns 20:40, in another order"),
        ("interleaved", "layers.0.query_key_value.bias", "h.0.attn.c_attn.bias", "in another order"),
        ("centred", "final_norm.gamma", "ln_f.weight", "none, less 1"),
        ("centred", "layers.0.to_out.weight", "h.0.attn.c_proj.weight", "transposed, divided by 0.2236"),
    ],
)
def test_transformations_in_words(port: str, name: str, sources: str, words: str) -> None:
    """The words must say which part of the checkpoint's tensor it is, and whether it was turned."""
    row = next(row for row in report_of(port).rows if row.name == name)
    assert row.sources == tuple(sources.split())
    assert row.transformation == words


def test_parameters_that_keras_registers_when_it_is_asked() -> None:
    """KerasHub's GPT2CausalLM loses what keras registered: it was told that nothing looks up a table of parameters."""

    class Late(Port):
        def _track_variables(self) -> None:
            self._modules["words"] = vars(self)["words"]

    module = Late()
    vars(module)["words"] = module._modules.pop("words")
    assert load_into(module, checkpoint()).ok


def test_the_table_and_the_json() -> None:
    """The table groups parameters with the same transformation; the JSON lists each."""
    report = report_of("no_out_bias")
    table = report.table()
    assert "✗  missing-bias at h.*.attn.c_proj.bias: you have no bias here" in table
    assert "NOT EQUAL: the logits differ, by what your module lacks (worst error" in table
    assert "h.*.mlp.c_fc.weight" in table
    body = json.loads(report.to_json())
    assert (body["ok"], len(body["rows"])) == (False, len(report.rows))
    assert body["unused"]["h.1.attn.c_proj.bias"] == "all of it"
    report = load_into(Port(), checkpoint())
    assert "\nEQUAL: the logits agree with our model's" in report.table()
    rows = {row.name: (row.sources, row.transformation) for row in report.rows}
    assert set(rows) == {name for name, _ in Port().named_parameters()}
    assert rows["blocks.1.k.weight"] == (("h.1.attn.c_attn.weight",), "columns 20:40, transposed")


def test_a_name_is_as_good_as_a_model() -> None:
    """A model may be given by name; the default is the embedded checkpoint."""
    module = PORTS["nano"].build(gpt2.load("shakespeare-mini").config)
    report = load_into(module)
    assert (report.ok, report.checkpoint, report.module) == (True, "shakespeare-mini", type(module).__name__)
    with pytest.raises(InputError, match="no-such-model"):
        load_into(module, "no-such-model", offline=True)


def test_a_training_step_s_leftovers_are_no_obstacle() -> None:
    """A module with gradients, optimizer state and a kept activation must be filled too."""
    module = Port()
    optimizer = torch.optim.AdamW(module.parameters())
    module.kept = module(torch.arange(6).view(1, 6))
    module.kept.sum().backward()
    optimizer.step()
    assert load_into(module, checkpoint()).ok
    optimizer.step()


@pytest.mark.parametrize("value", [None, 0.0, 0.5])
def test_a_buffer_is_in_the_way_only_if_it_changes_something(value: float | None) -> None:
    """TransformerLens keeps a buffer of zeros as the head's bias: the report must still be ok. None: positions are the buffer."""
    module = Port()
    if value is None:
        whose = "your wpe (places.table)"
        module.places, module.embed = nn.Module(), lambda ids: module.words(ids) + module.places.table[: ids.shape[1]]
        module.places.register_buffer("table", torch.randn(CONFIG.n_positions, CONFIG.n_embd))
    else:
        whose = "your head.bias (b_U)"
        module.register_buffer("b_U", torch.full((CONFIG.vocab_size,), value))
        module.register_forward_hook(lambda _, args, logits: logits + module.b_U)
    before = copy.deepcopy(dict(module.named_buffers()))
    report = load_into(module, checkpoint())
    assert report.ok == (value == 0)
    sentence = f"{whose} is a buffer and no parameter: it is left as it is"
    assert sentence in (report.notes if value == 0 else report.problems)
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())
