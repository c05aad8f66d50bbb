"""torchtitan on Onefold: torchtitan's trainer and configurations, with a recipe.

torchrun ... -m torchtitan.train --module onefold.integrations.torchtitan
    --config llama3_8b --recipe '{"stage": 3}'       # any configuration of torchtitan's decoders
    --parallelism.tensor_parallel_degree 2           # and its degrees, but pipelines

Data, model, optimizer, schedule, loss and metrics are torchtitan's, and so are tensor, expert and
context parallelism. Onefold shards the training state, reduces gradients and computes their norm.

    parallel_dims   (dp_replicate, dp_shard × cp, tp)  ─► onefold.shard(mesh=..., data=("dp_replicate", "fsdp"))
                    (dp_replicate, efsdp, ep)          ─► experts are DTensors over ep: shard() finds their holders

This module imports torchtitan. No other part of Onefold imports it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchtitan.trainer
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.context_parallel import apply_cp_to_forward
from torchtitan.models import _supported_models
from torchtitan.protocols.module import Module
from torchtitan.tools import utils

import onefold
from onefold.reading import parse_json
from onefold.recipe import Recipe

#: Keys of torchtitan's checkpoint configuration that `Checkpoints` reads.
_READ = (
    "enable",
    "folder",
    "interval",
    "keep_latest_k",
    "load_step",
    "load_only",
    "enable_first_step_checkpoint",
)
#: The axes of torchtitan's dense mesh, and those whose ranks compute with different tokens. `fsdp`
#: is dp_shard × cp.
_AXES, _DATA = ["dp_replicate", "fsdp", "tp"], ("dp_replicate", "fsdp")


class Checkpoints(BaseCheckpointManager):  # type: ignore[misc, unused-ignore]
    """Save and load all training state with `onefold.Checkpointer`, at torchtitan's intervals.

    A checkpoint loads on any number of ranks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc, unused-ignore]
        """torchtitan's configuration of checkpoints.

        These keys are read: `enable`, `folder`, `interval`, `keep_latest_k`, `load_step`,
        `load_only`, `enable_first_step_checkpoint`.

        Attributes:
            asynchronous: save while training goes on.
        """

        last_save_model_only: bool = False
        asynchronous: bool = False

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str,
    ) -> None:
        self.enable, self.save_future, self.config = config.enable, None, config
        if not self.enable:
            return
        self.progress = states["train_state"]
        self.parts = {
            "optimizer": optimizers.optimizers,
            "scheduler": lr_schedulers,
            "data": dataloader,
        }
        self.checkpointer = onefold.Checkpointer(
            Path(base_folder) / config.folder,
            model=model_parts[0],
            keep=config.keep_latest_k or sys.maxsize,
            asynchronous=config.asynchronous,
        )

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        config = self.config
        first = curr_step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (last_step or first or curr_step % config.interval == 0):
            return False
        self.checkpointer.save(curr_step, **self.parts, extra=self.progress.state_dict())
        return True

    def _load(self, step: int = -1) -> bool:
        if step < 0:
            loaded = self.checkpointer.load(**self.parts)
        else:
            path = self.checkpointer.root / f"step-{step:08d}"
            loaded = onefold.load(path, model=self.checkpointer.model, **self.parts)
        if loaded is None:
            return False
        self.progress.load_state_dict(loaded.extra)
        return True

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: an optimizer step itself waits for values that a save is still reading."""

    def _wait_for_saving(self) -> None:
        self.checkpointer.wait()

    def _close(self) -> None:
        self.checkpointer.close()


class Trainer(torchtitan.trainer.Trainer):  # type: ignore[misc, unused-ignore]
    """torchtitan's trainer with a recipe. Every rank must make the same calls."""

    @dataclass(kw_only=True, slots=True)
    class Config(torchtitan.trainer.Trainer.Config):  # type: ignore[misc, unused-ignore]
        """torchtitan's configuration, and the recipe.

        Attributes:
            recipe: `Recipe.zero`'s options as JSON.
        """

        recipe: str = '{"stage": 3}'

    def __init__(self, config: Any) -> None:
        recipe = _recipe(config)
        _refuse(config)
        spec = config.model_spec

        def parallelize(
            model: nn.Module, *, parallel_dims: Any, ac_config: Any, dump_folder: str, **_: Any
        ) -> Any:
            _divide(model, parallel_dims)
            if ac_config is not None:
                ac_config.build(dump_folder=dump_folder).apply(model)
            return _shard(model, recipe, parallel_dims)

        config.model_spec = dataclasses.replace(spec, parallelize_fn=parallelize)
        with _optimizers_of_torch():
            super().__init__(config)
        optimizers = self.optimizers

        def step(*_: Any) -> None:
            for hook in optimizers._optimizer_step_pre_hooks.values():  # balances experts' loads
                hook(optimizers, (), {})
            for each in optimizers.optimizers:
                each.step()

        # torchtitan's container is itself a torch optimizer over all parameters, and Onefold cannot
        # probe its update. So step the optimizers inside.
        optimizers.step = step

    def train_step(self, data_iterator: Any) -> None:
        with _norm_over_all_axes(self.model_parts):
            super().train_step(data_iterator)

    def forward_backward_step(
        self, *, input_dict: Any, labels: Any, global_valid_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Run forward and backward with the loss scaled for a mean of gradients.

        torchtitan sums the gradients of ranks with different tokens, and Onefold averages them. So
        the loss of the backward pass is multiplied by their number.
        """
        dims = self.parallel_dims
        ranks = dims.dp_replicate * dims.dp_shard * dims.cp
        loss = super().forward_backward_step(
            input_dict=input_dict,
            labels=labels,
            global_valid_tokens=global_valid_tokens / ranks,
        )
        return loss / ranks


def __getattr__(name: str) -> Callable[[], Trainer.Config]:
    """Return a function that makes torchtitan's configuration `name`, changed for Onefold.

    torchtitan looks the name of `--config` up in this module.
    """
    for model in sorted(_supported_models) if not name.startswith("_") else ():
        if name.startswith(model):
            registry = importlib.import_module(f"torchtitan.models.{model}.config_registry")
            if hasattr(registry, name):
                return lambda: by_onefold(getattr(registry, name)())
    raise AttributeError(f"torchtitan has no configuration {name!r}.")


def by_onefold(config: Any, recipe: str = '{"stage": 3}') -> Trainer.Config:
    """Change a configuration of torchtitan's trainer to one of Onefold's `Trainer`.

    This sets what Onefold does differently: no CUDA graphs, no SPMD types, a loss that is not
    chunked, and checkpoints that always have the whole training state.
    """
    if type(config) is not torchtitan.trainer.Trainer.Config:
        raise ValueError(
            f"this configuration is one of {type(config).__qualname__}, expected"
            " torchtitan.trainer.Trainer.Config: Onefold does not know other trainers."
        )
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    values["training"] = dataclasses.replace(config.training, disable_cuda_graphs=True)
    values["parallelism"] = dataclasses.replace(config.parallelism, spmd_backend="partial_dtensor")
    if isinstance(config.loss, ChunkedLossWrapper.Config):
        values["loss"] = config.loss.loss_fn
    kept = {name: getattr(config.checkpoint, name) for name in _READ}
    waits = getattr(config.checkpoint, "async_mode", "disabled") == "disabled"
    values["checkpoint"] = Checkpoints.Config(**kept, asynchronous=not waits)
    return Trainer.Config(**values, recipe=recipe)


def _recipe(config: Any) -> Recipe:
    """Return the configuration's recipe, in torchtitan's precision unless the recipe names one."""
    try:
        options = parse_json(config.recipe)
    except ValueError as error:
        raise ValueError(
            f"recipe={config.recipe!r} is no JSON ({error}): write --recipe '{{\"stage\": 3}}'."
        ) from None
    if not isinstance(options, dict) or "stage" not in options:
        raise ValueError(
            f"recipe={config.recipe!r} names no stage: write --recipe '{{\"stage\": 3}}'."
        )
    if config.training.mixed_precision_param == "bfloat16":
        options = {"precision": "bf16", "wire": "fp32"} | options
    # As with FSDP: each rank counts the tokens of its own experts in buffers
    options = {"sync_buffers": False} | options
    return Recipe.zero(**options)


def _refuse(config: Any) -> None:
    """Raise ValueError for settings of torchtitan that Onefold does not support."""
    parallelism, training = config.parallelism, config.training
    stages = parallelism.pipeline_parallel_degree
    asked = {
        f"parallelism.pipeline_parallel_degree={stages}": stages > 1,
        "parallelism.fsdp_reshard_after_forward": parallelism.fsdp_reshard_after_forward != "default",
        "parallelism.enable_fsdp_symm_mem": parallelism.enable_fsdp_symm_mem,
        f"parallelism.spmd_backend={parallelism.spmd_backend!r}": parallelism.spmd_backend != "partial_dtensor",
        "training.enable_cpu_offload (the recipe's offload_optimizer does it)": training.enable_cpu_offload,
        "CUDA graphs (training.disable_cuda_graphs=False)": not training.disable_cuda_graphs,
        f"training.dtype={training.dtype!r} (masters are the recipe's)": training.dtype != "float32",
        "compile of the model": config.compile.enable and "model" in config.compile.components,
        "ChunkedLossWrapper (use its loss_fn)": isinstance(config.loss, ChunkedLossWrapper.Config),
        "a validator": config.validator.enable,
        "other checkpoints than its own": not isinstance(config.checkpoint, Checkpoints.Config),
    }  # fmt: skip
    plain = Checkpoints.Config()
    for field in dataclasses.fields(config.checkpoint):
        differs = getattr(config.checkpoint, field.name) != getattr(plain, field.name, None)
        asked[f"checkpoint.{field.name}"] = field.name not in (*_READ, "asynchronous") and differs
    if found := [name for name, there in asked.items() if there]:
        raise ValueError(
            f"Onefold in torchtitan's trainer has no {', no '.join(found)}: leave it out, or train"
            " with `onefold train`."
        )


def _divide(model: Any, dims: Any) -> None:
    """Apply torchtitan's context, tensor and expert parallelism, as its models do before FSDP."""
    if dims.cp_enabled:
        # Before tensor parallelism, whose wrappers give attention local tensors
        attention = [block.attention.inner_attention for block in model.layers.values()]
        apply_cp_to_forward(attention, dims.get_mesh("cp"))
    if dims.tp_enabled or dims.ep_enabled:
        model.parallelize(dims)


@contextlib.contextmanager
def _optimizers_of_torch() -> Iterator[None]:
    """Inside, names of optimizers are also those of torch.optim, and "DistMuon" is torch's Muon:
    torchtitan's own moves FSDP's shards by itself, on CUDA. Onefold gives each matrix to one rank.
    """
    known = OptimizersContainer._resolve_optimizer_factory

    def factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        if name in ("DistMuon", "Muon"):
            return _muon
        kind = getattr(torch.optim, name, None)
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
            return kind
        return known(name)

    OptimizersContainer._resolve_optimizer_factory = staticmethod(factory)
    try:
        yield
    finally:
        OptimizersContainer._resolve_optimizer_factory = staticmethod(known)


def _muon(
    groups: list[dict[str, Any]],
    *,
    compute_sharding_by_fqn: Mapping[str, Any] | None = None,
    bucket_configs: Any = None,
    **options: Any,
) -> torch.optim.Optimizer:
    """Make torch's Muon from the arguments of torchtitan's. Those on how shards travel say nothing
    here, but for blocks of rows, which are matrices of their own.

    Raises:
        ValueError: a parameter that torch's Muon does not take, or would step otherwise.
    """
    in_blocks = {
        name
        for name, layout in (compute_sharding_by_fqn or {}).items()
        if any(hasattr(each, "block_size") for each in layout.shardings_by_mesh_axis.values())
    }
    for group in groups:
        for name, p in zip(group["param_names"], group["params"], strict=True):
            what = f"of shape {tuple(p.shape)}" if p.ndim != 2 else "in blocks of rows"
            if p.ndim != 2 or name in in_blocks:
                raise ValueError(
                    f"DistMuon was given {name}, {what}. Onefold steps it by torch.optim.Muon, which"
                    " takes each parameter as one matrix of two dimensions: give it to AdamW by a"
                    " param_group before this one."
                )
    return torch.optim.Muon(groups, **options)


@contextlib.contextmanager
def _norm_over_all_axes(parts: list[nn.Module]) -> Iterator[None]:
    """Inside, torchtitan's trainer clips by Onefold's norm. Its own wants FSDP's DTensors."""

    def clip(parameters: Any, max_norm: float, *_: Any, **options: Any) -> torch.Tensor:
        return onefold.clip_grad_norm_(parts[0], max_norm)

    before, dist_utils.clip_grad_norm_ = dist_utils.clip_grad_norm_, clip
    try:
        yield
    finally:
        dist_utils.clip_grad_norm_ = before


def _whole_buffers(model: nn.Module) -> list[tuple[nn.Module, str, Any, Any]]:
    """Replace DTensors among the buffers by whole tensors on the meta device, as torchtitan's initial
    values are whole. Returns where they were, and how they were placed.
    """
    placed = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if isinstance(buffer, DTensor):
                placed.append((module, name, buffer.device_mesh, buffer.placements))
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
    return placed


def _shard(model: nn.Module, recipe: Recipe, dims: Any) -> nn.Module:
    """Shard a model on the meta device, with torchtitan's initial values. Collective."""

    device = utils.get_local_device()

    def draw(module: nn.Module) -> None:
        if isinstance(module, Module):
            module._init_self_parameters()
            module._init_self_buffers(buffer_device=device)

    for module in model.modules():
        if isinstance(module, Module):
            # These hooks split fused weights (wqkv into wq, wk, wv), which no rank holds whole
            module._state_dict_hooks.clear()
            module._load_state_dict_pre_hooks.clear()
    placed = _whole_buffers(model)
    mesh = dims.get_activated_mesh(_AXES)
    data = [name for name in _DATA if name in mesh.mesh_dim_names]
    onefold.shard(model, recipe, mesh=mesh, data=data, init=draw, device=device)
    for owner, name, on, placements in placed:
        buffer = owner._buffers[name]
        assert buffer is not None
        owner._buffers[name] = distribute_tensor(buffer, on, placements, src_data_rank=None)
    # torchtitan calls both next, because it expects a model on the meta device
    model.to_empty = lambda **_: model  # type: ignore[method-assign]
    model.init_weights = lambda **_: None  # type: ignore[assignment]
    return model
