"""Source for a type checker (tests/test_types.py), never run: every public name as a user writes it, with its type."""

from collections.abc import Sequence
from typing import assert_type

import torch
from torch import Tensor, nn

import gpt2
from gpt2.data import Tokenizer

model = gpt2.load("gpt2-medium", dtype="bf16", device="cuda")
assert_type(model, gpt2.GPT2)
assert_type(gpt2.load(dtype=torch.float64), gpt2.GPT2)
assert_type(model.config, gpt2.GPT2Config)
assert_type(model.config.num_parameters(), int)
assert_type(gpt2.GPT2(gpt2.GPT2Config(vocab_size=65, n_layer=2)), gpt2.GPT2)
assert_type(model.hidden(torch.zeros(1, 1, dtype=torch.int64)), Tensor)

tok = gpt2.load_tokenizer("gpt2-medium")
assert_type(tok, Tokenizer)
assert_type(tok.encode("Once"), list[int])
assert_type(tok.n_vocab, int)
assert_type(gpt2.generate(model, tok.encode("Once"), max_new_tokens=32, temperature=0.8, top_k=50, seed=0), list[int])
assert_type(gpt2.generate(model, (1, 2), 8), Sequence[int])
assert_type(gpt2.generate(model, torch.zeros(2, 3, dtype=torch.int64), 8), Tensor)

assert_type(gpt2.verify("gpt2"), gpt2.Report)
assert_type(gpt2.verify().ok, bool)
assert_type(gpt2.verify().table(), str)
assert_type(gpt2.verify().to_json(), str)
assert_type(gpt2.verify("gpt2", device="cuda"), gpt2.DeviceReport)
assert_type(gpt2.verify_device("gpt2", "cuda"), gpt2.DeviceReport)
assert_type(gpt2.verify_device(device="auto").verdict, str)
assert_type(gpt2.compare("gpt2", "out/step-2000", on="my.txt"), gpt2.Comparison)
assert_type(gpt2.compare("gpt2", "gpt2:bf16").to_json(), str)
gpt2.compare("gpt2", "gpt2:bf16").save_html("report.html")
assert_type(gpt2.compare("gpt2", "gpt2:bf16", "gpt2:int8"), gpt2.Comparisons)

mine: nn.Module = nn.Identity()
assert_type(gpt2.load_into(mine, "gpt2"), gpt2.MappingReport)
assert_type(gpt2.load_into(mine).table(), str)
assert_type(gpt2.checkpoint_of(mine).config, gpt2.GPT2Config)
assert_type(gpt2.checkpoint_of(mine).load(), gpt2.GPT2)
assert_type(gpt2.diagnose(mine, "gpt2"), gpt2.Diagnosis)
assert_type(gpt2.diagnose(mine).verdict, str)
assert_type(gpt2.diagnose_step(mine, lambda model: lambda x, y: 0.0, "gpt2", settings=["optim.lr=3e-4"]), gpt2.Diagnosis)
assert_type(gpt2.trace("gpt2", ids=[[1, 2], [3, 4]], gradients=True), gpt2.Trace)
assert_type(gpt2.trace("gpt2", ids="ids.npy", dtype="float64").arrays["logits"], Tensor)
gpt2.trace(text="my.txt", tokens=8).save("reference.npz")
gpt2.save(model, tok, "dir")

mistake: gpt2.InputError = gpt2.CheckpointError("what, where, what to do")
