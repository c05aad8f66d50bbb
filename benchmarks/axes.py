"""Onefold beside FSDP2 on a mesh of two axes: the same model, cut over one axis by the same code of
torch, sharded over the other by each library.

    python -m benchmarks axes                     # TP 2 x DP 2, EP 2 x DP 2, PP 2 x DP 2: three minutes a round
    python -m benchmarks axes --axes tp --sides fsdp2 onefold-3 --rounds 1
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from benchmarks import gpt, harness, trainers, training
from benchmarks.gpt import PRECISIONS, Batch
from benchmarks.harness import Row
from benchmarks.pages import Cell, shown

AXES: dict[str, str] = {"tp": "TP 2 × DP 2", "ep": "EP 2 × DP 2", "pp": "PP 2 × DP 2"}
"""Compositions on four ranks."""

MESHES = {"tp": ("dp", "tp"), "ep": ("efsdp", "ep"), "pp": ("pp", "dp")}
"""Dimensions of the mesh of each composition."""

SIZES: dict[str, tuple[str, int, int]] = {
    "tp": ("gpt-34m", 64, 1),
    "ep": ("moe-51m", 64, 1),
    "pp": ("gpt-34m", 16, 4),
}
"""By composition: the model, tokens of a data rank and micro-batch, micro-batches. 64 tokens a data
rank are to 34M parameters what 256 are to the 110M of `peers`: the wire is the bottleneck.
"""

SIDES: tuple[str, ...] = ("fsdp2", "onefold-3", "fsdp2-kept", "onefold-1", "onefold-2")
"""In the order of a round. A number is the ZeRO stage."""

GOALS = {"step": ("ratio", 0.8), "peak": ("peak_ratio", 0.7)}
"""What stage 3 should reach beside FSDP2."""

NOTES: dict[str, str] = {
    "all": (
        "the same modules, cut by the same code: TP by parallelize_module (embedding, attention,"
        " feed-forward layers and head divided, activations whole between layers); EP by"
        " distribute_tensor(Shard(0)) of the experts over ep and an all-to-all; PP by torch's"
        " Schedule1F1B with two stages. Sent bytes include the other axis's activations"
    ),
    "fsdp2": (
        "fully_shard of each block, then of the root, with reshard_after_forward=True for blocks;"
        " of experts first, over the ranks that hold the same ones, with a gradient divided by all"
        " data ranks, as torchtitan does"
    ),
    "fsdp2-kept": "the same with reshard_after_forward=False, torchtitan's choice for pipelines",
    "onefold-N": (
        "onefold.shard with Recipe.zero(N), mesh= and data=; of each stage's module for PP, in"
        " onefold.parallel.PipelineStage"
    ),
}


@dataclass(frozen=True)
class Setting(gpt.Setting):
    """`axes`: a name of `AXES`. `tokens` are per data rank and micro-batch."""

    axes: str = "tp"
    ranks: int = 4

    @property
    def data_ranks(self) -> int:
        """Ranks that compute with different tokens."""
        return self.ranks if self.axes == "ep" else self.ranks // 2

    def data_rank(self, rank: int) -> int:
        """Which of them a rank is, or computes with."""
        # (dp, tp), (dp, ep), (pp, dp)
        return {"tp": rank // 2, "ep": rank, "pp": rank % (self.ranks // 2)}[self.axes]

    @property
    def title(self) -> str:
        return f"{AXES[self.axes]}, {super().title}"

    @property
    def tokens_a_step(self) -> int:
        return self.tokens * self.accumulation * self.data_ranks


# -- the model: a GPT whose head and embedding are apart, dense or with experts ---------------------


@dataclass(frozen=True)
class Shape(gpt.Shape):
    """`hidden`: width of the feed-forward layer, or of each of `experts`, if there are any; each
    token goes to two of them.
    """

    hidden: int = 0
    experts: int = 0


SHAPES: dict[str, Shape] = {
    "gpt-34m": Shape(layers=8, width=512, heads=8, vocab=8192, seq=128, hidden=2048),
    "moe-51m": Shape(layers=8, width=512, heads=8, vocab=8192, seq=128, hidden=512, experts=8),
    "gpt-tiny": Shape(layers=2, width=64, heads=4, vocab=512, seq=32, hidden=128),
    "moe-tiny": Shape(layers=2, width=64, heads=4, vocab=512, seq=32, hidden=64, experts=4),
}


class Attention(nn.Module):
    """Causal attention. Under tensor parallelism a rank has some of the heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.width_of_head = shape.width // shape.heads
        self.q, self.k, self.v, self.out = (
            nn.Linear(shape.width, shape.width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (
            project(x).view(batch, seq, -1, self.width_of_head).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, -1))
        return out


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.gelu(self.up(x)))
        return out


class AllToAll(torch.autograd.Function):
    """Sends `sizes[r]` rows to rank r of the group, and gets `back[r]` from it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], back: list[int], group: Any) -> Tensor:
        ctx.sizes, ctx.back, ctx.group = sizes, back, group
        out = x.new_empty(sum(back), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), back, sizes, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        out = grad.new_empty(sum(ctx.sizes), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), ctx.sizes, ctx.back, group=ctx.group)
        return out, None, None, None


class Experts(nn.Module):
    """Feed-forward layers in two stacks, [experts, ...]. `group`: the ranks that they are divided
    over, each of which computes its own.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.count = shape.experts
        self.up = nn.Parameter(torch.empty(shape.experts, shape.width, shape.hidden))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.width))
        self.group: Any = None

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        """x: (rows, width); expert: (rows,), the number of the one that each is sent to."""
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=self.count)
        y = (
            self._computed(x[order], counts, self.up, self.down)
            if self.group is None
            else self._elsewhere(x[order], counts)
        )
        return torch.empty_like(y).index_copy(0, order, y)

    def _elsewhere(self, x: Tensor, counts: Tensor) -> Tensor:
        size = dist.get_world_size(self.group)
        told = torch.empty_like(counts)  # rows for this rank's experts, by the rank that sends them
        dist.all_to_all_single(told, counts, group=self.group)
        sizes: list[int] = counts.view(size, -1).sum(1).tolist()
        back: list[int] = told.view(size, -1).sum(1).tolist()
        rows: Tensor = AllToAll.apply(x, sizes, back, self.group)
        own = self.count // size
        mine = torch.arange(own).repeat(size).repeat_interleave(told)
        order = mine.argsort(stable=True)
        local = [weight.to_local() for weight in (self.up, self.down)]  # type: ignore[operator]
        y = self._computed(rows[order], torch.bincount(mine, minlength=own), *local)
        y = torch.empty_like(y).index_copy(0, order, y)
        out: Tensor = AllToAll.apply(y, back, sizes, self.group)
        return out

    @staticmethod
    def _computed(x: Tensor, counts: Tensor, up: Tensor, down: Tensor) -> Tensor:
        # An expert without rows takes part with none: its gradient is zeros
        parts = zip(x.split(counts.tolist()), up.unbind(), down.unbind(), strict=True)
        return torch.cat([functional.gelu(rows @ u) @ d for rows, u, d in parts])


class Mixture(nn.Module):
    """A router and its experts."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.experts = Experts(shape)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        scores, chosen = self.router(rows).softmax(-1).topk(2)
        y = self.experts(rows.repeat_interleave(2, 0), chosen.flatten())
        out = (y * scores.reshape(-1, 1)).view(-1, 2, x.shape[-1]).sum(1)
        return out.view_as(x)


class Block(nn.Module):
    """Pre-norm attention and feed-forward, (batch, seq, width) to the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp = Mixture(shape) if shape.experts else FeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        out: Tensor = x + self.mlp(self.norm_2(x))
        return out


class Stage(nn.Module):
    """Some blocks of a GPT, with its embeddings if they are the first and its head if they are the
    last. Blocks have the names that they have in the whole.
    """

    def __init__(self, shape: Shape, blocks: Sequence[int] | None = None) -> None:
        super().__init__()
        mine = range(shape.layers) if blocks is None else blocks
        self.is_first, self.is_last = 0 in mine, shape.layers - 1 in mine
        if self.is_first:
            self.tokens = nn.Embedding(shape.vocab, shape.width)
            self.positions = nn.Embedding(shape.seq, shape.width)
        self.blocks = nn.ModuleDict({str(number): Block(shape) for number in mine})
        if self.is_last:
            self.norm = nn.RMSNorm(shape.width)
            self.head = nn.Linear(shape.width, shape.vocab, bias=False)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """`x`: ids, (batch, seq) int64, or what the stage before has computed. The mean loss if
        there are labels, else what the last block or the head has computed.
        """
        if self.is_first:
            places = torch.arange(x.shape[1], device=x.device)
            x = self.tokens(x) + self.positions(places)
        for block in self.blocks.values():
            x = block(x)
        if self.is_last:
            x = self.head(self.norm(x))
        return x if labels is None else loss_of(x, labels)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def built(name: str, blocks: Sequence[int] | None = None, device: str = "cpu") -> Stage:
    """The model of that name, or some of its blocks: with the same weights in every process."""
    with torch.device("meta"):
        stage = Stage(SHAPES[name], blocks)
    stage.to_empty(device=device)
    for weight_name, weight in stage.named_parameters():
        if weight.ndim == 1:
            nn.init.ones_(weight)
        else:  # by its name, so that a stage draws what the whole model does
            source = torch.Generator(device).manual_seed(crc32(weight_name.encode()))
            nn.init.normal_(weight, std=0.02, generator=source)
    return stage


def count_parameters(name: str) -> int:
    """Elements of the model of that name; nothing is allocated."""
    with torch.device("meta"):
        return sum(p.numel() for p in Stage(SHAPES[name]).parameters())


def batches(setting: Setting, step: int, rank: int) -> list[Batch]:
    """A rank's micro-batches of a step: those of its data rank."""
    at, shape = setting.data_rank(rank), SHAPES[setting.model]
    return [
        gpt.micro_batch(shape, setting.tokens, step, micro, at, setting.data_ranks)
        for micro in range(setting.accumulation)
    ]


# -- sides: the model is cut over an axis by torch, then sharded over the data axes ------------------


def mesh_of(setting: Setting) -> DeviceMesh:
    first = 2 if setting.axes == "pp" else setting.ranks // 2
    sizes = (first, setting.ranks // first)
    return init_device_mesh(setting.device, sizes, mesh_dim_names=MESHES[setting.axes])


def cut(setting: Setting, mesh: DeviceMesh) -> Stage:
    """What a rank runs, before it is sharded; the same for all sides."""
    if setting.axes == "pp":
        layers = range(SHAPES[setting.model].layers)
        half = len(layers) // 2
        blocks = layers[half:] if mesh.get_local_rank("pp") else layers[:half]
        return built(setting.model, blocks, setting.device)
    whole = built(setting.model, device=setting.device)
    if setting.axes == "tp":
        attention, mlp = "blocks.*.attention", "blocks.*.mlp"
        plan: dict[str, Any] = {
            "tokens": RowwiseParallel(input_layouts=Replicate()),
            **{f"{attention}.{name}": ColwiseParallel() for name in "qkv"},
            f"{attention}.out": RowwiseParallel(),
            f"{mlp}.up": ColwiseParallel(),
            f"{mlp}.down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(whole, mesh["tp"], plan)
    else:
        for experts in experts_of(whole):
            experts.group = mesh.get_group("ep")
            for name in ("up", "down"):
                weight = distribute_tensor(getattr(experts, name).data, mesh["ep"], [Shard(0)])
                setattr(experts, name, nn.Parameter(weight))
    return whole


def experts_of(module: nn.Module) -> list[Experts]:
    return [one for one in module.modules() if isinstance(one, Experts)]


class _Pipelined:
    """A step by torch's 1F1B schedule."""

    setting: Setting
    optimizer: torch.optim.Optimizer

    def schedule_over(self, stage: Any, mesh: DeviceMesh) -> None:
        self.stage, self.group = stage, mesh.get_group("pp")
        self.schedule = pipelining.Schedule1F1B(
            stage, n_microbatches=self.setting.accumulation, loss_fn=loss_of
        )

    def step(self, batches: Sequence[Batch]) -> float:
        ids, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        losses: list[Tensor] = []
        if self.stage.is_last:
            self.schedule.step(target=labels, losses=losses)
        else:
            self.schedule.step(ids)
        self.optimizer.step()
        self.optimizer.zero_grad()
        # The rank of the first stage is told what the last one has found
        mean = torch.stack(losses).detach().mean() if losses else torch.zeros((), device=ids.device)
        dist.broadcast(mean, group=self.group, group_src=1)
        return float(mean)


class FSDP2(trainers.Torch):
    """`fully_shard` of each block, then of the root.

    Args:
        kept: whole parameters live from the forward to the backward pass.
    """

    def __init__(self, setting: Setting, *, kept: bool = False) -> None:
        super().__init__(setting)
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.autocast = False
        dtype = torch.bfloat16 if setting.precision == "bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype and torch.float32)
        mesh = mesh_of(setting)
        self.model = part = cut(setting, mesh)
        data = mesh._flatten("dp") if setting.axes == "ep" else mesh["dp"]
        how: dict[str, Any] = {"mesh": data, "mp_policy": policy}
        for block in part.blocks.values():
            for experts in experts_of(block):
                own = {**how, "mesh": mesh["efsdp"], "reshard_after_forward": not kept}
                sharded = fully_shard(experts, **own)
                # As torchtitan: they have gradients of all data ranks' tokens. By a division of its
                # own, since gloo has none
                sharded.set_gradient_divide_factor(setting.data_ranks)
                sharded.set_force_sum_reduction_for_comms(True)
            fully_shard(block, reshard_after_forward=not kept, **how)
        fully_shard(part, **how)
        self.optimizer = trainers.adamw(part.parameters())
        self.mesh = mesh


class FSDP2Pipelined(_Pipelined, FSDP2):
    def __init__(self, setting: Setting, **how: Any) -> None:
        super().__init__(setting, **how)
        at, device = self.mesh.get_local_rank("pp"), torch.device(setting.device)
        group = self.mesh.get_group("pp")
        self.schedule_over(
            pipelining.PipelineStage(self.model, at, 2, device, group=group), self.mesh
        )


class Onefold(trainers.Onefold):
    """`onefold.shard` of what a rank runs."""

    def __init__(self, setting: Setting, stage: int) -> None:
        self.mesh = mesh = mesh_of(setting)
        ranks: dict[str, Any] = {"mesh": mesh, "data": MESHES["ep"]}
        if setting.axes != "ep":
            ranks = {"mesh": mesh["dp"] if setting.axes == "pp" else mesh, "data": "dp"}
        super().__init__(setting, cut(setting, mesh), stage, ranks)


class OnefoldPipelined(_Pipelined, Onefold):
    def __init__(self, setting: Setting, stage: int) -> None:
        super().__init__(setting, stage)
        parallel = importlib.import_module("onefold.parallel")
        at, device = self.mesh.get_local_rank("pp"), torch.device(setting.device)
        group = self.mesh.get_group("pp")
        self.schedule_over(
            parallel.PipelineStage(self.model, at, 2, device, group=group), self.mesh
        )


def build(side: str, setting: Setting) -> Any:
    """The side on this rank, from the same fp32 weights as every other."""
    family, _, how = side.partition("-")
    pipelined = setting.axes == "pp"
    if family == "fsdp2":
        return (FSDP2Pipelined if pipelined else FSDP2)(setting, kept=how == "kept")
    return (OnefoldPipelined if pipelined else Onefold)(setting, int(how))


def prepare(job: dict[str, Any]) -> None:
    trainers.prepare(job["side"])


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """One side on this rank."""

    def made(setting: Any) -> Any:
        return build(job["side"], setting)

    return training.measured(job, Setting(**job["setting"]), made, batches)


class BesideFSDP2(training.Steps):
    schema, module, known, notes = "onefold-axes/2", "benchmarks.axes", SIDES, NOTES
    read, reference = Setting, "fsdp2"

    def columns(self, setting: gpt.Setting) -> Mapping[str, Cell]:
        usual = {**training.times("FSDP2"), **training.MEMORY}
        share = {"peak × FSDP2": shown("peak_ratio", "{:.2f}")}
        return {**usual, **share, **training.WIRE, **training.LOSS}

    def count(self, name: str) -> int:
        return count_parameters(name)

    def goals(self, judged: Any) -> list[Row]:
        found = []
        for setting, rows in judged:
            ours = next((row for row in rows if row["side"] == "onefold-3"), {})
            for what, (field, most) in GOALS.items():
                text = f"{AXES[setting.axes]}, stage 3: {what} at most {most} of FSDP2's"
                found.append(harness.goal(text, ours.get(field), most))
        return found


@harness.command(
    "axes",
    __doc__,
    name="axes_beside_fsdp2",
    rounds=3,
    steps=5,
    warmup=2,
    timeout=300.0,
    axes=(list(AXES), "which compositions", AXES),
    sides=(list(SIDES), f"which of {', '.join(SIDES)}; a family's name takes all of it"),
    precision=("fp32", "what is computed in", PRECISIONS),
    tiny=(False, "models of a moment, for tests"),
    **harness.OPTIONS,
)
def main(options: harness.Options) -> int:
    harness.check_at_least(options, 1, "steps", "rounds")
    harness.check_at_least(options, 0, "warmup")
    shared = {n: getattr(options, n) for n in ("warmup", "steps", "threads", "precision")}
    settings = []
    for axes in options.axes:
        name, tokens, micro = SIZES[axes]
        if options.tiny:
            name, tokens = f"{name.partition('-')[0]}-tiny", 32
        settings.append(Setting(axes=axes, model=name, tokens=tokens, accumulation=micro, **shared))
    return BesideFSDP2(options, settings).run()
