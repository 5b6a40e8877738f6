"""LoRA adapters: they compute the paper's function, and merging makes a plain model of the same function."""

import re

import pytest
import torch
from support.commands import refusal

from gpt2 import GPT2, GPT2Config
from gpt2.lora import PROJECTIONS, TARGETS, adapters, inject, merged

CONFIG = GPT2Config(vocab_size=31, n_positions=16, n_embd=16, n_layer=2, n_head=2)
IDS = torch.arange(16)[None]


def model(dtype: torch.dtype = torch.float64) -> GPT2:
    torch.manual_seed(1)
    return GPT2(CONFIG).to(dtype).eval()


def trained(**settings) -> GPT2:
    """A model whose adapters differ from their initial values."""
    adapted = inject(model(), **settings)
    torch.manual_seed(2)
    with torch.no_grad():
        for module in adapters(adapted).values():
            module.lora_B.normal_(0, 0.1)
    return adapted


def bits(of: GPT2) -> dict[str, bytes]:
    return {name: tensor.clone().view(torch.uint8).numpy().tobytes() for name, tensor in of.state_dict().items()}


def test_training_begins_at_the_model_itself() -> None:
    """If B is not zero at first, a fine-tune starts from a damaged model, and only the loss shows it."""
    assert torch.equal(inject(model())(IDS), model()(IDS))


def test_a_merged_model_is_a_plain_one(tmp_path) -> None:
    adapted = trained()
    before = bits(adapted)
    plain = merged(adapted)
    assert type(plain.h[0].attn.c_attn).__name__ == "Conv1D"
    assert plain.state_dict().keys() == model().state_dict().keys()
    torch.testing.assert_close(plain(IDS), adapted(IDS), rtol=0, atol=1e-12)
    assert (plain(IDS) - model()(IDS)).abs().max() > 1e-3
    assert plain.wte.weight.data_ptr() == adapted.wte.weight.data_ptr()
    assert bits(adapted) == before
    assert merged(plain) is plain


def test_bfloat16_weights_are_merged_in_float32() -> None:
    """A sum in bfloat16 rounds a small change three times instead of once."""
    adapted = trained()
    exact = merged(adapted).h[0].mlp.c_fc.weight
    adapted.h[0].mlp.c_fc.weight.data = adapted.h[0].mlp.c_fc.weight.data.bfloat16()
    adapted.h[0].mlp.c_fc.bias.data = adapted.h[0].mlp.c_fc.bias.data.bfloat16()
    rounded = merged(adapted).h[0].mlp.c_fc.weight
    assert rounded.dtype == torch.bfloat16
    start = adapted.h[0].mlp.c_fc.weight.double()
    assert torch.equal(rounded, (start + (exact - model().h[0].mlp.c_fc.weight)).bfloat16())


def test_dropout_acts_on_the_adapters_while_training_only() -> None:
    adapted = trained(dropout=0.5)
    assert torch.equal(adapted(IDS), adapted(IDS))
    for module in adapted.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for block in adapted.h:
        block.attn.attn_pdrop = 0.0
    adapted.train()
    assert not torch.equal(adapted(IDS), adapted(IDS))


def test_the_same_seed_gives_the_same_adapters() -> None:
    one, same, other = (inject(model(), seed=seed).h[0].attn.c_attn.lora_A for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert 0.9 / 4 < one.abs().max() <= 1 / 4  # within 1/√in, as in PEFT


@pytest.mark.parametrize("target", TARGETS)
def test_targets_are_named_as_in_peft(target: str) -> None:
    """`c_proj` alone means both of a block; a longer name selects one."""
    names = [name.removeprefix("h.0.") for name in adapters(inject(model(), targets=[target])) if name.startswith("h.0.")]
    assert names == [name for name in PROJECTIONS if name == target or name.endswith(f".{target}")]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"targets": ["c_atn"]}, "no projection 'c_atn' .did you mean c_attn"),
        ({"targets": ["wte"]}, "give some of c_attn, c_proj, c_fc"),
        ({"targets": ["proj"]}, "no projection 'proj'"),
        ({"targets": []}, "the list is empty"),
        ({"r": 0}, "give 1 or more"),
    ],
)
def test_what_cannot_be_adapted_is_refused_in_one_line(settings: dict, says: str) -> None:
    """An unknown target that is ignored would train nothing for hours."""
    assert re.search(says, refusal(inject, model(), **settings))
    assert "has adapters already" in refusal(inject, inject(model()))
