"""Parse a MODEL argument: an official name, a repository, a path or random weights, with optional revision and dtype.

Also the names that files of weights have, for folders and for the Hub.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from gpt2.config import ACTIVATIONS, OFFICIAL_SIZES, official_size, quoted
from gpt2.errors import InputError, user_path

DEFAULT = "shakespeare-mini"
OFFICIAL = {
    "gpt2": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
    "distilgpt2": "distilbert/distilgpt2",
}
PATHS = (".", "/", "~")  # a name with such a prefix is a path, even if it does not exist
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)  # org/name on the Hub
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
# transformers' names of weights, preferred ones first: one file, or an index of shards.
LAYOUTS = ((WEIGHTS, INDEX, ".safetensors"), ("pytorch_model.bin", "pytorch_model.bin.index.json", ".bin"))
# Names of older releases, which transformers 5 does not open; always one file.
OLD_LAYOUTS = ("flax_model.msgpack", "tf_model.h5")
ADAPTED = ("adapter_model.safetensors", "adapter_model.bin")  # a PEFT adapter's, beside ADAPTER
# Spelling of a dtype -> torch's name.
FLOATS = {  # which transformers computes in, and other programs' files hold
    **dict.fromkeys(("fp32", "float32", "f32"), "float32"),
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16", "f16"), "float16"),
    **dict.fromkeys(("fp64", "float64", "f64"), "float64"),
}
Name = str | os.PathLike[str]
RUNS = {**FLOATS, "int8": "int8"}  # dtypes to run a model; int8 quantises the weights on loading (gpt2.int8)


def dtype_name(text: str, use: Mapping[str, str], where: str = "") -> str:
    """Return torch's name of a dtype: ``"bf16"`` -> ``"bfloat16"``. Raises InputError: not in ``use``, such as ``RUNS``."""
    if (text := str(text)) in use:
        return use[text]
    if text in RUNS:
        leave_out = f"leave :{text} out here" if where else "choose another here"
        raise InputError(f"{where or text}: eight bits are for running a model (generate, compare, bench); {leave_out}")
    inside = f" in {where!r}" if where else ""
    raise InputError(f"unknown dtype {quoted(text)}{inside}; use one of {', '.join(use)}")


@dataclass(frozen=True)
class RandomWeights:
    size: str
    seed: int


@dataclass(frozen=True)
class ModelName:
    """A parsed MODEL argument; ``dtype`` is torch's name or None for the stored one, ``local`` the embedded model or a path.

    ``activation`` is the feed-forward's, for a checkpoint that does not say it.
    """

    base: str
    revision: str | None
    dtype: str | None
    random: RandomWeights | None
    local: bool
    activation: str | None = None

    @classmethod
    def parse(
        cls,
        text: Name,
        use: Mapping[str, str] = RUNS,
        *,
        dtype: str | None = None,
        revision: str | None = None,
        activation: str | None = None,
    ) -> "ModelName":
        """Parse ``"org/name@v1:bf16"``, ``"random:gpt2:7"``, ``"ckpt.pt:gelu"``. Raises InputError: unknown, contradictory."""
        try:
            text = os.fsdecode(text)
        except TypeError:
            how = "; give gpt2.checkpoint_of(module).load()" if hasattr(text, "forward") else ""
            raise InputError(f"a model's name is a text or a path, and this is {type(text).__name__}{how}") from None
        base, activation = _split_activation(text, activation)
        base, suffix = _split_dtype(base, use)
        base, activation = _split_activation(base, activation)
        dtype = None if dtype is None else dtype_name(dtype, use)
        if None not in (dtype, suffix) and dtype != suffix:
            raise InputError(f"{text}: asks for {suffix}, and {dtype} is wanted here; leave out what is behind the last colon")
        repo, at, pinned = base.partition("@")
        local = base == DEFAULT or (repo not in OFFICIAL and _exists(base))
        random = None if local else _random(base)
        if (random is not None or local) and revision is not None:
            raise InputError(f"{base} has no revisions, only models of the Hub do: leave out revision {revision!r}")
        if at and not local and not base.startswith(PATHS):
            if revision not in (None, pinned):
                raise InputError(f"{text} and revision {revision!r} disagree: give the revision once")
            base, revision = repo, pinned
        return cls(base, revision, dtype or suffix, random, local, activation)


def _exists(text: str) -> bool:
    return text != "" and os.path.exists(user_path(text))


def _split_activation(text: str, given: str | None) -> tuple[str, str | None]:
    """Return the name without an activation at its end, and the activation, there or ``given``."""
    head, colon, suffix = text.rpartition(":")
    if not colon or suffix not in ACTIVATIONS or text.startswith("random:") or _exists(text):
        return text, given
    return head, suffix


def _split_dtype(text: str, use: Mapping[str, str]) -> tuple[str, str | None]:
    head, colon, suffix = text.rpartition(":")
    if not colon or "/" in suffix or "\\" in suffix or _exists(text):
        return text, None
    if text.startswith("random:") and (head == "random" or suffix not in RUNS):
        return text, None  # the size or the seed
    return head, dtype_name(suffix, use, text)


def _random(base: str) -> RandomWeights | None:
    if not base.startswith("random:"):
        return None
    size, colon, seed = base.removeprefix("random:").partition(":")
    official_size(size)  # raises an InputError that lists the sizes
    if colon and not re.fullmatch(r"[0-9]{1,19}", seed):
        sizes = ", ".join(OFFICIAL_SIZES)
        raise InputError(f"bad seed {seed!r} in {base!r}: write random:SIZE:SEED, 0 or more; sizes are {sizes}")
    if int(seed or 0) >= 2**63:
        raise InputError(f"{base}: the seed must be within 0 .. 2**63 - 1; choose a smaller one")
    return RandomWeights(size, int(seed or 0))
