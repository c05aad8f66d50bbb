"""Copy a module with fake tensors (`twin_of`), and answer a forward pass that asks for values
(`Integers`).

Fake tensors have sizes but no contents. A forward pass may ask for contents: is there padding,
which tokens go to which expert, how many positions are masked. Such questions are about integers
and booleans, which are small. An operation whose inputs are all known therefore also runs on the
real values, next to the fake one, and those values answer the questions. Floating-point values are
not computed, except small constants.

| the forward pass asks for                              | answer                                                                       |
|--------------------------------------------------------|------------------------------------------------------------------------------|
| integers that follow from the batch and from sizes     | the real ones; also floats that follow from constants (a mask of ones)       |
| which of n a router picks (topk, argmax of floats)     | balanced: row r takes r·k, r·k + 1, ... modulo n, so that all are used alike |
| a yes or no that depends on floats (is any infinite?)  | no, and a note                                                               |
| one float (a norm that is logged or compared)          | 1.0, and a note                                                              |
| how many floats fulfil a condition                     | ValueError: later sizes depend on it and cannot be known                     |
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.utils._pytree import tree_map_only

from onefold.machine.flops import values_in
from onefold.tracing.blocks import Repetition
from onefold.tracing.cuda_kernels import STAND_INS

#: Integer tensors above this many elements (a whole attention mask) are not computed.
LARGEST = 1 << 24
#: The same for floating-point constants.
LARGEST_FLOATS = 1 << 16

_aten = torch.ops.aten
_PICKS = (_aten.topk, _aten.argmax)
_INDEXED = (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_)
_ITEM = _aten._local_scalar_dense
_ON_CONTENTS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_CAST = (torch.float32, torch.float16, torch.bfloat16)


class Integers:
    """The known contents of fake tensors. `notes` are the assumptions made, as sentences."""

    def __init__(self) -> None:
        self.notes: dict[str, None] = {}

    def learn(self, fake: Any, real: torch.Tensor) -> None:
        """Note that `fake` has the contents of `real`."""
        fake.contents = real

    def contents(self, fake: torch.Tensor) -> torch.Tensor | None:
        """Return the real tensor behind `fake`, or None if its values are unknown."""
        real: torch.Tensor | None = getattr(fake, "contents", None)
        emptied = real is not None and real.numel() and not real.untyped_storage().nbytes()
        return None if emptied else real

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run `func` on fake tensors, and learn the contents of its results if possible."""
        packet, given = func.overloadpacket, (args, kwargs)
        whole = all(self.contents(t) is not None for t in _tensors_in(given))
        if packet in _INDEXED:
            args = (args[0], self._positions(args[1]), *args[2:])
        elif packet is _aten.embedding:
            _check_rows(args[0], self.contents(args[1]))
        elif not _ON_CONTENTS.isdisjoint(func.tags):
            return self._ask(func, args, kwargs, whole)
        try:
            out = STAND_INS.get(packet, func)(*args, **kwargs)
        except UnsupportedOperatorException as error:
            raise ValueError(
                f"the forward pass calls {func}, and nobody has told torch which shape it returns:"
                " register one with torch.library.register_fake, or plan by formulas."
            ) from error
        results = _tensors_in(out)
        if packet in _PICKS and not whole:
            self._balance(packet, args, results[-1])
        elif whole and results and all(map(_is_small, results)):
            for fake, real in zip(results, _tensors_in(self._for_real(func, *given)), strict=True):
                self.learn(fake, real)
        elif func._schema.is_mutable and not whole:
            self._spoil(func, args, kwargs)
        return out

    # -- the ways to know --------------------------------------------------------------------------

    def _for_real(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        with unset_fake_temporarily(), torch.no_grad():
            real_args, real_kwargs = tree_map_only(torch.Tensor, self.contents, (args, kwargs))
            return func(*real_args, **real_kwargs)

    def _ask(self, func: Any, args: Any, kwargs: dict[str, Any], whole: bool) -> Any:
        """Return a result whose value or size depends on contents."""
        if whole:
            real = self._for_real(func, args, kwargs)
            return tree_map_only(torch.Tensor, self._fake_like, real)
        if func.overloadpacket is _ITEM:
            return self._assumed(args[0])
        if func.overloadpacket is _aten.masked_select:
            size = torch.broadcast_shapes(*(t.shape for t in args))
            source, mask = (self.call(_aten.expand.default, (t, size), {}) for t in args)
            return self.call(_aten.index.Tensor, (source, [mask]), {})
        try:
            return func(*args, **kwargs)
        except Exception as error:
            raise ValueError(
                f"{func} makes a tensor whose size depends on computed floating-point values, so a"
                " trace without values cannot know how much memory follows. Write the forward pass"
                " with fixed sizes (a capacity, a mask that multiplies), or plan by formulas."
            ) from error

    def _assumed(self, scalar: torch.Tensor) -> bool | float:
        if scalar.dtype is torch.bool:
            self.notes["a yes or no that depends on floating-point values was taken as no"] = None
            return False
        if scalar.dtype.is_floating_point:
            self.notes["a floating-point value that the forward pass reads was taken as 1.0"] = None
            return 1.0
        raise ValueError(
            "the forward pass reads a whole number that depends on computed floating-point values"
            " (by .item(), int() or a loop), which a trace without values cannot know. Keep it in a"
            " tensor, or plan with the model's formulas."
        )

    def _fake_like(self, real: torch.Tensor) -> torch.Tensor:
        fake = torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device="cpu")
        self.learn(fake, real)
        return fake

    def _positions(self, indices: Any) -> list[Any]:
        """Replace boolean masks among `indices` by the positions that they select."""
        out: list[Any] = []
        for index in indices:
            if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8):
                out += self._ask(
                    _aten.nonzero_numpy.default, (index,), {}, self.contents(index) is not None
                )
            else:
                out.append(index)
        return out

    def _balance(self, packet: Any, args: Any, picked: torch.Tensor) -> None:
        """Set a router's choices so that all experts are used equally."""
        scores, at = args[0], 2 if packet is _aten.topk else 1
        # topk picks along the last dimension by default; argmax must name its dimension
        dim = args[at] if len(args) > at else -1 if at == 2 else None
        if dim not in (-1, scores.dim() - 1) or scores.dim() == 0 or picked.numel() > LARGEST:
            return
        with unset_fake_temporarily():
            rows = torch.arange(picked.numel(), device="cpu") % scores.shape[-1]
            self.learn(picked, rows.reshape(picked.shape))
        self.notes["routing by computed scores was taken as balanced"] = None

    def _spoil(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Forget the contents of what an operation on unknown values writes to, and of its views: an
        emptied storage says so.
        """
        declared = func._schema.arguments
        given = {a.name: value for a, value in zip(declared, args, strict=False)} | kwargs
        for a in declared:
            if a.alias_info is not None and a.alias_info.is_write:
                for t in _tensors_in(given.get(a.name)):
                    if (real := self.contents(t)) is not None:
                        real.untyped_storage().resize_(0)


def _tensors_in(given: Any) -> list[torch.Tensor]:
    return [t for t in values_in(given) if isinstance(t, torch.Tensor)]


def _check_rows(table: torch.Tensor, wanted: torch.Tensor | None) -> None:
    """Raise ValueError if known indices are outside an embedding. Real tensors would raise an
    IndexError.
    """
    if wanted is None or not wanted.numel():
        return
    with unset_fake_temporarily():
        low, high = (int(v) for v in torch.aminmax(wanted))
    rows = table.shape[0]
    if low < 0 or high >= rows:
        raise ValueError(
            f"the forward pass looks up row {high if high >= rows else low} of an embedding of"
            f" {rows:,} rows, as no run could. If it holds positions, a sample can have at most"
            f" {rows:,} tokens: a shorter --seq (seq=)."
        )


def _is_inexact(t: torch.Tensor) -> bool:
    return t.dtype.is_floating_point or t.dtype.is_complex


def _is_small(t: torch.Tensor) -> bool:
    most = LARGEST_FLOATS if _is_inexact(t) else LARGEST
    return t.layout is torch.strided and t.numel() <= most


def fake_of(t: torch.Tensor, integers: Integers, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a fake CPU tensor of the same size and strides. Floats become `dtype` (None: they keep
    theirs). `integers` learns the contents of integers; those on the meta device are taken as zeros.
    """
    kind = dtype if dtype is not None and t.dtype in _CAST else t.dtype
    new = torch.empty_strided(t.size(), t.stride(), dtype=kind, device="cpu")
    if isinstance(t, nn.Parameter):
        return nn.Parameter(new, requires_grad=t.requires_grad)
    if not _is_inexact(t) and _is_small(t):
        with unset_fake_temporarily(), torch.no_grad():
            if t.is_meta:
                integers.learn(new, torch.zeros(t.size(), dtype=t.dtype, device="cpu"))
            else:
                integers.learn(new, t.detach().cpu().clone())
    return new


def tensors_of(module: nn.Module, without: Iterable[nn.Module] = ()) -> Iterator[torch.Tensor]:
    """Yield the parameters, buffers and other tensors that a module keeps, some more than once.
    `without` are modules inside it that are passed over.
    """
    for _, inner in module.named_modules({*without}):
        yield from _tensors_in(vars(inner))


def twin_of(
    module: nn.Module,
    integers: Integers,
    dtype: torch.dtype | None = None,
    some: Repetition | None = None,
) -> nn.Module:
    """Copy the module, with its hooks and settings, and with fake CPU tensors (`fake_of`), parameters
    in `dtype`. The copy shares tensors where the module does; of repeated blocks it has those of
    `some`. The caller must be inside a FakeTensorMode.
    """
    left_out = {*some.blocks.values()} - {*some.few.values()} if some else ()
    memo: dict[int, Any] = {}
    for t in tensors_of(module, left_out):
        if id(t) not in memo:
            memo[id(t)] = fake_of(t, integers, dtype if isinstance(t, nn.Parameter) else None)
    try:
        if some is not None:
            few: dict[str, nn.Module] = {}
            memo[id(some.blocks)] = few  # before they are copied, since a block may know its model
            few.update(copy.deepcopy({**some.few}, memo))
        return copy.deepcopy(module, memo)
    except Exception as error:  # parts of a model may refuse to be copied in any way
        raise ValueError(
            f"{type(module).__name__} cannot be copied ({type(error).__name__}: {error}), and a copy with"
            " fake tensors is what runs here: ask by name or by size (--params)."
        ) from error


def fake_batch(batch: Any, dtype: torch.dtype | None, integers: Integers) -> Any:
    """Return the batch with fake tensors (`fake_of`), shared where the batch shares them."""
    seen: dict[int, torch.Tensor] = {}

    def fake(t: torch.Tensor) -> torch.Tensor:
        if id(t) not in seen:
            seen[id(t)] = fake_of(t, integers, dtype)
        return seen[id(t)]

    return tree_map_only(torch.Tensor, fake, batch)


@contextmanager
def fake_tensors() -> Iterator[None]:
    """New tensors are fake inside the context, and random numbers are as before behind it.

    transformers does not look at the values of fake tensors. It then builds attention masks of
    length x length, which it leaves out in training. Here the values are known (`Integers`), and a
    trace must see what training does: fake tensors pass as real ones.
    """
    with ExitStack() as inside:
        inside.enter_context(torch.random.fork_rng(devices=[]))
        for name in ("transformers.utils.import_utils", "transformers.utils.generic"):
            asked = sys.modules.get(name)
            if hasattr(asked, "is_fake_tensor"):
                inside.enter_context(mock.patch.object(asked, "is_fake_tensor", lambda _: False))
        inside.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield
