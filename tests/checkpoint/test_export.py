"""Exported files: the same bytes every time, equal to the files that the target programs write themselves."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf.quants import dequantize, quantize
from support.checks import content, refused
from support.gguf_layouts import BF16, F16, F32, Q8_0, WIDE, arithmetic, write
from support.hf_layouts import weights
from support.random_models import model_of
from support.tokenizers import bert, openai_vocabulary

import gpt2
from gpt2.checkpoint.containers.gguf_file import GGUFFile, config_of, tokenizer_of
from gpt2.checkpoint.export import export
from gpt2.checkpoint.gguf_writer import gguf_pieces
from gpt2.config import GPT2Config
from gpt2.data import from_directory
from gpt2.data.bpe import chars_of, made_bpe, train_bpe
from gpt2.data.library import LibraryTokenizer
from gpt2.errors import InputError

KINDS = {"f32": F32, "f16": F16, "bf16": BF16, "q8_0": Q8_0}
ODD = replace(WIDE, n_layer=11, n_inner=96, eos_token_id=7)  # h.10 comes before h.2
UNTIED, NARROW = replace(WIDE, tie_word_embeddings=False), replace(WIDE, n_embd=48, n_inner=64)
HF = ["config.json", "generation_config.json", "model.safetensors"]
VOCABULARY = ["merges.txt", "tokenizer.json", "tokenizer_config.json", "vocab.json"]


@pytest.fixture(scope="module")
def tokenizer() -> LibraryTokenizer:
    return train_bpe("to be or not to be that is the question whether tis nobler in the mind to suffer " * 3, WIDE.vocab_size)


def saved(directory: Path, config: GPT2Config = WIDE, tokenizer: Any = None, *, truth: Any = None, dtype=torch.float32) -> Path:
    return gpt2.save(model_of(config, truth or weights(config, dtype=dtype)), tokenizer, directory)


def export_refused(source: Path | str, out: Path, *words: str, error: type[InputError] = InputError, **settings: Any) -> str:
    return refused(lambda: export(str(source), out, **settings), *words, error=error)


@pytest.mark.parametrize("config", [WIDE, ODD], ids=["usual", "odd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_hf_export_load_export_gives_the_same_bytes(tmp_path: Path, tokenizer, dtype: torch.dtype, config: GPT2Config) -> None:
    """The export must not depend on the day: its hash would change."""
    source = saved(tmp_path / "source", config, tokenizer, dtype=dtype)
    done = export(str(source), tmp_path / "a")
    export(str(tmp_path / "a"), tmp_path / "b" / "deeper")
    assert content(tmp_path / "a") == content(tmp_path / "b" / "deeper") == content(source)
    assert [file.name for file in done.files] == HF + VOCABULARY
    assert done.type == str(dtype).removeprefix("torch.")
    assert len(done.notes) == (config is ODD)
    for file in done.files:
        data = (tmp_path / "a" / file.name).read_bytes()
        assert (file.size, file.sha256) == (len(data), hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize("type", KINDS)
def test_gguf_export_load_export_gives_the_same_bytes(tmp_path: Path, tokenizer: LibraryTokenizer, type: str) -> None:
    """Possible bugs: Q8_0 rounded twice, an epsilon that drifts, a guessed n_inner, the folder's name in it."""
    config = replace(WIDE, layer_norm_epsilon=3e-6, n_inner=96, bos_token_id=3)
    source = saved(tmp_path / "source", config, tokenizer)
    done = export(str(source), tmp_path / "a", format="gguf", type=type)
    assert [file.name for file in done.files] == ["model.gguf"]
    assert done.notes == ()
    first = content(tmp_path / "a")
    assert config_of(GGUFFile(tmp_path / "a" / "model.gguf")) == config
    export(str(tmp_path / "a" / "model.gguf"), tmp_path / "b", format="gguf", type=type)
    export_refused(tmp_path / "a", tmp_path / "a", "is read too", format="gguf", type=type)  # another type would lose digits
    export(str(tmp_path / "a"), tmp_path / "hf")  # through the other format as well
    export(str(tmp_path / "hf"), tmp_path / "c", format="gguf", type=type)
    assert content(tmp_path / "a") == content(tmp_path / "b") == content(tmp_path / "c") == first


@pytest.mark.parametrize("config", [WIDE, ODD, UNTIED, NARROW], ids=["usual", "odd", "untied", "narrow"])
@pytest.mark.parametrize("type", KINDS)
def test_gguf_is_what_the_package_writes(tmp_path: Path, tokenizer: LibraryTokenizer, type: str, config: GPT2Config) -> None:
    """Possible bugs: another order of dimensions, a value of another type, missing padding. Rows of 48 are written in f16."""
    source = saved(tmp_path / "source", config, tokenizer)
    done = export(str(source), tmp_path / "ours", format="gguf", type=type)
    said = "7 matrices in f16: the length of their rows is not a multiple of 32" in done.notes
    assert said == (config is NARROW and type == "q8_0")
    write(tmp_path / "theirs.gguf", config, KINDS[type], tokenizer=tokenizer)
    assert (tmp_path / "ours" / "model.gguf").read_bytes() == (tmp_path / "theirs.gguf").read_bytes()


# sha256 of the output of llama.cpp's convert_hf_to_gguf.py --model-name GPT-2 --outtype TYPE (in llama-cpp-python 0.3.36) for
# `saved(..., CONVERTED, openai, truth=arithmetic(CONVERTED))`, with OpenAI's vocabulary.
CONVERTED = GPT2Config(n_positions=16, n_embd=32, n_layer=11, n_head=2)
BY_LLAMA_CPP = {
    "f32": "e9efe01c35a85fd8d3722df68981b49f0e9bac1638759ee9cb951a1f392863e4",
    "f16": "5328030a1dd94922b11055c08ada08e7ea98b2bcec8ec455a525ab89444245d6",
    "bf16": "19c56e482eab1960dfbcfae62b4566312fccf2649a3d0510481c4608293ac19e",
    "q8_0": "c10ee7c9929a95d64cbde5c1ba977bc0cd23d952e57abeda59a935c9734e0e91",
}


@pytest.mark.slow
def test_gguf_is_what_llama_cpps_converter_writes() -> None:
    """Metadata that the converter does not write, or a tensor in another type, may break llama.cpp later."""
    model, tokenizer = model_of(CONVERTED, arithmetic(CONVERTED)), from_directory(openai_vocabulary()[0].parent)
    for type, sha256 in BY_LLAMA_CPP.items():
        pieces, _ = gguf_pieces(model, tokenizer, type, "model")
        assert hashlib.sha256(b"".join(pieces)).hexdigest() == sha256


def test_an_embedding_is_cropped_to_the_tokenizer(tmp_path: Path, tokenizer: LibraryTokenizer) -> None:
    """Possible bugs: the wrong rows are cropped, or the head keeps its old size."""
    source = saved(tmp_path / "source", replace(WIDE, vocab_size=352), tokenizer, dtype=torch.float64)
    done = export(str(source), tmp_path / "out")
    assert done.notes == ("embedding cropped from 352 rows to the tokenizer's 300",)
    ids = torch.arange(16)[None] * 18
    with torch.no_grad():
        assert torch.equal(gpt2.load(str(tmp_path / "out"))(ids), gpt2.load(str(source))(ids)[..., :300])


def test_q8_0_is_ggmls(tmp_path: Path) -> None:
    """Halves rounded to even change one number in a thousand. Where float16 makes the scale 0, a block is zeros."""
    config, truth = replace(WIDE, vocab_size=2000), weights(WIDE)
    rows = torch.randn(2000, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-5, 4, 2000)[:, None]
    rows[:4] = torch.tensor([127 * 2.0**-26, 1e-44, -127 * 2.0**-26, 127 * 2.0**-24])[:, None]
    rows[4] = 0
    rows[5] = torch.arange(64) * 0.5 - 8  # halves, with scales of 1 and less
    rows[5, :32] = torch.cat([torch.tensor([127.0]), torch.arange(31) - 15.5])
    export(str(saved(tmp_path, config, truth=truth | {"wte.weight": rows})), tmp_path, format="gguf", type="q8_0")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    (written,) = [tensor.data for tensor in reader.tensors if tensor.name == "token_embd.weight"]
    assert not written[:3].any()
    assert torch.equal(torch.from_numpy(dequantize(written[3], Q8_0)), rows[3])
    assert (written[3:] == quantize(rows[3:].numpy(), Q8_0)).all()


@pytest.mark.parametrize(
    ("value", "type", "says"),
    [
        (1e5, "f16", "transformer"),
        (1e5, "q8_0", None),
        (1e8, "q8_0", "q8_0"),
        (float("inf"), "f16", "not finite"),
        (float("nan"), "f32", "not finite"),
        (1e5, "bf16", None),
    ],
)
def test_values_that_a_type_cannot_hold_are_refused(tmp_path: Path, value: float, type: str, says: str | None) -> None:
    """A weight that overflows becomes infinite, and the model writes noise."""
    truth = weights(WIDE)
    truth["h.1.attn.c_attn.weight"][3, 5] = value
    source = saved(tmp_path / "source", truth=truth)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.gguf").write_text("old")
    if says is None:
        export(str(source), tmp_path / "out", format="gguf", type=type)
        held = GGUFFile(tmp_path / "out" / "model.gguf").read("blk.1.attn_qkv.weight")[5, 3]
        torch.testing.assert_close(float(held), value, rtol=4e-3, atol=0, equal_nan=True)
    else:
        words = (says,) if says == "not finite" else ("blk.1.attn_qkv.weight", type.upper(), "choose bf16 or f32")
        export_refused(source, tmp_path / "out", *words, format="gguf", type=type)
        assert content(tmp_path / "out") == {"model.gguf": b"old"}


def test_a_model_without_a_tokenizer_is_exported_and_said(tmp_path: Path) -> None:
    """Without a tokenizer llama.cpp needs the size of the vocabulary, and has no end-of-text token."""
    source = saved(tmp_path / "source")
    for format in ("hf", "gguf"):
        assert "without a tokenizer" in export(str(source), tmp_path / format, format=format).notes[0]
    assert sorted(content(tmp_path / "hf")) == HF
    metadata = GGUFFile(tmp_path / "gguf" / "model.gguf").metadata
    assert (metadata["tokenizer.ggml.model"], metadata["gpt2.vocab_size"]) == ("none", 300)
    export(str(tmp_path / "gguf"), tmp_path / "again", format="gguf")
    assert content(tmp_path / "gguf") == content(tmp_path / "again")
    assert gpt2.load(str(tmp_path / "again")).config == WIDE


def test_a_tokenizer_of_another_kind_goes_along_where_it_can(tmp_path: Path) -> None:
    """GGUF has no character tokenizer, nor BERT's vocab.txt of Chinese GPT-2s: a note says that it stays behind."""
    config = replace(WIDE, vocab_size=12, bos_token_id=None, eos_token_id=None)
    characters = saved(tmp_path / "characters", config, chars_of("To be,rnt\n'!"))
    assert export(str(characters), tmp_path / "hf").notes == ()
    assert content(tmp_path / "hf") == content(characters)
    done = export(str(characters), tmp_path / "gguf", format="gguf")
    assert done.notes == ("without its tokenizer: GPT-2's in GGUF is a byte-level BPE, no other; pass ids",)
    assert GGUFFile(tmp_path / "gguf" / "model.gguf").metadata["tokenizer.ggml.model"] == "none"
    chinese = saved(tmp_path / "chinese", replace(WIDE, bos_token_id=2, eos_token_id=3))
    bert(chinese)
    assert "embedding cropped" in export(str(chinese), tmp_path / "out").notes[0]
    kept = {name: (chinese / name).read_bytes() for name in ("vocab.txt", "tokenizer_config.json")}
    assert content(tmp_path / "out").items() >= kept.items()
    assert sorted(content(tmp_path / "out")) == sorted([*HF, *kept])
    assert "without its tokenizer" in export(str(chinese), tmp_path / "chinese.gguf", format="gguf").notes[1]


def test_a_damaged_tokenizer_is_refused(tmp_path: Path, tokenizer: LibraryTokenizer) -> None:
    """Without an error, the export would have no tokenizer; the library's own errors are tracebacks of Rust."""
    source = saved(tmp_path / "source", WIDE, tokenizer)
    for text, says, format in (("{", "not JSON", "hf"), ('{"model": 5}', "of the `tokenizers` library", "gguf")):
        (source / "tokenizer.json").write_text(text)
        export_refused(source, tmp_path / "out", f"{source / 'tokenizer.json'}", says, format=format)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_larger_than_the_model(tmp_path: Path, tokenizer: LibraryTokenizer) -> None:
    """An added token without a row is named and goes along; with an ordinary one the vocabulary is another model's."""
    source = saved(tmp_path / "source", replace(WIDE, vocab_size=299), tokenizer)
    assert "'<|endoftext|>' (299)" in export(str(source), tmp_path / "out").notes[0]
    source = saved(tmp_path / "smaller", replace(WIDE, vocab_size=298, bos_token_id=1, eos_token_id=1), tokenizer)
    export_refused(source, tmp_path / "other", "wrong vocabulary")


def test_ids_beyond_the_vocabulary_become_the_end_of_the_text(tmp_path: Path, tokenizer: LibraryTokenizer) -> None:
    """If the end-of-text id is out of range, llama.cpp uses token 11, GPT-2's comma, and stops at every comma."""
    source = saved(tmp_path / "source", replace(WIDE, bos_token_id=50256, eos_token_id=300, vocab_size=320), tokenizer)
    done = export(str(source), tmp_path / "gguf", format="gguf")
    beyond = "is beyond the vocabulary, written as 299"
    assert done.notes[1:] == (f"bos_token_id 50,256 {beyond}", f"eos_token_id 300 {beyond}")
    assert config_of(GGUFFile(tmp_path / "gguf" / "model.gguf")) == WIDE
    assert tokenizer_of(GGUFFile(tmp_path / "gguf" / "model.gguf")).fingerprint == tokenizer.fingerprint
    assert export(str(source), tmp_path / "hf").config == WIDE


def test_an_end_of_the_text_that_nobody_names_is_said(tmp_path: Path, tokenizer: LibraryTokenizer) -> None:
    """Without an end-of-text id llama.cpp stops at every comma, too."""
    vocab = {token: i for token, i in tokenizer.vocab.items() if i < 299}
    config = replace(WIDE, vocab_size=299, bos_token_id=None, eos_token_id=None)
    source = saved(tmp_path / "source", config, made_bpe(vocab, tokenizer.merges))
    (note,) = export(str(source), tmp_path / "out", format="gguf").notes
    assert "takes token 11" in note
    source = saved(tmp_path / "other", replace(WIDE, bos_token_id=None, eos_token_id=None), tokenizer)
    assert export(str(source), tmp_path / "out", format="gguf").notes == ()
    assert GGUFFile(tmp_path / "out" / "model.gguf").metadata["tokenizer.ggml.eos_token_id"] == 299


@pytest.mark.parametrize("left", ["vocab.bpe", "added_tokens.json", "vocab.json", "tokenizer.json"])
def test_another_tokenizer_in_the_folder_is_refused(tmp_path: Path, tokenizer: LibraryTokenizer, left: str) -> None:
    """Tokenizer files of an earlier export in the folder would be read as this model's."""
    bpe, none = saved(tmp_path / "bpe", WIDE, tokenizer), saved(tmp_path / "none")
    out = tmp_path / "out"
    out.mkdir()
    (out / left).write_text("{}")
    export_refused(none, out, f"holds {left} of another tokenizer")
    if left in VOCABULARY or left == "added_tokens.json":
        export(str(bpe), out)  # written over, or removed
        assert content(out) == content(bpe)
    else:
        export_refused(bpe, out, f"holds {left} of another tokenizer")
        assert list(content(out)) == [left]
    export(str(none), out, format="gguf")


SCALING = "only transformers knows its scaling of attention"


@pytest.mark.parametrize(
    ("changes", "hf", "gguf", "llmc"),
    [
        ({"activation_function": "gelu_fast"}, None, None, None),
        ({"n_inner": 256}, None, None, None),
        ({"activation_function": "gelu"}, "converter takes gelu for the tanh GELU", "activation_function 'gelu'", "'gelu'"),
        ({"activation_function": "relu"}, "converter takes relu for the tanh GELU", "activation_function 'relu'", "'relu'"),
        ({"n_inner": 96}, "converter takes a feed-forward of 96 for 256", None, "a feed-forward of 96"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon 1e-06: CTranslate2", None, "layer_norm_epsilon 1e-06"),
        ({"scale_attn_weights": False}, SCALING, "scale_attn_weights false", "scale_attn_weights false"),
        ({"scale_attn_by_inverse_layer_idx": True}, SCALING, "_by_inverse_layer_idx true", "_by_inverse_layer_idx true"),
        ({"tie_word_embeddings": False}, None, None, "an untied head"),
        ({"reorder_and_upcast_attn": True}, "vLLM refuses it", None, None),
    ],
)
def test_what_others_compute_otherwise_is_said_or_refused(tmp_path: Path, changes: dict[str, Any], hf, gguf, llmc) -> None:
    """Some programs, and llama.cpp's converter, open these without an error and compute another model."""
    source = saved(tmp_path / "source", config := replace(WIDE, **changes))
    done = export(str(source), tmp_path / "hf")
    assert done.config == config
    assert len(done.notes[1:]) == (hf is not None)
    assert hf is None or hf in done.notes[1]
    for format, says, place in (("gguf", gguf, "cannot be expressed in GGUF"), ("llmc", llmc, "cannot be expressed for llm.c")):
        if says is None:
            notes = export(str(source), tmp_path / format, format=format).notes[1:]
            upcast = format == "gguf" and "reorder_and_upcast_attn" in changes
            assert [("the same function, rounded otherwise" in note) for note in notes] == [True] * upcast
        else:
            export_refused(source, tmp_path / format, says, place, "export it as hf", format=format)
            assert not (tmp_path / format).exists()


def test_bad_requests_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    export_refused("no/such", tmp_path, "unknown format 'onnx'", "hf, gguf", format="onnx")
    export_refused("no/such", tmp_path, "unknown type 'q4_0'", "q8_0", format="gguf", type="q4_0")
    export_refused("gpt2", tmp_path, "is for gguf", "gpt2:bf16", type="f16")
    export_refused("gpt2", tmp_path, "llmc keeps the model's dtype", format="llmc", type="bf16")
    assert not list(tmp_path.iterdir())


def test_a_conversion_does_not_hold_the_model_twice() -> None:
    """gpt2-xl's largest matrix has 322 MB: a file is made in pieces of at most 4 MB, as the weights are read."""
    model = gpt2.GPT2(GPT2Config(5_000, 8, 512, 1, 1))
    for type in KINDS:
        pieces, _ = gguf_pieces(model, None, type, "model")
        assert max(len(piece) for piece in pieces) <= 4 << 20
