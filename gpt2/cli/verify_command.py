"""``gpt2 verify``: check that our model and transformers compute the same from the same files, or what a device computes."""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gpt2.cli.common import ModelSettings, finish
from gpt2.options import device_option, option, pick
from gpt2.pages.streams import Status
from gpt2.parity.settings import VerifySettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import RenderableType

    from gpt2.parity.report import Report

EXAMPLES = """\
  gpt2 verify                        the embedded checkpoint, in a few seconds
  gpt2 verify gpt2                   the official weights
  gpt2 verify gpt2-xl --quick        weights, activations, 128 tokens of logits, text; no training
  gpt2 verify gpt2 --record          and every number that others recorded of them
  gpt2 verify ./my-model:bf16        a local directory; rounding is checked in bfloat16
  gpt2 verify random:gpt2-medium     official shapes, random weights, no download
  gpt2 verify --json report.json --html report.html
  gpt2 verify gpt2 --device cuda     does this GPU compute GPT-2?

--device judges the device, not our model: each operator alone, forwards and backwards, and the whole model, in float32, bfloat16
and float16, beside float64 on the CPU. An error up to twice what rounding explains holds (three times in training). What TF32,
16-bit sums or flushed subnormals explain is named, with the line that turns it off. Of all else the first wrong point is named.

exit code: 0 equal, 1 different, or a device that is wrong or lacks an operator, 2 bad input, 130 interrupted, with a report"""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(VerifySettings, ModelSettings):
    html: str | None = option("also write the report as one HTML file", "FILE", writes=True)
    device: str | None = device_option("judge this device instead, operator by operator", None)
    WITHOUT_EFFECT: ClassVar = {"device": ("record", "quick", "keep_going")}  # which judges the device


def run(args: VerifyOptions) -> int:
    from gpt2.measure.allocator import keep_freed_memory

    keep_freed_memory()
    with Status("importing torch and transformers" if args.device is None else "importing torch") as status:
        from gpt2.pages.reports import Interrupted
        from gpt2.parity.run import verify

        options = pick(args, "device", "quick", "keep_going", "record", "seed", "revision", "offline")
        code, shown = None, _live(status) if status.live and args.device is None else nullcontext((status, None))
        try:
            with shown as (say, show):
                report = verify(args.model, **options, progress=say, watch=show)
        except Interrupted as interrupted:
            report, code = interrupted.report, 130
    return finish(args, report, code=code)


@contextmanager
def _live(status: Status) -> "Iterator[tuple[Callable[[str], None], Callable[[Report], None]]]":
    """Yield what takes a stage, and the report so far: both are shown on the terminal (stderr), and erased at the end."""
    from rich.live import Live

    from gpt2.pages.terminal import Terminal

    stage: str = ""
    report: Report | None = None

    def say(current: str) -> None:
        nonlocal stage
        stage = current
        if report is None:
            status(stage)

    def show(so_far: "Report") -> None:
        nonlocal report
        if report is None:
            status.clear()
            live.start()
        report = so_far

    def drawn() -> "RenderableType":
        return "" if report is None else report.so_far(stage, live.console.height)

    live = Live(console=Terminal(stderr=True), transient=True, get_renderable=drawn)  # four times a second
    try:
        yield say, show
    finally:
        live.stop()
