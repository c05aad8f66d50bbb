"""Stream the whole tensors of a sharded model on every rank, for example to an inference engine
that runs beside the training.

    flat buffers   [ a ][ b ][  c  ]   [ d ][ e ]   ...      in the order of the units
                   └── gathered whole, yielded as views, released ──┘

A parameter that ranks hold boxes of is put together by DTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from onefold.memory import GATHERED
from onefold.pretrained.adapters import Merging
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Flat
from onefold.runtime.hooks import engine_of
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.parts import tell_all, whole_masters
from onefold.runtime.state.dicts import beside_parameters

#: Values of `dtype=` besides torch's dtypes: the compute dtype and the master weights' dtype.
COMPUTE, MASTER = "compute", "master"


def stream_params(
    model: nn.Module,
    dtype: torch.dtype | str = COMPUTE,
    *,
    merge_adapters: bool = False,
    buffers: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) for each parameter and each persistent buffer of the model, on
    every rank. Collective: every rank must iterate to the end.

    Names are those of the module's state dict. Tied weights are yielded once, under their first
    name. A tensor is a copy on the model's device, which the next optimizer step does not change.
    A rank has the whole tensors of one unit at a time; of two in a `for` loop, whose variable keeps
    the last tensor while the next unit is gathered. A tensor that the caller keeps also keeps the
    memory of tensors that were gathered with it.

    Args:
        model: the return value of `onefold.shard`.
        dtype: dtype of floating-point parameters: "compute" (bf16 under bf16), "master" (the dtype
            of the master weights), or a torch dtype.
        merge_adapters: for a peft model with LoRA: yield the base model's tensors under its own
            names, with s · B·A of the active adapter added in fp32. The adapters of a unit are
            whole beside it.
        buffers: False leaves buffers out.

    Raises:
        CheckpointError: with `merge_adapters`: there are no adapters, or they do more than add B·A
            to weights of linear layers.
        ValueError: `dtype` is none of the above, or arguments differ between ranks.
        UninitializedError: the model was built on the meta device, and something was never loaded.
        RuntimeError: it was called inside a forward or backward pass, or the model was changed or
            stepped during the iteration.
    """
    engine, chosen = engine_of(model), _dtype_of(dtype)
    if engine.in_any_pass():
        raise RuntimeError("stream_params was called inside a pass of the model; call it outside.")
    if not engine.unsharded:
        engine.check_moment("stream_params")
    engine.uninitialized.refuse("stream_params() would give")
    engine.buffers.refuse_own(model, "stream_params()")
    merging = Merging.of(model) if merge_adapters else None
    said = tell_all(engine, "stream_params()", (str(dtype), merge_adapters))
    if other := next((there for there in said if there != said[0]), None):
        raise ValueError(
            f"stream_params() was given dtype and merge_adapters {other} on one rank and {said[0]}"
            " on rank 0: give all ranks the same."
        )
    return _stream(engine, beside_parameters(engine, model)[0] if buffers else {}, chosen, merging)


def _dtype_of(dtype: torch.dtype | str) -> Callable[[Flat], torch.dtype]:
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return lambda flat: dtype if flat.dtypes.compute.is_floating_point else flat.dtypes.compute
    if dtype in (COMPUTE, MASTER):
        return lambda flat: flat.dtypes.master if dtype == MASTER else flat.dtypes.compute
    raise ValueError(
        f"dtype={dtype!r}: expected 'compute', 'master' or a floating-point dtype of torch."
    )


def _stream(
    engine: Engine,
    buffers: Mapping[str, Tensor],
    dtype: Callable[[Flat], torch.dtype],
    merging: Merging | None,
) -> Iterator[tuple[str, Tensor]]:
    step = engine.step_count
    names = {name: name for name in (*buffers, *(entry.name for entry in engine.entries))}
    factors = {}
    if merging is not None:
        names, factors = merging.names, merging.factors
    entries = {entry.name: entry for entry in engine.entries}
    for flat in engine.flats:
        found = [entry for entry in flat.entries if entry.name in names]
        if not found:
            continue
        if engine.step_count != step or engine.stack:
            raise RuntimeError(
                "the model was trained while stream_params() was gone through: what is still to"
                " come would be of another step. Go through all of it between two steps."
            )
        added = {e: [entries[n] for n in (f.a, f.b)] for e in found if (f := factors.get(e.name))}
        near = dict.fromkeys(factor.flat for both in added.values() for factor in both)
        fulls = {other: whole_masters(engine, other) for other in near}
        fulls[flat] = whole_masters(engine, flat, dtype(flat))
        nbytes = sum(full.nbytes for full in fulls.values())
        engine.memory.add(GATHERED, nbytes, "(stream_params)")
        try:
            for entry in found:
                whole = flat.view(fulls[flat], entry)
                with disable_torch_function(), torch.no_grad():
                    if entry.box is not None:
                        whole = entry.box.gather(whole)
                    if entry in added:
                        a, b = (
                            factor.flat.view(fulls[factor.flat], factor) for factor in added[entry]
                        )
                        factors[entry.name].add_to(whole, a, b)
                yield names[entry.name], whole
                del whole  # frees its memory before the next unit is gathered
        finally:
            engine.memory.add(GATHERED, -nbytes, "(stream_params)")
        del fulls
    for name, value in buffers.items():
        if name in names:
            yield names[name], value.detach().clone()
