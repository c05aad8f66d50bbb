"""Reads and writes by a few threads.

    caller            start(op, region, pieces) -> Transfer          keeps computing            wait()
    threads              piece 0 ─ piece 4 ─ ...  piece 1 ─ ...      each one preadv or pwritev, repeated for the rest after a short one
    memory            the caller's own tensor, held until its last piece is done; no copies; only the pieces are queued

The system calls release the GIL, so a handful of threads keeps a disk's queue filled while the
caller computes.
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

from onefold.memory import TierError, in_words
from onefold.offload.nvme.buffer import PAGE
from onefold.offload.nvme.datafile import READ, WRITE, DataFile

#: For tests: a function that makes transfers fail. It is called as (operation, region, offset in
#: the region, nbytes) before each system call, on one of the threads. An OSError that it returns is
#: raised in place of the call. An int shortens the call to so many bytes, rounded down to pages.
Fault = Callable[[str, str, int, int], OSError | int | None]

#: A piece fails after so many short transfers in a row that moved less than a page.
_TRIES = 4


@dataclass(frozen=True)
class Piece:
    """One part of a transfer: from or to `view`.

    `offset`: its first byte in `file`. `at`: the same byte, counted in the region.
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
        """Return whether the transfer has ended, with success or not."""
        return self._over.is_set()

    def wait(self) -> None:
        """Wait for the end of the transfer.

        Raises:
            TierError: it failed (raised again on every later call). After a failed read the
                contents of the tensor are undefined.
        """
        self._over.wait()
        if self._error:
            raise TierError(self._error)

    def settle(self) -> None:
        """Wait for the end of the transfer, and ignore failure."""
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
    """The threads and their counters.

    Attributes:
        moved: bytes read and written since the start, in whole pages.
        fault: see `Fault`; None except in tests.
    """

    def __init__(self, name: str, threads: int) -> None:
        self.name = name
        self.fault: Fault | None = None
        self.moved = {READ: 0, WRITE: 0}
        self._process, self._closed = os.getpid(), False
        # At the interpreter's exit the executor's threads finish their work and are joined.
        # `own` has the threads' ids. It is a local too: the executor must not refer to `self`.
        own = self._own = set[int]()
        self._executor = ThreadPoolExecutor(
            threads,
            thread_name_prefix=f"onefold-nvme-{name}",
            initializer=lambda: own.add(threading.get_ident()),
        )
        self._lock = threading.Lock()
        self._at_work, self._since, self._busy = 0, 0.0, 0.0

    @property
    def busy_seconds(self) -> float:
        """Seconds during which at least one read or write was under way."""
        with self._lock:
            return self._busy + (time.perf_counter() - self._since if self._at_work else 0.0)

    def start(self, op: str, region: str, pieces: Sequence[Piece]) -> Transfer:
        """Start to move the pieces, in this order as far as the threads allow.

        Raises:
            TierError: the store is closed, or this is a forked child of the process that made it.
        """
        self.check_open()
        transfer = Transfer(len(pieces))
        for begun, piece in enumerate(pieces):
            try:
                self._executor.submit(self._run, op, region, piece, transfer)
            except RuntimeError:
                # Another thread has just closed the store, or the interpreter is shutting down
                closed = self._closed_error()
                for _ in pieces[begun:]:
                    transfer.piece_done(str(closed))
                transfer.settle()
                raise closed from None
        return transfer

    def check_open(self) -> None:
        """Check that transfers can be started. Raises: TierError: the store is closed, or this is
        a forked child of the process that made it.
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
        """Wait for all transfers, then end the threads. None of these threads may call it."""
        self._closed = True
        self._executor.shutdown(wait=True)

    def is_own_thread(self) -> bool:
        return threading.get_ident() in self._own

    def _closed_error(self) -> TierError:
        return TierError(
            f"the NVMe store {self.name!r} is closed; nothing can be read from it or"
            " written to it any more."
        )

    def _run(self, op: str, region: str, piece: Piece, transfer: Transfer) -> None:
        error = ""
        self._enter()
        try:
            if not transfer.failed():  # the rest of a failed transfer is not needed
                self._move(op, region, piece)
        except TierError as failed:
            error = str(failed)
        except BaseException as failed:
            # Any error must reach the caller, who would otherwise wait forever
            error = (
                f"{op} of {piece.file.path} (region {region!r}) failed: {type(failed).__name__}:"
                f" {failed}"
            )
        finally:
            self._leave()
            with contextlib.suppress(BufferError):
                # Before the transfer ends: from then on nothing here may refer to the tensor
                piece.view.release()
            transfer.piece_done(error)

    def _move(self, op: str, region: str, piece: Piece) -> None:
        """Move all of a piece. Raises: TierError."""
        total, done, tries = len(piece.view), 0, 0
        while done < total:
            moved = self._once(op, region, piece, done)
            if done + moved < total:
                moved -= moved % PAGE  # the next call must begin on a page
            with self._lock:
                self.moved[op] += moved
            done, tries = done + moved, 0 if moved else tries + 1
            if tries == _TRIES:
                raise TierError(
                    f"{_doing(op, region, piece)} ended after {done:,} of {total:,} bytes, as if"
                    " the file was cut short there, which it was not. The file system does not"
                    f" keep its word: name another disk in nvme=."
                )

    def _once(self, op: str, region: str, piece: Piece, done: int) -> int:
        """Make one system call for the rest of a piece; a second one if direct transfers turn out
        not to work. Return the bytes moved. Raises: TierError.
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
                said = in_words(error)
                raise TierError(f"{_doing(op, region, piece)} failed: {said}.") from None
            if moved == 0:
                piece.file.check()
                raise TierError(
                    f"{_doing(op, region, piece)} ended after {done:,} of {len(piece.view):,}"
                    " bytes: the file was cut short, or the file system does not keep its word."
                    f" Start again from the last checkpoint, with another disk in nvme=."
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
