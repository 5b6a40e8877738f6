"""Hold every repository of a list against transformers: `verify --quick`, ten greedy tokens, and the ids of ten texts.

    python tools/verify_repositories.py LIST --out FILE.jsonl --max-bytes 2e9 --timeout 300

LIST is a text file with one ``org/name[@revision]`` a line; # begins a comment. Each repository runs in a process of its own. It
becomes a line of JSON in FILE.jsonl, whole or not at all: the verdict with its reason, whether the greedy tokens and the ids are
transformers' own (null: not compared), seconds. Lines that are there are not run again, so a run may be ended at any time and
started again; a repository for which the Hub gave no answer has no line. Downloads go to a folder beside FILE.jsonl, and are
deleted after each repository; --max-bytes is held against the Hub's listing before (the base of an adapter does not count). On
stdout, a table in Markdown. Exit code: 0, 1 if a verdict is different or imprecise, 2 for bad input.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gpt2.checkpoint.hub import BUSY, choose, explained
from gpt2.checkpoint.names import REPOSITORY, ModelName
from gpt2.errors import InputError, printable

VERDICTS = ("equal", "different", "imprecise", "refused", "too large", "timed out")
HEAVY = ["gpt2.parity.run", "gpt2.generation", "transformers.models.gpt2.modeling_gpt2", "transformers.models.auto"]
NEW_TOKENS = 10
SPECIAL = "the end<|endoftext|>of it </s> [SEP] <s>x <pad> [PAD] <extra_id_9>"  # the tenth text; the others are verify's


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("list", type=Path, metavar="LIST", help="a text file with one org/name[@revision] a line")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl", help="where the lines go, and are looked for")
    parser.add_argument("--max-bytes", type=float, default=4e9, help="skip larger downloads (default: %(default).0e)")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds of one repository (default: %(default)g)")
    options = parser.parse_args()
    try:
        names, lines = repositories(options.list), finished(options.out)
        done = {line["repository"] for line in lines}
        lines += run([name for name in names if name not in done], options.out, options.max_bytes, options.timeout)
    except (InputError, OSError, UnicodeError) as error:
        print(f"verify_repositories: {error}", file=sys.stderr)
        return 2
    print(table(lines := [line for line in lines if line["repository"] in names]))
    return int(any(line["verdict"] in VERDICTS[1:3] for line in lines))


def repositories(path: Path) -> list[str]:
    """Return the names of a list, each once. Raises InputError: a line is not one."""
    names = [name for line in path.read_text(encoding="utf-8").splitlines() if (name := line.partition("#")[0].strip())]
    if odd := [printable(name, one_line=True) for name in names if not REPOSITORY.fullmatch(name.partition("@")[0])]:
        raise InputError(f"{path}: {odd[0]!r} is not org/name[@revision]; correct the line")
    return list(dict.fromkeys(names))


def finished(path: Path) -> list[dict[str, Any]]:
    """Return the lines of an earlier run; the beginning of a line that was never finished is cut off."""
    content = path.read_bytes() if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    try:
        lines = {line["repository"]: line for line in map(json.loads, whole.splitlines()) if VERDICTS.index(line["verdict"]) >= 0}
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path} has other lines than this script's; choose another file for --out") from None
    if whole != content:
        os.truncate(path, len(whole))
    return list(lines.values())


def run(names: list[str], out: Path, max_bytes: float, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield the line of each repository after it was written."""
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.absolute().parent) as folder:
        os.environ |= {"HF_HUB_CACHE": folder, "TRANSFORMERS_VERBOSITY": "error"}  # read by the processes
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(HEAVY)  # imported once, by the process whose forks examine the repositories
        for number, name in enumerate(names, 1):
            line = {"repository": name, "verdict": "timed out", "reason": f"not finished in {seconds:g} s"}
            line |= dict.fromkeys(("revision", "greedy", "ids"))
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=report, args=(send, name, max_bytes, folder))
            process.start()
            started = time.monotonic()  # the first one has waited for the imports
            send.close()
            try:
                while line["verdict"] == "timed out" and receive.poll(max(0.0, started + seconds - time.monotonic())):
                    line |= json.loads(receive.recv_bytes())
            except EOFError:
                process.join()
                line |= {"verdict": "refused", "reason": f"its process ended with status {process.exitcode}; is memory short?"}
            finally:
                process.kill()
                process.join()
                for path in Path(folder).iterdir():
                    shutil.rmtree(path, ignore_errors=True)
            line["seconds"] = round(time.monotonic() - started, 1)
            print(f"{number}/{len(names)} {name}: {line['verdict']}, {line['seconds']} s {line['reason']}", file=sys.stderr)
            if line["verdict"] in VERDICTS:
                with out.open("ab", buffering=0) as file:
                    file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
                yield line


def report(send: Connection, name: str, max_bytes: float, folder: str) -> None:
    """In a process of its own: send what is found of a repository as JSON, the verdict last."""
    os.chdir(folder)  # where no folder can be taken for a repository
    try:
        for found in examine(name, max_bytes):
            send.send_bytes(json.dumps(found).encode())
    except Exception as error:
        from huggingface_hub.errors import HfHubHTTPError, HTTPError

        cause, kind = error.__cause__, "" if isinstance(error, InputError) else f"unforeseen {type(error).__name__}: "
        final = isinstance(cause, HfHubHTTPError) and cause.response.status_code not in BUSY
        verdict = "no answer" if isinstance(cause, HTTPError) and not final else "refused"
        reason = re.sub(rf"{re.escape(folder)}/\S*/[0-9a-f]{{40}}", name, " ".join(f"{kind}{error}".split()))
        send.send_bytes(json.dumps({"verdict": verdict, "reason": printable(reason, one_line=True)[:500]}).encode())


def examine(name: str, max_bytes: float) -> Iterator[dict[str, Any]]:
    """Yield the commit, then the verdict. Raises InputError: the repository cannot be opened."""
    repo, _, revision = name.partition("@")
    with explained(repo, revision or "main"):
        from huggingface_hub import HfApi

        info = HfApi().model_info(repo, revision=revision or "main", files_metadata=True)
        yield {"revision": info.sha}
    files = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    size = sum(files[file] for file in choose(repo, files))
    reason = f"{size:,} bytes to download, more than {max_bytes:,.0f}"
    yield {"verdict": "too large", "reason": reason} if size > max_bytes else judge(f"{repo}@{info.sha}")


def judge(name: str) -> dict[str, Any]:
    """Return the verdict on a model by name. Raises InputError: it cannot be opened."""
    from gpt2.parity.run import verify

    found = verify(name, quick=True)
    greedy, ids = texts_and_ids(name)
    reasons = [f"first at {point.name}: {point.amount}" for point in [found.imprecise or found.first_divergence] if point]
    reasons += ["other greedy tokens"] * (greedy is False) + ["other ids"] * (ids is False)
    verdict = "imprecise" if found.verdict == "imprecise" else "different" if reasons or not found.ok else "equal"
    reasons = reasons or [check.skipped for check in found.checks if check.id == "tokens" and check.skipped]
    return {"verdict": verdict, "greedy": greedy, "ids": ids, "reason": "; ".join(reasons)}


def texts_and_ids(name: str) -> tuple[bool, bool | None]:
    """Return whether ten greedy tokens and the ids of the texts are transformers' own; None: no tokenizer."""
    import torch
    from transformers import AutoTokenizer, GenerationConfig

    from gpt2 import generation
    from gpt2.checkpoint.checkpoint import open_checkpoint
    from gpt2.parity.checks import SAMPLES
    from gpt2.parity.reference import directory, load_reference

    checkpoint = open_checkpoint(ModelName.parse(name))
    tokenizer, config, prompt, same, stop = checkpoint.own_tokenizer(), checkpoint.config, [0], None, None
    with directory(checkpoint) as folder:
        model = load_reference(folder, torch.float32)
        settings = GenerationConfig(eos_token_id=model.generation_config.eos_token_id, pad_token_id=0, do_sample=False)
        if tokenizer is not None:
            theirs, stop = AutoTokenizer.from_pretrained(folder, local_files_only=True), generation.StopText(tokenizer)
            texts = (*SAMPLES[:9], SPECIAL)
            plain = [theirs(text, add_special_tokens=False)["input_ids"] for text in texts]
            same = plain == [tokenizer.encode(text, special=True) for text in texts]
            same &= [theirs(t)["input_ids"] for t in texts] == [tokenizer.encode_prompt(t, special=True) for t in texts]
            prompt = theirs(SAMPLES[0])["input_ids"][: config.n_positions - NEW_TOKENS]
            prompt = [i for i in prompt if i < config.vocab_size] or [0]
            settings.suppress_tokens = sorted(set(range(config.vocab_size)) - set(theirs.get_vocab().values())) or None
            settings.eos_token_id = theirs.eos_token_id if settings.eos_token_id is None else settings.eos_token_id
        ours = generation.generate(checkpoint.load(torch.float32), prompt, NEW_TOKENS, temperature=0, stop=stop)
        text, model.generation_config = torch.tensor([prompt]), settings
        expected = model.generate(text, attention_mask=torch.ones_like(text), max_new_tokens=NEW_TOKENS)
    return ours == expected[0].tolist(), same


def table(lines: list[dict[str, Any]]) -> str:
    """Return the counts by verdict in Markdown, and the reasons of all that is not equal, without the repositories' names."""
    counts = Counter(VERDICTS.index(line["verdict"]) for line in lines)
    rows = [f"| {VERDICTS[verdict]} | {count} | |" for verdict, count in sorted(counts.items())]
    why: dict[tuple[int, str], list[str]] = {}
    for line in [line for line in lines if line["verdict"] != "equal"]:
        name = re.escape(line["repository"].partition("@")[0])
        reason = re.sub(rf"(\S*/)?{name}[/@:]?\S*", "…", line["reason"]).replace("|", r"\|")
        why.setdefault((VERDICTS.index(line["verdict"]), reason), []).append(line["repository"])
    for (verdict, reason), names in sorted(why.items()):
        rows.append(f"| {VERDICTS[verdict]}: {reason} | {len(names)} | {names[0]}{' and more' * (len(names) > 1)} |")
    return "\n".join(["| verdict | repositories | such as |", "| --- | --- | --- |", *rows])


if __name__ == "__main__":
    sys.exit(main())
