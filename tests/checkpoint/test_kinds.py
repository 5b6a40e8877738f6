"""What stands around a GPT-2: trainers' wrappers, objects, other heads; and files that are no GPT-2's weights, with the cause."""

import argparse
import dataclasses
import json
import pathlib
import re
import struct
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from support import torch_layouts
from support.checks import refused
from support.commands import refusal
from support.hf_layouts import TINY, sharded, weights, write_config
from torch import Tensor

import gpt2
from gpt2.checkpoint.checkpoint import open_path
from gpt2.checkpoint.describe import describe
from gpt2.cli.main import main
from gpt2.parity.run import verify

State = dict[str, Tensor]


@dataclasses.dataclass
class Settings:
    """An object of its author's class beside the weights, with the fields of a config."""

    block_size: int = 16
    vocab_size: int = 61
    n_layer: int = 2
    n_head: int = 3
    n_embd: int = 12


class Attributes(dict):
    """A dict of its author's class."""


def saved(truth: State) -> State:
    """The state dict of transformers' model."""
    return {f"transformer.{name}": tensor for name, tensor in truth.items()} | {"lm_head.weight": truth["wte.weight"]}


def begin(prefix: str) -> Callable[[State], State]:
    return lambda state: {prefix + name: tensor for name, tensor in state.items()}


def inside(wrapper: str) -> Callable[[State], State]:
    return lambda state: {re.sub(r"(h\.\d+\.(?:mlp\.)?)", rf"\1{wrapper}", name): tensor for name, tensor in state.items()}


def beside(**others: Any) -> Callable[[State], Any]:
    return lambda state: {"model": state, **others}


def under(*path: str, kind: type = dict) -> Callable[[State], Any]:
    def wrap(state: Any) -> Any:
        for key in reversed(path):
            state = kind({key: state, "step": 3})
        return state

    return wrap


OPTIMIZER = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 1e-3, "params": [0]}]}
WRAPPED: dict[str, Callable[[State], Any]] = {
    **{
        f"{name} inside": inside(name)
        for name in ("_checkpoint_wrapped_module.", "_orig_mod.", "module.", "_fsdp_wrapped_module.")
    },
    **{f"{name} before": begin(name) for name in ("_forward_module.", "_module.", "gpt.", "model.decoder.net.", "a.b-c.1.")},
    "averaged": lambda state: begin("module.")(state) | {"n_averaged": torch.tensor(3)},
    "both": lambda state: begin("_orig_mod.model.")(inside("_checkpoint_wrapped_module._orig_mod.")(state)),
    "twice the same": lambda state: state | begin("ema.")(state),
    "another module": lambda state: begin("gpt.")(state) | {"clip_project.model.0.weight": torch.ones(4, 4)},
    **{f"under {'.'.join(path)}": under(*path) for path in (("module",), ("state",), ("state", "model"), ("policy_state_dict",))},
    "in an author's dict": under("weights", kind=Attributes),
    "in a list": lambda state: [3, state],
    "optimizer states": beside(optimizer=OPTIMIZER, optimizers=[OPTIMIZER], rng=torch.ones(3)),
    "a number": lambda state: state | {"epoch": 3},
    "a dataclass": beside(config=Settings()),
    "a namespace": beside(hyper_parameters=argparse.Namespace(lr=1e-4)),
    "a path and a type": beside(config={"out": pathlib.PurePosixPath("/x"), "kind": UserDict}, made=UserDict({"a": 1})),
    "sets and defaults": beside(seen={1, 2}, frozen=frozenset("ab"), by=defaultdict(list, {"a": [1]}), counts=OrderedDict(a=1)),
    "keys of any kind": beside(callbacks={Settings: {"a": 1}, (1, 2): 3}),
    "NumPy's": beside(best=torch.ones(1).numpy()[0], curve=torch.ones(3).numpy()),
}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("kind", WRAPPED)
def test_what_a_trainer_wraps_is_found(tmp_path: Path, kind: str, protocol: int) -> None:
    """Published checkpoints have dozens of wrappers; a list of missing tensors helps nobody."""
    truth = weights()
    write_config(tmp_path)
    torch.save(WRAPPED[kind](saved(truth)), tmp_path / "pytorch_model.bin", pickle_protocol=protocol)
    state = gpt2.load(str(tmp_path)).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in truth.items())
    assert state.keys() == truth.keys()


def test_an_author_s_config_beside_the_weights_is_read(tmp_path: Path) -> None:
    """build-nanogpt saves its config as an object; its fields are data, and the number of heads is in no tensor."""
    torch.save({"model": torch_layouts.linear(weights()), "config": Settings(), "step": 5}, tmp_path / "model.pt")
    described = describe(str(tmp_path / "model.pt"))
    assert described.config == replace(TINY, bos_token_id=None, eos_token_id=None, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    assert any("Settings" in note for note in described.notes)


def test_files_of_a_trainer_are_no_weights(tmp_path: Path) -> None:
    """transformers' Trainer writes optimizer.pt and more beside a model; the folder's one other file is the model."""
    truth = weights()
    write_config(tmp_path)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "training_args.bin"):
        torch.save({"state": {}}, tmp_path / name)
    torch.save(saved(truth), tmp_path / "checkpoint.pt")
    assert torch.equal(gpt2.load(str(tmp_path)).wte.weight, truth["wte.weight"])


def test_one_name_of_a_tied_pair_is_enough(tmp_path: Path) -> None:
    """safetensors' save_model keeps the first name of the two, which is the head's."""
    from transformers import GPT2Config as TheirConfig, GPT2LMHeadModel

    theirs = GPT2LMHeadModel(TheirConfig(vocab_size=61, n_positions=16, n_embd=12, n_layer=2, n_head=3, eos_token_id=60))
    theirs.config.save_pretrained(tmp_path)
    save_model(theirs, str(tmp_path / "model.safetensors"), {"format": "pt"})
    assert "transformer.wte.weight" not in load_file(tmp_path / "model.safetensors")
    model = gpt2.load(str(tmp_path))
    assert model.config.tie_word_embeddings
    assert torch.equal(model.wte.weight, theirs.lm_head.weight)
    assert verify(str(tmp_path), quick=True).ok


def test_a_classifier_in_the_place_of_the_head(tmp_path: Path) -> None:
    """The book replaces `out_head` by a Linear of two classes, with a bias."""
    config = replace(TINY, n_embd=48, n_layer=3, bos_token_id=None, eos_token_id=None)
    truth = torch_layouts.llms_from_scratch(tmp_path / "model.pth", config)
    state = torch.load(tmp_path / "model.pth", weights_only=True)["model_state_dict"]
    head = {"out_head.weight": torch.ones(2, 48), "out_head.bias": torch.ones(2)}
    torch.save(state | head, tmp_path / "model.pth")
    checkpoint = open_path(tmp_path)
    assert checkpoint.extra.keys() == head.keys()
    assert all(torch.equal(tensor, truth[name]) for name, tensor in checkpoint.load().state_dict().items())


HEADS = {
    "TRL's value": {"v_head.summary.weight": torch.ones(1, 12), "v_head.summary.bias": torch.zeros(1)},
    "a classifier's": {"score.weight": torch.ones(3, 12)},
    "tokens'": {"classifier.weight": torch.ones(3, 12), "classifier.bias": torch.ones(3)},
    "double": {"multiple_choice_head.summary.weight": torch.ones(1, 12), "multiple_choice_head.summary.bias": torch.zeros(1)},
    "questions'": {"qa_outputs.weight": torch.ones(2, 12), "qa_outputs.bias": torch.zeros(2)},
}


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("prefix", ["", "module."])
def test_another_head_is_left_out_and_said(tmp_path: Path, kind: str, prefix: str) -> None:
    """A classifier is a GPT-2 with one more matrix; the language model inside is whole."""
    truth, head = weights(), begin(prefix)(HEADS[kind])
    write_config(tmp_path)
    torch.save(begin(prefix)(saved(truth)) | head, tmp_path / "pytorch_model.bin")
    checkpoint = open_path(tmp_path)
    assert checkpoint.extra.keys() == head.keys()
    assert all(torch.equal(checkpoint.extra[name], tensor) for name, tensor in head.items())
    assert all(torch.equal(tensor, truth[name]) for name, tensor in checkpoint.load().state_dict().items())
    assert any(next(iter(head)) in note and "left out" in note for note in describe(str(tmp_path)).notes)
    if kind == "double":
        assert verify(str(tmp_path), quick=True).ok


def test_an_index_may_list_a_tied_head_that_no_shard_has(tmp_path: Path) -> None:
    """Sharding leaves out the copy of a tied matrix, and some indexes name it still; any other tensor must be there."""
    truth = sharded(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps(index | {"weight_map": index["weight_map"] | {"lm_head.weight": first}}))
    assert all(torch.equal(tensor, truth[name]) for name, tensor in gpt2.load(str(tmp_path)).state_dict().items())
    path.write_text(json.dumps(index | {"weight_map": index["weight_map"] | {"transformer.h.9.ln_1.bias": first}}))
    refused(lambda: gpt2.load(str(tmp_path)), "disagrees with its shards about transformer.h.9.ln_1.bias")
    write_config(tmp_path, tie_word_embeddings=False)
    path.write_text(json.dumps(index))
    refused(lambda: gpt2.load(str(tmp_path)), "missing: lm_head.weight")


def pickled(change: Callable[[State], Any]) -> Callable[[Path], Path]:
    def write(directory: Path) -> Path:
        torch.save(change(saved(weights())), write_config(directory) / "pytorch_model.bin")
        return directory

    return write


def content(name: str, data: bytes) -> Callable[[Path], Path]:
    def write(directory: Path) -> Path:
        write_config(directory)
        (directory / name).write_bytes(data)
        return directory / name

    return write


def with_config(**changes: Any) -> Callable[[Path], Path]:
    def write(directory: Path) -> Path:
        save_file(weights(), write_config(directory, **changes) / "model.safetensors", {"format": "pt"})
        return directory

    return write


def quantised(suffix: str) -> Callable[[Path], Path]:
    module = "transformer.h.0.attn.c_attn"
    parts = {f"{module}{suffix}": torch.ones(3)}
    return pickled(lambda state: {k: t for k, t in state.items() if k != f"{module}.weight"} | parts)


def adapter(kind: str) -> Callable[[Path], Path]:
    return lambda directory: content("adapter_config.json", json.dumps({"peft_type": kind}).encode())(directory / "a").parent


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 548105171\n"
GGML = struct.pack("<i", 0x67676D6C) + struct.pack("<6i", 50257, 1024, 768, 12, 12, 1) + bytes(5000)
LORA = "transformer.h.0.attn.c_attn.lora_A.default.weight"


def renamed(*pairs: tuple[str, str]) -> Callable[[Path], Path]:
    return pickled(lambda s: {reduce(lambda name, pair: name.replace(*pair), pairs, n): t for n, t in s.items()})


def without(part: str) -> Callable[[Path], Path]:
    return pickled(lambda s: {n: t for n, t in s.items() if not re.search(part, n)})


CAUSES: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "ZeRO-3": (pickled(lambda s: {k: torch.empty(0) if t.ndim == 2 else t for k, t in s.items()}), ("ZeRO-3", "zero_to_fp32.py")),
    "GPTQ": (quantised(".qweight"), ("quantised weights", "give the model that they were made from")),
    "bitsandbytes": (quantised(".weight.quant_state.bitsandbytes__nf4"), ("quantised weights",)),
    "8 bits": (quantised(".SCB"), ("quantised weights",)),
    "a quantised config": (with_config(quantization_config={"quant_method": "awq"}), ("'awq'", "quantised weights are not read")),
    "an unmerged adapter": (pickled(lambda s: s | {LORA: torch.ones(2, 12)}), ("PEFT's parts", "save the adapter alone")),
    "FSDP's": (pickled(lambda s: {"_fsdp_wrapped_module._flat_param": torch.ones(9)} | s), ("FSDP's flat", "FULL_STATE_DICT")),
    "names of its own": (pickled(lambda s: {f"net.{n}": t for n, t in enumerate(s.values())}), ("no known GPT-2", "--like")),
    "names of a module's own": (
        renamed(("attn.c_attn", "look"), ("h.", "storeys.")),
        ("24 of its 29 tensors have names that no known GPT-2 gives them", "h.0 is missing; gpt2 export", "--like FILE.py:build"),
    ),
    "one name of its own": (renamed(("c_fc", "wide")), ("unexpected", "--like FILE.py:build")),
    "Megatron's": (
        pickled(lambda s: {"model": {"language_model": {part: {"x": s["lm_head.weight"]} for part in ("embedding", "encoder")}}}),
        ("model.language_model.embedding.x: a tensor of Megatron", "another architecture"),
    ),
    "GPT-NeoX's": (renamed(("transformer.", "gpt_neox."), ("ln_f", "norm")), ("a tensor of GPT-NeoX", "another architecture")),
    "rotary positions": (renamed(("wpe.weight", "inv_freq")), ("rotary positions, which make it another architecture",)),
    "no positions": (without("wpe"), ("missing: wpe.weight; without learned positions",)),
    "post-norm": (without("ln_f"), ("missing: ln_f.weight", "(as in GPT-1) it is another architecture")),
    "half a file": (without(r"h\."), ("missing: h.0; give the whole model",)),
    "RMSNorm": (without(r"ln_\w\.bias"), ("missing: h.0.ln_1.bias",)),
    "only FSDP's": (pickled(lambda s: {"_fsdp_wrapped_module._flat_param": torch.ones(9)}), ("FSDP's flat",)),
    "cross-attention": (pickled(lambda s: s | {"h.0.crossattention.c_attn.bias": torch.ones(2)}), ("cross-attention to an",)),
    "pruned": (pickled(lambda s: s | {"transformer.h.0.mlp.c_fc.weight_mask": torch.ones(2)}), ("prune.remove",)),
    "DCP's": (lambda d: content("__0_0.distcp", b"x")(d).parent, ("dcp_to_torch",)),
    "DeepSpeed's": (lambda d: content("zero_to_fp32.py", b"#")(d).parent, ("DeepSpeed", "python zero_to_fp32.py . out")),
    "two models": (pickled(lambda s: begin("a.")(s) | begin("b.")({k: t + 1 for k, t in s.items()})), ("twice", "b.transf")),
    "two state dicts": (pickled(lambda s: {"model": s, "ema": begin("")(s)}), ("has weights under model, ema", "save one of")),
    "Keras 3's": (pickled(lambda s: {f"layers/a/vars/{n}": t for n, t in enumerate(s.values())}), ("Keras 3, numbered",)),
    "a shard": (lambda d: (without("ln_f")(d) / "pytorch_model.bin").rename(d / "a-00001-of-00002.bin"), ("; give the folder",)),
    "NeMo's": (content("gpt2.nemo", b"./".ljust(257, b"\0") + b"ustar"), ("is a tar archive; unpack it",)),
    "no state dict": (pickled(lambda s: {"step": 3}), ("has no tensor at step", "save model.state_dict()")),
    "an object": (pickled(lambda s: Settings()), ("the object", "Settings where a state dict should be")),
    "another module": (pickled(lambda s: begin("gpt.")(s) | {"fuse.0.weight": torch.ones(2)}), ("unexpected: fuse.0.weight",)),
    "ggml": (content("ggml-model-f16.bin", GGML), ("ggml's from before GGUF", "give the checkpoint that it was made from")),
    "ggml by another name": (content("gpt-2-117M", GGML), ("ggml's from before GGUF",)),
    **{
        f"a pointer in {name}": (content(name, POINTER), ("is a git-lfs pointer", "run `git lfs pull`"))
        for name in ("model.safetensors", "pytorch_model.bin", "model.gguf", "tf_model.h5", "flax_model.msgpack")
    },
    "a pointer in checkpoint": (lambda d: content("checkpoint", POINTER)(d).parent, ("checkpoint: is a git-lfs pointer",)),
    "a pointer in config.json": (lambda d: (with_config()(d), (d / "config.json").write_bytes(POINTER))[0], ("git-lfs pointer",)),
    **{kind: (adapter(kind), (f"'{kind}'", "run it with PEFT")) for kind in ("PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING")},
    "IA3": (adapter("IA3"), ("'IA3'", "merge it with PEFT")),
}


@pytest.mark.parametrize("kind", CAUSES)
def test_the_true_cause_is_said(tmp_path: Path, kind: str) -> None:
    """ "29 tensors are missing" or "not a whole safetensors file" sends the user to look in the wrong place."""
    write, words = CAUSES[kind]
    path = write(tmp_path)
    message = refused(lambda: gpt2.load(str(path)), *words)
    assert kind not in ("PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING") or "merge_and_unload" not in message


def test_biases_that_are_not_there_are_zero_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A usual LayerNorm beside Linears without biases was refused for 8 missing tensors; zeros for them must not stay unsaid."""
    torch_layouts.nanogpt(tmp_path / "ckpt.pt", bias="ln_")
    said = "no biases of attn.c_attn, attn.c_proj, mlp.c_fc, mlp.c_proj are stored; zeros are used"
    assert said in describe(str(tmp_path / "ckpt.pt")).notes
    assert main(["export", str(tmp_path / "ckpt.pt"), str(tmp_path / "out")]) == 0
    assert said in capsys.readouterr().out


def test_info_says_where_tokenizer_and_rows_do_not_fit(tmp_path: Path) -> None:
    """`generate` refused the folder that `info` had described without a word."""
    config, tokenizer, folder = gpt2.load().config, gpt2.load_tokenizer(), tmp_path / "model"
    gpt2.save(gpt2.load(), tokenizer, folder)
    assert describe(str(folder)).notes == ()
    gpt2.save(gpt2.GPT2(replace(config, vocab_size=99, bos_token_id=None, eos_token_id=None)), None, folder)
    assert any(f"wrong vocabulary, the tokenizer has {tokenizer.n_vocab:,}" in note for note in describe(str(folder)).notes)


@pytest.mark.parametrize(("args", "assumed"), [({"bias": ...}, "gelu_new"), ({}, "gelu")], ids=["January 2023", "later"])
def test_an_activation_that_no_file_says_is_assumed(tmp_path: Path, args: dict, assumed: str, capsys: Any) -> None:
    """nanoGPT changed its GELU in June 2023; a model read with the other one differs by 1e-3, and verify calls both equal."""
    path = tmp_path / "ckpt.pt"
    torch_layouts.nanogpt(path, **args)
    assert gpt2.load(str(path)).config.activation_function == assumed
    (note,) = [note for note in describe(str(path)).notes if note.startswith("assumed: ")]
    assert f"activation_function {assumed}," in note
    assert "--set activation_function=NAME" in note
    assert main(["verify", str(path), "--quick"]) == 0
    assert "assumed: activation_function" in capsys.readouterr().out


def test_the_user_says_the_activation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In Python, as a suffix of the name, and on commands; never against what the files say."""
    path = tmp_path / "ckpt.pt"
    torch_layouts.nanogpt(path)
    models = gpt2.load(str(path), activation_function="gelu_new"), gpt2.load(f"{path}:gelu_new"), gpt2.load(f"{path}:relu:f64")
    assert [model.config.activation_function for model in models] == ["gelu_new", "gelu_new", "relu"]
    assert models[2].wte.weight.dtype == torch.float64
    for command in (["info"], ["verify", "--quick"]):
        assert main([*command, str(path), "--set", "activation_function=relu", "--json", str(tmp_path / "out.json")]) == 0
        assert "assumed: " not in capsys.readouterr().out
    assert verify(f"{path}:relu", quick=True).ok
    write_config(tmp_path, replace(TINY, activation_function="gelu"))
    assert "says activation_function gelu itself" in refusal(gpt2.load, f"{path}:gelu_new")
    assert gpt2.load(f"{path}:gelu").config.activation_function == "gelu"
    for flag, says in (("activation_function=gello", "is no activation known"), ("optim.lr=1", "the one setting here is")):
        assert main(["info", str(path), "--set", flag]) == 2
        assert says in capsys.readouterr().err
    assert "unknown dtype" in refusal(gpt2.load, f"{path}:gello")
