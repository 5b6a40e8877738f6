"""Read a module back into a checkpoint, with a config that nobody stated: ``checkpoint_of``, the reverse of ``load_into``.

The recording shows sizes and heads. Epsilon, activation and the scaling of scores are found one after the other, on weights that
switch later parts off. Our model with all that must then give the module's own logits in float64.
"""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.checkpoint.checkpoint import Checkpoint, Reader
from gpt2.checkpoint.containers import listed
from gpt2.checkpoint.containers.gguf_file import NoTokenizer
from gpt2.checkpoint.keys import head_name
from gpt2.checkpoint.saving import DTYPE_NAMES
from gpt2.config import ACTIVATIONS, GPT2Config
from gpt2.damage import look
from gpt2.data import Tokenizer
from gpt2.errors import InputError
from gpt2.measure.metrics import FLOAT64_BOUND
from gpt2.measure.user_code import error_at
from gpt2.port.anatomy.anatomy import Anatomy
from gpt2.port.anatomy.flow import Flow
from gpt2.port.anatomy.stream import NotGPT2, Stream
from gpt2.port.mapping import ROUNDED_CONSTANT, LogitsCheck, worst_error
from gpt2.port.mapping.departures import rows_apart, structural_causes, vocabulary as vocabulary_of
from gpt2.port.mapping.filling import Own, own_weights, put
from gpt2.port.mapping.mapping import WeightMap
from gpt2.port.mapping.report import in_a_line
from gpt2.port.recording.dispatch import DeterministicMode
from gpt2.port.recording.forward import Borrowed, ForwardError, plain_attention
from gpt2.port.recording.recorder import give_shapes, record_probe

VOCABULARIES = (30, 2)  # ids of the first recording are smaller than that
MAX_WINDOW = 8192  # the longest that is tried, for a module that takes sequences of one length only
END = 50256  # <|endoftext|> of OpenAI's vocabulary
SMALL = 1e-4  # factor of the embeddings, with which a norm's epsilon outweighs their variance
SCALINGS = [{"scale_attn_weights": a, "scale_attn_by_inverse_layer_idx": b} for a in (True, False) for b in (False, True)]


@dataclass(frozen=True)
class ModuleCheckpoint(Checkpoint):
    """A module's weights and config, in memory; ``notes`` say what was added, left out or rounded."""

    weights: dict[str, Tensor] = field(repr=False)
    notes: tuple[str, ...]

    def reader(self, *, mapped: bool = True) -> Reader:
        return lambda name, dtype: self.weights[name].to(dtype, copy=True)

    def tokenizer(self) -> Tokenizer:
        raise NoTokenizer("a module has none")


@torch.no_grad()
def checkpoint_of(module: nn.Module, name: "str | None" = None) -> ModuleCheckpoint:
    """Return the weights and the config of ``module``, any torch implementation of GPT-2, which stays unchanged.

    Weights get the module's dtype, the widest of several. A bias that it lacks is zero, a norm's scale is one. Everything that
    the logits depend on is found. The rest has GPT-2's defaults: dropout, and special tokens if the vocabulary has them. Padding
    of the vocabulary stays. ``gpt2.save(checkpoint.load(), tokenizer, folder)`` writes it. Memory: five float64 copies.

    ``module``: as for :func:`gpt2.load_into`; buffers are read as parameters are. ``name``: what messages call it; default: its
    class.

    Raises:
        InputError: ``module`` computes something else than GPT-2, or has parts that a checkpoint cannot hold.
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"checkpoint_of reads a torch.nn.Module, and was given {type(module).__name__}; build the module first")
    name = type(module).__name__ if name is None else name
    give_shapes(module, GPT2Config(vocab_size=VOCABULARIES[0]), name)
    with torch.random.fork_rng(devices=[]), Borrowed(module) as borrowed:
        try:
            return _Reading(borrowed, _anatomy(borrowed, name), name).checkpoint()
        except NotGPT2 as reason:
            raise InputError(f"{name}: cannot become a GPT-2 checkpoint: {reason}") from None


def _anatomy(borrowed: Borrowed, name: str) -> Anatomy:
    """Record the module as :func:`gpt2.load_into` does; how many tokens it knows shows in a first recording, on small ids."""
    shapes = [tensor.shape for tensor in borrowed.tensors.values()]
    windows = {size for shape in shapes for size in shape if size <= MAX_WINDOW}
    failure = None
    for vocabulary, context in itertools.product(VOCABULARIES, (5, *sorted(windows))):
        try:
            first = record_probe(borrowed, GPT2Config(vocabulary, context), name)
        except ForwardError as error:
            failure = failure or error
        else:
            stream = Stream(Flow(first))
            vocabulary = max(stream.vocabulary, first.output.size(-1))
            context = context if stream.positions is None else len(stream.positions.rows)
            return Anatomy(record_probe(borrowed, GPT2Config(vocabulary, context), name))
    assert failure is not None
    raise failure


def _sizes(anatomy: Anatomy) -> GPT2Config:
    """Return a config with the module's sizes, and defaults elsewhere."""
    if apart := rows_apart(anatomy):
        raise NotGPT2(apart)
    vocabulary = vocabulary_of(anatomy)
    positions = 1 if anatomy.positions is None else len(anatomy.positions.rows)
    inner = sum(len(part.columns) for part in anatomy.parts if part.part == "mlp.c_fc" and part.layer == 0)
    end, heads = END if vocabulary > END else None, len(anatomy.attentions[0].heads)
    if anatomy.width % heads:
        raise NotGPT2(f"your attention has {heads} heads, which do not divide its width of {anatomy.width:,}")
    config = GPT2Config(vocabulary, positions, anatomy.width, len(anatomy.layers), heads, bos_token_id=end, eos_token_id=end)
    return replace(config, n_inner=None if inner in (0, config.inner) else inner)


class _Reading:
    """A module in float64, which is read, and then run with other weights to find its config."""

    def __init__(self, borrowed: Borrowed, anatomy: Anatomy, name: str) -> None:
        self.borrowed, self.anatomy, self.name = borrowed, anatomy, name
        order = {layer: number for number, layer in enumerate(anatomy.layers)}  # blocks that do not run are left out
        anatomy.parts = [part if part.layer is None else replace(part, layer=order[part.layer]) for part in anatomy.parts]
        for branch in anatomy.branches:
            branch.layer = order[branch.layer]
        anatomy.layers = list(order.values())
        self.mapping = WeightMap(anatomy, _sizes(anatomy), from_buffers=True)
        for cause in structural_causes(self.mapping):
            raise NotGPT2(in_a_line(cause).replace("the checkpoint", "GPT-2").partition(";")[0])
        self.sources = [source for source in self.mapping.sources if self.mapping.parts(source)]
        self.dtype = reduce(torch.promote_types, (borrowed.tensors[source.name].dtype for source in self.sources))
        self.casts: set[str] = set()
        borrowed.to_float64()
        self.own = own = self._own()
        if own.head is not None and not torch.equal(own.head, own.weights["wte.weight"]):
            self.mapping = WeightMap(anatomy, replace(self.mapping.config, tie_word_embeddings=False), from_buffers=True)
            self.own = own = self._own()
        for key, placed in own.placed.items():
            if placed.ndim > 1 and not bool(placed.all()):
                raise NotGPT2(f"no parameter takes the place of {f'a part of {key}' if bool(placed.any()) else key}")
            if damage := look([(key, own.weights[key])]).damage:
                raise NotGPT2(f"{own.names[key]} holds {damage}")
        self.check = LogitsCheck(self.mapping, own.weights, {})

    def _own(self) -> Own:
        """Read the weights; what a matrix lacks is NaN."""
        blank = torch.tensor(torch.nan, dtype=torch.float64)
        return own_weights(self.mapping, self.borrowed.tensors, {key: blank.expand(s) for key, s in self.mapping.shapes.items()})

    def checkpoint(self) -> ModuleCheckpoint:
        """Read, verify and return. Raises NotGPT2: our model gives other logits."""
        check, weights, outputs = self.check, self.own.weights, self._outputs()
        probes, worked = check.probes, [n for n, output in enumerate(outputs) if isinstance(output, Tensor)]
        check.probes = [probes[next((n for n in worked if probes[n].size(1) > 1), worked[0])]]
        config = self._config()
        check.probes = probes
        self._require(error := worst_error(outputs, check.reference(weights)), "module computes, with its own weights alone,")
        dtype = self.dtype if self.dtype in DTYPE_NAMES else torch.float32
        stored = {key: tensor.to(dtype, copy=True) for key, tensor in weights.items()}
        return ModuleCheckpoint(self.name, None, config, dtype, dtype, stored, tuple(self._notes(stored, error)))

    def _outputs(self) -> list[Tensor | Exception]:
        """Return the module's outputs for the probes, without its casts to narrower dtypes."""
        with plain_attention(), DeterministicMode(keep_random=True) as mode:
            outputs = self.check.outputs(self.borrowed)
        if self.borrowed.failure is not None and not self.borrowed.wide:
            failure = error_at(self.borrowed.failure)
            raise InputError(f"{self.name}: its forward fails in float64 ({failure}); use the dtype of its weights there")
        self.casts |= mode.casts
        return outputs

    def _require(self, error: float, what: str) -> None:
        """Raise NotGPT2 if the logits differ by more than a constant in float32 explains; say why, if that is known."""
        if error <= ROUNDED_CONSTANT:
            return
        for name, norm in self.own.extra.items():
            raise NotGPT2(f"{name} (norm {norm:.2g}) is added where GPT-2 adds nothing; set it to zero, or leave it out")
        for id in sorted(self.anatomy.adapters):
            raise NotGPT2(f"your module has low-rank adapters ({self.anatomy.recording.name(id)}); merge them into the weights")
        advice = "`gpt2 diagnose` against a model of these sizes says what"
        raise NotGPT2(f"your {what} something else than GPT-2's (error of the logits {error:.1e}); {advice}")

    def _config(self) -> GPT2Config:
        """Find the config with which our model computes what the module does.

        This needs other weights than its own: a projection of zeros, which some initialise so, hides the activation before it.
        """
        check, generator = self.check, torch.Generator().manual_seed(2)
        for source in self.sources:
            tensor, mine = self.borrowed.tensors[source.name], self.mapping.entries(source) >= 0
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * mine
            tensor.add_(noise.to(tensor.device), alpha=1 / math.sqrt(check.config.n_embd))
        state = self._own().weights

        def fit(what: str, factor: float, off: tuple[str, ...], *fields: dict[str, Any]) -> None:
            """Scale what enters the stream, switch parts off, and choose the fields with which our model is nearest."""
            weights = {key: x * factor if key.startswith(("wte", "wpe")) or ".c_proj." in key else x for key, x in state.items()}
            weights |= {key: x * 0 for key, x in state.items() if key.endswith(off)}
            for source in self.sources:
                entries, use = self.mapping.entries(source), self.mapping.use(source)
                put(self.borrowed.tensors[source.name], entries, self.mapping, weights, use)
            outputs, errors = self._outputs(), []
            first = check.config if fields else replace(check.config, layer_norm_epsilon=self._epsilon(outputs, weights))
            configs = [replace(first, **each) for each in fields or ({},)]
            for check.config in configs:
                errors.append(worst_error(outputs, check.reference(weights)))
                if errors[-1] <= FLOAT64_BOUND:
                    break
            check.config = configs[errors.index(min(errors))]
            self._require(min(errors), what)

        attention, mlp = (tuple(f"{part}.c_proj.{leaf}" for leaf in ("weight", "bias")) for part in ("attn", "mlp"))
        fit("embeddings, last norm or head compute", SMALL, (*attention, *mlp, "ln_f.bias"))
        factor = max(math.sqrt(check.config.layer_norm_epsilon), SMALL)  # variances like epsilon: both are seen, in every norm
        activations = [{"activation_function": name} for name in ACTIVATIONS]
        fit(f"feed-forward computes, with each of {len(ACTIVATIONS)} activations,", factor, attention, *activations)
        fit("attention computes", factor, (), *SCALINGS)
        return check.config

    def _epsilon(self, outputs: list[Tensor | Exception], weights: dict[str, Tensor]) -> float:
        """Solve for the last norm's epsilon: the output is linear in 1 / sqrt(variance + epsilon)."""
        (output,), (ids,) = outputs, self.check.probes
        assert isinstance(output, Tensor)
        stream = (weights["wte.weight"][ids] + weights["wpe.weight"][: ids.size(1)])[:, -output.size(1) :]  # (B, T, D)
        normed = (stream - stream.mean(-1, keepdim=True)) * weights["ln_f.weight"]
        slope = normed if self.check.hidden_only else normed @ weights[head_name(weights)][: output.size(-1)].t()
        inverse = (output * slope).sum(-1) / slope.square().sum(-1)  # (B, T)
        epsilon = float((inverse**-2 - stream.var(-1, correction=0)).median())
        return float(f"{epsilon:.6g}") if 1e-16 < epsilon < math.inf else 0.0

    def _notes(self, stored: dict[str, Tensor], error: float) -> Iterator[str]:
        yield from self.borrowed.by_rows
        unused = [source.name for source in self.mapping.sources if source.is_parameter and source not in self.sources]
        lacks = [re.sub(r"^h\.\d+", "h.*", key) for key, placed in self.own.placed.items() if not bool(placed.all())]
        rounded = [key for key, tensor in stored.items() if not torch.equal(tensor.double(), self.own.weights[key])]
        for what, names in (
            ("verified with float64 where its forward casts to", sorted(self.casts)),
            ("its logits differ, as with a constant in float32, by", [f"{error:.1e}"] if error > FLOAT64_BOUND else []),
            ("a bias that it lacks is zero, a norm's scale is one:", lacks),
            ("left out, as no logit depends on them:", unused),
            ("rounded, as it uses its parameters scaled or shifted:", rounded),
        ):
            if names:
                yield f"{what} {listed(list(dict.fromkeys(names)))}"
