"""The allocator keeps freed memory in the process, so that the next step needs no new pages."""

import ctypes
import os
from unittest.mock import Mock

import pytest
from support import forks

from gpt2.cli.main import main
from gpt2.config import GPT2Config
from gpt2.measure import allocator
from gpt2.measure.allocator import give_back_freed_memory, keep_freed_memory
from gpt2.parity.checks import Subject

STEP = """
import resource, sys
import torch
from gpt2.measure.allocator import keep_freed_memory
def faults(work):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
def step():
    [torch.zeros(9_000_000) for _ in range(2)]  # of more than 32 MB, which glibc never keeps
if sys.argv[1] == "kept":
    assert keep_freed_memory()
    for _ in range(8):  # until the pool has the shape that the steps ask for; one in five heaps takes six
        step()
print(faults(lambda: [step() for _ in range(3)]))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_steps_after_the_first_touch_hardly_a_new_page():
    """mallopt accepts a wrong parameter number without an error and without effect."""
    kept, given_back = (int(forks.run("-c", STEP, how).stdout) for how in ("kept", "given back"))
    assert kept < given_back / 4  # a block occasionally starts at another address


def test_a_narrow_model_gives_back_its_logits(monkeypatch):
    """Parameters alone were counted: verify of tiny-gpt2, with 50,257 ids, took 40 % more memory."""
    trims = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Mock(malloc_trim=trims.append))
    for vocab in (50_257, 61):
        config = GPT2Config(vocab_size=vocab, n_embd=2, n_head=1, bos_token_id=None, eos_token_id=None)
        give_back_freed_memory(Subject.bytes.fget(Mock(config=config)))
    assert trims == [0]


def test_a_c_library_without_the_switch_is_left_alone(monkeypatch):
    for name, found in (("posix", lambda name: object()), ("nt", lambda name: pytest.fail("asked for"))):  # Windows has none
        monkeypatch.setattr(os, "name", name)
        monkeypatch.setattr(ctypes, "CDLL", found)
        assert not keep_freed_memory() | give_back_freed_memory()


@pytest.mark.parametrize("words", [["verify"], ["compare", "shakespeare-mini", "shakespeare-mini:bf16"]])
def test_commands_of_many_passes_keep_it(monkeypatch, words):
    """Without it, verify spends a fifth of its time on new pages."""
    monkeypatch.setattr(allocator, "keep_freed_memory", Mock(side_effect=KeyboardInterrupt))
    assert main(words) == 130
