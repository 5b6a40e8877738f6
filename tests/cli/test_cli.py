"""The command line: exit codes, one line per mistake, JSON that other tools call."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import gpt2
from gpt2.cli.main import COMMANDS, main, parser
from gpt2.parity import run as verify_module

ASSET = Path(gpt2.__file__).parent / "assets" / "shakespeare-mini"


def gpt2_command(*args: str, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "gpt2", *args], capture_output=True, text=True, **kwargs)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The embedded checkpoint where a test may damage it."""
    return Path(shutil.copytree(ASSET, tmp_path / "model"))


def one_line(capsys: pytest.CaptureFixture) -> str:
    """What a mistake printed: nothing on stdout, one line on stderr."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("gpt2 ")
    return err


# --- verify


def test_verify_exits_0_prints_a_table_and_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The first command a newcomer runs."""
    assert main(["verify", "--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]) == 0
    assert json.loads((tmp_path / "r.json").read_text())["ok"] is True
    assert "EQUAL" in (tmp_path / "r.html").read_text()
    out = capsys.readouterr().out
    assert "EQUAL" in out
    assert "h.4" in out
    assert "transformers" in out


def test_verify_exits_1_on_a_model_that_differs(
    copy: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts look at the exit code alone."""

    def build(path: Path, dtype: torch.dtype | None) -> gpt2.GPT2:
        model = gpt2.load(str(path), dtype=dtype)
        model.h[2].ln_2.eps = 1e-3
        return model

    monkeypatch.setattr(verify_module.verify, "__kwdefaults__", {**verify_module.verify.__kwdefaults__, "build": build})
    assert main(["verify", str(copy), "--json", "-"]) == 1
    body = json.loads(capsys.readouterr().out)
    assert body["first_divergence"]["point"] == "h.2.ln_2"
    assert body["first_divergence"]["layer"] == 2


# --- bad input: exit 2, one line


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def lie_about_a_shape(folder: Path) -> None:
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["transformer.ln_f.bias"]["shape"] = [159]
    text = json.dumps(header).encode().ljust(size)
    weights.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def drop_a_tensor(folder: Path) -> None:
    model = gpt2.load(str(folder))
    weights = {f"transformer.{name}": tensor.clone() for name, tensor in model.state_dict().items() if name != "h.1.ln_1.bias"}
    _write(folder, weights)


def add_a_tensor(folder: Path) -> None:
    model = gpt2.load(str(folder))
    weights = {f"transformer.{name}": tensor.clone() for name, tensor in model.state_dict().items()}
    _write(folder, {**weights, "transformer.h.1.adapter.weight": torch.zeros(3)})


def _write(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def contradict_the_tensors(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "n_layer": 7}))


def another_models_vocabulary(folder: Path) -> None:
    from gpt2.data.bpe import train_bpe
    from gpt2.data.shakespeare import play

    train_bpe(play("hamlet"), 2100).save(folder, n_positions=256)


def wrong_vocabulary(folder: Path) -> None:
    vocabulary = json.loads((folder / "vocab.json").read_text())
    del vocabulary[list(vocabulary)[1000]]
    (folder / "vocab.json").write_text(json.dumps(vocabulary))


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def not_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncate, "fetch it again"),
        (lie_about_a_shape, "contradicts itself about transformer.ln_f.bias"),
        (drop_a_tensor, "missing: h.1.ln_1.bias"),
        (add_a_tensor, "unexpected: transformer.h.1.adapter.weight"),
        (contradict_the_tensors, "config says n_layer 7, the tensors 5"),
        (wrong_vocabulary, "vocab"),
        (another_models_vocabulary, "the tokenizer has 2,100 entries, the model 2,048"),
        (no_weights, "no model.safetensors"),
        (not_json, "is not JSON"),
    ],
)
@pytest.mark.parametrize("command", ["verify", "generate"])
def test_a_damaged_checkpoint_is_one_line_and_exit_2(copy: Path, capsys: pytest.CaptureFixture, damage, says, command) -> None:
    """What, where, what to do; never a traceback, and never a model that half fits."""
    damage(copy)
    assert main([command, str(copy)]) == 2
    message = one_line(capsys)
    assert says in message
    assert str(copy) in message or "vocab" in message


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["verify", "gtp2"], "did you mean"),
        (["verify", "./nowhere"], "no such file"),
        (["verify", "random:gpt3"], "sizes are"),
        (["verify", "gpt2:int3"], "unknown dtype"),
        (["info", str(Path(__file__))], "no file of weights"),
        (["generate", "--prompt", ""], "prompt is empty"),
        (["generate", "--temperature", "-1"], "temperature"),
        (["generate", "--top-k", "0"], "top_k"),
        (["generate", "--max-new-tokens", "-3"], "max-new-tokens"),
        (["generate", "--top-p", "2"], "top_p"),
        (["generate", "random:distilgpt2"], "without a tokenizer"),
        (["train"], "which recipe"),
        (["train", "shakespere-mini"], "did you mean shakespeare-mini"),
        (["train", "shakespeare-mini", "--set", "optim.lrr=1"], "did you mean optim.lr"),
        (["train", "shakespeare-mini", "--set", "steps=many"], "steps must be int"),
        (["train", "shakespeare-mini", "--set", "data.path=/no/such/text"], "/no/such/text"),
        (["verify", "--json", "/no/such/folder/r.json"], "cannot be written"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(argv: list[str], says: str, tmp_path: Path, monkeypatch, capsys) -> None:
    """Every flag a person can get wrong."""
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    assert says in err


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Swallowing every exception would make our own faults look like the user's."""

    def fails(*args, **kwargs):
        raise RuntimeError("ours")

    monkeypatch.setattr(verify_module, "verify", fails)
    with pytest.raises(RuntimeError, match="ours"):
        main(["verify"])


# --- info, generate, train


def test_info_json_holds_the_whole_description(capsys: pytest.CaptureFixture) -> None:
    """Parameters, memory, and the hash of every file."""
    assert main(["info", "--json", "-"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["parameters"] == sum(body["parameters_by_part"].values()) == gpt2.load().config.num_parameters()
    assert {file["name"] for file in body["files"]} >= {"config.json", "model.safetensors", "vocab.json", "merges.txt"}
    assert all(len(file["sha256"]) == 64 for file in body["files"])
    assert body["memory_bytes"]["weights"] == 4 * body["parameters"]


def test_info_needs_no_weights_for_a_size(capsys: pytest.CaptureFixture) -> None:
    """What gpt2-xl would take, asked on a machine that could never hold it."""
    assert main(["info", "random:gpt2-xl:bf16"]) == 0
    out = capsys.readouterr().out
    assert "1,557,611,200" in out
    assert "3.12 GB" in out


def test_generate_streams_what_the_api_returns(capsys: pytest.CaptureFixture) -> None:
    """Token by token to the terminal, and not a character more or less than decoding them all."""
    argv = ["generate", "--prompt", "ROMEO:\n", "--max-new-tokens", "40", "--seed", "5", "--top-k", "20"]
    assert main(argv) == 0
    streamed = capsys.readouterr().out
    model, tokenizer = gpt2.load(), gpt2.load_tokenizer()
    ids = gpt2.generate(model, tokenizer.encode("ROMEO:\n"), 40, temperature=0.8, top_k=20, seed=5)
    assert streamed == tokenizer.decode(ids) + "\n"
    assert main([*argv, "--json", "-"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["prompt_ids"] + body["ids"] == ids


def test_generate_takes_a_draft(capsys: pytest.CaptureFixture) -> None:
    """`--draft` that changes the text, that is not loaded, or that is found unfit after half the answer is out."""
    argv = ["generate", "--prompt", "ROMEO:\n", "--max-new-tokens", "40", "--temperature", "0", "--json", "-"]
    assert main(argv) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main([*argv, "--draft", "shakespeare-mini:int8"]) == 0
    drafted = json.loads(capsys.readouterr().out)
    assert drafted["ids"] == plain["ids"]
    assert (plain["draft"], drafted["draft"]) == (None, "shakespeare-mini:int8")
    assert main(["generate", "--prompt", "ROMEO:\n", "--draft", "random:distilgpt2"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "50257 tokens, the model 2048" in err
    assert err.count("\n") == 1


def test_generate_reads_a_prompt_from_stdin() -> None:
    """A pipe is the natural way to hand over a long prompt."""
    result = gpt2_command("generate", "--prompt", "-", "--max-new-tokens", "3", input="JULIET:\n")
    assert result.returncode == 0
    assert result.stdout.startswith("JULIET:\n")
    assert "Traceback" not in result.stderr


def test_train_runs_resumes_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """From scratch, then fine-tuned, by the same loop; the result is a model that every other command takes."""
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question.\n" * 400)
    out = tmp_path / "run"
    settings = ["steps=4", "eval_every=2", "save_every=2", "batch_size=2", "context=16", f"data.path={text}", "sample_tokens=4"]
    small = [*settings, "data.vocab_size=270", "model.n_layer=1", "model.n_embd=16", "model.n_head=2", "model.n_positions=32"]
    argv = ["train", "shakespeare-mini", "--out", str(out), *(part for s in small for part in ("--set", s))]
    assert main([*argv, "--json", "-"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["stopped"] == "finished"
    assert body["step"] == 4
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "val_loss" in row] == [0, 2, 4]
    assert main(argv) == 0
    assert "going on" in capsys.readouterr().err
    assert main([*argv[:4], "--set", "steps=5"]) == 2
    assert "--fresh" in capsys.readouterr().err
    tuned = tmp_path / "tuned"
    argv = ["train", "finetune-shakespeare", "--init", str(out / "best"), "--out", str(tuned)]
    assert main([*argv, *(part for s in settings for part in ("--set", s))]) == 0
    assert main(["verify", str(tuned / "best")]) == 0


def test_train_lists_its_recipes(capsys: pytest.CaptureFixture) -> None:
    """A person has to know what there is to choose from."""
    assert main(["train", "--list"]) == 0
    out = capsys.readouterr().out
    assert "shakespeare-mini" in out
    assert "finetune-shakespeare" in out


def test_ctrl_c_while_training_saves_and_exits_130(tmp_path: Path) -> None:
    """A real process and a real signal: the step is finished and saved, and nothing looks like a crash."""
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question.\n" * 400)
    settings = ["steps=100000", "eval_every=100000", "save_every=100000", "batch_size=2", "context=16", f"data.path={text}"]
    settings += ["data.tokenizer=chars", "model.n_layer=1", "model.n_embd=16", "model.n_head=2", "log_every=1"]
    argv = ["train", "shakespeare-mini", "--out", str(tmp_path / "run"), *(part for s in settings for part in ("--set", s))]
    process = subprocess.Popen([sys.executable, "-m", "gpt2", *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.is_file() and metrics.read_text().count("\n") > 5) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted and saved" in out
    assert "Traceback" not in err
    assert list((tmp_path / "run").glob("step-*"))


# --- the program as a whole


def test_help_answers_fast_and_has_examples() -> None:
    """Every command, with examples to copy."""
    for command in COMMANDS:
        name = command.__name__.rpartition(".")[2].removesuffix("_command")
        result = gpt2_command(name, "--help")
        assert result.returncode == 0
        assert "examples:" in result.stdout
        assert f"gpt2 {name}" in result.stdout
        assert "--json" in result.stdout


def test_examples_in_help_parse() -> None:
    """An example that the parser refuses is worse than none."""
    for command in COMMANDS:
        for line in command.EXAMPLES.splitlines():
            text = line.split("|")[-1].strip()
            if not text.startswith("gpt2 "):
                continue
            words = shlex.split(text.split("    ")[0])[1:]
            assert parser().parse_args(words).run


def test_an_unknown_command_is_exit_2_with_usage() -> None:
    """argparse's own mistakes keep the same exit code."""
    result = gpt2_command("no-such-command")
    assert result.returncode == 2
    assert "usage: gpt2" in result.stderr


def test_a_closed_pipe_is_no_error() -> None:
    """`gpt2 info | head -1` must not end in a traceback."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    command = f"{sys.executable} -m gpt2 generate --max-new-tokens 50 | head -c 1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment)
    assert "Traceback" not in result.stderr
    assert "BrokenPipe" not in result.stderr
