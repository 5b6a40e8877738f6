"""Imports go in one direction, without cycles, and load nothing heavy before it is used."""

import ast
import graphlib
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from support import forks

import gpt2

PACKAGE = Path(gpt2.__file__).parent
# Each room may import itself and the rooms to its left.
ORDER = [
    *("errors", "garbage", "config", "options", "data", "kv_cache", "model", "int8", "lora", "damage", "optim", "sampling"),
    *("decoder", "generation", "checkpoint", "measure", "pages", "devices", "parity", "port", "comparison", "testing"),
    *("explore", "train", "traces", "bench", "cli"),
]
# The same inside `port`: what reads a module, what is computed, and on top what a user calls.
PORT = [
    *("terms", "recording", "anatomy", "mapping", "graph", "alternatives", "fits", "search", "module", "dump", "step"),
    "diagnosis",
]
JUDGES = {"parity", "devices", "comparison", "testing", "explore", "port"}  # train imports none of these, only measure
MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """``gpt2/data/bpe.py`` -> ``gpt2.data.bpe``."""
    return ".".join(["gpt2", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")


NAMES = {name_of(module) for module in MODULES} - {"gpt2"}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> list[ast.ImportFrom | ast.Import | ast.ClassDef]:
    """Its imports and classes, wherever they stand."""
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom | ast.Import | ast.ClassDef)]


@cache
def imports(path: Path) -> set[str]:
    """The modules of this package that a file imports at once, when it runs or for types alone, under their full names.

    ``from gpt2.data import bpe`` imports ``gpt2.data.bpe`` alone.
    """
    package = name_of(path).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    targets = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            names = {f"{source}.{alias.name}" for alias in node.names}
            targets |= names if names <= NAMES else {source, *names}
        elif isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
    return targets & NAMES


def room_of(module: str, depth: int) -> str:
    """``gpt2.port.dump.dumped`` -> ``port``, and at depth 2 ``dump``."""
    return module.split(".")[depth] if module.count(".") >= depth else ""


def misled(path: Path, order: list[str], depth: int = 1) -> set[str]:
    """Return the rooms of ``order`` to the right of a file's own that it imports."""
    name = name_of(path)
    beside = {room_of(one, depth) for one in imports(path) if one.split(".")[:depth] == name.split(".")[:depth]} - {""}
    return beside - {*order[: order.index(room_of(name, depth)) + 1]}


def test_imports_go_leftwards_only() -> None:
    """A cycle of rooms starts with one import in the wrong direction."""
    for path in MODULES:
        if path.parent != PACKAGE or path.stem in ORDER:
            assert not misled(path, ORDER), f"{path} imports {misled(path, ORDER)}"
            judges = {room_of(one, 1) for one in imports(path)} & JUDGES if room_of(name_of(path), 1) == "train" else set()
            assert not judges, f"{path} imports {judges}"


def test_imports_inside_port_go_leftwards_only() -> None:
    """Eleven pairs of its folders imported each other: none could be read before another one."""
    for path in (PACKAGE / "port").rglob("*.py"):
        if path != PACKAGE / "port/__init__.py":
            assert not misled(path, PORT, 2), f"{path} imports {misled(path, PORT, 2)}"


@pytest.mark.parametrize(
    ("place", "source", "found"),
    [
        ("fits/affine.py", "from gpt2.port.search.walk import search", {"search"}),
        ("fits/affine.py", "def f():\n    from gpt2.port import dump", {"dump"}),
        ("graph.py", "from gpt2.port.terms.places import Place\nfrom gpt2.port.alternatives import masks", {"alternatives"}),
        ("search/walk.py", "from gpt2.port.fits.affine import Norm\nfrom gpt2.model import GPT2", set()),
    ],
)
def test_a_planted_import_to_the_right_is_seen(place: str, source: str, found: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    assert (PACKAGE / "port" / place).exists()
    monkeypatch.setitem(globals(), "imports", imports.__wrapped__)
    monkeypatch.setitem(globals(), "nodes_of", lambda path: ast.walk(ast.parse(source)))
    assert misled(PACKAGE / "port" / place, PORT, 2) == found


def test_no_circle_of_imports() -> None:
    """Two files that import each other, even inside functions or for types alone, can only be understood together."""
    graphlib.TopologicalSorter({name_of(path): imports(path) - {name_of(path)} for path in MODULES}).prepare()  # names the circle


def test_no_module_has_the_name_of_a_public_function() -> None:
    """Importing ``gpt2.compare`` as a module would replace the function ``gpt2.compare``."""
    assert not {path.stem for path in MODULES} & {*gpt2.__all__}


def test_no_two_classes_have_one_name() -> None:
    """``Model`` was three things, ``Source`` three, ``Part`` three: a reader had to look up which one an import was."""
    names = Counter(node.name for path in MODULES for node in nodes_of(path) if isinstance(node, ast.ClassDef))
    assert len(names) > 300
    assert [name for name, times in names.items() if times > 1] == []


def test_a_module_says_first_what_it_is_for() -> None:
    """The first lines of the docstrings are an overview of the package."""
    for path in MODULES:
        docstring = ast.get_docstring(tree_of(path))
        assert docstring, f"{path} has no docstring"
        assert 10 <= len(docstring.splitlines()[0]) <= 125, path


def test_only_public_names_of_the_hub_s_client_are_used() -> None:
    """A private name may be gone in any release: our own client stood on five of them."""
    lines = [line.strip() for path in MODULES for line in path.read_text(encoding="utf-8").splitlines()]
    taken = [line for line in lines if re.search(r"huggingface_hub|\b(constants|errors)\.", line)]
    assert len(taken) > 20
    private = re.compile(r"huggingface_hub[.\w]*\._|import.*\b_(?!_)\w+|(constants|errors)\._")
    assert list(filter(private.search, taken)) == []


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


UNUSED = {"transformers", "huggingface_hub", "safetensors.torch", "numpy.random"}  # while loading a model
HEAVY = UNUSED | {"safetensors", "torch", "numpy", "tiktoken", "tokenizers", "rich"}
RECORDED_AND_TRAINED = """
import torch; from gpt2.optim import Optim, adamw; from gpt2.port.recording.recorder import record
class M(torch.nn.Module):
    def __init__(s): super().__init__(); s.e = torch.nn.Embedding(9, 4)
    def forward(s, ids): return s.e(ids) @ s.e.weight.T
record(M(), torch.tensor([[1, 2]])); steps = adamw(M(), Optim()); steps.zero_grad(); steps.step()
steps.load_state_dict(steps.state_dict())"""


@pytest.mark.parametrize(
    ("code", "unused"),
    [
        ("import gpt2", HEAVY),
        ("import gpt2.cli.main as m; m.parser().format_help()", HEAVY),
        ("import gpt2.data, gpt2.config, gpt2.errors", HEAVY),
        ("import gpt2.data.bpe", HEAVY - {"tokenizers"}),
        ("import gpt2.checkpoint.hub, gpt2.checkpoint.names", HEAVY),
        ("import gpt2; gpt2.load(); gpt2.load_tokenizer()", UNUSED),
        (RECORDED_AND_TRAINED, {"torch._dynamo"}),
    ],
)
def test_nothing_heavy_is_imported_before_it_is_used(code: str, unused: set[str]) -> None:
    """`gpt2 --help` must not wait a second for torch, nor a step of training for its compiler."""
    code = f"import sys; {code}; print(sorted({unused} & set(sys.modules)))"
    assert (run(code) if "torch" in unused else forks.run("-c", code, modules=forks.TORCH).stdout) == "[]\n"


def test_two_files_import_transformers_and_only_when_called() -> None:
    """The reference, and the adapter of tokenizers: whatever else used it would compare transformers with itself."""

    def found(nodes: object) -> bool:
        names = [(node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name for node in nodes if kind(node)]
        return any(name.split(".")[0] == "transformers" for name in names)

    def kind(node: ast.AST) -> bool:
        return isinstance(node, ast.Import | ast.ImportFrom)

    users = {name_of(path) for path in MODULES if found(nodes_of(path))}
    assert users == {"gpt2.data.adapter", "gpt2.parity.reference"}
    assert not any(found(tree_of(path).body) for path in MODULES)


def test_every_public_name_is_there() -> None:
    """Names are looked up lazily, so a typo in the table would show only on first use."""
    for name in gpt2.__all__:
        assert getattr(gpt2, name).__module__.partition(".")[0] == "gpt2"
    assert set(gpt2.__all__) <= set(dir(gpt2))
    with pytest.raises(AttributeError, match="no_such_name"):
        gpt2.no_such_name  # noqa: B018
