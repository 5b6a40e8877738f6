"""Load a checkpoint's weights into any module that computes GPT-2: ``load_into``.

The module runs once while every operator is recorded; :mod:`gpt2.port.anatomy` recognises GPT-2's parts by what they compute,
never by names. :mod:`.mapping` derives which entry belongs in each place; :class:`LogitsCheck` compares logits in float64.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gpt2.checkpoint.checkpoint import model_with
from gpt2.checkpoint.loading import load
from gpt2.checkpoint.names import DEFAULT, Name
from gpt2.errors import InputError
from gpt2.int8 import require_float
from gpt2.measure.metrics import FLOAT64_BOUND, worst_relative_error
from gpt2.measure.user_code import error_at, logits_of
from gpt2.model import GPT2
from gpt2.port.anatomy.anatomy import Anatomy
from gpt2.port.anatomy.stream import NotGPT2
from gpt2.port.mapping.filling import fill, overwritten
from gpt2.port.mapping.mapping import WeightMap, probes
from gpt2.port.mapping.report import MappingReport, Remarks
from gpt2.port.recording.forward import Borrowed, device_of
from gpt2.port.recording.recorder import give_shapes, record_probe
from gpt2.port.terms.budget import few_threads

__all__ = ["MappingReport", "load_into"]

ROUNDED_CONSTANT = 1e-6  # the error that a constant in float32 can cause
MAX_RATIO = 10  # where a port refuses float64: its error in its own dtype over our model's


@torch.no_grad()
def load_into(
    module: nn.Module, model: Name | GPT2 = DEFAULT, *, revision: str | None = None, offline: bool = False
) -> MappingReport:
    """Fill ``module``, any torch implementation of GPT-2, with the weights of ``model``, in place, and return a report.

    Args:
        module: maps ids (B, T) to logits, or to a tuple, dict or object that holds them. Its parameters keep their dtype, device
            and identity; buffers, modes and parts that GPT-2 does not have stay unchanged.
        model: a model's name, as for :func:`gpt2.load`, or a model.
        revision, offline: as for :func:`gpt2.load`.

    The report is ``ok`` when every parameter is filled or has no effect, and the logits agree with our model's to 1e-10 in
    float64. All weights that have a place are filled in, even if the module computes something else than GPT-2. Memory: a float64
    copy of the module's parameters, and before that, briefly, our model in float64.

    Raises:
        InputError: ``module``, then unchanged, is not a torch module; weights do not fit it; or the model does not exist.
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"load_into fills a torch.nn.Module, and was given {type(module).__name__}; build the module first")
    ours = model if isinstance(model, GPT2) else load(model, revision=revision, offline=offline)
    require_float(ours, "load_into")
    name, config, state = type(module).__name__, ours.config, ours.state_dict()
    give_shapes(module, config, name)
    if not any(tensor.is_floating_point() for tensor in [*module.parameters(), *module.buffers()]):
        raise InputError(f"{name}: it has no parameters to fill; register its weights as torch.nn.Parameter")
    with torch.random.fork_rng(devices=[]), few_threads(config.num_parameters()), Borrowed(module) as borrowed:
        try:
            mapping = WeightMap(Anatomy(record_probe(borrowed, config, name)), config)
        except NotGPT2 as reason:
            hint = "if it is a GPT-2, fill it yourself; gpt2.diagnose then compares its logits"
            raise InputError(f"{name}: {reason}; load_into needs a GPT-2 ({hint})") from None
        remarks = Remarks(mapping, state)
        check = LogitsCheck(mapping, state, remarks.neutral)
        borrowed.to_float64()
        remarks.notes += [*borrowed.by_rows, *overwritten(borrowed, mapping)]
        filled = fill(borrowed, mapping, state)
        rows = tuple(row for _, row, _ in filled if row is not None)
        remarks.left_over(filled)
        verdict = check.judge(borrowed, remarks)
        remarks.settle(verdict.agrees)
        borrowed.keep(row.name for row in rows)
    unplaced = remarks.unfilled, remarks.idle, remarks.unused
    said = tuple(remarks.ambiguous), tuple(remarks.problems), tuple(remarks.notes)
    return MappingReport(name, "a model" if isinstance(model, GPT2) else str(model), rows, *unplaced, *said, *verdict)


class LogitsVerdict(NamedTuple):
    """The worst error over the root mean square of all logits (None if unknown), a sentence, and whether the logits agree."""

    error: float | None
    words: str
    agrees: bool = False


class LogitsCheck:
    """Our model's outputs for a few probes: with the checkpoint, and with ``neutral`` tensors in place of the checkpoint's."""

    def __init__(self, mapping: WeightMap, state: Mapping[str, Tensor], neutral: dict[str, Tensor]) -> None:
        self.config, self.state, self.hidden_only = mapping.config, state, mapping.anatomy.head is None
        self.probes = probes(self.config, mapping.anatomy, len(mapping.anatomy.recording.ids))  # it may take no other batch
        self.expected = self.reference(state)
        self.expected_without = self.reference({**state, **neutral}) if neutral else []

    def reference(self, state: Mapping[str, Tensor], dtype: torch.dtype = torch.float64) -> list[Tensor]:
        model = model_with(self.config, ((name, tensor.to("cpu", dtype)) for name, tensor in state.items()))
        model.requires_grad_(False)
        return [model.hidden(ids) if self.hidden_only else model(ids) for ids in self.probes]

    def judge(self, borrowed: Borrowed, remarks: Remarks) -> LogitsVerdict:
        """Run the filled module in float64, return the verdict, and add the problems to ``remarks``."""
        if remarks.anatomy.width != self.config.n_embd:
            return LogitsVerdict(None, "the logits cannot be compared, the module being of another size")
        outputs = self.outputs(borrowed)
        failures = [error_at(output) for output in outputs if isinstance(output, Exception)]
        if len(failures) == len(outputs):
            return LogitsVerdict(None, f"the logits cannot be compared: the forward fails ({failures[0]})")
        if failures:
            pairs = zip(self.probes, outputs, strict=True)
            lengths = sorted(ids.size(1) for ids, output in pairs if isinstance(output, Tensor))
            remarks.notes.append(f"your forward fails on other lengths than {', '.join(map(str, lengths))} ({failures[0]})")
        error = worst_error(outputs, self.expected)
        if not borrowed.wide and borrowed.failure is not None:  # compared by its error in its own dtype, and our model's
            dtype = next(tensor.dtype for tensor in borrowed.tensors.values() if tensor.is_floating_point())
            rounding = worst_error(self.reference(self.state, dtype), self.expected)
            agrees, name = error <= MAX_RATIO * rounding, str(dtype).removeprefix("torch.")
            errors = f"{error:.1e} from our model in float64; our model in {name} is {rounding:.1e} from it"
            why = f"(in float64 yours fails: {error_at(borrowed.failure)})"
            return LogitsVerdict(None, f"the logits {'agree' if agrees else 'differ'} in {name}, {errors} {why}", agrees)
        if error <= FLOAT64_BOUND:
            return LogitsVerdict(error, "the logits agree with our model's", True)
        if self.expected_without and (rest := worst_error(outputs, self.expected_without)) <= FLOAT64_BOUND:
            lack = "what your module lacks is the only difference from the checkpoint: without that, logits agree"
            remarks.notes.append(f"{lack} ({rest:.1e})")
            return LogitsVerdict(error, "the logits differ, by what your module lacks")
        twice = zip(outputs, self.outputs(borrowed), strict=True)
        if any(isinstance(x, Tensor) and isinstance(y, Tensor) and not torch.equal(x, y) for x, y in twice):
            remarks.problems.append("your module gives other logits every time: is dropout active in eval mode?")
        if error <= ROUNDED_CONSTANT:
            kept = f"your module is GPT-2 but for {error:.1e}, as if it kept a constant in float32"
            remarks.problems.append(f"{kept}; `gpt2 diagnose` says which")
            return LogitsVerdict(error, "the logits nearly agree")
        placed = "what could be placed is placed" if remarks.unfilled or remarks.unused else "all weights are placed"
        other = "but your module computes something else than GPT-2; `gpt2 diagnose` says where it departs"
        remarks.problems.append(f"{placed}, {other}")
        return LogitsVerdict(error, "the logits differ")

    def outputs(self, borrowed: Borrowed) -> list[Tensor | Exception]:
        """Return the module's output for each probe, or its error there."""
        device = device_of(borrowed.module)

        def output(ids: Tensor) -> Tensor | Exception:
            borrowed.rewind()
            try:
                return logits_of(borrowed.module(ids.to(device)), ids, self.config.vocab_size).to("cpu", torch.float64)
            except Exception as error:
                return error

        return borrowed.widest(lambda: [output(ids) for ids in self.probes])


def worst_error(outputs: Sequence[Tensor | Exception], references: list[Tensor]) -> float:
    """Return the worst relative error of any output, over what both have: some ports return only the last position."""
    pairs = ((x, y[:, -x.shape[1] :]) for x, y in zip(outputs, references, strict=True) if isinstance(x, Tensor))
    cut = ((x, y, min(x.shape[-1], y.shape[-1])) for x, y in pairs)
    return max(worst_relative_error(x[..., :columns], y[..., :columns]) for x, y, columns in cut)
