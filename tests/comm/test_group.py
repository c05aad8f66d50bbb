"""A group's moves and communicators by themselves, over gloo and over the stand-in for NCCL."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import standin
from onefold.comm import CollectiveContext, Group
from onefold.comm.communicators import backend_of
from ranks import run_ranks
from zoo import TinyMLP, features_of

HERE = CollectiveContext("state", "(test)", 0, "state")
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def configured(backend: str | None, config: str) -> Any:
    """torch's own tables, of a group that was made for a machine that this one is not."""
    return SimpleNamespace(
        get_backend=lambda _: backend or "undefined", get_backend_config=lambda _: config
    )


@pytest.mark.parametrize(
    ("backend", "config", "device", "expected"),
    [
        # init_process_group() without a backend, and a mesh of "cuda"; before torch 2.13
        (None, "cuda:nccl", GPU, "nccl"),
        (None, "cpu:gloo,cuda:nccl", GPU, "nccl"),
        (None, "cpu:gloo,cuda:nccl", CPU, "gloo"),
        (None, "cpu:gloo,xpu:xccl", torch.device("xpu", 1), "xccl"),
        ("nccl", "cuda:nccl", GPU, "nccl"),
        ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl", GPU, "nccl"),
        ("gloo", "cpu:gloo,cuda:gloo", GPU, "gloo"),
        # Asked for by name: through the host
        ("gloo", "cpu:gloo,cuda:gloo", torch.device("xpu", 0), "gloo"),
        ("cuda:gloo", "cuda:gloo", GPU, "gloo"),
        ("fake", "cpu:fake,cuda:fake", GPU, "fake"),
    ],
)
def test_the_backend_is_the_one_of_the_devices_type(
    backend: str | None,
    config: str,
    device: torch.device,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("onefold.comm.communicators.dist", configured(backend, config))
    assert backend_of(None, device) == expected


@pytest.mark.parametrize(
    ("backend", "config", "device", "words"),
    [
        (
            None,
            "cpu:gloo",
            GPU,
            ["cuda:0", "gloo for cpu", "init_process_group('cpu:gloo,cuda:nccl')"],
        ),
        (
            "cpu:gloo",
            "cpu:gloo",
            GPU,
            ["cuda:0", "gloo for cpu", "init_process_group('cpu:gloo,cuda:nccl')"],
        ),
        *(
            (
                backend,
                "cuda:nccl",
                CPU,
                ["is on cpu", "nccl for cuda): give shard(..., device='cuda') to train there, or"],
            )
            for backend in (None, "nccl")
        ),
    ],
)
def test_a_group_without_a_backend_for_the_device_is_refused_in_a_sentence(
    backend: str | None,
    config: str,
    device: torch.device,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("onefold.comm.communicators.dist", configured(backend, config))
    with pytest.raises(ValueError) as caught:
        backend_of(None, device)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def every_move(inner: int | None, native: bool) -> dict[str, torch.Tensor]:
    """What each move gives this rank, on a group of `inner` and on both of its levels."""
    whole = Group(standin.new_group() if native else None, CPU, 20.0, inner)
    out: dict[str, torch.Tensor] = {"position": torch.tensor(whole.rank)}
    for name, group in (
        ("all", whole),
        ("inside", whole.intra_group),
        ("across", whole.inter_group),
    ):
        n, me = group.size, whole.number
        out[f"{name}: values"] = group.gather_values(torch.tensor([me, me * me]), HERE)
        payload = torch.tensor([me, 7], dtype=torch.uint8)
        out[f"{name}: control"] = torch.stack(group.exchange_control(payload, HERE))
        out[f"{name}: any"] = torch.tensor(list(group.any_of(bytes([1 << me, 2]), HERE)))
        mine = [
            features_of(me, 3).clone(),
            torch.full((2,), me, dtype=torch.int64),
            torch.tensor(me > 0),
        ]
        group.broadcast(mine, HERE)
        out |= {f"{name}: broadcast {i}": t for i, t in enumerate(mine)}
        full = torch.zeros(4 * n)
        full[4 * group.rank : 4 * group.rank + 4] = me + 1
        group.all_gather(full, HERE, 3).wait()
        out[f"{name}: gathered"] = full
        sizes = [1 + p % 2 for p in range(n)]
        sent = features_of(10 + me, sum(sizes))
        if native and n > 1:
            cut = group.cut(sizes)
            received = torch.zeros(n, cut.own)
            group.scatter_parts(sent, cut, received, HERE, 3, "reduce-scatter").wait()
            less = torch.zeros(n - 1, cut.own)
            a = sum(sizes[: group.rank])
            group.scatter_parts(
                torch.cat([sent[:a], sent[a + cut.own :]]), cut, less, HERE, 3, "reduce-scatter"
            ).wait()
            out[f"{name}: the others' parts"] = less
        else:
            received = torch.zeros(n, sizes[group.rank])
            pieces, rows = sent.split(sizes), received.unbind()
            received[group.rank] = pieces[group.rank]
            others = [p for p in range(n) if p != group.rank]
            group.exchange(
                [(p, pieces[p]) for p in others],
                [(p, rows[p]) for p in others],
                HERE,
                3,
                move="reduce-scatter",
            ).wait()
            if native or n > 1:
                out[f"{name}: the others' parts"] = received[others]
        out[f"{name}: parts"] = received
    ledger = {
        move: torch.tensor([sent.nbytes, sent.between])
        for move, sent in whole.ledger.by_move_in_full().items()
        if move != "state"
    }
    halves = 2 if native else 1  # the parts travelled twice
    ledger["reduce-scatter"] = ledger["reduce-scatter"] // halves
    whole.close()
    return out | {f"sent: {move}": sent for move, sent in ledger.items()}


@pytest.mark.parametrize(("world_size", "inner"), [(2, None), (3, None), (4, 2), (6, 3)])
def test_native_moves_give_what_gloos_give_by_position(world_size: int, inner: int | None) -> None:
    over_gloo, native = (run_ranks(world_size, every_move, inner, way) for way in (False, True))
    for rank, (a, b) in enumerate(zip(over_gloo, native, strict=True)):
        assert a.keys() <= b.keys() | {"all: the others' parts"}, (a.keys(), b.keys())
        for name in a:
            assert torch.equal(a[name], b[name]), (
                f"rank {rank}, {name}: gloo {a[name]}, native {b[name]}"
            )
        assert sorted(b["all: values"][:, 0].tolist()) == list(range(world_size))


def rounds() -> list[int]:
    """Control bytes that an agreement of 5 bytes and an exchange of 3 cost on this rank."""
    group, sent = Group(None, CPU, 20.0), []
    for move in (
        lambda: group.any_of(bytes(5), HERE),
        lambda: group.exchange_control(torch.zeros(3, dtype=torch.uint8), HERE),
    ):
        group.ledger.control_bytes = 0
        move()
        sent.append(group.ledger.control_bytes)
    return sent


def test_an_agreement_takes_as_many_messages_as_the_ranks_have_bits() -> None:
    assert run_ranks(2, rounds) == [[5, 3]] * 2
    assert run_ranks(5, rounds) == [[15, 12]] * 5


def communicators(folder: str, inner: int | None) -> list[Any]:
    """Numbers of native communicators that were made anew and by splitting, where the process group
    knows its device.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    standin.register()
    dist.init_process_group(
        "standin", store=dist.FileStore(f"{folder}/again", size), rank=rank, world_size=size
    )
    before = dict(standin.made)
    plain = Group(None, CPU, 20.0, inner)
    plain.close()
    anew = {how: n - before.get(how, 0) for how, n in standin.made.items()}
    # torch splits for an accelerator alone: say that there is one.
    torch.accelerator.is_available = lambda: True  # type: ignore[assignment]
    torch.accelerator.current_accelerator = lambda *_: GPU  # type: ignore[assignment]
    dist.distributed_c10d._get_default_group().bound_device_id = GPU
    before = dict(standin.made)
    split = Group(None, CPU, 20.0, inner)
    values = split.intra_group.gather_values(torch.tensor([rank]), HERE).flatten().tolist()
    more = {
        how: n - before.get(how, 0) for how, n in standin.made.items() if n - before.get(how, 0)
    }
    split.close()
    return [anew, more, values]


@pytest.mark.parametrize(("world_size", "inner", "count"), [(2, None, 2), (4, 2, 5)])
def test_communicators_are_few_and_split_where_the_backend_can(
    world_size: int, inner: int | None, count: int, tmp_path: Any
) -> None:
    for rank, (anew, split, values) in enumerate(
        run_ranks(world_size, communicators, str(tmp_path), inner)
    ):
        assert anew.get("new_group") == count and split == {"split": count}, (anew, split)
        assert values == ([0, 1] if rank < 2 else [2, 3]), values


def one_message(native: bool) -> int:
    """Operations for rank 0's tensors."""
    group = Group(standin.new_group() if native else None, CPU, 20.0)
    before = standin.launched.total()
    group.broadcast([torch.ones(3), torch.ones(2, dtype=torch.int32), torch.ones(())], HERE)
    return standin.launched.total() - before


def test_rank_0s_tensors_go_in_one_operation() -> None:
    assert run_ranks(3, one_message, True) == [1, 1, 1]


def calls_of_a_step(world_size: int, stage: int, options: dict[str, Any]) -> int:
    """Python and C calls of one training step, as one of `world_size` ranks that are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import onefold

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    model = onefold.shard(TinyMLP(8, 16, 4, 8), onefold.Recipe.zero(stage, **options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    count = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    for step in range(4):
        sys.setprofile(seen if step == 3 else None)
        model(features_of(step, 3, 8)).sum().backward()
        onefold.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (0, {}),
        (1, {}),
        (3, {}),
        (3, {"shard_group": 8, "precision": "bf16"}),
        (0, {"reduce": "native"}),
        (2, {"reduce": "native"}),
    ],
    ids=str,
)
def test_the_hosts_work_in_a_step_does_not_grow_with_the_ranks(
    stage: int, options: dict[str, Any]
) -> None:
    (few,), (many,) = (run_ranks(1, calls_of_a_step, n, stage, options) for n in (16, 1024))
    # What of a unit is this rank's differs a little
    assert few > 300 and many <= few * 1.15, (few, many)
