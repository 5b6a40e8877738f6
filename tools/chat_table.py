"""Fine-tune on questions about the plays, and measure the answers about plays that were held out.

    python tools/chat_table.py DIR [--init MODEL] [--questions 400] [--set KEY=VALUE]...

Writes the pairs by rule into DIR: a line of a speech, and which line follows it? Nobody chose them. The plays that the embedded
model has never seen give the questions; the others are trained on, four ways: not at all; the recipe `finetune-chat`; the same
without masking the questions; control: the same with the answers dealt out anew. Measured for each:

- loss: nats per token of the right answer and its end of text.
- choice: how often the right line has a higher mean log-probability than three others of its play, drawn at random; chance: 1/4.
- ended: how often a greedy answer of at most 24 tokens ends with the end of text, and is one line.

Ends stdout with one JSON line.
"""

import argparse
import json
import math
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

import gpt2
from gpt2.data import Tokenizer, shakespeare
from gpt2.data.chat import ChatFormat
from gpt2.train.loop import train
from gpt2.train.recipe import read

LONGEST, SEED = 60, 0  # characters of a line
WAYS = ("before", "masked", "plain", "shuffled")


def pairs(play: str, rng: random.Random) -> list[dict]:
    """Return the play's questions, answers and choices, in order; no line is used twice."""
    speeches = [block.partition(":\n")[2].strip().split("\n") for block in shakespeare.play(play).strip().split("\n\n")]
    lines = [line for speech in speeches for line in speech if len(line) <= LONGEST]
    made = []
    for speech in speeches:
        for line, following in zip(speech[::2], speech[1::2], strict=False):
            if max(len(line), len(following)) <= LONGEST:
                others = [other for other in rng.sample(lines, 8) if other != following][:3]
                made.append({"question": f"Which line follows?\n{line}", "answer": following, "choices": [following, *others]})
    return made


def write(folder: Path, chat: ChatFormat) -> list[dict]:
    """Write the files to train on; return the questions of the held-out plays."""
    rng = random.Random(SEED)
    made = {play: pairs(play, rng) for play in shakespeare.plays()}
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


def measure(model: gpt2.GPT2, tokenizer: Tokenizer, chat: ChatFormat, questions: Iterable[dict]) -> dict[str, float]:
    losses, right, ended = [], [], []
    for row in questions:
        ids = chat.question(tokenizer, row["question"])
        answers = [[*tokenizer.encode(choice), tokenizer.eot] for choice in row["choices"]]
        scores = log_probabilities(model, ids, answers)
        losses += [-scores[0]] * len(answers[0])  # a mean over tokens
        right.append(scores[0] > max(scores[1:]))
        new = gpt2.generate(model, ids, 24, temperature=0, stop=tokenizer.eot)[len(ids) :]
        ended.append(new[-1] == tokenizer.eot and "\n" not in tokenizer.decode(new))
    found = {"loss": losses, "choice": right, "ended": ended}
    return {name: sum(each) / len(each) for name, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--init", default="shakespeare-mini")
    parser.add_argument("--questions", type=int, default=400, help="of the held-out plays, drawn with a seed")
    parser.add_argument("--set", action="append", default=[], help="a key of the recipe")
    parser.add_argument("--only", default=",".join(WAYS))
    args = parser.parse_args()
    chat = ChatFormat.of_template(read("finetune-chat").data.prompt)
    questions = random.Random(SEED).sample(write(args.folder, chat), args.questions)
    table = {}
    for way in args.only.split(","):
        model = args.init
        if way != "before":
            settings = [*args.set, f"data.path={args.folder / way}.jsonl"]
            settings += ["data.prompt=", "data.field=text"] if way == "plain" else []
            recipe = read("finetune-chat", settings)
            train(recipe, args.folder / "runs" / way, init=args.init)
            model = str(args.folder / "runs" / way / f"step-{recipe.steps}")
        table[way] = measure(gpt2.load(model, dtype="float32"), gpt2.load_tokenizer(model), chat, questions)
        error = math.sqrt(table[way]["choice"] * (1 - table[way]["choice"]) / len(questions))
        print(f"{way:10}" + "  ".join(f"{name} {value:.3f}" for name, value in table[way].items()) + f"  (choice ± {error:.3f})")
    print(json.dumps({"questions": len(questions), "init": args.init, **table}))


if __name__ == "__main__":
    main()
