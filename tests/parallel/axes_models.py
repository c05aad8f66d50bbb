"""One small Llama on every mesh: tensor, sequence and loss parallel, with experts, adapters, ties; and
a model of uneven parts. How a case of it is trained on the mesh, and in one process on the batches of
all data ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import onefold
from promises.jobs import whole_states
from reference import by_rank_0
from zoo import tokens_of

VOCABULARY, WIDTH, LENGTH, EXPERTS = 61, 16, 12, 4


@dataclass(frozen=True)
class Case:
    """A model, its mesh, and how it is trained.

    Attributes:
        plan: "plain" leaves activations whole between layers, "sequence" divides them, "loss" keeps
            the logits divided up to the loss, "layers" divides feed-forward layers, embedding and
            head only. "none" leaves the model as it is. "parts": another model, of uneven parts.
        ep: ranks that experts are divided among, in place of feed-forward layers; 0: none.
        frozen: names (or their beginnings) that are not trained.
        options: of `Recipe.zero`. stages: of ZeRO, whose bits are the same.
        near: how far from one process, a share of losses and norms.
    """

    plan: str = "plain"
    dp: int = 2
    ep: int = 0
    tp: int = 2
    replicate: int = 1
    hidden: int = 40
    steps: int = 2
    micro_batches: int = 1
    max_norm: float = 0.5
    checkpointing: bool = False
    adapters: bool = False
    meta: bool = False
    tied: bool = False
    frozen: tuple[str, ...] = ()
    scaler: bool = False
    optimizer: str = "adamw"
    options: dict[str, Any] = field(default_factory=dict)
    stages: tuple[int, ...] = (0, 1, 2, 3)
    near: float = 2e-5
    ci: bool = False

    @property
    def axes(self) -> dict[str, int]:
        sizes = {"dp_replicate": self.replicate, "dp": self.dp, "ep": self.ep, "tp": self.tp}
        return {name: n for name, n in sizes.items() if n > 1 or name in ("dp", "tp")}

    @property
    def data(self) -> tuple[str, ...]:
        return tuple(name for name in self.axes if name != "tp")

    @property
    def data_ranks(self) -> int:
        return self.replicate * self.dp * max(self.ep, 1)


# -- the models ------------------------------------------------------------------------------------


class LlamaAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        # Under tensor parallelism a rank has some of the heads
        q, k, v = (
            w(x).view(batch, length, -1, 4).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


class LlamaMLP(nn.Module):
    """`adapters`: the whole output gets a plain adapter beside it."""

    def __init__(self, hidden: int, adapters: bool) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, WIDTH, bias=False)
        self.a, self.b = (
            (nn.Parameter(torch.randn(2, WIDTH) * 0.2) for _ in "ab") if adapters else (None, None)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return y if self.a is None or self.b is None else y + x @ self.a.t() @ self.b


class Experts(nn.Module):
    """A router, and feed-forward experts in two stacks [experts, ...], each divided over tp."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, hidden) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, hidden, WIDTH) * 0.3)
        self.mesh: DeviceMesh | None = None

    def divide(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        for name, dim in (("up", 2), ("down", 1)):
            placed = [Shard(0 if axis == "ep" else dim) for axis in mesh.mesh_dim_names or ()]
            setattr(
                self, name, nn.Parameter(distribute_tensor(getattr(self, name).data, mesh, placed))
            )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        scale, expert = weights.flatten(0, 1).max(-1)
        order, counts = expert.argsort(stable=True), torch.bincount(expert, minlength=EXPERTS)
        rows = x.flatten(0, 1)[order]
        axes = self.mesh.mesh_dim_names or () if self.mesh else ()
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        if "tp" in axes:  # gradients of what enters the parts are added up
            rows = _Summed.apply(rows, self.mesh.get_group("tp"), False, True)
        if "ep" in axes:
            ep = self.mesh.get_group("ep")
            told = torch.empty_like(counts)  # tokens for my experts, by the rank that sends them
            dist.all_to_all_single(told, counts, group=ep)
            sizes, back = (
                t.view(dist.get_world_size(ep), -1).sum(1).tolist() for t in (counts, told)
            )
            mine = torch.arange(len(up)).repeat(dist.get_world_size(ep)).repeat_interleave(told)
            again = mine.argsort(stable=True)
            arrived = all_to_all_single_autograd(rows, back, sizes, ep)[again]
            y = _computed(arrived, torch.bincount(mine, minlength=len(up)), up, down)
            y = all_to_all_single_autograd(
                torch.empty_like(y).index_copy(0, again, y), sizes, back, ep
            )
        else:
            y = _computed(rows, counts, up, down)
        if "tp" in axes:
            y = _Summed.apply(y, self.mesh.get_group("tp"), True, False)
        return (torch.empty_like(y).index_copy(0, order, y) * scale[:, None]).view_as(x)


class _Summed(torch.autograd.Function):
    """Added up over ranks, in the forward pass, the backward pass, or both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, forward: bool, backward: bool) -> Tensor:  # type: ignore[override]
        ctx.group = group if backward else None
        x = x.clone()
        if forward:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        if ctx.group is not None:
            grad = grad.contiguous().clone()
            dist.all_reduce(grad, group=ctx.group)
        return grad, None, None, None


def added_up(x: Tensor, group: Any) -> Tensor:
    """The sum over ranks, whose gradient reaches each of them whole."""
    return x if group is None else _Summed.apply(x, group, True, False)


def _computed(x: Tensor, counts: Tensor, up: Tensor, down: Tensor) -> Tensor:
    parts = x.split(counts.tolist())
    # Experts without tokens take part with none, so that they have a gradient of zeros
    return torch.cat([F.gelu(p @ u) @ d for p, u, d in zip(parts, up, down, strict=True)])


class LlamaBlock(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = LlamaAttention()
        self.feed_forward = (
            Experts(case.hidden) if case.ep else LlamaMLP(case.hidden, case.adapters)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class TinyLlama(nn.Module):
    """tokens (batch, length) -> the mean next-token loss, a scalar."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.checkpointing = case.checkpointing
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(LlamaBlock(case) for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens[:, :-1])
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Parts(nn.Module):
    """Each parameter takes part by itself, so a rank's own elements have the gradients of the whole.
    Over 3 ranks rows are 1, 1, 0; 3, 3, 1; and so on.
    """

    #: (shape, the dimension that is divided; None: it is not)
    SHAPES = (((2, 640), 0), ((4, 640), 0), ((2, 40), 0), ((5, 33), 0), ((9, 7), 1), ((1, 65), 0),
              ((4, 31), None), ((4, 3, 50), 0), ((130,), 0), ((3,), None))  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ParameterList(torch.randn(shape) for shape, _ in self.SHAPES)

    def forward(self, tokens: Tensor) -> Tensor:
        x, total = tokens.float() / VOCABULARY, torch.zeros(())
        for param in self.each:
            local = param.to_local() if isinstance(param, DTensor) else param
            total = total + (local * x.mean() + x.std()).pow(2).sum()
        return total


def built(case: Case) -> Any:
    torch.manual_seed(0)
    model = Parts() if case.plan == "parts" else TinyLlama(case)
    if case.tied:
        model.output.weight = model.tok_embeddings.weight
    return model


def plan_of(case: Case) -> dict[str, Any]:
    """The plan of `parallelize_module`, as torchtitan has it for Llama."""
    mlp = "layers.*.feed_forward"
    plain = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(output_layouts=Replicate()),
    }
    if case.plan == "layers":
        # As DTensors: torch takes local outputs for parts of equal length
        inner = dict.fromkeys((f"{mlp}.w1", f"{mlp}.w3"), ColwiseParallel(use_local_output=False))
        return {**plain, **inner, f"{mlp}.w2": RowwiseParallel()}
    columns = [f"layers.*.attention.{w}" for w in ("wq", "wk", "wv")]
    columns += [] if case.ep else [f"{mlp}.w1", f"{mlp}.w3"]
    rows = ["layers.*.attention.wo", *([] if case.ep else [f"{mlp}.w2"])]
    if case.plan == "plain":
        inner = dict.fromkeys(columns, ColwiseParallel())
        return {**plain, **inner, **dict.fromkeys(rows, RowwiseParallel())}
    spread = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    kept = case.plan == "loss"  # divided up to the loss
    last = ColwiseParallel(
        input_layouts=Shard(1),
        output_layouts=Shard(-1) if kept else Replicate(),
        use_local_output=not kept,
    )
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        **dict.fromkeys(("layers.*.attention_norm", "layers.*.ffn_norm", "norm"), SequenceParallel()),
        **dict.fromkeys(("layers.*.attention", "layers.*.feed_forward"), spread),
        **dict.fromkeys(columns, ColwiseParallel()),
        **dict.fromkeys(rows, RowwiseParallel(output_layouts=Shard(1))),
        "output": last,
    }  # fmt: skip


def mesh_of_case(case: Case) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(case.axes.values()), mesh_dim_names=tuple(case.axes))


def parallelized(case: Case, mesh: DeviceMesh) -> Any:
    with torch.device("meta") if case.meta else contextlib.nullcontext():
        model = built(case)
    if case.plan == "parts":
        for i, (_, dim) in enumerate(Parts.SHAPES):
            if dim is not None:
                model.each[i] = nn.Parameter(
                    distribute_tensor(model.each[i].data, mesh["tp"], [Shard(dim)])
                )
    elif case.plan != "none" and case.tp > 1:
        parallelize_module(model, mesh["tp"], plan_of(case))
    axes = tuple(name for name in ("ep", "tp") if case.axes.get(name, 1) > 1)
    for layer in model.layers if case.ep and axes else ():
        layer.feed_forward.divide(mesh[axes])
    if case.tied:
        model.output.weight = model.tok_embeddings.weight
    _freeze(model, case)  # after it: SequenceParallel makes frozen norms trainable again
    return model


def _freeze(model: nn.Module, case: Case) -> None:
    for name, param in model.named_parameters():
        if case.frozen and name.startswith(case.frozen):
            param.requires_grad_(False)


def initialize(module: nn.Module) -> None:
    """Initialize one module by the shapes of its parameters alone."""
    for p in module.parameters(recurse=False):
        drawn = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
        with torch.no_grad():
            p.copy_(0.1 * drawn + (p.ndim == 1))


# -- training --------------------------------------------------------------------------------------


def batches_of(case: Case, data_rank: int) -> list[Tensor]:
    # 13 tokens make 12 positions, which two or three ranks can divide
    return [
        tokens_of(100 * data_rank + i, 2, LENGTH + 1, VOCABULARY)
        for i in range(case.steps * case.micro_batches)
    ]


def optimizers_of(model: nn.Module, case: Case) -> list[torch.optim.Optimizer]:
    """ "muon": for attention, which `plan="layers"` leaves whole."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    muon = [p for name, p in named.items() if "attention.w" in name and case.optimizer == "muon"]
    rest = [p for p in named.values() if all(p is not other for other in muon)]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=0.01, eps=1e-4)]
    return [*found, torch.optim.Muon(muon, lr=0.02)] if muon else found


@dataclass
class Seen:
    """Of one rank; weights and states are whole, and on rank 0 only."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Job:
    case: Case
    model: Any
    optimizers: list[torch.optim.Optimizer]
    data_rank: int
    scaler: Any = None

    def batches(self) -> Iterator[list[Tensor]]:
        """Those of each step."""
        every, m = batches_of(self.case, self.data_rank), self.case.micro_batches
        yield from (every[i : i + m] for i in range(0, len(every), m))

    def step(self, batches: list[Tensor], seen: Seen, clip: bool = True) -> None:
        case = self.case
        for i, batch in enumerate(batches):
            with (
                contextlib.nullcontext() if i + 1 == len(batches) else onefold.no_sync(self.model),
                loss_parallel() if case.plan == "loss" else contextlib.nullcontext(),
            ):
                loss = self.model(batch)
                seen.losses.append(whole(loss).item())
                loss = loss / len(batches)
                (self.scaler.scale(loss) if self.scaler else loss).backward()
        for optimizer in self.optimizers if self.scaler else ():
            self.scaler.unscale_(optimizer)
        if clip:
            seen.norms.append(onefold.clip_grad_norm_(self.model, case.max_norm).item())
        for optimizer in self.optimizers:
            self.scaler.step(optimizer) if self.scaler else optimizer.step()
            optimizer.zero_grad()
        if self.scaler:
            self.scaler.update()


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def sharded(stage: int, case: Case, folder: Path | None = None, scale: float = 1.0) -> Job:
    """`folder`: of an NVMe store. `scale`: what weights are multiplied by before."""
    mesh = mesh_of_case(case)
    model = parallelized(case, mesh)
    if scale != 1.0:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(scale)
    options = {"stall_timeout": 60.0, **case.options}
    if "nvme" in options.values():
        options["nvme"] = str(folder)
    init = initialize if case.meta else None
    recipe = onefold.Recipe.zero(stage, **options)
    model = onefold.shard(model, recipe, mesh=mesh, data=case.data, init=init)
    scaler = onefold.GradScaler(model, init_scale=2.0**10) if case.scaler else None
    return Job(case, model, optimizers_of(model, case), dist.get_rank() // case.tp, scaler)


def look(job: Job, seen: Seen) -> Seen:
    """With the whole weights and states."""
    seen.weights = onefold.full_state_dict(job.model)
    seen.states = {
        f"{i} {k}": t for i, o in enumerate(job.optimizers) for k, t in whole_states(o).items()
    }
    return seen


@by_rank_0
def in_one_process(case: Case) -> list[Seen]:
    """The same training on all data ranks' batches together: what each data rank must see."""
    model = built(case)
    if case.meta:
        model.apply(initialize)
    _freeze(model, case)
    optimizers, seen = optimizers_of(model, case), [Seen() for _ in range(case.data_ranks)]
    for step in range(case.steps):
        for i in range(step * case.micro_batches, (step + 1) * case.micro_batches):
            for data_rank, each in enumerate(seen):
                loss = model(batches_of(case, data_rank)[i])
                each.losses.append(loss.item())
                (loss / case.data_ranks / case.micro_batches).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), case.max_norm).item()
        for each in seen:
            each.norms.append(norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for each in seen:
        each.weights = {name: t.detach().clone() for name, t in model.state_dict().items()}
        each.states = {
            f"{i} {k}": t for i, o in enumerate(optimizers) for k, t in whole_states(o).items()
        }
    return seen
