"""What one rank saved of the optimizer, in one form for all stages.

A rank's file holds flat tensors, here called cells. A cell is the rank's part of one parameter
group (stages 1, 2) or of one sub-group of a parameter group (stage 3), in master precision; each
state of the optimizer is a flat tensor beside it.

| what              | stages 1, 2                                       | stage 3                                    |
|-------------------|---------------------------------------------------|--------------------------------------------|
| masters           | single_partition_of_fp32_groups, padding cut off  | fp32_flat_groups                           |
| states, groups    | base_optimizer_state, padded                      | optimizer_state_dict, inside another       |
| elastic           | base_optimizer_state is a list, without groups    | does not exist                             |
| no "zero_stage"   | stage 1, bf16 with fp32 sums                      |                                            |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onefold.checkpoint.errors import CheckpointError
from onefold.integrations.deepspeed.checkpoint_reader.pickles import read_pickle


@dataclass(frozen=True)
class Shard:
    """Attributes:
    path: the file, for messages.
    stage: 1, 2 or 3.
    ranks: how many ranks the states are divided over.
    masters: for each cell its tensor, 1-D, mapped.
    states: for each cell the optimizer's state: flat tensors and scalars.
    groups: the options of each parameter group, the indices of its cells under "params"; None where
        they were not saved.
    paddings: for each cell the elements of padding behind each parameter.
    scaler: the attributes of DeepSpeed's loss scaler; None if it has none.
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
        """The master of a cell (`state` ""), or a state of it."""
        tensor = self.masters[cell] if not state else self.states[cell].get(state)
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(
                f"{self.path} holds no {state!r} for the optimizer's group {cell}, as other ranks'"
                " files do."
            )
        return tensor.detach().view(-1)

    def is_flat(self, cell: int, state: str) -> bool:
        """Whether a state runs along the parameters' elements, as the masters do."""
        value = self.states[cell].get(state)
        return (
            isinstance(value, torch.Tensor)
            and value.dim() > 0
            and value.numel() >= self.masters[cell].numel()
        )


def read_shard(path: Path) -> Shard:
    """Raises: CheckpointError: it cannot be read safely, or is no file that DeepSpeed's ZeRO
    optimizers write.
    """
    contents = read_pickle(path)
    try:
        return _shard(path, contents["optimizer_state_dict"])
    except CheckpointError:
        raise
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
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
    """Without what DeepSpeed's own Adam keeps among them and torch's does always (bias correction)
    or elsewhere (the step count).
    """
    return {k: v for k, v in group.items() if k != "step" and not (k == "bias_correction" and v)}


def _with_step(
    state: dict[str, Any], groups: list[dict[str, Any]] | None, cell: int, step: Any
) -> dict[str, Any]:
    """DeepSpeed's fused Adam counts steps in the group, torch's in each parameter's state."""
    if groups is not None:
        step = next((g["step"] for g in groups if cell in g["params"] and "step" in g), step)
    return state if step is None or "step" in state or not state else {**state, "step": step}
