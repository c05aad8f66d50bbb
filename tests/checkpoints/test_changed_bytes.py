"""Bytes of a checkpoint that have changed on the disk are an error on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

import onefold
from on_ranks import on_ranks
from reference import built
from zoo import TinyMLP


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_changed_byte_of_one_file_is_an_error_on_every_rank(stage: int, folder: Path) -> None:
    model = onefold.shard(built(TinyMLP), onefold.Recipe.zero(stage))
    onefold.save(folder / "checkpoint", model=model)
    if dist.get_rank() == 0:
        tensors = folder / "checkpoint" / "rank-00001.safetensors"
        data = bytearray(tensors.read_bytes())
        data[len(data) // 2 + 512] ^= 1
        tensors.write_bytes(data)
    dist.barrier()
    with pytest.raises(onefold.CheckpointError):
        onefold.load(folder / "checkpoint", model=model)
