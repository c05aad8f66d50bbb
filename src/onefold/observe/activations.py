"""Count the activations: the bytes that autograd keeps for the backward pass, as it saves and drops
tensors.

[Note: who holds a saved tensor] A tensor saved in a forward pass is given to autograd inside a
`_Held`. When autograd drops the `_Held`, the tensor's bytes are subtracted. A tensor saved during
the recomputation of a checkpointed block belongs to the checkpoint, which does not tell when it
drops the tensor. Such a storage is watched through a weak reference, which is checked whenever
something else is counted.

A storage counts once, however many views of it are saved. Parameters, buffers and the engine's own
flat buffers are not activations.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Container
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from onefold.plan.schema import ACTIVATIONS, LOGITS
from onefold.runtime.boxes import local_of
from onefold.runtime.differentiate import in_autograd
from onefold.runtime.hooks import engine_of, is_sharded
from onefold.runtime.parameters.parameter import disable_torch_function


class _Held:
    """The object that autograd keeps in place of a saved tensor."""

    __slots__ = ("drop", "key", "packed")

    def __init__(self, packed: Any, key: int, drop: Callable[[int], None]) -> None:
        self.packed, self.key, self.drop = packed, key, drop

    def __del__(self) -> None:
        self.drop(self.key)


class Activations:
    """Counts the bytes saved for backward. A context manager around whole steps; see
    `watch_activations`.

    Attributes:
        timeline: (perf_counter seconds, category, bytes gained or lost), in order.
    """

    def __init__(self, model: nn.Module, vocabulary: int | None = None) -> None:
        config = getattr(model, "config", None)
        size = vocabulary if vocabulary is not None else getattr(config, "vocab_size", None)
        self.vocabulary = size if isinstance(size, int) else None
        self.timeline: list[tuple[float, str, int]] = []
        self._model = weakref.ref(model)
        self._gathered: Container[int] = (
            engine_of(model).gather.by_storage if is_sharded(model) else ()
        )
        self._now: Counter[str] = Counter()
        self._peak: dict[str, int] = {}
        # {storage: (category, bytes, weak reference)}. The weak reference prevents that another
        # storage gets the same address.
        self._sizes: dict[int, tuple[str, int, StorageWeakRef]] = {}
        self._holders: Counter[int] = Counter()
        self._kept: set[int] = set()
        self._excluded: frozenset[int] = frozenset()
        self._saving: saved_tensors_hooks | None = None
        self._recomputing: list[tuple[nn.Module, saved_tensors_hooks]] = []
        self._handles: list[Any] = []

    # -- what it knows -----------------------------------------------------------------------------

    def now(self) -> dict[str, int]:
        """Return the bytes saved at this moment, by category ("activations", "logits")."""
        self._look()
        return {k: v for k, v in self._now.items() if v}

    def peak(self) -> dict[str, int]:
        """Return the bytes by category at the moment when their sum was largest."""
        return dict(self._peak)

    def reset(self) -> None:
        """Forget the peak and the timeline. Bytes that are saved now stay counted."""
        self._look()
        self._peak = {k: v for k, v in self._now.items() if v}
        self.timeline.clear()

    # -- around the steps --------------------------------------------------------------------------

    def __enter__(self) -> Activations:
        if self._saving is not None:
            raise RuntimeError(
                "this watch_activations() is open already: make another one, or leave the first."
            )
        model = self._model()
        if model is None:
            raise RuntimeError(
                "the model that this watch_activations() was made for is gone: make another one."
            )
        self._excluded = _not_activations(model)
        self._saving = self._hooks()
        self._saving.__enter__()
        for module in model.modules():
            self._handles.append(module.register_forward_pre_hook(self._before))
            self._handles.append(
                module.register_forward_hook(self._after, prepend=True, always_call=True)
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        assert self._saving is not None
        self._saving.__exit__(kind, error, trace)
        self._saving = None
        self._look()

    def _hooks(self) -> saved_tensors_hooks:
        """Return hooks that count a tensor and then call the hooks that were in place before (the
        engine's or a checkpoint's).
        """
        top: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
        pack_before, unpack_before = top if top else (None, None)
        recompute = bool(top) and in_autograd()

        def pack(t: torch.Tensor) -> Any:
            key = self._enter(t)
            if key is not None and recompute:
                # Before `pack_before`: the checkpoint's hook ends the recomputation by raising,
                # once it has the last tensor that it needs
                self._kept.add(key)
            # A node that saves its own output must not hold the tensor that holds the node.
            packed = pack_before(t) if pack_before else t if t.grad_fn is None else t.detach()
            if key is None or recompute:
                return packed
            self._holders[key] += 1
            return _Held(packed, key, self._drop)

        def unpack(saved: Any) -> torch.Tensor:
            inner = saved.packed if type(saved) is _Held else saved
            return unpack_before(inner) if unpack_before else inner

        return saved_tensors_hooks(pack, unpack)

    def _before(self, module: nn.Module, args: Any) -> None:
        # A recomputation has its own hooks, which hide the outer ones. Its outermost module puts
        # the counting hooks on top of them.
        if in_autograd() and not self._recomputing and not torch.compiler.is_compiling():
            self._look()
            hooks = self._hooks()
            self._recomputing.append((module, hooks))
            hooks.__enter__()

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._recomputing and self._recomputing[-1][0] is module:
            self._recomputing.pop()[1].__exit__(None, None, None)

    # -- counting ----------------------------------------------------------------------------------

    def _enter(self, t: torch.Tensor) -> int | None:
        """Count the storage behind `t`. Returns its key, or None if it is not an activation."""
        with disable_torch_function():
            # A DTensor has no memory of its own, and its part may be on its way
            local = local_of(t)
            storage = getattr(local, "elem", local).untyped_storage()
            address = storage.data_ptr()
            if (
                address in self._excluded
                or address in self._gathered
                or isinstance(t, nn.Parameter)
                or isinstance(t._base, nn.Parameter)
            ):
                return None
            key, nbytes = storage._cdata, storage.nbytes()
            if key not in self._sizes:
                is_logits = (
                    self.vocabulary is not None
                    and t.dim() > 1
                    and t.shape[-1] == self.vocabulary
                    and t.is_floating_point()
                )
                category = LOGITS if is_logits else ACTIVATIONS
                self._sizes[key] = (category, nbytes, StorageWeakRef(storage))
                self._add(category, nbytes)
            return key

    def _drop(self, key: int) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            if key not in self._kept:
                self._forget(key)
        if self._kept:
            self._look()

    def _look(self) -> None:
        """Subtract the recomputed tensors that are gone."""
        for key in [k for k in self._kept if self._sizes[k][2].expired()]:
            self._kept.discard(key)
            if not self._holders[key]:
                self._forget(key)

    def _forget(self, key: int) -> None:
        category, nbytes, _ = self._sizes.pop(key)
        self._add(category, -nbytes)

    def _add(self, category: str, delta: int) -> None:
        self._now[category] += delta
        self.timeline.append((time.perf_counter(), category, delta))
        if delta > 0 and sum(self._now.values()) > sum(self._peak.values()):
            self._peak = {k: v for k, v in self._now.items() if v}


def watch_activations(model: nn.Module, vocabulary: int | None = None) -> Activations:
    """Count what autograd keeps inside the `with` block:
    `with watch_activations(model) as saved: ...; saved.peak()`.

    It costs some microseconds per saved tensor, so it is opt-in. It does not change values or
    gradients. Put it around a step (forward and backward). Only one may be open per model.

    Args:
        model: sharded or not.
        vocabulary: a tensor whose last dimension has this size counts as logits. None takes
            `model.config.vocab_size`; without that, everything is "activations".
    """
    return Activations(model, vocabulary)


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
