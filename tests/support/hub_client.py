"""Model names resolved by our own code, in a fresh process that knows the stand-in Hub alone.

`huggingface_hub` reads its environment at import. So tests of it run in a process of their own.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from support import forks
from support.forks import TESTS, Fork
from support.hub_standin import HubStandIn

# Resolve every case and print its result, its time, and the number of bytes hashed.
SCRIPT = """
import contextlib, hashlib, json, logging, sys, threading, time
hashed = []
class Counting:
    def __init__(self, real): self.real = real
    def update(self, data): hashed.append(len(data)); self.real.update(data)
    def hexdigest(self): return self.real.hexdigest()
real_sha256 = hashlib.sha256
from gpt2.checkpoint import cache, checkpoint
class Hashlib:
    sha1 = hashlib.sha1
    @staticmethod
    def sha256(): return Counting(real_sha256())
cache.hashlib = Hashlib
logging.basicConfig(level="INFO", format="%(name)s %(levelname)s %(message)s")
exec(sys.argv[2])
for case in json.loads(sys.argv[1]):
    hashed.clear()
    start = time.monotonic()
    try:
        source = checkpoint.resolve(**case)
        out = dict(name=source.name, path=str(source.path), revision=source.revision)
    except Exception as error:
        out = dict(error=type(error).__name__, message=str(error))
    print(json.dumps(out | dict(seconds=time.monotonic() - start, hashed=sum(hashed))))
time.sleep(0.1 if threading.active_count() > 1 else 0)
open_questions = threading.active_count() - 1
print(json.dumps(dict(open_questions=open_questions)))
"""


MINE = "mine, not the cache's"


def start(environ: dict[str, str], *cases: str | dict[str, Any], before: str = "", within: list[str] | None = None) -> Any:
    """Resolve each case in one process, after the code ``before``; a plain string is a case with a name alone.

    ``within`` is a command that starts the process elsewhere.
    """
    asked = [{"name": case} if isinstance(case, str) else case for case in cases]
    words = ["-c", SCRIPT, json.dumps(asked), before]
    if within is None:
        return forks.start(*words, environ=environ, strict=True)
    environ = environ | {"PYTHONPATH": str(TESTS.parent)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*within, sys.executable, "-W", "error", *words], env=environ, **pipes)


def finish(process: Fork | subprocess.Popen) -> list[dict[str, Any]]:
    """The result of each case: ``path`` and ``revision``, or ``error`` and ``message``, one printable line."""
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    *results, end = map(json.loads, out.splitlines())
    for result in results:
        result |= {"stderr": err} | end
        assert result.get("message", "").isprintable()
        assert "\x1b" not in err
    return results


def resolve(environ: dict[str, str], *cases: str | dict[str, Any], **settings: Any) -> list[dict[str, Any]]:
    return finish(start(environ, *cases, **settings))


def fetch_as_others(hub: HubStandIn, home: Path, call: str, **environ: str) -> str:
    """The output of another program that calls ``call``, a function of the Hub's own client."""
    code = f"import huggingface_hub; print(huggingface_hub.{call})"
    return forks.run("-c", code, environ=hub.environ(home, **environ)).stdout.strip()


def plant(top: Path, home: Path) -> list[Path]:
    """Write a user's file into every folder from ``home``, the cache's folder, up to ``top``."""
    home.mkdir(parents=True, exist_ok=True)
    victims = [folder / "victim" for folder in home.parents if folder == top or top in folder.parents]
    for victim in victims:
        victim.write_text(MINE)
    return victims


def beside(top: Path, home: Path) -> dict[Path, bytes | None]:
    """All files and folders below ``top`` outside of ``home``, with the files' bytes."""
    paths = [path for path in top.rglob("*") if home not in path.parents]
    return {path: None if path.is_dir() else path.read_bytes() for path in paths}
