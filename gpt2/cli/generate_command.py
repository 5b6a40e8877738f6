"""``gpt2 generate``: continue a prompt, printed token by token."""

import codecs
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gpt2.cli.common import ModelSettings, finish, note
from gpt2.data.files import decoded
from gpt2.errors import InputError, require_memory
from gpt2.options import device_option, option, pick, seed_option
from gpt2.pages.streams import Status, nobody_reads, say

if TYPE_CHECKING:
    from gpt2.data import Tokenizer
    from gpt2.data.chat import ChatFormat
    from gpt2.decoder import Decoder
    from gpt2.model import GPT2
    from gpt2.sampling import Sampling

EXAMPLES = """\
  gpt2 generate --prompt 'ROMEO:'                       the embedded model
  gpt2 generate --prompt 'ROMEO:' --temperature 0       greedy: always the likeliest token
  gpt2 generate gpt2 --prompt 'Once upon a time' --top-p 0.9 --seed 7
  gpt2 generate gpt2-xl --draft gpt2:int8 --prompt 'Once' --temperature 0    speculative decoding: the same text, faster
  gpt2 generate --prompt 'ROMEO:' --stop ROMEO --samples 3      three continuations at once, each to the next ROMEO
  gpt2 generate --prompt 'JULIET:' --min-p 0.05 --temperature 1.2    only tokens at least 0.05 times as likely as the likeliest
  gpt2 generate out/finetune-chat/best --chat           questions on the terminal, until Ctrl-D
  gpt2 generate out/finetune-chat/best --chat --prompt 'Who is it?' --prompt 'And now?'    two turns
  echo 'JULIET:' | gpt2 generate --prompt - --max-new-tokens 200"""
PROMPT = "text to continue; - reads stdin (default: a new line). With --chat a question, and may be repeated"
CHAT = "answer questions in the format that the model was fine-tuned on; without --prompt, each line of stdin is one"
SPECIAL = "read the text of a special token in the prompt, such as <|endoftext|>, as that token, and show those written"
STOP = "end with the token that completes TEXT; may be repeated (the end-of-text tokens of the model always end)"
DRAFT = "speculative decoding: a smaller model of the same vocabulary that proposes tokens for the large one to check"


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(ModelSettings):
    device: str = device_option()
    prompt: tuple[str, ...] = option(PROMPT, "TEXT", ())
    no_prompt: bool = option("show only what the model writes, without the prompt before it", default=False)
    special: bool = option(SPECIAL, default=False)
    chat: bool = option(CHAT, default=False)
    max_new_tokens: int = option("", "N", 200, least=0)
    temperature: float = option("0 is greedy", "T", 0.8)
    top_k: int | None = option("sample among the K likeliest tokens", "K")
    top_p: float | None = option("sample among the likeliest tokens that reach probability P", "P")
    min_p: float | None = option("drop tokens less likely than P times the likeliest", "P")
    repetition_penalty: float = option("above 1, tokens of the text so far become less likely", "X", 1.0)
    stop: tuple[str, ...] = option(STOP, "TEXT", ())
    samples: int = option("continue the prompt N times, in one batch", "N", 1, least=1)
    seed: int | None = seed_option("seeds the sampling, so that it can be repeated", default=None)
    draft: str | None = option(DRAFT, "MODEL")
    # --chat gives one answer to each question, which is ordinary text
    WITHOUT_EFFECT: ClassVar = {"chat": ("samples", "special"), "draft": ("repetition_penalty",)}


def run(args: GenerateSettings) -> int:
    if not args.chat and len(args.prompt) > 1:
        raise InputError("--prompt is given twice; give one text to continue, or several questions with --chat")
    with Status(f"loading {args.model}"):
        import torch

        from gpt2.checkpoint.loading import load, load_tokenizer, require_intact, rows_note
        from gpt2.decoder import Decoder
        from gpt2.generation import check_draft
        from gpt2.sampling import Sampling

        sampling = Sampling(**pick(args, "temperature", "top_k", "top_p", "min_p", "repetition_penalty"))  # before loading
        named, where = pick(args, "revision", "offline"), pick(args, "device", "offline")
        tokenizer = load_tokenizer(args.model, **named)
        chat = None if tokenizer.eot is None else tokenizer.chat
        if args.chat and chat is None:
            remedy = f"fine-tune it on questions and answers (gpt2 train finetune-chat --init {args.model}), or leave --chat out"
            raise InputError(f"{args.model} knows no chat format; {remedy}")
        model = load(args.model, revision=args.revision, **where)
        draft = None if args.draft is None else load(args.draft, **where)
        if draft is not None:
            check_draft(draft, model, torch.zeros(args.samples, 1))
    remarks = [require_intact(each, each.name).outlier for each in (model, draft) if each is not None]
    remarks += [f"{each}; a prompt with one is refused" for each in rows_note(tokenizer, model.config, args.model)]
    if chat is not None and not args.chat:
        remarks.append(f"{args.model} was fine-tuned on questions and answers; --chat asks it in their format")
    for remark in filter(None, remarks):
        note(remark)
    writer = _Writer(args, tokenizer, Decoder(model), sampling, draft)
    started = time.perf_counter()
    if args.chat and chat is not None:
        body, count = _answer(_questions(args.prompt), writer, chat, model.config.n_positions // 2)
    else:
        body, count = _continue(_text(args.prompt[0] if args.prompt else "\n"), writer)
    seconds = time.perf_counter() - started
    body = pick(args, "model", "draft") | body | asdict(sampling) | pick(args, "seed", "stop") | {"seconds": seconds}
    if args.json != "-":
        print(f"{count} tokens in {seconds:.2f} s, {count / max(seconds, 1e-9):.0f} a second", file=sys.stderr)
    return finish(args, body, "")


class _Writer:
    """Continues ids, and prints the text as it comes unless stdout is for JSON."""

    def __init__(
        self, args: GenerateSettings, tokenizer: "Tokenizer", decoder: "Decoder", sampling: "Sampling", draft: "GPT2 | None"
    ) -> None:
        from gpt2.generation import StopText, rows_with_tokens

        self.args, self.tokenizer, self.decoder, self.sampling = args, tokenizer, decoder, sampling
        self.how: dict[str, Any] = {"seed": args.seed, "draft": draft, "rows": rows_with_tokens(tokenizer, decoder.model.config)}
        self.hidden = set() if args.special else set(tokenizer.special_tokens.values())
        self.stop = StopText(tokenizer, args.stop)

    def show(self, text: str, end: str = "") -> None:
        if self.args.json != "-":
            say(text, end)

    def text(self, ids: list[int]) -> str:
        """Return the text of new ids; special tokens are left out, as pipelines do, unless --special."""
        return self.tokenizer.decode([token for token in ids if token not in self.hidden])

    def __call__(self, ids: list[int], samples: int = 1) -> list[list[int]]:
        """Return the new ids of each sample, without the one that ends the text; print a single one."""
        import torch

        from gpt2.checkpoint.containers import require_whole_files
        from gpt2.checkpoint.loading import require_rows
        from gpt2.generation import Ending, stream

        config, wte = self.decoder.model.config, self.decoder.model.wte.weight
        require_rows(ids, self.tokenizer, config, "--prompt")
        if (dropped := len(ids) - (limit := config.n_positions)) > 0:
            note(f"the first {dropped:,} of {len(ids):,} tokens are dropped; the model reads {limit:,}")
        needed = samples * min(limit, len(ids) + self.args.max_new_tokens) * 2 * config.n_layer * config.n_embd * wte.itemsize
        require_memory(needed, f"{samples:,} samples: their keys and values", "take fewer, or --max-new-tokens")
        prompt = torch.tensor([ids] * samples, dtype=torch.long, device=wte.device)
        text = codecs.getincrementaldecoder("utf-8")("replace")
        ends: list[Ending] = [Ending(self.stop) for _ in prompt]
        rows: list[list[int]] = [[] for _ in prompt]
        require_whole_files()
        for chosen in stream(self.decoder, prompt, self.args.max_new_tokens, self.sampling, **self.how):
            require_whole_files()
            for token, end, new in zip(chosen.tolist(), ends, rows, strict=True):
                if end.ended:
                    continue
                end.reached(token)
                if token not in self.tokenizer.ends:
                    new.append(token)
                    if samples == 1 and token not in self.hidden:  # only one text can be shown while it is made
                        self.show(text.decode(self.tokenizer.token_bytes(token)))
            if all(end.ended for end in ends) or nobody_reads():
                break
        if samples == 1:
            self.show(text.decode(b"", final=True), "\n")
        return rows


def _continue(text: str, writer: _Writer) -> tuple[dict[str, Any], int]:
    """Continue one text; return what --json reports, and the number of new tokens."""
    special, samples = writer.args.special, writer.args.samples
    if not special and (found := [name for name in writer.tokenizer.special_tokens if name in text]):
        note(f"{found[0]} in the prompt is read as ordinary characters; --special reads it as the token")
    ids = writer.tokenizer.encode_prompt(text, special=special)
    if not ids:
        raise InputError("--prompt is empty; give at least one character, such as a new line")
    shown = "" if writer.args.no_prompt else text
    if samples == 1:
        writer.show(shown)
    rows = writer(ids, samples)
    texts = [writer.text(new) for new in rows]
    for number, sample in enumerate(texts if samples > 1 else (), 1):
        writer.show(f"--- {number}\n{shown}{sample}", "\n")
    body = {"prompt": text, "text": texts[0], "prompt_ids": ids, "ids": rows[0]}
    body["samples"] = [{"text": new, "ids": row} for new, row in zip(texts, rows, strict=True)]
    return body, sum(map(len, rows))


def _answer(questions: Iterable[str], writer: _Writer, chat: "ChatFormat", most: int) -> tuple[dict[str, Any], int]:
    """Answer each question after the turns before it, of which at most ``most`` tokens are read; return as :func:`_continue`."""
    turns: list[dict[str, Any]] = []
    for question in questions:
        ids = chat.conversation(writer.tokenizer, [(turn["prompt"], turn["ids"]) for turn in turns], question, most)
        if not ids:
            raise InputError("--prompt is empty, and the model's chat format has no text of its own; give a question")
        (new,) = writer(ids)
        turns.append({"prompt": question, "text": writer.text(new), "prompt_ids": ids, "ids": new})
    return {"turns": turns}, sum(len(turn["ids"]) for turn in turns)


def _questions(prompts: tuple[str, ...]) -> Iterator[str]:
    """Yield the questions of --prompt, or else each line of stdin that is not empty, until its end."""
    if prompts:
        yield from map(_text, prompts)
        return
    asks, line = sys.stdin.isatty(), b"\n"
    while line:
        if line.strip():
            yield decoded(line, "stdin").rstrip("\r\n")
        if asks:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.buffer.readline()
    if asks:
        print(file=sys.stderr)


def _text(prompt: str) -> str:
    return decoded(sys.stdin.buffer.read(), "--prompt -") if prompt == "-" else prompt
