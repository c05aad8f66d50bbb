"""The step of updates that look at whole matrices: `WholeStep`, and who owns which matrix.

    a round          every rank                       the owner of a matrix                      every rank
    of matrices      pieces of gradients ───────►     whole gradient, whole master
                     (and of masters)                 ─► the optimizer's own step ─►             new pieces into
                                                      whole states stay with it        ───────►  its masters

The next round's pieces travel while a round is stepped. Rounds, owners and bytes: layout/owners.py.

| masters are                                              | travel to the owner    |
|----------------------------------------------------------|------------------------|
| whole on every rank (stages 1 and 2 in one dtype), and nobody has written to them since they were gathered | gradients |
| else                                                     | gradients and masters  |
| whole on this rank alone (one rank; stage 0 of a box)    | nothing                |

[Note: states of owners] The states of a matrix are the owner's, whole, in whatever shape the
optimizer makes them. `optimizer.state[p]` is theirs on the owner; on other ranks it is a `StateElsewhere`,
which is empty and says where they are. Owners depend on the parameters and the number of ranks alone.
They are saved by their owners, whole, and loaded by whoever owns the matrix then.

[Note: once a step] The optimizer's own `step` runs on the owner once for each round, over that
round's matrices: each is updated once in an optimizer step, after accumulation, unscaling and
clipping. Then it runs as the user called it, over what is left of its groups: without these
parameters. So what it counts for itself or for a group is counted once.
"""  # fmt: skip

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from onefold.comm import OWNERS, CollectiveContext, Group
from onefold.comm.peers import alike, both
from onefold.comm.pending import Pending
from onefold.layout.owners import Matrix, assign, rounds
from onefold.memory import OWNED, nbytes_of
from onefold.optim.verdict import takes_stacks, verdict_for
from onefold.quant.moments import moment_policy, torchao_format
from onefold.recipe.optimizers import WHOLE
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry, Flat
from onefold.runtime.hooks import engine_of_entry
from onefold.runtime.parameters.values import written
from onefold.runtime.stepper import (
    GroupVerdict,
    Stepper,
    groups_of,
    held_inside,
    is_cut,
    only,
    raw_step,
)
from onefold.runtime.unit import State

_WHERE = "(whole matrices)"


# -- owners ----------------------------------------------------------------------------------------


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
        looked_at: what the answer depends on. chosen: {entry: owner}, which stays.
    """

    looked_at: Any = None
    owned: dict[int, Owned] = field(default_factory=dict)
    chosen: weakref.WeakKeyDictionary[Entry, int] = field(default_factory=weakref.WeakKeyDictionary)


_known: weakref.WeakKeyDictionary[Optimizer, _Known] = weakref.WeakKeyDictionary()
_engines = [0]  # how many times engines have come or gone


def engines_changed() -> None:
    """Called when an engine has started or closed."""
    _engines[0] += 1


def owned_by(optimizer: Optimizer) -> dict[int, Owned]:
    """Return the parameters that `optimizer` steps whole, by id. Local, and the same on every rank.
    Owners stay as they are when groups are added.
    """
    known = _known.setdefault(optimizer, _Known())
    groups = [(id(group), len(group["params"])) for group in optimizer.param_groups]
    if known.looked_at != (_engines[0], groups):
        known.owned = _find(optimizer, known.chosen)
        known.looked_at = _engines[0], groups
    return known.owned


def owned(optimizer: Optimizer, param: Any) -> Owned | None:
    """Return how `param` is stepped whole; None if it is not."""
    return owned_by(optimizer).get(id(param))


def _find(optimizer: Optimizer, chosen: weakref.WeakKeyDictionary[Entry, int]) -> dict[int, Owned]:
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
            chosen[entry] = owners[matrix.key]
            out[id(entry.param)] = Owned(entry, among, owners[matrix.key], matrix)
    return out


def _steps_whole(engine: Engine, optimizer: Optimizer, flat: Flat, group: int) -> bool:
    try:
        return WholeStep(engine).accepts(
            optimizer, flat, lambda: verdict_for(engine.recipe)(optimizer, group)
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
    for each in owned_by(optimizer).values():
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
        f"{type(optimizer).__name__} steps whole matrices, and {entry.part.names[0]!r} is divided as"
        f" {box.kind.describe()}: no rank has all of it. Use an element-wise optimizer for it, in a"
        " parameter group or an optimizer of its own, or leave it out of the tensor parallel plan."
        " Stacks of experts, divided by expert, are stepped by optimizers that take three dimensions."
    )


class StateElsewhere(dict[Any, Any]):
    """The state of a matrix on ranks that do not own it: empty. See [Note: states of owners]."""

    def __init__(self, owned: Owned) -> None:
        super().__init__()
        self.of, self.where = owned.entry.part.names[0], owned.where

    def __missing__(self, key: Any) -> Any:
        raise KeyError(
            f"state {key!r} of {self.of!r} is whole on {self.where}, which steps this matrix for all"
            " ranks. optimizer.state_dict() returns whole states on the first rank."
        )

    def __reduce__(self) -> Any:
        return dict, ()


# -- the step --------------------------------------------------------------------------------------


class WholeStep(Stepper):
    """Steps matrices on their owners. See this module."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def accepts(
        self, optimizer: Optimizer, flat: Flat, verdict: Callable[[], GroupVerdict]
    ) -> bool:
        # torchao's optimizers are known to be element-wise, and a trial would compile them
        if not is_cut(flat) or torchao_format(optimizer) is not None:
            return False
        if moment_policy(optimizer, self.engine.recipe, flat) is not None:
            return False  # it is Adam; with whole= the next stepper says what is wrong
        if verdict().update != WHOLE:
            return False
        if (what := self._cannot(optimizer, flat)) is not None:
            raise ValueError(
                f"{type(optimizer).__name__} steps whole matrices, and {what} ({verdict().reason})"
            )
        return True

    def _cannot(self, optimizer: Optimizer, flat: Flat) -> str | None:
        recipe, name = self.engine.recipe, flat.entries[0].part.names[0]
        if flat.storage.on_disk:
            return (
                f"the states of {name!r} are on NVMe, where they are stepped chunk by chunk. Use"
                " offload_optimizer='cpu', or an element-wise optimizer."
            )
        if flat.tiled:
            return (
                f"{name!r} is cut into tiles, each a parameter of its own. Leave tile= out, or use an"
                " element-wise optimizer."
            )
        if recipe.step_in_backward:
            return (
                "step_in_backward=True steps pieces as soon as their gradients are there. Leave it"
                " out."
            )
        if flat.dtypes.master.itemsize < 4 and recipe.stochastic_rounding:
            return (
                "stochastic_rounding=True rounds element by element. Leave it out, or keep fp32"
                " master weights."
            )
        return None

    def step(self, optimizer: Optimizer, entries: Sequence[Entry]) -> None:
        """Step `entries`, those that have a gradient. Collective.

        Raises:
            RuntimeError: on every rank, if the optimizer's own step failed on one, or the ranks
                have gradients of different parameters.
            ValueError: a matrix is divided over another axis.
        """
        known = owned_by(optimizer)
        for entry in entries:
            refuse_parts(optimizer, entry)
        ready = [known[id(e.param)] for e in entries if id(e.param) in known and _has_gradient(e)]
        here = self._agree(optimizer, ready)
        error: Exception | None = None
        groups = groups_of(optimizer)
        by_kind: dict[tuple[Group, torch.dtype, bool], list[Owned]] = {}
        for each in ready:
            flat = each.entry.flat
            whole = here and _has_whole(flat)
            by_kind.setdefault((each.group, flat.dtypes.master, whole), []).append(each)
        for number, ((group, dtype, whole), some) in enumerate(by_kind.items()):
            run = _Rounds(self.engine, optimizer, groups, group, dtype, whole, number)
            error = run.run(some) or error
        self._written(ready)
        for each in ready:
            if not each.mine and not dict.get(optimizer.state, each.entry.param):
                dict.__setitem__(optimizer.state, each.entry.param, StateElsewhere(each))
        self._agree_on_failure(optimizer, error)

    def _agree(self, optimizer: Optimizer, ready: Sequence[Owned]) -> bool:
        """Return whether the whole masters that ranks have are up to date on all of them.

        Raises:
            RuntimeError: on every rank, if the ranks have gradients of different parameters.
        """
        current = all(self._is_current(each.entry) for each in ready)
        if self.engine.group.alone:
            return current
        what = type(optimizer).__name__, [each.entry.number for each in ready]
        digest = both(zlib.crc32(repr(what).encode()).to_bytes(4, "little"))
        found = self.engine.group.any_of(digest + bytes([not current]), self._context("control"))
        if not alike(found[:-1]):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step(): the ranks have gradients of different"
                " parameters, or step different optimizers, so that nobody could bring the pieces of"
                " a matrix together. Nothing has been stepped. Every rank must step the same"
                " optimizers in one order, after the same zero_grad()."
            )
        return not found[-1]

    def _is_current(self, entry: Entry) -> bool:
        """Whether the resident whole of `entry`, if its flat buffer has one that is made of the
        masters, has their values: nobody has written to any since they were gathered.
        """
        flat = entry.flat
        return not _has_whole(flat) or (
            self.engine.unit_of[entry.number].state is not State.STALE
            and entry.last_write <= flat.copied
            and flat.versions == sum(written(e.param) for e in flat.entries)
        )

    def _agree_on_failure(self, optimizer: Optimizer, error: Exception | None) -> None:
        group, name = self.engine.group, type(optimizer).__name__
        found = bytes([error is not None])
        if not group.alone:
            found = group.any_of(found, self._context("control"))
        if not found[0]:
            return
        self.engine.transfers.broken = (
            f"{name}'s step failed half way, so that some matrices are of two steps. Start again"
            " from the last checkpoint."
        )
        raise RuntimeError(
            f"{name}.step() failed on this rank ({type(error).__name__}: {error})."
            if error is not None
            else f"{name}.step() failed on another rank, which steps some of the matrices."
        ) from error

    def _context(self, move: str) -> CollectiveContext:
        return CollectiveContext(move, _WHERE, self.engine.step_count, "optimizer")

    @staticmethod
    def _written(ready: Iterable[Owned]) -> None:
        for flat in dict.fromkeys(each.entry.flat for each in ready):
            flat.storage.masters_written()
            flat.storage.follow()


def _has_gradient(entry: Entry) -> bool:
    return entry.param.grad is not None or entry.graded_elsewhere


def _has_whole(flat: Flat) -> bool:
    """Whether the resident whole of `flat` is made of the masters themselves."""
    return flat.full is not None and flat.resident and not flat.storage.copies


@dataclass
class _Round:
    """Matrices that travel together, and their messages.

    Attributes:
        out: (place, message) of the pieces that this rank sends to owners. into: of those that it
            gets, as an owner.
    """

    owned: list[Owned]
    out: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    into: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    pending: Pending | None = None


class _Rounds:
    """The rounds of one step, over matrices of one dtype whose pieces the same ranks exchange."""

    def __init__(
        self,
        engine: Engine,
        optimizer: Optimizer,
        groups: dict[int, int],
        group: Group,
        dtype: torch.dtype,
        whole: bool,
        number: int,
    ) -> None:
        """`whole`: every rank has the whole masters. `number`: tells the messages from others."""
        self.engine, self.optimizer, self.groups = engine, optimizer, groups
        self.group, self.dtype, self.whole, self.number = group, dtype, whole, number
        self.device = engine.device
        self.error: Exception | None = None
        #: Elements of a piece in a message: its gradient's, and its master's
        self.times = 1 if whole else 2
        self.taken = 0  # bytes of the ledger

    def run(self, owned: Sequence[Owned]) -> Exception | None:
        """Step all of `owned`. Returns the first error of the optimizer's own step."""
        of_key = {each.entry.number: each for each in owned}
        matrices = [
            Matrix(each.entry.number, each.matrix.shape, each.matrix.pieces) for each in owned
        ]
        owners = {each.entry.number: each.owner for each in owned}
        todo = [_Round([of_key[m.key] for m in some]) for some in rounds(matrices, owners)]
        back: _Round | None = None
        for at, now in enumerate(todo):
            if not at:
                self._send_pieces(now)
            if at + 1 < len(todo):
                self._send_pieces(todo[at + 1])
            returned = self._step(now)
            if back is not None:
                self._take_back(back)
            back = self._send_back(now, returned)
        if back is not None:
            self._take_back(back)
        return self.error

    # -- pieces to owners --------------------------------------------------------------------------

    def _send_pieces(self, now: _Round) -> None:
        mine = self.group.rank
        sends: dict[int, list[torch.Tensor]] = {}
        sizes: dict[int, int] = {}
        for each in now.owned:
            for place, start, stop in each.matrix.pieces:
                if place == each.owner:
                    continue
                if each.owner == mine:
                    sizes[place] = sizes.get(place, 0) + self.times * (stop - start)
                elif place == mine:
                    parts = sends.setdefault(each.owner, [])
                    parts.append(self._gradient(each.entry))
                    if not self.whole:
                        parts.append(self._master(each.entry))
        now.out = [(peer, torch.cat(parts)) for peer, parts in sorted(sends.items())]
        now.into = [(peer, self._empty(numel)) for peer, numel in sorted(sizes.items())]
        self._count(nbytes_of(t) for _, t in [*now.out, *now.into])
        now.pending = self._exchange(now.out, now.into)

    def _gradient(self, entry: Entry) -> torch.Tensor:
        """This rank's piece of a gradient, [held], on the device."""
        grad = entry.param.grad
        assert grad is not None
        return grad.detach().reshape(-1).to(self.device, self.dtype)

    def _master(self, entry: Entry) -> torch.Tensor:
        return entry.param.detach().reshape(-1).to(self.device)

    # -- an owner's step ---------------------------------------------------------------------------

    def _step(self, now: _Round) -> dict[int, torch.Tensor]:
        """Step this rank's matrices. Returns their new values, [numel], by the entry's number."""
        assert now.pending is not None
        now.pending.wait()
        arrived = dict(now.into)
        at = dict.fromkeys(arrived, 0)
        mine = [each for each in now.owned if each.mine]
        stand_ins: list[nn.Parameter] = []
        for each in mine:
            master, grad = self._whole_of(each, arrived, at)
            stand_in = nn.Parameter(master.view(each.matrix.shape))
            stand_in.grad = grad.view(each.matrix.shape)
            stand_ins.append(stand_in)
        held = sum(2 * nbytes_of(t) for t in stand_ins)
        self._count([held, *(-nbytes_of(t) for _, t in [*now.out, *now.into])])
        now.out, now.into, now.pending = [], [], None
        if mine:
            try:
                self._own_step(mine, stand_ins)
            except Exception as error:
                # The others wait for their pieces: they are told at the end
                self.error = self.error or error
        out = {
            each.entry.number: t.detach().reshape(-1)
            for each, t in zip(mine, stand_ins, strict=True)
        }
        for t in stand_ins:
            t.grad = None
        self._count([-(held // 2)])
        return out

    def _whole_of(
        self, each: Owned, arrived: dict[int, torch.Tensor], at: dict[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the whole master and gradient, [numel] each, new."""
        entry, numel = each.entry, each.matrix.numel
        grad, master = self._empty(numel), self._empty(numel)
        if self.whole:
            assert entry.flat.full is not None
            master.copy_(entry.flat.view(entry.flat.full, entry).detach().reshape(-1))
        for place, start, stop in each.matrix.pieces:
            if place == each.owner:
                grad[start:stop] = self._gradient(entry)
                if not self.whole:
                    master[start:stop] = self._master(entry)
                continue
            for into in (grad,) if self.whole else (grad, master):
                first = at[place]
                into[start:stop] = arrived[place][first : first + stop - start]
                at[place] = first + stop - start
        return master, grad

    def _own_step(self, mine: Sequence[Owned], stand_ins: Sequence[nn.Parameter]) -> None:
        state = self.optimizer.state
        real = [each.entry.param for each in mine]
        offloaded = [each.entry.flat.storage.offloaded for each in mine]
        for param, stand_in, away in zip(real, stand_ins, offloaded, strict=True):
            if known := state.get(param):
                state[stand_in] = {
                    key: value.to(self.device, non_blocking=True)
                    if away and _is_large(value)
                    else value
                    for key, value in known.items()
                }
        try:
            with only(self.optimizer, self.groups, real, stand_ins, self.device):
                raw_step(self.optimizer)
        finally:
            for param, stand_in, away in zip(real, stand_ins, offloaded, strict=True):
                new = state.pop(stand_in, None)
                if new is not None:
                    state[param] = _brought_down(new, state.get(param) or {}) if away else new

    # -- new pieces back ---------------------------------------------------------------------------

    def _send_back(self, now: _Round, returned: dict[int, torch.Tensor]) -> _Round:
        mine, back = self.group.rank, _Round(now.owned)
        sends: dict[int, list[torch.Tensor]] = {}
        sizes: dict[int, int] = {}
        for each in now.owned:
            for place, start, stop in each.matrix.pieces:
                if each.owner != mine:
                    if place == mine:
                        sizes[each.owner] = sizes.get(each.owner, 0) + stop - start
                elif place == mine:
                    self._put(each.entry, returned[each.entry.number][start:stop])
                else:
                    sends.setdefault(place, []).append(returned[each.entry.number][start:stop])
        back.out = [(peer, torch.cat(parts)) for peer, parts in sorted(sends.items())]
        back.into = [(peer, self._empty(numel)) for peer, numel in sorted(sizes.items())]
        self._count(nbytes_of(t) for _, t in [*back.out, *back.into])
        self._count([-sum(nbytes_of(t) for t in returned.values())])
        back.pending = self._exchange(back.out, back.into)
        return back

    def _take_back(self, back: _Round) -> None:
        assert back.pending is not None
        back.pending.wait()
        arrived, at = dict(back.into), dict.fromkeys(dict(back.into), 0)
        mine = self.group.rank
        for each in back.owned:
            for place, start, stop in each.matrix.pieces:
                if place == mine and each.owner != mine:
                    first = at[each.owner]
                    self._put(each.entry, arrived[each.owner][first : first + stop - start])
                    at[each.owner] = first + stop - start
        self._count(-nbytes_of(t) for _, t in [*back.out, *back.into])

    @staticmethod
    def _put(entry: Entry, values: torch.Tensor) -> None:
        param = entry.param.detach()
        param.copy_(values.view(param.shape))

    # -- both --------------------------------------------------------------------------------------

    def _exchange(
        self, sends: Sequence[tuple[int, torch.Tensor]], recvs: Sequence[tuple[int, torch.Tensor]]
    ) -> Pending:
        context = CollectiveContext(OWNERS, _WHERE, self.engine.step_count, "optimizer")
        return self.group.exchange(sends, recvs, context, self.number, move=OWNERS)

    def _empty(self, numel: int) -> torch.Tensor:
        return torch.empty(numel, dtype=self.dtype, device=self.device)

    def _count(self, changes: Iterable[int]) -> None:
        self.engine.memory.add(OWNED, sum(changes))


def _is_large(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 1


def _brought_down(new: dict[Any, Any], before: dict[Any, Any]) -> dict[Any, Any]:
    """Return a new state with its tensors in host memory: in that of the state before, if it fits."""
    out: dict[Any, Any] = {}
    for key, value in new.items():
        old = before.get(key)
        if not _is_large(value):
            out[key] = value
        elif (
            isinstance(old, torch.Tensor) and old.shape == value.shape and old.dtype == value.dtype
        ):
            out[key] = old.copy_(value)
        else:
            out[key] = value.to("cpu")
    return out
