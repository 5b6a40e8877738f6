"""Open the sides of a comparison by name: the one place where the kinds of sides are told apart."""

from __future__ import annotations

import re
from collections.abc import Callable

from gpt2.comparison.settings import Settings
from gpt2.comparison.sides.checkpoint_side import CheckpointSide
from gpt2.comparison.sides.ctranslate2 import CTranslate2Side
from gpt2.comparison.sides.held import held
from gpt2.comparison.sides.llama_cpp import LlamaCppSide
from gpt2.comparison.sides.onnx import OnnxSide
from gpt2.comparison.sides.port import PortSide
from gpt2.comparison.sides.side import Side
from gpt2.comparison.sides.trace_side import PREFIX as TRACE_PREFIX
from gpt2.comparison.sides.trace_side import TraceSide
from gpt2.errors import InputError
from gpt2.measure.user_code import target
from gpt2.model import GPT2

PORT = re.compile(r".*\.py(:\w*)?", re.DOTALL)  # FILE.py:build
KINDS: dict[str, Callable[[str], Side]] = {  # prefix of a name -> how to open it
    TRACE_PREFIX: TraceSide.open,
    **{kind.prefix: kind.open for kind in (LlamaCppSide, CTranslate2Side, OnnxSide)},
}

ADDRESSES = ("http://", "https://")
DEFAULTS = Settings()


def open_sides(*models: str | GPT2, settings: Settings = DEFAULTS) -> tuple[Side, ...]:
    """Open the sides of one comparison; a port gets the first checkpoint's folder."""
    sides = [open_side(model, settings) for model in models]
    checkpoint = next((side.checkpoint for side in sides if isinstance(side, CheckpointSide)), None)
    for side in sides:
        if isinstance(side, PortSide):
            side.checkpoint = checkpoint
    return tuple(sides)


def open_side(name: str | GPT2, settings: Settings = DEFAULTS) -> Side:
    """Open a side, by name or a model in memory. The settings have the dtype of a model whose name gives none, and the device.

    Raises InputError: no such side or device, or its engine is missing.
    """
    if isinstance(name, GPT2):
        return held(name, offline=settings.offline)
    if PORT.fullmatch(name):
        return PortSide(name, target(name))
    if name.startswith(ADDRESSES):
        how = "give the engine's own file, or save its ids and logits as safetensors, and give trace:FILE"
        raise InputError(f"{name}: a server shows a few tokens of each place, so it is not compared; {how}")
    for prefix, kind in KINDS.items():
        if name.startswith(prefix) and name != prefix:
            return kind(name)
    return CheckpointSide.open(name, offline=settings.offline, dtype=settings.dtype, device=settings.device)
