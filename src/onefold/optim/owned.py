"""Who owns which matrix of an optimizer whose updates look at whole matrices (layout/owners.py
chooses), and what other ranks see of its states.

[Note: states of owners] The states of a matrix are the owner's, whole, in whatever shape the
optimizer makes them. `optimizer.state[p]` is theirs on the owner; on other ranks it is a `StateElsewhere`,
which is empty and says where they are. Owners depend on the parameters and the number of ranks alone.
They are saved by their owners, whole, and loaded by whoever owns the matrix then.
"""  # fmt: skip

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.optim.optimizer import Optimizer

from onefold.comm import Group
from onefold.layout.owners import Matrix, assign
from onefold.optim.verdict import takes_stacks, verdict_for
from onefold.quant.moments import moment_policy, torchao_format
from onefold.recipe.optimizers import WHOLE
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry, Flat
from onefold.runtime.hooks import engine_of_entry
from onefold.runtime.stepper import (
    GroupVerdict,
    groups_now,
    groups_of,
    held_inside,
    is_cut,
)


@dataclass(frozen=True)
class Owned:
    """A parameter that is stepped whole.

    Attributes:
        group: the ranks that exchange its pieces.
        owner: the place in `group` of its owner.
        matrix: its pieces, by place in `group`.
    """

    entry: Entry
    group: Group
    owner: int
    matrix: Matrix

    @property
    def mine(self) -> bool:
        """Whether this rank owns it."""
        return self.group.rank == self.owner

    def at(self, position: int | None = None) -> bool:
        """Whether this rank (or that at `position` of the flat buffer's group) has its states. Each
        shard group has an owner, at the same place.
        """
        flat = self.entry.flat
        if position is None or flat.whole_master:
            return self.mine
        if self.group is flat.group:
            return position == self.owner
        return flat.group.topology.intra_group(position).index(position) == self.owner

    def counts(self, position: int | None = None) -> bool:
        """Whether this rank (or that at `position`) accounts for its states. Where several ranks
        hold the same elements (in shard groups, or at stage 0), each has an owner among its own; the
        first one accounts.
        """
        flat = self.entry.flat
        here = flat.group.rank if position is None else position
        if flat.whole_master:
            return here == 0
        if self.group is flat.group:
            return here == self.owner
        return self.at(here) and flat.group.topology.inter_group(here)[0] == here

    @property
    def where(self) -> str:
        """The owner's global rank, in words."""
        return f"rank {self.group.ranks[self.owner]}"


@dataclass
class _Known:
    """The owners of an optimizer's matrices, at the last look.

    Attributes:
        looked_at: what the answer depends on.
        chosen: {entry: owner}, which stays: of matrices that may have states.
        kept: the result whose owners are in `chosen`.
        stepped: the parameters and switches of the groups at the last step.
    """

    looked_at: Any = None
    stepped: list[Any] | None = None
    owned: dict[int, Owned] = field(default_factory=dict)
    kept: dict[int, Owned] | None = None
    chosen: weakref.WeakKeyDictionary[Entry, int] = field(default_factory=weakref.WeakKeyDictionary)


_known: weakref.WeakKeyDictionary[Optimizer, _Known] = weakref.WeakKeyDictionary()
_engines = [0]  # how many times engines have come or gone


def engines_changed() -> None:
    """Called when an engine has started or closed."""
    _engines[0] += 1


def owned_by(optimizer: Optimizer) -> dict[int, Owned]:
    """Return the parameters that `optimizer` steps whole, by id. Local, and the same on every rank,
    whenever it asks. Once stepped, they keep their owners when groups are added.
    """
    known = _known.setdefault(optimizer, _Known())
    groups = [(id(group), len(group["params"])) for group in optimizer.param_groups]
    if known.looked_at != (_engines[0], groups):
        known.owned = _find(optimizer, known.chosen)
        known.looked_at = _engines[0], groups
    return known.owned


def owned_in_step(optimizer: Optimizer) -> dict[int, Owned]:
    """Return `owned_by` for a step; these owners stay. The groups may have other parameters in the
    place of those at the last step.
    """
    known = _known.setdefault(optimizer, _Known())
    groups = groups_now(optimizer)
    if groups != known.stepped:
        known.looked_at, known.stepped = None, groups
    return _keep_owners(optimizer)


def _keep_owners(optimizer: Optimizer) -> dict[int, Owned]:
    """Return `owned_by`; these owners stay. Called where states are made, by all ranks alike."""
    found, known = owned_by(optimizer), _known[optimizer]
    if known.kept is not found:
        known.chosen.update({each.entry: each.owner for each in found.values()})
        known.kept = found
    return found


def owned(optimizer: Optimizer, param: Any) -> Owned | None:
    """Return how `param` is stepped whole; None if it is not."""
    return owned_by(optimizer).get(id(param))


def _find(optimizer: Optimizer, chosen: Mapping[Entry, int]) -> dict[int, Owned]:
    wanted: dict[Group, list[tuple[Entry, tuple[tuple[int, int, int], ...]]]] = {}
    accepted: dict[tuple[int, int], bool] = {}
    group_of, inside = groups_of(optimizer), held_inside(optimizer)
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) in inside:
                continue
            known = p.__dict__.get("_onefold_entry")
            entry = known() if known is not None else None
            engine = engine_of_entry(entry) if entry is not None else None
            if entry is None or engine is None or not engine.started or engine.closed:
                continue
            key = id(entry.flat), group_of[id(p)]
            if key not in accepted:
                accepted[key] = _steps_whole(engine, optimizer, entry.flat, key[1])
            if accepted[key] and entry.slot.numel:
                among, pieces = _pieces(entry)
                wanted.setdefault(among, []).append((entry, pieces))
    out: dict[int, Owned] = {}
    for inner in {id(each): each for each in inside.values()}.values():
        out |= owned_by(inner)
    for among, found in wanted.items():
        matrices = [Matrix(i, entry.slot.shape, pieces) for i, (entry, pieces) in enumerate(found)]
        kept = {i: chosen[entry] for i, (entry, _) in enumerate(found) if entry in chosen}
        # One rank alone, in a group of its own: it owns all, whatever its place is
        places = {place for matrix in matrices for place, _, _ in matrix.pieces}
        if len(places) == 1:
            kept = dict.fromkeys(range(len(found)), places.pop())
        owners = assign(matrices, among.size, kept)
        for matrix, (entry, _) in zip(matrices, found, strict=True):
            out[id(entry.param)] = Owned(entry, among, owners[matrix.key], matrix)
    return out


def steps_whole(
    engine: Engine, optimizer: Optimizer, flat: Flat, verdict: Callable[[], GroupVerdict]
) -> bool:
    """Return whether the optimizer steps the parameters of `flat` whole.

    Raises:
        ValueError: it would have to, and the recipe does not allow it.
    """
    # torchao's optimizers are known to be element-wise, and a trial would compile them
    if not is_cut(flat) or torchao_format(optimizer) is not None:
        return False
    if moment_policy(optimizer, engine.recipe, flat) is not None:
        return False  # it is Adam; with whole= the next stepper says what is wrong
    if verdict().update != WHOLE:
        return False
    if (what := _cannot(engine, flat)) is not None:
        raise ValueError(
            f"{type(optimizer).__name__} steps whole matrices, and {what} ({verdict().reason})"
        )
    return True


def _cannot(engine: Engine, flat: Flat) -> str | None:
    """Return why the matrices of `flat` cannot be stepped whole, as the end of a sentence."""
    recipe, name = engine.recipe, flat.entries[0].name
    if flat.storage.on_disk:
        return (
            f"the states of {name!r} are on NVMe, where they are stepped chunk by chunk. Use"
            " offload_optimizer='cpu', or an element-wise optimizer."
        )
    if recipe.step_in_backward:
        return (
            "step_in_backward=True steps pieces as soon as their gradients are there. Leave it out."
        )
    if flat.dtypes.master.itemsize < 4 and recipe.stochastic_rounding:
        return (
            "stochastic_rounding=True rounds element by element. Leave it out, or keep fp32"
            " master weights."
        )
    return None


def _steps_whole(engine: Engine, optimizer: Optimizer, flat: Flat, group: int) -> bool:
    try:
        return steps_whole(
            engine, optimizer, flat, lambda: verdict_for(engine.recipe)(optimizer, group)
        )
    except ValueError:  # raised again when it steps
        return False


def _pieces(entry: Entry) -> tuple[Group, tuple[tuple[int, int, int], ...]]:
    """Return the ranks that exchange pieces of `entry`, and what each holds, by place in them."""
    flat = entry.flat
    if flat.whole_master:
        return flat.group, ((flat.group.rank, 0, entry.slot.numel),)
    among = flat.owners_group
    held = [(p, *entry.owned(flat.group.ranks.index(rank))) for p, rank in enumerate(among.ranks)]
    return among, tuple(piece for piece in held if piece[1] < piece[2])


def put_elsewhere(optimizer: Optimizer) -> None:
    """On ranks that do not own a matrix, drop what the optimizer has of its states, and say where
    they are. See [Note: states of owners].
    """
    if not optimizer.state:
        return
    for each in _keep_owners(optimizer).values():
        param = each.entry.param
        if not each.mine and dict.get(optimizer.state, param) is not None:
            dict.__setitem__(optimizer.state, param, StateElsewhere(each))


def refuse_parts(optimizer: Optimizer, entry: Entry) -> None:
    """Raise ValueError if no rank has the matrix `entry` whole, but for the other data ranks' pieces."""
    box = entry.box
    if box is None or not box.divided:
        return
    cut = {p.dim % len(entry.shape) for p in box.kind.placements if hasattr(p, "dim")}
    if len(entry.shape) == 3 and cut == {0} and takes_stacks(optimizer):
        return
    raise ValueError(
        f"{type(optimizer).__name__} steps whole matrices, and {entry.name!r} is divided as"
        f" {box.kind.describe()}: no rank has all of it. Use an element-wise optimizer for it, in a"
        " parameter group or an optimizer of its own, or leave it out of the tensor parallel plan."
        " Stacks of experts, divided by expert, are stepped by optimizers that take three dimensions."
    )


class StateElsewhere(dict[Any, Any]):
    """The state of a matrix on ranks that do not own it: empty. See [Note: states of owners]."""

    def __init__(self, owned: Owned) -> None:
        super().__init__()
        self.of, self.where = owned.entry.name, owned.where

    def __missing__(self, key: Any) -> Any:
        raise KeyError(
            f"state {key!r} of {self.of!r} is whole on {self.where}, which steps this matrix for all"
            " ranks. optimizer.state_dict() returns whole states on the first rank."
        )

    def __reduce__(self) -> Any:
        return dict, ()
