"""Fields of a frozen dataclass as a command's options and a function's keywords."""

import argparse
import inspect
from dataclasses import dataclass, fields

import numpy as np
import pytest
import torch
from support.commands import ASSET, refusal

import gpt2
from gpt2.bench import bench
from gpt2.checkpoint.export import export
from gpt2.cli.main import settings_of
from gpt2.comparison.settings import Settings
from gpt2.options import add_options, argument, changed, option, read, signed


@dataclass(frozen=True, kw_only=True)
class Own:
    what: str = argument("what", "WHAT")
    more: tuple[str, ...] = argument("more", "MORE", ())
    rate: float = option("how fast", "R", 1e-3)
    times: int | None = option("how often", "N")
    word: tuple[str, ...] = option("a word", "WORD", ())
    loud: bool = option("shout", default=False)
    progress: object = None  # of the function alone


def test_each_field_is_an_option_with_its_type_its_default_and_its_help() -> None:
    """Options of compare stood in five places, and a default could differ between them."""
    parser = argparse.ArgumentParser()
    add_options(parser, Own)
    assert read(Own, parser.parse_args(["x"])) == Own(what="x")
    with pytest.raises(SystemExit):  # a field without a default is required
        parser.parse_args([])
    given = read(Own, parser.parse_args(["x", "y", "z", "--rate", "2", "--times", "3", "--word", "a", "--word", "b", "--loud"]))
    assert given == Own(what="x", more=("y", "z"), rate=2.0, times=3, word=("a", "b"), loud=True)
    assert [each.name for each in changed(given, "loud", "times", "what")] == ["loud", "times", "what"]
    assert changed(Own(what="x", rate=1e-3), "rate", "word", "loud", "more") == []
    said = " ".join(parser.format_help().split())
    assert "--rate R how fast (default: 0.001)" in said
    assert "--progress" not in said


def test_a_function_shows_the_fields_as_its_keywords() -> None:
    """An editor, and help(), showed **options."""
    own = signed(lambda model, **options: None, Own)
    assert "rate: float = 0.001" in str(inspect.signature(own))
    assert "rate: how fast (default: 0.001)" in own.__doc__
    for wrong, says in {
        "tokns": r"compare\(\) has no keyword 'tokns' \(did you mean tokens\?\)",
        "zz": "'zz'; it has a, b, on, tokens",
    }.items():
        with pytest.raises(TypeError, match=says):  # it named a private class
            gpt2.compare(**{wrong: 1})
    model = gpt2.load(name=ASSET, offline=0, device=torch.device("cpu"))  # which it took by position alone
    for function, wrong, says in (
        *((gpt2.compare, {"a": model, "b": b, k: "x"}, f"{k} has no") for b, k in (("ct2/x", "dtype"), ("port.py:f", "device"))),
        (gpt2.verify, {"seed": None}, "verify: seed is None; give a whole number"),
        (gpt2.compare, {"tokens": "x"}, "compare: tokens is 'x'; give a whole number or None"),
        (gpt2.trace, {"gradients": "no"}, "trace: gradients is 'no'; give True or False"),
        (gpt2.compare, {"save": 5}, "compare: save is 5; give a text or a path or None"),
        (gpt2.trace, {"steps": 2**70}, "trace: steps is 11805"),
        (gpt2.GPT2, {"config": "gpt2"}, "GPT2: config is 'gpt2'; give a GPT2Config"),
        (gpt2.GPT2Config, {"activation_function": np.zeros(2)}, "unknown activation_function array("),
        *((each, {"dtype": torch.int16}, "unknown dtype") for each in (gpt2.compare, gpt2.trace, gpt2.verify, gpt2.load)),
        (gpt2.verify_device, {"progress": "x"}, "verify_device: progress is 'x'; give a function"),
    ):
        assert says in refusal(function, **wrong)
    assert gpt2.trace(name=ASSET, device=torch.device("cpu"), tokens=torch.tensor(4), gradients=1).model == str(ASSET)
    assert gpt2.compare(model, b=ASSET, device=torch.device("cpu"), offline=0, tokens=4, on=ASSET / "README.md").text.name
    assert len(gpt2.generate(model, [1], max_new_tokens=np.int64(2), use_cache=0, temperature=torch.tensor(1.0))) == 3
    shown = inspect.signature(gpt2.compare).parameters
    assert {each.name: each.default for each in fields(Settings)}.items() <= {n: p.default for n, p in shown.items()}.items()


@pytest.mark.parametrize(
    ("command", "function"),
    [
        *(("verify", gpt2.verify), ("trace", gpt2.trace), ("generate", gpt2.generate)),
        *(("bench", bench), ("export", export), ("diagnose", gpt2.diagnose), ("verify", gpt2.verify_device)),
    ],
)
def test_a_command_and_its_function_have_the_same_defaults(command: str, function: object) -> None:
    """The same name with another default: the command would compute something else than the function."""
    signature = inspect.signature(function).parameters
    keywords = {name: each for name, each in signature.items() if each.default is not inspect.Parameter.empty}
    options = fields(settings_of(command))
    both = {each.name: each.default for each in options if each.name in keywords and "help" in each.metadata}
    for other in ("stop", "model", "keep", *(["device"] if command == "verify" else [])):  # of another form
        both.pop(other, None)
    assert both
    assert both == {name: keywords[name].default for name in both}
