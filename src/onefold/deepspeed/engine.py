"""The engine of the four-tuple: `engine(batch)`, `engine.backward(loss)`, `engine.step()`, over a
sharded module.

    micro-batch 1          micro-batch 2 (boundary)
    forward  backward step forward  backward step
    no_sync  no_sync   -   sync     sync     clip, optimizer, zero_grad, schedule

`step()` is called after every micro-batch, and steps the optimizer at the boundary only. The engine
follows the passes of its module, so scripts may also call the module itself, and a loss's own
`backward()`:

| the backward pass                          | its gradients are                                        |
|--------------------------------------------|----------------------------------------------------------|
| `engine.backward(loss)`                    | left alone: the loss was divided, and scaled in fp16     |
| `other.backward(loss)` of another engine   | left alone: that engine has divided the loss             |
| `engine.scale(loss).backward()`            | divided by the accumulation steps                        |
| `loss.backward()`                          | divided by the accumulation steps; refused in fp16       |
| `torch.autograd.grad(loss, ...)`           | returned as they are                                     |

All of it is decided once a backward pass, at its beginning. The core tells when that is
(runtime/engine.py), also on one rank, where `initialize` asks for flat buffers.

| gradients are reduced                    | stages 0 and 1                    | stages 2 and 3                    |
|------------------------------------------|-----------------------------------|-----------------------------------|
| the engine counts micro-batches          | in the boundary's backward pass   | in every backward pass            |
| `managed_gradient_accumulation: false`   | in `step()`                       | in every backward pass            |
| inside `coalesce_grad_reduction()`       | when the block ends               | when the block ends               |
| inside `no_sync()`                       | in the next pass outside, or step | it raises                         |
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from onefold.checkpoint.together import Together
from onefold.deepspeed import checkpoints
from onefold.deepspeed.meaning import DeepSpeedConfig
from onefold.deepspeed.precision import LossScaler, context_of
from onefold.deepspeed.schema import FP16
from onefold.device import available
from onefold.optim.clip import scale_gradients
from onefold.reading import StrPath
from onefold.recipe import COMPUTE_DTYPES
from onefold.runtime.engine import Engine
from onefold.wording import few

logger = logging.getLogger("onefold")

__all__ = ["DeepSpeedEngine"]
#: Methods of the engine that return what its settings say.
_SAID = frozenset((
    "bfloat16_enabled", "fp16_enabled",
    "gradient_accumulation_steps", "gradient_clipping", "managed_gradient_accumulation", "optimizer_name",
    "optimizer_params", "scheduler_name", "steps_per_print", "train_batch_size",
    "train_micro_batch_size_per_gpu", "wall_clock_breakdown", "zero_optimization_stage",
))  # fmt: skip
#: Other methods without arguments: {name: what it returns}
_FACTS: Mapping[str, Callable[[DeepSpeedEngine], Any]] = {
    "compute_dtype": lambda e: COMPUTE_DTYPES.get(e.settings.precision or ""),
    "dynamic_loss_scale": lambda e: e.loss_scaler is not None and e.loss_scaler.dynamic,
    "get_batch_info": lambda e: (e.train_batch_size(), e.train_micro_batch_size_per_gpu(), e.gradient_accumulation_steps()),
    "get_global_grad_norm": lambda e: None if e._norm is None else float(e._norm),
    "get_lr": lambda e: [float(group["lr"]) for group in e._groups()],
    "get_mom": lambda e: [group.get("momentum", group.get("betas", 0.0)) for group in e._groups()],
    "_get_optimizer_ckpt_name": lambda e: "",  # a checkpoint's folder has all of it
    "gradient_average": lambda e: e.settings.gradient_allreduce_op == "mean",
    # The fixed one of the configuration; 0 if it is dynamic. The current scale is `cur_scale`
    "loss_scale": lambda e: 0.0 if e.settings.loss_scaling is None else e.settings.loss_scaling.loss_scale,
    "torch_autocast_dtype": lambda e: e.settings.autocast,
    "torch_autocast_enabled": lambda e: e.settings.autocast is not None,
    "was_step_applied": lambda e: e._step_applied,
    "zero_gather_16bit_weights_on_model_save": lambda e: e.settings.gather_16bit_weights_on_model_save is not False,
    "zero_optimization": lambda e: e.settings.zero_enabled,
    # Nothing to do: backward passes reduce gradients, and release gathered weights
    "allreduce_gradients": lambda e: None,
    "empty_partition_cache": lambda e: None,
}  # fmt: skip


#: Calls a function at the end of the backward pass that runs.
_at_end: Any = torch.autograd.Variable._execution_engine.queue_callback


class EngineMisuse(RuntimeError, AssertionError):
    """A call of an engine that cannot be followed in its present state. DeepSpeed asserts in some
    places and raises RuntimeError in others, by version. Scripts that catch either are served. Some
    compare the words: a message has those of DeepSpeed where it says the same.
    """


def _let_go(runtime: weakref.ref[Engine], follower: Any) -> None:
    """Follow the passes over a module no longer, unless another engine has taken it over."""
    if (core := runtime()) is not None and core.follower is follower:
        core.follower = None


def _begin_scaled(ref: weakref.ref[DeepSpeedEngine], _: Tensor) -> None:
    """A backward pass begins with a scaled loss, maybe after its engine is gone."""
    if (engine := ref()) is not None:
        engine._scaled = True
        _at_end(partial(setattr, engine, "_scaled", False))


class NoScalarLoss(ValueError, AssertionError):
    """What was given as a loss is no scalar with a graph."""


class DeepSpeedEngine(nn.Module):
    """A sharded module with its optimizer and schedule, driven by DeepSpeed's calls.

    Attributes:
        module: the sharded module itself. Attributes that the engine lacks are looked up in it.
        optimizer, lr_scheduler, training_dataloader: the other three of the tuple, or None.
        config: the configuration as it was given.
        settings: the configuration as it was read.
        loss_scaler: the loss scaler of fp16; None in other precisions.
        device: where this rank computes; parameters may be stored elsewhere.
        micro_steps: number of `step()` calls.
        global_steps: number of optimizer steps, including skipped ones.
        skipped_steps: number of steps that were skipped because gradients were not finite.
        global_samples: number of samples so far, over all ranks.
        collate_fn: the `collate_fn` of loaders that `deepspeed_io` makes.
    """

    settings: DeepSpeedConfig
    loss_scaler: LossScaler | None
    _norm: Tensor | None
    _step_applied: bool
    #: How many calls of any engine's `backward` run now: their losses have been divided.
    _dividing = 0

    def __init__(
        self,
        module: nn.Module,
        settings: DeepSpeedConfig,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        collate_fn: Any = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.settings, self.config = settings, settings.given
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.training_dataloader, self.collate_fn = None, collate_fn
        self.micro_steps = self.global_steps = self.skipped_steps = self.global_samples = 0
        self.loss_scaler = LossScaler(settings.loss_scaling) if settings.loss_scaling else None
        self._is_gradient_accumulation_boundary: bool | None = None
        # The block that holds gradients back: "no_sync" or "coalesce_grad_reduction"
        self._held = ""
        self._stepping = self._step_applied = False
        # Whether `.grad` holds the gradients of the last step, which the next pass drops; how many
        # backward passes ran since; whether one runs that began with a scaled loss
        self._stepped, self._since_step, self._scaled = False, 0, False
        self._norm = None
        runtime = onefold.engine_of(module)
        self.global_rank, self.world_size, self.device = (
            runtime.rank,
            runtime.world_size,
            runtime.device,
        )
        self.dp_world_size, self.mp_world_size = self.world_size, 1
        self.sparse_tensor_module_names = set[str]()
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if optimizer is not None:
            (self.loss_scaler or LossScaler(FP16(loss_scale=1))).show_on(optimizer)
        # Weak, so that an engine goes with its last reference; not registered as a submodule
        runtime.follower = follower = weakref.proxy(self)
        self._let_go = weakref.finalize(self, _let_go, weakref.ref(runtime), follower)

    # -- the three calls ---------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass."""
        with context_of(self.settings.autocast, self.device):
            return self.module(*args, **kwargs)

    def backward(
        self,
        loss: Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        create_graph: bool = False,
    ) -> Tensor:
        """Run the backward pass of a scalar loss, divided by the accumulation steps and multiplied
        by the loss scale.

        Args:
            loss: the mean over this rank's micro-batch; shape [].
            retain_graph, create_graph: as in `Tensor.backward`.
            scale_wrt_gas: False omits the division by the accumulation steps.

        Returns:
            the loss divided by the accumulation steps, without the loss scale.

        Raises:
            NoScalarLoss: `loss` is no scalar with a graph.
            EngineMisuse: the engine has no optimizer, or the whole model is gathered.
        """
        self._needs_optimizer("backward")
        if onefold.engine_of(self.module).full_params_depth:
            raise EngineMisuse(
                "engine.backward() was called inside a context that gathers the whole model, where"
                " no gradient is reduced: leave GatheredParameters or full_params first."
            )
        _check_loss("backward", loss)
        loss = loss / self.settings.gradient_accumulation_steps if scale_wrt_gas else loss
        scaled = loss if self.loss_scaler is None else loss.float() * self.loss_scaler.scale
        before, self._scaled = self._scaled, True
        DeepSpeedEngine._dividing += 1
        try:
            scaled.backward(retain_graph=retain_graph, create_graph=create_graph)
        finally:
            DeepSpeedEngine._dividing -= 1
            self._scaled = before
        return loss

    def scale(self, loss: Tensor, retain_graph: bool = False) -> Tensor:
        """Return the loss times fp16's loss scale, to call `engine.scale(loss).backward()` instead
        of `engine.backward(loss)`. Such a backward pass divides by the accumulation steps itself.

        Args:
            retain_graph: accepted; the call of `backward` decides.

        Raises:
            NoScalarLoss: `loss` is no scalar with a graph.
        """
        self._needs_optimizer("scale")
        _check_loss("scale", loss)
        if self.loss_scaler is None:
            return loss
        scaled = loss.float() * self.loss_scaler.scale
        scaled.register_hook(partial(_begin_scaled, weakref.ref(self)))
        return scaled

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Count this micro-batch. At the boundary, clip, step the optimizer and the schedule. The
        gradients stay until the next pass or `zero_grad`, for code that reads them after a step
        (AdaLoRA, callbacks of Trainer).

        In the 16-bit precisions, a step with gradients that are not finite is skipped on all ranks
        (in bf16 unless the configuration turns this off).

        Raises:
            EngineMisuse: there is no optimizer, or the call is inside `no_sync` or
                `coalesce_grad_reduction`.
            FloatingPointError: fp16 gradients overflow at the smallest loss scale.
        """
        self._needs_optimizer("step")
        if self._held:
            raise EngineMisuse(
                "It is illegal to call Engine.step() inside no_sync context manager, or inside"
                " coalesce_grad_reduction: nothing is reduced there. Leave the block first."
            )
        self._step_applied, self._stepping = False, True
        try:
            if self.is_gradient_accumulation_boundary():
                self._optimizer_step(lr_kwargs or {})
        finally:
            self._stepping = False
        self.micro_steps += 1

    def _optimizer_step(self, lr_kwargs: dict[str, Any]) -> None:
        self._drop_stepped()
        onefold.engine_of(self.module).reduce_pending()
        zero = self.settings.zero_config
        if zero.stage in (1, 2) and not zero.ignore_unused_parameters:
            named = self.module.named_parameters()
            if unused := [name for name, p in named if p.requires_grad and p.grad is None]:
                raise EngineMisuse(
                    f"parameters got no gradient since the last step: {few(unused, 3)}, and"
                    ' the configuration says "ignore_unused_parameters": false. Freeze them'
                    " (requires_grad_(False)), use them in the loss, or set ignore_unused_parameters"
                    " to true."
                )
        overflow = self.optimizer.overflow = not self._clip()
        if not overflow:
            self.optimizer.step()
            self._step_applied = True
        passes, self._since_step = self._since_step, 0
        self._stepped = not overflow
        if overflow:
            self.module.zero_grad()
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self.global_steps += 1
        settings, ranks = self.settings, self.world_size
        self.global_samples += (
            settings.train_batch_size
            if settings.managed_gradient_accumulation
            else settings.train_micro_batch_size_per_gpu * ranks * passes
        )

    def _clip(self) -> bool:
        """Unscale and clip the gradients. Return False if the step must be skipped because they are
        not finite; the answer is the same on all ranks.
        """
        config, limit = self.settings, self.settings.gradient_clipping or math.inf
        self._norm = None
        if not (config.gradient_clipping or config.compute_grad_norm or config.skips_nonfinite):
            return True
        if self.loss_scaler is None:
            self._norm = onefold.clip_grad_norm_(self.module, limit)
            return not config.skips_nonfinite or math.isfinite(float(self._norm))
        # The norm is taken over all ranks: it is not finite on every rank if any rank overflowed.
        scale = self.loss_scaler.scale
        norm = float(onefold.clip_grad_norm_(self.module, math.inf)) / scale
        finite = math.isfinite(norm)
        if finite:
            factor = min(1.0, limit / (norm + 1e-6)) / scale
            scale_gradients(
                [onefold.engine_of(self.module)],
                torch.tensor(factor, dtype=torch.float32, device="cpu"),
            )
        self._norm = torch.tensor(norm, device="cpu")
        self.loss_scaler.update(not finite)
        if not finite and self.global_rank == 0:
            logger.info(
                "step %d overflowed at loss scale %g and is skipped; next scale %g",
                self.global_steps,
                scale,
                self.loss_scaler.scale,
            )
        return finite

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. The next forward pass after a step does this."""
        self._stepped = False
        self.module.zero_grad(set_to_none)

    # -- what the core asks in every pass (runtime/engine.py) --------------------------------------

    @property
    def synchronizes(self) -> bool:
        """Whether a backward pass that runs now ends with reduced gradients, if the recipe does not
        reduce in every pass.
        """
        return self._held != "coalesce_grad_reduction" and self.is_gradient_accumulation_boundary()

    def forward_begins(self) -> None:
        self._scaled = False  # a backward pass that raised did not come to its end
        self._drop_stepped()

    def backward_begins(self) -> float:
        """Note that a backward pass begins. Returns what its gradients are multiplied with.

        Raises:
            EngineMisuse: fp16 needs a scaled loss, and nothing has scaled this one.
        """
        self._drop_stepped()
        # A scale that is fixed at 1 needs none
        if (self.dynamic_loss_scale() or self.cur_scale != 1) and not self._scaled:
            raise EngineMisuse(
                "Loss scaling is required in fp16, and nothing has scaled the loss of this backward"
                " pass: call engine.backward(loss), or engine.scale(loss).backward(), in place of"
                " loss.backward()."
            )
        self._since_step += 1
        return 1.0 if self._dividing else 1.0 / self.gradient_accumulation_steps()

    def _drop_stepped(self) -> None:
        if not self._stepped:
            return
        self.zero_grad()
        # The core asks with torch functions off, where `.grad` shows nothing to drop to a rank that
        # owns no element of a parameter. It must not go on believing that others have a gradient.
        for entry in onefold.engine_of(self.module).entries:
            entry.graded_elsewhere = False

    # -- when gradients are reduced ----------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch ends with an optimizer step.

        With `managed_gradient_accumulation: false` it is true only while `step` runs.
        """
        if not self.settings.managed_gradient_accumulation:
            return self._stepping
        if self._is_gradient_accumulation_boundary is not None:
            return self._is_gradient_accumulation_boundary
        return (self.micro_steps + 1) % self.settings.gradient_accumulation_steps == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether micro-batches end with an optimizer step, instead of counting them.

        Call it before the micro-batch's backward pass. It holds until the next call.

        Raises:
            EngineMisuse: with `managed_gradient_accumulation: false`, every `step()` is a boundary.
        """
        self._refuse_unmanaged("set_gradient_accumulation_boundary()")
        self._is_gradient_accumulation_boundary = is_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Run passes inside under `onefold.no_sync`, at stages 0 and 1.

        `step()` raises inside, so these micro-batches are not counted.

        Raises:
            EngineMisuse: the stage divides gradients, or the call is inside another such block.
        """
        stage = self.zero_optimization_stage()
        if stage > 1:
            raise EngineMisuse(
                f"no_sync context manager is incompatible with ZeRO stage {stage},"
                " which divides gradients: use engine.coalesce_grad_reduction(), or"
                " onefold.no_sync(engine.module)."
            )
        with self._holding("no_sync"), onefold.no_sync(self.module):
            yield

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Reduce the gradients of all backward passes inside once, when the block ends.

        Meanwhile every rank holds its whole gradients. `step()` raises inside. If the block raises,
        nothing is reduced at its end.

        Raises:
            EngineMisuse: the call is inside `no_sync` or another such block, or
                `managed_gradient_accumulation` is false.
        """
        self._refuse_unmanaged("coalesce_grad_reduction()")
        runtime, boundary = onefold.engine_of(self.module), self._is_gradient_accumulation_boundary
        with self._holding("coalesce_grad_reduction"):
            runtime.holds_whole = True
            try:
                yield
                self._held, self._is_gradient_accumulation_boundary = "", True
                runtime.reduce_pending()
            finally:
                runtime.holds_whole = False
                self._is_gradient_accumulation_boundary = boundary

    @contextlib.contextmanager
    def _holding(self, call: str) -> Iterator[None]:
        if self._held:
            raise EngineMisuse(
                f"no_sync context manager reentry is unsupported: engine.{call}() cannot be nested"
                f" inside engine.{self._held}(). Leave that first."
            )
        self._held = call
        try:
            yield
        finally:
            self._held = ""

    def _refuse_unmanaged(self, call: str) -> None:
        if not self.managed_gradient_accumulation():
            raise EngineMisuse(
                f"engine.{call} decides when gradients are reduced, and so does"
                ' "managed_gradient_accumulation": false, where each step() is a boundary: leave'
                " one of them out."
            )

    # -- batch sizes and data ----------------------------------------------------------------------

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches in a step; the micro-batch size stays.

        Raises:
            ValueError: `train_batch_size` is not a multiple of micro-batch size x ranks.
        """
        self.settings.set_batch(train_batch_size, self.train_micro_batch_size_per_gpu(), None)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch size; the number of micro-batches in a step stays."""
        self.settings.set_batch(None, micro_batch_size, self.gradient_accumulation_steps())

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
        `loader.sampler.set_epoch` changes the order.

        Args:
            batch_size: None takes the micro-batch size.
            collate_fn: None takes the one that `initialize` was given.
            num_local_io_workers: number of processes that read; None reads in this process.
            pin_memory: whether batches are in pinned memory, if there is an accelerator.
        """
        from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

        drop_last = self.settings.dataloader_drop_last
        if data_sampler is None and not isinstance(dataset, IterableDataset):
            data_sampler = DistributedSampler(
                dataset, self.world_size, self.global_rank, route == "train", drop_last=drop_last
            )
        return DataLoader(
            dataset,
            self.train_micro_batch_size_per_gpu() if batch_size is None else batch_size,
            sampler=data_sampler,
            collate_fn=self.collate_fn if collate_fn is None else collate_fn,
            drop_last=drop_last,
            num_workers=num_local_io_workers or 0,
            pin_memory=pin_memory and available(),
        )

    # -- saving ------------------------------------------------------------------------------------

    save_checkpoint = checkpoints.save_checkpoint
    load_checkpoint = checkpoints.load_checkpoint

    def save_16bit_model(
        self,
        save_dir: StrPath,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole model, with parameters in the compute dtype, at any stage. Every rank
        must call it.

        A name that ends in `.safetensors` is written in that format, any other with `torch.save`.
        An error never leaves an incomplete file of that name.

        Returns:
            True, on every rank, once the file is complete.

        Raises:
            CheckpointError: rank 0 could not write it (raised on every rank).
        """
        whole = checkpoints.whole_in(self.module, self.compute_dtype(), exclude_frozen_parameters)
        with Together.of(onefold.engine_of(self.module)).each_rank():
            if self.global_rank == 0:
                checkpoints.write_whole(whole, Path(save_dir) / save_filename)
        return True

    #: The former name
    save_fp16_model = save_16bit_model

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor]:
        """Return the whole model on rank 0's host, with parameters in the compute dtype. Every rank
        must call it.

        Other ranks get an empty dict: with None, `save_pretrained` would call `state_dict()`.
        Without frozen parameters it has those that peft writes beside adapters.
        """
        return checkpoints.whole_in(
            self.module, self.compute_dtype(), exclude_frozen_parameters, True
        )

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """Return the whole model in fp32 on rank 0, and an empty dict elsewhere. Every rank must
        call it. See `onefold.full_state_dict`.
        """
        return checkpoints.whole_in(self.module, torch.float32, exclude_frozen_parameters)

    # -- what else may be asked of it ----------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name in _SAID:
            value = getattr(self.settings, name)
            return lambda: value
        if (fact := _FACTS.get(name)) is not None:
            return lambda *_, **__: fact(self)
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        try:
            return getattr(self.module, name)
        except AttributeError:
            raise AttributeError(
                f"neither the engine nor its {type(self.module).__name__} has an attribute"
                f" {name!r}."
            ) from None

    @property
    def cur_scale(self) -> float:
        """The current loss scale; 1.0 outside fp16."""
        return self.loss_scaler.scale if self.loss_scaler else 1.0

    @property
    def data_parallel_group(self) -> Any:
        """The process group that `initialize` was given, else that of all ranks; None without
        torch.distributed.
        """
        own = onefold.engine_of(self.module).mesh.group
        return dist.group.WORLD if own is None and dist.is_initialized() else own

    def compile(self, backend: Any = None, compile_kwargs: Any = None, **others: Any) -> None:
        """Compile the module's forward pass with `torch.compile`."""
        options = dict(compile_kwargs or {}) | others
        if backend is not None:
            options["backend"] = backend
        self.module.compile(**options)

    def destroy(self) -> None:
        """Release the optimizer, the schedule and the data loader; the module stays usable."""
        self._let_go()
        self.optimizer = self.lr_scheduler = self.training_dataloader = None

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every parameter group, until a schedule sets its own."""
        for group in self._groups():
            group["lr"] = lr

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def _needs_optimizer(self, call: str) -> None:
        if self.optimizer is None:
            raise EngineMisuse(
                f"engine.{call}() needs an optimizer: pass optimizer= to initialize, or name one in"
                ' the configuration, as in "optimizer": {"type": "AdamW", "params": {"lr":'
                " 1e-4}}."
            )


def _check_loss(call: str, loss: Any) -> None:
    """Raise NoScalarLoss unless `loss` is a scalar tensor with a graph."""
    if not (isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad):
        given = f"a {type(loss).__name__} of shape {tuple(getattr(loss, 'shape', ()))}"
        raise NoScalarLoss(
            f"engine.{call} was given {given}: expected a scalar loss with a graph (a scalar tensor,"
            " as from mean())."
        )
