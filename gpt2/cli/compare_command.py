"""``gpt2 compare``: measure how models differ, from weights to generated text."""

import argparse
import os
import sys
from typing import TYPE_CHECKING

from gpt2.cli.common import Status, add_device, add_offline, add_set, require_writable, save_page, say, seed, size, write_result
from gpt2.errors import InputError, printable

if TYPE_CHECKING:
    from gpt2.comparison.gates import Gate, Judged
    from gpt2.comparison.many_results import Comparisons
    from gpt2.comparison.results import Comparison

HELP = "measure how models differ, from weights to words"
EXAMPLES = """\
  gpt2 compare shakespeare-mini out/macbeth/best             a base and its fine-tune, on a play that neither has seen
  gpt2 compare shakespeare-mini out/macbeth/best --html report.html    the same as one HTML page
  gpt2 compare gpt2 hf/gpt2                                  our implementation and transformers', the same weights
  gpt2 compare gpt2 gpt2:bf16                                two dtypes, both also compared with float64
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
DEFAULTS = {"on": None, "tokens": None, "threshold": 1e-3, "seed": 0}  # options that --attention does not use
UNUSED = {  # of a mode, the options that have no effect in it
    "--attention": (*DEFAULTS, "blame", "fail_if", "save", "cases"),
    "--noise": ("b", "attention", "blame", "fail_if", "save", "cases", "threshold", "device"),
    "--save and one model": ("fail_if", "html", "json", "blame", "cases", "threshold"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help = "a model, a port, trace:FILE or an engine's file; hf/ is transformers', a suffix such as :bf16 the dtype"
    parser.add_argument("a", metavar="A", help=help)
    parser.add_argument("b", metavar="B", nargs="?", help="the second model; optional with --attention and --save")
    help = "more models, each compared with A; a run's folder stands for all its checkpoints"
    parser.add_argument("others", metavar="C", nargs="*", help=help)
    help = (
        "a text file or table, read as train reads it, - for stdin, or a name (default: Twelfth Night, new to shakespeare-mini)"
    )
    parser.add_argument("--on", metavar="TEXT", help=help)
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens of the text, 0 for all (default: 8192; all of wikitext2)")
    help = "report the first activation with a larger relative error (default: %(default)s)"
    parser.add_argument("--threshold", type=float, default=DEFAULTS["threshold"], metavar="E", help=help)
    help = "seeds intervals and samples (default: %(default)s)"
    parser.add_argument("--seed", type=seed, default=DEFAULTS["seed"], metavar="N", help=help)
    add_offline(parser)
    add_device(parser, "where checkpoints run; float64 stays on the CPU")
    help = "METRIC OP NUMBER: exit 1 if it is met; repeat for several"
    parser.add_argument("--fail-if", action="append", default=[], metavar="EXPR", help=help)
    add_set(parser, "data.prompt=NAME and data.field=NAME, the fields of --cases; ")
    parser.add_argument("--blame", action="store_true", help="also put parts of B into A, and measure what each carries")
    parser.add_argument(
        "--cases",
        metavar="FILE",
        help="also ask both your own questions: prompt and expected (or question and answer), or text and label",
    )
    help = "of A alone: what rounding explains, beside a batch, padding and another dtype; of an engine, a batch"
    parser.add_argument("--noise", action="store_true", help=help)
    parser.add_argument("--save", metavar="FILE", help="keep what A shows on the text, for a side trace:FILE (.safetensors)")
    parser.add_argument("--attention", metavar="TEXT", help="compare only the attention of each head on TEXT")
    parser.add_argument("--html", metavar="FILE", help="write the report as one self-contained page")


def run(args: argparse.Namespace) -> int:
    if not args.threshold >= 0:
        raise InputError(f"--threshold {args.threshold}: give a number from 0 up, such as 1e-3")
    if args.noise:
        return _noise(args)
    names = _names(args)
    if len(names) == 1 and args.attention is None and args.save is None:
        instead = "or --noise, --save FILE or --attention TEXT"
        raise InputError(f"compare needs a second model, such as the one that {args.a} was made from, {instead}")
    if args.attention is not None:
        _require_used(args, "--attention")
        return _attention(args)
    from gpt2.comparison.cases import read_cases
    from gpt2.comparison.gates import Gate
    from gpt2.comparison.passage import CaseTable
    from gpt2.comparison.run import compare_named
    from gpt2.measure.allocator import keep_freed_memory

    require_writable("--save", args.save)
    if len(names) == 1:
        return _save(args)
    named = dict(each.split("=", 1) for each in args.set if "=" in each)
    if args.set and (args.cases is None or named.keys() != {"data.prompt", "data.field"}):
        raise InputError(f"--set {args.set[0]}: give data.prompt=NAME and data.field=NAME, the fields of --cases, both or none")
    if args.set:
        args.cases = CaseTable(args.cases, (named["data.prompt"], named["data.field"]))
    if args.cases is not None:
        read_cases(args.cases)  # before anything is downloaded
    gates = [Gate.parse(text) for text in args.fail_if]
    if len(names) > 2:
        for gate in gates:
            gate.require_of_many()
    keep_freed_memory()
    with Status() as status:
        options = {name: getattr(args, name) for name in (*DEFAULTS, "device", "offline", "blame", "cases")}
        shown = bool(args.json or args.html)
        result = compare_named(_given(args), **options, save=args.save, hashes=shown, progress=status)
    _say_saved(args.save)
    return _judged(args, result, gates)


def _judged(args: argparse.Namespace, result: "Comparison | Comparisons", gates: "list[Gate]") -> int:
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


def _noise(args: argparse.Namespace) -> int:
    from gpt2.cli.terminal import Terminal
    from gpt2.comparison.noise import measure_noise
    from gpt2.comparison.passage import Settings

    _require_used(args, "--noise")
    with Status() as status:
        options = {name: getattr(args, name) for name in ("on", "tokens", "seed", "offline")}
        found = measure_noise(args.a, Settings(**options, progress=status))
    save_page(args.html, found.save_html)
    write_result(args.json, found.to_json, lambda: found.print(Terminal()))
    return 0


def _require_used(args: argparse.Namespace, mode: str) -> None:
    """Raise InputError if an option is given that has no effect in this mode."""
    usual = {**DEFAULTS, "device": "cpu"}
    for name in UNUSED[mode]:
        if getattr(args, name) not in (usual.get(name), None, False, []):
            option = "B" if name == "b" else f"--{name.replace('_', '-')}"
            raise InputError(f"{option} has no effect with {mode}; leave it out")


def _names(args: argparse.Namespace) -> list[str]:
    """Return the models to compare, with a training run's checkpoints in place of its folder."""
    from gpt2.comparison.run import with_checkpoints

    given = _given(args)
    if args.attention is not None:
        if args.others:
            raise InputError("--attention compares two models at most; leave the others out")
        return given
    return [str(each.model) for name in given for each in with_checkpoints(name)]


def _given(args: argparse.Namespace) -> list[str]:
    return [name for name in (args.a, args.b, *args.others) if name is not None]


def _save(args: argparse.Namespace) -> int:
    """Save one side; nothing is compared."""
    from gpt2.comparison.passage import Settings
    from gpt2.comparison.reference import save_reference

    _require_used(args, "--save and one model")
    with Status() as status:
        options = {name: getattr(args, name) for name in ("on", "tokens", "seed", "device", "offline")}
        save_reference(args.a, args.save, Settings(**options, progress=status))
    _say_saved(args.save)
    return 0


def _say_saved(path: str | None) -> None:
    if path is not None:
        print(f"wrote {printable(path, one_line=True)}: {size(os.path.getsize(path))}, all logits", file=sys.stderr)


def _attention(args: argparse.Namespace) -> int:
    from gpt2.explore.attention import compare_attention

    heads = compare_attention(args.a, args.b, args.attention, device=args.device, offline=args.offline)
    save_page(args.html, heads.save_html)
    write_result(args.json, lambda: heads.to_json(maps=True), lambda: say(heads.table()))
    return 0
