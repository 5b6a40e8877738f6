"""A server on loopback that answers as OpenAI's completions API does, from one of our models; it can be made wrong on purpose."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import Tensor

from gpt2.data import Tokenizer
from gpt2.model import GPT2


@dataclass
class Standin:
    """What the server does; each field after the first two makes it wrong, or unwilling, in one way."""

    model: GPT2
    tokenizer: Tokenizer
    front: list[int] = field(default_factory=list)  # ids put in front of the prompt
    context: int | None = None  # it predicts from this many tokens at most
    temperature: float = 1.0  # applied to the log-probabilities
    late: bool = False  # it returns each place's row for the place before
    renormalise: bool = False  # over the tokens that it shows
    digits: int = 5  # after the point
    echo: bool = True  # whether it scores a prompt
    llama_server: bool = False  # without echo, it answers as llama.cpp's llama-server does
    busy: int = 0  # requests that it answers with 429 first
    key: str | None = None  # that it asks for
    later: GPT2 | None = None  # the model of all requests but the first
    reports: str | None = None  # the model's name in its answers
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)

    @torch.no_grad()
    def rows(self, ids: list[int]) -> Tensor:
        """Log-probabilities (T, V) after each of the ids."""
        vocab = self.tokenizer.n_vocab
        model = self.model if self.later is None or len(self.requests) < 2 else self.later
        if self.context is None:
            logits = model(torch.tensor([self.front + ids]))[0, len(self.front) :]
        else:
            parts = [ids[max(0, end - self.context) : end] for end in range(1, len(ids) + 1)]
            logits = torch.stack([self.model(torch.tensor([part]))[0, -1] for part in parts])
        logp = (logits[:, :vocab].double() / self.temperature).log_softmax(-1)
        return torch.cat((logp[1:], logp[-1:])) if self.late else logp

    def shown(self, row: Tensor, k: int, *also: int) -> dict[str, float]:
        values, ids = row.topk(k)
        values = values.log_softmax(-1) if self.renormalise else values
        pairs = dict(zip(ids.tolist(), values.tolist(), strict=True)) | {index: row[index].item() for index in also}
        return {self.text(index): round(value, self.digits) for index, value in pairs.items()}

    def text(self, index: int) -> str:
        return self.tokenizer.token_bytes(index).decode("utf-8", errors="ignore")

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = self.tokenizer.encode(body["prompt"])
        rows, k = self.rows(ids), body["logprobs"]
        chosen = int(rows[-1].argmax())
        texts, values, top = [self.text(chosen)], [rows[-1, chosen].item()], [self.shown(rows[-1], k)]
        if body.get("echo"):
            texts = [self.text(index) for index in ids] + texts
            values = [None, *(round(rows[at, index].item(), self.digits) for at, index in enumerate(ids[1:])), *values]
            top = [None, *(self.shown(rows[at], k, index) for at, index in enumerate(ids[1:])), *top]
        logprobs: dict[str, Any] = {"tokens": texts, "token_logprobs": values, "top_logprobs": top, "text_offset": []}
        if self.llama_server:
            listed = [{"id": 0, "token": text, "bytes": [], "logprob": value} for text, value in top[0].items()]
            logprobs = {"content": [{**listed[0], "top_logprobs": listed}]}
        choice = {"text": "".join(texts), "index": 0, "logprobs": logprobs, "finish_reason": "length"}
        named = {"model": self.reports} if self.reports else {}
        usage = {"prompt_tokens": len(self.front) + len(ids)}
        return {"object": "text_completion", "choices": [choice], "usage": usage, **named}


@contextmanager
def completions(standin: Standin) -> Iterator[str]:
    """Serve on loopback; yields the address that ends in /v1."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            standin.headers.append(self.headers.get("Authorization", ""))
            if standin.key is not None and standin.headers[-1] != f"Bearer {standin.key}":
                return self.reply(401, {"error": "no key"})
            if standin.busy:
                standin.busy -= 1
                return self.reply(429, {"error": "slow down"})
            if body.get("echo") and not standin.echo:
                return self.reply(500 if standin.llama_server else 400, {"error": "echo is not supported"})
            standin.requests.append(body)
            return self.reply(200, standin.answer(body))

        def reply(self, code: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(code)
            if code == 429:
                self.send_header("Retry-After", "0.01")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
