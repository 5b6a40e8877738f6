"""The command line: exit codes, one line per user error, JSON for other programs."""

import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from support import forks
from support.commands import ASSET, as_json, mistake, printed, watch_a_fork
from support.random_models import write_checkpoint
from support.training import logged_steps

import gpt2
from gpt2.cli import generate_command
from gpt2.cli.main import main, share_cores
from gpt2.data.bpe import chars_of
from gpt2.parity import run as verify_module
from gpt2.port.diagnosis import runner
from gpt2.sampling import Sampling


def test_waiting_threads_sleep_unless_the_user_chose_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spinning threads made training on a busy machine three times as long; libgomp prints what it read when it was loaded."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    with monkeypatch.context() as chosen:
        chosen.setenv("KMP_BLOCKTIME", "5")
        share_cores()
        assert "OMP_WAIT_POLICY" not in os.environ
    code = "import sys; from gpt2.cli.main import main; main([]); import ctypes; ctypes.CDLL(sys.argv[1])"
    environment = {**os.environ, "OMP_DISPLAY_ENV": "verbose"}
    library = next(Path(torch.__file__).with_name("lib").glob("lib*omp*"), sys.executable)
    done = subprocess.run([sys.executable, "-c", code, library], env=environment, capture_output=True, text=True, check=False)
    if "OMP_WAIT_POLICY" not in done.stderr:
        pytest.skip("this build of torch does not use an OpenMP that prints its settings")
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr


def test_verify_exits_0_with_a_table_and_both_files_and_1_on_a_model_that_differs(tmp_path: Path, capsys, monkeypatch) -> None:
    """This is the first command in the README; scripts check only the exit code."""
    model, page = str(write_checkpoint(tmp_path / "model")), tmp_path / "r.html"
    out = printed(capsys, "verify", model, "--json", str(tmp_path / "r.json"), "--html", str(page))
    assert json.loads((tmp_path / "r.json").read_text())["ok"] is True
    assert "EQUAL" in page.read_text()
    assert all(part in out for part in ("EQUAL", "h.1", "transformers"))

    def build(path: Path, dtype: torch.dtype | None) -> gpt2.GPT2:
        model = gpt2.load(str(path), dtype=dtype)
        model.h[1].ln_2.eps = 1e-3
        return model

    monkeypatch.setattr(verify_module, "verify", partial(verify_module.verify, build=build))
    first = as_json(capsys, "verify", model, code=1)["first_divergence"]
    assert (first["point"], first["layer"]) == ("h.1.ln_2", 1)


def test_another_models_tokenizer_is_one_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """No traceback, and no partly loaded model. Other damages: tests/checkpoint and tests/data."""
    folder = shutil.copytree(ASSET, tmp_path / "model")
    chars_of("".join(map(chr, range(256, 2356)))).save(folder, n_positions=256)
    said = mistake(capsys, "verify", str(folder))
    assert "the tokenizer has 2,100 entries, the model 2,048" in said
    assert str(folder) in said


MISTAKES = [
    ("verfy", "no command 'verfy' (did you mean verify?); see gpt2 --help"),
    ("verify --ofline", "unrecognized arguments: --ofline (did you mean --offline?); see gpt2 verify --help"),
    ("verify out/macbeth/best", "out/macbeth/best: no such folder; gpt2 train RECIPE --out out/macbeth makes"),
    ("verify run/gone", "run/gone: no such folder; gpt2 train RECIPE --out run/gone makes one"),  # was the Hub's error alone
    ("verify ~nosuchuser/x", "~nosuchuser"),
    ("info https://huggingface.co/gpt2", "is a web address; give ORG/NAME"),  # was no folder, which train would make
    ("diagnose port.py:Sized", "Sized(size) needs values: give them defaults, or write build() that returns a Sized"),
    ("verify --json /no/such/folder/r.json", "cannot be written"),
    ("generate --prompt ''", "prompt is empty"),
    ("generate --stop ''", "stop text is empty"),
    ("generate --samples 0", "samples"),
    ("diagnose port.py --timeout nan", "--timeout"),
    ("generate run", "run: no model.safetensors there; it is the folder of a training run, give run/best"),
    ("train", "which recipe"),
    ("compare shakespeare-mini shakespeare-mini --tokens 1", "1 tokens are too few"),
    ("compare shakespeare-mini random:distilgpt2", "vocabularies of 2,048 and 50,257 ids, and one has no tokenizer"),
    ("trace --out -", "--out -: only --json goes to stdout; give a path"),  # was a folder of that name
    ("info --json=--", "-- is no value of an option; give another one"),
    ("compare a b --json x --html ./x", "--html ./x: is what --json writes, and would be lost"),
    ("train file --set data.path=file --json file", "--json file: is read too, and would be lost; give another path"),
    ("compare a onnx/file --json run/../file", "--json run/../file: is read too, and would be lost"),  # was overwritten
    ("info . --json file", "--json file: is a model's or your own file, and would be lost"),  # a model's config was
    ("train finetune-shakespeare --init shakespeare-mini:int8", "leave out what is behind the last colon"),  # was: dtype=
    ("compare shakespeare-mini shakespeare-mini --device meta", "no device 'meta' here"),
    ("diagnose nowhere.py:build", "nowhere.py: no such file; there are port.py; give"),
    ("diagnose port.py:a-b", "'a-b' is not the name of a function; write port.py:build"),
    ("diagnose port.py --model gtp2 --offline", "unknown model 'gtp2' (did you mean gpt2?)"),
    ("generate --prompt x --samples 1000000000", "1,000,000,000 samples: their keys and values need about"),
    ("explore --port 99999", "--port 99999: a port is 0 .. 65535; choose another"),
    ("export shakespeare-mini ''", "DIR is empty; give a path"),
    ("generate --draft file --repetition-penalty 2", "--repetition-penalty has no effect with --draft"),  # was behind the prompt
]


@pytest.mark.parametrize(("command", "says"), MISTAKES, ids=[command for command, _ in MISTAKES])
def test_mistakes_are_one_line_and_exit_2(command: str, says: str, tmp_path: Path, monkeypatch, capsys) -> None:
    """Every wrong flag: no traceback, no exit code of success, and no file written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(runner, "watch", watch_a_fork)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "port.py").write_text("def build(): ...\nclass Sized:\n    def __init__(self, size): ...")
    (tmp_path / "run" / "best").mkdir(parents=True)
    (tmp_path / "run" / "best" / "model.safetensors").write_text("mine")
    assert says in mistake(capsys, *shlex.split(command))
    assert {path.name for path in tmp_path.iterdir()} - {"cache", "out"} == {"file", "port.py", "run"}


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """If every exception were caught, our bugs would look like user errors."""

    def fails(*args, **kwargs):
        raise RuntimeError("ours")

    monkeypatch.setattr(verify_module, "verify", fails)
    with pytest.raises(RuntimeError, match="ours"):
        main(["verify"])


def test_info_json_holds_the_whole_description(capsys: pytest.CaptureFixture) -> None:
    """The JSON has parameters, memory, and the hash of every file."""
    body = as_json(capsys, "info")
    assert body["parameters"] == sum(body["parameters_by_part"].values()) == gpt2.load().config.num_parameters()
    assert {file["name"] for file in body["files"]} >= {"config.json", "model.safetensors", "vocab.json", "merges.txt"}
    assert all(len(file["sha256"]) == 64 for file in body["files"])
    assert body["memory_bytes"]["weights"] == 4 * body["parameters"]
    out = printed(capsys, "info", "random:gpt2-xl:bf16")  # on a machine too small for it: no weights are needed
    assert "1,557,611,200" in out
    assert "3.12 GB" in out


def test_generate_streams_what_the_api_returns(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streaming token by token must print the same text as decoding all tokens; long prompts come through a pipe."""
    argv = ["generate", "--max-new-tokens", "12", "--seed", "5", "--top-k", "20", "--prompt"]
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"ROMEO:\n")))
    streamed = printed(capsys, *argv, "-")
    model, tokenizer = gpt2.load(), gpt2.load_tokenizer()
    ids = gpt2.generate(model, tokenizer.encode("ROMEO:\n"), 12, temperature=0.8, top_k=20, seed=5)
    assert streamed == tokenizer.decode(ids) + "\n"
    argv.append("ROMEO:\n")
    body = as_json(capsys, *argv)
    assert body["prompt_ids"] + body["ids"] == ids
    assert argv[-1] + printed(capsys, *argv, "--no-prompt") == streamed  # a script had to cut the prompt off by itself
    assert not printed(capsys, *argv, "--no-prompt", "--samples", "2").startswith("--- 1\nROMEO")


def test_generate_ends_each_of_several_samples_at_the_stop_text(capsys: pytest.CaptureFixture) -> None:
    """The first row that stops must not end the others, nor get the ids that the batch still computes for it."""
    argv = ["generate", "--prompt", "ROMEO:\n", "--max-new-tokens", "30", "--seed", "5", "--stop", "the", "--samples", "4"]
    body = as_json(capsys, *argv)
    texts = [sample["text"] for sample in body["samples"]]
    assert body["text"] == texts[0]
    assert len({len(sample["ids"]) for sample in body["samples"]}) > 1
    assert all(text.find("the") == text.rfind("the") >= len(text) - 8 for text in texts if "the" in text)
    assert printed(capsys, *argv) == "".join(f"--- {n}\nROMEO:\n{text}\n" for n, text in enumerate(texts, 1))


def test_generate_says_which_of_a_long_prompt_it_dropped(capsys: pytest.CaptureFixture) -> None:
    """The beginning of a prompt longer than the context was dropped in silence. Control: one that just fits."""
    for prompt, said in (("\n" * 256, ""), ("\n" * 300, "note: the first 44 of 300 tokens are dropped; the model reads 256\n")):
        assert main(["generate", "--prompt", prompt, "--max-new-tokens", "1", "--json", "-"]) == 0
        assert capsys.readouterr().err == said


def test_generate_takes_a_draft(capsys: pytest.CaptureFixture) -> None:
    """`--draft` must load, must not change the text, and must be refused before any output if it does not fit."""
    argv = ["generate", "--prompt", "ROMEO:\n", "--max-new-tokens", "20", "--temperature", "0"]
    plain, drafted = as_json(capsys, *argv), as_json(capsys, *argv, "--draft", "shakespeare-mini:int8")
    assert drafted["ids"] == plain["ids"]
    assert (plain["draft"], drafted["draft"]) == (None, "shakespeare-mini:int8")


def test_generate_puts_the_prompt_where_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --device cuda the ids stayed on the CPU, and the embedding refused them. "meta" stands for a GPU."""
    seen: list[str] = []
    monkeypatch.setattr("gpt2.generation.stream", lambda decoder, ids, *args, **kwargs: seen.append(ids.device.type) or ())
    for device in ("meta", "cpu"):
        args = SimpleNamespace(stop=[], json="-", max_new_tokens=1, special=False, seed=None)
        brain = SimpleNamespace(model=gpt2.load().to(device))
        writer = generate_command._Writer(args, gpt2.load_tokenizer(), brain, Sampling(0), None)
        assert writer([1, 2]) == [[]]
    assert seen == ["meta", "cpu"]


TINY = "--set data.path=text --set data.tokenizer=chars --set context=8 --set batch_size=1 --set eval_tokens=9"
TINY += " --set model.n_layer=1 --set model.n_embd=16 --set model.n_head=2 --set sample_tokens=0"


def test_train_runs_resumes_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Every other command must open the result."""
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question.\n" * 400)
    out = tmp_path / "run"
    settings = ["steps=4", "eval_every=2", "save_every=2", "batch_size=2", "context=16", f"data.path={text}", "sample_tokens=4"]
    small = [*settings, "data.vocab_size=270", "model.n_layer=1", "model.n_embd=16", "model.n_head=2", "model.n_positions=32"]
    argv = ["train", "shakespeare-mini", "--out", str(out), *(part for s in small for part in ("--set", s))]
    body = as_json(capsys, *argv)
    assert (body["stopped"], body["step"]) == ("finished", 4)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "val_loss" in row] == [0, 2, 4]
    assert main(argv) == 0
    assert "going on" in capsys.readouterr().err
    assert "--fresh" in mistake(capsys, *argv[:4], "--set", "steps=5")
    assert main(["verify", str(out / "best"), "--quick"]) == 0


def test_ctrl_c_while_training_saves_and_exits_130(tmp_path: Path) -> None:
    """A real process and signal: the step is finished and saved, and the output does not look like a crash."""
    (tmp_path / "text").write_text("To be, or not to be, that is the question.\n" * 400)
    endless = " ".join(f"--set {name}=100000" for name in ("steps", "eval_every", "save_every"))
    command = f"train shakespeare-mini --out run {TINY} {endless} --set log_every=1"
    process = forks.Fork("-m", "gpt2", *command.split(), cwd=tmp_path)
    while logged_steps(tmp_path / "run") < 5 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted and saved" in out
    assert "Traceback" not in err
    assert list((tmp_path / "run").glob("step-*"))


@pytest.mark.parametrize(
    ("name", "command"),
    [("stdout", "compare MODEL MODEL:bf16 --tokens 9"), ("stderr", f"train shakespeare-mini --out run {TINY} --set steps=2")],
)
def test_a_command_outlasts_its_reader(name: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `| head`, a comparison exited 1 as a failed check does, and a training run stopped."""
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "MODEL")
    (tmp_path / "text").write_text("To be, or not to be: that is the question.\n" * 30)
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patch, open(writer, "wb") as pipe:
        patch.setattr(sys, name, io.TextIOWrapper(pipe))
        assert main(shlex.split(command)) == 0
    assert (tmp_path / "run" / "step-2").is_dir() == ("train" in command)


@pytest.mark.parametrize("option", ["--list", "--help"])
def test_a_full_disk_behind_stdout_is_one_line(option: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """The exit code was 120, beside a part of a traceback."""
    with monkeypatch.context() as patch, open("/dev/full", "wb") as full:
        patch.setattr(sys, "stdout", io.TextIOWrapper(full))
        assert main(["train", option]) == 2
    said = ": the output cannot be written (No space left on device); make room, or send it elsewhere\n"
    assert capsys.readouterr().err == ("gpt2 train" if option == "--list" else "gpt2") + said


def test_a_closed_stdout_and_a_second_ctrl_c_are_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """`gpt2 train --list >&-` ended in one, and so did a user who pressed the keys twice, behind "interrupted"."""
    for name, value in (("sys.stdout", None), ("sys.argv", ["gpt2", "train", "--list"]), ("gc.set_threshold", limits := Mock())):
        monkeypatch.setattr(name, value)
    assert main() == 0
    assert limits.call_args.args[2] == 1000  # in a process of its own alone
    for name, value in (("EARLY", True), ("require_sense", Mock(side_effect=KeyboardInterrupt))):
        monkeypatch.setattr(f"gpt2.cli.main.{name}", value)
    monkeypatch.setattr(signal, "signal", handlers := Mock())
    assert main() == 130
    handlers.assert_called_with(signal.SIGINT, signal.SIG_DFL)
