"""A GPT-2 in NumPy: heads split in the weights and kept apart, every product an einsum. A program; imports nothing of ours.

    python numpy_port.py IDS.npy OUT.npz WEIGHTS.npz [--faults LINE] [--level L] [--dtype D] [--compute D] [--foreign SEED]

WEIGHTS.npz holds the checkpoint's tensors by name, and `sizes`: n_head and n_layer. LINE is in the words of
tests/support/faulty/meanings.toml.
"""

import argparse
import math

import numpy as np

EPS = {"eps-1e-6": 1e-6, "eps-1e-12": 1e-12, "eps-1e-3": 1e-3, "eps-none": 0.0}
AXES = {"softmax-queries": 2, "softmax-heads": 1}
erf = np.vectorize(math.erf, otypes=[float])


def parse(line):
    words = (word.partition("@") for word in line.split())
    return {name: [site for site in sites.split(",") if site] for name, _, sites in words}


class Port:
    def __init__(self, weights, faults, compute, kept):
        self.heads, self.layers = (int(n) for n in weights["sizes"])
        self.faults, self.dtype, self.kept = faults, compute, kept
        self.right = {name: w.astype(compute) for name, w in weights.items() if name != "sizes"}
        self.w = self.read(dict(self.right))

    def has(self, name, place=""):
        """Whether a fault holds at a place: block `1`, norm `1.ln_2`, the final norm `f`, or the whole model."""
        sites = self.faults.get(name)
        return sites is not None and (not sites or any(place == s or place.startswith(s + ".") for s in sites))

    def any(self, names, place):
        return next((name for name in names if self.has(name, place)), None)

    # The file, read with its author's mistakes

    def read(self, w):
        for layer in range(self.layers):
            self.read_block(w, layer, f"h.{layer}.", f"h.{(layer + 1) % self.layers}.")
        d = w["wte.weight"].shape[1]
        if self.has("wpe-rolled"):
            w["wpe.weight"] = np.roll(w["wpe.weight"], 1, axis=0)
        if self.has("wrong-tokens"):
            w["wte.weight"] = np.roll(w["wte.weight"], 1, axis=0)
        if self.has("not-loaded-ln_f"):
            w["ln_f.weight"], w["ln_f.bias"] = np.ones(d, self.dtype), np.zeros(d, self.dtype)
        if self.has("fp16-on-the-way"):
            w = {name: t.astype(np.float16).astype(self.dtype) for name, t in w.items()}
        if self.has("bf16-on-the-way"):
            w = {name: bfloat16(t) for name, t in w.items()}
        return w

    def read_block(self, w, layer, at, other):
        right, site = self.right, str(layer)
        c_attn, c_proj, c_fc = at + "attn.c_attn.", at + "attn.c_proj.", at + "mlp.c_fc."
        if self.has("transposed-proj", site):
            w[c_proj + "weight"] = right[c_proj + "weight"].T
        if self.has("transposed-q", site):
            q, k, v = np.split(right[c_attn + "weight"], 3, axis=1)
            w[c_attn + "weight"] = np.concatenate([q.T, k, v], axis=1)
        if self.has("viewed-fc", site):
            fc = right[c_fc + "weight"]
            w[c_fc + "weight"] = fc.reshape(fc.shape[::-1]).T
        for order in ("kqv", "vkq", "kvq"):
            if self.has(f"qkv-{order}", site):
                for leaf in ("weight", "bias"):
                    parts = dict(zip("qkv", np.split(right[c_attn + leaf], 3, axis=-1), strict=True))
                    w[c_attn + leaf] = np.concatenate([parts[letter] for letter in order], axis=-1)
        if self.has("qkv-cut", site):
            fused = right[c_attn + "weight"]
            w[c_attn + "weight"] = np.concatenate([*fused.reshape(3, len(fused), len(fused))], axis=1)
        for name, axes in (("head-interleaved", (self.heads, 3, -1)), ("head-columns", (3, -1, self.heads))):
            if self.has(name, site):
                for leaf in ("weight", "bias"):
                    t = right[c_attn + leaf]
                    cut = t.reshape(*t.shape[:-1], *axes)
                    cut = cut.swapaxes(-3, -2) if name == "head-interleaved" else cut.swapaxes(-2, -1)
                    w[c_attn + leaf] = cut.reshape(t.shape)
        if self.has("no-qkv-bias", site) or self.has("not-loaded-biases", site):
            w[c_attn + "bias"] = np.zeros_like(w[c_attn + "bias"])
        if self.has("no-out-bias", site):
            w[c_proj + "bias"] = np.zeros_like(w[c_proj + "bias"])
        if self.has("no-fc-bias", site):
            w[c_fc + "bias"] = np.zeros_like(w[c_fc + "bias"])
        if self.has("not-loaded-ln_2", site):
            w[at + "ln_2.weight"], w[at + "ln_2.bias"] = np.ones_like(w[at + "ln_2.weight"]), np.zeros_like(w[at + "ln_2.bias"])
        if self.has("wrong-bias", site):
            w[c_proj + "bias"] = right[at + "mlp.c_proj.bias"]
        if self.has("gamma-beta", site):
            w[at + "ln_1.weight"], w[at + "ln_1.bias"] = right[at + "ln_1.bias"], right[at + "ln_1.weight"]
        for leaf in ("weight", "bias"):
            if self.has("wrong-fc", site):
                w[c_fc + leaf] = right[other + "mlp.c_fc." + leaf]
            if self.has("wrong-ln_1", site) or self.has("norm-weights-swapped", site):
                w[f"{at}ln_1.{leaf}"] = right[f"{at}ln_2.{leaf}"]
            if self.has("norm-weights-swapped", site):
                w[f"{at}ln_2.{leaf}"] = right[f"{at}ln_1.{leaf}"]
        if self.has("bf16-fc", site):
            w[c_fc + "weight"] = bfloat16(w[c_fc + "weight"])
        source = "h.0." if self.has("wrong-all-first", site) else f"h.{self.layers - 1 - layer}."
        if self.has("wrong-all-first", site) or self.has("weights-reversed", site):
            w |= {name: right[source + name.removeprefix(at)] for name in right if name.startswith(at)}

    # The forward pass

    def norm(self, x, name, place):
        weight, bias = self.w[name + ".weight"], self.w[name + ".bias"]
        if self.has("not-normalising", place):
            return x * weight + bias
        if self.has("rmsnorm", place) or self.has("rmsnorm-no-bias", place):
            z = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight
            return z if self.has("rmsnorm-no-bias", place) else z + bias
        axis = 1 if self.has("norm-over-tokens", place) else -1
        centred = x - x.mean(axis, keepdims=True)
        unbiased = self.has("unbiased", place) or self.has("annotated", place)
        variance = (centred**2).sum(axis, keepdims=True) / (x.shape[axis] - unbiased)
        if self.has("annotated", place):
            z = centred / (np.sqrt(variance) + 1e-6)
        elif self.has("eps-outside", place):
            z = centred / (np.sqrt(variance) + 1e-5)
        else:
            z = centred / np.sqrt(variance + EPS.get(self.any(EPS, place), 1e-5))
        if self.has("no-affine", place):
            return z
        return z * weight if self.has("no-norm-bias", place) else z * weight + bias

    def gelu(self, x, place):
        if self.has("gelu-erf", place):
            return x * 0.5 * (1 + erf(x / math.sqrt(2)).astype(x.dtype))
        if self.has("gelu-quick", place) or self.has("gelu-silu", place):
            return x / (1 + np.exp(-(1.702 if self.has("gelu-quick", place) else 1.0) * x))
        if self.has("gelu-relu", place):
            return np.maximum(x, 0)
        if self.has("gelu-none", place):
            return x
        return 0.5 * x * (1 + np.tanh(np.asarray(math.sqrt(2 / math.pi), x.dtype) * (x + 0.044715 * x**3)))

    def attention(self, x, layer):
        at, place, (b, t, d), h = f"h.{layer}.attn.", str(layer), x.shape, self.heads
        keep = self.keeper(f"blocks/{layer}/attention/")
        w = self.w[at + "c_attn.weight"].reshape(d, 3, h, d // h)
        bias = self.w[at + "c_attn.bias"].reshape(3, h, d // h)
        q, k, v = (np.einsum("btd,dhk->bthk", x, w[:, n]) + bias[n] for n in range(3))  # (B, T, H, K)
        v = k if self.has("value-from-key", place) else q if self.has("value-from-query", place) else v
        v = x.reshape(b, t, h, -1) if self.has("value-identity", place) else v
        if self.has("heads-split-wrongly", place):
            q, k, v = (part.reshape(b, h, t, -1).swapaxes(1, 2) for part in (q, k, v))
        keep("q", q), keep("k", k), keep("v", v)
        scale = {"scale-missing": 1.0, "scale-by-width": math.sqrt(d), "scale-by-heads": math.sqrt(h), "scale-twice": d / h}
        scale |= {"scale-by-8": 8.0}
        divisor = scale.get(self.any(scale, place), math.sqrt(d // h))
        divisor *= layer + 1 if self.has("scale-inverse-layer", place) else 1
        scores = np.einsum("bthk,bshk->bhts", q, k) / np.asarray(divisor, x.dtype)
        keep("scores", scores)
        ahead = -1 if self.has("mask-strict", place) else 1 if self.has("mask-off-by-one", place) else 0
        allowed = np.tri(t, k=t if self.has("mask-missing", place) else ahead, dtype=bool)
        if self.has("mask-multiplied", place):
            masked = scores * allowed
        elif self.has("softmax-missing", place):
            masked = np.where(allowed, scores, 0)
        else:
            masked = np.where(allowed, scores, np.asarray(-1e9, x.dtype))
        axis = AXES.get(self.any(AXES, place), 3)
        raised = np.exp(masked - masked.max(axis, keepdims=True))
        weights = masked if self.has("softmax-missing", place) else raised / raised.sum(axis, keepdims=True)
        keep("weights", weights)
        y = np.einsum("bhts,bshk->bthk", weights, v)
        keep("mixed", y)
        y = y.swapaxes(1, 2).reshape(b, t, d) if self.has("heads-merged-wrongly", place) else y.reshape(b, t, d)
        if not self.has("output-projection-missing", place):
            y = y @ self.w[at + "c_proj.weight"] + self.w[at + "c_proj.bias"]
        keep("out", y)
        return y

    def feed_forward(self, x, layer):
        at, keep = f"h.{layer}.mlp.", self.keeper(f"blocks/{layer}/mlp/")
        up = np.einsum("btd,df->btf", x, self.w[at + "c_fc.weight"]) + self.w[at + "c_fc.bias"]
        act = self.gelu(up, str(layer))
        down = np.einsum("btf,fd->btd", act, self.w[at + "c_proj.weight"]) + self.w[at + "c_proj.bias"]
        keep("up", up), keep("act", act), keep("down", down)
        return down

    def block(self, x, layer):
        site, keep = str(layer), self.keeper(f"blocks/{layer}/")

        def has(name):
            return self.has(name, site)

        def ln(name, x):
            y = self.norm(x, f"h.{layer}.{name}", f"{layer}.{name}")
            keep(name, y)
            return y

        first, second = ("ln_2", "ln_1") if has("norms-swapped") else ("ln_1", "ln_2")
        if has("post-norm"):
            x = ln(first, x + self.attention(x, layer))
            return ln(second, x + self.feed_forward(x, layer))
        y = x if has("ln_1-missing") else ln(first, x)
        branch = self.attention(y, layer)
        if has("extra-norm-branch"):
            branch = plain_norm(branch)
        if has("parallel"):
            return x + branch + self.feed_forward(ln(second, x), layer)
        kept = y if has("residual-from-normed") else x
        mid = branch if has("residual-missing") or has("residual-missing-attn") else kept + branch
        keep("mid", mid)
        y = mid if has("ln_2-missing") else ln(second, mid)
        branch = self.feed_forward(y, layer)
        branch = branch * 0.5 if has("residual-halved") else branch
        kept = y if has("residual-from-normed") or has("residual-from-normed-mlp") else mid
        x = branch if has("residual-missing") or has("residual-missing-mlp") else kept + branch
        return plain_norm(x) if has("extra-norm-end") else x

    def positions(self, t, d):
        if self.has("position-sinusoidal"):
            angle = np.arange(t)[:, None] / 10000 ** (np.arange(0, d, 2) / d)
            return np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(t, d).astype(self.dtype)
        start = 1 if self.has("position-offset") else 0
        return self.w["wpe.weight"][start : start + t]

    def order(self):
        n, order = self.layers, list(range(self.layers))
        if self.has("layer-reversed"):
            order.reverse()
        if self.has("layer-swapped"):
            order[-2:] = [n - 1, n - 2]
        missing = [n for n in order if self.has("layer-missing", str(n))]
        again = [n for n in order if self.has("layer-repeated", str(n))]
        return [one for n in order if n not in missing for one in [n] * (1 + (n in again))]

    def forward(self, ids):
        keep = self.keeper("")
        x = self.w["wte.weight"][ids]
        d = x.shape[-1]
        if self.has("embedding-scaled"):
            x = x * np.asarray(math.sqrt(d), x.dtype)
        if not self.has("position-missing"):
            x = x + self.positions(ids.shape[1], d)
        x = plain_norm(x) if self.has("extra-norm-embed") else x
        keep("embedded", x)
        for number, layer in enumerate(self.order()):
            x = self.block(x, layer)
            keep(f"stream/{number}", x)
        if not self.has("final-norm-missing"):
            x = self.norm(x, "ln_f", "f")
            keep("final", x)
        head = self.w["wte.weight"]
        if self.has("untied-head"):
            head = (0.02 * np.sin(np.arange(head.size))).reshape(head.shape).astype(self.dtype)
        logits = np.einsum("btd,vd->btv", x, head)
        logits = logits / np.asarray(math.sqrt(d), x.dtype) if self.has("logits-scaled") else logits
        if self.has("logits-softmaxed") or self.has("logits-log-softmaxed"):
            logits = logits - logits.max(-1, keepdims=True)
            logits = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            logits = np.exp(logits) if self.has("logits-softmaxed") else logits
        keep("logits", logits)

    def keeper(self, prefix):
        def keep(name, value):
            path = prefix + name
            while path in self.kept:  # a block that runs twice
                path += "'"
            self.kept[path] = value

        return keep


def plain_norm(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def bfloat16(x):
    """Round to bfloat16 and back: to nearest, ties to even."""
    bits = x.astype(np.float32).view(np.uint32)
    bits = bits + 0x7FFF + ((bits >> 16) & 1) & 0xFFFF0000
    return bits.view(np.float32).astype(x.dtype)


def foreign(shape, width, dtype, seed):
    """Arrays that a dump may hold beside the intermediates of the model."""
    draw, (b, t) = np.random.default_rng(seed), shape
    return {
        "mask": np.where(np.tri(t, dtype=bool), 0, -1e9).astype(dtype),
        "visible": np.tri(t, dtype=np.int32),
        "positions": np.arange(t, dtype=np.int64),
        "noise": draw.normal(size=(b, t, width)).astype(dtype),
        "uniform": draw.uniform(size=(b, t, t)).astype(dtype),
        "seen": draw.integers(0, 9, (b, t)).astype(np.int32),
        "loss": np.asarray(draw.normal(), dtype),
    }


def main(argv=None):
    parser = argparse.ArgumentParser()
    for name in ("ids", "out", "weights"):
        parser.add_argument(name)
    parser.add_argument("--faults", default="")
    parser.add_argument("--level", default="full", choices=("full", "block", "logits"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compute", default="float64")
    parser.add_argument("--foreign", type=int, default=-1)
    given = parser.parse_args(argv)
    ids, weights, kept = np.atleast_2d(np.load(given.ids)), dict(np.load(given.weights)), {}
    Port(weights, parse(given.faults), np.dtype(given.compute), kept).forward(ids)
    starts = {"full": "", "block": ("embedded", "stream/", "logits"), "logits": "logits"}[given.level]
    with np.errstate(over="ignore"):
        dump = {name: value.astype(given.dtype) for name, value in kept.items() if name.startswith(starts)}
        if given.foreign >= 0:
            dump |= foreign(ids.shape, weights["wte.weight"].shape[1], given.dtype, given.foreign)
    np.savez(given.out, input_ids=ids, **dump)


if __name__ == "__main__":
    main()
