"""Hold the statistics of compare against those of `llama-perplexity --kl-divergence`, on the same logits of the same two models.

    python tools/check_kl.py --llama-perplexity PATH [MODEL] [--tokens 20000]

The model is exported as GGUF, in F32 and in Q8_0. llama.cpp measures the second against the first, on the embedded checkpoint's
held-out plays. Then its logits are taken once more (llama-cpp-python, of the same version as the program), and
gpt2.comparison.distributions makes its own figures of them. llama.cpp stores the first model's log-probabilities in 16 bits, at
most 16 nats apart, which makes any one of them wrong by up to 1.2e-4: no figure may differ by more than that and the last digit
that is printed. As a control, the same figures with the two models exchanged must be refused. Ends stdout with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import gpt2
from gpt2.checkpoint.export import export
from gpt2.comparison.distributions import percentiles, summarise
from gpt2.measure.per_token import Tokens, measure_pair
from gpt2.measure.texts import open_text
from gpt2.measure.windows import Windows

CONTEXT = 256
STEP = 16 / 65535  # nats, between two of llama.cpp's stored log-probabilities
LEVELS = {"Maximum": 100.0, "99.9%": 99.9, "99.0%": 99.0, "95.0%": 95.0, "90.0%": 90.0, "75.0%": 75.0, "Median": 50.0}
LEVELS |= {"25.0%": 25.0, "10.0%": 10.0, "5.0%": 5.0, "1.0%": 1.0, "0.1%": 0.1, "Minimum": 0.0}


def by_llama(program: Path, folder: Path, text: str) -> dict[str, tuple[float, float]]:
    """Its statistics by their names, each with half of its last printed digit."""
    (folder / "text.txt").write_text(text)
    one = ["-b", str(CONTEXT), "-ub", str(CONTEXT), "-fa", "off"]  # a window at a time, as below: sums are rounded by their shape
    base = [*one, "-f", str(folder / "text.txt"), "-c", str(CONTEXT), "--kl-divergence-base", str(folder / "base.bin")]
    for more in (["-m", str(folder / "f32/model.gguf")], ["-m", str(folder / "q8_0/model.gguf"), "--kl-divergence"]):
        done = subprocess.run([str(program), *more, *base], capture_output=True, text=True, check=True)
    statistics = {}
    for line in done.stdout.splitlines():
        if row := re.match(r"\s*(\S.*?)\s*:\s*(-?[\d.]+)(%| ±|$)", line):
            digits = len(row[2].partition(".")[2])
            statistics[re.sub(r"\s+", " ", row[1])] = float(row[2]), 0.5 * 10**-digits
    return statistics


def llama_logits(folder: Path) -> tuple[Tensor, list[Tensor]]:
    """The windows that it cut the text into (N, T), and its logits of each (N, T, V) under both models."""
    import llama_cpp

    raw = (folder / "base.bin").read_bytes()
    context, vocab, chunks = np.frombuffer(raw, np.int32, 3, len("_logits_"))
    ids = np.frombuffer(raw, np.int32, context * chunks, len("_logits_") + 12).reshape(chunks, context)
    logits = []
    for stored in ("f32", "q8_0"):
        model = llama_cpp.Llama(
            str(folder / stored / "model.gguf"),
            n_ctx=CONTEXT,
            n_batch=CONTEXT,
            n_ubatch=CONTEXT,
            logits_all=True,
            flash_attn=False,
            verbose=False,
        )
        rows = []
        for window in ids:
            model.reset()
            model.eval(window.tolist())
            rows.append(torch.from_numpy(np.array(model.scores[:CONTEXT, :vocab])))
        logits.append(torch.stack(rows))
    return torch.from_numpy(ids.astype(np.int64)), logits


def ours(ids: Tensor, a: Tensor, b: Tensor) -> dict[str, float]:
    """The same statistics, of the second half of every window, as llama.cpp scores it."""
    context, vocab = ids.size(1) - 1, a.size(-1)
    parts = [
        measure_pair(
            lambda x, i=i: a[i, None, :context], lambda x, i=i: b[i, None, :context], ids[i], Windows(context), vocab=vocab
        )
        for i in range(len(ids))
    ]
    scored = torch.arange(context) >= CONTEXT // 2
    columns = {
        field.name: torch.cat([getattr(part, field.name)[scored] for part in parts]) if torch.is_tensor(value) else value
        for field in fields(Tokens)
        for value in [getattr(parts[0], field.name)]
    }
    tokens = Tokens(**columns)
    summary = summarise(tokens, torch.ones(vocab))
    statistics = {
        "Mean PPL(Q)": summary.b.score.perplexity,
        "Mean PPL(base)": summary.a.score.perplexity,
        "Cor(ln(PPL(Q)), ln(PPL(base)))": 100 * summary.correlation,
        "Mean ln(PPL(Q)/PPL(base))": -summary.difference.value,
        "Mean PPL(Q)/PPL(base)": summary.ratio.value,
        "Mean PPL(Q)-PPL(base)": summary.b.score.perplexity - summary.a.score.perplexity,
        "Mean KLD": summary.kl_ab.mean.value,
        "Mean Δp": 100 * summary.change.mean.value,
        "RMS Δp": 100 * summary.change.rms.value,
        "Same top p": 100 * summary.same_top.value,
    }
    for kind, values in (("KLD", tokens.kl_ab), ("Δp", 100 * tokens.change)):
        statistics |= {
            f"{name} {kind}": value for name, value in zip(LEVELS, percentiles(values, tuple(LEVELS.values())), strict=True)
        }
    return statistics


def refused(theirs: dict[str, tuple[float, float]], mine: dict[str, float]) -> list[str]:
    """The statistics that differ by more than 16 bits and the printed digits account for."""
    bad = []
    for name, (value, half) in theirs.items():
        unit = 100.0 if "Δp" in name or "Same" in name or "Cor" in name else 1.0
        scale = theirs["Mean PPL(base)"][0] if name in ("Mean PPL(Q)", "Mean PPL(base)", "Mean PPL(Q)-PPL(base)") else unit
        if abs(mine[name] - value) > half + STEP / 2 * scale:
            bad.append(name)
    return bad


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("model", nargs="?", default="shakespeare-mini")
    arguments.add_argument("--llama-perplexity", type=Path, required=True)
    arguments.add_argument("--tokens", type=int, default=20_000)
    given = arguments.parse_args()
    tokenizer = gpt2.load_tokenizer(given.model)
    text = tokenizer.decode(tokenizer.encode(open_text("plays").text)[: given.tokens])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for stored in ("f32", "q8_0"):
            export(given.model, folder / stored, format="gguf", type=stored)
        theirs = by_llama(given.llama_perplexity, folder, text)
        ids, (a, b) = llama_logits(folder)
    mine, exchanged = ours(ids, a, b), ours(ids, b, a)
    theirs = {name: value for name, value in theirs.items() if name in mine}
    assert len(theirs) >= 30, f"the program printed other statistics than expected: {sorted(theirs)}"
    bad = refused(theirs, mine)
    for name, (value, _) in theirs.items():
        print(f"{name:32} {value:12.6f} {mine[name]:12.6f}  {'DIFFERS' if name in bad else 'equal'}", file=sys.stderr)
    control = refused(theirs, exchanged)
    result = {"model": given.model, "tokens": len(ids) * (CONTEXT // 2 - 1), "statistics": len(theirs), "differ": bad}
    result |= {"control differs": len(control), "llama_cpp": version("llama-cpp-python"), "theirs": theirs, "ours": mine}
    print(json.dumps(result))
    return 1 if bad or not control else 0


if __name__ == "__main__":
    sys.exit(main())
