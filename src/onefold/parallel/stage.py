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

[Note: zero bubbles] Zero-bubble schedules (Qi et al. 2024) compute gradients of inputs first, and those
of weights later. Here both come with the first: the numbers are the same, and the bubbles stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

from onefold.comm import StallError
from onefold.runtime.engine import Engine
from onefold.runtime.hooks import engine_of, is_sharded
from onefold.runtime.parameters.interval import disable_torch_function, get_grad, set_grad

# -- a module that stays gathered over several micro-batches ----------------------------------------
#
# Its gradients are reduced once for all of them:
#
#     unshard          gather every unit once                (stages 1 and 2: refresh the stale copies)
#     micro-batches    forward and backward passes in any order, several graphs open; gradients stay whole on this rank
#     reshard          release every unit
#     reduce_grad      one reduction of the sums


def unshard(module: nn.Module) -> None:
    """Gather all units of a sharded module, and keep them gathered until `reshard`. Collective.

    Returns once the gathers are launched; each unit is waited for where it is used. Passes in
    between gather nothing: forward passes of several micro-batches may be open, and backward passes
    may come in any order. An optimizer step in between releases the units, which are then gathered
    again as they are used.

    At stages 0 to 2 whole parameters exist anyway: copies that an optimizer step has made stale are
    gathered.

    Raises:
        ValueError: the module was not sharded.
        RuntimeError: a pass of the module is under way.
    """
    engine = engine_of(module)
    _refuse_inside(engine, "unshard")
    with disable_torch_function(), torch.no_grad():
        engine.gather.keep(engine.gather.sharded, holding=True)


def reshard(module: nn.Module) -> None:
    """Release the units that `unshard` has gathered.

    Raises:
        ValueError: the module was not sharded.
        RuntimeError: a pass of the module is under way.
    """
    engine = engine_of(module)
    _refuse_inside(engine, "reshard")
    with disable_torch_function():
        engine.gather.let_go()


def reduce_grad(module: nn.Module, divide_by: float = 1.0) -> None:
    """Divide the gradients that wait on this rank, and reduce them: `.grad` is set, or added to.
    Collective. Does nothing if none wait.

    They wait after backward passes inside `accumulating(module)`, and under `onefold.no_sync` where
    the recipe reduces at the boundary.

    Args:
        divide_by: the number of micro-batches, if each of their losses is a mean.

    Raises:
        ValueError: the module was not sharded.
        RuntimeError: a pass of the module is under way, or `onefold.no_sync(module)` is open.
    """
    engine = engine_of(module)
    _refuse_inside(engine, "reduce_grad")
    if not engine.pending:
        return
    if not engine.sync:
        raise RuntimeError(
            "onefold.parallel.reduce_grad was called inside onefold.no_sync of the same module, which"
            " keeps gradients from being reduced: call it outside."
        )
    if divide_by != 1:
        with disable_torch_function(), torch.no_grad():
            for flat in engine.flats:
                for buffer in (flat.grad, flat.held):  # whole, or summed inside a group of shards
                    if buffer is not None:
                        buffer.div_(divide_by)
    engine.reduce_pending()


@contextlib.contextmanager
def accumulating(module: nn.Module) -> Iterator[None]:
    """Context of passes whose gradients stay whole on this rank, until `reduce_grad`."""
    engine = engine_of(module)
    before, engine.holds_whole = engine.holds_whole, True
    try:
        with engine.unsynced():
            yield
    finally:
        engine.holds_whole = before


@contextlib.contextmanager
def _stalls_by_name() -> Iterator[None]:
    """torch's stage raises a RuntimeError from whatever a pass has raised: a StallError stays one."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__cause__, StallError):
            raise error.__cause__ from None
        raise


def _refuse_inside(engine: Engine, name: str) -> None:
    if engine.in_any_pass():
        raise RuntimeError(
            f"onefold.parallel.{name} was called inside a pass of the module; call it between"
            " micro-batches."
        )


# -- a stage -----------------------------------------------------------------------------------------


class PipelineStage(pipelining.PipelineStage):
    """torch's PipelineStage, for a module that `onefold.shard()` returned.

    Its parameters are gathered once for all micro-batches of a step and its gradients are reduced
    once, at every stage of ZeRO. Schedules with UNSHARD and RESHARD actions (those of several
    stages on a rank) gather and release by them after `register_actions(schedule)`. Without it, and
    in ScheduleGPipe and Schedule1F1B, which have no such actions, parameters stay gathered from the
    first forward to the last backward micro-batch.

    The arguments are those of torch's class.

    Raises:
        ValueError: the module is not sharded, its recipe steps in the backward pass, or it says
            that its embeddings are tied, which stages of a pipeline cannot be.
    """

    def __init__(
        self, submodule: nn.Module, stage_index: int, num_stages: int, *args: Any, **kwargs: Any
    ) -> None:
        _refuse(submodule, num_stages)
        super().__init__(submodule, stage_index, num_stages, *args, **kwargs)
        self._forwards = 0  # micro-batches of this step
        self._gathered_here = False  # by `forward_one_chunk`
        # What gradients that wait for a later step's reduction are to be divided by
        self._divide_by: int | None = None
        # `.grad` of earlier steps, of parameters that no rank shares; None outside a step
        self._earlier: list[tuple[nn.Parameter, torch.Tensor | None]] | None = None

    @property
    def _engine(self) -> Engine:
        return engine_of(self.submod)

    # -- one step ----------------------------------------------------------------------------------

    def clear_runtime_states(self) -> None:
        """Begin a step. Called by schedules."""
        self._release()  # left by a step that raised
        # Where it raised outside of the stage, unless zero_grad() has come since
        if any((g := get_grad(param)) is not None and g.any() for param, _ in self._earlier or ()):
            self._take_back()
        self._earlier = None
        if not any(flat.waits for flat in self._engine.flats):
            self._divide_by = None
        self._forwards = 0
        super().clear_runtime_states()

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        self._hold()
        with self._micro_batch():
            output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        self._forwards += 1
        if not self.has_backward and self._forwards == len(self.args_recv_info):
            self._release()
            self._engine.graphs.clear()  # no backward pass comes
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        # See [Note: zero bubbles]
        super().backward_one_chunk(bwd_chunk_id, loss, last_backward=last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if last_backward:
            self._release()

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, Any]] | None]:
        if self._earlier is None:
            self._set_aside()
        with self._micro_batch():
            result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if last_backward:
            self._release()
        return result

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide and reduce the gradients of this step. Called by schedules, once or twice a step."""
        if self._earlier is None:  # no backward pass: an evaluation, or the second call in a step
            return
        with disable_torch_function(), torch.no_grad():
            for param, earlier in self._earlier:
                if (grad := get_grad(param)) is not None:
                    grad.div_(grad_scale_factor)
                if earlier is not None:
                    set_grad(param, earlier if grad is None else earlier.add_(grad))
        self._earlier = None
        engine = self._engine
        if not engine.pending:
            return
        if self._divide_by not in (None, grad_scale_factor):
            raise ValueError(
                f"gradients that wait under onefold.no_sync are to be divided by {self._divide_by}"
                f" micro-batches, and those of this step by {grad_scale_factor}: give all steps of a"
                " schedule under no_sync the same number, or leave no_sync out."
            )
        if not engine.sync:
            self._divide_by = grad_scale_factor
            return
        self._divide_by = None
        reduce_grad(self.submod, grad_scale_factor)

    #: Schedules with REDUCE_GRAD actions call this one first.
    perform_reduce_grad = scale_grads

    def _hold(self) -> None:
        if not self._engine.gather.holding:
            self._gathered_here = True
            unshard(self.submod)

    def _release(self) -> None:
        if self._gathered_here:
            self._gathered_here = False
            reshard(self.submod)

    # -- gradients that autograd adds to `.grad` by itself -------------------------------------------
    #
    # Those of parameters that this rank alone holds (a stage on one rank). See [Note: divided before
    # it is added].

    def _set_aside(self) -> None:
        params = [entry.param for entry in self._engine.entries if entry.flat.unsharded]
        self._earlier = [(param, get_grad(param)) for param in params]
        for param in params:
            set_grad(param, None)

    @contextlib.contextmanager
    def _micro_batch(self) -> Iterator[None]:
        """Context of one pass. If it raises, gradients are those before the step again."""
        try:
            with accumulating(self.submod), _stalls_by_name():
                yield
        except BaseException:
            self._take_back()
            raise

    def _take_back(self) -> None:
        """Give the gradients back that a step which raised has set aside."""
        for param, grad in self._earlier or ():
            set_grad(param, grad)
        self._earlier = None

    # -- the first call, which infers shapes ---------------------------------------------------------
    #
    # It runs the module on tensors of arbitrary values, and differentiates with respect to inputs.

    def _forward_metadata_inference(
        self, args: Any, kwargs: dict[str, Any] | None = None, has_backward: bool = False
    ) -> Any:
        self._hold()
        with accumulating(self.submod):
            return super()._forward_metadata_inference(args, kwargs, has_backward)

    def _post_metadata_inference_cleanup(self) -> None:
        super()._post_metadata_inference_cleanup()  # frees the graph
        self._release()
        # A first stage has no inputs to differentiate with respect to: its graph was dropped
        self._engine.graphs.clear()


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
