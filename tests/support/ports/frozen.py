"""Inference only: the weights are buffers, there is not one parameter."""

from support.ports.parts import GPT, fill

__all__ = ["build", "fill"]


def build(config):
    module = GPT(config)
    for part in module.modules():
        for name, parameter in [*part.named_parameters(recurse=False)]:
            delattr(part, name)
            part.register_buffer(name, parameter.detach())
    return module
