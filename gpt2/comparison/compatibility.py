"""Decide which parts of two models can be compared, before anything runs."""

import itertools
import math
from dataclasses import dataclass, replace

from torch import Tensor

from gpt2.checkpoint.gguf_writer import TANH_GELU
from gpt2.comparison.sides.checkpoint_side import heads_left_out
from gpt2.comparison.sides.side import SHOWABLE, Side
from gpt2.config import GPT2Config
from gpt2.data import Tokenizer
from gpt2.errors import InputError

PADDING = 128  # largest multiple to which a vocabulary is padded for speed

# The fields of a config that decide what a model computes.
SHAPE = ("n_layer", "n_embd", "n_head", "n_inner", "n_positions", "vocab_size")
ROUNDING = ("reorder_and_upcast_attn", "tie_word_embeddings")  # the same function, or what the tensors themselves say
FUNCTION = ("activation_function", "layer_norm_epsilon", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", *ROUNDING)


@dataclass(frozen=True)
class Parting:
    """The first token of a text in which two tokenizers differ: its number, and each tokenizer's id and token there."""

    at: int
    a: tuple[int, str] | None  # None where its ids end
    b: tuple[int, str] | None

    def __str__(self) -> str:
        a, b = (f"{each[1]} ({each[0]})" if each else "the end" for each in (self.a, self.b))
        return f"token {self.at} is {a} by A and {b} by B"


@dataclass(frozen=True)
class Vocabularies:
    """The differences of two tokenizers, entry by entry.

    ``verdict`` is "equal" (every text gets the same ids), "merges" (same entries, different merges), "extended" (one has all
    entries of the other, and more), "different", or "none" if a model has no tokenizer. ``differing`` counts ids that mean
    different bytes or exist in one tokenizer only; ``examples`` are the first five, as (id, a, b). ``rules`` are the other
    differences, as (what, a, b): what is put around a prompt, where a text ends, how another program splits a text.
    """

    verdict: str
    entries_a: int | None
    entries_b: int | None
    differing: int
    examples: tuple[tuple[int, str | None, str | None], ...]
    parting: Parting | None = None  # on the scored text
    rules: tuple[tuple[str, str, str], ...] = ()

    @property
    def on_the_text(self) -> str:
        """In words, for tokenizers that share entries: what they make of the scored text."""
        same = "other ids of this text" if self.parting else "the same ids of this text"
        if self.verdict != "extended":
            return f"one vocabulary, {same}"
        more = "B" if self.examples[0][1] is None else "A"
        examples = [f"{a or b} ({index})" for index, a, b in self.examples]
        tokens = ", ".join([*examples, *["..."] * (self.differing > len(examples))])
        return f"{more}'s vocabulary has {self.differing:,} more, {tokens}; {same}"

    @property
    def comparable(self) -> bool:
        """Whether both models' distributions are over the same vocabulary."""
        return self.verdict in ("equal", "merges", "none") or (self.verdict == "extended" and self.parting is None)


@dataclass(frozen=True)
class Compatibility:
    """The differences of two configs, as rows (field, a, b), and the impossible parts of a comparison: part -> reason."""

    architecture: tuple[tuple[str, object, object], ...]
    vocabularies: Vocabularies
    impossible: dict[str, str]

    def without(self, parts: dict[str, str]) -> "Compatibility":
        """Return it with further impossible parts."""
        return replace(self, impossible=self.impossible | parts)

    @property
    def departures(self) -> tuple[str, ...]:
        """What makes b another program than a, whatever the weights: settings that change the function, and the tokenizer."""
        changed = [(field, {a, b}) for field, a, b in self.architecture if field in FUNCTION and field not in ROUNDING]
        fields = [field for field, both in changed if not both <= {*TANH_GELU}]
        tokenizer = [] if self.vocabularies.verdict in ("equal", "none") else ["the tokenizer"]
        return (*fields, *(what for what, *_ in self.vocabularies.rules), *tokenizer)


def compare_vocabularies(a: Tokenizer | None, b: Tokenizer | None, ids: Tensor | None = None) -> Vocabularies:
    """Compare two tokenizers entry by entry, and on the text of a's ``ids``; without a tokenizer a model uses its partner's."""
    if a is None or b is None:
        return Vocabularies("none", a.n_vocab if a else None, b.n_vocab if b else None, 0, ())
    differing = [index for index in range(max(a.n_vocab, b.n_vocab)) if _entry(a, index) != _entry(b, index)]
    examples = tuple((index, _text(_entry(a, index)), _text(_entry(b, index))) for index in differing[:5])
    held = {(a.holds(index), b.holds(index)) for index in differing}
    verdict = "different" if held else "equal" if a.fingerprint == b.fingerprint else "merges"
    verdict = "extended" if held in ({(True, False)}, {(False, True)}) else verdict
    parting = _first_parting(a, b, a.decode(ids.tolist())) if ids is not None and verdict != "equal" else None
    return Vocabularies(verdict, a.n_vocab, b.n_vocab, len(differing), examples, parting, _rules(a, b))


def _rules(a: Tokenizer, b: Tokenizer) -> tuple[tuple[str, str, str], ...]:
    """Return what two tokenizers do differently beside their entries; ends are compared where both say them."""
    rules = [(name, a.elsewhere.get(name, "gpt-2"), b.elsewhere.get(name, "gpt-2")) for name in {**a.elsewhere, **b.elsewhere}]
    for what, ids in (("around a prompt", [each.encode_prompt("") for each in (a, b)]), ("a text ends at", [a.ends, b.ends])):
        words = [", ".join(map(each.shown, sorted(own))) or "nothing" for each, own in zip((a, b), ids, strict=True)]
        rules += [(what, words[0], words[1])] if all(ids) or what == "around a prompt" else []
    return tuple(row for row in rules if row[1] != row[2])


def _first_parting(a: Tokenizer, b: Tokenizer, text: str) -> Parting | None:
    """Return the first token in which two tokenizers' ids of a text differ, or None."""
    ids = a.encode(text), b.encode(text)
    for at, (x, y) in enumerate(itertools.zip_longest(*ids)):
        if x != y:
            return Parting(at, *(None if i is None else (i, _text(_entry(own, i)) or "") for own, i in ((a, x), (b, y))))
    return None


def fit(a: Side, b: Side, ids: Tensor, *, several: bool) -> Compatibility:
    """Decide before anything runs what can be measured on ids (N,) of a's tokenizer; a config may be unknown.

    Of ``several`` models only the distributions are, and how far the weights moved. Raises InputError: nothing fits.
    """
    vocabularies, differing, tokens = compare_vocabularies(a.tokenizer, b.tokenizer, ids), _differing(a.config, b.config), {}
    if a.config is not None and b.config is not None and vocabularies.verdict == "none":
        fewer, more = sorted((a.config.vocab_size, b.config.vocab_size))
        if more > math.ceil(fewer / PADDING) * PADDING:
            what = f"vocabularies of {a.config.vocab_size:,} and {b.config.vocab_size:,} ids, and one has no tokenizer"
            how = "give models with the same vocabulary, or with their tokenizers"
            raise InputError(f"the models have {what}, so their ids cannot be matched; {how}")
    if not vocabularies.comparable:
        why = f"the tokenizers differ in {vocabularies.differing:,} entries"
        tokens = {"activations": why, "distributions": f"{why}; the report has each model's bits per byte instead"}
    missing = {part: [side for side in (a, b) if part not in side.shows] for part in SHOWABLE if not several}
    shown = {part: f"{few[0].name} shows only {' and '.join(sorted(few[0].shows))}" for part, few in missing.items() if few}
    rows = () if vocabularies.verdict == "different" else ("vocab_size",)  # those that both have are compared
    if shapes := [field for field, *_ in differing if field in SHAPE and field not in rows]:
        shown["weights"] = f"the models differ in {', '.join(shapes)}"
        shown |= {"activations": shown["weights"]} if {*shapes} & {"n_layer", "n_embd", "n_head", "n_inner"} else {}
    heads = heads_left_out(*((b,) if several else (a, b)))
    others = {part: why for part, why in shown.items() if part not in tokens}
    return Compatibility(differing, vocabularies, {**tokens, **others, **heads})


def require_same_function(compatible: Compatibility) -> None:
    """Raise InputError unless one model's tensors can stand in for the other's."""
    function = [field for field, *_ in compatible.architecture if field in FUNCTION]
    parts = [compatible.impossible[part] for part in ("weights", "activations", "distributions") if part in compatible.impossible]
    if why := parts or (function and [f"the models differ in {', '.join(function)}"]):
        raise InputError(f"--blame puts parts of B into A, and that needs models of one shape: {why[0]}; leave out --blame")


def _differing(a: GPT2Config | None, b: GPT2Config | None) -> tuple[tuple[str, object, object], ...]:
    if a is None or b is None:
        return ()
    fields = {field: (getattr(a, field), getattr(b, field)) for field in (*SHAPE, *FUNCTION)}
    fields["n_inner"] = a.inner, b.inner
    return tuple((field, *values) for field, values in fields.items() if values[0] != values[1])


def _entry(tokenizer: Tokenizer, index: int) -> bytes | None:
    return tokenizer.token_bytes(index) if tokenizer.holds(index) else None


def _text(entry: bytes | None) -> str | None:
    return None if entry is None else repr(entry.decode("utf-8", "replace"))
