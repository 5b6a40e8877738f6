"""Diagnose the ports of tests/support: the right cause at the right place for faulty ports, no cause for correct ones."""

from functools import cache
from pathlib import Path

import pytest
import torch
from support import faulty
from support.faulty import ARCHITECTURES, CONFIG, FAULTY, ONE, SOUND, TWO, Faulty, write
from support.faulty.scoring import FAULTY_AFTER_ALL, score
from support.ports import PORTS

import gpt2
from gpt2.port.diagnosis import diagnose
from gpt2.port.module import examination
from gpt2.port.search.walk import search
from gpt2.port.terms.causes import CAUSES

DEFAULT = (
    *("fused: gelu-erf", "heads: bf16-fc@1", "einsum3d: head-interleaved"),
    *("italiano: scale-by-width@1 gelu-erf@2", "conv1d: transposed-proj@1"),
)
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """The folder of a checkpoint of these sizes, which is written once."""
    return cache(lambda config: write(tmp_path_factory.mktemp("checkpoint"), config))


@pytest.fixture(scope="module")
def directory(folder_of):
    return folder_of(TWO)


@pytest.fixture(scope="module")
def model(directory):
    """A tiny random GPT-2, from a file."""
    return gpt2.load(str(directory))


@pytest.fixture(scope="module")
def one(folder_of):
    """The folder of a checkpoint of one block, and the model."""
    return folder_of(ONE), gpt2.load(str(folder_of(ONE)))


def of_each(names, default):
    """Test parameters; names outside of ``default`` are marked slow."""
    return [pytest.param(name, marks=[] if name in default else [pytest.mark.slow]) for name in names]


def in_each_dtype(names, default):
    """Each name, and every third in bfloat16 too, of which all but the first are slow, as are names outside of ``default``."""
    narrow = names[::3]
    cases = [(name, "float32") for name in names] + [(name, "bf16") for name in narrow]
    quick = {(name, "float32") for name in default} | {(narrow[0], "bf16")}
    return [pytest.param(*case, marks=[] if case in quick else [pytest.mark.slow]) for case in cases]


def test_every_cause_and_every_architecture_is_there():
    """A cause without a port would never be tested, and a word that no port knows is no fault, or no difference."""
    assert set(CAUSES) == {cause.partition(" ")[0] for port in FAULTY.values() for cause in port.truth[1:]}
    assert {port.architecture for port in FAULTY.values()} == {*ARCHITECTURES}
    sources = "".join(path.read_text() for path in Path(faulty.__file__).parent.glob("*.py"))
    assert all(f'"{word}"' in sources for port in (FAULTY | SOUND).values() for word in port.faults.sites)


@pytest.mark.parametrize("name", of_each(FAULTY, DEFAULT))
def test_what_is_wrong_is_named_and_located_and_nothing_else(name, folder_of):
    """A wrong cause makes the user change correct code; a wrong place costs the user time."""
    port = FAULTY[name]
    alike = not set("@ ") & set(port.line) and "h.2" not in " ".join(port.truth)  # one fault, in all blocks
    config = TWO if alike else CONFIG
    directory = folder_of(config)
    module, model = port.build(config, directory), gpt2.load(str(directory))
    if port.filled:
        gpt2.load_into(module, model)
    row = score(port, diagnose(module, model))
    assert (row.verdict, row.said) == ("mismatch", port.truth)


@pytest.mark.parametrize(("name", "dtype"), in_each_dtype([*SOUND], [name for name in SOUND if "compiled" not in name][::8]))
def test_a_right_architecture_is_called_right(name, dtype, directory, model):
    """Negative control of the tests above: a correct port has no cause."""
    found = diagnose(SOUND[name].build(TWO, directory).to(DTYPES[dtype]), model)
    assert found.ok, found.table()
    assert found.causes == ()


# The architectures of these ports are in SOUND.
RIGHT = [name for name, port in PORTS.items() if port.complete and not port.home and name not in FAULTY_AFTER_ALL]
QUICK = ["nano"]


@pytest.mark.parametrize(("name", "dtype"), in_each_dtype(RIGHT, QUICK))
def test_a_right_port_is_called_right(name, dtype, model):
    """A false alarm makes the user break correct code."""
    port = PORTS[name]
    module = port.build(TWO).float()
    port.fill(module, model.state_dict())
    found = diagnose(module.to(DTYPES[dtype]), model)
    assert found.ok, found.table()
    assert found.causes == ()


@pytest.mark.parametrize("name", FAULTY_AFTER_ALL)
def test_a_fault_that_logits_do_not_show_is_named(name, model):
    """The logits of these two ports are right, and yet the ports are faulty in use."""
    module = PORTS[name].build(TWO).float()
    PORTS[name].fill(module, model.state_dict())
    assert [cause.id for cause in diagnose(module, model).causes] == [FAULTY_AFTER_ALL[name]]


def test_positions_that_count_padding_are_said(directory, model):
    """A row of a padded batch has other logits than alone: right where positions are given as well, and else a surprise."""
    found = diagnose(SOUND["conv1d: padding-counted"].build(TWO, directory), model)
    assert found.ok
    assert "positions count the padding" in found.notes[0]


def test_positions_that_a_cache_must_be_given_are_said(directory, model):
    """A stranger's right module, whose caller counts the positions, was called faulty with its cache."""
    found = diagnose(SOUND["conv1d: positions-given"].build(TWO, directory), model)
    assert found.ok, found.table()
    assert "only if position_ids are given: in one piece, positions begin at 0 in each call" in found.notes[0]


def test_tables_in_float32_hide_no_two_faults_of_a_block(one, monkeypatch):
    """Three walks over all values were needed, where one is enough: a stranger's third fault met the limit of work."""
    (directory, model), walks = one, []
    monkeypatch.setattr(examination, "search", lambda *given, **named: walks.append(search(*given, **named)) or walks[-1])
    found = diagnose(Faulty("fused", "rotary gelu-erf position-missing no-out-bias").build(ONE, directory), model)
    ids = ["position-missing", "rotary-positions", "missing-bias", "gelu-variant"]
    assert ([cause.id for cause in found.causes], len(walks)) == (ids, 1), found.table()


@pytest.mark.parametrize("name", ["italiano: heads-grouped", "italiano: heads-grouped rotary"])
def test_heads_that_share_keys_are_filled(name, one):
    """With rotary positions, half of the rows of queries and keys were left as they were, which is random."""
    directory, model = one
    report = gpt2.load_into(FAULTY[name].build(ONE, directory), model)
    assert (report.unfilled, report.unused, report.ambiguous) == ({}, {}, ())
    assert any("4 heads share 2 heads of keys and values; each has" in problem for problem in report.problems)


def test_positions_that_begin_too_late_are_named_though_no_text_shows_it(one):
    """A class that `diagnose` fills was EQUAL: the checkpoint's first row stood in its second, and the last nowhere."""
    directory, model = one
    module = Faulty("heads", "position-offset").build(ONE, directory)  # it has a row more
    assert gpt2.load_into(module, model).ok
    assert diagnose(module, model).ok
    module.positions = torch.nn.Embedding(ONE.n_positions, ONE.n_embd)
    assert "position-offset at wpe: positions begin at row 1" in gpt2.load_into(module, model).problems[0]
    assert [(cause.id, str(cause.place)) for cause in diagnose(module, model).causes] == [("position-offset", "wpe")]
    module = Faulty("heads", "").build(ONE, directory)
    module.positions = torch.nn.Embedding(11, ONE.n_embd)
    gpt2.load_into(module, model)
    found = diagnose(module, model)
    assert found.ok
    assert f"11 positions, the checkpoint {ONE.n_positions}" in found.table(120)


@pytest.mark.parametrize("work", [0.0, pytest.param(1e7, marks=pytest.mark.slow)])  # parameters are compared before the walk
def test_values_that_are_turned_are_filled(work, one, monkeypatch):
    """A stranger turns values in place of keys: half of their rows were left as they were, and the order of heads was blamed."""
    monkeypatch.setattr("gpt2.port.terms.budget.WORK", {True: work, False: work})
    directory, model = one
    module = Faulty("italiano", "rotary-values").build(ONE, directory)
    report = gpt2.load_into(module, model)
    assert (report.unfilled, report.unused, len(report.problems)) == ({}, {}, 1), report.problems
    assert [cause.id for cause in diagnose(module, model).causes] == ["cache-inconsistent"]


def test_a_finite_mask_that_scores_reach_is_named(directory):
    """Training drove scores below a mask of -1e4, so that the future was seen: the cause was undetermined, at a known place."""
    module, right = SOUND["fused: mask-1e4"].build(TWO, directory), gpt2.load(str(directory))
    assert diagnose(module, right).ok
    with torch.no_grad():
        for bias in (module.blocks[1].attn.qkv.bias, right.h[1].attn.c_attn.bias):
            bias[: TWO.n_embd] += 300
            bias[TWO.n_embd : 2 * TWO.n_embd] -= 300
    found = diagnose(module, right)
    assert [(cause.id, cause.where) for cause in found.causes] == [("mask-multiplied", "h.1.attn")], found.table()
