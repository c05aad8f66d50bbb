"""Prepare everything that the loop needs from a configuration: model, data, stage, sharded module,
optimizer, schedule.

[Note: the choice of a stage] `--stage auto` is the lowest stage whose peak memory fits on every rank, and
`--micro-batch auto` the largest micro-batch that fits.

The first rank traces the model and asks the plan (`onefold.plan`); the others take its answer. One
rank uses stage 0, because there is nothing to divide, unless the options need stage 3 or nothing fits.
A model whose code cannot be traced gets the stage that needs least. The plan accounts for offloaded
state (plan/offloaded.py).

With tensor or expert parallelism the plan counts a rank of the mesh.
"""

from __future__ import annotations

import inspect
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import onefold
from onefold.data.order import DataOrder
from onefold.data.samples import Data, load_data
from onefold.data.tokens import tokens_of
from onefold.memory import free_host_memory
from onefold.models.adapters import with_adapters
from onefold.models.build import Loaded, load_on_first_rank
from onefold.models.names import kind_of
from onefold.models.parallel import AXES, DATA, parallelize
from onefold.observe.trace import Recording
from onefold.offload.nvme import TierError
from onefold.plan.account import Candidate, in_a_line
from onefold.plan.api import machine_here, planned
from onefold.plan.modules import model_shape
from onefold.plan.owned import stepped_whole
from onefold.plan.schema import Account
from onefold.processes.ranks import Ranks
from onefold.processes.signals import Stop
from onefold.recipe.core import NODES
from onefold.recipe.optimizers import PLANNED, TRAINED, WHOLE
from onefold.tracing.blocks import compile_blocks, recompute
from onefold.train import optimizers
from onefold.train.config import DEFAULT_STEPS, TrainConfig, with_precision
from onefold.wording import TrainError

if TYPE_CHECKING:
    from onefold.train.checkpoints import Point


def names_without_decay(module: nn.Module) -> frozenset[str]:
    """Return the names, before sharding, of the parameters that weight decay skips.
    A tied weight goes by its first name: an embedding that is also the output layer counts as an
    embedding.
    """
    out: set[str] = set()
    for prefix, owner in module.named_modules():
        embeds = isinstance(owner, nn.Embedding | nn.EmbeddingBag)
        skips = embeds or "norm" in type(owner).__name__.lower()
        for name, parameter in owner.named_parameters(prefix, recurse=False):
            if skips or parameter.ndim < 2 or name.endswith("bias"):
                out.add(name)
    return frozenset(out)


def hidden_matrices(module: nn.Module) -> frozenset[str]:
    """Return the names, before sharding, of the matrices that Muon is meant for, as the plan counts
    them: all but embeddings and the head.
    """
    return stepped_whole(model_shape(module), "muon")


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    no_decay: frozenset[str],
    weight_decay: float,
    matrices: frozenset[str] | None = None,
) -> list[dict[str, Any]]:
    """Return the optimizer's groups, with and without weight decay. Leaves out frozen parameters.

    Args:
        matrices: the names of those that Muon steps, in groups of their own; None: there is no
            Muon.
    """
    found: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            by_muon = matrices is not None and name in matrices
            found.setdefault((by_muon, name in no_decay), []).append(parameter)
    return [
        {"params": params, "weight_decay": 0.0 if skips else weight_decay}
        | ({} if matrices is None else {"use_muon": by_muon})
        for (by_muon, skips), params in sorted(found.items(), key=lambda item: item[0])
    ]


#: Share of the run that is the decay phase of "wsd" (warm-up, stable, decay).
WSD_DECAY = 0.2


def lr_factor(kind: str, steps: int, warmup: float, minimum: float) -> Callable[[int], float]:
    """Return step (from 0) -> factor on the peak learning rate, over a run of `steps`.

    Warm-up gives (step + 1) / (warmup + 1), so the first step already learns. After the last step
    the factor is `minimum`.

    Args:
        kind: "constant", "cosine", "linear" or "wsd".
        warmup: if 1 or more, the steps before the peak; below 1, the share of `steps` (rounded).
    """
    warmup = round(warmup) if warmup >= 1 else round(warmup * steps)
    falls = {"constant": math.inf, "wsd": steps - max(1, round(WSD_DECAY * steps))}
    start = max(falls.get(kind, warmup), warmup)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if step < start:
            return 1.0
        progress = min(1.0, (step - start) / max(1, steps - start))
        fall = 0.5 * (1 + math.cos(math.pi * progress)) if kind == "cosine" else 1 - progress
        return minimum + (1 - minimum) * fall

    return factor


@dataclass(frozen=True)
class Choice:
    """What was chosen and why.

    Attributes:
        stage: 0 to 3. micro_batch: sequences a rank computes at once.
        reason: one sentence.
        needed: {stage: bytes of one rank at peak}; {} if the model could not be traced.
        available: bytes that the run may use on the rank that has the least.
        planned: the chosen stage in the plan, None if the model could not be traced.
        flops_per_token: model FLOPs. peak_flops: measured FLOP/s of a rank's hardware, None if
            nobody measured it.
        notes: where the figures are not quite those of the run.
    """

    stage: int
    micro_batch: int
    reason: str
    needed: Mapping[int, int]
    available: int
    planned: Candidate | None = None
    flops_per_token: float | None = None
    peak_flops: float | None = None
    notes: tuple[str, ...] = ()


def choose(model: nn.Module, config: TrainConfig, ranks: Ranks, free: int) -> Choice:
    """Choose the stage that was asked for, or the lowest that fits. `free`: bytes on the rank that has
    the least.
    Raises TrainError for a batch or a mesh that does not divide.
    """
    try:
        return _planned(model, config, ranks, free)
    except Exception as error:
        known = config.axes or "does not divide" in str(error)
        if isinstance(error, ValueError) and known:
            raise TrainError(str(error)) from None
        # A model's code may fail in any way under a trace, and still train
        why = f"{type(error).__name__}: {str(error)[:120]}"
    stage = 3 if config.stage == "auto" else int(config.stage)
    if config.stage == "auto" and ranks.world_size == 1:
        with suppress(ValueError):  # the options need stage 3
            stage = config.recipe(0).stage
    reason = (
        f"stage {stage}, which needs least: the model could not be traced ({why}), so nothing is known"
        " of the others"
    )
    return Choice(stage, config.job().micro_batch or 1, reason, {}, free)


def _planned(model: nn.Module, config: TrainConfig, ranks: Ranks, free: int) -> Choice:
    """Choose by the account of each stage, on a mesh of --tp and --ep if there is one. Raises
    ValueError: it is not possible for the model.
    """
    job, mesh, notes, more = config.job(), bool(config.axes), list[str](), dict[str, Any]()
    if mesh:
        more["axes"] = {"tp": config.tp, "ep": config.ep, "sequence_parallel": False}
        count = ranks.world_size // config.tp
        job = replace(job, global_batch=job.global_batch or job.micro_batch * count)
        if PLANNED[job.optimizer].update == WHOLE:
            counted = PLANNED[job.optimizer].rest or "sgd-momentum"
            notes.append(f"on a mesh states of {job.optimizer} are counted as {counted} has them")
            job = replace(job, optimizer=counted)
        if config.arguments(NODES):
            notes.append("on a mesh the plan does not count groups")

    def batch(samples: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros((samples, job.seq), dtype=torch.long, device="cpu")
        return {"input_ids": ids, "labels": ids.clone()}

    beside = free_host_memory(), math.inf  # the disks are looked at before the run itself
    # Measured speeds are not by axis
    machine = machine_here(
        ranks.world_size, ranks.local_world_size, free, ranks.device.type, beside, not mesh
    )
    stages: tuple[int, ...] = (1, 2, 3) if mesh else ()
    if config.stage != "auto":
        stages = (int(config.stage),)
    found = planned(model, machine, job, stages=stages, batch=batch, largest=False, **more)
    chosen = found.shown
    if mesh:  # where the plan recommends the fastest
        chosen = next((c for c in found.stages if c.fits), chosen)
    why = "the lowest that fits" if config.stage == "auto" else "as asked"
    why = why if chosen.fits else "it may run out of memory"
    return Choice(
        chosen.scheme.stage,
        chosen.scheme.micro_batch,
        f"{in_a_line(chosen)}; {why}",
        {c.scheme.stage: c.needed for c in (*found.stages, chosen)},
        chosen.usable,
        chosen,
        found.model.flops_per_token(job.seq),
        machine.peak(job.precision or "fp32") if machine.is_timed else None,
        tuple(notes),
    )


@dataclass
class Run:
    """A run that is ready to step.

    Attributes:
        part: the number of the part of each batch that this rank computes, of so many `parts`. Each is
            computed by --tp ranks, which divide the layers.
        start: steps done before this start of the run.
        stopped: why the steps ended before the last one.
    """

    config: TrainConfig
    ranks: Ranks
    part: int
    parts: int
    loaded: Loaded
    data: Data
    choice: Choice
    recipe: onefold.Recipe
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Any
    order: DataOrder
    steps: int
    factor: Callable[[int], float]
    trained: int
    frozen: int
    recording: Recording | None = None  # of one step, once that step has run
    measured: Account | None = None
    start: int = 0
    stopped: Stop = Stop.NONE


def prepare(
    config: TrainConfig, ranks: Ranks, note: Callable[[str], None], point: Point | None = None
) -> Run:
    """Load the model and data, choose the stage, shard the model.
    Collective: every rank calls it with the same configuration.
    `note` tells the user what is being done. If the run resumes from `point`
    (`checkpoints.load`), it keeps the global batch of `point`.
    """
    part, parts = ranks.rank // config.tp, config.data_ranks(ranks.world_size)
    if point is not None:
        config = _going_on(config, point, parts, note)
    free = ranks.least(ranks.free_memory())
    note(f"loading {config.model}")
    loaded = load_on_first_rank(
        config.model, config.tokenizer, config.seed, config.seq, ranks, note
    )
    config = with_precision(config)  # known now, if the model was just downloaded
    if loaded.tokenizer is None:
        raise TrainError(
            f"--model {config.model} came without a tokenizer and none is installed; name one with"
            " --tokenizer."
        )
    for said in loaded.notes:
        note(said)
    data = _data(config, loaded.tokenizer, ranks, note)
    _check_model(config, loaded, data)
    if config.lora is not None:
        loaded.module = with_adapters(config, loaded)
    model = loaded.module
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters()) - trained
    if config.frozen is not None and not frozen:
        raise TrainError(
            f"--frozen {config.frozen}: every parameter of {config.model} is trained. Leave it out, or"
            " train adapters (--lora 16), or give a model whose factory freezes weights."
        )
    if getattr(model, "config", None) is not None and hasattr(model.config, "use_cache"):
        # The key-value cache is useless in training; `export` turns it on
        model.config.use_cache = False
    note("planning: what each stage would hold")
    choice = ranks.on_first(lambda: choose(model, config, ranks, int(free)))
    for said in choice.notes:
        note(said)
    global_batch = config.global_batch or choice.micro_batch * parts
    order = data.order(global_batch, config.seed)
    steps = config.steps or DEFAULT_STEPS
    if config.epochs is not None:
        steps = max(1, math.ceil(config.epochs * data.size() / global_batch))

    no_decay = names_without_decay(model)
    by_muon = hidden_matrices(model) if TRAINED[config.optimizer].rest else None
    try:
        recompute(model, config.activation_checkpointing)
        recipe = config.recipe(choice.stage)
        note(f"dividing {trained + frozen:,} parameters among {ranks.world_size} ranks")
        model = _sharded(loaded, recipe, config, ranks)
        if config.compile:
            compile_blocks(model, "--compile")
    except (ValueError, TierError) as error:
        raise TrainError(str(error)) from error
    groups = parameter_groups(model.named_parameters(), no_decay, config.weight_decay, by_muon)
    if not groups:
        raise TrainError(
            f"--model {config.model} has no parameter that requires a gradient: there is nothing to"
            " train."
        )
    optimizer = optimizers.make(config, groups, ranks.device.type)
    scaler = onefold.GradScaler(model) if config.precision == "fp16" else None
    # Everything drawn before this line is the same on all ranks; from here on dropout differs, but
    # between ranks that compute with the same samples
    torch.manual_seed(config.seed + 1_000_003 * (part + 1))
    factor = lr_factor(config.schedule, steps, config.warmup, config.min_lr)
    return Run(
        config, ranks, part, parts, loaded, data, choice, recipe, model, optimizer, scaler, order, steps, factor, trained, frozen,
    )  # fmt: skip


def _sharded(
    loaded: Loaded, recipe: onefold.Recipe, config: TrainConfig, ranks: Ranks
) -> nn.Module:
    """Shard the model with the weights of rank 0 or of the model's folder. Collective."""
    model: Any = loaded.module
    device, more = ranks.device, dict[str, Any]()
    whole: dict[str, torch.Tensor] | None = None
    if config.axes:
        # Each rank needs values for its own parts, or none: the first rank's wait beside the model
        if loaded.weights is None and kind_of(config.model) != "factory" and ranks.world_size > 1:
            whole = dict(model.state_dict()) if ranks.is_first else {}
            _to_meta(model)
        _, mesh = parallelize(model, device, ranks.world_size, tp=config.tp, ep=config.ep)
        more = {"mesh": mesh[AXES], "data": DATA}
    if loaded.weights is None and whole is None:
        return onefold.shard(model, recipe, device=device, **more)
    # Weights that the folder lacks (a new head, say) are drawn as in transformers, from the seed
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = onefold.shard(
            model, recipe, device=device, init=model._init_weights, weights=loaded.weights, **more
        )
    if whole is not None:
        onefold.load_full_state_dict(model, whole)
    return model


def _to_meta(model: nn.Module) -> None:
    """Move the parameters to the meta device. Buffers stay: the first rank's are sent."""
    named = dict(model.named_parameters(remove_duplicate=False))
    # A tied weight stays one
    meta = {p: nn.Parameter(p.to("meta"), p.requires_grad) for p in named.values()}
    model.load_state_dict({name: meta[p] for name, p in named.items()}, strict=False, assign=True)


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


def _going_on(
    config: TrainConfig, point: Point, ranks: int, note: Callable[[str], None]
) -> TrainConfig:
    """Return `config` with the global batch of the resumed run, and a micro-batch that divides it.
    `ranks`: those that compute with different samples.
    Raises TrainError if the options ask for another global batch or optimizer, or these ranks cannot
    share the batch.
    """
    before = point.extra.get("optimizer", "adamw")  # checkpoints from before --optimizer do not say
    if before != config.optimizer:
        raise TrainError(
            f"{point.path} holds the states of --optimizer {before}, and this run has"
            f" {config.optimizer}. Use --optimizer {before}, or start another run from the exported"
            " model (--model)."
        )
    global_batch, wanted = point.order["global_batch"], config.micro_batch
    if config.global_batch not in (None, global_batch):
        raise TrainError(
            f"--global-batch {config.global_batch}: the run to go on with has {global_batch}, which"
            " decides the samples of every step. Leave the option out, or start another run from"
            " the exported model (--model)."
        )
    most = global_batch if wanted == "auto" else wanted
    size = micro_batch_that_divides(most, global_batch, ranks)
    if wanted not in ("auto", size):
        note(
            f"micro-batches of {size} instead of {wanted}, so that {ranks} ranks share the global"
            f" batch of {global_batch}"
        )
        wanted = size
    return config.model_copy(update={"global_batch": global_batch, "micro_batch": wanted})


def _data(config: TrainConfig, tokenizer: Any, ranks: Ranks, note: Callable[[str], None]) -> Data:
    """Return the data, whose tokens the first rank writes into a folder. Collective."""
    root = config.data_cache or (config.output and os.path.join(config.output, "tokens"))
    aside = nullcontext(root) if root else tempfile.TemporaryDirectory(prefix="onefold-")
    with aside as folder:
        told = config.data, config.text_field, tokenizer, Path(folder), ranks, note
        tokens = tokens_of(*told)
        ranks.gather(None)  # before `aside` goes, all have mapped what is in it
    return load_data(
        config.data, tokens, tokenizer.eos_token_id or 0, config.seq, config.seed, config.eval_fraction, config.pack
    )  # fmt: skip


def _check_model(config: TrainConfig, loaded: Loaded, data: Data) -> None:
    """Raise TrainError if the model does not go with its tokenizer, or with --pack documents."""
    size = getattr(getattr(loaded.module, "config", None), "vocab_size", None)
    tokens = len(loaded.tokenizer or ())
    if isinstance(size, int) and tokens > size:
        raise TrainError(
            f"the tokenizer has {tokens} tokens, the model {loaded.name} only"
            f" {size}: they do not belong together; choose another --tokenizer."
        )
    takes = inspect.signature(loaded.module.forward).parameters
    fits = data.samples.apart and loaded.is_transformers and "position_ids" in takes
    if config.pack == "documents" and not fits:
        raise TrainError(
            "--pack documents needs rows of text (conversations are samples of their own anyway) and a"
            " transformers model that takes position_ids: leave it out."
        )
