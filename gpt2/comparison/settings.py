"""What a comparison takes beside its models: the keywords of ``gpt2.compare`` and the options of ``gpt2 compare``."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpt2.options import device_option, offline_option, option, seed_option

THRESHOLD = 1e-3  # relative error: 1000 times float32's rounding, and less than after one step of fine-tuning
TEXT = "a text file or table, read as train reads it, - for stdin, or a name (default: Twelfth Night, new to shakespeare-mini)"
CASES = "also ask both your own questions: prompt and expected, the whole answer (or question and answer); or text and label"


@dataclass(frozen=True)
class CaseTable:
    """A user's table of cases; ``fields`` names prompt and expected text where they have other names."""

    path: str
    fields: tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Each is said once, here. ``dtype`` is that of a model whose name gives none; by default it is as stored."""

    on: "str | Path | None" = option(TEXT, "TEXT")
    tokens: int | None = option("tokens of the text, 0 for all (default: 8192; all of wikitext2)", "N")
    threshold: float = option("report the first activation with a larger relative error", "E", THRESHOLD, least=0)
    seed: int = seed_option("seeds intervals, and the ids where there is no text", metavar="N")
    dtype: "str | None" = None
    offline: bool = offline_option()
    device: str | object = device_option("where checkpoints run; float64 stays on the CPU")  # or a torch.device
    blame: bool = option("also put parts of B into A, and measure what each carries", default=False)
    cases: str | Path | CaseTable | None = option(CASES, "FILE")
    save: str | Path | None = option("keep what A shows on the text, for a side trace:FILE (.safetensors)", "FILE", writes=True)
    progress: Callable[[str], None] = lambda what: None  # called with a few words at each stage
