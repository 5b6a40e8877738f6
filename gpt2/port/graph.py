"""GPT-2 as a graph of named nodes: what each node reads, its right formula, and where it is computed.

A block is :data:`READS`. A text is read in *calls*, one or several pieces: a call computes its own tokens, and sees the keys and
values of all up to its end. Wrong programs are this graph with other formulas at some nodes (:mod:`.alternatives`).

A node has the name of its traced point within a block (``attn.scores``, ``mlp.act``, "" for the block's output); three nodes
between the projections and the scores have no traced point.

Shapes: streams (B, T, D); heads (B, H, T, K); scores and weights (B, H, T, S).
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Self, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.checkpoint.keys import head_name
from gpt2.config import GPT2Config
from gpt2.measure.tracing import point_at
from gpt2.model import ACTIVATIONS
from gpt2.port.terms.budget import Budget

State = dict[str, Tensor]
Formula = Callable[["Site", State], Tensor]
Function = Callable[[Tensor], Tensor]  # of one value
Edits = Mapping[str, Formula]
Calls = tuple[tuple[int, int], ...]  # the text is read in these pieces; one piece: at once
Made = TypeVar("Made")

# Each node of a block, in order, with the nodes that GPT-2 reads there; "x" is the block's input.
READS: dict[str, tuple[str, ...]] = {
    "ln_1": ("x",),
    "attn.q": ("ln_1",),
    "attn.k": ("ln_1",),
    "attn.v": ("ln_1",),
    "attn.qh": ("attn.q",),  # cut into heads
    "attn.kh": ("attn.k",),
    "attn.vh": ("attn.v",),
    "attn.scores": ("attn.qh", "attn.kh"),
    "attn.weights": ("attn.scores",),
    "attn.mixed": ("attn.weights", "attn.vh"),
    "attn.heads": ("attn.mixed",),
    "attn.c_proj": ("attn.heads",),
    "mid": ("x", "attn.c_proj"),
    "ln_2": ("mid",),
    "mlp.c_fc": ("ln_2",),
    "mlp.act": ("mlp.c_fc",),
    "mlp.c_proj": ("mlp.act",),
    "": ("mid", "mlp.c_proj"),
}
NODES = tuple(READS)
ORDER = {node: number for number, node in enumerate(NODES)}
LAST = ORDER[""]
HIDDEN = ("attn.qh", "attn.kh", "attn.vh")  # nodes without a traced point
ATTENTION = NODES[ORDER["attn.qh"] : ORDER["attn.c_proj"]]  # nodes whose values depend on how the text is cut into calls
OUTSIDE = ("embed", "ln_f", "head")  # nodes outside the blocks; "head" is the table (V, D) that the last norm is compared with
THIRDS = {"attn.q": 0, "attn.k": 1, "attn.v": 2}
# Each linear node with the checkpoint's module.
MODULES = {"attn.q": "attn.c_attn", "attn.k": "attn.c_attn", "attn.v": "attn.c_attn", "attn.c_proj": "attn.c_proj"}
MODULES |= {"mlp.c_fc": "mlp.c_fc", "mlp.c_proj": "mlp.c_proj"}
MULTIPLIED = {*MODULES, "attn.scores", "attn.mixed"}  # nodes that are products of matrices
SQUARE = ("attn.scores", "attn.weights")  # of tokens and keys
HEADED = ("attn.q", "attn.k", "attn.v", "attn.heads")  # streams that may be recorded by heads
# Axes along which a program may write a value in pieces, by node; rows of the batch and tokens, if not here.
AXES = {**dict.fromkeys((*HEADED, "attn.mixed"), (1, 0, 2)), **dict.fromkeys(SQUARE, (1, 0))}
PIECES = (0, 1)
SMALL = 1 << 24  # parameters of the blocks times tokens of a small model
TEXT, ROWS = "text", "rows"  # what else than the tokens before it a token's value may depend on: later tokens, other rows
COST = {True: 3.0, False: 1.5}  # operators of a node's formula, by whether it is another one than GPT-2's, for the budget


@dataclass(frozen=True)
class Program:
    """What a program computes otherwise than GPT-2, from a whole text at once.

    ``blocks``: other formulas by the number of the block; ``outside``: of ``embed``, ``ln_f`` and ``head``. ``order``: the blocks
    that run, None for GPT-2's order.
    """

    blocks: Mapping[int, Edits] = field(default_factory=dict)
    outside: Edits = field(default_factory=dict)
    order: tuple[int, ...] | None = None

    def at(self, node: str) -> Formula:
        """Return the formula of a node outside the blocks."""
        return self.outside.get(node) or RIGHT[node]


@dataclass(frozen=True)
class Entrance:
    """Where a part of the forward pass begins: in block ``layer``, behind node number ``after``.

    ``state``: the block's input ``x``, and its nodes up to that number; -1 for the block's input alone.
    """

    layer: int
    state: State
    after: int = -1

    def cut(self, rows: int, tokens: int, dtype: torch.dtype) -> "Entrance":
        """Return the entrance on the first tokens of the first rows."""
        cut = {node: x[:rows, :, :tokens] if x.ndim == 4 else x[:rows, :tokens] for node, x in self.state.items()}
        cut |= {node: cut[node][..., :tokens] for node in SQUARE if node in cut}
        return Entrance(self.layer, {node: x.to(dtype) for node, x in cut.items()}, self.after)


class Model:
    """The checkpoint's tensors ``state`` in ``dtype``, its config, and ids (B, T). ``budget``: of the search that computes it."""

    def __init__(
        self, state: State, config: GPT2Config, ids: Tensor, dtype: torch.dtype = torch.float64, budget: Budget | None = None
    ) -> None:
        self.budget = budget or Budget()
        self.state = {name: tensor.detach().to("cpu", dtype) for name, tensor in state.items()}
        self.config, self.ids, self.dtype = config, ids.cpu(), dtype
        self.table = self.state[head_name(self.state)]  # (V, D), of the head
        self._parameters = sum(tensor.numel() for name, tensor in self.state.items() if name.startswith("h."))
        self._made: dict[Hashable, object] = {}

    @property
    def small(self) -> bool:
        """Whether thousands of programs can be run whole, on all tokens and in float64."""
        return self._parameters * self.ids.numel() <= SMALL

    def site(self, layer: int, state: State | None = None) -> "Site":
        """Return the place of a block that computes all tokens of ``state`` at once."""
        tokens = self.ids.shape[1] if state is None or "x" not in state else state["x"].shape[1]
        return Site(self, layer, 0, tokens)

    def embed(self, program: Program | None = None) -> Tensor:
        """Return the stream (B, T, D) that enters the first block."""
        return (program or Program()).at("embed")(self.site(0), {}).to(self.dtype)

    def stages(
        self, program: Program, first: int, last: int, entrance: Entrance | None = None, until: int = LAST, every: bool = True
    ) -> State:
        """Return a program's values by traced point, without an ``entrance`` from the embeddings on.

        Blocks ``first`` to ``last`` (excluded), up to node ``until`` of the last: ``every`` node, its input ``x``, its ``end``.
        """
        points: State = {} if entrance else {"embed": self.embed(program)}
        x = entrance.state["x"] if entrance else points["embed"]
        for number, layer in enumerate(program.order or range(first, last)):
            state, after = (entrance.state, entrance.after) if number == 0 and entrance else ({"x": x}, -1)
            stop = LAST if layer < last - 1 or program.order else until
            state = run_block(self.site(layer, state), state, program.blocks.get(layer, {}), after, stop)
            if "attn.scores" in state:
                state["attn.scores"] = state["attn.scores"].tril()  # as our trace has them: 0 for later tokens
            place = number if program.order else layer
            points |= {point_at(place, node): state[node] for node in NODES[: stop + 1] if every and node in state}
            points["x"], x = state["x"], state[NODES[stop]]
        return points | {"x": points.get("x", x), "end": x}

    def trace(self, program: Program, entrance: Entrance | None = None, every: bool = True) -> State:
        """Return a program's values at all traced points, from ``entrance`` on; those outside the blocks, if not ``every``."""
        first, layers = entrance.layer if entrance else 0, self.config.n_layer
        points = self.stages(program, first, layers, entrance, every=every)
        points = {point: value for point, value in points.items() if not point.endswith(HIDDEN)}
        ended = self.site(0, {"x": points["end"]})
        points["ln_f"] = program.at("ln_f")(ended, {"x": points["end"]})
        points["logits"] = points["ln_f"] @ program.at("head")(ended, {}).T
        self.budget.spend(4, points["logits"].numel(), points["logits"].numel() * self.config.n_embd)
        return points

    def on_ids(self, ids: Tensor) -> Self:
        """Return this model on other ids (B, T)."""
        other = copy(self)
        other.ids, other._made = ids, {}
        return other

    def always(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return what ``make`` makes, once for this model."""
        if key not in self._made:
            self._made[key] = make()
        return cast(Made, self._made[key])


class Site:
    """Where a node is computed: a block of a model, and the tokens ``begin`` to ``end`` of this call."""

    __slots__ = ("begin", "config", "end", "layer", "model")

    def __init__(self, model: Model, layer: int, begin: int, end: int) -> None:
        self.model, self.config, self.layer, self.begin, self.end = model, model.config, layer, begin, end

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor by its name in the block, such as ``attn.c_attn.weight``."""
        return self.model.state[f"h.{self.layer}.{name}"]

    def right(self, node: str, s: State) -> Tensor:
        """Return what GPT-2 computes at a node from ``s``."""
        return RIGHT[node](self, s)

    def full(self, part: str) -> str:
        """Return the checkpoint's name of the norm ``part``: ``ln_1`` -> ``h.3.ln_1``, ``ln_f`` -> ``ln_f``."""
        return part if part == "ln_f" or part.startswith("h.") else f"h.{self.layer}.{part}"

    def numbers(self, part: str) -> tuple[Tensor, Tensor]:
        """Return weight and bias (D,) of the norm ``part``."""
        return self.model.state[f"{self.full(part)}.weight"], self.model.state[f"{self.full(part)}.bias"]

    def norm(self, x: Tensor, part: str) -> Tensor:
        """Return GPT-2's norm ``part`` (``ln_1``, ``h.0.ln_1``, ``ln_f``) of x (..., D)."""
        weight, bias = self.numbers(part)
        return F.layer_norm(x, weight.shape, weight, bias, self.config.layer_norm_epsilon)

    def held(self, module: str) -> tuple[Tensor, Tensor]:
        """Return weight (I, O) and bias (O,) of a module such as ``attn.c_attn``."""
        return self[f"{module}.weight"], self[f"{module}.bias"]

    def linear(self, node: str, held: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Return weight (I, O) and bias (O,) of a linear node, as its module ``held`` them: q, k and v have a third of c_attn."""
        pair, third = held or self.held(MODULES[node]), THIRDS.get(node, 0)
        columns = slice(third * len(pair[1]) // 3, (third + 1) * len(pair[1]) // 3)
        return (pair[0][:, columns], pair[1][columns]) if node in THIRDS else pair

    @property
    def words(self) -> Tensor:
        """The embeddings (B, t, D) of this call's tokens, without positions."""
        return self.model.state["wte.weight"][self.model.ids[:, self.begin : self.end]]

    @property
    def tokens(self) -> Tensor:
        """The numbers of this call's tokens (t, 1)."""
        return torch.arange(self.begin, self.end)[:, None]

    def charge(self, node: str, value: Tensor, is_own: bool = False) -> None:
        """Count in the budget what a node's ``value`` costs; ``is_own``: by another formula than GPT-2's."""
        size, of = value.numel(), self.config
        lengths = {"attn.scores": of.head_dim, "attn.mixed": self.end, "mlp.c_proj": of.inner} if node in MULTIPLIED else {}
        products = size * lengths.get(node, of.n_embd) if node in MULTIPLIED else 0
        self.model.budget.spend(COST[is_own], size, products)

    def visible(self, keys: int) -> Tensor:
        """Return (t, S): a token sees itself and all before it."""
        return torch.arange(keys) <= self.tokens


def right_scale(config: GPT2Config, layer: int) -> float:
    """Return GPT-2's factor of the scores in a block."""
    root = 1 / math.sqrt(config.head_dim) if config.scale_attn_weights else 1.0
    return root / (layer + 1 if config.scale_attn_by_inverse_layer_idx else 1)


def split(y: Tensor, heads: int) -> Tensor:
    """Split (..., T, D) into heads (..., H, T, K)."""
    return y.unflatten(-1, (heads, -1)).transpose(-2, -3)


def merge(y: Tensor) -> Tensor:
    """Merge heads (B, H, T, K) into (B, T, D)."""
    return y.transpose(1, 2).flatten(2)


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return ``x @ weight + bias`` for (..., I), (I, O) and (O,)."""
    return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], -1)


def _linear(node: str) -> Formula:
    return lambda c, s: affine(s[READS[node][0]], *c.linear(node))


def heads_of(source: str) -> Formula:
    return lambda c, s: split(s[source], c.config.n_head)


def embedding(c: Site, rows: Tensor | slice | None = None) -> Tensor:
    """Return token embeddings and rows (t,) of the position table; GPT-2's own if None."""
    return c.words + c.model.state["wpe.weight"][slice(c.begin, c.end) if rows is None else rows]


RIGHT: dict[str, Formula] = {
    "ln_1": lambda c, s: c.norm(s["x"], "ln_1"),
    **{node: _linear(node) for node in THIRDS},
    **{f"{node}h": heads_of(node) for node in THIRDS},
    "attn.scores": lambda c, s: (s["attn.qh"] * right_scale(c.config, c.layer)) @ s["attn.kh"].mT,
    "attn.weights": lambda c, s: s["attn.scores"].masked_fill(~c.visible(s["attn.scores"].shape[-1]), -math.inf).softmax(-1),
    "attn.mixed": lambda c, s: s["attn.weights"] @ s["attn.vh"],
    "attn.heads": lambda c, s: merge(s["attn.mixed"]),
    "attn.c_proj": _linear("attn.c_proj"),
    "mid": lambda c, s: s["x"] + s["attn.c_proj"],
    "ln_2": lambda c, s: c.norm(s["mid"], "ln_2"),
    "mlp.c_fc": _linear("mlp.c_fc"),
    "mlp.act": lambda c, s: ACTIVATIONS[c.config.activation_function](s["mlp.c_fc"]),
    "mlp.c_proj": _linear("mlp.c_proj"),
    "": lambda c, s: s["mid"] + s["mlp.c_proj"],
    "embed": lambda c, s: embedding(c),
    "ln_f": lambda c, s: c.norm(s["x"], "ln_f"),
    "head": lambda c, s: c.model.table,
}


def computed(c: Site, state: State, node: str, edits: Edits) -> Tensor:
    """Return a node's value by its formula in ``edits``, or GPT-2's, and count what that costs."""
    own = edits.get(node)
    value = (own or RIGHT[node])(c, state)
    c.charge(node, value, own is not None)
    return value


def run_block(c: Site, state: State, edits: Edits, after: int = -1, until: int = LAST) -> State:
    """Return ``state`` with the nodes beyond number ``after`` computed, up to number ``until``."""
    state = dict(state)
    for node in NODES[after + 1 : until + 1]:
        state[node] = computed(c, state, node, edits)
    return state


class Lazily(State):
    """Nodes for a formula, each ``made`` of its name and value when it is read: of some twenty, a formula reads one."""

    def __init__(self, state: State, made: Callable[[str, Tensor], Tensor]) -> None:
        super().__init__(state)
        self.made = made

    def __getitem__(self, node: str) -> Tensor:
        return self.made(node, super().__getitem__(node))

    def __iter__(self) -> Iterator[str]:  # else {**nodes} would not ask for what is made
        return super().__iter__()
