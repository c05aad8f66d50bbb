"""`initialize`: make DeepSpeed's four-tuple from a model and a DeepSpeed configuration.

    configuration -> Recipe -> onefold.shard(model) -> optimizer -> schedule -> data loader ->
    engine

An optimizer made before this call stays valid: sharding keeps the Parameter objects and changes
what they hold.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import onefold
from onefold.deepspeed import muon
from onefold.deepspeed.autocast import mark_for_the_wire
from onefold.deepspeed.config import DeepSpeedConfig, read_deepspeed, refuse_auto
from onefold.deepspeed.config.classes import optimizer_class
from onefold.deepspeed.engine import DeepSpeedEngine
from onefold.deepspeed.schedules import build_schedule
from onefold.device import available, backend_name, default_device, of_local_rank, set_default
from onefold.recipe import Recipe
from onefold.runtime.hooks import engine_of, is_sharded
from onefold.unshard import unshard

logger = logging.getLogger("onefold")
OptimizerLike = torch.optim.Optimizer | Callable[[list[Any]], torch.optim.Optimizer]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: OptimizerLike | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    mesh_param: Any = None,
    config_params: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    group: Any = None,
    units: Sequence[str | type] | None = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Shard `model` as a DeepSpeed configuration says, and return DeepSpeed's four-tuple.

    Args:
        args: parsed arguments; `args.deepspeed_config` may name the configuration instead of
            `config`.
        model: the module, not yet wrapped; it is sharded in place.
        optimizer: a torch optimizer over (some of) the model's parameters, or a function that makes
            one from parameters. It takes precedence over the configuration's optimizer.
        model_parameters: parameters or parameter groups to train; None takes all that require a
            gradient.
        training_data: a dataset; each rank reads its share in micro-batches.
        lr_scheduler: a schedule, or a function that makes one from the optimizer. It takes
            precedence over the configuration's schedule.
        distributed_port: port of rank 0, if the launcher set none.
        dist_init_required: whether to join the process group that the launcher's environment
            describes, if none exists. None joins if the environment describes one, True raises if
            it does not, and False never joins.
        collate_fn: as in torch's DataLoader.
        config: a dict, or the path of a JSON file.
        config_params: another name of `config`.
        group: as in `onefold.shard`.
        units: as in `onefold.shard`.

    Returns:
        engine, optimizer, data loader, schedule; what was not asked for is None.

    Raises:
        ValueError: the configuration or the arguments contradict themselves (see `read_deepspeed`);
            the configuration says "auto" for a value that decides what is trained; a model in
            training mode has no optimizer.
        NotImplementedError: the configuration asks for something that Onefold does not do.
        TierError: state is to be stored on NVMe, but a folder does not exist or its disk is too
            full; raised on every rank.
    """
    if model is None:
        raise ValueError(
            "initialize was given no model: pass model=, an nn.Module that is not wrapped yet."
        )
    if mpu is not None or mesh_param is not None:
        raise NotImplementedError(
            "mpu and mesh_param: other parallel axes than data are not built yet; leave them out."
        )
    join(dist_init_required, distributed_port)
    world_size = world_size_of(group)
    read = read_deepspeed(chosen_config(args, config, config_params), world_size)
    refuse_auto(read.undecided(optimizer is not None, lr_scheduler is not None))
    chosen = list(model_parameters) if model_parameters is not None else None
    return assemble(
        model,
        read,
        optimizer=optimizer,
        model_parameters=chosen,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        collate_fn=collate_fn,
        group=group,
        units=units,
    )


def assemble(
    model: nn.Module,
    read: DeepSpeedConfig,
    *,
    optimizer: OptimizerLike | None,
    model_parameters: list[Any] | None,
    training_data: Any,
    lr_scheduler: Any,
    collate_fn: Callable[..., Any] | None,
    group: Any = None,
    units: Sequence[str | type] | None = None,
    must_train: bool = True,
    again: bool = False,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Make the four-tuple of `initialize` from a configuration that was read.

    Args:
        must_train: refuse a model in training mode that has no optimizer.
        again: take the model over if it belongs to another engine already.
    """
    if read.batch.train is None:
        raise ValueError(
            "the configuration has no batch size: set train_micro_batch_size_per_gpu, or"
            " train_batch_size."
        )
    _check_parameters(model, optimizer, model_parameters)
    _check_schedule(optimizer, lr_scheduler)
    if must_train:
        _check_optimizer(model, read, optimizer, lr_scheduler)
    recipe = Recipe.zero(**_recipe_arguments(read, optimizer))
    if again and is_sharded(model) and engine_of(model).recipe != recipe:
        unshard(model)
    if not (again and is_sharded(model)):
        if read.autocast is not None:
            mark_for_the_wire(model, read.autocast)
        onefold.shard(model, recipe, group=group, units=units, device=_device())
    read.buffer_dtypes.cast(model)
    trained = (
        model_parameters
        if model_parameters is not None
        else [p for p in model.parameters() if p.requires_grad]
    )
    torch_optimizer = _optimizer(model, read, optimizer, trained)
    _refuse_fp16_states(recipe, torch_optimizer)
    schedule = _schedule(read, lr_scheduler, torch_optimizer)
    engine = DeepSpeedEngine(model, read, torch_optimizer, schedule)
    engine.collate_fn, rank = collate_fn, engine.global_rank
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data)
    if rank == 0 and read.notes:
        logger.warning(
            "DeepSpeed configuration:\n%s", "\n".join(f"  - {note}" for note in read.notes)
        )
    return engine, torch_optimizer, engine.training_dataloader, schedule


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the arguments that DeepSpeed's launcher passes: --deepspeed, --deepspeed_config,
    --local_rank.
    """
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument(
        "--deepspeed", action="store_true", help="accepted; initialize() needs no switch"
    )
    group.add_argument(
        "--deepspeed_config", default=None, metavar="FILE", help="the configuration, a JSON file"
    )
    group.add_argument(
        "--local_rank",
        type=int,
        default=-1,
        help="accepted; the launcher's environment is what counts",
    )
    return parser


def chosen_config(args: Any, config: Any, config_params: Any) -> Any:
    given = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    named = {name: value for name, value in given.items() if value is not None}
    if not named:
        raise ValueError(
            "initialize was given no configuration: pass config=, a dict or the path of a JSON"
            " file."
        )
    if len(named) > 1:
        raise ValueError(
            f"the configuration was given more than once, by {' and '.join(named)}: keep one."
        )
    return next(iter(named.values()))


def join(required: bool | None, port: int) -> None:
    """Join the process group that the launcher's environment variables describe.

    torchrun, Slurm wrappers and others set these variables.
    """
    if not dist.is_available() or dist.is_initialized() or required is False:
        return
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        if required:
            raise ValueError(
                "dist_init_required=True, but RANK and WORLD_SIZE are not set: start with torchrun."
            )
        return
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(port))
    dist.init_process_group(backend_name(default_device()))


def world_size_of(group: Any) -> int:
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    return dist.get_world_size(group.get_group() if hasattr(group, "get_group") else group)


def _device() -> torch.device | None:
    """Return this rank's accelerator; None if there is none, which leaves the model where it is."""
    if not available():
        return None
    device = of_local_rank(default_device().type, int(os.environ.get("LOCAL_RANK", 0)))
    set_default(device)
    return device


def _check_parameters(model: nn.Module, optimizer: Any, chosen: list[Any] | None) -> None:
    """Raise ValueError for a parameter of another model, or an optimizer that has stepped."""
    groups: list[Any] = list(chosen or [])
    if isinstance(optimizer, torch.optim.Optimizer):
        groups += optimizer.param_groups
        if optimizer.state:
            raise ValueError(
                "the optimizer has stepped already, so its states have the shapes of whole"
                " parameters: call initialize before its first step."
            )
    own = {id(p) for p in model.parameters()}
    for entry in groups:
        for parameter in entry["params"] if isinstance(entry, Mapping) else [entry]:
            if id(parameter) not in own:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} to be trained is not one of the"
                    " model's: pass model.parameters(), or an optimizer over them, of the model"
                    " that is given here."
                )


def _check_optimizer(
    model: nn.Module, read: DeepSpeedConfig, given: Any, lr_scheduler: Any
) -> None:
    """Raise ValueError if a model in training mode, or a schedule, has no optimizer.

    A model that is only evaluated needs none.
    """
    if given is not None or read.optimizer is not None:
        return
    if read.scheduler is not None or lr_scheduler is not None:
        raise ValueError(
            "the configuration names a scheduler but there is no optimizer: name one too, or pass"
            " optimizer=."
        )
    if model.training and any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            'there is no optimizer: the configuration has no "optimizer", and initialize was given'
            ' none. Write one, as in {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}, or'
            " pass optimizer=. For evaluation alone call model.eval() before initialize."
        )


def _recipe_arguments(read: DeepSpeedConfig, given: OptimizerLike | None) -> dict[str, Any]:
    """Return the arguments of `Recipe.zero`, now that the optimizer is known: Adam over master
    weights in 16 bits keeps its moments in fp32, unless the file says otherwise.
    """
    arguments = read.recipe_arguments
    if (
        isinstance(given, (torch.optim.Adam, torch.optim.AdamW))
        and "master_dtype" in arguments
        and not read.short_states
    ):
        return {**arguments, "moments": "fp32"}
    return arguments


def _refuse_fp16_states(recipe: Recipe, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise ValueError for an optimizer that would divide by a state that it keeps in fp16."""
    if optimizer is None or recipe.masters_dtype != torch.float16 or recipe.moments is not None:
        return
    if any("eps" in group for group in optimizer.param_groups):
        raise ValueError(
            f"fp16_master_weights_and_grads with {type(optimizer).__name__}: its states would be"
            " fp16 too, where squares of small gradients are 0, so that its steps come out many"
            " times too large. Name Adam or AdamW in the configuration, pass an object of theirs"
            " as optimizer=, or leave fp16_master_weights_and_grads out."
        )


def _check_schedule(optimizer: Any, lr_scheduler: Any) -> None:
    """Raise ValueError for a schedule of an optimizer that the engine does not have."""
    made_here = optimizer is None or callable(optimizer)
    if made_here and isinstance(lr_scheduler, torch.optim.lr_scheduler.LRScheduler):
        raise ValueError(
            f"lr_scheduler is a {type(lr_scheduler).__name__} over an optimizer that was made"
            " outside, and the engine makes its own: pass that optimizer as optimizer=, or a"
            " function of an optimizer as lr_scheduler=."
        )


def _optimizer(
    model: nn.Module, read: DeepSpeedConfig, given: OptimizerLike | None, parameters: list[Any]
) -> torch.optim.Optimizer | None:
    if isinstance(given, torch.optim.Optimizer):
        return given
    if given is not None:
        if not callable(given):
            raise ValueError(
                f"optimizer is a {type(given).__name__}: expected a torch optimizer or a function"
                " of parameters."
            )
        return given(parameters)
    if read.optimizer is None:
        return None
    if not parameters:
        raise ValueError(
            f"the configuration names the optimizer {read.optimizer.given!r}, but no parameter of"
            ' the model requires a gradient: leave "optimizer" out to evaluate alone, or unfreeze'
            " some."
        )
    if read.optimizer.name == "Muon":
        if onefold.engine_of(model).recipe.optimizer.tier.on_disk:
            raise ValueError(
                'optimizer.type="Muon" with states on NVMe: Muon steps whole matrices, and states on'
                ' a disk are stepped chunk by chunk. Use offload_optimizer {"device": "cpu"}, or'
                " another optimizer."
            )
        return muon.make(model, parameters, read.optimizer.params)
    return optimizer_class(read.optimizer.name)(parameters, **read.optimizer.params)


def _schedule(read: DeepSpeedConfig, given: Any, optimizer: torch.optim.Optimizer | None) -> Any:
    if given is not None:
        return given(optimizer) if callable(given) else given
    if read.scheduler is None:
        return None
    assert optimizer is not None  # see _check_optimizer
    return build_schedule(read.scheduler, optimizer)
