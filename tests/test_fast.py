"""The fast step against the model itself: the same numbers, and never in its place where somebody could tell."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2 import lora
from gpt2.config import GPT2Config
from gpt2.fast import Step, _tanh_gelu_, for_attention, step_of
from gpt2.generation import decode, generate, prefill, stream
from gpt2.kv_cache import KVCache
from gpt2.model import ACTIVATIONS, GPT2, eager_attention

CONFIG = GPT2Config(vocab_size=61, n_positions=16, n_embd=24, n_layer=3, n_head=3, bos_token_id=None, eos_token_id=None)
VARIANTS = [
    *({"activation_function": name} for name in ACTIVATIONS),
    {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    {"scale_attn_weights": False, "n_inner": 40, "layer_norm_epsilon": 1e-3},
    {"n_head": 1, "n_layer": 1},
]


def drawn(config: GPT2Config = CONFIG, dtype: torch.dtype = torch.float64, seed: int = 0) -> GPT2:
    generator = torch.Generator().manual_seed(seed)
    model = GPT2(config, initialise=False).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if ".ln_" in f".{name}" and name.endswith("weight") else 0.0, 0.3, generator=generator)
    return model.to(dtype)


def left_padding(rows: int, length: int) -> Tensor:
    return torch.tensor([[0] * (row % length) + [1] * (length - row % length) for row in range(rows)])


def plainly(model: GPT2, ids: Tensor, cache: KVCache | None = None, mask: Tensor | None = None) -> Tensor:
    """What comes next by the model itself."""
    return model(ids, attention_mask=mask, cache=cache)[:, -1]


@torch.inference_mode()
def both(model: GPT2, rows: int, padded: bool, steps: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Logits of the next tokens by the model and by the step, each with a cache of its own."""
    ids = torch.randint(model.config.vocab_size, (rows, 9), generator=torch.Generator().manual_seed(rows))
    mask, found = left_padding(rows, 5) if padded else None, []
    caches, step = (model.new_cache(rows), model.new_cache(rows)), step_of(model)
    assert step is not None
    found.append((plainly(model, ids[:, :5], caches[0], mask), prefill(model, ids[:, :5], caches[1], mask)))
    if not padded:
        found.append((plainly(model, ids[:, :5]), step(ids[:, :5])))
    for at in range(5, 5 + steps):
        mask = None if mask is None else torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)
        found.append((plainly(model, ids[:, at : at + 1], caches[0], mask), step(ids[:, at : at + 1], caches[1], mask)))
    assert caches[0].length == caches[1].length == 5 + steps
    return found


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("change", VARIANTS, ids=str)
def test_a_step_is_the_model_in_float64(change: dict, padded: bool) -> None:
    """Another activation, scale, epsilon or position than the model's: right for gpt2 and wrong for its relatives."""
    for model_s, step_s in both(drawn(replace(CONFIG, **change)), 3, padded):
        torch.testing.assert_close(step_s, model_s, rtol=0, atol=1e-10 * float(model_s.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 15, 16, 17])
def test_a_step_is_as_precise_as_the_model(rows: int, dtype: torch.dtype) -> None:
    """A head turned the wrong way for some number of rows, or a step that rounds more than the model does."""
    model = drawn(dtype=dtype)
    exact = both(drawn(dtype=dtype).double(), rows, rows % 2 == 1)
    for (model_s, step_s), (truth, _) in zip(both(model, rows, rows % 2 == 1), exact, strict=True):
        scale = truth.abs().max()
        errors = [float((found.double() - truth).square().mean().sqrt() / scale) for found in (model_s, step_s)]
        assert errors[1] <= 1.5 * errors[0]
        assert model_s.dtype == step_s.dtype == dtype


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("change", VARIANTS, ids=str)
def test_many_rows_are_the_model_in_float64(change: dict, every: bool) -> None:
    """What they share memory for is written before it was read, or is as wide as another model's."""
    model = drawn(replace(CONFIG, **change))
    ids = torch.randint(CONFIG.vocab_size, (21, 9), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        step, caches = step_of(model), (model.new_cache(21), model.new_cache(21))
        assert step is not None
        for part in (ids[:, :4], ids[:, 4:]):  # alone, then behind a cache
            truth, found = model(part, cache=caches[0]), step(part, caches[1], every=every)
            truth = truth.flatten(0, 1) if every else truth[:, -1]
            torch.testing.assert_close(found, truth, rtol=0, atol=1e-10 * float(truth.abs().max()))


@pytest.mark.parametrize("rows", [3, 63, 64, 130])
def test_gelu_is_as_precise_for_many_rows(rows: int) -> None:
    """Another function where there are more rows, in its tails, or in the last few of them."""
    x = torch.linspace(-12, 12, rows * 40).view(rows, 40)
    x[-1, :6] = torch.tensor([-3e38, 3e38, -torch.inf, torch.inf, torch.nan, -0.0])
    truth, theirs = (F.gelu(each, approximate="tanh") for each in (x.double(), x))
    ours = _tanh_gelu_(x.clone())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1.5e-6, equal_nan=True)
    real = truth.isfinite() & (truth.abs() < 100)
    errors = [float((each.double() - truth)[real].square().mean().sqrt()) for each in (theirs, ours)]
    assert errors[1] <= 1.5 * errors[0]


def count_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each pass through the model itself reads, from now on."""
    read: list[int] = []
    hidden = GPT2.hidden
    monkeypatch.setattr(
        GPT2, "hidden", lambda self, ids, **settings: (read.append(ids.size(1)), hidden(self, ids, **settings))[1]
    )
    return read


def test_generation_steps_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast path that nothing takes."""
    model = drawn()
    expected = generate(model, [1, 2, 3], 30, temperature=0, use_cache=False)
    read = count_passes(monkeypatch)
    assert generate(model, [1, 2, 3], 30, temperature=0) == expected
    assert read == []
    generate(model, torch.ones(2, 3, dtype=torch.long), 3, attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]]))
    assert read == [3]  # a padded prompt goes the plain way


def hooked(model: GPT2) -> None:
    model.h[1].mlp.c_fc.register_forward_hook(lambda *_: None)


def given_another_forward(model: GPT2) -> None:
    norm = model.h[1].ln_2
    norm.forward = lambda x: nn.LayerNorm.forward(norm, x) * 2


def given_another_head(model: GPT2) -> None:
    model.head = lambda hidden: hidden @ model.wte.weight.t() * -1


def given_another_class(model: GPT2) -> None:
    class Loud(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 3

    model.h[0].ln_1.__class__ = Loud


def adapted(model: GPT2) -> None:
    lora.inject(model, r=2)
    for module in lora.adapters(model).values():
        nn.init.normal_(module.lora_B)
        module.double()


def merged(model: GPT2) -> None:
    adapted(model)
    lora.merge(model)


def read_by_eye(model: GPT2) -> None:
    model.use_attention(lambda q, k, v, mask, scale, dropout: eager_attention(q, k, v, mask, scale / 3, dropout))


def squashed(model: GPT2) -> None:
    model.h[2].mlp.activation = torch.tanh
    model.h[0].ln_1.eps = 0.1


@torch.no_grad()
def trained(model: GPT2) -> None:
    for parameter in model.parameters():
        parameter.add_(0.05 * parameter.sign())


def replaced(model: GPT2) -> None:
    model.load_state_dict(drawn(seed=9).state_dict(), assign=True)


def given_other_modules(model: GPT2) -> None:
    model.h[1] = drawn(seed=5).h[1]
    model.wte = drawn(seed=5).wte


CHANGES = [
    *(given_another_forward, given_another_head, given_another_class, adapted, merged, read_by_eye, squashed),
    *(trained, replaced, given_other_modules),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("when", ["before", "between two texts", "between two tokens"])
def test_what_changes_the_model_changes_the_text(change: Callable[[GPT2], None], when: str) -> None:
    """A text from weights that are no longer the model's, or past a module that somebody put in."""
    model, untouched, ids = drawn(), drawn(), torch.tensor([[1, 2, 3]])
    if when == "between two texts":
        generate(model, ids, 3, temperature=0)
    expected = ids
    steps = stream(model, ids, 8, temperature=0)
    if when == "between two tokens":
        expected = torch.cat((ids, *(next(steps)[:, None] for _ in range(3))), dim=1)
        cache = model.new_cache()
        with torch.inference_mode():  # what was read before the change stays as it was read
            plainly(model, expected[:, :-1], cache)
    change(model)
    if when == "between two tokens":
        with torch.inference_mode():
            for _ in range(5):
                logits = plainly(model, expected[:, -1:], cache)
                expected = torch.cat((expected, logits.argmax(-1)[:, None]), dim=1)
        assert [int(chosen) for chosen in steps] == expected[0, 6:].tolist()
    else:
        expected = generate(model, ids, 8, temperature=0, use_cache=False)
        assert torch.cat((ids, *(chosen[:, None] for chosen in steps)), dim=1).equal(expected)
        assert not expected.equal(generate(untouched, ids, 8, temperature=0, use_cache=False))


def test_a_hook_is_called_whenever_it_comes() -> None:
    """A hook put on in the middle of a text sees nothing of the rest of it."""
    model, seen = drawn(), []
    steps = stream(model, torch.tensor([[1, 2]]), 9, temperature=0)
    for _ in range(3):
        next(steps)
    handle = model.h[0].mlp.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    next(steps), next(steps)
    assert seen == [(1, 1, 24)] * 2
    handle.remove()
    list(steps)
    assert len(seen) == 2
    handle = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))
    try:
        generate(model, [1, 2], 1, temperature=0)
        once = len(seen) - 2
        generate(model, [1, 2], 2, temperature=0)
    finally:
        handle.remove()
    assert len(seen) - 2 == 3 * once > 30


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_write_that_counts_no_version_is_seen(dtype: torch.dtype) -> None:
    """Optimizers that write through `.data` leave a prepared copy of the head behind them, of the weights before."""
    model, ids = drawn(dtype=dtype), torch.tensor([1])
    with torch.inference_mode():
        for write in (lambda w: w.data.mul_(-1), lambda w: w.data.copy_(drawn(seed=3).wte.weight), lambda w: w[5].fill_(2)):
            with torch.inference_mode(False), torch.no_grad():
                write(model.wte.weight)
            caches = [model.new_cache(), model.new_cache()]
            for cache in caches:
                prefill(model, ids[None], cache)
            expected, found = plainly(model, ids[None], caches[0]), decode(model, ids, caches[1])
            torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))


def test_only_where_nobody_could_tell() -> None:
    """Gradients that stop at the step, dropout that does not happen, float32 under autocast."""
    model = drawn(replace(CONFIG, attn_pdrop=0.5, resid_pdrop=0.5))
    assert step_of(model) is None  # autograd records
    with torch.no_grad():
        first = step_of(model)
        assert isinstance(first, Step)
        assert step_of(model) is first
        with torch.autocast("cpu", torch.bfloat16):
            assert step_of(model) is None
        assert step_of(model.train()) is None
        model.eval()
        model.h[1].attn.train()
        assert step_of(model) is None
        assert step_of(model.eval()) is not None
        hooked(model)
        assert step_of(model) is None

        class Mine(GPT2):
            pass

        assert step_of(Mine(CONFIG).eval()) is None


def test_bad_calls_are_refused_as_the_model_refuses_them() -> None:
    """A 17th position read from whatever lies behind the table, a mask of another length broadcast."""
    model = drawn()
    with torch.inference_mode():
        cache = model.new_cache(2, 20)
        prefill(model, torch.zeros(2, 15, dtype=torch.long), cache)
        with pytest.raises(ValueError, match="attention_mask is"):
            decode(model, torch.zeros(2, dtype=torch.long), cache, torch.ones(2, 1))
        with pytest.raises(ValueError, match="batch of 2; 3 rows"):
            decode(model, torch.zeros(3, dtype=torch.long), cache)
        decode(model, torch.zeros(2, dtype=torch.long), cache)
        with pytest.raises(ValueError, match="do not fit the model's 16 positions"):
            decode(model, torch.zeros(2, dtype=torch.long), cache)


def test_a_model_is_not_kept_alive() -> None:
    """What was prepared for a model, holding the model: gigabytes that never go."""
    import gc
    import weakref

    model = drawn()
    generate(model, [1], 3)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_attention_reads_what_the_processor_is_fast_at() -> None:
    """A cache in another dtype that forgets, or a model that cannot read it once a hook sends it the plain way."""
    model = drawn(dtype=torch.bfloat16)
    with torch.inference_mode():
        cache = model.new_cache(1, 12)
        prefill(model, torch.arange(6)[None], cache)
        wide = for_attention(cache)
        assert wide.keys.dtype == torch.float32
        assert (wide.length, wide.capacity) == (6, 12)
        assert torch.equal(wide.keys[..., :6, :], cache.keys[..., :6, :].float())
        expected = plainly(model, torch.tensor([[7]]), cache)
        assert torch.equal(plainly(model, torch.tensor([[7]]), wide), expected)
    exact = drawn().new_cache()
    assert for_attention(exact) is exact
    steps = stream(model, torch.tensor([[1, 2]]), 20, temperature=0)
    for _ in itertools.islice(steps, 4):
        pass
    hooked(model)
    assert len(list(steps)) == 16
