"""Checkpoints that all ranks of an FSDP run write: read back on any number of ranks, refused when a part is missing."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, save, save_file
from support import forks
from support.ranks import ROOT, Run, job, toml
from support.training import flip, outcome

import gpt2
from gpt2.checkpoint.keys import to_file
from gpt2.config import GPT2Config
from gpt2.data.bpe import chars_of
from gpt2.errors import InputError
from gpt2.model import GPT2
from gpt2.optim import adamw
from gpt2.train import folders, parallel, shards, state
from gpt2.train.loss import WithLoss
from gpt2.train.recipe import Recipe

# Rows that neither 2 nor 4 ranks divide; of 5 positions, the fourth of four ranks has none.
CONFIG = GPT2Config(61, 5, 18, 2, 2, bos_token_id=None, eos_token_id=None)
RECIPE = Recipe(batch_size=4, context=5, parallel="fsdp", device="cpu")
LETTERS = chars_of("".join(map(chr, range(33, 33 + 61))))
Tensors = dict[str, torch.Tensor]


def values() -> tuple[Tensors, Tensors]:
    """The weights and moments that the tests write: drawn, so that no two entries are equal by chance."""
    random = torch.Generator().manual_seed(7)
    weights = {name: torch.randn(p.shape, generator=random) for name, p in GPT2(CONFIG).named_parameters()}
    order = [n for n in weights if weights[n].ndim >= 2] + [n for n in weights if weights[n].ndim < 2]
    moments: Tensors = {}
    for index, name in enumerate(order):
        moments[f"{index}.step"] = torch.tensor(float(index + 1))
        for which in ("exp_avg", "exp_avg_sq"):
            moments[f"{index}.{which}"] = torch.rand(weights[name].shape, generator=random)
    return weights, moments


class Resaved:
    """On each rank: take weights and moments, from ``read`` or from :func:`values`, save them to ``write``, and return all."""

    def __init__(self, read: Path | None, write: Path, *, how: str = "fsdp") -> None:
        self.read, self.write, self.recipe = read, write, replace(RECIPE, parallel=how)

    def __call__(self, rank: int) -> bytes:
        with parallel.joined("cpu") as ranks:
            model, (weights, moments) = GPT2(CONFIG), values()
            if self.read is not None:
                weights, moments = {n: torch.zeros_like(p) for n, p in weights.items()}, {}
                if rank == 0:
                    weights, (moments, _) = dict(gpt2.load(str(self.read)).named_parameters()), state.stored(self.read)
            for name, parameter in model.named_parameters():
                parameter.data = weights[name].detach()
            parallel.broadcast(model, ranks)
            scored = parallel.wrap(WithLoss(model), self.recipe, ranks)
            optimizer = adamw(model, self.recipe.optim)
            parallel.restore(optimizer, moments if rank == 0 else {}, ranks)
            if shards.by_all(self.write, model, self.recipe, ranks):
                shards.save(self.write, model, LETTERS, optimizer, state.Progress(8), ranks)
            moments = parallel.gathered(optimizer)
            with parallel.whole(scored):
                return save({name: parallel.full(p).detach() for name, p in model.named_parameters()} | moments)


def written(folder: Path, ranks: int) -> Path:
    folder.mkdir(exist_ok=True)
    job(ranks, Resaved(None, folder))
    return folder / "step-8"


@pytest.fixture(scope="module")
def by_two(tmp_path_factory) -> Path:
    return written(tmp_path_factory.mktemp("two"), 2)


def require_equal(a: Tensors, b: Tensors) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_two_ranks_write_what_every_reader_reads(by_two):
    """A part that is written with another rank's offsets loads as other weights without an error."""
    import torch.distributed.checkpoint as dcp  # takes over a second

    parts = sorted(str(path.relative_to(by_two)) for path in by_two.rglob("shard-*"))
    assert parts == [f"{where}shard-0000{n}-model-00001-of-00001.safetensors" for where in ("optimizer/", "") for n in (1, 2)]
    weights, moments = values()
    half = [sum(path.stat().st_size for path in by_two.rglob(f"shard-0000{n}-*")) for n in (1, 2)]
    assert 0.8 < half[0] / half[1] < 1.25
    require_equal(dict(gpt2.load(str(by_two)).named_parameters()), weights)
    require_equal(state.stored(by_two)[0], moments)
    assert state.newest_intact(by_two.parent) == (by_two, [])
    for folder, wanted in ((by_two, {to_file(n): t for n, t in weights.items()}), (by_two / "optimizer", moments)):
        found = {name: torch.full_like(tensor, torch.nan) for name, tensor in wanted.items()}
        dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
        require_equal(found, wanted)
    assert not list(by_two.rglob(".metadata"))  # DCP's pickle


@pytest.mark.parametrize(("first", "then", "how"), [(2, 4, "fsdp"), (4, 2, "ddp")])
@pytest.mark.slow
def test_read_back_on_another_number_of_ranks_to_the_bit(by_two, tmp_path, first, then, how):
    """Rows that are dealt out anew must be the same rows, of weights and of both moments."""
    source = by_two if first == 2 else written(tmp_path / "first", first)
    (tmp_path / "again").mkdir()
    for found in job(then, Resaved(source, tmp_path / "again", how=how)):
        require_equal(load(found), values()[0] | values()[1])
    again = tmp_path / "again" / "step-8"
    assert again.is_dir() == (how == "fsdp" and then > 1)
    if again.is_dir():
        require_equal(dict(gpt2.load(str(again)).named_parameters()), values()[0])


def rewrite(path: Path, change) -> None:
    with safe_open(path, "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    change(tensors, metadata)
    save_file(tensors, path, metadata)


def without_offsets(tensors: Tensors, metadata: dict[str, str]) -> None:
    metadata["DCP_SHARDING_INFO"] = "[" * 2000


def shortened(tensors: Tensors, metadata: dict[str, str]) -> None:
    name = to_file("wte.weight")
    tensors[name] = tensors[name][:5].contiguous()


FIRST, SECOND = (f"shard-0000{n}-model-00001-of-00001.safetensors" for n in (1, 2))
DAMAGES = {
    "the first part is missing": (lambda p: (p / FIRST).unlink(), "rows 0 to .* are missing or there twice"),
    "one part is there twice": (lambda p: shutil.copy(p / FIRST, p / FIRST.replace("1", "3", 1)), "there twice"),
    "a part has too few rows": (lambda p: rewrite(p / FIRST, shortened), "rows 5 to 31 of .*wte.weight are missing"),
    "no offsets": (lambda p: rewrite(p / FIRST, without_offsets), "no DCP_SHARDING_INFO that parts tensors by rows"),
}


@pytest.mark.parametrize(("damage", "says"), DAMAGES.values(), ids=DAMAGES)
def test_parts_that_do_not_fit_are_refused(by_two, tmp_path, damage, says):
    """DCP's reader takes the largest end of a part for the tensor's size, and leaves the rows between as they were."""
    copy = shutil.copytree(by_two, tmp_path / "step-8")
    damage(copy)
    with pytest.raises(InputError, match=says):
        gpt2.load(str(copy))


@pytest.mark.parametrize(("damage", "says"), [(flip, "does not have the sha256"), (Path.unlink, "is missing")])
def test_a_damaged_part_is_seen_before_a_run_goes_on(by_two, tmp_path, damage, says):
    copy = shutil.copytree(by_two, tmp_path / "step-8")
    damage(copy / "optimizer" / SECOND)
    found, (skipped,) = state.newest_intact(tmp_path)
    assert found is None
    assert f"{SECOND} {says}" in skipped


def test_a_full_disk_on_rank_0_is_one_line_on_every_rank(recipe, tmp_path):
    """Rank 0 left with its line alone; the others reported a lost process, and the launcher began the job again."""
    first, second = job(2, Run(replace(recipe, batch_size=4, parallel="fsdp"), tmp_path / "run", change="full disk on rank 0"))
    assert first == second
    assert "cannot write there (No space left on device)" in first
    assert not list((tmp_path / "run").glob("*step-*"))


def test_a_part_that_the_folder_does_not_show_yet_is_listed(tmp_path):
    """On a network's disk, another machine's new file may be missing in a listing; its loss would then never be noticed."""
    with folders.appearing(tmp_path / "step-8", {"optimizer/part": "0" * 64}) as aside:
        aside.mkdir()
    assert json.loads((tmp_path / "step-8" / "manifest.json").read_text()) == {"optimizer/part": "0" * 64}


KILLED = """
import os, signal, sys
from gpt2.cli.main import main
from gpt2.train import shards
real = shards._write
def write(path, tensors, ranks):
    real(path, tensors, ranks)
    if str(path).endswith(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
shards._write = write
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
def test_a_rank_is_killed_while_all_write_and_the_checkpoint_before_is_taken(recipe, tmp_path):
    """A folder that appears before the last rank has written would be resumed from with rows that are missing."""
    run, shared, after = tmp_path / "run", replace(recipe, batch_size=4, parallel="fsdp"), f"optimizer/{SECOND}"
    (tmp_path / "killed.py").write_text(KILLED)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    words = [tmp_path / "killed.py", f".step-8.partial/{after}", "train", toml(shared, tmp_path / "run.toml"), "--out", run]
    assert "SIGKILL" in forks.run(*torchrun, *words, environ=environment, status=1).stderr
    assert [path.name for path in state.checkpoints(run)] == ["step-4"]
    assert (run / ".step-8.partial" / after).is_file()
    assert job(2, Run(shared, run)) == job(2, Run(shared, tmp_path / "whole")) == ["finished"] * 2
    assert outcome(run) == outcome(tmp_path / "whole")
