"""Fine-tune on questions about the plays, and measure the answers about plays that were held out.

    python tools/chat_table.py DIR [--init MODEL] [--set KEY=VALUE]...

Writes the pairs by rule into DIR: the first lines of four speeches in a row, by three or four speakers, called A, B, C and D
in the order in which they appear; and who of them says the line that comes next? Nobody chose them. The plays that the embedded
model has never seen give the questions; the others are trained on, four ways: not at all; the recipe `finetune-chat`; the same
without masking the questions; control: the same with the answers dealt out anew. Measured for each:

- loss: nats per token of the right answer and its end of text.
- choice: how often the right speaker has a higher mean log-probability than the others of the excerpt.
- answered: how often the greedy answer is the right speaker and the end of text, and nothing else.

Beside it, without a model: chance, the commonest answer (C), and the rule that the speaker before the last one speaks again. Ends
stdout with one JSON line.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev

import torch

import gpt2
from gpt2.data import Tokenizer, shakespeare
from gpt2.data.chat import ChatFormat
from gpt2.train.loop import train
from gpt2.train.recipe import read

LONGEST, SEED = 50, 0  # characters of a line
SPEECHES = 4  # in a question
WAYS = ("before", "masked", "plain", "shuffled")


def pairs(play: str) -> list[dict]:
    """Return the play's questions, answers, choices, and the answer of the rule, in order."""
    blocks = (block.partition(":\n") for block in shakespeare.play(play).strip().split("\n\n"))
    speeches = [(name, speech.strip().split("\n")[0]) for name, _, speech in blocks]
    made = []
    for at in range(SPEECHES, len(speeches)):
        before, (name, line) = speeches[at - SPEECHES : at], speeches[at]
        letters = dict(zip(dict.fromkeys(each for each, _ in before), "ABCD", strict=False))
        short = all(len(each) <= LONGEST for _, each in speeches[at - SPEECHES : at + 1])
        if short and len(letters) > 2 and name in letters and name != before[-1][0]:
            shown = "".join(f"{letters[each]}:\n{text}\n\n" for each, text in before)
            choices = [letters[name], *(letter for letter in letters.values() if letter != letters[name])]
            row = {"question": f"{shown}Who says this line?\n{line}", "answer": choices[0], "choices": choices}
            made.append(row | {"rule": letters[before[-2][0]]})
    return made


def write(folder: Path, chat: ChatFormat) -> list[dict]:
    """Write the files to train on; return the questions of the held-out plays."""
    rng = random.Random(SEED)
    made = {play: pairs(play) for play in shakespeare.plays()}
    held = [pair for play in shakespeare.HELD_OUT for pair in made.pop(play)]
    masked = [{"question": pair["question"], "answer": pair["answer"]} for each in made.values() for pair in each]
    answers = [pair["answer"] for pair in masked]
    rng.shuffle(answers)
    plain = [{"text": f"{chat.before}{pair['question']}{chat.after}{pair['answer']}"} for pair in masked]
    shuffled = [{"question": pair["question"], "answer": answer} for pair, answer in zip(masked, answers, strict=True)]
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in {"masked": masked, "plain": plain, "shuffled": shuffled}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    print(f"{len(masked):,} pairs to train on, {len(held):,} held out", file=sys.stderr)
    return held


def log_probabilities(model: gpt2.GPT2, ids: list[int], answers: Sequence[list[int]]) -> list[float]:
    """Return the mean log-probability per token of each answer after ``ids``."""
    rows = torch.tensor([[*ids, *answer, *[0] * (max(map(len, answers)) - len(answer))] for answer in answers])
    with torch.no_grad():
        log_p = model(rows)[:, len(ids) - 1 : -1].double().log_softmax(-1)
    own = log_p.gather(2, rows[:, len(ids) :, None])[..., 0]
    return [float(row[: len(answer)].mean()) for row, answer in zip(own, answers, strict=True)]


def measure(model: gpt2.GPT2, tokenizer: Tokenizer, chat: ChatFormat, questions: Iterable[dict]) -> dict[str, list[float]]:
    """Return loss, choice and answered of each question."""
    found: dict[str, list[float]] = {"loss": [], "choice": [], "answered": []}
    for row in questions:
        ids = chat.question(tokenizer, row["question"])
        answers = [[*tokenizer.encode(choice), tokenizer.eot] for choice in row["choices"]]
        scores = log_probabilities(model, ids, answers)
        found["loss"].append(-scores[0])
        found["choice"].append(scores[0] > max(scores[1:]))
        found["answered"].append(gpt2.generate(model, ids, 4, temperature=0, stop=tokenizer.eot)[len(ids) :] == answers[0])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--init", default="shakespeare-mini")
    parser.add_argument("--set", action="append", default=[], help="a key of the recipe")
    parser.add_argument("--only", default=",".join(WAYS))
    args = parser.parse_args()
    chat = ChatFormat.of_template(read("finetune-chat").data.prompt)
    questions = write(args.folder, chat)
    chance = fmean(1 / len(row["choices"]) for row in questions)
    rule = fmean(row["rule"] == row["answer"] for row in questions)
    commonest = fmean(row["answer"] == "C" for row in questions)
    print(f"{len(questions)} questions  chance {chance:.3f}  the commonest answer {commonest:.3f}  the rule {rule:.3f}")
    table = {}
    for way in args.only.split(","):
        model = args.init
        if way != "before":
            settings = [*args.set, f"data.path={args.folder / way}.jsonl"]
            settings += ["data.prompt=", "data.field=text"] if way == "plain" else []
            recipe = read("finetune-chat", settings)
            train(recipe, args.folder / "runs" / way, init=args.init)
            model = str(args.folder / "runs" / way / f"step-{recipe.steps}")
        found = measure(gpt2.load(model, dtype="float32"), gpt2.load_tokenizer(model), chat, questions)
        table[way] = {name: fmean(each) for name, each in found.items()}
        errors = {name: stdev(each) / len(each) ** 0.5 for name, each in found.items()}
        print(
            f"{way:10}" + "  ".join(f"{name} {value:.3f} ± {errors[name]:.3f}" for name, value in table[way].items()), flush=True
        )
    known = {"questions": len(questions), "chance": chance, "commonest": commonest, "rule": rule}
    print(json.dumps({**known, "init": args.init, **table}))


if __name__ == "__main__":
    main()
