"""The native path of every recipe: the same bits over the stand-in for NCCL as over gloo, which is
what all other tests run on.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import standin
from invariants.test_same_numbers import Run
from ranks import run_ranks
from trials import STAGES, GPTCase, MLPCase, differences, train_sharded
from zoo import TinyMLP, features_of

Recipes = dict[str, tuple[GPTCase, int, dict[str, Any]]]


class Scaled(Run):
    """fp16 with a GradScaler: the first step overflows everywhere, the third on rank 1 alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.scaler: Any = None

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int
    ) -> float:
        import onefold

        if step == 0:
            self.scaler = onefold.GradScaler(model, init_scale=2.0**24)
        optimizer.zero_grad()
        loss = self.loss(model, self.batch(rank, step))
        self.scaler.scale(loss * (1e6 if (step, rank) == (2, 1) else 1)).backward()
        self.scaler.unscale_(optimizer)
        self.clip(model)
        self.scaler.step(optimizer)
        self.scaler.update()
        return loss.item() + self.scaler.get_scale()


class Frozen(Run):
    """Only the second block and the head are trained: parts of flat buffers, and units with nothing
    to reduce.
    """

    def build(self) -> nn.Module:
        model = super().build()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(
                "blocks.1" in name or "head" in name or name.endswith("norm_1.bias")
            )
        return model


class FrozenLater(Run):
    """Parameters are frozen and trained again between steps: what is reduced are parts of flat
    buffers.
    """

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int
    ) -> float:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (step % 2 and ("mlp.0" in name or "norm_1" in name)))
        return super().step(model, optimizer, rank, step)


class Normed(MLPCase):
    """Batch normalization: its statistics are rank 0's."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 4))


class Experts(MLPCase):
    """Each rank uses another block, and nobody the last one."""

    class Model(TinyMLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.leave(self.blocks[dist.get_rank() % 2](torch.tanh(self.enter(x))))

    def build(self) -> nn.Module:
        return self.Model()


def plain() -> Recipes:
    found: Recipes = {}
    for stage in STAGES:
        found |= {
            f"stage {stage}": (Run(kind="fused adamw", max_norm=0.5, steps=3), stage, {}),
            f"stage {stage}, accumulating": (Run(kind="sgd", micro_batches=2, steps=2), stage, {}),
            f"stage {stage}, bf16": (Run(max_norm=0.5, steps=3), stage, {"precision": "bf16"}),
            f"stage {stage}, other experts": (Experts(), stage, {}),
        }
    return found | {
        "a whole unit frozen": (Frozen(steps=2), 3, {}),
        "frozen later, stage 1": (FrozenLater(kind="sgd", steps=4), 1, {}),
        "frozen later, stage 3": (FrozenLater(kind="sgd", steps=4), 3, {}),
        "without overlap": (Run(steps=2), 3, {"overlap": False}),
        "far ahead": (Run(steps=3), 3, {"prefetch": 3, "in_flight": 4}),
        "kept between the passes": (Run(steps=2), 3, {"reshard_after_forward": False}),
        "recomputed": (Run(checkpointing="non-reentrant", steps=2), 3, {}),
        "at the boundary": (Run(micro_batches=2, steps=2), 3, {"reduce_at": "boundary"}),
        "fp32 on the wire of bf16": (Run(steps=2), 2, {"precision": "bf16", "wire": "fp32"}),
        "a scaler, stage 1": (Scaled(max_norm=0.5, steps=4), 1, {"precision": "fp16"}),
        "a scaler, stage 3": (Scaled(max_norm=0.5, steps=4), 3, {"precision": "fp16"}),
        "buffers": (Normed(), 2, {}),
        "in tiles": (Run(steps=2), 3, {"tile": 4096}),
    }  # fmt: skip


def over_groups() -> Recipes:
    def run(**more: Any) -> Run:
        return Run(kind="fused adamw", max_norm=0.5, steps=3, **more)

    return {
        "stage 0 in groups": (run(), 0, {"group": 2}),
        "stage 0 in groups, bf16": (run(), 0, {"group": 2, "precision": "bf16"}),
        "frozen later at stage 0 in groups": (FrozenLater(kind="sgd", steps=4), 0, {"group": 2}),
        "stage 1 in groups": (run(), 1, {"group": 2}),
        "stage 3 in groups": (run(), 3, {"group": 2}),
        "HSDP": (run(), 3, {"shard_group": 2}),
        "HSDP, accumulating": (Run(micro_batches=3, steps=2), 3, {"shard_group": 2}),
        "optimizer over all": (run(), 3, {"shard_group": 2, "optimizer_over": "all"}),
        "stage 1 inside groups, bf16": (run(), 1, {"shard_group": 2, "precision": "bf16"}),
        "second copy": (run(), 3, {"group": 2, "second_copy": True}),
        "other experts in groups": (Experts(), 3, {"group": 2}),
        "frozen later in groups": (FrozenLater(kind="sgd", steps=4), 3, {"shard_group": 2}),
    }


def encoded() -> Recipes:
    def run(**more: Any) -> Run:
        return Run(kind="fused adamw", max_norm=0.5, steps=3, **more)

    codecs = {
        f"{gather} and {reduce}": (
            run(),
            3,
            {"gather_codec": gather, "reduce_codec": reduce, "group": 2},
        )
        for gather, reduce in (("int8", "int4"), ("fp8", "int8"), ("int4", "fp8"))
    }
    return codecs | {
        "second copy, int8": (run(), 3, {"gather_codec": "int8", "reduce_codec": "int4", "second_copy": True, "group": 2}),
        "with feedback": (run(), 3, {"reduce_codec": "int4", "error_feedback": True, "group": 2}),
        "with feedback and a scaler": (
            Scaled(max_norm=0.5, steps=4), 3, {"reduce_codec": "int8", "error_feedback": True, "group": 2, "precision": "fp16"},
        ),
        "stochastic": (run(), 2, {"reduce_codec": "int8", "wire_rounding": "stochastic", "group": 2}),
        "HSDP, int8": (Run(micro_batches=2, steps=2), 3, {"shard_group": 2, "reduce_codec": "int8"}),
        "frozen weights as nf4": (Frozen(steps=2), 3, {"frozen": "nf4"}),
        "frozen weights as int4 in groups": (Frozen(steps=2), 3, {"frozen": "int4", "group": 2}),
    }  # fmt: skip


def offloaded() -> Recipes:
    def run(**more: Any) -> Run:
        return Run(kind="fused adamw", max_norm=0.5, steps=3, **more)

    return {
        "states on the host": (run(), 1, {"offload_optimizer": "cpu"}),
        "half of them": (run(), 2, {"offload_optimizer": 0.5}),
        "everything on the host": (
            run(micro_batches=2),
            3,
            {"offload_optimizer": "cpu", "offload_param": "cpu"},
        ),
        "everything on NVMe": (run(), 3, {"offload_optimizer": "nvme", "offload_param": "nvme"}),
        "behind the backward pass": (
            Run(kind="fused adamw", steps=3),
            3,
            {"offload_optimizer": "cpu", "step_in_backward": True},
        ),
        "second copy, states on the host": (
            run(),
            3,
            {"offload_optimizer": "cpu", "second_copy": True, "group": 2},
        ),
        "activations on the host": (run(), 3, {"offload_activations": "cpu"}),
        "moments in int8": (Run(kind="adamw", steps=3), 2, {"moments": "int8"}),
    }


SETS = {"plain": plain, "over groups": over_groups, "encoded": encoded, "offloaded": offloaded}


def compare(which: str, folder: str | None, names: list[str]) -> list[str]:
    """What differs between gloo and the stand-in on this rank."""
    group, found = standin.new_group(), []
    of_name = SETS[which]()
    for name in names:
        case, stage, options = of_name[name]
        if "nvme" in options.values():
            options = {**options, "nvme": folder, "chunk": 65536}
        expected = train_sharded(case, stage, **options)
        native = train_sharded(case, stage, process_group=group, **options)
        found += differences(name, expected, native, 0.0, 0.0)
        if any(loss != loss for loss in expected.losses):
            found.append(f"{name}: gloo's own losses are {expected.losses}")
    return found


@pytest.mark.parametrize(("which", "world_size"), [("plain", 2), ("plain", 4), ("over groups", 4), ("encoded", 4), ("offloaded", 2),
                                                   ("offloaded", 4)])  # fmt: skip
def test_every_recipe_gives_the_same_bits_on_a_native_backend(
    which: str, world_size: int, tmp_path: Path, sample: Any
) -> None:
    names = sample(SETS[which](), 3)
    assert run_ranks(world_size, compare, which, str(tmp_path), names) == [[]] * world_size


def a_life(folder: str, group: Any, stage: int, options: dict[str, Any]) -> dict[str, Tensor]:
    """Everything that moves state: made from the meta device, trained, saved, read, written, loaded
    at another stage.
    """
    import onefold

    def made(stage: int, **more: Any) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        with torch.device("meta"):
            model: Any = nn.Sequential(
                nn.Linear(7, 12),
                nn.BatchNorm1d(12),
                nn.Linear(12, 12),
                nn.Linear(12, 3, bias=False),
            )
        recipe = onefold.Recipe.zero(stage, stall_timeout=30.0, **more)
        model = onefold.shard(model, recipe, group=group, init=lambda m: m.reset_parameters())
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, fused=True)

    def trained(model: Any, optimizer: torch.optim.Optimizer, first: int) -> None:
        for step in range(first, first + 2):
            model(features_of(10 * step + dist.get_rank(), 5, 7)).square().mean().backward()
            onefold.clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()

    out: dict[str, Tensor] = {}

    def keep(name: str, tensors: Any) -> None:
        out.update(
            {
                f"{name}.{key}": t.detach().clone()
                for key, t in tensors.items()
                if isinstance(t, Tensor)
            }
        )

    def losses_at(model: Any, name: str) -> None:
        with torch.no_grad():
            out[name] = model(features_of(99, 5, 7)).square().mean()

    with contextlib.chdir(folder):
        model, optimizer = made(stage, **options)
        trained(model, optimizer, 0)
        losses_at(model, "trained")
        onefold.save("first", model=model, optimizer=optimizer)
        keep("whole", onefold.full_state_dict(model))
        with onefold.full_params(model, write=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.125 * (1 + dist.get_rank()))  # rank 0's are everybody's
        losses_at(model, "written to")
        keep("norms", {name: p.norm() for name, p in model.named_parameters()})
        other, its = made(3 - stage)
        onefold.load("first", model=other, optimizer=its)
        trained(other, its, 2)
        keep("loaded", onefold.full_state_dict(other))
        whole = onefold.full_state_dict(model)
        onefold.load_full_state_dict(model, whole if dist.get_rank() == 0 else None)
        trained(model, optimizer, 4)
        keep("loaded whole", onefold.full_state_dict(model))
    return out


LIVES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "stage 0": (2, 0, {}), "stage 1": (2, 1, {}), "stage 2": (3, 2, {}), "stage 3": (3, 3, {}),
    "stage 3 in groups": (4, 3, {"group": 2}), "HSDP": (4, 3, {"shard_group": 2}),
    "a second copy": (4, 3, {"group": 2, "second_copy": True}),
    "int8": (4, 3, {"group": 2, "gather_codec": "int8"}), "on the host": (2, 3, {"offload_optimizer": "cpu", "offload_param": "cpu"}),
}  # fmt: skip


def both_lives(folder: str, stage: int, options: dict[str, Any]) -> list[str]:
    found = []
    lives = []
    for name, group in (("gloo", None), ("native", standin.new_group())):
        place = Path(folder) / name
        place.mkdir(exist_ok=True)
        lives.append(a_life(str(place), group, stage, options))
    for key in sorted(set(lives[0]) | set(lives[1])):
        a, b = lives[0].get(key), lives[1].get(key)
        if a is None or b is None or not torch.equal(a, b):
            found.append(f"{key}: gloo has {a}, the native backend {b}")
    return found if len(lives[0]) > 6 else ["nothing was kept"]


@pytest.mark.parametrize("life", LIVES)
def test_all_state_moves_over_a_native_backend_as_over_gloo(life: str, tmp_path: Path) -> None:
    world_size, stage, options = LIVES[life]
    assert run_ranks(world_size, both_lives, str(tmp_path), stage, options) == [[]] * world_size


def over_the_default_group(folder: str, how: str) -> list[str]:
    """The stand-in as the group of all ranks, as a program would start NCCL."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    expected = train_sharded(Run(steps=2), 3)
    dist.destroy_process_group()
    standin.register()
    store = dist.FileStore(f"{folder}/again", world_size)
    dist.init_process_group(how, store=store, rank=rank, world_size=world_size)
    assert "standin" in dist.get_backend_config()
    native = train_sharded(Run(steps=2), 3)
    return differences(how, expected, native, 0.0, 0.0) + (
        [] if standin.launched["all_gather"] else ["nothing was gathered over it"]
    )


@pytest.mark.parametrize("how", ["standin", "cpu:standin"])
def test_the_default_group_may_be_native(how: str, tmp_path: Path) -> None:
    assert run_ranks(2, over_the_default_group, str(tmp_path), how) == [[]] * 2
