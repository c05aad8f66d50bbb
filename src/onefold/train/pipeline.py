"""`--pp`: the stage of the model that this rank computes, and torch's schedules that run it.

    train       1F1B over the micro-batches of a step (GPipe, if they are fewer than the stages)
    evaluate    GPipe, forward passes only

Every rank of a pipeline reads the same samples. The first stage takes their tokens and the last one
their labels: only there a loss is known, and elsewhere it counts as 0. torch's stages exchange
tensors of one shape, so batches are padded to `seq` tokens.

A stage infers its shapes in the first call of a schedule, and remembers how many micro-batches come.
So each number of micro-batches has a schedule and a stage of its own, over the same module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from onefold.data.samples import IGNORE, Batch
from onefold.parallel import PipelineStage


class Pipeline:
    """This rank's stage and its schedules.

    Args:
        model: the stage's module, cut and sharded.
        group: the ranks that have the stages, in their order.
        stage, stages: which one this is, and their number.
        seq, padding: tokens of a sample, and the token that pads a shorter one.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Any,
        device: torch.device,
        stage: int,
        stages: int,
        seq: int,
        padding: int,
    ) -> None:
        self.model, self.group, self.device = model, group, device
        self.stage, self.stages, self.seq, self.padding = stage, stages, seq, padding
        self._schedules: dict[tuple[int, bool], Any] = {}
        self._scaled: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def train(
        self,
        batches: Sequence[Batch],
        weights: Sequence[float],
        scaled: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Compute the gradients of the weighted sum of the batches' losses, and leave them in the
        model. Returns that sum in fp32 on the last stage, and 0 on the others. Collective.

        Args:
            batches: the micro-batches of a step. weights: of their losses.
            scaled: scales a loss before its backward pass.
        """
        self._scaled = scaled
        args, kwargs = self._inputs(batches)
        target = torch.tensor(weights, dtype=torch.float32, device=self.device)
        schedule = self._schedule(len(batches), trains=True)
        losses: list[torch.Tensor] = []
        # The outputs are losses alone: without `return_outputs` torch would still keep them
        schedule.step(
            *args,
            target=target if self.is_last else None,
            losses=losses,
            return_outputs=False,
            **kwargs,
        )
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        for loss in losses:
            total += loss.detach()
        return total

    def evaluate(self, batches: Sequence[Batch]) -> list[float]:
        """Return the mean loss of each batch on the last stage, [] on the others. Collective."""
        args, kwargs = self._inputs(batches)
        with torch.no_grad():
            found = self._schedule(len(batches), trains=False).eval(*args, **kwargs)
        return found.tolist() if self.is_last else []

    def _inputs(self, batches: Sequence[Batch]) -> tuple[tuple[torch.Tensor, ...], Batch]:
        """Return what the schedule cuts into micro-batches again: (positional, keyword)."""
        fill = {"input_ids": self.padding, "labels": IGNORE}
        # Padding comes after all tokens of a sample, as in `Samples.batch`
        whole = {
            name: torch.cat(
                [F.pad(b[name], (0, self.seq - b[name].shape[1]), value=fill.get(name, 0)) for b in batches]
            ).to(self.device)
            for name in batches[0]
        }  # fmt: skip
        tokens, labels = whole.pop("input_ids"), whole.pop("labels")
        if self.is_last:
            whole["labels"] = labels
        return (tokens,) if self.stage == 0 else (), whole

    def _schedule(self, count: int, trains: bool) -> Any:
        if (count, trains) not in self._schedules:
            stage = PipelineStage(
                self.model, self.stage, self.stages, self.device, group=self.group
            )
            make = Schedule1F1B if trains and count >= self.stages else ScheduleGPipe
            # Losses are weighted: gradients are sums over the micro-batches, not means
            self._schedules[count, trains] = make(
                stage, count, loss_fn=self._loss if trains else None, scale_grads=False
            )
        return self._schedules[count, trains]

    def _loss(self, mean: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._scaled((mean * weight).sum())
