"""List faults in how blocks, tokens and rows follow each other, as other runs of the blocks of a simulation.

A cache that blocks or rows share, a buffer that is used again without being cleared, tokens that are put before those given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from gpt2.port.diagnosis.hypotheses import right_scale
from gpt2.port.diagnosis.scores import Layout
from gpt2.port.diagnosis.search import Fault
from gpt2.port.dump.attention_variants import lengths
from gpt2.port.dump.simulation import Run, Simulation, Stage, Stages, State
from gpt2.port.dump.variants import Variant

BUFFERS = {
    "attn.heads": "the heads' results",
    "attn.c_proj": "the output projection's results",
    "mlp.c_fc": "the first layer's results",
    "mlp.act": "the activations",
    "mlp.c_proj": "the second layer's results",
}
SHARED = {"the last": -1, "the first": 0, "the one before it": None}  # whose keys and values of earlier tokens a block reads
# From a block's number, "k" or "v", those of the new tokens (B, t, D) and the first one's number: what the block reads (B, S, D).
Cache = Callable[[int, str, Tensor, int], Tensor]
MOST_BEFORE = 4  # tokens that are put before those given
MAX_TOKENS = 2048  # of all rows, as one: attention takes memory with their square, 400 MB for twelve heads in float64
CLEARED = "write each result over the one before it: out = x @ w, not out += x @ w"


def run_variants(simulation: Simulation) -> Iterator[Variant]:
    """Yield every known fault of how blocks, tokens and rows follow each other."""
    config, (rows, tokens) = simulation.config, simulation.ids.shape
    if rows > 1 and rows * tokens <= MAX_TOKENS:
        words = "a row of the batch sees the tokens of the rows before it, as if the cache were not cleared"
        if rows * tokens <= config.n_positions:
            yield _variant("rows follow", Fault("batch-dependent", "attn", f"{words}; its positions go on"), _rows_follow(True))
        yield _variant("rows seen", Fault("batch-dependent", "attn", f"{words}; its positions begin at 0"), _rows_follow(False))
    if rows > 1:
        for words, of_stream in (("it adds the tokens' embeddings to it", False), ("its stream is a view of that table", True)):
            words = f"a row changes the table of positions for the rows behind it: {words}"
            yield _variant(words, Fault("batch-dependent", "wpe", words), partial(_positions_written, of_stream))
    if config.n_layer > 1:
        for stage, what in BUFFERS.items():
            words = f"{what} are added to those of the blocks before, as in a buffer that is not cleared"
            fault = Fault(CARRIED.get(stage, "wrong-tensor"), stage, words, fix=CLEARED)
            yield _variant(f"carried {stage}", fault, partial(_carried, stage))
        if simulation.small:
            words = "the caches of the blocks overlap: each begins one token behind the one before it"
            yield _variant(words, Fault("cache-inconsistent", "attn", words), _overlapping)
        for prompt in lengths(simulation) if simulation.small else ():
            words = f"all blocks append their keys and values to one list, a prompt of {prompt} tokens first, and read all of it"
            yield _variant(words, Fault("cache-inconsistent", "attn", words), partial(_listed, prompt))
            for whose, block in SHARED.items():
                for part, what in (("kv", "keys and values"), ("k", "keys"), ("v", "values")):
                    words = f"from token {prompt} on, a block reads the {what} of earlier tokens that {whose} block has written"
                    fault = Fault("cache-inconsistent", "attn", words)
                    yield _variant(f"cache of {whose} {part} {prompt}", fault, partial(_stepped, prompt, block, part))
    for place in range(1, tokens) if simulation.small and tokens < config.n_positions else ():
        words = f"token {place - 1} is fed once more before token {place}, as by a loop that begins with the prompt's last token"
        fault = Fault("cache-inconsistent", "attn", f"{words}: it stands twice in the cache, and later positions are one too far")
        yield _variant(f"again {place}", fault, partial(_again, place))
    for count in range(1, min(MOST_BEFORE, config.n_positions - tokens) + 1):
        for token in dict.fromkeys((0, config.vocab_size - 1, config.eos_token_id, config.bos_token_id)):
            if token is None or not 0 <= token < config.vocab_size:
                continue
            words = f"{count} token{'s' * (count > 1)} of id {token} {'stand' if count > 1 else 'stands'} before those given"
            yield _variant(f"before {count} {token}", Fault("position-offset", "wpe", words), partial(_before, count, token))


CARRIED = {"attn.heads": "value-projection-wrong"}


def _variant(label: str, fault: Fault, run: Run) -> Variant:
    rows = fault.id == "batch-dependent"
    steps = fault.id == "cache-inconsistent"  # many, and slow
    return Variant(label, lambda layer: (fault,), _nothing, outside=True, rare=steps, all_tokens=True, mixes_rows=rows, run=run)


def _nothing(simulation: Simulation, layer: int) -> Stages:
    return {}


def _embedded(simulation: Simulation, ids: Tensor, positions: Tensor) -> Tensor:
    return simulation.state["wte.weight"][ids] + simulation.state["wpe.weight"][positions]


def _through(simulation: Simulation, x: Tensor) -> Tensor:
    for layer in range(simulation.config.n_layer):
        x = simulation.run_block(layer, {"x": x}, {})[""]
    return x


def _rows_follow(positions_go_on: bool) -> Run:
    def run(simulation: Simulation) -> Tensor:
        rows, tokens = simulation.ids.shape
        whole = simulation.on_ids(simulation.ids.reshape(1, -1))
        positions = torch.arange(rows * tokens)
        x = _embedded(whole, whole.ids, positions if positions_go_on else positions % tokens)
        return _through(whole, x).reshape(rows, tokens, -1)

    return run


def _before(count: int, token: int, simulation: Simulation) -> Tensor:
    ids = simulation.ids
    whole = simulation.on_ids(torch.cat([torch.full_like(ids[:, :1], token).expand(-1, count), ids], 1))
    return _through(whole, _embedded(whole, whole.ids, torch.arange(whole.ids.shape[1])))[:, count:]


def _again(place: int, simulation: Simulation) -> Tensor:
    ids = simulation.ids
    whole = simulation.on_ids(torch.cat([ids[:, :place], ids[:, place - 1 :]], 1))
    x = _through(whole, _embedded(whole, whole.ids, torch.arange(whole.ids.shape[1])))
    return torch.cat([x[:, :place], x[:, place + 1 :]], 1)


def _positions_written(of_stream: bool, simulation: Simulation) -> Tensor:
    """Run row after row; each leaves its embedded tokens, or its last stream, in the place of the positions."""
    out, table = [], simulation.state["wpe.weight"][: simulation.ids.shape[1]]
    for row in simulation.ids.split(1):
        x = simulation.state["wte.weight"][row] + table
        out.append(_through(simulation.on_ids(row), x))
        table = (out[-1] if of_stream else x)[0]
    return torch.cat(out)


def _carried(stage: str, simulation: Simulation) -> Tensor:
    x, before = simulation.embed(), None
    for layer in range(simulation.config.n_layer):
        right = simulation.right(layer)[stage]

        def added(s: State, right: Stage = right, before: Tensor | None = before) -> Tensor:
            return right(s) if before is None else right(s) + before

        state = simulation.run_block(layer, {"x": x}, {stage: added})
        x, before = state[""], state[stage]
    return x


def _cached(simulation: Simulation, prompt: int, read: Cache) -> Tensor:
    """Run a prompt, and then token by token; the blocks' keys and values are what ``read`` gives."""
    config, embedded = simulation.config, simulation.embed()
    heads, tokens = config.n_head, embedded.shape[1]
    ends = [prompt, *range(prompt + 1, tokens + 1)]
    out = []
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        x = embedded[:, begin:end]
        for layer in range(config.n_layer):

            def all_of(s: State, name: str, layer: int = layer, begin: int = begin) -> Tensor:
                return Layout.RIGHT.split(read(layer, name, s[f"attn.{name}"], begin), heads)

            def scores(s: State, layer: int = layer, all_of: Callable[[State, str], Tensor] = all_of) -> Tensor:
                return Layout.RIGHT.split(s["attn.q"], heads) @ all_of(s, "k").mT * right_scale(config, layer)

            def mixed(s: State, all_of: Callable[[State, str], Tensor] = all_of) -> Tensor:
                return s["attn.weights"] @ all_of(s, "v")

            changed: dict[str, Stage] = {"attn.scores": scores, "attn.weights": _causal, "attn.mixed": mixed}
            x = simulation.run_block(layer, {"x": x}, changed)[""]
        out.append(x)
    return torch.cat(out, 1)


def _causal(s: State) -> Tensor:
    scores = s["attn.scores"]
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(scores.shape[-1] - scores.shape[-2] + 1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def _stepped(prompt: int, block: int | None, part: str, simulation: Simulation) -> Tensor:
    """Each block reads the keys and values of tokens of earlier calls from another one."""
    kept: dict[tuple[int, str], Tensor] = {}
    layers = simulation.config.n_layer

    def read(layer: int, name: str, now: Tensor, begin: int) -> Tensor:
        whose = layer if name not in part else layer - 1 if block is None else block
        past = kept.get((whose % layers, name), now[:, :0])[:, :begin]
        kept[layer, name] = torch.cat([kept.get((layer, name), now[:, :0]), now], 1)
        return torch.cat([past, now], 1)

    return _cached(simulation, prompt, read)


def _listed(prompt: int, simulation: Simulation) -> Tensor:
    """All blocks append to one list, and read all of it."""
    kept: dict[str, Tensor] = {}

    def read(layer: int, name: str, now: Tensor, begin: int) -> Tensor:
        kept[name] = torch.cat([kept.get(name, now[:, :0]), now], 1)
        return kept[name]

    return _cached(simulation, prompt, read)


def _overlapping(simulation: Simulation) -> Tensor:
    """A block's keys and values of token t are in slot t + its number, which earlier blocks write as well."""
    slots: dict[tuple[str, int], Tensor] = {}

    def read(layer: int, name: str, now: Tensor, begin: int) -> Tensor:
        slots[name, layer + begin] = now
        return torch.cat([slots[name, layer + token] for token in range(begin + 1)], 1)

    return _cached(simulation, 1, read)
