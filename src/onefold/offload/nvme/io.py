"""Reads and writes by a few threads.

    caller            start(op, region, pieces) -> Transfer          goes on computing          wait()
    threads              piece 0 ─ piece 4 ─ ...  piece 1 ─ ...      each one preadv or pwritev, repeated for the rest after a short one
    memory            the caller's own tensor, held until its last piece is done; nothing is copied and nothing is queued but the pieces

The system calls let other threads of the interpreter run, so a handful of threads keeps a disk's
queue filled while the caller computes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from onefold.memory.tier_error import TierError, in_words
from onefold.offload.nvme.buffer import PAGE
from onefold.offload.nvme.datafile import READ, WRITE, DataFile

#: For tests: what happens to a transfer of `nbytes` at byte `offset` of a region. Gets (operation,
#: region, offset, nbytes) on one of the threads, ahead of each system call; an OSError is raised in
#: its place, an int shortens it to so many bytes (whole pages of them).
Fault = Callable[[str, str, int, int], OSError | int | None]

#: Short transfers without a whole page in them, one after another, after which a piece is given up.
_TRIES = 4


@dataclass(frozen=True)
class Piece:
    """One part of a transfer: `view` and the bytes at `offset` of `file`, which are those at `at`
    of the region.
    """

    file: DataFile
    offset: int
    at: int
    view: memoryview


class Transfer:
    """A read or write that is under way."""

    def __init__(self, pieces: int) -> None:
        self._left, self._error = pieces, ""
        self._lock, self._over = threading.Lock(), threading.Event()
        if not pieces:
            self._over.set()

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._over.is_set()

    def wait(self) -> None:
        """Return when it is over.

        Raises:
            TierError: it failed; again on every later call. The tensor of a failed read holds
                anything.
        """
        self._over.wait()
        if self._error:
            raise TierError(self._error)

    def settle(self) -> None:
        """Return when it is over, well or not."""
        self._over.wait()

    def failed(self) -> bool:
        return bool(self._error)

    def piece_done(self, error: str = "") -> None:
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            if self._left == 0:
                self._over.set()


class Io:
    """The threads, and the counters of what they did.

    Attributes:
        moved: bytes read and written since the start, whole pages as the disk saw them.
        fault: see `Fault`; None in every run that is not a test.
    """

    def __init__(self, name: str, threads: int) -> None:
        self.name = name
        self.fault: Fault | None = None
        self.moved = {READ: 0, WRITE: 0}
        self._process, self._closed = os.getpid(), False
        # Its threads are joined at the interpreter's exit too, after they have done what was begun.
        own = self._own = set[int]()  # its threads: the executor must not refer to us
        self._executor = ThreadPoolExecutor(
            threads,
            thread_name_prefix=f"onefold-nvme-{name}",
            initializer=lambda: own.add(threading.get_ident()),
        )
        self._lock = threading.Lock()
        self._at_work, self._since, self._busy = 0, 0.0, 0.0

    @property
    def busy_seconds(self) -> float:
        """Seconds in which at least one read or write was under way."""
        with self._lock:
            return self._busy + (time.perf_counter() - self._since if self._at_work else 0.0)

    def start(self, op: str, region: str, pieces: Sequence[Piece]) -> Transfer:
        """Have the pieces moved, in this order as far as the threads allow.

        Raises:
            TierError: the store is closed, or this is a forked child of the process that made it.
        """
        self.check_open()
        transfer = Transfer(len(pieces))
        for begun, piece in enumerate(pieces):
            try:
                self._executor.submit(self._run, op, region, piece, transfer)
            except RuntimeError:
                # Closed by another thread just now, or the interpreter is on its way out
                closed = self._closed_error()
                for _ in pieces[begun:]:
                    transfer.piece_done(str(closed))
                transfer.settle()
                raise closed from None
        return transfer

    def check_open(self) -> None:
        """Raises: TierError: the store is closed, or this is a forked child of the process that
        made it.
        """
        if self._closed:
            raise self._closed_error()
        if os.getpid() != self._process:
            raise TierError(
                f"the NVMe store {self.name!r} belongs to process {self._process}; this is a child"
                f" that was forked from it (process {os.getpid()}) and cannot use it. Make a store"
                " of its own in the child, or start the child with spawn."
            )

    def close(self) -> None:
        """Return when what was begun is over and the threads are gone. Not to be called by one of
        them.
        """
        self._closed = True
        self._executor.shutdown(wait=True)

    def is_own_thread(self) -> bool:
        return threading.get_ident() in self._own

    def _closed_error(self) -> TierError:
        return TierError(
            f"the NVMe store {self.name!r} is closed; nothing can be read from it or written to it"
            " any more."
        )

    def _run(self, op: str, region: str, piece: Piece, transfer: Transfer) -> None:
        error = ""
        self._enter()
        try:
            if not transfer.failed():  # what is left of one that failed would be for nothing
                self._move(op, region, piece)
        except TierError as failed:
            error = str(failed)
        except BaseException as failed:
            # A fault in here must reach the caller, who would wait for ever otherwise
            error = (
                f"{op} of {piece.file.path} (region {region!r}) failed: {type(failed).__name__}:"
                f" {failed}"
            )
        finally:
            self._leave()
            with contextlib.suppress(BufferError):
                # Before anybody learns that it is over: the tensor has no other reader then
                piece.view.release()
            transfer.piece_done(error)

    def _move(self, op: str, region: str, piece: Piece) -> None:
        """All of a piece. Raises: TierError."""
        total, done, tries = len(piece.view), 0, 0
        while done < total:
            moved = self._once(op, region, piece, done)
            if done + moved < total:
                moved -= moved % PAGE  # the rest begins on a page again
            with self._lock:
                self.moved[op] += moved
            done, tries = done + moved, 0 if moved else tries + 1
            if tries == _TRIES:
                raise TierError(
                    f"{_doing(op, region, piece)} ended after {done:,} of {total:,} bytes, as if"
                    " the file was cut short there, which it was not. The file system does not"
                    " keep its word: name another disk in nvme=."
                )

    def _once(self, op: str, region: str, piece: Piece, done: int) -> int:
        """One system call for what is left of a piece; another one where direct transfers turn out
        not to work. Raises: TierError.
        """
        rest = piece.view[done:]
        for direct in (True, False):
            direct = direct and piece.file.direct
            try:
                piece.file.check()
                if (fault := self.fault) is not None:
                    given = fault(op, region, piece.at + done, len(rest))
                    if isinstance(given, OSError):
                        raise given
                    if given is not None:
                        rest = rest[: given - given % PAGE]
                moved = piece.file.move(op, rest, piece.offset + done, direct) if len(rest) else 0
            except OSError as error:
                if error.errno == errno.EINVAL and direct:
                    piece.file.give_up_direct()
                    continue
                raise TierError(f"{_doing(op, region, piece)} failed: {in_words(error)}.") from None
            if moved == 0:
                piece.file.check()
                raise TierError(
                    f"{_doing(op, region, piece)} ended after {done:,} of {len(piece.view):,}"
                    " bytes: the file was cut short, or the file system does not keep its word."
                    " Start again from the last checkpoint, with another disk in nvme=."
                )
            return moved
        raise AssertionError("the second turn is never a direct one")

    def _enter(self) -> None:
        with self._lock:
            if self._at_work == 0:
                self._since = time.perf_counter()
            self._at_work += 1

    def _leave(self) -> None:
        with self._lock:
            self._at_work -= 1
            if self._at_work == 0:
                self._busy += time.perf_counter() - self._since


def _doing(op: str, region: str, piece: Piece) -> str:
    doing = "reading" if op == READ else "writing"
    where = f"{piece.file.path} (region {region!r}, from byte {piece.at:,} of it)"
    return f"{doing} {len(piece.view):,} bytes {'from' if op == READ else 'to'} {where}"
