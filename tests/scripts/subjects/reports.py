"""Counts, shapes, statistics and comparisons that scripts print."""

# ruff: noqa: E501 (a habit of the tables is one line)

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch

from scripts.loop import Script
from scripts.registry import BITS, EITHER, ROUNDING, habit

EXACT: dict[str, Any] = {
    "parameters: `sum(p.numel() for p in model.parameters())`": lambda s: sum(p.numel() for p in s.model.parameters()),
    "trainable: `sum(p.numel() ... if p.requires_grad)`": lambda s: sum(p.numel() for p in s.model.parameters() if p.requires_grad),
    "parameters by `p.nelement()`": lambda s: sum(p.nelement() for p in s.model.parameters()),
    "parameters by `torch.numel(p)`": lambda s: sum(torch.numel(p) for p in s.model.parameters()),
    "parameters by `p.shape.numel()`": lambda s: sum(p.shape.numel() for p in s.model.parameters()),
    "parameters by `p.data.numel()`": lambda s: sum(p.data.numel() for p in s.model.parameters()),
    "parameters by `np.prod(p.size())`": lambda s: sum(torch.Size(p.size()).numel() for p in s.model.parameters()),
    "without embeddings: `n -= model.wpe.weight.numel()` (nanoGPT)": lambda s: sum(p.numel() for p in s.module.parameters()) - s.module.positions.weight.numel(),
    "memory: `sum(p.numel() * p.element_size())`": lambda s: sum(p.numel() * p.element_size() for p in s.model.parameters()),
    "memory: `sum(p.nelement() * p.itemsize)` and `p.nbytes`": lambda s: [sum(p.nelement() * p.itemsize for p in s.model.parameters()), sum(p.nbytes for p in s.model.parameters())],
    "memory of gradients: `p.grad.numel() * p.grad.element_size()`": lambda s: sum(p.grad.numel() * p.grad.element_size() for p in s.model.parameters()),
    "shapes: `tuple(p.shape)` by name": lambda s: {n: tuple(p.shape) for n, p in s.named()},
    "shapes: `p.size()`, `p.size(0)`, `len(p)`": lambda s: [(tuple(p.size()), p.size(0), len(p)) for p in s.model.parameters()],
    "shapes: `list(p.data.shape)`, `p.detach().shape`": lambda s: [(list(p.data.shape), list(p.detach().shape)) for p in s.model.parameters()],
    "shapes through the state's names: `dict(model.named_parameters())[name].shape`": lambda s: tuple(dict(s.named())["head.weight"].shape),
    "`p.ndim`, `p.dim()`, `p.ndimension()`": lambda s: [(p.ndim, p.dim(), p.ndimension()) for p in s.model.parameters()],
    "`p.dtype`, `p.device`, `p.is_floating_point()`, `p.is_complex()`": lambda s: [(str(p.dtype), str(p.device), p.is_floating_point(), p.is_complex()) for p in s.model.parameters()],
    "`p.is_leaf`, `p.requires_grad`, `p.grad_fn`": lambda s: [(p.is_leaf, p.requires_grad, p.grad_fn is None) for p in s.model.parameters()],
    "`isinstance(p, nn.Parameter)`, `isinstance(p, torch.Tensor)`": lambda s: [(isinstance(p, torch.nn.Parameter), isinstance(p, torch.Tensor)) for p in s.model.parameters()],
    "`layer.weight.shape[0]`, `layer.in_features`": lambda s: [s.module.head.weight.shape[0], s.module.head.in_features, *s.module.blocks[0].mlp[0].weight.shape],
    "a model summary (torchinfo-like) by module": lambda s: {n: sum(p.numel() for p in m.parameters(recurse=False)) for n, m in s.module.named_modules()},
    "`repr(model)`": lambda s: len(repr(s.module).replace("Net(", "")),
    "all finite: `all(torch.isfinite(p).all() for p in ...)`": lambda s: all(bool(torch.isfinite(p).all()) for p in s.model.parameters()),
    "any NaN: `any(p.isnan().any() for p in ...)`": lambda s: any(bool(p.isnan().any()) for p in s.model.parameters()),
    "`torch.isnan(p.data).sum().item()`": lambda s: sum(torch.isnan(p.data).sum().item() for p in s.model.parameters()),
    "largest: `p.abs().max()`": lambda s: [p.abs().max().item() for p in s.model.parameters()],
    "largest: `p.data.abs().max().item()`": lambda s: [p.data.abs().max().item() for p in s.model.parameters()],
    "`p.min().item(), p.max().item()`": lambda s: [(p.min().item(), p.max().item()) for p in s.model.parameters()],
    "`torch.aminmax(p)`": lambda s: [[v.item() for v in torch.aminmax(p)] for p in s.model.parameters()],
    "`p.argmax().item()`": lambda s: [p.argmax().item() for p in s.model.parameters()],
    "sparsity: `(p == 0).sum().item() / p.numel()`": lambda s: [(p == 0).sum().item() / p.numel() for p in s.model.parameters()],
    "sparsity: `torch.count_nonzero(p)`": lambda s: [int(torch.count_nonzero(p)) for p in s.model.parameters()],
    "positive share: `(p.data > 0).sum()`": lambda s: [(p.data > 0).sum().item() for p in s.model.parameters()],
    "first numbers: `p.data.view(-1)[:3].tolist()`": lambda s: [p.data.view(-1)[:3].tolist() for p in s.model.parameters()],
    "first numbers: `p.flatten()[0].item()`": lambda s: [p.flatten()[0].item() for p in s.model.parameters()],
    "one number: `head.weight[0, 0].item()`": lambda s: s.module.head.weight[0, 0].item(),
    "one row: `emb.weight[3].tolist()`": lambda s: s.module.tokens.weight[3].tolist(),
    "one row: `emb.weight.data[3].tolist()`": lambda s: s.module.tokens.weight.data[3].tolist(),
    "`p.tolist()`": lambda s: s.module.norm.weight.tolist(),
    "`p.detach().cpu().numpy()`": lambda s: s.module.norm.weight.detach().cpu().numpy().tolist(),
    "`p.data.cpu().numpy().shape`": lambda s: [p.data.cpu().numpy().shape for p in s.model.parameters()],
    "`p.item()` of a one-element slice": lambda s: s.module.norm.bias[:1].item(),
    "a hash: `hashlib.md5(p.detach().numpy().tobytes())`": lambda s: hashlib.md5(b"".join(p.detach().numpy().tobytes() for p in s.model.parameters())).hexdigest(),
    "a hash: sum of bits, `p.data.view(torch.int32).sum()`": lambda s: [p.data.view(torch.int32).long().sum().item() for p in s.model.parameters()],
    "a histogram: `torch.histc(p, bins=5)`": lambda s: [torch.histc(p, bins=5).tolist() for p in s.model.parameters()],
    "a histogram: `torch.histogram(p, 5).hist`": lambda s: [torch.histogram(p.detach(), 5).hist.tolist() for p in s.model.parameters()],
    "median and quantile: `p.median()`": lambda s: [p.median().item() for p in s.model.parameters()],
    "`p.unique().numel()`": lambda s: [p.unique().numel() for p in s.model.parameters()],
    "`p.topk(3).values`": lambda s: [p.detach().flatten().topk(3).values.tolist() for p in s.model.parameters()],
    "`p.grad.abs().max()` beside `p.abs().max()`": lambda s: [(p.grad.abs().max().item(), p.abs().max().item()) for p in s.model.parameters()],
    "`torch.equal(a, b)` of two layers": lambda s: torch.equal(s.module.blocks[0].norm_1.weight, s.module.blocks[1].norm_1.weight),
    "`torch.allclose(p, p.clone())`": lambda s: [torch.allclose(p, p.clone()) for p in s.model.parameters()],
    "`(a == b).all()` of two layers": lambda s: bool((s.module.blocks[0].mlp[0].weight == s.module.blocks[1].mlp[0].weight).all()),
    "tied or not: `a.data_ptr() == b.data_ptr()`": lambda s: s.module.head.weight.data_ptr() == s.module.tokens.weight.data_ptr(),
    "tied or not: `a is b`, `id(p)` in a set": lambda s: [s.module.head.weight is s.module.tokens.weight, len({id(p) for p in s.model.parameters()})],
    "is a parameter among others: `any(p is q ...)`": lambda s: any(p is s.module.head.weight for p in s.model.parameters()),
    "`p.stride()`, `p.is_contiguous()`": lambda s: [(p.stride(), p.is_contiguous()) for p in s.model.parameters()],
    "`next(model.parameters()).device` and dtype": lambda s: [str(next(s.model.parameters()).device), str(next(s.model.parameters()).dtype)],
    "f-string: `f'{p.shape} {p.numel():,}'`": lambda s: [f"{p.shape} {p.numel():,}" for p in s.model.parameters()],
    "f-string of one number: `f'{p.abs().max():.4f}'`": lambda s: [f"{p.abs().max():.4f}" for p in s.model.parameters()],
}  # fmt: skip
STATISTICS: dict[str, Any] = {
    "`p.mean().item(), p.std().item()`": lambda s: [(p.mean().item(), p.std().item()) for p in s.model.parameters()],
    "`p.data.mean()`, `p.data.std()`": lambda s: [(p.data.mean().item(), p.data.std().item()) for p in s.model.parameters()],
    "`p.var()`, `torch.var_mean(p)`": lambda s: [(p.var().item(), *[v.item() for v in torch.var_mean(p)]) for p in s.model.parameters()],
    "`p.sum().item()`": lambda s: [p.sum().item() for p in s.model.parameters()],
    "`p.abs().mean()`": lambda s: [p.abs().mean().item() for p in s.model.parameters()],
    "`float(p.pow(2).mean())`": lambda s: [float(p.pow(2).mean()) for p in s.model.parameters()],
    "a checksum: `sum(p.double().sum())`": lambda s: sum(p.double().sum().item() for p in s.model.parameters()),
    "`p.mean(dim=0)`": lambda s: [p.mean(dim=0).tolist() for p in s.model.parameters() if p.ndim == 2],
    "`p.logsumexp(0)`, `p.softmax(-1)`": lambda s: [s.module.norm.weight.logsumexp(0).item(), s.module.norm.weight.softmax(-1)[0].item()],
    "`torch.prod(p)`, `p.cumsum(0)`": lambda s: [torch.prod(s.module.norm.weight).item(), s.module.norm.weight.cumsum(0)[-1].item()],
    "cosine of two rows: `F.cosine_similarity(w[0], w[1], dim=0)`": lambda s: torch.nn.functional.cosine_similarity(s.module.tokens.weight[0], s.module.tokens.weight[1], dim=0).item(),
    "rank of a matrix: `torch.linalg.matrix_rank(w)`": lambda s: int(torch.linalg.matrix_rank(s.module.head.weight)),
    "`(w @ w.T).trace()`": lambda s: (s.module.head.weight @ s.module.head.weight.T).trace().item(),
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


@habit("how many weights changed: `(p.data != old[n]).sum()`")
class Changed:
    def after(self, s: Script) -> None:
        self.old = {n: p.data.clone() for n, p in s.named()}

    def log(self, s: Script) -> None:
        s.note("changed", [(p.data != self.old[n]).sum().item() for n, p in s.named()])


@habit("parameters stored in a dict and looked up: `{p: name}[p]`, `p in dict`")
class ByParameter:
    def before(self, s: Script) -> None:
        self.names = {p: n for n, p in s.module.named_parameters()}

    def log(self, s: Script) -> None:
        s.note("names", [self.names[p] for p in s.model.parameters()])


@habit("a report from rank 0 only: counts and shapes", "log")
def rank_0(s: Script) -> None:
    if s.rank == 0:
        s.note(
            "count",
            [sum(p.numel() for p in s.model.parameters()), str(next(s.model.parameters()).shape)],
        )
