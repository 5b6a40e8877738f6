"""llm.c's own programs, unchanged, on our files: its test of a forward and a backward pass, and its tokenizer reader.

They are compiled if LLMC_SOURCE is a clone of https://github.com/karpathy/llm.c and there is a C compiler; else skipped.
test_gpt2.c compares the logits (1e-2), the loss (1e-2) and sixteen gradients (2e-2) with the debug state. Its ten losses are
constants for the official weights, so other weights cannot match them. Here they are compared with our own ten steps.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import gpt2
from gpt2.checkpoint.export import export
from gpt2.measure.metrics import token_losses

SOURCE, COMPILER = os.environ.get("LLMC_SOURCE", ""), shutil.which("cc") or shutil.which("gcc")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (Path(SOURCE, "test_gpt2.c").is_file() and COMPILER), reason="LLMC_SOURCE is no clone of llm.c"),
]
TENSORS = 16


def program(source: Path, folder: Path) -> Path:
    binary = folder / source.stem
    flags = ["-O3", "-w", "-I", SOURCE]
    subprocess.run([COMPILER, *flags, source, "-lm", "-o", binary], check=True, cwd=folder)
    return binary


def run(binary: Path, *arguments: object) -> str:
    return subprocess.run([binary, *map(str, arguments)], check=True, cwd=binary.parent, capture_output=True, text=True).stdout


def files(folder: Path, model: str, tokens: int) -> gpt2.Trace:
    """Our export and debug state of a model, under the names that test_gpt2.c opens."""
    export(model, folder, format="llmc")
    (folder / "model.bin").rename(folder / "gpt2_124M.bin")
    traced = gpt2.trace(model, tokens=tokens, gradients=True)
    traced.save(folder / "gpt2_124M_debug_state.bin")
    return traced


def verdict(output: str) -> tuple[bool, bool, int]:
    """Whether test_gpt2.c accepts the logits and the loss, and how many of the sixteen gradients."""
    logits = re.search(r"^(NOT )?OK \(LOGITS\)", output, re.MULTILINE)
    return logits[1] is None, "LOSS OK" in output, len(re.findall(r"^TENSOR OK", output, re.MULTILINE))


def ten_losses(model: str, traced: gpt2.Trace) -> list[float]:
    """Ten steps with test_gpt2.c's settings: AdamW, rate 1e-4, betas 0.9 and 0.999, decay 0.01 on everything."""
    module = gpt2.load(model)
    ids, targets = (traced.arrays[name].long() for name in ("ids", "targets"))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = token_losses(module(ids), targets).mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    return losses


def test_its_test_passes_and_sees_a_wrong_weight(tmp_path: Path) -> None:
    """The whole embedded model. Negative controls: one weight of 1.9 million, one gradient entry, one logit."""
    binary = program(Path(SOURCE, "test_gpt2.c"), tmp_path)
    traced = files(tmp_path, "shakespeare-mini", 16)
    output = run(binary)
    assert verdict(output) == (True, True, TENSORS), output
    losses = [float(loss) for loss in re.findall(r"^step \d: loss (\S+)", output, re.MULTILINE)]
    assert losses == pytest.approx(ten_losses("shakespeare-mini", traced), abs=1e-4)
    assert "overall okay: 0" in output  # only because of its ten constants
    model, state = tmp_path / "gpt2_124M.bin", tmp_path / "gpt2_124M_debug_state.bin"
    right, right_state = model.read_bytes(), state.read_bytes()

    def changed(content: bytes, number: int, value: float) -> bytes:
        at = 4 * number if number >= 0 else len(content) + 4 * number
        return content[:at] + torch.tensor(value, dtype=torch.float32).numpy().tobytes() + content[at + 4 :]

    model.write_bytes(changed(right, -1, 1.0))  # the last entry of ln_f.bias
    logits, _, tensors = verdict(run(binary))
    assert not logits
    assert tensors < TENSORS
    model.write_bytes(right)
    state.write_bytes(changed(right_state, -1, 1.0))
    assert verdict(run(binary)) == (True, True, TENSORS - 1)
    first_logit = 256 + 2 * traced.arrays["ids"].numel()
    state.write_bytes(changed(right_state, first_logit, 99.0))
    assert verdict(run(binary)) == (False, True, TENSORS)


def test_its_tokenizer_reads_ours(tmp_path: Path) -> None:
    """Decode token by token in C, for bytes that C prints unchanged."""
    export("shakespeare-mini", tmp_path, format="llmc")
    (tmp_path / "decode.c").write_text(
        '#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n#include "llmc/tokenizer.h"\n'
        'int main(int n, char **ids) {\n  Tokenizer t;\n  tokenizer_init(&t, "tokenizer.bin");\n'
        '  if (!t.init_ok) return 1;\n  fprintf(stderr, "%d", t.eot_token);\n'
        '  for (int i = 1; i < n; i++) printf("%s", tokenizer_decode(&t, atoi(ids[i])));\n  return 0;\n}\n'
    )
    binary, tokenizer = program(tmp_path / "decode.c", tmp_path), gpt2.load_tokenizer()
    text = "ROMEO:\nIt is my lady, O, it is my love! O, that she knew she were!\n"
    assert run(binary, *tokenizer.encode(text)) == text
    assert run(binary, tokenizer.eot) == "<|endoftext|>"
