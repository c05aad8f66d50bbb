"""Stages of torch's pipelines whose modules are sharded.

Each stage's module is sharded by itself, over the ranks that run this stage. torch's schedules call
the methods that `PipelineStage` overrides:

| a schedule calls                                 | this stage                                                         |
|--------------------------------------------------|--------------------------------------------------------------------|
| UNSHARD, RESHARD (after `register_actions`)      | gathers all units, releases them                                   |
| `forward_one_chunk`                              | gathers all units if nobody has: once for all micro-batches         |
| `backward_maybe_with_nosync`                     | leaves the gradients of a micro-batch whole on this rank            |
| the last of them                                 | releases what `forward_one_chunk` has gathered                      |
| `perform_reduce_grad`, or `scale_grads` by itself | divides by the number of micro-batches, then reduces                |
| `_post_metadata_inference_cleanup`               | forgets the graphs of the first call, which infers shapes           |

[Note: divided before it is added] torch divides `.grad` after each call of `schedule.step`. With two
calls in one optimizer step, gradients of the first would be divided twice. Here each call's own
gradients are divided, and then added to `.grad`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from onefold.parallel.held import accumulating, reduce_grad, reshard, unshard
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry
from onefold.runtime.hooks import engine_of, is_sharded
from onefold.runtime.parameters.interval import disable_torch_function, get_grad, set_grad


class PipelineStage(pipelining.PipelineStage):
    """torch's PipelineStage, for a module that `onefold.shard()` returned.

    Its parameters are gathered once for all micro-batches of a step and its gradients are reduced
    once, at every stage of ZeRO. Schedules with UNSHARD and RESHARD actions (those of several
    stages on a rank) gather and release by them after `register_actions(schedule)`. Without it, and
    in ScheduleGPipe and Schedule1F1B, which have no such actions, parameters stay gathered from the
    first forward to the last backward micro-batch.

    The arguments are those of torch's class, without `dw_builder`.

    Raises:
        ValueError: the module is not sharded, its recipe steps in the backward pass, or it says
            that its embeddings are tied, which stages of a pipeline cannot be.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        input_args: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        output_args: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        output_grads: torch.Tensor | tuple[torch.Tensor | None, ...] | None = None,
        input_grads: torch.Tensor | tuple[torch.Tensor | None, ...] | None = None,
        group: Any = None,
        get_mesh: Any = None,
    ) -> None:
        _refuse(submodule, num_stages)
        super().__init__(
            submodule,
            stage_index,
            num_stages,
            device,
            input_args,
            output_args,
            output_grads,
            input_grads,
            group,
            get_mesh=get_mesh,
        )
        self._forwards = 0  # micro-batches of this step
        self._gathered_here = False  # by `forward_one_chunk`
        # What gradients that wait for a later step's reduction are to be divided by
        self._divide_by: int | None = None
        # `.grad` of earlier steps, of parameters that no rank shares; None outside a step
        self._earlier: dict[nn.Parameter, torch.Tensor] | None = None

    @property
    def _engine(self) -> Engine:
        return engine_of(self.submod)

    # -- one step ----------------------------------------------------------------------------------

    def clear_runtime_states(self) -> None:
        """Begin a step. Called by schedules."""
        self._release()  # left by a step that raised
        self._take_back()
        self._forwards = 0
        super().clear_runtime_states()

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        if not self._engine.gather.holding:
            self._gathered_here = True
            unshard(self.submod)
        with accumulating(self.submod):
            output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        self._forwards += 1
        if not self.has_backward and self._forwards == len(self.args_recv_info):
            self._release()
            self._engine.progress.graphs.clear()  # no backward pass comes
        return output

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, Any]] | None]:
        if self._earlier is None:
            self._set_aside()
        with accumulating(self.submod):
            if backward_type == "input":
                result = self._backward_of_input(bwd_kwargs)
            elif backward_type == "weight":
                result = self._backward_of_weight(bwd_kwargs)
            else:
                result = super().backward_maybe_with_nosync(
                    backward_type, bwd_kwargs, last_backward
                )
        if last_backward:
            self._release()
        return result

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Divide and reduce the gradients of this step. Called by schedules, once a step."""
        self._finish(grad_scale_factor)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Do the same: schedules without REDUCE_GRAD actions call this alone."""
        self._finish(grad_scale_factor)

    def _finish(self, factor: int) -> None:
        if self._earlier is None:  # no backward pass: an evaluation, or the second call in a step
            return
        for param, earlier in self._divided(factor):
            set_grad(param, earlier)
        self._earlier = None
        progress = self._engine.progress
        if not progress.pending:
            return
        if self._divide_by not in (None, factor):
            raise ValueError(
                f"gradients that wait under onefold.no_sync are to be divided by {self._divide_by}"
                f" micro-batches, and those of this step by {factor}: give all steps of a"
                " schedule under no_sync the same number, or leave no_sync out."
            )
        if not progress.sync:
            self._divide_by = factor
            return
        self._divide_by = None
        reduce_grad(self.submod, factor)

    def _release(self) -> None:
        if self._gathered_here:
            self._gathered_here = False
            reshard(self.submod)

    # -- gradients that autograd adds to `.grad` by itself -------------------------------------------
    #
    # Those of parameters that this rank alone holds (a stage on one rank). See [Note: divided before
    # it is added].

    def _set_aside(self) -> None:
        self._earlier = {}
        with disable_torch_function():
            for entry in self._engine.entries:
                if entry.flat.unsharded and (grad := get_grad(entry.param)) is not None:
                    self._earlier[entry.param] = grad
                    set_grad(entry.param, None)

    def _divided(self, factor: int) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Return the sums of earlier gradients and this step's, divided by `factor`."""
        assert self._earlier is not None
        sums = []
        with disable_torch_function(), torch.no_grad():
            for entry in self._engine.entries:
                if not entry.flat.unsharded:
                    continue
                grad, earlier = get_grad(entry.param), self._earlier.get(entry.param)
                if grad is not None and factor != 1:
                    grad.div_(factor)
                if earlier is not None:
                    sums.append((entry.param, earlier if grad is None else earlier.add_(grad)))
        return sums

    def _take_back(self) -> None:
        """Give the gradients back that a step which raised has set aside."""
        earlier, self._earlier = self._earlier or {}, None
        for param, grad in earlier.items():
            set_grad(param, grad)

    # -- backward passes in two halves ---------------------------------------------------------------
    #
    # Zero-bubble schedules (Qi et al. 2024) compute gradients of inputs first, and those of weights
    # later. torch's functions find weights in the graph. There they are the whole parameters.

    def _weights(self) -> list[_Weight]:
        return [
            _Weight(entry.param if entry.flat.unsharded else entry.compute, entry)
            for entry in self._engine.entries
            if entry.param.requires_grad
        ]

    def _backward_of_input(self, given: dict[str, Any]) -> Any:
        weights: Any = iter(self._weights())
        return stage_backward_input(
            given["stage_output"], given["output_grads"], given["input_values"], weights
        )

    def _backward_of_weight(self, given: dict[str, Any]) -> Any:
        weights: Any = self._weights()
        stage_backward_weight(iter(weights), given["param_groups"])
        with disable_torch_function(), torch.no_grad():
            for weight in weights:
                weight.hand_over()
        if not self._engine.unsharded:
            self._engine.passes.take_gradients()
        return (), None

    # -- the first call, which infers shapes ---------------------------------------------------------
    #
    # It runs the module on tensors of arbitrary values, and differentiates with respect to inputs.

    def _forward_metadata_inference(
        self, args: Any, kwargs: dict[str, Any] | None = None, has_backward: bool = False
    ) -> Any:
        if not self._engine.gather.holding:
            self._gathered_here = True
            unshard(self.submod)
        with accumulating(self.submod):
            return super()._forward_metadata_inference(args, kwargs, has_backward)

    def _post_metadata_inference_cleanup(self) -> None:
        super()._post_metadata_inference_cleanup()  # frees the graph
        self._release()
        # A first stage has no inputs to differentiate with respect to: its graph was dropped
        self._engine.progress.graphs.clear()


class _Weight:
    """What torch's functions see of a parameter: its node in the graph, and a place for its
    gradient. (`.grad` of a whole parameter is that of the sharded one, outside a pass.)
    """

    requires_grad, grad_fn = True, None

    def __init__(self, leaf: torch.Tensor, entry: Entry) -> None:
        self.leaf, self.entry = leaf, entry
        self.grad: torch.Tensor | None = None

    def view_as(self, _: Any) -> torch.Tensor:
        return self.leaf.view_as(self.leaf)

    def hand_over(self) -> None:
        """Put the gradient on the parameter itself."""
        if self.grad is None:
            return
        before = get_grad(self.leaf) if self.entry.flat.unsharded else None
        set_grad(self.leaf, self.grad if before is None else before.add_(self.grad))


def register_actions(schedule: schedules._PipelineScheduleRuntime) -> None:
    """Let the UNSHARD and RESHARD actions of a schedule gather and release its stages. Stages that
    are no `onefold.parallel.PipelineStage` are passed over.

    Raises:
        ValueError: the schedule has no actions (ScheduleGPipe, Schedule1F1B): its stages gather by
            themselves.
    """
    if not hasattr(schedule, "register_custom_function"):
        raise ValueError(
            f"a {type(schedule).__name__} has no UNSHARD and RESHARD actions: leave"
            " register_actions out. onefold.parallel.PipelineStage gathers at the first micro-batch"
            " and releases after the last."
        )

    def by(act: Callable[[nn.Module], None]) -> Any:
        def action(what: Any, context: Any) -> None:
            for stage in context.schedule_ref._stages:
                if stage.stage_index == what.stage_index and isinstance(stage, PipelineStage):
                    act(stage.submod)

        return action

    schedule.register_custom_function(schedules.UNSHARD, by(unshard))
    schedule.register_custom_function(schedules.RESHARD, by(reshard))


def _refuse(module: nn.Module, stages: int) -> None:
    if not is_sharded(module):
        raise ValueError(
            f"a stage was made of a {type(module).__name__} that is not sharded: call"
            " onefold.shard(module, recipe, mesh=...) first, over the ranks that run this stage."
        )
    if engine_of(module).recipe.step_in_backward:
        raise ValueError(
            "step_in_backward=True steps a unit as soon as a backward pass has its gradients, and a"
            " stage of a pipeline reduces them after the backward passes of all micro-batches: leave"
            " that option out."
        )
    config = getattr(module, "config", None)
    if stages > 1 and getattr(config, "tie_word_embeddings", False) is True:
        raise ValueError(
            "this stage's config says tie_word_embeddings=True, and a weight cannot be shared between"
            f" the {stages} stages of a pipeline: each would train its own. Untie the head before"
            " the model is cut (give it a weight of its own, and set"
            " config.tie_word_embeddings=False)."
        )
