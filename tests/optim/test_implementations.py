"""Where the user has named none of torch's implementations, sharded parameters are stepped by the
best: told by spies on torch's own.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.runtime import stepper
from ranks import run_ranks

LARGE, FEW = 192, 24  # 144 KiB a matrix, and 2 KiB


def spy_on_adam() -> list[str]:
    """The implementations of Adam that torch calls from now on in this process: "single", "multi"
    or "fused".
    """
    module: Any = sys.modules["torch.optim.adam"]
    seen: list[str] = []

    def spied(own: Any, kind: str) -> Any:
        def called(params: list[Any], *args: Any, **kwargs: Any) -> Any:
            if params:  # the own step of an offloaded group has nothing left to do
                seen.append(kind)
            return own(params, *args, **kwargs)

        return called

    for name in ("_single_tensor_adam", "_multi_tensor_adam", "_fused_adam"):
        setattr(module, name, spied(getattr(module, name), name.split("_")[1]))
    return seen


def trained(
    width: int,
    options: dict[str, Any],
    recipe: dict[str, Any],
    steps: int = 3,
    seen: list[str] | None = None,
) -> tuple[list[Any], Any, Any]:
    """The whole parameters after some steps, the model and its optimizer; `seen` is emptied before
    the last step, behind all trials.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    onefold.shard(model, onefold.Recipe.zero(**recipe), units=(nn.Linear,))
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **options})
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(4, width)).square().mean().backward()
        if seen is not None and step + 1 == steps:
            seen.clear()
        optimizer.step()
        optimizer.zero_grad()
    return [p.onefold.gather().clone() for p in model.parameters()], model, optimizer


def implementation_of(
    width: int,
    options: dict[str, Any],
    recipe: dict[str, Any],
    fused_on: tuple[str, ...],
    foreach_on: tuple[str, ...],
) -> Any:
    stepper.FUSED_ON = frozenset(fused_on)
    sys.modules["torch.optim.optimizer"]._get_foreach_kernels_supported_devices = lambda: list(
        foreach_on
    )
    seen = spy_on_adam()
    weights, _, optimizer = trained(width, options, recipe, seen=seen)
    used = set(seen)
    plain = trained(width, {**options, "foreach": False}, recipe)[0]
    difference = max(float((a - b).abs().max()) for a, b in zip(weights, plain, strict=True))
    return (
        used,
        difference,
        [(group["foreach"], group["fused"]) for group in optimizer.param_groups],
    )


HOST = {"stage": 2, "offload_optimizer": "cpu"}


@pytest.mark.parametrize(
    ("width", "options", "recipe", "fused_on", "foreach_on", "expected"),
    [
        pytest.param(
            LARGE, {}, {"stage": 3}, (), ("cpu",), "multi", id="torch's own default is foreach"
        ),
        pytest.param(LARGE, {}, {"stage": 3}, ("cpu",), (), "fused", id="on an accelerator: fused"),
        pytest.param(
            LARGE,
            {},
            HOST,
            ("cpu",),
            (),
            "fused",
            id="on the host of a model on an accelerator: fused",
        ),
        pytest.param(
            LARGE, {}, {"stage": 1}, (), (), "single", id="on the host, large: torch's loop"
        ),
        pytest.param(
            FEW, {}, {"stage": 1}, (), (), "multi", id="on the host, few and small: foreach"
        ),
        pytest.param(FEW, {}, HOST, (), (), "multi", id="offloaded, few and small: foreach"),
        pytest.param(
            FEW,
            {"foreach": False},
            {"stage": 3},
            ("cpu",),
            ("cpu",),
            "single",
            id="what the user names is taken",
        ),
        pytest.param(
            FEW,
            {"lr": torch.tensor(1e-2)},
            {"stage": 1},
            (),
            (),
            "single",
            id="a rate that is a tensor: torch's own choice",
        ),
    ],
)
def test_the_best_implementation_steps(
    width: int, options: Any, recipe: Any, fused_on: Any, foreach_on: Any, expected: str
) -> None:
    for used, difference, groups in run_ranks(
        2, implementation_of, width, options, recipe, fused_on, foreach_on
    ):
        assert used == {expected}, used
        assert groups == [(options.get("foreach"), None)], groups
        assert difference == 0 if expected != "fused" else difference < 1e-5, difference


def a_step_raises() -> Any:
    stepper.FUSED_ON = frozenset(("cpu",))
    _, model, optimizer = trained(FEW, {}, {"stage": 2}, steps=1)
    model(torch.randn(4, FEW)).square().mean().backward()

    def closure() -> float:
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        optimizer.step(closure)
    return [(group["foreach"], group["fused"]) for group in optimizer.param_groups]


def test_a_step_that_raises_leaves_the_groups_as_they_were() -> None:
    assert run_ranks(2, a_step_raises) == [[(None, None)]] * 2


def overflow(fused: bool) -> Any:
    if fused:
        stepper.FUSED_ON = frozenset(("cpu",))
    _, model, optimizer = trained(FEW, {}, {"stage": 2}, steps=1)
    scaler = onefold.GradScaler(model, init_scale=1024.0)
    asked: list[int] = []
    own = scaler._maybe_opt_step
    scaler._maybe_opt_step = lambda *args, **kwargs: (asked.append(1), own(*args, **kwargs))[1]
    before = [p.onefold.gather().clone() for p in model.parameters()]
    found = []
    for bad in (True, False):
        loss = model(torch.ones(4, FEW)).square().mean() * (
            float("inf") if bad and torch.distributed.get_rank() == 1 else 1.0
        )
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = [p.onefold.gather().clone() for p in model.parameters()]
        found.append(all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))
    return (
        found,
        len(asked),
        scaler.get_scale(),
        hasattr(optimizer, "_step_supports_amp_scaling"),
        after,
    )


def test_a_fused_step_skips_an_overflow_without_asking_the_host() -> None:
    asking, fused = run_ranks(2, overflow, False), run_ranks(2, overflow, True)
    for plain, quick in zip(asking, fused, strict=True):
        assert plain[:4] == ([True, False], 2, 512.0, False), plain[:4]
        assert quick[:4] == ([True, False], 0, 512.0, False), quick[:4]
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(plain[4], quick[4], strict=True))
