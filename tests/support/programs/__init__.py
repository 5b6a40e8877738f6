"""GPT-2s that are no torch modules: programs in NumPy, C and JavaScript with faults to switch on, which dump their tensors.

Each language has a file that imports nothing of ours, in a style of its own (`numpy_port.py`, `flat_port.c`, `token_port.js`). A
:class:`Program` is a language and a line of faults, in the words of `support.faulty.faults`. tests/port/test_programs.py
proves, against torch computations written by other hands, that each is as faulty as it says.
"""

import shutil
import subprocess
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file

from gpt2.config import GPT2Config
from support import hf_layouts
from support.faulty import CONFIG, MEANINGS, Faults, Meaning
from support.faulty.loading import weights
from support.programs import numpy_port
from support.programs.files import flat

__all__ = [
    "DTYPES",
    "LANGUAGES",
    "LEVELS",
    "PROGRAMS",
    "SIZES",
    "Home",
    "Program",
    "flat_weights",
    "missing",
    "read_dump",
    "shuffled",
]

HERE = Path(__file__).parent
LEVELS = ("full", "block", "logits")
DTYPES = ("float16", "float32", "float64")
SIZES = {
    "tiny": CONFIG,
    "wider": GPT2Config(vocab_size=101, n_positions=31, n_embd=48, n_layer=4, n_head=3, bos_token_id=0, eos_token_id=0),
}
LANGUAGES = {"numpy": None, "c": "gcc", "javascript": "node"}  # and what it needs on the machine

LINES: dict[str, str] = tomllib.loads((HERE / "first.toml").read_text())

# Faults of weights that give the values of another fault.
SAME_VALUES = {
    "not-loaded-biases": ("missing-bias", "not-loaded"),  # zeros
    "wrong-all-first": ("layer-repeated", "wrong-tensor"),  # block 0 again and again
}


@dataclass(frozen=True)
class Program:
    """A program with its faults; ``line`` is the faults, "" for none. ``level`` is how much it dumps."""

    language: str
    line: str
    level: str = "full"

    @property
    def architecture(self) -> str:
        return self.language

    @property
    def name(self) -> str:
        return f"{self.language}: {self.line or 'right'}"

    @property
    def faults(self) -> Faults:
        return Faults(self.line)

    @property
    def causes(self) -> dict[str, tuple[str, ...]]:
        """Word of a fault -> the ids of causes that describe it, the best first."""
        return {word: self.meaning(word).ids for word in self.faults.sites}

    def meaning(self, word: str) -> Meaning:
        """As :data:`MEANINGS`, but for what a dump cannot show: parameters, only what was computed from them."""
        return replace(MEANINGS[word], ids=SAME_VALUES[word]) if word in SAME_VALUES else MEANINGS[word]

    @property
    def points(self) -> tuple[str, ...]:
        """Where it may first differ; () for logits alone, which have no place. With a tensor a block, its block's end too."""
        points = self.faults.first()
        if self.level == "logits":
            return ()
        if self.level == "full":
            return points
        blocks = {point.lstrip("=").split(".")[1] for point in points if point.lstrip("=").startswith("h.")}
        ends = {f"h.{number}" for number in blocks} | ({"logits"} if "ln_f" in points else set())
        return (*points, *ends, *(["h.0", "embed"] if {"wte", "wpe", "embed"} & set(points) else []))


PROGRAMS: dict[str, Program] = {
    program.name: program for language, lines in LINES.items() for program in (Program(language, one) for one in lines.split())
}


def missing(language: str) -> str | None:
    """Return what the machine lacks for a language, or None."""
    tool = LANGUAGES[language]
    return None if tool is None or shutil.which(tool) else f"no {tool} on this machine"


@cache
def _compiled(folder: Path) -> Path:
    binary = folder / "flat_port"
    command = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(binary), str(HERE / "flat_port.c"), "-lm"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return binary


class Home:
    """A folder with a random checkpoint, the files that the programs read, ids, and what the programs dump.

    ``model`` is the checkpoint's folder. ``ids`` are (2, T) for NumPy and C; JavaScript runs the first row.
    """

    def __init__(self, folder: Path, config: GPT2Config = CONFIG, tokens: int = 11, seed: int = 0) -> None:
        self.folder, self.config, self.model = folder, config, folder / "model"
        self.model.mkdir(parents=True)
        state = weights(config, seed)
        hf_layouts.write_weights(hf_layouts.write_config(self.model, config) / "model.safetensors", state, start=3)
        arrays = load_file(self.model / "model.safetensors")
        np.savez(folder / "weights.npz", sizes=np.array([config.n_head, config.n_layer]), **arrays)
        (folder / "weights.bin").write_bytes(flat_weights(config, arrays))
        self.ids = torch.randint(config.vocab_size, (2, tokens), generator=torch.Generator().manual_seed(seed + 1))
        np.save(folder / "ids.npy", self.ids.numpy())
        (folder / "ids.txt").write_text("".join(" ".join(map(str, row)) + "\n" for row in self.ids.tolist()))
        self.count = 0

    def command(
        self, program: Program, out: Path, dtype: str, compute: str, foreign: int = -1, ids: str | None = None
    ) -> list[str]:
        """The command that runs a program; ``ids`` in place of this folder's file of them."""
        line, level = program.line, program.level
        here, ids = self.folder, ids or str(self.folder / ("ids.npy" if program.language == "numpy" else "ids.txt"))
        if program.language == "numpy":
            options = ["--faults", line, "--level", level, "--dtype", dtype, "--compute", compute, "--foreign", str(foreign)]
            return ["python", str(HERE / "numpy_port.py"), ids, str(out), str(here / "weights.npz"), *options]
        if program.language == "c":
            return [str(_compiled(here)), ids, str(out), str(here / "weights.bin"), line, level, dtype, str(foreign)]
        files = [str(self.model / name) for name in ("model.safetensors", "config.json")]
        return ["node", str(HERE / "token_port.js"), ids, str(out), *files, line, level, dtype, compute, str(foreign)]

    def dump(self, program: Program, dtype: str = "float64", compute: str = "float64", foreign: int = -1) -> Path:
        """Run a program, and return the file or folder that it wrote. C computes in float32, whatever ``compute`` says."""
        self.count += 1
        out = self.folder / f"dump{self.count}{dict(numpy='.npz', c='', javascript='.safetensors')[program.language]}"
        command = self.command(program, out, dtype, compute, foreign)
        if program.language == "numpy":
            numpy_port.main(command[2:])  # in this process: numpy takes longer to import than to run
        else:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            if done.returncode:
                raise RuntimeError(f"{program.name}: {done.stderr[-500:]}")
        return out


def flat_weights(config: GPT2Config, arrays: dict[str, np.ndarray]) -> bytes:
    """The file that flat_port.c reads: six sizes, then every tensor, those of the blocks by their kind."""
    sizes = [config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head, config.inner]
    return flat(arrays, config.n_layer, sizes)


def read_dump(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a dump by name, read without our own reader."""
    if path.is_dir():
        return {file.stem: np.load(file) for file in sorted(path.glob("*.npy"))}
    return load_file(path) if path.suffix == ".safetensors" else dict(np.load(path))


def shuffled(path: Path, seed: int) -> Path:
    """A copy of a dump with names that say nothing, in another order; only the ids keep theirs."""
    arrays, draw = read_dump(path), np.random.default_rng(seed)
    ids = next(name for name in ("input_ids", "tokens", "ids") if name in arrays)
    others = [name for name in arrays if name != ids]
    order = draw.permutation(len(others))
    named = {f"array_{number}": arrays[others[old]] for number, old in enumerate(order)}
    out = path.parent / f"{path.stem}_shuffled.npz"
    np.savez(out, ids=arrays[ids], **named)
    return out
