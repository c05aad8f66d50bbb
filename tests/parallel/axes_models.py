"""Models on several axes: a small Llama and its plans for tensor parallelism; how they are trained on
a mesh, and in one process on the same batches.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from zoo import TinyGPT, tokens_of

VOCABULARY, WIDTH, LENGTH = 61, 16, 12


class LlamaAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width_of_head = width // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        # Under tensor parallelism a rank has some of the heads
        q, k, v = (
            w(x).view(batch, length, -1, self.width_of_head).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(_turned(q), _turned(k), v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


def _turned(x: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021)."""
    half = x.shape[-1] // 2
    rate = 100.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[-2], dtype=torch.float32)[:, None] * rate
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class LlamaMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.feed_forward = LlamaAttention(width, heads), LlamaMLP(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class TinyLlama(nn.Module):
    """tokens (batch, length) -> the mean next-token loss, a scalar."""

    def __init__(
        self, depth: int = 2, hidden: int = 40, checkpointing: bool = False, heads: int = 4
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(LlamaBlock(WIDTH, heads, hidden) for _ in range(depth))
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens[:, :-1])
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@dataclass(frozen=True)
class Case:
    """A model, how it is parallelized and trained.

    Attributes:
        plan: "plain" leaves activations whole between layers, "sequence" divides them, "loss" keeps
            the logits divided up to the loss. "layers" divides feed-forward layers, embedding and
            head only. "none" leaves the model as it is.
        frozen: names (or their beginnings) that are not trained.
        options: of `Recipe.zero`.
    """

    model: str = "llama"
    plan: str = "plain"
    dp: int = 2
    tp: int = 2
    hidden: int = 40
    steps: int = 3
    micro_batches: int = 1
    max_norm: float = 0.5
    checkpointing: bool = False
    adapters: bool = False
    meta: bool = False
    tied: bool = False
    frozen: tuple[str, ...] = ()
    scaler: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def built(case: Case) -> nn.Module:
    torch.manual_seed(0)
    if case.model == "gpt":
        return TinyGPT(
            vocabulary=VOCABULARY,
            width=WIDTH,
            length=LENGTH + 1,
            checkpointing="non-reentrant" if case.checkpointing else "none",
        )
    model = TinyLlama(hidden=case.hidden, checkpointing=case.checkpointing)
    if case.adapters:
        for layer in model.layers:
            layer.feed_forward = WithAdapters(layer.feed_forward)
    return model


class WithAdapters(nn.Module):
    """A feed-forward layer whose whole output gets a plain adapter beside it."""

    def __init__(self, base: LlamaMLP) -> None:
        super().__init__()
        self.base = base
        generator = torch.Generator().manual_seed(3)
        self.a = nn.Parameter(torch.randn(2, WIDTH, generator=generator) * 0.1)
        self.b = nn.Parameter(torch.randn(WIDTH, 2, generator=generator) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


def plan_of(case: Case) -> dict[str, Any]:
    """The plan of `parallelize_module`, as torchtitan has it for Llama."""
    if case.model == "gpt":
        return {
            "tokens": RowwiseParallel(input_layouts=Replicate()),
            "blocks.*.mlp.0": ColwiseParallel(),
            "blocks.*.mlp.2": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
    mlp = "layers.*.feed_forward.base" if case.adapters else "layers.*.feed_forward"
    inner = {
        "layers.*.attention.wq": ColwiseParallel(),
        "layers.*.attention.wk": ColwiseParallel(),
        "layers.*.attention.wv": ColwiseParallel(),
        f"{mlp}.w1": ColwiseParallel(),
        f"{mlp}.w3": ColwiseParallel(),
    }
    if case.plan == "layers":
        return {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
            # As DTensors: torch takes local outputs for parts of equal length
            f"{mlp}.w1": ColwiseParallel(use_local_output=False),
            f"{mlp}.w3": ColwiseParallel(use_local_output=False),
            f"{mlp}.w2": RowwiseParallel(),
            "output": ColwiseParallel(output_layouts=Replicate()),
        }
    if case.plan == "plain":
        return {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
            **inner,
            "layers.*.attention.wo": RowwiseParallel(),
            f"{mlp}.w2": RowwiseParallel(),
            "output": ColwiseParallel(output_layouts=Replicate()),
        }
    spread = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    last = (
        ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
        if case.plan == "loss"
        else ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    )
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": spread,
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.feed_forward": spread,
        **inner,
        "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        f"{mlp}.w2": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": last,
    }


def batches_of(case: Case, dp: int) -> list[Tensor]:
    # 13 tokens make 12 positions, which two or three ranks can divide
    return [
        tokens_of(100 * dp + i, batch=2, length=LENGTH + 1, vocabulary=VOCABULARY)
        for i in range(case.steps * case.micro_batches)
    ]


def initialize(module: nn.Module) -> None:
    """Initialize one module by the shapes of its parameters alone."""
    for param in module.parameters(recurse=False):
        drawn = torch.randn(
            param.shape, generator=torch.Generator().manual_seed(param.numel() + param.ndim)
        )
        with torch.no_grad():
            param.copy_(1.0 + 0.1 * drawn if param.ndim == 1 else 0.1 * drawn)


def freeze(model: nn.Module, case: Case) -> None:
    for name, param in model.named_parameters():
        if case.frozen and name.startswith(case.frozen):
            param.requires_grad_(False)


def mesh_of_case(case: Case) -> DeviceMesh:
    return init_device_mesh("cpu", (case.dp, case.tp), mesh_dim_names=("dp", "tp"))


def parallelized(case: Case, mesh: DeviceMesh) -> nn.Module:
    with torch.device("meta") if case.meta else contextlib.nullcontext():
        model = built(case)
    if case.plan != "none":
        parallelize_module(model, mesh["tp"], plan_of(case))
    if case.tied:
        model.output.weight = model.tok_embeddings.weight
    freeze(model, case)  # after it: SequenceParallel makes frozen norms trainable again
    return model


def trained(stage: int, case: Case) -> dict[str, Any]:
    """Train on the mesh. Returns losses and norms of each step, and on rank 0 the weights."""
    import onefold

    mesh = mesh_of_case(case)
    model = parallelized(case, mesh)
    recipe = onefold.Recipe.zero(stage, stall_timeout=30.0, **case.options)
    init = initialize if case.meta else None
    model = onefold.shard(model, recipe, mesh=mesh, data="dp", init=init)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = onefold.GradScaler(model, init_scale=2.0**10) if case.scaler else None
    losses, norms = [], []
    batches = batches_of(case, mesh.get_local_rank("dp"))
    for step in range(case.steps):
        mine = batches[step * case.micro_batches : (step + 1) * case.micro_batches]
        for i, batch in enumerate(mine):
            last = i + 1 == len(mine)
            with (
                contextlib.nullcontext() if last else onefold.no_sync(model),
                loss_parallel() if case.plan == "loss" else contextlib.nullcontext(),
            ):
                loss = model(batch)
                value = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
                losses.append(value.item())
                scaled = loss / len(mine)
                (scaler.scale(scaled) if scaler else scaled).backward()
        if scaler:
            scaler.unscale_(optimizer)
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
        "shapes": {name: tuple(p.shape) for name, p in model.named_parameters()},
        "gathered": len(engine.gather.by_storage),
        "reordered": reordered(model),
        "coordinate": mesh.get_coordinate(),
        "rank": dist.get_rank(),
    }


def reordered(model: nn.Module) -> bool:
    """Whether parameters of some flat buffer have another order than in the model."""
    import onefold

    place = {name: i for i, (name, _) in enumerate(model.named_parameters())}
    orders = [
        [place[entry.slot.name] for entry in flat.entries]
        for unit in onefold.engine_of(model).units
        for flat in unit.flats
    ]
    return any(order != sorted(order) for order in orders)


def at_stages(stages: list[int], case: Case) -> list[dict[str, Any]]:
    """Train at each stage, one after the other in the same processes."""
    return [trained(stage, case) for stage in stages]


def in_one_process(case: Case) -> dict[str, Any]:
    """The same training on all data ranks' batches together."""
    model = built(case)
    if case.meta:
        model.apply(initialize)
    if case.tied:
        model.output.weight = model.tok_embeddings.weight
    freeze(model, case)
    precision = case.options.get("precision", "fp32")
    assert precision == "fp32", "one process is the reference of fp32 runs"
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=0.01)
    every = [batches_of(case, dp) for dp in range(case.dp)]
    losses: list[list[float]] = [[] for _ in range(case.dp)]
    norms = []
    for step in range(case.steps):
        for i in range(step * case.micro_batches, (step + 1) * case.micro_batches):
            for dp in range(case.dp):
                loss = model(every[dp][i])
                losses[dp].append(loss.item())
                (loss / case.dp / case.micro_batches).backward()
        norms.append(nn.utils.clip_grad_norm_(trainable, case.max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return {
        "losses": losses,
        "norms": norms,
        "weights": dict(model.state_dict()),
        "shapes": {name: tuple(p.shape) for name, p in model.named_parameters()},
    }
