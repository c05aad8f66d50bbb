"""A ds_config.json that offloads, through `onefold.initialize` from its file to its last step: the
same numbers, elsewhere at rest.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from integrations.test_deepspeed import ACCUMULATION, STEPS, config
from onefold import Tier
from onefold.offload.nvme import TierError
from ranks import run_ranks

WIDTH = 380  # so that a rank of two steps a block in two chunks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(rank: int, index: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * rank + index))


CPU, NVME = (
    {"device": "cpu", "pin_memory": True},
    {
        "device": "nvme",
        "nvme_path": "FOLDER",
        "buffer_count": 4,
    },
)
#: What files say of "zero_optimization", beside the stage; those with offload_param need stage 3.
STATES: dict[str, dict[str, Any]] = {
    "host": {"offload_optimizer": CPU},
    "half of it on the host": {"offload_optimizer": {**CPU, "ratio": 0.5}},
    "as older files write it": {"cpu_offload": True},
    "NVMe": {"offload_optimizer": {**NVME, "pipeline_read": True}, "sub_group_size": 65536},
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "parameters on the host": {"offload_optimizer": CPU, "offload_param": CPU},
    "parameters on the host, states on NVMe": {"offload_optimizer": NVME, "offload_param": CPU},
    "everything on NVMe": {"offload_optimizer": NVME, "offload_param": NVME, "sub_group_size": 1e9},
}


def written(folder: Path, stage: int, zero: dict[str, Any], **more: Any) -> str:
    """The path of a ds_config.json whose NVMe folder is there."""
    disk = folder / "nvme"
    disk.mkdir(exist_ok=True)
    ranks = dist.get_rank() if dist.is_initialized() else 0
    path = folder / f"ds_config-{ranks}.json"
    aio = {"aio": {"block_size": 262144, "queue_depth": 4}} if "nvme" in str(zero) else {}
    text = json.dumps(
        {**config(stage, **aio, **more), "zero_optimization": {"stage": stage, **zero}}
    )
    path.write_text(text.replace("FOLDER", str(disk)))
    return str(path)


def curve(engine: Any, steps: int = STEPS, rank: int = 0) -> list[Any]:
    """Losses of all micro-batches, norms and whether steps were applied."""
    seen: list[Any] = []
    for index in range(steps * ACCUMULATION):
        loss = engine(batch(rank, index)).float().square().mean()
        engine.backward(loss)
        engine.step()
        seen.append(loss.item())
        if index % ACCUMULATION:
            seen += [engine.get_global_grad_norm(), engine.was_step_applied()]
    return seen


def trained(
    folder: Path, stage: int, zero: dict[str, Any], **more: Any
) -> tuple[list[Any], dict[str, torch.Tensor], Any]:
    engine, optimizer, _, _ = onefold.initialize(
        model=build(), config=written(folder, stage, zero, **more)
    )
    assert type(optimizer) is torch.optim.AdamW
    seen = curve(engine, rank=dist.get_rank() if dist.is_initialized() else 0)
    return seen, onefold.full_state_dict(engine.module), engine


def differing(folder: str, stage: int, which: dict[str, dict[str, Any]], **more: Any) -> list[str]:
    """What is not bit-equal to the same file without its offloading."""
    seen, weights, _ = trained(Path(folder), stage, {}, **more)
    wrong = []
    for name, zero in which.items():
        got, after, engine = trained(Path(folder), stage, zero, **more)
        if got != seen:
            wrong.append(f"{name}: {got} instead of {seen}")
        wrong += [f"{name}: {n} differs" for n in weights if not torch.equal(weights[n], after[n])]
        recipe = onefold.engine_of(engine.module).recipe
        if recipe.optimizer.tier is Tier.DEVICE or (
            ("offload_param" in zero) != (recipe.parameters.tier is not Tier.DEVICE)
        ):
            wrong.append(f"{name}: {recipe.describe()}")
        del engine
    return wrong


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_file_that_offloads_trains_to_the_same_bits(stage: int, tmp_path: Path) -> None:
    which = STATES | (PARAMETERS if stage == 3 else {})
    for wrong in run_ranks(2, differing, str(tmp_path), stage, which):
        assert wrong == []
    assert list((tmp_path / "nvme").iterdir()) == []


@pytest.mark.parametrize("stage", [0, 3])
def test_one_process_trains_from_the_file_as_well(stage: int, tmp_path: Path) -> None:
    assert differing(str(tmp_path), stage, STATES | (PARAMETERS if stage == 3 else {})) == []
    assert list((tmp_path / "nvme").iterdir()) == []


FP16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 2}


def test_scaled_gradients_are_unscaled_wherever_they_rest(tmp_path: Path) -> None:
    which = {name: STATES[name] for name in ("host", "NVMe")} | {
        "everything": PARAMETERS["everything on NVMe"]
    }
    for wrong in run_ranks(2, differing, str(tmp_path), 3, which, fp16=FP16):
        assert wrong == []


def overflow(folder: str, zero: dict[str, Any]) -> list[tuple[float, bool, bool]]:
    """(scale, whether the step was applied, whether weights changed) of steps of which the second
    overflows on rank 1.
    """
    engine, *_ = onefold.initialize(
        model=build(),
        config=written(
            Path(folder), 3, zero, fp16=FP16, scheduler=None, gradient_accumulation_steps=1
        ),
    )
    out = []
    for index in range(3):
        before = onefold.full_state_dict(engine.module)
        loss = engine(batch(dist.get_rank(), index)).float().square().mean()
        engine.backward(loss * math.inf if index == 1 and dist.get_rank() == 1 else loss)
        engine.step()
        after = onefold.full_state_dict(engine.module)
        out.append(
            (
                engine.cur_scale,
                engine.was_step_applied(),
                any(not torch.equal(before[n], after[n]) for n in before),
            )
        )
    return out


@pytest.mark.parametrize("where", [CPU, NVME], ids=["host", "NVMe"])
def test_an_overflow_on_one_rank_leaves_offloaded_states_alone(
    where: dict[str, Any], tmp_path: Path
) -> None:
    first, _ = run_ranks(2, overflow, str(tmp_path), {"offload_optimizer": where})
    assert first == [(256.0, True, True), (128.0, False, False), (128.0, True, True)]


def checkpoint(folder: str, first: dict[str, Any], then: dict[str, Any]) -> list[str]:
    """What differs between a run in one go on the device, and one that goes on from a checkpoint
    with its states elsewhere.
    """
    path, rank = Path(folder), dist.get_rank()
    whole, *_ = onefold.initialize(model=build(), config=written(path, 3, {}))
    seen = curve(whole, 2, rank) + curve(whole, 1, rank)
    begun, *_ = onefold.initialize(model=build(), config=written(path, 3, first))
    curve(begun, 2, rank)
    begun.save_checkpoint(path / "saved", client_state={"epoch": 3})
    resumed, *_ = onefold.initialize(model=build(), config=written(path, 3, then))
    _, client = resumed.load_checkpoint(path / "saved")
    assert client == {"epoch": 3} and resumed.global_steps == 2
    rest = curve(resumed, 1, rank)
    wrong = [] if seen[-len(rest) :] == rest else [f"{rest} instead of {seen[-len(rest) :]}"]
    a, b = onefold.full_state_dict(whole.module), onefold.full_state_dict(resumed.module)
    return wrong + [name for name in a if not torch.equal(a[name], b[name])]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (STATES["NVMe"], STATES["host"]),
        ({}, PARAMETERS["everything on NVMe"]),
        (PARAMETERS["everything on NVMe"], {}),
        (STATES["host"], STATES["half of it on the host"]),
    ],
    ids=["NVMe to host", "device to NVMe", "NVMe to device", "host to half of it"],
)
def test_a_checkpoint_goes_from_any_tier_to_any_other(
    first: dict[str, Any], then: dict[str, Any], tmp_path: Path
) -> None:
    for wrong in run_ranks(2, checkpoint, str(tmp_path), first, then):
        assert wrong == []


def test_what_the_file_says_without_effect_is_told_once_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="onefold"):
        engine, *_ = onefold.initialize(
            model=build(), config=written(tmp_path, 3, PARAMETERS["everything on NVMe"])
        )
    text = caplog.text
    for key in (
        "offload_optimizer.buffer_count",
        "offload_param.buffer_count",
        "sub_group_size",
        "aio.block_size",
    ):
        assert text.count(key) == 1, key
    assert "offload_optimizer.device" not in text
    assert engine.device == torch.device("cpu")
    assert engine.save_16bit_model(tmp_path, "model.safetensors")
    del engine


def test_a_folder_that_is_not_there_is_said_before_anything_is_sharded(tmp_path: Path) -> None:
    path = written(
        tmp_path, 3, {"offload_optimizer": {**NVME, "nvme_path": str(tmp_path / "absent")}}
    )
    with pytest.raises(TierError, match="absent"):
        onefold.initialize(model=build(), config=path)
