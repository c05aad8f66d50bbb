"""Invariant 5, for ranks that are stopped rather than dead: their connections stay open, and nobody
behind them answers. Also where that process keeps the ranks' store.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ranks import outcomes_of
from zoo import TinyMLP, features_of

#: Seconds after which the test gives up.
HANG = 120.0
STALL_TIMEOUT = 5.0
#: (the rank that stops, where it does)
STORE = [(0, "shard"), (0, "forward"), (0, "first save"), (0, "save")]
BYTES = [(1, "save"), (1, "load"), (1, "disk hangs"), (1, "disk is slow")]


def beside_a_stopped_rank(folder: str, moments: list[tuple[int, str]]) -> str:
    """Pairs of ranks, each with a moment and a store of its own, which its first rank keeps. Returns
    the error of the rank that is not stopped.
    """
    import onefold

    pair, rank = divmod(int(os.environ["RANK"]), 2)
    who, moment = moments[pair]
    place = Path(folder, str(pair))
    place.mkdir(exist_ok=True)
    join(place, rank)
    try:
        train(place, moment, who == rank)
        return "no error"
    except onefold.StallError as error:
        dist.destroy_process_group()
        os.kill(int((place / "stopped").read_text()), signal.SIGKILL)
        return str(error)


def join(place: Path, rank: int) -> None:
    patience, port = timedelta(seconds=HANG), place / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, True, patience, wait_for_workers=False)
        (place / "new").write_text(str(store.port))
        (place / "new").rename(port)
    else:
        while not port.exists():
            time.sleep(0.02)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), None, False, patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=patience)
    dist.barrier()


def train(place: Path, moment: str, chosen: bool) -> None:
    import onefold
    from onefold.checkpoint import saving, tensorfile

    def comes(now: str) -> None:
        if now == moment:
            if chosen:
                (place / "stopped").write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
            while not (place / "stopped").exists():
                time.sleep(0.02)

    meet, write, read = saving.meet, tensorfile._put, tensorfile.TensorFile.read

    def meet_and_stop(*given: Any) -> None:
        meet(*given)
        comes("first save")

    def write_badly(file: Any, data: bytes | memoryview) -> None:
        comes("save")
        if chosen and moment == "disk hangs":
            (place / "stopped").write_text(str(os.getpid()))
            time.sleep(HANG)
        if chosen and moment == "disk is slow":
            time.sleep(STALL_TIMEOUT / 5)  # each of the ten or so writes
        write(file, data)

    def read_and_stop(*given: Any) -> int:
        comes("load")
        return read(*given)

    comes("shard")
    model = onefold.shard(TinyMLP(), onefold.Recipe.zero(3, stall_timeout=STALL_TIMEOUT))
    model(features_of(0, 4, 7)).square().mean().backward()
    comes("forward")
    model(features_of(1, 4, 7)).square().mean().backward()
    saving.meet = meet_and_stop
    onefold.save(place / "one", model=model)
    tensorfile._put = write_badly
    start = time.monotonic()
    onefold.save(place / "two", model=model)
    assert moment != "disk is slow" or time.monotonic() - start > 1.5 * STALL_TIMEOUT
    tensorfile.TensorFile.read = read_and_stop  # type: ignore[method-assign,assignment]
    onefold.load(place / "two", model=model)
    dist.barrier()


def errors_beside(moments: list[tuple[int, str]], folder: Path) -> dict[tuple[int, str], str]:
    """The error of the other rank of each pair."""
    found = outcomes_of(
        2 * len(moments), beside_a_stopped_rank, str(folder), moments,
        timeout=HANG, process_group=False,
    )  # fmt: skip
    told = {moment: found[2 * pair + 1 - moment[0]] for pair, moment in enumerate(moments)}
    for moment, outcome in told.items():
        assert not outcome.error and outcome.exitcode == 0, (moment, outcome)
    return {moment: str(outcome.value) for moment, outcome in told.items()}


def test_a_stopped_rank_that_keeps_the_store_is_an_error_on_the_others(tmp_path: Path) -> None:
    for moment, error in errors_beside(STORE, tmp_path).items():
        assert "rank 0, which keeps the ranks' store, does not answer" in error, (moment, error)
        assert "rank 1" in error, (moment, error)


def test_a_save_or_load_waits_for_a_rank_that_moves_bytes_and_for_no_other(tmp_path: Path) -> None:
    errors = errors_beside(BYTES, tmp_path)
    assert errors.pop((1, "disk is slow")) == "no error"
    for moment, error in errors.items():
        assert "no rank has written or read anything for 5 s" in error, (moment, error)
        assert "disk or file system hangs" in error and "frozen" not in error, error
        assert "rank 1: not waiting in any collective" in error, (moment, error)
