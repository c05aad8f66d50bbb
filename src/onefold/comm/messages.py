"""Small messages between ranks. What the host reads goes over gloo, on any backend."""

from __future__ import annotations

import struct
from typing import NoReturn

import torch
import torch.distributed as dist

from onefold.comm.peers import Peers
from onefold.comm.stall import CollectiveContext

#: Bytes of numbers that travel together with the digest of what they are.
_INSIDE = 40
#: Bytes of words that tell other ranks what was asked for here.
_WORDS = 256


class Messages(Peers):
    """The small messages of a group."""

    def exchange_control(
        self, payload: torch.Tensor, context: CollectiveContext, kind: str = "control"
    ) -> list[torch.Tensor]:
        """Gather every rank's small uint8 payload ([n], the same length on all ranks, on the host),
        in rank order. Waits.

        Takes log2(ranks) rounds: in each, a rank passes on all payloads that it has (Bruck et al.
        1997). The messages go over gloo on any backend, because the host reads them.

        Args:
            kind: messages of different kinds are never taken for each other ("call": a collective
                that the user calls, at any time).
        """
        if self.size == 1 or self.fake:  # on a fake backend the others' payloads equal this rank's
            return [payload] * self.size
        # Row i is of the rank i positions after this one
        have = torch.empty((self.size, payload.numel()), dtype=torch.uint8, device="cpu")
        have[0] = payload
        step = 1
        while step < self.size:
            more = min(step, self.size - step)
            self._round(
                have[:more],
                (self.rank - step) % self.size,
                have[step : step + more],
                (self.rank + step) % self.size,
                context,
                kind,
                payload.numel(),
            )
            step *= 2
        return list(have.roll(self.rank, 0).unbind())

    def any_of(self, bits: bytes, context: CollectiveContext) -> bytes:
        """Return the bitwise or of `bits` over all ranks, which give equally many. Waits.

        Takes log2(ranks) rounds of one message, over gloo on any backend. With `both` and `alike`
        it also tells whether all ranks gave the same bits.
        """
        if self.size == 1 or self.fake:
            return bits
        mine = torch.frombuffer(bytearray(bits), dtype=torch.uint8)
        step = 1
        # Bits that arrive twice change nothing, so the number of ranks need not be a power of 2
        while step < self.size:
            theirs = torch.empty_like(mine)
            self._round(
                mine,
                (self.rank + step) % self.size,
                theirs,
                (self.rank - step) % self.size,
                context,
                "agreement",
                len(bits),
            )
            mine = mine | theirs
            step *= 2
        return mine.numpy().tobytes()

    def _round(
        self,
        sent: torch.Tensor,
        to: int,
        received: torch.Tensor,
        source: int,
        context: CollectiveContext,
        kind: str,
        length: int,
    ) -> None:
        """Send to one rank and receive from another, on the host. Messages of different `length`
        have different tags, so they are never taken for each other.
        """
        tag = self.tag(kind, length)
        self.ledger.control_bytes += sent.numel()
        with self.launching(context):
            works = [
                dist.irecv(
                    received, group=self.control_group, group_src=self._at_control[source], tag=tag
                ),
                dist.isend(sent, group=self.control_group, group_dst=self._at_control[to], tag=tag),
            ]
        self._wait(works, context, None, on_host=True)

    def gather_asked(
        self, value: torch.Tensor, digest: int, asked: str, context: CollectiveContext
    ) -> torch.Tensor:
        """`gather_values` of numbers that the user's code asks for, after a check that every rank
        asks for the same.

        A few numbers travel in the message that is compared. More of them follow in one of their
        own, and on native backends all of them: there the host waits for the other hosts, and not
        for the device.

        Args:
            digest: 32 bits that tell what is asked for from anything else.
            asked: the same in words, for the message: "the norm of 'head.weight'".

        Raises:
            RuntimeError: on every rank, if another rank asks for something else.
        """
        if self.size == 1 or self.fake:
            return self.gather_values(value, context)
        mine, shape = b"", (self.size, *value.shape)
        if not self.native:
            mine = value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        head = struct.pack("<II", digest, len(mine) if not self.native else value.numel())
        inside = len(mine) <= _INSIDE
        sent = bytearray((head + (mine if inside else b"")).ljust(len(head) + _INSIDE, b"\0"))
        told = self.exchange_control(torch.frombuffer(sent, dtype=torch.uint8), context, "call")
        found = torch.stack(told)
        if found[:, : len(head)].numpy().tobytes() != head * self.size:
            self._refuse_others(asked, context)
        if self.native or not inside:
            return self.gather_values(value, context)
        numbers = found[:, len(head) : len(head) + len(mine)].contiguous()
        return numbers.view(value.dtype).view(shape).to(value.device)

    def _refuse_others(self, asked: str, context: CollectiveContext) -> NoReturn:
        """Tell each other what was asked for, where it differs, and raise on every rank."""
        text = asked.encode()[:_WORDS].ljust(_WORDS, b"\0")
        told = self.exchange_control(
            torch.frombuffer(bytearray(text), dtype=torch.uint8), context, "call"
        )
        words = [bytes(t.numpy()).rstrip(b"\0").decode(errors="replace") for t in told]
        by_rank = sorted(zip(self.ranks, words, strict=True))
        other, theirs = next(
            ((rank, said) for rank, said in by_rank if said != asked),
            ("another", "it for other elements of it, or for other tensors beside it"),
        )
        raise RuntimeError(
            f"rank {self.ranks[self.rank]} called {asked} while rank {other} called {theirs}: every"
            " rank must call the same, in the same order."
        )

    def gather_values(self, value: torch.Tensor, context: CollectiveContext) -> torch.Tensor:
        """Gather a few numbers of every rank: [...] becomes [size, ...], in rank order. On native
        backends the host does not wait.
        """
        shape = (self.size, *value.shape)
        if self.size == 1 or self.fake:
            return value.expand(shape)
        if not self.native:
            payload = value.detach().cpu().reshape(-1).view(torch.uint8)
            return (
                torch.cat(self.exchange_control(payload, context))
                .view(value.dtype)
                .view(shape)
                .to(value.device)
            )
        out = torch.empty(shape, dtype=value.dtype, device=value.device)
        self.ledger.control_bytes += value.numel() * value.element_size() * (self.size - 1)
        self.note_launch(1, "control", 0, value.numel())
        with self.launching(context):
            work = dist.all_gather_single(
                out.view(-1), value.reshape(-1).contiguous(), group=self.reduce_group, async_op=True
            )
        self.wait([work], context)
        if self.ordered:
            return out
        if self._row_of is None:  # copied to the device once
            self._row_of = torch.tensor(self.at, device="cpu").to(value.device)
        return out.index_select(0, self._row_of)


def both(bits: bytes) -> bytes:
    """Return `bits` followed by their complement: the input of `any_of` whose result `alike` can
    read.
    """
    return bits + bytes(b ^ 0xFF for b in bits)


def alike(found: bytes) -> bool:
    """Whether all ranks gave the same bits to `both`; `found` is the result of `any_of` on it."""
    half = len(found) // 2
    return not any(a & b for a, b in zip(found[:half], found[half:], strict=True))
