"""Int8 weights: rounded to the nearest step, equal for any number of rows, and refused where they are not supported."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.commands import refusal
from support.random_models import random_model

import gpt2
from gpt2 import lora
from gpt2.checkpoint.export import export
from gpt2.comparison.sides.checkpoint_side import CheckpointSide
from gpt2.config import GPT2Config
from gpt2.data.shakespeare import play
from gpt2.decoder import Decoder
from gpt2.generation import generate
from gpt2.int8 import MAX_KERNEL_ROWS, ROW_CHUNK, WEIGHT_CHUNK, Int8GPT2, product, quantise, rounded_parameter
from gpt2.model import GPT2

CONFIG = GPT2Config(vocab_size=67, n_positions=16, n_embd=24, n_layer=2, n_head=3, n_inner=41)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_weight_goes_to_the_nearest_of_255_steps(dtype: torch.dtype) -> None:
    """Possible bugs: a scale rounded after the division, the largest weight clipped, a row of zeros divided by zero."""
    matrix = torch.randn(200, 31, generator=torch.Generator().manual_seed(0)).mul(torch.logspace(-20, 20, 200)[:, None]).to(dtype)
    matrix[3] = 0
    weight, scale = quantise(matrix)
    assert weight.dtype == torch.int8
    assert scale.equal(scale.bfloat16().float())  # PyTorch's kernel accepts no other
    error = (weight.double() * scale.double()[:, None] - matrix.double()).abs()
    assert (error <= scale.double()[:, None] * 0.5000001).all()
    assert not weight[3].any()
    assert (weight.abs().amax(1)[torch.arange(200) != 3] >= 125).all()  # the full range is used
    assert weight.min() >= -127


@pytest.fixture(params=["VNNI", "no VNNI"])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kinds of processor: this machine's integer instructions if it has them, and the fallback without."""
    if request.param == "no VNNI":
        monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    elif not torch.cpu._is_vnni_supported():
        pytest.skip("this processor has no instructions for whole numbers")
    return request.param


def rows_of(count: int, width: int) -> torch.Tensor:
    """Rows of many sizes; every third has an entry much larger than the others."""
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(1))
    x[::3, width // 2] = 60
    return x * torch.logspace(-6, 6, count)[:, None]


@pytest.mark.parametrize(
    ("n_in", "n_out"), [(24, 41), (160, 480), pytest.param(64, WEIGHT_CHUNK // 64 + 5, marks=pytest.mark.slow), (17, 3)]
)
def test_many_rows_and_few_give_the_same_product(n_in: int, n_out: int, processor: str) -> None:
    """The text must not depend on reading tokens at once or one by one; a large entry must not erase the others."""
    weight, scale = quantise(torch.randn(n_out, n_in, generator=torch.Generator().manual_seed(0)))
    x = rows_of(ROW_CHUNK + MAX_KERNEL_ROWS, n_in)
    matrix = weight.double() * scale.double()[:, None]
    exact, typical = F.linear(x.double(), matrix), x.double().norm(dim=1) * matrix.norm() / n_in**0.5
    found = product(x, weight, scale)
    assert found.dtype == torch.float32
    error = (found - exact).norm(dim=1) / typical
    assert error.max() < 0.02
    assert error[::3].max() < (2e-4 if processor == "VNNI" else 0.02)  # those use 16 bits
    bias = torch.randn(n_out, generator=torch.Generator().manual_seed(2))
    for added in (None, bias):
        out = torch.empty_like(found)
        many = product(x, weight, scale, added, out)
        if processor == "VNNI":
            assert many is out
        torch.testing.assert_close(many, found if added is None else found + bias)
        few = torch.cat([product(part, weight, scale, added) for part in x[: MAX_KERNEL_ROWS + 5].split(MAX_KERNEL_ROWS)])
        each = torch.cat([product(row, weight, scale, added) for row in x[: MAX_KERNEL_ROWS + 5].split(1)])
        if processor == "VNNI":
            assert few.equal(many[: MAX_KERNEL_ROWS + 5])
            assert each.equal(few)
        else:
            torch.testing.assert_close(each, few, rtol=2**-7, atol=0.01 * float(few.abs().max()))


def test_a_row_gets_as_many_bits_alone_as_among_others(processor: str) -> None:
    """A row whose largest entry is about four times its root mean square: rounding decides between 8 and 16 bits."""
    generator = torch.Generator().manual_seed(0)
    weight, scale = quantise(torch.randn(96, 768, generator=generator))
    x = torch.randn(256, 768, generator=generator)
    rest = x[:, 1:].double().square().sum(1)
    x[:, 0] = (rest * 16 / (768 - 16)).sqrt().float() * (1 + 2**-23 * torch.randint(-3, 4, (256,), generator=generator))
    among, alone = product(x, weight, scale), torch.cat([product(row, weight, scale) for row in x.split(1)])
    if processor == "VNNI":
        assert alone.equal(among)
    torch.testing.assert_close(alone, among, rtol=2**-7, atol=0.01 * float(among.abs().max()))


def test_no_sum_of_whole_numbers_overflows() -> None:
    """Instructions older than VNNI add two products in 16 bits, which can overflow."""
    if not torch.cpu._is_vnni_supported():
        pytest.skip("this processor has no instructions for whole numbers")
    weight, scale = torch.full((64, 3072), 127, dtype=torch.int8), torch.ones(64)
    for rows in (1, 2, 40):
        x = torch.full((rows, 3072), 127.0)
        assert (product(x, weight, scale) == 127 * 127 * 3072).all()
        assert (product(-x, weight, scale) == -127 * 127 * 3072).all()


def test_what_is_no_number_stays_so(processor: str) -> None:
    """NaN must stay NaN and in its own row; a row of zeros must stay zero."""
    weight, scale = quantise(torch.randn(48, 32, generator=torch.Generator().manual_seed(0)))
    x = rows_of(6, 32)
    x[1, 3], x[2, 5], x[4] = float("nan"), float("inf"), 0
    bias = torch.arange(48.0)
    for added in (None, bias):
        for found in (product(x, weight, scale, added), torch.cat([product(row, weight, scale, added) for row in x.split(1)])):
            assert found.isfinite().all(1).tolist() == [True, False, False, True, True, True]
            assert not found[[1, 2]].isfinite().any()
            assert found[4].equal(torch.zeros(48) if added is None else bias)


TIED = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


def drawn(tied: bool = True) -> GPT2:
    return random_model(replace(CONFIG, tie_word_embeddings=tied), 0.3, dtype=torch.float32)


def quantised(model: GPT2) -> Int8GPT2:
    """A quantised copy, made as a checkpoint is loaded."""
    copy = Int8GPT2(model.config)
    for name, tensor in model.state_dict().items():
        copy.put(name, tensor, tensor.device)
    return copy


@TIED
def test_it_is_the_model_of_its_rounded_weights(tied: bool) -> None:
    """Possible bugs: a scale per column instead of per row, a transposed projection, rounded positions or norms."""
    model, rounded = drawn(tied), drawn(tied)
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            before = parameter.clone()
            parameter.copy_(rounded_parameter(name, parameter))
            assert parameter.equal(before) == (parameter.ndim == 1 or name == "wpe.weight"), name
        small = quantised(model)
        ids = torch.randint(67, (3, 12), generator=torch.Generator().manual_seed(1))
        expected, found = rounded(ids), small(ids)
        assert (found - expected).norm() < 0.02 * expected.norm()  # the rounding of the activations
        off = model(ids)
        assert (found - off).norm() > (found - expected).norm()


@TIED
@pytest.mark.parametrize("rows", [1, 5, MAX_KERNEL_ROWS + 1])
def test_decoding_equals_the_model(rows: int, tied: bool) -> None:
    """Possible bugs: a decoder without a scale, or with another token's scale."""
    small = quantised(drawn(tied))
    decoder, caches = Decoder(small), (small.new_cache(rows), small.new_cache(rows))
    assert decoder.forward_pass is not None
    ids = torch.randint(67, (rows, 8), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = small(ids[:, :7], cache=caches[0])[:, -1], small(ids[:, 7:], cache=caches[0])[:, -1]
    found = decoder.prefill(ids[:, :7], caches[1]), decoder.decode(ids[:, 7:], caches[1])[:, -1]
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 0.01 * b.norm()


@pytest.mark.slow
def test_what_it_costs_on_the_embedded_model() -> None:
    """The documented bound of `:int8`: KL at most 1e-3 nats, and the same most likely token 98 times in 100."""
    tokenizer = gpt2.load_tokenizer("shakespeare-mini:int8")
    ids = torch.tensor(tokenizer.encode(play("twelfth-night"))[:8192]).view(-1, 256)
    exact, small = gpt2.load("shakespeare-mini"), gpt2.load("shakespeare-mini", dtype="int8")
    assert sum(t.nbytes for t in small.state_dict().values()) < 0.3 * sum(p.nbytes for p in exact.parameters())
    with torch.inference_mode():
        kl = same = 0.0
        for window in ids.split(8):
            a, b = exact(window).log_softmax(-1), small(window).float().log_softmax(-1)
            kl += float((a.exp() * (a - b)).sum())
            same += float((a.argmax(-1) == b.argmax(-1)).sum())
    assert 0 < kl / ids.numel() <= 1e-3
    assert same / ids.numel() >= 0.98


def test_a_name_is_enough(tmp_path: Path) -> None:
    """From a file one tensor at a time, from a model in memory, and from [out, in]: the same result."""
    folder = gpt2.save(gpt2.load(), gpt2.load_tokenizer(), tmp_path / "m")
    by_file, by_model = gpt2.load(f"{folder}:int8"), quantised(gpt2.load())
    assert isinstance(by_file, GPT2)
    states = by_file.state_dict(), by_model.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    prompt = gpt2.load_tokenizer().encode("ROMEO:\n")
    assert len(generate(by_file, (prompt * 99)[:250], 12, temperature=0)) == 262  # beyond the positions
    batch, mask = torch.tensor([prompt, [0] * (len(prompt) - 1) + prompt[:1]]), torch.ones(2, len(prompt))
    mask[1, :-1] = 0
    both = generate(by_file, batch, 12, temperature=0, attention_mask=mask)
    assert both[1, -12:].tolist() == generate(by_file, prompt[:1], 12, temperature=0)[1:]


def test_compare_reads_the_weights_as_they_run() -> None:
    """The report must not call the weights unchanged, nor show other weights than those that are multiplied."""
    side = CheckpointSide.open("shakespeare-mini:int8")
    read, plain = side.weights(side.config.vocab_size), gpt2.load()
    with side:
        model = side.program
        assert isinstance(model, Int8GPT2)
        conv = model.h[1].attn.c_attn
        torch.testing.assert_close(read("h.1.attn.c_attn.weight"), (conv.weight.float() * conv.scale[:, None]).t())
        torch.testing.assert_close(read("wte.weight"), model.wte(torch.arange(2048)))
    assert read("wpe.weight").equal(plain.wpe.weight)


REFUSED: list[tuple[str, Callable[[Path], object]]] = [
    ("load_into", lambda folder: gpt2.load_into(drawn(), "shakespeare-mini:int8")),
    ("diagnose", lambda folder: gpt2.diagnose(drawn(), "shakespeare-mini:int8")),
    ("leave :int8 out", lambda folder: gpt2.verify("shakespeare-mini:int8")),
    ("leave :int8 out", lambda folder: export("shakespeare-mini:int8", folder)),
    ("leave :int8 out", lambda folder: gpt2.compare("shakespeare-mini", "hf/shakespeare-mini:int8")),
    ("lora", lambda folder: lora.inject(gpt2.load("shakespeare-mini:int8"))),
    ("cannot save this model", lambda folder: gpt2.save(gpt2.load("shakespeare-mini:int8"), None, folder)),
    ("cannot be trained", lambda folder: gpt2.load("shakespeare-mini:int8").train()),
    ("asks for int8", lambda folder: gpt2.load("shakespeare-mini:int8", dtype="float32")),
]


@pytest.mark.parametrize(("message", "act"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_where_eight_bits_will_not_do(message: str, act: Callable[[Path], object], tmp_path: Path) -> None:
    """int8 weights are an approximation: verify, export and training must refuse them in one line, without a traceback."""
    assert re.search(message, refusal(act, tmp_path))
