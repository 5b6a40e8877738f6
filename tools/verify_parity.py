"""Is our GPT-2 transformers' GPT-2? The question put plainly, in a script to read and copy.

    python tools/verify_parity.py [MODEL]              a few dozen lines that show what `gpt2 verify` does at every point
    python tools/verify_parity.py [MODEL] --controls   ten broken models through `gpt2 verify` itself: each must be refused

MODEL is shakespeare-mini, gpt2, org/name or a directory. Ends stdout with one JSON line; exits 1 if it does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import gpt2
from gpt2.checkpoint.hub import resolve
from gpt2.checkpoint.loading import load_path
from gpt2.measure.rounding import rounding_noise
from gpt2.model import GPT2, eager_attention


def parity(path: Path) -> dict[str, float]:
    """Worst differences between our model and transformers' on the files in ``path``."""
    from transformers import GPT2LMHeadModel
    from transformers.utils import logging

    logging.disable_progress_bar()

    def both(dtype: torch.dtype) -> tuple[GPT2, torch.nn.Module]:
        return load_path(path, dtype=dtype), GPT2LMHeadModel.from_pretrained(path, dtype=dtype).eval()

    ours, theirs = both(torch.float64)
    torch.manual_seed(0)
    ids = torch.randint(ours.config.vocab_size, (1, ours.config.n_positions))

    # 1. The same function? In float64 rounding is 1e-15 and any bug is larger than 1e-10.
    with torch.no_grad():
        exact = theirs(ids).logits
        scale = exact.square().mean().sqrt()
        mapping = ((ours(ids) - exact).abs().max() / scale).item()
        cache, pieces = ours.new_cache(), ids.split([ids.size(1) // 2, 1, 1, ids.size(1) - ids.size(1) // 2 - 2], dim=1)
        cached = ((torch.cat([ours(piece, cache=cache) for piece in pieces], dim=1) - exact).abs().max() / scale).item()

    # 2. The same gradients? The loss goes through both models, and each parameter's gradient is compared by name.
    x, y = ids[:, :33][:, :-1], ids[:, :33][:, 1:]
    F.cross_entropy(ours(x).flatten(0, 1), y.flatten()).backward()
    F.cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten()).backward()
    expected = {name.removeprefix("transformer."): p.grad for name, p in theirs.named_parameters()}
    gradients = max(((p.grad - expected[name]).norm() / expected[name].norm()).item() for name, p in ours.named_parameters())

    # 3. As precise? In float32 ours strays from the float64 run, at most twice as far as random rounding errors explain.
    with torch.no_grad(), rounding_noise(torch.float32):
        explained = (theirs(ids).logits - exact).norm().item()
    ours, theirs = both(torch.float32)
    with torch.no_grad():
        our_error = (ours(ids) - exact).norm().item()

    # 4. The same text?
    prompt = ids[:, :8]
    settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
    theirs.generation_config.eos_token_id = None
    text = int((gpt2.generate(ours, prompt, 24, temperature=0) != theirs.generate(prompt, **settings)).sum())
    return {"logits": mapping, "cached": cached, "gradients": gradients, "rounding_ratio": our_error / explained, "text": text}


# Ten ways to be almost right. Each breaks a loaded model in place.


def erf_gelu(model: GPT2) -> None:
    for block in model.h:
        block.mlp.activation = F.gelu


def eps_1e6(model: GPT2) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-6


def untransposed_square_c_proj(model: GPT2) -> None:
    weight = model.h[-1].attn.c_proj.weight
    weight.data = weight.data.T.contiguous()


def q_and_k_swapped(model: GPT2) -> None:
    def swapped(c_attn: torch.nn.Module, args: tuple, output: Tensor) -> Tensor:
        q, k, v = output.chunk(3, dim=-1)
        return torch.cat((k, q, v), dim=-1)

    for block in model.h:
        block.attn.c_attn.register_forward_hook(swapped)


def positions_off_by_one(model: GPT2) -> None:
    model.wpe.forward = lambda positions: F.embedding((positions + 1).clamp(max=model.wpe.num_embeddings - 1), model.wpe.weight)


def untied_head(model: GPT2) -> None:
    noise = torch.randn(model.wte.weight.shape, generator=torch.Generator().manual_seed(0)).to(model.wte.weight.dtype)
    head = model.wte.weight.detach() + 1e-4 * noise
    model.head = lambda hidden: F.linear(hidden, head.to(hidden.dtype))


def no_final_norm(model: GPT2) -> None:
    model.ln_f.forward = lambda x: x


def missing_scale(model: GPT2) -> None:
    for block in model.h:
        block.attn.scale = 1.0


def mask_one_too_far(model: GPT2) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float) -> Tensor:
        sees = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril(k.size(-2) - q.size(-2) + 1)
        return eager_attention(q, k, v, sees, scale, dropout)

    model.use_attention(attend)


def one_bit_flipped(model: GPT2) -> None:
    weight = model.h[0].mlp.c_fc.weight
    bits = weight.data.clone().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()])
    bits[0, 0] ^= 1
    weight.data = bits.view(weight.dtype)


CONTROLS: dict[str, Callable[[GPT2], None]] = {
    "erf GELU": erf_gelu,
    "eps 1e-6": eps_1e6,
    "one untransposed square c_proj": untransposed_square_c_proj,
    "q and k swapped": q_and_k_swapped,
    "positions off by one": positions_off_by_one,
    "untied head": untied_head,
    "no final LN": no_final_norm,
    "missing scale": missing_scale,
    "mask includes the future by one": mask_one_too_far,
    "one bit flipped in one weight": one_bit_flipped,
}


def refused(name: str, path: Path) -> gpt2.Report:
    """``gpt2 verify`` of a model that control ``name`` has broken."""

    def build(path: Path, dtype: torch.dtype | None) -> GPT2:
        model = load_path(path, dtype=dtype)
        CONTROLS[name](model)
        return model

    return gpt2.verify(str(path), build=build)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="shakespeare-mini")
    parser.add_argument("--controls", action="store_true", help="ten broken models, each of which must be refused")
    args = parser.parse_args()
    try:
        path = resolve(args.model).path
    except gpt2.InputError as error:
        print(error, file=sys.stderr)
        return 2
    if args.controls:
        reports = {name: refused(name, path) for name in CONTROLS}
        for name, report in reports.items():
            first = report.first_divergence
            print(f"{name:34} {'ACCEPTED' if report.ok else 'refused'}  {f'{first.name}: {first.error:.1e}' if first else ''}")
        ok = not any(report.ok for report in reports.values())
        result = {name: report.first_divergence.name if report.first_divergence else None for name, report in reports.items()}
    else:
        result = parity(path)
        for name, value in result.items():
            print(f"{name:16} {value:.3g}")
        exact = max(result["logits"], result["cached"], result["gradients"])
        ok = exact <= 1e-10 and result["rounding_ratio"] <= 2 and result["text"] == 0
    print(json.dumps({"model": args.model, "ok": ok, **result}))
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
