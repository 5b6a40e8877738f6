"""The config: parameter counts in closed form, and a strange or hostile config.json refused in one line."""

import json

import pytest
import torch
from support.hf_layouts import TINY

from gpt2.checkpoint.keys import TABLE, expected
from gpt2.config import ALIASES, OFFICIAL_SIZES, GPT2Config, official_size, quoted
from gpt2.errors import CheckpointError
from gpt2.model import GPT2

# FACTS.md: parameters, and elements including the mask buffers of the official files.
COUNTS = {
    "distilgpt2": (81_912_576, 88_204_032),
    "gpt2": (124_439_808, 137_022_720),
    "gpt2-medium": (354_823_168, 379_988_992),
    "gpt2-large": (774_030_080, 811_778_816),
    "gpt2-xl": (1_557_611_200, 1_607_942_848),
}
OFFICIAL_CONFIG = """{"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
"bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
"model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1,
"summary_activation": null, "summary_first_dropout": 0.1, "summary_proj_to_labels": true, "summary_type": "cls_index",
"summary_use_proj": true, "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}},
"vocab_size": 50257}"""
VALID = TINY.to_hf()


@pytest.mark.parametrize("size", OFFICIAL_SIZES)
def test_official_sizes_have_the_published_counts(size: str) -> None:
    """A width, depth or bias may be missing in the closed form, the key table or the model: all three counts must agree."""
    config = OFFICIAL_SIZES[size]
    parameters, with_masks = COUNTS[size]
    assert config.num_parameters() == sum(config.parameters_by_part().values()) == parameters
    assert parameters + config.n_layer * config.n_positions**2 == with_masks
    d, v, p, layers = config.n_embd, config.vocab_size, config.n_positions, config.n_layer
    assert v * d + p * d + layers * (12 * d * d + 13 * d) + 2 * d == parameters
    with torch.device("meta"):
        model = GPT2(config, initialise=False)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes == expected(config) == {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert list(expected(config)) == list(shapes), "the order of the forward pass"


def test_counts_follow_an_unusual_feed_forward() -> None:
    """`12 d^2` holds for a feed-forward of width 4 d only; rinna's and Cerebras' differ."""
    config = GPT2Config(vocab_size=7, n_positions=5, n_embd=6, n_layer=3, n_head=2, n_inner=11)
    by_hand = 7 * 6 + 5 * 6 + 3 * (4 * 36 + 24 + 2 * 66 + 17 + 24) + 12
    assert config.num_parameters() == sum(p.numel() for p in GPT2(config).parameters()) == by_hand
    assert {name.replace("{}", "0") for name in TABLE} <= set(expected(config))


def test_reads_the_official_config() -> None:
    """Missing `n_inner` and scale flags mean the defaults, and keys of other tasks have no effect."""
    assert GPT2Config.from_hf(json.loads(OFFICIAL_CONFIG)) == official_size("gpt2")


def test_agrees_with_transformers_about_every_field() -> None:
    """If transformers spells a field differently, each side ignores the other's; it refuses an epsilon that is an integer."""
    from transformers import GPT2Config as Theirs

    ours = GPT2Config(91, 32, 24, 3, 4, 77, "relu", 0.3, 0.2, 0.4, 1, 0, False, True, True, 5, 6)
    theirs = Theirs(**ours.to_hf())
    assert all(getattr(theirs, name) == value for name, value in ours.to_hf().items() if name not in ("n_ctx", "dtype"))
    assert GPT2Config.from_hf(json.loads(theirs.to_json_string(use_diff=True))) == ours == GPT2Config.from_hf(ours.to_hf())
    assert ours.to_hf()["n_ctx"] == 32
    assert GPT2Config.from_hf(json.loads(Theirs().to_json_string(use_diff=True))) == GPT2Config()
    assert Theirs.attribute_map == {alias: name for alias, name in ALIASES.items()}


@pytest.mark.parametrize(
    "junk",
    [
        {"_attn_implementation_internal": "../../evil"},
        {"auto_map": {"AutoModel": "evil.Model"}, "trust_remote_code": True},
        {"__class__": "evil", "__init__": [1], "from_hf": 3, "head_dim": 0, "inner": 1, "self": 1, "cls": 2},
    ],
)
def test_what_is_not_a_field_has_no_effect(junk: dict) -> None:
    """CVE-2026-4372: a key of config.json chose the code to run."""
    assert GPT2Config.from_hf(VALID | junk) == TINY


def nested(depth: int) -> list:
    return [nested(depth - 1)] if depth else []


HOSTILE = [
    ("n_layer", 10**9, "within"),  # a table of tensors for each layer would fill memory
    ("vocab_size", 10**5000, "huge int"),  # Python refuses to print it
    ("n_embd", 13, "divisible"),
    ("n_head", 0, "within"),
    ("n_layer", 2.0, "int"),
    ("n_positions", float("nan"), "int"),
    ("bos_token_id", -1, "within"),
    ("eos_token_id", [[60]], "int"),
    ("layer_norm_epsilon", float("nan"), "must be 0 or more"),
    ("layer_norm_epsilon", -1e-5, "must be 0 or more"),
    ("attn_pdrop", 1.5, "within"),
    ("embd_pdrop", False, "number"),
    ("scale_attn_weights", 1, "bool"),
    ("activation_function", "gelu\nnew\x1b[2J", "unknown activation"),
    ("activation_function", nested(900), "unknown activation"),
    ("model_type", "llama", "reads GPT-2 only"),
    ("add_cross_attention", True, "decoder-only"),
    ("tie_word_embeddings", 0, "tie_word_embeddings must be bool"),
    ("quantization_config", {"quant_method": "gptq"}, "'gptq'}: quantised weights are not read"),
    ("hidden_size", 24, "n_embd is 12 and hidden_size, its other name, 24"),
]


@pytest.mark.parametrize(("name", "value", "says"), HOSTILE, ids=[f"{name}-{n}" for n, (name, _, _) in enumerate(HOSTILE)])
def test_a_value_that_cannot_be_is_refused_in_one_line(name: str, value: object, says: str) -> None:
    """NaN passes `x < 0`, True passes `isinstance(x, int)`, and a newline or a megabyte reaches the terminal."""
    with pytest.raises(CheckpointError) as caught:
        GPT2Config.from_hf(VALID | {name: value}, "DIR/config.json")
    message = str(caught.value)
    assert message.startswith("DIR/config.json: ")
    assert name in message
    assert says in message
    assert message.isprintable()
    assert len(message) < 400


def test_other_names_of_the_sizes_are_read() -> None:
    """Files with `hidden_size`, which transformers reads, and with `n_ctx` but no `n_positions`, as in GPT-2's first files."""
    renamed = {alias: VALID[name] for alias, name in ALIASES.items()}
    bare = {key: value for key, value in VALID.items() if key not in ALIASES.values() and key != "n_ctx"}
    assert GPT2Config.from_hf(bare | renamed) == TINY
    assert GPT2Config.from_hf(VALID | renamed) == TINY
    assert GPT2Config.from_hf({key: value for key, value in VALID.items() if key != "n_positions"}) == TINY


def test_quoted_is_short_and_printable() -> None:
    """A message must not carry an attacker's escape codes, or a megabyte of digits, to the terminal."""
    texts, numbers = ("a\nb", "\x1b[31m", "\ud800", "x" * 10**6), (10**4000, 10**5000, [10**5000])
    for value in (*texts, *numbers, [[[[[1]]]]], {"k" * 999: "v"}, {1, 2}):
        assert quoted(value).isprintable()
        assert len(quoted(value)) < 300
