"""Test how a port behaves: repeated, with one row alone, token by token through its cache, and padded.

What the usual mistakes with a cache give is computed: wrong positions and wrong masks of the tokens of later calls.
"""

import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.measure.dumps import MASKS as MASK_NAMES
from gpt2.measure.metrics import worst_relative_error
from gpt2.measure.tracing import trace
from gpt2.measure.user_code import error_at, logits_of
from gpt2.port.alternatives.alternative import Alternative, Schedule, Which, scheduled
from gpt2.port.alternatives.candidates import Candidate
from gpt2.port.alternatives.masks import CAUSAL, IN_CALLS, MASKS, Mask, seeing
from gpt2.port.graph import Model, Site, State, embedding
from gpt2.port.module.runs import Runs
from gpt2.port.recording.dispatch import DeterministicMode, run_deterministically
from gpt2.port.recording.pool import Pool
from gpt2.port.search.logits import Reference
from gpt2.port.terms.causes import SURE, Cause
from gpt2.port.terms.places import EVERY, Place, collapsed
from gpt2.port.terms.report import Divergence

MIN_BOUND = 1e-9  # relative, in float64: other shapes change the order of sums
PAST = re.compile(r"past|cache|kv|present")  # in the name of an argument, or of a part of the output
NO_PAST = re.compile(r"use|return|reset|pos|len|index|idx|implementation")
SWITCHES = ("use_cache", "use_kv_cache", "return_cache", "return_past")
STARTS = ("start_pos", "start", "offset", "pos_offset", "past_len", "past_length", "position_offset")
STATELESS = "keep nothing from call to call: take the cache as an argument and return it, or empty it before each new text"
RESETS = ("reset_cache", "reset_kv_cache", "clear_cache")
PositionRows = Callable[[int, int], Tensor]  # from the first token of a call and the one behind it to rows of the position table
POSITIONS: dict[str, PositionRows] = {
    "": torch.arange,
    "the positions of all new tokens are one, that of the first of them": lambda begin, end: torch.full((end - begin,), begin),
    "positions begin at 0 in each call": lambda begin, end: torch.arange(end - begin),
    "positions lag by one": lambda begin, end: torch.arange(begin, end) - 1,
    "positions run ahead by one": lambda begin, end: torch.arange(begin, end) + 1,
}
UNMASKED, *_ = MASKS
LATER: dict[str, Mask] = {
    "": CAUSAL,
    "the mask is missing: a new token sees those behind it": MASKS[UNMASKED][1],
    **{f"the mask: {words}": mask for words, mask in IN_CALLS.items()},
}


class Behaviour:
    """Tests a module in float64; the results are ``causes``, ``notes`` and ``divergence`` (where randomness begins).

    ``expected``: our model with the port's weights; locates dropouts and padding. ``runs``: the module's calls so far.
    """

    def __init__(self, module: nn.Module, expected: Reference, runs: Runs) -> None:
        self.module, self.expected, self.runs, self.config = module, expected, runs, expected.model.config
        self.bound = max(runs.bound, MIN_BOUND)
        self.causes: list[Cause] = []
        self.notes: list[str] = []
        self.divergence: Divergence | None = None
        try:
            self.arguments = {name: one.default for name, one in inspect.signature(module.forward).parameters.items()}
        except (TypeError, ValueError):
            self.arguments = {}
        self.past = next((name for name in self.arguments if _is_past(name)), None)
        self.switch, self.start, self.holds = self._argument(*SWITCHES), self._argument(*STARTS), False
        self.rows = 1 if hasattr(type(module), "row_by_row") else None  # of a text with a cache

    @torch.no_grad()
    def test(self, ids: Tensor) -> None:
        self.whole = self._logits(ids)
        self.size = float(self.whole.square().mean().sqrt())  # of a logit
        self._repeat(ids)
        self._rows(ids)
        self._padded(ids, self._cached(ids[: self.rows]))

    def _add(self, id: str, words: str, evidence: str, error: float, *places: Place, fix: str | None = None) -> None:
        """Add a cause, by the relative ``error`` of the logits that it makes."""
        places = places or (Place(None, "logits"),)
        effect = error * self.size if math.isfinite(error) else None
        self.causes.append(Cause(id, places, words, evidence, SURE, fix, effect=effect))

    def _logits(self, ids: Tensor, **arguments: Any) -> Tensor:
        """Return the logits of a call that no earlier one has changed."""
        self.runs.rewind()
        return self._logits_in(self.runs.call(ids, **arguments)[0], ids)

    def _logits_in(self, output: Any, ids: Tensor) -> Tensor:
        """Return the logits (B, T', V) in what the module returned for ``ids``, without the padding of the vocabulary."""
        return logits_of(output, ids, self.config.vocab_size)[..., : self.config.vocab_size].double()

    def _differ(self, mine: Tensor, expected: Tensor) -> float:
        """Return the error if it is above the bound, else 0."""
        error = worst_relative_error(mine, expected)
        return 0.0 if error <= self.bound else error

    def _argument(self, *names: str) -> str | None:
        return next((name for name in names if name in self.arguments), None)

    def _repeat(self, ids: Tensor) -> None:
        (first, second), mode = self._twice(ids)
        if torch.equal(first, second) and not mode.dropouts:
            self._repeat_after_others(ids)
            return
        error = worst_relative_error(second, first)
        evidence = f"two calls with the same ids {_apart(error)}"
        if mode.dropouts:
            self._dropouts(ids, error, evidence)
            return
        keeps = not mode.draws and torch.equal(first, self._twice(ids)[0][0])
        why = "your forward depends on a state that is not in your module, or on a generator without a seed"
        why = f"your forward draws random numbers ({', '.join(dict.fromkeys(mode.draws))})" if mode.draws else why
        why = "your module keeps a state from call to call, and its logits depend on it" if keeps else why
        words = f"the same ids give other logits every time; {why}"
        self._add("not-deterministic", words, evidence, error, fix=None if mode.draws else STATELESS)

    def _twice(self, ids: Tensor) -> tuple[list[Tensor], DeterministicMode]:
        """Return the logits of two calls with all that is random in them."""
        self.runs.rewind()
        keep = self.runs.keep_casts
        return run_deterministically(lambda: [self._logits_in(self.module(ids), ids) for _ in range(2)], keep, True)

    def _repeat_after_others(self, ids: Tensor) -> None:
        """Test whether one token's logits depend on previous calls."""
        after = []
        for before in (ids, ids[:, :3]):
            try:
                self._logits(before)
                after.append(self._logits_in(self.runs.call(ids[:, :1])[0], ids[:, :1]))
            except Exception:
                return
        if error := self._differ(*after):
            words = "the logits of one token depend on the text that was run before: your module remembers it"
            evidence = f"after {ids.size(1)} tokens and after 3, they {_apart(error)}"
            self._add("not-deterministic", words, evidence, error, fix=STATELESS)

    def _dropouts(self, ids: Tensor, error: float, evidence: str) -> None:
        """Locate the dropouts: compare their inputs with the traced values, while all dropouts are the identity."""
        _, mode = self.runs.call(ids, False)
        traced = trace(self.expected.model, ids.cpu())
        named = [*traced.items(), *((point, head) for point, x in traced.items() if x.ndim == 4 for head in x.unbind(1))]
        pool = Pool()
        for name, value in named:
            pool.add(value, name)
        matches = [pool.find(one.value.to("cpu", torch.float64)) for one in mode.dropouts]
        points = ["" if match is None else named[match.entries[0]][0] for match in matches]
        hidden = {self.config.inner} - {self.config.n_embd}  # empty if both widths are equal: they then tell nothing
        sizes = ((*one.value.shape[-1:], one.after) for one in mode.dropouts)  # of what is dropped, and of the sums before it
        inside = all(".mlp." in at if at else not hidden.isdisjoint(size) for at, size in zip(points, sizes, strict=True))
        found = map(Place.of, filter(None, points))
        places = [Place(place.layer, "mlp") if place.part.startswith("mlp.") else place for place in found]
        count = f"{len(mode.dropouts)} dropouts ran in eval mode" if len(mode.dropouts) > 1 else "one dropout ran in eval mode"
        words = f"your dropout{' inside the feed-forward' if inside else ''} does not stop in eval mode"
        where = collapsed(places, self.config.n_layer) or (Place(EVERY, "mlp" if inside else ""),)
        self._add("ffn-dropout" if inside else "dropout-active", words, f"{count}; {evidence}", error, *where)
        first = next((point for point in traced if point in points), None)
        self.divergence = None if first is None else Divergence(first, error)

    def _rows(self, ids: Tensor) -> None:
        for row in range(len(ids)):
            try:
                alone = self._logits(ids[row : row + 1])
            except Exception as failure:
                words = f"your forward fails on a batch of one ({error_at(failure)})"
                self._add("batch-dependent", words, "the same ids in a batch of two pass", math.inf)
                return
            if error := self._differ(self.whole[row : row + 1], alone):
                evidence = f"row {row} alone and row {row} in a batch of {len(ids)} {_apart(error)}"
                self._add("batch-dependent", "a row's logits depend on the rows beside it", evidence, error)
                return

    def _cached(self, ids: Tensor) -> bool:
        """Return whether the module has a cache that is right."""
        self._find_past(ids)
        if not (self.past or self.switch or self.start):
            return False
        errors = self._piecewise(ids, whole := self.whole[: self.rows])
        wrong = [words for words, error in errors.items() if not error <= self.bound]
        if wrong:
            mistakes = self._cache_mistakes(ids, wrong)
            if "position_ids" in self.arguments:
                notes, places = [*self.notes], torch.arange(ids.size(1), device=ids.device)
                given = self._piecewise(ids, whole, position_ids=places.expand_as(ids))
                self.notes = notes
                if given and all(error <= self.bound for error in given.values()):
                    self.notes.append(f"your cache gives the logits without it only if position_ids are given{mistakes}")
                    return False
            only = "; single tokens are right: look at the mask and the positions of several new tokens"
            hint = mistakes or (only if wrong == ["in one piece"] and len(errors) > 1 else "")
            words = f"with your cache the logits are others than without{hint}"
            self._add("cache-inconsistent", words, _split(errors), max(errors.values()))
        return bool(errors) and not wrong

    def _find_past(self, ids: Tensor) -> None:
        """Set ``past``, where no name says it, to the argument that takes the keys and values of a call; or add a note."""
        pieces, why = self._ways(ids)["in one piece"], ""
        for name in [] if self.past else [name for name, one in self.arguments.items() if one is None and "mask" not in name]:
            self.past = name
            try:
                given = self._in_pieces(ids, pieces, {}, True)
                changes = self._differ(given, self._logits(ids[:, pieces[0] :]))
                if changes and (self.holds or not self._differ(given, self.whole[: self.rows, -given.size(1) :])):
                    return
                takes = f"{name} takes it, and {'it is no keys and values' if changes else 'no logit changes'}"
                why = takes if changes or self.holds else why
            except Exception as error:
                why = why or (f"{name}: {error_at(error)}" if self.holds else "")
            self.past = None
        self.notes += [f"what your forward returns beside the logits was not tried as a cache: {why}"] if why else []

    def _cache_mistakes(self, ids: Tensor, wrong: list[str]) -> str:
        """Say which known mistakes of later calls give the logits of a text in pieces; "" if none do."""
        half, model = ids.size(1) // 2, Model(self.expected.model.state_dict(), self.config, ids.cpu())
        for way in reversed(wrong) if self.expected.own_head is None else ():
            pieces = self._ways(ids)[way]
            given = self._in_pieces(ids, pieces, {}, True).cpu()
            for words, logits in in_later_calls(model, pieces):
                if not self._differ(given, logits[:, half:][:, -given.size(1) :]):
                    return f": {way}, {words}"
        return ""

    @staticmethod
    def _ways(ids: Tensor) -> dict[str, list[int]]:
        """Return the ways to read a text (B, T) in calls: the number of tokens of each."""
        half, rest = ids.size(1) // 2, (ids.size(1) + 1) // 2
        return {"token by token": [half, *[1] * rest], "in one piece": [half, rest]}

    def _piecewise(self, ids: Tensor, whole: Tensor, **masks: Tensor) -> dict[str, float]:
        """Return by how much logits of a text in pieces differ from those of the ``whole`` (B, T, V), in each way that works."""
        rest, errors = min(ids.size(1) - ids.size(1) // 2, whole.size(1)), dict[str, float]()
        for words, pieces in self._ways(ids).items():
            why = ""
            for of_all in (True, False) if masks else (True,):  # the mask, of the tokens before too, or of the new ones alone
                try:
                    logits = self._in_pieces(ids, pieces, masks, of_all)[: len(whole), -rest:]
                    error = worst_relative_error(logits, whole[:, -logits.size(1) :])
                    errors[words] = min(error, errors.get(words, math.inf))
                except Exception as error:
                    why = f"your cache was not tried {words}: a call fails ({error_at(error)})"
            self.notes += [why] if why and words not in errors else []
        return errors

    def _in_pieces(self, ids: Tensor, pieces: list[int], masks: Mapping[str, Tensor], of_all: bool) -> Tensor:
        """Return the logits of all pieces but the first, one call each. Raises ValueError: the forward returns no cache."""
        past, switch, start = self.past, self.switch, self.start
        new_cache: Callable[[int], Any] | None = getattr(self.module, "new_cache", None)
        given = cache = new_cache(len(ids)) if new_cache and past and not switch and not start else None
        at, logits = 0, []
        self.runs.rewind()
        for reset in filter(callable, (getattr(self.module, name, None) for name in RESETS)):
            reset()
        for piece in pieces:
            arguments: dict[str, Any] = {switch: True} if switch else {}
            arguments |= {past: cache} if past and cache is not None else {}
            arguments |= {start: at} if start else {}
            arguments |= {name: mask[:, 0 if of_all else at : at + piece] for name, mask in masks.items()}
            some = ids[:, at : at + piece]
            output = self.runs.call(some, **arguments)[0]
            at += piece
            logits.append(self._logits_in(output, some)[:, -piece:])
            if past and given is None:
                old, cache = cache, _cache_of(output, past)
                if cache is None:
                    raise ValueError("it returns no cache")
                self.holds |= _numbers(cache) == 2 * self.config.n_layer * self.config.n_embd * ids[:, :at].numel()
                held, new = (x.size(-2) if isinstance(x, Tensor) and x.ndim > 1 else 0 for x in (old, cache))
                if isinstance(old, Tensor) and new == piece < held:
                    cache = torch.cat([old, cache], -2)  # as OpenAI's own code returns and takes it
                    self.notes.append("your forward returns new tokens' keys and values alone: put them behind the earlier ones")
        return torch.cat(logits[1:], 1)

    def _padded(self, ids: Tensor, has_right_cache: bool) -> None:
        if (name := self._argument(*MASK_NAMES)) is None:
            return
        gap, ones = 2, torch.full(ids.shape, MASK_NAMES[name])
        mask, filled = ones.clone(), ids.clone()
        mask[0, :gap] = 1 - MASK_NAMES[name]
        filled[0, :gap] = ids[1, :gap]
        for kind in (mask.dtype, torch.bool):
            mask, ones = mask.to(kind), ones.to(kind)
            try:
                padded, refilled, full = (self._logits(x, **{name: m}) for x, m in ((ids, mask), (filled, mask), (ids, ones)))
                break
            except Exception as failure:
                why = error_at(failure)
        else:
            self.notes.append(f"padding was not tried: your forward does not take {name} of shape (B, T) ({why})")
            return
        unmasked, alone, first = self.whole, self._logits(ids[:1, gap:]), padded[:1, gap:]
        checks = (
            (full, unmasked, f"a {name} of ones changes the logits"),
            (refilled[:1, gap:], first, "what stands at padded positions changes the logits of real ones"),
            (padded[1:], unmasked[1:], "a row without padding changes where another is padded"),
        )
        for mine, right, words in checks:
            if error := self._differ(mine, right):
                self._add("padding-wrong", words, f"they differ by {error:.1e}", error)
                return
        error, right = self._differ(first, alone), self.expected(ids[:1, gap:])
        is_ours = not self._differ(alone, right)  # else nothing says which positions are right
        if error and is_ours and self._differ(first, self.expected(ids[:1, gap:], slice(gap, None))):
            words = "a row that is padded on the left gives other logits than the same row alone"
            evidence = f"they differ by {error:.1e}, and are not those of positions counted with the padding either"
            self._add("padding-wrong", words, evidence, error)
            return
        if error and is_ours:
            words = f"a row padded on the left gives other logits than alone, by {error:.1e}, unless position_ids are given"
            self.notes.append(f"your positions count the padding: {words}")
        errors = self._piecewise(ids[: self.rows], padded[:1], **{name: mask[: self.rows]}) if has_right_cache else {}
        if not all(error <= self.bound for error in errors.values()):
            words = "with your cache, a row that is padded on the left gives other logits than without"
            self._add("padding-wrong", words, _split(errors), max(errors.values()))


def _apart(error: float) -> str:
    """Return words for how far two values are apart; there is no number for it where one is zero, or of another shape."""
    return f"differ by {error:.1e}" if math.isfinite(error) else "have nothing in common"


def _split(errors: Mapping[str, float]) -> str:
    differ = " and ".join(f"{error:.1e} {words}" for words, error in errors.items())
    return f"half of the tokens, then the rest through the cache: they differ by {differ}"


def _is_past(name: str) -> bool:
    return bool(PAST.search(name)) and not NO_PAST.search(name)


def _cache_of(output: Any, past: str) -> Any:
    """Return the forward's output without the logits: what is called ``past`` or the like, or the last part."""
    named = output if isinstance(output, dict) else getattr(output, "_asdict", lambda: getattr(output, "__dict__", {}))()
    cache = next((part for name, part in named.items() if part is not None and (name == past or _is_past(name))), None)
    if cache is not None or not isinstance(output, tuple):
        return cache
    losses = (isinstance(part, Tensor) and part.is_floating_point() and part.ndim < 2 for part in output)
    rest = [part for part, is_loss in zip(output, losses, strict=True) if part is not None and not is_loss]
    return rest[-1] if len(rest) > 1 else None


def _numbers(part: Any, depth: int = 6) -> int:
    """Return how many floating-point numbers are in the tensors of lists, dictionaries and objects within one another."""
    if isinstance(part, Tensor):
        return part.numel() if part.is_floating_point() else 0
    parts = part.values() if isinstance(part, dict) else getattr(part, "__dict__", {}).values()
    return sum(_numbers(one, depth - 1) for one in (part if isinstance(part, list | tuple) else parts) if depth)


def in_later_calls(model: Model, pieces: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield mistakes in words, and the logits of a text that is read in ``pieces`` of so many tokens; single mistakes first."""
    ends, room = list(itertools.accumulate(pieces)), model.config.n_positions - 1
    calls = tuple(zip([0, *ends], ends, strict=False))
    both = sorted(itertools.product(POSITIONS.items(), LATER.items()), key=lambda one: bool(one[0][0]) + bool(one[1][0]))
    for (where, rows), (hidden, mask) in both[1:]:  # the first is right

        def embed(c: Site, s: State, rows: PositionRows = rows) -> Tensor:
            return embedding(c, rows(c.begin, c.end).clamp(0, room))

        whole = scheduled(Alternative("", "", {"attn.weights": seeing(mask), "embed": embed}), Schedule("", calls, Which.LATER))
        sites = tuple((whole, layer) for layer in range(model.config.n_layer))
        program = Candidate((*sites, (whole, None))).program
        if program is not None:
            yield "; ".join(filter(None, (where, hidden))), model.trace(program)["logits"]
