"""What the commands took once: each option or word that is gone, with what to use instead."""

from collections.abc import Sequence

from gpt2.errors import InputError

BOARDS = "draw a run with gpt2 train plot RUN --out loss.svg, or follow it with --set tensorboard=true or --set wandb=true"
WHOLE = (
    "--save FILE keeps all logits; --tokens N makes the file smaller, and gpt2 trace MODEL --out FILE.safetensors has activations"
)
JUNIT = "assert it in a test with gpt2.testing.assert_same, and run pytest --junitxml FILE"
MEASURE = "gpt2 verify DIR and gpt2 compare BASE DIR measure the model; write what they say into its README.md"
GONE = {  # of a command, what may stand in its line -> what to do
    "compare": {"--junit": JUNIT, "--save-top": WHOLE, "--save-activations": WHOLE},
    "publish": {"--measure": MEASURE},
    "train": {"watch": BOARDS, "--html": BOARDS, "--port": BOARDS},
}


def require_none_gone(argv: Sequence[str]) -> None:
    """Raise InputError if a command line asks for something that is gone. A word without dashes must follow its command."""
    gone = GONE.get(argv[0], {}) if argv else {}
    for place, word in enumerate(argv[1:]):
        name = word.partition("=")[0]
        if name in gone and (place == 0 or name.startswith("--")):
            raise InputError(f"{argv[0]} {name} is gone: {gone[name]}")
