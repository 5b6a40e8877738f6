"""``gpt2 diagnose``: show where a user's implementation differs from GPT-2, and why."""

import json
import math
import re
import shutil
from dataclasses import dataclass
from typing import ClassVar

from gpt2.checkpoint.names import DEFAULT
from gpt2.cli.common import finish
from gpt2.errors import InputError
from gpt2.options import Command, argument, device_option, offline_option, option, pick, revision_option
from gpt2.pages.streams import Status

EXAMPLES = """\
  gpt2 diagnose port.py:build                        against the embedded checkpoint
  gpt2 diagnose port.py:build --model gpt2           against the official weights
  gpt2 diagnose port.py --model ./my-model           FILE.py alone means FILE.py:build
  gpt2 diagnose ./my-model --model gpt2              two checkpoints: what in the one is not the other's
  gpt2 diagnose port.py:build --json -               for programs: verdict, first_divergence, causes
  gpt2 diagnose port.py:build --step train.py:make_step --set optim.lr=3e-4 --set optim.clip=1.0
  gpt2 diagnose dump.npz --model gpt2                what a program in any language wrote
  gpt2 diagnose --run 'python port.py {ids} {out}' --model gpt2
  gpt2 diagnose --run './port {text} {out}' --model gpt2
  gpt2 diagnose --run 'node port.js {text} {out} {model}/model.safetensors' --model gpt2

port.py has a function that returns your module:

  def build(checkpoint_dir):      # the folder with config.json and model.safetensors
      model = MyGPT()
      model.load_state_dict(my_own_loading(checkpoint_dir))
      return model                # maps ids (B, T) to logits (B, T, V)

--step diagnoses a training step of that module: its loss, gradients, clipping and optimizer. make_step(model) returns a function
that makes one whole step, and is called again for each run:

  def make_step(model):
      optimizer = torch.optim.AdamW(groups(model), lr=3e-4)
      def step(x, y):                                # ids and next ids (B, T)
          loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
          optimizer.zero_grad(); loss.backward(); optimizer.step()
          return loss
      return step

--set says what the step should do, with a recipe's keys: optim.lr, min_lr, warmup, beta1, beta2, weight_decay, clip (each after
optim.), steps, batch_size, context, grad_accum, dropout. What is not set is read off and reported. Hugging Face's
Trainer and Lightning: PROGRAMS.md.

A dump (.npz, .safetensors, .pt, a directory of .npy, llm.c's debug state .bin) holds the token ids under the name ids, shape (T,)
or (B, T), the logits, and any intermediate values in any layout, under any names. The more it holds, the more can be said.

--run runs a program for its dump: {ids} is a .npy file of token ids, shape (T,), int64; {text} the same ids as text, in one line;
{out} the path to write to: add .npz or .safetensors, or make a directory of .npy files of it; {model} a folder with config.json
and model.safetensors. Each is one word, spaces and all. No shell reads the command: quotes group words, and |, >, * and $NAME
mean nothing. The lines that write a dump from NumPy, C, JavaScript, Rust and Go: PROGRAMS.md, in the folder gpt2/port of the
repository and of the installed package.

With def build(): the weights are put in for you, as gpt2.load_into does. The file is run: diagnose only files you trust.

exit code: 0 equal, 1 it differs, 2 it could not be built or run"""
DEVICE = "diagnose on the CPU as always, then judge this device on the model's shapes as gpt2 verify does"
WHAT = "a Python file and the function in it that returns the module, a dump of arrays, or another checkpoint"


@dataclass(frozen=True, kw_only=True)
class DiagnoseSettings(Command):
    what: str | None = argument(WHAT, "WHAT", None)
    step: str | None = option("diagnose a training step of the module that WHAT builds", "FILE.py:make_step")
    set: tuple[str, ...] = option("with --step: what a step should do, as in optim.lr=3e-4; may be repeated", "KEY=VALUE", ())
    run: str | None = option("in place of WHAT: a program that writes a dump", "CMD")
    model: str = option("the right weights", "MODEL", DEFAULT)
    revision: str | None = revision_option()
    offline: bool = offline_option()
    device: str | None = device_option(DEVICE, None)
    timeout: float = option("seconds for a file's import, build and first forward, or for a program", "S", 60.0)
    WITHOUT_EFFECT: ClassVar = {"run": ("step",)}  # a training step is diagnosed in Python


def run(args: DiagnoseSettings) -> int:
    if not 0 < args.timeout < math.inf:
        raise InputError(f"--timeout {args.timeout}: give a number of seconds above 0, such as 60")
    if (args.what is None) == (args.run is None):
        both = "not both" if args.what else "such as port.py:build, dump.npz, or --run 'python port.py {ids} {out}'"
        raise InputError(f"give WHAT to diagnose or --run CMD, {both}")
    if args.set and args.step is None:
        raise InputError(f"--set {args.set[0]}: is a setting of a training step; name that with --step FILE.py:make_step")
    where = None
    if args.device is not None:
        from gpt2.checkpoint.loading import require_device

        where = require_device(args.device)  # before minutes of diagnosis
    given, what = pick(args, "revision", "offline"), str(args.what)
    with Status(f"running {args.run or args.step or args.what}") as status:
        if args.run is not None:
            from gpt2.port.diagnosis.programs import diagnose_program

            diagnosis = diagnose_program(args.run, args.model, timeout=args.timeout, **given, progress=status)
        elif args.step is None and not re.search(r"\.py(:.*)?$", what):
            import gpt2

            diagnosis = gpt2.diagnose(what, args.model, **given, progress=status)
        else:
            from gpt2.port.diagnosis import runner
            from gpt2.port.step.settings import StepSettings

            StepSettings.of(args.set)  # a misspelt key is refused before anything is read or built
            how = pick(args, "step", "timeout") | given
            diagnosis = runner.run(what, args.model, settings=args.set, **how, progress=status)
    width = min(shutil.get_terminal_size((110, 24)).columns, 140)
    if where is None:
        return finish(args, diagnosis, diagnosis.table(width))
    from gpt2.devices.run import verify_device
    from gpt2.pages.reports import Interrupted

    try:
        with Status(f"judging {where}") as status:
            device = verify_device(args.model, where, **given, progress=status)
        code = int(not (diagnosis.ok and device.ok))
    except InputError:  # too little memory there, for example; the diagnosis took minutes
        finish(args, diagnosis, diagnosis.table(width))
        raise
    except Interrupted as interrupted:
        device, code = interrupted.report, 130
    joined = {**json.loads(diagnosis.to_json()), "device": json.loads(device.to_json())}
    return finish(args, joined, f"{diagnosis.table(width)}\n{device.table(width)}", code)
