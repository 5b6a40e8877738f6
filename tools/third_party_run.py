"""What the tools on third-party projects share: the checkpoint, the command line, and one process for each project."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from third_party_project import Project

from gpt2.checkpoint.keys import expected
from gpt2.config import GPT2Config

P = TypeVar("P", bound=Project)
ERROR_CHARACTERS = 600


class Absent(Exception):
    """The project is neither installed nor under --repositories."""


def version_of(source: str, repositories: Path | None) -> tuple[str, Path]:
    """Its version or commit, and the folder of its repository."""
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


def parser_of(description: str | None, timeout: float) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repositories", type=Path, help="folder of clones, each called owner+name")
    parser.add_argument("--only", nargs="*", help="words that the project's name contains", default=[])
    parser.add_argument("--timeout", type=float, default=timeout, help="seconds for each project")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    return parser


def run_each(
    arguments: argparse.Namespace,
    projects: Sequence[P],
    config: GPT2Config,
    attempt: Callable[[P, Path, Path | None], dict[str, Any]],
    row: Callable[[dict[str, Any]], str],
) -> list[dict[str, Any]]:
    """Return ``attempt(project, checkpoint, repositories)`` of each project, from a process of its own; rows go to stderr.

    That process is this script again with --one: it prints its project's result, and does not return from here.
    """
    if arguments.one:
        project = next(project for project in projects if project.name == arguments.one)
        with contextlib.redirect_stdout(sys.stderr):
            result = attempt(project, arguments.checkpoint, arguments.repositories)
        print(json.dumps(result))
        sys.exit(0)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *sys.argv, "--checkpoint", str(write_checkpoint(Path(folder), config)), "--one"]
        for project in projects:
            if arguments.only and not any(word.lower() in project.name.lower() for word in arguments.only):
                continue
            try:
                done = subprocess.run([*command, project.name], capture_output=True, text=True, timeout=arguments.timeout)
                last = done.stdout.strip().rpartition("\n")[2]
                failure = {"project": project.name, "failed": done.stderr[-ERROR_CHARACTERS:]}
                result = json.loads(last) if last else failure
            except subprocess.TimeoutExpired:
                result = {"project": project.name, "failed": f"more than {arguments.timeout:g} s"}
            results.append(result)
            print(row(result), file=sys.stderr, flush=True)
    return results
