"""`deepspeed.initialize`, as transformers, accelerate, TRL and Lightning call it.

`onefold.initialize` refuses a configuration that leaves open what is trained. These libraries fill
the configuration in themselves, partly late and in irregular forms. So this function is more
permissive:

| the caller gives                              | here                                                         |
|-----------------------------------------------|--------------------------------------------------------------|
| "zero_optimization.x": v at the top level     | used, unless the section "zero_optimization" sets x itself   |
| "auto" for what does not decide the training  | counts as not set                                            |
| a model in training mode, without optimizer   | an engine that only computes, such as for a reference model  |
| a dict that the caller goes on using          | read as a copy; the caller's dict stays unchanged            |
| a model that another engine already has       | the new engine takes it over                                 |
"""

from __future__ import annotations

import copy
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

import onefold
from onefold.deepspeed.communication import needs_group
from onefold.deepspeed.config import read_deepspeed, refuse_auto
from onefold.deepspeed.config.auto import BATCH
from onefold.deepspeed.config.file import loaded
from onefold.deepspeed.config.values import AUTO, is_unset
from onefold.deepspeed.engine import DeepSpeedEngine
from onefold.deepspeed.errors import as_config_errors
from onefold.deepspeed.leaves import mark_configured
from onefold.deepspeed.logs import logger
from onefold.deepspeed.optimizer_facts import show_leaves
from onefold.deepspeed.optimizer_kinds import show_groups
from onefold.deepspeed.optimizers import note_configured
from onefold.deepspeed.parameter_facts import check_writes, take_facts
from onefold.deepspeed.parameter_offload import ParameterOffload, mark
from onefold.deepspeed.saving import whole_in
from onefold.deepspeed.setup import assemble, chosen_config, join, world_size_of
from onefold.deepspeed.table import VERSION
from onefold.hosts import stream_under_the_name
from onefold.layout import LOW
from onefold.recipe import COMPUTE_DTYPES
from onefold.runtime.flat import declare
from onefold.runtime.hooks import is_sharded

_of_engines: weakref.WeakSet[Any] = weakref.WeakSet()
_sharded: weakref.WeakSet[Any] = weakref.WeakSet()


class _OfAnEngine(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return any(known is instance for known in _of_engines)


class _OfAStage(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return any(known is instance for known in _sharded)


class DeepSpeedOptimizer(metaclass=_OfAnEngine):
    """The class of which every engine's optimizer counts as an instance, for `isinstance`.

    The optimizers themselves are torch's, of any class.
    """


class ZeROOptimizer(metaclass=_OfAStage):
    """The class of which the optimizer of every engine at stages 1 to 3 counts as an instance."""


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Make an engine, as `onefold.initialize` does, with the differences in this file's table.

    Raises:
        DeepSpeedConfigError: the configuration or the arguments contradict themselves, or leave
            open what is trained. It is a `ValueError` and an `AssertionError`.
        NotImplementedError: something that Onefold does not do is asked for.
    """
    with as_config_errors():
        return _initialize(
            args, model, optimizer, model_parameters, training_data, lr_scheduler, distributed_port,
            mpu, dist_init_required, collate_fn, config, mesh_param, config_params,
        )  # fmt: skip


def _initialize(
    args: Any,
    model: nn.Module | None,
    optimizer: Any,
    model_parameters: Iterable[Any] | None,
    training_data: Any,
    lr_scheduler: Any,
    distributed_port: int,
    mpu: Any,
    dist_init_required: bool | None,
    collate_fn: Callable[..., Any] | None,
    config: Any,
    mesh_param: Any,
    config_params: Any,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    if model is None:
        raise ValueError("deepspeed.initialize was given no model: pass model=, an nn.Module.")
    if mpu is not None or mesh_param is not None:
        raise NotImplementedError(
            "mpu and mesh_param: other parallel axes than data are not built yet; leave them out."
        )
    if dist_init_required is False:
        needs_group()
    join(dist_init_required, distributed_port)
    if config is None and getattr(args, "deepscale_config", None) is not None:
        config = args.deepscale_config  # the name of this option in DeepSpeed's first releases
    given = tidied(loaded(chosen_config(args, config, config_params)))
    chosen = list(model_parameters) if model_parameters is not None else None
    if optimizer is None and not chosen and _is_open(given.get("optimizer")):
        # A model that is only evaluated, given the configuration of one that is trained
        given = {k: v for k, v in given.items() if k not in ("optimizer", "scheduler")}
    if optimizer is None and "optimizer" not in given:
        given = {k: v for k, v in given.items() if not (k in BATCH and is_unset(v))}
        if not any(key in given for key in BATCH[:2]):
            given["train_micro_batch_size_per_gpu"] = 1
    read = read_deepspeed(given, world_size_of(None))
    refuse_auto(
        [
            path
            for path in read.undecided(optimizer is not None, lr_scheduler is not None)
            if path.startswith(("optimizer.", "scheduler.", "train_", "zero_optimization.stage"))
        ]
    )
    logger.info("DeepSpeed info: version=%s, served by onefold", VERSION)
    if read.precision is not None and not is_sharded(model):
        _declare_precision(model, COMPUTE_DTYPES[read.precision])
    made = assemble(
        model,
        read,
        optimizer=optimizer,
        model_parameters=chosen or None,
        training_data=training_data,
        lr_scheduler=lr_scheduler if optimizer is not None or read.optimizer is not None else None,
        collate_fn=collate_fn,
        must_train=False,
        again=True,
    )
    made[0].keeps_gradients = True  # callbacks of Trainer read gradients after the step
    if made[0].zero_optimization_stage() < 3:
        _give_whole_state_dicts(made[0])
        take_facts(model.parameters())  # a former engine at stage 3 may have given them
    else:
        mark(model)
        if made[1] is not None:
            made[1].parameter_offload = offload = ParameterOffload(model)
            made[1].empty_partition_cache = offload.empty_partition_cache
        zero = read.given.get("zero_optimization") or {}
        check_writes(model.parameters(), zero)
        leaves = mark_configured(model, zero)
        if made[1] is not None:
            show_leaves(made[1], leaves)
    if made[1] is not None:
        _of_engines.add(made[1])
        if made[0].zero_optimization():
            _sharded.add(made[1])
        show_groups(made[0])
        if optimizer is None:
            note_configured(made[1], "offload_optimizer" in read.recipe_arguments)
    if made[0].global_rank:
        _leave_writing_to_first(made[0])
    _spare_lightning(model)
    stream_under_the_name()
    return made


def _declare_precision(model: nn.Module, dtype: torch.dtype) -> None:
    """Let `param.dtype` show the precision of the file, as after DeepSpeed's cast of the module.
    Master weights begin with the values as they are.
    """
    for param in model.parameters():
        if param.dtype in LOW:
            declare(param, dtype)


def _spare_lightning(model: nn.Module) -> None:
    """Keep Lightning's DeepSpeedStrategy from gathering state that it does not use.

    At each checkpoint it asks for the states of model and optimizer and discards them, because the
    engine writes them. It gets empty dicts instead.
    """
    strategy: Any = getattr(getattr(model, "_trainer", None), "strategy", None)
    if any(kind.__name__ == "DeepSpeedStrategy" for kind in type(strategy).__mro__):
        strategy.lightning_module_state_dict = dict
        strategy.optimizer_state = lambda optimizer: {}


def _give_whole_state_dicts(engine: DeepSpeedEngine) -> None:
    """Make `module.state_dict()` return the whole model on rank 0, and an empty dict on the others.

    Below stage 3, callers expect the whole model there. Every rank must call it.
    """
    ref, dtype = weakref.ref(engine.module), engine.compute_dtype()
    plain = type(engine.module).state_dict

    def state_dict(*args: Any, **kwargs: Any) -> Any:
        module = ref()
        assert module is not None
        if args or kwargs or onefold.engine_of(module).full_params_depth:
            return plain(module, *args, **kwargs)
        return whole_in(module, dtype, False)

    engine.module.state_dict = state_dict  # type: ignore[method-assign]


def _leave_writing_to_first(engine: DeepSpeedEngine) -> None:
    """Keep `save_pretrained` of transformers and peft from writing on ranks other than 0.

    Scripts call it on every rank with a state dict that is whole on rank 0 and empty elsewhere.
    Without this, the empty dict's file would replace the one that rank 0 has written.
    """
    module = engine.module
    plain = getattr(type(module), "save_pretrained", None)
    if plain is None:
        return
    ref, asks = weakref.ref(module), engine.zero_optimization_stage() < 3

    def save_pretrained(save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        model, state = ref(), kwargs.get("state_dict")
        assert model is not None
        if state is None and asks:
            # save_pretrained calls model.state_dict(), which is collective: this rank must call it
            # as often as rank 0 does, and discards the files.
            with tempfile.TemporaryDirectory() as aside:
                return plain(model, aside, *args, **{**kwargs, "push_to_hub": False})
        return (
            None
            if state is not None and not state
            else plain(model, save_directory, *args, **kwargs)
        )

    module.save_pretrained = save_pretrained  # type: ignore[assignment]


def tidied(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy without the dotted top-level keys whose section sets the same value itself."""
    out: dict[str, Any] = copy.deepcopy(dict(config))
    for name in [name for name in out if isinstance(name, str) and "." in name]:
        *outer, last = name.split(".")
        place: Any = out
        for part in outer:
            place = place.get(part) if isinstance(place, Mapping) else None
        if isinstance(place, Mapping) and not is_unset(place.get(last)):
            del out[name]
    return out


def _is_open(section: Any) -> bool:
    params = section.get("params") if isinstance(section, Mapping) else None
    return isinstance(params, Mapping) and AUTO in params.values()
