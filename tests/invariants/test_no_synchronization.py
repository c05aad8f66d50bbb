"""A step never makes the host wait for the device: no `.item()`, no truth value, no copy from or to
pageable memory, at any stage.

Steps run as rank 0 of several on torch's fake process group, on the virtual device (tests/virtual),
where each wait of the host raises at its place. What the fake group leaves out is not seen: the
waits of a real backend's messages, and codecs. On native backends the host also asks whether the
device has come to the unit before the last (comm/pending.py); a device that keeps up has, which
tests/comm/test_run_ahead.py shows. Steps of `onefold train` are in
tests/train/test_a_step_late.py.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
from onefold.runtime import stepper
from ranks import RankFailure

virtual = pytest.importorskip("virtual")

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm: nn.Module = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x)).tanh()


def model_of(batch_norm: bool, layer_norm: bool) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(4))]
    if batch_norm:
        layers[1:1] = [nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)]
    for block in layers if not layer_norm else ():  # the virtual device has none in 16 bits
        if isinstance(block, Block):
            block.norm = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(*layers)


@virtual.alone
def steps_without_a_wait(
    stage: int,
    ranks: int,
    micro_batches: int = 1,
    clip: bool = False,
    scaler: bool = False,
    buffers: bool = False,
    fused: bool = False,
    **recipe: Any,
) -> None:
    """Three steps that learn the order, then one in which a wait raises."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    if ranks > 1:
        dist.init_process_group(
            "cpu:fake,virtual:fake", store=FakeStore(), rank=0, world_size=ranks
        )
    if fused:
        stepper.FUSED_ON = frozenset(("virtual",))
    plain = model_of(buffers, layer_norm="precision" not in recipe)
    model = onefold.shard(
        plain, onefold.Recipe.zero(stage, **recipe), device="virtual", units=(Block,)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaling = onefold.GradScaler(model) if scaler else None
    batches = [torch.randn(4, WIDTH).to("virtual") for _ in range(micro_batches)]

    def step() -> None:
        for number, batch in enumerate(batches):
            with (
                contextlib.nullcontext() if number + 1 == micro_batches else onefold.no_sync(model)
            ):
                loss = model(batch).square().mean()
                (loss if scaling is None else scaling.scale(loss)).backward()
        if scaling is not None:
            scaling.unscale_(optimizer)
        if clip:
            onefold.clip_grad_norm_(model, 1.0)
        if scaling is not None:
            scaling.step(optimizer)
            scaling.update()
        else:
            optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    with virtual.no_synchronization():
        step()


def _case(*args: Any, **kwargs: Any) -> Any:
    named = [f"{name}={value}" for name, value in kwargs.items()]
    return pytest.param(
        args, kwargs, id=", ".join([f"stage {args[0]}", f"{args[1]} ranks", *named])
    )


@pytest.mark.parametrize(
    ("args", "options"),
    [
        *(_case(stage, 4) for stage in (0, 1, 2, 3)),
        *(_case(stage, 4, clip=True) for stage in (0, 1, 2, 3)),
        _case(3, 1, clip=True),
        _case(1, 4, micro_batches=3, clip=True),
        _case(3, 4, micro_batches=3, clip=True),
        _case(2, 4, clip=True, precision="bf16"),
        _case(3, 4, clip=True, precision="bf16"),
        _case(3, 4, clip=True, buffers=True),
        _case(3, 4, reshard_after_forward=False),
        _case(2, 4, clip=True, fused=True, scaler=True),
    ],
)
def test_a_step_never_makes_the_host_wait(args: Any, options: Any) -> None:
    steps_without_a_wait(*args, **options)


@virtual.alone
def steps_two_units_ahead(stage: int, ranks: int) -> None:
    """As `steps_without_a_wait`, with the bound of the host's run-ahead that native backends have:
    the host asks for events of earlier units, and only for those.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from onefold.comm.pending import AHEAD, RunAhead

    dist.destroy_process_group()
    dist.init_process_group("cpu:fake,virtual:fake", store=FakeStore(), rank=0, world_size=ranks)
    plain, recipe = model_of(False, layer_norm=True), onefold.Recipe.zero(stage)
    model = onefold.shard(plain, recipe, device="virtual", units=(Block,))
    engine, optimizer = onefold.engine_of(model), torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(4, WIDTH).to("virtual")
    ahead = RunAhead(engine.device, 60.0, lambda context, _: AssertionError(str(context)))
    engine.group.run_ahead = engine.forward.run_ahead = ahead
    asked: list[int] = []
    reach = ahead._reach

    def seen(mark: Any, waits: Any) -> None:
        asked.append(len(ahead._marks))
        assert mark is ahead._marks[0][0]
        reach(mark, waits)

    ahead._reach = seen  # type: ignore[method-assign]

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    asked.clear()
    with virtual.no_synchronization():
        step()
    units = len(engine.units)
    # Each time behind the event that was asked for lie two units, besides what comes now
    assert set(asked) == {AHEAD + 1} and 2 * units <= len(asked) <= 3 * units, asked


@pytest.mark.parametrize("stage", [2, 3])
def test_the_host_asks_for_events_of_two_units_before_and_waits_for_nothing_else(
    stage: int,
) -> None:
    steps_two_units_ahead(stage, 4)


@virtual.alone
def a_norm_is_measured_without_a_pass() -> None:
    dist.destroy_process_group()
    model = onefold.shard(model_of(False, True), onefold.Recipe.zero(2), device="virtual")
    model(torch.randn(4, WIDTH).to("virtual")).square().mean().backward()
    multiplied: list[int] = []
    torch._foreach_mul_ = lambda tensors, factor: multiplied.append(len(tensors))  # type: ignore[assignment]
    with virtual.no_synchronization():
        onefold.clip_grad_norm_(model, float("inf"))
        assert not multiplied
        onefold.clip_grad_norm_(model, 1e6)  # the factor is 1, and nobody asks
    assert len(multiplied) == 1


def test_gradients_on_the_device_are_clipped_without_asking_and_measured_without_a_pass() -> None:
    a_norm_is_measured_without_a_pass()


def test_a_scaler_asks_the_host_where_the_optimizer_is_not_fused() -> None:
    with pytest.raises(RankFailure, match=r"_local_scalar_dense[\s\S]*clip.py"):
        steps_without_a_wait(2, 4, scaler=True)


@virtual.alone
def what_encoding_lost_is_forgotten() -> None:
    dist.destroy_process_group()
    model = onefold.shard(model_of(False, True), onefold.Recipe.zero(2), device="virtual")
    residuals = onefold.engine_of(model).residuals
    lost = residuals.residual((0, 0, 0), 4)
    lost.copy_(torch.tensor([1.0, float("inf"), float("nan"), -2.0]).to("virtual"))
    yes, no = (torch.tensor(value).to("virtual") for value in (1.0, 0.0))
    before = lost.clone()
    with virtual.no_synchronization():
        residuals.forget_if(no)
        kept = lost.clone()
        residuals.forget_if(yes)
    assert (
        torch.equal(kept.cpu().nan_to_num(), before.cpu().nan_to_num())
        and not residuals.residual((0, 0, 0), 4).cpu().any()
    )


def test_what_encoding_lost_is_forgotten_on_the_device() -> None:
    what_encoding_lost_is_forgotten()


@virtual.alone
def a_batch_is_sent() -> None:
    from onefold.train.step import loss_of

    seen = []

    def model(**batch: torch.Tensor) -> torch.Tensor:
        seen.append(batch["input_ids"])
        return batch["input_ids"].float().mean()

    batch = {"input_ids": torch.arange(6).view(2, 3)}
    with virtual.no_synchronization():
        loss = loss_of(model, batch, torch.device("virtual", 0))
        batch["input_ids"].zero_()  # the device may read as late as it likes
    assert float(loss) == 2.5 and torch.equal(seen[0].cpu(), torch.arange(6).view(2, 3))


def test_train_sends_batches_without_waiting() -> None:
    a_batch_is_sent()
