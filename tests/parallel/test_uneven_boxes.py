"""Parts of unequal sizes, empty ones included, beside whole parameters: with and without borders, at every
stage the same as one process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ranks import run_ranks
from zoo import features_of

pytestmark = pytest.mark.one_in(2)

#: {name: (shape, the dimension that is divided; None: it is not)}. Over 3 ranks rows are 1, 1, 0; 2, 2,
#: 1; 3, 3, 1; and so on.
SHAPES: dict[str, tuple[tuple[int, ...], int | None]] = {
    "short": ((2, 640), 0),  # in order, the cut between two data ranks divides what comes next
    "long": ((4, 640), 0),
    "third": ((3, 640), 0),
    "narrow": ((2, 40), 0),
    "rows": ((5, 33), 0),
    "columns": ((9, 7), 1),
    "one": ((1, 65), 0),
    "whole": ((4, 31), None),
    "stack": ((4, 3, 50), 0),
    "vector": ((130,), 0),
    "scale": ((3,), None),
}


class Parts(nn.Module):
    """Each parameter takes part by itself, so a rank's own elements have the gradients of the whole."""

    def __init__(self, mesh: Any = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, (shape, dim) in SHAPES.items():
            value = torch.randn(shape, generator=generator)
            if mesh is not None and dim is not None:
                value = distribute_tensor(value, mesh, [Shard(dim)])
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for param in self.parameters():
            local = param.to_local() if isinstance(param, DTensor) else param
            total = total + (local * x.mean() + x.std()).pow(2).sum()
        return total


def trained(stages: tuple[int, ...], options: dict[str, Any]) -> list[dict[str, Any]]:
    import onefold

    mesh, found = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp")), []
    for stage in stages:
        recipe = onefold.Recipe.zero(stage, stall_timeout=30.0, **options)
        model = onefold.shard(Parts(mesh["tp"]), recipe, mesh=mesh, data="dp")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        norms = []
        for step in range(3):
            model(features_of(10 * mesh.get_local_rank("dp") + step, 3, 4)).backward()
            norms.append(onefold.clip_grad_norm_(model, 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
        flats = [flat for unit in onefold.engine_of(model).units for flat in unit.flats]
        found.append(
            {
                "norms": norms,
                "weights": onefold.full_state_dict(model),
                "states": optimizer.state_dict()["state"],
                "layouts": [[s.name for s in flat.layout.slots] for flat in flats],
                "rooms": [(flat.layout.numel, flat.boxed) for flat in flats],
            }
        )
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"borders": True}, {"borders": True, "offload_optimizer": "cpu"}, {"shard_group": 1}],
    ids=str,
)
def test_uneven_and_empty_parts_train_as_one_process(options: dict[str, Any]) -> None:
    plain = Parts()
    optimizer, norms = torch.optim.AdamW(plain.parameters(), lr=0.01), []
    for step in range(3):
        for dp in range(2):
            (plain(features_of(10 * dp + step, 3, 4)) / 2).backward()
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    stages = (1, 2, 3)
    ranks = run_ranks(6, trained, stages, options)
    for i, stage in enumerate(stages):
        first = ranks[0][i]
        for seen in (rank[i] for rank in ranks):
            assert seen["norms"] == first["norms"] == ranks[0][0]["norms"], (stage, seen["norms"])
            assert seen["rooms"] == first["rooms"], "ranks have unequal buffers"
            assert seen["layouts"] == first["layouts"]
        places = [[[*SHAPES].index(name) for name in names] for names in first["layouts"]]
        in_order = all(each == sorted(each) for each in places)
        assert in_order != ("borders" in options), (stage, first["layouts"])
        assert first["norms"] == pytest.approx(norms, rel=1e-5)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(first["weights"][name], value, rtol=1e-5, atol=1e-6)
            assert torch.equal(first["weights"][name], ranks[0][0]["weights"][name]), name
        for number, state in optimizer.state_dict()["state"].items():
            got = first["states"][number]["exp_avg"]
            torch.testing.assert_close(got, state["exp_avg"], rtol=1e-5, atol=1e-7)
