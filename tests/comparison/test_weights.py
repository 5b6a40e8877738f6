"""Weight changes against NumPy, closed forms and changes of known size."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from gpt2.comparison import tensors as module
from gpt2.comparison.tensors import compare_weights


def one(a: Tensor, b: Tensor):
    return compare_weights(["x"], lambda _: a, lambda _: b).tensors[0]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("piece", [1, 7, 1 << 21])
@pytest.mark.parametrize("shape", [(5,), (4, 9), (9, 4)])
@pytest.mark.parametrize("turned", [False, True])
def test_figures_are_numpys(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], piece: int, turned: bool) -> None:
    """Possible bugs: pieces that overlap or miss a rest, or a transposed view in the wrong order."""
    monkeypatch.setattr(module, "CHUNK", piece)
    a, b = draw(*shape, seed=1), draw(*shape, seed=2)
    b.flatten()[:2] = a.flatten()[:2]
    if turned and len(shape) == 2:
        a = a.t().contiguous().t()
    found, x, y = one(a, b), a.double().numpy(), b.double().numpy()
    assert found.distance == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x), rel=1e-12)
    assert found.max_abs == pytest.approx(np.abs(y - x).max(), rel=1e-12)
    assert found.cosine == pytest.approx((x * y).sum() / np.linalg.norm(x) / np.linalg.norm(y), rel=1e-12)
    assert found.unchanged == (x == y).mean()
    if len(shape) == 2:
        assert found.rank == 4


def test_noise_of_known_size_is_sized_within_one_percent() -> None:
    """The added noise must be found, located and measured."""
    a = {f"h.{i}.x": draw(300, 200, seed=i) for i in range(3)}
    noise = 0.01 * draw(300, 200, seed=9)
    b = {**a, "h.1.x": a["h.1.x"] + noise}
    found = compare_weights(a, a.__getitem__, b.__getitem__)
    assert [tensor.name for tensor in found.most_changed()] == ["h.1.x"]
    assert found.unchanged == ("h.0.x", "h.2.x")
    assert found.tensors[1].distance == pytest.approx(float(noise.norm() / a["h.1.x"].norm()), rel=1e-4)
    assert found.tensors[1].distance == pytest.approx(0.01, rel=0.01)
    assert found.tensors[1].rank == 200
    together = math.sqrt(sum(float(a[name].double().square().sum()) for name in a))
    assert found.total.distance == pytest.approx(float(noise.double().norm()) / together, rel=1e-4)
    assert found.total.unchanged == pytest.approx(2 / 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 8])
def test_a_lora_is_seen_as_one(rank: int, dtype: torch.dtype) -> None:
    """A merged adapter is a product of two thin matrices plus rounding; the rounding has full rank and must not count."""
    a = 0.02 * draw(256, 384, seed=1)
    change = 0.02 * draw(256, rank, seed=2) @ draw(rank, 384, seed=3)
    a = a.to(dtype)
    assert one(a, (a.float() + change).to(dtype)).rank == rank


def test_rounding_to_the_coarser_dtype_is_no_change() -> None:
    """Weights in float32 and the same in bfloat16 were called moved; one step of bfloat16 is a change."""
    a = draw(5)
    assert one(a, a.bfloat16()).rounded
    assert one(torch.zeros(2), -torch.zeros(2)).rounded
    assert not one(a, torch.nextafter(a.bfloat16(), torch.tensor(9.0).bfloat16())).rounded
    assert not one(a, torch.nextafter(a, torch.tensor(9.0))).rounded
