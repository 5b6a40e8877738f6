"""Our GPT-2 against transformers' in float64, where rounding stays below 1e-10 and a larger difference is a bug.

Tiny random configs, with transformers' weights. A test's docstring says where transformers 5.23 departs from GPT-2.
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
from support.oracle import assert_same
from torch import Tensor, nn

from gpt2 import diagnose
from gpt2.config import ACTIVATIONS, GPT2Config
from gpt2.generation import generate
from gpt2.model import GPT2, eager_attention, sdpa_attention

TINY = GPT2Config(vocab_size=37, n_positions=9, n_embd=20, n_layer=3, n_head=5, n_inner=33, bos_token_id=None, eos_token_id=None)


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


def pair(hf: ModuleType, config: GPT2Config) -> tuple[GPT2, Any]:
    """Both models of one config, in float64, with transformers' random weights."""
    raw = {k: v for k, v in config.to_hf().items() if k not in ("architectures", "model_type", "dtype", "n_ctx")}
    theirs = hf.GPT2LMHeadModel(hf.GPT2Config(**raw, attn_implementation="sdpa")).double().eval()
    randomise(theirs)
    ours = GPT2(config, initialise=False).double().eval()
    take_theirs(ours, theirs)
    return ours, theirs


def take_theirs(ours: GPT2, theirs: nn.Module) -> None:
    state = theirs.state_dict()
    same = state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
    assert same == ours.config.tie_word_embeddings
    if same:
        del state["lm_head.weight"]
    ours.load_state_dict({name.removeprefix("transformer."): tensor for name, tensor in state.items()})


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


def assert_same_gradients(ours: GPT2, theirs: Any) -> None:
    """Compare the loss and the gradient of every parameter, also of the tied embedding."""
    ids = some_ids(ours.config, 3, ours.config.n_positions)
    losses = []
    for model, logits in ((ours, ours(ids)), (theirs, theirs(ids).logits)):  # transformers computes its loss in float32
        model.zero_grad()
        losses.append(F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
        losses[-1].backward()
    assert_same(losses[0].detach(), losses[1].detach())
    gradients = {name.removeprefix("transformer."): p.grad for name, p in theirs.named_parameters()}
    assert gradients.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        assert_same(parameter.grad, gradients[name])


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
        {"n_embd": 17, "n_head": 17},
        {"vocab_size": 1009},
        {"n_positions": 2},
        {"layer_norm_epsilon": 1e-3},
        {"tie_word_embeddings": False},
    ],
    ids=lambda changes: ",".join(f"{key}={value}" for key, value in changes.items()) or "plain",
)
def test_both_ways_of_attending_forwards_and_backwards(hf: ModuleType, changes: dict) -> None:
    """transformers ignored both scale flags on its sdpa path until early 2026; 5.23 applies them."""
    ours, theirs = pair(hf, replace(TINY, **changes))
    for attend in (sdpa_attention, eager_attention):
        assert_same_models(ours.use_attention(attend), theirs)
        assert_same_gradients(ours, theirs)


def test_greedy_text(hf: ModuleType) -> None:
    """The generated ids of padded rows up to the last position, with our cache and without."""
    config = replace(TINY, n_positions=40, n_embd=40)
    ours, theirs = pair(hf, config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("bias"):
                parameter.mul_(0.1)  # a strong final bias would repeat one id
    take_theirs(ours, theirs)
    ids, mask = some_ids(config, 4, 6), torch.tensor([[0] * n + [1] * (6 - n) for n in (0, 1, 3, 5)])
    settings = hf.GenerationConfig(do_sample=False, max_new_tokens=34, pad_token_id=0, eos_token_id=None)
    expected = theirs.generate(ids, attention_mask=mask, generation_config=settings)
    assert all(len(set(row[6:].tolist())) > 5 for row in expected)
    for cached in (True, False):
        found = generate(ours, ids, 34, temperature=0, attention_mask=mask, use_cache=cached)
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


# Negative controls: small mistakes, which the comparison above must find; tests/parity/test_run.py has the common ones.


SPOILS: dict[str, Callable[[GPT2], object]] = {
    "one bias lost": lambda model: model.h[2].mlp.c_proj.bias.data.zero_(),
    "one vector rounded to float32": lambda model: setattr(norm := model.h[0].ln_1.weight, "data", norm.data.float().double()),
}


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
def test_a_broken_model_is_refused(hf: ModuleType, spoil: Callable[[GPT2], object]) -> None:
    """Negative control: the comparison must refuse a broken model."""
    ours, theirs = pair(hf, TINY)
    assert_same_models(ours, theirs)
    spoil(ours)
    with pytest.raises(AssertionError):
        assert_same_models(ours, theirs)
