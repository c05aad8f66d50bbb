"""What a step keeps in memory and computes, unit by unit, watched while it runs.

    forward     (root)   block.0        block.1        (root)             a row: one run of a unit
    storages    + +      + + - + +      + + - + +      + - +              come and go
    backward    (root)   block.1        block.0
    storages    - + -    + + - + -      + - + - + -

A row is one run of a unit in the forward pass, and what the backward pass does for it:

    row         (root)   block 0   block 1   (root)
    kept        ▒        ▓         ▓         ▒          bytes that wait for the backward pass
    forward     ░        ░         ░         ░          the highest moment of each pass, beyond what
    backward    ░        ░         ░         ░          earlier rows keep

A gradient looks like any other activation until it arrives. The watch therefore lists the storages
that come and go, and their sums are made when the step is over (`Watch.rows`).

[Note: whose backward it is] Autograd numbers its nodes in the order in which the forward pass makes
them. A node in the backward pass belongs to the row that ran when its number was given out.
Recomputation under checkpointing makes nodes with new numbers; they belong to the row whose node
started the recomputation.

[Note: sums in place] If a tensor has several uses, autograd adds up the gradients of the uses. It
adds into the first gradient in place, if nobody else holds that gradient. Under a dispatch mode it
makes a third tensor instead, and frees the first one (its donor) next: that counts as in place. A
view also holds its base, so autograd never adds to a view in place.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from onefold.offload.activations import SMALLEST
from onefold.runtime.differentiate import in_autograd, tensors_in

ROOT = "(root)"
_aten = torch.ops.aten


class Pass(NamedTuple):
    """A unit's forward or backward pass, with recomputation.

    Attributes:
        nbytes: at its highest moment, without parameters and buffers. `logits` of them are tensors
            over the vocabulary, `gradients` parameters' gradients that nobody has taken yet.
        flops: of matrix products.
    """

    nbytes: int = 0
    logits: int = 0
    gradients: int = 0
    flops: float = 0

    def plus(self, nbytes: int) -> Pass:
        """Return the pass with more bytes below it (or fewer)."""
        return self._replace(nbytes=self.nbytes + nbytes)

    def above(self, nbytes: int) -> Pass:
        """Return the pass with other bytes below it."""
        return self._replace(nbytes=max(self.nbytes + nbytes, self.logits + self.gradients))


class UnitActivity(NamedTuple):
    """One row.

    Attributes:
        kept: bytes that its forward pass leaves, of which `logits` are logits.
        forward, backward: beyond what earlier rows keep.
        movable: the bytes of `kept` in storages large enough for the host, which may hold them until
            the backward pass. largest: the bytes of the largest of these.
    """

    unit: str
    kept: int = 0
    forward: Pass = Pass()
    backward: Pass = Pass()
    logits: int = 0
    movable: int = 0
    largest: int = 0


class Watch(TorchDispatchMode):
    """A dispatch mode that watches the operations inside it.

    It works below a FakeTensorMode, and follows storages, not contents.
    """

    def __init__(
        self, vocabulary: int, excluded: set[int], call: Callable[[Any, Any, dict[str, Any]], Any]
    ) -> None:
        """
        Args:
            vocabulary: rows of the head; 0 for a model without one.
            excluded: the storages that are no activations.
            call: runs an operation.
        """
        super().__init__()
        self._vocabulary, self._excluded, self._call = vocabulary, excluded, call
        self._units: list[str] = []  # of each row
        self._stack = [ROOT]
        self._now = -1, "forward"  # the row and the pass that run
        # (autograd's number, the row) whenever another one begins to run
        self._begun: list[tuple[int, int]] = []
        # (row and pass, key of a storage, bytes that come with it, or go: less than 0)
        self._changes: list[tuple[tuple[int, str], int, int]] = []
        self._flops: Counter[tuple[int, str]] = Counter()
        self._keys: dict[int, int] = {}  # of living storages
        self._count = 0
        self._saved: dict[int, tuple[int, int]] = {}  # {key: (row, bytes)}
        self._wide: set[int] = set()
        self._gradients: set[int] = set()
        self._sum = -1, -1, False  # the last sum of gradients: its key, its donor, in place
        self._sums: list[tuple[int, int]] = []  # (donor, sum)
        self._formulas = flop_formulas()
        self._runs(ROOT)

    # -- who runs ----------------------------------------------------------------------------------

    def follow(self, name: str, module: nn.Module) -> None:
        """Note when the unit `module` runs."""
        module.register_forward_pre_hook(lambda *_: self._enter(name), prepend=True)
        module.register_forward_hook(lambda *_: self._leave(), always_call=True)

    def _runs(self, unit: str) -> None:
        """In the forward pass a unit begins a row, in the backward pass it has one: of its rows up to
        the one that runs, the last.
        """
        if not in_autograd():
            if self._units[-1:] != [unit]:
                self._units.append(unit)
            self._goes_to(len(self._units) - 1, "forward")
            return
        rows = [row for row, name in enumerate(self._units) if name == unit]
        at = bisect_right(rows, self._now[0])
        self._goes_to(rows[max(0, at - 1)], "backward")

    def _goes_to(self, row: int, phase: str) -> None:
        if self._now != (row, phase):
            self._now = row, phase
            self._begun.append((torch.autograd._get_sequence_nr(), row))
            self._changes.append((self._now, -1, 0))

    def _enter(self, unit: str) -> None:
        self._stack.append(unit)
        self._runs(unit)

    def _leave(self) -> None:
        self._stack.pop()
        if len(self._stack) > 1 or not in_autograd():  # else what was recomputed goes on
            self._runs(self._stack[-1])

    def _follow_backward(self) -> None:
        """Note whose backward node runs. See [Note: whose backward it is]."""
        node = torch._C._current_autograd_node()
        # Inside a recomputation, the unit's own hooks call `_enter`
        if node is None or len(self._stack) > 1:
            return
        number = node._sequence_nr()
        if number < 1 << 62:  # the accumulation of a parameter's gradient has no number
            at = bisect_right(self._begun, number, key=lambda begun: begun[0])
            self._goes_to(self._begun[max(0, at - 1)][1], "backward")

    # -- what it holds -----------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # asked twice for each operation
            return args[0].fake_device
        kwargs = kwargs or {}
        if in_autograd():
            self._follow_backward()
        donor = self._donor(func, args)
        out = self._call(func, args, kwargs)
        if (formula := self._formulas.get(func.overloadpacket)) is not None:
            self._flops[self._now] += int(formula(*args, **kwargs, out_val=out))
        for t in tensors_in(out):
            self.key(t)
        if donor is not None:
            self._sum = self.key(out), self.key(donor), not donor._is_view()
        return out

    def _donor(self, func: Any, args: Any) -> torch.Tensor | None:
        """Return the gradient to which a sum of gradients would be added. See [Note: sums in place]."""
        if func is not _aten.add.Tensor or torch.is_grad_enabled() or not in_autograd():
            return None
        first, other = args
        alike = isinstance(other, torch.Tensor) and first.shape == other.shape
        return first if alike and first.dtype == other.dtype else None

    def key(self, t: torch.Tensor) -> int:
        """Return the number of the storage of `t`, which may be new; -1 if it is no activation."""
        storage = t.untyped_storage()
        identity, nbytes = storage._cdata, storage.nbytes()
        if identity in self._excluded:
            return -1
        if identity not in self._keys:
            self._keys[identity] = key = self._count
            self._count += 1
            if t.dim() > 1 and t.shape[-1] == self._vocabulary:
                self._wide.add(key)
            self._changes.append((self._now, key, nbytes))
            weakref.finalize(storage, self._gone, identity, key, nbytes).atexit = False
        return self._keys[identity]

    def _gone(self, identity: int, key: int, nbytes: int) -> None:
        if self._keys.get(identity) == key:
            del self._keys[identity]
        total, donor, in_place = self._sum
        if key == donor and self._changes[-1] == (self._now, total, nbytes):
            self._sums.append((donor, total))
            if in_place:  # one storage
                self._changes.pop()
                return
        self._changes.append((self._now, key, -nbytes))

    # -- what autograd says ------------------------------------------------------------------------

    def pack(self, t: torch.Tensor) -> torch.Tensor:
        """Note that `t` is saved; the pack hook of saved_tensors_hooks."""
        self._saved.setdefault(self.key(t), (self._now[0], t.untyped_storage().nbytes()))
        # A node that saves its own output must not hold the tensor that holds the node.
        return t if t.grad_fn is None else t.detach()

    def take(self, param: torch.Tensor) -> None:
        """Take a parameter's gradient as soon as it is complete, as the engine does."""
        if param.grad is not None:
            self._gradients.add(self.key(param.grad))
            param.grad = None

    def rows(self) -> list[UnitActivity]:
        """Return the rows of the step."""
        gradients = self._gradients
        for donor, total in reversed(self._sums):  # what a parameter's gradient began as
            if total in gradients:
                gradients.add(donor)
        logits, now, highest = self._wide - gradients, Pass(), dict[tuple[int, str], Pass]()
        for at, key, n in self._changes:
            now = Pass(now[0] + n, now[1] + n * (key in logits), now[2] + n * (key in gradients))
            if at not in highest or now.nbytes > highest[at].nbytes:
                highest[at] = now
        self._saved.pop(-1, None)
        out, below = [], 0
        for row, unit in enumerate(self._units):
            saved = {key: n for key, (owner, n) in self._saved.items() if owner == row}
            large = [n for n in saved.values() if n >= SMALLEST]
            forward, backward = (
                highest.get(at, Pass(below))._replace(flops=self._flops[at]).plus(-below)
                for at in ((row, "forward"), (row, "backward"))
            )
            kept = sum(saved.values())
            wide = sum(n for key, n in saved.items() if key in self._wide)
            most = max(large, default=0)
            out.append(UnitActivity(unit, kept, forward, backward, wide, sum(large), most))
            below += kept
        return out


# -- operations ------------------------------------------------------------------------------------


def flop_formulas() -> dict[Any, Callable[..., int]]:
    """Return {operation with matrix products: function of its FLOPs}, as torch counts FLOPs: a
    multiplication and an addition are two.
    """
    from torch.utils.flop_counter import flop_registry

    table = dict(flop_registry)
    flash = "_scaled_dot_product_flash_attention"
    for backward in ("", "_backward"):  # the CPU's kernels, which torch's table leaves out
        table[getattr(_aten, f"{flash}_for_cpu{backward}")] = table[
            getattr(_aten, flash + backward)
        ]
    return table | {_aten._grouped_mm: _grouped_flops}


def _grouped_flops(
    a: torch.Tensor, b: torch.Tensor, *_: Any, out_val: Any = None, **__: Any
) -> int:
    """Return the FLOPs of a grouped product: rows times the matrix of their group, (rows, k) and
    (groups, k, n); or the matrices' gradients, (m, rows) and (rows, n).
    """
    return 2 * a.shape[-2] * a.shape[-1] * b.shape[-1]
