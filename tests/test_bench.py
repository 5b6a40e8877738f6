"""``gpt2 bench`` on the embedded model: both sides do the same work, and each figure has the value that its name says."""

import json
import re
from pathlib import Path

import pytest
import torch
from support.commands import refusal
from support.random_models import write_checkpoint

import gpt2
from gpt2.bench import Ours, Spread, Transformers, bench, interleaved, machine, ratio, train_step
from gpt2.cli.main import main
from gpt2.parity.reference import load_reference


def test_runs_take_turns_and_the_first_round_is_thrown_away() -> None:
    """All runs of A before all runs of B would measure the machine's changes; the first round is slower, so it is dropped."""
    order, values = [], {"a": iter([100, 1, 2, 3]), "b": iter([100, 4, 5, 6])}

    def run(name: str) -> float:
        order.append(name)
        return next(values[name])

    found = interleaved({name: lambda name=name: run(name) for name in values}, 3)
    assert "".join(order) == "abababab"
    assert found == {"a": [1, 2, 3], "b": [4, 5, 6]}


def test_a_ratio_is_taken_pair_by_pair() -> None:
    """The ratio of two medians hides that both runs of a pair were slow."""
    assert ratio([2, 20, 6], [1, 10, 2]) == Spread(2, 2, 3)
    assert f"{Spread(2, 1.5, 3)}" == "2.00 (1.50 .. 3.00)"


def test_a_table_and_json_of_the_same_rows(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Possible bugs: tokens per second above a column of seconds, or an inverted ratio."""
    found = bench("shakespeare-mini", pairs=1, context=16, tokens=4)
    assert [row.unit for row in found.rows] == ["s", "tokens/s", "tokens/s", "tokens/s"]
    for row in found.rows:
        faster = row.theirs.median / row.ours.median if row.unit == "s" else row.ours.median / row.theirs.median
        assert row.ratio.median == pytest.approx(faster)
        assert row.what in found.table()
    assert json.loads(found.to_json())["machine"] == json.loads(json.dumps(machine())) | {"load": found.machine["load"]}
    assert found.parameters == 1_915_360
    assert main(["bench", str(write_checkpoint(tmp_path)), "--pairs", "1", "--context", "8", "--tokens", "2", "--json", "-"]) == 0
    assert [row["what"] for row in json.loads(capsys.readouterr().out)["rows"]][1] == "prefill 1 x 8"


def test_what_a_model_cannot_do_is_left_out() -> None:
    """Int8 weights cannot be trained. A prompt and continuation longer than the positions would include a cache restart."""
    found = bench("shakespeare-mini:int8", pairs=1, context=10_000, tokens=3)
    assert [row.unit for row in found.rows] == ["s", "tokens/s", "tokens/s"]
    assert found.rows[1].what == "prefill 1 x 252"


def test_both_sides_do_the_same_work() -> None:
    """A comparison is wrong if one runner takes a shorter path."""
    folder = next(iter((Path(gpt2.__file__).parent / "assets").iterdir()))
    sides = Ours(gpt2.load(str(folder))), Transformers(load_reference(folder, torch.float32))
    ids = torch.arange(24).view(2, 12)
    ours, theirs = (side.prefill(ids) for side in sides)
    torch.testing.assert_close(ours, theirs)
    assert ours.shape == (2, 2048)
    after = []
    for side in sides:
        assert side.decode(ids, 3) > 0
        optimizer = torch.optim.SGD(side.model.parameters(), lr=0.1)
        train_step(side, optimizer, ids[:, :-1], ids[:, 1:])
        after.append(side.prefill(ids))
    torch.testing.assert_close(*after)
    assert not torch.allclose(after[0], ours, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("shakespeare-mini", {"pairs": 0}, "pairs is 0"),
        ("shakespeare-mini", {"batch": -1}, "batch is -1"),
        ("shakespeare-mini", {"batch": 10**7}, "a training step on 10,000,000 x 128 tokens need about"),
        ("hf/shakespeare-mini", {}, "leave hf/ out"),
        ("no-such-model", {"offline": True}, "no-such-model"),
    ],
)
def test_bad_input_is_one_line(name: str, settings: dict, message: str) -> None:
    """A wrong flag must be refused before minutes of work."""
    assert re.search(message, refusal(bench, name, **settings))
