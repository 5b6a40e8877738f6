"""``gpt2 generate``: continue a prompt, printed token by token."""

from __future__ import annotations

import argparse
import codecs
import json
import sys
import time

from gpt2.cli.common import Commands, Status, add_command, add_json, add_model, say, seed, write_json
from gpt2.errors import InputError

EXAMPLES = """\
  gpt2 generate --prompt 'ROMEO:'                       the embedded model
  gpt2 generate --prompt 'ROMEO:' --temperature 0       greedy: always the likeliest token
  gpt2 generate gpt2 --prompt 'Once upon a time' --top-p 0.9 --seed 7
  gpt2 generate gpt2-xl --draft gpt2:int8 --prompt 'Once' --temperature 0    speculative decoding: the same text, faster
  echo 'JULIET:' | gpt2 generate --prompt - --max-new-tokens 200"""


def add(commands: Commands) -> None:
    parser = add_command(commands, "generate", "continue a prompt, streamed to stdout", EXAMPLES)
    add_model(parser)
    parser.add_argument("--prompt", default="\n", metavar="TEXT", help="text to continue; - reads stdin (default: a new line)")
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0 is greedy (default: %(default)s)")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample among the K likeliest tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="sample among the likeliest tokens that reach probability P")
    parser.add_argument("--seed", type=seed, help="seeds the sampling, so that it can be repeated")
    parser.add_argument(
        "--draft",
        metavar="MODEL",
        help="speculative decoding: a smaller model of the same vocabulary that proposes tokens for the large one to check",
    )
    add_json(parser)
    parser.set_defaults(run=run)


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
    quiet, decoder = args.json == "-", codecs.getincrementaldecoder("utf-8")("replace")
    new, started = [], time.perf_counter()
    if not quiet:
        say(text, end="")
    settings = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p, "seed": args.seed}
    require_whole_files()
    for chosen in stream(model, prompt, args.max_new_tokens, **settings, draft=draft):
        require_whole_files()
        token = int(chosen)
        if token == tokenizer.eot:
            break
        new.append(token)
        if not quiet:
            say(decoder.decode(tokenizer.token_bytes(token)), end="")
    seconds = time.perf_counter() - started
    if not quiet:
        say(decoder.decode(b"", final=True))
        print(f"{len(new)} tokens in {seconds:.2f} s, {len(new) / max(seconds, 1e-9):.0f} a second", file=sys.stderr)
    if args.json:
        body = {
            "model": args.model,
            "draft": args.draft,
            "prompt": text,
            "text": tokenizer.decode(new),
            "prompt_ids": ids,
            "ids": new,
            **settings,
        }
        write_json(args.json, json.dumps({**body, "seconds": seconds}, indent=2))
    return 0


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"--prompt -: stdin is not UTF-8 (byte {error.start}); convert it first") from None
