"""``gpt2 verify``: check that our model and transformers compute the same from the same files, or what a device computes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from gpt2.cli.common import ModelSettings, Status, save_page, write_result
from gpt2.errors import InputError
from gpt2.options import changed, device_option, flag_of, json_option, option, pick
from gpt2.parity.settings import VerifySettings

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpt2.devices.report import DeviceReport
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
    html: str | None = option("also write the report as one HTML file", "FILE")
    device: str | None = device_option("judge this device instead, operator by operator", None)
    json: str | None = json_option()


def run(args: VerifyOptions) -> int:
    from gpt2.cli.terminal import Terminal
    from gpt2.measure.allocator import keep_freed_memory

    if args.device is not None and (given := changed(args, "record", "quick", "keep_going")):
        raise InputError(f"{flag_of(given[0])} has no effect with --device, which judges the device; leave it out")
    keep_freed_memory()
    report: Report | DeviceReport
    with Status("importing torch and transformers" if args.device is None else "importing torch") as status:
        from gpt2.pages.reports import Interrupted
        from gpt2.parity.run import verify

        where = pick(args, "seed", "revision", "offline")
        options = pick(args, "quick", "keep_going", "record") | where
        code = None
        try:
            if args.device is not None:
                from gpt2.devices.run import verify_device

                report = verify_device(args.model, args.device, **where, progress=status)
            elif status.live:
                with _Live(status) as live:
                    report = verify(args.model, **options, progress=live.say, watch=live.show)
            else:
                report = verify(args.model, **options)
        except Interrupted as interrupted:
            report, code = interrupted.report, 130
    save_page(args.html, report.save_html)
    write_result(args.json, report.to_json, lambda: report.print(Terminal(highlight=False)))
    return (0 if report.ok else 1) if code is None else code


class _Live:
    """The report on the terminal (stderr) while it fills in, with the current stage below; it is erased at the end."""

    def __init__(self, status: Status) -> None:
        from rich.live import Live

        from gpt2.cli.terminal import Terminal

        self.status, self.stage = status, ""
        self.report: Report | None = None
        self.live = Live(console=Terminal(stderr=True), transient=True, get_renderable=self._drawn)  # four times a second

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.live.stop()

    def say(self, stage: str) -> None:
        """Show the current stage, in one line until there is a report."""
        self.stage = stage
        if self.report is None:
            self.status(stage)

    def show(self, report: "Report") -> None:
        """Show the report so far."""
        if self.report is None:
            self.status.clear()
        self.report = report
        self.live.start()

    def _drawn(self) -> "RenderableType":
        return "" if self.report is None else self.report.so_far(self.stage, self.live.console.height)
