"""The modules that compute in tiles, and the tiles.

    Linear       y = cat(x @ W_i.T + b_i)                   rows of W are outputs
    Embedding    y = W_i[ids] where ids are rows of W_i     rows of W are looked up
    Conv1D       y = b + x_0 @ W_0 + x_1 @ W_1 + ...        rows of W are inputs (transformers')

[Note: what is equal] An embedding has the same bits as untiled, output and gradient: rows are only
copied and added. Other results are equal within rounding. A matrix library chooses kernels by
shape, so a linear's output, and the gradients of its weight and bias, may be summed in another
order than untiled. A linear's gradient of x and a Conv1D's output are sums over the tiles; in 16
bits each tile's part is rounded before it is added. With the same tile size the bits are always the
same, on every tier.

[Note: one tile at a time] A tile is a unit: its weight is gathered when the tile is called, and
released after the call. Autograd saves a handle in place of the weight (runtime/saved_tensors.py), in a
recomputed forward pass too (`saving`). So the backward pass gathers a tile, reads it and releases
it, even if other operations still need that tile.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onefold.layout import Part
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.saved_tensors import saving
from onefold.runtime.units import TiledModule, WeightTile
from onefold.tiling.weight import copy_of, stored, weight_of

if TYPE_CHECKING:
    from onefold.runtime.gather import Gatherer


class Tile(WeightTile):
    """Some rows of a weight.

    Attributes:
        rows: number of rows. first: index of the first one. shape: shape of the whole weight.
        shared: several modules compute with it (tied weights).
        told: the warning that code reads the whole weight was given.
    """

    weight: nn.Parameter
    _kind: type

    def set_up(
        self, weight: nn.Parameter, first: int, shape: tuple[int, ...], shared: bool
    ) -> None:
        """Initialize the tile. Used in place of `__init__`: those of the other base classes would
        create weights.
        """
        nn.Module.__init__(self)
        self.weight, self.rows, self.first, self.shape, self.shared, self.told = (
            weight,
            weight.shape[0],
            first,
            shape,
            shared,
            False,
        )
        self._gatherer: weakref.ref[Gatherer] | None = None

    def part(self, names: Sequence[str]) -> Part:
        """Return the tile's part of the whole weight; `names` are the names of its own weight."""
        whole = tuple(
            ".".join([*path[:-3], path[-1]]) for path in (name.split(".") for name in names)
        )
        return Part(whole, self.shape, self.first * prod(self.shape[1:]))

    def save_by(self, gatherer: Gatherer) -> None:
        """Have `gatherer` (weakly held) save this tile's weight. See [Note: one tile at a time]."""
        self._gatherer = weakref.ref(gatherer)

    def forward(self, use: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `use(weight)`."""
        known = self._gatherer if torch.is_grad_enabled() else None
        gatherer = known() if known is not None else None
        with (
            saving(gatherer, recomputed_alike=True)
            if gatherer is not None
            else contextlib.nullcontext()
        ):
            return use(self.weight)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return instance, (tile_of, self._kind), self.__dict__

    # The tiled module puts the whole weight into the state dict, under its own name.

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        pass

    def _load_from_state_dict(self, *_: Any) -> None:
        pass


class LinearTile(Tile, nn.Linear):  # type: ignore[misc]
    """A tile that is initialized like a linear layer."""

    _kind = nn.Linear

    def set_up(
        self, weight: nn.Parameter, first: int, shape: tuple[int, ...], shared: bool
    ) -> None:
        super().set_up(weight, first, shape, shared)
        self.out_features, self.in_features = weight.shape
        self.register_parameter("bias", None)


class EmbeddingTile(Tile, nn.Embedding):  # type: ignore[misc]
    """A tile that is initialized like an embedding."""

    looked_up = True

    _kind = nn.Embedding

    def set_up(
        self, weight: nn.Parameter, first: int, shape: tuple[int, ...], shared: bool
    ) -> None:
        super().set_up(weight, first, shape, shared)
        self.num_embeddings, self.embedding_dim = weight.shape
        self.padding_idx = self.max_norm = None
        self.norm_type, self.scale_grad_by_freq, self.sparse = 2.0, False, False

    def pad(self, index: int | None) -> None:
        """Set the padding row. `index`: the row of the whole weight that starts as zeros."""
        self.padding_idx = _inside(index, self)


class Conv1DTile(Tile):
    """A tile initialized like transformers' Conv1D; `tile_of` adds that class to its bases."""

    def set_up(
        self, weight: nn.Parameter, first: int, shape: tuple[int, ...], shared: bool
    ) -> None:
        super().set_up(weight, first, shape, shared)
        self.nx, self.nf = weight.shape
        self.register_parameter("bias", None)


def _inside(row: int | None, tile: Tile) -> int | None:
    """Return a row of the whole weight as a row of `tile`; None if it is in another tile."""
    return (
        row - tile.first if row is not None and tile.first <= row < tile.first + tile.rows else None
    )


class Tiled(TiledModule):
    """Base of the tiled modules. cut.py turns modules into these, in place; `_kind` is their
    original class.
    """

    tiles: nn.ModuleList
    whole_shape: tuple[int, ...]
    _kind: type
    _blank = False

    @property
    def weight(self) -> Tensor:
        """See tiling/weight.py."""
        if self._blank:
            return nn.Parameter(torch.empty(self.whole_shape, device="meta"), requires_grad=False)
        return weight_of(self.own_tiles, self.whole_shape)

    @property
    def own_tiles(self) -> list[Any]:
        return list(self.tiles)

    @contextlib.contextmanager
    def blank(self) -> Iterator[None]:
        """Inside this context the weight is a meta tensor. So an initialization sets only the bias;
        the tiles are initialized separately.
        """
        self.__dict__["_blank"] = True
        try:
            yield
        finally:
            del self.__dict__["_blank"]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        first = stored(self.own_tiles[0])
        if TiledModule.outlined:
            weight = first
        else:
            with disable_torch_function(), torch.no_grad():
                weight = copy_of(self.own_tiles, self.whole_shape)
            weight = nn.Parameter(weight, first.requires_grad) if keep_vars else weight
        destination[prefix + "weight"] = weight
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: Any,
        unexpected_keys: Any,
        error_msgs: Any,
    ) -> None:
        key = prefix + "weight"
        rest = {name: value for name, value in state_dict.items() if name != key}
        super()._load_from_state_dict(
            rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        given = state_dict.get(key)
        if given is None:
            if strict:
                missing_keys.append(key)
            return
        if tuple(given.shape) != self.whole_shape:
            error_msgs.append(
                f"size mismatch for {key}: given {tuple(given.shape)}, expected {self.whole_shape}."
            )
            return
        with disable_torch_function(), torch.no_grad():
            for tile in self.own_tiles:
                tile.weight.copy_(given[tile.first : tile.first + tile.rows])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return instance, (in_tiles, self._kind), self.__dict__

    def extra_repr(self) -> str:
        known = super().extra_repr()
        return f"{known}{', ' if known else ''}tiles={len(self.tiles)}"


class TiledLinear(Tiled, nn.Linear):  # type: ignore[override]
    """x [..., in_features] -> [..., out_features]"""

    def forward(self, input: Tensor) -> Tensor:
        tiles = self.own_tiles
        biases = (
            [None] * len(tiles)
            if self.bias is None
            else self.bias.split([tile.rows for tile in tiles])
        )
        return torch.cat(
            [
                tile(partial(F.linear, input, bias=bias))
                for tile, bias in zip(tiles, biases, strict=True)
            ],
            dim=-1,
        )

    def reset_parameters(self) -> None:
        """Reset the bias, as nn.Linear does. The tiles reset themselves."""
        if self.bias is not None:
            bound = self.in_features**-0.5 if self.in_features else 0.0
            nn.init.uniform_(self.bias, -bound, bound)


class TiledEmbedding(Tiled, nn.Embedding):  # type: ignore[override]
    """ids [...] -> [..., embedding_dim]"""

    def forward(self, input: Tensor) -> Tensor:
        out = None
        for tile in self.own_tiles:
            end = tile.first + tile.rows
            # Ids of other tiles look up some row, which is replaced below. Ids outside the whole
            # weight must raise an error, so the first and the last tile do not clamp them.
            local = (input - tile.first).clamp(
                min=0 if tile.first > 0 else None,
                max=tile.rows - 1 if end < self.num_embeddings else None,
            )
            found = tile(
                partial(
                    F.embedding,
                    local,
                    padding_idx=_inside(self.padding_idx, tile),
                    sparse=self.sparse,
                )
            )
            inside = (input >= tile.first) & (input < end)
            out = found if out is None else torch.where(inside.unsqueeze(-1), found, out)
        assert out is not None
        return out

    def reset_parameters(self) -> None:
        """Do nothing: the tiles reset themselves."""


class TiledConv1D(Tiled):
    """x [..., nx] -> [..., nf]; `in_tiles` adds transformers' class to its bases."""

    nf: int
    bias: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        tiles = self.own_tiles
        out: Tensor = self.bias
        for tile, piece in zip(
            tiles,
            x.reshape(-1, x.size(-1)).split([tile.rows for tile in tiles], dim=-1),
            strict=True,
        ):
            out = tile(partial(torch.addmm, out, piece))
        return out.view(*x.shape[:-1], self.nf)

    def reset_parameters(self) -> None:
        """Reset the bias to zeros. The tiles reset themselves."""
        nn.init.zeros_(self.bias)


# -- the classes of tiled modules and of tiles -----------------------------------------------------


def in_tiles(kind: type) -> type:
    """Return a subclass of `kind` that computes in tiles. It has the same name, so checks by class
    or by name still find it.
    """
    own = {"__module__": kind.__module__, "_kind": kind}
    for base, tiled in ((nn.Linear, TiledLinear), (nn.Embedding, TiledEmbedding)):
        if issubclass(kind, base):
            return type(kind.__name__, (tiled,) if kind is base else (kind, tiled), own)
    return type(kind.__name__, (TiledConv1D, kind), own)


def tile_of(kind: type) -> type[Tile]:
    """Return the class of the tiles of a module of class `kind`."""
    if issubclass(kind, nn.Linear):
        return LinearTile
    return (
        EmbeddingTile
        if issubclass(kind, nn.Embedding)
        else type("Conv1DTile", (Conv1DTile, kind), {"_kind": kind})
    )


def instance(make: Callable[[type], type], kind: type) -> Any:
    """Return an uninitialized instance of the class `make(kind)`. Copies and pickles use it."""
    made: Any = make(kind)
    return made.__new__(made)
