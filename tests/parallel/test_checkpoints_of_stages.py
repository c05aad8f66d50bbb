"""Checkpoints between meshes with and without a pipeline: bit-equal on every way, and whole after a kill."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pipeline_models import Case, batch_of, built, called, in_one_process, resumed, saved
from test_checkpoints_of_meshes import same, wholes
from test_pipelines import close

from onefold.checkpoint import CheckpointError, join_stages
from ranks import outcomes_of, run_ranks

pytestmark = pytest.mark.one_in(2)

MESHES = {
    "dp 2 × tp 2": Case(pp=1, stages=1, tp=2),
    "dp 4": Case(pp=1, stages=1, dp=4),
    "pp 2 × dp 2": Case("Schedule1F1B"),
    "pp 2 × tp 2": Case("Schedule1F1B", dp=1, tp=2),
    "pp 2 × dp 2, four stages": Case("ScheduleInterleaved1F1B", stages=4),
}


def through(source: str, target: str, stage: int, case: Case) -> dict[str, torch.Tensor]:
    """Load `source`, or train if it is "", and save as `target`. Returns whole weights and states of
    this rank's stages, on the first rank of each.
    """
    import onefold

    pipeline = built(stage, case)
    dp = pipeline.mesh.get_local_rank("dp")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in pipeline.modules]
    if source:
        for module, optimizer in zip(pipeline.modules, optimizers, strict=True):
            with torch.no_grad():
                for param in module.parameters():
                    param.mul_(0.5)
            loaded = onefold.load(source, model=module, optimizer=optimizer, strict=case.pp == 1)
            assert (loaded.step, loaded.missing) == (2, ())
    for step in range(0 if source else 2):
        called(pipeline, batch_of(case, dp, step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found: dict[str, torch.Tensor] = {}
    for module, at, optimizer in zip(pipeline.modules, pipeline.stages, optimizers, strict=True):
        folder = target if case.pp == 1 else f"{target}/stage-{at.stage_index}"
        onefold.save(folder, model=module, optimizer=optimizer, step=2)
        found |= wholes(module, optimizer)
    dist.barrier()
    if case.pp > 1 and dist.get_rank() == 0:
        onefold.checkpoint.join_stages(target)
    return found


def test_a_checkpoint_goes_through_tensor_parallelism_data_ranks_and_stages_bit_equal(
    tmp_path: Path,
) -> None:
    expected: dict[str, torch.Tensor] = {}
    source, ways = "", [*MESHES, "dp 2 × tp 2"]
    for number, name in enumerate(ways):
        target = str(tmp_path / str(number))
        ranks = run_ranks(4, through, source, target, number % 3 + 1, MESHES[name])
        found: dict[str, torch.Tensor] = {}
        for seen in ranks:
            found |= seen
        expected = expected or found
        same(found, expected, f"{' -> '.join(ways[: number + 1])}")
        source = target


# -- after a kill ----------------------------------------------------------------------------------


def killed(case: Case, folder: str) -> None:
    """Save after half of the steps; then rank 3 dies in a save of a later step."""
    import onefold

    saved(case, f"{folder}/step-2")
    pipeline = built(3, case)
    (module,), (stage,) = pipeline.modules, pipeline.stages
    called(pipeline, batch_of(case, pipeline.mesh.get_local_rank("dp"), 0))
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    onefold.save(f"{folder}/step-3/stage-{stage.stage_index}", model=module, step=3)


@pytest.mark.slow
def test_a_pipeline_that_was_killed_goes_on_from_its_last_whole_checkpoint(tmp_path: Path) -> None:
    written = Case("Schedule1F1B", steps=4)
    expected = in_one_process(written)
    outcomes = outcomes_of(4, killed, written, str(tmp_path), timeout=120.0)
    said = [(o.rank, o.error, o.message[:300], o.seconds) for o in outcomes]
    assert outcomes[3].exitcode == -signal.SIGKILL and outcomes[2].error, said
    with pytest.raises(CheckpointError, match="checkpoints of 1 stages \\(stage-0\\), expected 2"):
        join_stages(tmp_path / "step-3", stages=2)
    case = Case("ScheduleInterleaved1F1B", stages=4, steps=4)
    ranks = run_ranks(4, resumed, case, str(tmp_path / "step-2"), False)
    weights = {key: value for seen in ranks for key, value in seen["weights"].items()}
    assert weights.keys() == expected["weights"].keys()
    for seen in ranks:
        later = expected["losses"][seen["dp"]][2 * case.micro_batches :]
        assert not seen["losses"] or close(seen["losses"], later), (seen["losses"], later)
    for key, value in expected["weights"].items():
        assert (weights[key] - value).abs().max().item() < 2e-5, key
