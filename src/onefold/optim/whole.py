"""Updates that look at whole matrices: who owns which matrix, and the step of the owners.

    a round          every rank                       the owner of a matrix                      every rank
    of matrices      pieces of gradients ───────►     whole gradient, whole master
                     (and of masters)                 ─► the optimizer's own step ─►             new pieces into
                                                      whole states stay with it        ───────►  its masters

The next round's pieces travel while a round is stepped. Owners, rounds and bytes: layout/owners.py.

| masters are                                              | travel to the owner    |
|----------------------------------------------------------|------------------------|
| whole on every rank (stages 1 and 2 in one dtype), and nobody has written to them since they were gathered | gradients |
| else                                                     | gradients and masters  |
| whole on this rank alone (one rank; stage 0 of a box)    | nothing                |

[Note: once a step] The optimizer's own `step` runs on the owner once for each round, over that
round's matrices: each is updated once in an optimizer step, after accumulation, unscaling and
clipping. Then it runs as the user called it, over what is left of its groups: without these
parameters. So what it counts for itself or for a group is counted once.

[Note: states of owners] The states of a matrix are the owner's, whole, in whatever shape the
optimizer makes them. `optimizer.state[p]` is theirs on the owner; on other ranks it is a
`StateElsewhere`, which is empty and says where they are. Owners depend on the parameters and the
number of ranks alone. They are saved by their owners, and loaded by whoever owns the matrix then.
"""  # fmt: skip

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from onefold.comm import OWNERS, CollectiveContext, Group, alike, both
from onefold.layout.owners import Matrix, assign, rounds
from onefold.memory import OWNED, nbytes_of
from onefold.optim.verdict import takes_stacks, verdict_of
from onefold.quant.moments import moment_policy
from onefold.recipe.optimizers import WHOLE
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry, Flat
from onefold.runtime.parameters.interval import owner_of
from onefold.runtime.stepper import (
    GroupVerdict,
    Part,
    Stepper,
    groups_of,
    held_inside,
    is_cut,
    step_parts,
)

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
        """Whether this rank (or that at `position`) is the first of those that have its states."""
        group = self.entry.flat.group
        here = group.rank if position is None else position
        return here == next(filter(self.at, range(group.size)))


@dataclass
class _Known:
    """The owners of an optimizer's matrices, at the last look.

    Attributes:
        looked_at: what the answer depends on.
        chosen: {entry: owner}, which stays: of matrices that may have states.
    """

    looked_at: Any = None
    owned: dict[int, Owned] = field(default_factory=dict)
    chosen: weakref.WeakKeyDictionary[Entry, int] = field(default_factory=weakref.WeakKeyDictionary)


_known: weakref.WeakKeyDictionary[Optimizer, _Known] = weakref.WeakKeyDictionary()
epoch = [0]  # how many times engines have come or gone


def owned_by(optimizer: Optimizer, stays: bool = False) -> dict[int, Owned]:
    """Return the parameters that `optimizer` steps whole, by id. Local, and the same on every rank,
    whenever it asks. `stays`: these owners stay when groups are added. All ranks alike say so, where
    states are made.
    """
    known = _known.setdefault(optimizer, _Known())
    groups = [(id(group), len(group["params"])) for group in optimizer.param_groups]
    if known.looked_at != (epoch[0], groups):
        known.owned = _find(optimizer, known.chosen)
        known.looked_at = epoch[0], groups
    if stays:
        known.chosen.update({each.entry: each.owner for each in known.owned.values()})
    return known.owned


def _find(optimizer: Optimizer, chosen: Mapping[Entry, int]) -> dict[int, Owned]:
    wanted: dict[Group, list[Entry]] = {}
    out, inside = dict[int, Owned](), held_inside(optimizer)
    for inner in {id(each): each for each in inside.values()}.values():
        out |= owned_by(inner)
    params = [(p, i) for i, group in enumerate(optimizer.param_groups) for p in group["params"]]
    for param, number in params:
        entry, engine = owner_of(param)
        if entry is None or id(param) in inside:
            continue
        with contextlib.suppress(ValueError):  # raised again when it steps
            verdict = partial(verdict_of, engine.recipe, optimizer, number)
            if entry.slot.numel and steps_whole(engine, optimizer, entry.flat, verdict):
                if entry.flat.whole_master:  # every rank owns all
                    among, place = entry.flat.group, entry.flat.group.rank
                    matrix = Matrix(entry.number, entry.slot.shape, ((place, 0, entry.slot.numel),))
                    out[id(param)] = Owned(entry, among, place, matrix)
                else:
                    wanted.setdefault(entry.flat.owners_group, []).append(entry)
    for among, found in wanted.items():
        matrices = [Matrix(e.number, e.slot.shape, _pieces(e, among)) for e in found]
        kept = {entry.number: chosen[entry] for entry in found if entry in chosen}
        owners = assign(matrices, among.size, kept)
        for matrix, entry in zip(matrices, found, strict=True):
            out[id(entry.param)] = Owned(entry, among, owners[matrix.key], matrix)
    return out


def _pieces(entry: Entry, among: Group) -> tuple[tuple[int, int, int], ...]:
    """Return what each rank of `among` holds of `entry`, by place in them."""
    held = [
        (place, *entry.owned(entry.flat.group.ranks.index(rank)))
        for place, rank in enumerate(among.ranks)
    ]
    return tuple(piece for piece in held if piece[1] < piece[2])


def steps_whole(
    engine: Engine, optimizer: Optimizer, flat: Flat, verdict: Callable[[], GroupVerdict]
) -> bool:
    """Return whether the optimizer steps the parameters of `flat` whole.

    Raises:
        ValueError: it would have to, and the recipe does not allow it.
    """
    # With a policy it is Adam; with whole= the next stepper says what is wrong
    if (
        not is_cut(flat)
        or moment_policy(optimizer, engine.recipe, flat) is not None
        or verdict().update != WHOLE
    ):
        return False
    recipe = engine.recipe
    refusals = {
        f"the states of {flat.entries[0].name!r} are on NVMe, where they are stepped chunk by chunk."
        " Use offload_optimizer='cpu', or an element-wise optimizer.": flat.storage.on_disk,
        "step_in_backward=True steps pieces as soon as their gradients are there. Leave it out.": (
            recipe.step_in_backward
        ),
        "stochastic_rounding=True rounds element by element. Leave it out, or keep fp32 master"
        " weights.": flat.dtypes.master.itemsize < 4 and recipe.stochastic_rounding,
    }
    for what, refused in refusals.items():
        if refused:
            raise ValueError(
                f"{type(optimizer).__name__} steps whole matrices, and {what} ({verdict().reason})"
            )
    return True


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
        self.of, self.where = owned.entry.name, owned.group.ranks[owned.owner]

    def __missing__(self, key: Any) -> Any:
        raise KeyError(
            f"state {key!r} of {self.of!r} is whole on rank {self.where}, which steps this matrix for"
            " all ranks. optimizer.state_dict() returns whole states on the first rank."
        )

    def __reduce__(self) -> Any:
        return dict, ()


def put_elsewhere(optimizer: Optimizer, stepped: Iterable[Owned] = ()) -> None:
    """On ranks that do not own a matrix, drop what the optimizer has of its states, and say where
    they are. `stepped`: those whose owners have states now. See [Note: states of owners].
    """
    state = optimizer.state
    known = owned_by(optimizer, stays=True).values() if state else ()
    for each in [*stepped, *(e for e in known if dict.get(state, e.entry.param) is not None)]:
        if not each.mine:
            dict.__setitem__(state, each.entry.param, StateElsewhere(each))


# -- their step ------------------------------------------------------------------------------------


class WholeStep(Stepper):
    """Steps matrices on their owners. See this module."""

    whole = True

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def accepts(
        self, optimizer: Optimizer, flat: Flat, verdict: Callable[[], GroupVerdict]
    ) -> bool:
        # The groups may have other parameters in the place of those at the last step
        _known.setdefault(optimizer, _Known()).looked_at = None
        return steps_whole(self.engine, optimizer, flat, verdict)

    def step(self, optimizer: Optimizer, entries: Sequence[Entry]) -> None:
        """Step `entries`, those that have a gradient. Collective.

        Raises:
            RuntimeError: on every rank, if the optimizer's own step failed on one, or the ranks
                have gradients of different parameters.
            ValueError: a matrix is divided over another axis.
        """
        known = owned_by(optimizer, stays=True)
        for entry in entries:
            refuse_parts(optimizer, entry)
        graded = [e for e in entries if e.param.grad is not None or e.graded_elsewhere]
        ready = [known[id(e.param)] for e in graded if id(e.param) in known]
        current = self._agree(optimizer, graded, ready)
        error: Exception | None = None
        kinds: dict[Any, list[Owned]] = {}  # those of a kind travel in the same rounds
        for each in ready:
            flat = each.entry.flat
            whole, away = current and _has_whole(flat), flat.storage.offloaded
            kinds.setdefault((each.group, flat.dtypes.master, whole, away), []).append(each)
        for kind, some in kinds.items():
            # Ranks with an empty part of some parameter have fewer kinds
            number = some[0].entry.number
            error = _Rounds(self.engine, optimizer, number, *kind).run(some) or error
        for flat in dict.fromkeys(each.entry.flat for each in ready):
            flat.storage.renew()
        put_elsewhere(optimizer, ready)
        self._agree_on_failure(optimizer, error)

    def _agree(self, optimizer: Optimizer, graded: Sequence[Entry], ready: Sequence[Owned]) -> bool:
        """Return whether the resident wholes that are made of the masters are up to date on all ranks:
        nobody has written to any masters since they were gathered.

        Raises:
            RuntimeError: on every rank, if the ranks have gradients of different parameters.
        """
        current = not any(_has_whole(each.entry.flat) and each.entry.flat.stale for each in ready)
        if self.engine.group.alone:
            return current
        what = type(optimizer).__name__, [entry.number for entry in graded]
        digest = both(zlib.crc32(repr(what).encode()).to_bytes(4, "little"))
        found = self.engine.group.any_of(digest + bytes([not current]), _context(self.engine))
        if not alike(found[:-1]):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step(): the ranks have gradients of different"
                " parameters, or step different optimizers, so that nobody could bring the pieces of"
                " a matrix together. Nothing has been stepped. Every rank must step the same"
                " optimizers in one order, after the same zero_grad()."
            )
        return not found[-1]

    def _agree_on_failure(self, optimizer: Optimizer, error: Exception | None) -> None:
        failed = self.engine.group.failed(error, _context(self.engine))
        if not failed:
            return
        name = type(optimizer).__name__
        self.engine.transfers.broken = (
            f"{name}'s step failed half way, so that some matrices are of two steps. Start again"
            " from the last checkpoint."
        )
        said = "; ".join(f"rank {rank} ({text})" for rank, text in failed.items())
        raise RuntimeError(
            f"{name}.step() failed on {said}, which steps some of the matrices for all."
        ) from error


def _context(engine: Engine, move: str = "control") -> CollectiveContext:
    return engine.context(move, _WHERE, "optimizer")


def _has_whole(flat: Flat) -> bool:
    """Whether the resident whole of `flat` is made of the masters themselves."""
    return flat.full is not None and flat.spec.shares_memory


#: Rows of a matrix that travels.
_GRADIENT, _MASTER = 0, 1
#: {gradient, master}, [numel] each, of the matrices that this rank owns, by their keys.
Wholes = dict[int, dict[int, torch.Tensor]]


@dataclass
class _Rounds:
    """The rounds of one step, over matrices whose pieces the same ranks exchange in the same way.

    Attributes:
        number: tells the messages from those of other kinds.
        group: the ranks that exchange their pieces. dtype: of masters and gradients.
        whole: every rank has the whole masters.
        away: masters and states are on the host.
        error: the first of the optimizer's own step.
    """

    engine: Engine
    optimizer: Optimizer
    number: int
    group: Group
    dtype: torch.dtype
    whole: bool
    away: bool
    error: Exception | None = None

    def run(self, owned: Sequence[Owned]) -> Exception | None:
        """Step all of `owned`. Returns the first error of the optimizer's own step."""
        of_key = {each.matrix.key: each for each in owned}
        in_order = rounds([e.matrix for e in owned], {k: e.owner for k, e in of_key.items()})
        todo = [self._round([of_key[matrix.key] for matrix in some]) for some in in_order]
        next(todo[0])
        for before, now, after in zip([None, *todo], todo, [*todo[1:], None], strict=False):
            if after is not None:
                next(after)  # its pieces travel while this round is stepped
            next(now)
            if before is not None:
                next(before, None)
            next(now)
        next(todo[-1], None)
        return self.error

    def _round(self, owned: Sequence[Owned]) -> Iterator[None]:
        """Send pieces to the owners; step; send new pieces back; bring them to their places. Yields
        after each but the last.
        """
        mine, itemsize = [each for each in owned if each.mine], self.dtype.itemsize
        rows = (_GRADIENT,) if self.whole else (_GRADIENT, _MASTER)
        whole: Wholes = {}
        for each in mine:
            numel = each.matrix.numel
            whole[each.matrix.key] = {row: self.empty(numel) for row in (_GRADIENT, _MASTER)}
            self.count(2 * numel * itemsize)
        landing = [self._exchange(owned, whole, row) for row in rows]
        yield
        while landing:
            landing.pop(0)()
        self._step(mine, whole)
        yield
        land = self._exchange(owned, whole, _MASTER, back=True)
        yield
        land()
        self.count(-sum(each.matrix.numel for each in mine) * itemsize)

    def _exchange(
        self, owned: Sequence[Owned], wholes: Wholes, row: int, back: bool = False
    ) -> Callable[[], None]:
        """Begin to send pieces to the owners, or `back`. Every rank makes it, in the same order, also
        without pieces. Returns what waits, and brings the pieces to their places.

        A piece that is alone on its way between two ranks is sent from where it lies, and received
        where it belongs; several, or those on the host, go in a buffer together.
        """
        sends, recvs = defaultdict[int, list[torch.Tensor]](list), defaultdict[int, list[Any]](list)
        at_holders, at_owners = (recvs, sends) if back else (sends, recvs)
        for each in owned:
            for place, start, stop in each.matrix.pieces:
                whole = wholes[each.matrix.key][row][start:stop] if each.mine else None
                if place != self.group.rank:
                    if whole is not None:
                        at_owners[place].append(whole)
                    continue
                param: Any = each.entry.param
                own = param.detach() if row == _MASTER else param.grad.detach().to(self.dtype)
                if whole is None:
                    at_holders[each.owner].append(own)
                elif back:
                    own.copy_(whole.view(own.shape))
                else:
                    whole.copy_(own.reshape(-1))
        together: list[tuple[torch.Tensor, list[torch.Tensor]]] = []

        def messages(by_peer: Mapping[int, list[torch.Tensor]]) -> list[tuple[int, torch.Tensor]]:
            out = []
            for peer, parts in sorted(by_peer.items()):
                if len(parts) == 1 and not self.away and parts[0].is_contiguous():
                    out.append((peer, parts[0].view(-1)))
                    continue
                buffer = self.empty(sum(t.numel() for t in parts))
                if by_peer is sends:
                    torch.cat([t.reshape(-1).to(buffer) for t in parts], out=buffer)
                together.append((buffer, parts if by_peer is recvs else []))
                out.append((peer, buffer))
            return out

        context, number = _context(self.engine, OWNERS), 3 * self.number + (2 if back else row)
        pending = self.group.exchange(messages(sends), messages(recvs), context, number)
        buffers = sum(nbytes_of(buffer) for buffer, _ in together)
        self.count(buffers)

        def land() -> None:
            pending.wait()
            for buffer, places in together:
                at = 0
                for place in places:
                    place.copy_(buffer[at : at + place.numel()].view(place.shape))
                    at += place.numel()
            self.count(-buffers)

        return land

    def _step(self, mine: Sequence[Owned], wholes: Wholes) -> None:
        """Step this rank's matrices: their masters get their new values."""
        parts, states = list[Part](), self.optimizer.state
        here, host = self.engine.device, torch.device("cpu")
        for each in mine:
            whole = wholes[each.matrix.key]
            grad, master = whole.pop(_GRADIENT), whole[_MASTER]
            flat, shape = each.entry.flat, each.matrix.shape
            if self.whole:
                assert flat.full is not None
                master.copy_(flat.view(flat.full, each.entry).detach().reshape(-1))
            known: dict[Any, Any] = states.get(each.entry.param) or {}
            state = _moved(known, here, {}) if self.away else known
            part = Part(each.entry.param, master.view(shape), grad.view(shape), state or None)
            parts.append(part)
            del grad, master
        try:
            if parts:
                step_parts(self.optimizer, groups_of(self.optimizer), parts, here)
        except Exception as error:
            # The others wait for their pieces: they are told at the end
            self.error = self.error or error
        finally:
            for part in parts:
                if (new := part.state) is not None:
                    before: dict[Any, Any] = states.get(part.param) or {}
                    states[part.param] = _moved(new, host, before) if self.away else new
        for each, part in zip(mine, parts, strict=True):
            # The optimizer may have given the parameter other memory
            wholes[each.matrix.key] = {_MASTER: part.data.reshape(-1)}
            self.count(-each.matrix.numel * self.dtype.itemsize)

    def empty(self, numel: int) -> torch.Tensor:
        return torch.empty(numel, dtype=self.dtype, device=self.engine.device)

    def count(self, nbytes: int) -> None:
        self.engine.memory.add(OWNED, nbytes)


def _moved(
    state: Mapping[Any, Any], device: torch.device, before: Mapping[Any, Any]
) -> dict[Any, Any]:
    """Return a state with its tensors on a device: in those of the state before, where they fit."""
    out = dict(state)
    for key, value in state.items():
        old = before.get(key)
        if not isinstance(value, torch.Tensor) or value.numel() <= 1:
            continue
        if isinstance(old, torch.Tensor) and (old.shape, old.dtype) == (value.shape, value.dtype):
            out[key] = old.copy_(value)
        else:
            out[key] = value.to(device, non_blocking=device.type != "cpu")
    return out
