"""``gpt2 generate``: continue a prompt, printed token by token."""

import argparse
import codecs
import json
import sys
import time
from dataclasses import asdict

from gpt2.cli.common import Status, add_model, say, seed, write_result
from gpt2.errors import InputError

HELP = "continue a prompt, streamed to stdout"
EXAMPLES = """\
  gpt2 generate --prompt 'ROMEO:'                       the embedded model
  gpt2 generate --prompt 'ROMEO:' --temperature 0       greedy: always the likeliest token
  gpt2 generate gpt2 --prompt 'Once upon a time' --top-p 0.9 --seed 7
  gpt2 generate gpt2-xl --draft gpt2:int8 --prompt 'Once' --temperature 0    speculative decoding: the same text, faster
  gpt2 generate --prompt 'ROMEO:' --stop ROMEO --samples 3      three continuations at once, each to the next ROMEO
  echo 'JULIET:' | gpt2 generate --prompt - --max-new-tokens 200"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--prompt", default="\n", metavar="TEXT", help="text to continue; - reads stdin (default: a new line)")
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0 is greedy (default: %(default)s)")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample among the K likeliest tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="sample among the likeliest tokens that reach probability P")
    parser.add_argument("--min-p", type=float, metavar="P", help="drop tokens less likely than P times the likeliest")
    penalty = "above 1, tokens of the text so far become less likely (default: %(default)s)"
    parser.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help=penalty)
    stop = "end with the token that completes TEXT; may be repeated (the end-of-text token always ends)"
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help=stop)
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="continue the prompt N times, in one batch")
    parser.add_argument("--seed", type=seed, help="seeds the sampling, so that it can be repeated")
    draft = "speculative decoding: a smaller model of the same vocabulary that proposes tokens for the large one to check"
    parser.add_argument("--draft", metavar="MODEL", help=draft)


def run(args: argparse.Namespace) -> int:
    if args.max_new_tokens < 0:
        raise InputError(f"--max-new-tokens {args.max_new_tokens}: give 0 or more")
    if args.samples < 1:
        raise InputError(f"--samples {args.samples}: give 1 or more")
    with Status(f"loading {args.model}"):
        import torch

        from gpt2.checkpoint.containers.mapped_file import require_whole_files
        from gpt2.checkpoint.loading import load, load_tokenizer, require_vocabulary
        from gpt2.generation import Ending, StopText, check_draft, stream
        from gpt2.sampling import Sampling

        sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p, args.repetition_penalty)  # before loading

        tokenizer = load_tokenizer(args.model, revision=args.revision, offline=args.offline)
        model = load(args.model, revision=args.revision, offline=args.offline)
        require_vocabulary(tokenizer, model.config, args.model)
        draft = None if args.draft is None else load(args.draft, offline=args.offline)
    text = _read_stdin() if args.prompt == "-" else args.prompt
    ids = tokenizer.encode(text)
    if not ids:
        raise InputError("--prompt is empty; give at least one character, such as a new line")
    stop = StopText(tokenizer, tuple(args.stop))
    prompt = torch.tensor([ids] * args.samples, dtype=torch.long)
    if draft is not None:
        check_draft(draft, model, prompt)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def show(text: str, end: str = "") -> None:
        if args.json != "-":
            say(text, end)

    single = args.samples == 1  # only one text can be shown while it is made
    if single:
        show(text)
    ends = [Ending(stop) for _ in prompt]
    rows: list[list[int]] = [[] for _ in prompt]
    settings = {**asdict(sampling), "seed": args.seed}
    started = time.perf_counter()
    require_whole_files()
    for chosen in stream(model, prompt, args.max_new_tokens, **settings, draft=draft):
        require_whole_files()
        for token, end, new in zip(chosen.tolist(), ends, rows, strict=True):
            if end.ended:
                continue
            end.reached(token)
            if token != tokenizer.eot:
                new.append(token)
                if single:
                    show(decoder.decode(tokenizer.token_bytes(token)))
        if all(end.ended for end in ends):
            break
    seconds = time.perf_counter() - started
    texts = [tokenizer.decode(new) for new in rows]
    if single:
        show(decoder.decode(b"", final=True), "\n")
    else:
        for number, sample in enumerate(texts, 1):
            show(f"--- {number}\n{text}{sample}", "\n")
    body = {
        "model": args.model,
        "draft": args.draft,
        "prompt": text,
        "text": texts[0],
        "prompt_ids": ids,
        "ids": rows[0],
        "samples": [{"text": new, "ids": row} for new, row in zip(texts, rows, strict=True)],
    }
    count = sum(map(len, rows))
    speed = f"{count} tokens in {seconds:.2f} s, {count / max(seconds, 1e-9):.0f} a second"
    write_result(
        args.json,
        lambda: json.dumps({**body, **settings, "stop": args.stop, "seconds": seconds}, indent=2),
        lambda: print(speed, file=sys.stderr),
    )
    return 0


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"--prompt -: stdin is not UTF-8 (byte {error.start}); convert it first") from None
