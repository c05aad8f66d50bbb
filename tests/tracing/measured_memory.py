"""What a real training step on the CPU keeps and holds, measured apart from the tracer: by
autograd's hooks and by torch's allocator.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from onefold.tracing.calling import loss_of

Batch = Mapping[str, Any] | tuple[Tensor, ...]


class RealStep:
    """Forward and backward of a real module; gradients are dropped as they are complete, as the
    engine does.
    """

    def __init__(self, module: nn.Module, batch: Batch, precision: str) -> None:
        self.module = module.train()
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        for p in module.parameters():
            p.data = p.data.to(dtype)
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(_drop)
        seen = {id(t): t.to(dtype) if t.is_floating_point() else t for t in _tensors(batch)}
        self.batch: Any = (
            {k: seen.get(id(t), t) for k, t in batch.items()}
            if isinstance(batch, Mapping)
            else tuple(seen[id(t)] for t in batch)
        )
        self.inputs = sum(
            {t.data_ptr(): t.untyped_storage().nbytes() for t in seen.values()}.values()
        )

    def forward(self) -> Tensor:
        batch = self.batch
        return loss_of(self.module(**batch) if isinstance(batch, dict) else self.module(*batch))

    def saved(self) -> int:
        """Bytes of the storages that autograd saves, parameters, buffers and constants of modules
        left out.
        """
        constants = [
            v for m in self.module.modules() for v in m.__dict__.values() if isinstance(v, Tensor)
        ]
        known = {
            t.untyped_storage().data_ptr()
            for t in (*self.module.parameters(), *self.module.buffers(), *constants)
        }
        storages = {}

        def pack(t: Tensor) -> Tensor:
            if t.untyped_storage().data_ptr() not in known:
                storages[t.untyped_storage().data_ptr()] = t.untyped_storage()
            return t.detach() if t.grad_fn is not None else t

        with saved_tensors_hooks(pack, lambda t: t):
            loss = self.forward()
        total = sum(s.nbytes() for s in storages.values())
        loss.backward()
        return total

    def allocated(self) -> int:
        """The most that torch's allocator had handed out during a step, in bytes, the batch
        included.

        The random state that checkpointing copies for each block (5 kB on the CPU whatever the
        model's size) is left out.
        """
        self.forward().backward()
        state = torch.get_rng_state().nbytes
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            self.forward().backward()
        results: Any = prof.profiler.kineto_results  # type: ignore[union-attr]
        events = sorted(
            (e for e in results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()
        )
        now = peak = 0
        for event in events:
            if abs(event.nbytes()) != state:
                now += event.nbytes()
                peak = max(peak, now)
        assert events and now == 0, f"{now} bytes of {len(events)} allocations were left over"
        return peak + self.inputs

    def tensors(self) -> int:
        """The most bytes of live tensors during a step: as `allocated`, but for what kernels take
        for themselves.
        """
        self.forward().backward()
        known = {
            t.untyped_storage()._cdata
            for t in (*self.module.parameters(), *self.module.buffers(), *_tensors(self.batch))
        }
        live = _Live(known)
        with live:
            self.forward().backward()
        return live.peak + self.inputs


class _Live(TorchDispatchMode):
    """Counts storages from the operation that makes them to their end."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.known, self.now, self.peak = known, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_iter(out):
            if isinstance(t, Tensor) and (key := t.untyped_storage()._cdata) not in self.known:
                self.known.add(key)
                self.now += t.untyped_storage().nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(t.untyped_storage(), self._end, key, t.untyped_storage().nbytes())
        return out

    def _end(self, key: int, nbytes: int) -> None:
        self.known.discard(key)
        self.now -= nbytes


def _drop(p: Tensor) -> None:
    p.grad = None


def _tensors(batch: Batch) -> list[Tensor]:
    return [
        t
        for t in (batch.values() if isinstance(batch, Mapping) else batch)
        if isinstance(t, Tensor)
    ]


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Inside, torch draws the same random numbers every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
