"""What a dump holds: its logits, its arrays, those that are right, and what rounding explains in one dtype."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gpt2.checkpoint.containers import shown
from gpt2.config import GPT2Config
from gpt2.errors import InputError
from gpt2.measure.dumps import Dump
from gpt2.measure.metrics import relative_error, worst_relative_error
from gpt2.measure.tracing import part_of, point_at, points
from gpt2.model import GPT2
from gpt2.port.graph import AXES, HEADED, ORDER, PIECES, Model, State, run_block, split
from gpt2.port.recording.pool import Pool
from gpt2.port.search.observe import Observation
from gpt2.port.terms.places import Place
from gpt2.port.terms.tolerance import UNITS, excess, measured, stored

MAX_PADDING = 128  # a vocabulary is padded to a multiple of this at most
MASKED = -1e4  # scores of this size or below hide a token
WALKED = 3  # arrays of a stream's size a block from which on a walk is tried
MAX_PLACEMENTS = 3  # places in a block that unknown arrays are tried at
EXCHANGED = ("wte", "wpe", "attn.q", "attn.k", "attn.v", "attn.heads")  # points whose right numbers may be used as others
RECORDED: tuple[tuple[str, ...], ...] = (  # one tensor a block, or two
    *((stage,) for stage in ("", "mid", "mlp.c_proj", "attn.c_proj", "ln_1", "ln_2", "attn.heads")),
    ("mid", ""),
    ("attn.c_proj", "mlp.c_proj"),
    ("ln_1", "ln_2"),
)
LEAST_LIKENESS = 0.1  # of a stream and what the right block makes of the one before it, as a cosine
BY_CHANCE = 4.0  # standard deviations of such a cosine for an array that has nothing to do with the model
THIRDS = ("[q]", "[k]", "[v]")  # endings of the names of the parts of c_attn's result
SHOWN = 3  # recognised arrays that a note names


@dataclass(frozen=True)
class Output:
    """A dump's logits (B, T', V'), T' being 1 or T, in their own dtype, and the ids (B, T) that they belong to: its ``rows``."""

    name: str
    logits: Tensor
    ids: Tensor
    rows: slice


def find_output(dump: Dump, expected: Tensor, config: GPT2Config) -> Output:
    """Return the dump's logits; ``expected`` (B, T, V) are the right ones. Raises InputError if it has none, or NaN."""
    candidates = [
        Output(name, laid, dump.ids[rows], rows)
        for name, array in dump.arrays.items()
        for laid, rows in _as_logits(array, dump.ids, expected, config)
    ]
    if not candidates:
        raise _without_logits(dump, config)

    def rank(one: Output) -> tuple[bool, bool, float]:
        probabilities = bool((one.logits >= 0).all()) or bool((one.logits <= 0).all())
        value, right = one.logits[..., : expected.shape[-1]].double(), expected[one.rows]
        error = relative_error(value, right[:, -value.shape[1] :])
        return one.logits.shape[-1] != config.vocab_size, probabilities, error if math.isfinite(error) else math.inf

    output = min(candidates, key=rank)
    if bool((missing := output.logits.isnan()).any()):
        where = int(missing.any(-1).any(0).nonzero()[0])
        raise InputError(
            f"{dump.source}: the logits ({shown(output.name)}) are NaN from position {where} on; look for a division by "
            "zero, or a softmax over nothing but -inf"
        )
    return output


def _without_logits(dump: Dump, config: GPT2Config) -> InputError:
    """Return the error of a dump without logits, which says what an array of this name has instead."""
    shape, arrays, width = (*dump.ids.shape, config.vocab_size), dump.arrays, config.n_embd
    name, todo = next((name for name in arrays if "logits" in name.lower()), None), "; save them as well"
    if any(array.shape[-1:] == (width,) for array in (arrays.values() if name is None else [arrays[name]])):
        what = "arrays" if name is None else shown(name)
        todo = f"; {what} of {width:,} columns are hidden states: save x @ wte.T, the head's"
    elif name is not None:
        todo = f": the array {shown(name)} has {tuple(arrays[name].shape)}; "
        todo += "save the logits of these ids, or give the checkpoint that the program has loaded (--model)"
    return InputError(f"{dump.source}: holds no logits {shape}, with a batch dimension or none{todo}")


def _as_logits(array: Tensor, ids: Tensor, expected: Tensor, config: GPT2Config) -> Iterable[tuple[Tensor, slice]]:
    """Yield an array as logits of all rows or of one, all positions or the last, if its shape allows this."""
    batch, tokens = ids.shape
    least = config.vocab_size
    most = math.ceil(least / MAX_PADDING) * MAX_PADDING
    array = array.squeeze() if array.ndim > 1 else array
    laid = []
    axes = [axis for axis, size in enumerate(array.shape) if least <= size <= most]
    if axes:
        laid.append(array.movedim(axes[-1], -1))
    elif array.ndim == 1:
        widths = (array.numel() // (batch * tokens), array.numel() // tokens)
        laid += [array.view(-1, width) for width in widths if least <= width <= most and array.numel() % width == 0]
    for one in laid:
        width = one.shape[-1]
        lead = one.numel() // width
        if lead == batch * tokens:
            if one.shape[:-1] == (tokens, batch) and batch != tokens:
                one = one.transpose(0, 1)
            yield one.reshape(batch, tokens, width), slice(None)
        elif lead == batch:
            yield one.reshape(batch, 1, width), slice(None)
        elif lead in (tokens, 1):
            whole = one.reshape(1, lead, width)
            right = [relative_error(whole[..., :least].double(), row[None, -lead:]) for row in expected]
            row = min(range(batch), key=lambda n: right[n])
            yield whole, slice(row, row + 1)


def parts(name: str, array: Tensor, config: GPT2Config, rows: int, tokens: int) -> list[tuple[str, Tensor]]:
    """Return an array and what it may be made of, named: blocks in a stack, q, k and v (or k and v) in one, unmasked scores."""
    array = array.squeeze()
    found = [(name, array)]
    layers, width = config.n_layer, config.n_embd
    for stack in (layers, layers + 1, 2 * layers):
        axis = next((axis for axis, size in enumerate(array.shape[:-1]) if size == stack and array.ndim > 2), None)
        if axis is not None and stack > 1:
            found += [(f"{name}[{n}]", part) for n, part in enumerate(array.unbind(axis))]
    for label, part in list(found):
        for axis, size in enumerate(part.shape):
            if size == 3 * width:
                found += [(f"{label}[{third}]", one) for third, one in zip("qkv", part.chunk(3, axis), strict=True)]
            elif (size == 3 and part.ndim > 2) or (size == 2 and part.numel() == 2 * rows * tokens * width):
                found += [(f"{label}[{n}]", one) for n, one in enumerate(part.unbind(axis))]
    for label, part in list(found):
        if part.ndim >= 2 and part.shape[-2:] == (tokens, tokens) and tokens > 1:
            future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
            hidden = part[..., future]
            if bool((hidden <= MASKED).all()) or bool((hidden == 0).all()) or bool((hidden == hidden.flatten()[0]).all()):
                found.append((f"{label} masked", part.masked_fill(future, 0.0)))
    return found


class Dumped:
    """A dump's ``arrays``, all but the logits, under the assumption that they were computed in ``dtype``.

    ``exact``: the trace of ``reference``, our model in float64, on the same ids. ``held``: the names of the arrays that hold a
    right value, by traced point. ``error``: of the logits; ``right``: rounding explains it. ``coarsest``: the dtype in which an
    array is stored that rounds most. ``is_constant``: each array is one number throughout. ``has_computed``: one holds a right
    value that is computed, and not read from a table.
    """

    def __init__(self, arrays: State, output: Output, exact: State, reference: GPT2, dtype: torch.dtype) -> None:
        self.arrays, self.output, self.exact, self.reference = arrays, output, exact, reference
        self.config, self.ids, self.order = reference.config, output.ids, points(reference.config.n_layer)
        self.tolerance = measured(reference, self.ids, exact, dtype)
        self.pool = Pool(self.tolerance)
        for name, array in arrays.items():
            for part, tensor in parts(name, array, self.config, *self.ids.shape):
                self.pool.add(tensor, part, array.dtype, part == name)
        self.pool.logits, self.pool.logits_dtype = output.logits.double(), output.logits.dtype
        self.held = self.recognised(exact)
        self.has_computed = not self.held.keys() <= {"wte", "wpe"}
        expected = exact["logits"][:, -output.logits.shape[1] :]
        mine = output.logits[..., : self.config.vocab_size].double()
        self.right = excess(mine, expected, output.logits.dtype) <= self.tolerance.points["logits"]
        self.error = worst_relative_error(mine, expected)
        every = [output.logits, *arrays.values()]
        self.coarsest = max((array.dtype for array in every), key=lambda dtype: UNITS[dtype][0])
        self.is_constant = all(bool((one == one.flatten()[0]).all()) for one in every)

    def recognised(self, values: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
        """Return the arrays' names by the traced point whose value in ``values`` they hold."""
        found: dict[str, tuple[str, ...]] = {}
        for point, value in values.items():
            part = part_of(point)
            value = split(value, self.config.n_head) if part in HEADED else value
            bound = self.pool.allowance[point]
            if point != "logits" and (match := self.pool.find(value, *AXES.get(part, PIECES), bound=bound)) is not None:
                found[point] = tuple(dict.fromkeys(self.pool.names[number] for number in match.entries))
        return found

    @property
    def is_walkable(self) -> bool:
        """Whether it holds so many values that a walk from one to the next may succeed."""
        size = self.ids.numel() * self.config.n_embd
        entries = zip(self.pool.names, self.pool.entries, strict=True)
        names = {name[:-3] if name.endswith(THIRDS) else name for name, entry in entries if entry.numel() == size}
        return len(names) >= WALKED * self.config.n_layer

    def notes(self) -> Iterator[str]:
        """Yield what the report says about the arrays."""
        if self.is_constant:
            yield "each array of your dump is one number throughout: nothing was computed, or it is other memory"
        dtypes = sorted({str(array.dtype).removeprefix("torch.") for array in [*self.arrays.values(), self.output.logits]})
        if not self.arrays:
            yield f"your dump holds the logits alone ({dtypes[0]})"
            return
        origin = {name: name.partition("[")[0].removesuffix(" masked") for names in self.held.values() for name in names}
        count = len(set(origin.values()) & set(self.arrays))
        some = [f"{names[0]} is {point}" for point, names in self.held.items() if len(names) == 1][:SHOWN]
        shown = f", such as: {', '.join(some)}" if some else ""
        arrays = f"{len(self.arrays)} other array{'s' if len(self.arrays) != 1 else ''}"
        yield f"your dump holds the logits, under the name {self.output.name}, and {arrays} ({', '.join(dtypes)})"
        yield f"{count} of the arrays {'hold' if count != 1 else 'holds'} GPT-2's own values{shown}"

    @cached_property
    def shown(self) -> dict[str, Tensor]:
        """The right values that are held, by traced point; but for those that a program may use as others."""
        return {point: self.exact[point] for point in self.held if Place.of(point).part not in EXCHANGED}

    def allowed(self, evidence: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the allowed errors with the rounding of storage."""
        points = self.tolerance.points
        most = max(points.values())
        return points | {point: points.get(point, most) + stored(value, self.coarsest) for point, value in evidence.items()}

    def placements(self, model: Model) -> list[dict[str, Tensor]]:
        """Return what unknown arrays of a stream's size may be, the likeliest first: results of blocks, of norms, of branches."""
        known = {name for names in self.held.values() for name in names}
        used = set[int]().union(*(self.pool.again(number) for number, name in enumerate(self.pool.names) if name in known))
        found = [self._placed(model, stages, used) for stages in RECORDED] if self.arrays else []
        return [values for _, values in sorted(found, key=lambda one: -one[0]) if values][:MAX_PLACEMENTS]

    def _placed(self, model: Model, stages: tuple[str, ...], used: set[int]) -> tuple[float, dict[str, Tensor]]:
        """Return arrays at these stages, each as that which is most like what a block makes of the arrays before it.

        So where one block alone is wrong, everything else is exact. Before them, how alike they are.
        """
        observation, values, likeness, x = Observation(self.pool, model), dict[str, Tensor](), 0.0, model.embed()
        observation.used = set(used)
        layers, order = self.config.n_layer, self.order
        least = max(LEAST_LIKENESS, BY_CHANCE / x.numel() ** 0.5)
        behind = max((order.index(one) for one in self.shown if Place.of(one).part in ("", "mid", "ln_f")), default=-1)
        for layer in range(layers):
            state, after = {"x": x}, -1
            for stage in (*stages, "") if stages[-1] else stages:
                state = run_block(model.site(layer, state), state, {}, after, ORDER[stage])
                point, after = point_at(layer, stage), ORDER[stage]
                if stage not in stages or (point not in self.shown and order.index(point) < behind):
                    continue  # what a right stream was made of is right
                likest = None if point in self.shown else next(observation.unexplained(stage, state[stage], ()), None)
                if likest is not None and likest.likeness >= least:
                    observation.used.add(likest.number)
                    state[stage] = values[point] = likest.value
                    likeness += likest.likeness
                likeness += point in self.shown
            x = state[""]
        return likeness, values
