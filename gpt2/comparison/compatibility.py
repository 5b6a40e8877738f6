"""What of two models can be compared at all, found out before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from gpt2.config import GPT2Config
from gpt2.data import Tokenizer
from gpt2.errors import InputError

PADDING = 128  # vocabularies are padded to a multiple of at most so much, for speed

# What decides which numbers a model computes; the rest of a config is about training it, or about ids that end a text.
SHAPE = ("n_layer", "n_embd", "n_head", "n_inner", "n_positions", "vocab_size")
FUNCTION = (
    "activation_function",
    "layer_norm_epsilon",
    "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx",
    "reorder_and_upcast_attn",
)


@dataclass(frozen=True)
class Vocabularies:
    """Two tokenizers, entry by entry.

    ``verdict`` is "equal" (every text gets the same ids), "merges" (the same entries, other merges), "different", or "none"
    where a model comes without one. ``differing`` counts ids that stand for other bytes or are in one only, ``examples`` shows
    the first of them as (id, a, b).
    """

    verdict: str
    entries_a: int | None
    entries_b: int | None
    differing: int
    examples: tuple[tuple[int, str | None, str | None], ...]

    @property
    def comparable(self) -> bool:
        """Whether the two models' distributions are over the same things."""
        return self.verdict in ("equal", "merges", "none")


@dataclass(frozen=True)
class Compatibility:
    """``architecture`` has a row (field, a, b) for each difference; ``impossible`` says of a part why it is left out."""

    architecture: tuple[tuple[str, object, object], ...]
    vocabularies: Vocabularies
    impossible: dict[str, str]

    @property
    def same_shape(self) -> bool:
        return not {field for field, *_ in self.architecture} & {"n_layer", "n_embd", "n_head", "n_inner"}


def compare_vocabularies(a: Tokenizer | None, b: Tokenizer | None) -> Vocabularies:
    """Every entry of both; a model without a tokenizer is taken to share the other's ids."""
    sizes = [None if tokenizer is None else tokenizer.n_vocab for tokenizer in (a, b)]
    if a is None or b is None:
        return Vocabularies("none", *sizes, 0, ())
    differing = []
    for index in range(max(sizes)):
        entries = [_entry(tokenizer, index) for tokenizer in (a, b)]
        if entries[0] != entries[1]:
            differing.append((index, *(None if entry is None else _shown(entry) for entry in entries)))
    verdict = "different" if differing else "equal" if a.fingerprint == b.fingerprint else "merges"
    return Vocabularies(verdict, *sizes, len(differing), tuple(differing[:5]))


def compatibility(a: GPT2Config, b: GPT2Config, tokenizer_a: Tokenizer | None, tokenizer_b: Tokenizer | None) -> Compatibility:
    """What differs, and what follows for the parts of a comparison.

    Raises:
        InputError: vocabularies of different sizes, beyond padding, of which one has no tokenizer to be compared.
    """
    fields = {field: (getattr(a, field), getattr(b, field)) for field in (*SHAPE, *FUNCTION)}
    fields["n_inner"] = a.inner, b.inner
    differing = tuple((field, *values) for field, values in fields.items() if values[0] != values[1])
    vocabularies = compare_vocabularies(tokenizer_a, tokenizer_b)
    small, large = sorted((a.vocab_size, b.vocab_size))
    if vocabularies.verdict == "none" and large > -(-small // PADDING) * PADDING:
        raise InputError(
            f"one of the models has no tokenizer, and {a.vocab_size:,} ids cannot be the other's {b.vocab_size:,}: there is "
            "nothing to compare; give models of one vocabulary, or with their tokenizers"
        )
    of_shape = [field for field, *_ in differing if field in SHAPE]
    impossible = {}
    if of_shape:
        impossible["weights"] = f"the models differ in {', '.join(of_shape)}"
    if not vocabularies.comparable:
        why = f"the tokenizers differ in {vocabularies.differing:,} entries"
        impossible |= {"activations": why, "distributions": f"{why}; each model's loss on the text is told in bits per byte"}
    return Compatibility(differing, vocabularies, impossible)


def _entry(tokenizer: Tokenizer, index: int) -> bytes | None:
    return tokenizer.token_bytes(index) if index < tokenizer.n_vocab else None


def _shown(entry: bytes) -> str:
    return repr(entry.decode("utf-8", "replace"))
