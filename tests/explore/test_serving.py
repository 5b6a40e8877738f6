"""``gpt2 explore``: the page in a file, from a server for this machine only, and in a browser."""

import http.client
import itertools
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import pytest
from support import forks
from support.browser import Browser, in_a_browser
from support.commands import as_json, mistake, printed

import gpt2
from gpt2.cli.main import main
from gpt2.data.bpe import chars_of
from gpt2.explore.lens import explorer

PROMPT = "O Romeo,\nwherefore art"


class Page(NamedTuple):
    """The address of the page: the port and the secret path."""

    port: int
    path: str


def start(*args: str) -> tuple[forks.Fork, Page]:
    """Start the command as a process; return its address."""
    process = forks.Fork("-m", "gpt2", "explore", "--port", "0", *args, strict=True)
    line = process.error_line()
    found = re.fullmatch(r"open http://127\.0\.0\.1:(\d+)(/[\w-]{22}/) in a browser; Ctrl-C ends it\n", line)
    if not found:
        process.kill()
        pytest.fail(line)
    return process, Page(int(found[1]), found[2])


@pytest.fixture(scope="module")
def served() -> Iterator[Page]:
    process, address = start("--prompt", PROMPT)
    yield address
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (out, err, process.returncode) == ("", "", 0)


def get(at: Page, query: str = "", method: str = "GET", **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", at.port, timeout=20)
    connection.request(method, at.path + query, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body, dict(answer.getheaders())


def test_it_serves_the_page_of_what_is_typed(served: Page) -> None:
    """A form sends CR LF for a line break; without conversion the model would read an extra token."""
    status, first, headers = get(served)
    assert (status, headers["x-frame-options"], headers["cache-control"]) == (200, "DENY", "no-store")
    assert f">\n{PROMPT}</textarea>" in first
    status, typed, _ = get(served, "?prompt=" + quote(PROMPT.replace("\n", "\r\n")))
    assert (status, typed) == (200, first)
    assert "Good" in get(served, "?prompt=Good+morrow")[1]


def test_bad_prompts_are_one_line_above_the_field(served: Page) -> None:
    """The user must see an error, not a blank page or a dead server."""
    status, text, _ = get(served, "?prompt=" + "light+" * 300)
    assert status == 400
    alert = re.search(r'role="alert">(.*?)</p>', text)[1]
    assert alert == "the prompt makes 302 tokens of shakespeare-mini; there is room for 128: shorten it"
    assert "light light" in text.split("<textarea", 1)[1]
    assert ".error {" in text  # its own style, which a page without a prompt's lens had lost
    status, text, _ = get(served, "?prompt=" + quote("</textarea><script>alert(1)</script>"))
    assert (status, text.count("<script>")) == (200, 1)


def test_no_other_name_and_no_other_site_gets_an_answer(served: Page) -> None:
    """Any web page could let its own name resolve to this machine (DNS rebinding), or keep all cores busy by links."""
    assert get(served, Host="evil.example")[0] == 400
    assert get(served, Host=f"evil.example:{served.port}")[0] == 400
    assert get(served, Host=f"localhost:{served.port}")[0] == 200
    assert [get(served, method="POST")[0], get(served, "other")[0]] == [501, 404]
    for site, mode in itertools.product(("cross-site", "same-site"), ("no-cors", "cors", "navigate")):
        status, body, _ = get(served, "?prompt=O", Sec_Fetch_Site=site, Sec_Fetch_Mode=mode)
        assert (status, '<a href="./">' in body) == (403, True)
    for site in ("none", "same-origin"):
        assert get(served, "?prompt=O", Sec_Fetch_Site=site, Sec_Fetch_Mode="navigate")[0] == 200
    with socket.socket() as outside, pytest.raises(OSError, match="refused"):
        outside.connect(("127.0.0.2", served.port))  # a server on 0.0.0.0 would answer here as well


def test_who_does_not_know_the_address_gets_nothing(served: Page) -> None:
    """Any user of the machine may connect to the port; the page shows the prompt."""
    for path in ("/", "/?prompt=O", "/x/", "/" + "A" * 22 + "/", "/favicon.ico", "//", served.path[:-2] + "/"):
        status, body, _ = get(Page(served.port, path))
        assert (status, "Romeo" in body) == (404, False), path


def test_a_file_and_json_instead_of_a_server(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A page to share, and the same figures for a script."""
    models, page = ["shakespeare-mini", "shakespeare-mini:bf16"], tmp_path / "p.html"
    assert printed(capsys, "explore", *models, "--prompt", "O", "--html", str(page)) == ""
    assert page.read_text().count('role="grid"') == 2
    assert "".join(as_json(capsys, "explore", "--prompt", PROMPT)["lenses"][0]["tokens"]) == PROMPT


def test_a_port_that_is_taken_is_said_before_the_model_is_loaded(capsys: pytest.CaptureFixture) -> None:
    """Starting the same command twice is the usual cause."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        said = mistake(capsys, "explore", "--port", port)
    assert said == f"gpt2 explore: --port {port}: address already in use; choose another, or 0 for a free one\n"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("browser") / "profile")
    yield browser
    browser.close()


CHOSEN = """(side => ({
    strip: [...document.querySelectorAll('.strip')].map(s => [...s.children].findIndex(t => t.ariaSelected === 'true')),
    cell: [...document.querySelectorAll(`table[data-side="${side}"] tbody tr`)].flatMap((row, point) =>
        [...row.querySelectorAll('td')].map((cell, at) => [cell, point, at])).filter(([c]) => c.ariaSelected === 'true')
        .map(([c, point, at]) => [point, at, c.innerText])[0],
    layer: document.querySelectorAll('.layers')[side].querySelector('[aria-checked=true]').innerText,
    head: document.querySelectorAll('.heads')[side].querySelector('[aria-checked=true]').innerText,
    detail: document.querySelectorAll('.detail')[side].innerText,
    says: document.querySelectorAll('.says')[side].innerText,
    focus: document.activeElement.getAttribute('role'),
    ring: getComputedStyle(document.activeElement.querySelector('i') || document.activeElement).outlineStyle,
}))"""


@in_a_browser
@pytest.mark.parametrize("width", [1280, 420])
def test_the_keyboard_reaches_everything(browser: Browser, served: Page, width: int) -> None:
    """The keyboard alone must be enough (typing, tab, arrows), and the text must describe the selection."""
    browser.open(f"http://127.0.0.1:{served.port}{served.path}", width)
    assert browser.value("document.documentElement.scrollWidth") <= width
    browser.value("document.querySelector('textarea').select(), document.querySelector('textarea').focus()")
    browser("Input.insertText", text="O Romeo, Romeo! wherefore art")
    browser.value("window.before = true")
    browser.press("Tab")
    browser.press("Enter")
    browser.wait("!window.before && document.readyState == 'complete'")
    assert "prompt=O+Romeo" in browser.value("location.search")
    with explorer("shakespeare-mini") as opened:
        lens = opened.look("O Romeo, Romeo! wherefore art").lenses[0]
        last, top = len(lens.tokens) - 1, lens.readings
        chosen = browser.value(CHOSEN + "(0)")
        assert chosen["strip"] == [last]
        assert chosen["cell"][:2] == [5, last]
        assert [chosen["layer"], chosen["head"].strip()] == ["h.4", "head 0"]
        browser.value("document.querySelector('textarea').focus()")
        browser.press("Tab", 2)  # the button, the strip
        browser.press("ArrowLeft", 3)
        chosen = browser.value(CHOSEN + "(0)")
        assert (chosen["focus"], chosen["strip"], chosen["cell"][:2]) == ("option", [last - 3], [5, last - 3])
        assert chosen["ring"] == "solid"
        browser.press("Tab")  # the grid
        browser.press("ArrowUp", 2)
        browser.press("ArrowRight")
        chosen = browser.value(CHOSEN + "(0)")
        assert (chosen["focus"], chosen["strip"], chosen["cell"][:2]) == ("gridcell", [last - 2], [3, last - 2])
        reading = top[3][last - 2]
        assert chosen["cell"][2].strip() == reading.top[0].text.strip()
        for choice in reading.top:
            assert choice.text.strip() in chosen["detail"]
        assert f"{100 * reading.top[0].probability:.1f}\xa0%" in chosen["detail"]
        assert f"choice number {reading.rank}." in chosen["detail"]
        assert chosen["layer"] == "h.2"
        browser.press("Tab")  # the layers
        browser.press("ArrowLeft")
        browser.press("Tab")  # the heads
        browser.press("End")
        chosen = browser.value(CHOSEN + "(0)")
        assert (chosen["focus"], chosen["ring"], chosen["cell"][0]) == ("radio", "solid", 2)
        assert [chosen["layer"], chosen["head"].strip()] == ["h.1", "head 4"]
        row = lens.attention[1, 4, last - 2].tolist()
        best = max(range(len(row)), key=row.__getitem__)
        expected = f"looks at “{lens.tokens[best].strip()}” {100 * row[best]:.0f}\xa0%"
        assert expected in chosen["says"]
    assert browser.value("document.documentElement.scrollWidth") <= width
    own = (f"http://127.0.0.1:{served.port}{served.path}", "file:", "data:", "about:")
    assert all(url.startswith(own) for url in browser.asked)


@in_a_browser
@pytest.mark.parametrize("width", [1280, 420])
def test_two_models_move_together_where_they_correspond(browser: Browser, tmp_path: Path, width: int) -> None:
    """If both models read the same tokens, a selection moves on both sides; with other tokens or layers it must not."""
    chars = tmp_path / "chars"
    tokenizer = chars_of(PROMPT)
    gpt2.save(gpt2.GPT2(gpt2.GPT2Config(tokenizer.n_vocab, 64, 12, 2, 3)), tokenizer, chars)
    for other, together in (("shakespeare-mini:bf16", True), (str(chars), False)):
        target = tmp_path / f"{together}.html"
        assert main(["explore", "shakespeare-mini", other, "--prompt", PROMPT, "--html", str(target)]) == 0
        browser.open(target.as_uri(), width)
        before = browser.value(CHOSEN + "(1)")
        browser.value(
            "document.querySelector('.strip').children[2].click(); document.querySelectorAll('.layers button')[1].click()"
        )
        assert browser.value(CHOSEN + "(0)")["cell"][:2] == [2, 2]
        after = browser.value(CHOSEN + "(1)")
        assert after["cell"][:2] == ([2, 2] if together else before["cell"][:2])
        assert len(after["strip"]) == (1 if together else 2)
        assert browser.value("document.documentElement.scrollWidth") <= width
        sight = browser.value("[...document.querySelectorAll('.lens + .remark:not([hidden])')].map((says) => says.textContent)")
        said = [says for says in sight if re.match(r"Tokens \d+ to (\d+) of \1; scroll", says)]
        assert len(sight) == len(said) == (2 if width < 1000 else not together)  # 22 letters are wider than half a page
        tops = browser.value("[...document.querySelectorAll('.side')].map(s => s.getBoundingClientRect().top)")
        assert (tops[0] == tops[1]) == (width > 1000)


@in_a_browser
def test_light_and_dark_are_both_drawn(browser: Browser, tmp_path: Path) -> None:
    """Maps with a white background are too bright on a dark page; they are drawn again when the scheme changes."""
    assert main(["explore", "--prompt", PROMPT, "--html", str(tmp_path / "p.html")]) == 0
    browser.open((tmp_path / "p.html").as_uri(), 1280)
    pixel = "[470, 5].map((x) => [...document.querySelector('.map').getContext('2d').getImageData(x, 5, 1, 1).data])"
    seen = {}
    for scheme in ("light", "dark"):
        browser("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        browser.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        seen[scheme] = browser.value(pixel)
    browser("Emulation.setEmulatedMedia", features=[])
    assert [each[0][3] for each in seen.values()] == [0, 0]  # the page shines through
    assert {scheme: each[1] for scheme, each in seen.items()} == {"light": [200, 85, 27, 255], "dark": [240, 147, 92, 255]}
    assert main(["compare", "shakespeare-mini", "--attention", PROMPT, "--html", str(tmp_path / "a.html")]) == 0
    browser.open((tmp_path / "a.html").as_uri(), 1280)  # one model: a choice among models was there
    assert browser.value("[...document.querySelectorAll('.switch label')].map(x => !!x.offsetParent)") == [False, True, True]
