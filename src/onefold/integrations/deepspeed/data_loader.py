"""Sizes of batches, and the data loader that `initialize` and `engine.deepspeed_io` make."""

from __future__ import annotations

import dataclasses
from typing import Any

from onefold.device import available
from onefold.integrations.deepspeed.config import BatchSizes, resolve_batch_sizes
from onefold.integrations.deepspeed.facts import EngineFacts


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
) -> Any:
    """Micro-batches of this rank's share of the data, in an order that `loader.sampler.set_epoch`
    changes.
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
        pin_memory=available(),
    )


class MicroBatches(EngineFacts):
    """The part of `DeepSpeedEngine` that reads data and changes the sizes of batches."""

    collate_fn: Any

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change how many micro-batches a step has; their size stays.

        Raises:
            ValueError: it is no multiple of micro-batch x ranks.
        """
        batch = self.settings.batch
        self._set_batch(resolve_batch_sizes(train_batch_size, batch.micro, None, self.world_size))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the size of a micro-batch; how many a step has stays."""
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
        """A loader of this rank's share of the data, in the order of the data unless `route` is
        "train".

        Args:
            batch_size: None takes the micro-batch's. collate_fn: None takes `initialize`'s.
            num_local_io_workers: processes that read; None reads in this one.
            pin_memory: accepted; memory is pinned where a GPU copies from it.
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
        )
