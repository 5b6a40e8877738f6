"""Files that `gpt2 diagnose` is to answer in one line, and the exit code of each: 0 equal, 1 mismatch, 2 bad input."""

import shutil
from pathlib import Path

HEAD = """import atexit, math, os, sys, threading, time

import sound
import torch

"""
BUILD = HEAD + "def build(checkpoint_dir):\n    {}\n"  # the text of a function begins in line 7
FORWARD = HEAD + "class Wrong(sound.Sound):\n    def forward(self, ids):\n        {}\n"  # in line 8
FORWARD += "\ndef build(checkpoint_dir):\n    return sound.load(Wrong, checkpoint_dir)\n"
BUILDS = {
    "class_and_no_instance": "return sound.Sound",
    "crashes_in_build": r"""raise RuntimeError("Error(s) in loading:\n\tMissing key(s): 'a'\n\tsize mismatch for c")""",
    "exits": "sys.exit(0)",  # as a training script that ends so
    "hangs_at_the_end": "threading.Thread(target=time.sleep, args=(3600,)).start(); return sound.build(checkpoint_dir)",
    "imports_what_is_not_there": "import a_package_that_nobody_has_installed",
    "no_module": "return sound.build(checkpoint_dir).state_dict()",
    "returns_a_nan_weight": "m = sound.build(checkpoint_dir); m.layers[0].up.weight.data[0, 0] = math.nan; return m",
    "too_big": "return torch.nn.Linear(2**24, 2**24, dtype=torch.float64)",
    "wants_gpu": "return sound.build(checkpoint_dir).cuda()",
}
FORWARDS = {
    "crashes_in_forward": "return super().forward(ids).view(7, 7, 7, -1)[1000]",
    "hangs_in_forward": "time.sleep(3600)",
    "returns_hidden": "return torch.zeros(*ids.shape, self.sizes.width) + super().forward(ids).sum()",
    "returns_nan": "return super().forward(ids) + math.inf - math.inf",  # as with a mask of minus infinity only
    "training_dropout": "return torch.dropout(super().forward(ids), 0.1, True)",
}
WHOLE = {
    "needs_more": "import sound\n\ndef build(checkpoint_dir, device, compile): return sound.build(checkpoint_dir).to(device)\n",
    "no_build": "from sound import build as make\n",
    # To both streams and to their file descriptors.
    "prints": HEAD
    + r"""
print('{"verdict": "not this one"}')

class Talks(sound.Sound):
    def forward(self, ids):
        print("forward", ids.shape, "x" * 10_000)
        os.write(1, b"straight to the descriptor\n\xff\xfe\n")
        print("and to stderr \x1b[31m", file=sys.stderr)
        return super().forward(ids)

def build(checkpoint_dir):
    print("building ...")
    atexit.register(print, "a last word")
    return sound.load(Talks, checkpoint_dir)
""",
}
TEXTS = WHOLE | {name: FORWARD.format(text) for name, text in FORWARDS.items()}
TEXTS |= {name: BUILD.format(text) for name, text in BUILDS.items()}
RUN = {"prints": 0, "hangs_at_the_end": 0, "training_dropout": 1}
HOSTILE = {name: RUN.get(name, 2) for name in TEXTS}


def write_hostile(folder: Path) -> None:
    """Write every file into a new folder, beside the right one that all import."""
    folder.mkdir()
    shutil.copy(Path(__file__).with_name("sound.py"), folder)
    for name, text in TEXTS.items():
        (folder / f"{name}.py").write_text(text)
