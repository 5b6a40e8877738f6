"""Windows of a text: a step reads the same text after any earlier steps and on any number of ranks."""

import numpy as np
import pytest

from gpt2.data.batches import batch

IDS = np.arange(1000, dtype=np.int32) * 3  # a window's content shows its start


def test_addressed_by_seed_and_step():
    """A resume at step 700 must read the same windows as an undisturbed run; different seeds and steps must differ."""
    first = batch(IDS, 8, 5, seed=1, step=7)
    batch(IDS, 8, 5, seed=1, step=8)
    np.random.default_rng(0).random(100)
    again = batch(IDS, 8, 5, seed=1, step=7)
    assert np.array_equal(first, again)
    starts = {tuple(batch(IDS, 8, 5, seed=seed, step=step)[0][:, 0]) for seed in range(10) for step in range(10)}
    assert len(starts) == 100  # (seed 1, step 2) is not (seed 2, step 1)


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_together_are_the_global_batch(ranks):
    """If each rank drew its own windows, a run on two machines would differ from a run on one."""
    whole = batch(IDS, 8, 12, seed=3, step=5)
    parts = [batch(IDS, 8, 12, seed=3, step=5, rank=rank, ranks=ranks) for rank in range(ranks)]
    for side in (0, 1):
        assert all(part[side].shape == (12 // ranks, 8) for part in parts)
        assert np.array_equal(np.concatenate([part[side] for part in parts]), whole[side])


def test_every_window_is_drawn_and_none_beyond_the_text():
    """The last token must be a target of some window, or it is never learnt; with targets off by one, a model learns to copy."""
    x, y = batch(IDS[:12], 8, 4000, seed=0, step=0)
    assert x.dtype == y.dtype == np.int64
    assert (y == x + 3).all()
    assert (np.diff(x) == 3).all()
    starts, counts = np.unique(x[:, 0] // 3, return_counts=True)
    assert starts.tolist() == [0, 1, 2, 3]
    assert y.max() == IDS[11]
    assert abs(counts - 1000).max() < 150  # five standard deviations of a fair draw
    only, _ = batch(IDS[:9], 8, 3, seed=0, step=0)
    assert (only == IDS[:8]).all()


def test_what_cannot_be_drawn_is_refused():
    for ids, size, says in ((IDS[:8], 1, "8 tokens hold no window of 8"), (IDS, 10**12, "000 windows of 8 tokens need about")):
        with pytest.raises(ValueError, match=says):
            batch(ids, 8, size, seed=0, step=0)


@pytest.mark.parametrize("ranks", [1, 3])
def test_windows_with_a_stride_come_once_each_before_any_comes_again(ranks):
    """The order must not depend on earlier steps, or a run cannot resume; and each window must appear."""
    ids, context, stride, size = np.arange(103), 8, 5, 6
    drawn = [
        int(x[0])
        for step in range(6)
        for rank in range(ranks)
        for x in batch(ids, context, size, seed=1, step=step, stride=stride, rank=rank, ranks=ranks)[0]
    ]
    windows = list(range(0, len(ids) - context, stride))  # 19: not a multiple of the batch size
    assert sorted(drawn[:19]) == windows
    assert drawn[:19] != windows
    assert len(set(drawn[19:36])) == 17  # the second epoch has begun, in another order
    assert drawn[19:36] != drawn[:17]
    x, y = batch(ids, context, size, seed=1, step=3, stride=stride)
    assert (y == x + 1).all()
    assert [int(row[0]) for row in x] == drawn[18:24]


def test_a_rank_reads_its_own_windows_only():
    """If every rank read the whole batch, eight ranks would read a file of tokens eight times."""

    class Watched(np.ndarray):
        def __getitem__(self, places):
            read.append(np.asarray(places).size)
            return np.asarray(self)[places]

    ids, read = np.arange(1000).view(Watched), []
    for ranks in (1, 2, 4):
        for rank in range(ranks):
            batch(ids, 8, 4, seed=1, step=3, rank=rank, ranks=ranks)
    assert read == [36, 18, 18, 9, 9, 9, 9]
