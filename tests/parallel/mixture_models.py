"""A mixture of experts on a mesh of dp, ep and tp: attention and the head over tp, experts over ep, and
each expert over tp. It is trained on the mesh, and in one process on the same batches.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from axes_models import VOCABULARY, WIDTH, LlamaAttention
from test_experts import AllToAll
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from zoo import tokens_of

HIDDEN, EXPERTS = 12, 4


@dataclass(frozen=True)
class Case:
    """A mesh, and how the model is trained on it.

    Attributes:
        max_norm: None leaves out clipping.
        learned: tokens go to the expert that the router likes best, else to one by their number:
            then no rounding of weights sends a token elsewhere.
        frozen: beginnings of names. lora: adapters of peft in routers and embedding, beside a frozen
            base that tensor parallelism divides.
        options: of `Recipe.zero`.
    """

    dp: int = 2
    ep: int = 2
    tp: int = 2
    steps: int = 3
    micro_batches: int = 1
    max_norm: float | None = 0.5
    learned: bool = True
    checkpointing: bool = False
    scaler: bool = False
    lora: bool = False
    frozen: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def data(self) -> int:
        """Ranks that compute with different tokens."""
        return self.dp * self.ep


class Copied(torch.autograd.Function):
    """Into what a rank has a part of: gradients of the parts are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:  # type: ignore[override]
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Summed(torch.autograd.Function):
    """Out of it: the parts are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:  # type: ignore[override]
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None


class Experts(nn.Module):
    """Feed-forward experts in two stacks [experts, ...]; each token goes to one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * 0.3)
        self.mesh: DeviceMesh | None = None

    def divide(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        for name, dim in (("up", 2), ("down", 1)):
            whole = getattr(self, name).data
            placed = distribute_tensor(whole, mesh, [Shard(0), Shard(dim)])
            setattr(self, name, nn.Parameter(placed))

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        """x [tokens, width], expert [tokens]."""
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=EXPERTS)
        if self.mesh is None:
            y = _computed(x[order], counts, self.up, self.down)
            return torch.empty_like(y).index_copy(0, order, y)
        ep, tp = self.mesh.get_group("ep"), self.mesh.get_group("tp")
        size = dist.get_world_size(ep)
        told = torch.empty_like(counts)
        dist.all_to_all_single(told, counts, group=ep)
        sizes, back = counts.view(size, -1).sum(1).tolist(), told.view(size, -1).sum(1).tolist()
        rows = AllToAll.apply(Copied.apply(x, tp)[order], sizes, back, ep)
        mine = torch.arange(EXPERTS // size).repeat(size).repeat_interleave(told)
        again = mine.argsort(stable=True)
        each = torch.bincount(mine, minlength=EXPERTS // size)
        y = _computed(rows[again], each, self.up.to_local(), self.down.to_local())
        y = torch.empty_like(y).index_copy(0, again, y)
        y = Summed.apply(AllToAll.apply(y, back, sizes, ep), tp)
        return torch.empty_like(y).index_copy(0, order, y)


def _computed(x: Tensor, counts: Tensor, up: Tensor, down: Tensor) -> Tensor:
    parts = x.split(counts.tolist())
    return torch.cat([F.gelu(p @ u) @ d for p, u, d in zip(parts, up, down, strict=True)])


class Block(nn.Module):
    def __init__(self, learned: bool) -> None:
        super().__init__()
        self.learned = learned
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.experts = LlamaAttention(WIDTH, 4), Experts()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        h = self.ffn_norm(x).flatten(0, 1)
        weights = self.router(h).softmax(-1)
        chosen = weights.argmax(-1) if self.learned else tokens.flatten() % EXPERTS
        scale = weights.gather(1, chosen[:, None])
        return x + (self.experts(h, chosen) * scale).view_as(x)


class Mixture(nn.Module):
    """tokens -> the mean next-token loss."""

    def __init__(self, learned: bool = True, checkpointing: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.checkpointing = checkpointing
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(learned) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        given = tokens[:, :-1]
        x = self.tokens(given)
        for block in self.blocks:
            x = (
                checkpoint(block, x, given, use_reentrant=False)
                if self.checkpointing
                else block(x, given)
            )
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


PLAN = {
    "blocks.*.attention.wq": ColwiseParallel(),
    "blocks.*.attention.wk": ColwiseParallel(),
    "blocks.*.attention.wv": ColwiseParallel(),
    "blocks.*.attention.wo": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


def batch_of(data_rank: int, number: int) -> Tensor:
    return tokens_of(100 * data_rank + number, batch=2, length=9, vocabulary=VOCABULARY)


def adapted(model: nn.Module, case: Case) -> nn.Module:
    """The model with adapters, and what is frozen."""
    if case.lora:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=2, target_modules=["router", "tokens"], lora_alpha=8)
        torch.manual_seed(1)
        model = get_peft_model(model, config)
        generator = torch.Generator().manual_seed(2)
        for name, param in model.named_parameters():
            if "lora_" in name:  # some start as zeros
                with torch.no_grad():
                    param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    for name, param in model.named_parameters():
        if case.frozen and name.startswith(case.frozen):
            param.requires_grad_(False)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # With this eps, noise in gradients near zero does not become a step
    trainable = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trainable, lr=0.02, eps=1e-2)


def trained(case: Case, *stages: int) -> list[dict[str, Any]]:
    """Train on the mesh at each of these stages."""
    mesh = init_device_mesh("cpu", (case.dp, case.ep, case.tp), mesh_dim_names=("dp", "ep", "tp"))
    return [_trained(case, stage, mesh) for stage in stages]


def _trained(case: Case, stage: int, mesh: DeviceMesh) -> dict[str, Any]:
    import onefold

    model: Any = Mixture(case.learned, case.checkpointing)
    if case.tp > 1:
        parallelize_module(model, mesh["tp"], PLAN)
    for block in model.blocks:
        block.experts.divide(mesh["ep", "tp"])
    model = adapted(model, case)
    options = {k: v for k, v in case.options.items() if stage == 3 or k not in OF_STAGE_3}
    recipe = onefold.Recipe.zero(stage, stall_timeout=60.0, **options)
    model = onefold.shard(model, recipe, mesh=mesh, data=("dp", "ep"))
    optimizer = optimizer_of(model)
    scaler = onefold.GradScaler(model, init_scale=2.0**8) if case.scaler else None
    losses, norms = [], []
    data_rank = dist.get_rank() // case.tp
    for step in range(case.steps):
        for i in range(case.micro_batches):
            last = i + 1 == case.micro_batches
            with contextlib.nullcontext() if last else onefold.no_sync(model):
                loss = model(batch_of(data_rank, step * case.micro_batches + i))
                losses.append(loss.item())
                loss = loss / case.micro_batches
                (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.unscale_(optimizer)
        if case.max_norm is not None:
            norms.append(onefold.clip_grad_norm_(model, case.max_norm).item())
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
    engine = onefold.engine_of(model)
    return {
        "losses": losses,
        "norms": norms,
        "weights": onefold.full_state_dict(model),
        "holders": {e.slot.name: e.flat.size for e in engine.entries},
        "gathered": len(engine.gather.by_storage),
        "scale": scaler.get_scale() if scaler else None,
    }


#: Options that other stages refuse.
OF_STAGE_3 = ("gather_codec", "frozen", "offload_param")


def in_one_process(case: Case) -> dict[str, Any]:
    """The same training in fp32, on all data ranks' batches together. "start": its weights before."""
    model = adapted(Mixture(case.learned), case)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = optimizer_of(model)
    losses: list[list[float]] = [[] for _ in range(case.data)]
    norms = []
    for step in range(case.steps):
        for i in range(case.micro_batches):
            for data_rank in range(case.data):
                loss = model(batch_of(data_rank, step * case.micro_batches + i))
                losses[data_rank].append(loss.item())
                (loss / case.data / case.micro_batches).backward()
        if case.max_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), case.max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "weights": dict(model.state_dict()), "start": start}
