"""How the files under `tensorflow/` were made: TensorFlow 2.21.0, its own Saver (v1, format V2), on 2026-11-21.

    python -m venv venv && venv/bin/pip install tensorflow-cpu==2.21.0 && venv/bin/python make_tensorflow.py

Every number is drawn from the tensor's name by `numbers`, so the tests know them without TensorFlow.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
HERE = Path(__file__).parent / "tensorflow"
SIZES = {"n_vocab": 61, "n_ctx": 16, "n_embd": 12, "n_head": 3, "n_layer": 2}


def numbers(name: str, shape: tuple[int, ...]) -> np.ndarray:
    count = int(np.prod(shape))
    return np.frombuffer(hashlib.shake_128(name.encode()).digest(count), np.int8).reshape(shape) / 64


def shapes(n_vocab: int, n_ctx: int, n_embd: int, n_head: int, n_layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Shapes of the variables of openai/gpt-2, src/model.py."""
    yield "model/wpe", (n_ctx, n_embd)
    yield "model/wte", (n_vocab, n_embd)
    for layer in range(n_layer):
        for name, inputs, outputs in (
            ("attn/c_attn", 1, 3),
            ("attn/c_proj", 1, 1),
            ("mlp/c_fc", 1, 4),
            ("mlp/c_proj", 4, 1),
        ):
            yield f"model/h{layer}/{name}/w", (1, inputs * n_embd, outputs * n_embd)
            yield f"model/h{layer}/{name}/b", (outputs * n_embd,)
        for name in ("ln_1", "ln_2"):
            yield f"model/h{layer}/{name}/g", (n_embd,)
            yield f"model/h{layer}/{name}/b", (n_embd,)
    yield "model/ln_f/g", (n_embd,)
    yield "model/ln_f/b", (n_embd,)


def variable(name: str, value: object, **kwargs: object) -> None:
    v1.get_variable(name, initializer=value, use_resource=False, **kwargs)


def gpt2() -> None:
    for name, shape in shapes(**SIZES):
        variable(name, numbers(name, shape).astype(np.float32))
    variable("global_step", np.int64(1000))


def slices() -> None:
    v1.get_variable("model/wte", shape=(10, 4), partitioner=v1.fixed_size_partitioner(3), use_resource=False)
    variable("model/wpe", np.ones(3, np.float32))


def save(build) -> None:
    out = Path(build.__name__)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    with tf.Graph().as_default():
        build()
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            v1.train.Saver().save(session, f"{out}/model.ckpt", write_meta_graph=False)


if __name__ == "__main__":
    v1.disable_eager_execution()
    HERE.mkdir(exist_ok=True)
    os.chdir(HERE)  # else `checkpoint` would hold an absolute path
    save(gpt2)
    Path("gpt2/hparams.json").write_text(json.dumps(SIZES))
    save(slices)
