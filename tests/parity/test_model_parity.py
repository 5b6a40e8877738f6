"""What transformers generates with padding, and where it departs from GPT-2; `test_run.py` compares every config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from support.oracle import assert_same
from torch import Tensor, nn

from gpt2 import diagnose
from gpt2.config import GPT2Config
from gpt2.generation import generate
from gpt2.model import GPT2

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
