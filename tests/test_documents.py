"""README, help and docstrings: every command and example shown parses, runs and prints the shown output."""

import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from support import forks
from support.random_models import write_checkpoint

import gpt2
from gpt2.cli.main import COMMANDS, file_of, parser
from gpt2.port.terms.causes import document

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SOURCES = "tools/README.md", "gpt2/parity/README.md", "gpt2/port/RESULTS.md"  # of the README's figures
PORTS = (ROOT / "gpt2/port/README.md").read_text(encoding="utf-8")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
SETTINGS = {"environ": ENVIRONMENT, "timeout": 300, "modules": forks.WITH_TRANSFORMERS}
PORT = f"""
import sys

sys.path.insert(0, {str(ROOT / "tests")!r})

import gpt2
from support.faulty import Faults, heads


def build():
    return heads.build(gpt2.load("shakespeare-mini").config, Faults("no-qkv-bias gelu-erf residual-from-normed"))
"""
RIGHT = """
import gpt2


def build():
    return gpt2.load("shakespeare-mini")
"""
STEP = """
import torch


def make_step(model):
    matrices, others = ([p for p in model.parameters() if (p.ndim > 1) is matrix] for matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.99))

    def step(x, y):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step
"""
FAULTY_STEP = STEP.replace("        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n", "")
FAULTY_STEP = FAULTY_STEP.replace(
    "AdamW(groups, lr=3e-4, betas=(0.9, 0.99))", "Adam(model.parameters(), lr=3e-4, weight_decay=0.1)"
)


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language in the README, then in that of ports."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README + PORTS, re.DOTALL | re.MULTILINE)


def shown() -> list[tuple[str, str]]:
    """Each command of both READMEs with its shown output; training first, because others read its files."""
    parts = [part for block in blocks("console") for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    found = [part.partition("\n")[::2] for part in parts]
    return sorted(found, key=lambda each: not each[0].startswith("gpt2 train"))


def words(text: str) -> list[str]:
    """The words of an output without line breaks, and without times, speeds, last digits and the place of the largest error."""
    text = re.sub(r"(\d\.\de[-+]\d\d|× \d\.\d\d).*(\n {40}.*)?", "ROUNDING", text)  # and text wrapped in its column
    text = re.sub(r"\b\de-0[5-9]\b", "ROUNDING", text)  # an error of rounding in a sentence; a larger one stays
    text = re.sub(r"[\d,]+ tok/s .*left|[\d.]+ s\b", "TIME", text)
    text = re.sub(r"\d+ threads?\b", "THREADS", text)
    return [word for word in text.split() if set(word) != {"─"}]


def holds(output: str, wanted: str) -> str:
    """The lines of ``wanted`` that are missing in ``output``, in order; ``...`` stands for any number of lines."""
    there, at = words(output), 0
    for chunk in re.split(r"^\.\.\.$", wanted, flags=re.MULTILINE):
        part = words(chunk)
        while at + len(part) <= len(there) and there[at : at + len(part)] != part:
            at += 1
        if at + len(part) > len(there):
            return chunk
        at += len(part)
    return ""


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)


@pytest.mark.slow
def test_every_command_of_the_readme_prints_what_is_shown(tmp_path: Path) -> None:
    """Output that was pasted once becomes wrong after a change."""
    mine = next(block for block in blocks("python") if "class GPT" in block)
    for name, text in (("my_gpt.py", mine), ("my_port.py", PORT), ("gpt.py", RIGHT), ("train.py", FAULTY_STEP)):
        (tmp_path / name).write_text(text)
    commands = shown()
    assert {command.split()[1] for command, _ in commands} == {"train", "compare", "diagnose", "export"}
    for command, output in commands:
        done = forks.run("-m", *shlex.split(command), status=int("MISMATCH" in output), cwd=tmp_path, **SETTINGS)
        assert "training mode" not in done.stdout  # of a class: its mode is not the user's
        missing = holds(done.stdout, output)
        assert not missing, f"{command}\n{missing}\n--- is not in what it printed ---\n{done.stdout}"


@pytest.mark.parametrize("name", ["compare", "explore"])
def test_the_picture_shows_what_the_text_says(name: str) -> None:
    """The picture had a perplexity of 52.72, the text beside it 45.03. ``tools/pictures.py`` makes it."""
    picture = Image.open(ROOT / ".github" / f"{name}.png")
    assert (picture.width, picture.text["shows"] in " ".join(README.split())) == (1160, True)


def test_figures_of_the_readme_are_those_of_the_tables() -> None:
    """One token took 1.28 in the README and 1.20 in the table that it names: one of them had been measured again."""
    tables, *texts = ((ROOT / name).read_text(encoding="utf-8") for name in SOURCES)
    known = "\n".join(re.findall(r"^\|.*$", tables, re.MULTILINE) + texts)
    rows = README.partition("| | this | beside |\n")[2].partition("\n\n")[0]
    figures = re.findall(r"\d+\.\d+(?:e-\d+)?|\d+ models of \d+ projects", rows)
    assert [each for each in figures if not re.search(rf"(?<![\d.]){re.escape(each)}", known)] == [] != figures


@pytest.mark.slow
def test_the_python_shown_runs(tmp_path: Path) -> None:
    block = next(block for block in blocks("python") if block.startswith("import gpt2\n"))
    quick = block.replace('verify("shakespeare-mini")', 'verify("shakespeare-mini", quick=True)')  # the command does it all
    code = f"{quick}\nassert report.ok\n"
    forks.run("-c", code, cwd=tmp_path, **SETTINGS)


def test_the_comparison_sees_a_difference() -> None:
    """Control: a changed figure, a missing line or two exchanged chunks are noticed; not a time, a wrapped line or rounding."""
    output = "best 3.3490 at step 200\nin 41 s\nworst 2.6e-08 wte\nabout one\ntwo three\nend\n"
    assert not holds(output, "best 3.3490 at step 200\nin 7 s\n...\nabout one two\nthree\n")
    assert not holds(output, "worst 9.9e-09 ln_f\n...\nend\n")
    assert not holds("h.2.attn to 6e-07\n", "h.2.attn to 8e-07\n")
    assert holds("h.2.attn to 6e-04\n", "h.2.attn to 8e-07\n")
    assert holds(output, "best 3.3491 at step 200\n")
    assert holds(output, "best 3.3490 at step 200\nworst 2.6e-08\n")
    assert holds(output, "end\n...\nbest 3.3490 at step 200\n")


def test_the_table_of_causes_is_the_one_that_is_printed() -> None:
    """A cause without a row, or with another title. ``python -m gpt2.port.terms.causes`` writes it."""
    assert (Path(gpt2.__file__).parent / "port/CAUSES.md").read_text(encoding="utf-8") == document()


def test_ci_runs_the_readme_s_test_command() -> None:
    """Otherwise a dependency that only CI installs would not be noticed."""
    extract = re.search(r"command=\$\((.*)\)\n", (ROOT / ".ci" / "run").read_text())[1]
    command = run(["bash", "-c", extract], ROOT).stdout.strip()
    assert command == blocks("sh")[1].strip()
    assert "-m pytest" in command
    elsewhere = re.findall(r"run: (.+)", (ROOT / ".github/workflows/test.yml").read_text())
    assert elsewhere[:2] == [command, command.replace("/bin/", "/Scripts/")]  # the folder's name on Windows
    assert [elsewhere[2].split()[0], *elsewhere[3:]] == [".ci/run", command.replace("-m pytest -n 2", "tools/step_table.py")]


def test_the_versions_of_python_that_are_claimed_are_those_that_are_tested() -> None:
    """3.12 was claimed, and no machine ran it."""
    tested = re.findall(r'ubuntu-latest, python: "(.+?)"', (ROOT / ".github/workflows/test.yml").read_text())
    claimed = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert tested == claimed
    assert f"Python {claimed[0]} to {claimed[-1]}" in README


# Requirements of examples that are missing here, by a word of the example; all other examples run.
NEEDS = {
    r"^(verify|bench) random:": "minutes",
    r"^torchrun": "several machines",
    r"\bgpt2(-medium|-xl)?(:bf16|:int8)?( |$)": "the official weights",
    r"out/(macbeth|step|mini|finetune-chat)|\./my-model|ckpt\.pt|my\.txt|steps\.npz": "files of the reader's",
    r"llama\.cpp/": "llama.cpp, an optional extra; tests/comparison/sides runs it",
    r"^train (?!--list)": "minutes",
    r"^explore(?!.*(--html|--json))": "a browser",
}


def examples() -> list[str]:
    """The commands in the examples of every help, without the comments beside them."""
    lines = [line for command in COMMANDS for line in file_of(command).EXAMPLES.splitlines() if line.startswith("  ")]
    return [re.split(r" {3,}", line.strip())[0] for line in lines if re.search(r"^  (gpt2|torchrun|echo) ", line)]


def needs(example: str) -> str | None:
    command = example.rpartition("| ")[2].removeprefix("gpt2 ")
    return next((why for pattern, why in NEEDS.items() if re.search(pattern, command)), None)


IN_README = [command for command, _ in shown() if command.startswith("gpt2")]
IN_README += [command for command in re.findall(r"`(gpt2 [a-z][^`]*)`", README) if "..." not in command]


@pytest.mark.parametrize("example", sorted({*IN_README, *examples()}))
def test_every_command_shown_parses(example: str) -> None:
    """A newcomer copies commands from the README and the help first."""
    words = shlex.split(example.partition("gpt2 ")[2])
    assert example.startswith("torchrun") or words[-1] == "--help" or parser(words).parse_args(words)


def options(example: str) -> set[str]:
    command = shlex.split(example.rpartition("gpt2 ")[2])
    return {command[0], *(word for word in command if word.startswith("--"))}


RUNNABLE = [example for example in examples() if needs(example) is None and example not in dict(shown())]
# What another example says with more options is not run: it parses, above.
RUN = [each for each in RUNNABLE if not any(options(each) < options(other) for other in RUNNABLE)]
# An example runs with less work than it asks for; that of the README runs as it stands.
LESS = {"compare": ["--tokens", "200"], "verify": ["--quick"], "bench": ["--pairs", "1"], "diagnose": ["--model", "model"]}


def test_every_command_s_help_has_examples_that_are_run() -> None:
    """The list of exceptions must leave at least one example to run for every command."""
    ran = {example.rpartition("gpt2 ")[2].split()[0] for example in RUN}
    assert ran >= COMMANDS.keys(), RUN
    assert len(RUN) >= 14


@pytest.mark.slow
@pytest.mark.parametrize("example", RUN)
def test_an_example_of_the_help_runs(example: str, tmp_path: Path) -> None:
    """An example that parses may still fail."""
    shutil.copy(ROOT / "tests" / "support" / "faulty" / "sound.py", tmp_path / "port.py")
    (tmp_path / "train.py").write_text(STEP)
    (tmp_path / "mine.py").write_text("import port\n\n\ndef build():\n    return port.build('model')\n")
    write_checkpoint(tmp_path / "model")
    if "mine.pt" in example:
        forks.run("-c", "import mine, torch\ntorch.save(mine.build().state_dict(), 'mine.pt')", cwd=tmp_path)
    if "|" in example:
        command = re.sub(r"(^|\| )gpt2 ", rf"\1{shlex.quote(sys.executable)} -m gpt2 ", example)
        done = run(["bash", "-euc", command], tmp_path)
        assert done.returncode == 0, done.stderr
    else:
        words = shlex.split(example)
        less = [] if {"--attention", "--tokens"} & {*words} else LESS.get(words[1], [])
        done = forks.run("-m", *words, *less, cwd=tmp_path, **SETTINGS)
    assert "Warning" not in done.stderr
    if "--json -" in example:
        json.loads(done.stdout)
    for file in re.findall(r"--(?:html|json|out) (\S+\.\w+)", example):
        assert (tmp_path / file).stat().st_size > 1000, file


def public() -> list[tuple[str, object]]:
    """Every public name, and every public method and property that its class defines itself."""
    found = []
    for name in gpt2.__all__:
        thing = getattr(gpt2, name)
        found.append((name, thing))
        if inspect.isclass(thing):
            own = {part: value for part, value in vars(thing).items() if not part.startswith("_")}
            kinds = (property, classmethod, staticmethod)
            found += [(f"{name}.{part}", v) for part, v in own.items() if inspect.isfunction(v) or isinstance(v, kinds)]
    return found


@pytest.mark.parametrize(("name", "thing"), public(), ids=[name for name, _ in public()])
def test_every_public_name_says_what_it_is(name: str, thing: object) -> None:
    """pydoc shows a bare signature where a docstring is missing; a dataclass shows its signature as a docstring."""
    text = thing.__doc__ or ""
    assert len(text) > 15, name
    assert not text.startswith(f"{name}("), f"{name}: only the signature that dataclass writes"
    if name in ("load", "load_tokenizer", "load_into", "checkpoint_of", "verify", "diagnose", "trace", "generate", "save"):
        assert re.search(r"Raises( InputError)?:", text)  # a function's docstring must list its errors for user input


GUIDES = [
    path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *ROOT.glob("[gnt]*/**/*.md")) if ".venv" not in path.parts
]


@pytest.mark.parametrize("name", GUIDES)
def test_files_that_are_spoken_of_are_there(name: str) -> None:
    """A guide must not name files that no longer exist."""
    text = (ROOT / name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert ((ROOT / name).parent / target).exists() or "://" in target, target
    for target, part in re.findall(r"\]\(([^)#:]*)#([\w-]+)\)", text):
        other = ((ROOT / name).parent / target if target else ROOT / name).read_text(encoding="utf-8")
        parts = [
            re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)$", other, re.MULTILINE)
        ]
        assert part in parts, (target, part)
    if name == "gpt2/port/README.md":
        for path in re.findall(r"`(?:\.\./)?([\w/]+\.py)`", text):
            assert (ROOT / path).exists() or list(ROOT.glob(f"gpt2/port/**/{path}")), path
    if name == "CONTRIBUTING.md":
        for path in re.findall(r"`((?:gpt2|tests|tools|\.ci)/[\w/.]+)", text):
            assert (ROOT / path).exists(), path
        for word, path in re.findall(r"`([A-Za-z_]{3,})`\s+(?:of|in)\s+`([\w/.]+\.py)`", text):
            found = [ROOT / path] if "/" in path else list(ROOT.glob(f"gpt2/**/{path}"))
            assert any(re.search(rf"^ *(def |class )?{word}\b", file.read_text(), re.MULTILINE) for file in found), (word, path)


def test_the_changelog_has_this_version_and_the_licence_its_name() -> None:
    """A release needs an entry in the changelog."""
    assert f"\n## {gpt2.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert (ROOT / "LICENSE").read_text().startswith("MIT License")
    assert 'license = "MIT"' in (ROOT / "pyproject.toml").read_text()
