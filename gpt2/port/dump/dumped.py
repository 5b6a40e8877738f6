"""What a dump holds, if its program computed in one dtype: its arrays, those that are right, and what rounding explains."""

from collections.abc import Iterator, Mapping
from functools import cached_property

import torch
from torch import Tensor

from gpt2.measure.metrics import worst_relative_error
from gpt2.measure.tracing import part_of, point_at, points
from gpt2.model import GPT2
from gpt2.port.dump.arrays import Output, parts
from gpt2.port.graph import AXES, HEADED, ORDER, PIECES, Model, State, run_block, split
from gpt2.port.recording.pool import Pool
from gpt2.port.search.observe import Observation
from gpt2.port.terms.places import Place
from gpt2.port.terms.tolerance import UNITS, excess, measured, stored

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
