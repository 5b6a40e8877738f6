"""Damaged checkpoint folders for `support/fuzz.py`: the weights, the config or the index of shards, through the loader.

A folder that loads must give the tensors that the safetensors library reads; a leading axis of one may differ.
"""

import json
import random
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from gpt2.checkpoint.files import open_weights
from gpt2.checkpoint.keys import from_file
from gpt2.checkpoint.loading import load_path
from gpt2.config import GPT2Config
from support.checks import all_same
from support.fuzz import Subject, changed_json
from support.hf_layouts import official, prefixed, sharded
from support.safetensors_fuzz import damaged

SMALL = GPT2Config(vocab_size=7, n_positions=4, n_embd=4, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)


def prepare(folder: Path) -> Subject:
    for layout in (official, prefixed, sharded):
        layout(folder / layout.__name__, SMALL)
    whole = {path: path.read_bytes() for path in sorted(folder.glob("*/*"))}
    victims = [path for path in whole for _ in range(8 if path.suffix == ".safetensors" else 3)]
    victim = [victims[0]]

    def overwrite(content: bytes) -> None:
        """Write in place: on ext4, truncating and rewriting a file takes milliseconds."""
        with open(victim[0], "r+b") as file:
            file.write(content)
            file.truncate()

    def damage(pick: random.Random) -> None:
        overwrite(whole[victim[0]])
        victim[0] = pick.choice(victims)
        content = whole[victim[0]]
        if victim[0].suffix == ".json":
            overwrite(json.dumps(changed_json(json.loads(content), pick)).encode())
        elif pick.random() < 0.9:
            overwrite(damaged(pick, content))
        else:  # the data: other numbers, an untied head, or no mask
            place = pick.randrange(8 + int.from_bytes(content[:8], "little"), len(content))
            overwrite(content[:place] + pick.randbytes(1) + content[place + 1 :])

    def read() -> None:
        model, theirs = load_path(victim[0].parent), dict[str, Tensor]()
        for path in {file.path for file in open_weights(victim[0].parent).values()}:
            with safe_open(path, "pt") as file:
                theirs |= {from_file(key): file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
        state = model.state_dict()
        assert all_same(state, {name: theirs[name].to(t.dtype).reshape(t.shape) for name, t in state.items()})

    return Subject(damage, read, limit=2000)
