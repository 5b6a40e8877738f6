"""Damaged files of every kind that we read: `python -m support.fuzz --count 20000 --seed N`, from tests/.

Each input must be read, or be refused by an InputError in one printable line, within SECONDS of processor time and without MEMORY
more. Anything else has fallen. What loads of a file with a checksum has the right tensors.
"""

import argparse
import contextlib
import io
import json
import random
import re
import resource
import shutil
import sys
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file

from gpt2.checkpoint import checkpoint
from gpt2.checkpoint.containers.gguf_file import GGUFFile, NoTokenizer, tokenizer_of
from gpt2.checkpoint.files import open_weights
from gpt2.checkpoint.peft_files import read_adapter
from gpt2.data import from_directory
from gpt2.errors import InputError
from gpt2.traces.batch import read_ids
from gpt2.train.recipe import read as read_recipe
from gpt2.train.runs import read as read_runs
from support.checks import all_same
from support.commands import ASSET

SECONDS, MEMORY, LIMIT = 30, 2000, 2000  # of one input: seconds, MB that the process grows by, letters of its refusal
NUMBERS = [0, 1, 2, 3, 7, 8, 31, 64, 127, 255, 65535, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**47, 2**53, 2**62, 2**63, -1]
JUNK = [*NUMBERS, 10**30, 1.5, 1e300, True, None, "", "F32", "a\nb", "\ud800", "x" * 3000]
JUNK += [[], [[]], {}, float("nan"), [2**32] * 2]
Read = Callable[[Path], object]


def damaged(pick: random.Random, data: bytes, other: bytes) -> bytes:
    """A file cut, or with places changed: in a value of its JSON, in a member of its archive, or in its bytes."""
    if pick.random() < 0.1:
        return data[: pick.randrange(len(data))]
    if data[:1] in b"{[" and pick.random() < 0.5:
        with contextlib.suppress(ValueError):
            lines = data.splitlines() if data.count(b"\n{") else [data]  # of a .jsonl
            lines[0] = json.dumps(changed_json(json.loads(lines[0]), pick)).encode(errors="surrogatepass")
            return b"\n".join(lines)
    if data.startswith(b"PK") and pick.random() < 0.7:
        return changed_archive(pick, data, other)
    result = bytearray(data)
    for _ in range(pick.choice([1, 1, 1, 2, 5])):
        at = pick.randrange(min(len(result), pick.choice([64, 2000, 1 << 30])) + 1)  # most that can lie is at the beginning
        width, next_one = pick.choice([1, 2, 4, 8]), sum(result[at : at + 1]) + 1
        number = (pick.choice([*NUMBERS, pick.randrange(256), next_one]) % 256**width).to_bytes(width, "little")
        start, length = pick.randrange(len(other)), pick.choice([1, 5, 30, 300])
        match pick.randrange(5):
            case 0 | 1:
                result[at : at + width] = number
            case 2:
                result[at : at + pick.choice([0, length])] = other[start : start + length]
            case 3:
                del result[at : at + length]
            case 4:
                result[at:at] = result[at : at + length]
    return bytes(result)


def changed_json(raw: Any, pick: random.Random) -> Any:
    """Change one place in a JSON value: a key that goes or is renamed, a number's neighbour, or nonsense."""
    if isinstance(raw, dict) and raw and pick.random() < 0.9:
        key = pick.choice(list(raw))
        match pick.randrange(8):
            case 0:
                return {name: value for name, value in raw.items() if name != key}
            case 1:
                return {("transformer.h.9.x\n" if name == key else name): value for name, value in raw.items()}
        return raw | {key: changed_json(raw[key], pick)}
    if isinstance(raw, list) and raw and pick.random() < 0.8:
        at = pick.randrange(len(raw))
        return [*raw[:at], changed_json(raw[at], pick), *raw[at + 1 :]]
    return raw + pick.choice([-4, -1, 1, 8]) if type(raw) is int and pick.random() < 0.6 else pick.choice(JUNK)


def changed_archive(pick: random.Random, data: bytes, other: bytes) -> bytes:
    """A well-formed archive, in which a member is damaged, gone or another one: the archive's checksums hold."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = pick.choice([*members, *[next(each for each in members if each.endswith("data.pkl"))] * 9])
    match pick.randrange(8):
        case 0:
            del members[name]
        case 1:
            members[name] = members[pick.choice([*members])]
        case _:
            members[name] = damaged(pick, members[name] or b"x", other)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def victims(folder: Path) -> dict[Path, Read]:
    """Every file of every known layout (`checkpoint/test_dialects.py`), and one of each kind that holds no weights."""
    from checkpoint.test_dialects import DIALECTS

    left_out = "transformers", "shards", "cerebras"  # as others; the last has 34 MB, which took a fifth of the time
    written = {name: each.write(folder / name) for name, each in DIALECTS.items() if name not in left_out}

    def weights(path: Path) -> None:
        name = path.relative_to(folder).parts[0]
        root, truth, _ = written[name]
        opened = open_weights(root)
        for file in {file.path: file for file in opened.values()}.values():
            for key, entry in file.entries.items():
                tensors = [file.read(key), file.read(key, mapped=False), file.read(key, torch.bfloat16)]
                assert all(tensor.shape == entry.shape and tensor.is_contiguous() for tensor in tensors)
                assert sum(tensor.nbytes for tensor in tensors) < 40 * file.path.stat().st_size
            if isinstance(file, GGUFFile):
                with contextlib.suppress(NoTokenizer):
                    tokenizer_of(file)
        with mock.patch.object(checkpoint, "open_weights", return_value=opened):  # it opened them a second time
            mine = checkpoint.open_path(root).load().state_dict()
        assert name != "openai" or all_same(mine, {key: truth[key].reshape(t.shape) for key, t in mine.items()})

    found: dict[Path, Read] = {path: weights for path in sorted(folder.rglob("*.*")) if path.is_file()}
    base, key = written["official"][0], "base_model.model.transformer.h.0.attn.c_attn.lora_{}.weight"
    texts = shutil.copytree(ASSET, folder / "texts", ignore=shutil.ignore_patterns("*.safetensors"))
    save_file({key.format("A"): torch.ones(2, 12), key.format("B"): torch.ones(36, 2)}, texts / "adapter_model.safetensors")
    lora = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True}
    lora |= {"base_model_name_or_path": str(base)}
    rows = [json.dumps({"step": step, "loss": 3.0, "val_loss": 3.0, "val_bits_per_byte": 2.0}) for step in range(3)]
    others: dict[str, tuple[str, Read]] = {
        "adapter_config.json": (json.dumps(lora), lambda path: read_adapter(path.parent)),
        "metrics.jsonl": ("\n".join(rows), lambda path: [run.best for run in read_runs([path.parent])]),
        "r.toml": ("steps = 5\ndata.path = 'x.txt'\noptim = {lr = 1e-3}\n", lambda path: read_recipe(str(path))),
        "ids.txt": ("1 2 3\n4 5 6\n", read_ids),
    }
    for name, (text, read) in others.items():
        (texts / name).write_text(text)
        found[texts / name] = read
    return found | {texts / "tokenizer_config.json": lambda path: from_directory(path.parent).encode("a b")}


def forbid(event: str, args: tuple[object, ...]) -> None:
    """Raise if a file runs code."""
    if event == "pickle.find_class" or event.startswith(("os.system", "os.exec", "os.spawn", "subprocess")):
        raise AssertionError(f"{event} {args}")


def fuzz(files: dict[Path, Read], count: int, seed: int, damage: Callable[..., bytes] = damaged) -> dict[str, Any]:
    """Run ``count`` damaged inputs; return how many loaded, each refusal without names and numbers, and what fell."""
    whole, loaded, refused, fallen = {path: path.read_bytes() for path in files}, 0, Counter[str](), list[str]()
    for path, read in files.items():
        read(path)  # the control: whole, it is read
    warnings.simplefilter("error")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        pick = random.Random(f"{seed} {number}")
        path = pick.choice([*files])
        path.unlink()  # a disk waits for the bytes of a file that is written over, which took half of the time
        path.write_bytes(damage(pick, whole[path], whole[pick.choice([*files])] or b"x"))
        begin, fall = time.process_time(), ""
        try:
            files[path](path)
            loaded += 1
        except InputError as error:
            what = str(error)
            refused[re.sub(r"b?'.*'|b?\".*\"|[\w./-]*[._/][\w./-]+|tensor \S+|[\d,]+", "*", what)[:60]] += 1
            right = what.isprintable() and len(what) < LIMIT and re.search("[;:] ", what)
            fall = "" if right else f"not one line with advice: {what[:200]!r}"
        except Exception as error:
            fall = f"{type(error).__name__}: {str(error)[:200]!r}"
        path.unlink()
        path.write_bytes(whole[path])
        grown, took = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) // 1024, time.process_time() - begin
        fall = fall or f"{took:.0f} s, {grown} MB" * (took > SECONDS or grown > MEMORY)
        fallen += [f"{number} of seed {seed}, {path.parent.name}/{path.name}: {fall}"] if fall else []
    return {"loaded": loaded, "refused": refused, "fallen": fallen}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        torch.manual_seed(options.seed)
        torch.set_num_threads(1)
        files = victims(Path(name))
        sys.addaudithook(forbid)
        print(json.dumps(fuzz(files, options.count, options.seed)))
