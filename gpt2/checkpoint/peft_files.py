"""Read and write LoRA adapters in PEFT's files: ``adapter_config.json`` and ``adapter_model.safetensors``.

Tensors have nn.Linear's orientation: A is (r, in), B (out, r). ``fan_in_fan_out`` tells PEFT that the base is a Conv1D, as in
GPT-2, so PEFT transposes their product before it adds it. An embedding's A is (r, rows). Parameters that were trained whole
(``modules_to_save``, ``bias``, tables with new rows) stand in the same file.

PEFT adapts the embedding and the head each for itself, also where the base ties them: then the result has an untied head. Its
own merge_and_unload() adds both to the one matrix, which is another model.
"""

import contextlib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt2.checkpoint.containers import Container, listed, read_json
from gpt2.checkpoint.files import open_file
from gpt2.checkpoint.keys import HEAD, expected, from_file, is_parameter, layer, to_file
from gpt2.checkpoint.names import ADAPTED, ADAPTER as CONFIG, DEFAULT, OFFICIAL, ModelName
from gpt2.checkpoint.saving import safetensors_file, write_file, write_json
from gpt2.config import GPT2Config, number, quoted
from gpt2.errors import CheckpointError, InputError, user_path
from gpt2.lora import PROJECTIONS, adapters, merge_into
from gpt2.model import GPT2

Reader = Callable[[str, torch.dtype], Tensor]
WEIGHTS = ADAPTED[0]
PREFIX = "base_model.model."  # attributes of PeftModel and LoraModel
MAX_NUMBER = 1e30  # of r and alpha: their quotient is finite in float32
TABLES = ("wte", "wpe")
MODULES = r"h\.\d{1,5}\.(?:attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)|wte|wpe|lm_head"
TENSOR = re.compile(rf"({MODULES})\.lora_(embedding_)?([AB])(?:\.weight)?", re.ASCII)
WHOLE = re.compile(r"\.(base_layer|modules_to_save)(?=\.)")  # in the keys of parameters that are stored whole
# Config keys that do not change what A and B mean. Any other key with a value is refused.
WITHOUT_EFFECT = {
    *("peft_type", "peft_version", "task_type", "inference_mode", "auto_mapping", "runtime_config", "lora_dropout"),
    *("base_model_name_or_path", "revision", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "eva_config", "ensure_weight_tying"),
    *("megatron_core", "qalora_group_size", "init_lora_weights", "bias", "modules_to_save"),
}
# Other initialisations (pissa, olora, loftq, corda ...) change the base's weights.
INITIALISATIONS = (None, True, False, "gaussian", "eva", "orthogonal")
# Kinds that do not change the base's weights, so that PEFT cannot merge them.
NOT_MERGED = ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "ADAPTION_PROMPT", "POLY", "XLORA")
NO_BASE = "a LoRA adapter; its base model cannot be opened"
MERGE_WITH_PEFT = "merge it with PEFT (merge_and_unload, save_pretrained) and load what that writes"
UNTIE_FIRST = (
    "untie the base's head in transformers (model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone()), "
    "model.config.tie_word_embeddings = False), open the adapter on that, "
)


@dataclass(frozen=True)
class Adapter:
    """The checked content of a PEFT directory: which factors are added to which weights of the base, and what replaces them."""

    path: Path
    base: str | None
    revision: str | None
    file: Container
    factors: Mapping[str, tuple[str, str, float]]  # parameter ("h.0.attn.c_attn.weight") -> names of A and B, scale
    whole: Mapping[str, str] = field(default_factory=dict)  # parameter -> name of the tensor that replaces the base's

    def config_of(self, base: GPT2Config, read: Reader) -> GPT2Config:
        """Return the config of ``base`` with the adapter, from the base's parameters: more rows, a head of its own."""
        rows = self.file.entries[self.whole["wte.weight"]].shape[0] if "wte.weight" in self.whole else base.vocab_size
        tied = base.tie_word_embeddings
        if tied and {HEAD, "wte.weight"} & {*self.factors, *self.whole}:
            both = (self.merge(name, partial(read, "wte.weight"), torch.float32) for name in ("wte.weight", HEAD))
            tied = torch.equal(*both)
        return replace(base, vocab_size=rows, tie_word_embeddings=tied)

    def require_fit(self, config: GPT2Config) -> None:
        """Raise CheckpointError if the parameters of the adapted model are not of the shapes that the adapter needs."""
        entries = self.file.entries
        shapes = expected(replace(config, tie_word_embeddings=False))
        made_for: dict[str, tuple[int, ...]]
        made_for = {name: (entries[a].shape[1], entries[b].shape[0]) for name, (a, b, _) in self.factors.items()}
        made_for |= {HEAD: made_for[HEAD][::-1]} if HEAD in made_for else {}  # an nn.Linear, [out, in]
        made_for |= {name: entries[key].shape for name, key in self.whole.items()}
        odd = [
            f"{name} is {list(shapes[name]) if name in shapes else 'not there'}, the adapter's {list(shape)}"
            for name, shape in made_for.items()
            if shapes.get(name) != shape
        ]
        if odd:
            more = f" and {len(odd) - 2} more" if len(odd) > 2 else ""
            what = f"does not fit its base {self.base} ({'; '.join(odd[:2])}{more}); give the model it was trained on"
            raise CheckpointError(f"{self.path}: {what}")

    def merge(self, name: str, read: Callable[[torch.dtype], Tensor], dtype: torch.dtype) -> Tensor:
        """Return one parameter with the adapter added, summed in float64 and rounded once; ``read`` reads the base's."""
        if name in self.whole:
            read = partial(self.file.read, self.whole[name])
        if name not in self.factors:
            return read(dtype)
        key_a, key_b, scale = self.factors[name]
        a, b = (self.file.read(key, torch.float64) for key in (key_a, key_b))
        weight = read(torch.float64)
        if name == HEAD:
            return merge_into(weight.t(), a, b, scale).t().to(dtype).contiguous()
        return merge_into(weight, a, b, scale).to(dtype)


def read_adapter(path: Path) -> Adapter:
    """Read a PEFT directory. Raises CheckpointError: missing, damaged or contradictory files, or more than plain LoRA."""
    where, config = path / CONFIG, read_json(path / CONFIG)
    if (kind := config.get("peft_type")) != "LORA":
        beside = "it works beside the base's weights in every call, so run it with PEFT, or give its base model alone"
        advice = beside if kind in NOT_MERGED else _merging(config) if kind else "merge it with the library that wrote it"
        raise CheckpointError(f"{where}: peft_type is {quoted(str(kind))}, not LORA; {advice}")
    advice = _merging(config)
    more = [key for key, value in config.items() if key not in WITHOUT_EFFECT and value not in (None, False, {}, [], "")]
    more += ["init_lora_weights"] if config.get("init_lora_weights") not in INITIALISATIONS else []
    if more:
        raise CheckpointError(f"{where}: uses {listed(more)}, which is more than LoRA; {advice}")
    if (weights := next((path / name for name in ADAPTED if os.path.lexists(path / name)), None)) is None:
        raise CheckpointError(f"{path}: has no {WEIGHTS} beside {CONFIG}; fetch the adapter again")
    file = open_file(weights)
    pairs: dict[str, dict[str, str]] = {}
    whole: dict[str, str] = {}
    strange = []
    for key, entry in file.entries.items():
        if ".original_module." in key:
            continue  # the base's, beside the module that was trained in its place
        name = from_file(WHOLE.sub("", key.removeprefix(PREFIX)))
        match = TENSOR.fullmatch(name)
        if match and len(entry.shape) == 2 and bool(match[2]) == (match[1] in TABLES):
            pairs.setdefault(match[1], {})[match[3]] = key
        elif is_parameter(name) and entry.dtype.is_floating_point:
            whole[name] = key
        else:
            strange.append(key)
    strange += [key for pair in pairs.values() if len(pair) < 2 for key in pair.values()]
    if strange or not (pairs or whole):
        what = f"holds {listed(strange)}, no A and B of a projection" if strange else "holds no adapter"
        raise CheckpointError(f"{weights}: {what}; {advice}")
    trained = [*_names(config, "modules_to_save", where), *(["bias"] if config.get("bias", "none") != "none" else [])]
    if absent := [name for name in trained if not any(f".{name}." in f".{held}." for held in whole)]:
        raise CheckpointError(f"{weights}: holds nothing of {listed(absent)}, which {CONFIG} says was trained; fetch it again")
    factors = {f"{name}.weight": (pair["A"], pair["B"], _scale(config, file, pair, where)) for name, pair in pairs.items()}
    names = (config.get(key) for key in ("base_model_name_or_path", "revision"))
    base, revision = (name if isinstance(name, str) and name else None for name in names)
    return Adapter(path, base, revision, file, factors, whole)


def _merging(config: Mapping[str, Any]) -> str:
    """Say how PEFT merges an adapter; of one on a matrix that may be tied, how its result keeps two."""
    names = [name for key in ("target_modules", "modules_to_save") for name in _names(config, key)]
    tied = any(re.search(r"wte|lm_head|all-linear", name) for name in names)
    return UNTIE_FIRST + MERGE_WITH_PEFT if tied else MERGE_WITH_PEFT


def _names(config: Mapping[str, Any], key: str, where: Path = Path(CONFIG)) -> list[str]:
    """Return the names of modules under ``key``, which may be one name."""
    value = config.get(key) or []
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{where}: {key} is {quoted(value)}, not a list of names; fetch the adapter again")
    return names


def _scale(config: Mapping[str, Any], file: Container, pair: Mapping[str, str], where: Path) -> float:
    """Return alpha / r, or alpha / √r for rsLoRA (Kalajdzievski, arXiv:2312.03732), as configured for this module."""
    name = pair["A"].removeprefix(PREFIX).rpartition(".lora_")[0]
    r = _number(config, "r", 8, "rank_pattern", name, where)
    alpha = _number(config, "lora_alpha", 8, "alpha_pattern", name, where)
    ranks = (file.entries[pair["A"]].shape[0], file.entries[pair["B"]].shape[1])
    if ranks != (r, r):
        what = f"says rank {r:g} for {name}, the tensors {ranks[0]} and {ranks[1]}; fetch the adapter again"
        raise CheckpointError(f"{where}: {what}")
    return alpha / math.sqrt(r) if config.get("use_rslora") else alpha / r


def _number(config: Mapping[str, Any], key: str, default: float, patterns: str, name: str, where: Path) -> float:
    """Return a number of the config, or that of the first pattern that matches the name, as PEFT does."""
    value = config.get(key, default)
    table = config.get(patterns) or {}
    for pattern, special in table.items() if isinstance(table, dict) else ():
        if not re.fullmatch(r"[\w.^\\$]{1,200}", pattern, re.ASCII):  # security: no repetition, which can take forever to match
            what = f"{patterns} has the pattern {quoted(pattern)}, which is not a plain name; {MERGE_WITH_PEFT}"
            raise CheckpointError(f"{where}: {what}")
        with contextlib.suppress(re.error):
            if re.match(rf"(.*\.)?({pattern})$", name):
                value = special
                break
    if (found := number(value, float, math.ulp(0), MAX_NUMBER)) is None:
        raise CheckpointError(f"{where}: {key} is {quoted(str(value))}, no positive number; fetch the adapter again")
    return float(found)


def save_adapter(model: GPT2, directory: Path, base: str | None) -> Path:
    """Write the adapters of ``model`` as PEFT does; ``base`` is the base model's name. Raises InputError: it has no adapters."""
    if not (adapted := adapters(model)):
        raise InputError("cannot save adapters: this model has none; inject some, or save the model itself")
    first = next(iter(adapted.values()))
    name, revision = _portable(base)
    suffixes = [name for name in PROJECTIONS if any(key.endswith(name) for key in adapted)]
    assert len(adapted) == len(suffixes) * len({layer(f"{name}.weight") for name in adapted})
    config: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM"}
    config |= {"base_model_name_or_path": name, "revision": revision, "inference_mode": True}
    config |= {"r": first.r, "lora_alpha": first.alpha, "lora_dropout": first.dropout}
    config |= {"target_modules": suffixes, "fan_in_fan_out": True, "bias": "none", "use_rslora": False, "init_lora_weights": True}
    factors = ((name, which, getattr(module, f"lora_{which}")) for name, module in adapted.items() for which in "AB")
    tensors = {f"{PREFIX}{to_file(name)}.lora_{which}.weight": factor for name, which, factor in factors}
    directory.mkdir(parents=True, exist_ok=True)
    write_file(directory / WEIGHTS, safetensors_file(tensors))
    write_json(directory / CONFIG, config)
    return directory


def _portable(base: str | None) -> tuple[str | None, str | None]:
    """Return a name and revision that work elsewhere: an absolute path, or a repository for an official name."""
    if base is None:
        return None, None
    name = ModelName.parse(base)
    if name.local and name.base != DEFAULT:
        return os.path.abspath(user_path(name.base)), None
    return OFFICIAL.get(name.base, name.base), name.revision
