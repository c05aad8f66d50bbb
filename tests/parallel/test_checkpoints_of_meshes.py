"""What a checkpoint of a mesh may not lose on another one (test_axes.py has that it is read bit for
bit): damage, the data of each rank, shapes, and what leaves it for other tools.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from axes_models import Case, Job, Seen, look, sharded
from torch.distributed import checkpoint

import onefold
from on_ranks import on_ranks, slow
from reference import differences

#: TP 2 × DP 2, with norms that every rank holds beside the parts.
MESH = Case()
OTHERS = (replace(MESH, dp=1, tp=4), replace(MESH, dp=4, tp=1, plan="none"))


def trained(case: Case, stage: int) -> Job:
    job = sharded(stage, case)
    for batches in job.batches():
        job.step(batches, Seen())
    return job


class Position(dict[str, Any]):
    """A data loader."""

    load_state_dict = dict.update


@on_ranks(4)
def test_what_another_mesh_cannot_have_is_told(folder: Path, every: bool) -> None:
    lossy = replace(MESH, options={"reduce_codec": "int8"})
    job, rank = trained(lossy, 2), dist.get_rank()
    give = {"model": job.model, "optimizer": job.optimizers[0]}
    onefold.save(folder / "whole", **give, data={"seen": 10 + job.data_rank})
    with pytest.raises(onefold.CheckpointError, match="were given different positions"):
        onefold.save(folder / "never", **give, data={"seen": rank})
    assert not (folder / "never").exists()
    small = trained(replace(MESH, hidden=20), 0)
    onefold.save(folder / "small", model=small.model)
    if rank == 0:
        shutil.copytree(folder / "whole", folder / "damaged")
        for file in (folder / "damaged").glob("*.safetensors"):
            content = bytearray(file.read_bytes())
            content[len(content) * 3 // 4] ^= 1
            file.write_bytes(content)
    dist.barrier()
    saved = look(job, Seen())
    for case in (MESH, *OTHERS) if every else (MESH, OTHERS[1]):
        other = sharded(2, replace(case, options=lossy.options), scale=0.5)
        give = {"model": other.model, "optimizer": other.optimizers[0]}
        with pytest.raises(onefold.CheckpointError, match="bytes have changed"):
            onefold.load(folder / "damaged", **give)
        # A rank's own part of w1 has that very shape under TP 2
        with pytest.raises(
            onefold.CheckpointError, match=r"w1.weight: \(20, 16\) in it, \(40, 16\)"
        ):
            onefold.load(folder / "small", model=other.model)
        loaded, position = onefold.load(folder / "whole", **give), Position()
        assert not differences(saved.weights, look(other, Seen()).weights)
        if case == MESH:
            onefold.load(folder / "whole", **give, data=position)
            assert loaded.data == position == {"seen": 10 + job.data_rank}
        else:
            assert loaded.data is None
            with pytest.raises(onefold.CheckpointError, match="holds no position in the data for"):
                onefold.load(folder / "whole", **give, data=position)


@on_ranks(4)
@slow
def test_exports_averages_and_streams_are_whole(folder: Path) -> None:
    from safetensors.torch import load_file

    job = trained(MESH, 3)
    average, before = onefold.ema.EMA(job.model, decay=0.5), onefold.full_state_dict(job.model)
    average.update()  # a copy
    job.step(next(job.batches()), Seen())
    average.update()
    seen = look(job, Seen())
    half = {name: before[name].lerp(w, 0.5) for name, w in seen.weights.items()}
    found = {n: t.clone() for n, t in onefold.stream_params(job.model)}
    onefold.export(job.model, folder / "hf", max_shard_bytes=4000)
    with average.applied():
        onefold.export(job.model, folder / "averaged")
    checkpoint.save(
        onefold.dcp_state_dict(job.model, job.optimizers[0]), checkpoint_id=folder / "dcp"
    )
    dist.barrier()
    exported = {
        n: t for file in (folder / "hf").glob("*.safetensors") for n, t in load_file(file).items()
    }
    assert not differences(found, exported)
    if dist.get_rank() == 0:
        assert not differences(seen.weights, found)
        assert not differences(half, load_file(folder / "averaged/model.safetensors"))
    for case in OTHERS:
        other = sharded(0, case, scale=0.5)
        state = onefold.dcp_state_dict(other.model, other.optimizers[0])
        checkpoint.load(state, checkpoint_id=folder / "dcp")
        again = look(other, Seen())
        assert not differences(seen.weights, again.weights) and not differences(
            seen.states, again.states
        )
