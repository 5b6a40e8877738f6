"""Check that a filled port computes what our model does, in float64."""

from __future__ import annotations

from collections.abc import Mapping as MappingType
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gpt2.checkpoint.checkpoint import model_with
from gpt2.measure.metrics import FLOAT64_BOUND, worst_relative_error
from gpt2.port.mapping.mapping import Mapping
from gpt2.port.mapping.remarks import Remarks
from gpt2.port.recording.borrowed import Borrowed
from gpt2.port.recording.forward import error_line, logits_of

ROUNDED_CONSTANT = 1e-6  # the error that a constant in float32 can cause
MAX_RATIO = 10  # where a port refuses float64: its error in its own dtype over our model's
MAX_COST = 4e9  # parameters times tokens in one forward pass; above it, the full context is not tried


@dataclass(frozen=True)
class Verdict:
    """Whether it agrees; the worst error of a logit over the root mean square of all, None if unknown; and in words."""

    agrees: bool
    error: float | None
    words: str


class Check:
    """Our model's outputs for a few probes, with the checkpoint as it is, and with ``neutral`` tensors in place of its own."""

    def __init__(self, mapping: Mapping, state: MappingType[str, Tensor], neutral: dict[str, Tensor]) -> None:
        anatomy, self.config, self.state = mapping.anatomy, mapping.config, state
        self.hidden_only = anatomy.head is None
        rows = [anatomy.stream.vocabulary, self.config.vocab_size, *([] if anatomy.head is None else [len(anatomy.head)])]
        self.vocabulary = min(rows)
        self.fits = anatomy.width == self.config.n_embd
        positions = self.config.n_positions
        context = positions if anatomy.positions is None else min(positions, len(anatomy.positions.rows))
        lengths = {min(length, context) for length in (1, 7, 32)}
        if self.config.num_parameters() * context <= MAX_COST or anatomy.recording.ids.size(1) == context:
            lengths.add(context)
        generator = torch.Generator().manual_seed(1)
        self.probes = [torch.randint(self.vocabulary, (2, length), generator=generator) for length in sorted(lengths)]
        self.expected = self._ours(state)
        self.expected_without = self._ours({**state, **neutral}) if neutral else []

    def _ours(self, state: MappingType[str, Tensor], dtype: torch.dtype = torch.float64) -> list[Tensor]:
        model = model_with(self.config, ((name, tensor.to("cpu", dtype)) for name, tensor in state.items()))
        model.requires_grad_(False)
        return [model.hidden(ids) if self.hidden_only else model(ids)[..., : self.vocabulary] for ids in self.probes]

    def judge(self, borrowed: Borrowed, remarks: Remarks) -> Verdict:
        """Run the filled module in float64; add what is wrong with it to ``remarks``."""
        if not self.fits:
            return Verdict(False, None, "the logits cannot be compared, the module being of another size")
        theirs, failures = self._theirs(borrowed.module)
        if all(output is None for output in theirs):
            return self._judge_rounding(borrowed, failures[0])
        if failures:
            remarks.notes.append(f"your forward fails on other lengths than {self._lengths(theirs)} ({failures[0]})")
        error = _worst(theirs, self.expected)
        if error <= FLOAT64_BOUND:
            return Verdict(True, error, "the logits agree with our model's")
        if self.expected_without and (rest := _worst(theirs, self.expected_without)) <= FLOAT64_BOUND:
            remarks.notes.append(
                f"what your module lacks is the only difference from the checkpoint: without that, logits agree ({rest:.1e})"
            )
            return Verdict(False, error, "the logits differ, by what your module lacks")
        again, _ = self._theirs(borrowed.module)
        if any(x is not None and y is not None and not torch.equal(x, y) for x, y in zip(theirs, again, strict=True)):
            remarks.problems.append("your module gives other logits every time: is dropout active in eval mode?")
        if error <= ROUNDED_CONSTANT:
            remarks.problems.append(
                f"your module is GPT-2 but for {error:.1e}, as if it kept a constant in float32; `gpt2 diagnose` says which"
            )
            return Verdict(False, error, "the logits nearly agree")
        placed = "what could be placed is placed" if remarks.unfilled or remarks.unused else "all weights are placed"
        remarks.problems.append(
            f"{placed}, but your module computes something else than GPT-2; `gpt2 diagnose` says where it departs"
        )
        return Verdict(False, error, "the logits differ")

    def _judge_rounding(self, borrowed: Borrowed, failure: str) -> Verdict:
        """For a module that refuses float64: its error in its own dtype, compared with our model's error in that dtype."""
        borrowed.to_own_dtype()
        dtype = next(tensor.dtype for tensor in borrowed.tensors.values() if tensor.is_floating_point())
        theirs, failures = self._theirs(borrowed.module)
        if all(output is None for output in theirs):
            return Verdict(False, None, f"the logits cannot be compared: the forward fails ({failures[0]})")
        error, ours = _worst(theirs, self.expected), _worst(self._ours(self.state, dtype), self.expected)
        agrees, name = error <= MAX_RATIO * ours, str(dtype).removeprefix("torch.")
        errors = f"{error:.1e} from our model in float64; our model in {name} is {ours:.1e} from it"
        words = f"the logits {'agree' if agrees else 'differ'} in {name}, {errors} (in float64 yours fails: {failure})"
        return Verdict(agrees, None, words)

    def _theirs(self, module: nn.Module) -> tuple[list[Tensor | None], list[str]]:
        """The module's output for each probe, None where it fails; and the errors."""
        outputs: list[Tensor | None] = []
        failures = []
        device = next((tensor.device for tensor in [*module.parameters(), *module.buffers()]), torch.device("cpu"))
        for ids in self.probes:
            try:
                output = logits_of(module(ids.to(device))).to("cpu", torch.float64)
                output = output.reshape(len(ids), -1, output.shape[-1])
                outputs.append(output if self.hidden_only else output[..., : self.vocabulary])
            except Exception as error:
                outputs.append(None)
                failures.append(error_line(error))
        return outputs, failures

    def _lengths(self, outputs: list[Tensor | None]) -> str:
        return ", ".join(str(ids.size(1)) for ids, output in zip(self.probes, outputs, strict=True) if output is not None)


def _worst(outputs: Sequence[Tensor | None], references: list[Tensor]) -> float:
    """The worst relative error of any output; some ports return the last positions only."""
    return max(
        worst_relative_error(output, reference[:, -output.shape[1] :])
        for output, reference in zip(outputs, references, strict=True)
        if output is not None
    )
