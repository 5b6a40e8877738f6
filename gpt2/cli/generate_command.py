"""``gpt2 generate``: continue a prompt, printed token by token."""

import argparse
import codecs
import json
import sys
import time

from gpt2.cli.common import Status, add_model, say, seed, write_result
from gpt2.errors import InputError

HELP = "continue a prompt, streamed to stdout"
EXAMPLES = """\
  gpt2 generate --prompt 'ROMEO:'                       the embedded model
  gpt2 generate --prompt 'ROMEO:' --temperature 0       greedy: always the likeliest token
  gpt2 generate gpt2 --prompt 'Once upon a time' --top-p 0.9 --seed 7
  gpt2 generate gpt2-xl --draft gpt2:int8 --prompt 'Once' --temperature 0    speculative decoding: the same text, faster
  echo 'JULIET:' | gpt2 generate --prompt - --max-new-tokens 200"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--prompt", default="\n", metavar="TEXT", help="text to continue; - reads stdin (default: a new line)")
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0 is greedy (default: %(default)s)")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample among the K likeliest tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="sample among the likeliest tokens that reach probability P")
    parser.add_argument("--seed", type=seed, help="seeds the sampling, so that it can be repeated")
    draft = "speculative decoding: a smaller model of the same vocabulary that proposes tokens for the large one to check"
    parser.add_argument("--draft", metavar="MODEL", help=draft)


def run(args: argparse.Namespace) -> int:
    if args.max_new_tokens < 0:
        raise InputError(f"--max-new-tokens {args.max_new_tokens}: give 0 or more")
    with Status(f"loading {args.model}"):
        import torch

        from gpt2.checkpoint.containers.mapped_file import require_whole_files
        from gpt2.checkpoint.loading import load, load_tokenizer, require_vocabulary
        from gpt2.generation import check_draft, stream
        from gpt2.sampling import Sampling

        Sampling(args.temperature, args.top_k, args.top_p)  # refuse bad settings before loading

        tokenizer = load_tokenizer(args.model, revision=args.revision, offline=args.offline)
        model = load(args.model, revision=args.revision, offline=args.offline)
        require_vocabulary(tokenizer, model.config, args.model)
        draft = None if args.draft is None else load(args.draft, offline=args.offline)
    text = _read_stdin() if args.prompt == "-" else args.prompt
    ids = tokenizer.encode(text)
    if not ids:
        raise InputError("--prompt is empty; give at least one character, such as a new line")
    prompt = torch.tensor([ids], dtype=torch.long)
    if draft is not None:
        check_draft(draft, model, prompt)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def show(text: str, end: str = "") -> None:
        if args.json != "-":
            say(text, end)

    show(text)
    new, started = [], time.perf_counter()
    settings = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p, "seed": args.seed}
    require_whole_files()
    for chosen in stream(model, prompt, args.max_new_tokens, **settings, draft=draft):
        require_whole_files()
        token = int(chosen)
        if token == tokenizer.eot:
            break
        new.append(token)
        show(decoder.decode(tokenizer.token_bytes(token)))
    seconds = time.perf_counter() - started
    show(decoder.decode(b"", final=True), "\n")
    body = {
        "model": args.model,
        "draft": args.draft,
        "prompt": text,
        "text": tokenizer.decode(new),
        "prompt_ids": ids,
        "ids": new,
    }
    speed = f"{len(new)} tokens in {seconds:.2f} s, {len(new) / max(seconds, 1e-9):.0f} a second"
    write_result(
        args.json, lambda: json.dumps({**body, **settings, "seconds": seconds}, indent=2), lambda: print(speed, file=sys.stderr)
    )
    return 0


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"--prompt -: stdin is not UTF-8 (byte {error.start}); convert it first") from None
