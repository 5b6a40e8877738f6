"""``gpt2 export``: write a model as a directory that other programs open."""

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2.cli.common import ModelSettings, finish, listed
from gpt2.errors import InputError, printable
from gpt2.options import argument, option, pick
from gpt2.pages.streams import Status

if TYPE_CHECKING:
    from gpt2.checkpoint.checkpoint import Checkpoint
    from gpt2.checkpoint.export import Export

EXAMPLES = """\
  gpt2 export shakespeare-mini out/hf                        the embedded model
  gpt2 export gpt2 out/gpt2                                  for transformers, vLLM, CTranslate2 and llama.cpp's converter
  gpt2 export ckpt.pt out/mine                               a nanoGPT checkpoint, in Hugging Face's layout
  gpt2 export gpt2:bf16 out/half                             the same in bfloat16
  gpt2 export gpt2 out/gguf --format gguf                    out/gguf/model.gguf, for llama.cpp
  gpt2 export gpt2 out/small --format gguf --type q8_0       a quarter of the size
  gpt2 export shakespeare-mini out/q8 --format gguf --type q8_0 --check      opened in llama.cpp and others, and compared
  gpt2 export shakespeare-mini out/kept --format gguf --type q8_0 --keep h.0,wte   two parts in their own precision
  gpt2 export shakespeare-mini out/llmc --format llmc        model.bin and tokenizer.bin, for llm.c
  gpt2 export mine.py:build out/mine --check                 your own module, with the weights that it has
  gpt2 export mine.pt out/mine --like mine.py:build          the weights of mine.pt, whose names only that module knows

build() in mine.py returns your torch.nn.Module with its weights; names and layouts do not matter. Sizes, activation, epsilon and
scaling are read from what it computes. It is written if our model gives its logits in float64, else the line says which part
differs. The file is run: export only files you trust.

--check reads every value back, and runs the result in every program that is installed (transformers, CTranslate2, llama.cpp):
its logits may differ from the model's by what the type and the program's own rounding explain, and no more.

exit code: 0, 1 if --check finds a difference, 2 if it cannot be exported"""
TYPE = "how GGUF stores the matrices (default: in the model's dtype); the other formats keep the model's dtype"
KEEP = "parts that --type leaves in the model's dtype, such as h.0,h.11.mlp,wte (gpt2 compare --blame says which)"


@dataclass(frozen=True, kw_only=True)
class ExportSettings(ModelSettings):
    model: str = argument("which model", "MODEL")
    directory: str = argument("folder to write; files of the same names are replaced", "DIR", writes=True)
    format: str = option("", default="hf", choices=("hf", "gguf", "llmc"))
    type: str | None = option(TYPE, choices=("f32", "f16", "bf16", "q8_0"))
    keep: str | None = option(KEEP, "PARTS")
    like: str | None = option("the module that MODEL's tensors belong to, by its own names", "FILE.py:build")
    check: bool = option("open the result in every installed program; exit 1 if one differs", default=False)


def run(args: ExportSettings) -> int:
    from gpt2.checkpoint.export import export

    check = None
    with Status(f"exporting {args.model}") as status:
        where = pick(args, "revision", "offline")
        source, notes = _source(args)
        keep = args.keep.split(",") if args.keep is not None else ()
        done = export(source, args.directory, keep=keep, **pick(args, "format", "type"), **where)
        if args.check:
            from gpt2.comparison.exported import check_export

            check = check_export(done, of=source, **where, progress=status)
    done = _with_card(replace(done, notes=notes + done.notes), args)
    body = asdict(done) | {"parameters": done.config.num_parameters()}
    body |= {} if check is None else {"check": {"ok": check.ok, **asdict(check)}}
    head = f"{done.model} -> {done.directory}  {done.format}, {done.type}, {done.config.num_parameters():,} parameters"
    lines = [head, *listed(done.files, done.notes), *([] if check is None else [check.table()])]
    return finish(args, body, printable("\n".join(lines)), code=0 if check is None or check.ok else 1)


def _source(args: ExportSettings) -> tuple["str | Checkpoint", tuple[str, ...]]:
    """Return the model's name, or the checkpoint that a module of ``FILE.py:build`` becomes, and notes on that."""
    from gpt2.comparison.sides.opening import PORT
    from gpt2.comparison.sides.port import PortSide
    from gpt2.measure.user_code import target

    port = args.like or args.model
    if not PORT.fullmatch(port):
        if args.like:
            raise InputError(f"--like {port}: give the file and the function that builds the module, as FILE.py:build")
        return args.model, ()
    if args.revision is not None:
        raise InputError(f"{args.model}: has no revisions, only models of the Hub do: leave out --revision")
    with PortSide(port, target(port)) as side:
        if args.like:
            side.fill(Path(args.model))
        checkpoint = side.held()
    said = (f"the tensors of {args.model} were read by the names of {port}",) if args.like else ()
    return replace(checkpoint, name=args.model), said + checkpoint.notes


def _with_card(done: "Export", args: ExportSettings) -> "Export":
    """Write the export's model card beside the files; return the export with it, or with a note why there is none."""
    from gpt2.checkpoint.card import of_export, remark_of, write_card
    from gpt2.checkpoint.describe import File
    from gpt2.checkpoint.saving import CARD

    source = replace(done, model=re.sub(r"\.py:\w*$", ".py", done.model))
    if remark := remark_of(lambda: write_card(Path(done.directory), of_export(source, args.revision))):
        return replace(done, notes=(*done.notes, remark))
    return replace(done, files=(*done.files, File.of(Path(done.directory, CARD))))
