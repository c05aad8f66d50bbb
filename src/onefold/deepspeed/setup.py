"""`initialize`: make DeepSpeed's four-tuple from a model and a DeepSpeed configuration.

    configuration -> Recipe -> onefold.shard(model) -> optimizer -> schedule -> data loader ->
    engine

An optimizer made before this call stays valid: sharding keeps the Parameter objects and changes
what they hold. transformers, accelerate, TRL and Lightning fill the configuration in themselves,
partly late. So some of what looks incomplete is served:

| the caller gives                              | here                                                         |
|-----------------------------------------------|--------------------------------------------------------------|
| "auto" for what does not decide the training  | counts as not set, where the name `deepspeed` is served      |
| no optimizer, or one whose params are "auto"  | an engine that only computes, such as for a reference model  |
| a dict that the caller goes on using          | the caller's dict stays unchanged                            |
| a model that another engine already has       | the new engine takes it over                                 |
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import onefold
from onefold.deepspeed.checkpoints import whole_in
from onefold.deepspeed.engine import DeepSpeedEngine
from onefold.deepspeed.leaves import mark_configured
from onefold.deepspeed.meaning import BATCH, DeepSpeedConfig, refuse_auto, world_size_of
from onefold.deepspeed.named import make_muon
from onefold.deepspeed.optimizers import count_as
from onefold.deepspeed.precision import mark_for_the_wire
from onefold.deepspeed.reading import DeepSpeedConfigError, is_unset, load
from onefold.deepspeed.serving import serving
from onefold.deepspeed.utilities import get_local_rank, join
from onefold.deepspeed.zero import ParameterOffload, mark
from onefold.device import available, default_device, of_local_rank, set_default
from onefold.hosts import stream_to_vllm
from onefold.layout import LOW
from onefold.optim.muon import MuonWithAdamW
from onefold.optim.states import meet
from onefold.reading import StrPath
from onefold.recipe import COMPUTE_DTYPES, Recipe
from onefold.runtime.flat import BUFFERED, declare
from onefold.runtime.hooks import engine_of, is_sharded
from onefold.sharding import unshard

logger = logging.getLogger("onefold")
__all__ = ["add_config_arguments", "initialize"]
#: Beginnings of the paths whose "auto" is refused where the name is served.
_DECIDING = ("optimizer.", "scheduler.", "train_", "zero_optimization.stage")


@contextlib.contextmanager
def _as_config_errors() -> Iterator[None]:
    """Raise every `ValueError` inside as a `DeepSpeedConfigError`, with the same message."""
    try:
        yield
    except DeepSpeedConfigError:
        raise
    except ValueError as error:
        raise DeepSpeedConfigError(*error.args) from error


@_as_config_errors()
def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[list[Any]], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Mapping[str, Any] | StrPath | None = None,
    mesh_param: Any = None,
    config_params: Mapping[str, Any] | StrPath | None = None,
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
            it does not, and False needs one that exists.
        collate_fn: as in torch's DataLoader.
        config: a dict, or the path of a JSON file.
        config_params: another name of `config`.
        group: as in `onefold.shard`.
        units: as in `onefold.shard`.

    Returns:
        engine, optimizer, data loader, schedule; what was not asked for is None.

    Raises:
        DeepSpeedConfigError: the configuration or the arguments contradict themselves, or leave
            open what is trained. It is a `ValueError` and an `AssertionError`.
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
            "mpu and mesh_param: give onefold.shard(mesh=...) the axes beside data."
        )
    join(dist_init_required, distributed_port)
    chosen = None if model_parameters is None else list(model_parameters)
    given = _configuration(args, config, config_params, optimizer, chosen)
    settings = DeepSpeedConfig(given, ranks=world_size_of(group))
    beside = {"optimizer.": optimizer, "scheduler.": lr_scheduler}
    left = settings.undecided(*(part for part, value in beside.items() if value is not None))
    refuse_auto([path for path in left if path.startswith(_DECIDING)] if serving() else left)
    settings._configure_train_batch_size()
    _check(model, optimizer, chosen, lr_scheduler)
    recipe = settings.recipe(optimizer)
    _shard(model, recipe, settings, group, units)
    trained = chosen or [p for p in model.parameters() if p.requires_grad]
    made = _optimizer(model, settings, optimizer, trained)
    if (
        made is not None
        and recipe.optimizer.dtype == torch.float16
        and recipe.moments is None
        and any("eps" in group for group in made.param_groups)
    ):
        raise ValueError(
            f"fp16_master_weights_and_grads with {type(made).__name__}: its states would be fp16 too,"
            " where squares of small gradients are 0, so that its steps come out many times too"
            " large. Name Adam or AdamW in the configuration, pass an object of theirs as optimizer=,"
            " or leave fp16_master_weights_and_grads out."
        )
    schedule = lr_scheduler if made is not None else None
    if callable(schedule):
        schedule = schedule(made)
    elif schedule is None and settings.scheduler is not None and made is not None:
        schedule = settings.scheduler.kind(made, **settings.scheduler.params)
    engine = DeepSpeedEngine(model, settings, made, schedule, collate_fn)
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data)
    if engine.global_rank == 0 and settings.notes:
        notes = "\n".join(f"  - {note}" for note in settings.notes)
        logger.warning("DeepSpeed configuration:\n%s", notes)
    _meet_hosts(engine, configured=optimizer is None)
    return engine, made, engine.training_dataloader, schedule


def _configuration(
    args: Any, config: Any, config_params: Any, optimizer: Any, chosen: list[Any] | None
) -> dict[str, Any]:
    """Return the one configuration that was given, without what a model needs that is only
    evaluated.
    """
    sources = (config, config_params, getattr(args, "deepspeed_config", None))
    said = [source for source in sources if source is not None]
    if len(said) != 1:
        raise ValueError(
            "initialize takes one configuration, as config=, a dict or the path of a JSON file; it"
            f" was given {len(said)} by config=, config_params= and args.deepspeed_config."
        )
    given = load(*said)
    section = given.get("optimizer")
    params = section.get("params") if isinstance(section, Mapping) else None
    values = params.values() if isinstance(params, Mapping) else ()
    if optimizer is None and not chosen and "auto" in values:
        # A model that is only evaluated, given the configuration of one that is trained
        given = {k: v for k, v in given.items() if k not in ("optimizer", "scheduler")}
    if optimizer is None and "optimizer" not in given:
        given = {k: v for k, v in given.items() if not (k in BATCH and is_unset(v))}
        if not any(key in given for key in BATCH[:2]):
            given["train_micro_batch_size_per_gpu"] = 1
    return given


def _shard(
    model: nn.Module, recipe: Recipe, settings: DeepSpeedConfig, group: Any, units: Any
) -> None:
    safe = settings.torch_autocast.lower_precision_safe_modules
    differs = mark_for_the_wire(model, settings.autocast, safe)
    if is_sharded(model) and (
        differs or engine_of(model).unsharded or engine_of(model).asked != recipe
    ):
        unshard(model)
    if not is_sharded(model):
        for param in model.parameters():
            param.__dict__[BUFFERED] = True  # an engine follows the passes of flat buffers
        if settings.precision is not None:
            # `param.dtype` shows the precision of the file, as after DeepSpeed's cast of the
            # module. Master weights begin with the values as they are.
            for param in model.parameters():
                if param.dtype in LOW:
                    declare(param, COMPUTE_DTYPES[settings.precision])
        device = None  # without an accelerator the model stays where it is
        if available():
            device = of_local_rank(default_device().type, get_local_rank())
            set_default(device)
        onefold.shard(model, recipe, group=group, units=units, device=device)
    settings.cast_buffers(model)


def _meet_hosts(engine: DeepSpeedEngine, configured: bool) -> None:
    """Do what transformers, accelerate, peft, TRL and Lightning expect of an engine."""
    model, optimizer, settings = engine.module, engine.optimizer, engine.settings
    if optimizer is not None:
        meet(optimizer)  # for the functions of access.py, also before its first step
        count_as(engine, configured)
    if settings.zero_optimization_stage < 3:
        _give_whole_state_dicts(engine)
    else:
        mark(model, settings.enable_sanity_checks)
        mark_configured(model, settings.leaf_module, optimizer)
        if optimizer is not None:
            optimizer.parameter_offload = offload = ParameterOffload(model)
            optimizer.empty_partition_cache = offload.empty_partition_cache
    _leave_writing_to_first(engine)
    # At each checkpoint Lightning's DeepSpeedStrategy asks for the states of model and optimizer and
    # discards them, because the engine writes them: they are not gathered for it
    strategy: Any = getattr(getattr(model, "_trainer", None), "strategy", None)
    if any(kind.__name__ == "DeepSpeedStrategy" for kind in type(strategy).__mro__):
        strategy.lightning_module_state_dict = dict
        strategy.optimizer_state = lambda optimizer: {}
    stream_to_vllm(
        getattr(sys.modules.get("trl.generation.vllm_generation"), "VLLMGeneration", None)
    )


def _give_whole_state_dicts(engine: DeepSpeedEngine) -> None:
    """Make `module.state_dict()` return the whole model on rank 0, and an empty dict on the others.

    Below stage 3, callers expect the whole model there. Every rank must call it. It is the class's own
    again once the model is sharded at stage 3, or no longer.
    """
    ref, dtype = weakref.ref(engine.module), engine.compute_dtype()
    plain = type(engine.module).state_dict

    def state_dict(*args: Any, **kwargs: Any) -> Any:
        module = ref()
        assert module is not None
        engine = engine_of(module) if is_sharded(module) and not (args or kwargs) else None
        if engine is None or engine.full_params_depth or engine.recipe.parameters.sharded:
            return plain(module, *args, **kwargs)
        return whole_in(module, dtype, False)

    engine.module.state_dict = state_dict  # type: ignore[method-assign]


def _leave_writing_to_first(engine: DeepSpeedEngine) -> None:
    """Let a model's `save_pretrained` write on rank 0 only. Every rank calls it.

    Scripts give it a state dict that is whole on rank 0 and empty elsewhere, or none below stage 3,
    where the model's own is such a one: it is gathered before, and rank 0 may ask for it as often as
    it likes. An empty dict's file would replace the one of rank 0.
    """
    plain = getattr(type(engine.module), "save_pretrained", None)
    if plain is None:
        return
    ref, first = weakref.ref(engine.module), engine.global_rank == 0
    asks = engine.zero_optimization_stage() < 3

    def save_pretrained(save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        model: Any = ref()
        by_position = (value for value in args if isinstance(value, Mapping))
        state = kwargs.get("state_dict", next(by_position, None))
        if state is not None or not asks or not is_sharded(model):
            return None if state == {} else plain(model, save_directory, *args, **kwargs)
        gathers = model.state_dict
        whole = gathers()
        if not first:
            return None
        model.state_dict = lambda *a, **k: gathers(*a, **k) if a or k else dict(whole)
        try:
            return plain(model, save_directory, *args, **kwargs)
        finally:
            model.state_dict = gathers

    engine.module.save_pretrained = save_pretrained  # type: ignore[assignment]


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


def _check(model: nn.Module, optimizer: Any, chosen: list[Any] | None, lr_scheduler: Any) -> None:
    """Raise ValueError for a parameter of another model, an optimizer that has stepped, or a schedule
    of an optimizer that the engine does not have.
    """
    groups: list[Any] = list(chosen or [])
    if isinstance(optimizer, torch.optim.Optimizer):
        groups += optimizer.param_groups
        if optimizer.state:
            raise ValueError(
                "the optimizer has stepped already, so its states have the shapes of whole"
                " parameters: call initialize before its first step."
            )
    elif isinstance(lr_scheduler, torch.optim.lr_scheduler.LRScheduler):
        raise ValueError(
            f"lr_scheduler is a {type(lr_scheduler).__name__} over an optimizer that was made"
            " outside, and the engine makes its own: pass that optimizer as optimizer=, or a"
            " function of an optimizer as lr_scheduler=."
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


def _optimizer(
    model: nn.Module, settings: DeepSpeedConfig, given: Any, parameters: list[Any]
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
    named = settings.optimizer
    if named is None:
        return None
    if not parameters:
        raise ValueError(
            f"the configuration names the optimizer {named.given!r}, but no parameter of"
            ' the model requires a gradient: leave "optimizer" out to evaluate alone, or unfreeze'
            " some."
        )
    if named.kind is MuonWithAdamW:
        return make_muon(model, parameters, named.params)
    try:
        made: torch.optim.Optimizer = named.kind(parameters, **named.params)
        return made
    except TypeError as error:
        raise ValueError(f"optimizer.params: {error}.") from error
