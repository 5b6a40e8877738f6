"""The parts of an HTML page, and the checks that every page of ours must pass."""

import base64
import hashlib
import re
from html.parser import HTMLParser

ATTACK = '</script><script>alert(1)</script><img src=x onerror="alert(2)">\'"&'


class Parts(HTMLParser):
    """A page's elements, ids, links and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str | None] = []
        self.links: list[str | None] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value for name, value in attributes if name == "id"]
        links = [value for name, value in attributes if name in ("src", "href", "action") or name.startswith("on")]
        self.links += [link for link in links if not (link or "").startswith("#")]

    def handle_data(self, data: str) -> None:
        self.text += data


def assert_whole_by_itself(page: str) -> None:
    """Assert that the page loads nothing, and that its policy allows its own script."""
    parts = Parts(page)
    assert set(parts.links) <= {"data:,"}
    assert not {"iframe", "object", "base"} & set(parts.tags)
    assert not re.search(r"url\((?!#)|@import", page)
    script = page[page.rindex("<script>") + 8 : page.rindex("</script>")]
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in page
