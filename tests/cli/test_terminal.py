"""The output of commands fits a terminal of 80 columns, and no name is cut off."""

import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from support.commands import as_json, mistake, printed
from support.pages import Parts
from support.random_models import write_checkpoint

from gpt2.bench import Bench, Row, Spread
from gpt2.cli import verify_command
from gpt2.cli.main import COMMANDS, file_of, main
from gpt2.comparison.results import Comparison
from gpt2.comparison.run import compare
from gpt2.data.bpe import chars_of
from gpt2.explore.attention import summarise_attention
from gpt2.measure.environment import Environment
from gpt2.measure.last_words import LastWords, last_words_change, score_last_words
from gpt2.measure.tracing import points
from gpt2.pages.reports import Printed
from gpt2.pages.streams import Status
from gpt2.parity.record import RecordReport, public_record
from gpt2.parity.report import EXACT, MAPPING, ROUNDING, Check, Point, Report
from gpt2.port.mapping.report import MappingReport, MappingRow

LAYERS = 12
NAMES = "out/macbeth/a-name-of-a-run/best", "hf/openai-community/gpt2-medium:bf16"
VERSIONS = {"torch": "2.13.0+cpu", "transformers": "5.23.0"}
PARAMETERS = [f"h.{n}.{part}" for n in range(LAYERS) for part in ("mlp.c_proj.bias", "attn.c_attn.weight")]
LOGITS = ["logits (single tokens)", "logits (padded row 1, cached)"]


def verified() -> Report:
    """A report with the longest names of every kind, each the worst point of its block."""
    exact = [Point(name, 1e-13 if name.endswith("attn.weights") else 0.0, 1e-10) for name in points(LAYERS)]
    rounding = [Point(name, 1.3e-7 * (1 + len(name)), 1e-5, 1e-7, 1e-7) for name in (*points(LAYERS), *LOGITS)]
    checks = (
        Check("weights", EXACT, "bits of 148 tensors", "stored", tuple(Point(name, 0.0, 0.0) for name in PARAMETERS)),
        Check("activations", MAPPING, "173 points", "float64", tuple(exact)),
        Check("cache", MAPPING, "read in three parts", "float64", tuple(Point(name, 1e-15, 1e-10) for name in LOGITS)),
        Check("rounding", ROUNDING, "175 points", "bfloat16", tuple(rounding)),
        Check("gradients", MAPPING, "every parameter", "float64", (Point(PARAMETERS[-1], 1.2e-13, 1e-10),)),
        Check("adamw", MAPPING, "change by 5 steps", "float64", skipped="needs 56 GB of memory, this machine has 24"),
        Check("tokens", EXACT, "10 texts and back", "", (Point("tokens (sample 3)", 1.0, 0.0),)),
    )
    environment = Environment(VERSIONS, "bfloat16", "cpu", 2, "x86_64, 2 cores")
    records = [replace(record, ours=record.values or record.continuation) for record in public_record()]
    record = RecordReport("gpt2", (*records[1:], replace(records[0], ours=(), not_computed="out of reach")), True)
    sizes = 124_439_808, LAYERS, "50,257 ids"
    return Report("gpt2", "transformers 5.23.0", None, *sizes, checks, {}, environment, 0, 12.3, record=record)


@cache
def compared() -> Comparison:
    """A real comparison with every part, and the longest names in place of its own."""
    with TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder) / "model")
        real = compare(str(model), f"{model}:bf16", on=__file__, tokens=64)
    parameters = [name for name in PARAMETERS for _ in range(2)]
    some = replace(real.weights.tensors[3], rounded=False)
    tensors = [replace(some, name=name, distance=100 + at) for at, name in enumerate(parameters)]
    errors = tuple(replace(real.activations.points[0], point=point, error=len(point)) for point in points(LAYERS))
    passages = ("to be or not", "the cat sat on the mat")
    scored = score_last_words(lambda ids: torch.zeros(*ids.shape, 99), chars_of("".join(passages)), passages, context=64)
    seen = tuple(replace(each, words=tuple(replace(word, js=0.5) for word in each.words)) for each in real.words.passages)
    said = tuple(replace(each, a=f"{each.a} \0\x1b[2J", b="\0" * 50) for each in real.words.continuations)
    return replace(
        real,
        a=replace(real.a, name=NAMES[0]),
        b=replace(real.b, name=NAMES[1]),
        weights=replace(real.weights, tensors=tuple(tensors)),
        activations=replace(real.activations, points=errors),
        words=replace(real.words, passages=seen, continuations=said),
        last_words=LastWords(scored, scored, last_words_change(scored, scored)),
    )


def mapped() -> MappingReport:
    long = "transformer.decoder_layers.{}.self_attention.qkv_projection.weight"
    rows = [MappingRow(long.format(n), (3, 3), (source,), "transposed") for n, source in enumerate(PARAMETERS)]
    return MappingReport("Port", "gpt2", tuple(rows), {}, {}, {}, (), (), ("a note " * 30,), 1e-15, "the logits agree", True)


def attention() -> Printed:
    maps = torch.rand(2, LAYERS, 4, 9, 9, generator=torch.Generator().manual_seed(0)).tril().softmax(-1)
    return summarise_attention("gpt2", "out/a-long-name/best", tuple("abcdefghi"), *maps)


def words_of(text: str) -> set[str]:
    """The names with a point in a text: traced points and parameters."""
    return set(re.findall(r"[a-z]\w*(?:\.\w+)+", text))


@pytest.mark.parametrize("made", [verified, compared, mapped, attention])
@pytest.mark.parametrize("width", [80, 100])
def test_reports_cut_no_name_off(made, width: int) -> None:
    """``gpt2 verify`` printed ``attn.weig…`` in a plain terminal."""
    report = made()
    text = report.table(width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert words_of(text) == words_of(report.table(300))


@pytest.mark.parametrize("made", [verified, compared, mapped, attention])
def test_a_page_shows_what_the_terminal_shows(made) -> None:
    """A report was written three times, and a figure of one was missing in another; a text in it was read as markup."""
    report = replace(made(), **({"module": "<b>[bold]Port"} if made is mapped else {}))
    page, figures = report.html(), re.split(r"\n|  +", report.table(400))
    shown = "".join(Parts(page).text.split())
    assert len(figures) > 10
    assert [each for each in figures if each.strip(" ─") and "".join(each.split()) not in shown] == []
    assert ("&lt;b&gt;[bold]Port" in page) == (made is mapped)


def test_the_names_that_could_be_cut_off_are_there() -> None:
    """Control: all parts are present, with the longest names; those of projects are the widest cells of verify's tables."""
    text = verified().table(80)
    assert {"attn.weights", "h.11.attn.c_attn.weight"} <= words_of(text)
    assert {cell for record in public_record() for cell in (record.source["project"], record.kind)} <= {*text.split()}
    text = compared().table(80)
    parts = ["Weights", "Activations", "Distributions", "Words", "last words right", "prompt", *NAMES]
    assert [part for part in parts if part not in text] == []
    assert {"h.11.attn.c_attn.weight", "attn.weights"} <= words_of(text)


def test_a_benchmark_fits() -> None:
    both = ("s", Spread(112.3, 101.2, 123.4)), ("tokens/s", Spread(12_345.6, 11_234.5, 13_456.7))
    rows = tuple(Row("decode after 16 x 1024", unit, spread, spread, Spread(1.1, 1.0, 1.2)) for unit, spread in both)
    here = {"processor": "x86_64", "threads": 2, "versions": VERSIONS}
    assert max(map(len, Bench("random:gpt2", 124_439_808, "float32", 5, rows, here).table().splitlines())) <= 80


@pytest.mark.parametrize("argv", [["info"], ["train", "--list"], []])
def test_lists_fit(argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Recipe descriptions and sha256 sums were longer than 80 columns, and the terminal broke them at any place."""
    monkeypatch.setenv("COLUMNS", "80")
    out = printed(capsys, *argv)
    assert len(lines := out.splitlines()) > 5
    if not argv:  # the command alone prints its help; it gave an error about a missing argument
        assert all(command in out for command in COMMANDS)
    assert [line for line in lines if len(line) > 80 and "/" not in line] == []  # paths are not wrapped


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits(name: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Examples and their comments were up to 129 columns wide; a wrapped command must still be one that can be copied."""
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        main([name, "--help"])
    out = capsys.readouterr().out
    assert columns < 80 or max(map(len, out.splitlines())) <= 80
    joined = out.replace(" \\\n   ", "")
    examples = [re.split(r" {2,}", line.strip())[0] for line in file_of(name).EXAMPLES.splitlines() if line.startswith("  gpt2 ")]
    ragged = re.findall(r"^  gpt2 .*\S {2}\S.*", out, re.MULTILINE)  # a comment stands in its column, or below
    assert [example for example in examples if example not in joined] == ragged == []
    assert not any(line.endswith("\\") and not line.startswith("  gpt2") and "--" not in line for line in out.splitlines())


@pytest.mark.parametrize(("term", "widest"), [("xterm", 49), ("dumb", 0)])
def test_progress_fits_a_terminal(term: str, widest: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """A line that cannot be overwritten left its remains at each step, on a terminal of 50 columns, and on a dumb one."""
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Status() as status:
        status("blame: variant 12 of 30, windows 3 of 8, and so on for a long time")
    lines = [line.removeprefix("\x1b[2K") for line in capsys.readouterr().err.split("\r")]
    assert max(map(len, lines)) == widest


def test_a_download_before_the_first_check_has_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """A live view that begins with the first stage took stderr: each update of a download's bar became a line of its own."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Status() as status, verify_command._live(status) as (say, _):
        say("downloading")
        for step in range(9):
            print(f"\r{step}", end="", file=sys.stderr, flush=True)
        assert "\n" not in capsys.readouterr().err


def test_completion(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The script for the Tab key must know our commands and options; shtab's writing of it is its own."""
    pytest.importorskip("shtab")
    out = printed(capsys, "--completion", "bash")
    assert all(name in out for name in (*COMMANDS, "fail-if"))
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert "--completion needs the package shtab; install it with pip install" in mistake(capsys, "--completion", "fish")


def test_reports_of_two_machines_can_be_compared(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict that differs between machines cannot be explained if a report does not say which kernels ran."""
    monkeypatch.setenv("MKL_CBWR", "AUTO")
    here = as_json(capsys, "info")["environment"]  # of each report: test_agents.py
    assert here["processor"]
    assert (here["capability"], here["threads"]) == (torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())
    assert here["blas"] in str(torch.__config__.show())
    assert here["settings"]["MKL_CBWR"] == "AUTO"
