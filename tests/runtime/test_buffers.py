"""Buffers follow rank 0's exactly when they do under DistributedDataParallel, all in one
message.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import onefold
import standin
import virtual
from onefold.runtime.parameters.interval import ShardedParameterError
from ranks import run_ranks

STALL_TIMEOUT = 20.0


class Layer(nn.Module):
    """Buffers of all kinds, changed by this rank's data: in place, through `.data`, and by putting
    others in their place.
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.register_buffer("average", torch.zeros(width))
        self.register_buffer("codebook", torch.zeros(3, dtype=torch.complex64), persistent=False)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("flag", torch.tensor(False))
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("none", None)
        self.register_buffer("strided", torch.arange(12.0).view(3, 4).t())
        self.register_buffer("bias", torch.zeros(5, dtype=torch.bfloat16))
        self.register_buffer("table", torch.linspace(1, 2, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x)) * self.table
        with torch.no_grad():
            self.average.data.mul_(0.9).add_(x.mean(0))
            self.codebook = self.codebook + 1j * x[0, :3]
            self.seen += 1
            self.flag.fill_(bool(x[0, 0] > 0))
            self.strided.add_(x[0, 0])
            self.bias += x[0, 0].bfloat16()
        return y * (1 + self.average)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.same = self.blocks[0]  # under two names
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def seen_by(stage: int | None, **options: Any) -> list[Tensor]:
    """All buffers after each of many passes (accumulation, evaluation, changes from outside) and
    outputs, under DDP or sharded.
    """
    import onefold

    rank = dist.get_rank()
    torch.manual_seed(0)
    inner = Model()
    if rank == 1:
        inner.blocks[0].average.fill_(5.0)
    if stage is None:
        model: nn.Module = DistributedDataParallel(inner)
        unsynced = model.no_sync
    else:
        model = onefold.shard(
            inner, onefold.Recipe.zero(stage, stall_timeout=STALL_TIMEOUT, **options)
        )
        unsynced = partial(onefold.no_sync, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Tensor] = []

    def note(*outputs: Tensor) -> None:
        seen.extend(t.detach().clone() for t in (*outputs, *inner.buffers()))

    torch.manual_seed(100 + rank)
    for step in range(2):
        note()
        for k in range(3):
            with unsynced() if k < 2 else contextlib.nullcontext():
                loss = model(torch.randn(4, 8)).square().mean()
                note(loss)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 1:
            # By code of a loop: rank 0's are everybody's again before the next pass
            inner.blocks[0].average.data += 1
        model.eval()
        for _ in range(2):
            with torch.no_grad():
                note(model(torch.randn(4, 8)))
        model.train()
        if step == 1:
            model(torch.randn(4, 8))  # a pass whose gradients nobody takes
            note()
            with contextlib.suppress(RuntimeError):
                model(torch.randn(4, 9))  # raises, on every rank
            note()
            note(model(torch.randn(4, 8)))
    return seen


def against_ddp() -> dict[int, list[int]]:
    expected, out = seen_by(None), {}
    for stage in (0, 1, 2, 3):
        found = seen_by(stage, **({"reduce_at": "boundary"} if stage > 1 else {}))
        same = [
            a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True)
        ]
        out[stage] = [i for i, equal in enumerate(same) if not equal]
    return out


def test_buffers_are_those_of_ddp_to_the_bit_after_every_pass() -> None:
    for rank, seen in enumerate(run_ranks(2, against_ddp)):
        assert seen == {0: [], 1: [], 2: [], 3: []}, f"rank {rank}: {seen}"


def what_is_sent() -> dict[Any, Any]:
    """The messages named "buffers" of each of some passes, by what is asked of them."""
    import onefold

    out: dict[Any, Any] = {}
    for which in (True, "norms", False):
        torch.manual_seed(0)
        model = onefold.shard(
            Model(), onefold.Recipe.zero(3, stall_timeout=STALL_TIMEOUT, sync_buffers=which)
        )
        engine = onefold.engine_of(model)
        passes: list[list[tuple[str, int]]] = []
        engine.memory.record = True  # the traffic ledger keeps its events meanwhile
        for k in range(4):
            engine.traffic.reset()
            with onefold.no_sync(model) if k in (1, 2) else contextlib.nullcontext():
                model(torch.randn(4, 8)).sum().backward()
            events = [e for e in engine.traffic.events if e.move == "state"]
            passes.append([(e.unit, e.nbytes) for e in events])
        out[which] = passes
        out["bytes"] = sum(b.numel() * b.element_size() for b in model.buffers())
        out["of norms"] = sum(
            b.numel() * b.element_size() for n, b in model.named_buffers() if ".norm." in n
        )
    return out


def test_all_of_them_are_one_message_a_pass_that_rank_0_sends() -> None:
    zero, one = run_ranks(2, what_is_sent)
    for seen, share in ((zero, 1), (one, 0)):
        for which, nbytes in ((True, seen["bytes"]), ("norms", seen["of norms"])):
            message = [("buffers", nbytes * share)]
            # The first pass, and that behind it; those behind a pass under no_sync begin without.
            assert seen[which] == [message, message, [], []], (which, seen[which])
        assert seen[False] == [[], [], [], []]
    assert zero["bytes"] > zero["of norms"] > 0


class Doubled(nn.Module):
    """Two passes before one backward pass, over a constant that autograd saves: as contrastive
    losses and rotary tables have it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.rand(4, 1).expand(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.table


def two_views(stage: int) -> list[str]:
    import onefold

    torch.manual_seed(dist.get_rank())
    model = onefold.shard(Doubled(), onefold.Recipe.zero(stage, stall_timeout=STALL_TIMEOUT))
    tables = [torch.empty(4, 8) for _ in range(dist.get_world_size())]
    dist.all_gather(tables, model.table.contiguous())
    problems = (
        [] if torch.equal(tables[0], tables[1]) else ["expanded buffers differ between ranks"]
    )
    for _ in range(2):
        (model(torch.randn(4, 8)) * model(torch.randn(4, 8))).sum().backward()
    return problems


def all_two_views() -> list[list[str]]:
    return [two_views(stage) for stage in (0, 3)]


def test_a_constant_that_autograd_saved_outlives_a_second_pass() -> None:
    assert run_ranks(2, all_two_views) == [[[], []]] * 2


def late_ones() -> list[Any]:
    """A module without parameters put in place of another after shard(), whose buffer is another
    one too.
    """
    import onefold

    class Scale(nn.Module):
        def __init__(self, value: float, numel: int = 8) -> None:
            super().__init__()
            self.register_buffer("by", torch.full((numel,), value))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.by

    model = onefold.shard(
        nn.Sequential(nn.Linear(8, 8), Scale(1.0)),
        onefold.Recipe.zero(3, stall_timeout=STALL_TIMEOUT),
    )
    model(torch.randn(2, 8)).sum().backward()
    model[1] = Scale(2.0 + dist.get_rank())
    model(torch.randn(2, 8)).sum().backward()
    found = model[1].by[0].item()
    model[1].by = torch.full((1,), 7.0 + dist.get_rank())  # of another shape, on every rank
    model(torch.randn(2, 8))
    return [found, model[1].by.tolist()]


def test_buffers_put_in_place_of_others_are_followed() -> None:
    assert run_ranks(2, late_ones) == [[2.0, [7.0]]] * 2


def differing() -> str:
    """Rank 1 has a buffer of another length than the others."""
    import onefold

    model = onefold.shard(Model(), onefold.Recipe.zero(0, stall_timeout=3.0))
    if dist.get_rank() == 1:
        model.blocks[1].bias = torch.zeros(50)
    try:
        model(torch.randn(4, 8))
        model(torch.randn(4, 8)).sum().backward()
    except onefold.StallError as error:
        return str(error)
    return "nothing"


def test_ranks_whose_buffers_differ_stop_with_an_error_that_names_buffers() -> None:
    assert any("buffers" in said for said in run_ranks(2, differing))


def averaged(stage: int) -> list[Any]:
    """An average of weights kept in a buffer, updated by a loop behind its step, as expert biases
    are.
    """
    import onefold

    torch.manual_seed(dist.get_rank())
    model = onefold.shard(Model(), onefold.Recipe.zero(stage, stall_timeout=STALL_TIMEOUT))
    out = []
    for _ in range(3):
        model(torch.randn(4, 8)).square().mean().backward()
        with torch.no_grad():
            model.blocks[1].bias.copy_(torch.randn(5))  # each rank its own
        passed: list[Any] = []
        handle = model.blocks[1].register_forward_pre_hook(
            lambda m, _, passed=passed: passed.append(m.bias.tolist())
        )
        with onefold.no_sync(model):
            model(torch.randn(4, 8)).square().mean().backward()
        handle.remove()
        model(torch.randn(4, 8)).square().mean().backward()
        out.append(passed)
    return out


@pytest.mark.parametrize("stage", [0, 3])
def test_what_a_loop_writes_on_one_rank_is_rank_0s_in_the_next_pass(stage: int) -> None:
    first, second = run_ranks(2, averaged, stage)
    assert first == second


def pruned_after_shard(stage: int) -> str:
    torch.manual_seed(0)
    model = onefold.shard(
        nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)),
        onefold.Recipe.zero(stage, stall_timeout=20),
    )
    nn.utils.prune.l1_unstructured(model[0], "weight", amount=0.5)
    with pytest.raises(ShardedParameterError) as error:
        model(torch.ones(2, 6))
    return str(error.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_mask_made_of_one_ranks_part_is_refused_on_every_rank_at_once(stage: int) -> None:
    for said in run_ranks(2, pruned_after_shard, stage):
        assert (
            "buffer 'weight_mask' was made of parameter '0.weight' after shard(): it holds this"
            " rank's part" in said
        )
        assert "with onefold.unsharded(model):" in said


def two_passes_before_a_backward_pass() -> list[float]:
    """On the virtual device: a constant that autograd has saved becomes rank 0's again meanwhile."""
    virtual.start(seed=0)
    standin.register("cpu", "virtual")
    torch.manual_seed(0)
    model = onefold.shard(
        Scaled().to("virtual"),
        onefold.Recipe.zero(2, stall_timeout=STALL_TIMEOUT),
        group=standin.new_group(),
    )
    versions = model.scale._version
    losses = [model(torch.full((2, 4), float(i)).to("virtual")).sum() for i in (1, 2)]
    torch.stack(losses).sum().backward()
    assert model.scale._version == versions
    return model.scale.tolist()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 2.0 + dist.get_rank()))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


@pytest.mark.skipif(not virtual.available(), reason=virtual.why_not())
def test_a_constant_on_a_device_may_be_saved_by_autograd_on_every_rank() -> None:
    assert run_ranks(2, two_passes_before_a_backward_pass) == [[2.0] * 4] * 2
