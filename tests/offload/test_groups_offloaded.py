"""Groups and codecs with state off the device: the bits of the same recipe on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from test_offload import train

from ranks import run_ranks

OVER: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "HSDP": ({"shard_group": 2}, ("parameters and states on the host", "everything on NVMe")),
    "optimizer over all": (
        {"shard_group": 2, "optimizer_over": "all"},
        ("states on NVMe", "stepped in the backward pass"),
    ),
    "second copy and codecs": (
        {
            "group": 2,
            "second_copy": True,
            "gather_codec": "int8",
            "reduce_codec": "int4",
            "error_feedback": True,
        },
        ("stepped in the backward pass", "everything on NVMe"),
    ),
    "codecs, HSDP": (
        {"shard_group": 2, "gather_codec": "int8", "reduce_codec": "int8"},
        ("parameters and states on the host",),
    ),
    "frozen weights at rest": ({"group": 2, "frozen": "int8"}, ("states on NVMe",)),
}
TIERS: dict[str, dict[str, Any]] = {
    "states on NVMe": {"offload_optimizer": "nvme", "chunk": 65536},
    "stepped in the backward pass": {"offload_optimizer": "cpu", "step_in_backward": True},
    "parameters and states on the host": {"offload_optimizer": "cpu", "offload_param": "cpu"},
    "everything on NVMe": {"offload_optimizer": "nvme", "offload_param": "nvme", "chunk": 65536},
}


def differing(folder: str, some: list[str]) -> list[str]:
    """What is not bit-equal to the same run on the device."""
    wrong = []
    for over in some:
        options, tiers = OVER[over]
        frozen = "frozen" in options
        losses, weights = train(3, options, accumulate=2, frozen=frozen)
        for name in tiers:
            on_disk = {"nvme": folder} if "nvme" in str(TIERS[name].values()) else {}
            got, after = train(
                3, {**options, **TIERS[name], **on_disk}, accumulate=2, frozen=frozen
            )
            if got != losses or any(not (weights[n] == after[n]).all() for n in weights):
                wrong.append(f"{over}, {name}: {got}, expected {losses}")
    return wrong


def test_what_rests_off_the_device_keeps_its_bits_over_groups_and_with_codecs(
    tmp_path: Path, sample: Any
) -> None:
    assert run_ranks(4, differing, str(tmp_path), sample(OVER, 2)) == [[]] * 4
