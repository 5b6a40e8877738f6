"""What ``verify`` takes beside its model: the keywords of ``gpt2.verify`` and the options of ``gpt2 verify``."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2.options import offline_option, option, revision_option, seed_option

if TYPE_CHECKING:
    from gpt2.model import GPT2
    from gpt2.parity.report import Report

QUICK = "leave out training (loss, gradients, optimizer steps), and read 128 tokens, not whole contexts"


@dataclass(frozen=True, kw_only=True)
class VerifySettings:
    """Each is said once, here; :func:`gpt2.parity.run.verify` says what the last four are."""

    revision: str | None = revision_option()
    offline: bool = offline_option()
    seed: int = seed_option("seeds the random token ids")
    quick: bool = option(QUICK, default=False)
    keep_going: bool = option("look for more differences; the default stops at the first one", default=False)
    record: bool = option("show each number that others recorded of the official weights, beside ours", default=False)
    dtype: "str" = "float32"
    build: "Callable[[Path, Any], GPT2] | None" = None
    progress: Callable[[str], None] = lambda what: None
    watch: "Callable[[Report], None] | None" = None
