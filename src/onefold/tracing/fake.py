"""Copy a module with fake tensors (`twin_of`), and answer a forward pass that asks for values
(`Integers`).

Fake tensors have sizes but no contents. A forward pass may ask for contents: is there padding,
which tokens go to which expert, how many positions are masked. Such questions are about integers
and booleans, which are small. Integers are therefore real tensors among the fake ones: an operation
on real tensors alone is computed, and its results are real. Floating-point values are not computed,
except small constants. What a fake tensor is written to is unknown from then on.

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

from onefold.runtime.differentiate import tensors_in, written_by
from onefold.tracing.blocks import Repetition
from onefold.tracing.cuda_kernels import STAND_INS

#: Integer tensors above this many elements (a whole attention mask) are not computed.
LARGEST = 1 << 24
#: The same for floating-point constants.
LARGEST_FLOATS = 1 << 16

_aten = torch.ops.aten
_PICKS = (_aten.topk, _aten.argmax)
_INDEXED = (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_)
_EMPTY = (_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty)
_ITEM = _aten._local_scalar_dense
_ON_CONTENTS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_CAST = (torch.float32, torch.float16, torch.bfloat16)


class Integers:
    """Runs operations on fake tensors, and on real ones where all contents are known. `notes` are the
    assumptions made, as sentences.
    """

    def __init__(self) -> None:
        self.notes: dict[str, None] = {}

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run `func`. Its results are real tensors if all inputs are, and they are small."""
        packet, inputs = func.overloadpacket, tensors_in((args, kwargs))
        whole = all(map(_is_known, inputs))
        if packet in _INDEXED:
            args = (args[0], self._positions(args[1]), *args[2:])
        elif packet is _aten.embedding:
            _check_rows(*args[:2])
        elif not _ON_CONTENTS.isdisjoint(func.tags):
            return self._ask(func, args, kwargs, whole)
        if not whole and (written := list(filter(_is_known, written_by(func, args, kwargs)))):
            for t in written:
                t.untyped_storage().spoiled = True  # type: ignore[attr-defined]
            return written[0]
        # Real inputs alone would be computed by torch's mode too, however large the result
        like = tree_map_only(torch.Tensor, _fake_like, (args, kwargs)) if whole else (args, kwargs)
        try:
            out = STAND_INS.get(packet, func)(*like[0], **like[1])
        except UnsupportedOperatorException as error:
            raise ValueError(
                f"the forward pass calls {func}, and nobody has told torch which shape it returns:"
                " register one with torch.library.register_fake, or plan by its size"
                " (--params)."
            ) from error
        if packet in _PICKS and not whole:
            return self._balanced(packet, args, out)
        results = tensors_in(out)
        # Memory of floats without contents is an engine's, which fills it with what is not known
        filled = packet not in _EMPTY or not results[0].is_floating_point()
        if whole and results and filled and all(map(_is_small, results)):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return out

    # -- the ways to know --------------------------------------------------------------------------

    def _ask(self, func: Any, args: Any, kwargs: dict[str, Any], whole: bool) -> Any:
        """Return a result whose value or size depends on contents."""
        if whole:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func.overloadpacket is _ITEM:
            return self._assumed(args[0])
        try:
            return func(*args, **kwargs)
        except Exception as error:
            raise ValueError(
                f"{func} makes a tensor whose size depends on computed floating-point values, so a"
                " trace without values cannot know how much memory follows. Write the forward pass"
                " with fixed sizes (a capacity, a mask that multiplies), or plan by its size (--params)."
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
            " tensor, or plan by its size (--params)."
        )

    def _positions(self, indices: Any) -> list[Any]:
        """Replace boolean masks among `indices` by the positions that they select."""
        out: list[Any] = []
        for index in indices:
            if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8):
                out += self._ask(_aten.nonzero_numpy.default, (index,), {}, _is_known(index))
            else:
                out.append(index)
        return out

    def _balanced(self, packet: Any, args: Any, out: Any) -> Any:
        """Return a router's choices such that all experts are used equally."""
        scores, picked, at = args[0], tensors_in(out)[-1], 2 if packet is _aten.topk else 1
        # topk picks along the last dimension by default; argmax must name its dimension
        dim = args[at] if len(args) > at else -1 if at == 2 else None
        if dim not in (-1, scores.dim() - 1) or scores.dim() == 0 or picked.numel() > LARGEST:
            return out
        with unset_fake_temporarily():
            rows = torch.arange(picked.numel(), device="cpu") % scores.shape[-1]
            chosen = rows.reshape(picked.shape)
        self.notes["routing by computed scores was taken as balanced"] = None
        return (out[0], chosen) if at == 2 else chosen


def _is_known(t: torch.Tensor) -> bool:
    """Return whether a tensor is real, and nothing unknown was written to it."""
    return type(t) is torch.Tensor and not hasattr(t.untyped_storage(), "spoiled")


def _fake_like(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="cpu")


def _check_rows(table: torch.Tensor, wanted: torch.Tensor) -> None:
    """Raise ValueError if known indices are outside an embedding. Real tensors would raise an
    IndexError.
    """
    if not (_is_known(wanted) and wanted.numel()):
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
    """Return whether memory for a tensor's contents is small."""
    inexact = t.is_floating_point() or t.is_complex()
    most = (LARGEST_FLOATS if inexact else LARGEST) * t.itemsize
    return t.layout is torch.strided and t.untyped_storage().nbytes() <= most


def fake_of(t: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a fake CPU tensor of the same size and strides. Floats become `dtype` (None: they keep
    theirs). Integers are real: copies, or zeros of those on the meta device.
    """
    parameter = isinstance(t, nn.Parameter)
    if not (parameter or t.is_floating_point() or t.is_complex()) and _is_small(t):
        with unset_fake_temporarily(), torch.no_grad():
            return (torch.zeros_like(t, device="cpu") if t.is_meta else t.cpu().clone()).detach()
    kind = dtype if dtype is not None and t.dtype in _CAST else t.dtype
    new = torch.empty_strided(t.size(), t.stride(), dtype=kind, device="cpu")
    return nn.Parameter(new, requires_grad=t.requires_grad) if parameter else new


def tensors_of(module: nn.Module, without: Iterable[nn.Module] = ()) -> Iterator[torch.Tensor]:
    """Yield the parameters, buffers and other tensors that a module keeps, some more than once.
    `without` are modules inside it that are passed over.
    """
    for _, inner in module.named_modules({*without}):
        yield from tensors_in([v for name, v in vars(inner).items() if name != "_modules"])


def twin_of(
    module: nn.Module,
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
            memo[id(t)] = fake_of(t, dtype if isinstance(t, nn.Parameter) else None)
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


def fake_batch(batch: Any, dtype: torch.dtype | None = None) -> Any:
    """Return the batch with fake tensors (`fake_of`), shared where the batch shares them."""
    seen: dict[int, torch.Tensor] = {}

    def fake(t: torch.Tensor) -> torch.Tensor:
        if id(t) not in seen:
            seen[id(t)] = fake_of(t, dtype)
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
        if asked := sys.modules.get("transformers.utils.import_utils"):
            inside.enter_context(mock.patch.object(asked, "is_fake_tensor", lambda _: False))
        inside.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield
