"""State divided over groups is saved once and read by any recipe, bit for bit; what encoding lost
goes to the same ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import onefold
from onefold.checkpoint.folder_source import FolderSource
from onefold.inspection.diff import differences
from onefold.inspection.reshard import reshard
from onefold.inspection.summary import summarize
from ranks import run_ranks
from zoo import TinyGPT, tokens_of

RECIPES: list[dict[str, Any]] = [
    {"stage": 3, "shard_group": 2},
    {"stage": 3},
    {"stage": 3, "shard_group": 2, "optimizer_over": "all"},
    {"stage": 2, "shard_group": 2},
    {"stage": 3, "group": 2, "second_copy": True},
    {"stage": 0},
    {"stage": 3, "shard_group": 2},
]


def made(options: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = onefold.shard(TinyGPT(), onefold.Recipe.zero(**options))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    model(tokens_of(10 * number + torch.distributed.get_rank())).backward()
    optimizer.step()
    optimizer.zero_grad()


def handed_on(folder: str) -> list[str]:
    """Each recipe reads what the one before saved and saves it again: what the last read is what
    the first had.
    """
    model, optimizer = made(RECIPES[0])
    for number in range(2):
        step(model, optimizer, number)
    first: dict[str, Tensor] = onefold.full_state_dict(model)
    found = []
    for number, options in enumerate(RECIPES):
        onefold.save(f"{folder}/{number}", model=model, optimizer=optimizer)
        model, optimizer = made(options)
        onefold.load(f"{folder}/{number}", model=model, optimizer=optimizer)
        read = onefold.full_state_dict(model)
        found += [
            f"{options}: {name}" for name in first if not torch.equal(first[name], read[name])
        ]
    # Moments too: the next step of the last is that of a run that never stopped
    twin, twins = made(RECIPES[0])
    for number in range(3):
        step(twin, twins, number)
    step(model, optimizer, 2)
    goes_on, never_stopped = onefold.full_state_dict(model), onefold.full_state_dict(twin)
    return found + [
        f"the next step: {name}"
        for name in goes_on
        if not torch.equal(goes_on[name], never_stopped[name])
    ]


def through_dcp(folder: str) -> list[str]:
    """HSDP's state by torch's own checkpoints, read by stage 3 over all ranks, and back."""
    import torch.distributed.checkpoint as dcp

    model, optimizer = made(RECIPES[0])
    for number in range(2):
        step(model, optimizer, number)
    saved, found = onefold.full_state_dict(model), []
    dcp.save(onefold.dcp_state_dict(model, optimizer), checkpoint_id=f"{folder}/dcp")
    step(model, optimizer, 2)
    went_on = onefold.full_state_dict(model)
    for options in (RECIPES[1], RECIPES[2], RECIPES[4], RECIPES[0]):
        other, its = made(options)
        dcp.load(onefold.dcp_state_dict(other, its), checkpoint_id=f"{folder}/dcp")
        read = onefold.full_state_dict(other)
        found += [
            f"{options} through DCP: {name}"
            for name in saved
            if not torch.equal(saved[name], read[name])
        ]
        step(other, its, 2)
        after = onefold.full_state_dict(other)
        # Without them sums are in another order
        groups = "shard_group" in options or "group" in options
        near = torch.equal if groups else lambda a, b: torch.allclose(a, b, rtol=1e-5, atol=1e-6)
        found += [
            f"{options}, a step after DCP: {name}"
            for name in went_on
            if not near(went_on[name], after[name])
        ]
    return found


LOSSY: dict[str, Any] = {
    "stage": 3, "group": 2, "second_copy": True, "gather_codec": "int8", "reduce_codec": "int4", "error_feedback": True,
    "wire_rounding": "stochastic",
}  # fmt: skip


def lost(model: nn.Module) -> list[Tensor]:
    return list(onefold.engine_of(model).residuals.kept.values())


def resumed(folder: str) -> list[str]:
    """What encoding lost is a part of the state: four steps at once, and two and two; on other
    ranks it begins anew, and says so.
    """
    rank = torch.distributed.get_rank()
    pairs = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    model, optimizer = made(LOSSY)
    step(model, optimizer, 0)
    step(model, optimizer, 1)
    saving = onefold.save_async(f"{folder}/lossy", model=model, optimizer=optimizer)
    kept = [t.clone() for t in lost(model)]
    step(model, optimizer, 2)
    saving.wait()
    step(model, optimizer, 3)
    at_once = onefold.full_state_dict(model)
    onefold.save(f"{folder}/plain", model=model)

    again, its = made(LOSSY)
    step(again, its, 7)
    said = onefold.load(f"{folder}/lossy", model=again, optimizer=its)
    found = [f"notes of the same ranks: {said.notes}"] if said.notes else []
    back = lost(again)
    if len(kept) != len(back) or not all(
        torch.equal(a, b) and a.any() for a, b in zip(kept, back, strict=True)
    ):
        found.append("what encoding lost did not come back")
    for number in (2, 3):
        step(again, its, number)
    resumed = onefold.full_state_dict(again)
    found += [
        f"resumed: {name}" for name in at_once if not torch.equal(at_once[name], resumed[name])
    ]

    for options, over, note in (
        ({**LOSSY, "group": 4}, None, "kept by 4 ranks in groups of 2"),
        ({**LOSSY, "borders": True}, None, "with another borders="),
        (LOSSY, pairs[rank // 2], "cannot be divided anew among 2 in groups of 2"),
        ({**LOSSY, "error_feedback": False}, None, "left out: this recipe has no error_feedback"),
    ):
        torch.manual_seed(0)
        other: nn.Module = onefold.shard(TinyGPT(), onefold.Recipe.zero(**options), group=over)
        its = torch.optim.AdamW(other.parameters(), lr=0.01)
        step(other, its, 5)
        said = onefold.load(f"{folder}/lossy", model=other, optimizer=its)
        if lost(other) or not any(note in n for n in said.notes):
            found.append(f"{options}: {said.notes}, {len(lost(other))} residuals")
        step(other, its, 2)
    onefold.load(f"{folder}/plain", model=again)
    return found + (["residuals of other weights were kept"] if lost(again) else [])


def both(folder: str) -> list[str]:
    return handed_on(folder) + through_dcp(folder) + resumed(folder)


def test_any_recipe_reads_what_groups_saved_and_the_same_ranks_resume_to_the_bit(
    tmp_path: Path,
) -> None:
    assert run_ranks(4, both, str(tmp_path)) == [[]] * 4
    # The files can be cut anew, and say what they hold.
    reshard(tmp_path / "lossy", tmp_path / "two", 2)
    one, two = FolderSource(tmp_path / "lossy"), FolderSource(tmp_path / "two")
    found = differences(one, two)
    assert (
        found.equal
        and found.compared["rest"] == sum(item.kind == "residual" for item in one.records) >= 4 * 2
    )
    assert summarize(two, tmp_path / "two").resumes["error feedback"] == "of 4 ranks in groups of 2"
    one.close()
    two.close()
