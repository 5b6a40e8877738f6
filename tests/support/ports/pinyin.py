"""GPT-2 jiaocheng: cong ling kaishi."""

import math

import torch
from torch import nn

from support.ports import put


class GuiYiHua(nn.Module):
    def __init__(self, kuandu):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(kuandu))
        self.shift = nn.Parameter(torch.zeros(kuandu))

    def forward(self, x):
        junzhi = x.mean(dim=-1, keepdim=True)
        fangcha = x.var(dim=-1, keepdim=True, unbiased=False)
        return self.scale * (x - junzhi) / torch.sqrt(fangcha + 1e-5) + self.shift


class DuoTouZhuYiLi(nn.Module):
    def __init__(self, kuandu, toushu):
        super().__init__()
        self.toushu = toushu
        self.touwei = kuandu // toushu
        self.chaxun = nn.Linear(kuandu, kuandu)
        self.jian = nn.Linear(kuandu, kuandu)
        self.zhi = nn.Linear(kuandu, kuandu)
        self.shuchu = nn.Linear(kuandu, kuandu)
        self.suofang = 1 / math.sqrt(self.touwei)

    def forward(self, x):
        b, n, d = x.shape
        q = (self.chaxun(x) * self.suofang).view(b, n, self.toushu, self.touwei)
        k = self.jian(x).view(b, n, self.toushu, self.touwei)
        v = self.zhi(x).view(b, n, self.toushu, self.touwei)
        fenshu = torch.einsum("bihd,bjhd->bhij", q, k)
        yanma = torch.triu(torch.ones(n, n, device=x.device), 1) * -1e30
        quanzhong = torch.exp(torch.log_softmax(fenshu + yanma, dim=-1))
        return self.shuchu(torch.einsum("bhij,bjhd->bihd", quanzhong, v).reshape(b, n, d))


class QianKui(nn.Module):
    def __init__(self, kuandu, zhongjian):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(kuandu, zhongjian), nn.GELU(approximate="tanh"), nn.Linear(zhongjian, kuandu))

    def forward(self, x):
        return self.layers(x)


class BianMaKuai(nn.Module):
    def __init__(self, kuandu, toushu, zhongjian, diuqi=0.1):
        super().__init__()
        self.zhuyili = DuoTouZhuYiLi(kuandu, toushu)
        self.qiankui = QianKui(kuandu, zhongjian)
        self.guiyi2 = GuiYiHua(kuandu)
        self.guiyi1 = GuiYiHua(kuandu)
        self.diuqi = nn.Dropout(diuqi)

    def forward(self, x):
        jiejing = x
        x = jiejing + self.diuqi(self.zhuyili(self.guiyi1(x)))
        jiejing = x
        return jiejing + self.diuqi(self.qiankui(self.guiyi2(x)))


class YuYanMoXing(nn.Module):
    def __init__(self, cihui, changdu, kuandu, cengshu, toushu, zhongjian):
        super().__init__()
        self.weizhi = nn.Parameter(torch.zeros(1, changdu, kuandu))
        self.ci = nn.Embedding(cihui, kuandu)
        self.ceng = nn.Sequential(*[BianMaKuai(kuandu, toushu, zhongjian) for _ in range(cengshu)])
        self.zuihou = GuiYiHua(kuandu)
        self.tou = nn.Linear(kuandu, cihui, bias=False)

    def forward(self, x):
        return self.tou(self.zuihou(self.ceng(self.ci(x) + self.weizhi[:, : x.shape[1], :])))


def build(config):
    return YuYanMoXing(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head, config.inner)


def fill(module, state):
    put(module, state, {"ci": "wte", "weizhi": "wpe.weight", "zuihou": "ln_f", "tou": "head"})
    for i, kuai in enumerate(module.ceng):
        put(kuai, state, {"guiyi1": "ln_1", "guiyi2": "ln_2", "zhuyili.shuchu": "attn.c_proj.T"}, f"h.{i}.")
        put(kuai.zhuyili, state, {"chaxun": "q.T", "jian": "k.T", "zhi": "v.T"}, f"h.{i}.")
        put(kuai.qiankui.layers, state, {"0": "mlp.c_fc.T", "2": "mlp.c_proj.T"}, f"h.{i}.")
