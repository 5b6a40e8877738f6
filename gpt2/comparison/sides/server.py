"""``http://HOST[:PORT]/v1[#model]``: a server with OpenAI's completions API, such as llama.cpp's or vLLM's.

It shows the likeliest tokens of each place, not all of them. With ``echo`` one request scores a whole window. A server that
answers without the prompt's log-probabilities is asked for the next token at ``PLACES`` places of each window.

Sources: OpenAI's API reference, "Create completion": ``echo``, ``logprobs``, ``top_logprobs``, ``text_offset``. llama.cpp,
tools/server: llama-server answers 500 to ``echo``, and gives log-probabilities as a list of tokens under ``content``.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from gpt2.comparison.sides.server_request import KEY, post
from gpt2.comparison.sides.side import Model, Running, Shown, Side, T, Top
from gpt2.data import Tokenizer
from gpt2.errors import InputError, printable

PREFIXES = ("http://", "https://")
LIMIT_VARIABLE = "GPT2_SEND_LIMIT"
SEND_LIMIT = 100_000  # tokens sent to this machine in one comparison, unless the variable says more
ANNOUNCED = 10_000  # tokens; the cost of more is told, and to another machine they are sent only if the variable allows them
TOP_K = 5  # OpenAI's API gives at most 5
PLACES = 16  # of each window, where the server does not score a prompt
MAX_SHOWN = 20  # tokens that are read at a place: a table of all places is as wide as the longest
LONGEST_NAME = 100  # characters of a model's name in an answer


@dataclass(frozen=True)
class ServerSide(Side):
    name: str
    url: str
    model: str | None
    partner: Side | None = None  # whose tokenizer its tokens are read with
    answered: list[str] = field(default_factory=list, compare=False)  # the names of models that its answers bear
    shows = frozenset({Shown.TOP})

    @classmethod
    def open(cls, name: str) -> ServerSide:
        url, _, model = name.partition("#")
        try:
            parts = urlsplit(url)
            bad = not parts.hostname or parts.port == 0
        except ValueError:
            bad = True
        if bad or parts.query or parts.username or parts.password:  # which may hold a key
            shown = (name.partition("@")[2] or name).partition("?")[0]
            raise InputError(f"{shown}: write http://HOST:PORT/v1#MODEL; a key belongs into {KEY}")
        return cls(name, url.rstrip("/"), model or None)

    @property
    def loopback(self) -> bool:
        """Whether the server is this machine."""
        host = urlsplit(self.url).hostname or ""
        try:
            return ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    @property
    def private(self) -> bool:
        """Whether nobody on the way reads what is sent, so that the key may be."""
        return self.loopback or self.url.startswith("https://")

    @property
    def n_positions(self) -> int | None:
        """Two less than its partner's: a request holds a window's tokens, the last target, and a new token."""
        known = self.partner.n_positions if self.partner else None
        return None if known is None else max(1, known - 2)

    def describe(self, versions: dict[str, str], *, hashes: bool = True) -> Model:
        calls = ", ".join(f"calls itself {name}" for name in self.answered)
        return Model(self.name, f"a server, OpenAI's completions API{calls and f', {calls}'}", "", None, None, {}, {})

    def _send_limit(self) -> int:
        text = os.environ.get(LIMIT_VARIABLE, str(SEND_LIMIT if self.loopback else ANNOUNCED))
        if not (text.isascii() and text.isdigit()):
            raise InputError(f"{LIMIT_VARIABLE}={text}: is not a number of tokens; write {LIMIT_VARIABLE}={SEND_LIMIT}")
        return int(text)

    @contextmanager
    def running(self) -> Iterator[RunningServer]:
        tokenizer = self.partner.tokenizer() if self.partner else None
        if tokenizer is None:
            raise InputError(f"{self.name}: a server takes text; compare it with a MODEL that has a tokenizer")
        yield RunningServer(self, tokenizer, self._send_limit())


def _places(count: int) -> list[int]:
    """Return the places of a window of ``count`` inputs at which the next token is asked for."""
    return sorted({round((i + 1) * count / PLACES) - 1 for i in range(PLACES)} - {-1})


@dataclass
class RunningServer(Running):
    """The connection; counts the tokens sent, and notes what the answers say beside their figures."""

    side: ServerSide
    tokenizer: Tokenizer
    limit: int
    sent: int = 0
    echoes: bool | None = None  # whether it scores a prompt; None before the first answer
    extra_tokens: int = 0  # that it counted beyond the prompt's, in the first answer
    other_tokens: str = ""  # where its tokens are not those of the partner's tokenizer
    strings: dict[str, int] = field(default_factory=dict)  # text of a token -> its id, -1 where several have it
    planned: list[int] = field(default_factory=list)  # inputs of the windows that it will be asked about

    def plan(self, windows: list[int]) -> None:
        """Announce what windows of so many inputs send. Raises InputError: more than the limit."""
        self.planned = windows
        self._agree(sum(count + 1 for count in windows))

    def _agree(self, tokens: int) -> None:
        """Tell what many ``tokens`` cost. Raises InputError: more than may be sent without the user's word."""
        cost = f"{tokens:,} tokens, about {tokens / 1e6:.3f} times its price of a million tokens"
        if tokens > self.limit:
            how = f"give --tokens with a smaller number, or set {LIMIT_VARIABLE}={tokens} to agree"
            raise InputError(f"{self.side.name}: this would send {cost}, more than {self.limit:,}; {how}")
        if tokens > ANNOUNCED:
            print(f"{printable(self.side.name)}: sending {cost}; Ctrl-C stops", file=sys.stderr)

    def top(self, ids: Tensor) -> Top:
        tokenizer = self.tokenizer
        if not self.strings:
            for index in range(tokenizer.n_vocab):
                text = _text(tokenizer, index)
                self.strings[text] = -1 if text in self.strings or not text else index
        if self.echoes is not False:
            answer = self._complete(tokenizer.decode(ids.tolist()), len(ids), echo=True)
            given = _as(dict, answer.get("logprobs"))
            if len(_as(list, given.get("tokens"))) >= max(2, len(ids) // 2):
                self.echoes = True
                return self._read(given, ids, tokenizer)
            self.echoes = False
            self._agree(self.sent + sum(place + 1 for count in self.planned or [len(ids) - 1] for place in _places(count)))
        return self._ask_places(ids, tokenizer)

    def _read(self, given: dict[str, Any], ids: Tensor, tokenizer: Tokenizer) -> Top:
        """Read an echoed prompt; tokens in front of it are counted, and the places after a token that differs stay unknown."""
        count = len(ids) - 1
        expected = [_text(tokenizer, index) for index in ids.tolist()]
        tokens = [str(token) for token in given["tokens"]]
        start = next((s for s in range(max(1, len(tokens) - count)) if tokens[s : s + 4] == expected[:4]), 0)
        self.extra_tokens = self.extra_tokens or start
        target, rows = [math.nan] * count, [dict[int, float]() for _ in range(count)]
        top, logprobs = _as(list, given.get("top_logprobs")), _as(list, given.get("token_logprobs"))
        for place in range(count):
            at = start + place + 1
            if at >= len(tokens) or tokens[at] != expected[place + 1]:
                if not self.other_tokens and at < len(tokens):
                    self.other_tokens = f"token {place + 1} is {tokens[at]!r} there and {expected[place + 1]!r} here"
                break
            if at < len(logprobs):
                target[place] = _log_probability(logprobs[at])
            if at < len(top) and (row := self._row(_as(dict, top[at]))):
                right = int(ids[place + 1])
                target[place] = row.get(right, target[place])
                rows[place] = row if math.isnan(target[place]) else {**row, right: target[place]}
        return _as_top(target, rows)

    def _ask_places(self, ids: Tensor, tokenizer: Tokenizer) -> Top:
        """Ask for the next token at a few places."""
        count = len(ids) - 1
        target, rows = [math.nan] * count, [dict[int, float]() for _ in range(count)]
        for place in _places(count):
            answer = self._complete(tokenizer.decode(ids[: place + 1].tolist()), place + 1, echo=False)
            rows[place] = self._row(_first_top(_as(dict, answer.get("logprobs"))))
            target[place] = rows[place].get(int(ids[place + 1]), math.nan)
        if not any(rows):
            raise InputError(f"{self.side.name}: its answers hold no log-probabilities; start it with them switched on")
        return _as_top(target, rows)

    def _row(self, top: dict[str, Any]) -> dict[int, float]:
        """Return ids and log-probabilities of the likeliest tokens, as far as each one's text belongs to one id.

        What is left out is then no likelier than what is shown, on which the bounds of KL rest.
        """
        values = [(_log_probability(value), str(text)) for text, value in top.items()]
        row: dict[int, float] = {}
        for value, text in sorted((each for each in values if not math.isnan(each[0])), reverse=True):
            if (index := self.strings.get(text, -1)) < 0 or len(row) == MAX_SHOWN:
                break
            row[index] = value
        return row

    def _complete(self, prompt: str, tokens: int, *, echo: bool) -> dict[str, Any]:
        side, self.sent = self.side, self.sent + tokens
        if self.sent > self.limit:
            raise InputError(f"{side.name}: {self.limit:,} tokens were sent; set {LIMIT_VARIABLE} to allow more")
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 1.0, "logprobs": TOP_K, "echo": echo, "seed": 0}
        body |= {"model": side.model} if side.model else {}
        refusable = echo and self.echoes is None  # an error answer to the first one is {}
        way = {"private": side.private, "proxy": not side.loopback}
        answer = post(f"{side.url}/completions", body, side.name, **way, refusable=refusable)
        named = answer.get("model")
        if isinstance(named, str) and (name := printable(named, one_line=True)[:LONGEST_NAME]) not in side.answered:
            side.answered.append(name)
        counted = _as(dict, answer.get("usage")).get("prompt_tokens")
        if isinstance(counted, int) and not self.extra_tokens:
            self.extra_tokens = counted - tokens
        return _as(dict, next(iter(_as(list, answer.get("choices"))), None))


def _as(kind: type[T], value: Any) -> T:
    """Return a part of an answer, or an empty one where it is of another kind."""
    return value if isinstance(value, kind) else kind()


def _log_probability(value: Any) -> float:
    """Return a part of an answer, at most 0, or NaN where it is no finite number."""
    return min(0.0, float(value)) if isinstance(value, int | float) and abs(value) <= sys.float_info.max else math.nan


def _first_top(given: dict[str, Any]) -> dict[str, Any]:
    """Return text -> log-probability of the first generated token's alternatives, in OpenAI's form or llama-server's."""
    if top := _as(dict, next(iter(_as(list, given.get("top_logprobs"))), None)):
        return top
    token = _as(dict, next(iter(_as(list, given.get("content"))), None))
    listed: list[dict[str, Any]] = [_as(dict, each) for each in _as(list, token.get("top_logprobs"))]
    return {str(each.get("token")): each.get("logprob") for each in listed}


def _text(tokenizer: Tokenizer, index: int) -> str:
    """A token's text as servers write it."""
    return tokenizer.token_bytes(index).decode("utf-8", errors="ignore") if tokenizer.holds(index) else ""


def _as_top(target: list[float], rows: list[dict[int, float]]) -> Top:
    width = max(1, *(len(row) for row in rows))
    ids = torch.full((len(rows), width), -1)
    logp = torch.full((len(rows), width), -math.inf, dtype=torch.float64)
    for place, row in enumerate(rows):
        for at, (index, value) in enumerate(sorted(row.items(), key=lambda item: -item[1])):
            ids[place, at], logp[place, at] = index, value
    return Top(torch.tensor(target, dtype=torch.float64), ids, logp)
