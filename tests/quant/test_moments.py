"""Moments in bf16, 8 and 4 bits: the same bits of weights and moments on any number of ranks, at
any stage, on any tier; close to fp32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moments_runs import different, left_of, made, train
from needed import skip_without
from ranks import run_ranks
from zoo import features_of

skip_without("torchao", "the formats are torchao's: pip install onefold[lowbit]")
SERVER = "libraries"

#: What is asked for: the recipe's options, and the optimizer.
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "int8": ({"moments": "int8"}, "AdamW"),
    "int4, AMSGrad": ({"moments": "int4"}, "amsgrad"),
    "fp8, fused": ({"moments": "fp8"}, "fused"),
    "bf16": ({"moments": "bf16"}, "Adam"),
    "bf16, by chance": ({"moments": "bf16", "stochastic_rounding": True}, "AdamW"),
    "bf16 masters too": (
        {"moments": "bf16", "stochastic_rounding": True, "master_dtype": "bf16"},
        "AdamW",
    ),
    "AdamW8bit": ({"moments": "int8"}, "AdamW8bit"),
    "Adam4bit": ({"moments": "int4"}, "Adam4bit"),
}
LOOPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two micro-batches, clipped": {"accumulate": 2, "clip": 0.5},
}


def cases(
    kinds: list[str], loop: str, places: list[tuple[int, dict[str, Any]]]
) -> dict[str, tuple[list[float], dict[str, torch.Tensor]]]:
    """{case: (losses, what is left)} of each kind at each (stage, tiers)."""
    out = {}
    for kind in kinds:
        recipe, optimizer = KINDS[kind]
        for stage, tiers in places:
            model, stepper = made(stage, {**recipe, **tiers}, optimizer)
            losses = train(model, stepper, 0, 3, **LOOPS[loop])
            shown = {name: value for name, value in tiers.items() if name != "nvme"}
            out[f"{kind}, {loop}, stage {stage}, {shown}"] = losses, left_of(model, stepper)
    return out


def differing(found: dict[str, Any], want: dict[str, Any]) -> list[str]:
    """Cases that differ from the one of the same kind and loop in `want`."""
    wrong = []
    for case, (losses, left) in found.items():
        reference = next(
            other for other in want if other.split(", stage")[0] == case.split(", stage")[0]
        )
        if losses != want[reference][0] or (off := different(left, want[reference][1])):
            wrong.append(
                f"{case}: {losses} for {want[reference][0]},"
                f" {off[:3] if losses == want[reference][0] else ''}"
            )
    return wrong


def places(nvme: Path) -> list[tuple[int, dict[str, Any]]]:
    """(stage, tiers) that everything has to be the same in."""
    on_disk = {"offload_optimizer": "nvme", "offload_param": "nvme", "nvme": str(nvme)}
    return [(0, {}), (1, {"offload_optimizer": "cpu"}), (3, {}), (3, on_disk)]


def test_ranks_stages_and_tiers_change_no_bit_of_weights_or_moments(
    tmp_path: Path, sample: Any
) -> None:
    kinds = ["int8", *sample(list(KINDS)[1:], 5)]
    want = run_ranks(2, cases, kinds, "plain", places(tmp_path))[0]
    assert differing(want, want) == []
    for ranks in (1, 4):
        assert differing(run_ranks(ranks, cases, kinds, "plain", [(3, {})])[0], want) == [], (
            f"{ranks} ranks"
        )
    left = want[next(iter(want))][1]
    assert (
        left["blocks.0.weight: exp_avg.int8"].dtype == torch.uint8
        and left["leave.weight: exp_avg.int8.scale"].numel() == 83
    )
    assert left["enter.weight: exp_avg"].dtype == torch.float32, (
        "a small parameter keeps fp32 moments"
    )


def test_accumulation_and_clipping_are_the_same_at_every_stage_on_every_tier(
    tmp_path: Path,
) -> None:
    """On these ranks: a norm is added up part by part, and comes out with other bits on another
    number of them.
    """
    found = run_ranks(
        2,
        cases,
        ["int8", "bf16, by chance", "AdamW8bit"],
        "two micro-batches, clipped",
        places(tmp_path),
    )[0]
    assert differing(found, found) == []


def in_other_ways(nvme: str) -> list[str]:
    """Ways of stepping that must change no bit: behind the backward pass, a share, no overlap,
    stage 2, a second time.
    """
    on_disk = {"offload_optimizer": "nvme", "nvme": nvme}
    ways: list[tuple[int, dict[str, Any]]] = [
        (3, {}),
        (2, {}),
        (3, {"overlap": False}),
        (3, {"offload_optimizer": 0.5}),
        (0, on_disk),
        (3, {"offload_optimizer": "cpu", "step_in_backward": True}),
        (3, {**on_disk, "step_in_backward": True}),
    ]
    found = cases(["int8", "bf16 masters too"], "plain", ways)
    return differing(found, dict(found))


def test_ways_of_stepping_change_no_bit(tmp_path: Path) -> None:
    for wrong in run_ranks(2, in_other_ways, str(tmp_path)):
        assert wrong == []


def test_torchaos_optimizer_steps_as_the_recipes_format_does_up_to_its_own_rounding() -> None:
    """One block of arithmetic differs in order (torchao divides both moments first), no format
    does.
    """
    losses = []
    for optimizer in ("AdamW", "AdamW8bit"):
        model, stepper = made(0, {"moments": "int8"}, optimizer)
        losses.append(torch.tensor(train(model, stepper, 0, 5)))
    assert torch.allclose(*losses, rtol=2e-3), losses


def test_without_a_recipe_torchaos_optimizer_is_right_on_one_rank_and_at_stage_0() -> None:
    want = cases(["AdamW8bit"], "plain", [(0, {})])
    model, stepper = made(0, {}, "AdamW8bit")
    losses = train(model, stepper, 0, 3)
    assert differing({"AdamW8bit, plain, stage 0": (losses, left_of(model, stepper))}, want) == []
    assert differing({"AdamW8bit, plain, stage 0": run_ranks(2, unasked_at_stage_0)[0]}, want) == []


def unasked_at_stage_0() -> tuple[list[float], dict[str, torch.Tensor]]:
    model, stepper = made(0, {}, "AdamW8bit")
    return train(model, stepper, 0, 3), left_of(model, stepper)


def test_losses_stay_close_to_those_of_fp32_moments() -> None:
    """60 steps of a regression. int4 is told apart by more than int8 is: it is the coarser format,
    and both are really at work.
    """
    end = {}
    for kind in ("fp32", "bf16", "int8", "fp8", "int4"):
        model, stepper = made(0, {"moments": kind})
        for step in range(60):
            x = features_of(step % 4, 16, 19)
            loss = (model(x) - x[:, :1].sin()).square().mean()
            loss.backward()
            stepper.step()
            stepper.zero_grad()
        end[kind] = loss.item()
    start = 1.0
    apart = {kind: abs(loss - end["fp32"]) / start for kind, loss in end.items()}
    assert (
        0 < apart["bf16"] < 0.02
        and 0 < apart["int8"] < 0.02
        and 0 < apart["fp8"] < 0.02
        and 0 < apart["int4"] < 0.05
    ), end


def held(stage: int, recipe: dict[str, Any]) -> tuple[int, int, dict[str, int]]:
    """(bytes behind the optimizer's state without step counts, the same by the formula, the ledger
    of NVMe and the elements there).
    """
    import onefold
    from onefold.observe.memory import moments_of
    from onefold.recipe.moments import bytes_of_moments

    model, optimizer = made(stage, recipe)
    train(model, optimizer, 0, 2)
    engine = onefold.engine_of(model)
    with torch._C.DisableTorchFunctionSubclass():
        counts = sum(4 for state in optimizer.state.values() if state)
        own = [(e.param.numel(), e.slot.numel) for e in engine.entries]
    expected = sum(bytes_of_moments(n, recipe["moments"], whole=whole) for n, whole in own)
    owned = sum(
        f.storage.numel
        for f in engine.offloaded_flats
        if any(e.slot.numel >= 4096 for e in f.entries)
    )
    return (
        moments_of(optimizer) - counts,
        expected,
        {**engine.transfers.disk.now(), "packed": owned},
    )


def every_format_held(nvme: str) -> list[tuple[int, int, dict[str, int]]]:
    out = [
        held(stage, {"moments": kind})
        for kind in ("bf16", "int8", "fp8", "int4")
        for stage in (0, 3)
    ]
    return [*out, held(3, {"moments": "int8", "offload_optimizer": "nvme", "nvme": nvme})]


def test_moments_take_the_bytes_of_the_formula(tmp_path: Path) -> None:
    """A packed moment takes 1 byte (int4: half a one) an element and 4 a block; small parameters 4
    bytes an element.
    """
    large, small = 2 * 4900 + 21000, 19 * 70 + 70 + 2 * 70 + 300
    blocks = {256: 2 * 20 + 83, 128: 2 * 39 + 165}
    by_hand = {
        "bf16": 4 * (large + small),
        "int8": 2 * (large + 4 * blocks[256] + 4 * small),
        "fp8": 2 * (large + 4 * blocks[256] + 4 * small),
        "int4": 2 * (large // 2 + 4 * blocks[128] + 4 * small),
    }
    found = run_ranks(2, every_format_held, str(tmp_path))
    for i, kind in enumerate(by_hand):
        for j, _stage in enumerate((0, 3)):
            for rank in found:
                living, expected, _ = rank[2 * i + j]
                assert living == expected, (kind, living, expected)
            parts = [rank[2 * i + j][0] for rank in found]
            assert (parts[0] if j == 0 else sum(parts)) == by_hand[kind], (kind, parts)
    for rank in found:
        living, _, disk = rank[-1]
        assert disk["moments"] == 2 * (disk["packed"] + 4 * disk["packed"] // 256), disk
        assert living <= 8 * small, "only moments of small parameters stay in memory"


def refusals() -> list[str]:
    """What each of these is told."""
    wanted: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
        ("SGD", {"moments": "int8"}, "moments='int8'.*torch.optim.Adam and AdamW", {}),
        ("AdamW8bit", {}, "give the recipe moments='int8'", {}),
        ("AdamW4bit", {"moments": "int8"}, "give the recipe moments='int4'", {}),
        ("AdamW8bit", {"moments": "int8"}, "blocks of 256: leave it out", {"block_size": 512}),
        (
            "AdamW8bit",
            {"moments": "int8"},
            "stochastic_rounding=True",
            {"bf16_stochastic_round": True},
        ),
    ]
    told = []
    for optimizer, recipe, pattern, options in wanted:
        model, stepper = made(3, recipe, optimizer)
        if options:
            stepper = type(stepper)(model.parameters(), **options)
        with pytest.raises(ValueError, match=pattern):
            train(model, stepper, 0, 1)
        told.append(optimizer)
    return told


def test_what_cannot_be_made_right_is_refused_on_every_rank() -> None:
    assert [len(told) for told in run_ranks(2, refusals)] == [5, 5]


def test_a_step_that_a_gradient_scaler_skips_changes_no_code() -> None:
    import onefold

    model, optimizer = made(0, {"moments": "int8"}, "fused")
    scaler = onefold.GradScaler(model, init_scale=4.0)
    for step in range(3):
        if step == 2:
            before = left_of(model, optimizer)
        scaler.scale(
            model(features_of(step, 8, 19)).square().mean() * (float("inf") if step == 2 else 1.0)
        ).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert different(left_of(model, optimizer), before) == []


def test_torchs_own_state_dict_brings_packed_moments_back() -> None:
    import copy

    model, optimizer = made(0, {"moments": "int4"})
    train(model, optimizer, 0, 3)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    want = train(model, optimizer, 3, 2)
    again, optimizer = made(0, {"moments": "int4"}, seed=1)
    again.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    assert train(again, optimizer, 3, 2) == want
