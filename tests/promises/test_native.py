"""Collectives of a backend's own, as NCCL has them, over tests/standin: rows of the table again keep
every promise, with the bits of gloo; and `reduce="native"`, by which the backend adds gradients up.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
import standin
import virtual
from on_ranks import on_ranks, slow
from onefold.runtime.hops import add_up
from promises.jobs import STEPS, Loop, Mesh, Row, ask, differing, sharded
from promises.table import table
from zoo import TinyMLP, features_of

ROWS = table()
#: Groups of the table without another backend: their bits are near only, or no move is in them.
NOT_HERE = ("moments", "optimizers", "recomputation")
#: Of other groups one row in so many; `make test` takes a few of them.
EACH, OF_CI = 5, 40


def again(ranks: int) -> Any:
    rows = [r for r in ROWS if r.mesh.ranks == ranks and r.name.split(":")[0] not in NOT_HERE]
    found = [
        pytest.param(r, id=r.name, marks=() if r.ci and at % OF_CI < EACH else slow)
        for at, r in enumerate(rows)
        if at % EACH == 0
    ]
    return pytest.mark.parametrize("row", found)


def keep(row: Row, folder: Path) -> None:
    options = {**row.options, "reduce": "ordered"}  # which is no default where groups are flat
    native = replace(row, options=options, mesh=replace(row.mesh, backend="standin"))
    family = [r for r in ROWS if r.key == row.key]
    broken = ask(native, [*family, native], folder)
    assert not broken, "\n".join(broken)


@on_ranks(2)
@again(2)
def test_two_ranks_keep_every_promise(row: Row, folder: Path) -> None:
    keep(row, folder)


@on_ranks(4)
@again(4)
def test_four_ranks_keep_every_promise(row: Row, folder: Path) -> None:
    keep(row, folder)


# -- sums of the backend's -------------------------------------------------------------------------

BF16 = {"precision": "bf16"}
ONCE, THREE = Loop(optimizer="sgd", clip=0.5), Loop(3, optimizer="sgd")
#: (stage, options, loop, how near to one process)
ADDED: list[tuple[int, dict[str, Any], Loop, float]] = [
    *((stage, {}, loop, 2e-5) for stage in (0, 1, 2, 3) for loop in (ONCE, THREE)),
    *((stage, BF16, ONCE, 3e-2) for stage in (0, 3)),
    (3, {"shard_group": 2}, THREE, 2e-5),
    (3, {"group": 2}, ONCE, 2e-5),
    (0, {"group": 2}, ONCE, 2e-5),
    (1, {"group": 2, "in_flight": 0}, ONCE, 2e-5),
    (2, {"offload_optimizer": "cpu"}, ONCE, 2e-5),
    (2, {**BF16, "wire": "fp32"}, ONCE, 3e-2),
    (3, {**BF16, "shard_group": 2}, THREE, 3e-2),
]


@on_ranks(4)
@pytest.mark.parametrize(
    "case", [pytest.param(at, marks=() if at in (0, 6, 10) else slow) for at in range(len(ADDED))]
)
def test_sums_of_the_backend_are_within_rounding_and_send_no_byte_more(
    case: int, folder: Path
) -> None:
    stage, options, loop, near = ADDED[case]
    mesh = Mesh(dp=4, backend="standin")
    # Each is compared with one process of its own precision
    name, options = f"native {case}", {"reduce": "native", **options}
    row = Row(name, stage, options, mesh, loop, "mlp", "", near=near)
    before = standin.launched["reduce_scatter"]
    assert ask(row, [row], folder) == []
    assert standin.launched["reduce_scatter"] > before, "the backend added nothing up"


class One(nn.Module):
    """Whose gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).sum()


@on_ranks(4)
def test_sums_are_made_in_the_dtype_of_the_wire() -> None:
    """Of 256 and three times 1: the mean is 64.75. bf16 has 64.5 and 65 near it, and steps of 2
    above 256, where 256 + 1 is 256.
    """
    found = {}
    for name, options in {
        "ordered": {"reduce": "ordered"},
        "native": {"reduce": "native"},
        "wide": {"reduce": "native", "wire": "fp32"},
    }.items():
        recipe = onefold.Recipe.zero(0, precision="bf16", **options)
        model = onefold.shard(One(), recipe, group=standin.new_group())
        model(torch.full((4,), 256.0 if dist.get_rank() == 0 else 1.0)).backward()
        found[name] = set(model.w.grad.detach().float().flatten().tolist())
    assert found["wide"] == {64.75} and found["ordered"] <= {64.5, 65.0}, found
    assert all(64.0 <= x <= 65.0 and x != 64.75 for x in found["native"]), found


@on_ranks(2)
def test_gloo_has_no_reduce_scatter_and_says_so() -> None:
    with pytest.raises(ValueError, match=r"gloo has none.*leave it out"):
        onefold.shard(TinyMLP(), onefold.Recipe.zero(2, reduce="native"))


# -- how state moves over it -----------------------------------------------------------------------


@on_ranks(2, fresh=True)
@pytest.mark.parametrize("how", ["standin", "cpu:standin"])
def test_the_default_group_may_be_native(how: str, folder: Path) -> None:
    """As a program starts NCCL."""
    row, rank, ranks = Row("default", 3), dist.get_rank(), dist.get_world_size()
    expected = sharded(row, folder / f"gloo {rank}")
    losses = [expected.step(number) for number in range(STEPS)]
    dist.barrier()
    dist.destroy_process_group()
    standin.register()
    store = dist.FileStore(str(folder / "again"), ranks)
    dist.init_process_group(how, store=store, rank=rank, world_size=ranks)
    job = sharded(row, folder / f"native {rank}")
    assert [job.step(number) for number in range(STEPS)] == losses
    assert standin.launched["all_gather"] > 0


def from_nothing(group: Any, row: Row, folder: Path) -> dict[str, torch.Tensor]:
    """A model with running statistics that is made from the meta device, trained, written to by all
    ranks, and loaded whole.
    """
    torch.manual_seed(0)
    with torch.device("meta"):
        layers = nn.Linear(7, 12), nn.BatchNorm1d(12), nn.Linear(12, 3)
        model = nn.Sequential(*layers)

    def init(module: Any) -> None:
        module.reset_parameters()

    model = onefold.shard(model, row.recipe(folder), group=group, init=init)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = {}
    for number in range(2):
        x = features_of(number + dist.get_rank(), 5, 7)
        model(x).square().mean().backward()
        onefold.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    found |= {f"norm of {name}": p.norm().detach() for name, p in model.named_parameters()}
    with onefold.full_params(model, write=True), torch.no_grad():
        for p in model.parameters():
            p.add_(0.125 * (1 + dist.get_rank()))  # rank 0's are everybody's
    whole = onefold.full_state_dict(model)
    found |= {f"written {name}": t for name, t in whole.items()}
    halves = {name: t / 2 if t.is_floating_point() else t for name, t in whole.items()}
    onefold.load_full_state_dict(model, halves or None)
    with torch.no_grad():
        found["output"] = model(features_of(9, 5, 7))
    return found


@on_ranks(4)
@pytest.mark.parametrize(
    ("stage", "options"), [(1, {}), (3, {}), (3, {"group": 2, "second_copy": True}), (3, {"shard_group": 2})]
)  # fmt: skip
def test_state_moves_as_over_gloo(stage: int, options: dict[str, Any], folder: Path) -> None:
    row = Row("meta", stage, options)
    gloo = from_nothing(None, row, folder)
    native = from_nothing(standin.new_group(), row, folder)
    assert len(gloo) > 4 and list(differing("native", gloo, native)) == []


@pytest.mark.skipif(not virtual.available(), reason=virtual.why_not())
@on_ranks(4, fresh=True)
@pytest.mark.parametrize(
    ("stage", "options"),
    [(0, {}), (1, {}), (2, BF16), (3, {}), (3, {"group": 2}), (3, {"shard_group": 2})],
    ids=str,
)
def test_on_a_device_with_streams_bits_are_gloos_and_no_wait_is_missing(
    stage: int, options: dict[str, Any]
) -> None:
    virtual.start(seed=stage)
    standin.register("cpu", "virtual")
    found, streams = {}, set()

    def added(parts: Any, *more: Any, **named: Any) -> None:
        if parts[0].device.type == "virtual":
            streams.add(torch.accelerator.current_stream(parts[0].device))
        add_up(parts, *more, **named)

    for device, group in (("cpu", None), (f"virtual:{dist.get_rank()}", standin.new_group())):
        torch.manual_seed(0)
        recipe = onefold.Recipe.zero(stage, stall_timeout=30.0, **options)
        model = onefold.shard(TinyMLP().to(device), recipe, group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for number in range(2):
            x = features_of(number + dist.get_rank(), 4, 7).to(device)
            with patch("onefold.runtime.hops.add_up", added):
                model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found[torch.device(device).type] = {
            n: t.cpu() for n, t in onefold.full_state_dict(model).items()
        }
    torch.accelerator.synchronize(device)  # a rank that ends takes along what it has not sent
    dist.barrier()
    assert list(differing("virtual", found["cpu"], found["virtual"])) == []
    assert not virtual.violations(), virtual.violations()
    computing = torch.accelerator.current_stream(device)
    assert streams and computing not in streams, "sums hold up the passes"
