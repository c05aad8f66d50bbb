"""Checkpoints of a row beyond what each row asks (jobs.py): on more ranks, in other precisions and
formats, and everything else that a run resumes with.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import onefold
from on_ranks import on_ranks, slow
from promises.jobs import STEPS, Job, Mesh, Row, differing, first_ranks, sharded, whole_states

SERVER = "libraries"
FORMATS = ("fp32", "bf16", "int8", "int4")


def trained(row: Row, folder: Path, group: Any = None, steps: int = 2) -> Job:
    job = sharded(row, folder / f"disk of {row.name}", group=group)
    for number in range(steps):
        job.step(number)
    return job


def state(job: Job) -> dict[str, torch.Tensor]:
    """Whole weights and states, on rank 0. Collective."""
    return onefold.full_state_dict(job.model) | whole_states(job.optimizer)


def save(job: Job, folder: Path, **more: Any) -> dict[str, torch.Tensor]:
    onefold.save(folder, model=job.model, optimizer=job.optimizer, **more)
    return state(job)


def load(row: Row, saved: Path, folder: Path, group: Any = None, **more: Any) -> Job:
    """Into another model of the row, which is a step ahead in another direction."""
    job = sharded(row, folder / f"disk of {row.name}", seed=7, group=group)
    job.step(9)
    onefold.load(saved, model=job.model, optimizer=job.optimizer, rng=False, **more)
    return job


# -- ranks -----------------------------------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize(
    "stage", [pytest.param(stage, marks=() if stage == 3 else slow) for stage in (0, 1, 2, 3)]
)
def test_any_number_of_ranks_loads_what_any_other_saved(stage: int, folder: Path) -> None:
    """On 1, 2, 3 and 4 ranks, at this stage and at all others."""
    for writers in (1, 2, 3, 4):
        model = ("odd", "tied gpt", "half-frozen gpt", "gpt")[writers - 1]
        row = Row("writer", stage, mesh=Mesh(dp=writers), model=model)
        group, saved, expected = first_ranks(writers), folder / f"of {writers}", {}
        if dist.get_rank() < writers:
            expected = save(trained(row, folder, group), saved)
        dist.barrier()
        for readers in {1, 2, 3, 4} - {writers}:
            group = first_ranks(readers)
            if dist.get_rank() < readers:
                reader = Row("reader", (stage + readers) % 4, mesh=Mesh(dp=readers), model=model)
                found = state(load(reader, saved, folder, group))
                assert list(differing(f"{writers} to {readers}", expected, found)) == []
            dist.barrier()


@on_ranks(4)
def test_ranks_that_join_get_random_streams_of_their_own(folder: Path) -> None:
    row, pair = Row("two", 1, mesh=Mesh(dp=2)), first_ranks(2)
    if dist.get_rank() < 2:
        job = trained(row, folder, pair)
        torch.manual_seed(dist.get_rank())
        save(job, folder / "saved")
        before = float(torch.rand(()))
    dist.barrier()
    drawn = []
    for _ in range(2):
        job = sharded(Row("four", 3, mesh=Mesh(dp=4)), folder / "four", seed=7)
        onefold.load(folder / "saved", model=job.model, optimizer=job.optimizer)
        drawn.append(float(torch.rand(())))
    assert drawn[0] == drawn[1]
    assert dist.get_rank() > 1 or drawn[0] == before, "who was there goes on where it stood"
    of_all: list[Any] = [None] * 4
    dist.all_gather_object(of_all, drawn[0])
    assert len(set(of_all)) == 4


@on_ranks(2)
def test_every_byte_is_in_the_files_once(folder: Path) -> None:
    for stage in (0, 3):
        kept = save(trained(Row("bytes", stage), folder), folder / f"saved {stage}")
        files = (folder / f"saved {stage}").glob("*.safetensors")
        written, content = (
            sum(f.stat().st_size for f in files),
            sum(t.nbytes for t in kept.values()),
        )
        assert dist.get_rank() or 0.99 * content < written < content + 300_000, (written, content)
        dist.barrier()


# -- a run that goes on ----------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_resumed_run_is_bit_equal_to_one_that_was_not_interrupted(
    stage: int, folder: Path
) -> None:
    """With its schedule, three random generators and what the program keeps beside."""
    import numpy as np

    def seeded(seed: int) -> None:
        torch.manual_seed(seed + dist.get_rank())
        random.seed(seed + dist.get_rank())
        np.random.seed(seed + dist.get_rank())

    def made(seed: int) -> tuple[Job, Any]:
        job = sharded(Row("run", stage, model="tied gpt"), folder / "disk", seed=seed)
        return job, torch.optim.lr_scheduler.OneCycleLR(job.optimizer, 1e-2, total_steps=8)

    def part(job: Job, scheduler: Any, steps: range) -> list[Any]:
        told: list[Any] = []
        for number in steps:
            noise = float(torch.rand(())) + random.random() + float(np.random.rand())
            kept = torch.get_rng_state()
            told += [noise, job.step(number), scheduler.get_last_lr()]
            torch.set_rng_state(kept)  # the step draws from a generator that it seeds
            scheduler.step()
        return told

    job, scheduler = made(0)
    seeded(5)
    whole = part(job, scheduler, range(3))
    extra = {"best": 0.25, "w": torch.arange(9000)}
    save(job, folder / "saved", scheduler=scheduler, step=3, extra=extra)
    went_on = part(job, scheduler, range(3, 7))
    job, scheduler = made(7)
    seeded(999)
    back = onefold.load(
        folder / "saved", model=job.model, optimizer=job.optimizer, scheduler=scheduler
    )
    assert back.step == 3 and back.extra["best"] == 0.25
    assert torch.equal(back.extra["w"], torch.arange(9000))
    assert part(job, scheduler, range(3, 7)) == went_on
    assert len({*whole[::3], *went_on[::3]}) == 7, "the generators moved"


# -- precisions and formats ------------------------------------------------------------------------


@on_ranks(1)
def test_masters_of_16_bits_are_rounded_once(folder: Path) -> None:
    kept = save(trained(Row("wide", 0), folder), folder / "wide")
    for stage in (0, 3):
        options = {"precision": "bf16", "master_dtype": "bf16"}
        narrow = load(Row("narrow", stage, options), folder / "wide", folder)
        rounded = {n: t.bfloat16() if t.dim() else t for n, t in kept.items()}
        assert list(differing("rounded", rounded, save(narrow, folder / f"narrow {stage}"))) == []
        wide = load(Row("wide again", 3 - stage), folder / f"narrow {stage}", folder)
        widened = {n: t.float() for n, t in rounded.items()}
        assert list(differing("widened", widened, state(wide))) == []


def moments(kind: str, stage: int = 3, **more: Any) -> Row:
    return Row(f"moments in {kind}", stage, {"moments": kind, **more}, model="wide gpt")


@on_ranks(1)
@pytest.mark.parametrize("source", FORMATS)
def test_moments_of_every_format_are_read_into_every_other(source: str, folder: Path) -> None:
    kept = save(trained(moments(source), folder), folder / "saved")
    for target in FORMATS:
        found = state(load(moments(target, 0), folder / "saved", folder))
        for name, value in kept.items():
            coarse = 0.2 if "int4" in (source, target) else 0.05
            bound = 0.0 if source == target else coarse * value.abs().max().item()
            assert torch.allclose(found[name].float(), value.float(), 0, bound), (target, name)


@on_ranks(2)
def test_who_cannot_hold_packed_moments_is_told(folder: Path) -> None:
    job = trained(moments("int8"), folder, steps=1)
    save(job, folder / "saved")
    with pytest.raises(onefold.CheckpointError, match=r"or in fewer bits: use onefold"):
        onefold.dcp_state_dict(job.model, job.optimizer)
    other = torch.optim.SGD(job.model.parameters(), lr=0.1)
    with pytest.raises(onefold.CheckpointError, match=r"moments='int8'.*SGD"):
        onefold.load(folder / "saved", model=job.model, optimizer=other)


@on_ranks(2)
def test_a_save_beside_the_training_is_of_one_moment(folder: Path) -> None:
    """Of state on NVMe, which steps go on writing to."""
    options = {"offload_optimizer": "nvme", "offload_param": "nvme"}
    job = trained(Row("disk", 3, options), folder)
    kept = state(job)
    saving = onefold.save_async(folder / "saved", model=job.model, optimizer=job.optimizer)
    for number in range(2, 2 + STEPS):
        job.step(number)
    saving.wait()
    found = state(load(Row("device", 3), folder / "saved", folder))
    assert list(differing("one moment", kept, found)) == []
