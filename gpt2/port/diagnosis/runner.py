"""Run ``gpt2 diagnose FILE.py:build``: run the user's file in a process of its own.

The file may hang, crash, print or exit. Its output is not read, the answer comes back in a file, and the process ends itself when
a stage takes too long. A failure is one line that names the user's line of code. If this process ends first, that one does too.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpt2.errors import InputError
from gpt2.measure.user_code import Target, target
from gpt2.port.terms.causes import Cause
from gpt2.port.terms.places import Place
from gpt2.port.terms.report import Diagnosis, Divergence

TIMEOUT = 60.0  # seconds for the user's code: import, build, one forward
DIAGNOSIS_FACTOR = 20  # the diagnosis may take this many times as long
PROGRESS = "progress"  # the file in which the process says what it does
POLL_SECONDS = 0.2  # between two looks at it
MAX_PROGRESS = 200  # characters shown of it
MAX_ANSWER = 1 << 24  # bytes read of an answer, which is JSON of some thousands
# By stage: what did not end in time, and when the process ended.
STAGES = {
    "import": ("being imported", "while it was imported"),
    "build": ("its {name}()", "in {name}()"),
    "forward": ("its forward, called on 2 x 8 ids,", "in its forward"),
    "step": ("one call of its step(x, y)", "in its step(x, y)"),
}
REASONS = {"SIGKILL": ": out of memory?", "SIGBUS": ": was the model's weight file cut short meanwhile?"}
START = "import sys; sys.path.insert(0, sys.argv[2]); from gpt2.port.diagnosis.worker import main; main(sys.argv[1])"


def run(
    text: str,
    model: str,
    *,
    step: str | None = None,
    settings: Sequence[str] = (),
    timeout: float = TIMEOUT,
    revision: str | None = None,
    offline: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Diagnosis:
    """Build the model in a process of its own, and diagnose it there.

    ``text``: ``FILE.py:build``, where ``build(checkpoint_dir)`` or ``build()`` returns the module. ``step``:
    ``FILE.py:make_step``, to diagnose a training step of it, with ``settings`` as for :func:`gpt2.diagnose_step`. ``timeout``:
    seconds for the user's code; the diagnosis may take longer. ``progress``: called with a short text at each stage. Raises
    InputError if the file, function or model is missing, or the module cannot be built and run.
    """
    port = target(text)
    training = None if step is None else target(step, "make_step")
    from gpt2.checkpoint.checkpoint import open_checkpoint
    from gpt2.checkpoint.names import FLOATS, ModelName

    open_checkpoint(ModelName.parse(model, FLOATS, revision=revision), offline=offline)  # download before the timeout begins
    with tempfile.TemporaryDirectory(prefix="gpt2-diagnose-", ignore_cleanup_errors=True) as name:
        folder, limits = Path(name), {"short": timeout, "whole": timeout * DIAGNOSIS_FACTOR}
        order: dict[str, object] = {"file": str(port.path), "name": port.name, "model": model}
        order |= {"revision": revision, "offline": offline, **limits}
        if training is not None:
            order |= {"step_file": str(training.path), "step": training.name, "settings": list(settings)}
        (folder / "order.json").write_text(json.dumps(order))
        command = [sys.executable, "-B", "-P", "-c", START, str(folder), str(Path(__file__).parents[3])]
        code = watch(command, folder, 2 * limits["whole"], progress)
        if not (folder / "answer.json").exists():
            raise InputError(f"{port.shown}: {_failure(folder, port, timeout, code)}")
        try:
            with open(folder / "answer.json", "rb") as file:
                answer = json.loads(file.read(MAX_ANSWER))
            if "error" not in answer:
                return _diagnosis(answer)
            words = str(answer["error"])
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}"[:200]
            words = f"{port.shown}: the answer of its process is damaged ({why}); does {port.name} write into other folders?"
    raise InputError(words)


def _diagnosis(answer: dict[str, Any]) -> Diagnosis:
    causes = ({**cause, "places": tuple(Place(**place) for place in cause["places"])} for cause in answer["causes"])
    answer |= {"causes": tuple(Cause(**cause) for cause in causes), "notes": tuple(answer["notes"])}
    if answer["first_divergence"]:
        answer["first_divergence"] = Divergence(**answer["first_divergence"])
    return Diagnosis(**answer)


def watch(command: list[str], folder: Path, limit: float, progress: Callable[[str], None] | None = None) -> int | None:
    """Run a command and return its exit code, minus a signal's number; None if it did not end in ``limit`` seconds.

    What it prints goes to ``printed`` in ``folder``. Afterwards nothing of its process group runs. Its stdin ends with this
    process. ``progress``: called with what the command writes to the file PROGRESS in ``folder``.
    """
    with open(folder / "printed", "wb") as printed:  # a session of its own: Ctrl-C reaches this process only
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
        )
    end_of_time = time.monotonic() + limit
    try:  # an interrupt may come at any time
        while (left := end_of_time - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(min(POLL_SECONDS, left))
            if progress is not None and (folder / PROGRESS).is_file():
                progress((folder / PROGRESS).read_text(errors="replace")[:MAX_PROGRESS])
        return None
    finally:
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                subprocess.call(("taskkill", "/F", "/T", "/PID", str(process.pid)), stdout=subprocess.DEVNULL)
        process.communicate()


def _failure(folder: Path, port: Target, timeout: float, code: int | None) -> str:
    """Say why there is no answer: the stage, and the last line of the user's code."""
    files = (folder / name for name in ("stage", "where", "printed"))
    stage, dump, printed = (file.read_text(errors="replace") if file.exists() else "" for file in files)
    if not stage:
        last = next((line for line in reversed(printed.splitlines()) if line.strip()), "")
        return f"the process could not be started ({last[:200]}); is this Python's torch in order?"
    lines = re.findall(r'File "([^"]*)", line (\d+) in (\S+)', dump)
    own = [f" ({Path(file).name}, line {line}, in {name})" for file, line, name in lines if Path(file).parent == port.path.parent]
    line = own[0] if own else ""
    what, during = (words.format(name=port.name) for words in STAGES.get(stage, ("it", "")))
    if code is None or "Timeout (" in dump:
        limit = timeout * DIAGNOSIS_FACTOR if stage == "diagnosis" else timeout
        return f"{what} did not end in {limit:g} s{line}; find out why, or give it longer with --timeout"
    wanted = "it has to return the loss" if stage == "step" else f"{port.name} has to return the module"
    killer = signal.Signals(-code).name if -code in list(signal.Signals) else ""
    how = f"was killed by {killer}" if killer else f"ended the process (exit code {code})"
    return f"it {how} {during}{line}{REASONS.get(killer, '')}; {wanted}, and nothing else"
