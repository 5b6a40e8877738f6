"""Damaged inputs of every surface, through our readers: `python -m support.surfaces --count 20000`, from tests/.

One generator of damages (:mod:`support.fuzz`), and a table of surfaces. Each input must be read, or be refused by an InputError
in one printable line, within SECONDS and without MEMORY more. Weight files have more such tests (`KIND_fuzz.py`).
"""

import argparse
import contextlib
import io
import json
import random
import resource
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from gpt2.checkpoint.checkpoint import open_path
from gpt2.checkpoint.loading import load_path
from gpt2.checkpoint.peft_files import read_adapter
from gpt2.cli.main import main as command
from gpt2.config import GPT2Config
from gpt2.data import from_directory
from gpt2.data.documents import documents
from gpt2.errors import InputError
from gpt2.measure.dumps import read as read_dump
from gpt2.measure.npy import read_npy
from gpt2.traces.batch import read_ids
from gpt2.train.recipe import read as read_recipe
from gpt2.train.runs import read as read_runs
from gpt2.train.state import Progress
from support.commands import ASSET
from support.fuzz import JUNK, changed_bytes, changed_json
from support.hf_layouts import official

SECONDS, MEMORY = 30, 2_000_000  # of one input: seconds, and kB that the process grows by
SMALL = GPT2Config(vocab_size=7, n_positions=8, n_embd=4, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
Read = Callable[[Path], object]


def damaged(pick: random.Random, content: bytes) -> bytes:
    """Bytes, or, half the time where they are JSON, another value somewhere in it."""
    if content[:1] in b"{[" and pick.random() < 0.5:
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(content)
            for _ in range(pick.choice([1, 1, 2])):
                value = changed_json(value, pick)
            return json.dumps(value).encode(errors="surrogatepass")
    return changed_bytes(pick, content, content)


def files(folder: Path) -> dict[str, tuple[Path, Read]]:
    """Return for each surface the file to damage, and how it is read."""
    pick = np.random.default_rng(0)
    ids, logits = np.array([[1, 2, 3]]), pick.normal(size=(1, 3, 7)).astype(np.float32)
    np.save(folder / "x.npy", logits)
    np.save(folder / "ids.npy", ids)
    np.savez(folder / "x.npz", ids=ids, logits=logits)
    np.savez_compressed(folder / "y.npz", ids=ids, logits=logits)
    save_file({"ids": torch.tensor(ids), "logits": torch.tensor(logits)}, folder / "x.safetensors")
    (folder / "ids.txt").write_text("1 2 3\n4 5 6\n")
    official(folder / "model", SMALL)
    shutil.copytree(ASSET, folder / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors"))
    adapter = folder / "adapter"
    adapter.mkdir()
    base = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True}
    (adapter / "adapter_config.json").write_text(json.dumps(base | {"base_model_name_or_path": str(folder / "model")}))
    key = "base_model.model.transformer.h.0.attn.c_attn.lora_{}.weight"
    save_file({key.format("A"): torch.ones(2, 4), key.format("B"): torch.ones(12, 2)}, adapter / "adapter_model.safetensors")
    rows = [{"step": step, "loss": 3.0, "val_loss": 3.0, "val_bits_per_byte": 2.0} for step in range(3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "progress.json").write_text(json.dumps({"step": 3, "best_loss": 2.0, "best_step": 1, "evals_since_best": 0}))
    (folder / "r.toml").write_text(
        "steps = 5\nbatch_size = 2\ndata.path = 'x.txt'\noptim = {lr = 1e-3}\nlora = {r = 2, alpha = 4}\n"
    )
    (folder / "t.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (folder / "t.csv").write_text('text,more\n"one",2\n')
    found: dict[str, tuple[Path, Read]] = {
        "npy": (folder / "x.npy", read_npy),
        "ids": (folder / "ids.npy", read_ids),
        "ids as text": (folder / "ids.txt", read_ids),
        "npz": (folder / "x.npz", lambda path: read_dump(path, SMALL)),
        "npz, compressed": (folder / "y.npz", lambda path: read_dump(path, SMALL)),
        "safetensors dump": (folder / "x.safetensors", lambda path: read_dump(path, SMALL)),
        "config": (folder / "model" / "config.json", lambda path: load_path(path.parent)),
        "weights": (folder / "model" / "model.safetensors", lambda path: load_path(path.parent)),
        "tokenizer": (folder / "tokenizer" / "tokenizer_config.json", lambda path: from_directory(path.parent).encode("a b")),
        "generation": (folder / "tokenizer" / "generation_config.json", lambda path: from_directory(path.parent).encode("a b")),
        "adapter": (adapter / "adapter_config.json", lambda path: read_adapter(path.parent)),
        "adapted": (adapter / "adapter_model.safetensors", lambda path: open_path(path.parent).load()),
        "metrics": (folder / "metrics.jsonl", lambda path: [run.warnings or run.best for run in read_runs([path.parent])]),
        "state": (folder / "progress.json", lambda path: state(path.parent)),
        "recipe": (folder / "r.toml", lambda path: read_recipe(str(path))),
        "jsonl": (folder / "t.jsonl", lambda path: list(documents([path], tally=Counter()))),
        "csv": (folder / "t.csv", lambda path: list(documents([path], tally=Counter()))),
    }
    with contextlib.suppress(ImportError):
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"text": ["one", "two", "one"] * 9}), folder / "t.parquet")
        found["parquet"] = (folder / "t.parquet", lambda path: list(documents([path], tally=Counter())))
    return found


def state(folder: Path) -> Progress:
    """Read a run's progress as a resumed run does, which says in one line what is wrong."""
    try:
        return Progress.read(folder)
    except ValueError as error:
        raise InputError(f"{folder}: cannot be resumed ({error}); start anew with --fresh") from None


def arguments(pick: random.Random) -> None:
    """Run a command whose options have nonsense for values; no file has these names."""
    options = ["--tokens", "--seed", "--top-k", "--temperature", "--set", "--ids", "--json", "--revision", "--device", "--nope"]
    names = ["info", "trace", "compare", "generate", "diagnose", "train", "export", "publish", "explore", "bench", "verify"]
    words = [pick.choice(names), *(str(pick.choice(JUNK)) for _ in range(pick.choice([0, 1, 1, 2])))]
    words += [word for _ in range(pick.choice([1, 2])) for word in (pick.choice(options), str(pick.choice(JUNK)))]
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            code = command([words[0], "/nowhere/x", *words[1:]])
        except SystemExit as end:
            code = end.code
    lines = said.getvalue().splitlines()
    assert code in (0, 1, 2), (code, words)
    assert not lines or lines[-1].isprintable(), lines[-1]


def check(read: Callable[[], object]) -> str:
    """Return how an input fell, or "": it was read, or refused in one line, in time and in little memory."""
    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        read()
    except InputError as error:
        if not str(error).isprintable() or len(str(error)) > 1500:
            return f"line {str(error)[:80]!r}"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:120]!r}"
    if time.monotonic() - begin > SECONDS:
        return "time"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return "" if grown < MEMORY else "memory"


def fuzz(count: int, seed: int, folder: Path) -> tuple[int, list[str]]:
    """Try ``count`` inputs over all surfaces; return how many were tried, and each that fell."""
    surfaces, fallen = files(folder), []
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name, (path, read) in surfaces.items():
        whole = path.read_bytes()
        assert not (how := check(partial(read, path))), f"{name}: {how}"  # the control: whole, it is read
        for number in range(count // (len(surfaces) + 1)):
            path.write_bytes(damaged(random.Random(f"{seed} {name} {number}"), whole))
            if how := check(partial(read, path)):
                fallen.append(f"{name} {number} of seed {seed}: {how}")
        path.write_bytes(whole)
    each = count // (len(surfaces) + 1)
    for number in range(each):
        if how := check(partial(arguments, random.Random(f"{seed} arguments {number}"))):
            fallen.append(f"arguments {number} of seed {seed}: {how}")
    return each * (len(surfaces) + 1), fallen


def main(argv: Any = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        tried, fallen = fuzz(args.count, args.seed, Path(folder))
    print(*fallen, f"{tried:,} tried, {tried - len(fallen):,} held", sep="\n")
    return int(bool(fallen))


if __name__ == "__main__":
    raise SystemExit(main())
