"""A save behind the training is of the moment of its call; its errors come out of `wait()` or the
next step; the last few checkpoints stay. A load behind it changes nothing before it is waited for.
"""

from __future__ import annotations

import copy
import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
from checkpoints.injured import flip
from on_ranks import on_ranks
from onefold.checkpoint import Background, CheckpointError, tensorfile
from onefold.checkpoint.background import Copying
from onefold.deepspeed.zero import GatheredParameters
from onefold.ema import EMA
from promises.jobs import whole_states
from reference import adamw, built, differences, on_each_rank, train, weights
from zoo import TinyGPT, tokens_of

#: Seconds that a copy goes on after somebody began to wait for it.
HELD = 0.05
Act = Callable[[nn.Module, torch.optim.Optimizer, dict[str, Any]], object]


def made(stage: int, seed: int = 1, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    recipe = onefold.Recipe.zero(stage, stall_timeout=30.0, **options)
    model = onefold.shard(built(lambda: TinyGPT(depth=2), seed), recipe)
    return model, adamw(model)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return train(model, optimizer, [tokens_of(100 * rank + number)])[0]


def hold_copies(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies begin when the event is set, or `HELD` seconds after somebody began to wait for one."""
    release, run, wait = threading.Event(), Copying.run, Copying.wait

    def late(self: Copying) -> Any:
        assert release.wait(120.0), "nobody waited for the copy"
        return run(self)

    def waited_for(self: Copying) -> None:
        threading.Timer(HELD, release.set).start()
        wait(self)

    monkeypatch.setattr(Copying, "run", late)
    monkeypatch.setattr(Copying, "wait", waited_for)
    return release


# -- the moment ------------------------------------------------------------------------------------


def by_hand(model: nn.Module, *_: Any) -> None:
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            (param, param.data, param.detach())[number % 3].mul_(0.5)


def whole(model: nn.Module, *_: Any) -> None:
    with onefold.full_params(model, write=True):
        for param in model.parameters():
            param.mul_(0.5)


def other_weights(model: nn.Module, *_: Any) -> None:
    zeros = {n: torch.zeros_like(t) for n, t in onefold.full_state_dict(model).items()}
    onefold.load_full_state_dict(model, zeros)


def other_states(_: nn.Module, optimizer: torch.optim.Optimizer, before: dict[str, Any]) -> None:
    optimizer.load_state_dict(before)
    for state in optimizer.state.values():
        if "exp_avg" in state:  # this rank has some of the parameter
            state["exp_avg"].zero_()


def gathered(model: nn.Module, *_: Any) -> None:
    with GatheredParameters(model):
        time.sleep(2 * HELD)


def averaged(model: nn.Module, *_: Any) -> None:
    with EMA(model, 0.9).applied():
        pass


def another_structure(model: nn.Module, *_: Any) -> None:
    onefold.shard(onefold.unshard(model), onefold.Recipe.zero(3))


#: What is done while a save has not yet copied.
ACTS: list[Act] = [
    lambda model, optimizer, _: step(model, optimizer, 3), by_hand, whole, other_weights, other_states,
    averaged, gathered, another_structure,
]  # fmt: skip


@on_ranks(2, fresh=True)
@pytest.mark.parametrize(
    ("stage", "options", "acts"),
    [
        (0, {}, 1),
        (1, {"offload_optimizer": "cpu"}, 7),
        (3, {}, 8),
        (1, {"offload_optimizer": "cpu", "step_in_backward": True}, 1),
    ],
)
def test_whatever_follows_waits_for_the_copy_which_is_of_the_moment_of_the_call(
    stage: int, options: dict[str, Any], acts: int, folder: Path
) -> None:
    model, optimizer = made(stage, **options)
    step(model, optimizer, 0)
    before = copy.deepcopy(optimizer.state_dict())
    for number, act in enumerate(ACTS[:acts]):
        step(model, optimizer, 1)
        path = folder / str(number)
        expected = weights(model) | whole_states(optimizer)
        with pytest.MonkeyPatch.context() as monkeypatch:
            release = hold_copies(monkeypatch)
            saving = onefold.save_async(path, model=model, optimizer=optimizer, step=1)
            stalled = saving.stall_s
            assert not release.is_set(), "the call does not wait for the copy"
            assert not saving.done and not path.exists()
            act(model, optimizer, before)
            assert release.is_set() and saving.stall_s > stalled, "the act waits, and that is told"
            assert saving.wait() == path
        onefold.load(path, model=model, optimizer=optimizer)
        assert not differences(expected, weights(model) | whole_states(optimizer)), act


@on_ranks(2, fresh=True)
def test_a_write_that_nobody_sees_fails_the_save_instead_of_mixing_two_moments(
    folder: Path,
) -> None:
    model, optimizer = made(3)
    release = hold_copies(pytest.MonkeyPatch())
    saving = onefold.save_async(folder / "a", model=model, optimizer=optimizer)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for param in model.parameters():
            param.mul_(0.5)
    release.set()
    with pytest.raises(CheckpointError, match="two moments"):
        saving.wait()
    step(model, optimizer, 1)  # what wait() has told, no step tells again
    assert not list(folder.iterdir())


@on_ranks(2, fresh=True)
@pytest.mark.parametrize("stage", [1, 3])
def test_what_a_module_writes_to_its_weights_follows_the_copy_or_fails_the_save(
    stage: int, folder: Path
) -> None:
    """At stage 1 masters are a part of the whole weights, so that the write cannot wait."""
    model: Any = made(stage)[0]
    before = weights(model)

    def write(head: Any, _: Any) -> None:
        head.weight.zero_()

    model.head.register_forward_pre_hook(write)
    hold_copies(pytest.MonkeyPatch())
    saving = onefold.save_async(folder / "a", model=model)
    with torch.no_grad():
        model(tokens_of(0))
    assert not weights(model)["head.weight"].any()
    if stage == 1:
        with pytest.raises(CheckpointError, match="two moments"):
            saving.wait()
    else:
        onefold.load(saving.wait(), model=model)
        assert not differences(before, weights(model))


# -- errors ----------------------------------------------------------------------------------------


@on_ranks(2, fresh=True)
def test_a_failure_is_raised_by_the_same_step_on_every_rank_and_once(folder: Path) -> None:
    """The disk of the second rank is full, and it hears of the failed save later than the first."""
    model, optimizer = made(1)
    step(model, optimizer, 0)
    if dist.get_rank() == 1:

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def late(self: Background, error: BaseException) -> None:
            time.sleep(0.2)
            heard(self, error)

        heard = Background._failed
        tensorfile._put = full
        Background._failed = late  # type: ignore[method-assign]
    onefold.save_async(folder / "a", model=model, optimizer=optimizer, step=1)
    said, until = [], time.monotonic() + 60.0
    while on_each_rank("told" not in "".join(said))[0] and time.monotonic() < until:
        try:
            step(model, optimizer, len(said))
            said.append("")
        except CheckpointError as error:
            said.append("told")
            for words in ("No space left on device", "rank 1", "This rank writes "):
                assert words in str(error), error
        optimizer.zero_grad()
    step(model, optimizer, 0)
    assert on_each_rank(said) == [said] * 2 and said[-1] == "told"
    assert not list(folder.iterdir())


# -- the checkpoints of a run ----------------------------------------------------------------------


def test_a_second_save_waits_or_is_skipped_and_the_last_few_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made(2)
    step(model, optimizer, 0)
    with onefold.Checkpointer(tmp_path, model=model, keep=2, busy="skip") as checkpoints:
        with pytest.MonkeyPatch.context() as monkeypatch:
            release = hold_copies(monkeypatch)
            assert checkpoints.save(1, optimizer=optimizer) is not None
            assert checkpoints.save(2, optimizer=optimizer) is None
            release.set()
            checkpoints.wait()
        checkpoints.busy = "wait"
        for number in (7, 8, 9, 3):  # the last one of a run that went back
            checkpoints.save(number, optimizer=optimizer)
    assert {p.name for p in tmp_path.glob("step-*")} == {f"step-0000000{n}" for n in (3, 8, 9)}
    assert onefold.checkpoint.latest(tmp_path) == tmp_path / "step-00000009"


def test_the_newest_sound_checkpoint_is_loaded_where_a_newer_one_is_damaged(tmp_path: Path) -> None:
    model, optimizer = made(0)
    with onefold.Checkpointer(tmp_path, model=model, asynchronous=False) as checkpoints:
        assert checkpoints.load(optimizer=optimizer) is None
        for number in (1, 2, 3):
            step(model, optimizer, number)
            checkpoints.save(number, optimizer=optimizer)
        flip(tmp_path / "step-00000003" / "rank-00000.safetensors")
        (tmp_path / "step-00000002" / "manifest.json").write_text("{}")
        loaded = checkpoints.load(optimizer=optimizer)
        assert loaded is not None and loaded.step == 1
        (tmp_path / "step-00000001" / "state.json").unlink()
        with pytest.raises(CheckpointError, match="none of the 3 checkpoints"):
            checkpoints.load(optimizer=optimizer)
