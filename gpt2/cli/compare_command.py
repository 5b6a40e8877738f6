"""``gpt2 compare``: measure how models differ, from weights to generated text."""

import os
import sys
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from gpt2.cli.common import finish, set_option, wrote
from gpt2.comparison.settings import CaseTable, Settings
from gpt2.errors import InputError, size
from gpt2.options import Command, argument, option, require_unused
from gpt2.pages.streams import Status

EXAMPLES = """\
  gpt2 compare shakespeare-mini out/macbeth/best             a base and its fine-tune, on a play that neither has seen
  gpt2 compare shakespeare-mini out/macbeth/best --html report.html    the same as one HTML page
  gpt2 compare gpt2 hf/gpt2                                  our implementation and transformers', the same weights
  gpt2 compare gpt2 gpt2:bf16                                what another dtype changes
  gpt2 compare gpt2 gpt2-medium --on wikitext2:stride=512    two sizes, on a text with its protocol
  gpt2 compare shakespeare-mini --attention "To be, or not to be" --html heads.html
  gpt2 compare out/step-1000 out/step-2000 --on my.txt --json -
  gpt2 compare shakespeare-mini shakespeare-mini:int8 --blame --tokens 200      which parts carry the difference
  gpt2 compare shakespeare-mini out/macbeth/best --cases mine.jsonl   your own questions: which answers turned right, which wrong
  gpt2 compare shakespeare-mini --noise --tokens 200         how far rounding alone moves its logits
  gpt2 compare shakespeare-mini --save ref.safetensors       keep what it shows; later, or on another machine:
  gpt2 compare trace:ref.safetensors out/macbeth/best
  gpt2 compare shakespeare-mini shakespeare-mini:bf16 shakespeare-mini:int8 --html sizes.html     several, each with the first
  gpt2 compare shakespeare-mini out/macbeth                  all checkpoints of a run, in the order of steps
  gpt2 compare shakespeare-mini port.py:build --tokens 60    a model that you wrote, in a file of yours
  gpt2 compare shakespeare-mini llama.cpp/model-Q4_K_M.gguf  a GGUF file, run by llama.cpp; also ct2/DIR and onnx/FILE_OR_DIR
  gpt2 compare gpt2 ./quantised --fail-if 'kl>1e-3' --fail-if 'same_top<0.98'      in a build
  gpt2 compare gpt2 model-Q8_0.gguf --fail-if 'beyond_rounding>0'    gpt2, rounded, and nothing else? (the model first)

METRIC of --fail-if: kl, kl_max, js (nats a token), same_top (a fraction), perplexity_ratio (B over A), weights (norm of the
change over the norm), beyond_rounding (tensors of B that are not A's, rounded to one type, and settings that differ), activation
(the largest relative error), logit (that of the logits); of --cases exact_match (the fraction that B has right), contains (of B's
answers that hold the expected text), lost_cases (that A has right and B wrong), answer_ratio (probability of the expected texts,
B over A). OP: >, >=, <, <=. A metric with a 95 % interval is judged by its far end (the upper one for >, the lower one for <), so
a build passes only if the whole interval does.

exit code: 0 whatever the models are, but 1 if a --fail-if is met; 2 for bad input, also if the metric of a --fail-if cannot be
measured between these models, or a file is not whole"""
A = "a model, a port, trace:FILE or an engine's file; hf/ is transformers', a suffix such as :bf16 the dtype"
OTHERS = "more models, each compared with A; a run's folder stands for all its checkpoints"
NOISE = "of A alone: what rounding explains, beside a batch, padding and another dtype; of an engine, a batch"


@dataclass(frozen=True, kw_only=True)
class CompareSettings(Settings, Command):
    a: str = argument(A, "A")
    b: str | None = argument("the second model; optional with --attention and --save", "B", None)
    others: tuple[str, ...] = argument(OTHERS, "C", ())
    fail_if: tuple[str, ...] = option("METRIC OP NUMBER: exit 1 if it is met; repeat for several", "EXPR", ())
    set: tuple[str, ...] = set_option("data.prompt=NAME and data.field=NAME, the fields of --cases; ")
    noise: bool = option(NOISE, default=False)
    attention: str | None = option("compare only the attention of each head on TEXT", "TEXT")
    html: str | None = option("write the report as one self-contained page", "FILE", writes=True)
    WITHOUT_EFFECT: ClassVar = {
        "noise": ("b", "attention", "blame", "fail_if", "save", "cases", "threshold", "device", "set"),
        "attention": ("others", "on", "tokens", "threshold", "seed", "blame", "fail_if", "save", "cases"),
    }


def run(args: CompareSettings) -> int:
    from gpt2.comparison.gates import Gate, judge

    gates = [Gate.parse(text) for text in args.fail_if]
    judged: Any = {}
    with Status() as status:
        result = _measured(replace(args, progress=status))
    if args.save is not None:
        wrote(str(args.save), f": {size(os.path.getsize(args.save))}, all logits")
    if result is None:
        return 0
    try:
        if gates:
            result, judged = judge(result, gates)
    finally:  # what was measured is shown even if a gate cannot be judged
        finish(args, result)
    for names, judgements in judged.items():
        for each in judgements:
            print(f"{names}{each.verdict}", file=sys.stderr)
    return int(any(each.met for judgements in judged.values() for each in judgements))


def _measured(args: CompareSettings) -> Any:
    """Return the report that the options ask for; None where A was kept in a file, and nothing compared."""
    from gpt2.comparison.cases import read_cases
    from gpt2.comparison.run import compare_named, with_checkpoints
    from gpt2.measure.allocator import keep_freed_memory

    if args.noise:
        from gpt2.comparison.noise import measure_noise

        return measure_noise(args.a, args)
    if args.attention is not None:
        from gpt2.explore.attention import compare_attention

        return compare_attention(args.a, args.b, args.attention, device=str(args.device), offline=args.offline)
    names = [name for name in (args.a, args.b, *args.others) if name is not None]
    if sum(len(with_checkpoints(name)) for name in names) == 1:
        if args.save is None:
            instead = "or --noise, --save FILE or --attention TEXT"
            raise InputError(f"compare needs a second model, such as the one that {args.a} was made from, {instead}")
        from gpt2.comparison.pairs import save_reference

        require_unused(args, "--save and one model", ("fail_if", "html", "json", "blame", "cases", "threshold"))
        save_reference(args.a, str(args.save), args)
        return None
    if args.set:
        named = dict(each.split("=", 1) for each in args.set if "=" in each)
        if args.cases is None or named.keys() != {"data.prompt", "data.field"}:
            need = "give data.prompt=NAME and data.field=NAME beside --cases, both or none; --on reads a table's field text"
            raise InputError(f"--set {args.set[0]}: {need}")
        args = replace(args, cases=CaseTable(str(args.cases), (named["data.prompt"], named["data.field"])))
    if args.cases is not None:
        read_cases(args.cases)  # before anything is downloaded
    keep_freed_memory()
    return compare_named(names, args)
