"""The decoder computes the model's own numbers, and runs the model itself where the results could differ."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.oracle import assert_same
from support.random_models import random_model
from torch import Tensor, nn

from gpt2 import lora
from gpt2.config import GPT2Config
from gpt2.decoder import Decoder, _tanh_gelu_
from gpt2.generation import generate, stream
from gpt2.kv_cache import KVCache
from gpt2.measure.metrics import relative_error
from gpt2.measure.rounding import FORWARD_RATIO, rounding_noise
from gpt2.model import ACTIVATIONS, GPT2, eager_attention
from gpt2.sampling import Sampling

CONFIG = GPT2Config(vocab_size=61, n_positions=16, n_embd=24, n_layer=3, n_head=3, bos_token_id=None, eos_token_id=None)
VARIANTS = [
    *({"activation_function": name} for name in ACTIVATIONS),
    {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    {"scale_attn_weights": False, "n_inner": 40, "layer_norm_epsilon": 1e-3},
    {"n_head": 1, "n_layer": 1},
    {"tie_word_embeddings": False},
]


def drawn(config: GPT2Config = CONFIG, dtype: torch.dtype = torch.float64, seed: int = 0) -> GPT2:
    return random_model(config, 0.3, dtype=torch.float32, seed=seed).to(dtype)


def left_padding(rows: int, length: int) -> Tensor:
    return torch.tensor([[0] * (row % length) + [1] * (length - row % length) for row in range(rows)])


@torch.no_grad()
def next_logits(model: GPT2, ids: Tensor, cache: KVCache | None = None, mask: Tensor | None = None) -> Tensor:
    """Logits of the next token, from the model itself."""
    return model(ids, attention_mask=mask, cache=cache)[:, -1]


@torch.inference_mode()
def both(model: GPT2, rows: int, padded: bool, steps: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Logits of the next tokens from the model and from the decoder, each with its own cache."""
    ids = torch.randint(model.config.vocab_size, (rows, 9), generator=torch.Generator().manual_seed(rows))
    mask, pairs = left_padding(rows, 5) if padded else None, []
    caches, decoder = (model.new_cache(rows), model.new_cache(rows)), Decoder(model)
    assert decoder.forward_pass is not None
    pairs.append((next_logits(model, ids[:, :5], caches[0], mask), decoder.prefill(ids[:, :5], caches[1], mask)))
    if not padded:
        pairs.append((next_logits(model, ids[:, :5]), decoder.prefill(ids[:, :5])))
    for at in range(5, 5 + steps):
        mask = None if mask is None else torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)
        one = ids[:, at : at + 1]
        pairs.append((next_logits(model, one, caches[0], mask), decoder.decode(one, caches[1], mask)[:, -1]))
    assert caches[0].length == caches[1].length == 5 + steps
    return pairs


@pytest.mark.parametrize(("rows", "padded"), [(3, False), (3, True), (21, False)])
@pytest.mark.parametrize("change", VARIANTS, ids=str)
def test_equals_the_model_in_float64(change: dict, rows: int, padded: bool) -> None:
    """An activation, scale, epsilon or position that is fixed in the decoder is right for gpt2 only; many rows share a buffer."""
    for expected, found in both(drawn(replace(CONFIG, **change)), rows, padded):
        assert_same(found, expected)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 16, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (2, 8, 15, 17))])
def test_as_precise_as_the_model(rows: int, dtype: torch.dtype) -> None:
    """Possible bugs: a head transposed wrongly for some number of rows, or more rounding than in the model."""
    model, padded = drawn(dtype=dtype), rows % 2 == 1
    exact = both(drawn(dtype=dtype).double(), rows, padded)
    with rounding_noise(dtype):
        noisy = both(drawn(dtype=dtype).double(), rows, padded)
    for (model_s, decoder_s), (truth, _), (rounded, _) in zip(both(model, rows, padded), exact, noisy, strict=True):
        explained = relative_error(rounded, truth)
        assert relative_error(decoder_s, truth) <= FORWARD_RATIO * explained
        assert model_s.dtype == decoder_s.dtype == dtype


@pytest.mark.parametrize("parts", [(3, 4), (1, 5, 1), (2, 2, 2, 1)])
def test_a_prompt_may_be_read_in_parts(parts: tuple[int, ...]) -> None:
    """Possible bugs: a part's last token does not see the part's other tokens, or the last block's mask has too many rows."""
    model, ids = drawn(), torch.randint(61, (2, sum(parts)), generator=torch.Generator().manual_seed(0))
    decoder, cache = Decoder(model), model.new_cache(2)
    for part in ids.split(parts, dim=1):
        logits = decoder.prefill(part, cache)
        assert_same(logits, next_logits(model, ids[:, : cache.length]))


@pytest.mark.kernels
@pytest.mark.parametrize("rows", [3, 63, 64, 130])
def test_gelu_is_as_precise_for_many_rows(rows: int) -> None:
    """Possible bugs: the code for many rows computes another function, in its tails or in the last rows."""
    x = torch.linspace(-12, 12, rows * 40).view(rows, 40)
    x[-1, :6] = torch.tensor([-3e38, 3e38, -torch.inf, torch.inf, torch.nan, -0.0])
    truth, theirs = (F.gelu(each, approximate="tanh") for each in (x.double(), x))
    ours = _tanh_gelu_(x.clone())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1.5e-6, equal_nan=True)
    real = truth.isfinite() & (truth.abs() < 100)
    errors = [float((each.double() - truth)[real].square().mean().sqrt()) for each in (theirs, ours)]
    assert errors[1] <= 1.5 * errors[0]


def test_generation_uses_the_fast_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generation must use the decoder, also in the middle of training, where dropout is switched off."""
    model = drawn(replace(CONFIG, attn_pdrop=0.9, resid_pdrop=0.9, embd_pdrop=0.9))
    expected = generate(model, [1, 2, 3], 30, temperature=0, use_cache=False)
    read, hidden = [], GPT2.hidden  # the number of tokens in each pass of the model itself
    monkeypatch.setattr(GPT2, "hidden", lambda self, ids, **rest: read.append(ids.size(1)) or hidden(self, ids, **rest))
    assert generate(model, [1, 2, 3], 30, temperature=0) == expected
    assert generate(model.train(), [1, 2, 3], 30, temperature=0) == expected
    assert read == []
    generate(model, torch.ones(2, 3, dtype=torch.long), 3, attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]]))
    assert read == [3]  # the model itself reads a prompt with padding


# Changes after which a model computes something else than its weights say


class Loud(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 3


def negative_head(model: GPT2) -> None:
    model.head = lambda hidden: hidden @ model.wte.weight.t() * -1


def adapted(model: GPT2) -> GPT2:
    lora.inject(model, r=2)
    for module in lora.adapters(model).values():
        nn.init.normal_(module.lora_B)
        module.double()
    return model


def attention_of_another_scale(model: GPT2) -> None:
    model.use_attention(lambda q, k, v, mask, scale, dropout: eager_attention(q, k, v, mask, scale / 3, dropout))


def another_activation_and_epsilon(model: GPT2) -> None:
    model.h[2].mlp.activation = torch.tanh
    model.h[0].ln_1.eps = 0.1


@torch.no_grad()
def trained(model: GPT2) -> None:
    for parameter in model.parameters():
        parameter.add_(0.05 * parameter.sign())


def other_modules(model: GPT2) -> None:
    model.h[1] = drawn(seed=5).h[1]
    model.wte = drawn(seed=5).wte


CHANGES: dict[str, Callable[[GPT2], object]] = {
    "another forward": lambda model: setattr(model.h[1].mlp, "forward", torch.zeros_like),
    "another head": negative_head,
    "another class": lambda model: setattr(model.h[0].ln_1, "__class__", Loud),
    "a hook": lambda model: model.h[1].mlp.register_forward_hook(lambda module, args, output: -output),
    "adapters": adapted,
    "another attention": attention_of_another_scale,
    "another activation and epsilon": another_activation_and_epsilon,
    "trained": trained,
    "other modules": other_modules,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_changed_model_gives_another_text(change: Callable[[GPT2], object], rows: int) -> None:
    """The text must not come from old weights, and must not skip the user's module, method or hook."""
    model, ids = drawn(), torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])[:rows]
    before = generate(model, ids, 8, temperature=0)
    change(model)
    expected = generate(model, ids, 8, temperature=0, use_cache=False)
    steps = stream(model, ids, 8, Sampling(0))
    assert torch.cat((ids, *(chosen[:, None] for chosen in steps)), dim=1).equal(expected)
    window = ids
    for _ in range(8):  # the same text from the model alone
        window = torch.cat((window, next_logits(model, window).argmax(-1)[:, None]), dim=1)
    assert window.equal(expected)
    assert not expected.equal(before)


def test_the_model_runs_itself_where_the_results_could_differ() -> None:
    """Possible bugs: a subclass's forward is skipped, or float32 is used under autocast. `CHANGES` has the others."""

    class Mine(GPT2):
        pass

    assert Decoder(drawn()).forward_pass is not None
    assert Decoder(Mine(CONFIG)).forward_pass is None
    with torch.autocast("cpu", torch.bfloat16):
        assert Decoder(drawn()).forward_pass is None


def test_a_decoder_serves_many_texts() -> None:
    """A decoder must not keep state from one text to the next."""
    model = drawn(dtype=torch.bfloat16)
    decoder = Decoder(model)
    for prompt in ([1, 2, 3], [5], [6, 7]):
        text = [int(chosen) for chosen in stream(decoder, torch.tensor([prompt]), 20, Sampling(0))]
        assert [*prompt, *text] == generate(model, prompt, 20, temperature=0)


def test_bad_calls_are_refused_as_the_model_refuses_them() -> None:
    """Possible bugs: a 17th position read past the table, or a mask of another length broadcast."""
    model = drawn()
    decoder, cache, one = Decoder(model), model.new_cache(2, 20), torch.zeros(2, 1, dtype=torch.long)
    decoder.prefill(torch.zeros(2, 15, dtype=torch.long), cache)
    with pytest.raises(ValueError, match="attention_mask is"):
        decoder.decode(one, cache, torch.ones(2, 1))
    with pytest.raises(ValueError, match="batch of 2; 3 rows"):
        decoder.decode(torch.zeros(3, 1, dtype=torch.long), cache)
    decoder.decode(one, cache)
    with pytest.raises(ValueError, match="do not fit the model's 16 positions"):
        decoder.decode(one, cache)


def test_a_16_bit_cache_is_converted_for_decoding() -> None:
    """The conversion must keep all tokens, and leave a cache that the model can continue outside inference mode."""
    model = drawn(dtype=torch.bfloat16)
    cache, same, decoder = model.new_cache(1, 12), model.new_cache(1, 12), Decoder(model)
    decoder.prefill(torch.arange(6)[None], cache)
    decoder.prefill(torch.arange(6)[None], same)
    before = cache.keys[..., :6, :].clone()
    found = decoder.decode(torch.tensor([[7]]), cache)
    assert cache.keys.dtype == cache.values.dtype == torch.float32
    assert (cache.length, cache.capacity) == (7, 12)
    assert torch.equal(cache.keys[..., :6, :], before.float())
    with torch.no_grad():
        torch.testing.assert_close(found, model(torch.tensor([[7]]), cache=same), rtol=0.05, atol=0.05)
        assert model(torch.tensor([[8]]), cache=cache).isfinite().all()
    exact, cache = drawn(), drawn().new_cache()
    Decoder(exact).decode(torch.tensor([[7]]), cache)
    assert cache.keys.dtype == torch.float64
