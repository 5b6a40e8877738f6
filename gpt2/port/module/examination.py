"""Examine one port against one checkpoint: run all checks in order, and draw the conclusions."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn

from gpt2.checkpoint.keys import HEAD
from gpt2.damage import look
from gpt2.errors import InputError
from gpt2.measure.metrics import FLOAT64_BOUND, Progress, max_abs, silent, worst_relative_error
from gpt2.measure.tracing import layer_of, points, trace
from gpt2.measure.user_code import error_at
from gpt2.model import GPT2
from gpt2.port.alternatives import entries
from gpt2.port.alternatives.outside import LAST_STEPS
from gpt2.port.anatomy.anatomy import Anatomy
from gpt2.port.anatomy.stream import NotGPT2
from gpt2.port.graph import Model
from gpt2.port.mapping import ROUNDED_CONSTANT
from gpt2.port.mapping.departures import SHARED, other_sizes, rows_apart, structural_causes
from gpt2.port.mapping.filling import Own, fill, overwritten, own_weights, put
from gpt2.port.mapping.mapping import WeightMap, probes
from gpt2.port.module.behaviour import Behaviour
from gpt2.port.module.runs import Runs
from gpt2.port.module.seen import seen
from gpt2.port.module.weights import WeightComparison
from gpt2.port.recording.dataflow import Use
from gpt2.port.recording.dispatch import tensors
from gpt2.port.recording.forward import Borrowed, plain_attention
from gpt2.port.recording.pool import Pool
from gpt2.port.recording.recorder import give_shapes, record_probe
from gpt2.port.search.blamed import effect_of_weights
from gpt2.port.search.logits import Reference, error_of, padding_causes
from gpt2.port.search.walk import Walked, search
from gpt2.port.terms.budget import of_model
from gpt2.port.terms.causes import SURE, Cause
from gpt2.port.terms.places import ALL_WEIGHTS, Place, listed
from gpt2.port.terms.ranking import ranked
from gpt2.port.terms.report import Diagnosis, Divergence

MOST_ROUNDED = 1.0  # a larger error of logits, over their root mean square, is none of rounding
FAR = 1000  # times what rounding explains in a short text: a larger error is none of rounding in a long one
NARROW = (torch.bfloat16, torch.float16)
LONG_TEXT = 1.5e11  # parameters times tokens of the longest text: the whole context of gpt2, in some 10 s of two cores


class Examination:
    """The checks of one module; :meth:`diagnosis` runs them. Raises InputError as :func:`gpt2.diagnose` does."""

    def __init__(self, module: nn.Module, ours: GPT2, fill: bool = False, progress: Progress = silent) -> None:
        self.module, self.ours, self.config, self.fill, self.progress = module, ours, ours.config, fill, progress
        self.budget, self.who = of_model(ours.config.num_parameters()), type(module).__name__
        self.weight_causes: list[Cause] = []
        self.notes: list[str] = []
        self.runs = Runs(module, ours.config, self.notes)
        self.exact = True  # all is explained in float64
        self.late = False  # the first text does not show what is wrong
        self.not_gpt2, self.holds = "", True  # why the parts are not recognised; whether some tensor is the checkpoint's

    def diagnosis(self) -> Diagnosis:
        give_shapes(self.module, self.config, self.who)
        training = [part for part in self.module.modules() if part.training]
        with torch.random.fork_rng(devices=[]), plain_attention(), Borrowed(self.module) as borrowed:
            torch.default_generator.manual_seed(0)  # what a module draws by mistake is the same in each diagnosis
            self.runs.rewind = borrowed.rewind
            how = "export it in eval mode, for it has no .eval()"
            with suppress(NotImplementedError):  # torch.export's; some modules override it
                self.module.eval()
                how = "it was judged in eval mode; call .eval() before you use it"
            weights = dict(self.module.named_parameters())  # a buffer may be a mask of infinite values
            if damage := look((k, v) for k, v in borrowed.tensors.items() if k in weights or bool(v.isnan().any())).damage:
                first = self.runs.first_nan(probes(self.config)[0])
                raise InputError(f"{self.who}: its weights hold {damage}{first}; look where they come from")
            diagnosis = self._examine(borrowed)
            return replace(diagnosis, notes=(*self._training(training, how), *diagnosis.notes))

    def _training(self, training: list[nn.Module], how: str) -> Iterator[str]:
        """Yield a note, that ends in ``how``, on a module with parts that came in ``training`` mode, if it is random there."""
        results = []
        with suppress(Exception):
            for _ in range(2 if training else 0):
                self.runs.rewind()
                for part in training:
                    part.training = True
                results.append(self.module(probes(self.config)[0].to(self.runs.device)))
            first, second = results
            if not all(map(torch.equal, tensors(first), tensors(second))):
                yield f"your module came in training mode, where each call gives other logits, by dropout or the like: {how}"

    def _examine(self, borrowed: Borrowed) -> Diagnosis:
        self.progress("recording one forward pass of your module")
        anatomy = self._anatomy(borrowed)
        self.notes += borrowed.by_rows
        self.progress("comparing your weights with the checkpoint's")
        self._read_checkpoint(borrowed)
        borrowed.to_float64()
        self.mapping = None if anatomy is None else WeightMap(anatomy, self.config)
        own, blank = self._weights(borrowed)
        self.own = own
        every = [] if self.mapping is None else list(structural_causes(self.mapping))
        self.structural = [cause for cause in every if cause.kind != SHARED]
        self.weight_causes += [cause for cause in every if cause not in self.structural]
        reference = Reference(self.config, self.state)
        alike = own.head is None and not own.extra and all(own.weights[name] is one for name, one in self.state.items())
        same = Reference(self.config, own.weights, own.head) if own.placed and not alike else reference
        self.progress("comparing your logits with ours")
        texts = probes(self.config, anatomy, work=LONG_TEXT)
        outputs = self.runs.outputs(borrowed, texts)
        ids, first_logits = outputs[0]
        self.ids = ids
        if own.extra:  # perhaps a bias of the head
            same.bias = (first_logits[..., : self.config.vocab_size] - same(ids)[:, -first_logits.shape[1] :]).mean((0, 1))
        padding, notes = padding_causes(first_logits, self.config)
        if first_logits.shape[1] < ids.shape[1]:
            notes.append("your module returns the logits of the last position alone, and these were compared")
        rows = len(anatomy.positions.rows) if anatomy and anatomy.positions else self.config.n_positions
        if rows < self.config.n_positions:
            words = f"your module has {rows:,} positions, the checkpoint {self.config.n_positions:,}"
            notes.append(f"{words}: longer texts were not compared")
        elif (longest := max(ids.size(1) for ids in texts)) < rows:
            notes.append(f"texts of more than {longest:,} tokens were not compared")
        behaviour = Behaviour(self.module, same, self.runs)
        self.progress("trying your module alone, repeated, cached and padded")
        behaviour.test(ids.to(self.runs.device))
        self.notes += notes + behaviour.notes
        changing = any(cause.id == "not-deterministic" for cause in behaviour.causes)
        if self.dtype == torch.float32 and self.runs.bound == FLOAT64_BOUND and not changing:
            padding += self.runs.imprecise(borrowed, ids, first_logits, same)
        errors = [error_of(logits, reference(ids)) for ids, logits in outputs]
        worst, others = max(errors), [*padding, *behaviour.causes]
        rounding, ends, unread = self.runs.bound, list[Cause](), self.weight_causes
        if self.weight_causes or worst > self.runs.bound:
            probe = outputs[errors.index(worst)][0]
            by_weights = worst_relative_error(same(probe), reference(probe)) if same is not reference else 0.0
            if worst <= MOST_ROUNDED or by_weights > rounding:  # as of folded weights
                rounding = self.runs.explained(reference, ids, torch.float32)
                if probe is not ids and min(worst, by_weights or worst) <= FAR * rounding:
                    rounding = self.runs.explained(reference, probe, torch.float32)
            unread = [cause for cause in self.weight_causes if blank or _is_unread(cause, own, self.state)]
            if own.placed and (by_weights <= rounding or (ends := _ends(same(probe), reference(probe), rounding))):
                if departures := [place for cause in self.weight_causes if cause not in unread for place in cause.places]:
                    words = f"differ from the checkpoint's ({listed(departures, self.config.n_layer)}), and compute the same"
                    self.notes.append(f"your weights {words}, as folded norms do")
                self.weight_causes, reference = unread, same
        if worst <= self.runs.bound:
            lost = [cause for cause in self.structural if cause.id == "position-offset"]  # no text is long enough to show it
            return self._diagnosed(worst, [blank or behaviour.divergence], [*unread, *lost, *others])
        least = self.runs.bound if worst <= ROUNDED_CONSTANT else max(self.runs.bound, ROUNDED_CONSTANT)
        wrong = next(number for number, error in enumerate(errors) if error > least)
        if wrong and changing:
            return self._diagnosed(worst, [blank], [*self.weight_causes, *others])
        ids, logits = outputs[wrong]
        if wrong:
            self.late = True
            at = ids.size(1) - logits.size(1) + self.runs.parted(logits, reference(ids), least)
            self.notes.append(f"your logits are right for {outputs[0][0].size(1)} tokens; they part at token {at}, from 0")
            ids, logits = self.runs.cut(ids, logits, reference, least)
        self.ids = ids
        own_error = error_of(logits, same(ids))
        if own.placed and own_error <= self.runs.bound:
            expected, traced = trace(reference.model, ids), trace(same.model, ids)
            apart = ((point, worst_relative_error(traced[point], value)) for point, value in expected.items())
            parted = (Divergence(point, error) for point, error in apart if error > FLOAT64_BOUND)
            divergence, evidence = next(parted, None), f"; with your weights our model gives your logits to {own_error:.0e}"
            silent = [cause for cause in self.structural if cause.id == "position-missing"]
            causes = [_sure(cause, evidence) for cause in [*self.weight_causes, *silent]]
        else:
            for one in (reference, same):
                one.kept.clear()  # a walk takes more memory than all else, and asks for no logits of whole texts
            mixed = any(cause.id == "batch-dependent" for cause in behaviour.causes)
            divergence, causes = self._walked(ids, own, reference, mixed, worst <= rounding, outputs[-1])
        if worst <= rounding:
            causes, self.runs.bound = causes if self.exact else [], rounding
            self.notes += [f"your logits are right: float32's rounding explains errors up to {rounding:.1e}"] * (not causes)
        return self._diagnosed(worst, [blank, divergence, behaviour.divergence], [*causes, *ends, *others])

    def _diagnosed(self, error: float, divergences: list[Divergence | None], causes: list[Cause]) -> Diagnosis:
        """Build the diagnosis; its place is the first of these divergences in the forward pass."""
        causes = ranked(causes, self.config.n_layer, self._effect)
        equal = error <= self.runs.bound and not causes
        order = {point: number for number, point in enumerate(points(self.config.n_layer))}
        known = [one for one in divergences if one is not None]
        first = min(known, key=lambda one: order.get(one.point, 0), default=Divergence("logits", error))
        verdict = "equal" if equal else "mismatch" if causes else "undetermined"
        notes = tuple(dict.fromkeys(self.notes))
        return Diagnosis(verdict, None if equal else first, tuple(causes), notes, self.who, logits_error=error)

    def _effect(self, cause: Cause) -> float | None:
        """Return how far the parameters at a cause's places, and no others, move the checkpoint's logits; None if unknown."""
        own, tensors = self.own, dict[str, Tensor]()
        if cause.id == "untied-head" and own.head is not None:
            tensors[HEAD] = own.head
        for name, held in own.weights.items() if cause.held else ():
            places = [place for place in cause.places if place == ALL_WEIGHTS or place.holds(name)]
            if any(not place.share for place in places):
                tensors[name] = held
            elif places:
                thirds = zip("qkv", held.chunk(3, -1), self.state[name].chunk(3, -1), strict=True)
                tensors[name] = torch.cat([x if any(one.share == share for one in places) else y for share, x, y in thirds], -1)
        return effect_of_weights(Model(self.state, self.config, self.ids), tensors)

    def _anatomy(self, borrowed: Borrowed) -> Anatomy | None:
        """Return None if the parts are not recognised; the module is then assumed to hold the checkpoint's weights."""
        recording = record_probe(borrowed, self.config, self.who)
        try:
            return Anatomy(recording)
        except Exception as error:
            self.not_gpt2 = str(error) if isinstance(error, NotGPT2) else error_at(error)
            return None

    def _read_checkpoint(self, borrowed: Borrowed) -> None:
        """Set ``state`` to the checkpoint in float64, rounded first to the module's dtype if that is narrower."""
        self.dtypes = {name: tensor.dtype for name, tensor in borrowed.tensors.items()}
        sizes: Counter[torch.dtype] = Counter()
        for tensor in borrowed.tensors.values():
            sizes[tensor.dtype] += tensor.numel() if tensor.is_floating_point() else 0
        self.dtype = dtype = sizes.most_common(1)[0][0] if sizes else torch.float32
        state = {name: tensor.detach().to("cpu") for name, tensor in self.ours.state_dict().items()}
        if dtype in NARROW and any(tensor.dtype != dtype for tensor in state.values()):
            kind = str(dtype).removeprefix("torch.")
            self.notes.append(f"your module is in {kind}: it is compared with the checkpoint rounded to that, in float64")
            state = {name: tensor.to(dtype) for name, tensor in state.items()}
        self.state = self.runs.state = {name: tensor.double() for name, tensor in state.items()}

    def _weights(self, borrowed: Borrowed) -> tuple[Own, Divergence | None]:
        """Compare and return the module's weights; fill it if it holds none of the checkpoint's, which is the divergence."""
        if self.mapping is None:
            held = {entries.fingerprint(x.detach().double()) for x in borrowed.tensors.values() if x.is_floating_point()}
            ours = [Place.of(name) for name, x in self.state.items() if x.ndim > 1 and ".c_attn." not in name]  # many cut that
            absent = [place for place in ours if entries.fingerprint(self.state[place.name]) not in held]
            self.holds = len(absent) < len(ours)
            if absent and 2 * len(absent) < len(ours):
                self.notes.append(f"no tensor of yours has the entries of {listed(absent, self.config.n_layer)}")
            if self.fill and not self.holds:
                words = "its weights cannot be put in for you; load them yourself, in build(checkpoint_dir), or without fill=True"
                raise InputError(f"{self.who}: {self.not_gpt2}, so {words}")
            return Own(self.state, {}, {}), None
        if apart := rows_apart(self.mapping.anatomy):
            raise InputError(f"{self.who}: {apart}")
        for what, size, wanted in other_sizes(self.mapping):
            if what != "number of blocks":
                words = f"its {what} is {size:,}, the checkpoint's {wanted:,}; build it with the checkpoint's sizes"
                raise InputError(f"{self.who}: {words}")
        divergence = None
        if not self.fill:
            self._restore_rounded(self.mapping, borrowed)
            own, comparison = self._compared(self.mapping, borrowed)
            if not comparison.blank:
                return own, None
            self.weight_causes = [cause for cause in comparison.causes if cause.id == "not-loaded"]
            self.notes.append("beyond that, the diagnosis is of your module as gpt2.load_into fills it")
            error = worst_relative_error(own.weights["wte.weight"], self.state["wte.weight"])
            divergence, self.mapping = Divergence("wte", error), WeightMap(self.mapping.anatomy, self.config)
        self.notes += overwritten(borrowed, self.mapping)
        fill(borrowed, self.mapping, self.state)
        return self._compared(self.mapping, borrowed)[0], divergence

    def _compared(self, mapping: WeightMap, borrowed: Borrowed) -> tuple[Own, WeightComparison]:
        own = own_weights(mapping, borrowed.tensors, self.state)
        comparison = WeightComparison(own, self.state, self.config)
        if not comparison.blank:
            self.weight_causes += comparison.causes
            self.notes += comparison.notes
        return own, comparison

    def _restore_rounded(self, mapping: WeightMap, borrowed: Borrowed) -> None:
        """Set parameters that are used scaled or shifted to exact values, if they hold the checkpoint's up to rounding."""
        for source in mapping.sources:
            use, tensor = mapping.use(source), borrowed.tensors[source.name]
            if use == Use():
                continue
            exact = tensor.clone()
            put(exact, mapping.entries(source), mapping, self.state, use)
            near = 4 * torch.finfo(self.dtypes[source.name]).eps * (exact.abs() + abs(use.shift / use.scale))
            if bool(((exact - tensor).abs() <= near).all()):
                tensor.copy_(exact)

    def _walked(
        self, ids: Tensor, own: Own, reference: Reference, mixed: bool, is_right: bool, last: tuple[Tensor, Tensor]
    ) -> tuple[Divergence | None, list[Cause]]:
        """Walk through GPT-2's stages with the module's own weights and recorded tensors.

        ``mixed``: rows of a batch change one another. What else is wrong shows in a batch of equal rows, unless it leaves
        nothing of them: a mean over the batch, subtracted, makes equal rows zero. ``is_right``: within float32's rounding.
        ``last``: the longest ids and their logits, which what is found in ``ids`` may not explain.
        """
        weights = dict(own.weights)
        if own.placed and not bool(own.placed["wpe.weight"].any()):  # the walk finds what is added in place of positions
            weights["wpe.weight"] = self.state["wpe.weight"]
        pool = self._pool(ids)
        walked = self._best_walk(pool, ids, reference, weights, own)
        if mixed and not walked.explained:
            alike = ids[:1].expand_as(ids).contiguous()
            pool = self._pool(alike)
            if pool.logits.shape[-2] == 1 or bool((pool.logits.diff(dim=-2).abs() > 1e-6 * pool.logits.abs().amax()).any()):
                again = self._best_walk(pool, alike, reference, weights, own)
                if again.explained or len(again.values) > len(walked.values):
                    walked = replace(again, first=walked.first or again.first)
        foretold, least = walked.foretold(last[0]), max(self.runs.bound, ROUNDED_CONSTANT)
        if foretold is not None and error_of(last[1], foretold) > least:
            longer, self.late = self.runs.cut(*last, walked.foretold, least)[0], True
            again = self._best_walk(self._pool(longer), longer, reference, weights, own)
            walked, self.ids = (again, longer) if again.explained else (walked, self.ids)
        if is_right or walked.causes or self.weight_causes or not walked.explained:
            for one in walked.rounded:
                words = f"{one.detail}, at {listed(one.places, self.config.n_layer)}"
                self.notes.append(f"{words}: float32's rounding explains that; it moves the logits by {one.effect or 0:.1e}")
        else:  # it adds up to more than float32's rounding
            walked = replace(walked, causes=walked.rounded)
        if walked.lost:
            self.notes += [walked.edge(self.config.n_layer), *([walked.ended] if walked.ended else [])]
        if self.not_gpt2 and self.holds:
            self.notes.append(f"the parts of your module were not recognised ({self.not_gpt2}); its weights were not compared")
        if walked.explained:
            held = [cause for cause in self.weight_causes if cause.id != "extra-bias"]  # the walk has measured its effect
            self.exact = not pool.narrow
            return walked.first, [*walked.causes, *(_sure(cause) for cause in held)]
        is_lost = not walked.ended and all(layer_of(point) is None for point in walked.values)
        if self.not_gpt2 and not walked.causes and is_lost and not self.holds:
            words = "and it holds no tensor of the checkpoint: this is another kind of model, and gpt2 diagnose needs a GPT-2"
            raise InputError(f"{self.who}: {self.not_gpt2}, {words}")
        known = {cause.id for cause in walked.causes}
        reached = [Place.of(point) for point in walked.values]  # there, the cause did not give the port's values
        refuted = [one for one in self.structural if any(p.part and p.contains(point) for p in one.places for point in reached)]
        structural = [cause for cause in self.structural if cause.id not in known and cause not in refuted]
        causes = [*walked.causes, *structural, *self.weight_causes]
        self.notes += seen(self.module, ids.to(self.runs.device), [cause.id for cause in causes])
        if causes:
            self.notes.append("these causes do not explain all of the difference; fix them and run the diagnosis again")
        self.exact = False
        return walked.first, causes

    def _pool(self, ids: Tensor) -> Pool:
        """Return the module's recorded tensors."""
        pool = self.runs.pool(ids, self.runs.keep_casts)
        pool.narrow, pool.budget, pool.late = self.runs.bound > FLOAT64_BOUND, self.budget, self.late
        return pool

    def _best_walk(self, pool: Pool, ids: Tensor, reference: Reference, weights: dict[str, Tensor], own: Own) -> Walked:
        """Walk with the module's weights; if these do not explain its logits, with the checkpoint's too.

        A bias that the anatomy has not found, or blocks that it has taken for others, need not be wrong: if the walk comes
        further with the checkpoint's own, the causes that say so are dropped.
        """
        ours, right = reference.model, Model(self.state, self.config, ids)
        walk = partial(search, pool, reference=ours, right=right, head=own.head, progress=self.progress)
        best = walk(weights)
        completed = {name: torch.where(placed, weights[name], self.state[name]) for name, placed in own.placed.items()}
        checkpoint = self.state if own.placed else {}
        misread_all = {cause.id for cause in self.weight_causes}
        for others, misread in ((completed, {"missing-bias", "layernorm-without-affine"}), (checkpoint, misread_all)):
            if best.explained or all(torch.equal(tensor, weights[name]) for name, tensor in others.items()):
                continue
            walked = walk(others)
            if walked.explained or len(walked.values) > len(best.values):
                best = walked
                self.weight_causes = [cause for cause in self.weight_causes if cause.id not in misread]
        if not best.explained and not pool.narrow:  # float32 constants may be the only obstacle
            pool.narrow = True
            walked = walk(weights)
            best = walked if walked.explained else best
        return best


def _is_unread(cause: Cause, own: Own, state: Mapping[str, Tensor]) -> bool:
    """Return whether a cause is of rows of an embedding that no probe has read, and not of their means, which norms remove."""
    if (stem := cause.place.stem) not in ("wte", "wpe"):
        return False
    mine, ours = (table[f"{stem}.weight"] - table[f"{stem}.weight"].mean(-1, keepdim=True) for table in (own.weights, state))
    return worst_relative_error(mine, ours) > ROUNDED_CONSTANT


def _ends(mine: Tensor, right: Tensor, bound: float) -> list[Cause]:
    """Return what the port's weights do to right logits (B, T, V), if a known step gives ``mine``."""
    ends = ((one, max_abs(end, right)) for one, make in LAST_STEPS if worst_relative_error(end := make(right), mine) <= bound)
    same = worst_relative_error(mine.softmax(-1), right.softmax(-1)) <= bound
    evidence = f"with your weights our model gives that, to {bound:.0e}{'; the softmax of it is right' if same else ''}"
    return [replace(one, evidence=evidence, effect=moved) for one, moved in islice(ends, 1)]


def _sure(cause: Cause, evidence: str = "") -> Cause:
    """Return a cause of weights as certain: our model with the port's weights gives the port's logits."""
    return replace(cause, confidence=SURE, evidence=cause.evidence + evidence)
