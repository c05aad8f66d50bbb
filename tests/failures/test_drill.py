"""A drill: a training on two ranks is killed at random moments and goes on from its last checkpoint,
with the bits of a run that nobody disturbed. What is done to its checkpoints at random is found.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import onefold
from onefold.inspection.verify import examine
from ranks import outcomes_of, run_ranks
from reference import adamw, built, differences, train, weights
from zoo import TinyGPT, tokens_of

pytestmark = pytest.mark.slow
STEPS, EVERY, KILLS = 40, 2, 8
Weights = dict[str, torch.Tensor]


def made(stage: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = built(lambda: TinyGPT(depth=2, dropout=0.1))
    onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=15.0))
    return model, adamw(model)


def drill(root: str, stage: int, behind: bool, dies: dict[int, float]) -> Weights:
    """Train to the end from the last checkpoint, with losses in a file of each rank. `dies`: the
    seconds after which a rank is killed.
    """
    rank = dist.get_rank()
    if rank in dies:
        kill = threading.Timer(dies[rank], os.kill, (os.getpid(), signal.SIGKILL))
        kill.daemon = True
        kill.start()
    model, optimizer = made(stage)
    torch.manual_seed(rank)
    checkpoints = Path(root, "checkpoints")
    with onefold.Checkpointer(checkpoints, model=model, keep=2, asynchronous=behind) as kept:
        begun = kept.load(optimizer=optimizer)
        for number in range(begun.step if begun else 0, STEPS):
            (loss,) = train(model, optimizer, [tokens_of(100 * rank + number)])
            with Path(root, f"losses of {rank}").open("a") as file:
                file.write(f"{number} {loss.hex()}\n")
            if (number + 1) % EVERY == 0:
                kept.save(number + 1, optimizer=optimizer)
    return weights(model)


def losses(root: Path, rank: int) -> set[str]:
    return set((root / f"losses of {rank}").read_text().splitlines())


@pytest.mark.parametrize(("stage", "behind"), [(0, True), (1, False), (2, False), (3, True)])
def test_a_run_that_is_killed_at_any_moment_ends_with_the_bits_of_one_that_is_not(
    stage: int, behind: bool, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    draw, whole, killed = random.Random(seed), tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    began = time.monotonic()
    expected = run_ranks(2, drill, str(whole), stage, behind, {})[0]
    seconds, kills = time.monotonic() - began, 0
    while True:
        who = draw.choice([[0], [1], [0, 1]]) if kills < KILLS else []
        moment = draw.uniform(0, seconds / 2)
        dies = dict.fromkeys(who, moment)
        outcomes = outcomes_of(2, drill, str(killed), stage, behind, dies, grace=30.0)
        if not any(o.error for o in outcomes):
            break
        assert who and any(o.exitcode == -signal.SIGKILL for o in outcomes), (kills, outcomes)
        assert all(o.error != "killed" for o in outcomes), f"a hang: {outcomes}"
        for path in (killed / "checkpoints").glob("step-*"):
            assert not examine(path), (kills, path)
        kills += 1
    assert kills, "the run was over before each kill"
    assert not differences(expected, outcomes[0].value), f"after {kills} kills"
    for rank in (0, 1):
        assert losses(killed, rank) == losses(whole, rank), f"after {kills} kills, rank {rank}"


def test_injuries_of_a_checkpoint_are_found_and_never_load_wrong(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)
    (expected, _) = run_ranks(2, drill, str(tmp_path), 3, False, {})
    sound = tmp_path / "checkpoints" / f"step-{STEPS:08d}"
    model, optimizer = made(1)
    for number in range(200):
        folder = Path(shutil.copytree(sound, tmp_path / str(number)))
        file = draw.choice(sorted(folder.iterdir()))
        data, how = bytearray(file.read_bytes()), draw.choice(["flipped", "cut", "missing"])
        at = draw.randrange(len(data))
        data[at] ^= draw.randrange(1, 256)
        if how == "missing":
            file.unlink()
        else:
            file.write_bytes(data[:at] if how == "cut" else data)
        told = f"{file.name} {how} at {at} of {len(data)}"
        try:
            found = [problem.file for problem in examine(folder)]
        except onefold.CheckpointError:
            found = [file.name]
        assert file.name in found, told
        try:
            onefold.load(folder, model=model, optimizer=optimizer)
        except onefold.CheckpointError:
            continue
        finally:
            shutil.rmtree(folder)
        assert not differences(expected, onefold.full_state_dict(model)), told
