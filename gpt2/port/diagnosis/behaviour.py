"""How a port behaves: the same every time, whatever lies beside a row, in one piece or token by token, padded or not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.config import GPT2Config
from gpt2.measure.metrics import worst_relative_error
from gpt2.measure.tracing import layer_of
from gpt2.port.diagnosis.causes import cause
from gpt2.port.diagnosis.report import SURE, Cause, Divergence, merged
from gpt2.port.recording.deterministic import DeterministicMode, Dropout, run_deterministically
from gpt2.port.recording.forward import error_line, logits_of

ALIKE = 1e-9  # relative, in float64: other shapes are summed in another order
PASTS = ("past_key_values", "past_key_value", "past", "layer_past", "kv_cache", "cache", "past_kv", "kv_caches", "caches")
SWITCHES = ("use_cache", "use_kv_cache", "return_cache", "return_past")
STARTS = ("start_pos", "start", "offset", "pos_offset", "past_len", "past_length", "position_offset")
MASKS = {
    "attention_mask": 1,
    "padding_mask": 1,
    "pad_mask": 1,
    "key_padding_mask": 0,
    "src_key_padding_mask": 0,
}  # of a real token


class Behaviour:
    """Tries a module that lies on the bench, in float64. ``causes`` and ``notes`` are what came of it.

    ``expected(ids, offset)`` are the logits that our model gives with the port's own weights and positions from ``offset``; they
    decide which convention of positions a padded row follows. ``points(ids)`` are the traced values on the way there. ``bound``
    is what its logits may be off. ``divergence`` is where it begins to be random, if that is known.
    """

    def __init__(
        self,
        module: nn.Module,
        config: GPT2Config,
        expected: Callable[[Tensor, int], Tensor],
        points: Callable[[Tensor], Mapping[str, Tensor]],
        bound: float,
    ) -> None:
        self.module, self.config, self.expected, self.points = module, config, expected, points
        self.bound = max(bound, ALIKE)
        self.causes: list[Cause] = []
        self.notes: list[str] = []
        self.divergence: Divergence | None = None
        try:
            self.takes: Mapping[str, inspect.Parameter] = inspect.signature(module.forward).parameters
        except (TypeError, ValueError):
            self.takes = {}

    @torch.no_grad()
    def judge(self, ids: Tensor) -> None:
        """Everything that can be tried on (2, T) ``ids``."""
        self._repeats(ids)
        self._rows(ids)
        self._cached(ids)
        self._padded(ids)

    def _logits(self, *args: Any, **kwargs: Any) -> Tensor:
        return run_deterministically(lambda: logits_of(self.module(*args, **kwargs)))[0][..., : self.config.vocab_size].double()

    # The same every time

    def _repeats(self, ids: Tensor) -> None:
        watch = DeterministicMode(keep_casts=True, keep_random=True)
        with watch:
            once = logits_of(self.module(ids)).double()
        again = logits_of(self.module(ids)).double()
        if torch.equal(once, again) and not watch.dropouts:
            self._remembers(ids)
            return
        evidence = f"two calls with the same ids differ by {worst_relative_error(again, once):.1e}"
        if watch.dropouts:
            self._dropouts(ids, worst_relative_error(again, once))
        else:
            drawn = (
                f"your forward draws random numbers ({', '.join(dict.fromkeys(watch.draws))})"
                if watch.draws
                else "your forward depends on more than the ids: a state that changes from call to call"
            )
            self.causes.append(
                cause("not-deterministic", "logits", f"the same ids give other logits every time; {drawn}", evidence, SURE)
            )

    def _remembers(self, ids: Tensor) -> None:
        """Whether one token's logits depend on what was run before."""
        found = []
        for before in (ids, ids[:, :3]):
            try:
                self._logits(before)
                found.append(self._logits(ids[:, :1]))
            except Exception:
                return
        if not (error := worst_relative_error(*found)) <= self.bound:
            words = "the logits of one token depend on the text that was run before: your module remembers it"
            evidence = f"after {ids.size(1)} tokens and after 3, they differ by {error:.1e}"
            self.causes.append(cause("not-deterministic", "logits", words, evidence, SURE))

    def _dropouts(self, ids: Tensor, error: float) -> None:
        """Where they are: what they are applied to is known by its value, the dropouts before being made to let all through."""
        evidence = f"two calls with the same ids differ by {error:.1e}"
        _, mode = run_deterministically(lambda: self.module(ids))
        traced = self.points(ids)
        found = [next((point for point, value in traced.items() if _is_of(dropout, value)), None) for dropout in mode.dropouts]
        inside = all(
            ".mlp." in point if point else self._is_inside(dropout) for point, dropout in zip(found, mode.dropouts, strict=True)
        )
        id = "ffn-dropout" if inside else "dropout-active"
        words = f"your dropout{' inside the feed-forward' if inside else ''} does not stop in eval mode"
        count = f"{len(mode.dropouts)} ran in eval mode" if len(mode.dropouts) > 1 else "one ran in eval mode"
        places = [point.rpartition(".mlp")[0] + ".mlp" if ".mlp." in point else point for point in found if point]
        causes = [cause(id, place, words, f"{count}; {evidence}", SURE) for place in dict.fromkeys(places)]
        if causes:
            where = ", ".join(one.where for one in merged(causes, self.config.n_layer))
            self.causes.append(replace(causes[0], where=where))
            first = next(point for point in traced if point in found)
            self.divergence = Divergence(first, layer_of(first), error)
        else:
            self.causes.append(cause(id, "h.*.mlp" if inside else "h.*", words, f"{count}; {evidence}", SURE))

    def _is_inside(self, dropout: Dropout) -> bool:
        """In the feed-forward: of the hidden units, or of what the product that sums over them gave."""
        inner = self.config.inner
        return inner != self.config.n_embd and (dropout.width == inner or dropout.after == inner)

    # A row alone

    def _rows(self, ids: Tensor) -> None:
        both = self._logits(ids)
        for row in range(len(ids)):
            try:
                alone = self._logits(ids[row : row + 1])
            except Exception as error:
                self.causes.append(
                    cause(
                        "batch-dependent",
                        "logits",
                        f"your forward fails on a batch of one ({error_line(error)})",
                        "the same ids in a batch of two pass",
                        SURE,
                    )
                )
                return
            error = worst_relative_error(both[row : row + 1], alone)
            if not error <= self.bound:
                self.causes.append(
                    cause(
                        "batch-dependent",
                        "logits",
                        "a row's logits depend on the rows beside it",
                        f"row {row} alone and row {row} in a batch of {len(ids)} differ by {error:.1e}",
                        SURE,
                    )
                )
                return

    # Cached

    def _cached(self, ids: Tensor) -> None:
        past = next((name for name in PASTS if name in self.takes), None)
        switch = next((name for name in SWITCHES if name in self.takes), None)
        start = next((name for name in STARTS if name in self.takes), None)
        if not (past or switch or start):
            return
        whole, cut = self._logits(ids), ids.size(1) // 2
        errors = {}
        for words, pieces in (("token by token", [cut, *[1] * (ids.size(1) - cut)]), ("in one piece", [cut, ids.size(1) - cut])):
            try:
                found = self._in_pieces(ids, pieces, past, switch, start)
            except Exception as error:
                self.notes.append(f"your cache was not tried: it is not clear how to call it ({error_line(error)})")
                return
            if found is None:
                self.notes.append(f"your cache was not tried: forward takes {past or switch or start}, and returned no cache")
                return
            n = min(found.size(1), ids.size(1) - cut)
            errors[words] = worst_relative_error(found[:, -n:], whole[:, -n:])
        wrong = [words for words, error in errors.items() if not error <= self.bound]
        if wrong:
            hint = {("in one piece",): "; single tokens are right, so the mask of several new tokens is wrong"}.get(
                tuple(wrong), ""
            )
            told_ = " and ".join(f"{error:.1e} {words}" for words, error in errors.items())
            self.causes.append(
                cause(
                    "cache-inconsistent",
                    "logits",
                    f"with your cache the logits are others than without{hint}",
                    f"{cut} tokens, then the rest through the cache: they differ by {told_}",
                    SURE,
                )
            )

    def _in_pieces(
        self, ids: Tensor, pieces: list[int], past: str | None, switch: str | None, start: str | None
    ) -> Tensor | None:
        """The logits of all pieces but the first, one call each; None where no cache comes back."""
        cache, at, found = None, 0, []
        if past and not switch and not start and hasattr(self.module, "new_cache"):
            cache = self.module.new_cache(len(ids))
        given = cache
        for name in ("reset_cache", "reset_kv_cache", "clear_cache"):
            if callable(getattr(self.module, name, None)):
                getattr(self.module, name)()
        for piece in pieces:
            extra: dict[str, Any] = {switch: True} if switch else {}
            extra |= {past: cache} if past and cache is not None else {}
            extra |= {start: at} if start else {}
            part = ids[:, at : at + piece]
            output, _ = run_deterministically(lambda part=part, extra=extra: self.module(part, **extra))
            at += piece
            found.append(logits_of(output)[..., : self.config.vocab_size].double())
            if past:
                cache = _cache_of(output) if given is None else given
                if cache is None:
                    return None
        return torch.cat([part[:, -piece:] for part, piece in zip(found[1:], pieces[1:], strict=True)], 1)

    # Padded

    def _padded(self, ids: Tensor) -> None:
        name = next((name for name in MASKS if name in self.takes), None)
        if name is None:
            return
        real, gap = MASKS[name], 2
        mask = torch.full(ids.shape, real)
        mask[0, :gap] = 1 - real
        filled = ids.clone()
        filled[0, :gap] = ids[1, :gap]
        try:
            one, other = (self._masked(x, name, mask) for x in (ids, filled))
            full = self._masked(ids, name, torch.full(ids.shape, real))
        except Exception as error:
            self.notes.append(f"padding was not tried: your forward does not take {name} of shape (B, T) ({error_line(error)})")
            return
        alone = self._logits(ids[:1, gap:])
        first, second = one[:1, gap:], other[:1, gap:]
        plain = worst_relative_error(full, self._logits(ids))
        seen, moved = worst_relative_error(second, first), worst_relative_error(first, alone)
        if not plain <= self.bound:
            words, evidence = f"a {name} of ones changes the logits", f"by {plain:.1e}, against no mask at all"
        elif not seen <= self.bound:
            words, evidence = (
                "what stands at padded positions changes the logits of real ones",
                f"other ids under the padding change them by {seen:.1e}",
            )
        elif moved <= self.bound or self._is_absolute(ids[:1], gap, first, alone):
            words = ""
        else:
            words = "a row that is padded on the left gives other logits than the same row alone"
            evidence = f"they differ by {moved:.1e}, and are not those of positions counted with the padding either"
        if not words and not (error := worst_relative_error(one[1:], self._logits(ids)[1:])) <= self.bound:
            words, evidence = "a row without padding changes where another is padded", f"by {error:.1e}"
        if words:
            self.causes.append(cause("padding-wrong", "logits", words, evidence, SURE))

    def _masked(self, ids: Tensor, name: str, mask: Tensor) -> Tensor:
        failure = None
        for dtype in (torch.int64, torch.bool):
            try:
                return self._logits(ids, **{name: mask.to(dtype)})
            except Exception as error:
                failure = failure or error
        raise failure

    def _is_absolute(self, ids: Tensor, gap: int, padded: Tensor, alone: Tensor) -> bool:
        """Whether positions are counted with the padding: then the logits are those of a row that begins at ``gap``. Where the
        port departs from GPT-2 already when nothing is padded, that cannot be told and is believed."""
        ids = ids[:, gap:]
        n = min(padded.size(-1), self.config.vocab_size)
        if not worst_relative_error(alone[..., :n], self.expected(ids, 0)[..., :n]) <= self.bound:
            return True
        return worst_relative_error(padded[..., :n], self.expected(ids, gap)[..., :n]) <= self.bound


def _is_of(dropout: Dropout, value: Tensor) -> bool:
    """Of a traced value, or of one head of it."""
    return dropout.is_of(value) or (value.ndim == 4 and any(dropout.is_of(head) for head in value.unbind(1)))


def _cache_of(output: Any) -> Any:
    """What came back beside the logits."""
    for name in PASTS:
        found = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
        if found is not None:
            return found
    if isinstance(output, tuple):
        rest = [
            part
            for part in output
            if part is not None and not (isinstance(part, Tensor) and part.is_floating_point() and part.ndim < 2)
        ]
        return rest[-1] if len(rest) > 1 else None
    return None
