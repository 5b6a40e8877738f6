"""Call a user's module: borrow it in eval mode and in float64, find the logits, and disable fused operators."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpt2.errors import InputError
from gpt2.measure.user_code import kept_by, kind_of


def device_of(module: nn.Module) -> torch.device:
    return next((tensor.device for tensor in [*module.parameters(), *module.buffers()]), torch.device("cpu"))


@contextmanager
def plain_attention() -> Iterator[None]:
    """Make torch compute attention by single operators: no fused kernel, no compiled graph."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with ExitStack() as stack:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if "torch._dynamo" in sys.modules:  # importing it takes seconds; without it nothing is compiled
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class ForwardError(InputError):
    """Raised when a module's forward pass fails."""


class Borrowed:
    """A module in eval mode that may be changed; leaving the context restores all except what :meth:`keep` names.

    Modes, attributes (what is in lists and dictionaries, too) and buffers are restored; other objects that the module refers to
    are not. This is the module itself, not a copy: many modules cannot be copied, and a lambda in a copy still calls the
    original's layers. ``failure``: its error in float64, if it has one. ``wide``: it runs there.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        held = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
        self.tensors: dict[str, Tensor] = {name: tensor for some in held for name, tensor in some}
        self.failure: Exception | None = None
        self.wide = True
        self._kept: set[int] = set()
        self._swapped: dict[int, tuple[Tensor, Tensor]] = {}  # a tensor, and its original data
        self._inference = ExitStack()  # elsewhere torch refuses to change tensors that were made in inference mode

    def __enter__(self) -> "Borrowed":
        if any(tensor.is_inference() for tensor in self.tensors.values()):
            self._inference.enter_context(torch.inference_mode())
        self._default, self._class = torch.get_default_dtype(), type(self.module)
        self._during = self._default  # the default dtype during a call of the module
        self._modes = [(part, part.training) for part in self.module.modules()]
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in self.module.buffers()]
        for part, _ in self._modes:  # some modules override eval()
            part.training = False
        self._set_back = kept_by(self.module)
        return self

    @property
    def by_rows(self) -> list[str]:
        """A note, if the module takes one row of ids alone."""
        why = getattr(type(self.module), "row_by_row", "")
        return [f"your forward fails on two rows of ids ({why}): the rows of a text were run one after the other"] * bool(why)

    def rewind(self) -> None:
        """Restore what the module keeps beside its parameters as it was at first: a call may leave something for the next one."""
        self._set_back()
        for buffer, old in self._buffers:
            if buffer.shape == old.shape and id(buffer) not in self._kept:
                buffer.data.copy_(old)

    def to_float64(self) -> None:
        """Replace parameters and floating-point buffers by float64 copies; keep the originals."""
        self._buffers = [(buffer, before) for buffer, before in self._buffers if not torch.equal(buffer, before)]
        for tensor in self.tensors.values():
            if tensor.is_floating_point() and id(tensor) not in self._swapped:
                self._swapped[id(tensor)] = tensor, tensor.data
                tensor.data = tensor.data.to(torch.float64, copy=True)

    def widest(self, call: Callable[[], list[Tensor | Exception]]) -> list[Tensor | Exception]:
        """Return what ``call`` returns in float64; if errors alone, with new tensors in float64 too, or in the own dtype.

        A forward that makes tensors in torch's default dtype fails where they meet float64, or its least number.
        """
        made = call()
        if isinstance(made[0], Exception) and self.failure is None and not any(isinstance(one, Tensor) for one in made):
            self.failure = made[0]
            self._during = torch.float64
            self._become(kind_of(type(self.module), __call__=self._calling()(type(self.module).__call__)))
            made = call()
            if not any(isinstance(one, Tensor) for one in made):
                self.wide = False
                self.to_own_dtype()
                made = call()
        return made

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Let torch have another default dtype during a call of the module alone, as all threads have it. Calls may be nested."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self._during)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def _become(self, kind: type[nn.Module]) -> None:
        object.__setattr__(self.module, "__class__", kind)  # a compiled module passes attributes on to what is compiled

    def to_own_dtype(self) -> None:
        """Round the float64 values to each tensor's own dtype."""
        self._during = self._default
        for tensor, before in self._swapped.values():
            tensor.data = tensor.data.to(before.dtype)

    @contextmanager
    def in_own_dtype(self) -> Iterator[None]:
        """Let the float64 values be rounded to each tensor's own dtype meanwhile."""
        wide, during = [(tensor, tensor.data) for tensor, _ in self._swapped.values()], self._during
        self.to_own_dtype()
        try:
            yield
        finally:
            self._during = during
            for tensor, data in wide:
                tensor.data = data

    def keep(self, names: Iterable[str]) -> None:
        """Let these tensors keep their final values after the context ends."""
        self._kept |= {id(self.tensors[name]) for name in names}

    @torch.no_grad()
    def __exit__(self, *error: object) -> None:
        self._become(self._class)
        for tensor, before in self._swapped.values():
            if id(tensor) in self._kept:
                before.copy_(tensor.data)
            tensor.data = before
        self.rewind()
        for part, training in self._modes:
            part.training = training
        self._inference.close()
