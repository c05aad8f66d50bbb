"""Beside other axes of parallelism: the stages of a pipeline.

| name               | does                                                                               |
|--------------------|------------------------------------------------------------------------------------|
| `PipelineStage`    | torch's stage of a pipeline, for a module that `onefold.shard()` returned          |
| `register_actions` | lets a schedule's UNSHARD and RESHARD actions act on such stages                   |
| `unshard`          | gathers all units of a sharded module and keeps them gathered                      |
| `reshard`          | releases them                                                                      |
| `accumulating`     | leaves the gradients of passes whole on this rank                                  |
| `reduce_grad`      | reduces the gradients that micro-batches have left on this rank                    |
"""

from __future__ import annotations

from onefold.parallel.stage import (
    PipelineStage,
    accumulating,
    reduce_grad,
    register_actions,
    reshard,
    unshard,
)

__all__ = [
    "PipelineStage",
    "accumulating",
    "reduce_grad",
    "register_actions",
    "reshard",
    "unshard",
]
