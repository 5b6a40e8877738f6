"""Whether a filled port computes what our model does, in float64: the last word on a mapping."""

from __future__ import annotations

from collections.abc import Mapping as MappingType
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gpt2.measure.metrics import FLOAT64_BOUND, worst_relative_error
from gpt2.model import GPT2
from gpt2.port.anatomy.anatomy import Anatomy
from gpt2.port.mapping.lacks import Findings
from gpt2.port.mapping.mapping import Mapping
from gpt2.port.recording.borrowed import Borrowed
from gpt2.port.recording.forward import error_line, logits_of

NEARLY = 1e-6  # what float32 can do to a constant
SLACK = 10  # where a port refuses float64: how much farther than our model it may be from the float64 run, in its own dtype
AFFORDABLE = 4e9  # parameters times tokens in one forward pass


@dataclass(frozen=True)
class Verdict:
    """Whether it agrees; the worst error of a logit over the root mean square of all, if there is one; and in words."""

    agrees: bool
    error: float | None
    words: str


class Check:
    """Our model's outputs for a few probes, as the checkpoint is and as it would be without what the port lacks."""

    def __init__(self, anatomy: Anatomy, mapping: Mapping, state: MappingType[str, Tensor], neutral: dict[str, Tensor]) -> None:
        self.config, self.state = mapping.config, state
        self.in_stream = anatomy.head is None
        self.vocabulary = min(anatomy.stream.vocabulary, self.config.vocab_size, *([] if self.in_stream else [len(anatomy.head)]))
        self.fits = anatomy.width == self.config.n_embd
        context = min(self.config.n_positions, self.config.n_positions if anatomy.positions is None else anatomy.positions.rows)
        lengths = {min(length, context) for length in (1, 7, 32)}
        if self.config.num_parameters() * context <= AFFORDABLE or anatomy.recording.ids.size(1) == context:
            lengths.add(context)
        generator = torch.Generator().manual_seed(1)
        self.probes = [torch.randint(self.vocabulary, (2, length), generator=generator) for length in sorted(lengths)]
        self.whole = self._ours(state)
        self.without = self._ours({**state, **neutral}) if neutral else []

    def _ours(self, state: MappingType[str, Tensor], dtype: torch.dtype = torch.float64) -> list[Tensor]:
        model = GPT2(self.config, initialise=False).eval()
        for name, tensor in state.items():
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor.to("cpu", dtype), requires_grad=False))
        return [model.hidden(ids) if self.in_stream else model(ids)[..., : self.vocabulary] for ids in self.probes]

    def judge(self, bench: Borrowed, found: Findings) -> Verdict:
        """Run what lies filled on the bench, in float64; what is wrong with it goes to ``found``."""
        if not self.fits:
            return Verdict(False, None, "the logits cannot be compared, the module being of another size")
        theirs, failures = self._theirs(bench.module)
        if not any(torch.is_tensor(output) for output in theirs):
            return self._judge_rounding(bench, failures[0])
        if failures:
            found.notes.append(f"your forward fails on other lengths than {self._lengths(theirs)} ({failures[0]})")
        error = _worst(theirs, self.whole)
        if error <= FLOAT64_BOUND:
            return Verdict(True, error, "the logits agree with our model's")
        if self.without and (rest := _worst(theirs, self.without)) <= FLOAT64_BOUND:
            found.notes.append(
                f"what your module lacks is all that parts it from the checkpoint: without that, logits agree ({rest:.1e})"
            )
            return Verdict(False, error, "the logits differ, by what your module lacks")
        again, _ = self._theirs(bench.module)
        if any(torch.is_tensor(x) and not torch.equal(x, y) for x, y in zip(theirs, again, strict=True)):
            found.problems.append("your module gives other logits every time: does dropout not ask whether it is in eval mode?")
        if error <= NEARLY:
            found.problems.append(
                f"your module is GPT-2 but for {error:.1e}, as if it kept a constant in float32; `gpt2 diagnose` says which"
            )
            return Verdict(False, error, "the logits nearly agree")
        placed = "what could be placed is placed" if found.unfilled or found.unused else "all weights are placed"
        found.problems.append(
            f"{placed}, but your module computes something else than GPT-2; `gpt2 diagnose` says where it departs"
        )
        return Verdict(False, error, "the logits differ")

    def _judge_rounding(self, bench: Borrowed, failure: str) -> Verdict:
        """In the module's own dtype, for want of float64: no farther from the float64 run than our model is, within ``SLACK``."""
        bench.to_own_dtype()
        dtype = next(tensor.dtype for tensor in bench.tensors.values() if tensor.is_floating_point())
        theirs, failures = self._theirs(bench.module)
        if not any(torch.is_tensor(output) for output in theirs):
            return Verdict(False, None, f"the logits cannot be compared: the forward fails ({failures[0]})")
        error, ours = _worst(theirs, self.whole), _worst(self._ours(self.state, dtype), self.whole)
        agrees, name = error <= SLACK * ours, str(dtype).removeprefix("torch.")
        strays = f"{error:.1e} from our model in float64, which itself strays {ours:.1e}"
        words = f"the logits {'agree' if agrees else 'differ'} in {name}, {strays} (in float64 yours fails: {failure})"
        return Verdict(agrees, None, words)

    def _theirs(self, module: nn.Module) -> tuple[list[Tensor | None], list[str]]:
        outputs: list[Tensor | None] = []
        failures = []
        device = next((tensor.device for tensor in [*module.parameters(), *module.buffers()]), "cpu")
        for ids in self.probes:
            try:
                output = logits_of(module(ids.to(device))).to("cpu", torch.float64)
                output = output.reshape(len(ids), -1, output.shape[-1])
                outputs.append(output if self.in_stream else output[..., : self.vocabulary])
            except Exception as error:
                outputs.append(None)
                failures.append(error_line(error))
        return outputs, failures

    def _lengths(self, outputs: list[Tensor | None]) -> str:
        return ", ".join(str(ids.size(1)) for ids, output in zip(self.probes, outputs, strict=True) if output is not None)


def _worst(outputs: list[Tensor | None], references: list[Tensor]) -> float:
    """The worst relative error of any output; some ports return the last positions only."""
    return max(
        worst_relative_error(output, reference[:, -output.shape[1] :])
        for output, reference in zip(outputs, references, strict=True)
        if output is not None
    )
