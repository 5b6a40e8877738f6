"""Prompts that are read and not scored: one loss, however the documents are laid out, parted and shared."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.ranks import job
from support.training import furthest, metrics, one_step, outcome, stop_at

from gpt2.comparison.cases import read_cases
from gpt2.config import GPT2Config
from gpt2.data import from_directory
from gpt2.data.batches import FILLER, READ, SCORED, UNSCORED, documents
from gpt2.data.bpe import chars_of
from gpt2.measure.texts import open_text
from gpt2.model import GPT2
from gpt2.train import loop, parallel
from gpt2.train.corpus import Corpus, corpus
from gpt2.train.evaluation import scores
from gpt2.train.listing import list_data
from gpt2.train.loop import Evaluated, Started, train
from gpt2.train.loss import WithLoss
from gpt2.train.recipe import Data, Recipe
from gpt2.train.step import Feed

END = 0
T = 24


def model() -> GPT2:
    torch.manual_seed(1)
    return GPT2(GPT2Config(13, T, 16, 2, 2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).double()


def gradients(trained: GPT2, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    trained.zero_grad()
    loss.backward()
    return {"loss": loss.detach()} | {name: parameter.grad.clone() for name, parameter in trained.named_parameters()}


def answers(seed: int, count: int) -> list[tuple[list[int], list[int]]]:
    rng = random.Random(seed)
    return [([rng.randrange(1, 13) for _ in range(n)] for n in (rng.randint(1, 4), rng.randint(1, 5))) for _ in range(count)]


def test_packed_padded_and_alone_have_one_loss_and_gradient():
    """Attention across documents, positions that go on, filler that counts, or a mean of rows: each gives another gradient."""
    trained, texts = model(), [tuple(each) for each in answers(3, 6)]
    total, scored = torch.zeros((), dtype=torch.float64), 0
    for prompt, text in texts:  # the definition: each document alone, the sum over all scored tokens
        ids = torch.tensor([[*prompt, *text, END]])
        total = total + F.cross_entropy(trained(ids)[0, len(prompt) - 1 : -1], ids[0, len(prompt) :], reduction="sum")
        scored += len(text) + 1
    expected = gradients(trained, total / scored)

    def rows(lists: list[list[tuple[int, bool]]]) -> tuple[torch.Tensor, torch.Tensor]:
        full = [row + [(END, False)] * (T + 1 - len(row)) for row in lists]
        ids = np.array([[token for token, _ in row] for row in full])
        y = np.array([[token if counts else UNSCORED for token, counts in row] for row in full])
        return torch.from_numpy(ids[:, :-1]), torch.from_numpy(y[:, 1:])

    marked = [[*((i, False) for i in prompt), *((i, True) for i in text), (END, True)] for prompt, text in texts]
    x, y = rows(marked)
    assert furthest(gradients(trained, WithLoss(trained, partial=True)(x, y)), expected) < 1e-10
    x, y = rows([[pair for each in three for pair in each] for three in (marked[:3], marked[3:])])
    apart = torch.from_numpy(documents(x.numpy(), END))
    assert furthest(gradients(trained, WithLoss(trained, partial=True)(x, y, apart)), expected) < 1e-10
    # Negative control: documents that see each other.
    assert furthest(gradients(trained, WithLoss(trained, partial=True)(x, y)), expected) > 1e-3


def test_a_single_document_is_computed_as_without_documents_to_the_bit():
    """A mask where none is needed takes another kernel, which rounds otherwise."""
    ids = np.random.default_rng(0).integers(1, 13, (3, T))
    ids[:, -1] = END
    assert documents(ids, END) is None
    ids[1, 5] = END
    assert documents(ids, END).tolist() == [[0] * T, [0] * 6 + [1] * (T - 6), [0] * T]
    trained, x = model(), torch.from_numpy(ids)
    alone = trained.hidden(x[1:2, 6:])
    found = trained.hidden(x[1:2], documents=torch.from_numpy(documents(ids, END))[1:2])[:, 6:]
    assert (found - alone).abs().max() < 1e-12


def test_a_batch_without_a_scored_token_changes_nothing(steps):
    """A batch of nothing but prompts pulled all weights to 0. Other ranks would wait for a gradient. Control: one is scored."""
    trained, ids, x = model(), np.ones(900, dtype=np.int64), torch.ones(2, T, dtype=torch.long)
    assert not any(value.any() for value in gradients(trained, WithLoss(trained, partial=True)(x, x * UNSCORED)).values())
    trained.zero_grad(set_to_none=True)
    before = {name: parameter.detach().clone() for name, parameter in trained.named_parameters()}
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.1, weight_decay=0.1)
    for mark, same in ((READ, True), (SCORED, False)):
        feed = Feed(ids, marks=np.full(900, mark, dtype=np.uint8))
        found = loop.optimizer_step(WithLoss(trained, partial=True), optimizer, feed, steps, 0, 0.1)
        assert (found == (0.0, 0.0)) == same
        assert all(torch.equal(parameter, before[name]) for name, parameter in trained.named_parameters()) == same
        assert bool(optimizer.state) != same


class Step:
    """Losses and gradients of one step on rank ``rank`` of a job; ``lost`` forgets to weigh the parts by their scored tokens."""

    def __init__(self, recipe: Recipe, lost: bool = False) -> None:
        self.recipe, self.lost = recipe, lost

    def __call__(self, rank: int) -> dict[str, np.ndarray]:
        with parallel.joined("cpu") as ranks:
            return self.gradients(ranks)

    def gradients(self, ranks: parallel.Ranks) -> dict[str, np.ndarray]:
        """Separate, because freeing DDP's objects after the process group is destroyed hangs."""
        trained = model()
        rng = np.random.default_rng(2)
        ids = rng.integers(0, 13, 900)
        marks = np.where(rng.random(900) ** 3 * 3 < np.arange(900) % 17 / 16, SCORED, READ).astype(np.uint8)
        feed = Feed(ids, ranks, marks=marks, end=END if self.recipe.data.reset else None)
        if self.lost:
            real = feed.send
            feed.send = lambda *args: real(*args)._replace(scored=torch.full((self.recipe.batch_size // ranks.size,), T))
        scored = parallel.wrap(WithLoss(trained, partial=True), self.recipe, ranks)
        caught = one_step(scored, feed, self.recipe)
        text = Corpus(chars_of("abcdefghijklm"), ids, ids[:311], "", marks, marks[:311], end=feed.end)
        with parallel.whole(scored):
            held_out = scores(trained, text, self.recipe, ranks)
        values = {"held out": held_out[0].loss, "held out, all": held_out[1].loss, "tokens": held_out[0].tokens}
        return {name: np.asarray(value) for name, value in (values | caught).items()}


@pytest.fixture
def steps(quiet) -> Recipe:
    return replace(quiet, batch_size=8, context=T, optim=replace(quiet.optim, clip=0.0))


@pytest.mark.parametrize(("parts", "reset"), [(2, False), (8, True)])
def test_accumulated_parts_weigh_by_their_scored_tokens(steps, parts, reset):
    """The usual bug: the mean of the parts' means, in which a token of a short answer counts more."""
    recipe = replace(steps, data=replace(steps.data, reset=reset))
    whole = Step(recipe)(0)
    split = replace(recipe, grad_accum=parts)
    assert furthest(Step(split)(0), whole) < 1e-10
    assert furthest(Step(split, lost=True)(0), whole) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_ranks_weigh_by_their_scored_tokens(steps, how):
    """DDP averages the ranks' gradients, whatever their tokens are. Ranks that average held-out losses per window do the same."""
    recipe = replace(steps, parallel=how, grad_accum=4, data=replace(steps.data, reset=True))
    whole = Step(replace(recipe, grad_accum=1))(0)
    for found in job(2, Step(recipe)):
        assert furthest(found, whole) < 1e-10


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    """Sums in words, whose answer follows from the question."""
    path = tmp_path_factory.mktemp("table") / "sums.jsonl"
    words = ["none", "one", "two", "three", "four", "five", "six", "seven", "eight"]
    pairs = [(a, b) for a in range(5) for b in range(5)]
    lines = [{"q": f"{words[a]} and {words[b]}", "answer": words[a + b]} for a, b in pairs]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def asked(quiet, table) -> Recipe:
    data = Data(path=str(table), field="answer", prompt="Q: {q}\nA: ", tokenizer="words", vocab_size=264, held_out=0.2)
    return replace(quiet, data=data, context=16)


@pytest.mark.parametrize("layout", [{"reset": True}, {"padded": True}])
def test_a_run_on_answers(asked, tmp_path, layout):
    """The loss of the answers decides what is best, beside that of all tokens; a resumed run reads in the same order."""
    recipe, events = replace(asked, data=replace(asked.data, **layout)), []
    train(recipe, tmp_path / "run", report=events.append)
    train(recipe, tmp_path / "again", report=stop_at(5))
    train(recipe, tmp_path / "again")
    assert outcome(tmp_path / "again") == outcome(tmp_path / "run")
    text = corpus(recipe)
    answer = text.tokenizer.decode(text.train_ids[text.train_marks == SCORED])
    assert answer.count("<|endoftext|>") > 15
    assert "Q" not in answer
    last = [event for event in events if isinstance(event, Evaluated)][-1]
    assert (
        last.val.tokens
        == list_data(recipe).val_scored
        == (text.val_marks[1:] == SCORED).sum()
        < last.val_all.tokens
        <= (text.val_marks != FILLER).sum()
    )
    rows = [row for row in metrics(tmp_path / "run") if "val_loss" in row]
    assert (rows[-1]["val_loss"], rows[-1]["val_loss_all"]) == (last.val.loss, last.val_all.loss)
    assert last.sample.startswith("Q: ")
    assert "\nA: " in last.sample
    assert "held out" in " ".join(next(event.notes for event in events if isinstance(event, Started)))


def test_the_filler_behind_the_longest_row_is_not_computed(asked):
    """Short answers took the time of a whole context; compiled blocks keep it, for each new shape is compiled anew."""
    recipe = replace(asked, context=64, model=replace(asked.model, n_positions=64), data=replace(asked.data, padded=True))
    text, widths, found = corpus(recipe), [], []
    trained = loop.models.new(recipe, text.tokenizer).double()
    trained.h[0].register_forward_pre_hook(lambda block, inputs: widths.append(inputs[0].size(1)))
    for compiled in (False, True):
        feed = Feed(text.train_ids, marks=text.train_marks)
        found.append(one_step(WithLoss(trained, partial=True), feed, replace(recipe, compile=compiled)))
        assert feed.width == widths[-1]  # of which tokens per second are counted, and not of filler
    assert widths[0] < 20 < widths[1] == 64
    assert furthest(*found) < 1e-10


def test_in_padded_rows_the_evaluation_is_the_loss_of_each_document_alone(asked, tmp_path):
    recipe = replace(asked, steps=1, data=replace(asked.data, padded=True))
    events = []
    train(recipe, tmp_path / "run", report=events.append)
    text, trained = corpus(recipe), loop.models.new(recipe, corpus(recipe).tokenizer).eval()
    losses = []
    for row, marks in zip(text.val_ids[:-1].reshape(-1, 16), text.val_marks[:-1].reshape(-1, 16), strict=True):
        ids = torch.from_numpy(row[marks != FILLER]) if marks[0] else torch.from_numpy(row[: (marks > 0).sum() + 1])
        each = F.cross_entropy(trained(ids[None].long())[0, :-1], ids[1:].long(), reduction="none")
        losses += each[torch.from_numpy(marks[1 : len(ids)] == SCORED)].tolist()
    first = next(event for event in events if isinstance(event, Evaluated))
    assert first.val.loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)


def test_the_listing_shows_what_is_scored_and_what_is_cut_off(asked, monkeypatch):
    """What is trained on by mistake is seen before the run, or never."""
    listing = list_data(replace(asked, context=13, data=replace(asked.data, padded=True)))
    for window in listing.windows:
        (first, prompt), (second, answer) = [(part.scored, part.text) for part in window][:2]
        assert (first, second) == (False, True)
        assert prompt.startswith("Q: ")
        assert prompt.endswith("\nA: ")
        assert "Q" not in answer
    assert 0 < listing.longer < listing.documents == 25
    assert listing.lost == 0
    assert f"{listing.longer} documents are cut off at 13 tokens" in listing.table()
    packed = list_data(replace(asked, context=8))
    assert packed.lost == 25
    assert "25 documents are longer than the context of 8 tokens, and read in several windows; of 25" in packed.table()
    apart = replace(asked, data=replace(asked.data, prompt="", reset=True))
    ids, end = corpus(apart).train_ids, corpus(apart).end
    monkeypatch.setattr("gpt2.data.batches.BLOCK", 7)  # counted in blocks
    assert list_data(apart).train_scored == len(ids) - 1 - (ids[:-1] == end).sum() < list_data(apart).train_tokens


@pytest.mark.parametrize("count", [40, 3])
def test_a_run_keeps_what_it_never_trains_on_for_compare(count: int, recipe: Recipe, tmp_path: Path) -> None:
    """`compare BASE TUNED --on RUN` and `--cases RUN` ask whether the model got better on what it has not seen."""
    rows = [{"question": f"{n} plus {n}?", "answer": f"it is {2 * n}"} for n in range(count)]
    (tmp_path / "qa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = Data(path=str(tmp_path / "qa.jsonl"), prompt="Q: {question}\nA: ", field="answer", tokenizer="chars", held_out=0.2)
    run = tmp_path / "run"
    train(replace(recipe, data=data, steps=1, eval_every=1, save_every=1), run)
    cases, _ = read_cases(str(run))
    text = open_text(str(run))
    held = [row for row in rows if (row["question"], (row["answer"],)) in cases]
    assert 0 < len(held) == len(cases) < 20
    assert text.documents == [f"Q: {row['question']}\nA: {row['answer']}" for row in held]
    assert (text.protocol.context, "prompts are scored too" in text.remark) == (recipe.context, True)
    tokens, split = from_directory(run / "best"), corpus(replace(recipe, data=data))
    assert text.encode(tokens) == split.val_ids.tolist()  # so that perplexities are those that the run printed
    assert not any(row["question"] in tokens.decode(split.train_ids.tolist()) for row in held)
    (run / "recipe.json").write_text((run / "recipe.json").read_text().replace('"reset": false', '"reset": true'))
    assert "which training kept apart" in open_text(str(run)).remark
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one")
    (tmp_path / "texts" / "b.txt").write_text("two")
    assert open_text(str(tmp_path / "texts")).documents == ["one", "two"]
