"""compare from end to end: a model and itself, its fine-tune, its other precisions, and unrelated models."""

import gc
import json
import math
import weakref
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from support.commands import refusal
from support.pages import Parts
from support.random_models import changed, noisy, write_checkpoint

import gpt2
from gpt2.checkpoint.loading import load
from gpt2.comparison.compatibility import Parting
from gpt2.comparison.gates import Gate
from gpt2.comparison.results import Comparison
from gpt2.comparison.run import compare
from gpt2.comparison.sides import opening
from gpt2.config import GPT2Config
from gpt2.data.bpe import train_bpe
from gpt2.lora import inject, merged
from gpt2.measure.estimates import Estimate
from gpt2.measure.tracing import points

OTHER = "Enter GHOST. Who's there? Nay, answer me: stand, and unfold yourself. Long live the king!\n" * 20


def run(a: object, b: object, text: str, **settings) -> Comparison:
    return compare(str(a), str(b), **{"on": text, "tokens": 200, **settings})


def test_a_model_against_itself_is_zero_everywhere(base: Path, text: str, in_a_notebook: None) -> None:
    """Any figure that is not exactly zero would look like a difference."""
    found = run(base, base, text)
    assert (found.ok, found.weights.total.distance) == (True, 0)
    assert set(found.weights.unchanged) == set(load(str(base)).state_dict())
    for point in found.activations.points:
        assert (point.error, point.max_abs, point.sqnr, point.cosine) == (0.0, 0.0, math.inf, 1.0)
    assert (found.activations.first_past, found.words.passages) == (None, ())
    assert (found.distributions.js.max, found.distributions.ratio.value) == (0, 1)
    assert all(row.parts_at is None for row in found.words.continuations)
    assert "IDENTICAL" in found.table()
    few = replace(found.distributions, ratio=Estimate(2.2e-6, 2e-6, 1235))  # was × 0.000
    words = replace(found.compatibility.vocabularies, verdict="merges", parting=Parting(9, (1, "a"), (2, "b")))
    said = replace(found, distributions=few, compatibility=replace(found.compatibility, vocabularies=words)).table(200)
    assert ("× 2.200e-06 (2.000e-06 .. 1235)" in said, "predict A's tokens of this text alike" in said) == (True, True)
    assert ('<span class="bold">Identical</span>' in (html := found.html()), "<svg" in html) == (True, False)
    again = run(base, base, text)  # nothing is random
    assert replace(again, seconds=0) == replace(found, seconds=0)
    body = json.loads(found.to_json())  # is enough to run it again
    assert body["verdict"] == "identical"
    assert body["a"]["files"].keys() >= {"config.json", "model.safetensors", "vocab.json", "merges.txt"}
    assert len(body["text"]["sha256"]) == 64
    assert (body["text"]["tokens"], body["text"]["context"], body["text"]["stride"], body["seed"]) == (200, 32, 32, 0)
    versions = {"torch": version("torch"), "gpt2-toolkit": gpt2.__version__}
    assert versions.items() <= body["environment"]["versions"].items()


def test_noise_in_one_tensor_is_found_and_located(base: Path, text: str, tmp_path: Path) -> None:
    """The report must name the tensor, and the first point of the forward pass that differs."""
    found = run(base, changed(base, tmp_path, noisy(0.005, "h.1.mlp.c_fc.weight")), text)
    assert not found.ok
    assert found.distributions.kl_ab.mean.value > 0
    body = json.loads(found.to_json())
    assert (body["first_past"]["point"], body["first_past"]["layer"]) == ("h.1.mlp.c_fc", 1)
    assert body["weights"]["most_changed"] == ["h.1.mlp.c_fc.weight"]
    assert len(body["weights"]["unchanged"]) == len(found.weights.tensors) - 1


def test_what_was_zero_did_not_move_by_inf_percent(base: Path, text: str, tmp_path: Path) -> None:
    """Biases start at zero: the relative change of a first step would be infinite."""
    start = changed(base, tmp_path, lambda model: model.h[0].ln_1.bias.zero_())
    table = run(start, base, text).table()
    assert "h.0.ln_1.bias, from zero" in table
    assert "inf%" not in table


def test_two_implementations_of_one_model(base: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`hf/`: transformers' code on the same files, equal up to rounding."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = run(base, f"hf/{base}", text)
    assert found.b.implementation.startswith("transformers 5.")
    assert found.weights.total.unchanged == 1
    assert [point.point for point in found.activations.points] == points(2)
    assert 0 < max(point.error for point in found.activations.points) < 1e-5
    assert (found.distributions.kl_ab.mean.value < 1e-10, found.distributions.same_top.value) == (True, 1)


def test_another_size_shares_the_text_and_the_distributions(base: Path, text: str, tmp_path: Path) -> None:
    """A message says so before anything runs: neither weights nor activations can be subtracted."""
    found = run(base, write_checkpoint(tmp_path, n_embd=24, n_layer=3, n_head=2), text)
    assert (found.weights, found.activations) == (None, None)
    why = "the models differ in n_layer, n_embd, n_head, n_inner"
    assert found.compatibility.impossible == {"weights": why, "activations": why}
    assert found.distributions is not None
    assert "left out  weights, activations: the models differ" in found.table(200)
    assert not {"activations", "each-tensor"} & {*Parts(found.html()).ids}


def test_another_vocabulary_leaves_bits_per_byte(base: Path, text: str, tmp_path: Path) -> None:
    """KL between distributions over different vocabularies has no meaning."""
    found = run(base, write_checkpoint(tmp_path, tokenizer=train_bpe(OTHER, 290)), text)
    assert (found.distributions, found.activations, found.words) == (None, None, None)
    assert len(found.alone) == 2
    assert abs(found.alone[0].bytes - found.alone[1].bytes) <= 8  # the first token of each is not scored
    assert "bits per byte" in found.table(200)
    assert "tokenizers: token 0 is 'Firs' (297) by A and 'F' (37) by B" in found.table(200)
    scored = (f"{score.tokens:,} tokens scored, context 32, stride 32" for score in found.alone)
    assert " → ".join(scored) in found.table(200)  # each has its own: one line for both would be wrong
    assert not {"activations", "distributions", "the-text", "words"} & {*Parts(found.html()).ids}
    assert not found.ok
    json.loads(found.to_json())


def test_a_padded_vocabulary_is_compared_over_the_tokens_there_are(base: Path, text: str, tmp_path: Path) -> None:
    """Padding rows would take probability, and a model would differ from its padded copy; what they take is said."""
    padded = load(str(base))
    padded.with_tables(lambda rows: torch.cat((rows, 0.02 * torch.randn(20, rows.size(1)))))
    gpt2.save(padded, gpt2.load_tokenizer(str(base)), tmp_path)
    found = run(base, tmp_path, text)
    assert found.distributions.js.max < 1e-12
    assert found.weights.same_numbers  # on the rows that both have
    assert "weights 20 rows more 28 tensors equal in the shared rows" in " ".join(found.table(200).split())
    logits = padded(torch.tensor([gpt2.load_tokenizer(str(base)).encode(Path(text).read_text())[:32]])).detach().double()
    share = float(logits.softmax(-1)[..., 300:].sum(-1).mean())
    said = found.compatibility.impossible[f"rows of {tmp_path} without a token"]
    assert float(said.split("take ")[1].split("%")[0]) / 100 == pytest.approx(share, rel=0.1)
    several = gpt2.compare(str(base), str(base), str(tmp_path), on=text, tokens=200)
    assert several.candidates[2].distributions.kl_ab.max < 1e-12
    assert "equal, +20 rows" in several.table(200)
    assert f"left out of C: rows of {tmp_path} without a token: they take" in " ".join(several.table(300).split())


def with_token(base: Path, folder: Path, token: str) -> Path:
    """The model with one more token, its row, and noise in one matrix, as a fine-tune has it."""
    model, tokenizer = load(str(base)), gpt2.load_tokenizer(str(base)).with_tokens([token])
    model.with_tables(lambda rows: torch.cat((rows, rows[:1])))
    with torch.no_grad():
        model.h[1].mlp.c_fc.weight.mul_(1.1)
    return gpt2.save(model, tokenizer, folder)


def test_added_tokens_that_take_the_probability(base: Path, text: str, tmp_path: Path) -> None:
    """Two untrained rows took 90 %: the report said x 1.000, KL 0, equal weights and continuations, and gates passed."""
    from transformers import GPT2LMHeadModel

    model, tokenizer = load(str(base)), gpt2.load_tokenizer(str(base))
    ids = tokenizer.encode(Path(text).read_text())[:200]
    with torch.no_grad():
        mean = model.hidden(torch.tensor([ids[:32]]))[0].mean(0)
        model.with_tables(lambda rows: torch.cat((rows, (mean / mean.norm()).expand(2, -1))))
    grown = gpt2.save(model, tokenizer.with_tokens(["[first]", "[second]"]), tmp_path / "grown")
    found, back = run(base, grown, text), run(grown, base, text)
    windows = [(max(0, min(at + 32, 199) - 32), at, min(at + 32, 199)) for at in range(0, 199, 32)]
    p, q = (
        torch.cat([whole(torch.tensor([ids[a:b]])).logits[0, at - a :].detach().log_softmax(-1) for a, at, b in windows])
        for whole in (GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float64).eval() for folder in (base, grown))
    )
    right = torch.tensor(ids[1:])[:, None]
    ratio = float((p.gather(1, right) - q.gather(1, right)).mean().exp())
    share, same = float(q.exp()[:, 300:].sum(-1).mean()), float((p.argmax(1) == q.argmax(1)).double().mean())
    assert ratio > 2
    both = found.distributions
    assert (both.ratio.value, both.same_top.value) == pytest.approx((ratio, same), rel=1e-4)
    assert (both.only_a.value, both.only_b.value) == (0, pytest.approx(share, rel=1e-4))
    assert both.kl_ab.mean.value == pytest.approx(float((p.exp() * (p - q[:, :300])).sum(-1).mean()), rel=1e-4)
    assert both.kl_ba.mean.value == back.distributions.kl_ab.mean.value == math.inf
    assert back.distributions.ratio.value == pytest.approx(1 / ratio, rel=1e-4)
    assert any("[first]" in row.b or "[second]" in row.b for row in found.words.continuations)
    assert "inf" in back.html()
    table = " ".join(found.table(200).split())
    assert f"A lacks {100 * share:.3g}% of B's probability" in table
    assert "weights 2 rows more 28 tensors equal in the shared rows" in table
    assert "weights 2 rows fewer" in " ".join(back.table(200).split())
    assert Gate.parse("perplexity_ratio>1.05").judge(found).met
    assert not found.ok
    assert "The same weights in the rows that both have, and 2 rows more" in table
    several = gpt2.compare(str(base), str(base), str(grown), on=text, tokens=200)
    assert several.candidates[2].distributions.ratio.value == pytest.approx(ratio, rel=1e-4)
    assert f"A lacks tokens that have {100 * share:.3g}% of C's probability" in " ".join(several.table(200).split())


def test_a_vocabulary_that_another_extends(base: Path, text: str, tmp_path: Path) -> None:
    """A fine-tune with one more token, which is not in the text, was said to read other tokens: no KL, no weights, no gate."""
    tuned = with_token(base, tmp_path / "pad", "[PAD]")
    plain = changed(base, tmp_path / "plain", lambda model: model.h[1].mlp.c_fc.weight.mul_(1.1))
    found, without = run(base, tuned, text, blame=True), run(base, plain, text)
    assert [tensor.name for tensor in found.weights.most_changed()] == ["h.1.mlp.c_fc.weight"]
    assert found.blame.whole.value == pytest.approx(without.distributions.kl_ab.mean.value, rel=1e-4)
    assert "over the tokens that both have" in found.table(200)
    assert found.distributions.kl_ab.mean.value > without.distributions.kl_ab.mean.value
    assert found.activations.first_past.point == "h.1.mlp.c_fc"
    assert "B's vocabulary has 1 more, '[PAD]' (300)" in found.table(200)
    assert "A's vocabulary has 1 more, '[PAD]' (300)" in run(tuned, base, text).table(200)
    apart = run(base, with_token(base, tmp_path / "word", "thunder"), text)  # a token that the text does hold
    assert apart.distributions is None
    assert "distributions" in apart.compatibility.impossible


def test_random_models_are_compared_on_random_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tokenizer and text, compare still reports weights, activations and distributions."""
    from gpt2 import config as configs

    tiny = GPT2Config(vocab_size=61, n_positions=16, n_embd=12, n_layer=2, n_head=3)
    monkeypatch.setitem(configs.OFFICIAL_SIZES, "tiny", tiny)
    found = compare("random:tiny", "random:tiny:1", tokens=50)
    assert (found.words, found.text.name) == (None, "random ids")
    assert "bits per token" in found.table()
    assert "bits per byte" not in found.table()  # there are no bytes
    assert found.weights.tensors[0].distance == pytest.approx(2**0.5, rel=0.1)  # the embeddings are independent draws
    assert compare("random:tiny", "random:tiny", tokens=50).ok


def test_documents_are_parted_by_the_end_of_text(base: Path, tmp_path: Path) -> None:
    """Their mark was read as letters, in the models that were trained to see it as one token. With CRLF it is the same text."""
    parts = ["Enter GHOST.\n", "Who's there?\n", "Nay, answer me.\n"]
    (tmp_path / "lf.txt").write_bytes("<|endoftext|>\n".join(parts).encode())
    (tmp_path / "crlf.txt").write_bytes("<|endoftext|>\n".join(parts).replace("\n", "\r\n").encode())
    tokenizer, model = gpt2.load_tokenizer(str(base)), load(str(base)).double()
    ids = torch.tensor([i for part in parts for i in (*tokenizer.encode(part), tokenizer.eot)])[:32]
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(ids[None, :-1])[0], ids[1:])
    for name in ("lf", "crlf"):
        found = compare(str(base), str(base), on=str(tmp_path / f"{name}.txt"), tokens=len(ids))
        assert found.distributions.a.score.perplexity == pytest.approx(loss.exp().item(), rel=1e-4)
        said = " ".join(found.table().split())
        assert "3 documents, parted by '<|endoftext|>'" in said
        assert (r"line ends \r\n and \r are read as \n" in said) == (name == "crlf")
        shown = tokenizer.decode([i for i in ids[1:].tolist() if i != tokenizer.eot])
        assert found.distributions.a.score.bytes == len(shown.encode())


def test_models_in_memory_are_compared_as_their_files_are(
    base: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPT2 in place of its name, a list of texts, ids and a text in place of a model were tracebacks of no use."""
    model, tuned, where = load(str(base)), load(str(base)).train(), {"on": text, "tokens": 100}
    inject(tuned, r=2, alpha=4)
    adapted = list(tuned.named_parameters())
    with torch.no_grad():
        noisy(0.01)(tuned)
    found = gpt2.compare(model, tuned, **where)
    assert found.a.name == f"{base} in memory"
    assert f"gpt2.compare(a, b, on=&#39;{text}&#39;, tokens=100" in found.html()  # no command takes what is in memory
    assert found.text.name == text  # it is read by the tokenizer of what the models were loaded from
    saved = gpt2.save(merged(tuned), gpt2.load_tokenizer(str(base)), tmp_path)
    alone = run(base, saved, text, tokens=100)
    assert found.distributions.kl_ab.mean.value == pytest.approx(alone.distributions.kl_ab.mean.value, rel=1e-9)
    assert found.weights.total.distance == pytest.approx(alone.weights.total.distance, rel=1e-9)
    assert tuned.training
    assert [name for name, _ in tuned.named_parameters()] == [name for name, _ in adapted]  # it stays as it was
    assert gpt2.compare(model, model, base, **where).candidates[1].moved == 0
    for wrong, says in {
        ("To be, or not to be", model): "reads like a text; texts are read as on='my.jsonl'",
        (text, model): "reads like a text",
        ("twelfth-night", model): "reads like a text",
        (("one text", "another"), model): "was given tuple; texts are read as",
        (torch.arange(4), model): "was given Tensor; texts are read as on='my.jsonl', one {\"text\": ...} a line; ids of",
        (torch.nn.Linear(2, 2), model): "gpt2.checkpoint_of(module).load()",
    }.items():
        assert says in refusal(compare, *wrong)
    assert "on=list: give the name of a text, or of a file with it; texts" in refusal(compare, model, tuned, on=["one", "two"])
    asked, tokenizer = [], gpt2.load_tokenizer(str(base))  # which were looked for on the Hub, whatever `offline` said
    monkeypatch.setattr(opening, "load_tokenizer", lambda name, *, offline=False: (asked.append(offline), tokenizer)[1])
    kept, held = list[weakref.ref](), opening.held
    monkeypatch.setattr(opening, "held", lambda *a, **b: (side := held(*a, **b), kept.append(weakref.ref(side)))[0])
    for offline in (True, False):
        gpt2.compare(model, tuned, offline=offline, **where)
        assert {*asked} == {offline}
        asked.clear()
    gc.disable()
    try:
        gpt2.compare(model, tuned, **where)
    finally:
        gc.enable()
    assert [side() for side in kept[-2:]] == [None] * 2  # the copies of models stayed until Python looked for circles
