"""Stepping in the backward pass takes the host memory that was planned: to 5 %, from the first
step on.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

import states
from onefold.runtime.parameters.interval import disable_torch_function
from ranks import run_ranks
from zoo import TinyGPT, tokens_of

#: (stage, options of Recipe.zero) by name.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "host": (3, {"offload_optimizer": "cpu"}),
    "host, gradients in another dtype than masters": (
        0,
        {"offload_optimizer": "cpu", "precision": "bf16"},
    ),
    "NVMe": (3, {"offload_optimizer": "nvme", "chunk": 65536}),
    "NVMe, gradients on the host": (
        2,
        {"offload_optimizer": "nvme", "offload_gradients": "cpu", "chunk": 65536},
    ),
    "NVMe, parameters too": (
        3,
        {"offload_optimizer": "nvme", "offload_param": "nvme", "precision": "bf16", "chunk": 65536},
    ),
}
#: Here the first step, to which all gradients come, takes more than those after it; the plan knows
#: of it.
FIRST = "NVMe, gradients on the host"


def slowest_case(arrivals: dict[str, int]) -> None:
    """Step each unit only when so many others wait behind it as ever may: what is held at once does
    not depend on who is faster.
    """
    from onefold.offload.in_backward import WAITING, InBackwardStepper

    landed, step = InBackwardStepper.landed, InBackwardStepper._step

    def counted(self: InBackwardStepper, flat: Any) -> None:
        arrivals["landed"] += 1
        landed(self, flat)

    def patient(self: InBackwardStepper, flat: Any, *where: Any) -> None:
        arrivals["stepped"] += 1
        wanted, until = min(arrivals["stepped"] + WAITING, arrivals["of"]), time.monotonic() + 60
        while arrivals["landed"] < wanted and time.monotonic() < until:
            time.sleep(0.0005)
        step(self, flat, *where)

    InBackwardStepper.landed, InBackwardStepper._step = counted, patient  # type: ignore[method-assign]


def moments_in_memory(optimizer: torch.optim.Optimizer) -> int:
    with disable_torch_function():
        return sum(
            t.numel() * t.element_size()
            for t in states.held(optimizer)
            if t.dim() and not t.is_meta
        )


def held_and_planned(
    stage: int, options: dict[str, Any], arrivals: dict[str, int]
) -> dict[str, int]:
    """Bytes of host memory, moments included: at their most in the "first" step and in "later"
    ones; "planned"; all "gradients".
    """
    from host_planned import planned

    import onefold

    torch.manual_seed(0)
    model: Any = onefold.shard(
        TinyGPT(width=192, depth=4, vocabulary=600),
        onefold.Recipe.zero(stage, step_in_backward=True, **options),
    )
    engine, host = onefold.engine_of(model), onefold.engine_of(model).transfers.host
    seen = {"first": 0, "later": 0}

    class Watched(torch.optim.AdamW):
        """In the first step, which makes them, moments are counted with what is in memory beside
        them: after each unit or chunk.
        """

        def step(self, closure: Any = None) -> Any:
            out = super().step(closure)
            if not arrivals["of"]:
                seen["first"] = max(
                    seen["first"], sum(host.now().values()) + moments_in_memory(self)
                )
            return out

    optimizer = Watched(model.parameters(), lr=1e-3, fused=True)
    for number in range(3):
        arrivals.update(landed=0, stepped=0, of=len(engine.offloaded_flats) if number else 0)
        host.reset_peak()
        model(tokens_of(number)).backward()
        if number == 0:
            seen["first"] = sum(host.peak().values())
        optimizer.step()
        optimizer.zero_grad()
        if number:
            assert arrivals["landed"] == arrivals["stepped"] == arrivals["of"]
            seen["later"] = max(
                seen["later"], sum(host.peak().values()) + moments_in_memory(optimizer)
            )
    gradients = sum(4 * (flat.owned[1] - flat.owned[0]) for flat in engine.offloaded_flats)
    return {**seen, "planned": planned(engine)["host_peak"], "gradients": gradients}


def all_cases(nvme: str) -> dict[str, dict[str, int]]:
    arrivals = {"landed": 0, "stepped": 0, "of": 0}
    slowest_case(arrivals)
    return {
        name: held_and_planned(
            stage, options | ({"nvme": nvme} if "nvme" in options.values() else {}), arrivals
        )
        for name, (stage, options) in CASES.items()
    }


def test_stepping_behind_the_backward_pass_holds_what_was_planned_to_5_percent(
    tmp_path: Path,
) -> None:
    for seen in run_ranks(2, all_cases, str(tmp_path)):
        for name, case in seen.items():
            said = (
                f"{name}: {case['first']:,} bytes of host memory in the first step,"
                f" {case['later']:,} later; {case['planned']:,} planned"
            )
            assert max(case["first"], case["later"]) <= 1.05 * case["planned"], said
            if name != FIRST:
                assert case["first"] <= case["later"], said
                assert case["later"] >= 0.95 * case["planned"], said
