"""The table of surfaces for `support/fuzz.py`: `python -m support.surfaces [--count 20000] [--seed N] [NAME ...]`, from tests/.

Each makes honest files in a folder, and says how they are damaged and read. Weight files that load must give the right tensors,
where that can be known. One line of JSON for each surface, then how many inputs were tried, and how many held.
"""

import argparse
import contextlib
import io
import itertools
import json
import pickletools
import random
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save_file

from gpt2.checkpoint.containers.gguf_file import GGUFFile, NoTokenizer, tokenizer_of
from gpt2.checkpoint.containers.torch_file import TorchFile
from gpt2.checkpoint.files import open_weights
from gpt2.checkpoint.keys import from_file
from gpt2.checkpoint.loading import load_path
from gpt2.checkpoint.peft_files import read_adapter
from gpt2.config import GPT2Config
from gpt2.data import from_directory
from gpt2.data.bpe import train_bpe
from gpt2.traces.batch import read_ids
from gpt2.train.recipe import read as read_recipe
from gpt2.train.runs import read as read_runs
from support import fuzz, gguf_layouts
from support.checks import all_same
from support.commands import ASSET
from support.fuzz import (
    Surface,
    Way,
    changed_bytes,
    changed_numbers,
    changed_text,
    cut,
    number_bytes,
    of_files,
    read_every_way,
)
from support.hf_layouts import official

SMALL = GPT2Config(vocab_size=7, n_positions=8, n_embd=4, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)


def texts(folder: Path) -> dict[str, Surface]:
    """A file of each kind that is not a model's weights; each surface has its own copy of all."""
    honest = official(folder / "honest", SMALL) and folder / "honest"
    shutil.copytree(ASSET, honest / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors"))
    key = "base_model.model.transformer.h.0.attn.c_attn.lora_{}.weight"
    save_file({key.format("A"): torch.ones(2, 4), key.format("B"): torch.ones(12, 2)}, honest / "adapter_model.safetensors")
    base = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True}
    rows = [json.dumps({"step": step, "loss": 3.0, "val_loss": 3.0, "val_bits_per_byte": 2.0}) for step in range(3)]
    written = {
        "adapter_config.json": json.dumps(base | {"base_model_name_or_path": str(honest)}),
        "metrics.jsonl": "\n".join(rows),
        "r.toml": "steps = 5\nbatch_size = 2\ndata.path = 'x.txt'\noptim = {lr = 1e-3}\nlora = {r = 2, alpha = 4}\n",
        "ids.txt": "1 2 3\n4 5 6\n",
    }
    for name, text in written.items():
        (honest / name).write_text(text)
    readers: dict[str, tuple[str, Callable[[Path], object]]] = {
        "ids": ("ids.txt", read_ids),
        "tokenizer": ("tokenizer/tokenizer_config.json", lambda path: from_directory(path.parent).encode("a b")),
        "adapter": ("adapter_config.json", lambda path: read_adapter(path.parent)),
        "metrics": ("metrics.jsonl", lambda path: [run.best for run in read_runs([path.parent])]),
        "recipe": ("r.toml", lambda path: read_recipe(str(path))),
    }
    odd = {"turned": torch.randn(3, 5).t(), "part": torch.randn(40)[3:30:2], "parameter": torch.nn.Parameter(torch.randn(2, 2))}
    torch.save(odd, honest / "odd.pt", pickle_protocol=4)
    readers["torch, odd"] = ("odd.pt", lambda path: read_every_way(TorchFile(path), 4))
    copies = {name: shutil.copytree(honest, folder / name) for name in readers}
    ways = {".pt": TORCH}
    return {
        name: of_files({copies[name] / file: ways.get(file[-3:], [changed_text])}, read, limit=2000)
        for name, (file, read) in readers.items()
    }


OPCODES = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes]


def changed_pickle(pick: random.Random, data: bytes, start: int = 0) -> bytes:
    """Change whole instructions (replace, drop, repeat or swap some), or a number in one."""
    stream = io.BytesIO(data)
    stream.seek(start)
    bounds = [position for _, _, position in pickletools.genops(stream)] + [stream.tell()]
    parts = [data[a:b] for a, b in itertools.pairwise(bounds)]
    for _ in range(pick.choice([1, 1, 2, 4])):
        at, other, numbers = pick.randrange(len(parts)), pick.randrange(len(parts)), [b"K", b"M", b"J"]
        small = [i for i, part in enumerate(parts) if part[:1] in numbers] or [at]
        match pick.randrange(4):
            case 0:
                parts[at] = pick.choice([pick.choice(OPCODES) + parts[at][1:], b"", b"J" + number_bytes(pick, (4,))])
            case 1:
                parts[at] += parts[other]
            case 2:
                parts[at], parts[other] = parts[other], parts[at]
            case 3:
                parts[pick.choice(small)] = b"K" + bytes([pick.randrange(40)])
    return data[: bounds[0]] + b"".join(parts) + data[bounds[-1] :]


def changed_archive(pick: random.Random, data: bytes, other: bytes) -> bytes:
    """A well-formed archive with damaged members; or the format before torch 1.6 with one of its five pickles damaged."""
    if not data.startswith(b"PK"):
        stream, starts = io.BytesIO(data), []
        for _ in range(5):
            starts.append(stream.tell())
            list(pickletools.genops(stream))
        return changed_pickle(pick, data, starts[pick.choice([3, 3, 3, 3, 3, 0, 1, 2, 4])])
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name, root = pick.choice([*members]), next(iter(members)).split("/")[0]
    main = f"{root}/data.pkl"
    match pick.randrange(7):
        case 0 | 1 | 2 | 3:
            members[main] = changed_pickle(pick, members[main])
        case 4:
            hurt = pick.choice([main, name])
            members[hurt] = changed_bytes(pick, members[hurt], data)
        case 5:
            del members[name]
        case 6:
            members[name.replace(root, pick.choice([root, "", "x/y"]))] = members[pick.choice([*members])]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", pick.choice([zipfile.ZIP_STORED] * 9 + [zipfile.ZIP_DEFLATED])) as archive:
        for name, content in members.items():
            archive.writestr(name if name.strip("\0") else "-", content)
    return buffer.getvalue()


def gguf_head(pick: random.Random, data: bytes, other: bytes) -> bytes:
    """Bytes of GGUF's header, or the lengths, counts, types and offsets before and after each name."""
    end = data.rindex(b"token_embd.weight") + 100  # approximate start of the data
    if pick.random() < 0.65:
        return changed_bytes(pick, data[:end], other) + data[end:]
    spans = [place for name in re.finditer(rb"[a-z_]+\.[a-z0-9_.]+", data[:end]) for place in name.span()]
    return changed_numbers(pick, data, [at + n for at in spans for n in (-8, 0, 0, 4, 8, 12, 16, 20, 24)])


def llmc_head(pick: random.Random, data: bytes, other: bytes) -> bytes:
    if pick.random() < 0.15:
        return changed_bytes(pick, data[:1024], other) + data[1024:]
    return changed_numbers(pick, data, [*range(0, 32, 4)] * 128 + [*range(0, 1024, 4)], (4,))


def other_number(pick: random.Random, data: bytes, other: bytes) -> bytes:
    """A safetensors file with other data: other numbers, an untied head, or no mask."""
    place = pick.randrange(8 + int.from_bytes(data[:8], "little"), len(data))
    return data[:place] + pick.randbytes(1) + data[place + 1 :]


# How a file begins -> how it is damaged, more often where there are more ways.
TORCH: list[Way] = [*[changed_bytes] * 3, cut, *[changed_archive] * 4]
BEGINNINGS: dict[bytes, list[Way]] = {
    rb"PK|\x80[\x02-\x05][}c\x8a]": TORCH,
    rb"GGUF": [*[gguf_head] * 9, changed_bytes],
    rb"\xc6\xd7\x34\x01": [*[llmc_head] * 7, changed_bytes, changed_bytes, cut],
    rb".{7}\0\{": [*[changed_bytes] * 3, other_number, cut],
    rb"[{\[]": [changed_text] * 2,
    rb"": [changed_bytes] * 15,
}


def dialects(folder: Path) -> Surface:
    """Every file of every layout that is known: the table of `checkpoint/test_dialects.py`.

    What loads gives the tensors that the safetensors library reads (a leading axis of 1 may differ), or that have checksums.
    """
    from checkpoint.test_dialects import DIALECTS

    ours = {name: dialect for name, dialect in DIALECTS.items() if name not in ("transformers", "shards")}  # seconds of imports
    written = {name: dialect.write(folder / name) for name, dialect in ours.items()}
    config = GPT2Config(vocab_size=260, n_positions=4, n_embd=32, n_layer=1, n_head=2, bos_token_id=259, eos_token_id=259)
    settings = {"kind": gguf_layouts.Q8_0, "tokenizer": train_bpe("to be or not to be", config.vocab_size)}
    truth = gguf_layouts.write(folder / "vocabulary" / "model.gguf", config, **settings)
    written["vocabulary"] = folder / "vocabulary", truth, config

    def read(path: Path) -> None:
        name = path.relative_to(folder).parts[0]
        root, truth, _ = written[name]
        files = {file.path: file for file in open_weights(root).values()}
        for file in files.values():
            read_every_way(file, 40)
            if isinstance(file, GGUFFile):
                with contextlib.suppress(NoTokenizer):
                    tokenizer_of(file)
        mine = load_path(root).state_dict()
        if name in ("official", "prefix", "shards-no-prefix"):
            truth = {}
            for file in files:
                with safetensors.safe_open(file, "pt") as held:
                    truth |= {from_file(key): held.get_tensor(key) for key in held.keys()}  # noqa: SIM118 - not a mapping
        if name in ("official", "prefix", "shards-no-prefix", "openai"):
            assert all_same(mine, {name: truth[name].to(t.dtype).reshape(t.shape) for name, t in mine.items()})

    def ways(content: bytes) -> list[Way]:
        return next(ways for begins, ways in BEGINNINGS.items() if re.match(begins, content, re.DOTALL))

    return of_files({path: ways(path.read_bytes()) for path in sorted(folder.rglob("*.*")) if path.is_file()}, read, limit=2000)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", metavar="NAME", nargs="*", choices=["texts", "dialects"], default=["texts", "dialects"], help="default: all"
    )
    parser.add_argument("--count", type=int, default=20_000, help="inputs, over all surfaces")
    parser.add_argument("--seed", type=int, default=1)
    args, fallen = parser.parse_args(argv), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Surface] = {}
        for name in args.names:
            (place := Path(folder, name)).mkdir()
            torch.manual_seed(args.seed)
            found |= texts(place) if name == "texts" else {name: dialects(place)}
        sys.addaudithook(fuzz.forbid)
        for name, surface in found.items():
            report = fuzz.fuzz(name, surface, args.count // len(found), args.seed)
            fallen += report["fallen"]
            print(json.dumps({"surface": name, **report}))
    tried = args.count // len(found) * len(found)
    print(*fallen, f"{tried:,} tried, {tried - len(fallen):,} held", sep="\n")
    return int(bool(fallen))


if __name__ == "__main__":
    raise SystemExit(main())
