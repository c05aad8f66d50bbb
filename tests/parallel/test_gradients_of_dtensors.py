"""`torch.autograd.grad` with respect to DTensor parameters: the gradient of this rank's own loss, as a
DTensor of the parameter's shape and placements, which can be differentiated again.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from axes_models import LENGTH, VOCABULARY, Case, built, mesh_of_case, parallelized
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ranks import run_ranks
from zoo import tokens_of

pytestmark = pytest.mark.one_in(3)

CASES = {
    "plain activations": Case(),
    "sequence parallel": Case(plan="sequence"),  # gradients of norms come in parts
    "adapters": Case(plan="layers", adapters=True),
}


def batch(data_rank: int) -> torch.Tensor:
    return tokens_of(data_rank, batch=2, length=LENGTH + 1, vocabulary=VOCABULARY)


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def sharded(stage: int, case: Case) -> tuple[nn.Module, Any]:
    import onefold

    mesh = mesh_of_case(case)
    recipe = onefold.Recipe.zero(stage, stall_timeout=30.0)
    return onefold.shard(parallelized(case, mesh), recipe, mesh=mesh, data="dp"), mesh


def returned(case: Case) -> list[dict[str, Any]]:
    return [returned_at(stage, case) for stage in (0, 1, 3)]


def returned_at(stage: int, case: Case) -> dict[str, Any]:
    """What autograd.grad returns, of some parameters and of all, then what an ordinary pass leaves."""
    import onefold

    model, mesh = sharded(stage, case)
    named = dict(model.named_parameters())
    loss = model(batch(mesh.get_local_rank("dp")))
    (one,) = torch.autograd.grad(loss, model.output.weight, retain_graph=True)
    grads = torch.autograd.grad(loss, [*named.values()], retain_graph=True)
    left = [name for name, p in named.items() if p.grad is not None]
    loss.backward()
    boxes = {e.slot.name: e.box for e in onefold.engine_of(model).entries}
    return {
        "one": whole(one).clone(),
        "grads": {name: whole(g).clone() for name, g in zip(named, grads, strict=True)},
        "shapes": [
            tuple(g.shape) == tuple(p.shape) for g, p in zip(grads, named.values(), strict=True)
        ],
        "placed": [
            boxes[name] is None or g.placements == boxes[name].kind.placements
            for name, g in zip(named, grads, strict=True)
        ],
        "boxed": sum(box is not None for box in boxes.values()),
        "left": left,
        "norm": onefold.clip_grad_norm_(model, 1e9).item(),
        "dp": mesh.get_local_rank("dp"),
    }


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_of_a_dtensor_is_that_of_the_global_tensor(name: str) -> None:
    case = CASES[name]
    plain = built(case)
    expected = []
    for data_rank in range(2):
        grads = torch.autograd.grad(plain(batch(data_rank)), [*plain.parameters()])
        expected.append(dict(zip(dict(plain.named_parameters()), grads, strict=True)))
    mean = [(a + b) / 2 for a, b in zip(*(e.values() for e in expected), strict=True)]
    norm = torch.nn.utils.get_total_norm(mean).item()
    for rank, stages in enumerate(run_ranks(4, returned, case)):
        for at, seen in enumerate(stages):
            told = f"{name}, stage {(0, 1, 3)[at]}, rank {rank}"
            assert seen["boxed"] > 3 and all(seen["shapes"]) and all(seen["placed"]), told
            assert not seen["left"], f"{told}: gradients were left on {seen['left']}"
            wanted = expected[seen["dp"]]
            torch.testing.assert_close(seen["one"], wanted["output.weight"], rtol=1e-4, atol=1e-6)
            for key, grad in wanted.items():
                apart = (seen["grads"][key] - grad).abs().max().item()
                assert apart < 1e-5, f"{told}: the gradient of {key} differs by {apart}"
            assert seen["norm"] == pytest.approx(norm, rel=1e-5), told


class Net(nn.Module):
    """Two matrices, divided over tp, and a scale that is not, of which ranks have parts or copies."""

    def __init__(self, mesh: Any = None, parts: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, shape, placed in (
            ("up", (8, 6), Shard(0)),
            ("down", (6, 8), Shard(1)),
            ("scale", (6,), Replicate()),
        ):
            value = torch.randn(shape) * 0.5
            value = value if mesh is None else distribute_tensor(value, mesh, [placed])
            setattr(self, name, nn.Parameter(value))
        self.mesh, self.parts = mesh, parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mesh is not None:
            x = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
            if self.parts:  # rows over tp: the gradient of scale is partial
                x = x.redistribute(placements=[Shard(0)])
        x = x * self.scale
        if self.mesh is not None:
            x = x.redistribute(placements=[Replicate()])
        y = (x @ self.up.t()).tanh() @ self.down.t()
        return whole(y.square().mean())


def penalized(parts: bool) -> list[dict[str, Any]]:
    return [penalized_at(stage, parts) for stage in (1, 3)]


def penalized_at(stage: int, parts: bool) -> dict[str, Any]:
    import onefold

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    recipe = onefold.Recipe.zero(stage, stall_timeout=30.0)
    model = onefold.shard(Net(mesh["tp"], parts), recipe, mesh=mesh, data="dp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for step in range(2):
        loss = model(rows(mesh.get_local_rank("dp"), step))
        grads = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
        (loss + sum(whole(g.square().sum()) for g in grads)).backward()
        norms.append(onefold.clip_grad_norm_(model, 1e9).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": norms, "weights": onefold.full_state_dict(model)}


def rows(data_rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * data_rank + step))


@pytest.mark.parametrize("parts", [False, True])
def test_a_penalty_on_gradients_of_dtensors_trains_as_in_one_process(parts: bool) -> None:
    plain, norms = Net(), []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        for data_rank in range(2):
            loss = plain(rows(data_rank, step))
            grads = torch.autograd.grad(loss, [*plain.parameters()], create_graph=True)
            ((loss + sum(g.square().sum() for g in grads)) / 2).backward()
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 1e9).item())
        optimizer.step()
        optimizer.zero_grad()
    ranks = run_ranks(4, penalized, parts)
    for at in range(2):
        for seen in (stages[at] for stages in ranks):
            assert seen["norms"] == pytest.approx(norms, rel=1e-5), (at, seen["norms"], norms)
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(ranks[0][at]["weights"][key], value, rtol=1e-5, atol=1e-6)


def batched() -> str:
    model, _ = sharded(1, Case(dp=1))
    loss = model(batch(0))
    try:
        torch.autograd.grad(
            loss, model.output.weight, torch.ones(3, device="cpu"), is_grads_batched=True
        )
    except ValueError as error:
        return str(error)
    return "done"
