"""Dtypes of models, before and after shard()."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from scripts.loop import Net, Script
from scripts.registry import EITHER, REFUSED, ROUNDING, habit

LOOSE: dict[str, Any] = {"rtol": 3e-2, "atol": 3e-3}


class MixedNorms(Net):
    """Norms in fp32, the rest in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()
        self.norm.float()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.float()).to(torch.bfloat16)).float()


def double() -> nn.Module:
    return Net().double()


# 16-bit weights get fp32 masters: what is compared is one step of the computation, and the masters
# in the dtype of the weights.
class Sixteen:
    net: Any = None

    def build(self) -> nn.Module:
        return type(self).net()

    def log(self, s: Script) -> None:
        seen: list[str] = []
        handle = s.module.head.register_forward_hook(
            lambda m, a, out: seen.append(f"{a[0].dtype} {m.weight.dtype} {out.dtype}")
        )
        with torch.no_grad():
            s.cross_entropy()
        handle.remove()
        s.note("computed in", seen)


habit("dtypes: norms in fp32, the rest in bf16", expect=ROUNDING, one=ROUNDING, steps=1, **LOOSE)(
    type("Dtype", (Sixteen,), {"net": staticmethod(MixedNorms), "__module__": __name__})
)


@habit("dtypes: `model.double()` before shard()")
class Double(Sixteen):
    net = staticmethod(double)


@habit(
    "dtypes: `model.bfloat16()` before shard(), computed in bf16",
    steps=1,
    expect=ROUNDING,
    one=ROUNDING,
    **LOOSE,
)
class Bfloat(Sixteen):
    net = staticmethod(lambda: Net().bfloat16())


@habit(
    "dtypes: `model.to(torch.bfloat16)` after shard()",
    "after",
    sharded=REFUSED,
    zero=EITHER,
    steps=1,
    expect=ROUNDING,
    composes=False,
    **LOOSE,
)
def to_after(s: Script) -> None:
    s.module.to(torch.bfloat16)
