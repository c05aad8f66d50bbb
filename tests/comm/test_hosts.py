"""Hosts that no launcher tells of: the ranks compare them, on four ranks. What follows for moves,
for who adds gradients up, and for devices that ranks share.
"""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import onefold
import standin
from onefold.comm import group as groups
from onefold.comm.communicators import (
    communicators_of,
    flat_note,
    flat_over,
    host_identity,
    inner_of,
    nodes_of,
    refuse_shared_device,
)
from onefold.device import device_identity, of_local_rank
from onefold.layout import Topology
from ranks import run_ranks
from zoo import TinyMLP, features_of

TWO, UNEVEN, SCATTERED, ONE = "aabb", "aaab", "abab", "aaaa"


def on(hosts: str) -> None:
    """Be on the host that this rank's letter names, started by a launcher that says nothing."""
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    os.environ["NCCL_HOSTID"] = hosts[dist.get_rank()]


class Said(logging.Handler):
    """What Onefold logs inside the context."""

    def __enter__(self) -> Said:
        self.lines: list[str] = []
        logging.getLogger("onefold").addHandler(self)
        return self

    def __exit__(self, *_: Any) -> None:
        logging.getLogger("onefold").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def groups_on(hosts: str, group: Any = None) -> tuple[int, str, bool, list[str]]:
    on(hosts)
    with Said() as said:
        model = onefold.shard(TinyMLP(), onefold.Recipe.zero(3, group=group))
    found = onefold.engine_of(model).group
    return found.topology.outer, found.borders, found.flat_over_nodes, said.lines


def test_two_hosts_of_two_ranks_make_two_levels_though_no_launcher_says_so() -> None:
    assert run_ranks(4, groups_on, TWO) == [(2, "2 nodes", False, [])] * 4
    assert run_ranks(4, groups_on, TWO, "node") == [(2, "2 nodes", False, [])] * 4


def test_one_host_is_one_node_and_four_hosts_need_no_levels() -> None:
    assert run_ranks(4, groups_on, ONE) == [(1, "", False, [])] * 4
    assert run_ranks(4, groups_on, "abcd") == [(1, "4 nodes", False, [])] * 4


@pytest.mark.parametrize(
    ("hosts", "why", "times"),
    [
        (UNEVEN, "2 hosts unevenly (ranks 0-2; 3)", "up to 3 times"),
        (SCATTERED, "2 hosts not as neighbours (ranks 0,2; 1,3)", "up to 2 times"),
    ],
)
def test_uneven_or_scattered_hosts_are_told_once_with_their_cost_and_a_cure(
    hosts: str, why: str, times: str
) -> None:
    found = run_ranks(4, groups_on, hosts)
    assert [rest for *rest, _ in found] == [[1, "2 nodes", True]] * 4
    first, *others = [lines for *_, lines in found]
    assert others == [[]] * 3 and len(first) == 1
    assert why in first[0] and times in first[0] and "Start the same number of ranks" in first[0]
    # Whoever asks for one level needs no telling
    assert [lines for *_, lines in run_ranks(4, groups_on, hosts, "flat")] == [[]] * 4


def refused_on(hosts: str) -> str:
    with pytest.raises(ValueError, match="unevenly") as raised:
        groups_on(hosts, "node")
    return str(raised.value)


def test_groups_of_a_node_are_refused_where_the_hosts_are_uneven() -> None:
    assert all("lie on nodes [0, 0, 0, 1]" in text for text in run_ranks(4, refused_on, UNEVEN))


def launcher_first() -> int:
    """The launcher's word stands where it can be used: hosts are not compared."""
    on(SCATTERED)
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    groups.host_identity = lambda: pytest.fail("the hosts were compared")  # type: ignore[assignment]
    return onefold.engine_of(onefold.shard(TinyMLP(), onefold.Recipe.zero(3))).group.topology.outer


def test_hosts_are_not_compared_where_the_launcher_tells_of_even_nodes() -> None:
    assert run_ranks(4, launcher_first) == [2] * 4


def launcher_of_uneven_nodes() -> tuple[int, str]:
    """LOCAL_WORLD_SIZE=3 on three ranks and 1 on the fourth, while hosts are even."""
    on(TWO)
    os.environ["LOCAL_WORLD_SIZE"] = "1" if dist.get_rank() == 3 else "3"
    found = onefold.engine_of(onefold.shard(TinyMLP(), onefold.Recipe.zero(3))).group
    return found.topology.outer, found.borders


def test_hosts_are_compared_where_what_the_launcher_says_cannot_be_used() -> None:
    assert run_ranks(4, launcher_of_uneven_nodes) == [(2, "2 nodes")] * 4


def of_a_part() -> tuple[int, bool] | None:
    """A process group of the ranks 0, 1 and 2."""
    on(TWO)
    group = dist.new_group([0, 1, 2])
    if dist.get_rank() == 3:
        return None
    found = onefold.engine_of(onefold.shard(TinyMLP(), onefold.Recipe.zero(3), group=group)).group
    return found.topology.outer, found.flat_over_nodes


def test_a_part_of_the_ranks_compares_its_own_hosts() -> None:
    assert run_ranks(4, of_a_part) == [(1, True)] * 3 + [None]


# -- who adds gradients up -------------------------------------------------------------------------


def sums_on(
    hosts: str, stage: int, options: dict[str, Any]
) -> tuple[set[str], str | None, list[torch.Tensor], list[str]]:
    """(reductions launched, the recipe's `reduce`, gradients, what was said) over the stand-in for
    NCCL.
    """
    on(hosts)
    torch.manual_seed(0)
    with Said() as said:
        model = onefold.shard(
            TinyMLP(8, 24, 2, 6), onefold.Recipe.zero(stage, **options), group=standin.new_group()
        )
    before = dict(standin.launched)
    model(features_of(dist.get_rank(), 3, 8)).square().mean().backward()
    new = {op for op, count in standin.launched.items() if count > before.get(op, 0)}
    grads = [
        torch.as_tensor(p.grad.detach().as_subclass(torch.Tensor))
        for p in model.parameters()
        if p.grad is not None
    ]
    engine = onefold.engine_of(model)
    return new - {"all_gather"}, engine.recipe.reduce, grads, said.lines


def defaults() -> list[str]:
    wrong = []
    cases = [
        (ONE, {}, "all_to_all", None),
        (TWO, {}, "all_to_all", None),
        ("abcd", {}, "all_to_all", None),
        (UNEVEN, {}, "reduce_scatter", "native"),
        (TWO, {"group": "flat"}, "reduce_scatter", "native"),
        (UNEVEN, {"reduce": "ordered"}, "all_to_all", "ordered"),
        (UNEVEN, {"reduce_codec": "int8"}, "all_to_all", None),
        (TWO, {"reduce": "native"}, "reduce_scatter", "native"),
    ]
    for hosts, options, operation, reduce in cases:
        launched, found, _, said = sums_on(hosts, 3, options)
        told = any("reduce='native'" in line for line in said)
        decided = reduce == "native" and "reduce" not in options
        if launched != {operation} or found != reduce:
            wrong.append(f"{hosts}, {options}: {launched}, reduce={found!r}")
        if told != (decided and dist.get_rank() == 0):
            wrong.append(f"{hosts}, {options}: {said}")
    return wrong


def test_sums_are_native_by_default_only_where_exchanges_are_flat_over_hosts() -> None:
    assert run_ranks(4, defaults) == [[]] * 4


def decided_and_asked() -> list[str]:
    """The default over uneven hosts has the bits of reduce="native", and ordered sums those of one
    host.
    """
    wrong = []
    for stage in (0, 2, 3):
        (_, _, decided, _), (_, _, asked, _) = (
            sums_on(UNEVEN, stage, options) for options in ({}, {"reduce": "native"})
        )
        (_, _, ordered, _), (_, _, alone, _) = (
            sums_on(hosts, stage, {"reduce": "ordered"}) for hosts in (UNEVEN, ONE)
        )
        wrong += [
            f"stage {stage}: {name}"
            for name, a, b in (("decided", decided, asked), ("ordered", ordered, alone))
            if not a or not all(map(torch.equal, a, b))
        ]
    return wrong


def test_the_default_has_the_bits_of_the_way_that_it_takes() -> None:
    assert run_ranks(4, decided_and_asked) == [[]] * 4


# -- what is said, by itself -----------------------------------------------------------------------


def test_a_host_is_told_by_name_and_boot_or_as_nccl_is_told() -> None:
    assert host_identity({"NCCL_HOSTID": "here"}) == "here"
    name, _, boot = host_identity({}).partition(" ")
    assert name and boot and host_identity({}) == host_identity({})


@pytest.mark.parametrize(
    ("hosts", "fitting"), [("aaaabb", "group=2"), ("aabbaa", "group=2"), ("aaab", ""), ("abab", "")]
)
def test_a_number_of_ranks_that_share_a_host_is_named_where_there_is_one(
    hosts: str, fitting: str
) -> None:
    nodes = {rank: ord(letter) for rank, letter in enumerate(hosts)}
    ranks = range(len(hosts))
    topology = Topology(len(hosts), inner_of(None, ranks, nodes))
    said = flat_note(None, ranks, nodes, topology)
    assert said and ("group=" in said) == bool(fitting) and fitting in said
    if fitting:  # and it makes two levels
        assert Topology(len(hosts), inner_of(2, ranks, nodes)).two_levels


def test_exchanges_are_flat_over_nodes_only_where_ranks_share_some() -> None:
    for hosts, inner, expected in (
        ("aabb", 2, False), ("aabb", 4, True), ("aaaa", 4, False), ("abcd", 4, False), ("abcd", 1, False), ("aaab", 4, True),
    ):  # fmt: skip
        assert flat_over(list(map(ord, hosts)), Topology(4, inner)) == expected, (hosts, inner)
    assert nodes_of([0, 3, 5], 2) == [0, 1, 2] and nodes_of([0, 3], {0: 7, 3: 9}) == [7, 9]
    assert nodes_of([0, 3], None) == [0, 0]


# -- communicators ---------------------------------------------------------------------------------


def made(hosts: str, options: dict[str, Any]) -> tuple[int, int]:
    """(native communicators that the engine made, those that the count says)."""
    on(hosts)
    model = onefold.shard(TinyMLP(), onefold.Recipe.zero(3, **options), group=standin.new_group())
    group = onefold.engine_of(model).group
    levels = {id(level): level for level in (group, group.intra_group, group.inter_group)}
    found = sum(len(level.communicators.native) for level in levels.values())
    return found, communicators_of(group.topology)


@pytest.mark.parametrize(
    ("hosts", "options", "expected"),
    [(ONE, {}, 2), (TWO, {}, 5), (UNEVEN, {}, 2), ("abcd", {}, 2), (ONE, {"group": 2}, 5)],
)
def test_the_engine_makes_as_many_communicators_as_the_plan_reserves_for(
    hosts: str, options: dict[str, Any], expected: int
) -> None:
    assert run_ranks(4, made, hosts, options) == [(expected, expected)] * 4
    assert communicators_of(Topology(1, 1)) == 0


# -- devices ---------------------------------------------------------------------------------------


def gpus(monkeypatch: pytest.MonkeyPatch, uuids: list[str]) -> None:
    """Let torch see GPUs of these ids."""
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: bool(uuids))
    module = SimpleNamespace(
        get_device_properties=lambda device: SimpleNamespace(uuid=uuids[device.index])
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)


@pytest.mark.parametrize(("seen", "local", "index"), [(8, 3, 3), (1, 3, 0), (4, 5, 1), (0, 2, 0)])
def test_a_rank_that_sees_one_gpu_of_its_own_takes_it(
    seen: int, local: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, [f"GPU-{i}" for i in range(seen)])
    assert of_local_rank("cuda", local) == torch.device("cuda", index)


def test_a_device_is_told_by_its_id_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, ["GPU-a", "GPU-b"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert device_identity(torch.device("cuda", 1)) == "GPU-b"
    assert device_identity(torch.device("cpu")) == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-7")  # parts of one GPU
    assert device_identity(torch.device("cuda", 0)) == "GPU-aMIG-7"
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace())
    assert device_identity(torch.device("cuda", 0)) == ""


@pytest.mark.parametrize(
    ("seen", "cure"), [(8, "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))"), (1, "start as")]
)
def test_ranks_on_one_gpu_are_refused_with_the_line_to_add(
    seen: int, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, [f"GPU-{i}" for i in range(seen)])
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    device = torch.device("cuda", 0)
    refuse_shared_device({r: bytes([r]) for r in range(4)}, device)
    with pytest.raises(ValueError, match="ranks 0-2 compute on one device") as raised:
        refuse_shared_device({0: b"a", 1: b"a", 2: b"a", 3: b"b"}, device)
    assert cure in str(raised.value)


def sharing(identities: str) -> str:
    """What shard() says over the stand-in where the ranks' devices have these identities."""
    on(ONE)
    groups.device_identity = lambda _: identities[dist.get_rank()]  # type: ignore[assignment]
    try:
        onefold.shard(TinyMLP(), onefold.Recipe.zero(3), group=standin.new_group())
    except ValueError as error:
        return str(error)
    return ""


def test_shard_refuses_before_anything_is_laid_out_where_ranks_share_a_device() -> None:
    assert all("ranks 0-1 compute on one device" in text for text in run_ranks(4, sharing, "aabc"))
    assert run_ranks(4, sharing, "abcd") == [""] * 4
