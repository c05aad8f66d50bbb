"""Groups and codecs with state off the device: the bits of the same recipe on the device, or a refusal that says what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ranks import run_ranks
from runtime.test_offload import train

OVER: dict[str, dict[str, Any]] = {
    "in groups": {"group": 2},
    "HSDP": {"shard_group": 2},
    "optimizer over all": {"shard_group": 2, "optimizer_over": "all"},
    "second copy": {"group": 2, "second_copy": True},
    "everything": {"group": 2, "second_copy": True, "gather_codec": "int8", "reduce_codec": "int4", "error_feedback": True},
    "codecs, HSDP": {"shard_group": 2, "gather_codec": "int8", "reduce_codec": "int8"},
    "frozen weights at rest": {"group": 2, "frozen": "int8"},
}
TIERS: dict[str, dict[str, Any]] = {
    "states on the host": {"offload_optimizer": "cpu"},
    "states on NVMe": {"offload_optimizer": "nvme", "chunk": 65536},
    "stepped behind the backward pass": {"offload_optimizer": "cpu", "step_in_backward": True},
    "parameters and states on the host": {"offload_optimizer": "cpu", "offload_param": "cpu"},
    "everything on NVMe": {"offload_optimizer": "nvme", "offload_param": "nvme", "chunk": 65536},
}


def differing(folder: str) -> list[str]:
    """What is not bit-equal to the same run on the device, and what is refused."""
    wrong = []
    for over, options in OVER.items():
        frozen = "frozen" in options
        losses, weights = train(3, options, accumulate=2, frozen=frozen)
        for name, tiers in TIERS.items():
            if frozen and "offload_param" in tiers:
                continue  # refused, see test_frozen_weights.py
            on_disk = {"nvme": folder} if "nvme" in str(tiers.values()) else {}
            try:
                got, after = train(3, {**options, **tiers, **on_disk}, accumulate=2, frozen=frozen)
            except Exception as error:
                wrong.append(f"{over}, {name}: {type(error).__name__}: {error}")
                continue
            if got != losses or any(not (weights[n] == after[n]).all() for n in weights):
                wrong.append(f"{over}, {name}: {got}, expected {losses}")
    return wrong


def test_what_rests_off_the_device_keeps_its_bits_over_groups_and_with_codecs(tmp_path: Path) -> None:
    assert run_ranks(4, differing, str(tmp_path)) == [[]] * 4
