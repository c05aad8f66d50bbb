"""An asynchronous save is of the moment of its call, though its copy is taken while the training
goes on.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import virtual
from ranks import run_ranks
from zoo import TinyGPT, tokens_of

HELD = 0.3  # seconds


def trained(stage: int, ranks: int) -> tuple[Any, torch.optim.Optimizer]:
    import onefold

    torch.manual_seed(0)
    model = onefold.shard(TinyGPT(), onefold.Recipe.zero(stage, stall_timeout=20.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer, 0)
    return model, optimizer


def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    model(tokens_of(10 * number + rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def hold_copies() -> threading.Event:
    """Copies begin when the event is set, or `HELD` seconds after somebody began to wait for
    one.
    """
    from onefold.checkpoint.copying import Copying

    release, run, wait = threading.Event(), Copying.run, Copying.wait

    def late(self: Copying) -> Any:
        assert release.wait(120.0), "nobody waited for the copy"
        return run(self)

    def waited_for(self: Copying) -> None:
        threading.Timer(HELD, release.set).start()
        wait(self)

    Copying.run, Copying.wait = late, waited_for  # type: ignore[method-assign]
    return release


def of_one_moment(stage: int, folder: str) -> dict[str, Any]:
    import onefold

    hold_copies()
    model, optimizer = trained(stage, 2)
    want = onefold.full_state_dict(model)
    moment = [t.clone() for s in optimizer.state.values() for t in s.values()]
    saving = onefold.save_async(folder, model=model, optimizer=optimizer, step=1)
    stalled, before = saving.stall_s, saving._copying._done.is_set()
    step(model, optimizer, 1)  # waits for the copy, and then writes to what was copied
    waited, after = saving.stall_s, saving._copying._done.is_set()
    step(model, optimizer, 2)
    saving.wait()
    onefold.load(folder, model=model, optimizer=optimizer)
    got = onefold.full_state_dict(model)
    states = [t for s in optimizer.state.values() for t in s.values()]
    return {
        "same": (
            all(torch.equal(want[n], got[n]) for n in want)
            and all(map(torch.equal, moment, states))
        ),
        "copied": (before, after),
        "stalled": stalled,
        "waited": waited,
    }


@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (0, 2), (1, 2), (3, 2)])
def test_the_copy_is_taken_behind_the_training_and_is_of_one_moment(
    stage: int, ranks: int, tmp_path: Path
) -> None:
    for seen in run_ranks(ranks, of_one_moment, stage, str(tmp_path / "c")):
        assert seen["same"]
        assert seen["copied"] == (False, True), "the call does not wait for the copy, the step does"
        assert seen["waited"] > seen["stalled"], "and what it waited is told"


def written_meanwhile(folder: str, how: str) -> tuple[str, bool]:
    import onefold

    release = hold_copies()
    model, optimizer = trained(3, 2)
    saving = onefold.save_async(folder, model=model, optimizer=optimizer, step=1)
    if how == "by hand":
        with torch.no_grad():
            for number, param in enumerate(model.parameters()):
                (param, param.data, param.detach())[number % 3].mul_(0.5)
    elif how == "unseen":
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for param in model.parameters():
                param.mul_(0.5)
        release.set()
    else:
        with onefold.full_params(model, write=True):
            for param in model.parameters():
                param.mul_(0.5)
    try:
        saving.wait()
        return "", Path(folder).exists()
    except onefold.CheckpointError as error:
        return str(error), Path(folder).exists()


def test_a_write_under_the_copy_fails_the_save_instead_of_mixing_two_moments(
    tmp_path: Path,
) -> None:
    for said, there in run_ranks(2, written_meanwhile, str(tmp_path / "c"), "unseen"):
        assert "two moments" in said and not there


@pytest.mark.parametrize("how", ["by hand", "full_params"])
def test_a_write_that_is_seen_waits_for_the_copy(how: str, tmp_path: Path) -> None:
    assert run_ranks(2, written_meanwhile, str(tmp_path / "c"), how) == [("", True), ("", True)]


@virtual.alone
def test_a_background_save_pins_in_the_background_and_keeps_its_stream(tmp_path: Path) -> None:
    import onefold
    from onefold.checkpoint import copying

    torch.manual_seed(0)
    model: Any = onefold.shard(TinyGPT(), onefold.Recipe.zero(3), device="virtual")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(tokens_of(0).to("virtual")).backward()
    optimizer.step()
    optimizer.zero_grad()
    pinned: list[tuple[int, bool]] = []  # bytes, in the calling thread
    streams: list[Any] = []
    empty, new_stream = copying.empty, copying.new_stream

    def noted(numel: int, *rest: Any, **named: Any) -> torch.Tensor:
        pinned.append((numel, threading.current_thread() is threading.main_thread()))
        return empty(numel, *rest, **named)

    def counted(*given: Any) -> Any:
        streams.append(new_stream(*given))
        return streams[-1]

    copying.empty, copying.new_stream = noted, counted  # type: ignore[assignment]
    for number in range(3):
        onefold.save_async(tmp_path / str(number), model=model, optimizer=optimizer).wait()
    whole = 3 * 4 * sum(t.numel() for t in onefold.full_state_dict(model).values())
    assert sum(nbytes for nbytes, _ in pinned) >= whole
    assert sum(nbytes for nbytes, calling in pinned if calling) < whole // 10, pinned
    assert len([nbytes for nbytes, _ in pinned if nbytes >= whole]) == 1, f"pinned again: {pinned}"
    assert len(streams) == 1


@virtual.alone
def waits_of_a_call(root: str) -> None:
    import onefold
    from onefold.runtime import stepper

    stepper.FUSED_ON = frozenset(("virtual",))
    dist.destroy_process_group()
    model: Any = onefold.shard(
        TinyGPT(), onefold.Recipe.zero(3, precision="bf16"), device="virtual"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    counts = [state["step"] for state in optimizer.state.values()]
    assert len(counts) > 10 and {count.device.type for count in counts} == {"virtual"}
    before = len(virtual.synchronizations())
    saving = onefold.save_async(f"{root}/a", model=model, optimizer=optimizer)
    waits = [str(wait) for wait in virtual.synchronizations()[before:] if "values.py" in str(wait)]
    assert not waits, waits[:2]
    saving.wait()
    optimizer.step()
    onefold.load(f"{root}/a", model=model, optimizer=optimizer)
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


def test_counts_of_steps_on_the_device_come_to_the_host_in_one_copy(tmp_path: Path) -> None:
    waits_of_a_call(str(tmp_path))
