"""The page of a comparison loads nothing, is reproducible, escapes all text, and works with missing parts."""

import math
import os
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from support import forks
from support.browser import Browser, in_a_browser
from support.pages import ATTACK, Parts, assert_whole_by_itself

from gpt2.comparison.charts import errors_by_layer, heat_shade
from gpt2.comparison.results import Comparison
from gpt2.comparison.run import compare
from gpt2.comparison.words import Choice
from gpt2.errors import InputError
from gpt2.explore.lens import error_page
from gpt2.pages.drawing import shade
from gpt2.pages.rendering import number, percent, readable, visible

SECTIONS = ["activations", "distributions", "the-text", "words", "each-tensor", "made-with"]
NARROW = '<div class="narrow">'


@pytest.fixture(scope="module")
def found(base: Path, text: str) -> Comparison:
    """A comparison of two precisions of one model: every part except unequal shapes, with enough numbers for every picture."""
    return compare(str(base), f"{base}:bf16", on=text, tokens=200)


@pytest.fixture(scope="module")
def html(found: Comparison) -> str:
    return found.html()


def test_the_page_is_whole_by_itself_and_the_same_each_time(found: Comparison, html: str) -> None:
    """A page that needs the network is blank offline; a page that varies cannot be compared with an older version."""
    assert html == found.html()
    assert "--html &#39;my page.html&#39;" in found.html("my page.html")
    assert [html.count(digest) for digest in found.a.files.values()] == [1] * len(found.a.files)  # both have the same files
    assert_whole_by_itself(html)
    assert [name for name in Parts(html).ids if name in (*SECTIONS, "blame")] == SECTIONS
    assert "form" not in Parts(html).tags
    assert 'class="tok s16' in html  # of two near models the largest divergence is the darkest: all was pale
    assert 100_000 < len(html.encode()) < 3_000_000


def test_text_from_models_and_files_stays_text(found: Comparison) -> None:
    """A token or name that is parsed as markup would run in the browser of each reader."""
    words, choice = found.words, (Choice(ATTACK, 0.5),)
    word = replace(words.text[0], text=ATTACK, top_a=choice, top_b=choice)
    said = replace(words.continuations[0], prompt=ATTACK, a=ATTACK, b=ATTACK)
    words = replace(words, text=(word,), passages=(replace(words.passages[0], words=(word,)),), continuations=(said,))
    page = replace(found, a=replace(found.a, name=ATTACK), text=replace(found.text, name=ATTACK), words=words).html()
    assert_whole_by_itself(page)
    assert "alert(1)" in page
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    assert "&lt;b&gt;" in error_page(("a",), "<b>", InputError("x"))


def test_figures_read_as_a_person_writes_them() -> None:
    """ "100.0 %" of a million tokens may hide a thousand that differ."""
    shares = {0.0: "0.0 %", 2.1e-4: "0.021 %", 1e-9: "1 × 10⁻⁷ %", 1.0: "100.0 %", 0.99999: "> 99.9 %", -0.25: "−25.0 %"}
    assert {value: percent(value) for value in shares} == shares
    figures = {math.inf: "∞", -math.inf: "−∞", None: "–", math.nan: "–", 0.0: "0", 123.0: "123", 1.5e-9: "1.50 × 10⁻⁹"}
    assert {value: number(value) for value in figures} == figures
    assert (readable("a\n\x1b\u202e\udc80b"), visible("  "), visible(" a\n")) == ("a\n���b", "␣␣", " a⏎")  # an empty cell


def test_colours_grow_with_what_they_stand_for() -> None:
    """Blank means equal, and nothing else is blank."""
    assert [shade(x) for x in (0.0, 1e-9, 0.5, 1.0, 2.0, math.inf)] == [0, 1, 8, 16, 16, 16]
    shades = [heat_shade(x, 0.1) for x in (0.0, 1e-5, 0.001, 0.01, 0.1, math.inf)]
    assert shades[0] == 0 < shades[1]
    assert all(x <= y for x, y in pairwise(shades))
    assert shades[-2:] == [16, 16]
    assert heat_shade(math.nan, 0.1) == 16


def test_pictures_touch_no_configuration(tmp_path: Path) -> None:
    """The user's matplotlib style would change the page, and matplotlib would write to the home folder."""
    home = tmp_path / "home"
    (home / ".config" / "matplotlib").mkdir(parents=True)
    (home / ".config" / "matplotlib" / "matplotlibrc").write_text("lines.linewidth: 77\n")
    (tmp_path / "matplotlibrc").write_text("lines.linewidth: 55\n")
    code = """if True:
        import os
        from gpt2.pages import drawing
        seen = drawing.svg("x", (2, 2), "<x>", lambda figure: figure.subplots().plot([1, 2]))
        import matplotlib
        assert "MPLCONFIGDIR" not in os.environ and 'aria-label="&lt;x&gt;"' in seen
        assert "stroke-width: 77" not in seen and "stroke-width: 1.5" in seen
        assert "stroke-width: 55" not in seen and "#000001" not in seen
    """
    inherited = {name: value for name, value in os.environ.items() if name != "MPLCONFIGDIR" and not name.startswith("XDG_")}
    forks.run("-c", code, cwd=tmp_path, environ=inherited | {"HOME": str(home)}, modules=forks.TORCH)
    assert [path.name for path in home.rglob("*") if path.is_file()] == ["matplotlibrc"]


@in_a_browser
def test_pointing_at_a_token_shows_what_both_models_expected(found: Comparison, tmp_path: Path) -> None:
    """In a browser: on a wide and a narrow screen; no network request, and nothing wider than the screen."""
    found.save_html(tmp_path / "report.html")
    browser = Browser(tmp_path / "profile")
    try:
        for width in (1280, 390):
            browser.open((tmp_path / "report.html").as_uri(), width)
            assert browser.value("document.documentElement.scrollWidth") <= width
            cut = browser.value("[...document.querySelectorAll('.scroll')].some((box) => box.scrollWidth > box.clientWidth)")
            assert cut == (width < 1000)
            for at in (7, 20):
                tip = f"getComputedStyle(document.querySelectorAll('.tok')[{at}], '::after')"
                assert browser.value(f"{tip}.content") == "none"
                browser.value(f"document.querySelectorAll('.tok')[{at}].focus()")
                shown, word = browser.value(f"{tip}.content"), found.words.text[at]
                for top in (word.top_a, word.top_b):
                    assert f"“{visible(top[0].text)}” {percent(top[0].probability)}" in shown
                assert browser.value(f"parseFloat({tip}.width)") <= width
        assert all(url.startswith("file:") for url in browser.asked)
    finally:
        browser.close()


@pytest.mark.parametrize("top", [0.02, 0.2, 2e6])
def test_a_logarithmic_axis_has_three_labels(top: float) -> None:
    """One of two decades had two labels, one within a decade had formulas for TeX, $\\mathdefault{6\\times10^{-1}}$."""
    errors = [("embed", 0.011), ("h.0.mid", 0.012), ("h.0", top)]
    for drawn in errors_by_layer(errors, 1e-9).split(NARROW):
        assert "mathdefault" not in drawn
        labels = [text for text in re.findall(r">([^<>\n]+)</text>", drawn) if re.fullmatch(r"[\d.e+]+|10[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", text)]
        assert len(labels) >= 3, labels
        assert "0.09" not in labels
