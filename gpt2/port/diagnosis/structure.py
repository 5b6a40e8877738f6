"""What the structure of a port alone says is wrong, whatever its values: for where the walk could not get through."""

from __future__ import annotations

from collections.abc import Iterator

from gpt2.config import GPT2Config
from gpt2.errors import InputError
from gpt2.port.anatomy.anatomy import Anatomy
from gpt2.port.diagnosis.causes import cause
from gpt2.port.diagnosis.report import LIKELY, Cause
from gpt2.port.mapping.lacks import named
from gpt2.port.mapping.mapping import Mapping

SEEN = "seen in the operators of its forward pass, whatever their names"


def must_fit(anatomy: Anatomy, config: GPT2Config, who: str) -> None:
    """Refuse a port of another size.

    Raises:
        InputError: another width, feed-forward, or a smaller vocabulary.
    """
    sizes = {}
    for part in anatomy.parts:
        if part.part == "mlp.c_fc":
            sizes[part.layer] = sizes.get(part.layer, 0) + len(part.outputs)
    hidden = next(iter(sizes.values())) if len(set(sizes.values())) == 1 else config.inner
    words = len(anatomy.head) if anatomy.head is not None else anatomy.stream.vocabulary
    for what, theirs, ours in (
        ("width", anatomy.width, config.n_embd),
        ("feed-forward width", hidden, config.inner),
        ("vocabulary", min(words, config.vocab_size), config.vocab_size),
    ):
        if theirs != ours:
            raise InputError(f"{who}: its {what} is {theirs:,}, the checkpoint's {ours:,}; build it with the checkpoint's sizes")


def structural_causes(anatomy: Anatomy, mapping: Mapping, config: GPT2Config) -> Iterator[Cause]:
    """Departures that show in how things are connected. Weaker than the walk's: nothing was recomputed."""
    blocks, heads = len(anatomy.layers), len(anatomy.attentions[0].heads) if anatomy.attentions else 0
    if blocks < config.n_layer:
        absent = [layer for layer in range(config.n_layer) if layer not in anatomy.layers]
        where = ", ".join(f"h.{layer}" for layer in absent)
        yield cause(
            "layer-missing", where, f"your forward runs {blocks} blocks, the checkpoint has {config.n_layer}", SEEN, LIKELY
        )
    for kind, part, branches in (("attention", "attn", anatomy.attentions), ("feed-forward", "mlp", anatomy.feed_forwards)):
        for layer, branch in zip(anatomy.layers, branches, strict=False):
            place = named(anatomy, kind, layer)
            if branch.times > 1:
                yield cause("layer-repeated", f"h.{layer}", f"your {kind} {place}runs {branch.times} times", SEEN, LIKELY)
            if not branch.normed and not anatomy.post_norm:
                norm = "ln_1" if part == "attn" else "ln_2"
                yield cause("norm-missing", f"h.{layer}.{norm}", f"your {kind} {place}has no norm before it", SEEN, LIKELY)
    for layer in sorted(anatomy.torn):
        words = f"your attention {named(anatomy, 'attention', layer)}mixes up heads and positions"
        yield cause("head-layout", f"h.{layer}.attn", words, SEEN, LIKELY)
    if heads and heads != config.n_head and not anatomy.torn:
        words = f"your attention has {heads} head{'s' * (heads != 1)}, the checkpoint {config.n_head}"
        yield cause("head-layout", "h.*.attn", words, SEEN, LIKELY, f"n_head={config.n_head}  # each {config.head_dim} wide")
    if anatomy.post_norm:
        yield cause("post-norm", "h.*", "your norms stand after the branches, GPT-2's before them", SEEN, LIKELY)
    for norm in anatomy.extra_norms:
        names = {anatomy.recording.name(int(ids[0])) for ids in (norm.scale, norm.shift) if ids is not None}
        yield cause("extra-norm", ", ".join(sorted(names)), "a norm that GPT-2 does not have", SEEN, LIKELY)
    if not anatomy.end_normed:
        yield cause("final-norm-missing", "ln_f", "your module has no norm before the head", SEEN, LIKELY)
    if anatomy.positions is None and not any(part.part == "wpe" for part, _ in mapping.in_buffers):
        yield cause("position-missing", "wpe", "your module adds no learned positions", SEEN, LIKELY)
    elif anatomy.positions is not None and anatomy.positions.skipped and mapping.is_shifted(anatomy.positions):
        words = f"your positions begin at row {anatomy.positions.skipped} of their table, the checkpoint's at 0"
        yield cause("position-offset", "wpe", words, SEEN, LIKELY)
