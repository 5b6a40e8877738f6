"""What importing costs, and in which direction it goes."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gpt2

PACKAGE = Path(gpt2.__file__).parent
# Each layer may import itself and what stands to its left.
ORDER = [
    *("errors", "data", "config", "kv_cache", "model", "int8", "lora", "sampling", "fast", "generate"),
    *("checkpoint", "compare", "train", "bench", "cli"),
]


def imports(path: Path) -> set[str]:
    """The layers that a module imports from this package, lazily or not."""
    found = set()
    package = ["gpt2", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            target = [*base, *(node.module or "").split(".")] if node.module else base
            names = [[*target, alias.name] for alias in node.names] if target == ["gpt2"] else [target]
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        else:
            continue
        found |= {name[1] for name in names if name[0] == "gpt2" and len(name) > 1}
    return found & set(ORDER)


MODULES = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem not in ("__init__", "__main__")]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_leftwards_only(path: Path) -> None:
    """A cycle starts with one convenient import; this is where it stops."""
    layer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    allowed = ORDER[: ORDER.index(layer) + 1]
    assert imports(path) <= set(allowed), f"{layer} imports {imports(path) - set(allowed)}"


def test_the_reader_of_imports_sees_every_form(tmp_path: Path) -> None:
    """A test that overlooks a form of import holds nothing."""
    inside = PACKAGE / "data" / "pretend.py"
    cases = {
        "from ..model import GPT2": {"model"},
        "from .. import train": {"train"},
        "import gpt2.cli.main": {"cli"},
        "from gpt2.compare.run import verify": {"compare"},
        "def f():\n    from ..checkpoint.load import load": {"checkpoint"},
        "from .bpe import BPE": {"data"},
    }
    for source, expected in cases.items():
        path = type("Pretend", (type(inside),), {"read_text": lambda self, source=source: source})(inside)
        assert imports(path) == expected, source


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "code",
    [
        "import gpt2",
        "import gpt2.cli.main as m; m.parser().format_help()",
        "import gpt2.data, gpt2.data.bpe, gpt2.config, gpt2.errors",
        "from gpt2.checkpoint import hub; hub.resolve('shakespeare-mini')",
    ],
)
def test_nothing_heavy_is_imported_before_it_is_used(code: str) -> None:
    """`gpt2 --help` that waits a second for torch feels broken."""
    heavy = "{'torch', 'transformers', 'numpy', 'tiktoken', 'tokenizers', 'huggingface_hub', 'rich', 'safetensors'}"
    assert run(f"import sys; {code}; print(sorted({heavy} & set(sys.modules)))").strip() == "[]"


def test_loading_a_model_imports_no_reference() -> None:
    """transformers takes seconds, and is only ever a yardstick."""
    code = "import sys, gpt2; gpt2.load(); gpt2.load_tokenizer(); print({'transformers', 'huggingface_hub'} & set(sys.modules))"
    assert run(code).strip() == "set()"


def test_every_public_name_is_there() -> None:
    """Names are looked up lazily, so a typo in the table would only show when a user trips over it."""
    for name in gpt2.__all__:
        assert getattr(gpt2, name).__module__.startswith("gpt2.")
    assert set(gpt2.__all__) <= set(dir(gpt2))
    with pytest.raises(AttributeError, match="no_such_name"):
        gpt2.no_such_name  # noqa: B018


def test_generate_is_the_function_even_after_its_module_was_imported() -> None:
    """Importing gpt2.generate would bind the module over the public function of the same name."""
    assert (
        run("import gpt2.generate, gpt2; from gpt2.generate import stream; print(gpt2.generate.__name__)").strip() == "generate"
    )
    assert callable(gpt2.generate)
