"""Run our models in EleutherAI's lm-evaluation-harness: ``--model gpt2-toolkit --model_args pretrained=MODEL[,dtype=...]``.

Releases of lm_eval up to 0.4.13 know only their own models on the command line. With these, use lm_eval's command with our
model added:

    python -m gpt2.comparison.lm_eval_adapter --model gpt2-toolkit --model_args pretrained=shakespeare-mini --tasks ...

Later releases read this package's entry point ``lm_eval.models``, so ``lm_eval --model gpt2-toolkit`` works.

The protocol is that of its ``hf`` model (lm_eval/models/huggingface.py). Context and continuation are encoded as one text; a
text that is too long loses its beginning. Special tokens in a text are read as such. Rolling windows begin with the end-of-text
token and overlap by one. Generation ends at a stop sequence, end of text, or ``max_gen_toks``. Results differ only by rounding:
here log-probabilities are computed in at least float32, whatever the dtype.

Only lm_eval imports this module, so it imports lm_eval at its top.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from gpt2.checkpoint.checkpoint import open_checkpoint
from gpt2.checkpoint.names import DEFAULT, RUNS, ModelName
from gpt2.decoder import Decoder
from gpt2.errors import InputError
from gpt2.generation import stream
from gpt2.measure.last_words import score_targets

NAME = "gpt2-toolkit"
AUTO_BATCH = 16  # rows, for lm_eval's ``--batch_size auto``
TOP_K = 50  # transformers' default
IGNORED = ("attention_mask", "pad_token_id", "use_cache")  # options that do not change the generated text


class ToolkitLM(TemplateLM):
    """A :class:`gpt2.GPT2` with the methods that lm_eval calls.

    Args:
        pretrained: a model name as for :func:`gpt2.load`, as are ``dtype``, ``revision`` and ``offline``.
        device: where the model runs; the CPU if there is no GPU, as in lm_eval's ``hf``.
        max_length: tokens of context; default and maximum: the model's positions.
        prefix_token_id: the token before a text whose first token is scored; default: the tokenizer's end-of-text.

    Raises:
        InputError: no such model, no tokenizer for it, or a ``max_length`` or ``batch_size`` out of range.
    """

    def __init__(
        self,
        pretrained: str = DEFAULT,
        *,
        dtype: str | None = None,
        revision: str | None = None,
        offline: bool = False,
        device: str | None = None,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        prefix_token_id: int | None = None,
    ) -> None:
        super().__init__()
        if device is None or (device.startswith("cuda") and not torch.cuda.is_available()):  # lm_eval's default is cuda:0
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(device)
        dtype = None if dtype == "auto" else dtype  # lm_eval's "auto" is the stored dtype
        checkpoint = open_checkpoint(ModelName.parse(pretrained, RUNS, dtype=dtype, revision=revision), offline=offline)
        self.model, self.tokenizer = checkpoint.load(device=self._device), checkpoint.tokenizer()
        self.decoder = Decoder(self.model)
        self.revision = checkpoint.revision
        positions = self.model.config.n_positions
        if max_length is not None and not 1 <= max_length <= positions:
            raise InputError(f"max_length {max_length} is not within the model's 1 .. {positions} positions")
        self.max_length = max_length or positions
        if batch_size is None or str(batch_size).startswith("auto"):
            self.batch_size = max_batch_size or AUTO_BATCH
        else:
            self.batch_size = int(batch_size)
        if self.batch_size < 1:
            raise InputError(f"batch_size {self.batch_size}: give 1 or more, or auto")
        self._prefix = self.tokenizer.eot if prefix_token_id is None else prefix_token_id
        self._special = set(self.tokenizer.special_tokens.values())

    @property
    def eot_token_id(self) -> int | None:
        return self.tokenizer.eot

    @property
    def prefix_token_id(self) -> int:
        if self._prefix is None:
            raise InputError("this vocabulary has no end-of-text token to put before a text; give prefix_token_id=N")
        return self._prefix

    @property
    def max_gen_toks(self) -> int:
        """The default number of new tokens, as in lm_eval."""
        return 256

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.fingerprint

    def get_model_info(self) -> dict[str, Any]:
        """Return the model's entries in lm_eval's results, under the names that its ``hf`` uses."""
        return {
            "model_num_parameters": self.model.config.num_parameters(),
            "model_dtype": str(self.model.wte.weight.dtype),
            "model_revision": self.revision or "",
            "model_sha": self.revision or "",
        }

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Encode a text. No token is added, and ``<|endoftext|>`` in the text is read as the special token."""
        return self.tokenizer.encode(string, special=True)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Return each continuation's log-probability, and whether greedy decoding gives it."""
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        spans = []
        for _, context, continuation in requests:
            ids = [*(context or [self.prefix_token_id]), *continuation][-(self.max_length + 1) :]
            if len(continuation) >= len(ids):
                raise InputError(
                    f"a continuation of {len(continuation)} tokens leaves no room for its context; shorten the continuation"
                )
            spans.append((ids, len(continuation)))
        for batch in self._batches([len(ids) - 1 for ids, _ in spans], "loglikelihood", disable_tqdm):
            with torch.inference_mode():
                scores = score_targets(lambda ids: self.model(ids.to(self._device)), [spans[i] for i in batch])
            for i, (loss, greedy) in zip(batch, scores, strict=True):
                answers[i] = -loss, greedy
                if requests[i][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], answers[i])
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text; the prefix token predicts the first token."""
        windows, counts = [], []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            pairs = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            disjoint = [(None, *make_disjoint_window(pair)) for pair in pairs]
            windows += disjoint
            counts.append(len(disjoint))
        scored = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        totals = []
        for request, count in zip(requests, counts, strict=True):
            totals.append(sum(next(scored)[0] for _ in range(count)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate a text after each context, up to and without the first stop sequence."""
        generated = [""] * len(requests)
        by_settings: dict[str, list[int]] = {}  # requests of one batch have the same settings
        for i, request in enumerate(requests):
            by_settings.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(i)
        for group in by_settings.values():
            settings = requests[group[0]].args[1]
            contexts = [self.tok_encode(requests[i].args[0]) for i in group]
            for batch in self._batches([len(ids) for ids in contexts], "generate_until", disable_tqdm):
                texts = self._generate([contexts[j] for j in batch], settings)
                for j, text in zip(batch, texts, strict=True):
                    generated[group[j]] = text
                    self.cache_hook.add_partial("generate_until", requests[group[j]].args, text)
        return generated

    def _generate(self, contexts: list[list[int]], settings: dict[str, Any]) -> list[str]:
        options = normalize_gen_kwargs(settings, self.max_gen_toks)
        eos = None if self.tokenizer.eot is None else self.tokenizer.decode([self.tokenizer.eot])
        until = [term for term in handle_stop_sequences(options.pop("until"), eos=eos) if term]
        new = options.pop("max_gen_toks")
        room = self.max_length - new
        if room < 1:
            raise InputError(
                f"{new} new tokens leave no room for a prompt in {self.max_length}; "
                f"give --gen_kwargs max_gen_toks={self.max_length // 2}"
            )
        sampled = options.pop("do_sample")
        temperature = options.pop("temperature", 1.0) if sampled else 0.0
        top_k, top_p = options.pop("top_k", TOP_K), options.pop("top_p", None)
        if unknown := [key for key in options if key not in IGNORED]:
            raise InputError(f"generation option {unknown[0]!r} is not supported; use temperature, top_k or top_p")
        prompts = [torch.tensor(ids[-room:] or [self.prefix_token_id], device=self._device) for ids in contexts]
        prompt, mask = (
            pad_sequence(rows, batch_first=True, padding_side="left") for rows in (prompts, [*map(torch.ones_like, prompts)])
        )
        top_k, top_p = ((top_k or None), top_p) if sampled else (None, None)
        tokens = stream(self.decoder, prompt, new, temperature=temperature, top_k=top_k, top_p=top_p, attention_mask=mask)
        return [postprocess_generated_text(text, until, None) for text in self._until(tokens, until, len(contexts))]

    def _until(self, tokens: Iterator[Tensor], until: list[str], rows: int) -> Iterable[str]:
        """Return the generated text of each row; stop reading ``tokens`` when every row has ended."""
        ids: list[list[int]] = [[] for _ in range(rows)]
        texts, done = [""] * rows, [False] * rows
        for chosen in tokens:
            for row, token in enumerate(chosen.tolist()):
                if done[row]:
                    continue
                if token not in self._special:
                    ids[row].append(token)
                    texts[row] = self.tokenizer.decode(ids[row])
                done[row] = token in self.tokenizer.ends or any(term in texts[row] for term in until)
            if all(done):
                break
        return texts

    def _batches(self, lengths: list[int], kind: str, disable_tqdm: bool) -> Iterator[list[int]]:
        """Yield ``batch_size`` indices at a time, longest first, so that a lack of memory shows at once; show a progress bar."""
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        with tqdm(total=len(order), desc=f"Running {kind} requests", disable=disable_tqdm) as progress:
            for start in range(0, len(order), self.batch_size):
                batch = order[start : start + self.batch_size]
                yield batch
                progress.update(len(batch))


def register() -> None:
    """Register ``gpt2-toolkit`` with lm_eval in this process, for every release."""
    import lm_eval.models  # noqa: F401  registers lm_eval's own models first
    from lm_eval.api.registry import model_registry

    if NAME not in model_registry:
        model_registry.register(NAME, target="gpt2.comparison.lm_eval_adapter:ToolkitLM")


def main() -> None:
    """Run lm_eval's command with our model added."""
    from lm_eval.__main__ import cli_evaluate

    register()
    try:
        cli_evaluate()
    except InputError as error:
        print(f"gpt2: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
