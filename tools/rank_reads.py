"""Measure what each rank reads of a token file: bytes from the disk and pages of its windows, at 1, 2 and 4 ranks.

    python tools/rank_reads.py [--tokens 100000000] [--windows 4096]

The kernel is asked to drop the file from its cache before each job; bytes are those of /proc/self/io. Each rank opens the file as
in training, then reads its windows of as many steps. Linux, and a file system with a disk under it. Ends with one JSON line.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

CONTEXT, BATCH = 1024, 64


def one_rank(folder: Path, rank: int, ranks: int, windows: int, first: bool) -> dict[str, int]:
    from gpt2.data import token_files
    from gpt2.data.batches import batch

    begin = read_bytes()
    train, val = token_files.read(folder, 1 << 16, check=first)
    if first:
        token_files.fingerprint(train, val)
    opened = read_bytes()
    for step in range(windows // BATCH):
        batch(train, CONTEXT, BATCH, seed=1, step=step, rank=rank, ranks=ranks)
    return {"rank": rank, "opening": opened - begin, "windows": read_bytes() - opened}


def read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split("read_bytes: ")[1].split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--windows", type=int, default=4096)
    parser.add_argument("--rank", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        print(json.dumps(one_rank(args.folder, *args.rank, args.windows, args.rank[0] == 0)))
        return
    table = {}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for name, count in (("train.bin", args.tokens), ("val.bin", 10_000)):
            np.random.default_rng(0).integers(0, 50257, count, dtype=np.uint16).tofile(Path(folder, name))
        for ranks in (1, 2, 4):
            drop(Path(folder, "train.bin"))
            words = [sys.executable, __file__, "--folder", folder, "--windows", str(args.windows), "--rank"]
            jobs = [subprocess.Popen([*words, str(n), str(ranks)], stdout=subprocess.PIPE, text=True) for n in range(ranks)]
            table[ranks] = [json.loads(job.communicate()[0]) for job in jobs]
            for row in table[ranks]:
                print(f"{ranks} ranks, rank {row['rank']}: opening {row['opening']:,} bytes, windows {row['windows']:,} bytes")
    print(json.dumps({"tokens": args.tokens, "windows": args.windows, "context": CONTEXT, "ranks": table}))


def drop(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
