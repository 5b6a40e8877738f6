"""Passages and continuations, on models with known answers."""

import itertools

import pytest
import torch
from torch import Tensor

from gpt2.comparison.compatibility import compare_vocabularies
from gpt2.comparison.sides.side import Side
from gpt2.comparison.words import continuations, passages
from gpt2.data.bpe import chars_of, train_bpe


def brute(js: list[float], count: int, length: int) -> list[int]:
    starts, found = set(range(len(js) - length + 1)), []
    while starts and len(found) < count:
        best = max(sorted(starts), key=lambda s: sum(js[s : s + length]))
        found.append(best)
        starts = {s for s in starts if abs(s - best) >= length}
    return found


def test_passages_are_the_worst_that_do_not_overlap_from_five_places() -> None:
    """One scene that a model does not know filled the list of the largest disagreements."""
    for seed in range(5):
        js = torch.rand(60, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        found = passages(js, 4, 7)
        assert [start for start, _ in found] == brute(js.tolist(), 4, 7)
        assert found[0][1] == pytest.approx(float(js.unfold(0, 7, 1).mean(-1).max()))
    js = torch.rand(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    js[600:700] += 5
    starts = sorted(start for start, _ in passages(js))
    assert len(starts) == 5
    assert min(b - a for a, b in itertools.pairwise(starts)) >= 200
    assert passages(torch.zeros(50)) == passages(torch.zeros(0)) == []
    assert [start for start, _ in passages(torch.ones(3), 5, 16)] == [0]


class Counting(Side):
    """Predict the next letter or, from position ``turn`` on, always the first letter."""

    name, tokenizer, load = "counting", chars_of("abcde"), None

    def __init__(self, turn: int) -> None:
        self.turn = turn

    def forward(self, ids: Tensor) -> Tensor:
        logits = torch.zeros(*ids.shape, 5)
        target = torch.where(torch.tensor(ids.size(1) >= self.turn), torch.zeros_like(ids), (ids + 1) % 5)
        return logits.scatter(-1, target[..., None], 50.0)


def test_continuations_part_where_they_part() -> None:
    """The position counts from the first new token; None if both texts are equal."""
    tokenizer, prompts = Counting.tokenizer, [[0, 1], [3, 4]]
    found = continuations([(Counting(99), tokenizer), (Counting(4), tokenizer)], prompts, 4)
    assert [(row.prompt, row.a, row.b, row.parts_at) for row in found] == [("ab", "cdea", "cdaa", 2), ("de", "abcd", "abaa", 2)]
    same = continuations([(Counting(99), tokenizer)] * 2, prompts, 4)
    assert all(row.parts_at is None and row.a == row.b for row in same)


def test_vocabularies_entry_by_entry() -> None:
    """A vocabulary of the same length may differ; the same entries with other merges split text differently."""
    text = "the rain in spain stays mainly in the plain; " * 20
    one, same, other = train_bpe(text, 275), train_bpe(text, 275), train_bpe(text[::-1], 275)
    assert compare_vocabularies(one, same).verdict == "equal"
    found = compare_vocabularies(one, other)
    assert (found.verdict, found.comparable) == ("different", False)
    expected = [i for i in range(275) if one.token_bytes(i) != other.token_bytes(i)]
    assert found.differing == len(expected)
    assert [row[0] for row in found.examples] == expected[:5]
    assert compare_vocabularies(one, chars_of("abc")).differing == 275
    assert compare_vocabularies(None, one).verdict == "none"
