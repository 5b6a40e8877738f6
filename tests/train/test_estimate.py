"""The memory told before a run, against what autograd keeps and what AdamW holds."""

import pytest
import torch
import torch.nn.functional as F

from gpt2.config import GPT2Config
from gpt2.model import GPT2
from gpt2.train import estimate
from gpt2.train.bigram import Bigram, BigramConfig
from gpt2.train.optim import adamw
from gpt2.train.recipe import Recipe


def kept(model, ids) -> int:
    """Bytes of distinct storages that the backward pass of one step waits with, parameters aside."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()} | {ids.untyped_storage().data_ptr()}
    sizes, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # or its address would be given to another
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    return sum(sizes.values())


@pytest.mark.parametrize(("dropout", "attn_dropout"), [(0.0, 0.0), (0.1, 0.0), (0.1, 0.1)])
@pytest.mark.parametrize(("width", "layers", "context"), [(64, 6, 32), (96, 3, 128)])
def test_activations_are_what_autograd_keeps(dropout, attn_dropout, width, layers, context):
    """An estimate that is off by half sends a night's run into the swap file."""
    recipe = Recipe(batch_size=8, grad_accum=2, context=context, dropout=dropout, attn_dropout=attn_dropout)
    config = GPT2Config(
        65,
        context,
        width,
        layers,
        4,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=attn_dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    measured = kept(GPT2(config).train(), torch.zeros(4, context, dtype=torch.long))
    logits = 4 * context * 65 * 4  # the log-softmax; the estimate has one copy more, alive for a moment
    assert estimate.passing(config, recipe) - logits == pytest.approx(measured, rel=0.12)


def test_what_stands_is_weights_gradients_and_moments():
    model = GPT2(GPT2Config(65, 16, 32, 2, 2, bos_token_id=0, eos_token_id=0))
    optimizer = adamw(model, Recipe().optim)
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    optimizer.step()
    tensors = [t for p in model.parameters() for t in (p, p.grad, *optimizer.state[p].values()) if t.numel() > 1]
    assert estimate.standing(model) == sum(t.nbytes for t in tensors)
    model.wte.weight.requires_grad_(False)  # as a run of adapters freezes it
    assert estimate.standing(model) == sum(t.nbytes for t in tensors) - 3 * model.wte.weight.nbytes


def test_a_bigram_is_its_table_and_logits():
    recipe = Recipe(batch_size=4, context=8)
    assert estimate.peak_memory(Bigram(BigramConfig(10)), recipe) == 4 * 4 * 100 + 2 * 4 * 8 * 10 * 4
