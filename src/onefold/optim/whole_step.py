"""The step of updates that look at whole matrices: `WholeStep`.

    a round          every rank                       the owner of a matrix                      every rank
    of matrices      pieces of gradients ───────►     whole gradient, whole master
                     (and of masters)                 ─► the optimizer's own step ─►             new pieces into
                                                      whole states stay with it        ───────►  its masters

The next round's pieces travel while a round is stepped. Rounds and bytes: layout/owners.py. Who owns
which matrix: optim/owned.py.

| masters are                                              | travel to the owner    |
|----------------------------------------------------------|------------------------|
| whole on every rank (stages 1 and 2 in one dtype), and nobody has written to them since they were gathered | gradients |
| else                                                     | gradients and masters  |
| whole on this rank alone (one rank; stage 0 of a box)    | nothing                |

[Note: once a step] The optimizer's own `step` runs on the owner once for each round, over that
round's matrices: each is updated once in an optimizer step, after accumulation, unscaling and
clipping. Then it runs as the user called it, over what is left of its groups: without these
parameters. So what it counts for itself or for a group is counted once.
"""  # fmt: skip

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from onefold.comm import OWNERS, CollectiveContext, Group, alike, both
from onefold.comm.pending import Pending
from onefold.layout.owners import Matrix, rounds
from onefold.memory import OWNED, nbytes_of
from onefold.optim.owned import Owned, StateElsewhere, owned_in_step, refuse_parts, steps_whole
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry, Flat
from onefold.runtime.parameters.values import written
from onefold.runtime.stepper import (
    GroupVerdict,
    Part,
    Stepper,
    groups_of,
    step_parts,
)
from onefold.runtime.unit import State

_WHERE = "(whole matrices)"


class WholeStep(Stepper):
    """Steps matrices on their owners. See this module."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def accepts(
        self, optimizer: Optimizer, flat: Flat, verdict: Callable[[], GroupVerdict]
    ) -> bool:
        return steps_whole(self.engine, optimizer, flat, verdict)

    def step(self, optimizer: Optimizer, entries: Sequence[Entry]) -> None:
        """Step `entries`, those that have a gradient. Collective.

        Raises:
            RuntimeError: on every rank, if the optimizer's own step failed on one, or the ranks
                have gradients of different parameters.
            ValueError: a matrix is divided over another axis.
        """
        known = owned_in_step(optimizer)
        for entry in entries:
            refuse_parts(optimizer, entry)
        ready = [known[id(e.param)] for e in entries if id(e.param) in known and _has_gradient(e)]
        here = self._agree(optimizer, ready)
        error: Exception | None = None
        groups = groups_of(optimizer)
        by_kind: dict[_Kind, list[Owned]] = {}
        for each in ready:
            flat = each.entry.flat
            whole, away = here and _has_whole(flat), flat.storage.offloaded
            kind = _Kind(each.group, flat.dtypes.master, whole, away)
            by_kind.setdefault(kind, []).append(each)
        for number, (kind, some) in enumerate(by_kind.items()):
            run = _Rounds(self.engine, optimizer, groups, kind, number)
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
        bits = bytearray(-(-group.size // 8))
        if error is not None:
            bits[group.rank // 8] |= 1 << group.rank % 8
        found = group.any_of(bytes(bits), self._context("control"))
        failed = sorted(rank for p, rank in enumerate(group.ranks) if found[p // 8] >> p % 8 & 1)
        if not failed:
            return
        self.engine.transfers.broken = (
            f"{name}'s step failed half way, so that some matrices are of two steps. Start again"
            " from the last checkpoint."
        )
        if error is not None:
            raise RuntimeError(
                f"{name}.step() failed on this rank ({type(error).__name__}: {error})."
            ) from error
        raise RuntimeError(
            f"{name}.step() failed on rank {', '.join(map(str, failed))}, which steps some of the"
            " matrices for all: look at the error there."
        )

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


class _Kind(NamedTuple):
    """What matrices have in common that travel in the same rounds.

    Attributes:
        group: the ranks that exchange their pieces. dtype: of masters and gradients.
        whole: every rank has the whole masters.
        away: masters and states are on the host.
    """

    group: Group
    dtype: torch.dtype
    whole: bool
    away: bool


class _Mail:
    """One exchange of pieces. A piece that is alone on its way between two ranks is sent from where it
    lies, and received where it belongs; several, or those on the host, go in a buffer together.
    """

    def __init__(self, rounds: _Rounds) -> None:
        self._rounds = rounds
        self._out: dict[int, list[torch.Tensor]] = {}
        self._into: dict[int, list[torch.Tensor]] = {}
        self._landed: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        self._pending: Pending | None = None
        self.buffers = 0  # bytes

    def send(self, peer: int, piece: torch.Tensor) -> None:
        self._out.setdefault(peer, []).append(piece)

    def receive(self, peer: int, place: torch.Tensor) -> None:
        """`place`: in memory, [numel] or of any shape; filled by `land`."""
        self._into.setdefault(peer, []).append(place)

    def launch(self, number: int) -> None:
        """Every rank calls it, in the same order, also without pieces."""
        sends, recvs = [], []
        for peer, parts in sorted(self._out.items()):
            sends.append(
                (peer, self._alone(parts) if self._is_alone(parts) else self._together(parts))
            )
        for peer, parts in sorted(self._into.items()):
            if self._is_alone(parts):
                recvs.append((peer, self._alone(parts)))
                continue
            into = self._rounds.empty(sum(t.numel() for t in parts))
            self.buffers += nbytes_of(into)
            self._landed.append((into, parts))
            recvs.append((peer, into))
        self._rounds.count(self.buffers)
        self._pending = self._rounds.exchange(sends, recvs, number)

    def _is_alone(self, parts: list[torch.Tensor]) -> bool:
        return len(parts) == 1 and not self._rounds.away and parts[0].is_contiguous()

    @staticmethod
    def _alone(parts: list[torch.Tensor]) -> torch.Tensor:
        return parts[0].view(-1)

    def _together(self, parts: list[torch.Tensor]) -> torch.Tensor:
        sent = torch.cat([t.reshape(-1).to(self._rounds.device) for t in parts])
        self.buffers += nbytes_of(sent)
        return sent

    def land(self) -> None:
        """Wait, and bring what came together to its places."""
        assert self._pending is not None
        self._pending.wait()
        for into, places in self._landed:
            at = 0
            for place in places:
                place.copy_(into[at : at + place.numel()].view(place.shape))
                at += place.numel()
        self._rounds.count(-self.buffers)
        self._pending = None
        self._landed, self._out, self._into = [], {}, {}


@dataclass
class _Round:
    """Matrices that travel together. `whole`: (gradient, master), [numel] each, by the entry's number,
    of those that this rank owns.
    """

    owned: list[Owned]
    gradients: _Mail
    masters: _Mail
    back: _Mail
    whole: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def mine(self) -> list[Owned]:
        return [each for each in self.owned if each.mine]


class _Rounds:
    """The rounds of one step, over matrices whose pieces the same ranks exchange in the same way."""

    def __init__(
        self,
        engine: Engine,
        optimizer: Optimizer,
        groups: dict[int, int],
        kind: _Kind,
        number: int,
    ) -> None:
        """`number`: tells the messages from those of other kinds."""
        self.engine, self.optimizer, self.groups = engine, optimizer, groups
        self.group, self.dtype, self.whole, self.away = kind
        self.number, self.device = number, engine.device
        self.error: Exception | None = None

    def run(self, owned: Sequence[Owned]) -> Exception | None:
        """Step all of `owned`. Returns the first error of the optimizer's own step."""
        of_key = {each.entry.number: each for each in owned}
        matrices = [
            Matrix(each.entry.number, each.matrix.shape, each.matrix.pieces) for each in owned
        ]
        owners = {each.entry.number: each.owner for each in owned}
        todo = [
            _Round([of_key[m.key] for m in some], _Mail(self), _Mail(self), _Mail(self))
            for some in rounds(matrices, owners)
        ]
        self._send_pieces(todo[0])
        for at, now in enumerate(todo):
            if at + 1 < len(todo):
                self._send_pieces(todo[at + 1])
            self._step(now)
            if at:
                self._take_back(todo[at - 1])
            self._send_back(now)
        self._take_back(todo[-1])
        return self.error

    # -- pieces to owners --------------------------------------------------------------------------

    def _send_pieces(self, now: _Round) -> None:
        mine = self.group.rank
        for each in now.mine:
            numel = each.matrix.numel
            now.whole[each.entry.number] = self.empty(numel), self.empty(numel)
            self.count(2 * numel * self.dtype.itemsize)
        for each in now.owned:
            for place, start, stop in each.matrix.pieces:
                if each.owner == mine:
                    grad, master = now.whole[each.entry.number]
                    if place == mine:
                        grad[start:stop] = self._gradient(each.entry).reshape(-1)
                        if not self.whole:
                            master[start:stop] = each.entry.param.detach().reshape(-1)
                        continue
                    now.gradients.receive(place, grad[start:stop])
                    if not self.whole:
                        now.masters.receive(place, master[start:stop])
                elif place == mine:
                    now.gradients.send(each.owner, self._gradient(each.entry))
                    if not self.whole:
                        now.masters.send(each.owner, each.entry.param.detach())
        now.gradients.launch(0)
        if not self.whole:
            now.masters.launch(1)

    def _gradient(self, entry: Entry) -> torch.Tensor:
        """This rank's piece of a gradient."""
        assert entry.param.grad is not None
        return entry.param.grad.detach().to(self.dtype)

    # -- an owner's step ---------------------------------------------------------------------------

    def _step(self, now: _Round) -> None:
        """Step this rank's matrices: the masters of `now.whole` get their new values."""
        now.gradients.land()
        if not self.whole:
            now.masters.land()
        parts: list[Part] = []
        for each in now.mine:
            grad, master = now.whole[each.entry.number]
            flat, shape = each.entry.flat, each.matrix.shape
            if self.whole:
                assert flat.full is not None
                master.copy_(flat.view(flat.full, each.entry).detach().reshape(-1))
            state = self._state(each.entry.param)
            parts.append(Part(each.entry.param, master.view(shape), grad.view(shape), state))
            del grad, master
        if parts:
            try:
                self._own_step(parts)
            except Exception as error:
                # The others wait for their pieces: they are told at the end
                self.error = self.error or error
        for each, part in zip(now.mine, parts, strict=True):
            # The optimizer may have given the parameter other memory
            now.whole[each.entry.number] = self.empty(0), part.data.reshape(-1)
            self.count(-each.matrix.numel * self.dtype.itemsize)

    def _state(self, param: nn.Parameter) -> dict[Any, Any] | None:
        """Return the state that the step begins with."""
        known = self.optimizer.state.get(param)
        if not known or not self.away:
            return known or None
        return {
            key: value.to(self.device, non_blocking=True) if _is_large(value) else value
            for key, value in known.items()
        }

    def _own_step(self, parts: Sequence[Part]) -> None:
        state = self.optimizer.state
        try:
            step_parts(self.optimizer, self.groups, parts, self.device)
        finally:
            for part in parts:
                new = part.state
                if new is not None:
                    before = state.get(part.param) or {}
                    state[part.param] = _brought_down(new, before) if self.away else new

    # -- new pieces back ---------------------------------------------------------------------------

    def _send_back(self, now: _Round) -> None:
        mine = self.group.rank
        for each in now.owned:
            for place, start, stop in each.matrix.pieces:
                if each.owner != mine:
                    if place == mine:
                        now.back.receive(each.owner, each.entry.param.detach())
                    continue
                piece = now.whole[each.entry.number][1][start:stop]
                if place == mine:
                    param = each.entry.param.detach()
                    param.copy_(piece.view(param.shape))
                else:
                    now.back.send(place, piece)
        now.back.launch(2)

    def _take_back(self, now: _Round) -> None:
        now.back.land()
        self.count(-sum(each.matrix.numel for each in now.mine) * self.dtype.itemsize)
        now.whole.clear()

    # -- for mail ----------------------------------------------------------------------------------

    def exchange(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        recvs: Sequence[tuple[int, torch.Tensor]],
        number: int,
    ) -> Pending:
        context = CollectiveContext(OWNERS, _WHERE, self.engine.step_count, "optimizer")
        return self.group.exchange(sends, recvs, context, 3 * self.number + number, move=OWNERS)

    def empty(self, numel: int) -> torch.Tensor:
        return torch.empty(numel, dtype=self.dtype, device=self.device)

    def count(self, nbytes: int) -> None:
        self.engine.memory.add(OWNED, nbytes)


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
