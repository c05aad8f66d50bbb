"""Gradient norms, clipping and loss scaling."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from onefold.comm import Group
from onefold.device import has_streams
from onefold.recipe.rows import FLAT
from onefold.runtime.agree import in_words
from onefold.runtime.engine import Engine
from onefold.runtime.hooks import engine_of
from onefold.runtime.parameters.interval import dispatches, entry_of
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.stepper import is_known, supports_scaling
from onefold.runtime.storage import Storage

# -- norms -----------------------------------------------------------------------------------------
#
# Clip by the global norm of gradients that are divided among the ranks.
#
# [Note: the norm's order] At every stage each rank computes the norms of its own intervals (at stage
# 0 too, where it holds all gradients) and adds their powers in fp64. Then the ranks' sums are added
# in rank order. So the norm has the same bits at every stage. It costs one pass over 1/N of the
# gradients and one exchange of 8 bytes. Gradients are measured by the model's device, also if they
# are stored on the host: see [Note: norms on the device] in offload/storage.py.
#
# [Note: stages of a pipeline] Each stage is a sharded model of its own, on some of the ranks. Every
# element of every stage is accounted for by one rank, so the sum over all ranks of what each accounts
# for is the power of the norm over all stages. The ranks of the stages are told by one group over all
# of them, which is made at the first call.


def clip_grad_norm_(
    module: nn.Module | Sequence[nn.Module],
    max_norm: float,
    norm_type: float = 2.0,
) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`. Collective. Returns the
    norm before scaling, on every rank. Each element counts once, whatever axes of a mesh it is
    divided or replicated over.

    Args:
        module: the model; or a list of the stages of a pipeline that this rank has, each sharded by
            itself. Then the norm is over all stages of all ranks, and every rank must call it.

    Raises:
        ValueError: `max_norm` is not a number from 0 up (infinity only measures), `norm_type` is
            not a number above 0, or the recipe steps in the backward pass. Raised on every rank,
            before gradients change.
    """
    for name, given, expected in (
        ("max_norm", max_norm, "0 or more; float('inf') measures without clipping"),
        ("norm_type", norm_type, "above 0; float('inf') is one"),
    ):
        number = isinstance(given, (numbers.Real, torch.Tensor)) and not isinstance(given, bool)
        if not number or not float(given) >= 0 or (name == "norm_type" and given == 0):
            raise ValueError(f"{name}={given!r}: expected a number, {expected}.")
    limit, p = float(max_norm), float(norm_type)
    engines, across = _measured(module)
    if any(engine.recipe.step_in_backward for engine in engines):
        raise ValueError(
            "the recipe says step_in_backward=True, so that offloaded units are stepped before the"
            " norm of all gradients is known. Leave that option out to clip."
        )
    with disable_torch_function(), torch.no_grad():
        for engine in engines:
            engine.optimizer_is_stepping()
            said = f"max_norm={in_words(limit)}", f"norm_type={in_words(p)}"
            engine.note_update("clip_grad_norm_()", iter(said))
        total = _total_norm(engines, across, p)
        for engine in engines:
            engine.transfers.measures = p == 2
        if limit == math.inf:  # the factor is 1: no need to read the norm
            return total.to(torch.float32)
        scale_gradients(engines, (limit / (total + 1e-6)).clamp(max=1.0).to(torch.float32))
        return total.to(torch.float32)


def scale_gradients(engines: Sequence[Engine], scale: torch.Tensor) -> None:
    """Multiply all gradients by a 0-dim fp32 tensor, wherever they are stored: those on NVMe when they
    are next read.
    """
    with disable_torch_function(), torch.no_grad():
        grads, on_disk = in_memory(e.param for engine in engines for e in engine.entries)
        host = grads.pop(torch.device("cpu"), [])
        for device, here in grads.items():
            torch._foreach_mul_(here, scale.to(device))
        # If gradients are on the host, read the factor: a factor of 1 saves a pass over them. The
        # host's step needs the value anyway. On a device, reading it would make the host wait. A fake
        # tensor has none.
        if (host or on_disk) and (dispatches(type(scale)) or scale.item() != 1.0):
            scale = scale.cpu()
            with engines[0].transfers.host_threads():
                if host:
                    torch._foreach_mul_(host, scale)
                for storage in on_disk:
                    storage.scale_gradients(scale)


def in_memory(
    params: Iterable[torch.Tensor],
) -> tuple[dict[torch.device, list[torch.Tensor]], list[Storage]]:
    """Return the gradients in memory, by device, and the storages of those on NVMe."""
    here: dict[torch.device, list[torch.Tensor]] = {}
    storages: dict[Storage, None] = {}
    for param in params:
        if (grad := param.grad) is None:
            continue
        entry = entry_of(param)
        if entry is not None and entry.flat.storage.gradients_on_disk:
            storages[entry.flat.storage] = None
        else:
            here.setdefault(grad.device, []).append(grad)
    return here, list(storages)


def _total_norm(engines: Sequence[Engine], group: Group, p: float) -> torch.Tensor:
    """Return the norm over all ranks of `group` as a 0-dim fp64 tensor, with the same bits on every
    rank. Each rank measures the parts of all gradients that it accounts for.
    """
    device = engines[0].device
    norms, grads = dict[int, torch.Tensor](), dict[int, torch.Tensor]()  # by the entry's place
    for at, entry in enumerate(entry for engine in engines for entry in engine.entries):
        (a, b), flat, grad = entry.accounted(), entry.flat, entry.param.grad
        if grad is None or a == b:
            continue
        if flat.storage.measures_gradients:  # on NVMe, or off a device with streams
            norms[at] = flat.storage.gradient_norm(entry, p)
            continue
        # Other ranks hold it too: each accounts for one part
        if flat.shared:
            first, _ = entry.owned()
            grad = grad.reshape(-1)[a - first : b - first]
        grads[at] = grad
    if grads:
        norms.update(zip(grads, torch._foreach_norm([*grads.values()], p), strict=True))
    each = [norms[at] for at in sorted(norms)]
    each = each or [torch.zeros((), dtype=torch.float64, device=device)]
    if len({(n.dtype, n.device) for n in each}) > 1:  # else one cast serves all
        each = [n.to(device, torch.float64) for n in each]
    found = torch.stack(each).to(device, torch.float64)
    mine = found.max() if math.isinf(p) else found.pow(p).sum()
    values = group.gather_values(
        mine, engines[0].context("control", "(gradient norm)", "optimizer")
    )
    return values.max() if math.isinf(p) else values.sum().pow(1.0 / p)


def _measured(module: nn.Module | Sequence[nn.Module]) -> tuple[list[Engine], Group]:
    """Return the engine of a model, or those of this rank's stages of a pipeline; and all ranks of the
    model, or of all stages.
    """
    if isinstance(module, nn.Module):
        engine = engine_of(module)
        return [engine], engine.group
    engines = [engine_of(stage) for stage in module]
    if not engines:
        raise ValueError("no stage was given: give the list of those on this rank.")
    return engines, across_stages(engines)


def across_stages(engines: Sequence[Engine]) -> Group:
    """Return a group over all ranks, those of all stages of a pipeline. Collective the first time.
    See [Note: stages of a pipeline].
    """
    first = engines[0]
    if first.across is None:
        first.across = Group.over(None, first.device, first.recipe.stall_timeout, FLAT)
    return first.across


# -- loss scaling ----------------------------------------------------------------------------------
#
# Loss scaling for fp16: torch's GradScaler, with an overflow on one rank seen by all ranks.


class GradScaler(torch.amp.GradScaler):
    """Dynamic loss scaling for a sharded model: `scale`, `unscale_`, `step`, `update` as in
    `torch.amp.GradScaler`.

    Gradients are unscaled on the rank that owns them; if any rank found an infinity or a NaN, every
    rank skips the step.

    Args:
        module: the model that `onefold.shard` returned, or a list of those of this rank's stages of
            a pipeline. Then one optimizer steps all of them.
        options: those of torch.amp.GradScaler (init_scale, growth_factor, backoff_factor,
            growth_interval, enabled).
    """

    def __init__(self, module: nn.Module | Sequence[nn.Module], **options: Any) -> None:
        self._engines, self._across = _measured(module)
        super().__init__(self._engines[0].device.type, **options)
        # Only ranks of the last stage scale a loss; the others unscale by the same number
        self._stages = not isinstance(module, nn.Module)
        if self._stages and self.is_enabled():
            self._lazy_init_scale_growth_tracker(self._engines[0].device)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step as torch's GradScaler does. With a fused optimizer the device skips the step after
        an overflow, without a synchronization.
        """
        engine = self._engines[0]
        known = "_step_supports_amp_scaling" in optimizer.__dict__ or args or kwargs
        with disable_torch_function():
            alone = all(_in_one_piece(each) and not each.unsharded for each in self._engines)
            fuses = not known and alone and supports_scaling(optimizer, engine.device)
        if not fuses:
            return super().step(optimizer, *args, **kwargs)
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        try:
            return super().step(optimizer)
        finally:
            del optimizer._step_supports_amp_scaling  # type: ignore[attr-defined]

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        engine = self._engines[0]
        if self._stages and len(self._per_optimizer_states) > 1:
            raise ValueError(
                "a GradScaler of a pipeline's stages scales one optimizer: give one the parameters of"
                " all stages of this rank, in groups if they have different options."
            )
        with disable_torch_function(), torch.no_grad():
            params = (p for group in optimizer.param_groups for p in group["params"])
            grads, on_disk = in_memory(params)
            found = torch.zeros((), dtype=torch.float32, device=engine.device)
            for device, some in grads.items():
                here = torch.zeros((), dtype=torch.float32, device=device)
                on_host = device.type == "cpu"
                with engine.transfers.host_threads() if on_host else nullcontext():
                    for dtype in {grad.dtype for grad in some}:  # a kernel of CUDA takes one
                        torch._amp_foreach_non_finite_check_and_unscale_(
                            [g for g in some if g.dtype == dtype], here, inv_scale.to(device)
                        )
                found += here.to(engine.device)
            for storage in on_disk:
                found += not storage.gradients_finite()
                storage.scale_gradients(inv_scale)
            # One exchange, also where ranks have unequal numbers of stages
            engine.agree_on_overflow(found, self._across)
            for each in self._engines[1:]:
                each.told_of_overflow()
        return {engine.device: found}


# -- steps that are left out -----------------------------------------------------------------------
#
# Skip a step without telling the host: the device decides.
#
# torch's fused kernels take a number on the device, `found_inf`. If it is 1, the kernel writes
# neither weights nor moments, and torch takes back the step counts that bias correction uses. All
# state is as if `step()` had not been called.
#
# | the step is made                                        | who decides                                         |
# |---------------------------------------------------------|-----------------------------------------------------|
# | by a fused kernel, on a device with streams             | the device                                          |
# | on the host (offloaded shards)                          | the host, which waits for the gradients anyway      |
# | piece by piece (packed moments, stochastic rounding)    | the host: packing them again would change them      |
# | by a loop or foreach, or by an unknown optimizer        | the host: these take no `found_inf`                 |
# | on a device without streams                             | the host: it never waits for such a device          |


def skips_on_device(optimizer: torch.optim.Optimizer, engine: Engine) -> bool:
    """Return whether `step_unless` can be used: the device decides. See the table above."""
    fused = is_known(optimizer) and all(group.get("fused") for group in optimizer.param_groups)
    return has_streams(engine.device) and _in_one_piece(engine) and fused


def _in_one_piece(engine: Engine) -> bool:
    """Whether a fused kernel steps all parameters where they are, piece by piece none."""
    recipe = engine.recipe
    return not (engine.offloaded_flats or recipe.moments or recipe.stochastic_rounding)


def step_unless(
    optimizer: Any, skip: torch.Tensor, scaler: torch.amp.GradScaler | None = None
) -> None:
    """Call `optimizer.step()`, without effect if `skip` is 1. The host never reads `skip`.

    Args:
        optimizer: one for which `skips_on_device` returns True.
        skip: 0 or 1 in fp32, 0-dim, on the device, the same on every rank.
        scaler: the scaler that has unscaled the gradients. The step is also skipped if it found an
            overflow. The caller must call its `update`.
    """
    if scaler is not None:
        for found in scaler._found_inf_per_device(optimizer).values():
            skip = torch.maximum(skip, (found > 0).to(skip))
    optimizer.grad_scale, optimizer.found_inf = None, skip
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf
