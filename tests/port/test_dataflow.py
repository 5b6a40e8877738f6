"""Recording a forward pass: every element has an id, whatever the operators."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.measure.user_code import logits_of
from gpt2.port.recording import recorder
from gpt2.port.recording.dataflow import NodeKind, Recording, Region, Use
from gpt2.port.recording.recorder import record

D, V = 6, 17
IDS = torch.tensor([[9, 5, 14], [16, 7, 11]])


class Small(nn.Module):
    """An embedding, a few parameters, and a function of them."""

    def __init__(self, function: Callable[["Small", Tensor], Tensor]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def w(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))

        self.function = function
        self.table, self.square, self.wide, self.cube = w(V, D), w(D, D), w(D, 4), w(D, 2, 3)
        self.row, self.stack, self.unused = w(D), w(2, D, D), w(3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.function(self, F.embedding(ids, self.table))


def evaluate(recording: Recording, module: nn.Module) -> Tensor:
    """Compute the output from the recording alone: parameters by their ids, sums and products by the nodes."""
    values = torch.full((recording.stop,), torch.nan, dtype=torch.float64)
    for source in recording.sources:
        values[source.region.ids()] = module.get_parameter(source.name).detach()
    for node in recording.nodes:
        operands = [values[x.ids() if isinstance(x, Region) else x] for x in node.operands]
        if node.kind is NodeKind.LOOKUP:
            result = operands[0]
        elif node.kind is NodeKind.CONTRACTION:
            result = (operands[0] * operands[1]).sum(-1)
        else:
            result = {"add": sum, "mul": lambda x: x[0] * x[-1]}[node.op](operands)
        values[node.start : node.stop] = result.reshape(-1)
    return values[recording.output]


def fill_slices(m: Small, x: Tensor) -> Tensor:
    out = x.new_zeros(2, 3, 4)
    out[..., 1::2] = x @ m.wide[:, :2]
    out[..., ::2] = x @ m.wide[:, 2:]
    return out


LINEAR: dict[str, Callable[["Small", Tensor], Tensor]] = {
    "linear": lambda m, x: F.linear(x, m.square, m.row),
    "matmul": lambda m, x: x @ m.wide,
    "turned": lambda m, x: (m.wide.t() @ x.mT).mT,
    "einsum": lambda m, x: torch.einsum("btd,dhk->bhtk", x, m.cube).transpose(1, 2).flatten(2),
    "einsum over two axes": lambda m, x: torch.einsum("bthk,dhk->btd", x.unflatten(-1, (2, 3)), m.cube),
    "a contiguous copy": lambda m, x: x @ m.wide.t().contiguous().t().flip(1).roll(1, 0),
    "concatenated": lambda m, x: x @ torch.cat((m.square[:, 3:], m.wide, m.square[:, :3]), dim=1),
    "of a stack": lambda m, x: (x @ m.stack[1]) @ m.stack.unbind()[0],
    "bmm by head": lambda m, x: torch.bmm(x.reshape(6, 2, 3).transpose(0, 1), m.stack[:, :3, :4]).transpose(0, 1).flatten(1),
    "baddbmm": lambda m, x: torch.baddbmm(m.row, x, m.square.expand(2, D, D)),
    "addmm": lambda m, x: torch.addmm(m.row, x.flatten(0, 1), m.square).view(2, 3, D),
    "mv": lambda m, x: torch.stack([torch.mv(m.square, row) for row in x.flatten(0, 1)]),
    "convolution": lambda m, x: F.conv1d(x.mT, m.square[..., None], m.row).mT,
    "sum of products": lambda m, x: (x[..., None] * m.wide).sum(-2),
    "sum over heads": lambda m, x: torch.einsum("bthk,hkd->bthd", x.unflatten(-1, (2, 3)), m.stack[:, :3]).sum(2),
    "in place": lambda m, x: (x @ m.square).add_(x).mul_(m.row),
    "into slices": fill_slices,
    "vmap": lambda m, x: torch.vmap(lambda row: m.square @ row + m.row)(x.flatten(0, 1)),
    "by a permutation": lambda m, x: x[..., torch.tensor([3, 0, 2, 5, 1, 4])] @ m.square[torch.arange(D).flip(0)],
    "by one-hot vectors": lambda m, x: x @ torch.eye(D, dtype=x.dtype).flip(0) @ m.square,
    "cast": lambda m, x: x.double() @ m.square.clone().to(torch.float64),
}


@pytest.mark.parametrize("name", LINEAR)
def test_a_recording_can_be_computed_again_from_its_ids(name: str) -> None:
    """A single wrong id in any operator that copies or multiplies would change the result."""
    module = Small(LINEAR[name])
    recording = record(module, IDS)
    assert recording.unfollowed == ()
    expected = module(IDS).detach()
    torch.testing.assert_close(evaluate(recording, module).view(expected.shape), expected, rtol=1e-12, atol=1e-12)


def test_the_evaluation_above_can_fail() -> None:
    """Negative control: two exchanged ids must change the result."""
    module = Small(LINEAR["matmul"])
    recording = record(module, IDS)
    node = next(node for node in recording.nodes if node.kind is NodeKind.CONTRACTION)
    recording.output[0, 0, :2] = recording.output[0, 0, :2].flip(0)
    assert node.weight == 1
    assert not torch.allclose(evaluate(recording, module), module(IDS))


@pytest.mark.parametrize(
    "look_up",
    [
        lambda m, ids: F.embedding(ids, m.table),
        lambda m, ids: m.table[ids],
        lambda m, ids: m.table.t()[:, ids].movedim(0, -1),
        lambda m, ids: m.table.index_select(0, ids.flatten()).view(2, 3, D),
        lambda m, ids: m.table.gather(0, ids.flatten()[:, None].expand(-1, D)).view(2, 3, D),
        lambda m, ids: F.one_hot(ids, V).double() @ m.table,
        lambda m, ids: (m.table * 2)[ids + 0],
        lambda m, ids: torch.stack([F.embedding(column, m.table) for column in ids.unbind(1)], dim=1),
    ],
)
def test_a_table_read_by_the_tokens_is_a_lookup(look_up: Callable[["Small", Tensor], Tensor]) -> None:
    """The anatomy starts from the token embedding: every way to read it must become a lookup, with the rows that were read."""
    module = Small(lambda m, x: x)
    module.forward = lambda ids: look_up(module, ids)
    recording = record(module, IDS)
    nodes = [node for node in recording.nodes if node.kind is NodeKind.LOOKUP]
    assert {int(row) for node in nodes for row in node.index.unique()} == set(IDS.flatten().tolist())
    read = torch.cat([node.operands[0].flatten() for node in nodes]).unique()
    table = recording.sources[0].region.ids()
    assert torch.equal(read, table[IDS.flatten().sort().values].flatten())
    assert {recording.owner(i) for i in recording.output.flatten()} <= {recording.nodes.index(n) for n in nodes}


@pytest.mark.parametrize(
    ("change", "use"),
    [
        (lambda w: w, Use()),
        (lambda w: w * 0.5, Use(0.5)),
        (lambda w: 4 * w, Use(4.0)),
        (lambda w: w / 8, Use(0.125)),
        (lambda w: w.t().contiguous() * torch.tensor(2.0), Use(2.0)),
        (lambda w: -w, Use(-1.0)),
        (lambda w: 1 + w, Use(1.0, 1.0)),
        (lambda w: (w - 1) * 3, Use(3.0, -3.0)),
        (lambda w: torch.cat((w[:, :2] * 2, w[:, 2:] * 2), 1), Use(2.0)),
    ],
)
def test_constants_applied_to_a_parameter_are_recorded(change: Callable[[Tensor], Tensor], use: Use) -> None:
    """A weight that is scaled whenever it is used must be stored divided by the scale."""
    recording = record(Small(lambda m, x: x @ change(m.square)), IDS)
    assert recording.uses[recording.sources[1].storage] == {use}
    assert [node.weight for node in recording.nodes] == [None, 1]


def mha(m: Small, x: Tensor) -> Tensor:
    layer = nn.MultiheadAttention(D, 2, batch_first=True, dtype=torch.float64).eval()
    return layer(x, x, x, need_weights=False)[0]


@torch.inference_mode()  # which does not split composite operators
def inferred(m: Small, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(F.linear(x, m.square), x, x)


@pytest.mark.parametrize(
    "attend",
    [
        lambda m, x: F.scaled_dot_product_attention(x, x @ m.square, x, is_causal=True),
        lambda m, x: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x[:, None], x[:, None], x[:, None])[0],
        lambda m, x: torch.softmax(x @ (x @ m.square).mT, -1) @ x,
        lambda m, x: torch.einsum("bts,bsd->btd", torch.einsum("btd,bsd->bts", x, x).softmax(-1), x),
        lambda m, x: ((x[:, :, None] * x[:, None]).sum(-1).exp()[..., None] * (x @ m.square)[:, None]).sum(2),
        mha,
        inferred,
    ],
)
def test_attention_is_two_products_of_activations_however_it_is_called(attend: Callable[["Small", Tensor], Tensor]) -> None:
    """A fused kernel, or the fast path of torch's own module, would hide queries, keys and values."""
    recording = record(Small(attend), IDS)
    pairs = [node for node in recording.nodes if node.kind is NodeKind.CONTRACTION and node.weight is None]
    assert len(pairs) == 2
    assert recording.unfollowed == ()


def test_operators_that_the_output_does_not_need_are_left_out() -> None:
    """A value head beside the logits must not be taken for a feed-forward."""
    recording = record(Small(lambda m, x: (x @ m.square, torch.tanh(x @ m.wide))[0]), IDS)
    assert {recording.nodes[number].op for number in recording.needed} == {"embedding", "mm"}
    assert len(recording.nodes) == 4


def test_an_operator_that_cannot_be_followed_does_not_stop_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module must run even if an operator cannot be followed, and the recording must name that operator."""

    def broken(*_: object) -> Tensor:
        raise RuntimeError("not foreseen")

    monkeypatch.setitem(recorder.HANDLERS, "mm", broken)
    recording = record(Small(lambda m, x: (x @ m.square) + x), IDS)
    assert recording.unfollowed == ("aten.mm.default",)
    assert recording.nodes[-1].op == "add"
    assert len(recording.nodes[-1].operands) == 2


def test_recording_changes_neither_module_nor_torch() -> None:
    """A torch setting that stays changed would slow, or change, everything that runs later."""
    module = Small(lambda m, x: F.scaled_dot_product_attention(x, x, x) @ m.square)
    before, fast = module(IDS), torch.backends.mha.get_fastpath_enabled()
    backends = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()
    record(module, IDS)
    assert torch.equal(module(IDS), before)
    assert torch.backends.mha.get_fastpath_enabled() == fast
    assert (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()) == backends


TOKENS, WORDS = torch.zeros(2, 3, dtype=torch.long), 5
LOGITS, LOSS, HIDDEN = torch.zeros(2, 3, WORDS), torch.tensor(1.0), torch.zeros(2, 3)


@pytest.mark.parametrize(
    "output",
    [
        LOGITS,
        (LOGITS, None),
        (LOSS, LOGITS),
        (HIDDEN, LOGITS),
        [LOGITS, LOSS],
        {"logits": LOGITS, "hidden": torch.zeros(2, 3, 9)},
        {"loss": LOSS, "out": LOGITS},
        SimpleNamespace(logits=LOGITS, past=[HIDDEN]),
        SimpleNamespace(scores=LOGITS, loss=None),
        (torch.zeros(2, 3, 4), LOGITS),
        (torch.zeros(2, 3, 9), LOGITS),
        (torch.zeros(2, 3, 3, WORDS), LOGITS),
        (LOGITS, [torch.zeros(2, 1, 3, 3)]),
    ],
)
def test_logits_are_found_in_whatever_a_forward_returns(output: object) -> None:
    """Ports return logits in many forms."""
    assert logits_of(output, TOKENS, WORDS) is LOGITS


@pytest.mark.parametrize("others", [[], [torch.zeros(2, 2, 3, 3)], [torch.zeros(2, 3, 4)]])
@pytest.mark.parametrize(("shape", "tokens"), [((6, 5), 3), ((6, 7), 3), ((2, 5), 1)])
def test_flattened_logits_get_their_axes_back(shape: tuple[int, int], tokens: int, others: list[Tensor]) -> None:
    """A port that flattens its logits for the loss, and returns attention maps beside them, was refused."""
    logits = torch.arange(float(shape[0] * shape[1])).view(shape)
    assert torch.equal(logits_of((logits, others), TOKENS, WORDS), logits.view(2, tokens, shape[1]))


@pytest.mark.parametrize("output", [None, LOSS, (torch.zeros(2, 3, dtype=torch.long),), {"loss": LOSS}, "text"])
def test_an_output_without_logits_is_refused(output: object) -> None:
    """The error message is for the module's author."""
    with pytest.raises(ValueError, match=r"its forward returns .* with no logits in it"):
        logits_of(output, TOKENS, WORDS)
