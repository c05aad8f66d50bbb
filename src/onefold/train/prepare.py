"""From a configuration to everything a loop needs: model, data, stage, sharded module,
optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import onefold
from onefold.observe.trace import Recording
from onefold.offload.nvme import TierError
from onefold.plan.schema import Account
from onefold.train.batch import accumulation_steps, micro_batch_that_divides
from onefold.train.blocks import checkpoint_activations, compile_blocks
from onefold.train.choose import Asked, Choice, choose
from onefold.train.config import DEFAULT_STEPS, TrainConfig
from onefold.train.data import Data, load_data
from onefold.train.documents import read_documents
from onefold.train.errors import TrainError
from onefold.train.groups import names_without_decay, parameter_groups
from onefold.train.models import Loaded, load_on_first_rank
from onefold.train.order import DataOrder, fingerprint_of
from onefold.train.ranks import Ranks
from onefold.train.resume import Point
from onefold.train.schedule import lr_factor, steps_of, warmup_steps
from onefold.train.stop import Stop
from onefold.train.tiers import tier_arguments
from onefold.train.wires import refuse_frozen, refuse_groups, wire_arguments


@dataclass
class Run:
    """A run that is ready to step.

    Attributes:
        start: steps that were done before, in an earlier start. earlier: what that start kept
            beside its checkpoint.
        stopped: why the steps end before the last one.
    """

    config: TrainConfig
    ranks: Ranks
    loaded: Loaded
    data: Data
    choice: Choice
    recipe: onefold.Recipe
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Any
    order: DataOrder
    steps: int
    accumulation: int
    factor: Callable[[int], float]
    trained: int
    frozen: int
    recording: Recording | None = None  # of one step, once it was run
    measured: Account | None = None
    start: int = 0
    earlier: dict[str, Any] = field(default_factory=dict)
    stopped: Stop = Stop.NONE


def prepare(
    config: TrainConfig, ranks: Ranks, note: Callable[[str], None], point: Point | None = None
) -> Run:
    """Load, choose, shard. Collective: every rank calls it with the same configuration.

    Args:
        note: tells the user what is being done, a line at a time.
        point: the checkpoint that the run will go on from (`resume.load` does); its global batch
            stays, whatever the ranks are now.
    """
    if point is not None and point.global_batch is not None:
        config = _with_global_batch(config, point.global_batch, ranks, note)
    refuse_groups(config, ranks.world_size)
    (free,) = ranks.least(ranks.free_memory())
    note(f"reading {config.data}")
    documents = read_documents(config.data)  # what cannot be read is told before a model is loaded
    note(f"loading {config.model}")
    loaded = load_on_first_rank(config.model, config.tokenizer, config.seed, config.seq, ranks)
    if loaded.tokenizer is None:
        raise TrainError(
            f"--model {config.model} came without a tokenizer and none is installed; name one with"
            " --tokenizer."
        )
    data = load_data(
        config.data, loaded.tokenizer, config.seq, config.seed, config.eval_fraction, documents
    )
    _check_vocabulary(loaded)
    model = loaded.module
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters()) - trained
    refuse_frozen(config, frozen)
    if getattr(model, "config", None) is not None and hasattr(model.config, "use_cache"):
        # A cache of keys and values is of no use in training; sampling asks for it
        model.config.use_cache = False
    choice = _choice(config, ranks, model, int(free), note)
    global_batch = config.global_batch or choice.micro_batch * ranks.world_size
    accumulation = accumulation_steps(global_batch, choice.micro_batch, ranks.world_size)
    order = DataOrder(len(data.train), global_batch, config.seed, fingerprint_of(data.train))
    steps = config.steps or DEFAULT_STEPS
    if config.epochs is not None:
        steps = max(1, math.ceil(config.epochs * len(data.train) / global_batch))

    steps_of(config.trace, steps)  # said before anything long begins
    recipe = _recipe(config, choice.stage)
    no_decay = names_without_decay(model)
    checkpoint_activations(model, config.activation_checkpointing)
    note(f"dividing {trained + frozen:,} parameters among {ranks.world_size} ranks")
    try:
        model = onefold.shard(model, recipe, device=ranks.device)
    except (ValueError, TierError) as error:
        raise TrainError(str(error)) from error
    if config.compile:
        compile_blocks(model)
    optimizer = _optimizer(config, model, no_decay, ranks)
    scaler = onefold.GradScaler(model) if config.precision == "fp16" else None
    # Dropout differs from rank to rank; everything drawn before this line was the same everywhere.
    torch.manual_seed(config.seed + 1_000_003 * (ranks.rank + 1))
    warmup = warmup_steps(config.warmup, steps)
    factor = lr_factor(config.schedule, steps, warmup, config.min_lr)
    return Run(
        config, ranks, loaded, data, choice, recipe, model, optimizer, scaler, order, steps, accumulation, factor, trained, frozen
    )  # fmt: skip


def _with_global_batch(
    config: TrainConfig, global_batch: int, ranks: Ranks, note: Callable[[str], None]
) -> TrainConfig:
    """`config` with the global batch of the run that goes on, and a micro-batch that divides it.

    Raises:
        TrainError: another one was asked for, or these ranks cannot share it.
    """
    if config.global_batch not in (None, global_batch):
        raise TrainError(
            f"--global-batch {config.global_batch}: the run to go on with has {global_batch}, which"
            " decides the samples of every step. Leave the option out, or start another run from"
            " the exported model (--model)."
        )
    wanted = config.micro_batch if config.micro_batch != "auto" else global_batch
    micro_batch = micro_batch_that_divides(wanted, global_batch, ranks.world_size)
    if config.micro_batch == "auto" or micro_batch == wanted:
        return config.model_copy(update={"global_batch": global_batch})
    note(
        f"micro-batches of {micro_batch} instead of {wanted}, so that {ranks.world_size} ranks"
        f" share the global batch of {global_batch}"
    )
    return config.model_copy(update={"global_batch": global_batch, "micro_batch": micro_batch})


def _choice(
    config: TrainConfig, ranks: Ranks, model: nn.Module, free: int, note: Callable[[str], None]
) -> Choice:
    """What the first rank chooses, on every rank. Collective."""
    asked = Asked(
        stage=config.stage,
        micro_batch=0 if config.micro_batch == "auto" else config.micro_batch,
        global_batch=config.global_batch or 0,
        seq=config.seq,
        precision=config.precision,
        checkpointing=config.activation_checkpointing,
        ranks=ranks.world_size,
        local_ranks=ranks.local_world_size,
        free=free,
        device=ranks.device.type,
        reduce_at=config.reduce_at,
        units=config.units,
        tiers=tuple(tier_arguments(config).items()),
        wires=tuple(wire_arguments(config).items()),
    )
    note("planning: what each stage would hold")
    found: Choice | TrainError | None = None
    if ranks.is_first:
        try:
            found = choose(model, asked)
        except TrainError as error:
            found = error
    found = ranks.from_first(found)
    if isinstance(found, TrainError):
        raise found
    assert found is not None
    return found


def _recipe(config: TrainConfig, stage: int) -> onefold.Recipe:
    try:
        return config.recipe(stage)
    except ValueError as error:
        raise TrainError(str(error)) from None


def _optimizer(
    config: TrainConfig, model: nn.Module, no_decay: frozenset[str], ranks: Ranks
) -> torch.optim.Optimizer:
    # A tile of a weight is decayed as the weight would be: it is known here by the weight's name.
    known = {id(entry.param): entry.part.names[0] for entry in onefold.engine_of(model).entries}
    named = [(known.get(id(p), name), p) for name, p in model.named_parameters()]
    groups = parameter_groups(named, no_decay, config.weight_decay)
    if not groups:
        raise TrainError(
            f"--model {config.model} has no parameter that requires a gradient: there is nothing to"
            " train."
        )
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


def _check_vocabulary(loaded: Loaded) -> None:
    size = getattr(getattr(loaded.module, "config", None), "vocab_size", None)
    if loaded.tokenizer is not None and isinstance(size, int) and len(loaded.tokenizer) > size:
        raise TrainError(
            f"the tokenizer has {len(loaded.tokenizer)} tokens, the model {loaded.name} only"
            f" {size}: they do not belong together; choose another --tokenizer."
        )
