"""``gpt2 trace``: write the reference's numbers on a few tokens, to compare another program with."""

from dataclasses import MISSING, dataclass
from typing import ClassVar

from gpt2.cli.common import ModelSettings, finish, set_option, wrote
from gpt2.errors import InputError
from gpt2.options import device_option, option, pick, setting
from gpt2.pages.streams import Status

EXAMPLES = """\
  gpt2 trace --out reference.safetensors                     the embedded model, 4 x 64 tokens of Twelfth Night
  gpt2 trace gpt2 --out reference.npz                        the official weights, for NumPy
  gpt2 trace --out reference                                 a folder: an .npy for each array, and index.json
  gpt2 trace --gradients --tokens 16 --out reference.npz     the loss and every gradient too, 16 tokens a row
  gpt2 trace --steps 2 --set optim.lr=3e-4 --out steps.npz   the parameters and losses after 1 and 2 AdamW steps too
  gpt2 trace --out gpt2_124M_debug_state.bin                 ids, next ids, logits, loss, gradients, as llm.c's ports read them
  gpt2 trace random:distilgpt2 --tokens 8 --out random.npz   random weights, random ids

Computed in float64, stored in float32. For each block: ln_1, attn.q, .k, .v, .scores, .weights, .heads, .c_proj, mid, ln_2,
mlp.c_fc, .act, .c_proj and the block's output, as in h.0.attn.q; around them ids, wte, wpe, embed, ln_f, logits. --gradients adds
targets, loss and grad.wte.weight for each parameter; --steps adds losses and step1.wte.weight. --json says each array's meaning.

A step is AdamW's on the same batch: mean loss, clipping to a norm of 1, then the update with a constant rate of 1e-3, betas 0.9
and 0.99, eps 1e-8, a decay of 0.1 on matrices and embeddings; no dropout. --set changes optim.lr, optim.beta1, optim.beta2,
optim.weight_decay and optim.clip.

What each array is, the environment, the ids' origin and the sha256 of the checkpoint's files are in index.json, in an .npz under
about.json (bytes of JSON), in a .safetensors in its metadata. A .bin is llm.c's debug state; it has no room for these, and the
last id of each row of --ids is only predicted. gpt2 diagnose reads all of these forms; gpt2 compare takes a
.safetensors as a side, trace:FILE."""


@dataclass(frozen=True, kw_only=True)
class TraceSettings(ModelSettings):
    set: tuple[str, ...] = set_option("a setting of the steps, such as optim.lr=3e-4, or ")
    device: str | None = device_option("run there in float32, to see what it computes, in place of float64 on the CPU", None)
    out: str = option("FILE.safetensors, FILE.npz, llm.c's FILE.bin, or a folder", "PATH", MISSING, writes=True)
    ids: str | None = option("token ids to use: .npy, or a text of whole numbers, one line a row", "FILE")
    text: str | None = option("take the ids from a text file, - for stdin, or a name (default: Twelfth Night)", "TEXT")
    tokens: int | None = option("tokens in each of the 4 rows (default: 64)", "N")
    gradients: bool = option("also the loss and its gradient by every parameter", default=False)
    steps: int = option("also every parameter after each of N AdamW steps", "N", 0)
    dtype: str = option("stored as float32, float64 or float16", "D", "float32")
    WITHOUT_EFFECT: ClassVar = {"ids": ("text", "tokens")}


def run(args: TraceSettings) -> int:
    import numpy as np

    from gpt2.traces.batch import read_ids
    from gpt2.traces.files import STATE_FORM, require_form
    from gpt2.traces.run import trace

    form = require_form(args.out)
    options = pick(args, "ids", "text", "tokens", "gradients", "steps", "dtype", "device", "revision", "offline")
    options |= {"settings": dict(map(setting, args.set)), "gradients": args.gradients or form == STATE_FORM}
    if form == STATE_FORM:
        if args.steps:
            raise InputError(f"--steps {args.steps}: llm.c's debug state holds no training steps; choose another form than .bin")
        if args.ids is not None:
            rows = np.atleast_2d(read_ids(args.ids))
            if rows.shape[-1] < 2:
                raise InputError(f"{args.ids}: the last id of each row is predicted, never read; give rows of two ids or more")
            options |= {"ids": rows[:, :-1], "targets": rows[:, 1:]}
    with Status() as status:
        traced = trace(args.model, **options, progress=status)
        status("writing")
        traced.save(args.out)
    wrote(args.out)
    return finish(args, traced)
