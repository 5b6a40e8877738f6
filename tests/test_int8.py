"""Eight-bit weights: as near as eight bits come, the same however they are run, and refused where they will not do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import gpt2
from gpt2 import lora
from gpt2.checkpoint.export import export
from gpt2.cli.main import main
from gpt2.compare.side import Side
from gpt2.config import GPT2Config
from gpt2.data.shakespeare import play
from gpt2.errors import InputError
from gpt2.fast import step_of
from gpt2.generate import generate
from gpt2.int8 import FEW, PIECE, Int8GPT2, as_it_runs, product, quantise
from gpt2.model import GPT2

CONFIG = GPT2Config(vocab_size=67, n_positions=16, n_embd=24, n_layer=2, n_head=3, n_inner=41)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_weight_goes_to_the_nearest_of_255_steps(dtype: torch.dtype) -> None:
    """A scale rounded after the weights were divided by it, the largest clipped, a row of zeros divided by zero."""
    matrix = torch.randn(200, 31, generator=torch.Generator().manual_seed(0)).mul(torch.logspace(-20, 20, 200)[:, None]).to(dtype)
    matrix[3] = 0
    weight, scale = quantise(matrix)
    assert weight.dtype == torch.int8
    assert scale.dtype == torch.bfloat16
    error = (weight.double() * scale.double()[:, None] - matrix.double()).abs()
    assert (error <= scale.double()[:, None] * 0.5000001).all()
    assert not weight[3].any()
    assert (weight.abs().amax(1)[torch.arange(200) != 3] >= 125).all()  # all of the range is used
    assert weight.min() >= -127


def test_many_rows_and_few_give_the_same_product() -> None:
    """Text that depends on whether it was read at once or token by token."""
    generator = torch.Generator().manual_seed(0)
    for n_in, n_out in ((24, 41), (160, 480), (64, PIECE // 64 + 5)):
        weight, scale = quantise(torch.randn(n_out, n_in, generator=generator))
        x = torch.randn(FEW + 1, n_in, generator=generator)
        exact = F.linear(x.bfloat16().double(), weight.double() * scale.double()[:, None])
        many, few = product(x, weight, scale), product(x[:FEW], weight, scale)
        for found, truth in ((many, exact), (few, exact[:FEW])):
            assert found.dtype == torch.bfloat16
            torch.testing.assert_close(found.double(), truth, rtol=2**-8, atol=1e-4)


def drawn() -> GPT2:
    torch.manual_seed(0)
    model = GPT2(CONFIG).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def test_it_is_the_model_of_its_rounded_weights() -> None:
    """A scale for columns instead of rows, a projection on its side, positions or norms that were rounded too."""
    model, rounded = drawn(), drawn()
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            before = parameter.clone()
            parameter.copy_(as_it_runs(name, parameter))
            assert parameter.equal(before) == (parameter.ndim == 1 or name == "wpe.weight"), name
        small = Int8GPT2.of(model)
        ids = torch.randint(67, (3, 12), generator=torch.Generator().manual_seed(1))
        expected, found = rounded(ids), small(ids)
        assert (found - expected).norm() < 0.02 * expected.norm()  # the activations' rounding to bfloat16
        off = model(ids)
        assert (found - off).norm() > (found - expected).norm()


@pytest.mark.parametrize("rows", [1, 5, FEW + 1])
def test_the_step_is_the_model(rows: int) -> None:
    """A step that leaves out a scale or reads another token's."""
    small = Int8GPT2.of(drawn())
    ids = torch.randint(67, (rows, 8), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        caches = small.new_cache(rows), small.new_cache(rows)
        for cache in caches:
            small(ids[:, :7], cache=cache)
        expected, step = small(ids[:, 7:], cache=caches[0])[:, -1], step_of(small)
        assert step is not None
        found = step(ids[:, 7:], caches[1])
    assert (found.float() - expected.float()).norm() <= 0.01 * expected.float().norm()


def test_what_it_costs_on_the_embedded_model() -> None:
    """The promise beside `:int8`: KL at most 1e-3 nats, and the same likeliest token 98 times in 100."""
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
    """From a file one tensor at a time, from a model in memory, from [out, in]: one result."""
    folder = gpt2.save(gpt2.load(), gpt2.load_tokenizer(), tmp_path / "m")
    by_file, by_model = gpt2.load(f"{folder}:int8"), Int8GPT2.of(gpt2.load())
    assert isinstance(by_file, GPT2)
    states = by_file.state_dict(), by_model.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    prompt = gpt2.load_tokenizer().encode("ROMEO:\n")
    ids = generate(by_file, prompt, 300, temperature=0)  # beyond the positions
    assert len(ids) == len(prompt) + 300
    batch, mask = torch.tensor([prompt, [0] * (len(prompt) - 1) + prompt[:1]]), torch.ones(2, len(prompt))
    mask[1, :-1] = 0
    both = generate(by_file, batch, 12, temperature=0, attention_mask=mask)
    assert both[1, -12:].tolist() == generate(by_file, prompt[:1], 12, temperature=0)[1:]


def test_compare_reads_the_weights_as_they_run() -> None:
    """Weights reported as unchanged, or all of them as other than what was multiplied with."""
    side = Side.open("shakespeare-mini:int8")
    read, plain = side.reader(), gpt2.load()
    with side.model() as model:
        assert isinstance(model, Int8GPT2)
        conv = model.h[1].attn.c_attn
        torch.testing.assert_close(read("h.1.attn.c_attn.weight"), (conv.weight.float() * conv.scale.float()[:, None]).t())
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
    ("unknown dtype 'int4'", lambda folder: gpt2.load("shakespeare-mini:int4")),
]


@pytest.mark.parametrize(("message", "act"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_where_eight_bits_will_not_do(message: str, act: Callable[[Path], object], tmp_path: Path) -> None:
    """A verdict, a file or a training run on weights that only approximate the model's, or a traceback from deep inside."""
    with pytest.raises(InputError, match=message) as caught:
        act(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_command_line_says_it_in_one_line(capsys: pytest.CaptureFixture) -> None:
    """`gpt2 info gpt2:int8` with a traceback."""
    for words in (["info", "shakespeare-mini:int8"], ["train", "finetune-shakespeare", "--init", "shakespeare-mini:int8"]):
        assert main(words) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert main(["generate", "shakespeare-mini:int8", "--prompt", "A", "--max-new-tokens", "3"]) == 0
