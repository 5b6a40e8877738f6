"""Show a run's metrics in TensorBoard and Weights & Biases, each an optional package, behind one interface."""

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpt2.checkpoint.saving import write_file
from gpt2.errors import InputError
from gpt2.train.recipe import Recipe
from gpt2.train.runs import RECIPE

PROJECT, ID = "gpt2-toolkit", "wandb-id.txt"


def _missing(package: str) -> InputError:
    return InputError(f"{package} is not installed: pip install 'gpt2-toolkit[{package}]', or --set {package}=false")


class TensorBoard:
    """Event files in ``folder/tensorboard``; steps after a resumed checkpoint are removed there."""

    def __init__(self, folder: Path, first_step: int | None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise _missing("tensorboard") from None
        self.writer = SummaryWriter(folder / "tensorboard", purge_step=first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of W&B in ``folder/wandb`` and, unless WANDB_MODE=offline, on its server; a resumed run keeps its id.

    It gets the recipe and the metrics, and neither code, git state nor console output.
    """

    def __init__(self, folder: Path, first_step: int | None) -> None:
        try:
            import wandb
        except ImportError:
            raise _missing("wandb") from None
        if first_step is None or not (folder / ID).is_file():
            write_file(folder / ID, secrets.token_hex(8).encode())
        quiet: Any = {"console": "off", "disable_git": True, "disable_code": True, "silent": True}
        try:
            self.run = wandb.init(
                project=PROJECT,
                name=folder.resolve().name,
                id=(folder / ID).read_text(),
                resume="allow",
                dir=str(folder),
                config=json.loads((folder / RECIPE).read_text(encoding="utf-8")),
                settings=wandb.Settings(**quiet),
            )
        except wandb.Error as error:
            what = " ".join(str(error).split())[:160]
            raise InputError(f"W&B: {what}; run `wandb login`, set WANDB_MODE=offline, or --set wandb=false") from None
        self.run.define_metric("*", step_metric="at_step")  # W&B's own step may not go back, as a rewound run does

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log({**values, "at_step": step})

    def close(self) -> None:
        self.run.finish()


Board = TensorBoard | WeightsAndBiases


def boards(recipe: Recipe, folder: Path, first_step: int | None) -> list[Board]:
    """Open the boards that the recipe asks for; ``first_step`` follows a resumed checkpoint, None: a new run."""
    kinds: dict[str, type[Board]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
    return [board(folder, first_step) for name, board in kinds.items() if getattr(recipe, name)]
