"""Open the sides of a comparison, by name or as models in memory, and its text: where the kinds of sides are told apart."""

import re
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch

from gpt2.checkpoint.loading import load_tokenizer
from gpt2.comparison.passage import DEFAULT_CONTEXT, Passage, Scored, read
from gpt2.comparison.settings import Settings
from gpt2.comparison.sides.checkpoint_side import CheckpointSide
from gpt2.comparison.sides.engines import CTranslate2Side, LlamaCppSide, OnnxSide
from gpt2.comparison.sides.port import PortSide
from gpt2.comparison.sides.side import Side
from gpt2.comparison.sides.trace_side import TraceSide
from gpt2.errors import InputError
from gpt2.int8 import Int8GPT2
from gpt2.lora import merged
from gpt2.measure.texts import RUNNING, open_text
from gpt2.measure.user_code import target
from gpt2.model import GPT2
from gpt2.options import changed, flag_of
from gpt2.port.mapping.checkpoint import ModuleCheckpoint

TOKENS = 8192  # tokens of the text, by default
PORT = re.compile(r".*\.py(:\w*)?", re.DOTALL)  # FILE.py:build
KINDS = TraceSide, LlamaCppSide, CTranslate2Side, OnnxSide  # each with the prefix of its names
DEFAULTS = Settings()


def open_sides(*models: str | GPT2, settings: Settings = DEFAULTS) -> tuple[Side, ...]:
    """Open the sides of one comparison, which know each other; a circle of references would keep models in memory."""
    sides = [open_side(model, settings) for model in models]
    for side in sides:
        side.sides = [weakref.proxy(each) for each in sides]
    return tuple(sides)


def open_side(name: str | GPT2, settings: Settings = DEFAULTS) -> Side:
    """Open a side, by name or a model in memory. The settings have the dtype of a model whose name gives none, and the device.

    Raises InputError: no such side or device, or its engine is missing.
    """
    if isinstance(name, GPT2):
        return held(name, offline=settings.offline)
    if PORT.fullmatch(name):
        return PortSide(name, target(name))
    if name.startswith(("http://", "https://")):
        how = "give the engine's own file, or save its ids and logits as safetensors, and give trace:FILE"
        raise InputError(f"{name}: a server shows a few tokens of each place, so it is not compared; {how}")
    for kind in KINDS:
        if name.startswith(kind.prefix) and name != kind.prefix:
            return kind.open(name)
    return CheckpointSide.open(name, offline=settings.offline, dtype=settings.dtype, device=str(settings.device))


def held(model: GPT2, *, offline: bool = False) -> CheckpointSide:
    """Return the side of a copy of a model as it is now, adapters merged, with the tokenizer of what it was loaded from.

    Raises InputError: it is in int8.
    """
    loaded_from, table = getattr(model, "name", ""), model.wte.weight
    name = f"{loaded_from or 'a GPT2'} in memory"
    if isinstance(model, Int8GPT2):
        raise InputError(f"{name}: is in int8; give its name, as in {loaded_from or 'MODEL'}:int8")
    weights = {key: each.cpu() for key, each in merged(model).state_dict().items()}
    checkpoint = ModuleCheckpoint(name, None, model.config, table.dtype, table.dtype, weights, ())
    side, tokenizer = CheckpointSide(name, False, checkpoint, table.device), None
    with suppress(InputError):  # the files may be gone
        tokenizer = load_tokenizer(loaded_from, offline=offline) if loaded_from else None
    side.tokenizer = tokenizer if tokenizer and tokenizer.n_vocab <= model.config.vocab_size else None
    side.in_memory = True
    return side


def open_passage(sides: Sequence[Side], settings: Settings) -> Passage:
    """Return what is compared. Raises InputError: no such text, or one that is too short; recordings of other texts."""
    if recorded := [side for side in sides if side.recording is not None]:
        return _recorded(recorded, sides, settings)
    tokenizer = sides[0].text_tokenizer
    text = open_text(settings.on, offline=settings.offline) if tokenizer or settings.on else None
    known = [side.n_positions for side in sides if side.n_positions is not None]
    if not any(side.config for side in sides):  # no GPT-2: others have 100,000 positions
        known.append(DEFAULT_CONTEXT)
    windows = (text.protocol if text else RUNNING).windows(min(known))
    tokens = settings.tokens if settings.tokens is not None else 0 if windows.guide else TOKENS
    if tokens < 0 or tokens == 1:
        raise InputError(f"{tokens} tokens are too few to predict one from another; give 2 or more, or 0 for all of the text")
    if text is None or tokenizer is None:
        name = f"random ids, as no tokenizer is here to read {settings.on}" if settings.on else "random ids"
        if not (vocab := min(side.vocab for side in sides)):
            raise InputError(f"{sides[0].name}: has no tokenizer to read a text with; compare it with a model that has one")
        ids = torch.randint(vocab, (tokens or TOKENS,), generator=torch.Generator().manual_seed(settings.seed))
        return Passage(ids, windows, Scored(name, "", len(ids), windows.context, windows.step, ""))
    (ids, documents), told = (each[: tokens or None] for each in read(text, tokenizer)), text.protocol.told
    if len(ids) < 2:
        raise InputError(f"{text.name}: the text is {len(ids)} tokens, too few to predict one from another; give a longer text")
    scored = Scored(text.name, text.sha256, len(ids), windows.context, windows.step, told, text.reading(tokenizer))
    return Passage(ids, windows, scored, text, documents=documents)


def _recorded(recorded: Sequence[Side], sides: Sequence[Side], settings: Settings) -> Passage:
    first, recording = recorded[0], recorded[0].recording
    assert recording is not None
    for each in changed(settings, "on", "tokens"):
        held = f"{recording.scored.name}, {len(recording.ids):,} tokens"
        raise InputError(f"{first.name}: holds its own text ({held}); leave {flag_of(each)} out")
    for side in recorded[1:]:
        other = side.recording
        if other is None or not torch.equal(other.ids, recording.ids) or other.windows != recording.windows:
            raise InputError(f"{first.name} and {side.name}: were made on different texts; save them on one, with one context")
    for side in sides:
        if side.tokenizer is not None and recording.tokenizer not in (None, side.tokenizer.fingerprint):
            raise InputError(f"{first.name}: was saved with another tokenizer than {side.name}'s, so its ids are other words")
        if side.n_positions is not None and side.n_positions < recording.windows.context:
            what = f"predicts from {recording.windows.context:,} tokens, and {side.name} has {side.n_positions:,} positions"
            raise InputError(f"{first.name}: {what}; save it with a context that both have")
    return recording
