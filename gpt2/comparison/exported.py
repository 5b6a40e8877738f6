"""Check an export: open it in every program that is installed, and hold what each computes against the source model.

README.md says what each must give. llama.cpp takes its GELU from a table over float16, and rounds what it multiplies with an F16,
BF16 or Q8_0 matrix to that type as well (ggml-cpu: vec.h, vec_dot_type).
"""

import importlib
import importlib.util
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.checkpoint.checkpoint import Checkpoint, model_with, open_path
from gpt2.checkpoint.export import GGUF_FILE, OF_DTYPE, Export, exported_model, opened
from gpt2.checkpoint.gguf_writer import parameters_of, type_of
from gpt2.checkpoint.keys import from_file, head_name, layer
from gpt2.comparison.sides.checkpoint_side import CheckpointSide
from gpt2.comparison.sides.engines import CTranslate2Side, LlamaCppSide
from gpt2.comparison.sides.side import Side
from gpt2.data import Tokenizer
from gpt2.data.adapter import auto_ids, auto_tokenizer
from gpt2.errors import InputError
from gpt2.measure.metrics import Progress, silent
from gpt2.measure.rounding import FORWARD_RATIO, rounding_noise
from gpt2.measure.user_code import error_line
from gpt2.model import GPT2

TOKENS = 128
TEXTS = ("To be, or not to be\n", "ROMEO:\nI'll   be 21 — naïve?\t\U0001f3ad", "   ", "e\u0301 12345 don't")
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
PACKAGES = {  # module -> (program, what installs it, the format that it opens); a method of _Check has the module's name
    "transformers": ("transformers", "pip install transformers", "hf"),
    "ctranslate2": ("CTranslate2", "pip install 'gpt2-toolkit[ctranslate2]'", "hf"),
    "gguf": ("gguf package", "pip install gguf", "gguf"),
    "llama_cpp": ("llama.cpp", "pip install 'gpt2-toolkit[llamacpp]'", "gguf"),
}
Outcome = tuple[float | None, float | None, bool | None, str]  # all of Opened but its program


@dataclass(frozen=True)
class Opened:
    """What one program made of an export; ``error`` and ``allowed`` are root mean squares, relative to the largest logit.

    ``ok`` is None where the program does not open such a model at all; ``note`` then says why.
    """

    program: str
    error: float | None
    allowed: float | None
    ok: bool | None
    note: str


@dataclass(frozen=True)
class ExportCheck:
    """An export, opened in every program. ``rounding`` is what storing the weights in this type does to the logits."""

    opened: tuple[Opened, ...]
    missing: tuple[tuple[str, str], ...]  # program, the command that installs it
    rounding: float
    tokens: int
    seconds: float

    @property
    def ok(self) -> bool:
        return not any(each.ok is False for each in self.opened)

    def table(self) -> str:
        """Return a line for each program, and one for each that is not installed."""
        lines = [f"  check on {self.tokens} tokens; storing in this type moves the logits by {self.rounding:.1e} of the largest"]
        for each in self.opened:
            verdict = {True: "ok", False: "DIFFERS", None: "not opened"}[each.ok]
            distance = "" if each.error is None else f"off by {each.error:.1e}, its rounding explains {each.allowed:.1e}"
            lines.append(f"    {each.program:13} {verdict:11}{'; '.join(filter(None, (distance, each.note)))}")
        lines += [f"    {program:13} not installed: {command}" for program, command in self.missing]
        return "\n".join(lines)


@torch.inference_mode()
def check_export(
    done: Export, *, of: str | Checkpoint = "", revision: str | None = None, offline: bool = False, progress: Progress = silent
) -> ExportCheck:
    """Open what was written in every installed program that takes its format, and compare it with the source ``of`` it.

    Raises InputError: the source cannot be read any more. A program that fails to open the files is a row that is not ok.
    """
    started = time.perf_counter()
    progress("check: the source in float64")
    model, tokenizer, _ = exported_model(opened(of or done.model, revision, offline))
    check = _Check(done, model, tokenizer)
    rows, missing = [check.by("loader", "gpt2")], []
    for module, (program, command, format) in PACKAGES.items():
        if format == done.format and importlib.util.find_spec(module) is None:
            missing.append((program, command))
        elif format == done.format:
            progress(f"check: {program}")
            rows.append(check.by(module, program))
    rounding = check.distance(model.double()(check.ids)[0])
    return ExportCheck(tuple(rows), tuple(missing), rounding, check.ids.size(1), time.perf_counter() - started)


def _types(model: GPT2, done: Export) -> dict[str, str]:
    state = model.state_dict()
    own = OF_DTYPE[dtype := model.wte.weight.dtype]
    if done.format != "gguf":
        return dict.fromkeys(state, done.type if done.format == "llmc" else "f64" if dtype == torch.float64 else own)
    kept = parameters_of(done.keep, state)
    return {name: type_of(name, tensor.shape, own if name in kept else done.type) for name, tensor in state.items()}


def rounded(name: str, tensor: Tensor, type: str) -> Tensor:
    """Round a parameter to a type; written apart from the GGUF writer, so that a fault of the writer is seen."""
    if type == "f64":
        return tensor.double()
    if type != "q8_0":
        return tensor.to(DTYPES[type]).float()
    return q8_0(tensor.float().t()).t() if name.startswith("h.") else q8_0(tensor.float())


def q8_0(x: Tensor) -> Tensor:
    """Round blocks of 32 numbers of a row to eight bits, with one float16 scale each."""
    blocks = x.reshape(-1, 32)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    stored = scales.half().float()
    scaled = blocks * torch.where(scales == 0, 0, 1 / scales)
    numbers = (scaled.abs() + 0.5).floor().copysign(scaled)  # half away from zero, as ggml's roundf
    return (numbers.clamp(-127, 127) * stored).reshape(x.shape)


class _Check:
    """One export, with what the programs must compute on ``ids`` (1, T): ``truth`` (T, V) in float64."""

    def __init__(self, done: Export, model: GPT2, tokenizer: Tokenizer | None) -> None:
        self.done, self.model, self.tokenizer, self.folder = done, model, tokenizer, Path(done.directory)
        self.types = _types(model, done)
        self.weights = {name: rounded(name, tensor, self.types[name]) for name, tensor in model.state_dict().items()}
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(model.config.vocab_size, (1, min(TOKENS, model.config.n_positions)), generator=generator)
        self.truth = self._ours(torch.float64)(self.ids)[0]

    def distance(self, logits: Tensor) -> float:
        off = (logits.double()[..., : self.truth.size(-1)] - self.truth).square().mean().sqrt()
        return float(off / self.truth.abs().max())

    def by(self, module: str, program: str) -> Opened:
        try:
            return Opened(program, *getattr(self, f"_{module}")())
        except Exception as error:  # another program's code may raise anything
            why = str(error) if isinstance(error, InputError) else error_line(error)
            return Opened(program, None, None, False, f"does not open it: {why}")

    def _values(self, values: Mapping[str, Tensor]) -> Outcome:
        wrong = [name for name, tensor in self.weights.items() if not torch.equal(values[name].double(), tensor.double())]
        have = f" and {len(wrong) - 1} more have" if len(wrong) > 1 else " has"
        said = f"{wrong[0]}{have} other values than the source" if wrong else f"every value of {len(self.weights)} tensors"
        return None, None, not wrong, said

    def _logits(self, side: Side, ours: GPT2, encode: Callable[[str], Sequence[int]] | None = None) -> Outcome:
        with side:
            error = self.distance(side.forward(self.ids)[0].cpu())
        with rounding_noise(ours.wte.weight.dtype):
            noisy = ours.double()(self.ids)[0]
        allowed = FORWARD_RATIO * self.distance(noisy)  # outside, where squares of small errors are not rounded to zero
        ok, note = error <= allowed, ""
        if encode is not None and self.tokenizer is not None:
            wrong = [text for text in TEXTS if list(encode(text)) != self.tokenizer.encode(text)]
            ok, note = ok and not wrong, f"other ids for {wrong[0]!r}" if wrong else "same ids of texts"
        return error, allowed, ok, note

    def _ours(self, dtype: torch.dtype) -> GPT2:
        return model_with(self.model.config, ((name, tensor.to(dtype)) for name, tensor in self.weights.items()))

    def _loader(self) -> Outcome:
        """Every parameter, read by our own loader."""
        read = open_path(self.folder if self.done.format == "hf" else self.folder / self.done.files[0].name).reader()
        return self._values({name: read(name, torch.float64) for name in self.weights})

    def _transformers(self) -> Outcome:
        known = self.tokenizer is not None and (self.folder / "vocab.json").is_file()
        encode = partial(auto_ids, auto_tokenizer(self.folder)) if known else None
        side = CheckpointSide.open(f"hf/{self.folder}", offline=True)
        return self._logits(side, self._ours(self.model.wte.weight.dtype), encode)

    def _ctranslate2(self) -> Outcome:
        if not (self.folder / "vocab.json").is_file():
            return None, None, None, "its converter needs the files of a BPE tokenizer"
        converters = importlib.import_module("ctranslate2.converters")
        with tempfile.TemporaryDirectory() as room:
            converted = str(Path(room) / "ct2")
            converters.TransformersConverter(str(self.folder)).convert(converted)
            return self._logits(CTranslate2Side.open(f"ct2/{converted}"), self._ours(torch.float32))

    def _gguf(self) -> Outcome:
        gguf = importlib.import_module("gguf")
        values = {}
        for tensor in gguf.GGUFReader(self.folder / GGUF_FILE).tensors:
            name = from_file(tensor.name)
            read = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
            values[name] = read.t() if read.ndim == 2 and layer(name) is not None else read
        return self._values(values)

    def _llama_cpp(self) -> Outcome:
        side = LlamaCppSide.open(f"llama.cpp/{self.folder / GGUF_FILE}")
        theirs = side.tokenizer
        return self._logits(side, as_llama(self._ours(torch.float32), self.types), theirs.encode if theirs else None)


def as_llama(model: GPT2, types: Mapping[str, str]) -> GPT2:
    """Return our model, rounding where llama.cpp rounds."""
    for number, block in enumerate(model.h):
        block.mlp.activation = _table_gelu
        for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            block.get_submodule(part).register_forward_pre_hook(_rounding(types[f"h.{number}.{part}.weight"]))
    table = model.head_table.weight
    head = _rounding(types[head_name(types)])
    model.head = lambda hidden: F.linear(head(model, (hidden,))[0], table)  # type: ignore[method-assign]
    return model


def _rounding(type: str) -> Callable[[nn.Module, tuple[Tensor]], tuple[Tensor]]:
    """Return a hook that rounds activations as llama.cpp does before it multiplies them with a matrix of a type."""
    return lambda _, inputs: ((q8_0(inputs[0]) if type == "q8_0" else inputs[0].to(DTYPES[type])).to(inputs[0].dtype),)


def _table_gelu(x: Tensor) -> Tensor:
    """Return llama.cpp's GELU: looked up by x in float16, itself in float16; beyond 10 it is not looked up."""
    y = F.gelu(x.half().float(), approximate="tanh").half().to(x.dtype)
    return torch.where(x <= -10, 0.0, torch.where(x >= 10, x, y))
