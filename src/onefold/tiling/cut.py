"""Cut large weights into tiles, in place, before units are found.

    nn.Embedding 'tokens'  weight ──┐ one Parameter           Embedding 'tokens'  tiles.0  tiles.1  ...
    nn.Linear    'head'    weight ──┘ (tied)          ──►     Linear    'head'    the same tiles

A module stays the same object (hooks, attributes, references to it), and its old class is a base of
its new class. A tile's parameter is a view of rows of the weight. Cutting copies nothing; on one
rank with nothing to cast, nothing is ever copied.

A weight is left whole, with a note to the user, if a module computes with it that `modules.py` does
not cover.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from onefold.layout import Dtypes, round_up
from onefold.recipe import Recipe
from onefold.runtime.parameters.parameter import ShardedParameterError
from onefold.runtime.units import Found, parameters_of
from onefold.tiling.modules import EmbeddingTile, Tile, Tiled, in_tiles, instance, tile_of
from onefold.tiling.weight import joint

#: Tiles have a multiple of 64 (else 16) rows if the limit allows it. Matrix kernels work in blocks
#: of rows, and a partly filled block takes as long as a full one. This does not guarantee equal
#: bits: a library may sum in another order for another shape.
ROWS = (64, 16)


class Cut:
    """Cuts the large weights of `root` into tiles. A context manager: an exception inside restores
    the model.

    Attributes:
        notes: sentences about weights that were left whole.
    """

    def __init__(self, root: nn.Module, recipe: Recipe) -> None:
        """Raises: ValueError: one row is larger than the limit of a tile, or a weight or an
        embedding has a feature that tiles do not support.
        """
        self.notes: list[str] = []
        self._undo: list[Callable[[], None]] = []
        self._weights: list[tuple[nn.Parameter, str]] = []
        self._whole: dict[str, list[str]] = {}
        # Modules of the same class get the same new class, since units are found by class
        self._classes: dict[type, type] = {}
        limit = recipe.tile
        if limit is None:
            return
        try:
            for found in list(parameters_of(root)):
                self._look_at(found, limit, recipe)
            self.notes += [_left_whole(what, names, limit) for what, names in self._whole.items()]
        except BaseException:
            self._put_back()
            raise

    def _look_at(self, found: Found, limit: int, recipe: Recipe) -> None:
        weight, name = found.param, found.names[0]
        dtype = Dtypes.of(weight.dtype, weight.requires_grad, recipe).compute
        if weight.numel() * dtype.itemsize <= limit or any(
            isinstance(module, Tile) for module, _ in found.places
        ):
            return
        if weight._backward_hooks or weight._post_accumulate_grad_hooks:
            raise ValueError(
                f"parameter {name!r} has gradient hooks and takes more than tile={limit:,} bytes,"
                " so it would be computed in tiles, whose gradients come one by one: remove the"
                " hooks, or give the recipe a larger tile."
            )
        odd = next(
            (
                module
                for module, attribute in found.places
                if not _computes_in_tiles(module, attribute)
            ),
            None,
        )
        if odd is not None or type(weight) is not nn.Parameter or not weight.is_floating_point():
            what = type(odd).__name__ if odd is not None else type(weight).__name__
            self._whole.setdefault(what, []).append(name)
            return
        for (module, _), home in zip(found.places, found.place_names, strict=True):
            _refuse_odd_embedding(module, home.rpartition(".")[0])
        row = weight.shape[1] * dtype.itemsize
        whole = (
            recipe.block // math.gcd(weight.shape[1], recipe.block)
            if recipe.block and weight.requires_grad
            else 1
        )
        if row * whole > limit:
            why = (
                "a row is not divided"
                if whole == 1
                else f"moments in {recipe.moments} have blocks of {recipe.block} elements"
            )
            rows = "one row" if whole == 1 else f"{whole} rows"
            raise ValueError(
                f"tile={limit:,} bytes, but {rows} of {name!r} ({tuple(weight.shape)}, {dtype})"
                f" take{'s' * (whole == 1)} {row * whole:,}, and {why}: give a tile of"
                f" {row * whole:,} bytes or more."
            )
        self._cut(found, rows_of_a_tile(weight.shape[0], limit // row, whole), name)

    def _cut(self, found: Found, rows: int, name: str) -> None:
        weight = found.param
        first, shape = found.places[0][0], tuple(weight.shape)
        if not weight.is_contiguous():
            weight.data = weight.data.contiguous()
        tiles = [
            _tile(first, weight, start, rows, len(found.places) > 1)
            for start in range(0, shape[0], rows)
        ]
        before = [(module, type(module), dict(module._parameters)) for module, _ in found.places]
        for module, kind, _ in before:
            module.__class__ = self._classes.setdefault(kind, in_tiles(kind))
            del module._parameters["weight"]
            module.tiles = nn.ModuleList(tiles)
            module.whole_shape = shape  # type: ignore[assignment]
        whole, weight.data = (
            weight.data if weight.is_meta else None,
            torch.empty(0, dtype=weight.dtype, device=weight.device),
        )
        self._weights.append((weight, name))
        self._undo.append(lambda: _put_back(weight, tiles, before, whole))

    def __enter__(self) -> Cut:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._put_back()
            return
        # An optimizer made before may still refer to the old parameter. Its use must raise.
        for weight, name in self._weights:
            weight.__class__ = CutParameter
            weight._onefold_name = name  # type: ignore[attr-defined]
        self._undo.clear()
        self._weights.clear()

    def _put_back(self) -> None:
        while self._undo:
            self._undo.pop()()


def rows_of_a_tile(rows: int, most: int, multiple: int = 1) -> int:
    """Return the rows of a tile, at most `most`, such that `rows` rows give as few tiles as
    possible, of about equal size. The last tile may have fewer rows.

    The result is a multiple of `multiple`; `most` must be >= `multiple`.
    """
    even = min(round_up(-(-rows // -(-rows // most)), multiple), most // multiple * multiple)
    return next(
        (whole for q in ROWS if (whole := round_up(even, math.lcm(q, multiple))) <= most), even
    )


def _tile(module: nn.Module, weight: nn.Parameter, start: int, rows: int, shared: bool) -> Tile:
    """Return a tile with up to `rows` rows of the weight of `module`, from row `start` on."""
    tile: Tile = instance(tile_of, type(module))
    part = nn.Parameter(weight.data[start : start + rows], requires_grad=weight.requires_grad)
    own = weight.__dict__  # an optimizer may read what the user has put there
    part.__dict__.update({k: v for k, v in own.items() if not k.startswith("_onefold")})
    tile.set_up(part, start, tuple(weight.shape), shared)
    if weight.grad is not None:
        part.grad = weight.grad[start : start + rows]
    if isinstance(tile, EmbeddingTile) and isinstance(module, nn.Embedding):
        tile.pad(module.padding_idx)
    return tile.train(module.training)


def _put_back(
    weight: nn.Parameter,
    tiles: list[Tile],
    before: list[tuple[nn.Module, type, dict[str, Any]]],
    whole: Tensor | None,
) -> None:
    shape = tiles[0].shape
    data = whole if whole is not None else joint([tile.weight for tile in tiles], shape)
    if data is None:
        return  # the model is already sharded, which cannot be undone
    weight.data = data
    for module, kind, parameters in before:
        module.__class__ = kind
        del module._modules["tiles"]
        del module.__dict__["whole_shape"]
        module._parameters.clear()
        module._parameters.update(parameters)


def _left_whole(what: str, names: list[str], limit: int) -> str:
    more = f" and {len(names) - 1} more take" if len(names) > 1 else " takes"
    return (
        f"parameter {names[0]!r}{more} more than tile={limit:,} bytes when gathered, but {what} is"
        " not computed in tiles: gathered whole."
    )


# -- which modules can be tiled --------------------------------------------------------------------


def _base_of(module: nn.Module) -> type | None:
    """Return the base class of `module` that can be computed in tiles; None if there is none."""
    for base in (nn.Linear, nn.Embedding):
        if isinstance(module, base):
            # A subclass may add to the forward pass. But one with its own initialization stays
            # whole: the tiles would not get its values.
            return base if type(module).reset_parameters is base.reset_parameters else None
    conv: Any = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return conv if conv is not None and type(module) is conv else None


def _computes_in_tiles(module: nn.Module, attribute: str) -> bool:
    weight = module._parameters.get("weight")
    if (
        attribute != "weight"
        or weight is None
        or weight.dim() != 2
        or isinstance(module, torch.jit.ScriptModule)
    ):
        return False
    return _base_of(module) is not None


def _refuse_odd_embedding(module: nn.Module, name: str) -> None:
    for option in ("max_norm", "scale_grad_by_freq") if isinstance(module, nn.Embedding) else ():
        if getattr(module, option):
            raise ValueError(
                f"embedding {name!r} has {option}={getattr(module, option)!r}, which looks at all"
                " rows that a batch uses together and cannot be computed in tiles: leave it out,"
                " or give the recipe a tile larger than this weight."
            )


class CutParameter(nn.Parameter):
    """A weight that was cut into tiles. Using it raises: an optimizer that was made before would
    step it without effect.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for a in args for t in (a if isinstance(a, (list, tuple)) else (a,))]
        name = next((t.__dict__["_onefold_name"] for t in given if isinstance(t, CutParameter)), "")
        raise ShardedParameterError(
            f"parameter {name!r} is computed in tiles since shard(), and each tile is a parameter"
            " of its own: make the optimizer of model.parameters() after shard(), and keep no"
            " parameter from before."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"CutParameter({self.__dict__['_onefold_name']!r})"


# -- for shard() -----------------------------------------------------------------------------------


def initializing(
    init: Callable[[nn.Module], object] | None,
) -> Callable[[nn.Module], object] | None:
    """Wrap `init`: on a tiled module it initializes only the bias. Each tile is initialized as a
    module of its own.
    """
    if init is None:
        return None

    def each(module: nn.Module) -> None:
        if isinstance(module, Tiled):
            with module.blank():
                init(module)
        else:
            init(module)

    return each


def with_tiles(root: nn.Module, names: Collection[str]) -> set[str]:
    """Return `names` of parameters, plus the names of the tiles of these parameters."""
    out = set(names)
    for name, module in root.named_modules():
        if isinstance(module, Tile):
            own = f"{name}.weight"
            out |= {own} if module.part([own]).names[0] in out else set()
    return out


__all__ = ["Cut", "CutParameter", "initializing", "rows_of_a_tile", "with_tiles"]
