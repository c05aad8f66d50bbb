"""Count the activations: the bytes that autograd keeps for the backward pass, as it saves and drops
tensors.

[Note: who holds a saved tensor] A tensor saved in a forward pass is given to autograd inside a
`_Saved`. When autograd drops the `_Saved`, the tensor's bytes are subtracted. A tensor saved during
the recomputation of a checkpointed block belongs to the checkpoint, which does not tell when it
drops the tensor. Such a storage is watched through a weak reference, which is checked whenever
something else is counted.

A storage counts once, however many views of it are saved. Parameters, buffers and the engine's own
flat buffers are not activations.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from onefold.observe.memory import Held, ordered
from onefold.plan.schema import ACTIVATIONS, LOGITS
from onefold.runtime.boxes import local_of
from onefold.runtime.differentiate import in_autograd
from onefold.runtime.hooks import engine_of, is_sharded
from onefold.runtime.parameters.parameter import disable_torch_function


class _Saved:
    """The object that autograd keeps in place of a saved tensor."""

    __slots__ = ("drop", "key", "packed")

    def __init__(self, packed: Any, key: int, drop: Callable[[int], None]) -> None:
        self.packed, self.key, self.drop = packed, key, drop

    def __del__(self) -> None:
        self.drop(self.key)


@dataclass(slots=True)
class _Storage:
    """A storage that is counted.

    Attributes:
        alive: its weak reference, which also keeps another storage from its address.
        holders: the number of `_Saved` for it.
    """

    category: str
    nbytes: int
    alive: StorageWeakRef
    holders: int = 0


class Activations(contextlib.ExitStack):
    """Counts what autograd keeps inside the `with` block:
    `with Activations(model) as saved: ...; saved.peak()`.

    It costs some microseconds per saved tensor, so it is opt-in. It does not change values or
    gradients. Put it around whole steps (forward and backward). Only one may be open per model.

    Args:
        model: sharded or not.
        vocabulary: a tensor whose last dimension has this size counts as logits. None takes
            `model.config.vocab_size`; without that, everything is "activations".
    """

    def __init__(self, model: nn.Module, vocabulary: int | None = None) -> None:
        super().__init__()
        known = getattr(getattr(model, "config", None), "vocab_size", None)
        self.vocabulary = vocabulary if vocabulary is not None else known
        self.changes: list[tuple[float, str, str, int]] = []
        self._model = model
        self._gathered: Container[int] = (
            engine_of(model).gather.by_storage if is_sharded(model) else ()
        )
        self._excluded = _not_activations(model)
        self._stored: dict[int, _Storage] = {}
        self._recomputed: set[int] = set()
        self._recomputing: list[tuple[nn.Module, saved_tensors_hooks]] = []

    def now(self) -> dict[str, int]:
        """Return the bytes saved at this moment, by category ("activations", "logits")."""
        self._look()
        *_, (_, level) = Held(changes=self.changes).levels()
        return ordered(level)

    def peak(self) -> dict[str, int]:
        """Return the bytes by category at the moment when their sum was largest."""
        return Held(changes=self.changes).peak()

    def __enter__(self) -> Activations:
        super().__enter__()
        self.callback(self._look)
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
        pack_before, unpack_before = top if top else (None, None)
        recompute = bool(top) and in_autograd()

        def pack(t: torch.Tensor) -> Any:
            key = self._enter(t)
            if key is not None and recompute:
                # Before `pack_before`: the checkpoint's hook ends the recomputation by raising,
                # once it has the last tensor that it needs
                self._recomputed.add(key)
            # A node that saves its own output must not hold the tensor that holds the node.
            packed = pack_before(t) if pack_before else t if t.grad_fn is None else t.detach()
            if key is None or recompute:
                return packed
            self._stored[key].holders += 1
            return _Saved(packed, key, self._drop)

        def unpack(saved: Any) -> torch.Tensor:
            inner = saved.packed if type(saved) is _Saved else saved
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

    def _enter(self, t: torch.Tensor) -> int | None:
        """Count the storage behind `t`. Returns its key, or None if it is not an activation."""
        with disable_torch_function():
            # A DTensor has no memory of its own, and its part may be on its way
            local = local_of(t)
            storage = getattr(local, "elem", local).untyped_storage()
            address = storage.data_ptr()
            own = address in self._excluded or address in self._gathered
            if own or isinstance(t, nn.Parameter) or isinstance(t._base, nn.Parameter):
                return None
            key = storage._cdata
            if key not in self._stored:
                last = t.shape[-1] if t.dim() > 1 and t.is_floating_point() else None
                logits = last is not None and last == self.vocabulary
                found = _Storage(
                    LOGITS if logits else ACTIVATIONS, storage.nbytes(), StorageWeakRef(storage)
                )
                self._stored[key] = found
                self._change(found.category, found.nbytes)
            return key

    def _drop(self, key: int) -> None:
        self._stored[key].holders -= 1
        self._forget_unheld(key)
        if self._recomputed:
            self._look()

    def _look(self) -> None:
        """Subtract the recomputed tensors that are gone."""
        for key in [k for k in self._recomputed if self._stored[k].alive.expired()]:
            self._recomputed.discard(key)
            self._forget_unheld(key)

    def _forget_unheld(self, key: int) -> None:
        if not self._stored[key].holders and key not in self._recomputed:
            gone = self._stored.pop(key)
            self._change(gone.category, -gone.nbytes)

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
