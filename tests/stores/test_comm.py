"""Ranks and what moves between them: who shares a node, which backend serves, what each move gives, in
which order parts are added up, what is counted as sent.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import looks
import onefold
import standin
import virtual
from examples import examples
from on_ranks import on_ranks
from onefold.comm import CollectiveContext, Group
from onefold.comm.communicators import Communicators
from onefold.comm.pending import within
from onefold.device import of_local_rank
from onefold.runtime.hops import add_up
from ranks import outcomes_of
from zoo import TinyMLP, features_of

HERE = CollectiveContext("state", "(test)", 0, "state")
GATHER, REDUCE = replace(HERE, move="all-gather"), replace(HERE, move="reduce-scatter")
CPU = torch.device("cpu")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def shard(among: Any = None, **options: Any) -> Any:
    recipe = onefold.Recipe.zero(3, stall_timeout=20.0, **options)
    return onefold.shard(TinyMLP(8, 24, 2, 6), recipe, group=among)


# -- sums ------------------------------------------------------------------------------------------


def one_by_one(
    parts: list[Tensor], out: Tensor, scale: float, round_to: torch.dtype | None
) -> Tensor:
    """What a reader would write: an accumulator, an addition a rank, a factor, conversions."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    total = total * scale
    return (total if round_to is None else total.to(round_to).float()).to(out.dtype)


@examples(200)
@given(
    st.integers(1, 5),
    st.sampled_from([0, 1, 101, 300]),
    st.tuples(*[st.sampled_from(FLOATS)] * 3),
    st.sampled_from([None, *FLOATS]),
    st.sampled_from(["parts", "own", "in place", "own in place", "apart"]),
    st.floats(0, 0.99),
)
@example(3, 1_300_000, (torch.bfloat16, torch.float32, torch.float16), torch.float16, "apart", 0.5)
def test_a_sum_has_the_bits_of_one_addition_a_rank_in_the_order_of_ranks(
    ranks: int,
    n: int,
    dtypes: tuple[torch.dtype, ...],
    round_to: torch.dtype | None,
    how: str,
    which: float,
) -> None:
    """From and to every dtype; the own part may have another one; the sum may take any part's place;
    rows may lie apart and begin anywhere.
    """
    wire, other, out_dtype = dtypes
    values = [(features_of(r, n) * 10.0 ** (r % 3)).to(wire) for r in range(ranks)]
    at = int(which * ranks)
    rows, own = torch.stack(values), None
    if how == "apart":
        buffer = torch.full((3 + ranks * (n + 27),), torch.nan, dtype=wire)[3:].view(ranks, -1)
        buffer[:, :n] = rows
        rows = buffer[:, :n]
    if "own" in how:
        own = values[at] = values[at].to(other)
        rows = (
            torch.stack([v.to(wire) for i, v in enumerate(values) if i != at])
            if ranks > 1
            else rows[:0]
        )
    around = torch.full((n + 2,), 7.0, dtype=out_dtype)
    out = around[1:-1]
    if how == "in place":
        out = rows[at]
    elif how == "own in place":
        out = own = values[at].clone()
    expected = one_by_one(values, out, 1 / 3, round_to)
    parts = list(rows)
    if own is not None:
        parts.insert(at, own)
    elif how == "in place":
        parts[at] = out
    add_up(parts, out, 1 / 3, round_to=round_to)
    assert torch.equal(out, expected), (out[out != expected], expected[out != expected])
    assert around[0] == around[-1] == 7.0
    loose = torch.empty(n, dtype=out_dtype)
    add_up(values, loose, 1 / 3, round_to=round_to)
    assert torch.equal(loose, one_by_one(values, loose, 1 / 3, round_to))


# -- moves -----------------------------------------------------------------------------------------


def part_of(p: int, native: bool) -> int:
    """Elements of the part of the rank at `p`: uneven in messages, even in the backend's operations."""
    return 2 if native else 1 + p % 2


def each_move(group: Group, me: int, whole: Group) -> dict[str, Tensor]:
    """What each move gives this rank, by position in `group`. `me` is the rank's number."""
    n, at = group.size, group.rank
    out = {"values": group.gather_values(torch.tensor([me, me * me]), HERE)}
    out["control"] = torch.stack(
        group.exchange_control(torch.tensor([me, 7], dtype=torch.uint8), HERE)
    )
    out["any"] = torch.tensor(list(group.any_of(bytes([1 << me, 2]), HERE)))
    mine = [torch.full((3,), me + 0.5), torch.full((2,), me), torch.tensor(me > 0)]
    group.broadcast(mine, HERE)
    out |= {f"broadcast {i}": t for i, t in enumerate(mine)}
    full = torch.zeros(4 * n)
    full[4 * at : 4 * at + 4] = me
    group.all_gather(full, GATHER, 3).wait()
    out["gathered"] = full
    # A part for each rank, `sizes[p]` elements, all of them 100·sender + receiver
    sizes = [part_of(p, whole.native) for p in range(n)]
    sent = torch.cat([torch.full((size,), 100.0 * me + p) for p, size in enumerate(sizes)])
    received = torch.zeros(n, sizes[at])
    if group.native and group.ranks == sorted(group.ranks):  # as reductions run on
        group.scatter_parts(sent, received, REDUCE, 3).wait()
    else:
        pieces, rows = sent.split(sizes), received.unbind()
        received[at] = pieces[at]
        others = [p for p in range(n) if p != at]
        to, of = [(p, pieces[p]) for p in others], [(p, rows[p]) for p in others]
        group.exchange(to, of, REDUCE, 3).wait()
    out["parts"] = torch.stack([received[:, 0], received[:, -1]], 1)
    return out


def expected_of(numbers: list[int], at: int) -> dict[str, Tensor]:
    """The same for the ranks with these numbers, by position."""
    n, found = len(numbers), torch.tensor(numbers)
    bits = 0
    for number in numbers:
        bits |= 1 << number
    return {
        "values": torch.stack([found, found * found], 1),
        "control": torch.stack([found, torch.full((n,), 7)], 1).byte(),
        "any": torch.tensor([bits, 2]),
        "broadcast 0": torch.full((3,), numbers[0] + 0.5),
        "broadcast 1": torch.full((2,), numbers[0]),
        "broadcast 2": torch.tensor(numbers[0] > 0),
        "gathered": found.float().repeat_interleave(4),
        "parts": (100.0 * found + at)[:, None].expand(n, 2),
    }


def moves_of_each_level(inner: int | None, native: bool) -> None:
    whole = Group.over(standin.new_group() if native else None, CPU, 20.0, inner)
    me, size = dist.get_rank(), dist.get_world_size()
    each = inner or size
    node, place = me // each * each, me % each
    order = [g * each + p for p in range(each) for g in range(size // each)]
    levels = (
        ("all", whole, order),
        ("inside a node", whole.intra_group, list(range(node, node + each))),
        ("between nodes", whole.inter_group, list(range(place, size, each))),
    )
    for name, group, numbers in levels:
        wanted = expected_of(numbers, numbers.index(me))
        for move, found in each_move(group, me, whole).items():
            assert torch.equal(found, wanted[move]), (name, move, found, wanted[move])
    sent = whole.ledger.by_move_in_full()
    parts = [4 * part_of(p, native) for p in range(size)]
    crossing = [p for p, number in enumerate(order) if number // each != me // each]
    flat = sum(parts) - parts[order.index(me)]
    if inner is None:  # the levels are the whole, and groups of one
        assert sent["all-gather"].nbytes == 16 * (size - 1) * 2 and not crossing
        assert sent["reduce-scatter"].nbytes == 2 * flat
    elif inner:
        assert sent["reduce-scatter"].between == sum(parts[p] for p in crossing) + sum(
            4 * part_of(p, native) for p in range(size // each) if p != node // each
        )
    whole.close()


@on_ranks(4)
@pytest.mark.parametrize("inner", [None, 2])
@pytest.mark.parametrize("native", [False, True])
def test_each_move_gives_what_it_says_by_position_and_counts_its_bytes(
    inner: int | None, native: bool
) -> None:
    moves_of_each_level(inner, native)


def as_one_of(world_size: int) -> None:
    """Be rank 0 of so many, of which the others are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


def calls_of_a_step(world_size: int) -> int:
    """Python and C calls of one training step, as one of `world_size` ranks."""
    as_one_of(world_size)
    model, count = shard(shard_group=8), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

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


@on_ranks(1, fresh=True)
def test_the_hosts_work_in_a_step_does_not_grow_with_the_ranks() -> None:
    few, many = calls_of_a_step(16), calls_of_a_step(1024)
    as_one_of(1)
    assert few > 300 and many <= few * 1.15, (few, many)


@pytest.mark.skipif(not virtual.available(), reason=virtual.why_not())
@on_ranks(2, fresh=True)
@pytest.mark.parametrize(
    ("stage", "move", "phase", "trained"),
    [
        (2, "reduce-scatter", "backward", 12),
        (3, "all-gather", "backward", 1),
        (3, "all-gather", "forward", 12),
    ],
)
def test_a_peer_that_hangs_is_named_in_the_middle_of_the_pass(
    stage: int, move: str, phase: str, trained: int
) -> None:
    """The host runs two units ahead of the device, and notices there. Each unit's messages are large
    enough to be waited for.
    """
    virtual.start(seed=0)
    standin.register("cpu", "virtual")
    layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12))).to("virtual")
    layers[trained:].requires_grad_(False)
    recipe = onefold.Recipe.zero(stage, stall_timeout=2.0)
    model = onefold.shard(layers, recipe, group=standin.new_group(), units=(nn.Linear,))

    def forward() -> Tensor:
        out: Tensor = model(torch.ones(2, 1024).to("virtual")).square().mean()
        return out

    forward().backward()
    act = forward if phase == "forward" else forward().backward
    come: list[str] = []
    for layer in layers:
        layer.register_forward_hook(lambda *_: come.append("forward"))
        layer.register_full_backward_hook(lambda *_: come.append("backward"))
    if dist.get_rank() == 0:
        with pytest.raises(
            onefold.StallError, match=rf"gave up waiting in {move} of unit '\d+' \({phase}"
        ):
            act()
        assert len(come) < 10, come
    dist.barrier()


@pytest.mark.skipif(not virtual.available(), reason=virtual.why_not())
@on_ranks(2, fresh=True)
def test_a_buffer_that_stays_on_the_host_is_rank_0s_too() -> None:
    virtual.start(seed=0)
    standin.register("cpu", "virtual")
    model: Any = nn.Linear(3, 1).to("virtual")
    model.register_buffer("kept", torch.full((2,), float(dist.get_rank())))
    recipe = onefold.Recipe.zero(2, stall_timeout=20.0)
    onefold.shard(model, recipe, group=standin.new_group())
    assert model.kept.tolist() == [0.0, 0.0]


@pytest.mark.skipif(not virtual.available(), reason=virtual.why_not())
@on_ranks(4, fresh=True)
def test_some_axes_of_a_mesh_have_communicators_of_their_ranks_alone(folder: Path) -> None:
    """The process group was made with its device, so that communicators of all ranks are split."""
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    virtual.start(seed=0)
    standin.register("cpu", "virtual")
    store = dist.FileStore(str(folder / "again"), 4)
    dist.init_process_group("standin", store=store, rank=rank, world_size=4)
    world, make = dist.distributed_c10d._get_default_group(), dist.new_group

    def new_group(*arguments: Any, **named: Any) -> Any:
        world.bound_device_id = None  # which torch's gloo would look for in itself
        try:
            return make(*arguments, **named)
        finally:
            world.bound_device_id = torch.device("virtual", 0)

    mesh = dist.init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "dp", "tp"))
    world.bound_device_id = torch.device("virtual", 0)
    for among, peers in ((mesh["dp", "tp"], 2), (None, 4)):
        split, recipe = standin.made["split"], onefold.Recipe.zero(2, stall_timeout=20.0)
        weight = nn.Linear(3, 1, bias=False).to("virtual")
        with patch.object(dist, "new_group", new_group):
            model = onefold.shard(weight, recipe, mesh=among, data=among and "dp")
        model(torch.full((1, 3), float(rank)).to("virtual")).sum().backward()
        first = rank - rank % peers
        mean = sum(range(first, first + peers)) / peers
        assert onefold.clip_grad_norm_(model, 100.0).item() == pytest.approx(mean * 3**0.5)
        assert (standin.made["split"] > split) == (peers == 4)


# -- nodes -----------------------------------------------------------------------------------------


class Said(logging.Handler):
    """What Onefold logs inside the context."""

    def __enter__(self) -> list[str]:
        self.lines: list[str] = []
        logging.getLogger("onefold").addHandler(self)
        return self.lines

    def __exit__(self, *_: Any) -> None:
        logging.getLogger("onefold").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def on(hosts: str, launcher: str = "") -> None:
    """Be on the host that this rank's letter names. `launcher`: what it says of each rank's node."""
    os.environ["NCCL_HOSTID"] = hosts[dist.get_rank()]
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    if launcher:
        os.environ["LOCAL_WORLD_SIZE"] = launcher[dist.get_rank()]


@on_ranks(4)
@pytest.mark.parametrize(
    ("hosts", "group", "launcher", "expected", "said"),
    [
        ("aabb", "node", "", (2, "2 nodes", False), []),
        ("aaaa", None, "", (1, "", False), []),
        ("aaab", None, "", (1, "2 nodes", True), ["unevenly (ranks 0-2; 3)", "up to 3 times"]),
        ("abab", None, "", (1, "2 nodes", True), ["not as neighbours", "up to 2 times"]),
        ("abab", None, "2222", (2, "2 nodes", False), []),  # the launcher's word is taken
        ("aabb", None, "3331", (2, "2 nodes", False), []),  # where it can be used
    ],
)
def test_hosts_are_compared_where_no_launcher_tells_of_even_nodes(
    hosts: str,
    group: str | None,
    launcher: str,
    expected: tuple[int, str, bool],
    said: list[str],
) -> None:
    on(hosts, launcher)
    with Said() as lines:
        model = shard(group=group)
    assert looks.nodes(model) == expected
    assert len(lines) == bool(said and dist.get_rank() == 0)
    for line in lines:
        assert all(word in line for word in [*said, "Start the same number of ranks"])


@on_ranks(4)
def test_uneven_hosts_cannot_be_groups() -> None:
    on("aaab")
    with pytest.raises(ValueError, match=r"lie on nodes \[0, 0, 0, 1\], unevenly"):
        shard(group="node")


# -- native communicators --------------------------------------------------------------------------


def reducing(hosts: str, **options: Any) -> set[str]:
    """The operations that reduce gradients over the stand-in for NCCL."""
    on(hosts)
    model = shard(standin.new_group(), **options)
    before = dict(standin.launched)
    model(features_of(dist.get_rank(), 3, 8)).square().mean().backward()
    return {op for op, n in standin.launched.items() if n > before.get(op, 0)} - {"all_gather"}


@on_ranks(4)
@pytest.mark.parametrize(
    ("hosts", "options", "operation"),
    [
        ("aaaa", {}, "all_to_all"),
        ("aabb", {}, "all_to_all"),
        ("aaab", {}, "reduce_scatter"),
        ("aaab", {"reduce": "ordered"}, "all_to_all"),
        ("aabb", {"reduce": "native"}, "reduce_scatter"),
    ],
)
def test_the_backend_adds_up_by_default_only_where_messages_are_flat_over_hosts(
    hosts: str, options: dict[str, Any], operation: str
) -> None:
    with Said() as lines:
        assert reducing(hosts, **options) == {operation}
    decided = operation == "reduce_scatter" and "reduce" not in options
    assert any("native" in line for line in lines) == (decided and dist.get_rank() == 0)


@on_ranks(4, fresh=True)
@pytest.mark.parametrize("made", range(6))
def test_a_group_that_cannot_be_made_leaves_nothing_behind(made: int) -> None:
    """A communicator of all ranks or of a level cannot be made, after some others were."""
    on("aabb")
    among, known, left = standin.new_group(), dist.distributed_c10d._world.pg_names, [made]
    before, make = len(known), dist.new_group

    def new_group(*arguments: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("no memory for it")
        return make(*arguments, **named)

    with (
        patch.object(dist, "new_group", new_group),
        pytest.raises(onefold.StallError, match="no memory for it"),
    ):
        shard(among)
    assert left[0] == -1 and len(known) == before, (made, set(known.values()))


def without_the_last(comes: bool, limit: float) -> None:
    store, last = dist.distributed_c10d._get_default_store(), dist.get_rank() == 3
    while last and not comes and store.add("given up", 0) < 3:
        time.sleep(0.05)
    try:
        made = Communicators([0, 1, 2, 3], CPU, limit).make("gloo", on_demand=True)
    finally:
        store.add("given up", 1)
    if last:
        os._exit(1)
    made.recv([torch.empty(1)], 3, 0).wait()


@pytest.mark.parametrize(("comes", "limit"), [(True, 60.0), (False, 1.0)])
def test_a_rank_that_ends_or_does_not_come_is_noticed_before_any_message(
    comes: bool, limit: float
) -> None:
    *others, _ = outcomes_of(4, without_the_last, comes, limit, timeout=30)
    said = "by peer" if comes else "other ranks of [0, 1, 2, 3] to call it too"
    assert all(said in other.message and other.seconds < 20 for other in others), others


def test_a_store_that_does_not_answer_is_told_and_costs_one_thread() -> None:
    def waiting() -> int:
        return sum(thread.name == "onefold-store" for thread in threading.enumerate())

    store, answers, others = object(), threading.Event(), waiting()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="rank 0, which keeps the ranks' store, does not"):
            within(0.05, answers.wait, store)
    assert waiting() == others + 1
    assert within(60.0, lambda: "another one answers", object()) == "another one answers"
    answers.set()


# -- devices ---------------------------------------------------------------------------------------


def gpus(monkeypatch: pytest.MonkeyPatch, ids: list[str]) -> None:
    """Let torch see GPUs of these ids."""
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(ids))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: bool(ids))
    module = SimpleNamespace(
        get_device_properties=lambda device: SimpleNamespace(uuid=ids[device.index])
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)


@pytest.mark.parametrize(("seen", "local", "index"), [(8, 3, 3), (1, 3, 0), (4, 5, 1), (0, 2, 0)])
def test_a_rank_that_sees_one_gpu_of_its_own_takes_it(
    seen: int, local: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, [f"GPU-{i}" for i in range(seen)])
    assert of_local_rank("cuda", local) == torch.device("cuda", index)


@on_ranks(2, fresh=True)
def test_ranks_on_one_device_are_refused_with_a_cure() -> None:
    from onefold.comm import group

    group.device_identity = lambda _: "ab"[dist.get_rank()]  # type: ignore[assignment]
    shard(among=standin.new_group())
    group.device_identity = lambda _: "a"  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"ranks 0-1 compute on one device.*--nproc-per-node"):
        shard(among=standin.new_group())
