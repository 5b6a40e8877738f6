"""``gpt2 train watch`` and ``plot``: what the page and the picture show of a run, also of one that failed."""

from __future__ import annotations

import http.client
import json
import re
import signal
from contextlib import closing
from pathlib import Path

import pytest
from support import forks
from support.browser import Browser, in_a_browser
from support.commands import mistake, refusal

from gpt2.cli.main import main
from gpt2.train.plot import page, plot
from gpt2.train.runs import COLOURS, read


def write(folder: Path, val: list[float], more: str = "") -> Path:
    """A run's folder with an evaluation every ten steps and a step that was skipped; training losses fall."""
    folder.mkdir(exist_ok=True)
    rows: list[dict] = []
    for i, loss in enumerate(val):
        rows += [{"step": 10 * i, "loss": 3 - 0.1 * i, "lr": 1e-3 / (i + 1), "grad_norm": 1.0 + i}] if i else []
        rows.append({"step": 10 * i, "val_loss": loss, "val_bits_per_byte": loss * 1.4, "sample": f"I am <b>step</b> {10 * i}"})
    rows.append({"step": 5, "diverged": "loss nan", "action": "skip"})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + more)
    (folder / "recipe.json").write_text(json.dumps({"steps": 100, "patience": 0, "expect": 1.5}))
    return folder


def test_a_run_is_read_as_it_was_logged(tmp_path: Path) -> None:
    """A NaN, a damaged or an incomplete line must not stop the plot: those runs need it most."""
    folder = write(tmp_path / "a", [3.0, 2.0, float("nan"), 1.8], more="[" * 100_000 + '\n{"step": 99, "lo')
    (found,) = read([folder])
    assert found.name == "a"
    assert found.points("val_loss") == ((0, 3.0), (10, 2.0), (30, 1.8))
    assert [step for step, _ in found.points("loss")] == [10, 20, 30]
    assert found.setting("expect") == 1.5


def test_pictures_of_one_run_and_of_several(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", [3.0, 2.0, 1.8]), write(tmp_path / "b", [2.5, 1.9, 1.85])
    assert plot([a], tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    svg = plot([a, b], tmp_path / "two.svg").read_text()
    for part in ("a, held out: best 1.8000 at step 20", "b, held out: best 1.8500 at step 20", "bits per byte", "nats per token"):
        assert part in svg
    assert "expected 1.5" in plot([a], tmp_path / "one.svg").read_text()
    assert plot([a, b], tmp_path / "again.svg").read_text() == svg


def test_what_cannot_be_drawn_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    a, empty = write(tmp_path / "a", [3.0, 2.0]), tmp_path / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").touch()
    for folders, out, says in (
        ([], "x.png", "no runs: give the folders"),
        ([a], "x.gif", "ends in .png or .svg"),
        ([tmp_path / "none"], "x.png", "cannot be read"),
        ([empty], "x.png", "no losses there yet"),
        ([a], "nowhere/x.png", "cannot be written"),
    ):
        assert says in refusal(plot, folders, tmp_path / out)
    assert main(["train", "plot", str(a), "--out", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").is_file()
    capsys.readouterr()
    assert "cannot be read" in mistake(capsys, "train", "plot", str(tmp_path / "none"))
    assert "give one recipe only" in mistake(capsys, "train", "bigram", str(a))


def test_where_held_out_loss_turned(tmp_path: Path) -> None:
    """The step to stop at is what people look for; a single later evaluation is no turn. Control: a loss that still falls."""
    turned, falls = write(tmp_path / "turned", [3.0, 2.5, 2.2, 2.4, 2.6]), write(tmp_path / "falls", [3.0, 2.5, 2.2, 2.1, 2.15])
    assert [run.turned for run in read([turned, falls])] == [20, None]
    text = page([turned, falls])
    assert "turned at 20" in text
    assert text.count("turned at") == 2  # wide and narrow
    assert "overfitting: since step 20" in text
    assert "Lowest held-out loss <b>2.2000</b> at step 20; it has only been higher since" in text


def test_the_page_shows_rate_norm_and_samples_and_obeys_none(tmp_path: Path) -> None:
    """A sample is whatever a model wrote: it must not become part of the page. An incomplete line must not end it."""
    text = page([write(tmp_path / "run", [3.0, 2.5, 2.2], more='{"step": 30, "lo')])
    assert "I am &lt;b&gt;step&lt;/b&gt; 20" in text
    for title in ("Loss, nats per token", "Learning rate", "Gradient norm before clipping"):
        assert title in text
    assert "training: step 20 of 100. Lowest" in text
    assert "src=" not in text


def test_the_axes_of_a_run_that_has_begun(tmp_path: Path) -> None:
    """Ticks between two steps were rounded, to 0 0 1 2 2, and a single point was not seen. A class is of a document."""
    rows = [{"step": step, "val_loss": 3.1 - step, "confusion": [[1, 0], [0, 1]]} for step in range(3)]
    more = "".join(json.dumps(row) + "\n" for row in [*rows, {"step": 2, "loss": 2.0, "lr": 1e-3}])
    text = page([write(tmp_path / "run", [], more=more)])
    assert "Loss, nats per document" in text
    loss, rate, _ = re.findall(r'<div class="narrow">(.*?)</div>', text, re.DOTALL)
    assert [re.findall(r">(\d+)</text>", chart) for chart in (loss, rate)] == [["0", "1", "2"], ["2"]]
    assert re.search(rf"<use [^>]*{COLOURS[0]}", rate)


def test_a_page_in_a_file_and_user_errors(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = str(write(tmp_path / "run", [3.0]))
    assert main(["train", "watch", folder, "--html", str(tmp_path / "w.html")]) == 0
    assert "gpt2 train watch" in (tmp_path / "w.html").read_text()
    capsys.readouterr()
    assert "give the folder of a run" in mistake(
        capsys, "train", "watch", str(tmp_path / "none"), "--html", str(tmp_path / "x.html")
    )
    assert "no runs: give the folders" in mistake(capsys, "train", "watch", "--html", str(tmp_path / "x.html"))
    assert "the numbers are in RUN/metrics.jsonl" in mistake(capsys, "train", "watch", folder, "--json", "-")
    assert "are for gpt2 train watch" in mistake(capsys, "train", "shakespeare-mini", "--port", "1")


def get(address: str, **headers: str) -> tuple[int, str]:
    host, path = re.fullmatch(r"http://([^/]+)(/.*)", address).groups()
    with closing(http.client.HTTPConnection(host, timeout=20)) as connection:
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_it_follows_a_run_on_loopback(tmp_path: Path) -> None:
    """The page must show a line that was written after it was opened, to nobody without the address, and wait for the run."""
    folder = tmp_path / "run"
    process = forks.start("-m", "gpt2", "train", "watch", folder, "--port", "0", strict=True)
    assert process.error_line() == f"{folder}: no run there yet; waiting for gpt2 train to begin it\n"
    address = re.search(r"http://127\.0\.0\.1:\d+/[\w-]{22}/", process.error_line())[0]
    try:
        assert "waiting for the run to begin: step 0" in get(address)[1]
        write(folder, [3.0, 2.5, 2.4])
        status, text = get(address)
        assert (status, "step 20 of 100" in text) == (200, True)
        assert '{"refresh": 5}' in text
        assert get(address[:-3] + "xx/")[0] == 404
        assert get(address, Host="evil.example")[0] == 400
        assert get(address, Sec_Fetch_Site="cross-site")[0] == 403
    finally:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert (out, err, process.returncode) == ("", "", 0)


@in_a_browser
def test_a_browser_loads_it_again_by_itself(tmp_path: Path) -> None:
    """The security policy of the page could forbid its own script."""
    folder = write(tmp_path / "run", [3.0, 2.5])
    (tmp_path / "w.html").write_text(page([folder], refresh=1))
    browser = Browser(tmp_path / "browser")
    try:
        browser.open((tmp_path / "w.html").as_uri(), width=900)
        (tmp_path / "w.html").write_text(page([write(folder, [3.0, 2.5, 2.4])], refresh=1))
        browser.wait("document.body.innerText.includes('step 20 of 100')")
    finally:
        browser.close()
