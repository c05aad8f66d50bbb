"""One rank's part of the optimizer, in one form for all stages.

A rank's file has flat tensors, here called cells. A cell is the rank's part of one parameter group
(stages 1, 2) or of one sub-group of a parameter group (stage 3), in master precision. Each
optimizer state is another flat tensor of the same elements.

| what              | stages 1, 2                                       | stage 3                                    |
|-------------------|---------------------------------------------------|--------------------------------------------|
| masters           | single_partition_of_fp32_groups, without padding  | fp32_flat_groups                           |
| states, groups    | base_optimizer_state, padded                      | a nested optimizer_state_dict              |
| elastic           | base_optimizer_state is a list, without groups    | does not exist                             |
| no "zero_stage"   | stage 1, bf16 with fp32 sums                      |                                            |
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onefold.checkpoint.errors import CheckpointError
from onefold.deepspeed.checkpoint_reader.pickles import read_pickle


@dataclass(frozen=True)
class Shard:
    """The optimizer file of one rank.

    Attributes:
        path: the file, for messages.
        stage: 1, 2 or 3.
        ranks: the number of ranks over which the states are divided.
        masters: the master weights of each cell, 1-D and memory-mapped.
        states: the optimizer's states of each cell: flat tensors and scalars.
        groups: the options of each parameter group, with the indices of its cells under "params";
            None if they were not saved.
        paddings: for each cell, the elements of padding after each parameter.
        scaler: the attributes of DeepSpeed's loss scaler; None if there is none.
    """

    path: Path
    stage: int
    ranks: int
    masters: Sequence[torch.Tensor]
    states: Sequence[Mapping[str, Any]]
    groups: list[dict[str, Any]] | None
    paddings: Sequence[Sequence[int]] | None
    scaler: Mapping[str, Any] | None

    def flat(self, cell: int, state: str) -> torch.Tensor:
        """Return an optimizer state of a cell, or its master weights if `state` is ""."""
        tensor = self.masters[cell] if not state else self.states[cell].get(state)
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(
                f"{self.path} holds no {state!r} for the optimizer's group {cell}, as other ranks'"
                " files do."
            )
        return tensor.detach().view(-1)

    def is_flat(self, cell: int, state: str) -> bool:
        """Whether a state has an element for each element of the parameters, as masters have."""
        value = self.states[cell].get(state)
        return (
            isinstance(value, torch.Tensor)
            and value.dim() > 0
            and value.numel() >= self.masters[cell].numel()
        )


def read_shard(path: Path) -> Shard:
    """Read one rank's optimizer file.

    Raises:
        CheckpointError: the file cannot be read safely, or is not of DeepSpeed's ZeRO optimizers.
    """
    contents = read_pickle(path)
    try:
        return _shard(path, contents["optimizer_state_dict"])
    except CheckpointError:
        raise
    except Exception as error:  # whatever values of other kinds than DeepSpeed's lead to
        raise CheckpointError(
            f"{path} is no optimizer file of DeepSpeed's ZeRO as of version 0.19:"
            f" {type(error).__name__} {error}."
        ) from None


def _shard(path: Path, saved: Mapping[str, Any]) -> Shard:
    stage = int(saved.get("zero_stage", 1))
    counts = saved["partition_count"]
    counts = {int(n) for n in counts} if isinstance(counts, (list, tuple)) else {int(counts)}
    if len(counts) != 1 or saved.get("ds_zero_partition_groups") is not None:
        raise CheckpointError(
            f"{path}: parameters are divided over groups of different sizes (experts), which cannot"
            " be read."
        )
    masters = list(
        saved["fp32_flat_groups"] if stage == 3 else saved["single_partition_of_fp32_groups"]
    )
    inner = saved["optimizer_state_dict"] if stage == 3 else saved["base_optimizer_state"]
    states, groups = (
        (inner["state"], inner["param_groups"])
        if isinstance(inner, Mapping)
        else (dict(enumerate(inner)), None)
    )
    if groups is not None and sorted(i for g in groups for i in g["params"]) != list(
        range(len(masters))
    ):
        raise CheckpointError(
            f"{path}: the optimizer has other groups ({[g['params'] for g in groups]}) than the"
            f" {len(masters)} that were saved."
        )
    listed = [
        _with_step(dict(states.get(i, {})), groups, i, saved.get("base_optimizer_state_step"))
        for i in range(len(masters))
    ]
    for master, state in zip(masters, listed, strict=True):
        if not isinstance(master, torch.Tensor) or not math.isfinite(float(state.get("step", 0))):
            raise TypeError(
                f"a flat group is a {type(master).__name__} with {state.get('step')} steps"
            )
    scaler = saved.get("loss_scaler")
    return Shard(
        path=path,
        stage=stage,
        ranks=counts.pop(),
        masters=masters,
        states=listed,
        groups=[_options(g) for g in groups] if groups is not None else None,
        paddings=saved.get("param_alignment_paddings"),
        scaler=dict(vars(scaler)) if scaler is not None and hasattr(scaler, "__dict__") else None,
    )


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's options without those that only DeepSpeed's own Adam has.

    These are `bias_correction`, which torch's Adam always does, and `step`, which torch keeps in
    each parameter's state.
    """
    return {k: v for k, v in group.items() if k != "step" and not (k == "bias_correction" and v)}


def _with_step(
    state: dict[str, Any], groups: list[dict[str, Any]] | None, cell: int, step: Any
) -> dict[str, Any]:
    """Add the step count to a cell's state. DeepSpeed's fused Adam keeps it in the group."""
    if groups is not None:
        step = next((g["step"] for g in groups if cell in g["params"] and "step" in g), step)
    return state if step is None or "step" in state or not state else {**state, "step": step}
