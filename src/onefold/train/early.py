"""Checks of a configuration that need no torch. They take about a second, while loading a model
takes minutes. They change nothing.

    check_early      tokenizer, NVMe folders, --resume, data and model exist and can be read
    data_ranks       the axes divide the ranks; how many compute with different samples
    check_batch      the global batch can be cut on these ranks
    refuse_groups    groups divide the ranks
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from onefold.data.sources import check_data
from onefold.data.text import check_tokenizer
from onefold.models.names import check_hub, kind_of
from onefold.train.config import TrainConfig
from onefold.train.optimizers import check_optimizer
from onefold.wording import TrainError


def accumulation_steps(global_batch: int, micro_batch: int, world_size: int) -> int:
    """Return the micro-batches that a rank computes per optimizer step. `world_size`: of the ranks
    that compute with different samples.
    Raises TrainError if the global batch does not divide.
    """
    at_once = micro_batch * world_size
    if global_batch % at_once:
        lower, upper = global_batch // at_once * at_once, (global_batch // at_once + 1) * at_once
        near = f"{lower} or {upper}" if lower else str(upper)
        raise TrainError(
            f"--global-batch {global_batch} cannot be cut into micro-batches of {micro_batch} on"
            f" {world_size} ranks ({at_once} sequences at once); use {near}, or another"
            " --micro-batch."
        )
    return global_batch // at_once


def micro_batch_that_divides(wanted: int, global_batch: int, world_size: int) -> int:
    """Return the largest micro-batch, at most `wanted`, into which these ranks can cut the global
    batch of the resumed run. Raises TrainError if there is none.
    """
    share, rest = divmod(global_batch, world_size)
    if rest:
        counts = ", ".join(str(n) for n in range(1, 2 * world_size) if global_batch % n == 0)
        raise TrainError(
            f"the run goes on with its global batch of {global_batch} sequences, which {world_size}"
            f" ranks cannot share equally. It can go on with {counts} ranks; a global batch that"
            " every number of ranks divides (such as 24) is safest."
        )
    return max(size for size in range(1, min(wanted, share) + 1) if share % size == 0)


def check_early(config: TrainConfig) -> None:
    """Raise TrainError unless everything that the options name exists and can be read."""
    check_tokenizer(config.tokenizer)
    check_optimizer(config)
    refuse_folders(config)
    if config.resume not in ("none", "auto") and not os.path.exists(config.resume):
        raise TrainError(
            f"--resume {config.resume}: there is no such folder. Expected auto, none, or a folder"
            " such as OUTPUT/checkpoints/step-00000100."
        )
    check_data(config.data, config.seq, config.text_field)
    # The model comes last: where the user has named none, the default's package may be missing,
    # and what the user has named wrong is told first
    if kind_of(config.model) == "hub":
        check_hub(config.model)
    check_lora(config)


def check_lora(config: TrainConfig) -> None:
    """Raise TrainError if the adapters or encoded frozen weights asked for are impossible."""
    if config.lora is not None and importlib.util.find_spec("peft") is None:
        raise TrainError(f"--lora {config.lora} needs peft: pip install peft.")
    if config.lora is None and kind_of(config.model) != "factory":
        refuse_frozen(config, 0)
        if config.merge:
            raise TrainError("--merge is about adapters, and there are none: add --lora 16.")


def data_ranks(config: TrainConfig, ranks: int) -> int:
    """Return how many of the ranks compute with different samples. Raises TrainError if --tp does
    not divide the ranks, or --ep these.
    """
    if ranks % config.tp:
        raise TrainError(
            f"--tp {config.tp} does not divide {ranks} ranks: use {_divisors(ranks)}, or another"
            " number of ranks."
        )
    found = ranks // config.tp
    if found % config.ep:
        raise TrainError(
            f"--ep {config.ep} does not divide the {found} data-parallel ranks: use"
            f" {_divisors(found)}."
        )
    return found


def _divisors(number: int) -> str:
    found = [str(n) for n in range(1, number + 1) if number % n == 0]
    return f"{', '.join(found[:-1])} or {found[-1]}" if len(found) > 1 else found[0]


def check_batch(config: TrainConfig, ranks: int) -> None:
    """Raise TrainError if the global batch cannot be cut on these ranks.
    A resumed run is not checked: it takes the global batch from the checkpoint, and a micro-batch
    that divides it.
    """
    ranks = data_ranks(config, ranks)
    if config.global_batch is not None and config.resume == "none":
        accumulation_steps(
            config.global_batch, 1 if config.micro_batch == "auto" else config.micro_batch, ranks
        )


def refuse_folders(config: TrainConfig) -> None:
    """Raise TrainError for a disk's folder that does not exist, or a token folder that cannot."""
    for folder in config.nvme or ():
        if not os.path.isdir(folder):
            raise TrainError(
                f"--nvme {folder}: there is no such folder; make one on the disk that is to be used."
            )
    cache = Path(config.data_cache or ".")
    for place in (*cache.parents[::-1], cache):
        if os.path.lexists(place) and not place.is_dir():
            raise TrainError(f"--data-cache {config.data_cache}: {place} is a file; name a folder.")


def refuse_groups(config: TrainConfig, ranks: int) -> None:
    """Raise TrainError for groups that do not divide the ranks."""
    from onefold.layout import Topology

    ranks = data_ranks(config, ranks)
    for name in ("group", "shard_group"):
        size = getattr(config, name)
        if isinstance(size, int):
            try:
                Topology(ranks, size)
            except ValueError as error:
                raise TrainError(f"--{name.replace('_', '-')} {size}: {error}") from None


def refuse_frozen(config: TrainConfig, frozen: int) -> None:
    """Raise TrainError if --frozen is given and no parameter is frozen."""
    if config.frozen is not None and not frozen:
        raise TrainError(
            f"--frozen {config.frozen}: every parameter of {config.model} is trained, so none could"
            " are stored encoded. Leave the option out (--gather-codec encodes what is trained while it"
            " travels), or train adapters around it (--lora 16), or give a model with frozen"
            " weights: --model module:factory, whose factory freezes them, or returns one of peft's."
        )
