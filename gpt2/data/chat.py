"""The chat format of a model: how turns of question and answer become one text, and where the model keeps it.

A turn is ``before``, the question, ``after``, the answer, and the end-of-text token; turns follow each other. These are the
documents of a table whose ``data.prompt`` is the template ``before{question}after`` (:mod:`gpt2.data.documents`).
"""

import json
import os
import string
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, Self

from gpt2.data.files import read_json
from gpt2.errors import InputError

FILE = "chat.json"


class Reader(Protocol):
    """What a tokenizer does for a chat."""

    @property
    def eot(self) -> int | None: ...

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class ChatFormat:
    """The texts around a question."""

    before: str
    after: str

    @classmethod
    def of_template(cls, prompt: str) -> Self | None:
        """Return the format of a recipe's ``data.prompt``: a field's name or a template; None if it has not exactly one field."""
        if "{" not in prompt:
            return cls("", "") if prompt else None
        texts, fields = [""], 0
        for text, field, _, _ in string.Formatter().parse(prompt):
            texts[-1] += text
            if field is not None:
                texts.append("")
                fields += 1
        return cls(*texts) if fields == 1 else None

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """Return the format in a model's folder, or None. Raises InputError: its file is damaged."""
        file = directory / FILE
        if not os.path.lexists(file):
            return None
        match read_json(file):
            case {"before": str(before), "after": str(after)}:
                return cls(before, after)
        raise InputError(f'{file} holds no {{"before": "...", "after": "..."}}; it is damaged, save it again')

    def text(self) -> str:
        """Return the content of the file."""
        return json.dumps(asdict(self), ensure_ascii=False) + "\n"

    def question(self, tokenizer: Reader, question: str) -> list[int]:
        """Return the ids after which the model answers; encoded apart from the answer, as in training."""
        return tokenizer.encode(f"{self.before}{question}{self.after}")

    def conversation(self, tokenizer: Reader, turns: Sequence[tuple[str, list[int]]], question: str, most: int) -> list[int]:
        """Return the ids of earlier turns (question, ids of the answer) and of a question, at most ``most``.

        The oldest turns that do not fit are left out whole; of a question that is too long itself nothing is left out.
        """
        ids = self.question(tokenizer, question)
        for earlier, answer in reversed(turns):
            turn = [*self.question(tokenizer, earlier), *answer, *([] if tokenizer.eot is None else [tokenizer.eot])]
            if len(turn) + len(ids) > most:
                break
            ids = turn + ids
        return ids

    def jinja(self) -> str:
        """Return the same format as the template that transformers, vLLM and llama.cpp read (``chat_template``)."""
        before, after = (json.dumps(text, ensure_ascii=False) for text in (self.before, self.after))
        question, answer = f"{before} + message['content'] + {after}", "message['content'] + eos_token"
        parts = [f"{{% for message in messages %}}{{% if message['role'] == 'user' %}}{{{{ {question} }}}}"]
        parts += [f"{{% elif message['role'] == 'assistant' %}}{{{{ {answer} }}}}"]
        refused = "raise_exception('this model was trained on user and assistant alone, and knows no ' + message['role'])"
        return "".join([*parts, f"{{% else %}}{{{{ {refused} }}}}{{% endif %}}{{% endfor %}}"])
