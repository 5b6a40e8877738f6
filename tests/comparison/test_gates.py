"""`compare --fail-if`: conditions are parsed, and judged by the worse end of an interval."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import forks
from support.commands import mistake, refusal
from support.random_models import changed, noisy, write_checkpoint

import gpt2
from gpt2.checkpoint import gguf_writer
from gpt2.checkpoint.export import export
from gpt2.checkpoint.loading import load
from gpt2.cli.main import main
from gpt2.comparison.gates import METRICS, Gate
from gpt2.comparison.results import Comparison
from gpt2.data.bpe import train_bpe
from gpt2.measure.estimates import Estimate
from gpt2.testing import assert_same


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """A model, the same model with noise in one tensor, one with another tokenizer, and the text."""
    tuned = changed(base, tmp_path_factory.mktemp("noisy"), noisy(1.0, "h.1.mlp.c_fc.weight"))
    other = write_checkpoint(tmp_path_factory.mktemp("other"), tokenizer=train_bpe("Enter GHOST. Who's there?\n" * 20, 270))
    return str(base), str(tuned), str(other)


@pytest.fixture(scope="module")
def compared(folders: tuple[str, str, str], text: str) -> Comparison:
    return gpt2.compare(folders[0], folders[1], on=text, tokens=200)


def test_a_wrong_expression_is_one_line() -> None:
    """A misspelt condition that passes would check nothing."""
    wrong = {"kl": "METRIC OP NUMBER", "kl=1": "METRIC OP NUMBER", "kl>1>2": "no finite number", "kl>nan": "no finite number"}
    for expression, words in {**wrong, "kld>1": "there is no metric 'kld'; use one of kl, kl_max, js"}.items():
        assert words in refusal(Gate.parse, expression)
    assert Gate.parse(" kl  >= .5") == Gate("kl", ">=", 0.5)  # with or without spaces


def test_every_metric_is_what_the_report_says(compared: Comparison) -> None:
    """A metric read from the wrong field would judge another figure than the report shows."""
    both, points = compared.distributions, compared.activations.points
    shown = {"kl": both.kl_ab.mean.value, "kl_max": both.kl_ab.max, "js": both.js.mean.value, "same_top": both.same_top.value}
    shown |= {"perplexity_ratio": both.ratio.value, "weights": compared.weights.total.distance}
    shown |= {"beyond_rounding": 1.0}  # the tensor with noise
    shown |= {"activation": max(point.error for point in points), "logit": points[-1].error}
    assert set(METRICS) - set(shown) == {"exact_match", "contains", "lost_cases", "answer_ratio"}  # of --cases
    for metric, value in shown.items():
        judged = [Gate(metric, op, limit).judge(compared) for op, limit in ((">", -1.0), (">", 1e9))]
        assert [(each.measured.value, each.met) for each in judged] == [(value, True), (value, False)], metric


def test_an_interval_is_judged_by_its_far_end(compared: Comparison) -> None:
    """A figure may be within the limit by chance while its interval exceeds the limit: the condition must fail."""
    divergence = replace(compared.distributions.kl_ab, mean=Estimate(0.25, 0.2, 0.3))
    apart = replace(compared, distributions=replace(compared.distributions, kl_ab=divergence))
    met = {"kl>0.29": True, "kl>=0.3": True, "kl>0.3": False, "kl<0.2": False, "kl<0.21": True, "kl<0.25": True}
    judged = {expression: Gate.parse(expression).judge(apart) for expression in met}
    assert {expression: each.met for expression, each in judged.items()} == met
    assert all("95 % interval 0.2 .. 0.3" in str(each) for each in judged.values())
    broken = replace(compared, distributions=replace(compared.distributions, kl_ab=replace(divergence, max=math.nan)))
    assert Gate.parse("kl_max>1").judge(broken).met  # NaN compares as False with every limit
    assert str(Gate.parse("kl_max<1").judge(broken)).endswith("is nan, a figure that passes no limit")


def test_a_quantised_file_is_the_model_rounded_and_nothing_else(text: str, tmp_path: Path) -> None:
    """ "Is this Q8_0 file right?" had a KL for an answer, and no word on whether rounding explains it; one other weight must."""
    base, gate = str(write_checkpoint(tmp_path / "base", n_embd=64)), Gate.parse("beyond_rounding>0")
    model, tokenizer = load(base), gpt2.load_tokenizer(base)

    def judged(source: str, gguf: str = "") -> tuple[Comparison, float]:
        if gguf:
            source = str(Path(export(source, tmp_path / gguf, format="gguf", type="q8_0").directory, "model.gguf"))
        found = gpt2.compare(base, source, on=text, tokens=24)
        return found, gate.judge(found).measured.value

    found, beyond = judged(base, "right")
    assert (found.weights.rounded_to, beyond) == ("q8_0", 0)
    with torch.no_grad():
        model.h[1].ln_2.weight[7] += 1e-3
    wrong, beyond = judged(str(gpt2.save(model, tokenizer, tmp_path / "other")), "wrong")
    assert (wrong.weights.nearly, wrong.weights.beyond, beyond) == ("q8_0", ("h.1.ln_2.weight",), 1)  # no KL would show it
    assert "but not h.1.ln_2.weight" in " ".join(wrong.table(120).split())
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # a fine-tune: that one matrix is only rounded says nothing of it
            smallest = name == "h.0.attn.c_proj.weight"
            parameter.copy_(parameter.bfloat16().float() if smallest else parameter * 1.01)
    tuned, beyond = judged(str(gpt2.save(model, tokenizer, tmp_path / "tuned")))
    assert (tuned.weights.nearly, tuned.weights.beyond) == ("", ())
    assert beyond == len(tuned.weights.tensors) - len(tuned.weights.unchanged) > 0


SETTINGS = {
    "nothing": ({}, "IDENTICAL"),
    "epsilon": ({"gpt2.attention.layer_norm_epsilon": 1e-6}, "layer_norm_epsilon: 1e-05 → 1e-06"),
    "no split named": ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre: gpt-2 → missing, which llama.cpp reads as default"),
    "a token in front": ({"tokenizer.ggml.add_bos_token": True}, "around a prompt: nothing → <|endoftext|>"),
    "two tokens swapped": ({"tokenizer.ggml.tokens": lambda tokens: [*tokens[:-3], tokens[-2], tokens[-3], tokens[-1]]}, "in 2"),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_file_of_the_right_tensors_that_is_another_program(
    setting: str, folders: tuple[str, str, str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "Rounded, and nothing else" was said of a file that llama.cpp gives other tokens, or another epsilon; two IDENTICAL."""
    changes, says = SETTINGS[setting]
    written = gguf_writer._metadata

    def metadata(*args):
        found = written(*args)
        for key, value in changes.items():
            kind, before = found.pop(key)
            if value is not None:
                found[key] = kind, value(before) if callable(value) else value
        return found

    monkeypatch.setattr(gguf_writer, "_metadata", metadata)
    file = Path(export(folders[0], tmp_path, format="gguf").directory, "model.gguf")
    found = gpt2.compare(folders[0], str(file), on=text, tokens=24)
    assert Gate.parse("beyond_rounding>0").judge(found).met == bool(changes)
    assert says in " ".join(found.table(120).split())
    assert ("IDENTICAL" in found.table(120)) == (not changes)


def test_full_agreement_on_too_few_tokens_says_how_many_decide(folders: tuple[str, str, str], text: str) -> None:
    """`same_top<0.999` failed at 100 %, with no hint that only more tokens can pass it."""
    few, gate = gpt2.compare(folders[0], folders[0], on=text, tokens=60), Gate.parse("same_top<0.95")
    assert not Gate.parse("same_top<0.9").judge(few).met
    enough = int(str(gate.judge(few)).partition("--tokens ")[2].split()[0])
    several = [gpt2.compare(folders[0], folders[0], on=text, tokens=tokens) for tokens in (enough - 2, enough)]
    assert [gate.judge(each).met for each in several] == [True, False]
    one = gpt2.compare(folders[0], folders[0], on=text, tokens=2)  # its interval, of nothing, was past every limit
    assert Gate.parse("kl>1e-3").judge(one).verdict.endswith("nats is 0 (a single value has no interval), within the limit")
    assert set(json.loads(one.to_json())["distributions"]["ratio"].values()) == {1.0}
    assert re.search(r"1 token scored(?s:.*)1\.000 \(no interval\)", one.table(120))


def test_exit_codes(folders: tuple[str, str, str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Met, not met, not measurable: exit 1, 0, 2; each condition is in the JSON and on stderr."""
    base, tuned, other = folders
    command = ["compare", base, tuned, "--on", text, "--tokens", "40", "--json", "-"]
    assert main([*command, "--fail-if", "kl>1e-9", "--fail-if", "weights>1e9"]) == 1
    out, err = capsys.readouterr()
    assert [(each["gate"]["metric"], each["met"]) for each in json.loads(out)["gates"]] == [("kl", True), ("weights", False)]
    assert [line[:16] for line in err.splitlines()] == ["failed: kl>1e-09", "passed: weights>"]
    assert main([*command, "--fail-if", "kl>1e9"]) == 0
    assert main(["compare", base, other, *command[3:7], "--fail-if", "kl>1"]) == 2
    out, err = capsys.readouterr()
    assert "bits per byte" in out  # the measured figures are shown
    assert "kl was not measured (" in err.splitlines()[-1]
    assert "no effect with --attention" in mistake(capsys, "compare", base, tuned, "--fail-if", "kl>1", "--attention", "To be")


def test_assert_same_raises_where_a_limit_is_passed(folders: tuple[str, str, str], text: str) -> None:
    """The direction of limits: same_top is a minimum, all others are maximums."""
    base, tuned, _ = folders
    assert assert_same(base, base, on=text, tokens=64, kl=0.0, same_top=0.9, weights=0.0).ok
    with pytest.raises(AssertionError, match=r"differ: kl>0.*; weights>0\.01"):
        assert_same(base, tuned, on=text, tokens=64, kl=0.0, weights=0.01, same_top=0.0)
    assert "needs a limit, such as kl=1e-3" in refusal(assert_same, base, base)
    run = Path(base).parent / "run"
    for place in ("step-1", "best"):
        shutil.copytree(base, run / place)
    (run / "recipe.json").write_text("{}")
    assert "it is the folder of a training run" in refusal(assert_same, str(run), base, on=text, kl=1.0)
    assert "there is no metric 'nats'" in refusal(assert_same, base, base, nats=1.0)


@pytest.mark.slow
def test_the_fixture_in_a_project_of_its_own(folders: tuple[str, str, str], text: str, tmp_path: Path) -> None:
    """Run the README's example in a pytest of its own: one test passes, one fails; of a wrong path, our source was shown."""
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["gpt2.testing"]\n')
    it = "def test_{}(assert_same):\n    assert_same({!r}, {!r}, on={!r}, tokens=64, kl=1e-3)\n"
    (tmp_path / "test_it.py").write_text("".join(it.format(n, folders[0], b, text) for n, b in enumerate((*folders[:2], "./no"))))
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path]
    ran = forks.run(*words, status=1, cwd=tmp_path)
    assert ("2 failed, 1 passed" in ran.stdout, "raise" in ran.stdout) == (True, False)
    assert "differ: kl>0.001: mean KL(a‖b) in nats is" in ran.stdout
