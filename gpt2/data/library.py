"""Any tokenizer that the `tokenizers` library runs: BPE, Unigram, WordPiece, WordLevel, with whatever stands around the model.

:mod:`gpt2.data.auto` builds it from files. A BPE of GPT-2's own kind is encoded by tiktoken, ten times as fast, and
single characters by a table (:func:`gpt2.data.byte_level.core`).
"""

import copy
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Self

from tokenizers import AddedToken, Tokenizer as Backend

from gpt2.config import quoted
from gpt2.data import byte_level
from gpt2.data.tokenizer import Tokenizer, refuse_surrogates, require_id
from gpt2.errors import InputError, panicked

BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a token of SentencePiece's byte fallback
GROWTH = 1000  # a part may make a text so many times as long; 40 steps that double it would fill any memory
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@contextmanager
def library(
    where: str, fault: str = "the tokenizers library cannot read it", remedy: str = "fetch the files again"
) -> Iterator[None]:
    """Report what the library does not take as an InputError of one line."""
    try:
        yield
    except InputError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not panicked(error):
            raise
        kind = "" if type(error) in (Exception, ValueError) else f"{type(error).__name__}: "
        reason = quoted(kind + " ".join(str(error).split()))
        raise InputError(f"{where}: {fault} ({reason}); {remedy}") from None


def growth(told: Mapping[str, Any]) -> float:
    """Return how many times as long a part of a pipeline (its JSON) makes a text at most, by what it replaces or repeats."""
    steps = told.get("normalizers") or told.get("decoders") or told.get("processors") or ()
    old, new = (told.get("pattern") or {}).get("String"), len(told.get("content") or "") * (told.get("type") == "Replace")
    repeated = sum("Sequence" in piece for piece in told["single"]) if told.get("type") == "TemplateProcessing" else 1
    return math.prod(map(growth, steps)) * max(1.0, repeated, new / len(old) if old else new + 1.0)


class LibraryTokenizer(Tokenizer):
    """A pipeline of the `tokenizers` library; ``kept`` are the files that it was read from, to be written back as they are.

    Args:
        backend: the pipeline; truncation and padding are switched off.
        roles: "eos_token" and the like, each with its token.
        merges: a BPE's merges in rank order, which the library does not give back.
    """

    def __init__(
        self, backend: Backend, *, roles: Mapping[str, str] | None = None, merges: byte_level.Merges | None = None
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend, self.roles, self.merges = backend, dict(roles or {}), merges
        self.added = backend.get_added_tokens_decoder()  # id -> AddedToken
        self.vocab = dict(sorted(backend.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1]))
        require_id(max(self.vocab.values(), default=-1))  # the library itself makes a list of the ids to write a vocabulary
        self.special_tokens = {token.content: i for i, token in sorted(self.added.items()) if token.special}
        self.matched = {token.content: i for i, token in sorted(self.added.items()) if not token.special}
        self.eos = self.vocab.get(self.roles.get("eos_token", ""))
        parts = {"normaliser": backend.normalizer, "template": backend.post_processor, "decoder": backend.decoder}
        for name, part in parts.items():
            if growth(byte_level.state(part)) > GROWTH:
                raise ValueError(f"its {name} makes a text over {GROWTH:,} times as long")
        self.core = byte_level.core(backend, self.vocab, merges)
        self.letters = isinstance(self.core, byte_level.Letters)  # one id for each character of a table
        bytewise = byte_level.state(backend.decoder).get("type") == "ByteLevel"
        added = {i: token.content.encode() for i, token in self.added.items()}
        tokens = byte_level.to_bytes(list(self.vocab)) if bytewise else [token.encode() for token in self.vocab]
        self._bytewise = bytewise or self.letters  # a token has the same bytes in every text
        self.own = bytewise and self.core is not None and not self.letters  # GPT-2's own kind
        super().__init__({**dict(zip(self.vocab.values(), tokens, strict=True)), **added})
        plain = not any(token.single_word or token.lstrip or token.rstrip for token in self.added.values() if not token.special)
        self.exact = plain and (self.letters or byte_level.lossless(backend, self.vocab))
        names = sorted(self.matched, key=len, reverse=True)  # a token may be the beginning of a longer one
        self._split = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None

    def unreachable(self) -> list[str]:
        """Return the tokens of a BPE of GPT-2's own kind that no merge makes; others may be made otherwise."""
        if not self.own or len(self.vocab) <= len(self.merges or ()) + len(self.added) + byte_level.N_BYTES:
            return []
        made = {*byte_level.byte_alphabet(), *(a + b for a, b in self.merges or ()), *self.special_tokens, *self.matched}
        return [token for token in self.vocab if token not in made]

    @cached_property
    def fingerprint(self) -> str:
        content: list[object] = [list(self.vocab), self.merges, sorted(self.special_tokens.values())]
        content += [sorted(self.matched)] if self.matched else []
        content += [self.template] if self.template else []
        content = content if self.exact and self.core is not None else [self.definition()]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def definition(self) -> dict[str, Any]:
        """Return what `tokenizer.json` says: the whole pipeline. A BPE's merges are lines, which every release reads."""
        content: dict[str, Any] = json.loads(self.backend.to_str())
        merges = content["model"].get("merges")
        if merges and not any(" " in part for pair in merges for part in pair):
            content["model"]["merges"] = [" ".join(pair) for pair in merges]
        return content

    @property
    def template(self) -> list[int]:
        """The ids that :meth:`encode_prompt` puts around a text."""
        return list(self.backend.encode("", add_special_tokens=True).ids)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        refuse_surrogates(text)
        slow = not self.exact or (special and self.special_tokens)
        if self.core is None or slow or (self.own and byte_level.has_long_run(text)):
            return list(self._run(text, special, False).ids)
        if self._split is None:
            return self.core.encode(text)
        ids: list[int] = []
        for i, part in enumerate(self._split.split(text)):
            ids += [self.matched[part]] if i % 2 else self.core.encode(part)
        return ids

    def encode_prompt(self, text: str, *, special: bool = False) -> list[int]:
        refuse_surrogates(text)
        if self.letters:
            self.encode(text)  # raises for an unknown character
        return list(self._run(text, special, True).ids)

    def _run(self, text: str, special: bool, template: bool) -> Any:
        """Return the library's encoding. Raises InputError: it fails."""
        self.backend.encode_special_tokens = not special
        with library("the tokenizer"):
            return self.backend.encode(text, add_special_tokens=template)

    def lengths(self, text: str) -> list[int]:
        if self.exact:
            return super().lengths(text)
        refuse_surrogates(text)
        spans = self._run(text, False, False).offsets  # in characters
        starts, found, end = [0], list[int](), 0
        for char in text:
            starts.append(starts[-1] + len(char.encode()))
        for number, (_, stop) in enumerate(spans, 1):
            stop = len(text) if number == len(spans) else max(stop, end)
            found.append(starts[stop] - starts[end])
            end = stop
        return found

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        if self._bytewise:
            return super().decode_bytes(ids)
        known = self._known(ids)
        with library("the tokenizer"):
            return self.backend.decode(known, skip_special_tokens=False).encode()

    def token_bytes(self, token_id: int) -> bytes:
        if self._bytewise:
            return super().decode_bytes([token_id])
        if found := BYTE.fullmatch(self.token(token_id)):
            return bytes.fromhex(found[1])
        before, both = self.decode_bytes([self._before]), self.decode_bytes([self._before, token_id])
        return both[len(before) :] if both.startswith(before) else self.decode_bytes([token_id])

    @cached_property
    def _before(self) -> int:
        """An id that stands for a text before another token: a letter if there is one."""
        return max(self.vocab.values(), key=lambda i: self.token(i).strip("▁#").isalpha() and i not in self.added)

    def token(self, token_id: int) -> str:
        return super().token(token_id) if self._bytewise else str(self.backend.id_to_token(token_id))

    def with_tokens(self, tokens: Sequence[str]) -> Self:
        added = [token for token in dict.fromkeys(tokens) if token not in self.matched]
        for token in added:
            refuse_surrogates(token)
            if not token or token in self.vocab:
                why = "is in the vocabulary already" if token else "is empty"
                raise InputError(f"add_tokens: {quoted(token)} {why}; give texts that are no token yet")
        if not added:
            return self
        backend = copy.deepcopy(self.backend)
        backend.add_tokens([AddedToken(token) for token in added])
        grown = type(self)(backend, roles=self.roles, merges=self.merges)  # all its files are written anew
        if [grown.vocab[token] for token in added] != list(range(self.n_vocab, grown.n_vocab)):
            raise InputError("add_tokens: this vocabulary has ids without tokens, and the library fills them; use another one")
        grown.chat, grown.stated = self.chat, self.stated
        return grown

    def texts(self, n_positions: int) -> dict[str, str | bytes]:
        """Return the files that were read, and the others in which programs look for it: llama.cpp wants a BPE's own two."""
        if self.kept and self.core is None:
            return dict(self.kept)
        config = {
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": n_positions,
            "tokenizer_class": "GPT2Tokenizer" if self.own and "eos_token" in self.roles else "PreTrainedTokenizerFast",
            **self.roles,
        }
        texts: dict[str, str | bytes] = {
            "tokenizer.json": json.dumps(self.definition(), ensure_ascii=False, indent=1) + "\n",
            "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        }
        if self.own and self.merges is not None:
            lines = ["#version: 0.2", *(" ".join(pair) for pair in self.merges)]
            texts |= {"vocab.json": json.dumps(self.vocab), "merges.txt": "".join(f"{line}\n" for line in lines)}
        return texts | self.kept
