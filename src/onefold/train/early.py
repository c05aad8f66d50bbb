"""Checks of a configuration that need no torch. They take about a second, while loading a model
takes minutes. They change nothing.

    check_early      tokenizer, NVMe folders, --resume, data and model exist and can be read
    data_ranks       the axes divide the ranks; how many compute with different samples
    check_batch      the global batch can be cut on these ranks
"""

from __future__ import annotations

import importlib.util
import os

from onefold.data.sources import check_data
from onefold.data.text import check_tokenizer
from onefold.models.names import check_hub, kind_of
from onefold.train.config import TrainConfig
from onefold.train.optimizers import check_optimizer
from onefold.wording import TrainError, few


def micro_batch_that_divides(wanted: int, global_batch: int, world_size: int) -> int:
    """Return the largest micro-batch, at most `wanted`, into which these ranks can cut the global
    batch of the resumed run. Raises TrainError if there is none.
    """
    share, rest = divmod(global_batch, world_size)
    if rest:
        raise TrainError(
            f"the run goes on with its global batch of {global_batch} sequences, which {world_size}"
            " ranks cannot share equally: start a number of ranks that divides it."
        )
    return max(size for size in range(1, min(wanted, share) + 1) if share % size == 0)


def check_early(config: TrainConfig) -> None:
    """Raise TrainError unless everything that the options name exists and can be read."""
    check_tokenizer(config.tokenizer)
    check_optimizer(config)
    for option, folder in [("nvme", folder) for folder in config.nvme or ()] + [
        ("resume", config.resume)
    ]:
        if folder not in ("none", "auto") and not os.path.exists(folder):
            raise TrainError(f"--{option} {folder}: there is no such folder.")
    check_data(config.data, config.text_field)
    # The model comes last: where the user has named none, the default's package may be missing,
    # and what the user has named wrong is told first
    if kind_of(config.model) == "hub":
        check_hub(config.model)
    if config.lora is not None and importlib.util.find_spec("peft") is None:
        raise TrainError(f"--lora {config.lora} needs peft: pip install peft.")


def data_ranks(config: TrainConfig, ranks: int) -> int:
    """Return how many of the ranks compute with different samples. Raises TrainError if --tp does
    not divide the ranks, or --ep these.
    """
    for name, size, of in (("tp", config.tp, ranks), ("ep", config.ep, ranks // config.tp)):
        if of % size:
            raise TrainError(
                f"--{name} {size} does not divide {of} {'data-parallel ' * (name == 'ep')}ranks: use"
                f" one of {few((str(n) for n in range(1, of + 1) if of % n == 0), 20)}."
            )
    return ranks // config.tp


def check_batch(config: TrainConfig, ranks: int) -> None:
    """Raise TrainError if the axes do not divide these ranks, or the global batch cannot be cut on them.
    A resumed run takes the global batch from the checkpoint, and a micro-batch that divides it. Imports
    torch.
    """
    count = data_ranks(config, ranks)
    config.check_recipe()
    if config.resume == "none":
        try:
            config.job().accumulation(count)
        except ValueError as error:
            raise TrainError(str(error)) from None
