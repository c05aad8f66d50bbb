"""How communicators of NCCL are made and destroyed, on torch's calls that are looked at."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import warnings
import weakref
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import virtual
from onefold.comm import communicators
from onefold.comm.communicators import Communicators, warn_of_one_connection
from onefold.device import new_stream, streams

GPU = torch.device("cuda", 0)


class Options:
    """NCCL's, of which a CPU build of torch has none."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = {"min_ctas": 4}
        self._timeout = timedelta(minutes=10)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What `new_group` and `split_group` are called with."""
    calls: list[dict[str, Any]] = []

    def seen(*_: Any, **named: Any) -> Any:
        calls.append(named)
        return SimpleNamespace(number=len(calls))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(communicators, "within", lambda seconds, call: call())
    monkeypatch.setattr(communicators, "guard", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(dist, "new_group", seen)
    monkeypatch.setattr(dist, "split_group", seen)
    yield calls
    if communicators._follow_collector in gc.callbacks:
        gc.callbacks.remove(communicators._follow_collector)


def test_new_communicators_of_nccl_run_on_streams_of_high_priority(
    made: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Communicators([0, 1], GPU, 20.0)
    monkeypatch.setattr(group, "_can_split", lambda _: False)
    for backend in ("nccl", "xccl", "gloo"):
        group.make(backend)
    assert made[0]["pg_options"].is_high_priority_stream
    assert made[0]["pg_options"]._timeout == made[0]["timeout"], "torch warns where they differ"
    assert not any("pg_options" in call for call in made[1:])


@pytest.mark.parametrize("name", ["nccl", "cpu:gloo,cuda:nccl"])
def test_split_communicators_keep_the_options_of_their_parent_at_high_priority(
    name: str, made: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Options()
    backend = SimpleNamespace(options=own, supports_splitting=True)
    parent = SimpleNamespace(_get_backend=lambda _: backend)
    monkeypatch.setattr(dist, "get_backend", lambda _: name)
    group = Communicators([0, 1], GPU, 20.0)
    monkeypatch.setattr(group, "_can_split", lambda _: True)
    group.make("nccl", parent=parent)
    given = made[0]["pg_options"]
    assert given.is_high_priority_stream and given.config == own.config
    assert given is not own and not own.is_high_priority_stream, "torch writes into what it gets"
    assert made[0].get("backend") == ("cuda:nccl" if ":" in name else None)


class Owner:
    """What frees communicators when it dies; `itself` makes it garbage that only the collector
    finds.
    """

    def __init__(self, group: Communicators, in_a_cycle: bool) -> None:
        self.itself = self if in_a_cycle else None
        weakref.finalize(self, group.close)


def test_the_garbage_collector_destroys_no_communicator_of_nccl(
    made: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    destroyed: list[Any] = []
    monkeypatch.setattr(dist, "destroy_process_group", destroyed.append)
    gc.collect()
    for in_a_cycle in (False, True):
        destroyed.clear()
        group = Communicators([0, 1], GPU, 20.0)
        monkeypatch.setattr(group, "_can_split", lambda _: False)
        native, over_gloo = group.make("nccl"), group.make("gloo")
        owner = Owner(group, in_a_cycle)
        del owner
        if not in_a_cycle:
            assert destroyed == [native, over_gloo]
            continue
        gc.collect()
        assert destroyed == [over_gloo], destroyed
        # The next call that makes one comes at the same point on every rank
        Communicators([0, 1], GPU, 20.0).make("gloo")
        assert destroyed == [over_gloo, native]
        assert not communicators._LEFT


@pytest.mark.parametrize(
    ("value", "device", "told"),
    [("1", GPU, 1), ("8", GPU, 0), (None, GPU, 0), ("1", torch.device("cpu"), 0)],
)
def test_one_queue_for_all_streams_is_told_once(
    value: str | None, device: torch.device, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv(name, value)
    warn_of_one_connection.cache_clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            warn_of_one_connection(device)
    warn_of_one_connection.cache_clear()
    assert len(found) == told
    assert all(f"Unset {name}, or set it to 8 or more" in str(each.message) for each in found)


def test_an_urgent_stream_has_torchs_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(streams.torch, "Stream", lambda **named: asked.append(named))
    monkeypatch.setitem(streams._streamless, "cuda", False)
    new_stream(GPU)
    new_stream(GPU, urgent=True)
    assert asked == [{"device": GPU}, {"device": GPU, "priority": -1}]


@virtual.alone
def test_streams_that_the_computation_waits_for_are_urgent() -> None:
    from torch import nn

    import onefold
    from onefold.comm import group
    from onefold.device import copies

    asked: dict[str, bool] = {}

    def seen(device: torch.device, name: str = "", urgent: bool = False) -> Any:
        asked[name] = urgent
        return new_stream(device, name, urgent)

    group.new_stream = copies.new_stream = seen
    onefold.shard(nn.Linear(4, 4), onefold.Recipe.zero(3), device="virtual")
    assert asked == {"relay": True, "sums": True, "copies up": True, "copies down": False}


_ENDS = """
import sys
import torch
import torch.distributed as dist

import onefold


class Native:
    pass


model = onefold.shard(torch.nn.Linear(2, 2), onefold.Recipe.zero(3))
native, over_gloo = Native(), object()
made = onefold.engine_of(model).group.communicators
made._made, made.native = [native, over_gloo], [native]
dist.destroy_process_group = lambda group: print("destroys", type(group).__name__)
if sys.argv[1] == "dies":
    del model
    print("goes on")
if sys.argv[1] == "raises":
    raise ValueError("out of memory")
"""


@pytest.mark.parametrize(
    ("how", "destroyed"),
    [
        ("dies", ["destroys Native", "destroys object", "goes on"]),
        ("ends", ["destroys object"]),
        ("raises", ["destroys object"]),
    ],
)
def test_the_end_of_a_process_destroys_no_communicator_of_nccl(
    how: str, destroyed: list[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ENDS, how], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == destroyed, done.stderr
    assert ("ValueError" in done.stderr) == (how == "raises"), done.stderr
