"""Recipes: a misspelt key or a value of the wrong type is refused, and never replaced by a default."""

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
from support.commands import refusal

from gpt2.data import shakespeare
from gpt2.data.bpe import chars_of
from gpt2.train import models, recipe as recipes
from gpt2.train.corpus import texts
from gpt2.train.listing import list_data
from gpt2.train.loop import train
from gpt2.train.recipe import ELSEWHERE, Recipe, build, read


@pytest.fixture
def mine(tmp_path):
    """Write a recipe file; returns its path."""

    def write(text: str) -> str:
        (tmp_path / "mine.toml").write_text(text)
        return str(tmp_path / "mine.toml")

    return write


@pytest.mark.parametrize("name", recipes.names())
def test_own_recipes_are_read_and_describe_themselves(name):
    """Every recipe in the package must load: otherwise its first user finds the typo."""
    found = read(name)
    assert found.name == name
    assert found.description
    assert found.takes
    assert found.optim.warmup < found.steps
    assert found.eval_every <= found.steps
    assert found.context <= 1024  # fits every official GPT-2


def test_recipe_by_path_has_defaults_for_what_it_does_not_say(mine):
    path = mine('steps = 5\n[data]\npath = "x.txt"\n')
    found = read(path)
    assert (found.name, found.steps, found.data.path) == ("mine", 5, "x.txt")
    assert found.optim == Recipe().optim
    assert build(json.loads(json.dumps(asdict(found))), "its own JSON") == found


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("step=5", "unknown key 'step'; did you mean steps?"),
        ("lr=1", "unknown key 'lr'; did you mean optim.lr?"),  # it was lora
        ("learning_rate=1", "unknown key 'learning_rate'; did you mean optim.lr?"),  # transformers' and nanoGPT's names
        ("per_device_train_batch_size=1", "did you mean batch_size?"),
        ("out_dir=x", "did you mean --out DIR?"),
        ("epochs=-1", "epochs is -1.0; give 0 or more"),
        ("steps=many", "steps must be int, found 'many'"),
        ("optim=1", "optim is a table of keys, found 1"),
        ("steps", "write key=value"),
        ("batch_size=6", "batch_size 6 does not divide into grad_accum 4 parts"),
        ("dropout=1.0", "dropout is 1.0; give 0 or more and less than 1"),
        ("data.held_out=0", "data.held_out is 0.0; give a fraction"),
        ("data.tokenizer=word", "data.tokenizer is 'word'; give 'bpe', 'chars', 'words' or 'gpt2'"),
        ("optim.lr=1e-9", "optim.lr 1e-09 is below optim.min_lr"),
        ("lora.alpha=0", "lora.alpha is 0.0; give more than 0"),
        ("data.tokens=here", "data.path and data.tokens are both given"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(override, says, mine):
    """A typo that would train with the default, a negative clip that increases the loss, NaN that passes comparisons."""
    assert says in refusal(read, mine('steps = 9\ngrad_accum = 4\n[data]\npath = "x.txt"\n'), [override])


@pytest.mark.parametrize(
    ("override", "value"),
    [
        (" steps = 7 ", lambda r: r.steps == 7),
        ("optim.lr=1", lambda r: type(r.optim.lr) is float and r.optim.lr == 1),
        ("optim.lr=.01", lambda r: r.optim.lr == 0.01),  # not TOML, but a common way to type it
        ("optim.lr=5e-3", lambda r: r.optim.lr == 0.005),
        ("data.path=my text.txt", lambda r: r.data.path == "my text.txt"),
        ('data.path="quoted.txt"', lambda r: r.data.path == "quoted.txt"),
        ("data.path=1984", lambda r: r.data.path == "1984"),  # a number is accepted as text
        ("data.path=a=b", lambda r: r.data.path == "a=b"),
        ("data.path=", lambda r: r.data.path == ""),
        ("data.path=1\nsteps = 3", lambda r: r.steps == 1000 and r.data.path == "1\nsteps = 3"),
    ],
)
def test_overrides_mean_what_a_shell_user_means(override, value, mine):
    assert value(read(mine("[optim]\nmin_lr = 0.0\n"), [override]))


def test_unknown_recipe_names_the_nearest(tmp_path):
    assert "did you mean shakespeare-mini?" in refusal(read, "shakespear-mini")
    assert "or give the path of a TOML file" in refusal(read, str(tmp_path))
    bad = tmp_path / "bad.toml"
    bad.write_text("steps = = 3")
    assert "not a TOML file" in refusal(read, str(bad))
    bad.write_bytes(b"\xff\xfe")
    assert "not a TOML file" in refusal(read, str(bad))


@pytest.mark.parametrize("name", [name for name in recipes.names() if name.startswith("finetune")])
def test_a_recipe_that_starts_from_a_model_is_refused_without_one(name, tmp_path):
    """A forgotten --init trained from scratch in silence, or said that vocab_size is too large."""
    for call in (partial(train, read(name), tmp_path / "run"), partial(list_data, read(name))):
        assert "starts from a model; name it, as in --init gpt2" in refusal(call)
    assert not (tmp_path / "run").exists()
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be: that is the question. " * 20)
    scratch = ["needs_init=false", "lora.r=0", f"data.path={text}", "data.tokenizer=chars", "context=8"]
    scratch += ["data.prompt=", "data.label=", "data.padded=false"]
    assert list_data(read(name, [*scratch, "data.field=text"])).train_tokens == 774


def test_a_recipe_that_needs_a_network_names_the_way_without(monkeypatch):
    """Its first run ended at a download that nobody had announced. The way is tried for each that needs one."""
    monkeypatch.setattr(shakespeare, "tiny_shakespeare", partial(shakespeare.tiny_shakespeare, Path("/nowhere"), offline=True))
    online = [name for name in recipes.names() if "downloaded once" in read(name).data.needs]
    assert {"bigram", "tutorial-char", "shakespeare-char", "shakespeare-char-cpu"} < {*online}
    for name in online:
        assert refusal(texts, read(name)).endswith("or --set data.source=all-plays, with the extra plays")
        assert sum(map(len, texts(read(name, ["data.source=all-plays"])))) > 4e6
    assert read("finetune-chat").data.needs == ""


def test_the_activation_reaches_the_model_and_a_wrong_one_is_refused(recipe):
    """nanoGPT's character model uses the exact GELU; a recipe key that is ignored would train another model."""
    exact = replace(recipe, model=replace(recipe.model, activation_function="gelu"))
    assert models.new(exact, chars_of("ab")).config.activation_function == "gelu"
    assert models.new(recipe, chars_of("ab")).config.activation_function == "gelu_new"
    assert "model.activation_function is 'glu'; give 'gelu_new'" in refusal(read, "words", ["model.activation_function=glu"])


@pytest.mark.parametrize("name", ["../../x", "a\\b", "C:x", "..", "", "a\x1b]0;x", "x" * 300])
def test_a_name_is_one_component_of_a_path(mine, name):
    """A run writes to out/NAME: a name with a path in it could write anywhere."""
    path = mine(f"name = {json.dumps(name)}\n")
    assert f"{path}: name" in refusal(read, path)
    assert read(path, ["name=mine"]).name == "mine"


def test_every_setting_has_a_meaning_and_every_name_of_others_a_key() -> None:
    """`--settings` shows them: a key without a meaning, or advice to use a key that is not there, leads nowhere."""
    settings = read("finetune-texts", ["context=64"]).settings()
    assert settings["context"] == {"value": 64, "default": 256, "meaning": "tokens of a window"}
    assert all(each["meaning"] for each in settings.values())
    assert {key for key in ELSEWHERE if not key.startswith("--")} <= settings.keys()
