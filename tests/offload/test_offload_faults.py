"""State on NVMe when things go wrong: a sentence on every rank, no hang, nothing stepped by halves
in silence, no litter.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import outcomes_of, run_ranks
from zoo import TinyGPT, tokens_of


def sharded(nvme: str, **options: Any) -> Any:
    import onefold

    torch.manual_seed(0)
    tiers = {"offload_optimizer": "nvme", "offload_param": "nvme", "nvme": nvme, **options}
    return onefold.shard(TinyGPT(), onefold.Recipe.zero(3, stall_timeout=20.0, **tiers))


def one_step(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    model(tokens_of(10 * step + dist.get_rank())).backward()
    optimizer.step()
    optimizer.zero_grad()


def failing(nvme: str, op: str, kind: str, code: int) -> tuple[str, str, str]:
    """Rank 1's disk fails in the second step. Returns what that step said, what the next one says,
    and what a save says.
    """
    import onefold

    model = sharded(nvme)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    one_step(model, optimizer, 0)
    if dist.get_rank() == 1:
        store = onefold.engine_of(model).transfers.open_store
        assert store is not None
        store.fault = lambda o, region, offset, nbytes: (
            OSError(code, os.strerror(code)) if o == op and kind in region else None
        )
    said = []
    for step in (1, 2):
        try:
            one_step(model, optimizer, step)
            said.append("")
        except onefold.TierError as error:
            said.append(str(error))
    try:
        onefold.save(f"{nvme}/../checkpoint", model=model, optimizer=optimizer)
        said.append("")
    except (onefold.CheckpointError, onefold.TierError) as error:
        said.append(str(error))
    return said[0], said[1], said[2]


@pytest.mark.parametrize(
    ("op", "kind", "code"),
    [
        ("write", "exp_avg", errno.ENOSPC),
        ("read", "exp_avg", errno.EIO),
        ("write", "master", errno.EIO),
    ],
)
def test_a_disk_that_fails_in_the_middle_of_a_step_stops_every_rank_for_good(
    tmp_path: Path, op: str, kind: str, code: int
) -> None:
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    for said, after, saved in run_ranks(2, failing, str(nvme), op, kind, code):
        assert "rank 1, in the middle of the step" in said and os.strerror(code) in said
        assert "last checkpoint" in after and saved
    assert list(nvme.iterdir()) == [] and not (tmp_path / "checkpoint").exists()


def failing_before_the_step(nvme: str, op: str, kind: str, phase: int) -> tuple[str, list[float]]:
    """Rank 1's disk fails once, in a forward or a backward pass. Returns what the step said, and
    losses after it is well again.
    """
    import onefold

    model = sharded(nvme)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    one_step(model, optimizer, 0)
    store = onefold.engine_of(model).transfers.open_store
    assert store is not None
    if dist.get_rank() == 1:
        store.fault = lambda o, region, offset, nbytes: (
            OSError(errno.EIO, "Input/output error") if o == op and kind in region else None
        )
    said = ""
    try:
        one_step(model, optimizer, 1)
    except onefold.TierError as error:
        said = str(error)
    store.fault = None
    optimizer.zero_grad()
    losses = []
    for step in (1, 2):
        loss = model(tokens_of(10 * step + dist.get_rank()))
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return said, losses


@pytest.mark.parametrize(("op", "kind"), [("read", "master"), ("write", "gradient")])
def test_a_disk_that_fails_before_the_step_leaves_every_rank_as_it_was(
    tmp_path: Path, op: str, kind: str
) -> None:
    got = run_ranks(2, failing_before_the_step, str(tmp_path), op, kind, 0)
    want = run_ranks(2, failing_before_the_step, str(tmp_path), "never", kind, 0)
    # Without a fault the step between is taken, so losses differ from there on; with one it is as
    # if it had not been.
    for (said, losses), (nothing, others) in zip(got, want, strict=True):
        assert (
            "rank 1, before the step" in said
            and "nothing has been stepped" in said
            and nothing == ""
        )
        assert losses[0] != others[0] and all(x == x for x in losses)


def step_and_say(nvme: str, how: str) -> bool:
    """Whether training goes on, and with the same losses, when somebody removes the files under
    it.
    """
    import onefold

    losses = []
    for remove in (False, True):
        model = sharded(nvme)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        one_step(model, optimizer, 0)
        store = onefold.engine_of(model).transfers.open_store
        assert store is not None
        if remove:
            for folder in store.folders:
                shutil.rmtree(folder)
        one_step(model, optimizer, 1)
        losses.append(model(tokens_of(7)).item())
        del model, optimizer
    return losses[0] == losses[1]


def test_removed_files_are_still_ours(tmp_path: Path) -> None:
    assert run_ranks(2, step_and_say, str(tmp_path), "removed") == [True, True]


def killed(nvme: str) -> None:
    model = sharded(nvme)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    one_step(model, optimizer, 0)
    os.kill(os.getpid(), signal.SIGKILL)


def count(nvme: str) -> int:
    model = sharded(nvme)
    dist.barrier()
    found = len(os.listdir(nvme))
    dist.barrier()
    del model
    return found


def test_what_killed_ranks_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    outcomes_of(2, killed, str(tmp_path), grace=5.0)
    assert len(list(tmp_path.iterdir())) == 2
    assert run_ranks(2, count, str(tmp_path)) == [2, 2]
    assert list(tmp_path.iterdir()) == []


def no_room(nvme: str) -> str:
    import onefold
    from onefold.offload.nvme import preflight

    def full(path: Any) -> Any:
        return shutil._ntuple_diskusage(1 << 30, (1 << 30) - 1000, 1000)  # type: ignore[attr-defined]

    if dist.get_rank() == 1:  # the disk of one host only
        preflight.shutil.disk_usage = full  # type: ignore[assignment]
    try:
        sharded(nvme)
    except onefold.TierError as error:
        return str(error)
    return ""


def test_a_run_that_will_not_fit_is_refused_before_it_begins(tmp_path: Path) -> None:
    for said in run_ranks(2, no_room, str(tmp_path)):
        assert (
            said.startswith("rank 1, before the run: the state of")
            and "needed" in said
            and "1,000 are free" in said
        )
    assert list(tmp_path.iterdir()) == []


def little_room(nvme: str) -> bool:
    from onefold.offload.nvme import preflight

    def almost_full(path: Any) -> Any:
        return shutil._ntuple_diskusage(1 << 30, (1 << 30) - (20 << 20), 20 << 20)  # type: ignore[attr-defined]

    preflight.shutil.disk_usage = almost_full  # type: ignore[assignment]
    model = sharded(nvme)
    before = model(tokens_of(0)).item()
    one_step(model, torch.optim.AdamW(model.parameters(), lr=1e-2), 0)
    return bool(model(tokens_of(0)).item() < before)


def test_a_disk_with_too_little_room_to_be_measured_still_takes_a_state_that_fits(
    tmp_path: Path,
) -> None:
    assert run_ranks(1, little_room, str(tmp_path)) == [True]


def computing_with_nothing(nvme: str) -> list[str]:
    import onefold

    model = sharded(nvme)
    param = next(p for p in model.parameters() if p.numel())
    model(tokens_of(0)).backward()
    said = []
    codes = (
        "param.sum()",
        "param.data.mul_(2)",
        "param.detach().cpu()",
        "param.grad.norm()",
        "param.grad.zero_()",
        "torch.add(param, 1)",
    )
    for code in codes:
        try:
            eval(code, {"param": param, "torch": torch})
        except RuntimeError as error:
            said.append(str(error))
    assert param.shape == param.grad.shape and "NVMe" in repr(param) and "NVMe" in repr(param.grad)
    with onefold.full_params(model):
        assert all(bool(p.isfinite().all()) for p in model.parameters())
    return said


def test_code_that_computes_with_a_parameter_on_nvme_is_told_so(tmp_path: Path) -> None:
    for said in run_ranks(2, computing_with_nothing, str(tmp_path)):
        assert len(said) == 6 and all("stored on NVMe" in s for s in said)


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(Exception, match="/nowhere/at/all"):
        sharded("/nowhere/at/all")
