"""Batch sizes, and the data loader that `initialize` and `engine.deepspeed_io` make."""

from __future__ import annotations

import dataclasses
from typing import Any

from onefold.deepspeed.config import BatchSizes, resolve_batch_sizes
from onefold.deepspeed.facts import EngineFacts
from onefold.device import available


def data_loader(
    data: Any,
    batch_size: int | None,
    rank: int,
    world_size: int,
    *,
    collate_fn: Any = None,
    drop_last: bool = False,
    shuffle: bool = True,
    sampler: Any = None,
    workers: int = 0,
    pin_memory: bool = True,
) -> Any:
    """Make a loader of micro-batches of this rank's share of the data. With `pin_memory` its
    batches are in pinned memory if there is an accelerator.

    `loader.sampler.set_epoch` changes the order.
    """
    from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

    if sampler is None and not isinstance(data, IterableDataset):
        sampler = DistributedSampler(
            data, num_replicas=world_size, rank=rank, shuffle=shuffle, drop_last=drop_last
        )
    return DataLoader(
        data,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=drop_last,
        num_workers=workers,
        pin_memory=pin_memory and available(),
    )


class MicroBatches(EngineFacts):
    """The part of `DeepSpeedEngine` that makes data loaders and changes batch sizes."""

    collate_fn: Any

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches in a step; the micro-batch size stays.

        Raises:
            ValueError: `train_batch_size` is not a multiple of micro-batch size x ranks.
        """
        batch = self.settings.batch
        self._set_batch(resolve_batch_sizes(train_batch_size, batch.micro, None, self.world_size))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch size; the number of micro-batches in a step stays."""
        accumulation = self._accumulation
        self._set_batch(resolve_batch_sizes(None, micro_batch_size, accumulation, self.world_size))

    def _set_batch(self, batch: BatchSizes) -> None:
        self.settings = dataclasses.replace(self.settings, batch=batch)
        self._accumulation = batch.accumulation or 1

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """Make a loader of this rank's share of the data, shuffled if `route` is "train".

        Args:
            batch_size: None takes the micro-batch size.
            collate_fn: None takes the one that `initialize` was given.
            num_local_io_workers: number of processes that read; None reads in this process.
            pin_memory: whether batches are in pinned memory, if there is an accelerator.
        """
        return data_loader(
            dataset,
            self.settings.batch.micro if batch_size is None else batch_size,
            self.global_rank,
            self.world_size,
            collate_fn=self.collate_fn if collate_fn is None else collate_fn,
            drop_last=self.settings.drop_last,
            shuffle=route == "train",
            sampler=data_sampler,
            workers=num_local_io_workers or 0,
            pin_memory=pin_memory,
        )
