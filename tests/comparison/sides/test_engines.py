"""Sides that other programs run: each engine's figures beside the same ones computed without our code, and bad input."""

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.commands import refusal
from support.random_models import TEXT, write_checkpoint

import gpt2
from gpt2.checkpoint.export import export
from gpt2.cli.main import main
from gpt2.comparison.results import Comparison
from gpt2.comparison.run import compare
from gpt2.comparison.sides import engines
from gpt2.comparison.sides.opening import open_side, open_sides
from gpt2.errors import InputError
from gpt2.measure.last_words import score_last_words

MODEL = "shakespeare-mini"
TOKENS = 129  # one window


PORT = """
import sys
import gpt2

def build(folder):
    print("a line that must not end up in the report")
    sys.path.insert(0, "left behind")
    model = gpt2.load(folder)
    CHANGE
    return model
"""


def port(file: Path, change: str = "pass") -> str:
    """Write a port that is our model with a change; return its name."""
    file.write_text(PORT.replace("CHANGE", change))
    return f"{file}:build"


def figures(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Mean KL(a || b) and the fraction of equal first choices, from logits (T, V), in numpy alone."""

    def logp(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64)
        x = x - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    p, q = logp(a), logp(b)
    return float((np.exp(p) * (p - q)).sum(-1).mean()), float((p.argmax(-1) == q.argmax(-1)).mean())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(export(MODEL, tmp_path_factory.mktemp("hf")).directory)


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return gpt2.load_tokenizer(MODEL).encode(TEXT * 3)[: TOKENS - 1]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT * 3)
    return str(path)


@pytest.fixture(scope="module")
def reference_logits(folder: Path, ids: list[int]) -> np.ndarray:
    from transformers import GPT2LMHeadModel

    with torch.no_grad():
        return GPT2LMHeadModel.from_pretrained(folder).eval()(torch.tensor([ids])).logits[0].numpy()


def run(side: str, text: str) -> Comparison:
    return compare(MODEL, side, on=text, tokens=TOKENS)


def holds(found: Comparison, reference: np.ndarray, theirs: np.ndarray, slack: float) -> None:
    """Our figures of a side are those of the engine's own logits; ``slack`` is the rounding of float32 logits in a KL."""
    kl, same = figures(reference, theirs)
    assert found.distributions.kl_ab.mean.value == pytest.approx(kl, rel=1e-3, abs=slack)
    assert found.distributions.same_top.value == pytest.approx(same, abs=1e-9)
    assert set(found.compatibility.impossible) == {"weights", "activations"}


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["F32", "Q8_0", "Q4_K_M"])
def test_llama_cpp(stored: str, text: str, ids: list[int], reference_logits: np.ndarray, tmp_path: Path) -> None:
    """A GGUF side once read the weights with our loader, so it could not tell what llama.cpp computes from Q4_K."""
    llama_cpp = pytest.importorskip("llama_cpp")
    file = Path(export(MODEL, tmp_path, format="gguf").directory, "model.gguf")
    if stored != "F32":
        parameters = llama_cpp.llama_model_quantize_default_params()
        parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{stored}")
        small = tmp_path / "small.gguf"
        assert llama_cpp.llama_model_quantize(str(file).encode(), str(small).encode(), parameters) == 0
        file = small
    llama = llama_cpp.Llama(str(file), n_ctx=256, logits_all=True, type_k=0, type_v=0, flash_attn=False, verbose=False)
    llama.eval(ids)
    theirs = np.array(llama.scores[: len(ids)])
    llama.close()
    found = run(f"llama.cpp/{file}", text)
    holds(found, reference_logits, theirs, 1e-9)
    assert found.b.dtype == stored
    assert (found.compatibility.vocabularies.parting, found.compatibility.vocabularies.differing) == (None, 0)


@pytest.mark.slow
@pytest.mark.parametrize("quantised", [None, "int8"])
def test_ctranslate2(quantised: str | None, folder: Path, text: str, ids: list[int], reference_logits, tmp_path: Path) -> None:
    """Its own rounding must stay: int8 weights that are computed in float32 would show no difference."""
    ctranslate2 = pytest.importorskip("ctranslate2")
    converted = tmp_path / "ct2"
    ctranslate2.converters.TransformersConverter(str(folder)).convert(str(converted), quantization=quantised)
    theirs = np.array(ctranslate2.Generator(str(converted), compute_type="default").forward_batch([ids]))[0]
    found = run(f"ct2/{converted}", text)
    holds(found, reference_logits, theirs, 1e-11)
    assert (found.distributions.kl_ab.mean.value > 1e-5) == (quantised is not None)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["ctranslate2", "llama_cpp"])
def test_a_window_longer_than_the_engines_context(module: str, tmp_path: Path) -> None:
    """CTranslate2's folder does not tell its context, so windows are the partner's; llama.cpp ends the process (SIGABRT)."""
    engine = pytest.importorskip(module)
    write_checkpoint(tmp_path / "short")  # 32 positions
    if module == "ctranslate2":
        engine.converters.TransformersConverter(str(tmp_path / "short")).convert(str(tmp_path / "ct2"))
        name = f"ct2/{tmp_path / 'ct2'}"
    else:
        name = f"llama.cpp/{export(str(tmp_path / 'short'), tmp_path, format='gguf').directory}/model.gguf"
    with open_side(name) as side:
        assert side.logits(torch.zeros(1, 32, dtype=torch.int64)).shape[:2] == (1, 32)
        assert "give a shorter context" in refusal(side.logits, torch.zeros(1, 40, dtype=torch.int64))


@pytest.mark.slow
@pytest.mark.parametrize("past", [False, True])
@pytest.mark.filterwarnings("ignore")  # torch.onnx warns of its own age
def test_onnx(past: bool, folder: Path, text: str, ids: list[int], reference_logits: np.ndarray, tmp_path: Path) -> None:
    """A graph with a cache needs empty past tensors of the right shape, and positions that start at 0."""
    ort = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    from transformers import DynamicCache, GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager").eval()
    heads, width = model.config.n_head, model.config.n_embd // model.config.n_head

    class Graph(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids, attention_mask, *states):
            cache = DynamicCache() if states else None
            for layer in range(len(states) // 2):
                cache.update(states[2 * layer], states[2 * layer + 1], layer)
            return self.model(input_ids, cache, attention_mask=attention_mask, use_cache=bool(states)).logits

    states = [torch.zeros(2, heads, 3, width) for _ in range(2 * model.config.n_layer if past else 0)]
    inputs = torch.zeros(2, 16, dtype=torch.int64), torch.ones(2, 19 if past else 16, dtype=torch.int64), *states
    caches = [f"past_key_values.{layer}.{part}" for layer in range(model.config.n_layer) for part in ("key", "value")]
    names = ["input_ids", "attention_mask", *caches[: len(states)]]
    axes = {name: {0: "rows", 2: "before"} for name in names[2:]} | {"attention_mask": {0: "rows", 1: "all"}}
    axes |= {name: {0: "rows", 1: "tokens"} for name in ("input_ids", "logits")}
    file = tmp_path / "model.onnx"
    torch.onnx.export(
        Graph(), inputs, str(file), input_names=names, output_names=["logits"], dynamic_axes=axes, dynamo=False, opset_version=17
    )
    feeds = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), np.int64)}
    feeds |= {name: np.zeros((1, heads, 0, width), np.float32) for name in names[2:]}
    (theirs,) = ort.InferenceSession(str(file)).run(["logits"], feeds)
    holds(run(f"onnx/{tmp_path}", text), reference_logits, theirs[0], 1e-11)


class ScaledTogether:
    """ONNX Runtime with dynamic quantisation, in small: whole numbers times one scale for all of a batch."""

    def __init__(self, *_: object, **__: object) -> None:
        self.model = gpt2.load(MODEL)

    def get_inputs(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name="input_ids", type="tensor(int64)", shape=["rows", "tokens"])]

    def get_outputs(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name="logits")]

    def run(self, _: list[str], feeds: dict[str, np.ndarray]) -> tuple[np.ndarray]:
        logits = self.model(torch.from_numpy(feeds["input_ids"])).detach()
        scale = logits.abs().max() / 31
        return (((logits / scale).round_() * scale).numpy(),)


def test_an_engine_is_asked_one_row_at_a_time(
    text: str, ids: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An int8 engine's rows depend on their neighbours: KL was that of a batch, which nobody runs (onnxruntime #5653)."""
    runtime = SimpleNamespace(SessionOptions=SimpleNamespace, InferenceSession=ScaledTogether)
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    (tmp_path / "model.onnx").touch()
    gpt2.load_tokenizer(MODEL).save(tmp_path)
    side, model, engine = f"onnx/{tmp_path}", gpt2.load(MODEL), ScaledTogether()
    rows = torch.tensor(ids[:128]).view(8, 16)
    exact, alone, together = (
        model(rows).detach().numpy(),
        np.concatenate([engine.run([], {"input_ids": row[None].numpy()})[0] for row in rows]),
        engine.run([], {"input_ids": rows.numpy()})[0],
    )
    kl, of_batch = figures(exact, alone)[0], figures(exact, together)[0]
    assert abs(of_batch / kl - 1) > 0.02
    found = compare(MODEL, side, on=f"{text}:context=16", tokens=129)
    assert found.distributions.kl_ab.mean.value == pytest.approx(kl, rel=1e-4)
    assert main(["compare", side, "--noise", "--on", f"{text}:context=16", "--tokens", "128", "--json", "-"]) == 0
    body = json.loads(capsys.readouterr().out)
    moved = [figures(alone[i : i + 4], engine.run([], {"input_ids": rows[i : i + 4].numpy()})[0])[0] for i in (0, 4)]
    ways = [("in a batch of 4", pytest.approx(np.mean(moved), rel=1e-4))]
    assert [(way["name"], way["kl"]["value"]) for way in body["ways"]] == ways
    assert body["floor"] is None
    passages, score = ("to be or not to be", "I pray you, go"), partial(score_last_words, tokenizer=gpt2.load_tokenizer(MODEL))
    with open_side(side) as opened:  # nor with the padding of a longer row
        words = score(opened.logits, passages=passages, context=64)
        single = [score(opened.run, passages=[passage], context=64).losses[0] for passage in passages]
    assert words.losses == pytest.approx(single, abs=1e-6)


def test_a_port(base: Path, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its prints must not end up in ``--json -``; its points are found by its modules' names, and the first wrong one named."""
    argv, path, model, config = sys.argv, list(sys.path), str(base), gpt2.load(str(base)).config
    same = port(tmp_path / "same.py")
    assert main(["compare", model, same, "--on", text, "--tokens", "60", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["distributions"]["kl_ab"]["max"] == 0
    assert (found["a"]["parameters"], found["b"]["parameters"]) == (config.num_parameters(), None)
    assert [point["error"] < 1e-5 for point in found["activations"]["points"]] == [True] * (5 + 12 * config.n_layer)
    wrong = compare(model, port(tmp_path / "wrong.py", "model.h[1].mlp.c_fc.bias.data[0] += 1"), on=text, tokens=24)
    assert wrong.activations.first_past.point == "h.1.mlp.c_fc"
    assert wrong.distributions.kl_ab.mean.value > 1e-4
    assert wrong.compatibility.impossible["weights"].endswith("wrong.py:build shows only activations and logits")
    assert "attn.scores, attn.weights: no module of" in " ".join(wrong.table(300).split())
    change = "blocks = list(model.h); del model.h; model.h = blocks"
    flat = compare(model, port(tmp_path / "flat.py", change), on=text, tokens=24)
    assert flat.activations is None
    assert "no list of" in flat.compatibility.impossible["activations"]
    assert flat.distributions.kl_ab.max < 1e-9
    assert (sys.argv, sys.path) == (argv, path)
    # The folder of a model in memory had no tokenizer, and names with a prefix, unlike the one that diagnose makes.
    names = "from safetensors.torch import load_file; assert 'wte.weight' in load_file(folder + '/model.safetensors')"
    reads = port(tmp_path / "reads.py", f"gpt2.load_tokenizer(folder); {names}")
    assert compare(gpt2.load(model), reads, on=text, tokens=24).distributions.kl_ab.max < 1e-9
    assert "compare it with a" in refusal(compare, same, same, on=text, tokens=20)
    assert "--blame puts parts of B into A" in refusal(compare, model, same, on=text, tokens=20, blame=True)


# What is advised: it said to diagnose what is only too large, and a file that no program can import.
BROKEN = {
    "def build():\n    return 1 / 0\n": "ZeroDivisionError.*gpt2 diagnose .* finds out why",
    "import no_such_module\n": r"No module named 'no_such_module'; the file does not import; mend it \(python port\.py shows",
    "def build():\n    return bytearray(2**62)\n": "memory does not suffice: choose a smaller model",
    "def build():\n    raise GeneratorExit\n": "build: GeneratorExit; gpt2 diagnose",  # is no Exception
    "class Mute(Exception):\n    def __str__(self): raise self\ndef build():\n    raise Mute\n": "build: Mute; gpt2 diagnose",
}


@pytest.mark.parametrize("source", BROKEN)
def test_a_port_that_fails_is_one_line(source: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "port.py").write_text(source)
    with pytest.raises(InputError, match=BROKEN[source]), open_side(f"{tmp_path / 'port.py'}:build"):
        pass


@pytest.mark.parametrize(
    ("body", "says"),
    [("raise GeneratorExit", "GeneratorExit"), ("return torch.empty(1, 8, 50, device='meta')", "on the meta device")],
)
def test_a_port_whose_forward_fails_is_one_line(body: str, says: str, tmp_path: Path) -> None:
    """Both were tracebacks: one is no Exception, the other failed where logits are brought to the CPU."""
    module = f"import torch\nclass M(torch.nn.Module):\n    def forward(self, ids):\n        {body}\n"
    (tmp_path / "port.py").write_text(f"{module}def build():\n    return M()\n")
    with open_side(f"{tmp_path / 'port.py'}:build") as side:
        assert says in refusal(side.logits, torch.zeros(1, 8, dtype=torch.long))


def test_logits_of_a_port_that_are_not_finite(base: Path, text: str, tmp_path: Path) -> None:
    """A port whose logits are NaN made a table of nan, and exit code 0; one token's is enough, of either side, in any mode."""
    head = "head = model.head; model.head = lambda x: head(x).index_fill(-1, torch.tensor([7]), float('inf'))"
    broken, model = port(tmp_path / "broken.py", f"import torch; {head}"), str(base)
    for names in ((model, broken), (broken, model), (model, model, broken)):
        said = refusal(compare, *names, on=text, tokens=24)
        assert f"{broken}: 23 logits are not finite numbers, but NaN or infinite; gpt2 diagnose {broken} finds out why" in said
    padded = "model.head = lambda x: torch.cat((head(x), torch.full((*x.shape[:2], 3), -torch.inf)), -1)"  # and no tokens there
    masked = port(tmp_path / "masked.py", f"import torch; head = model.head; {padded}")
    assert compare(model, masked, on=text, tokens=24).distributions.kl_ab.max < 1e-9


def test_hidden_states_are_told_from_logits(base: Path, text: str, tmp_path: Path) -> None:
    """A model without its head gives the stream: it was said to know 160 tokens, or compared column by column."""
    headless, name = port(tmp_path / "port.py", "model.head = lambda x: x"), str(base)
    model, ids, says = gpt2.load(name), torch.arange(5, 25)[None], r"48 columns, as wide as the model: hidden states"
    arrays = {"ids": ids.numpy(), "logits": model.hidden(ids).detach().numpy()}
    save_file({"ids": ids, "logits": model.hidden(ids).detach()}, tmp_path / "dump.safetensors")
    for side, where in ((headless, {"on": text, "tokens": 60}), (f"trace:{tmp_path / 'dump.safetensors'}", {})):
        with pytest.raises(InputError, match=says):
            compare(name, side, **where)
    with pytest.raises(InputError, match=says):
        gpt2.compare(name, name, headless, on=text, tokens=60)
    for array in ("logits", "stream"):
        with pytest.raises(InputError, match=r"48 columns are hidden states: save x @ wte\.T"):
            gpt2.diagnose({"ids": arrays["ids"], array: arrays["logits"]}, name)


def test_an_engine_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One line with the command that installs it, in place of a traceback; the extra must exist in pyproject.toml."""
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    sides = {"llama_cpp": "llama.cpp/x.gguf", "ctranslate2": "ct2/x", "onnxruntime": "onnx/x.onnx"}
    for (module, side), extra in zip(sides.items(), ("llamacpp", "ctranslate2", "onnx"), strict=True):
        monkeypatch.setitem(sys.modules, module, None)
        assert main(["compare", MODEL, side]) == 2
        error = capsys.readouterr().err
        assert f"pip install 'gpt2-toolkit[{extra}]'" in error
        assert len(error.splitlines()) == 1
        assert f"\n{extra} = [" in project


def test_names_that_open_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A wrong path ended in the engine's own traceback."""
    monkeypatch.setattr(engines.importlib, "import_module", lambda name: None)
    for name in ("llama.cpp/none.gguf", "ct2/none", "onnx/none.onnx", f"onnx/{tmp_path}", "none.py:build"):
        with pytest.raises(InputError, match=r"give|name one"):
            open_sides(MODEL, name)
