"""A stand-in for NCCL: a process-group backend that moves real data between processes, offers what
NCCL offers and nothing more.

| of NCCL                                                     | here                                                                      |
|-------------------------------------------------------------|---------------------------------------------------------------------------|
| an operation runs some time after its launch                | inputs are read late, outputs hold 0xFF (NaN) until `wait()` writes them  |
| one communicator runs operations in the order of the launch | so it does here                                                           |
| all ranks launch the same operations in the same order      | where they do not, all raise, in a sentence that names both (NCCL hangs)  |
| tensors are contiguous and on the communicator's device     | others are refused                                                        |
| no tags, no receiving from whoever sends                    | refused                                                                   |
| sums in the tensors' dtype, in the order of a ring          | so they are here: rank r's part begins with rank r + 1                    |
| communicators are made by splitting                         | `split_group`                                                             |

`launch` is the one place that knows how an operation is started and waited for: on the host, or on
the virtual device (tests/virtual). There the communicator has a stream of its own, which waits for
the current one at the launch; `wait` makes the current stream wait, never the host.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ReduceOp

from standin.wire import COLLECTIVE, POINT, POISON, Operation, Wire, every

NAME = "standin"
#: Seconds by which the inputs of an operation are read late, at most, while the host does not wait.
LATE = 0.02
# As torch declares them their methods have several signatures each; only those that
# torch.distributed calls are here.
_Work: Any = dist.Work
_ProcessGroup: Any = dist.ProcessGroup
# Before 2.14 torch's own cannot be made in Python, and takes any object in its place
_Backend: Any = (
    torch._C._distributed_c10d.Backend if torch.__version__ >= "2.14.dev0" else SimpleNamespace
)
#: How many operations of each name this process has launched.
launched: Counter[str] = Counter()
#: How many communicators it has made by "new_group" (or as the default group) and by "split".
made: Counter[str] = Counter()

Read = Callable[[], Mapping[int, bytes]]
Write = Callable[[Mapping[int, bytes]], None]


class StandInWork(_Work):
    """An operation under way."""

    def __init__(self, group: StandIn, operation: Operation) -> None:
        super().__init__()
        self._group, self._operation = group, operation

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """The host's wait; the outputs are there behind it. `timeout` zero: the communicator's."""
        self._group.finish(
            self._operation, timeout if timeout > timedelta(0) else self._group.timeout
        )
        return True

    def is_completed(self) -> bool:
        """False until somebody has waited: who asks may not take an operation for done because it
        was launched.
        """
        return self._operation.written

    def is_success(self) -> bool:
        return self._operation.written and not self._operation.error

    def synchronize(self) -> None:
        self.wait()


class StandInStreamWork(_Work):
    """An operation under way on a communicator's stream. `event` is recorded behind it."""

    def __init__(self, operation: Operation, event: Any, device: torch.device) -> None:
        super().__init__()
        self._operation, self._event, self._device = operation, event, device

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """The current stream waits, the host goes on. NCCL lets the host wait if a timeout is
        given, which nobody here should want.
        """
        if timeout > timedelta(0):
            raise RuntimeError("wait(timeout) makes the host wait for the device")
        torch.accelerator.current_stream(self._device).wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        return self._operation.written

    def synchronize(self) -> None:
        self.wait()


def launch(group: StandIn, operation: Operation) -> Any:
    """Start an operation. On the host the communicator's thread runs it, and `wait` is the
    host's.
    """
    device = next((t.device for t in (*operation.outputs, *operation.inputs)), torch.device("cpu"))
    if device.type != "cpu":
        return _launch_on_stream(group, operation, device)
    taken = {t.untyped_storage().data_ptr() for t in operation.inputs if t.numel()}
    for t in operation.outputs:
        if t.numel():  # what is read later stays until then
            _poison_around(t, operation.inputs if t.untyped_storage().data_ptr() in taken else ())
    if operation.kind == COLLECTIVE:
        group.under_way.append(operation)
    group.wire.post(operation)
    return StandInWork(group, operation)


def _launch_on_stream(group: StandIn, operation: Operation, device: torch.device) -> Any:
    import virtual

    stream = group.stream_of(device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    posted: list[Operation] = []

    def arrived() -> bool:
        if not posted:  # the stream has got here
            posted.append(operation)
            operation.due = 0.0
            group.wire.post(operation)
        return operation.done.is_set()

    def write(*_: Tensor) -> None:
        if operation.error:
            raise RuntimeError(operation.error)
        operation.finish()

    virtual.enqueue(
        stream,
        write,
        reads=list(operation.inputs),
        writes=list(operation.outputs),
        ready=arrived,
        name=operation.said,
    )
    return StandInStreamWork(operation, stream.record_event(), device)


class InnerBackend(_Backend):
    """The backend in a communicator's process group: what torch asks what it can do. From 2.14 on
    torch hands it on to each new group, which refuses anything else.
    """

    supports_splitting, supports_coalescing, options = True, False, None

    @classmethod
    def of(cls, group: StandIn) -> InnerBackend:
        made = cls(group.my_rank, group.my_size) if _Backend is not SimpleNamespace else cls()
        made.comm_split_count = lambda: group.splits
        return made

    def _set_sequence_number_for_group(self) -> None:
        pass


class StandIn(_ProcessGroup):
    """One communicator of one rank."""

    launch: Callable[[StandIn, Operation], Any] = staticmethod(launch)
    seed = 0

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.store, self.my_rank, self.my_size, self.timeout = store, rank, size, timeout
        self.name = ""
        self._number, self._points = 0, dict[tuple[int, int], int]()
        # Collectives of the host whose outputs have not been written
        self.under_way: list[Operation] = []
        self._streams: dict[torch.device, Any] = {}
        self._chance = random.Random(f"{self.seed} {rank}")
        self.splits = 0
        # NCCL's is that of the thread that makes the communicator
        self.device = (
            torch.accelerator.current_accelerator() and torch.accelerator.current_device_index()
        )
        self.wire = Wire(
            rank,
            size,
            lambda port: store.set(f"port/{rank}", str(port)),
            lambda r: int(store.get(f"port/{r}")),
            timeout,
        )

    # -- what torch.distributed asks of a process group --------------------------------------------

    def rank(self) -> int:
        return self.my_rank

    def size(self) -> int:
        return self.my_size

    def getBackendName(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self.name = name

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._number

    def _set_group_desc(self, description: str) -> None:
        pass

    @property
    def group_name(self) -> str:
        return self.name

    @property
    def pg_name(self) -> str:
        return self.name

    def _get_backend(self, device: torch.device) -> InnerBackend:
        return InnerBackend.of(self)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in dist.Backend.backend_capability[NAME]]

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        **_: Any,
    ) -> StandIn | None:
        """As ncclCommSplit: collective over this communicator, also for who is in none of the new
        ones.
        """
        self.splits += 1
        self._collective("split", "", lambda: {}, lambda parts: None, wait=True)
        if self.my_rank not in new_ranks:
            return None
        ranks = sorted(new_ranks)
        store = PrefixStore(f"split/{self.splits}/{ranks[0]}/", self.store)
        made["split"] += 1
        part = type(self)(store, ranks.index(self.my_rank), len(ranks), timeout or self.timeout)
        part.name = group_name or ""
        return part

    def shutdown(self) -> None:
        # As ncclCommFinalize: what was launched is finished first
        for stream in self._streams.values():
            stream.synchronize()
        self.wire.close()

    def abort(self) -> None:
        self.wire.close(now=True)

    def __del__(self) -> None:
        if hasattr(self, "wire"):
            self.wire.close(now=not self.under_way)

    # -- launching and waiting ---------------------------------------------------------------------

    def _launch(self, kind: bytes, number: int, said: str, read: Read, sources: Iterable[int], write: Write,
                outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:  # fmt: skip
        due = time.monotonic() + self._chance.random() * LATE
        operation = Operation(
            kind, number, said, read, frozenset(sources), write, due, outputs, inputs
        )
        launched[said.split(" ")[0]] += 1
        return type(self).launch(self, operation)

    def _collective(self, name: str, said: str, read: Read, write: Write, outputs: Sequence[Tensor] = (), inputs: Sequence[Tensor] = (),
                    wait: bool = False) -> Any:  # fmt: skip
        self._check(name, [*outputs, *inputs])
        self._number += 1
        everyone = range(self.my_size)

        # Every rank hears of every operation, and can tell whether it is its own
        def to_all() -> Mapping[int, bytes]:
            payloads = read()
            return {peer: payloads.get(peer, b"") for peer in everyone}

        work = self._launch(
            COLLECTIVE,
            self._number,
            f"{name} {said}".rstrip(),
            to_all,
            everyone,
            write,
            outputs,
            inputs,
        )
        if wait:
            work.wait()
        return work

    def stream_of(self, device: torch.device) -> Any:
        """The communicator's stream on a device."""
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        return self._streams[device]

    def finish(self, operation: Operation, timeout: timedelta) -> None:
        """Wait on the host for an operation, and write what it gives: behind what the operations
        before it give.
        """
        if operation.written:
            return
        for wire in list(every):
            wire.hurry()
        while not operation.written:
            first = self.under_way[0] if operation.kind == COLLECTIVE else operation
            if not first.done.wait(timeout.total_seconds()):
                raise RuntimeError(
                    f"Timed out after {timeout.total_seconds():.1f} s in {first.said} (operation"
                    f" {first.number})"
                )
            if first.error:
                raise RuntimeError(first.error)
            first.finish()
            if first.kind == COLLECTIVE:
                self.under_way.pop(0)

    def _check(self, name: str, tensors: Sequence[Tensor]) -> None:
        for t in tensors:
            if not t.is_contiguous():
                raise ValueError(
                    f"{name}: tensors must be contiguous, this one has sizes {tuple(t.shape)} and"
                    f" strides {t.stride()}"
                )
            if t.device.type != "cpu" and t.device.index != self.device:
                raise ValueError(f"{name}: {t.device} is not the communicator's: {self.device}")
            if t.is_sparse or t.is_complex():
                raise ValueError(f"{name}: tensors must be dense and real")
        if len({t.device for t in tensors}) > 1 or len({t.dtype for t in tensors}) > 1:
            raise ValueError(f"{name}: tensors must be of one device and dtype")

    # -- collectives -------------------------------------------------------------------------------

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        n = input.numel()
        if output.numel() != n * self.my_size:
            raise ValueError(
                f"all_gather: output has {output.numel()} elements, expected {self.my_size} times"
                f" the input's {n}"
            )
        flat = output.view(-1)

        def write(parts: Mapping[int, bytes]) -> None:
            for rank, part in parts.items():
                _put(flat[rank * n : (rank + 1) * n], part)

        def read() -> Mapping[int, bytes]:
            return dict.fromkeys(range(self.my_size), _take(input))

        return self._collective(
            "all_gather", f"of {n} {input.dtype}", read, write, [output], [input]
        )

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        n, op = output.numel(), _op(opts)
        if input.numel() != n * self.my_size:
            raise ValueError(
                f"reduce_scatter: input has {input.numel()} elements, expected {self.my_size} times"
                f" the output's {n}"
            )
        flat = input.view(-1)

        def read() -> Mapping[int, bytes]:
            return {p: _take(flat[p * n : (p + 1) * n]) for p in range(self.my_size)}

        def write(parts: Mapping[int, bytes]) -> None:
            _put(
                output,
                _take(
                    _reduce(
                        [_made(parts[r], output) for r in range(self.my_size)], op, self.my_rank
                    )
                ),
            )

        return self._collective(
            "reduce_scatter", f"of {n} {input.dtype} by {op}", read, write, [output], [input]
        )

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        (tensor,), op = tensors, _op(opts)

        def read() -> Mapping[int, bytes]:
            return dict.fromkeys(range(self.my_size), _take(tensor))

        def write(parts: Mapping[int, bytes]) -> None:
            every_part = [
                _made(parts[r], tensor).tensor_split(self.my_size) for r in range(self.my_size)
            ]
            chunks = [_reduce([part[c] for part in every_part], op, c) for c in range(self.my_size)]
            _put(tensor, _take(torch.cat(chunks)))

        return self._collective(
            "all_reduce",
            f"of {tensor.numel()} {tensor.dtype} by {op}",
            read,
            write,
            [tensor],
            [tensor],
        )

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        (tensor,), root = tensors, opts.rootRank

        def read() -> Mapping[int, bytes]:
            return dict.fromkeys(range(self.my_size), _take(tensor)) if self.my_rank == root else {}

        def write(parts: Mapping[int, bytes]) -> None:
            _put(tensor, parts[root])

        mine = [tensor] if self.my_rank == root else []
        return self._collective(
            "broadcast",
            f"of {tensor.numel()} {tensor.dtype} from {root}",
            read,
            write,
            [tensor],
            mine,
        )

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> Any:
        outs, ins = (
            _split(output, output_sizes, self.my_size),
            _split(input, input_sizes, self.my_size),
        )
        even = not output_sizes and not input_sizes
        said = f"of {input.numel()} {input.dtype} evenly" if even else f"of {input.dtype} in parts"
        return self._all_to_all(outs, ins, said, [output], [input])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        if len(outputs) != self.my_size or len(inputs) != self.my_size:
            raise ValueError(
                f"all_to_all: expected a tensor for each of {self.my_size} ranks, got"
                f" {len(outputs)} and {len(inputs)}"
            )
        dtype = next((t.dtype for t in (*outputs, *inputs)), None)
        return self._all_to_all(outputs, inputs, f"of {dtype} in parts", outputs, inputs)

    def _all_to_all(
        self, outs: Sequence[Tensor], ins: Sequence[Tensor], said: str, outputs: Any, inputs: Any
    ) -> Any:
        def read() -> Mapping[int, bytes]:
            return {p: _take(t) for p, t in enumerate(ins)}

        def write(parts: Mapping[int, bytes]) -> None:
            for t, (peer, part) in zip(outs, sorted(parts.items()), strict=True):
                if len(part) != t.numel() * t.element_size():
                    raise RuntimeError(
                        f"all_to_all: rank {peer} sent {len(part)} bytes, rank {self.my_rank}"
                        f" expects {_nbytes(t)}"
                    )
                _put(t, part)

        return self._collective("all_to_all", said, read, write, outputs, inputs)

    def barrier(self, opts: Any = None) -> Any:
        return self._collective("barrier", "", lambda: {}, lambda parts: None)

    # Under both names that torch has for them
    all_gather_single = allgather_into_tensor = _allgather_base
    reduce_scatter_single = reduce_scatter_tensor = _reduce_scatter_base

    # -- messages between two ----------------------------------------------------------------------

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Any:
        (tensor,) = tensors
        self._check_point("send", tensor, tag)
        said, number = (
            f"a message of {tensor.numel()} {tensor.dtype}",
            self._next_point(self.my_rank, to),
        )
        return self._launch(
            POINT, number, said, lambda: {to: _take(tensor)}, (), lambda parts: None, [], [tensor]
        )

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        (tensor,) = tensors
        self._check_point("recv", tensor, tag)
        said, number = (
            f"a message of {tensor.numel()} {tensor.dtype}",
            self._next_point(source, self.my_rank),
        )
        write = lambda parts: _put(tensor, parts[source])  # noqa: E731
        return self._launch(POINT, number, said, lambda: {}, (source,), write, [tensor], [])

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        raise RuntimeError("NCCL receives from a rank that is named, not from whoever sends")

    def _check_point(self, name: str, tensor: Tensor, tag: int) -> None:
        if tag:
            raise RuntimeError(f"{name} with tag={tag}: NCCL has no tags")
        self._check(name, [tensor])

    def _next_point(self, source: int, to: int) -> int:
        number = self._points[source, to] = self._points.get((source, to), 0) + 1
        return number


def _as_bytes(t: Tensor) -> Tensor:
    """The memory of a contiguous tensor, as the host sees it."""
    if t.device.type != "cpu":
        import virtual

        t = virtual.cpu_alias(t)
    return t.detach().view(-1).view(torch.uint8)


def _nbytes(t: Tensor) -> int:
    return t.numel() * t.element_size()


def _take(t: Tensor) -> bytes:
    return _as_bytes(t).numpy().tobytes() if t.numel() else b""


def _put(t: Tensor, part: bytes) -> None:
    if t.numel():
        with torch.no_grad():
            _as_bytes(t).copy_(torch.frombuffer(bytearray(part), dtype=torch.uint8))


def _made(part: bytes, like: Tensor) -> Tensor:
    return (
        torch.frombuffer(bytearray(part), dtype=torch.uint8).view(like.dtype)
        if part
        else torch.empty(0, dtype=like.dtype)
    )


def _poison_around(t: Tensor, inputs: Sequence[Tensor]) -> None:
    """Poison an output but for what of it is an input."""
    room, first = _as_bytes(t), t.data_ptr()
    keep = torch.zeros(room.numel(), dtype=torch.bool)
    for other in inputs:
        a, b = other.data_ptr() - first, other.data_ptr() - first + _nbytes(other)
        keep[max(a, 0) : max(min(b, room.numel()), 0)] = True
    room[~keep] = POISON


def _split(t: Tensor, sizes: list[int], ranks: int) -> list[Tensor]:
    if sizes:
        if len(sizes) != ranks or sum(sizes) != t.shape[0]:
            raise ValueError(
                f"all_to_all_single: parts {sizes} of {t.shape[0]} rows for {ranks} ranks"
            )
        return list(t.split(sizes))
    if t.shape[0] % ranks:
        raise ValueError(f"all_to_all_single: {t.shape[0]} rows do not divide by {ranks} ranks")
    return list(t.split(t.shape[0] // ranks)) if t.shape[0] else [t] * ranks


def _op(opts: Any) -> str:
    op = opts.reduceOp if opts is not None else ReduceOp.SUM
    for name in ("SUM", "AVG", "MAX", "MIN"):
        if op == getattr(ReduceOp, name):
            return name
    raise RuntimeError(f"NCCL has no {op}")


def _reduce(parts: list[Tensor], op: str, chunk: int) -> Tensor:
    """All ranks' parts of a chunk, one after the other round the ring: the chunk of rank r begins
    behind it and ends with it.
    """
    n = len(parts)
    ring = [parts[(chunk + 1 + i) % n] for i in range(n)]
    total = ring[0].clone()
    if op == "AVG":
        total.mul_(1.0 / n)
    for part in ring[1:]:
        if op == "SUM":
            total.add_(part)
        elif op == "AVG":
            total.add_(part * (1.0 / n))
        else:
            total = torch.maximum(total, part) if op == "MAX" else torch.minimum(total, part)
    return total


def _make(store: Any, rank: int, size: int, timeout: timedelta) -> StandIn:
    made["new_group"] += 1
    return StandIn(store, rank, size, timeout)


def register(*devices: str) -> str:
    """Make the backend known to torch.distributed, once; its name."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _make, devices=list(devices or ("cpu",)))
    return NAME


def new_group(ranks: Sequence[int] | None = None, timeout: float = 60.0) -> Any:
    """A process group of the stand-in over `ranks` (None: all). Collective over all ranks, as
    dist.new_group is.
    """
    return dist.new_group(
        list(ranks) if ranks is not None else None,
        backend=register(),
        timeout=timedelta(seconds=timeout),
    )
