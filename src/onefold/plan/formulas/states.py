"""Bytes of model states by convention and stage.

A convention says what one parameter weighs in each kind of state; a stage says which kinds are
divided by the number of ranks:

| stage | parameters | gradients | optimizer |
|-------|------------|-----------|-----------|
| 0     | 1          | 1         | 1         |
| 1     | 1          | 1         | 1/N       |
| 2     | 1          | 1/N       | 1/N       |
| 3     | 1/N        | 1/N       | 1/N       |

Source: Rajbhandari et al. 2020 (ZeRO), section 5 and Table 1.
"""

from __future__ import annotations

from dataclasses import dataclass

STAGES = (0, 1, 2, 3)
_FIRST_STAGE_THAT_SHARDS = {"optimizer": 1, "gradients": 2, "parameters": 3}


@dataclass(frozen=True)
class Convention:
    """Bytes per parameter of each kind of state; `optimizer` is ZeRO's K (fp32 master weights
    included).
    """

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer

    def by_kind(self) -> dict[str, float]:
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
        }


def states_by_kind(
    numel: float, convention: Convention, stage: int, ranks: int
) -> dict[str, float]:
    """Bytes of each kind of state on one of `ranks` ranks at a stage.

    Raises:
        ValueError: an unknown stage, or less than one rank.
    """
    if stage not in STAGES:
        raise ValueError(f"stage={stage!r}: expected 0, 1, 2 or 3.")
    if ranks < 1:
        raise ValueError(f"ranks={ranks!r}: expected 1 or more.")
    return {
        kind: numel * nbytes / (ranks if stage >= _FIRST_STAGE_THAT_SHARDS[kind] else 1)
        for kind, nbytes in convention.by_kind().items()
    }
