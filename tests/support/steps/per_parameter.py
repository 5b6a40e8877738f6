"""Style 6: loops over parameters by name, state in a dictionary of dictionaries, updates of `.data`; for the port `kv_joint`."""

import torch

from support.steps.faults import words

WORDS = words("""
    not-zeroed sgd amsgrad decay-without-rate biases-left-out smoothed temperature clipped-by-maximum rate-doubled
    last-micro-batch rolled embedding-detached decay-missing eps-1e-6 moments-kept
""")
COMBINED = ("not-zeroed betas-default", "smoothed unclipped decay-missing", "rolled clipped-by-maximum rate-doubled")
MEMORY = {}


def make(has, s):
    def make_step(net):
        memory = MEMORY if "moments-kept" in has else {}
        clock = {"t": 0}
        if "embedding-detached" in has:
            table = next(m for m in net.modules() if isinstance(m, torch.nn.Embedding) and m.num_embeddings == 67)
            table.register_forward_hook(lambda m, args, out: out.detach())

        def loss_of(x, y):
            out = net(x)
            out = out[0] if isinstance(out, tuple) else out
            if "temperature" in has:
                out = out / 1.3
            if "rolled" in has:
                y = torch.cat((x[:, 1:], x[:, 0:1]), 1)
            total, count = 0.0, 0
            for row, answers in zip(out, y, strict=True):
                p = torch.log_softmax(row, dim=1)
                keep = answers >= 0
                good = p[torch.arange(len(answers)), answers.clamp(min=0)]
                if "smoothed" in has:
                    good = 0.9 * good + 0.1 * p.mean(1)
                total = total - good[keep].sum()
                count = count + int(keep.sum())
            return total / count

        def step(x, y):
            parts = list(zip(torch.chunk(x, s.grad_accum), torch.chunk(y, s.grad_accum), strict=True))
            value = 0.0
            for xb, yb in parts:
                if "last-micro-batch" in has:
                    for p in net.parameters():
                        p.grad = None
                loss = loss_of(xb, yb) / len(parts)
                loss.backward()
                value += loss.item()
            size = 0.0
            for p in net.parameters():
                if "clipped-by-maximum" in has:
                    size = max(size, float(p.grad.abs().max()) * 30)
                else:
                    size += float((p.grad**2).sum())
            size = size if "clipped-by-maximum" in has else size**0.5
            clock["t"] += 1
            lr = s.lr * (2 if "rate-doubled" in has else 1)
            b2 = 0.999 if "betas-default" in has else s.beta2
            for name, p in net.named_parameters():
                g = p.grad.data
                if s.clip and size > s.clip and "unclipped" not in has:
                    g.mul_(s.clip / (size + 1e-6))
                if "biases-left-out" in has and name.endswith("bias"):
                    continue
                if "sgd" in has:
                    p.data.sub_(lr * g)
                    continue
                own = memory.setdefault(
                    name, {"first": torch.zeros_like(g), "second": torch.zeros_like(g), "top": torch.zeros_like(g)}
                )
                own["first"] = own["first"].to(g) * s.beta1 + g * (1 - s.beta1)
                own["second"] = own["second"].to(g) * b2 + g**2 * (1 - b2)
                own["top"] = torch.maximum(own["top"].to(g), own["second"])
                second = own["top"] if "amsgrad" in has else own["second"]
                if p.dim() > 1 and "decay-missing" not in has:
                    p.data.sub_((1.0 if "decay-without-rate" in has else lr) * s.weight_decay * p.data)
                change = (own["first"] / (1 - s.beta1 ** clock["t"])) / (
                    (second / (1 - b2 ** clock["t"])).sqrt() + (1e-6 if "eps-1e-6" in has else 1e-8)
                )
                p.data.sub_(lr * change)
            if "not-zeroed" not in has:
                for p in net.parameters():
                    p.grad = None
            return value

        return step

    return make_step
