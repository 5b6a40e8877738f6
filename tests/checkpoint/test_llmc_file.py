"""llm.c's files: they load, our exports equal llm.c's own files, and invalid files are refused in one line."""

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support import llmc_layouts
from support.checks import all_same, refused
from support.commands import refusal
from support.hf_layouts import TINY
from support.random_models import random_model

import gpt2
from gpt2.checkpoint.checkpoint import open_path
from gpt2.checkpoint.export import export
from gpt2.checkpoint.llmc_writer import tokenizer_file
from gpt2.checkpoint.loading import load
from gpt2.data.bpe import chars_of

CONFIG = replace(TINY, bos_token_id=None, eos_token_id=None)


@pytest.mark.parametrize(("dtype", "type"), [("float32", "f32"), ("bfloat16", "bf16"), ("float16", "f32"), ("float64", "f32")])
def test_an_export_is_what_llm_c_would_write(dtype: str, type: str, tmp_path: Path) -> None:
    """llm.c's files have no names to check: a matrix that is not transposed, or parameters grouped by layer, loads."""
    done = export(f"shakespeare-mini:{dtype}", tmp_path, format="llmc")
    assert (done.type, [file.name for file in done.files]) == (type, ["model.bin", "tokenizer.bin"])
    assert any("rounded" in note for note in done.notes) == (dtype == "float64")
    state = gpt2.load(f"shakespeare-mini:{dtype}").state_dict()
    found = llmc_layouts.read_model(tmp_path / "model.bin", done.config)
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        wanted = tensor.view(torch.int16) if type == "bf16" else tensor.float()
        np.testing.assert_array_equal(found[name], wanted.numpy(), err_msg=name)
    again = gpt2.load(str(tmp_path)).state_dict()
    wide = torch.bfloat16 if type == "bf16" else torch.float32
    assert all_same(again, {name: tensor.to(wide) for name, tensor in state.items()})
    tokenizer = gpt2.load_tokenizer()
    tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.n_vocab)]
    assert llmc_layouts.read_tokenizer(tmp_path / "tokenizer.bin") == (tokens, tokenizer.eot)


def test_a_tokenizer_without_an_end_or_with_a_long_token(tmp_path: Path) -> None:
    """A token of 256 bytes would shift every token after it."""
    model = random_model(replace(CONFIG, vocab_size=4), dtype=torch.float32)
    gpt2.save(model, chars_of("abcd"), tmp_path / "chars")
    done = export(str(tmp_path / "chars"), tmp_path / "out", format="llmc")
    assert "without an end of text, for which llm.c takes token 0" in done.notes
    assert llmc_layouts.read_tokenizer(tmp_path / "out" / "tokenizer.bin") == ([b"a", b"b", b"c", b"d"], 0)
    bare = str(gpt2.save(model, None, tmp_path / "bare"))
    done = export(bare, tmp_path / "alone", format="llmc")
    assert [file.name for file in done.files] == ["model.bin"]
    assert "without a tokenizer" in done.notes[0]
    assert "holds tokenizer.bin of another model" in refusal(export, bare, tmp_path / "out", format="llmc")
    long = chars_of("abcd")
    long._bytes[2] = b"c" * 256
    with pytest.raises(ValueError, match="1 to 255 bytes, and token 2 has 256"):
        tokenizer_file(long, 0)


LIES = [
    ({1: 2}, None, "version 2, and 1, 3, 5 are read"),
    ({0: 20240327}, None, "debug state, which holds gradients, not a GPT-2's weights"),
    ({0: 20240328}, None, "tokenizer, not"),
    ({0: 20240801}, None, "Llama 3"),
    ({2: 0}, None, "states n_positions 0"),
    ({4: 2**31 - 1}, None, "n_layer 2,147,483,647"),
    ({4: 3}, None, "where its header says"),
    ({5: 5}, None, "n_embd 12 is not divisible by n_head 5"),
    ({7: 60}, None, "60 rows for a vocabulary of 61"),
    ({}, 3, "does not begin as weights do"),  # cut off while it was downloaded
    ({}, 500, "cut short"),
    ({}, -1, "where its header says"),
]


@pytest.mark.parametrize(("change", "length", "says"), LIES)
def test_a_header_that_lies_or_a_cut_is_told(change: dict[int, int], length: int | None, says: str, tmp_path: Path) -> None:
    """These files have no names and no shapes: a wrong number reads every parameter from a wrong place."""
    path = tmp_path / ("model" if length == 3 else "model.bin")
    llmc_layouts.write(path, CONFIG)
    content = bytearray(path.read_bytes())
    for place, number in change.items():
        struct.pack_into("<i", content, 4 * place, number)
    path.write_bytes(content[:length])
    refused(lambda: load(str(path)), says)


def test_a_folder_of_llm_c_s_files_is_opened_by_its_model(tmp_path: Path) -> None:
    """The starter pack has the tokenizer and the debug state beside the model, all .bin."""
    truth = llmc_layouts.write(tmp_path / "gpt2_124M.bin", CONFIG)
    for name, magic in (("gpt2_tokenizer.bin", 20240328), ("gpt2_124M_debug_state.bin", 20240327)):
        (tmp_path / name).write_bytes(struct.pack("<i", magic) + bytes(2000))
    assert all_same(load(str(tmp_path)).state_dict(), truth)
    assert open_path(tmp_path).container == "llm.c"
    llmc_layouts.write(tmp_path / "gpt2_124M_bf16.bin", CONFIG, version=5)
    refused(lambda: load(str(tmp_path)), "could each be it, give one of them")
    assert load(str(tmp_path / "gpt2_124M_bf16.bin")).wte.weight.dtype == torch.bfloat16
