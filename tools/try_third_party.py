"""Try `gpt2.load_into` on GPT-2s that other people have written: random weights into each, logits against ours in float64.

    python tools/try_third_party.py --repositories ~/others            # everything that is installed or lies there
    python tools/try_third_party.py --only nanoGPT litgpt --size gpt2

Nothing is fetched and no third-party code is kept here: a project is tried if its package is installed, or if its repository lies
under --repositories as `owner+name`. **Their code is run**, each project in a process of its own. Where a project computes
something else than GPT-2 (`fault`), it is tried as it is and then mended, so that a wrong mapping does not hide behind their
fault. One table on stderr; the last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import gpt2
from gpt2.checkpoint.keys import expected
from gpt2.config import GPT2Config, official_size
from gpt2.port.mapping import load_into

TINY = GPT2Config(vocab_size=61, n_positions=20, n_embd=24, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0)


class Absent(Exception):
    """The project is neither installed nor under --repositories."""


# ---------------------------------------------------------------------------------------------------------------------
# Their code, found and imported
# ---------------------------------------------------------------------------------------------------------------------


def file_of(root: Path, name: str) -> types.ModuleType:
    """A single file as a module, its folder importable, as if one stood beside it."""
    sys.path.insert(0, str((root / name).parent))
    spec = importlib.util.spec_from_file_location("theirs", root / name)
    module = importlib.util.module_from_spec(spec)
    sys.modules["theirs"] = module
    spec.loader.exec_module(module)
    return module


def definitions_of(path: Path, **names: Any) -> types.SimpleNamespace:
    """Imports, classes and functions of a script that trains when it is imported; its globals are what we say."""
    kept = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)
    sys.path.insert(0, str(path.parent))
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, kept)]
    space = {"__name__": "theirs"} | names
    sys.modules["theirs"] = types.ModuleType("theirs")
    exec(compile(tree, str(path), "exec"), space)
    return types.SimpleNamespace(**space)


def rooted(root: Path, name: str) -> types.ModuleType:
    """A module of a repository that expects its own folder on the path."""
    sys.path.insert(0, str(root))
    return importlib.import_module(name)


class Hollow(types.ModuleType):
    """Stands for a package that they import and their model does not need; has every name, and each is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def not_needed(*packages: str) -> None:
    for package in packages:
        sys.modules.setdefault(package, Hollow(package))


def nano_sizes(c: GPT2Config) -> dict[str, int]:
    """Karpathy's names, which half of the world uses."""
    return {
        "block_size": c.n_positions,
        "vocab_size": c.vocab_size,
        "n_layer": c.n_layer,
        "n_head": c.n_head,
        "n_embd": c.n_embd,
    }


def book_sizes(c: GPT2Config) -> dict[str, Any]:
    """Raschka's names, which the other half uses."""
    return {
        "vocab_size": c.vocab_size,
        "context_length": c.n_positions,
        "emb_dim": c.n_embd,
        "n_heads": c.n_head,
        "n_layers": c.n_layer,
        "drop_rate": 0.1,
        "qkv_bias": True,
    }


# ---------------------------------------------------------------------------------------------------------------------
# How each is built: (sizes, root of its repository) -> module
# ---------------------------------------------------------------------------------------------------------------------


def transformers_(c: GPT2Config, _: Path) -> nn.Module:
    from transformers import GPT2Config as Config
    from transformers import GPT2LMHeadModel

    raw = {key: value for key, value in c.to_hf().items() if key not in ("architectures", "model_type", "dtype")}
    return GPT2LMHeadModel(Config(**raw))


def nanogpt(c: GPT2Config, root: Path) -> nn.Module:
    theirs = file_of(root, "model.py")
    return theirs.GPT(theirs.GPTConfig(**nano_sizes(c), dropout=0.0, bias=True))


def nanogpt_without_biases(c: GPT2Config, root: Path) -> nn.Module:
    theirs = file_of(root, "model.py")
    return theirs.GPT(theirs.GPTConfig(**nano_sizes(c), dropout=0.0, bias=False))


def nanogpt_padded(c: GPT2Config, root: Path) -> nn.Module:
    theirs = file_of(root, "model.py")
    padded = nano_sizes(c) | {"vocab_size": -(-c.vocab_size // 64) * 64}
    return theirs.GPT(theirs.GPTConfig(**padded, dropout=0.0, bias=True))


def build_nanogpt(c: GPT2Config, root: Path) -> nn.Module:
    not_needed("hellaswag")  # fetches a vocabulary when imported
    theirs = definitions_of(root / "train_gpt2.py")
    return theirs.GPT(theirs.GPTConfig(**nano_sizes(c)))


def mingpt(c: GPT2Config, root: Path) -> nn.Module:
    theirs = rooted(root, "mingpt.model").GPT
    config = theirs.get_default_config()
    config.model_type = None
    for name, value in nano_sizes(c).items():
        setattr(config, name, value)
    return theirs(config)


def video_lecture(c: GPT2Config, root: Path) -> nn.Module:
    return definitions_of(root / "gpt.py", **nano_sizes(c), dropout=0.0, device="cpu").GPTLanguageModel()


def book(c: GPT2Config, _: Path) -> nn.Module:
    from llms_from_scratch.ch04 import GPTModel

    return GPTModel(book_sizes(c))


def book_fast(c: GPT2Config, _: Path) -> nn.Module:
    from llms_from_scratch.ch04 import GPTModelFast

    return GPTModelFast(book_sizes(c))


def book_cached(c: GPT2Config, _: Path) -> nn.Module:
    from llms_from_scratch.kv_cache.gpt2 import GPTModel

    return GPTModel(book_sizes(c))


def litgpt(c: GPT2Config, _: Path) -> nn.Module:
    from litgpt import GPT, Config

    return GPT(
        Config(
            block_size=c.n_positions,
            n_layer=c.n_layer,
            n_embd=c.n_embd,
            n_head=c.n_head,
            vocab_size=c.vocab_size,
            padding_multiple=64,
            rotary_percentage=0.0,
            parallel_residual=False,
            bias=True,
            attn_bias=True,
            norm_class_name="LayerNorm",
            mlp_class_name="GptNeoxMLP",
            gelu_approximate="tanh",
        )
    )


def hooked_transformer(c: GPT2Config, _: Path) -> nn.Module:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    return HookedTransformer(
        HookedTransformerConfig(
            n_layers=c.n_layer,
            d_model=c.n_embd,
            n_ctx=c.n_positions,
            d_head=c.head_dim,
            n_heads=c.n_head,
            d_mlp=c.inner,
            d_vocab=c.vocab_size,
            act_fn="gelu_new",
            normalization_type="LN",
            device="cpu",
            dtype=torch.float64,
            seed=0,
        )
    )


def transformer_bridge(c: GPT2Config, _: Path) -> nn.Module:
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    model = transformers_(c, _).double()
    return build_bridge_from_module(model, "GPT2LMHeadModel", hf_config=model.config)


class FromDictionary(nn.Module):
    """A Keras model takes a dictionary; its layers are torch modules when torch is its backend."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        model._track_variables()  # what Keras does on a layer's build, and here too early: its variables as parameters

    def forward(self, ids: Tensor) -> Tensor:
        return self.model({"token_ids": ids, "padding_mask": torch.ones_like(ids)}, training=False)


def keras_hub(c: GPT2Config, _: Path) -> nn.Module:
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    keras.config.set_floatx("float64")
    from keras_hub.models import GPT2Backbone, GPT2CausalLM

    backbone = GPT2Backbone(
        vocabulary_size=c.vocab_size,
        num_layers=c.n_layer,
        num_heads=c.n_head,
        hidden_dim=c.n_embd,
        intermediate_dim=c.inner,
        max_sequence_length=c.n_positions,
    )
    return FromDictionary(GPT2CausalLM(backbone=backbone, preprocessor=None))


def x_transformers(c: GPT2Config, _: Path) -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=c.n_embd, depth=c.n_layer, heads=c.n_head, attn_dim_head=c.head_dim, ff_no_bias=False)
    return TransformerWrapper(num_tokens=c.vocab_size, max_seq_len=c.n_positions, attn_layers=layers)


def labml_lora(c: GPT2Config, _: Path) -> nn.Module:
    from labml_nn.lora.gpt2 import GPTModel

    return GPTModel(
        d_model=c.n_embd,
        n_heads=c.n_head,
        n_layers=c.n_layer,
        n_positions=c.n_positions,
        layer_norm_epsilon=c.layer_norm_epsilon,
        vocab_size=c.vocab_size,
        r=2,
    )


def pretrained_bert(c: GPT2Config, _: Path) -> nn.Module:
    from pytorch_pretrained_bert.modeling_gpt2 import GPT2Config as Config
    from pytorch_pretrained_bert.modeling_gpt2 import GPT2LMHeadModel

    return GPT2LMHeadModel(Config(c.vocab_size, c.n_positions, c.n_positions, c.n_embd, c.n_layer, c.n_head))


def torch_gpt_2(c: GPT2Config, _: Path) -> nn.Module:
    import torch_position_embedding

    torch_position_embedding.TrigonometricPositionEmbedding = nn.Module  # its newer releases dropped it
    not_needed("tensorflow", "keras_gpt_2")
    from torch_gpt_2.net import GPT_2

    return GPT_2(c.vocab_size, c.n_positions, c.n_embd, c.n_head, c.n_layer)


def sagar(c: GPT2Config, _: Path) -> nn.Module:
    from sagar_neuron_gpt2.model_configuration.gpt_model import GPTModel

    return GPTModel(book_sizes(c))


def nano_gpt(c: GPT2Config, _: Path) -> nn.Module:
    from nano_gpt.config import GPTConfig
    from nano_gpt.model import GPT

    return GPT(GPTConfig(**nano_sizes(c)), None)


def gpt2lm(c: GPT2Config, _: Path) -> nn.Module:
    from GPT2LM.gpt2 import GPT

    config = GPT.get_default_config()
    config.model_type = None
    for name, value in nano_sizes(c).items():
        setattr(config, name, value)
    return GPT(config)


def graykode(c: GPT2Config, root: Path) -> nn.Module:
    config = rooted(root, "GPT2.config").GPT2Config(c.vocab_size, c.n_positions, c.n_positions, c.n_embd, c.n_layer, c.n_head)
    return rooted(root, "GPT2.model").GPT2LMHeadModel(config)


def affjljoo(c: GPT2Config, root: Path) -> nn.Module:
    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "gpt2"}
    sys.modules["gpt2"] = types.ModuleType("gpt2")  # their package is called as ours is
    sys.modules["gpt2"].__path__ = [str(root / "src" / "gpt2")]
    theirs = importlib.import_module("gpt2.modeling.transformer")
    sys.modules.update(ours)
    return theirs.Transformer(
        c.n_layer, -1, c.vocab_size, c.n_positions, c.n_head, c.n_embd, rate=4, dropout=0.1, bidirectional=False
    )


def med_karim(c: GPT2Config, root: Path) -> nn.Module:
    return rooted(root, "src.models.gpt").GPTModel(types.SimpleNamespace(**book_sizes(c)))


def cafesuada(c: GPT2Config, root: Path) -> nn.Module:
    config = types.SimpleNamespace(**book_sizes(c), d_emb=c.n_embd)
    head_dim = c.head_dim
    model = rooted(root, "src.model.gpt2").GPT2(config)
    for module in model.modules():  # their __post_init__ is misspelt, so the head size stays -1
        if hasattr(module, "config") and hasattr(module.config, "d_head"):
            module.config.d_head = head_dim
    return model


def b4s1c(c: GPT2Config, root: Path) -> nn.Module:
    torch.set_default_device = lambda device: None  # their files ask for CUDA when imported
    config = rooted(root, "impl.config").GPTModelCfg(**book_sizes(c))
    return rooted(root, "impl.gpt_model").GPTModel(config)


def anthonyli(c: GPT2Config, root: Path) -> nn.Module:
    sizes = nano_sizes(c)
    config = rooted(root, "src.config").GPTConfig(d_model=sizes.pop("n_embd"), **sizes)
    return rooted(root, "src.models.gpt").GPT(config)


def parkhamchuk(c: GPT2Config, root: Path) -> nn.Module:
    not_needed("wandb")
    sizes = file_of(root, "model/hyperparams.py")
    sys.modules["model.hyperparams"] = sizes
    sizes.VOCABULARY_SIZE, sizes.EMBEDDING_DIM, sizes.CONTEXT_SIZE = c.vocab_size, c.n_embd, c.n_positions
    sizes.DECODER_BLOCKS, sizes.ATTENTION_HEADS, sizes.HEAD_DIM = c.n_layer, c.n_head, c.head_dim
    return rooted(root, "model.model").GPT2()


def nanogpt_plus(c: GPT2Config, root: Path) -> nn.Module:
    theirs = rooted(root, "src.model.gpt_language_model.gpt").GPTLanguageModel
    return theirs(c.vocab_size, c.n_embd, c.n_positions, None, c.n_head, 4, c.n_layer, bias=True, dropout=0.0)


def nanogpt_plus_heads(c: GPT2Config, root: Path) -> nn.Module:
    theirs = rooted(root, "src.model.gpt_language_model.transformer_block")
    theirs.CausalSelfAttention = theirs.MultiHeadAttention  # their other attention: a module per head
    return nanogpt_plus(c, root)


def gptnext(c: GPT2Config, root: Path) -> nn.Module:
    return nanogpt(c, root)


def r2d2(c: GPT2Config, root: Path) -> nn.Module:
    theirs = definitions_of(root / "gpt.py")
    return theirs.GPT(theirs.gptconfig(**nano_sizes(c)))


def anthracite(c: GPT2Config, _: Path) -> nn.Module:
    from anthracite.architectures.gpt2_text import GPT2TextModel
    from anthracite.core.config import ModelConfig

    return GPT2TextModel(
        ModelConfig(
            vocab_size=c.vocab_size,
            context_length=c.n_positions,
            d_model=c.n_embd,
            n_layers=c.n_layer,
            n_heads=c.n_head,
            ffn_hidden=c.inner,
        )
    )


class TexarLogits(nn.Module):
    """Its decoder decodes; given the tokens, and told to use them, it gives their logits."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, ids: Tensor) -> Tensor:
        return self.decoder(inputs=ids, decoding_strategy="train_greedy").logits


def texar(c: GPT2Config, _: Path) -> nn.Module:
    import numpy

    numpy.float_ = numpy.float64  # its last release is older than NumPy 2
    not_needed("pkg_resources")
    sys.modules["pkg_resources"].parse_version = __import__("packaging.version").version.parse
    from texar.torch.modules import GPT2Decoder

    width = {"dim": c.n_embd}
    sizes = {
        "pretrained_model_name": None,
        "vocab_size": c.vocab_size,
        "position_size": c.n_positions,
        "embed": width,
        "position_embed": width,
        "decoder": {
            **width,
            "num_blocks": c.n_layer,
            "multihead_attention": attention_of(c),
            "poswise_feedforward": feed_forward_of(c),
        },
    }
    return TexarLogits(GPT2Decoder(hparams=sizes))


def attention_of(c: GPT2Config) -> dict[str, Any]:
    return {"use_bias": True, "num_units": c.n_embd, "num_heads": c.n_head, "output_dim": c.n_embd}


def feed_forward_of(c: GPT2Config) -> dict[str, Any]:
    from texar.torch.modules import GPT2Decoder

    default = GPT2Decoder.default_hparams()["decoder"]["poswise_feedforward"]
    linear = [layer["kwargs"] for layer in default["layers"] if layer["type"] == "Linear"]
    linear[0].update(in_features=c.n_embd, out_features=c.inner)
    linear[1].update(in_features=c.inner, out_features=c.n_embd)
    return default


# ---------------------------------------------------------------------------------------------------------------------
# Where theirs is not GPT-2, what would make it so
# ---------------------------------------------------------------------------------------------------------------------


def tanh_gelu(model: nn.Module) -> None:
    """Whatever stands where an activation does becomes tanh-GELU."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.GELU | nn.ReLU) or type(child).__name__ in ("Swish", "GELU", "NewGELU"):
                setattr(module, name, nn.GELU(approximate="tanh"))


def right_norm(model: nn.Module) -> None:
    """Every hand-written norm divides by the root of the biased variance plus 1e-5."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        weight, bias = (p for p in self.parameters())
        return nn.functional.layer_norm(x, weight.shape, weight, bias, 1e-5)

    for module in model.modules():
        if type(module).__name__ in ("LayerNorm", "LayerNormalization"):
            module.forward = types.MethodType(forward, module)


def right(model: nn.Module) -> None:
    """Both."""
    tanh_gelu(model)
    right_norm(model)


def right_norm_no_softmax(model: nn.Module) -> None:
    right_norm(model)
    model.embedding_sim.forward = lambda x, weight: x @ weight.T


def true_float64(model: nn.Module) -> None:
    from keras.src.backend.common import dtypes

    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"


def no_downcast(model: nn.Module) -> None:
    """Their `scores.float()` leaves float64 alone."""
    torch.Tensor.float = lambda tensor: tensor


def functional_gelu(model: nn.Module) -> None:
    """`F.gelu` as their block sees it."""
    theirs = sys.modules[type(model.blocks[0]).__module__]
    theirs.F = types.SimpleNamespace(gelu=lambda x: nn.functional.gelu(x, approximate="tanh"))


@dataclass(frozen=True)
class Project:
    """A GPT-2 of somebody else's; ``source`` is `package` or `owner/name`; ``lacks`` says what it has no place for."""

    name: str
    source: str
    build: Callable[[GPT2Config, Path], nn.Module]
    fault: str = ""
    mend: Callable[[nn.Module], None] | None = None
    lacks: str = ""


NO_BIASES = "no biases"
PROJECTS = (
    Project("transformers GPT2LMHeadModel", "transformers", transformers_),
    Project("nanoGPT", "karpathy/nanoGPT", nanogpt, "exact GELU", tanh_gelu),
    Project("nanoGPT, vocabulary padded to 64", "karpathy/nanoGPT", nanogpt_padded, "exact GELU", tanh_gelu),
    Project("nanoGPT, bias=False", "karpathy/nanoGPT", nanogpt_without_biases, "exact GELU", tanh_gelu, "all biases"),
    Project("build-nanogpt", "karpathy/build-nanogpt", build_nanogpt),
    Project("minGPT", "karpathy/minGPT", mingpt),
    Project("ng-video-lecture", "karpathy/ng-video-lecture", video_lecture, "ReLU", tanh_gelu, "qkv biases"),
    Project("LLMs-from-scratch GPTModel", "llms-from-scratch", book, "GELU constant in float32", tanh_gelu),
    Project("LLMs-from-scratch GPTModelFast", "llms-from-scratch", book_fast),
    Project("LLMs-from-scratch with key-value cache", "llms-from-scratch", book_cached, "GELU constant in float32", tanh_gelu),
    Project("litgpt GPT", "litgpt", litgpt, lacks="learned positions"),
    Project("TransformerLens HookedTransformer", "transformer-lens", hooked_transformer),
    Project("TransformerLens TransformerBridge", "transformer-lens", transformer_bridge),
    Project(
        "keras-hub GPT2CausalLM",
        "keras-hub",
        keras_hub,
        "products and norms in float32 even where asked for float64",
        true_float64,
    ),
    Project("x-transformers Decoder", "x-transformers", x_transformers, "exact GELU", lacks="qkv, output and norm biases"),
    Project("labml lora GPT-2", "labml-nn", labml_lora, "exact GELU", tanh_gelu),
    Project("pytorch-pretrained-bert", "pytorch-pretrained-bert", pretrained_bert),
    Project(
        "torch-gpt-2",
        "torch-gpt-2",
        torch_gpt_2,
        "no epsilon in the norms; gives probabilities, not logits",
        right_norm_no_softmax,
    ),
    Project("sagar-neuron-gpt2", "sagar-neuron-gpt2", sagar, "GELU constant in float32", tanh_gelu),
    Project("nano-gpt", "nano-gpt", nano_gpt),
    Project("GPT2LM", "GPT2LM", gpt2lm),
    Project("anthracite GPT2TextModel", "anthracite", anthracite, "softmax in float32 whatever the dtype", no_downcast),
    Project("texar GPT2Decoder", "texar-pytorch", texar),
    Project("graykode/gpt-2-Pytorch", "graykode/gpt-2-Pytorch", graykode),
    Project("affjljoo3581/GPT2", "affjljoo3581/GPT2", affjljoo, "Swish", tanh_gelu),
    Project(
        "Med-Karim/gpt-2-from-scratch",
        "Med-Karim-Ben-Boubaker/gpt-2-from-scratch",
        med_karim,
        "unbiased variance; float32 GELU constant",
        right,
    ),
    Project("cafesuada24/GPT-2-Replication", "cafesuada24/GPT-2-Replication", cafesuada, "GELU with 0.44715", tanh_gelu),
    Project(
        "B4S1C-Coder/GPT-2-from-scratch",
        "B4S1C-Coder/GPT-2-from-scratch",
        b4s1c,
        "no epsilon in the norms; float32 GELU constant",
        right,
    ),
    Project("anthonyli358/pytorch-nanogpt", "anthonyli358/pytorch-nanogpt", anthonyli, "exact GELU", functional_gelu),
    Project("KsuParkhamchuk/GPT-2", "KsuParkhamchuk/GPT-2", parkhamchuk, "exact GELU", tanh_gelu, "learned positions"),
    Project("nanoGPTplus", "Andrei-Aksionov/nanoGPTplus", nanogpt_plus),
    Project("nanoGPTplus, a module per head", "Andrei-Aksionov/nanoGPTplus", nanogpt_plus_heads),
    Project("GPTNext", "loftusa/GPTNext", gptnext, "exact GELU", tanh_gelu),
    Project("R2D2-08/GPT-2_124M", "R2D2-08/GPT-2_124M", r2d2),
)


# ---------------------------------------------------------------------------------------------------------------------
# One try
# ---------------------------------------------------------------------------------------------------------------------


def version_of(source: str, repositories: Path | None) -> tuple[str, Path]:
    """Version or commit, and where its repository lies."""
    if "/" not in source:
        try:
            return importlib.metadata.version(source), Path()
        except importlib.metadata.PackageNotFoundError:
            raise Absent(f"{source} is not installed") from None
    root = repositories / source.replace("/", "+") if repositories else Path()
    if not repositories or not root.is_dir():
        raise Absent(f"{source} is not under --repositories")
    commit = subprocess.run(["git", "-C", str(root), "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True)
    return commit.stdout.strip() or "no commit", root


def logits_of(module: nn.Module, ids: Tensor, vocabulary: int) -> Tensor:
    """(B, T, V), or (B, 1, V) from a model that gives the last position only; the padding of a vocabulary is cut off."""
    output = module(ids)
    output = output[0] if isinstance(output, tuple | list) else output
    output = output["logits"] if isinstance(output, dict) else output
    return getattr(output, "logits", output)[..., :vocabulary].double()


@torch.no_grad()
def relative_error(module: nn.Module, checkpoint: Path) -> float:
    """Largest difference of any logit over the largest logit, in float64, over the whole context or 256 tokens of it.

    A model that gives the last position only is asked at eight lengths.
    """
    ours = gpt2.load(str(checkpoint), dtype="float64")
    vocabulary, length = ours.config.vocab_size, min(ours.config.n_positions, 256)
    ids = torch.randint(vocabulary, (2, length), generator=torch.Generator().manual_seed(0))
    right = ours(ids)
    found = logits_of(module, ids, vocabulary)
    if found.size(1) != length:
        ends = sorted({max(1, length * eighth // 8) for eighth in range(1, 9)})
        found = torch.cat([logits_of(module, ids[:, :end], vocabulary) for end in ends], dim=1)
        right = right[:, [end - 1 for end in ends]]
    error = float((found - right).abs().max() / right.abs().max())
    return error if math.isfinite(error) else math.inf


def attempt(project: Project, checkpoint: Path, repositories: Path | None) -> dict[str, Any]:
    """Build, load, compare; again with the fault mended. Never raises."""
    result: dict[str, Any] = {"project": project.name, "source": project.source, "fault": project.fault, "lacks": project.lacks}
    stage = "find"
    try:
        result["version"], root = version_of(project.source, repositories)
        config = gpt2.load(str(checkpoint)).config
        for mended in (False, True) if project.mend else (False,):
            stage = "build"
            torch.manual_seed(0)
            module = project.build(config, root).double().eval()
            result["parameters"] = sum(1 for _ in module.parameters())
            if mended:
                project.mend(module)
            stage = "load_into"
            report = load_into(module, str(checkpoint))
            said = json.loads(report.to_json())
            said["rows"] = [row for row in said["rows"] if not row["sources"]]  # the filled ones are long and all alike
            result["report, mended" if mended else "report"] = said
            stage = "compare"
            result["error, mended" if mended else "error"] = relative_error(module, checkpoint)
    except Absent as absent:
        result["absent"] = str(absent)
    except Exception as error:
        result["failed"] = f"{stage}: {type(error).__name__}: {error}"[:600]
        result["traceback"] = traceback.format_exc()[-3000:]
    return result


def write_checkpoint(directory: Path, config: GPT2Config) -> Path:
    """Random weights in the official layout. Biases and norms are drawn too, so nothing hides behind a zero or a one."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in expected(config).items():
        spread = 0.02 if len(shape) == 2 and config.n_embd >= 128 else 0.3
        tensors[name] = torch.randn(shape, generator=generator) * spread + (".ln_" in f".{name}" and name.endswith("weight"))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config.to_hf()))
    return directory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repositories", type=Path, help="folder of clones, each called owner+name")
    parser.add_argument("--only", nargs="*", help="words that the project's name contains", default=[])
    parser.add_argument("--size", default="tiny", help="tiny, or an official size such as gpt2")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for each project")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        project = next(project for project in PROJECTS if project.name == arguments.one)
        with contextlib.redirect_stdout(sys.stderr):
            result = attempt(project, arguments.checkpoint, arguments.repositories)
        print(json.dumps(result))
        return 0
    wanted = [p for p in PROJECTS if not arguments.only or any(word.lower() in p.name.lower() for word in arguments.only)]
    config = TINY if arguments.size == "tiny" else official_size(arguments.size)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder), config)
        for project in wanted:
            command = [sys.executable, __file__, "--one", project.name, "--checkpoint", str(checkpoint)]
            if arguments.repositories:
                command += ["--repositories", str(arguments.repositories.resolve())]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=arguments.timeout)
                last = done.stdout.strip().rpartition("\n")[2]
                result = json.loads(last) if last else {"project": project.name, "failed": done.stderr[-600:]}
            except subprocess.TimeoutExpired:
                result = {"project": project.name, "failed": f"more than {arguments.timeout:g} s"}
            results.append(result)
            print(row(result), file=sys.stderr, flush=True)
    print(json.dumps({"size": arguments.size, "torch": torch.__version__, "results": results}))
    return 0


def row(result: dict[str, Any]) -> str:
    """One line of the table."""
    state = result.get("absent") or result.get("failed") or ""
    if not state:
        state = f"ok={result['report']['ok']!s:5} logits {result['error']:.1e}"
        state += f", mended {result['error, mended']:.1e}" if "error, mended" in result else ""
        state += f" (theirs: {result['fault']})" if result["fault"] else ""
        last = result.get("report, mended", result["report"])
        else_equal = any("logits agree" in note for note in last["notes"])
        state += f" (lacks {result['lacks']}{': all that parts it from ours' if else_equal else ''})" if result["lacks"] else ""
    return f"{result['project']:42} {result.get('version', ''):12} {state}"


if __name__ == "__main__":
    sys.exit(main())
