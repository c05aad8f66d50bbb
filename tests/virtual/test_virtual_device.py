"""The virtual device itself: results of the CPU in any order, every kind of missing wait named,
none found where there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import virtual

HERE = Path(__file__).name


class Block(nn.Module):
    def __init__(self, width: int, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.first, self.second = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        return x + F.dropout(self.down(F.gelu(self.up(self.second(x)))), 0.1, self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.recompute else self.inner(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.blocks = nn.Sequential(Block(16, False), Block(16, True))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 50, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.blocks(self.embedding(tokens))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def trained(device: str, steps: int = 2, **adamw: Any) -> list[torch.Tensor]:
    """Losses, norms and final parameters, on the CPU."""
    torch.manual_seed(1)
    model = Model().to(device).eval()  # dropout draws other numbers on the CPU
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **adamw)
    batches = torch.randint(0, 50, (steps, 2, 2, 8), generator=torch.Generator().manual_seed(5)).to(
        device
    )
    kept = []
    with sdpa_kernel(SDPBackend.MATH):
        for tokens, targets in batches:
            loss = model(tokens, targets)
            loss.backward()
            kept += [loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), 1.0)]
            optimizer.step()
            optimizer.zero_grad()
    return [t.detach().cpu() for t in (*kept, *model.parameters())]


def assert_same(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if not torch.equal(x, y)] == []


def assert_named(found: list[virtual.Violation], *words: str) -> virtual.Violation:
    """One of the violations has all the words. Returns it."""
    for violation in found:
        if violation.names(*words):
            return violation
    raise AssertionError(
        f"no violation names {', '.join(words)}; there are {len(found)}:\n"
        + "\n".join(map(str, found))
    )


# ---- training


@virtual.alone
def test_training_gives_the_bits_of_the_cpu_in_any_order() -> None:
    for adamw in ({}, {"fused": True}):
        expected = trained("cpu", **adamw)
        for seed in [None, *range(6)]:
            virtual.start(seed)
            assert_same(trained("virtual", **adamw), expected)
            assert virtual.violations() == [], seed


@virtual.alone
def test_nothing_runs_until_somebody_waits_and_a_steps_only_waits_are_those_asked_for() -> None:
    trained("virtual", steps=1)
    torch.accelerator.synchronize()
    model = Model().to("virtual")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(2, 8, dtype=torch.long, device="virtual")
    virtual.reset(1)
    with virtual.no_synchronization(all_threads=True):
        loss = model(tokens, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert virtual.executed() == 0 and virtual.pending() and virtual.synchronizations() == []
    loss.item()
    assert virtual.executed() > 0 and [s.name for s in virtual.synchronizations()] == [
        "aten::_local_scalar_dense"
    ]


# ---- mistakes, each named; and the same program without the mistake


def both(program: Callable[[bool], None], *words: str, seeds: int = 4) -> virtual.Violation:
    """Runs `program(True)`, which is right, and `program(False)`, which lacks a wait, by several
    seeds. Returns the violation found.
    """
    for seed in range(seeds):
        virtual.reset(seed)
        program(True)
        virtual.drain()
        assert virtual.violations() == [], "\n".join(map(str, virtual.violations()))
        with virtual.allowing_violations() as found:
            program(False)
            virtual.drain()
        named = assert_named(found, *words)
    return named


@virtual.alone
def test_a_missing_wait_between_compute_and_copy_is_named_and_seen_in_the_data() -> None:
    side = torch.Stream("virtual")
    virtual.name_stream(side, "copies")
    results: dict[bool, list[float]] = {True: [], False: []}

    def program(right: bool) -> None:
        x = torch.zeros(8, device="virtual")
        x.add_(1)
        if right:
            side.wait_stream(torch.accelerator.current_stream())
        with side:
            y = x * 2
        if right:
            torch.accelerator.current_stream().wait_stream(side)
        side.synchronize()
        results[right].append(virtual.cpu_alias(y)[0].item())
        x.record_stream(side)

    named = both(
        program, "aten::add_ writes on virtual:0 default stream", "aten::mul reads on copies", HERE
    )
    assert not named.reused and named.bytes == 32
    assert set(results[True]) == {2.0} and any(value != 2.0 for value in results[False]), results


@virtual.alone
def test_memory_freed_while_another_stream_uses_it_is_named_as_reused() -> None:
    side = torch.Stream("virtual")
    virtual.name_stream(side, "copies")
    host = torch.empty(1000).pin_memory()

    def program(right: bool) -> None:
        x = torch.ones(1000, device="virtual")
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            host.copy_(x, non_blocking=True)
        if right:
            x.record_stream(side)
        del x
        torch.zeros(1000, device="virtual")
        torch.accelerator.synchronize()
        if right:
            assert host.sum().item() == 1000

    named = both(
        program, "aten::copy_ (device to host) reads on copies", "aten::zero_ writes", HERE
    )
    assert named.reused


@virtual.alone
def test_the_host_may_not_write_pinned_memory_under_a_copy() -> None:
    host = torch.empty(8).pin_memory()
    results = set()

    def program(right: bool) -> None:
        host.fill_(1)
        x = torch.empty(8, device="virtual")
        x.copy_(host, non_blocking=True)
        if right:
            torch.accelerator.current_stream().synchronize()
        host.fill_(2)
        value = x[0].item()
        assert value == 1 or not right
        results.add(value)

    both(
        program,
        "aten::copy_ (host to device) reads on virtual:0 default stream",
        "aten::fill_ writes on the host",
        HERE,
    )
    assert results == {1.0, 2.0}, "a late copy sees what the host wrote later"


# ---- host synchronizations


SYNCHRONIZATIONS: dict[str, tuple[str, Callable[[torch.Tensor], Any]]] = {
    "item": ("_local_scalar_dense", lambda x: x.sum().item()),
    "nonzero": ("nonzero", lambda x: torch.nonzero(x)),
    "indices": ("indices in host memory", lambda x: x[torch.tensor([0, 1])]),
    "cpu()": ("device to host, pageable", lambda x: x.cpu()),
    "to pageable, non_blocking": (
        "device to host, pageable",
        lambda x: torch.empty(4).copy_(x, non_blocking=True),
    ),
    "to pinned": ("device to host, blocking", lambda x: torch.empty(4, pin_memory=True).copy_(x)),
    "from pageable": (
        "host to device, pageable",
        lambda x: torch.ones(4).to("virtual", non_blocking=True),
    ),
    "from pinned": ("host to device, blocking", lambda x: x.copy_(torch.ones(4).pin_memory())),
    "stream": ("stream.synchronize", lambda x: torch.accelerator.current_stream().synchronize()),
    "event": (
        "event.synchronize",
        lambda x: torch.accelerator.current_stream().record_event().synchronize(),
    ),
    "device": ("device.synchronize", lambda x: torch.accelerator.synchronize()),
    "empty_cache": ("empty_cache", lambda x: torch.accelerator.empty_cache()),
}


@virtual.alone
def test_host_synchronizations_are_counted_and_refused() -> None:
    for kind, (name, act) in SYNCHRONIZATIONS.items():
        x = torch.ones(4, device="virtual")
        virtual.reset(0)
        act(x)
        found = [str(s) for s in virtual.synchronizations()]
        assert len(found) == 1 and name in found[0] and HERE in found[0], (kind, found)
        with (
            virtual.no_synchronization(),
            pytest.raises(RuntimeError, match=rf"(?s)none is allowed.*{name}.*{HERE}"),
        ):
            act(x)
        act(x)


# ---- functions on streams


@virtual.alone
def test_a_function_on_a_stream_runs_when_it_is_ready_while_other_work_goes_on() -> None:
    side = torch.Stream("virtual")
    for seed in range(10):
        virtual.reset(seed)
        main = torch.accelerator.current_stream()
        a, b = torch.full((4,), 2.0, device="virtual"), torch.empty(4, device="virtual")
        log: list[str] = []

        def ready(log: list[str] = log) -> bool:
            return "other" in log

        def add_ten(into: torch.Tensor, log: list[str] = log) -> None:
            log.append("ready one")
            into.add_(10)

        side.wait_stream(main)
        virtual.enqueue(side, lambda x, into: into.copy_(x), reads=[a], writes=[b])
        virtual.enqueue(side, add_ten, reads=[b][:0], writes=[b], ready=ready, name="add ten")
        virtual.enqueue(main, lambda log=log: log.append("other"))
        side.synchronize()
        assert log == ["other", "ready one"]
        main.wait_stream(side)
        assert b.tolist() == [12] * 4 and virtual.violations() == []
