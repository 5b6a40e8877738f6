"""GPT-2 jiaocheng: cong ling kaishi."""

import torch
from torch import nn

from support.ports.parts import GPT, Block, fill

__all__ = ["build", "fill"]


class GuiYiHua(nn.Module):
    def __init__(self, kuandu):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(kuandu)), nn.Parameter(torch.zeros(kuandu))

    def forward(self, x):
        fangcha = x.var(dim=-1, keepdim=True, unbiased=False)
        return self.scale * (x - x.mean(dim=-1, keepdim=True)) / torch.sqrt(fangcha + 1e-5) + self.shift


class BianMaKuai(Block):
    NORM, ORDER = GuiYiHua, "q k v out up down norm_2 norm_1"
    NAMES = "q chaxun k jian v zhi out shuchu norm_1 guiyi1 norm_2 guiyi2 up xiangshang down xiangxia"

    def attend(self, x):
        b, n, d = x.shape
        q, k, v = (touying(x).view(b, n, self.n_head, -1) for touying in (self.chaxun, self.jian, self.zhi))
        fenshu = torch.einsum("bihd,bjhd->bhij", q * (1 / (d // self.n_head) ** 0.5), k)
        yanma = torch.triu(torch.ones(n, n, device=x.device), 1) * -1e30
        quanzhong = torch.exp(torch.log_softmax(fenshu + yanma, dim=-1))
        return self.shuchu(torch.einsum("bhij,bjhd->bihd", quanzhong, v).reshape(b, n, d))


class YuYanMoXing(GPT):
    BLOCK, NORM, HEAD = BianMaKuai, GuiYiHua, nn.Linear
    NAMES = "words ci places weizhi blocks ceng last zuihou head tou"


build = YuYanMoXing
