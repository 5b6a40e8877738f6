"""``gpt2 compare``: measure how models differ, from weights to generated text."""

import os
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpt2.cli.common import Status, require_writable, save_page, say, set_option, size, write_result
from gpt2.comparison.settings import CaseTable, Settings
from gpt2.errors import InputError, printable
from gpt2.options import argument, changed, flag_of, json_option, option

if TYPE_CHECKING:
    from gpt2.comparison.gates import Gate, Judged
    from gpt2.comparison.many_results import Comparisons
    from gpt2.comparison.results import Comparison

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
UNUSED = {  # of a mode, the options that have no effect in it
    "--attention": ("on", "tokens", "threshold", "seed", "blame", "fail_if", "save", "cases"),
    "--noise": ("b", "attention", "blame", "fail_if", "save", "cases", "threshold", "device", "set"),
    "--save and one model": ("fail_if", "html", "json", "blame", "cases", "threshold"),
}
A = "a model, a port, trace:FILE or an engine's file; hf/ is transformers', a suffix such as :bf16 the dtype"
OTHERS = "more models, each compared with A; a run's folder stands for all its checkpoints"
NOISE = "of A alone: what rounding explains, beside a batch, padding and another dtype; of an engine, a batch"


@dataclass(frozen=True, kw_only=True)
class CompareSettings(Settings):
    a: str = argument(A, "A")
    b: str | None = argument("the second model; optional with --attention and --save", "B", None)
    others: tuple[str, ...] = argument(OTHERS, "C", ())
    fail_if: tuple[str, ...] = option("METRIC OP NUMBER: exit 1 if it is met; repeat for several", "EXPR", ())
    set: tuple[str, ...] = set_option("data.prompt=NAME and data.field=NAME, the fields of --cases; ")
    noise: bool = option(NOISE, default=False)
    attention: str | None = option("compare only the attention of each head on TEXT", "TEXT")
    html: str | None = option("write the report as one self-contained page", "FILE")
    json: str | None = json_option()

    @property
    def names(self) -> list[str]:
        return [name for name in (self.a, self.b, *self.others) if name is not None]


def run(args: CompareSettings) -> int:
    if not args.threshold >= 0:
        raise InputError(f"--threshold {args.threshold}: give a number from 0 up, such as 1e-3")
    if args.noise:
        return _noise(args)
    names = _models(args)
    if len(names) == 1 and args.attention is None and args.save is None:
        instead = "or --noise, --save FILE or --attention TEXT"
        raise InputError(f"compare needs a second model, such as the one that {args.a} was made from, {instead}")
    if args.attention is not None:
        return _attention(args, args.attention)
    from gpt2.comparison.cases import read_cases
    from gpt2.comparison.gates import Gate
    from gpt2.comparison.run import compare_named
    from gpt2.measure.allocator import keep_freed_memory

    require_writable("--save", args.save)
    if len(names) == 1:
        return _save(args)
    named = dict(each.split("=", 1) for each in args.set if "=" in each)
    if args.set and (args.cases is None or named.keys() != {"data.prompt", "data.field"}):
        need = "give data.prompt=NAME and data.field=NAME, the fields of --cases, both or none"
        raise InputError(f"--set {args.set[0]}: {need}")
    if args.set:
        args = replace(args, cases=CaseTable(str(args.cases), (named["data.prompt"], named["data.field"])))
    if args.cases is not None:
        read_cases(args.cases)  # before anything is downloaded
    gates = [Gate.parse(text) for text in args.fail_if]
    keep_freed_memory()
    with Status() as status:
        result = compare_named(args.names, replace(args, progress=status))
    _say_saved(args)
    return _judged(args, result, gates)


def _judged(args: CompareSettings, result: "Comparison | Comparisons", gates: "list[Gate]") -> int:
    """Judge a result by the gates, show it, and report; what was measured is shown even if a gate cannot be judged."""
    from gpt2.cli.terminal import Terminal
    from gpt2.comparison.gates import judge

    judged: Judged = {}
    not_measured = None
    try:
        if gates:
            result, judged = judge(result, gates)
    except InputError as error:  # raised below
        not_measured = error
    save_page(args.html, result.save_html)
    write_result(args.json, result.to_json, lambda: result.print(Terminal()))
    if not_measured is not None:
        raise not_measured
    for names, each in judged.items():
        for judgement in each:
            print(f"{names}{judgement.verdict}", file=sys.stderr)
    return 1 if any(judgement.met for each in judged.values() for judgement in each) else 0


def _require_used(args: CompareSettings, mode: str) -> None:
    """Raise InputError if an option is given that has no effect in this mode."""
    for each in changed(args, *UNUSED[mode]):
        raise InputError(f"{flag_of(each)} has no effect with {mode}; leave it out")


def _models(args: CompareSettings) -> list[str]:
    """Return the models to compare, with a training run's checkpoints in place of its folder."""
    from gpt2.comparison.run import with_checkpoints

    if args.attention is not None and args.others:
        raise InputError("--attention compares two models at most; leave the others out")
    return [str(each.model) for name in args.names for each in with_checkpoints(name)]


def _noise(args: CompareSettings) -> int:
    from gpt2.cli.terminal import Terminal
    from gpt2.comparison.noise import measure_noise

    _require_used(args, "--noise")
    with Status() as status:
        found = measure_noise(args.a, replace(args, progress=status))
    save_page(args.html, found.save_html)
    write_result(args.json, found.to_json, lambda: found.print(Terminal()))
    return 0


def _save(args: CompareSettings) -> int:
    """Save one side; nothing is compared."""
    from gpt2.comparison.reference import save_reference

    _require_used(args, "--save and one model")
    with Status() as status:
        save_reference(args.a, str(args.save), replace(args, progress=status))
    _say_saved(args)
    return 0


def _say_saved(args: CompareSettings) -> None:
    if (path := args.save) is not None:
        print(f"wrote {printable(str(path), one_line=True)}: {size(os.path.getsize(path))}, all logits", file=sys.stderr)


def _attention(args: CompareSettings, text: str) -> int:
    from gpt2.explore.attention import compare_attention

    _require_used(args, "--attention")
    heads = compare_attention(args.a, args.b, text, device=args.device, offline=args.offline)
    save_page(args.html, heads.save_html)
    write_result(args.json, lambda: heads.to_json(maps=True), lambda: say(heads.table()))
    return 0
