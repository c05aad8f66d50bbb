"""Messages between the ranks of a sharded model about checkpoints. They use their own communicator,
not the training's.
"""

from __future__ import annotations

import contextlib
import pickle
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, cast

import torch

from onefold.checkpoint.errors import CheckpointError, DamagedCheckpoint
from onefold.checkpoint.progress import Signs
from onefold.comm import CollectiveContext, Group, StallError
from onefold.comm.pending import CHECKPOINT, stall_error
from onefold.runtime.engine import Engine
from onefold.runtime.parts import tell_all
from onefold.runtime.uninitialized import UninitializedError
from onefold.wording import in_words

_T = TypeVar("_T")

_known: weakref.WeakKeyDictionary[Engine | Group, Together] = weakref.WeakKeyDictionary()


def meet(engine: Engine, call: str) -> None:
    """Wait until every rank has made the same call, and until no earlier save or load of this rank
    is under way. Uses the training's communicator, which waits at most the recipe's
    `stall_timeout`.

    Raises:
        StallError: another rank does not arrive.
        CheckpointError: another rank has made a different call.
    """
    try:
        tell_all(engine, call, None)
    except StallError:
        raise
    except RuntimeError as error:
        raise CheckpointError(str(error)) from None
    engine.settle()


class Together:
    """The ranks of one engine, for messages about checkpoints.

    Args:
        across: the ranks of all stages of a pipeline, in place of those of the engine.
    """

    def __init__(self, engine: Engine, across: Group | None = None) -> None:
        self._engine = weakref.ref(engine)
        group = across or engine.group
        self.rank, self.size = group.number, group.size
        self.ranks = sorted(group.ranks)
        data_of = engine.mesh.data_of
        data = [data_of.get(rank, (rank,)) for rank in self.ranks]
        numbers = {at: number for number, at in enumerate(sorted(set(data)))}
        #: The number of each rank's data coordinate. Ranks with the same compute with the same data
        self.data_of = [numbers[at] for at in data]
        if engine.group.stands_for_all:
            raise CheckpointError(
                "this model is sharded over a process group of the fake backend, whose other ranks do"
                " not exist: there is nothing to save or load."
            )
        if self.size > 1:
            self._group: Any = group.communicator()
            self._timeout, self._places = group.timeout, group.shared.places
            self._signs = Signs(self._group.group_name, group.timeout)

    @property
    def data_ranks(self) -> int:
        """The number of data coordinates: of ranks, unless other axes than data divide them."""
        return max(self.data_of) + 1

    @classmethod
    def of(cls, engine: Engine, across: Group | None = None) -> Together:
        """Return the engine's ranks, or those of all stages of a pipeline (`optim.clip.across_stages`).
        The first call is collective over them.
        """
        key = engine if across is None else across
        if key not in _known:
            _known[key] = cls(engine, across)
        return _known[key]

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order."""
        return self._exchange(value, range(self.size))

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value in rank order on the first rank, [] elsewhere."""
        return self._exchange(value, range(self.size) if self.rank == 0 else range(0))

    def from_first(self, value: Any) -> Any:
        """Return the first rank's value."""
        return self._exchange(value if self.rank == 0 else None, range(1))[0]

    def said_by_first(self, ask: Callable[[], _T]) -> _T:
        """Return what `ask` returns on the first rank, which alone calls it.
        Raises: CheckpointError: on every rank, if it raises there.
        """
        value = None
        with self.each_rank():
            if self.rank == 0:
                value = ask()
        return cast("_T", self.from_first(value))

    def _exchange(self, value: Any, of: Iterable[int]) -> list[Any]:
        if self.size == 1:
            return [value]
        # Not dist.all_gather_object: it looks the group up in a registry that
        # destroy_process_group() empties. A save under way at the end of a script must complete.
        text = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        self._talk(lengths, torch.tensor([len(text)], device="cpu"))
        most = max(int(n) for n in lengths)
        parts = [torch.zeros(most, dtype=torch.uint8, device="cpu") for _ in range(self.size)]
        self._talk(parts, torch.nn.functional.pad(text, (0, most - len(text))))
        return [pickle.loads(bytes(parts[r][: int(lengths[r])].numpy())) for r in of]

    @contextlib.contextmanager
    def each_rank(self) -> Iterator[None]:
        """Run a block of local work. At its end, an error on one rank is raised on all ranks.
        Raises: CheckpointError, with the first rank's error and the number of others; or
        UninitializedError on a rank whose block has raised an UninitializedError.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        try:
            raise_first(self.all_gather(None if error is None else worded(error)))
        except CheckpointError as told:
            if isinstance(
                error, UninitializedError
            ):  # the error of every other use of such a model
                raise error from None
            raise told from error
        finally:
            error = None  # its traceback holds this frame

    def _talk(self, out: list[torch.Tensor], mine: torch.Tensor) -> None:
        engine = self._engine()
        if engine is not None:
            # One exchange at a time: a background save or load uses this communicator too
            engine.settle()
        try:
            self._wait(self._group.allgather([out], [mine]))
        except StallError:
            raise
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"rank {self.ranks[self.rank]} lost the other ranks of {self.ranks} while they"
                " saved or loaded a checkpoint together: one has ended, or did not call the same."
                f" ({str(error).splitlines()[0][:200]})"
            ) from None

    def _wait(self, work: Any) -> None:
        """Wait for the other ranks as long as some of them give signs of progress.
        Raises: StallError: none has, for `stall_timeout` seconds.
        """
        start = since = time.monotonic()
        seen = None
        while True:
            with contextlib.suppress(RuntimeError):  # its time is up, or it has failed
                return work.wait(timedelta(seconds=self._signs.every))
            if work.is_completed():
                return work.wait()
            left = since + self._timeout - time.monotonic()
            if left <= 0:
                self._give_up(time.monotonic() - start)
            found = self._signs.seen(left)
            if found is not None and found != seen:
                seen, since = found, time.monotonic()

    def _give_up(self, waited: float) -> NoReturn:
        # gloo waits on: a receive whose time is up closes the connections
        with contextlib.suppress(RuntimeError):
            nothing = torch.zeros(1, device="cpu")
            self._group.recv([nothing], (self.rank + 1) % self.size, 0).wait(
                timedelta(milliseconds=1)
            )
        engine = self._engine()
        step, heard = (
            (engine.step_count, engine.group.shared.heard) if engine is not None else (0, None)
        )
        context = CollectiveContext("control", CHECKPOINT, step, "state")
        cause = RuntimeError(f"no rank has written or read anything for {self._timeout:.0f} s")
        name, me = self._group.group_name, self.ranks[self.rank]
        raise stall_error(context, waited, cause, name, me, self.ranks, heard, places=self._places)


def raise_different(call: str, said: Sequence[Mapping[str, Any]]) -> None:
    """Raise CheckpointError if ranks were given different arguments."""
    for name, mine in said[0].items():
        other = next((rank for rank, theirs in enumerate(said) if theirs[name] != mine), None)
        if other is not None:
            raise CheckpointError(
                f"{call} was given {name} {mine} on rank 0 and {said[other][name]} on rank {other}:"
                " every rank must be given the same."
            )


def worded(error: Exception) -> CheckpointError:
    """Return the error in the form in which every rank raises it."""
    if isinstance(error, DamagedCheckpoint):
        return DamagedCheckpoint(str(error))
    if isinstance(error, CheckpointError):
        return CheckpointError(str(error))
    text = (
        in_words(error) + "." if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    )
    return CheckpointError(text)


def raise_first(errors: Sequence[CheckpointError | None]) -> None:
    """Raise the first of the ranks' errors, naming its rank and the number of further errors."""
    bad = [(rank, error) for rank, error in enumerate(errors) if error is not None]
    if bad:
        rank, error = bad[0]
        more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
        who = f" (rank {rank}{more})" if len(errors) > 1 else ""
        raise type(error)(f"{error}{who}")
