"""The hooks that tie an engine to the modules of its units."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from onefold.runtime.engine import Engine, in_autograd
from onefold.runtime.gather import tensors_in
from onefold.runtime.parameter import whole_sight
from onefold.runtime.unit import Unit


def install(engine: Engine, unit: Unit, module: nn.Module) -> None:
    """Let `engine` know when the forward pass of `unit`'s module begins, ends, or raises."""
    cast_to = _cast_to(engine)
    left = [False]

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if engine.whole_depth or engine.closed:
            return None
        left[0] = False
        outermost = engine.enter(unit)
        return (_cast(args, cast_to), _cast(kwargs, cast_to)) if outermost and cast_to is not None else None

    def after(_: nn.Module, args: Any, output: Any) -> None:
        if not (engine.whole_depth or engine.closed):
            engine.leave(unit, output)
            left[0] = True

    def always(_: nn.Module, args: Any, output: Any) -> None:
        # Runs after `after`, and also when the forward pass raised: then nothing has left.
        if not left[0] and engine.stack and not engine.closed:
            engine.abort(unit)

    _register(module, before, after, always)


def install_on_part(engine: Engine, module: nn.Module) -> None:
    """Let a module of the root unit be called by itself (an encoder, an embedding): that too is a pass over the model."""
    root, token = engine.units[0], object()
    cast_to = _cast_to(engine)

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if engine.stack or engine.whole_depth or engine.closed or in_autograd():
            return None
        engine.part = token
        engine.enter(root, part=True)
        return (_cast(args, cast_to), _cast(kwargs, cast_to)) if cast_to is not None else None

    def after(_: nn.Module, args: Any, output: Any) -> None:
        if engine.part is token and len(engine.stack) == 1:
            engine.part = None
            engine.leave(root, output)

    def always(_: nn.Module, args: Any, output: Any) -> None:
        if engine.part is token and len(engine.stack) == 1:  # it raised
            engine.part = None
            engine.abort(root)

    _register(module, before, after, always)


def _register(module: nn.Module, before: Any, after: Any, always: Any) -> None:
    for hook in (before, after, always):
        _keep_from_compiler(hook)
    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    module.register_forward_hook(after)
    module.register_forward_hook(always, always_call=True)


def _keep_from_compiler(hook: Any) -> None:
    """A compiled module breaks its graph at the hook, and the hook's own frames are run as they are.

    torch.compiler.disable would do, but importing the compiler costs a second to all who do not compile.
    """
    hook._torchdynamo_disable = True
    frames = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if frames is not None and hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(hook.__code__, frames._FrameExecStrategy(skip, skip))


def _cast_to(engine: Engine) -> torch.dtype | None:
    return engine.recipe.compute_dtype if engine.recipe.cast_inputs and engine.recipe.compute_dtype != torch.float32 else None


def guard_state_dict(engine: Engine, module: nn.Module) -> None:
    """`state_dict()` of a sharded model would hold one rank's intervals under the names of whole parameters: refuse it."""
    if all(flat.whole_master for u in engine.units for flat in u.flats):
        return

    def on_save(_: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not engine.whole_depth and not engine.closed:
            raise RuntimeError(
                "state_dict() of a sharded model would hold this rank's intervals under the names of whole parameters. "
                "Use onefold.full_state_dict(model) on every rank (rank 0 gets the whole), "
                "or call state_dict() inside `with onefold.full_params(model):`."
            )

    def on_load(*_: Any) -> None:
        if not engine.whole_depth and not engine.closed:
            raise RuntimeError(
                "load_state_dict() on a sharded model would write whole parameters over this rank's intervals. "
                "Use onefold.load_full_state_dict(model, state_dict) on every rank, "
                "or load inside `with onefold.full_params(model, write=True):`."
            )

    module.register_state_dict_pre_hook(on_save)
    module.register_load_state_dict_pre_hook(on_load)


def statistics_of(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """The buffers that training changes by its data: running statistics of normalization layers."""
    norm = nn.modules.batchnorm._NormBase
    return [(m, name) for m in module.modules() if isinstance(m, norm) for name, b in m._buffers.items() if b is not None]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        with whole_sight():
            return value.to(dtype) if value.is_floating_point() and value.dtype in (torch.float32, torch.float16, torch.bfloat16) else value
    if isinstance(value, (list, tuple)) and tensors_in(value):
        cast = [_cast(v, dtype) for v in value]
        return type(value)(*cast) if hasattr(value, "_fields") else type(value)(cast)
    if type(value) is dict:
        return {k: _cast(v, dtype) for k, v in value.items()}
    return value
