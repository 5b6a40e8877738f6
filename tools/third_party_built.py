"""Builders of those GPT-2s in `third_party_faults.py` that a line of its table does not describe."""

import importlib
import logging
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path

import torch
from third_party_project import KARPATHY, RASCHKA, file_of, find, namespace, sizes_of, stub
from torch import Tensor, nn

from gpt2.config import GPT2Config


class Logits(nn.Module):
    """A model whose forward pass takes more than the ids; ``call`` gives the logits."""

    def __init__(self, model: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, ids: Tensor) -> Tensor:
        return self.call(self.model, ids)


def package(name: str, folder: Path) -> None:
    """Register a package without its `__init__`, which imports what the model does not need."""
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [str(folder)]


def adityaa(c: GPT2Config, root: Path) -> nn.Module:
    stub("Configs")
    config = types.SimpleNamespace(n_embed=c.n_embd, n_head=c.n_head, block_size=c.n_positions, dropout=0.1)
    sys.modules["Configs.configs"] = types.ModuleType("Configs.configs")  # not in their repository
    sys.modules["Configs.configs"].ModelConfig = config
    return find("Model.model:GptModel", root)(c.vocab_size)  # always three blocks


def minhnguyen(c: GPT2Config, root: Path) -> nn.Module:
    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "gpt2"}
    package("gpt2", root / "gpt2")  # their package has our name
    sys.modules["gpt2"].utils = sys.modules["gpt2.utils"] = types.ModuleType("gpt2.utils")
    theirs = importlib.import_module("gpt2.model")
    for name in ("gpt2", "gpt2.utils", "gpt2.model"):
        del sys.modules[name]
    sys.modules.update(ours)
    sizes = "num_layers num_heads vocab_size seq_length"
    config = theirs.GPTConfig(**sizes_of(c, sizes), d_model=c.n_embd, d_ff=c.inner, dropout=0.1)
    return theirs.GPT(config)


def pyemma(c: GPT2Config, root: Path) -> nn.Module:
    stub("tiktoken")
    config = sizes_of(c, RASCHKA) | {"dropout": 0.1, "qkv_bias": False}
    return Logits(find("model.gpt:GPT", root)(config), lambda model, ids: model(ids, kv_caches=[None] * c.n_layer)[0])


def pyemma_nano(c: GPT2Config, root: Path) -> nn.Module:
    config = find("model.nano:GPTConfig", root)(**sizes_of(c, KARPATHY), dropout=0.1, bias=True)
    return Logits(find("model.nano:GPT", root)(config), lambda model, ids: model(ids, ids)[0])


def submarat(c: GPT2Config, root: Path) -> nn.Module:
    theirs = file_of(root / "gpt2_small/model.py")
    names = "d_model vocab seq_len n_heads n_layers"
    return theirs.Transformer(theirs.TransformerConfig(**sizes_of(c, names), d_head=c.head_dim, d_mlp=c.inner))


def pfrwilson(c: GPT2Config, root: Path) -> nn.Module:
    find("models.transformer:MLP", root)
    theirs = sys.modules["models.transformer"]
    sys.modules |= {"torchzero": types.ModuleType("torchzero"), "torchzero.nn": theirs}
    model = theirs.TransformerForSequenceGeneration
    return model(c.vocab_size, 0, c.n_layer, c.n_head, c.n_embd, c.inner, 0.1, max_len=c.n_positions)


def michaelnny(c: GPT2Config, root: Path) -> nn.Module:
    config = find("models.gpt2_model:GPT2Config", root)
    names = "num_layers num_attn_heads vocab_size block_size"
    theirs = sys.modules["models.gpt2_model"]
    theirs.get_gpt2_config = lambda model_type, **rates: config(**sizes_of(c, names), hidden_size=c.n_embd, **rates)
    return theirs.GPT2LMHeadModel("gpt2", 0.1, 0.1, 0.1)


def msaelices(c: GPT2Config, root: Path) -> nn.Module:
    os.chdir(root / "problems/10-full-model")
    rates = {"embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1, "layer_norm_epsilon": 1e-5}
    sizes = {name: getattr(c, name) for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")}
    return file_of(Path("solution.py").resolve()).GPT2Model(namespace(sizes | {"n_inner": c.inner} | rates))


def huangchong(c: GPT2Config, root: Path) -> nn.Module:
    package("gpt2_from_scratch", root / "src/gpt2_from_scratch")
    return find("gpt2_from_scratch.model:GPTModel", root)(sizes_of(c, RASCHKA) | {"drop_rate": 0.1, "qkv_bias": True})


def wanghaoming(c: GPT2Config, root: Path) -> nn.Module:
    return find("my_gpt2.model:GPT2", root / "src")(namespace(sizes_of(c, KARPATHY) | {"dropout": 0.1, "bias": True}))


def davidfitzek(c: GPT2Config, root: Path) -> nn.Module:
    for name in ("minigpt", "minigpt.model"):
        package(name, root / "src" / name.replace(".", "/"))
    stub("minigpt.config")
    config = sizes_of(c, RASCHKA) | {"block_size": c.n_positions, "dropout": 0.1, "qkv_bias": False}
    return find("minigpt.model.transformer:GPTModel", root)(namespace(config))


def llmc(c: GPT2Config, root: Path) -> nn.Module:
    config = find("train_gpt2.py!GPTConfig", root)(**sizes_of(c, KARPATHY))
    model = find("train_gpt2.py!GPT", root, FLASH=0)
    model.__init__.__globals__["print0"] = lambda *_: None
    return Logits(model(config), lambda model, ids: model(ids, ids)[0])


class SevenShi(nn.Module):
    """7shi's model: dataclasses of plain tensors that take one row of ids."""

    def __init__(self, c: GPT2Config, root: Path) -> None:
        super().__init__()
        find("my_gpt2_torch.model:GPT2", root)
        theirs = sys.modules["my_gpt2_torch.model"]
        self.weights = nn.ParameterList()

        def made(kind: type, *shapes: tuple[int, ...], first: tuple[int, ...] = ()) -> object:
            return kind(*first, *(self._made(*shape) for shape in shapes))

        d, inner = c.n_embd, c.inner
        wte, wpe, norm = self._made(c.vocab_size, d), self._made(c.n_positions, d), ((d,), (d,))
        blocks = [
            theirs.TransformerBlock(
                made(theirs.LayerNorm, *norm),
                made(theirs.Attention, (d, 3 * d), (3 * d,), (d, d), (d,), first=(c.n_head,)),
                made(theirs.LayerNorm, *norm),
                made(theirs.MLP, (d, inner), (inner,), (inner, d), (d,)),
            )
            for _ in range(c.n_layer)
        ]
        self.model = theirs.GPT2({}, wte, wpe, made(theirs.LayerNorm, *norm), blocks)

    def _made(self, *shape: int) -> nn.Parameter:
        self.weights.append(nn.Parameter(torch.randn(shape, dtype=torch.float64)))
        return self.weights[-1]

    def forward(self, ids: Tensor) -> Tensor:
        return torch.stack([self.model(row) for row in ids])


def abdulvajid(c: GPT2Config, root: Path) -> nn.Module:
    stub("tiktoken")
    sys.modules["tiktoken"].get_encoding = lambda name: None
    sizes = {"d_model": c.n_embd, "n_heads": c.n_head, "n_layers": c.n_layer, "context_len": c.n_positions}
    config = find("model:GptConfig", root)(**sizes, vocab_size=c.vocab_size, intermidiate_size=c.inner)
    return find("model:GPT", root)(config)


def shehab(c: GPT2Config, root: Path) -> nn.Module:
    names = "context_length vocab_size num_layers num_heads"
    config = find("model.gpt:GPTConfig", root)(**sizes_of(c, names), embd_size=c.n_embd)
    return Logits(find("model.gpt:GPT", root)(config), lambda model, ids: model(ids, ids, True)[0])


def gregoire(c: GPT2Config, root: Path) -> nn.Module:
    stub("torchtune", "torchtune.modules", "torchtune.modules.attention")
    sizes = {"n_embedding": c.n_embd, "n_head": c.n_head, "block_size": c.n_positions, "vocab_size": c.vocab_size}
    model = find("src.training.models.gpt_model:GPT", root)
    return model(**sizes, n_layer=c.n_layer, bias=True, dropout=0.1, grouped=False)


def deniskurlov(c: GPT2Config, root: Path) -> nn.Module:
    stub("src.data")
    return find("src.model:GPT", root)(c.vocab_size, c.n_positions, c.n_head, c.n_embd, c.n_layer, 10000.0, None, 0.1)


def tamir303(c: GPT2Config, root: Path) -> nn.Module:
    for name in ("src", "src.etc", "src.impl", "src.interfaces"):
        package(name, root / "GPT2-backend" / name.replace(".", "/"))
    log = types.SimpleNamespace(get_logger=lambda: logging.getLogger("theirs"))
    modules = {
        "src.etc.config": types.SimpleNamespace(Config=types.SimpleNamespace(log_debug_activate=False)),
        "src.etc.logger": types.SimpleNamespace(logging=logging, CustomLogger=lambda **_: log),
    }
    sys.modules |= modules  # type: ignore[arg-type]
    model = find("src.impl.model.model:GPT2", root)
    return model(c.vocab_size, c.n_positions, c.n_embd, c.n_head, c.n_layer)


def timotheegath(c: GPT2Config, root: Path) -> nn.Module:
    from transformers.activations import NewGELUActivation

    class Annotation:
        def __class_getitem__(cls, _: object) -> type:
            return cls

    lens = "transformer_lens.utilities.activation_functions"
    reference = types.SimpleNamespace(cfg=types.SimpleNamespace(d_vocab=c.vocab_size), tokenizer=())
    hooked = types.SimpleNamespace(from_pretrained=lambda *_, **__: reference)
    stub("beartype", "jaxtyping", "tests", "tqdm", "wandb", "transformer_lens", "transformer_lens.utilities", lens)
    for name in ("transformer_lens", "transformer_lens.utilities"):
        sys.modules[name].__path__ = []
    sys.modules["transformer_lens"].HookedTransformer = hooked
    sys.modules[lens].gelu_new = NewGELUActivation()
    annotations = sys.modules["jaxtyping"]
    annotations.Float = annotations.Int = Annotation
    annotations.jaxtyped = lambda **_: lambda function: function
    config = find("custom_transformer:Config", root)
    sizes = sizes_of(c, "d_model d_vocab n_ctx d_head d_mlp n_heads n_layers")
    return find("custom_transformer:DemoTransformer", root)(config(**sizes))
