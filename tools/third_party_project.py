"""How a GPT-2 by somebody else is described in the tables of third-party projects, found, and built at our sizes.

A project's ``model`` and ``config`` say where its classes are: ``package.module:Class`` for what is installed or expects its
repository on the path, ``file.py:Class`` for a single file, ``file.py!Class`` for a script that trains when it is imported (only
its imports, classes and functions are executed). ``config`` is "" where the model takes the sizes as keyword arguments, and
``dict`` or ``namespace`` where it takes one object of them; ``globals`` where they are global names of its script. A class that
no such line describes has a function that builds it.
"""

import ast
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from gpt2.config import GPT2Config

WORDS = {  # ours -> theirs: every name that a project has for that size
    "n_positions": "block_size chunk_size context_len context_length context_size context_window max_len max_length"
    " max_position_embeddings max_seq_len n_ctx n_position n_positions seq_len seq_length",
    "vocab_size": "d_vocab vocab vocab_size",
    "n_layer": "layers n_blocks n_layer n_layers n_transformer_blocks num_blocks num_layers",
    "n_head": "n_head n_heads nhead num_attn_heads num_heads",
    "n_embd": "d_model emb_dim embd_size embdg_dim embed_dim embedding_dimension embed_size embedding_size hidden_size"
    " n_emb n_embd n_embed n_embedding_size n_embeddings",
    "head_dim": "d_head head_size",
    "inner": "d_ff d_mlp dim_feedforward ff_hidden_dim intermediate_size",
}
OURS = {theirs: ours for ours, words in WORDS.items() for theirs in words.split()}
KARPATHY = "block_size vocab_size n_layer n_head n_embd"
RASCHKA = "vocab_size context_length emb_dim n_heads n_layers"


def sizes_of(c: GPT2Config, names: str) -> dict[str, Any]:
    return {theirs: getattr(c, OURS[theirs]) for theirs in names.split()}


@dataclass(frozen=True)
class Project:
    """A GPT-2 by somebody else; ``source`` is its repository, `owner/name`."""

    name: str
    source: str
    model: str | Callable[[GPT2Config, Path], nn.Module]
    config: str = ""
    sizes: str = KARPATHY  # its names of them
    settings: Mapping[str, Any] = field(default_factory=dict)
    stubs: tuple[str, ...] = ()  # packages that it imports and its model does not need

    def module(self, c: GPT2Config, root: Path) -> nn.Module:
        """The module at the sizes of ``c``; ``root`` is the folder of its repository."""
        stub(*self.stubs)
        if not isinstance(self.model, str):
            return self.model(c, root)
        sizes = sizes_of(c, self.sizes) | dict(self.settings)
        if self.config == "globals":
            return find(self.model, root, **sizes)()
        model = find(self.model, root)
        if self.config == "":
            return model(**sizes)
        if self.config in ("dict", "namespace"):
            return model(sizes if self.config == "dict" else namespace(sizes))
        return model(find(self.config, root)(**sizes))


def find(place: str, root: Path, **names: Any) -> Any:
    """The class at ``place``; ``names`` are the globals of a script whose definitions alone are executed."""
    for separator, load in ((".py!", definitions_of), (".py:", file_of)):
        if separator in place:
            file, _, name = place.partition(separator)
            return getattr(load(root / f"{file}.py", **names), name)
    module, _, name = place.partition(":")
    sys.path.insert(0, str(root))
    return getattr(importlib.import_module(module), name)


def file_of(path: Path) -> types.ModuleType:
    """A single file as a module, with its folder on the path."""
    if "theirs" not in sys.modules:
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location("theirs", path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules["theirs"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["theirs"]


def definitions_of(path: Path, **names: Any) -> types.SimpleNamespace:
    """Imports, classes and functions of a script that trains when it is imported, with ``names`` as its globals."""
    sys.path.insert(0, str(path.parent))
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef)]
    space = {"__name__": "theirs"} | names
    sys.modules["theirs"] = types.ModuleType("theirs")
    exec(compile(tree, str(path), "exec"), space)
    return types.SimpleNamespace(**space)


def namespace(sizes: Mapping[str, Any]) -> types.SimpleNamespace:
    return types.SimpleNamespace(**sizes)


class Stub(types.ModuleType):
    """Stands in for a package that they import and their model does not need: every name exists and is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def stub(*packages: str) -> None:
    for package in packages:
        sys.modules.setdefault(package, Stub(package))
