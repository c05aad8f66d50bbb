"""Count the activations: the bytes that autograd keeps for the backward pass.

A tensor counts from the moment autograd saves it, in a forward pass or in the recomputation of a
checkpointed block, until its storage is freed. A weak reference to the storage tells when that is. A
storage counts once, however many views of it are saved. Parameters, buffers and the engine's own flat
buffers are not activations.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Container
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from onefold.plan.schema import ACTIVATIONS, LOGITS
from onefold.runtime.boxes import local_of
from onefold.runtime.differentiate import in_autograd
from onefold.runtime.hooks import engine_of, is_sharded
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.saved import Kept


class Activations(contextlib.ExitStack):
    """Counts what autograd keeps inside the `with` block:
    `with Activations(model) as saved: ...; Held(changes=saved.changes).peak()`.

    It costs some microseconds per saved tensor, so it is opt-in. It does not change values or
    gradients. Put it around whole steps (forward and backward). Only one may be open per model.

    Args:
        model: sharded or not. A tensor whose last dimension is its `config.vocab_size` counts as
            logits.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
        self.changes: list[tuple[float, str, str, int]] = []
        self._model = model
        self._gathered: Container[int] = (
            engine_of(model).gather.by_storage if is_sharded(model) else ()
        )
        self._excluded = _not_activations(model)
        self._saved: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._recomputing: list[tuple[nn.Module, saved_tensors_hooks]] = []

    def __enter__(self) -> Activations:
        super().__enter__()
        self.callback(self._saved.clear)
        self.enter_context(self._hooks())
        for module in self._model.modules():
            self.callback(module.register_forward_pre_hook(self._before).remove)
            after = module.register_forward_hook(self._after, prepend=True, always_call=True)
            self.callback(after.remove)
        return self

    def _hooks(self) -> saved_tensors_hooks:
        """Return hooks that count a tensor and then call the hooks that were in place before (the
        engine's or a checkpoint's).
        """
        top: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
        pack_before, unpack_before = top or (Kept, Kept.read)

        def pack(t: torch.Tensor) -> Any:
            # Before `pack_before`: a checkpoint's hook ends the recomputation by raising, once it
            # has the last tensor that it needs
            self._count(t)
            return pack_before(t)

        return saved_tensors_hooks(pack, unpack_before)

    def _before(self, module: nn.Module, args: Any) -> None:
        # A recomputation has its own hooks, which hide the outer ones. Its outermost module puts
        # the counting hooks on top of them.
        if in_autograd() and not self._recomputing and not torch.compiler.is_compiling():
            hooks = self._hooks()
            self._recomputing.append((module, hooks))
            hooks.__enter__()

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._recomputing and self._recomputing[-1][0] is module:
            self._recomputing.pop()[1].__exit__(None, None, None)

    def _count(self, t: torch.Tensor) -> None:
        """Count the storage behind `t`, unless it is counted already or is no activation."""
        with disable_torch_function():
            # A DTensor has no memory of its own, and its part may be on its way
            local = local_of(t)
            storage = getattr(local, "elem", local).untyped_storage()
            address, key, nbytes = storage.data_ptr(), storage._cdata, storage.nbytes()
            own = address in self._excluded or address in self._gathered or key in self._saved
            if own or isinstance(t, nn.Parameter) or isinstance(t._base, nn.Parameter):
                return
            last = t.shape[-1] if t.dim() > 1 and t.is_floating_point() else None
            logits = last is not None and last == self.vocabulary
            category = LOGITS if logits else ACTIVATIONS

            def freed(_: Any) -> None:
                self._saved.pop(key, None)
                self._change(category, -nbytes)

            self._saved[key] = weakref.ref(storage, freed)
            self._change(category, nbytes)

    def _change(self, category: str, delta: int) -> None:
        self.changes.append((time.perf_counter(), category, "", delta))


def _not_activations(model: nn.Module) -> frozenset[int]:
    """Return the addresses of the storages that the model or its engine holds anyway."""
    with disable_torch_function():
        tensors = [*model.parameters(), *model.buffers()]
        if is_sharded(model):
            for unit in engine_of(model).units:
                for flat in unit.flats:
                    held = (flat.full,) if flat.unsharded else (flat.full, flat.master)
                    tensors += [t for t in held if t is not None]
        return frozenset(
            t.untyped_storage().data_ptr() for t in tensors if t.numel() and not t.is_meta
        )
