"""Our models in lm-evaluation-harness, beside its own `hf` model: the same numbers on small local tasks of every kind.

This runs if lm_eval is installed (the extra `eval`), in a process of its own, as lm_eval and the Hub's client read their
settings at import.
"""

import json
import os
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import gpt2
from gpt2.data.chars import Chars
from gpt2.measure.texts import open_text

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm_eval is not installed: pip install gpt2-toolkit[eval]"),
]

ROOT = Path(__file__).parents[2]


def measured(metric: str, aggregation: str = "mean", higher_is_better: bool = True) -> dict:
    return {"metric": metric, "aggregation": aggregation, "higher_is_better": higher_is_better}


def generated(until: list[str], length: int) -> dict:
    prompt = {"output_type": "generate_until", "doc_to_text": "{{prompt}}", "doc_to_target": "{{answer}}"}
    settings = {"until": until, "max_gen_toks": length}
    return {**prompt, "generation_kwargs": settings, "metric_list": [measured("exact_match")]}


TASKS = {
    "last_word": {  # lm_eval's own lambada_openai, with other passages
        "output_type": "loglikelihood",
        "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
        "doc_to_target": "{{' '+text.split(' ')[-1]}}",
        "metric_list": [measured("perplexity", "perplexity", False), measured("acc")],
    },
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "gold",
        "doc_to_choice": "choices",
        "metric_list": [measured("acc"), measured("acc_norm")],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [
            measured("word_perplexity", "weighted_perplexity", False),
            measured("bits_per_byte", "bits_per_byte", False),
        ],
    },
    # lm_eval asks for both in one call; their settings must not mix
    "go_on": generated(["\n\n", "king"], 40),
    "one_line": generated(["\n"], 9),
}
PAIRS = pytest.mark.parametrize("pair", [(0, 1), (3, 2)], ids=["as it is", "batches, short context, ends"])

# Run every task with each model in float64, where no difference is rounding; print metrics and answers as JSON.
SCRIPT = """
import json, sys
import lm_eval
from importlib.metadata import EntryPoint
from lm_eval.api.registry import model_registry
from lm_eval.tasks import TaskManager

tasks, models, out = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
import lm_eval.models
for name, value in json.loads(sys.argv[4]).items():  # what a release that knows entry points does with ours
    model_registry.register(name, target=EntryPoint(name, value, "lm_eval.models"))
found = []
for model, args, batch_size in models:
    results = lm_eval.simple_evaluate(
        model=model, model_args=args, tasks=list(tasks), batch_size=batch_size, device="cpu", bootstrap_iters=0,
        task_manager=TaskManager(include_path=next(iter(tasks.values())), include_defaults=False),
    )
    metrics = {
        f"{task} {name.removesuffix(',none')}": float(value)
        for task, values in results["results"].items()
        for name, value in values.items()
        if name.endswith(",none") and "_stderr" not in name
    }
    answers = {t: [sample["resps"] for sample in s] for t, s in results["samples"].items()}
    found.append({"metrics": metrics, "answers": answers, "config": {k: str(v) for k, v in results["config"].items()}})
json.dump(found, open(out, "w"))
"""


def run(arguments: list[str], home: Path) -> subprocess.CompletedProcess:
    """Run Python offline in a process of its own, with its settings and caches in ``home``."""
    quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
    places = {"HOME": str(home), "HF_HOME": str(home / "hf"), "XDG_CACHE_HOME": str(home / "cache")}
    environ = os.environ | quiet | places | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], env=environ, capture_output=True, text=True, timeout=900, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tasks, and the embedded checkpoint as a directory that transformers opens."""
    folder = tmp_path_factory.mktemp("tasks")
    model, tokenizer = gpt2.load(), gpt2.load_tokenizer()
    gpt2.save(model, tokenizer, folder / "model")
    comma, end = tokenizer.encode(",")[0], tokenizer.eot
    with torch.no_grad():  # an answer "," ends the text
        model.wte.weight[[comma, end]] = model.wte.weight[[end, comma]]
    gpt2.save(model, tokenizer, folder / "curt")
    model = gpt2.load()
    macbeth = open_text().text
    speeches = [speech for speech in macbeth.split("\n\n") if 60 < len(speech) < 600]

    def said(prompt: str, tokens: int) -> str:
        return tokenizer.decode(gpt2.generate(model, tokenizer.encode(prompt), tokens, temperature=0))

    rows = {
        # some that the model gets right, since it generated them; one longer than its 256 positions
        "last_word": [{"text": text} for text in [*speeches[:8], *(said(s[:40], 12) for s in speeches[8:14]), macbeth[:3000]]],
        "choice": [
            {"prompt": s[:50], "choices": [s[50:70], " of the king", "\nWhat, my lord?", said(s[:50], 5)[50:] or "x"], "gold": 3}
            for s in [*speeches[14:22], "x" * 900 + speeches[22], "To be <|endoftext|>ROMEO:\nWhat is" + speeches[23]]
        ]
        + [{"prompt": "", "choices": ["ROMEO", "Zounds"], "gold": 0}],
        "rolling": [{"text": text} for text in (macbeth[:4000], macbeth[4000:4300], "Exit<|endoftext|>Enter", "x")],
        "go_on": [
            {"prompt": prompt, "answer": said(prompt, 40).split("\n\n")[0]}
            for prompt in [*(s.split("\n")[0] + "\n" for s in speeches[24:30]), macbeth[:1201]]
        ],
    }
    rows["one_line"] = rows["go_on"][:4]
    for name, task in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        whole = {"task": name, **source, "metadata": {"version": 1}, **task}
        (folder / f"{name}.yaml").write_text(json.dumps(whole))  # JSON is YAML
    return folder


@pytest.fixture(scope="module")
def results(folder, tmp_path_factory):
    """(hf model, our model, our model with other batches, a shorter context and an end of text, the hf model with the same
    changes)."""
    out = folder / "results.json"
    models = [
        ("hf", f"pretrained={folder / 'model'},dtype=float64", 1),
        ("gpt2-toolkit", "pretrained=shakespeare-mini,dtype=float64", 1),
        ("gpt2-toolkit", f"pretrained={folder / 'curt'}:float64,max_length=100", "auto"),
        ("hf", f"pretrained={folder / 'curt'},dtype=float64,max_length=100", 4),
    ]
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["lm_eval.models"]
    arguments = json.dumps(dict.fromkeys(TASKS, str(folder))), json.dumps(models), str(out), json.dumps(declared)
    done = run(["-c", SCRIPT, *arguments], tmp_path_factory.mktemp("home"))
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


@PAIRS
def test_the_numbers_are_those_of_the_hf_model(results, pair):
    """Possible bugs: no prefix token, other overlaps of windows, a cut at the wrong end. Each changes one of these numbers."""
    theirs, ours = (results[i] for i in pair)
    assert ours["metrics"].keys() == theirs["metrics"].keys()
    assert len(ours["metrics"]) == 8
    for name, value in theirs["metrics"].items():
        assert ours["metrics"][name] == pytest.approx(value, rel=1e-9), name
    assert 0 < ours["metrics"]["last_word acc"] < 1
    assert ours["config"]["model_num_parameters"] == theirs["config"]["model_num_parameters"] == "1915360"
    assert ours["config"]["model_dtype"] == theirs["config"]["model_dtype"] == "torch.float64"


@PAIRS
def test_every_answer_is_that_of_the_hf_model(results, pair):
    """Equal means may hide different answers."""
    theirs, ours = (results[i]["answers"] for i in pair)
    assert (ours["go_on"], ours["one_line"]) == (theirs["go_on"], theirs["one_line"])
    assert len({len(text) for [[text]] in ours["go_on"]}) > 2  # some stopped, some reached the length limit
    for [mine], [other] in zip(ours["rolling"], theirs["rolling"], strict=True):
        assert mine == pytest.approx(other, rel=1e-9)
    greedy = set()
    for task in ("last_word", "choice"):
        for mine, other in zip(ours[task], theirs[task], strict=True):
            for [(logp, best)], [(their_logp, their_best)] in zip(mine, other, strict=True):
                assert logp == pytest.approx(their_logp, rel=1e-9)
                assert best == their_best
                greedy.add(best)
    assert greedy == {True, False}


def test_another_context_is_another_number(results):
    """Control: with another context the figures must differ; otherwise the tests above could not see wrong cuts."""
    assert results[1]["metrics"]["rolling bits_per_byte"] != results[2]["metrics"]["rolling bits_per_byte"]
    assert results[1]["answers"]["last_word"][-1] != results[2]["answers"]["last_word"][-1]
    commas = ["".join(text for [[text]] in results[i]["answers"]["go_on"]).count(",") for i in (1, 2)]
    assert commas[0] > commas[1] == 0


def test_last_words_are_scored_as_lm_eval_scores_them(results, folder):
    """`--on lambada` names lm-evaluation-harness as its protocol; the numbers must agree."""
    from gpt2.measure.last_words import score_last_words

    passages = [json.loads(line)["text"] for line in (folder / "last_word.jsonl").read_text().splitlines()]
    found = score_last_words(gpt2.load(dtype="float64"), gpt2.load_tokenizer(), passages, context=256)
    assert found.perplexity.value == pytest.approx(results[0]["metrics"]["last_word perplexity"], rel=1e-9)
    assert found.accuracy.value == pytest.approx(results[0]["metrics"]["last_word acc"], rel=1e-12)
    assert found.losses == pytest.approx([-answer[0][0][0] for answer in results[0]["answers"]["last_word"]], rel=1e-9)


def test_the_command(folder, tmp_path):
    """lm_eval's own command with our models; its default device is a GPU, which this machine may not have."""
    args = ["--model", "gpt2-toolkit", "--model_args", "pretrained=shakespeare-mini", "--tasks", "rolling"]
    done = run(["-m", "gpt2.comparison.lm_eval_adapter", *args, "--include_path", str(folder)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "|bits_per_byte  |" in done.stdout


MISTAKES = """
import lm_eval.__main__ as command
import sys
import torch
from types import SimpleNamespace
from gpt2.comparison import lm_eval_adapter
from gpt2.comparison.lm_eval_adapter import ToolkitLM

model = ToolkitLM()
ask = lambda args: SimpleNamespace(args=args)

# what lm_eval's own model fails on: a context of spaces; and what no model of the other tests says: a further special token
both = model.loglikelihood([ask((" ", "a")), ask(("", " a"))], disable_tqdm=True)
assert both[0] == both[1], both
model._special.add(7)
said = list(model._until((torch.tensor([i]) for i in (5, 7, 6, model.tokenizer.eot, 5)), [], 1))
assert said == [model.tokenizer.decode([5, 6])], said

for wrong in (
    lambda: ToolkitLM(max_length=257),
    lambda: ToolkitLM(batch_size=0),
    lambda: ToolkitLM("random:gpt2"),
    lambda: model.generate_until([ask(("a", {"until": ["b"], "max_gen_toks": 9, "num_beams": 4}))], disable_tqdm=True),
    lambda: model.generate_until([ask(("a", {"until": ["b"]}))], disable_tqdm=True),
    lambda: model.loglikelihood([ask(("a", "b " * 300))], disable_tqdm=True),
    lambda: ToolkitLM(sys.argv[1]).loglikelihood_rolling([ask(("a",))]),
):
    try:
        wrong()
    except lm_eval_adapter.InputError as error:
        print(error)
command.cli_evaluate = lambda: ToolkitLM("shakespeare-mni")
lm_eval_adapter.main()
"""


def test_mistakes_are_one_line(tmp_path):
    gpt2.save(gpt2.GPT2(gpt2.GPT2Config(3, 8, 4, 1, 1)), Chars.from_text("abc"), tmp_path / "chars")
    done = run(["-c", MISTAKES, str(tmp_path / "chars")], tmp_path)
    assert done.returncode == 2
    expected = [
        "max_length 257 is not within the model's 1 .. 256 positions",
        "batch_size 0: give 1 or more, or auto",
        "random:gpt2: random weights come without a tokenizer",
        "generation option 'num_beams' is not supported",
        "256 new tokens leave no room for a prompt in 256; give --gen_kwargs max_gen_toks=128",
        "tokens leaves no room for its context; shorten the continuation",
        "this vocabulary has no end-of-text token to put before a text; give prefix_token_id=N",
    ]
    for line, says in zip(done.stdout.splitlines(), expected, strict=True):
        assert says in line
    assert done.stderr.splitlines()[-1].startswith("gpt2: unknown model 'shakespeare-mni' (did you mean shakespeare-mini?)")
    assert "Traceback" not in done.stderr
