"""Counts, shapes, statistics and comparisons that scripts print."""

# ruff: noqa: E501 (a habit of the tables is one line)

from __future__ import annotations

import hashlib
from typing import Any

import torch

from scripts.loop import Script
from scripts.registry import BITS, EITHER, ROUNDING, habit

EXACT: dict[str, Any] = {
    "memory: `sum(p.nelement() * p.itemsize)` and `p.nbytes`": lambda s: [sum(p.nelement() * p.itemsize for p in s.model.parameters()), sum(p.nbytes for p in s.model.parameters())],
    "shapes: `p.size()`, `p.size(0)`, `len(p)`": lambda s: [(tuple(p.size()), p.size(0), len(p)) for p in s.model.parameters()],
    "`p.dtype`, `p.device`, `p.is_floating_point()`, `p.is_complex()`": lambda s: [(str(p.dtype), str(p.device), p.is_floating_point(), p.is_complex()) for p in s.model.parameters()],
    "all finite: `all(torch.isfinite(p).all() for p in ...)`": lambda s: all(bool(torch.isfinite(p).all()) for p in s.model.parameters()),
    "`p.min().item(), p.max().item()`": lambda s: [(p.min().item(), p.max().item()) for p in s.model.parameters()],
    "first numbers: `p.data.view(-1)[:3].tolist()`": lambda s: [p.data.view(-1)[:3].tolist() for p in s.model.parameters()],
    "one row: `emb.weight[3].tolist()`": lambda s: s.module.tokens.weight[3].tolist(),
    "`p.detach().cpu().numpy()`": lambda s: s.module.norm.weight.detach().cpu().numpy().tolist(),
    "a hash: `hashlib.md5(p.detach().numpy().tobytes())`": lambda s: hashlib.md5(b"".join(p.detach().numpy().tobytes() for p in s.model.parameters())).hexdigest(),
    "a histogram: `torch.histc(p, bins=5)`": lambda s: [torch.histc(p, bins=5).tolist() for p in s.model.parameters()],
    "tied or not: `a.data_ptr() == b.data_ptr()`": lambda s: s.module.head.weight.data_ptr() == s.module.tokens.weight.data_ptr(),
    "tied or not: `a is b`, `id(p)` in a set": lambda s: [s.module.head.weight is s.module.tokens.weight, len({id(p) for p in s.model.parameters()})],
}  # fmt: skip
STATISTICS: dict[str, Any] = {
    "`p.mean().item(), p.std().item()`": lambda s: [(p.mean().item(), p.std().item()) for p in s.model.parameters()],
    "a checksum: `sum(p.double().sum())`": lambda s: sum(p.double().sum().item() for p in s.model.parameters()),
    "`p.mean(dim=0)`": lambda s: [p.mean(dim=0).tolist() for p in s.model.parameters() if p.ndim == 2],
}  # fmt: skip
#: What needs the arrangement of a whole, or leaves torch: right by a gather, or refused.
_EITHER = ("tolist", "numpy", "hash", "histogram", "data_ptr", "dim=0")
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
