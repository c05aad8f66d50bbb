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
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.utils._pytree import tree_map_only

from onefold.machine.flops import values_in
from onefold.tracing.cuda_kernels import STAND_INS

#: Integer tensors above this many elements (a whole attention mask) are not computed.
LARGEST = 1 << 24
#: The same for floating-point constants.
LARGEST_FLOATS = 1 << 16

_aten = torch.ops.aten
_PICKS = (_aten.topk, _aten.argmax)
_INDEXED = (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_)
_ITEM = _aten._local_scalar_dense


class Integers:
    """The known contents of fake tensors. `notes` are the assumptions made, as sentences."""

    def __init__(self) -> None:
        self.notes: dict[str, None] = {}
        # {id of a fake tensor: its contents}; an entry is removed when its fake tensor dies
        self._known: dict[int, torch.Tensor] = {}
        # Contents that an operation on unknown values has written to, by storage. They are kept
        # alive so that no other storage gets the same address.
        self._spoilt: dict[int, torch.Tensor] = {}

    def learn(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Note that `fake` has the contents of `real`."""
        if id(fake) not in self._known:
            weakref.finalize(fake, self._known.pop, id(fake), None)
        self._known[id(fake)] = real

    def contents(self, fake: torch.Tensor) -> torch.Tensor | None:
        """Return the real tensor behind `fake`, or None if its values are unknown."""
        real = self._known.get(id(fake))
        return None if real is None or real.untyped_storage()._cdata in self._spoilt else real

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run `func` on fake tensors, and learn the contents of its results if possible."""
        tensors = [t for t in values_in((args, kwargs)) if isinstance(t, torch.Tensor)]
        whole = all(self.contents(t) is not None for t in tensors)
        known = args, kwargs
        if func.overloadpacket in _INDEXED:
            args = (args[0], self._positions(args[1]), *args[2:])
        elif func.overloadpacket is _aten.embedding:
            _check_rows(args[0], self.contents(args[1]))
        elif (
            torch.Tag.data_dependent_output in func.tags
            or torch.Tag.dynamic_output_shape in func.tags
        ):
            return self._ask(func, args, kwargs, whole)
        out = self._fake(func, args, kwargs)
        results = [t for t in values_in(out) if isinstance(t, torch.Tensor)]
        if func.overloadpacket in _PICKS and not whole:
            self._balance(func, args, results[-1])
        elif whole and results and all(_is_small(t) for t in results):
            real = [
                t for t in values_in(self._for_real(func, *known)) if isinstance(t, torch.Tensor)
            ]
            for fake, contents in zip(results, real, strict=True):
                self.learn(fake, contents)
        elif func._schema.is_mutable and not whole:
            self._spoil(func, args, kwargs)
        return out

    def _fake(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        rule = STAND_INS.get(func.overloadpacket)
        try:
            return func(*args, **kwargs) if rule is None else rule(*args, **kwargs)
        except UnsupportedOperatorException as error:
            raise ValueError(
                f"the forward pass calls {func}, and nobody has told torch which shape it returns:"
                " register one with torch.library.register_fake, or plan by formulas."
            ) from error

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
        if (
            func.overloadpacket is _aten.masked_select
            and (mask := self.contents(args[1])) is not None
        ):
            count = int(
                torch.broadcast_to(mask, torch.broadcast_shapes(mask.shape, args[0].shape)).sum()
            )
            return torch.empty(count, dtype=args[0].dtype, device="cpu")
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

    def _balance(self, func: Any, args: Any, picked: torch.Tensor) -> None:
        """Set a router's choices so that all experts are used equally."""
        scores, at = args[0], 2 if func.overloadpacket is _aten.topk else 1
        # topk picks along the last dimension by default; argmax must name its dimension
        dim = args[at] if len(args) > at else -1 if at == 2 else None
        if dim is None or scores.dim() == 0 or dim % scores.dim() != scores.dim() - 1:
            return
        if picked.numel() > LARGEST:
            return
        with unset_fake_temporarily():
            rows = torch.arange(picked.numel(), device="cpu") % scores.shape[-1]
            self.learn(picked, rows.reshape(picked.shape))
        self.notes["routing by computed scores was taken as balanced"] = None

    def _spoil(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        declared = func._schema.arguments
        for argument, value in (
            *zip(declared, args, strict=False),
            *((a, kwargs.get(a.name)) for a in declared),
        ):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for t in values_in(value):
                    if isinstance(t, torch.Tensor) and (real := self._known.get(id(t))) is not None:
                        self._spoilt[real.untyped_storage()._cdata] = real


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


def _is_small(t: torch.Tensor) -> bool:
    inexact = t.dtype.is_floating_point or t.dtype.is_complex
    return t.layout is torch.strided and t.numel() <= (LARGEST_FLOATS if inexact else LARGEST)


_CAST = (torch.float32, torch.float16, torch.bfloat16)


def fake_of(t: torch.Tensor, integers: Integers, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a fake copy of a module's parameter or buffer.
    A parameter in fp32, bf16 or fp16 becomes `dtype`. `integers` learns the contents of an integer
    buffer, unless it is on the meta device.
    """
    if isinstance(t, nn.Parameter):
        return nn.Parameter(_empty_like(t, dtype), requires_grad=t.requires_grad)
    new = _empty_like(t)
    inexact = t.dtype.is_floating_point or t.dtype.is_complex
    if not (t.is_meta or inexact) and t.layout is torch.strided:
        integers.learn(new, _contents(t))
    return new


def _empty_like(t: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    kind = dtype if dtype is not None and t.dtype in _CAST else t.dtype
    return torch.empty_strided(t.size(), t.stride(), dtype=kind, device="cpu")


def tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters, buffers and other tensors that a module keeps, some more than once."""
    for inner in module.modules():
        yield from (t for t in values_in(vars(inner)) if isinstance(t, torch.Tensor))


def twin_of(module: nn.Module, integers: Integers, dtype: torch.dtype | None = None) -> nn.Module:
    """Copy the module, with its hooks and settings, and with fake CPU tensors (`fake_of`). The copy
    shares tensors where the module does. The caller must be inside a FakeTensorMode.
    """
    memo: dict[int, Any] = {}
    for t in tensors_of(module):
        if id(t) not in memo:
            memo[id(t)] = fake_of(t, integers, dtype)
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:  # parts of a model may refuse to be copied in any way
        raise ValueError(
            f"{type(module).__name__} cannot be copied ({type(error).__name__}: {error}), and a copy with"
            " fake tensors is what runs here: ask by name or by size (--params)."
        ) from error


def _contents(t: torch.Tensor) -> torch.Tensor:
    """Return a CPU copy of a tensor's contents; zeros for one on the meta device."""
    with unset_fake_temporarily(), torch.no_grad():
        return (
            torch.zeros(t.size(), dtype=t.dtype, device="cpu")
            if t.is_meta
            else t.detach().cpu().clone()
        )


def fake_batch(batch: Any, dtype: torch.dtype | None, integers: Integers) -> Any:
    """Return the batch as fake CPU tensors of the same sizes and strides.

    Integers keep their contents; those on the meta device are taken as zeros. Floats become `dtype`
    (None: they keep theirs).
    """

    seen: dict[int, torch.Tensor] = {}

    def fake(t: torch.Tensor) -> torch.Tensor:
        if id(t) in seen:
            return seen[id(t)]
        seen[id(t)] = new = _empty_like(t, dtype)
        if not t.dtype.is_floating_point and not t.dtype.is_complex:
            integers.learn(new, _contents(t))
        return new

    return tree_map_only(torch.Tensor, fake, batch)


@contextmanager
def fake_tensors() -> Iterator[None]:
    """New tensors are fake inside the context, and random numbers are as before behind it."""
    with (
        torch.random.fork_rng(devices=[]),
        _passing_as_real(),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


@contextmanager
def _passing_as_real() -> Iterator[None]:
    """Make transformers treat fake tensors as real ones, inside the context.

    transformers does not look at the values of fake tensors. It then builds attention masks of
    length x length, which it leaves out in training. Here the values are known (`Integers`), and a
    trace must see what training does.
    """
    names = ("transformers.utils.import_utils", "transformers.utils.generic")
    asked = [vars(m) for m in map(sys.modules.get, names) if m is not None]
    before = [(own, own["is_fake_tensor"]) for own in asked if "is_fake_tensor" in own]
    try:
        for own, _ in before:
            own["is_fake_tensor"] = lambda _: False
        yield
    finally:
        for own, answer in before:
            own["is_fake_tensor"] = answer
