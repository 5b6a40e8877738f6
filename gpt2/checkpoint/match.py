"""Match every tensor of a checkpoint to a parameter of the model; report all mismatches at once.

Files differ in names (:mod:`gpt2.checkpoint.keys`), orientation and omissions. The orientation is decided once per file, from
the matrices that are not square: the square `attn.c_proj` fits both ways, so a decision per tensor would load it transposed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from gpt2.checkpoint import keys
from gpt2.checkpoint.containers import Container, listed, read_json, shown
from gpt2.config import GPT2Config, quoted
from gpt2.errors import CheckpointError

OTHER = "another architecture; this loader reads GPT-2 only"
# A pattern of keys that no GPT-2 has -> what the file is, and what to do about it.
CAUSES = {
    r"\.(q_?weight|W_q|codebooks|qzeros|g_idx|(nested_)?(absmax|quant_map)|SCB|weight_format|quant_state\..*|(weight)?_scale)$": (
        "quantised weights (GPTQ, AWQ, bitsandbytes, quanto ...), which are not read; give the model that they were made from"
    ),
    r"\.(lora_[AB]|lora_embedding_[AB]|base_layer|original_module|modules_to_save)\b": (
        "PEFT's parts beside the weights; save the adapter alone (save_pretrained of the PEFT model) and give that folder"
    ),
    r"\.(crossattention|ln_cross_attn)\.": "cross-attention to an encoder, which GPT-2 lacks; give a model without it",
    r"\.(weight_(orig|mask)$|parametrizations\.)": (
        "a weight that torch computes (pruning, parametrization); make it permanent (prune.remove, remove_parametrizations)"
    ),
    r"(^|\.)_?flat_param": "FSDP's flat parameters; save a full state dict (StateDictType.FULL_STATE_DICT)",
    r"(^|\.)(gpt_neox|embed_in|embed_out)\.": f"a tensor of GPT-NeoX (Pythia), {OTHER}",
    r"(^|\.)(language_model|word_embeddings)\.|\.(self_)?attention\.(query_key_value|linear_qkv)\.": (
        f"a tensor of Megatron, BLOOM or Falcon, {OTHER} (Megatron's GPT-2: transformers 4's convert_megatron_gpt2_checkpoint.py)"
    ),
    r"\.self_attn\.q_proj\.|\.gate_proj\.|\.fc_in\.|\.attn\.attention\.|\.Wqkv\.": (
        f"a tensor of Llama, OPT, GPT-J, GPT-Neo, MPT or the like, {OTHER}"
    ),
    r"\.attention\.self\.|\.SelfAttention\.|\.q_lin\.|(^|\.)tokens_embed\.": f"a tensor of BERT, T5, GPT-1 or the like, {OTHER}",
    r"/vars/\d+$": "weights of Keras 3, numbered and not named; write them from Keras under transformers' names, as safetensors",
    r"rotary|inv_freq|freqs_cis": f"rotary positions, which make it {OTHER}",
}
LACKING = {
    "wpe.weight": f"without learned positions it is {OTHER}",
    "ln_f.weight": f"a GPT-2 has a norm after its last block; with norms after each part (as in GPT-1) it is {OTHER}",
}
LIKE = "gpt2 export {} DIR --like FILE.py:build reads them by their module"
EMPTY = "empty, as in one process of DeepSpeed ZeRO-3; run zero_to_fp32.py of its checkpoints' folder, and give what that writes"
Files = Mapping[str, Container]  # key -> the open file that holds it


@dataclass(frozen=True)
class Assignment:
    """The mapping from parameters to tensors of the files."""

    files: Files
    sources: Mapping[str, tuple[str, ...]]  # parameter -> its key, or the keys of its thirds q, k and v
    shapes: Mapping[str, tuple[int, ...]]  # parameter -> shape, in the order of the forward pass
    transposed: bool  # the blocks' matrices are stored [out, in], as in nn.Linear
    absent: tuple[str, ...]  # biases of the kinds that no block has: zeros
    dropped: tuple[str, ...]  # redundant keys
    extra: tuple[str, ...]  # keys of other heads, which are no part of the language model
    notes: tuple[str, ...]  # about the head and absent biases

    @property
    def tied(self) -> bool:
        """Whether the head is the token embedding."""
        return keys.HEAD not in self.shapes

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest dtype that holds every stored tensor."""
        stored = (self.files[key].entries[key].dtype for held in self.sources.values() for key in held)
        return reduce(torch.promote_types, stored)

    def read(self, name: str, dtype: torch.dtype, *, mapped: bool = True) -> Tensor:
        """Read one parameter to the CPU: a view of the mapped file if dtype and alignment allow it and ``mapped``."""
        if name not in self.sources:  # an absent bias
            return torch.zeros(self.shapes[name], dtype=dtype)
        parts = [self.files[key].read(key, dtype, mapped=mapped) for key in self.sources[name]]
        parts = [part.squeeze(0) if part.ndim == 3 else part for part in parts]
        turned = self.transposed and bool(matrices({name: self.shapes[name]}))
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts, 0 if turned else -1)
        return tensor.t() if turned else tensor


def matrices(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the parameters that nn.Linear stores transposed. Embeddings are not among them."""
    return [name for name, shape in shapes.items() if len(shape) == 2 and name.startswith("h.")]


def match(files: Files, config: GPT2Config, where: Path) -> Assignment:
    """Assign every tensor to one parameter, or to a reason for dropping it. Raises CheckpointError: lists all mismatches.

    Whatever the config says, the head is untied if the files hold one whose values are not the token embedding's.
    """
    found: dict[str, list[str]] = {}
    for key, file in files.items():
        found.setdefault(_name(key, file.entries[key].shape, config.vocab_size), []).append(key)
    entries = {name: files[held[0]].entries[held[0]] for name, held in found.items()}
    wanted = keys.expected(replace(config, tie_word_embeddings=False))
    # If the tensors agree on another size than the config's, one statement explains many mismatches.
    stated, actual = {**vars(config), "n_inner": config.inner}, keys.sizes({name: entry.shape for name, entry in entries.items()})
    thirds = {name: [name.replace(".c_attn.", f".{part}.") for part in keys.SHARES] for name in wanted if ".c_attn." in name}
    parts = {name: [name] if name in found else thirds.get(name, [name]) for name in wanted}
    sources = {name: tuple(found[part][0] for part in each) for name, each in parts.items() if found.keys() >= set(each)}
    if config.tie_word_embeddings and "wte.weight" not in sources and keys.HEAD in sources:
        sources["wte.weight"] = sources.pop(keys.HEAD)  # safetensors' save_model keeps one name of the two
    apart = [name for name, held in sources.items() if len(held) > 1]
    first = {name: files[held[0]].entries[held[0]] for name, held in sources.items()}
    if empty := [sources[name][0] for name, entry in first.items() if len(wanted[name]) == 2 and entry.shape == (0,)]:
        raise CheckpointError(f"{where}: {len(empty):,} of its tensors ({listed(empty, 1)}) are {EMPTY}")
    again = {key: _same(files, key, held[0]) for held in found.values() for key in held[1:]}
    dropped = [key for key, same in again.items() if same]
    tied, notes = config.tie_word_embeddings, []
    if keys.HEAD in sources and "wte.weight" in sources:
        tied = _same(files, sources[keys.HEAD][0], sources["wte.weight"][0])
        if tied != config.tie_word_embeddings:
            values = "the token embedding's own" if tied else "not the token embedding's"
            notes.append(f"the head is {'tied' if tied else 'untied'}: the values of {sources[keys.HEAD][0]} are {values}")
    if tied:
        del wanted[keys.HEAD]
        dropped += sources.pop(keys.HEAD, ())
    used = {part for name in sources for part in parts[name]} | {keys.HEAD}
    extra, faults = _drop(files, {name: held[0] for name, held in found.items() if name not in used}, dropped)
    biases = {name: keys.template(name) for name in wanted if name.endswith(".bias")}
    stored = {kind for name, kind in biases.items() if name in sources}
    # Norms without biases beside projections with them are no LayerNorm.
    zeros = {kind for kind in biases.values() if kind not in stored and not (stored and "ln_" in kind)}
    absent = tuple(name for name, kind in biases.items() if kind in zeros)
    if absent:
        which = f" of {listed(sorted(kind.removeprefix('h.{}.').removesuffix('.bias') for kind in zeros))}" if stored else ""
        notes.append(f"no biases{which} are stored; zeros are used")
    given = sources.keys() | set(absent)
    faults |= {
        "missing": [name for name in wanted if name not in given],
        "there twice, with other values": [key for key, same in again.items() if not same],
        "not floating point": [held[0] for name, held in sources.items() if not first[name].dtype.is_floating_point],
    }
    problems = [f"config says {key} {stated[key]}, the tensors {size}" for key, size in actual.items() if size != stated[key]]
    problems += [f"{title}: {listed(wrong)}" for title, wrong in faults.items() if wrong]
    shapes = {name: keys.without_leading_ones(first[name].shape) for name in sources if name not in apart}
    turned_shapes = {name: wanted[name][::-1] for name in matrices(wanted)}
    oblong = [name for name, shape in turned_shapes.items() if name in shapes and shape != wanted[name]]
    straight = [name for name in oblong if shapes[name] == wanted[name]]
    reversed_ = [name for name in oblong if shapes[name] == turned_shapes[name]]
    transposed = len(reversed_) > len(straight)
    fits = wanted | (turned_shapes if transposed else {})
    expected = {sources[name][0]: (shapes[name], fits[name]) for name in shapes}
    square = (config.n_embd, config.n_embd)  # the shape of a third, in either orientation
    expected |= {key: (files[key].entries[key].shape, square[: len(wanted[name])]) for name in apart for key in sources[name]}
    if misshapen := [f"{key} is {list(shape)}, expected {list(fit)}" for key, (shape, fit) in expected.items() if shape != fit]:
        more = f" and {len(misshapen) - 4:,} more" if len(misshapen) > 4 else ""
        why = f" ({len(straight)} matrices lie [in, out] and {len(reversed_)} [out, in])" if straight and reversed_ else ""
        problems.append(f"misshapen: {', '.join(misshapen[:4])}{more}{why}")
    if problems:
        what, renamed = "; ".join(problems), faults["missing"] and faults.get("unexpected")
        advice = f"if they have other names, {LIKE.format(where)}" if renamed else "correct the config or the file"
        raise CheckpointError(f"{where}: the tensors do not fit the config: {what}; {advice}")
    return Assignment(files, sources, wanted, transposed, absent, tuple(dropped), tuple(extra), tuple(notes))


def _name(key: str, shape: tuple[int, ...], vocabulary: int) -> str:
    """Return our name for a key; a classifier in the place of the head that LLMs-from-scratch and minGPT have is another head."""
    name = keys.from_file(key)
    other = name.startswith("lm_head.") and re.search(r"(^|\.)(out_)?head\.\w+$", key) and shape[:1] != (vocabulary,)
    return f"classifier.{key}" if other else name


def require_gpt2(files: Files, where: Path) -> None:
    """Raise CheckpointError if files lack a part of every GPT-2: another architecture, names of no known scheme, or half a file.

    It comes before the config, of which only a GPT-2 has any use.
    """
    named = {key: keys.from_file(key) for key in files}
    held, blocks = set(named.values()), any(keys.layer(keys.share(name)[0]) is not None for name in named.values())
    there = {"wte.weight": bool(held & {"wte.weight", keys.HEAD}), "h.0": blocks}
    there |= {name: name in held for name in ("wpe.weight", "ln_f.weight")}
    if not (lacking := [name for name, is_there in there.items() if not is_there]):
        return
    odd = {key: name for key, name in named.items() if not keys.is_parameter(name)}
    unknown = [key for key, name in odd.items() if not any(kind.fullmatch(name) for kind in keys.REDUNDANT)]
    _refuse_known_cause(files, unknown)
    config = read_json(where / "config.json") if (where / "config.json").is_file() else {}
    if isinstance(config, dict) and (kind := config.get("model_type", "gpt2")) != "gpt2":
        raise CheckpointError(f"{where}: model_type is {quoted(kind)}, not 'gpt2'; this loader reads GPT-2 only")
    if unknown:
        what = f"{len(unknown):,} of its {len(files):,} tensors have names that no known GPT-2 gives them ({listed(unknown, 2)})"
        raise CheckpointError(f"{where}: {what}, and {listed(lacking)} is missing; {LIKE.format(where)}")
    part = re.search(r"-\d{5}-of-\d{5}\.", where.name, re.ASCII) and f"it is a part of a model; give the folder, {where.parent}"
    raise CheckpointError(f"{where}: missing: {listed(lacking)}; {part or LACKING.get(lacking[0], 'give the whole model')}")


def _refuse_known_cause(files: Files, unknown: list[str]) -> None:
    for key in unknown:
        if cause := next((cause for pattern, cause in CAUSES.items() if re.search(pattern, key, re.ASCII)), None):
            raise CheckpointError(f"{files[key].path}: holds {shown(key)}: {cause}")


def _drop(files: Files, others: Mapping[str, str], dropped: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Add the redundant keys to ``dropped``; return the keys of other heads, and the faults of the rest."""
    extra: list[str] = []
    faults: dict[str, list[str]] = {}
    for name, key in others.items():
        if keys.OTHER_HEADS.fullmatch(name):
            extra.append(key)
            continue
        if keys.CAUSAL_MASK.fullmatch(name):
            empty, fault = _is_causal_mask(files[key], key), "not the causal mask"
        elif keys.MASKED_SCORE.fullmatch(name):
            empty, fault = files[key].entries[key].shape in ((), (1,)), "not a scalar"
        else:
            empty, fault = bool(keys.TRAINING_STATE.fullmatch(name)), "unexpected"
        (dropped if empty else faults.setdefault(fault, [])).append(key)
    _refuse_known_cause(files, faults.get("unexpected", []))
    return extra, faults


def _is_causal_mask(file: Container, key: str) -> bool:
    """Return whether a buffer is ones on and below the diagonal, or, in LLMs-from-scratch, ones above it."""
    shape = file.entries[key].shape
    if shape[:-2] not in ((1, 1), ()) or len(shape) < 2 or shape[-2] != shape[-1] or shape[-1] == 0:
        return False
    mask = file.read(key).reshape(shape[-2:])
    ones = torch.ones_like(mask)
    return torch.equal(mask, ones.tril()) or (len(shape) == 2 and torch.equal(mask, ones.triu(1)))


def _same(files: Files, one: str, other: str) -> bool:
    """Return whether two tensors are equal: bit by bit, or in value if their dtypes differ."""
    a, b = files[one].entries[one], files[other].entries[other]
    if keys.without_leading_ones(a.shape) != keys.without_leading_ones(b.shape):
        return False
    x, y = (files[key].read(key).reshape(-1) for key in (one, other))
    if a.dtype != b.dtype:
        wide = torch.promote_types(a.dtype, b.dtype)
        return torch.equal(x.to(wide), y.to(wide))
    return torch.equal(x.view(torch.uint8), y.view(torch.uint8))
