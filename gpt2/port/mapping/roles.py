"""Which tensors of the checkpoint each parameter of a module holds, and what they are there."""

from torch import Tensor, nn

from gpt2.port.mapping.mapping import WeightMap


class Roles:
    """Which tensors of the checkpoint each parameter of a module holds, by the names that its step's parameters have."""

    def __init__(self, module: nn.Module, mapping: WeightMap | None) -> None:
        self.mapping = mapping
        named = dict(module.named_parameters(remove_duplicate=False))
        held = {id(named[one.name]): one for one in (mapping.sources if mapping else ()) if one.name in named}
        self.sources = {name: held[id(parameter)] for name, parameter in named.items() if id(parameter) in held}
        self.parts = {name: mapping.parts(source) for name, source in self.sources.items()} if mapping else {}

    def names_of(self, *parts: str) -> list[str]:
        """Return the parameters that hold only these parts, such as "ln_f"."""
        return [name for name, held in self.parts.items() if held and all(part.part in parts for part in held)]

    def role(self, name: str, parameter: Tensor) -> str:
        """Return "embedding", "norm", "bias" or "matrix": by its parts if they agree, else by its shape and name."""
        parts = [part.part for part in self.parts.get(name, [])]
        if any(part.split(".")[0] in ("wte", "wpe", "head") for part in parts):
            return "embedding"
        kinds = {"bias" if part.endswith(".bias") else "norm" if part.startswith("ln_") else "matrix" for part in parts}
        if len(kinds) == 1:
            return kinds.pop()
        return "matrix" if parameter.ndim >= 2 else "norm" if not kinds and "bias" not in name.split(".")[-1] else "bias"

    def where(self, name: str) -> list[str]:
        """Return the checkpoint's names for a parameter; its own name if it holds none of its tensors."""
        targets = [self.mapping.target(part) for part in self.parts.get(name, [])] if self.mapping else []
        return list(dict.fromkeys(filter(None, targets))) or [name]

    def depth(self, name: str) -> int:
        """Return when the forward pass last uses a parameter: the number of its part, of those that have weights."""
        stems = [one.rpartition(".")[0] for one in (self.mapping.shapes if self.mapping else ())]
        return max((stems.index(stem) for one in self.where(name) if (stem := one.rpartition(".")[0]) in stems), default=0)
