"""A rank of a mesh that dies, or does not come, leaves no hang: the others raise, and a `StallError` says
where each rank of the mesh stands and along which axes this one has waited.

Beside tensor parallelism and in pipelines, a rank may wait in a collective of torch's own. Such a wait
ends in torch's RuntimeError, at once if the peer has died.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from axes_models import Case, batches_of, mesh_of_case, parallelized
from pipeline_models import Case as Pipeline
from pipeline_models import batch_of, built, called
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ranks import Outcome, outcomes_of
from zoo import TinyMLP, features_of

#: Seconds of the recipe, and in which every rank must have given up: gloo's notice of a connection
#: that closed, the wait for notes, and what a busy machine adds. Of a collective that nobody watches.
STALL_TIMEOUT, PATIENCE, HANG = 8.0, 60.0, 120.0


def told(outcomes: list[Outcome]) -> str:
    return "\n".join(
        f"rank {o.rank}: {o.error} after {o.seconds:.1f} s: {o.message}\n{o.trace[-800:]}"
        for o in outcomes
    )


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def beside_tensor_parallelism(stage: int, where: str) -> None:
    import onefold

    case = Case(steps=3)
    mesh = mesh_of_case(case)
    recipe = onefold.Recipe.zero(stage, stall_timeout=STALL_TIMEOUT)
    model = onefold.shard(parallelized(case, mesh), recipe, mesh=mesh, data="dp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, batch in enumerate(batches_of(case, mesh.get_local_rank("dp"))):
        if (dist.get_rank(), step) == (3, 1):
            if where == "forward":
                model.layers[1].register_forward_pre_hook(_die)
            else:
                model.layers[0].feed_forward.w1.weight.register_hook(_die)
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("stage", "where"), [(1, "backward"), (3, "forward")])
def test_a_rank_killed_beside_tensor_parallelism_leaves_no_hang(stage: int, where: str) -> None:
    outcomes = outcomes_of(4, beside_tensor_parallelism, stage, where, timeout=HANG)
    said = told(outcomes)
    assert outcomes[3].exitcode == -signal.SIGKILL, said
    stalls = [o for o in outcomes[:3] if o.error == "StallError"]
    for survivor in outcomes[:3]:
        assert survivor.error in ("StallError", "RuntimeError", "DistBackendError"), said
        assert survivor.seconds < PATIENCE, said
    # Rank 2 computes with rank 3 along tp, ranks 0 and 1 wait for them along dp
    assert stalls, said
    for stall in stalls:
        assert "rank 3 (dp 1, tp 1): not waiting in any collective" in stall.message, said
        assert "step 1" in stall.message and "unit" in stall.message, said


def stays_away() -> None:
    """Rank 3 makes no second pass, and does not end."""
    import onefold

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    recipe = onefold.Recipe.zero(3, stall_timeout=STALL_TIMEOUT)
    weight = torch.distributed.tensor.distribute_tensor(
        torch.ones(6, 4, device="cpu"), mesh["tp"], [torch.distributed.tensor.Shard(0)]
    )
    model = Local(weight)
    model = onefold.shard(model, recipe, mesh=mesh, data="dp")
    store = dist.distributed_c10d._get_default_store()
    for step in range(2):
        if (dist.get_rank(), step) == (3, 1):
            store.wait(["given up 0", "given up 1", "given up 2"])
            return
        try:
            model(features_of(step, 2, 4)).backward()
        except BaseException:
            store.set(f"given up {dist.get_rank()}", "")
            raise
        model.zero_grad()


class Local(nn.Module):
    """Computes with its part of a weight, without a collective along tp."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        return (x @ weight.to_local().t()).square().sum()


def test_the_error_names_the_missing_rank_of_the_mesh_and_the_axes_of_the_wait() -> None:
    outcomes = outcomes_of(4, stays_away, timeout=HANG)
    said = told(outcomes)
    assert outcomes[3].error == "", said
    for rank, at in enumerate(("dp 0, tp 0", "dp 0, tp 1", "dp 1, tp 0")):
        outcome = outcomes[rank]
        assert outcome.error == "StallError" and outcome.seconds < PATIENCE, said
        assert outcome.message.startswith(f"rank {rank} ({at}) gave up waiting in "), said
        assert "rank 3 (dp 1, tp 1): not waiting in any collective" in outcome.message, said
    # It shares the boxes with rank 3
    assert "among ranks 1,3 (along dp)" in outcomes[1].message, said
    assert "rank 1 (dp 0, tp 1): waiting in " in outcomes[0].message, said


def in_a_pipeline(stage: int) -> None:
    case = Pipeline("Schedule1F1B")
    pipeline = built(stage, case)
    (module,) = pipeline.modules
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(3):
        if (dist.get_rank(), step) == (3, 1):
            module.blocks["3"].register_forward_pre_hook(_die)
        called(pipeline, batch_of(case, pipeline.mesh.get_local_rank("dp"), step))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_killed_in_a_pipeline_leaves_no_hang(stage: int) -> None:
    outcomes = outcomes_of(4, in_a_pipeline, stage, timeout=HANG)
    said = told(outcomes)
    assert outcomes[3].exitcode == -signal.SIGKILL, said
    for survivor in outcomes[:3]:
        assert survivor.error in ("StallError", "RuntimeError", "DistBackendError"), said
        assert survivor.seconds < PATIENCE, said
    # Rank 2 runs the same stage as rank 3, the other two the stage before
    assert outcomes[2].error == "StallError", said
    assert "rank 3: not waiting in any collective" in outcomes[2].message, said


def one_of_experts() -> None:
    """A mesh of two data axes: a rank is killed between a forward and a backward pass."""
    import onefold

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    recipe = onefold.Recipe.zero(2, stall_timeout=STALL_TIMEOUT)
    model = onefold.shard(TinyMLP(), recipe, mesh=mesh, data=("dp", "ep"))
    for step in range(2):
        loss = model(features_of(step, 4, 7)).square().mean()
        if (dist.get_rank(), step) == (1, 1):
            _die()
        loss.backward()
        model.zero_grad()


def test_a_rank_killed_on_a_mesh_of_data_axes_is_named_by_every_other() -> None:
    outcomes = outcomes_of(4, one_of_experts, timeout=HANG)
    said = told(outcomes)
    for survivor in (outcomes[0], *outcomes[2:]):
        assert survivor.error == "StallError" and survivor.seconds < PATIENCE, said
        assert "rank 1 (dp 0, ep 1): not waiting in any collective" in survivor.message, said
