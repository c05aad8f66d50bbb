"""Checkpoints hold moments as they rest: bit-equal at any number of ranks, stage and tier; others
are read as what they stand for.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from moments_runs import different, left_of, made, train
from needed import skip_without
from ranks import run_ranks

skip_without("torchao", "the formats are torchao's: pip install onefold[lowbit]")
SERVER = "libraries"

FORMATS = ("int8", "int4", "fp8", "bf16")
#: Those of the matrix of ranks, stages and tiers: two codes in a byte, a dtype that few know,
#: rounding by chance.
MOST_UNLIKE = FORMATS[1:]
Left = dict[str, torch.Tensor]


def recipe_of(kind: str) -> dict[str, Any]:
    return {"moments": kind, "stochastic_rounding": kind == "bf16"}


def saved(
    folder: str, places: list[tuple[str, int, dict[str, Any]]], optimizer: str = "AdamW"
) -> dict[str, tuple[Left, list[float], Left]]:
    """{format: (what is left after two steps, losses of the next two, what is left then)}; each
    (name, stage, tiers) saves after two.
    """
    import onefold

    out = {}
    for kind in MOST_UNLIKE:
        for name, stage, tiers in places:
            model, stepper = made(stage, {**recipe_of(kind), **tiers}, optimizer)
            train(model, stepper, 0, 2)
            onefold.save(f"{folder}/{name}-{kind}", model=model, optimizer=stepper, step=2)
            before = left_of(model, stepper)
            out[kind] = before, train(model, stepper, 2, 2), left_of(model, stepper)
    return out


def resumed(
    folder: str, names: list[str], places: list[tuple[int, dict[str, Any]]], want: dict[str, Any]
) -> list[str]:
    """What differs from `want` where each checkpoint is loaded in each place, and where it goes on
    from there. Collective.
    """
    import onefold

    wrong = []
    for kind in MOST_UNLIKE:
        for name in names:
            for stage, tiers in places:
                model, stepper = made(stage, {**recipe_of(kind), **tiers}, seed=1)
                onefold.load(f"{folder}/{name}-{kind}", model=model, optimizer=stepper)
                before, losses, after = want[kind]
                found = left_of(model, stepper)
                off = different(found, before) if found else []
                if (
                    train(model, stepper, 2, 2) != losses
                    or off
                    or ((left := left_of(model, stepper)) and different(left, after))
                ):
                    wrong.append(f"{name}-{kind} at stage {stage}, {tiers}: {off[:3]}")
    return wrong


def test_any_ranks_stage_and_tier_load_what_any_saved(
    tmp_path: Path, sample: Callable[[Iterable[Any], int], list[Any]]
) -> None:
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    on_disk = {"offload_optimizer": "nvme", "nvme": str(nvme)}
    want = run_ranks(2, saved, str(tmp_path), [("disk", 1, on_disk), ("three", 3, {})])[0]
    run_ranks(2, saved, str(tmp_path), [("zero", 0, {})])
    names = ["disk", "three", "zero"]
    into = [
        (1, [(0, {}), (3, on_disk)]),
        (2, [(0, {}), (0, on_disk), (3, {"offload_optimizer": "cpu"})]),
        (4, [(3, {})]),
    ]
    for ranks, places in sample(into, 2):
        assert (
            run_ranks(
                ranks, resumed, str(tmp_path), names if ranks == 2 else names[:1], places, want
            )
            == [[]] * ranks
        )
    shutil.rmtree(nvme)


def converted(folder: str) -> list[str]:
    """Every format into every other; returns what is not what the stored moment stands for, packed
    anew. On one rank.
    """
    import onefold
    from onefold.quant.moment_packing import MomentPacking
    from onefold.recipe import moments as formats

    def values(left: Left, name: str, key: str, kind: str | None) -> torch.Tensor:
        f = formats.FORMATS[kind or "fp32"].of(70 * 300)
        parts = [left[f"{name}: {k}"] for k in f.keys(key)]
        if not f.packed:
            return parts[0].float()
        codes = parts[0].view(f.dtype)
        return MomentPacking(f, codes.device).decode(codes, parts[1], 70 * 300, formats.SIGNED[key])

    wrong = []
    for source in (None, *FORMATS):
        model, stepper = made(3, {"moments": source})
        train(model, stepper, 0, 2)
        onefold.save(f"{folder}/from-{source}", model=model, optimizer=stepper)
        left = left_of(model, stepper)
        for target in (None, *FORMATS):
            model, stepper = made(0, {"moments": target}, seed=1)
            onefold.load(f"{folder}/from-{source}", model=model, optimizer=stepper)
            found = left_of(model, stepper)
            for key in ("exp_avg", "exp_avg_sq"):
                stood, stands = (
                    values(left, "leave.weight", key, source),
                    values(found, "leave.weight", key, target),
                )
                f = formats.FORMATS[target or "fp32"]
                if f.packed and target != source:
                    codes, scales = (
                        torch.empty(-(-21000 // f.grain), dtype=f.dtype),
                        torch.empty(-(-21000 // f.block)),
                    )
                    codec = MomentPacking(f, codes.device)
                    codec.encode(stood, formats.SIGNED[key], codes, scales)
                    stood = codec.decode(codes, scales, 21000, formats.SIGNED[key])
                if not torch.equal(
                    stood.to(f.dtype).float() if target == "bf16" else stood, stands
                ):
                    wrong.append(f"{source} -> {target}: {key}")
            train(model, stepper, 2, 1)
    return wrong


def test_every_format_is_read_into_every_other(tmp_path: Path) -> None:
    assert converted(str(tmp_path)) == []


def test_a_checkpoint_of_torchaos_optimizer_is_one_of_the_recipes_format(tmp_path: Path) -> None:
    """Saved at stage 0 by a recipe that knows nothing of blocks, loaded by torch's AdamW in blocks
    at stage 3 on two ranks.
    """
    import onefold

    model, stepper = made(0, {}, "AdamW8bit")
    train(model, stepper, 0, 2)
    onefold.save(tmp_path / "c", model=model, optimizer=stepper)
    want = left_of(model, stepper)
    for found in (
        run_ranks(2, loaded, str(tmp_path / "c"), "AdamW")[:1]
        + run_ranks(2, loaded, str(tmp_path / "c"), "AdamW8bit")[:1]
    ):
        assert different(found, want) == []


def loaded(folder: str, optimizer: str) -> Left:
    import onefold

    model, stepper = made(3, {"moments": "int8"}, optimizer, seed=1)
    onefold.load(folder, model=model, optimizer=stepper)
    return left_of(model, stepper)


def test_tiles_have_the_blocks_of_the_whole_weight(tmp_path: Path) -> None:
    """`leave` in three tiles, of which the last would be too small to be packed by itself, is
    loaded whole; and the other way round.
    """
    import onefold

    left = {}
    for name, tile in (("tiles", {"tile": 36000}), ("whole", {})):
        model, stepper = made(3, {"moments": "int8", **tile})
        train(model, stepper, 0, 2)
        onefold.save(tmp_path / name, model=model, optimizer=stepper)
        left[name] = left_of(model, stepper)
    for name, tile in (("tiles", {}), ("whole", {"tile": 36000})):
        model, stepper = made(3, {"moments": "int8", **tile}, seed=1)
        onefold.load(tmp_path / name, model=model, optimizer=stepper)
        assert different(left_of(model, stepper), left[name]) == []


def test_a_resharded_checkpoint_divides_codes_and_scales(tmp_path: Path) -> None:
    import onefold
    from onefold.inspection.reshard import reshard

    model, stepper = made(3, {"moments": "int4"})
    train(model, stepper, 0, 2)
    want = left_of(model, stepper)
    onefold.save(tmp_path / "one", model=model, optimizer=stepper)
    reshard(tmp_path / "one", tmp_path / "three", 3)
    sizes = [f.stat().st_size for f in sorted((tmp_path / "three").glob("rank-*.safetensors"))]
    assert len(sizes) == 3 and max(sizes) < 2 * min(sizes), sizes
    again, stepper = made(0, {"moments": "int4"}, seed=1)
    onefold.load(tmp_path / "three", model=again, optimizer=stepper)
    assert different(left_of(again, stepper), want) == []


def test_other_checkpoint_writers_and_optimizers_are_told_what_to_do(tmp_path: Path) -> None:
    import onefold

    model, stepper = made(3, {"moments": "int8"})
    train(model, stepper, 0, 1)
    onefold.save(tmp_path / "c", model=model, optimizer=stepper)
    with pytest.raises(
        onefold.CheckpointError,
        match=r"moments in int8 mean nothing to other readers.*use onefold\.save",
    ):
        onefold.dcp_state_dict(model, stepper)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(onefold.CheckpointError, match=r"moments='int8'.*SGD"):
        onefold.load(tmp_path / "c", model=model, optimizer=other)
