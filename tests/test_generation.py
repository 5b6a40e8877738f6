"""Generation against a plain loop: read the window, take the most likely token, append it, repeat."""

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.commands import ASSET, refusal
from support.random_models import random_model
from torch import Tensor

import gpt2
from gpt2.config import GPT2Config
from gpt2.decoder import Decoder
from gpt2.generation import DRAFT_TOKENS, Ending, StopText, generate, stream
from gpt2.model import GPT2
from gpt2.sampling import Sampling, accept_draft

CONFIG = GPT2Config(vocab_size=61, n_positions=8, n_embd=24, n_layer=2, n_head=3, bos_token_id=None, eos_token_id=None)


def lively(config: GPT2Config = CONFIG, seed: int = 0) -> GPT2:
    """A model whose greedy text does not repeat one id, and whose top logits are never nearly equal."""
    return random_model(config, 0.5, 0.05, seed=seed)


@torch.no_grad()
def plainly(model: GPT2, ids: list[int], new: int) -> list[int]:
    """Greedy continuation of one text without cache, batch or mask; half of a full window is dropped."""
    text, limit = list(ids), model.config.n_positions
    window = text[-limit:]
    for _ in range(new):
        if len(window) > limit:
            window = window[-max(1, limit // 2) :]
        chosen = int(model(torch.tensor([window]))[0, -1].argmax())
        text, window = [*text, chosen], [*window, chosen]
    return text


SHAPES = [*((8, length, 30) for length in (1, 2, 7, 8, 9)), (8, 20, 1), (1, 3, 9), (2, 3, 9), (3, 3, 9)]


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(("positions", "length", "new"), [*SHAPES, pytest.param(8, 20, 30, marks=pytest.mark.kernels)])
def test_greedy_is_the_plain_loop(use_cache: bool, positions: int, length: int, new: int) -> None:
    """Possible bugs: a cache not reset at a restart, a window one token late or `ids[-0:]`, a prompt cut at the wrong end."""
    model = lively(replace(CONFIG, n_positions=positions))
    prompt = torch.randint(61, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    expected = plainly(model, prompt, new)
    assert generate(model, prompt, new, temperature=0, use_cache=use_cache) == expected
    assert new < 30 or len(set(expected[length:])) > 5  # else the model repeats itself and the test is weak


DRAFTS = {
    "the model itself": CONFIG,
    "a smaller one": replace(CONFIG, n_layer=1, n_embd=12),
    "one that reads less": replace(CONFIG, n_positions=5),
    "one that reads more": replace(CONFIG, n_positions=40),
}


@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
@pytest.mark.parametrize("length", [1, 8, pytest.param(20, marks=pytest.mark.kernels)])
def test_a_draft_changes_nothing_but_time(draft: GPT2Config, length: int) -> None:
    """Possible bugs: a proposal accepted unchecked, rejected tokens left in the cache, proposals past the last position."""
    model = lively()
    prompt = torch.randint(61, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for new in (0, 1, 6, 30):
        assert generate(model, prompt, new, temperature=0, draft=lively(draft)) == plainly(model, prompt, new)


def test_a_draft_spares_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted proposals must save passes of the model."""
    model, decode, passes = lively(replace(CONFIG, n_positions=64)), Decoder.decode, []
    monkeypatch.setattr(Decoder, "decode", lambda self, *args: (passes.append(self.model), decode(self, *args))[1])
    generate(model, [1, 2, 3], 41, temperature=0, draft=lively(replace(CONFIG, n_positions=64)))
    assert sum(each is model for each in passes) == 40 // (DRAFT_TOKENS + 1)


def test_a_draft_is_sampled_and_judged_by_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Possible bugs: probabilities of another place, or by other settings. That ids then follow them: test_sampling.py."""
    larger, settings, judged = replace(CONFIG, n_positions=40), {"temperature": 0.7, "top_k": 5}, []
    model, draft, sampling = lively(larger), lively(larger, seed=3), Sampling(**settings)

    def watched(ids: Tensor, *rest: Any) -> tuple[int, Tensor]:
        judged.append((ids.tolist(), *rest[:2], found := accept_draft(ids, *rest)))
        return found

    monkeypatch.setattr("gpt2.generation.accept_draft", watched)
    text, known = generate(model, [7], 30, seed=1, draft=draft, **settings), 1
    for ids, proposed, wanted, (accepted, _) in judged:
        read, places = torch.tensor([[*text[:known], *ids]]), slice(known - 1, None)
        torch.testing.assert_close(wanted, sampling.probabilities(model(read)[0, places]).detach())
        if ids:
            torch.testing.assert_close(proposed, sampling.probabilities(draft(read)[0, known - 1 : -1]).detach())
        known += accepted + 1
    assert known == 31
    assert 5 < len(judged) < 30


@pytest.mark.kernels
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_padded_batch_continues_each_row_as_if_alone(use_cache: bool) -> None:
    """Rows must be independent: padding must not be read, and the longest row must not decide when all rows restart."""
    model, new = lively(), 25
    rows = [[7], [1, 2, 3], [60, 50, 40, 30, 20, 10], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]]
    alone = [plainly(model, row, new) for row in rows]
    for chosen in ([0, 1, 2], [1, 2], [0, 3], [0, 1, 2, 3], [2, 1, 0, 0]):
        batch = [rows[i] for i in chosen]
        width = max(map(len, batch)) + (chosen == [1, 2])  # once with a column of padding in every row
        ids = torch.tensor([[0] * (width - len(row)) + row for row in batch])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
        given = mask.bool() if len(batch) == 2 else mask
        found = generate(model, ids, new, temperature=0, attention_mask=given, use_cache=use_cache)
        assert found.shape == (len(batch), width + new)
        for i, result in zip(chosen, found.tolist(), strict=True):
            assert result[width - len(rows[i]) :] == alone[i]


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_k": 9}, {"top_p": 0.8}])
def test_seed_repeats_and_cache_does_not_matter(settings: dict) -> None:
    """A generator created anew at each step draws the same number for ever; the cache must not change the draws."""
    model, ids, state = lively(), torch.arange(6).view(2, 3), torch.get_rng_state()
    first = generate(model, ids, 30, seed=1, **settings)
    assert torch.equal(first, generate(model, ids, 30, seed=1, **settings))
    assert torch.equal(first, generate(model, ids, 30, seed=1, use_cache=False, **settings))
    assert not torch.equal(first, generate(model, ids, 30, seed=2, **settings))
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(4)
    unseeded = generate(model, ids, 30, **settings)
    torch.manual_seed(4)
    assert torch.equal(unseeded, generate(model, ids, 30, **settings))
    # With flat probabilities, sampled ids spread: the generator's state advances.
    flat = generate(model, [0], 200, temperature=1e9, seed=0)
    assert len(set(flat)) > 50


def test_the_cache_is_used() -> None:
    """Without the cache the ids are right but slow: one pass over the prompt, then one token at a time."""
    read: list[int] = []
    model = lively()
    model.wte.register_forward_hook(lambda module, args, output: read.append(args[0].size(1)))
    generate(model, [1, 2, 3], 9, temperature=0)
    assert read == [3, 1, 1, 1, 1, 1, 4, 1, 1]
    read.clear()
    generate(model, [1, 2, 3], 4, temperature=0, use_cache=False)
    assert read == [3, 4, 5, 6]


def test_what_goes_in_comes_out() -> None:
    """A list returns a list, a tensor returns a tensor, and the result does not share the caller's memory."""
    model, ids = lively(), torch.tensor([[1, 2]])
    for use_cache in (True, False):
        assert generate(model, [1, 2], 0, use_cache=use_cache) == [1, 2]
        result = generate(model, ids, 0, use_cache=use_cache)
        assert torch.equal(result, ids)
        assert result.data_ptr() != ids.data_ptr()
    found = generate(model, [1, 2], 3, temperature=0)
    assert all(type(i) is int for i in found)
    assert generate(model, (1, 2), 3, temperature=0) == found
    assert generate(model, ids[0].numpy(), 3, temperature=0) == found
    assert generate(model, ids[0], 3, temperature=0).tolist() == found, "(T,) returns (T + new,)"
    masked = [generate(model, one, 3, temperature=0, attention_mask=one - 1) for one in (ids, ids[0])]
    assert torch.equal(masked[0][0], masked[1])
    for dtype in (torch.int32, torch.int16, torch.uint8, torch.int64):
        result = generate(model, ids.to(dtype), 3, temperature=0)
        assert (result.dtype, result.tolist()) == (torch.long, [found])


def test_stop_ends_a_text_and_keeps_the_id() -> None:
    """Possible bugs: a stop id in the prompt counts, the id is dropped, or the first row that stops ends the batch."""
    model = lively()
    free = generate(model, [1, 2, 3], 20, temperature=0)
    stop = free[8]
    first = free.index(stop, 3)
    assert generate(model, [1, 2, 3], 20, temperature=0, stop=stop) == free[: first + 1]
    assert generate(model, [stop, 2, 3], 2, temperature=0, stop=stop)[:3] == [stop, 2, 3]
    assert generate(model, [1, 2, 3], 20, temperature=0, stop=min(set(range(61)).difference(free))) == free
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    both = generate(model, ids, 60, temperature=0)
    met = {i: [row[3:].tolist().index(i) for row in both if i in row[3:].tolist()] for i in range(61)}
    shared = next(i for i, at in met.items() if len(at) == 2 and at[0] != at[1])
    found = generate(model, ids, 60, temperature=0, stop=shared)
    assert torch.equal(found, both[:, : 3 + max(met[shared]) + 1])


DRAFT = lively()
BAD: list[tuple[object, dict, str]] = [
    ([], {}, "the prompt is empty"),
    (torch.empty(0, 3, dtype=torch.long), {}, "the prompt is empty"),
    ([61], {}, "outside the model's vocabulary of 61"),
    ([2**70], {}, "outside the model's vocabulary of 61"),
    ([1.5], {}, "not a list of ids"),
    ([[7]], {}, r"not a list of ids; .* give several as a tensor \(B, T\)"),
    (torch.ones(1, 2, dtype=torch.long, device="meta"), {}, "give a list of ids"),
    (torch.ones(1, 1, 2, dtype=torch.long), {}, r"shape \(1, 1, 2\)"),
    (torch.tensor([[1.0]]), {}, "torch.float32"),
    ([1], {"max_new_tokens": -1}, "max_new_tokens is -1"),
    ([1], {"max_new_tokens": 2.0}, "max_new_tokens is 2.0; give 0 or more"),
    ([1], {"seed": 2**64}, "seed is 18446744073709551616; give a whole number"),
    ([1], {"stop": "."}, "stop is '.'; give an id, or gpt2.generation.StopText"),  # no id is a text: it never ended
    ([1], {"draft": "distilgpt2"}, "the draft is a str; give a model"),
    ([1], {"top_p": 0.0, "temperature": 0}, "top_p is 0.0"),
    ([1, 2], {"attention_mask": torch.ones(1, 3)}, r"attention_mask is \(1, 3\); make it \(1, 2\)"),
    ([1, 2], {"attention_mask": torch.tensor([[1, 0]])}, "pad on the left"),
    (torch.ones(2, 3, dtype=torch.long), {"draft": DRAFT}, "a batch of 2"),
    ([1], {"draft": lively(replace(CONFIG, vocab_size=62))}, "a vocabulary of 62 tokens, the model 61"),
    ([2, 1], {"draft": DRAFT, "attention_mask": torch.tensor([[0, 1]])}, "a draft needs .* leave out attention_mask"),
    ([1], {"draft": DRAFT, "use_cache": False}, "a draft needs .* and use_cache"),
    ([1], {"draft": DRAFT, "repetition_penalty": 1.8}, "a repetition penalty"),
]


@pytest.mark.parametrize(("ids", "settings", "message"), BAD)
def test_bad_input_is_refused_before_any_work(ids: object, settings: dict, message: str) -> None:
    """A fraction, an id past the embedding or right padding is refused in one line, without a pass of the model."""
    model = lively()
    model.wte.register_forward_hook(lambda *_: pytest.fail("the model ran"))
    assert re.search(message, refusal(generate, model, ids, **settings))


def test_arguments_in_another_order_are_told_as_that() -> None:
    """``generate(ids, model)`` ended in an AttributeError about a list without a config."""
    assert "takes a model, then ids, and was given list first" in refusal(generate, [1, 2], lively())
    assert "the model is on the meta device and holds no weights" in refusal(generate, lively().to("meta"), [1])


def take_a_training_step(model: GPT2, ids: Tensor) -> None:
    model.zero_grad()
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_inference_mode_ends_with_each_token() -> None:
    """Inference mode between tokens would disable the caller's autograd, and its ids could not be used in training."""
    model = lively()
    for chosen in stream(model, torch.tensor([[1, 2]]), 3, Sampling(0)):
        assert not torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled()
        assert not chosen.is_inference()
        take_a_training_step(model, chosen[:, None].expand(-1, 3))
        chosen.add_(1)  # the caller's own tensor; the text does not depend on it
    first = [int(c) for c in stream(model, torch.tensor([[1, 2]]), 3, Sampling(0))]
    assert [1, 2, *first] == plainly(model, [1, 2], 3)
    result = generate(model, torch.tensor([[1, 2]]), 3)
    assert not result.is_inference()
    take_a_training_step(model, result)
    with torch.no_grad():
        next(stream(model, result, 1, Sampling(0)))
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        assert generate(model, [1, 2], 3, temperature=0) == plainly(model, [1, 2], 3)


def modes(model: GPT2) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


@pytest.mark.parametrize("how", ["drained", "abandoned", "closed", "failed"])
def test_mode_is_the_callers_between_and_after(how: str) -> None:
    """Sampling during training must not leave dropout off, nor switch on the dropout of a frozen part."""
    model = lively(replace(CONFIG, embd_pdrop=0.9, attn_pdrop=0.9, resid_pdrop=0.9)).train()
    model.h[1].eval()
    before = modes(model)
    assert set(before.values()) == {True, False}
    ids = torch.tensor([[1, 2]])
    iterator = stream(model, ids, 5, Sampling(0))
    next(iterator)
    assert modes(model) == before
    if how == "drained":
        list(iterator)
    elif how == "abandoned":
        del iterator
    elif how == "closed":
        iterator.close()
    else:
        handle = model.ln_f.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generate(model, ids, 3)
        handle.remove()
    assert modes(model) == before
    generate(model, ids, 3)
    assert modes(model) == before
    assert not torch.is_inference_mode_enabled()


def test_stream_yields_as_it_goes() -> None:
    """A stream must yield the first id before it computes the rest."""
    passes: list[int] = []
    model = lively()
    model.wte.register_forward_hook(lambda *_: passes.append(1))
    iterator = stream(model, torch.tensor([[1, 2], [3, 4]]), 10**9, Sampling(0))
    assert passes == []
    for count, chosen in enumerate(itertools.islice(iterator, 12), start=1):
        assert (chosen.shape, chosen.dtype, len(passes)) == ((2,), torch.long, count)


def test_the_penalty_counts_the_prompt_and_what_was_generated_but_no_padding() -> None:
    """A padded row must be continued as it would be alone; the id of padding would otherwise be penalised."""
    model, settings = lively(replace(CONFIG, n_positions=40)), {"temperature": 0, "repetition_penalty": 1.8}
    prompts = [[3, 5, 5, 8, 13], [21, 34]]
    alone = [generate(model, prompt, 12, **settings)[len(prompt) :] for prompt in prompts]
    assert alone[0] != generate(model, prompts[0], 12, temperature=0)[5:]
    pad = alone[1][0]  # the id that would come first: penalised, it would not
    rows = torch.tensor([prompts[0], [pad] * 3 + prompts[1]])
    mask = torch.tensor([[1] * 5, [0] * 3 + [1] * 2])
    assert generate(model, rows, 12, attention_mask=mask, **settings)[:, 5:].tolist() == alone

    text = list(prompts[0])  # by the definition, one id after the other
    for _ in range(12):
        logits = model(torch.tensor([text]))[0, -1].detach()
        for token in set(text):
            logits[token] = logits[token] * 1.8 if logits[token] < 0 else logits[token] / 1.8
        text.append(int(logits.argmax()))
    assert text[5:] == alone[0]


def test_a_stop_text_ends_where_transformers_ends() -> None:
    """A stop text that begins in one token and ends in another, or lies inside one token, must end the text at that token."""
    from transformers import StopStringCriteria

    from gpt2.data.adapter import auto_tokenizer

    model, tokenizer = gpt2.load(), gpt2.load_tokenizer()
    prompt = tokenizer.encode("ROMEO:\n")
    new = generate(model, prompt, 60, seed=0)[len(prompt) :]
    text = tokenizer.decode(new)
    stops = [text[33:36], text[10:14], text[21:30], "e", "not in it at all"]
    theirs, ends = auto_tokenizer(ASSET), []
    for stop in stops:
        criteria, end = StopStringCriteria(theirs, [stop]), Ending(StopText(tokenizer, (stop,)))
        done = [(end.reached(token), bool(criteria(torch.tensor([new[:count]]), None))) for count, token in enumerate(new, 1)]
        ends.append(next((count for count, (ours, _) in enumerate(done, 1) if ours), None))
        assert ends[-1] == next((count for count, (_, reference) in enumerate(done, 1) if reference), None)
        assert generate(model, prompt, 60, seed=0, stop=StopText(tokenizer, (stop,))) == prompt + new[: ends[-1]]
    assert ends[-1] is None
    assert None not in ends[:-1]
    assert len(set(ends)) > 2
