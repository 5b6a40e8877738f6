"""GPT-2s that other people have written, as a table: where each lies, how it is built, what is wrong in it and what mends that.

How a line is written: see `third_party_project.py`.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
from third_party_project import KARPATHY, RASCHKA, Project, file_of, find, namespace
from torch import Tensor, nn

from gpt2.config import GPT2Config

RASCHKA_SETTINGS = {"drop_rate": 0.1, "qkv_bias": True}

# Projects that a line of the table does not describe.


def transformers_model(c: GPT2Config, _: Path) -> nn.Module:
    from transformers import GPT2Config as Config
    from transformers import GPT2LMHeadModel

    raw = {key: value for key, value in c.to_hf().items() if key not in ("architectures", "model_type", "dtype")}
    return GPT2LMHeadModel(Config(**raw))


def transformer_bridge(c: GPT2Config, root: Path) -> nn.Module:
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    model = transformers_model(c, root).double()
    return build_bridge_from_module(model, "GPT2LMHeadModel", hf_config=model.config)


def nanogpt_padded(c: GPT2Config, root: Path) -> nn.Module:
    sizes = {theirs: getattr(c, ours) for theirs, ours in KARPATHY.items()} | {"vocab_size": -(-c.vocab_size // 64) * 64}
    config = find("model.py:GPTConfig", root)
    return find("model.py:GPT", root)(config(**sizes, dropout=0.0, bias=True))


class FromDictionary(nn.Module):
    """A Keras model takes a dictionary; with torch as its backend, its layers are torch modules."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        model._track_variables()  # registers Keras' variables as parameters, which Keras does when a layer is built

    def forward(self, ids: Tensor) -> Tensor:
        return self.model({"token_ids": ids, "padding_mask": torch.ones_like(ids)}, training=False)


def keras_hub(c: GPT2Config, _: Path) -> nn.Module:
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    keras.config.set_floatx("float64")
    from keras_hub.models import GPT2Backbone, GPT2CausalLM

    backbone = GPT2Backbone(c.vocab_size, c.n_layer, c.n_head, c.n_embd, c.inner, max_sequence_length=c.n_positions)
    return FromDictionary(GPT2CausalLM(backbone=backbone, preprocessor=None))


def x_transformers(c: GPT2Config, _: Path) -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=c.n_embd, depth=c.n_layer, heads=c.n_head, attn_dim_head=c.head_dim, ff_no_bias=False)
    return TransformerWrapper(num_tokens=c.vocab_size, max_seq_len=c.n_positions, attn_layers=layers)


def pretrained_bert(c: GPT2Config, _: Path) -> nn.Module:
    from pytorch_pretrained_bert.modeling_gpt2 import GPT2Config as Config
    from pytorch_pretrained_bert.modeling_gpt2 import GPT2LMHeadModel

    return GPT2LMHeadModel(Config(c.vocab_size, c.n_positions, c.n_positions, c.n_embd, c.n_layer, c.n_head))


def torch_gpt_2(c: GPT2Config, _: Path) -> nn.Module:
    import torch_position_embedding

    torch_position_embedding.TrigonometricPositionEmbedding = nn.Module  # its newer releases dropped it
    from torch_gpt_2.net import GPT_2

    return GPT_2(c.vocab_size, c.n_positions, c.n_embd, c.n_head, c.n_layer)


def nano_gpt(c: GPT2Config, _: Path) -> nn.Module:
    from nano_gpt.config import GPTConfig
    from nano_gpt.model import GPT

    return GPT(GPTConfig(**{theirs: getattr(c, ours) for theirs, ours in KARPATHY.items()}), None)


def graykode(c: GPT2Config, root: Path) -> nn.Module:
    config = find("GPT2.config:GPT2Config", root)(c.vocab_size, c.n_positions, c.n_positions, c.n_embd, c.n_layer, c.n_head)
    return find("GPT2.model:GPT2LMHeadModel", root)(config)


def affjljoo(c: GPT2Config, root: Path) -> nn.Module:
    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "gpt2"}
    sys.modules["gpt2"] = types.ModuleType("gpt2")  # their package has our name
    sys.modules["gpt2"].__path__ = [str(root / "src" / "gpt2")]
    theirs = importlib.import_module("gpt2.modeling.transformer")
    sys.modules.update(ours)
    sizes = (c.n_layer, -1, c.vocab_size, c.n_positions, c.n_head, c.n_embd)
    return theirs.Transformer(*sizes, rate=4, dropout=0.1, bidirectional=False)


def cafesuada(c: GPT2Config, root: Path) -> nn.Module:
    sizes = {theirs: getattr(c, ours) for theirs, ours in RASCHKA.items()} | RASCHKA_SETTINGS | {"d_emb": c.n_embd}
    model = find("src.model.gpt2:GPT2", root)(namespace(sizes))
    for module in model.modules():  # their __post_init__ is misspelt, so the head size stays -1
        if hasattr(module, "config") and hasattr(module.config, "d_head"):
            module.config.d_head = c.head_dim
    return model


def b4s1c(c: GPT2Config, root: Path) -> nn.Module:
    torch.set_default_device = lambda device: None  # their files ask for CUDA when imported
    sizes = {theirs: getattr(c, ours) for theirs, ours in RASCHKA.items()} | RASCHKA_SETTINGS
    return find("impl.gpt_model:GPTModel", root)(find("impl.config:GPTModelCfg", root)(**sizes))


def parkhamchuk(c: GPT2Config, root: Path) -> nn.Module:
    sizes = sys.modules["model.hyperparams"] = file_of(root / "model/hyperparams.py")
    sizes.VOCABULARY_SIZE, sizes.EMBEDDING_DIM, sizes.CONTEXT_SIZE = c.vocab_size, c.n_embd, c.n_positions
    sizes.DECODER_BLOCKS, sizes.ATTENTION_HEADS, sizes.HEAD_DIM = c.n_layer, c.n_head, c.head_dim
    return find("model.model:GPT2", root)()


def nanogpt_plus(c: GPT2Config, root: Path) -> nn.Module:
    model = find("src.model.gpt_language_model.gpt:GPTLanguageModel", root)
    return model(c.vocab_size, c.n_embd, c.n_positions, None, c.n_head, 4, c.n_layer, bias=True, dropout=0.0)


def nanogpt_plus_heads(c: GPT2Config, root: Path) -> nn.Module:
    sys.path.insert(0, str(root))
    theirs = importlib.import_module("src.model.gpt_language_model.transformer_block")
    theirs.CausalSelfAttention = theirs.MultiHeadAttention  # their other attention: a module per head
    return nanogpt_plus(c, root)


class TexarLogits(nn.Module):
    """The logits that a texar decoder computes for given tokens."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, ids: Tensor) -> Tensor:
        return self.decoder(inputs=ids, decoding_strategy="train_greedy").logits


def texar(c: GPT2Config, _: Path) -> nn.Module:
    import numpy

    numpy.float_ = numpy.float64  # its last release is older than NumPy 2
    sys.modules["pkg_resources"].parse_version = __import__("packaging.version").version.parse
    from texar.torch.modules import GPT2Decoder

    width = {"dim": c.n_embd}
    feed_forward = GPT2Decoder.default_hparams()["decoder"]["poswise_feedforward"]
    first, second = (layer["kwargs"] for layer in feed_forward["layers"] if layer["type"] == "Linear")
    first.update(in_features=c.n_embd, out_features=c.inner)
    second.update(in_features=c.inner, out_features=c.n_embd)
    attention = {"use_bias": True, "num_units": c.n_embd, "num_heads": c.n_head, "output_dim": c.n_embd}
    decoder = {**width, "num_blocks": c.n_layer, "multihead_attention": attention, "poswise_feedforward": feed_forward}
    sizes = {"vocab_size": c.vocab_size, "position_size": c.n_positions, "embed": width, "position_embed": width}
    return TexarLogits(GPT2Decoder(hparams={"pretrained_model_name": None, **sizes, "decoder": decoder}))


# What makes theirs GPT-2 where it is not.


def tanh_gelu(model: nn.Module) -> None:
    """Replace every activation by tanh-GELU."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.GELU | nn.ReLU) or type(child).__name__ in ("Swish", "GELU", "NewGELU"):
                setattr(module, name, nn.GELU(approximate="tanh"))


def layer_norm(model: nn.Module) -> None:
    """Make every hand-written norm divide by the root of the biased variance plus 1e-5."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        weight, bias = (p for p in self.parameters())
        return nn.functional.layer_norm(x, weight.shape, weight, bias, 1e-5)

    for module in model.modules():
        if type(module).__name__ in ("LayerNorm", "LayerNormalization"):
            module.forward = types.MethodType(forward, module)


def gelu_and_norm(model: nn.Module) -> None:
    tanh_gelu(model)
    layer_norm(model)


def norm_and_logits(model: nn.Module) -> None:
    layer_norm(model)
    model.embedding_sim.forward = lambda x, weight: x @ weight.T


def keras_float64(model: nn.Module) -> None:
    from keras.src.backend.common import dtypes

    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"


def no_downcast(model: nn.Module) -> None:
    """Make their `scores.float()` keep float64."""
    torch.Tensor.float = lambda tensor: tensor


def functional_gelu(model: nn.Module) -> None:
    """Replace `F.gelu` in their block's module."""
    theirs = sys.modules[type(model.blocks[0]).__module__]
    theirs.F = types.SimpleNamespace(gelu=lambda x: nn.functional.gelu(x, approximate="tanh"))


EXACT_GELU: dict[str, Any] = {"fault": "exact GELU", "mend": tanh_gelu}
FLOAT32_GELU: dict[str, Any] = {"fault": "GELU constant in float32", "mend": tanh_gelu}
NANOGPT: dict[str, Any] = {"model": "model.py:GPT", "config": "model.py:GPTConfig"}
BOOK: dict[str, Any] = {"source": "llms-from-scratch", "config": "dict", "sizes": RASCHKA, "settings": RASCHKA_SETTINGS}
PROJECTS = (
    Project("transformers GPT2LMHeadModel", "transformers", transformers_model),
    Project("nanoGPT", "karpathy/nanoGPT", **NANOGPT, settings={"dropout": 0.0, "bias": True}, **EXACT_GELU),
    Project("nanoGPT, vocabulary padded to 64", "karpathy/nanoGPT", nanogpt_padded, **EXACT_GELU),
    Project(
        "nanoGPT, bias=False",
        "karpathy/nanoGPT",
        **NANOGPT,
        settings={"dropout": 0.0, "bias": False},
        **EXACT_GELU,
        lacks="all biases",
    ),
    Project("build-nanogpt", "karpathy/build-nanogpt", "train_gpt2.py!GPT", "train_gpt2.py!GPTConfig", stubs=("hellaswag",)),
    Project("minGPT", "karpathy/minGPT", "mingpt.model:GPT", "get_default_config"),
    Project(
        "ng-video-lecture",
        "karpathy/ng-video-lecture",
        "gpt.py!GPTLanguageModel",
        "globals",
        settings={"dropout": 0.0, "device": "cpu"},
        fault="ReLU",
        mend=tanh_gelu,
        lacks="qkv biases",
    ),
    Project("LLMs-from-scratch GPTModel", model="llms_from_scratch.ch04:GPTModel", **BOOK, **FLOAT32_GELU),
    Project("LLMs-from-scratch GPTModelFast", model="llms_from_scratch.ch04:GPTModelFast", **BOOK),
    Project("LLMs-from-scratch with key-value cache", model="llms_from_scratch.kv_cache.gpt2:GPTModel", **BOOK, **FLOAT32_GELU),
    Project(
        "litgpt GPT",
        "litgpt",
        "litgpt:GPT",
        "litgpt:Config",
        settings={
            "padding_multiple": 64,
            "rotary_percentage": 0.0,
            "parallel_residual": False,
            "bias": True,
            "attn_bias": True,
            "norm_class_name": "LayerNorm",
            "mlp_class_name": "GptNeoxMLP",
            "gelu_approximate": "tanh",
        },
        lacks="learned positions",
    ),
    Project(
        "TransformerLens HookedTransformer",
        "transformer-lens",
        "transformer_lens:HookedTransformer",
        "transformer_lens:HookedTransformerConfig",
        sizes={
            "n_layers": "n_layer",
            "d_model": "n_embd",
            "n_ctx": "n_positions",
            "d_head": "head_dim",
            "n_heads": "n_head",
            "d_mlp": "inner",
            "d_vocab": "vocab_size",
        },
        settings={"act_fn": "gelu_new", "normalization_type": "LN", "device": "cpu", "dtype": torch.float64, "seed": 0},
    ),
    Project("TransformerLens TransformerBridge", "transformer-lens", transformer_bridge),
    Project(
        "keras-hub GPT2CausalLM",
        "keras-hub",
        keras_hub,
        fault="products and norms in float32 even where asked for float64",
        mend=keras_float64,
    ),
    Project("x-transformers Decoder", "x-transformers", x_transformers, fault="exact GELU", lacks="qkv, output and norm biases"),
    Project(
        "labml lora GPT-2",
        "labml-nn",
        "labml_nn.lora.gpt2:GPTModel",
        sizes={
            "d_model": "n_embd",
            "n_heads": "n_head",
            "n_layers": "n_layer",
            "n_positions": "n_positions",
            "layer_norm_epsilon": "layer_norm_epsilon",
            "vocab_size": "vocab_size",
        },
        settings={"r": 2},
        **EXACT_GELU,
    ),
    Project("pytorch-pretrained-bert", "pytorch-pretrained-bert", pretrained_bert),
    Project(
        "torch-gpt-2",
        "torch-gpt-2",
        torch_gpt_2,
        stubs=("tensorflow", "keras_gpt_2"),
        fault="no epsilon in the norms; gives probabilities, not logits",
        mend=norm_and_logits,
    ),
    Project(
        "sagar-neuron-gpt2",
        **BOOK | {"source": "sagar-neuron-gpt2"},
        model="sagar_neuron_gpt2.model_configuration.gpt_model:GPTModel",
        **FLOAT32_GELU,
    ),
    Project("nano-gpt", "nano-gpt", nano_gpt),
    Project("GPT2LM", "GPT2LM", "GPT2LM.gpt2:GPT", "get_default_config"),
    Project(
        "anthracite GPT2TextModel",
        "anthracite",
        "anthracite.architectures.gpt2_text:GPT2TextModel",
        "anthracite.core.config:ModelConfig",
        sizes={
            "vocab_size": "vocab_size",
            "context_length": "n_positions",
            "d_model": "n_embd",
            "n_layers": "n_layer",
            "n_heads": "n_head",
            "ffn_hidden": "inner",
        },
        fault="softmax in float32 whatever the dtype",
        mend=no_downcast,
    ),
    Project("texar GPT2Decoder", "texar-pytorch", texar, stubs=("pkg_resources",)),
    Project("graykode/gpt-2-Pytorch", "graykode/gpt-2-Pytorch", graykode),
    Project("affjljoo3581/GPT2", "affjljoo3581/GPT2", affjljoo, fault="Swish", mend=tanh_gelu),
    Project(
        "Med-Karim/gpt-2-from-scratch",
        "Med-Karim-Ben-Boubaker/gpt-2-from-scratch",
        "src.models.gpt:GPTModel",
        "namespace",
        sizes=RASCHKA,
        settings=RASCHKA_SETTINGS,
        fault="unbiased variance; float32 GELU constant",
        mend=gelu_and_norm,
    ),
    Project(
        "cafesuada24/GPT-2-Replication", "cafesuada24/GPT-2-Replication", cafesuada, fault="GELU with 0.44715", mend=tanh_gelu
    ),
    Project(
        "B4S1C-Coder/GPT-2-from-scratch",
        "B4S1C-Coder/GPT-2-from-scratch",
        b4s1c,
        fault="no epsilon in the norms; float32 GELU constant",
        mend=gelu_and_norm,
    ),
    Project(
        "anthonyli358/pytorch-nanogpt",
        "anthonyli358/pytorch-nanogpt",
        "src.models.gpt:GPT",
        "src.config:GPTConfig",
        sizes={name.replace("n_embd", "d_model"): ours for name, ours in KARPATHY.items()},
        fault="exact GELU",
        mend=functional_gelu,
    ),
    Project(
        "KsuParkhamchuk/GPT-2",
        "KsuParkhamchuk/GPT-2",
        parkhamchuk,
        stubs=("wandb",),
        **EXACT_GELU,
        lacks="learned positions",
    ),
    Project("nanoGPTplus", "Andrei-Aksionov/nanoGPTplus", nanogpt_plus),
    Project("nanoGPTplus, a module per head", "Andrei-Aksionov/nanoGPTplus", nanogpt_plus_heads),
    Project("GPTNext", "loftusa/GPTNext", **NANOGPT, settings={"dropout": 0.0, "bias": True}, **EXACT_GELU),
    Project("R2D2-08/GPT-2_124M", "R2D2-08/GPT-2_124M", "gpt.py!GPT", "gpt.py!gptconfig"),
)
