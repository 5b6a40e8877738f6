"""Our GPT-2 against transformers' in float64, where rounding stays below 1e-10 and a larger difference is a bug.

Tiny random configs; weights are copied in both directions. A test's docstring says where transformers 5.23 departs from GPT-2.
`tests/test_model.py` compares ours with the papers' formulas, so both files together show which side is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.broken_models import CONTROLS
from support.oracle import assert_same
from torch import Tensor, nn

from gpt2 import diagnose
from gpt2.config import ACTIVATIONS, GPT2Config
from gpt2.generation import generate
from gpt2.model import GPT2, Conv1D, eager_attention, sdpa_attention

TINY = GPT2Config(vocab_size=37, n_positions=9, n_embd=20, n_layer=3, n_head=5, n_inner=33, bos_token_id=None, eos_token_id=None)
PATHS = {"sdpa": sdpa_attention, "eager": eager_attention}


@pytest.fixture(scope="module")
def hf() -> Iterator[ModuleType]:
    """transformers, imported with the Hub disabled: it reads its environment at import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        import transformers

        transformers.logging.set_verbosity_error()
        yield transformers


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Draw every parameter so that it matters: norm weights are not 1, biases not 0, scores far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if ".ln_" in f".{name}" and name.endswith("weight") else 0.0, 0.4, generator=generator)


def empty_pair(hf: ModuleType, config: GPT2Config, attention: str = "sdpa") -> tuple[GPT2, Any]:
    """Both models of one config, in float64, with uninitialised weights."""
    raw = {k: v for k, v in config.to_hf().items() if k not in ("architectures", "model_type", "dtype", "n_ctx")}
    theirs = hf.GPT2LMHeadModel(hf.GPT2Config(**raw, attn_implementation=attention)).double().eval()
    ours = GPT2(config, initialise=False).double().eval()
    return ours, theirs


def take_theirs(ours: GPT2, theirs: nn.Module) -> None:
    state = theirs.state_dict()
    same = state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
    assert same == ours.config.tie_word_embeddings
    if same:
        del state["lm_head.weight"]
    ours.load_state_dict({name.removeprefix("transformer."): tensor for name, tensor in state.items()})


def give_ours(ours: GPT2, theirs: nn.Module) -> None:
    state = {k if k == "lm_head.weight" else f"transformer.{k}": v for k, v in ours.state_dict().items()}
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] * ours.config.tie_word_embeddings, [])


def pair(hf: ModuleType, config: GPT2Config, attention: str = "sdpa") -> tuple[GPT2, Any]:
    ours, theirs = empty_pair(hf, config, attention)
    randomise(theirs)
    take_theirs(ours, theirs)
    return ours, theirs


def some_ids(config: GPT2Config, batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def assert_same_models(ours: GPT2, theirs: Any) -> None:
    """Compare logits at every position and id, the residual stream after every block, and texts of every length."""
    config, blocks = ours.config, []
    ids = some_ids(config, 2, config.n_positions)
    hooks = [block.register_forward_hook(lambda module, args, output: blocks.append(output)) for block in ours.h]
    answer = theirs(ids, output_hidden_states=True)
    found, hidden = ours(ids), ours.hidden(ids)
    for hook in hooks:
        hook.remove()
    *streams, last = answer.hidden_states
    assert len(streams) == config.n_layer
    for block, stream in zip(blocks[: config.n_layer - 1], streams[1:], strict=True):
        assert_same(block, stream)
    assert_same(hidden, last)  # transformers puts ln_f's output in place of the last block's
    assert_same(found, answer.logits)
    for length in range(1, config.n_positions):
        assert_same(ours(ids[:1, :length]), theirs(ids[:1, :length]).logits)


@pytest.mark.parametrize("attention", PATHS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        *({"activation_function": name} for name in ACTIVATIONS),
        *({"scale_attn_weights": a, "scale_attn_by_inverse_layer_idx": b} for a in (True, False) for b in (True, False)),
        {"n_inner": None},
        {"n_inner": 7},
        {"n_layer": 1},
        {"n_head": 1},
        {"n_embd": 21, "n_head": 7},
        {"n_embd": 17, "n_head": 17},
        {"vocab_size": 1},
        {"vocab_size": 1009},
        {"n_positions": 1},
        {"layer_norm_epsilon": 1e-3},
        {"tie_word_embeddings": False},
    ],
    ids=lambda changes: ",".join(f"{key}={value}" for key, value in changes.items()) or "plain",
)
def test_logits_and_streams(hf: ModuleType, changes: dict, attention: str) -> None:
    """transformers ignored both scale flags on its sdpa path until early 2026; 5.23 applies them."""
    config = replace(TINY, **changes)
    ours, theirs = pair(hf, config, attention)
    assert_same_models(ours.use_attention(PATHS[attention]), theirs)


@pytest.mark.parametrize("changes", [{}, {"n_inner": 7}, {"tie_word_embeddings": False}], ids=str)
def test_weights_go_in_the_other_direction_too(hf: ModuleType, changes: dict) -> None:
    """Ours have transformers' names, whatever the config's numbers: a parameter that only we have would be left out above."""
    ours, theirs = empty_pair(hf, replace(TINY, **changes))
    randomise(ours)
    give_ours(ours, theirs)
    assert_same_models(ours, theirs)


def test_upcast_attention(hf: ModuleType) -> None:
    """`reorder_and_upcast_attn` must change rounding only, not the function.

    transformers 5.23 applies it on its eager path only, which computes in float32 and so refuses float64. Its sdpa path
    ignores the flag, which is right in float64. Both paths are compared where they work.
    """
    config = replace(TINY, reorder_and_upcast_attn=True, scale_attn_by_inverse_layer_idx=True)
    ours, theirs = pair(hf, config)
    assert_same_models(ours, theirs)
    ids = some_ids(config, 2, 9)
    _, eager = empty_pair(hf, config, "eager")
    give_ours(ours, eager)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match=r"does not have dtype torch\.float32"):
            eager(ids)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            randomise(ours.double())
            ours.to(dtype)
            give_ours(ours, eager.to(dtype))
            found, expected = ours(ids).double(), eager(ids).logits.double()
            exact = ours.double()(ids)  # of the rounded weights: only the rounding of the arithmetic remains
            our_error, their_error = (found - exact).abs().max(), (expected - exact).abs().max()
            assert 0 < our_error <= 1.5 * their_error, dtype


@pytest.mark.parametrize("attention", PATHS)
@pytest.mark.parametrize(
    "changes",
    [
        *({"activation_function": name} for name in ACTIVATIONS),
        {"scale_attn_by_inverse_layer_idx": True},
        {"n_layer": 1},
        {"tie_word_embeddings": False},
    ],
    ids=lambda changes: next(iter(changes.values())),
)
def test_loss_and_gradients(hf: ModuleType, changes: dict, attention: str) -> None:
    """The forward pass may be right and the backward pass wrong: compare the loss and every gradient, also of the tied
    embedding."""
    config = replace(TINY, **changes)
    ours, theirs = pair(hf, config, attention)
    ids = some_ids(config, 3, 9)
    loss = F.cross_entropy(ours.use_attention(PATHS[attention])(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    logits = theirs(ids).logits[:, :-1]  # transformers computes its loss in float32 for any dtype of the model
    expected = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    expected.backward()
    assert_same(loss.detach(), expected.detach())
    gradients = {name.removeprefix("transformer."): p.grad for name, p in theirs.named_parameters()}
    assert gradients.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        assert_same(parameter.grad, gradients[name])


def their_greedy(hf: ModuleType, theirs: Any, ids: Tensor, mask: Tensor, new: int, use_cache: bool) -> Tensor:
    settings = hf.GenerationConfig(do_sample=False, max_new_tokens=new, pad_token_id=0, eos_token_id=None, use_cache=use_cache)
    return theirs.generate(ids, attention_mask=mask, generation_config=settings)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("padded", [False, True])
def test_greedy_text(hf: ModuleType, padded: bool, use_cache: bool) -> None:
    """The generated ids: a batch, padded or not, with and without cache on each side, up to the last position."""
    config = replace(TINY, n_positions=40, n_embd=40)
    ours, theirs = pair(hf, config)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name.endswith("bias"):
                parameter.mul_(0.1)  # a strong final bias would repeat one id
    give_ours(ours, theirs)
    ids = some_ids(config, 4, 6)
    mask = torch.tensor([[0] * n + [1] * (6 - n) for n in ((0, 1, 3, 5) if padded else (0, 0, 0, 0))])
    expected = their_greedy(hf, theirs, ids, mask, 34, use_cache)
    assert all(len(set(row[6:].tolist())) > 5 for row in expected)
    for cached in (True, False):
        found = generate(ours, ids, 34, temperature=0, attention_mask=mask if padded else None, use_cache=cached)
        assert found.tolist() == expected.tolist()


def test_transformers_counts_padding_unless_it_is_given_positions(hf: ModuleType) -> None:
    """The README says so of this version, and that `diagnose` sees it."""
    ours, theirs = pair(hf, TINY)
    ids, mask = some_ids(TINY, 1, 6), torch.tensor([[0, 0, 1, 1, 1, 1]])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        alone, silently = theirs(ids[:, 2:]).logits, theirs(ids, attention_mask=mask).logits[:, 2:]
        told = theirs(ids, attention_mask=mask, position_ids=positions).logits[:, 2:]
        assert_same(ours(ids, attention_mask=mask)[:, 2:], alone)
    assert_same(told, alone)
    assert (silently - alone).norm() > 0.1 * alone.norm()
    assert any("your positions count the padding" in note for note in diagnose(theirs, ours).notes)


# Negative controls: each makes one common mistake in our model, which the comparison above must find.


def head_off_by_1e_8(model: GPT2) -> None:
    weight = model.wte.weight.detach() * (1 + 1e-8)
    model.head = lambda hidden: hidden @ weight.T


def post_norm(model: GPT2) -> None:
    block = model.h[0]
    block.forward = lambda x, mask=None, cache=None: block.ln_2((y := block.ln_1(x + block.attn(x, mask, cache))) + block.mlp(y))


SPOILS: dict[str, Callable[[GPT2], object]] = {
    **CONTROLS,
    "head off by 1e-8": head_off_by_1e_8,
    "post-norm": post_norm,
    "eps of one norm": lambda model: setattr(model.h[2].ln_1, "eps", 1e-6),
    "one bias lost": lambda model: model.h[2].mlp.c_proj.bias.data.zero_(),
    "one vector rounded to float32": lambda model: setattr(norm := model.h[0].ln_1.weight, "data", norm.data.float().double()),
}
del SPOILS["one bit flipped in one weight"]  # in float64 this is rounding


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
def test_a_broken_model_is_refused(hf: ModuleType, spoil: Callable[[GPT2], object]) -> None:
    """Negative control: the comparison must refuse a broken model."""
    ours, theirs = pair(hf, TINY)
    assert isinstance(ours.h[0].mlp.c_fc, Conv1D)
    assert_same_models(ours, theirs)
    spoil(ours)
    with pytest.raises(AssertionError):
        assert_same_models(ours, theirs)
