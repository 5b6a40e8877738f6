"""verify: it accepts equal models, and each of its checks refuses a model that differs."""

import itertools
import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import forks, imprecise, torch_layouts
from support.broken_models import CONTROLS
from support.commands import refusal
from support.oracle import assert_same
from support.pages import assert_whole_by_itself
from support.random_models import write_checkpoint
from torch import nn

import gpt2
from gpt2.checkpoint.checkpoint import open_path
from gpt2.cli.main import main
from gpt2.config import ACTIVATIONS, GPT2Config
from gpt2.kv_cache import KVCache
from gpt2.model import GPT2, eager_attention, sdpa_attention
from gpt2.parity import run, training
from gpt2.parity.checks import Probe, Subject
from gpt2.parity.reference import load_reference
from gpt2.parity.run import verify


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def broken(control: Callable[[GPT2], None]) -> Callable[[Path, torch.dtype | None], GPT2]:
    def build(path: Path, dtype: torch.dtype | None) -> GPT2:
        model = open_path(path).load(dtype)
        control(model)
        return model

    return build


def failing(report: gpt2.Report) -> list[str]:
    return [check.id for check in report.checks if not check.ok]


@pytest.fixture(scope="module")
def built() -> list[GPT2]:
    """The models that the report is of."""
    return []


@pytest.fixture(scope="module")
def report(checkpoint: Path, built: list[GPT2]) -> gpt2.Report:
    return verify(str(checkpoint), seed=3, build=broken(built.append))


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong model is refused with few random errors already; verify draws 8 times as many before it says so."""
    monkeypatch.setattr(run, "MORE_DRAWS", 1)


@pytest.mark.kernels
def test_an_honest_model_is_equal(report: gpt2.Report) -> None:
    """For a correct model every check must pass, and none may be skipped or empty."""
    assert failing(report) == []
    assert report.ok
    assert report.first_divergence is None
    assert all(check.points and not check.skipped for check in report.checks)
    assert report.coverage == "300 of 300 ids at all 32 positions"


SWITCHES = [
    *({"scale_attn_weights": a, "scale_attn_by_inverse_layer_idx": b} for a in (True, False) for b in (True, False)),
    {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    {"n_head": 1},
    {"n_embd": 17, "n_head": 17, "n_inner": 7},
    {"n_positions": 2, "layer_norm_epsilon": 1e-3},
    {},
]
ROWS = enumerate(zip(ACTIVATIONS, SWITCHES, strict=True))
ROWS = [pytest.param(*row, n in (2, 4, 6, 8), marks=[pytest.mark.slow] * (n % 2)) for n, row in ROWS]


@pytest.mark.parametrize(("activation", "switches", "quick"), ROWS)
def test_every_switch_of_the_config_is_equal(tmp_path: Path, activation: str, switches: dict, quick: bool) -> None:
    """Cerebras' erf GELU and odd heads, stanford-crfm's scales: ports often get these dialects wrong."""
    changes = {"activation_function": activation, "n_inner": 100, "n_head": 3} | switches
    changes["n_layer"] = 1 + switches.get("scale_attn_by_inverse_layer_idx", False)  # which shows in a second block
    assert failing(verify(str(write_checkpoint(tmp_path / "model", **changes)), quick=quick)) == []


def head_permuted(model: GPT2) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().roll(1, 0))


def head_tied(model: GPT2) -> None:
    model.config = replace(model.config, tie_word_embeddings=True)
    del model.lm_head


def gradient_doubled(name: str, model: GPT2) -> None:
    model.get_parameter(name).register_hook(lambda gradient: 2 * gradient)


@pytest.mark.parametrize(
    ("control", "first"),
    [
        (head_permuted, "lm_head.weight"),
        (head_tied, "lm_head.weight (tied)"),
        (partial(gradient_doubled, "lm_head.weight"), "lm_head.weight"),
        (partial(gradient_doubled, "wte.weight"), "wte.weight"),
    ],
)
def test_a_wrong_head_of_its_own_is_refused(tmp_path: Path, control: Callable, first: str) -> None:
    """A head that a port ties, or loads in another order, has the right shape."""
    untied = str(write_checkpoint(tmp_path / "model", tie_word_embeddings=False))
    assert verify(untied, build=broken(control)).first_divergence.name == first


def test_the_values_decide_whether_a_head_is_tied(tmp_path: Path) -> None:
    """The config is wrong about it in published checkpoints, either way; transformers compares the values too."""
    untied, tied = (write_checkpoint(tmp_path / str(tie), tie_word_embeddings=tie) for tie in (False, True))
    for folder, says in ((untied, True), (tied, False)):
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": says}))
    state = load_file(tied / "model.safetensors")
    save_file(state | {"lm_head.weight": state["transformer.wte.weight"].clone()}, tied / "model.safetensors", {"format": "pt"})
    for folder, is_tied in ((untied, False), (tied, True)):
        assert open_path(folder).load().config.tie_word_embeddings is is_tied
        assert failing(verify(str(folder), quick=is_tied)) == []


@pytest.mark.parametrize("name", CONTROLS)
def test_the_ten_controls_are_refused_at_the_right_point(checkpoint: Path, name: str) -> None:
    """The ten faults of real ports: each must be refused, at the right point."""
    control, place = CONTROLS[name]
    report = verify(str(checkpoint), build=broken(control), quick=True)
    assert not report.ok
    assert report.first_divergence.name == place
    assert json.loads(report.to_json())["first_divergence"]["point"] == place


def fused_path_without_mask(model: GPT2) -> None:
    """The traced path is right and the default path wrong: a trace alone cannot show it."""

    def unmasked(q, k, v, mask, scale, dropout):
        return sdpa_attention(q, k, v, torch.ones(q.size(-2), k.size(-2), dtype=torch.bool), scale, dropout)

    def swap(attention: nn.Module, old: Callable, new: Callable) -> None:
        attention.attend = new if attention.attend is old else attention.attend

    for block in model.h:  # a trace replaces the fused path by its own
        block.attn.register_forward_pre_hook(lambda attention, _: swap(attention, sdpa_attention, unmasked))
        block.attn.register_forward_hook(lambda attention, *_: swap(attention, unmasked, sdpa_attention))


def attending(change: Callable[..., tuple[Any, ...]]) -> Callable[[GPT2], object]:
    """A control: attention of what ``change`` makes of queries, keys, values and the mask."""

    def attend(q, k, v, mask, scale, dropout):
        return eager_attention(*change(q, k, v, mask), scale, dropout)

    return lambda model: model.use_attention(attend)


@attending
def forgetful_cache(q, k, v, mask):
    """Single tokens do not see the previous one."""
    if q.size(-2) == 1 and k.size(-2) > 1:
        mask = torch.ones(1, k.size(-2), dtype=torch.bool)
        mask[0, -2] = False
    return q, k, v, mask


def padding_takes_positions(model: GPT2) -> None:
    """Positions counted from the start of the row, padding included: the most common fault of batched ports."""
    original = model.wpe.forward
    model.wpe.forward = lambda positions: original(torch.arange(positions.size(-1)) if positions.ndim == 2 else positions)


def gradient_stopped(model: GPT2) -> None:
    """A detached residual: the forward pass is right, the training is not."""
    model.h[0].mlp.register_forward_hook(lambda module, args, output: output.detach())


@attending
def every_row_reads_the_first(q, k, v, mask):
    """A cache that mixes up the rows of a batch: a run with one row cannot show it."""
    if q.size(-2) != k.size(-2):
        k, v = k[:1].expand_as(k), v[:1].expand_as(v)
    return q, k, v, mask


def no_softmax(model: GPT2) -> None:
    """Attention weights without a softmax call: some points of the trace are missing."""

    def attend(q, k, v, mask, scale, dropout):
        causal = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril(k.size(-2) - q.size(-2))
        scores = (q @ k.mT * scale).masked_fill(~causal, -torch.inf).exp()
        return scores / scores.sum(-1, keepdim=True) @ v

    model.use_attention(attend)


def gradient_cut_late(model: GPT2) -> None:
    """No gradient past the first positions: short training sequences do not reach them."""
    model.ln_f.register_forward_hook(
        lambda module, args, y: torch.cat((y[:, :-1], y[:, -1:].detach()), 1) if y.size(1) == 32 else y
    )


@attending
def long_cache_forgets(q, k, v, mask):
    """Behind more than 40 tokens, the cache has lost the first eight."""
    if k.size(-2) > max(40, q.size(-2)):
        v = torch.cat((torch.zeros_like(v[..., :8, :]), v[..., 8:, :]), -2)
    return q, k, v, mask


@attending
def coarse_behind_40_tokens(q, k, v, mask):
    """Right in float64; in float32, a long text is computed with values in bfloat16."""
    return q, k, v.bfloat16().float() if v.dtype == torch.float32 and k.size(-2) > 40 else v, mask


def off_without_a_cache(model: GPT2) -> None:
    """Off by less than float32 rounds, only where a long text is read without a cache."""
    hidden = model.hidden

    def without(ids: torch.Tensor, *, cache: KVCache | None = None, **rest: Any) -> torch.Tensor:
        found = hidden(ids, cache=cache, **rest)
        return found * (1 + 1e-9) if cache is None and ids.size(1) > 40 else found

    model.hidden = without


@pytest.mark.parametrize(
    ("control", "must_fail"),
    [
        (lambda model: None, []),
        (long_cache_forgets, ["cache"]),
        (coarse_behind_40_tokens, ["rounding"]),
        (off_without_a_cache, ["logits"]),
    ],
)
@pytest.mark.kernels
def test_positions_behind_the_traced_rows_are_judged(
    tmp_path: Path, control: Callable, must_fail: list[str], monkeypatch
) -> None:
    """All positions up to the context length, cached and in the dtype: the traced rows have 32 tokens, a context up to 1,024."""
    checkpoint = write_checkpoint(tmp_path / "model", n_positions=64)
    monkeypatch.setattr(run, "MORE_DRAWS", 1 if must_fail else run.MORE_DRAWS)
    assert failing(verify(str(checkpoint), build=broken(control), quick=True, keep_going=True)) == must_fail


def other_row(row: int, model: GPT2) -> None:
    original = model.wpe.forward
    model.wpe.forward = lambda positions: original(torch.where(positions == row, 0, positions))


@attending
def mask_of_long_rows(q, k, v, mask):
    """Behind 512 tokens, in float32 alone, one query does not see one key."""
    if q.size(-2) > 512 and q.dtype == torch.float32:
        mask = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril()
        mask[600, 100] = False
    return q, k, v, mask


@pytest.mark.parametrize(
    ("control", "check", "place"),
    [
        (partial(other_row, 600), "logits", "logits (window 0, 512 to 639)"),
        (mask_of_long_rows, "rounding", "ln_f (window 0, 512 to 639)"),
    ],
)
@pytest.mark.usefixtures("few_draws")
def test_a_late_position_is_judged_by_itself(tmp_path: Path, control: Callable, check: str, place: str, monkeypatch) -> None:
    """What rounding explains is known of the first positions: a fault that begins far behind must not hide in it."""
    monkeypatch.setattr(run, "gradients", lambda subject: None)
    monkeypatch.setattr(run, "rounded_gradients", lambda subject: None)
    long = str(write_checkpoint(tmp_path / "model", n_positions=640, n_layer=1, n_embd=16, n_head=2))
    report = verify(long, build=broken(control))
    assert report.first_divergence.name == place
    assert [point.name for point in report.check(check).points if not point.ok] == [place]


def test_what_a_few_sequences_leave_open_is_decided_by_all(checkpoint: Path, report: gpt2.Report, monkeypatch) -> None:
    """A parameter that the first sequences do not decide must not be left out, nor one that they decide appear twice."""
    monkeypatch.setattr(training, "TRAINING_RATIO", 0.0)  # the first sequences decide nothing
    again = verify(str(checkpoint), seed=3)
    assert failing(again) == []
    for check in ("loss-rounding", "gradients-rounding"):
        names, few = ([point.name for point in each.check(check).points] for each in (again, report))
        assert sorted(names) == sorted(few)
        assert len(set(names)) == len(names)
    errors = [[point.error for point in each.check("gradients-rounding").points] for each in (again, report)]
    assert errors[0] != errors[1]


def test_a_model_in_memory_is_verified_as_it_computes(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one's own training loop there is a model and no name; its own forward pass is judged, not a reloaded copy's."""
    model = gpt2.load(str(checkpoint))
    report = verify(model, quick=True)
    assert report.ok
    assert report.model == model.name
    partial(imprecise.cache, torch.bfloat16)(model)
    monkeypatch.setattr(run, "MORE_DRAWS", 1)
    assert failing(verify(model, quick=True, keep_going=True)) == ["rounding"]
    assert "device takes a name" in refusal(verify, model, device="cpu")
    assert "a model's name is a text or a path, and this is list" in refusal(verify, [model])


@pytest.mark.slow
def test_more_random_errors_decide_where_few_speak_against_a_model(checkpoint: Path, monkeypatch) -> None:
    """Five of 40 right models with weights of N(0, 1) were refused: their few random errors were small ones."""
    sizes = []

    def noisily(subject: Subject, *args: Any, original: Callable[..., Any] = Subject.noisily, **kwargs: Any) -> Any:
        sizes.append(subject.draws)
        lucky = replace(subject, dtype=torch.float64) if subject.draws == 1 else subject
        return original(lucky, *args, **kwargs)

    monkeypatch.setattr(Subject, "noisily", noisily)
    monkeypatch.setattr(run, "MORE_DRAWS", 3)
    assert verify(str(checkpoint), keep_going=True).ok
    assert sizes.count(run.MORE_DRAWS) > sizes.count(1) > 2
    assert failing(verify(str(checkpoint), build=broken(partial(imprecise.cache, torch.bfloat16)))) == ["rounding"]


def test_quick_leaves_out_training_and_long_texts_and_says_so(tmp_path: Path) -> None:
    """An EQUAL without gradients must say so, and a report of a short text must not claim all positions."""
    report = verify(str(write_checkpoint(tmp_path / "model", n_positions=160)), quick=True)
    assert (report.ok, report.table(80).count("not run: quick")) == (True, 6)  # it was broken over two lines
    assert report.coverage.endswith("ids at the first 128 positions")
    assert report.check("logits").title == "a short text"
    assert report.check("cache").points[-1].name == "ln_f (window 0, 0 to 127)"
    left_out = [check.id for check in report.checks if check.skipped]
    assert left_out == ["loss", "gradients", "adamw", "loss-rounding", "gradients-rounding", "adamw-rounding"]
    assert "at every point that was run; not run: loss, gradients" in " ".join(report.table(width=200).split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("control", "fails", "must_pass"),
    [
        (
            partial(imprecise.gradients, imprecise.off(1e-3)),
            {"gradients-rounding": "wte.weight (head)", "adamw-rounding": "ln_f (all parameters)"},
            {"gradients", "adamw"},
        ),
        (every_row_reads_the_first, {"padding": "logits (padded rows, cached)"}, {"activations"}),
        (no_softmax, {"activations": "h.0.attn.scores"}, {"logits"}),
        (gradient_cut_late, {"gradients": "ln_f.weight"}, {"activations"}),
        (lambda model: [setattr(block.mlp, "activation", torch.tanh) for block in model.h], {"loss": "loss"}, {"weights"}),
        (
            partial(imprecise.attention, qk=imprecise.to(torch.bfloat16), v=imprecise.to(torch.bfloat16)),
            {"rounding": "h.0.attn.scores", "loss-rounding": "loss"},
            {"activations", "loss"},
        ),
        (fused_path_without_mask, {"logits": "logits (window 0, 0 to 31)"}, {"activations"}),
        (
            forgetful_cache,
            {"cache": "logits (single tokens)", "text": "text (generated with the cache)"},
            {"activations", "logits"},
        ),
        (padding_takes_positions, {"padding": "logits (padded rows)"}, {"cache"}),
        (gradient_stopped, {"gradients": "h.0.ln_1.weight", "adamw": "h.0.ln_1.weight"}, {"loss", "rounding"}),
    ],
)
@pytest.mark.usefixtures("few_draws")
def test_every_check_can_fail_alone(checkpoint: Path, control: Callable, fails: dict[str, str], must_pass: set[str]) -> None:
    """Negative controls: for each check, a broken model fails that check at the point where it is broken, and not another."""
    report = verify(str(checkpoint), build=broken(control), keep_going=True)
    for check, at in fails.items():
        assert next(point.name for point in report.check(check).points if not point.ok) == at
    assert not must_pass & {*failing(report)}


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws")
def test_what_adamw_moved_is_judged_by_how_far_it_moved(checkpoint: Path) -> None:
    """A parameter moves little in a step: relative to its size, a wrong step looks a hundred times too small."""

    def too_far(model: GPT2) -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: 1.001 * gradient)

    checks = {check.id: check for check in verify(str(checkpoint), build=broken(too_far), keep_going=True).checks}
    norms = [point.error for point in checks["adamw"].points if ".ln_" in point.name and point.name.endswith("weight")]
    blocks = [point.error for point in checks["adamw-rounding"].points]
    assert norms
    assert blocks
    assert all(1e-4 < error < 1.1e-3 for error in norms + blocks), (norms, blocks)


@pytest.mark.kernels
def test_bfloat16_is_judged_by_bfloat16(checkpoint: Path) -> None:
    """A tolerance for float32 would refuse every correct bfloat16 model; one for bfloat16 in float32 would pass bugs."""
    report = verify(f"{checkpoint}:bf16")
    assert report.environment.dtype == "bfloat16"
    assert report.check("rounding").worst.reference_error > 1e-4
    assert failing(report) == []


def test_the_report_says_what_it_takes_to_rerun_it(report: gpt2.Report, tmp_path: Path, in_a_notebook: None) -> None:
    """The report needs versions, hashes and seed to repeat the run, in strict JSON, and the verdict in HTML."""
    body = json.loads(report.to_json())
    assert (body["ok"], body["verdict"], body["seed"]) == (True, "equal", 3)
    assert set(body["files"]) >= {"config.json", "model.safetensors", "vocab.json", "merges.txt"}
    assert torch.__version__.startswith(body["environment"]["versions"]["torch"])  # without a local suffix +cu130
    assert {check["id"] for check in body["checks"]} >= {"weights", "activations", "rounding", "gradients", "tokens"}
    report.save_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.index("EQUAL") < page.index("<td>")  # the verdict first, then the tables
    assert page.count("<table") == 2
    assert_whole_by_itself(page)  # it was a terminal's text, without the dark colours of the others
    assert "h.1" in report.table(width=80)
    assert "cannot be written" in refusal(report.save_html, tmp_path / "no" / "such" / "folder.html")


def block_run_twice(model: GPT2) -> None:
    once = model.h[0].forward
    model.h[0].forward = lambda x, mask=None, cache=None: once(once(x, mask, cache), mask, cache)


def order_swapped(model: GPT2) -> None:
    """Each block has its own weights under its own name; only the order of the calls is wrong."""
    first, second = model.h._modules.items()
    model.h._modules.clear()
    model.h._modules.update([second, first])


def head_without_gradient(model: GPT2) -> None:
    model.head = lambda hidden: torch.nn.functional.linear(hidden, model.wte.weight.detach())


def lookup_without_gradient(model: GPT2) -> None:
    model.wte.forward = lambda ids: torch.nn.functional.embedding(ids, model.wte.weight.detach())


def tied_weight_counted_twice(model: GPT2) -> None:
    """Every gradient is right, and clipping takes the tied matrix for two parameters."""
    once = model.parameters
    model.parameters = lambda recurse=True: itertools.chain(once(recurse), [model.wte.weight])


def parameter_hidden(model: GPT2) -> None:
    """Every gradient is right, and neither clipping nor an optimizer sees one parameter."""
    listed = model.parameters
    model.parameters = lambda recurse=True: (each for each in listed(recurse) if each is not model.ln_f.bias)


@pytest.mark.parametrize(
    ("control", "first"),
    [
        (block_run_twice, "h.0.ln_1"),
        (order_swapped, "embed"),  # the input of h.0 is not the embeddings
        (head_without_gradient, "wte.weight (head)"),
        (lookup_without_gradient, "wte.weight (lookup)"),
        (tied_weight_counted_twice, "norm, as clipping computes it"),
        (parameter_hidden, "norm, as clipping computes it"),
    ],
)
def test_what_only_the_whole_chain_shows_is_refused(checkpoint: Path, control: Callable, first: str) -> None:
    """Each block is right by itself: a judge that takes them one at a time would accept these."""
    report = verify(str(checkpoint), build=broken(control))
    assert not report.ok
    assert report.first_divergence.name == first


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws")
def test_it_stops_at_the_first_difference(checkpoint: Path) -> None:
    """Ten minutes of further checks must not delay the answer; what was not done must not look done."""
    build = broken(block_run_twice)
    short, long = (verify(str(checkpoint), build=build, keep_going=keep_going) for keep_going in (False, True))
    assert short.first_divergence == long.first_divergence
    few, all_of_them = ({point.name for point in each.check("activations").points} for each in (short, long))
    assert few < all_of_them
    assert [check.id for check in long.checks if check.skipped] == []
    assert short.check("gradients").skipped
    assert not short.check("gradients").points
    body = json.loads(short.to_json())
    assert (body["verdict"], body["stopped"]) == ("mismatch", "stopped at the first difference")
    assert "gradients" in body["skipped"]


def test_ctrl_c_leaves_what_was_found(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Minutes of work were lost; and a report of half the checks must not say EQUAL. The signal comes while a thread computes."""

    def interrupting(model: GPT2) -> None:
        def press(gradient: torch.Tensor) -> None:
            if gradient.dtype == torch.float32:
                os.kill(os.getpid(), signal.SIGINT)

        model.h[0].ln_1.weight.register_hook(press)

    threads = threading.active_count()
    monkeypatch.setattr(run, "verify", partial(verify, build=broken(interrupting)))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        assert main(["verify", str(checkpoint), "--json", str(tmp_path / "report.json")]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    body = json.loads((tmp_path / "report.json").read_text())
    assert (body["ok"], body["verdict"], body["stopped"]) == (False, "interrupted", "interrupted")
    assert {"gradients-rounding", "adamw-rounding"} <= set(body["skipped"])
    assert not {"activations", "gradients"} & set(body["skipped"])
    assert "INTERRUPTED  no difference so far" in capsys.readouterr().out
    assert threading.active_count() == threads


def test_the_models_are_as_before(checkpoint: Path, report: gpt2.Report, built: list[GPT2]) -> None:
    """A walk that leaves float64 weights, gradients or hooks behind would spoil the next one, and take the memory of a model."""
    fresh = open_path(checkpoint).load().state_dict()
    for model in built:
        assert all(torch.equal(tensor, fresh[name]) for name, tensor in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())
        assert not any("forward" in vars(block) for block in model.h)


def test_the_probe_shows_every_id_and_position_it_claims() -> None:
    """The ids are a permutation, so each occurs; a big model gets as many as the budget allows."""
    probe = Probe.draw(GPT2Config(500, n_positions=64, n_embd=32, n_layer=1, n_head=2), seed=1)
    padded, mask = probe.padded()
    for row, text, real in zip(padded, probe.rows, mask.bool(), strict=True):
        assert torch.equal(row[real], text[: real.sum()])
    assert (probe.windows.shape, probe.windows.unique().numel()) == ((8, 64), 500)
    big = Probe.draw(GPT2Config(), seed=1)
    assert big.windows.size(1) == 1024
    assert 1 <= len(big.windows) < 50


def a_trainers_file(folder: Path) -> Path:
    """transformers opens a file of that name, finds no weights at its top, and draws random ones: our right model differed."""
    write_checkpoint(folder)
    torch.save({"state_dict": load_file(folder / "model.safetensors"), "step": 3}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def a_nanogpt_checkpoint(folder: Path) -> Path:
    """Its matrices are transposed, and it has no tokenizer."""
    torch_layouts.nanogpt(folder / "ckpt.pt")
    return folder / "ckpt.pt"


@pytest.mark.parametrize("write", [pytest.param(a_trainers_file, marks=pytest.mark.slow), a_nanogpt_checkpoint])
def test_what_transformers_cannot_open_is_verified_all_the_same(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    """transformers gets our tensors, the report says so, and a wrong loader is still refused."""
    name = str(write(tmp_path))
    report = verify(name, quick=True)
    assert failing(report) == []
    assert report.reference.endswith("(given our tensors: it cannot open these files itself)")
    build = broken(CONTROLS["one untransposed square c_proj"][0])
    assert {"weights", "activations", "logits"} <= {*failing(verify(name, build=build, quick=True, keep_going=True))}


def test_transformers_counts_padding_unless_it_is_given_positions(checkpoint: Path) -> None:
    """The README says so of this version, and that `diagnose` sees it."""
    ours, theirs = open_path(checkpoint).load(torch.float64), load_reference(checkpoint, torch.float64)
    ids, mask = torch.tensor([[7, 7, 1, 2, 3, 4]]), torch.tensor([[0, 0, 1, 1, 1, 1]])
    with torch.no_grad():
        alone, silently = theirs(ids[:, 2:]).logits, theirs(ids, attention_mask=mask).logits[:, 2:]
        told = theirs(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits[:, 2:]
        assert_same(ours(ids, attention_mask=mask)[:, 2:], alone)
    assert_same(told, alone)
    assert (silently - alone).norm() > 0.1 * alone.norm()
    assert any("your positions count the padding" in note for note in gpt2.diagnose(theirs, ours).notes)


@pytest.mark.slow
def test_transformers_warns_of_nothing(tmp_path: Path) -> None:
    """It printed that bos_token_id is outside the vocabulary: its own import had set the level of warnings back."""
    gpt2.save(GPT2(GPT2Config(vocab_size=65, n_positions=8, n_embd=8, n_layer=1, n_head=1)), None, tmp_path)
    code = "import pathlib, sys, gpt2.parity.reference as own\nown.load_reference(pathlib.Path(sys.argv[1]), None)"
    assert "transformers]" not in forks.run("-c", code, tmp_path).stderr
