"""Chromium for tests of pages; the tests are skipped without it."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
KEYS = {"Tab": 9, "Enter": 13, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


def in_a_browser(test: Callable) -> Callable:
    """Mark a test as slow, and skip it without Chromium."""
    return pytest.mark.slow(pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")(test))


class Browser:
    """Headless Chromium, controlled through a pipe: https://chromedevtools.github.io/devtools-protocol/."""

    def __init__(self, folder: Path) -> None:
        (their_in, self.out), (self.into, their_out) = os.pipe(), os.pipe()
        flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update"
        command = f'exec "{CHROMIUM}" {flags} --disable-sync --user-data-dir="{folder}" --remote-debugging-pipe about:blank'
        # The browser reads file 3 and writes file 4.
        take = "from fcntl import fcntl, F_DUPFD as d; from os import dup2, execvp; import sys; "
        take += "r, w = (fcntl(int(x), d, 10) for x in sys.argv[1:3]); dup2(r, 3); dup2(w, 4); "
        take += "execvp('sh', ['sh', '-c', *sys.argv[3:]])"
        redirected = [sys.executable, "-c", take, str(their_in), str(their_out), command]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(redirected, pass_fds=(their_in, their_out), **quiet)
        os.close(their_in)
        os.close(their_out)
        self.number, self.session, self.rest, self.asked = 0, None, b"", []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self.session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self("Network.enable")

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                if not (more := os.read(self.into, 1 << 16)):
                    raise RuntimeError("the browser has gone")
                self.rest += more
            one, self.rest = self.rest.split(b"\0", 1)
            answer = json.loads(one)
            if answer.get("method") == "Network.requestWillBeSent":
                self.asked.append(answer["params"]["request"]["url"])
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def value(self, expression: str) -> Any:
        return self("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)["result"].get("value")

    def open(self, url: str, width: int) -> None:
        self("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
        self("Page.navigate", url=url)
        self.wait(f"document.readyState == 'complete' && location.href == {json.dumps(url)}")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true; raise after half a minute."""
        end = time.monotonic() + 30
        while not self.value(condition):
            if time.monotonic() > end:
                raise TimeoutError(
                    f"{condition} at {self.value('location.href')}: {self.value('document.body.innerText')[:200]!r}"
                )

    def press(self, key: str, times: int = 1) -> None:
        """Press a key, given by its name in a KeyboardEvent: "ArrowLeft", "Tab", "Enter"."""
        code = KEYS[key]
        for _ in range(times):
            text = {"text": "\r"} if key == "Enter" else {}  # without this, Enter does not press a button
            self("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **text)
            self("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    def close(self) -> None:
        self("Browser.close")
        self.process.wait(30)
        os.close(self.out)
        os.close(self.into)
