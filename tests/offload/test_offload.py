"""Invariant 1 with tiers: whatever rests on the host or on NVMe, in whole or in part, losses and
weights keep their bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from zoo import TinyGPT, tokens_of

#: Options of Recipe.zero by name; those that move parameters need stage 3.
STATES: dict[str, dict[str, Any]] = {
    "host": {"offload_optimizer": "cpu"},
    "half of it on the host": {"offload_optimizer": 0.5},
    "NVMe": {"offload_optimizer": "nvme", "chunk": 65536},
    "half of it on NVMe": {"offload_optimizer": "nvme:0.5"},
    "NVMe, gradients on the host": {"offload_optimizer": "nvme", "offload_gradients": "cpu"},
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "parameters and states on the host": {"offload_optimizer": "cpu", "offload_param": "cpu"},
    "parameters on the host, states on NVMe": {"offload_optimizer": "nvme", "offload_param": "cpu"},
    "everything on NVMe": {"offload_optimizer": "nvme", "offload_param": "nvme", "chunk": 65536},
}
#: What else a run may do: name, options of the loop.
LOOPS: dict[str, dict[str, Any]] = {
    "AdamW in two groups": {},
    "clipped": {"clip": 0.05},
    "two micro-batches": {"accumulate": 2},
    "some of it frozen": {"frozen": True, "clip": 0.05},
    "SGD with momentum": {"optimizer": "sgd"},
    "two optimizers": {"optimizer": "two"},
    "a closure": {"optimizer": "closure"},
}


def optimizers_of(model: torch.nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if kind == "sgd":
        return [torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)]
    wide, narrow = (
        [p for n, p in named if "norm" not in n and "bias" not in n],
        [p for n, p in named if "norm" in n or "bias" in n],
    )
    if kind == "two":
        return [torch.optim.AdamW(wide, lr=1e-2), torch.optim.SGD(narrow, lr=0.1, momentum=0.9)]
    return [
        torch.optim.AdamW(
            [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "weight_decay": 0.0}],
            lr=1e-2,
            fused=True,
        )
    ]


def train(
    stage: int, tiers: dict[str, Any], precision: str = "fp32", clip: float = 0.0, accumulate: int = 1, frozen: bool = False,
    optimizer: str = "adamw", steps: int = 3,
) -> tuple[list[float], dict[str, torch.Tensor]]:  # fmt: skip
    """(losses, whole weights on rank 0)."""
    import onefold

    torch.manual_seed(0)
    model: Any = TinyGPT()
    if frozen:
        for name, param in model.named_parameters():
            param.requires_grad = "0" not in name
    model = onefold.shard(
        model, onefold.Recipe.zero(stage, precision=precision, stall_timeout=20.0, **tiers)
    )
    optimizers, losses = optimizers_of(model, optimizer), []
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(steps):
        for micro in range(accumulate):
            batch = tokens_of(100 * step + 10 * micro + rank)
            if micro < accumulate - 1:
                with onefold.no_sync(model):
                    loss = model(batch)
                    loss.backward()
            else:
                loss = model(batch)
                loss.backward()
        losses.append(loss.item())
        if clip:
            losses.append(onefold.clip_grad_norm_(model, clip).item())
        for o in optimizers:
            if optimizer == "closure":
                losses.append(o.step(partial(once_more, model, o, 100 * step + rank)).item())
            else:
                o.step()
        for o in optimizers:
            o.zero_grad()
    return losses, onefold.full_state_dict(model)


def once_more(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = model(tokens_of(seed + 5))
    loss.backward()
    return loss


def differing(
    stage: int,
    which: dict[str, dict[str, Any]],
    folder: str,
    loops: dict[str, dict[str, Any]],
    precision: str,
    pairs: Sequence[tuple[str, str]] | None = None,
) -> list[str]:
    """What is not bit-equal to the same run on the device: each of `loops` with each of `which`, or
    those of `pairs`.
    """
    wrong = []
    pairs = list(itertools.product(which, loops)) if pairs is None else pairs
    for loop, options in loops.items():
        of_loop = [name for name, its in pairs if its == loop]
        if not of_loop:
            continue
        losses, weights = train(stage, {}, precision, **options)
        for name in of_loop:
            tiers = which[name]
            if loop.startswith("stepped in backward"):
                tiers = {**tiers, "step_in_backward": True}
            on_disk = {"nvme": folder} if "nvme" in str(tiers.values()) else {}
            got, after = train(stage, {**tiers, **on_disk}, precision, **options)
            if got != losses:
                wrong.append(f"{name}, {loop}: losses {got} instead of {losses}")
            off = [n for n in weights if not torch.equal(weights[n], after[n])]
            if off:
                wrong.append(f"{name}, {loop}: weights {off[:3]} differ")
    return wrong


def some_of(loops: dict[str, dict[str, Any]], ranks: int) -> dict[str, dict[str, Any]]:
    """All of them on two ranks; where the number of ranks is what is tested, three."""
    return (
        loops
        if ranks == 2
        else {name: loops[name] for name in ("clipped", "two micro-batches", "some of it frozen")}
    )


@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (3, 1), (0, 2), (1, 2), (2, 2), (3, 2)])
def test_states_off_the_device_change_no_bit(
    stage: int, ranks: int, tmp_path: Path, sample: Any
) -> None:
    loops = some_of(LOOPS, ranks)
    pairs = sample(itertools.product(STATES, loops), 5)
    for wrong in run_ranks(
        ranks, differing, stage, STATES, str(tmp_path), loops, "fp32", pairs=pairs
    ):
        assert wrong == []


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_parameters_off_the_device_change_no_bit(ranks: int, tmp_path: Path, sample: Any) -> None:
    loops = some_of(LOOPS, ranks)
    pairs = sample(itertools.product(PARAMETERS, loops), 4)
    for wrong in run_ranks(
        ranks, differing, 3, PARAMETERS, str(tmp_path), loops, "fp32", pairs=pairs
    ):
        assert wrong == []


@pytest.mark.parametrize("stage", [1, 3])
def test_16_bits_compute_with_the_same_weights_wherever_the_masters_rest(
    stage: int, tmp_path: Path, sample: Any
) -> None:
    loops = {name: LOOPS[name] for name in ("clipped", "two micro-batches")}
    which = STATES | (PARAMETERS if stage == 3 else {})
    pairs = sample(itertools.product(which, loops), 3)
    for wrong in run_ranks(2, differing, stage, which, str(tmp_path), loops, "bf16", pairs=pairs):
        assert wrong == []


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_units_stepped_behind_the_backward_pass_get_the_same_bits(
    stage: int, tmp_path: Path, sample: Any
) -> None:
    loops: dict[str, dict[str, Any]] = {
        "stepped in backward, AdamW in two groups": {"steps": 4},
        "stepped in backward, two micro-batches": {"accumulate": 2},
        "stepped in backward, some of it frozen": {"frozen": True},
        "stepped in backward, two optimizers": {"optimizer": "two"},
    }
    which = STATES | (PARAMETERS if stage == 3 else {})
    pairs = sample(itertools.product(which, loops), 3)
    for wrong in run_ranks(2, differing, stage, which, str(tmp_path), loops, "fp32", pairs=pairs):
        assert wrong == []


def gone_after_backward(nvme: str) -> tuple[bool, bool]:
    """(all gradients are gone when backward returns, from the second step on; before that they are
    there).
    """
    import onefold

    torch.manual_seed(0)
    recipe = onefold.Recipe.zero(3, offload_optimizer="nvme", nvme=nvme, step_in_backward=True)
    model: Any = onefold.shard(TinyGPT(), recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for step in range(2):
        model(tokens_of(step)).backward()
        seen.append([p.grad is None for p in model.parameters() if p.numel()])
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(ValueError, match="step_in_backward"):
        onefold.clip_grad_norm_(model, 1.0)
    return all(seen[1]), not any(seen[0])


def test_gradients_are_stepped_while_the_backward_pass_goes_on(tmp_path: Path) -> None:
    assert run_ranks(2, gone_after_backward, str(tmp_path)) == [(True, True), (True, True)]


def test_a_run_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    run_ranks(
        2,
        differing,
        3,
        {"everything on NVMe": PARAMETERS["everything on NVMe"]},
        str(tmp_path),
        {"clipped": {"clip": 0.1}},
        "fp32",
    )
    assert list(tmp_path.iterdir()) == []


def everywhere_at_rest(stage: int, tiers: dict[str, Any]) -> dict[str, Any]:
    import onefold

    torch.manual_seed(0)
    model = onefold.shard(TinyGPT(), onefold.Recipe.zero(stage, **tiers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = onefold.engine_of(model)
    for step in range(2):
        model(tokens_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    own = sum(f.owned[1] - f.owned[0] for u in engine.units for f in u.flats)
    return {
        "own": own,
        "whole": sum(u.numel for u in engine.units),
        "device": dict(engine.memory.now()),
        "host": dict(engine.transfers.host.now()),
        "disk": dict(engine.transfers.disk.now()),
        "states": [t.device.type for s in optimizer.state.values() for t in s.values() if t.dim()],
    }


def test_bytes_rest_where_the_recipe_says(tmp_path: Path) -> None:
    nvme = str(tmp_path)
    for seen in run_ranks(
        2,
        everywhere_at_rest,
        3,
        {"offload_optimizer": "nvme", "offload_param": "nvme", "nvme": nvme},
    ):
        own = 4 * seen["own"]
        assert seen["disk"] == {"master weights": own, "gradients": own, "moments": 2 * own}
        assert seen["device"].keys() <= {"idle buffers"} and set(seen["states"]) == {"meta"}
    for seen in run_ranks(2, everywhere_at_rest, 3, {"offload_optimizer": "cpu"}):
        own = 4 * seen["own"]
        assert (
            seen["host"] == {"master weights": own}
            and seen["device"] == {"parameters": own}
            and seen["disk"] == {}
        )
    for seen in run_ranks(2, everywhere_at_rest, 1, {"offload_optimizer": "nvme", "nvme": nvme}):
        own = 4 * seen["own"]
        assert (
            seen["device"] == {"parameters": 4 * seen["whole"]}
            and seen["disk"]["moments"] == 2 * own
        )


def test_the_rows_of_all_combinations_are_executed_or_refused(tmp_path: Path) -> None:
    """No combination of tiers is half understood: it trains, or building the recipe says why
    not.
    """
    import onefold

    for p, g, o in itertools.product((None, "cpu", "nvme"), repeat=3):
        options = {
            "offload_param": p,
            "offload_gradients": g,
            "offload_optimizer": o,
            "nvme": str(tmp_path),
        }
        try:
            recipe = onefold.Recipe.zero(3, **options)
        except ValueError as error:
            assert len(str(error)) > 40
            continue
        model = onefold.shard(TinyGPT(), recipe)
        model(tokens_of(0)).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
