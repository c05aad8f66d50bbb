"""Counts, shapes, statistics and comparisons that scripts print."""

# ruff: noqa: E501 (a habit of the tables is one line)

from __future__ import annotations

import hashlib
import math
import re
from typing import Any

import torch

from scripts.loop import Script
from scripts.registry import BITS, EITHER, ROUNDING, habit

EXACT: dict[str, Any] = {
    "`torch.where(p.data > 0)`": lambda s: [i.tolist() for i in torch.where(s.module.head.weight.data > 0)],
    "`p.new_tensor(p.data)`, `p.new_tensor([1.0, 2.0])`": lambda s: [(p.new_tensor(p.data).tolist(), p.new_tensor([1.0, 2.0]).tolist()) for p in s.module.norm.parameters()],
    "`torch.ones(2).to(p)`, `x.type_as(p)`, `p.data.to(torch.ones(2))`": lambda s: [(torch.ones(2).to(p).tolist(), torch.ones(2).type_as(p.data).tolist(), tuple(p.data.to(torch.ones(2).double()).shape)) for p in s.model.parameters()],
    "memory: `sum(p.nelement() * p.itemsize)` and `p.nbytes`": lambda s: [sum(p.nelement() * p.itemsize for p in s.model.parameters()), sum(p.nbytes for p in s.model.parameters())],
    "shapes: `p.size()`, `p.size(0)`, `len(p)`": lambda s: [(tuple(p.size()), p.size(0), len(p)) for p in s.model.parameters()],
    "shapes: `list(p.data.shape)`, `p.detach().shape`": lambda s: [(list(p.data.shape), list(p.detach().shape)) for p in s.model.parameters()],
    "`p.ndim`, `p.dim()`, `p.ndimension()`": lambda s: [(p.ndim, p.dim(), p.ndimension()) for p in s.model.parameters()],
    "`p.dtype`, `p.device`, `p.is_floating_point()`, `p.is_complex()`": lambda s: [(str(p.dtype), str(p.device), p.is_floating_point(), p.is_complex()) for p in s.model.parameters()],
    "`p.is_leaf`, `p.requires_grad`, `p.grad_fn`": lambda s: [(p.is_leaf, p.requires_grad, p.grad_fn is None) for p in s.model.parameters()],
    "`isinstance(p, nn.Parameter)`, `isinstance(p, torch.Tensor)`": lambda s: [(isinstance(p, torch.nn.Parameter), isinstance(p, torch.Tensor)) for p in s.model.parameters()],
    "all finite: `all(torch.isfinite(p).all() for p in ...)`": lambda s: all(bool(torch.isfinite(p).all()) for p in s.model.parameters()),
    "`p.min().item(), p.max().item()`": lambda s: [(p.min().item(), p.max().item()) for p in s.model.parameters()],
    "`torch.aminmax(p)`": lambda s: [[v.item() for v in torch.aminmax(p)] for p in s.model.parameters()],
    "`p.argmax().item()`": lambda s: [p.argmax().item() for p in s.model.parameters()],
    "first numbers: `p.data.view(-1)[:3].tolist()`": lambda s: [p.data.view(-1)[:3].tolist() for p in s.model.parameters()],
    "one row: `emb.weight[3].tolist()`": lambda s: s.module.tokens.weight[3].tolist(),
    "`p.tolist()`": lambda s: s.module.norm.weight.tolist(),
    "`p.detach().cpu().numpy()`": lambda s: s.module.norm.weight.detach().cpu().numpy().tolist(),
    "a hash: `hashlib.md5(p.detach().numpy().tobytes())`": lambda s: hashlib.md5(b"".join(p.detach().numpy().tobytes() for p in s.model.parameters())).hexdigest(),
    "a hash: sum of bits, `p.data.view(torch.int32).sum()`": lambda s: [p.data.view(torch.int32).long().sum().item() for p in s.model.parameters()],
    "a histogram: `torch.histc(p, bins=5)`": lambda s: [torch.histc(p, bins=5).tolist() for p in s.model.parameters()],
    "median and quantile: `p.median()`": lambda s: [p.median().item() for p in s.model.parameters()],
    "`p.unique().numel()`": lambda s: [p.unique().numel() for p in s.model.parameters()],
    "`p.topk(3).values`": lambda s: [p.detach().flatten().topk(3).values.tolist() for p in s.model.parameters()],
    "`torch.equal(a, b)` of two layers": lambda s: torch.equal(s.module.blocks[0].norm_1.weight, s.module.blocks[1].norm_1.weight),
    "tied or not: `a.data_ptr() == b.data_ptr()`": lambda s: s.module.head.weight.data_ptr() == s.module.tokens.weight.data_ptr(),
    "tied or not: `a is b`, `id(p)` in a set": lambda s: [s.module.head.weight is s.module.tokens.weight, len({id(p) for p in s.model.parameters()})],
    "`p.stride()`, `p.is_contiguous()`": lambda s: [(p.stride(), p.is_contiguous()) for p in s.model.parameters()],
}  # fmt: skip
STATISTICS: dict[str, Any] = {
    "`p.data.expand(2, *p.shape).sum()`": lambda s: [p.data.expand(2, *p.shape).sum().item() for p in s.model.parameters()],
    "norms of negative orders: `p.data.norm(-inf)`, `norm(-1)`": lambda s: [p.data.norm(o).item() for p in s.model.parameters() for o in (-math.inf, -1.0)],
    "the norm in 16 bits: `p.data.bfloat16().norm()`": lambda s: s.module.head.weight.data.bfloat16().norm().float().item(),
    "`p.mean().item(), p.std().item()`": lambda s: [(p.mean().item(), p.std().item()) for p in s.model.parameters()],
    "a checksum: `sum(p.double().sum())`": lambda s: sum(p.double().sum().item() for p in s.model.parameters()),
    "`p.mean(dim=0)`": lambda s: [p.mean(dim=0).tolist() for p in s.model.parameters() if p.ndim == 2],
    "`p.logsumexp(0)`, `p.softmax(-1)`": lambda s: [s.module.norm.weight.logsumexp(0).item(), s.module.norm.weight.softmax(-1)[0].item()],
    "`torch.prod(p)`, `p.cumsum(0)`": lambda s: [torch.prod(s.module.norm.weight).item(), s.module.norm.weight.cumsum(0)[-1].item()],
    "rank of a matrix: `torch.linalg.matrix_rank(w)`": lambda s: int(torch.linalg.matrix_rank(s.module.head.weight)),
}  # fmt: skip
#: What needs the arrangement of a whole, or leaves torch: right by a gather, or refused.
_EITHER = (
    "tolist", "numpy", "hash", "histogram", "median", "unique", "topk", "[0, 0]", "flatten()[0]", "[:1]", "stride", "data_ptr", "argmax", "aminmax",
    "dim=0", "logsumexp", "prod(p)", "rows", "matrix_rank", "trace", "torch.var_mean", "view(torch.int32)",
)  # fmt: skip
for _expect, _reports in ((BITS, EXACT), (ROUNDING, STATISTICS)):
    for _title, _report in _reports.items():
        _sharded = EITHER if any(word in _title for word in _EITHER) else None

        def _log(s: Script, f: Any = _report) -> None:
            with torch.no_grad():
                s.note("report", f(s))

        habit(_title, "log", expect=_expect, sharded=_sharded)(_log)


@habit(
    "statistics with gradients enabled: `p.mean().item()` outside no_grad", "log", expect=ROUNDING
)
def with_gradients(s: Script) -> None:
    s.note("mean", [p.mean().item() for p in s.model.parameters()])


@habit("`print(p)`: all elements, or which of them these are", "log", composes=False)
def printed(s: Script) -> None:
    weight = s.module.norm.weight.detach()
    shown = str(weight)
    numbers, part = shown.count("."), re.search(r"elements \d+ to \d+ of shape", shown)
    s.note("told", part is not None or numbers == weight.numel())


@habit("weights of two models compared: `torch.equal(p, q) for p, q in zip(...)`", sharded=EITHER)
class Compared:
    def before(self, s: Script) -> None:
        import copy

        self.twin = copy.deepcopy(s.module)

    def log(self, s: Script) -> None:
        with torch.no_grad():
            s.note(
                "equal",
                [
                    torch.equal(p, q)
                    for p, q in zip(s.model.parameters(), self.twin.parameters(), strict=True)
                ],
            )


@habit("parameters stored in a dict and looked up: `{p: name}[p]`, `p in dict`")
class ByParameter:
    def before(self, s: Script) -> None:
        self.names = {p: n for n, p in s.module.named_parameters()}

    def log(self, s: Script) -> None:
        s.note("names", [self.names[p] for p in s.model.parameters()])
