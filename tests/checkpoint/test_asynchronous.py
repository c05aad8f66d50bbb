"""Saves behind the training: what they store, how they fail, how they wait or skip, and what the
last few are.
"""

from __future__ import annotations

import copy
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import run_ranks
from zoo import TinyGPT, tokens_of

pytestmark = pytest.mark.one_in(2)


def start(stage: int, seed: int = 1, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    import onefold

    torch.manual_seed(seed)
    model = onefold.shard(TinyGPT(), onefold.Recipe.zero(stage, stall_timeout=30.0, **options))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    rank = dist.get_rank() if dist.is_initialized() else 0
    loss = model(tokens_of(100 * rank + number))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


class Gate:
    """Holds every write of tensor files until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        from onefold.checkpoint import parts as module

        self._open, self._real, self._module = threading.Event(), module.write_tensors, module
        module.write_tensors = self._write  # type: ignore[assignment]

    def _write(self, *args: Any, **kwargs: Any) -> Any:
        assert self._open.wait(300.0)
        return self._real(*args, **kwargs)

    def release(self) -> None:
        self._open.set()

    def remove(self) -> None:
        self._open.set()
        self._module.write_tensors = self._real  # type: ignore[assignment]


def behind(root: str) -> dict[str, Any]:
    """Train on while a save is held up; what it stores must be the state at its start."""
    import onefold

    model, optimizer = start(3)
    for number in range(2):
        step(model, optimizer, number)
    gate = Gate()
    try:
        saving = onefold.save_async(f"{root}/a", model=model, optimizer=optimizer, step=2)
        ahead = [step(model, optimizer, number) for number in range(2, 5)]
        early = saving.done, Path(root, "a").exists()
    finally:
        gate.remove()
    path = saving.wait(300.0)
    again, states = start(3, seed=9)
    onefold.load(path, model=again, optimizer=states)
    return {
        "ahead": ahead,
        "again": [step(again, states, number) for number in range(2, 5)],
        "early": early,
    }


def test_a_save_behind_the_training_stores_the_moment_it_began(tmp_path: Path) -> None:
    for found in run_ranks(2, behind, str(tmp_path)):
        assert found["early"] == (False, False)
        assert found["again"] == found["ahead"]


def failing(root: str) -> dict[str, Any]:
    """The disk of the second rank is full; both ranks hear of it at their next step."""
    import errno

    import onefold
    from onefold.checkpoint import tensorfile

    model, optimizer = start(1)
    step(model, optimizer, 0)
    if dist.get_rank() == 1:

        def full(file: int, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        tensorfile.os = type(
            "os",
            (),
            {
                **{k: getattr(tensorfile.os, k) for k in dir(tensorfile.os)},
                "write": staticmethod(full),
            },
        )  # type: ignore[assignment]
    saving = onefold.save_async(f"{root}/a", model=model, optimizer=optimizer, step=1)
    while not saving.done:
        pass
    said = []
    for number in (1, 2):
        loss = model(tokens_of(number))
        loss.backward()
        try:
            optimizer.step()
            said.append("stepped")
        except onefold.CheckpointError as error:
            said.append(str(error))
        optimizer.zero_grad()
    return {"said": said, "left": sorted(p.name for p in Path(root).iterdir())}


def test_a_failure_behind_the_training_is_raised_by_the_next_step_on_every_rank(
    tmp_path: Path,
) -> None:
    for found in run_ranks(2, failing, str(tmp_path)):
        first, second = found["said"]
        assert "No space left on device" in first and "rank 1" in first and "free space" in first, (
            first
        )
        where = f"no checkpoint can be written in {tmp_path}: "
        assert where in first and "This rank writes " in first and " were free." in first, first
        assert second == "stepped", "it is told once"
        assert found["left"] == []


def test_a_second_save_waits_or_is_skipped_and_the_last_few_stay(tmp_path: Path) -> None:
    import onefold

    model, optimizer = start(2)
    step(model, optimizer, 0)
    with onefold.Checkpointer(tmp_path, model=model, keep=2, busy="skip") as checkpoints:
        gate = Gate()
        try:
            assert checkpoints.save(1, optimizer=optimizer) is not None
            assert checkpoints.save(2, optimizer=optimizer) is None and checkpoints.skipped == 1
        finally:
            gate.remove()
        checkpoints.wait()
        for number in (3, 4, 5):
            checkpoints.busy = "wait"
            checkpoints.save(number, optimizer=optimizer)
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith(".")) == [
        "step-00000004",
        "step-00000005",
    ]
    assert onefold.checkpoint.latest(tmp_path) == tmp_path / "step-00000005"


def test_the_newest_sound_checkpoint_is_loaded_where_a_newer_one_is_damaged(tmp_path: Path) -> None:
    import onefold

    model, optimizer = start(0)
    with onefold.Checkpointer(tmp_path, model=model, asynchronous=False) as checkpoints:
        assert checkpoints.load(optimizer=optimizer) is None
        for number in (1, 2, 3):
            step(model, optimizer, number)
            checkpoints.save(number, optimizer=optimizer)
        data = tmp_path / "step-00000003" / "rank-00000.safetensors"
        whole = data.read_bytes()
        data.write_bytes(whole[:-5] + bytes([whole[-5] ^ 4]) + whole[-4:])
        (tmp_path / "step-00000002" / "manifest.json").write_text("{}")
        loaded = checkpoints.load(optimizer=optimizer)
        assert loaded is not None and loaded.step == 1
        (tmp_path / "step-00000001" / "state.json").unlink()
        with pytest.raises(onefold.CheckpointError, match="none of the 3 checkpoints"):
            checkpoints.load(optimizer=optimizer)


def test_loading_ahead_changes_nothing_before_it_is_waited_for(tmp_path: Path) -> None:
    import onefold

    model, optimizer = start(3)
    step(model, optimizer, 0)
    onefold.save(tmp_path / "a", model=model, optimizer=optimizer, step=1)
    expected = step(model, optimizer, 1)
    other, states = start(3, seed=4)
    before = onefold.full_state_dict(other)
    loading = onefold.load_async(tmp_path / "a", model=other, optimizer=states)
    assert all(torch.equal(v, before[k]) for k, v in onefold.full_state_dict(other).items())
    assert loading.wait(300.0).step == 1
    assert step(other, states, 1) == expected


def slow_to_hear(root: str) -> list[str]:
    """The second rank hears of the failed save much later than the first; both must skip the same
    update.
    """
    import time

    import onefold
    from onefold.checkpoint import Background
    from onefold.checkpoint import parts as module

    model, optimizer = start(1)
    step(model, optimizer, 0)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    module.write_tensors = broken  # type: ignore[assignment]
    if dist.get_rank():
        heard = Background._failed

        def late(self: Background, error: BaseException) -> None:
            time.sleep(0.3)
            heard(self, error)

        Background._failed = late  # type: ignore[method-assign]
    onefold.save_async(f"{root}/a", model=model, optimizer=optimizer)
    out = []
    for number in range(1, 30):
        try:
            step(model, optimizer, number)
            out.append("stepped")
        except onefold.CheckpointError:
            out.append("told")
            optimizer.zero_grad()
    return out


def test_all_ranks_are_told_of_a_failed_save_by_the_same_step(tmp_path: Path) -> None:
    first, second = run_ranks(2, slow_to_hear, str(tmp_path))
    assert first == second and first.count("told") == 1, (first, second)


def loading_behind_a_save(root: str, stage: int, tier: str, locally: bool) -> bool:
    """Whether a save has the states of its beginning, if others are loaded before it has copied."""
    import onefold
    from onefold.checkpoint.copying import Copying

    model, optimizer = start(stage, offload_optimizer=tier or None)
    optim = onefold.optim
    step(model, optimizer, 0)
    earlier = copy.deepcopy(
        optim.local_state_dict(optimizer) if locally else optimizer.state_dict()
    )
    step(model, optimizer, 1)
    expected = copy.deepcopy(optimizer.state_dict().get("state", {}))
    run = Copying.run

    def late(self: Copying) -> Any:
        time.sleep(0.5)
        return run(self)

    Copying.run = late  # type: ignore[method-assign]
    saving = onefold.save_async(f"{root}/saved", model=model, optimizer=optimizer)
    if locally:
        optim.load_local_state_dict(optimizer, earlier)
    else:
        optimizer.load_state_dict(earlier)
    for states in optimizer.state.values():
        if "exp_avg" in states:  # this rank has some of the parameter
            states["exp_avg"].zero_()
    saving.wait()
    onefold.load(f"{root}/saved", model=model, optimizer=optimizer)
    again = optimizer.state_dict().get("state", {})
    return all(
        torch.equal(again[number]["exp_avg"], states["exp_avg"])
        for number, states in expected.items()
    )


@pytest.mark.parametrize(
    ("stage", "tier", "locally"), [(3, "", False), (1, "cpu", False), (3, "cpu", True)]
)
def test_a_save_under_way_has_the_states_of_its_beginning_though_others_are_loaded(
    stage: int, tier: str, locally: bool, tmp_path: Path
) -> None:
    assert run_ranks(2, loading_behind_a_save, str(tmp_path), stage, tier, locally) == [True] * 2


def overwritten_behind_a_save(root: str) -> bool:
    """Whether a save has the weights of its beginning, if these change before it has copied."""
    import onefold
    from onefold.checkpoint.copying import Copying

    model, optimizer = start(3)
    step(model, optimizer, 0)
    expected = onefold.full_state_dict(model)
    run = Copying.run

    def late(self: Copying) -> Any:
        time.sleep(0.5)
        return run(self)

    Copying.run = late  # type: ignore[method-assign]
    saving = onefold.save_async(f"{root}/saved", model=model)
    zeros = {name: torch.zeros_like(value) for name, value in expected.items()}
    onefold.load_full_state_dict(model, zeros)
    saving.wait()
    again, _ = start(3, seed=9)
    onefold.load(f"{root}/saved", model=again)
    loaded = onefold.full_state_dict(again)
    return all(torch.equal(loaded[name], value) for name, value in expected.items())


def test_whole_weights_are_loaded_when_a_save_under_way_has_read_those_before(
    tmp_path: Path,
) -> None:
    assert run_ranks(1, overwritten_behind_a_save, str(tmp_path)) == [True]
